"""The names of a lake: the tree in RocksDB, and when the store is asked about it.

While the listing of a directory counts (`look_intervals`), it answers every question about the directory's names,
absent ones included, without a request; the kernel keeps an answer for the TTL at most. Once the listing no longer
counts, the directory is listed again, with one LIST for all concurrent requests. In a directory that was never listed,
or is very large, the store is asked for single names. The second such name also fetches the first page of the
directory, which is all of a small one; after a few more the directory is listed in the background. Times of listings
are wall clock and survive a restart; a time in the future counts as long ago. While the store is away, old listings
continue to count. The first listing of a directory can be read while it is under way (`listing_flight`). If another
node announces a name, the store is asked for it again when the name is needed (`outdated_names`).

Changes by this node go through `changing`, so that a LIST that began earlier cannot undo them. All code between two
awaits is atomic; trio thread only. A crash leaves the rows of whole batches.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import trio

from lakefs_fuse.commits.applier import is_of_renamed
from lakefs_fuse.commits.idleness import Idleness
from lakefs_fuse.commits.record import OWN, STORED_MAX, Put, Record, Remove
from lakefs_fuse.config import MountConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import AccessDenied, CacheError, FileError, LakeError, NotFound, Unavailable
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import NO_OBJECT, ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.schema import PATH
from lakefs_fuse.meta.tree import Listing, Tree
from lakefs_fuse.metrics import NamespaceMetrics
from lakefs_fuse.store.client import StoreClient, is_copy
from lakefs_fuse.store.parallel_list import KEYS_MAX, ParallelList
from lakefs_fuse.store.protocol import ListPage, ObjectMeta
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.sync.steps import finish_paced
from lakefs_fuse.vfs.files.file_table import FileTable, renew_inode
from lakefs_fuse.vfs.namespace.absent_names import Absences, AbsentNames
from lakefs_fuse.vfs.namespace.commit_order import ANNOUNCED_NS, OrderedLists
from lakefs_fuse.vfs.namespace.emptied_directories import EmptiedDirectories
from lakefs_fuse.vfs.namespace.key_mapping import (
    NAME_BYTES_MAX,
    Hidden,
    KeyLimits,
    extent_of,
    is_long,
    is_reserved,
    path_of_key,
)
from lakefs_fuse.vfs.namespace.listing_flight import Flight, described
from lakefs_fuse.vfs.namespace.listing_merge import DirectoryMerge, Found, is_object_removed, read_page
from lakefs_fuse.vfs.namespace.look_intervals import LookIntervals
from lakefs_fuse.vfs.namespace.outdated_names import OutdatedNames
from lakefs_fuse.vfs.namespace.subtree_listing import FlatListing, Place, SubtreeListings

NS = 1_000_000_000
RELIST_ENTRIES_MAX = 10_000
"""A request for a name lists a directory of up to this many names again; a larger one is listed in the background."""
POINT_LOOKUPS_MAX = 4
"""Single names of a directory that are asked for before it is listed in the background."""
FIRST_PAGE_LOOKUPS = 2
"""Single names after which the first page is fetched, which is all of most directories, and costs as much as a name."""
POINT_ANSWERS_MAX = 65_536
BACKGROUND_LISTINGS_MAX = 4
FIRST_PAGES_MAX = 16
SINGLE_NAME_KEYS = 100
HEADS_AT_ONCE = 16
GHOSTS_AT_ONCE = 16
OUTDATED_AT_ONCE = 64
"""Directories that are outdated, because others have moved, between two turns of other tasks: 10 ms."""
AWAY = (Unavailable, AccessDenied)
"""Errors of a LIST after which old listings continue to count: the store is away, or a key has expired."""
AWAY_CHECK_S = 0.5
"""A request that waits for a LIST checks this often whether the store is away."""
log = logging.getLogger(__name__)


class Namespace:
    """See the module's head."""

    def __init__(
        self,
        config: MountConfig,
        database: Database,
        tree: Tree,
        client: StoreClient,
        metrics: NamespaceMetrics,
        nursery: trio.Nursery,
        clock: Clock,
        files: FileTable,
    ) -> None:
        self.tree, self.events = tree, files.events
        self.mountpoint = config.mountpoint
        self.idleness = Idleness(config.metadata_ttl_s)
        self.invalidate_name = self.events.invalidate_name
        self.prefix, self.key, self.path_of = tree.prefix, tree.key, tree.path_of
        self.keys = KeyLimits(tree.prefix, client.capabilities, config.store.source)
        self.extent = partial(extent_of, tree)
        self.events.listing_dropped.append(self._mark_listings_stale)
        self.events.redated_file_closed.append(self._renew_redated)
        self.root = Entry(ROOT_INODE, 0, b"", ROOT_INODE, Flag.DIRECTORY | Flag.ATTRIBUTES_KNOWN | Flag.MARKER)
        """The root has no row; its times are those of this mount's own changes."""
        self.database = self._db = database
        self._client, self._metrics, self._nursery = client, metrics, nursery
        self._ttl_ns = int(config.metadata_ttl_s * NS)
        self._clock_ns = self.now_ns = clock.wall_ns
        self._keep = files.keeps_name
        self._flights: dict[int, Flight] = {}
        self._watched: dict[int, list[Flight]] = {}
        self._answers = OrderedDict[tuple[int, bytes], int]()
        self._asked: dict[int, set[bytes]] = {}
        self._background: dict[int, Flight] = {}
        self._failing = False
        self._outdated, self._absent = OutdatedNames(tree), AbsentNames()
        self.announced = self._outdated.announced
        self.events.listing_dropped.append(self._outdated.forget)
        self.events.commit_applied.append(self._take_announcements)
        self._looks = LookIntervals(config.metadata_ttl_s, config.foreign_s)
        self._new_object_ns = 0
        """When a LIST last showed a new object; other objects may have been stored before that one."""
        self._lists = OrderedLists(client, self.events, self._note_new_object)
        self._subtrees = SubtreeListings(self._lists, self._clock_ns, self._looks.first_ns, self.events.unlisted_keys)
        self._emptied = EmptiedDirectories(client, self._subtrees, self._looks, self._clock_ns, self._is_object_removed)
        self.touch(ROOT_INODE)

    async def check_empty(self, entry: Entry) -> None:
        """Check that a directory is empty. Raises LakeError; FileError(ENOTEMPTY) if it has names, or keys that cannot
        be shown, which would make the directory appear again."""
        await self.ensure_listed(entry.inode, strictly=False)
        self.check_known_empty(entry)

    def check_known_empty(self, entry: Entry) -> None:
        """Check as `check_empty` does, without asking the store. Raises FileError(ENOTEMPTY)."""
        listing = self.tree.listing(entry.inode)
        if self.tree.has_children(entry.inode) or (listing is not None and listing.hides_keys):
            raise FileError(errno.ENOTEMPTY)

    def is_listed(self, directory: int) -> bool:
        """Return whether a directory was listed, and no other node has announced a name in it since.

        While the store is away, announcements do not count."""
        listing = self.tree.listing(directory)
        return listing is not None and (self._whole_ns(directory, listing) > 0 or self._counts_on(directory))

    def directory(self, path: str) -> int | None:
        """Return the inode of a directory by its path; None if it is not known."""
        return self.tree.directory(path.encode("utf-8", "surrogatepass"))

    def at(self, path: str) -> Entry | None:
        """Return the entry known at a path; None if there is none, and for the root."""
        return self.tree.resolve([name.encode("utf-8", "surrogatepass") for name in path.split("/")])

    def own_etag(self, path: str, parent: int | None = None) -> str:
        """Return the ETag of the plain object that is known to be at a path's own key, hidden or not, or that may
        appear there; empty if there is none. ``parent`` is the inode of its directory, if that is known."""
        return self.tree.own_etags([path], parent)[0]

    # -- freshness

    def directory_fresh_s(self, directory: int, *, within_ttl: bool = False) -> float:
        """Return for how many seconds the last listing of a directory still counts, the TTL at most; 0 if the store
        must be asked again. ``within_ttl``: a listing older than the TTL does not count, although its interval is
        longer."""
        listing = self.tree.listing(directory)
        return (
            0.0 if listing is None else self._listed_fresh_s(directory, self._whole_ns(directory, listing), within_ttl)
        )

    def name_fresh_s(self, directory: int, name: bytes, *, within_ttl: bool = False) -> float:
        """Return for how many seconds the entry of a name still counts, by a listing or by a lookup of the name alone.
        See `directory_fresh_s`."""
        listed_ns = self._listed_ns(directory, name)
        return max(self._listed_fresh_s(directory, listed_ns, within_ttl), self._lookup_fresh_s(directory, name))

    def _listed_ns(self, directory: int, name: bytes) -> int:
        """Return when a directory was listed; 0 if that listing does not count for the name."""
        listing = self.tree.listing(directory)
        if listing is None:
            return 0
        return self._whole_ns(directory, listing) or self._outdated.listed_ns(directory, name)

    def _whole_ns(self, directory: int, listing: Listing) -> int:
        """Return when a directory was listed if the listing counts for all of its names, otherwise 0."""
        return 0 if directory in self._outdated.directories else listing.at_ns

    def _listed_fresh_s(self, directory: int, listed_ns: int, within_ttl: bool = False) -> float:
        """Return for how many seconds a listing of that time counts: at most the TTL if a flat listing costs
        nothing."""
        fresh_s = self._fresh_s(listed_ns, self._looks.first_ns)
        if fresh_s > 0 or within_ttl:
            return fresh_s
        interval_ns = self._looks.interval_ns(directory)
        if interval_ns <= self._looks.first_ns:
            return 0.0
        if self._subtrees.flat_listings and self._subtrees.is_shared(self._place(directory)):
            return 0.0
        return self._fresh_s(listed_ns, interval_ns)

    def _fresh_s(self, asked_ns: int, interval_ns: int) -> float:
        """Return for how many seconds an answer of that time counts, the TTL at most."""
        age_ns = self._clock_ns() - asked_ns
        return max(0, min(self._ttl_ns, interval_ns - age_ns)) / NS if age_ns >= 0 else 0.0

    def listing_fresh_s(self, directory: int) -> float:
        """Return for how many seconds what READDIR shows counts: `directory_fresh_s`, or that of the first listing if
        that is under way and can be read."""
        flight = self._flights.get(directory)
        return (
            self._flight_fresh_s(flight)
            if flight is not None and flight.is_readable
            else self.directory_fresh_s(directory)
        )

    def _flight_fresh_s(self, flight: Flight) -> float:
        return self._fresh_s(flight.began_ns, self._looks.first_ns)

    def _lookup_fresh_s(self, directory: int, name: bytes) -> float:
        asked_ns = self._answers.get((directory, name))
        return 0.0 if asked_ns is None else self._fresh_s(asked_ns, self._looks.first_ns)

    def lease_fresh_s(self, directory: int) -> float:
        """Return `directory_fresh_s`, but 0 while a name that the listing lacks may have been stored before a new
        object that was seen since: a lease answers for all absent names."""
        listing = self.tree.listing(directory)
        if listing is None or (self._has_seen_new and self._whole_ns(directory, listing) < self._new_object_ns):
            return 0.0
        return self.directory_fresh_s(directory)

    def _note_new_object(self) -> None:
        self._new_object_ns = self._clock_ns()
        self.tree.drop_mirrors()

    @property
    def _has_seen_new(self) -> bool:
        """Return whether a LIST has shown a new object within the last ANNOUNCED_NS."""
        return 0 <= self._clock_ns() - self._new_object_ns < ANNOUNCED_NS

    def _doubts_absence(self, directory: int, name: bytes) -> bool:
        """Return whether an absent name may have been stored before a new object that a LIST has shown since."""
        if not self._has_seen_new:
            return False
        return max(self._listed_ns(directory, name), self._answers.get((directory, name), 0)) < self._new_object_ns

    # -- asking

    async def lookup(
        self, directory: int, name: bytes, *, ask: bool = False, within_ttl: bool = False
    ) -> tuple[Entry | None, float]:
        """Return the entry of a name, and for how many seconds that answer counts. ``ask``: the store is asked in any
        case; ``within_ttl``: see `directory_fresh_s`. Raises LakeError."""
        try:
            component = name.decode("utf-8")
        except UnicodeDecodeError:
            return None, self._ttl_ns / NS
        if is_reserved(directory, component) or len(name) > NAME_BYTES_MAX:
            return None, self._ttl_ns / NS
        entry = None if ask else self.tree.child(directory, name)
        if not ask:
            fresh_s = self._known_fresh_s(directory, name, entry, within_ttl=within_ttl)
            if fresh_s is not None:
                return entry, fresh_s
            if await self._list_for(directory, name, entry):
                return self.tree.child(directory, name), self.name_fresh_s(directory, name)
        if not self._counts_on(directory) and (entry is None or not self._client.is_away):
            with self._counting_on(directory, entry):
                await self._ask_for_name(directory, name, component)
        entry = self.tree.child(directory, name)
        if ask and entry is not None and self._absent.discard(directory, name):
            self.invalidate_name(directory, name)
        return entry, self._lookup_fresh_s(directory, name)

    def _known_fresh_s(self, directory: int, name: bytes, entry: Entry | None, *, within_ttl: bool) -> float | None:
        """Return for how many seconds the row of a name, or that there is none, counts; None if the store must be
        asked."""
        is_dir = entry is not None and bool(entry.flags & Flag.DIRECTORY)
        if entry is not None and not is_dir and self._keep(entry):
            return self._ttl_ns / NS
        fresh_s = self.name_fresh_s(directory, name, within_ttl=within_ttl)
        flight = self._flights.get(directory)
        if flight is not None and entry is not None and flight.brought(entry.cookie) and name not in flight.announced:
            fresh_s = max(fresh_s, self._flight_fresh_s(flight))
        is_local = entry is not None and bool(entry.flags & Flag.LOCAL)
        if fresh_s > 0 and not is_local and not (entry is None and self._doubts_absence(directory, name)):
            return fresh_s
        is_kept = entry is not None and is_dir and self._keep(entry)  # late, because it reads all files in use
        return self._ttl_ns / NS if is_kept else None

    async def _list_for(self, directory: int, name: bytes, entry: Entry | None) -> bool:
        """List the directory of a name, if that costs no more than asking for the name alone. Return whether that was
        done, or the store is away. Otherwise a listing in the background is considered. Raises LakeError."""
        listing = self.tree.listing(directory)
        is_small = listing is not None and listing.entries <= RELIST_ENTRIES_MAX
        if is_small and entry is None and self._doubts_absence(directory, name):
            with suppress(*AWAY):
                await self.list_directory(directory, since_ns=self._new_object_ns)
            return True
        if listing is not None and self._are_few_outdated(directory, listing):
            return False
        if is_small:
            await self._list_again(directory)
            return True
        if (
            directory not in self._flights
            and not self._client.is_away
            and self._subtrees.is_shared(self._place(directory))
        ):
            with self._counting_on(directory, entry):
                await self.list_directory(directory, within_ttl=True)
            return True
        self._consider_background_listing(directory, name)
        return False

    async def ensure_absent(self, directory: int, name: bytes) -> str:
        """Check that a name is absent, and return its path after that: the directory may have been renamed meanwhile.
        Raises LakeError; FileError(EEXIST), and those of `checked_path`."""
        self.keys.checked_path(directory, name)
        if (await self.lookup(directory, name))[0] is not None:
            raise FileError(errno.EEXIST)
        return self.keys.checked_path(directory, name)

    async def lookup_in_store(self, directory: int, name: bytes) -> Entry | None:
        """Return the entry of a name as the store has it now, by one request that begins after the call.

        That is a HEAD if an answer that still counts says that the name is absent, otherwise a LIST. The HEAD misses a
        directory that another program made since that answer. Raises LakeError."""
        known = self.tree.child(directory, name)
        if known is None and self.name_fresh_s(directory, name) > 0 and not self._counts_on(directory):
            prefix = self.prefix(directory)
            meta = None
            with self._counting_on(directory):
                meta = await self._client.find(self.keys.checked_key(prefix, name.decode()))
            if (meta is None or self._is_object_removed(meta)) and not self._is_moved(directory, prefix):
                return self.tree.child(directory, name)
        return (await self.lookup(directory, name, ask=True))[0]

    @contextmanager
    def _counting_on(self, directory: int, entry: Entry | None = None) -> Iterator[None]:
        """Suppress AWAY if an old listing counts then, or the known ``entry`` of a directory that was never listed."""
        try:
            yield
        except AWAY:
            if entry is None and self.tree.listing(directory) is None:
                raise

    def _counts_on(self, directory: int) -> bool:
        """Return whether an old listing counts because the store is away. A LIST in the background keeps trying
        then."""
        if not self._client.is_away or self.tree.listing(directory) is None:
            return False
        self.list_soon(directory)
        return True

    async def _list_again(self, directory: int) -> None:
        """List a directory again that was listed before, unless the store is away. Raises LakeError."""
        announced = self._flights[directory].announced if directory in self._flights else ()
        for _ in range(2 if announced else 1):  # the LIST in progress began before the announcements
            if self._counts_on(directory):
                return
            flight = self._listing(directory)
            while (flight.is_interrupted or not flight.done.is_set()) and not self._client.is_away:
                flight = self._listing(directory)
                with trio.move_on_after(AWAY_CHECK_S):
                    await flight.done.wait()
            if flight.error is not None and not isinstance(flight.error, AWAY):
                raise flight.error

    def _are_few_outdated(self, directory: int, listing: Listing) -> bool:
        """Return whether asking for each outdated name takes no more requests than a LIST that is not due yet."""
        names, listed_ns = self._outdated.of(directory)
        return 0 < len(names) <= max(1, listing.entries // KEYS_MAX) and self._listed_fresh_s(directory, listed_ns) > 0

    async def _update_listing(self, directory: int) -> None:
        """Bring a listing up to date as `_list_again` does, but with as few requests as possible. Raises LakeError."""
        listing = self.tree.listing(directory)
        if listing is None or not self._are_few_outdated(directory, listing):
            await self._list_again(directory)
        elif not self._counts_on(directory):
            names, _ = self._outdated.of(directory)
            with suppress(*AWAY):
                await for_each([*names], partial(self._ask_for, directory), min(HEADS_AT_ONCE, len(names)))

    async def _ask_for(self, directory: int, name: bytes) -> None:
        await self._ask_for_name(directory, name, name.decode())

    def list_soon(self, directory: int) -> None:
        """List a directory in the background, unless too many are being listed."""
        if directory in self._flights or self._may_list():
            self._listing(directory)

    def _may_list(self) -> bool:
        """Return whether one more directory may be listed to its end in the background."""
        return sum(flight.is_wanted for flight in self._background.values()) < BACKGROUND_LISTINGS_MAX

    def _listing(self, directory: int) -> Flight:
        """Return the LIST of a directory that is under way, or a new one; it will fetch all pages."""
        flight = self._flights.get(directory) or self._begin_listing(directory)
        flight.is_wanted = True
        return flight

    def _begin_listing(self, directory: int, *, is_wanted: bool = True) -> Flight:
        flight = self._flights[directory] = Flight(self._clock_ns(), is_wanted)
        self._background[directory] = flight
        self._nursery.start_soon(self._list_in_background, directory, flight)
        return flight

    def _consider_background_listing(self, directory: int, name: bytes) -> None:
        """Count a lookup of a single name, and list the directory in the background after several names. Repeated
        lookups of one name count once."""
        names = self._asked.setdefault(directory, set())
        if directory in self._flights or (name in names and len(names) <= POINT_LOOKUPS_MAX):
            return
        if len(names) <= POINT_LOOKUPS_MAX:
            names.add(name)
        unlisted = self.tree.listing(directory) is None
        if len(names) > POINT_LOOKUPS_MAX and self._may_list():
            del self._asked[directory]
            self._begin_listing(directory)
        elif len(names) == FIRST_PAGE_LOOKUPS and unlisted and len(self._background) < FIRST_PAGES_MAX:
            self._begin_listing(directory, is_wanted=False)
        elif len(self._asked) > POINT_ANSWERS_MAX:
            self._asked.clear()

    async def _list_in_background(self, directory: int, flight: Flight) -> None:
        try:
            await self._fly(directory, flight)
            self._failing = False
        except AWAY as error:
            if not self._failing:
                log.warning("the store does not tell names, those that are known count on: %s", error)
            self._failing = True
        except LakeError as error:
            log.info("listing of inode %d in the background failed: %s", directory, error)
        except Exception:
            log.exception("listing of inode %d in the background", directory)
        finally:
            del self._background[directory]

    async def _ask_for_name(self, directory: int, name: bytes, component: str) -> None:
        """Ask the store for a name: one LIST finds its file and its directory, unless many keys are between them.
        Raises LakeError."""
        self._metrics.point_lookups += 1
        prefix = self.prefix(directory)
        asked_ns = self._clock_ns()
        flight = Flight(asked_ns)
        key = self.keys.checked_key(prefix, component)
        with self._watching(directory, flight):
            page = await self._lists.list_page(key, delimiter="/", keys_max=SINGLE_NAME_KEYS)
            found = [item for item in read_page(page, directory, prefix).found if item.sort_name in (name, name + b"/")]
            if page.next_token is not None and not any(item.meta is None for item in found):
                below = await self._client.list_page(key + "/", keys_max=1)
                if below.objects or below.prefixes:
                    found.append(Found(name + b"/", None))
            if page.next_token is not None and not self._client.capabilities.sorted_listing:
                found += await self._head_if_missing(found, name, key)
            self._subtrees.name_asked(directory, name, self._directories_above)
            is_whole = not self._is_moved(directory, prefix) and await self._merge_one(directory, name, found, flight)
        if not is_whole or self._is_moved(directory, prefix):
            await self._ask_for_name(directory, name, component)
            return
        if name not in flight.announced:
            self._remember_answer(directory, name, asked_ns)
            is_outdated = name in self._outdated.of(directory)[0]
            for above, last in self._outdated.name_if_emptied(directory) if is_outdated else ():
                self.outdate(above, last)
            self._outdated.discard(directory, name)
        if self.tree.listing(directory) is None and self.tree.child(directory, name) is None:
            self._absent.add(directory, name, self._db.inode_next - 1)

    async def _merge_one(self, directory: int, name: bytes, found: list[Found], flight: Flight) -> bool:
        """Merge what a LIST found of a name. Returns False if the directory was renamed meanwhile. Raises LakeError."""
        prefix, merge = self.prefix(directory), self._merge(directory, flight)
        if not await self._take_steps(merge.apply_one(name, found), directory, prefix):
            return False
        await self._ask_about_overriding(merge, directory, prefix)
        if self._finds_foreign(merge, directory, flight):
            self._looks.reset(directory)
        flight.announced |= merge.passed | self._outdated.among(directory, merge.kept)
        for name in merge.ghosts:
            await self._look_below_ghost(merge, directory, prefix, name)
        self._touch_listed(directory, merge.changed_ns)
        return True

    async def _head_if_missing(self, found: list[Found], name: bytes, key: str) -> list[Found]:
        if any(item.meta is not None for item in found):
            return []
        try:
            return [Found(name, await self._client.head(key))]
        except NotFound:
            return []

    def _remember_answer(self, directory: int, name: bytes, asked_ns: int) -> None:
        self._answers[directory, name] = asked_ns
        self._answers.move_to_end((directory, name))
        if len(self._answers) > POINT_ANSWERS_MAX:
            self._answers.popitem(last=False)

    async def ensure_listed(self, directory: int, *, strictly: bool = True) -> float:
        """List a directory unless it was listed within the TTL. Returns for how many seconds the listing counts.

        Unless ``strictly``, an old listing suffices while the store is away. Raises LakeError."""
        fresh_s = self.directory_fresh_s(directory, within_ttl=True)
        if fresh_s > 0 and not self._emptied.relies(directory):
            return fresh_s
        self._emptied.forget(directory, b"")
        if strictly or self.tree.listing(directory) is None:
            await self.list_directory(directory, within_ttl=True)
        else:
            await self._update_listing(directory)
        return self.directory_fresh_s(directory)

    async def begin_reading(self, directory: int) -> None:
        """Ensure that a directory is listed, not strictly; a first listing may still be under way on return. Raises
        LakeError."""
        if self.directory_fresh_s(directory) > 0:
            return
        if self.tree.listing(directory) is not None:
            await self._update_listing(directory)
            return
        flight = self._listing(directory)
        while not flight.done.is_set() and not flight.is_readable:
            await flight.more()
        if flight.is_interrupted:
            await self.begin_reading(directory)
        elif flight.error is not None:
            raise flight.error

    async def wait_for_more(self, directory: int, after: int) -> None:
        """Wait until the directory has names with cookies beyond ``after``, or its listing is complete. Raises the
        error that ended the listing early."""
        while self.tree.listing(directory) is None and self.tree.path(directory) is not None:
            flight = self._listing(directory)
            following = self.tree.children(directory, after) if flight.is_readable else ()
            if any(not entry.flags & Flag.SHADOWED for entry in following):
                return
            await flight.more()
            if flight.error is not None:
                raise flight.error

    async def list_directory(self, directory: int, *, within_ttl: bool = False, since_ns: int = 0) -> None:
        """LIST a directory to its end and merge the changes; concurrent callers wait for the same LIST. Raises
        LakeError.

        A flat listing of several directories suffices if it began at ``since_ns`` (0: now) or later, or
        ``within_ttl``."""
        while (flight := self._flights.get(directory)) is not None:
            flight.is_wanted = True
            await flight.done.wait()
            if flight.error is not None:
                raise flight.error
            is_whole = not flight.is_interrupted and not self._emptied.relies(directory)
            if is_whole and (within_ttl or (not flight.is_dated_back and flight.began_ns >= since_ns)):
                return
        if not within_ttl:
            self._emptied.forget(directory, b"")
        began_ns = self._clock_ns()
        flight = Flight(began_ns, since_ns=0 if within_ttl else since_ns or began_ns)
        self._flights[directory] = flight
        await self._fly(directory, flight)

    async def _fly(self, directory: int, flight: Flight) -> None:
        try:
            with self._watching(directory, flight):
                await self._list(directory, flight)
        except LakeError as error:
            flight.error = error
            raise
        except Exception:
            flight.error = FileError(errno.EIO, "the listing failed")
            raise
        except BaseException:  # the caller was cancelled
            flight.is_interrupted = True
            raise
        finally:
            del self._flights[directory]
            flight.end()

    async def _list(self, directory: int, flight: Flight) -> None:
        while True:
            prefix = self.prefix(directory)
            flat = await self._subtrees.flat_listing(self._place(directory), flight.since_ns)
            if self._is_moved(directory, prefix):
                continue
            if flat is None:
                self._subtrees.directory_asked(directory)
            else:
                flight.date_back(flat.began_ns)
                flight.touched |= flat.touched.get(directory, set())
            if await self._list_below(directory, prefix, flight, flat):
                return

    def _place(self, directory: int) -> Place:
        names, at = list[tuple[int, bytes]](), directory
        while (entry := self.tree.entry(at)) is not None:
            names.append((entry.parent, entry.name))
            at = entry.parent
        listing, (outdated, listed_ns) = self.tree.listing(directory), self._outdated.of(directory)
        is_listed = listing is not None and (listing.at_ns > 0 or listed_ns > 0)
        return Place(directory, self.prefix(directory), names, is_listed, outdated)

    async def _list_below(self, directory: int, prefix: str, flight: Flight, flat: FlatListing | None) -> bool:
        """List a directory once, and merge it. Returns False if it was renamed meanwhile. Raises LakeError."""
        is_deep = is_long(prefix + "x" * NAME_BYTES_MAX)
        merge = flight.merge = self._merge(directory, flight)

        def take(page: ListPage) -> None:
            if self._is_moved(directory, prefix):
                return
            merge.apply(read_page(page, directory, prefix))
            if is_deep and (long := next((each.key for each in page.objects if is_long(each.key)), None)):
                self.keys.report_long(long)
            flight.told()

        if flat is not None:
            take(flat.page(prefix))
        else:
            pages = ParallelList(self._lists, prefix, take)
            flight.progress = pages.progress
            if not await pages.run(goes_on=lambda: flight.is_wanted):
                return True
        await self._look_below_ghosts(merge, directory, prefix, flat, flight.began_ns)
        await self._ask_about_overriding(merge, directory, prefix)
        if not await self._take_steps(merge.remove_missing(), directory, prefix):
            return False
        self._touch_listed(directory, merge.changed_ns)
        before = self.tree.listing(directory)
        is_first, was_outdated = before is None, before is None or not self._whole_ns(directory, before)
        listing, absences = merge.complete(), self._absent.pop(directory) if is_first else None
        if is_first or flat is not None or self._finds_foreign(merge, directory, flight):
            self._looks.reset(directory)
        elif listing.entries > KEYS_MAX or self._subtrees.is_in_large(prefix):
            self._looks.lengthen(directory)
        flight.announced |= merge.passed | (merge.kept if is_first else self._outdated.among(directory, merge.kept))
        self._outdated.forget(directory)
        self._outdated.add(directory, *flight.announced)
        for above, name in self._outdated.name_if_emptied(directory) if was_outdated else ():
            self.outdate(above, name)
        if flight.is_stale:
            batch = Batch()
            self.tree.forget_listing(batch, directory)
            self._db.commit_volatile(batch)
        self._asked.pop(directory, None)
        if absences is not None:
            with trio.CancelScope(shield=True):
                await self._invalidate_added(directory, absences)
        return True

    async def _invalidate_added(self, directory: int, absences: Absences) -> None:
        """Invalidate names that a first listing added and that the kernel may have cached as absent."""
        for name in absences.names:
            if self.tree.child(directory, name) is not None:
                self.invalidate_name(directory, name)
        if absences.is_any:
            for children in self.tree.children_in_steps(directory, absences.after):
                for child in children:
                    if not child.stamp and not child.is_local:
                        self.invalidate_name(directory, child.name)
                await trio.lowlevel.checkpoint()

    def _finds_foreign(self, merge: DirectoryMerge, directory: int, flight: Flight) -> bool:
        """Return whether a LIST showed a difference that no commit told or announced."""
        announced, _ = self._outdated.of(directory)
        return any(name not in announced and name not in flight.announced for name in merge.differences)

    def _is_moved(self, directory: int, prefix: str) -> bool:
        """Return whether the directory is at another path by now. Raises FileError(ESTALE) if it is gone."""
        return self.prefix(directory) != prefix

    async def _take_steps(self, steps: Iterator[None], directory: int, prefix: str) -> bool:
        """Take the steps of a merge, and let other tasks run between them. Returns False, without the rest, if the
        directory is at another path by now. Raises FileError(ESTALE) if it is gone."""
        if self._is_moved(directory, prefix):
            return False
        for _ in steps:
            await trio.lowlevel.checkpoint()
            if self._is_moved(directory, prefix):
                return False
        return True

    async def _look_below_ghosts(
        self, merge: DirectoryMerge, directory: int, prefix: str, flat: FlatListing | None, since_ns: int
    ) -> None:
        """Show each ghost below which there is a visible name, and remove the others. Raises LakeError."""
        flat, empty = await self._emptied.begin(directory, prefix, merge.ghosts, flat, since_ns)

        async def look(name: bytes) -> None:
            await self._look_below_ghost(merge, directory, prefix, name, flat, is_empty=name in empty)

        if merge.ghosts:
            await for_each(merge.ghosts, look, min(GHOSTS_AT_ONCE, len(merge.ghosts)))

    async def _look_below_ghost(
        self, merge: DirectoryMerge, directory: int, prefix: str, name: bytes, flat: FlatListing | None = None,
        *, is_empty: bool = False,
    ) -> None:  # fmt: skip
        is_shown = not is_empty and await self._emptied.has_visible_name(directory, prefix, name, flat)
        if self._is_moved(directory, prefix):
            return
        if is_shown:
            merge.add_directory(name)
        else:
            await self._take_steps(merge.drop_directory(name), directory, prefix)

    async def _ask_about_overriding(self, merge: DirectoryMerge, directory: int, prefix: str) -> None:
        """Ask the store about objects that may have been put in place of bytes elsewhere, and merge those that count.

        A copy that no commit names does not count. Neither does a later version of a file that was renamed from this
        key, stored by a writer that did not know of the rename: it belongs to the renamed file. Raises LakeError."""
        listed, found = merge.overriding, list[ObjectMeta]()

        async def ask(meta: ObjectMeta) -> None:
            now = await self._client.find(meta.key)
            if now is not None and not is_copy(now) and not is_of_renamed(self.tree, now):
                found.append(now)

        if listed:
            await for_each(listed, ask, min(HEADS_AT_ONCE, len(listed)))
        if found and not self._is_moved(directory, prefix):
            merge.apply_overriding(found)

    def _is_object_removed(self, meta: ObjectMeta) -> bool:
        path = path_of_key(meta.key).encode("utf-8", "surrogatepass")
        return is_object_removed(self.tree, path, meta, self.tree.resolve(path.split(b"/")))

    def _merge(self, directory: int, flight: Flight) -> DirectoryMerge:
        return DirectoryMerge(
            self.tree, self._metrics, directory, prefix=self.prefix(directory), now_ns=flight.began_ns,
            touched=flight.touched, keep=self._keep, events=self.events,
        )  # fmt: skip

    # -- changing

    @contextmanager
    def _watching(self, directory: int, flight: Flight) -> Iterator[None]:
        """Add the names changed during the block, in the directory or below it, to the flight's ``touched``.

        A change below the directory adds the name in it that leads there."""
        flights = self._watched.setdefault(directory, [])
        flights.append(flight)
        try:
            yield
        finally:
            flights.remove(flight)
            if not flights:
                self._watched.pop(directory, None)

    def _mark_listings_stale(self, directory: int) -> None:
        if self.tree.listing(directory) is not None:
            self._absent.add_any(directory, self._db.inode_next - 1)
        self._subtrees.directory_asked(directory)
        for flight in self._watched.get(directory, ()):
            flight.is_stale = True

    def changing(self, directory: int, name: bytes, *, is_stored: bool = False) -> None:
        """Protect a name that this node changes now from LISTs under way, including those of the directories above.

        Such a LIST may show nothing below it yet, and would remove the directories between. ``is_stored``: the store
        has just confirmed an object of this node, which counts as a lookup."""
        self._answers.pop((directory, name), None)
        if directory in self._absent.directories:
            self._absent.discard(directory, name)  # the kernel requested the change, or is notified of it
        if is_stored:
            self._remember_answer(directory, name, self._clock_ns())
        if self._subtrees.flat_listings:
            self._subtrees.name_changed(directory, name, self._directories_above)
        for flight, each in self._flights_over(directory, name):
            flight.touched.add(each)

    def _flights_over(self, directory: int, name: bytes) -> Iterator[tuple[Flight, bytes]]:
        """Yield the LISTs under way of a directory and of those above it, each with the name there that leads down."""
        while self._watched:
            yield from ((flight, name) for flight in self._watched.get(directory, ()))
            entry = self.tree.entry(directory) if directory != ROOT_INODE else None
            if entry is None:
                break
            directory, name = entry.parent, entry.name

    def _take_announcements(self, record: Record) -> None:
        """Have the store asked again for names that another node's commit makes outdated.

        These are plain objects that it announces, and those that its operations name without effect here, perhaps
        because of a change that is in no commit yet; directories that have lost the only names for which they exist;
        and directories that it moves or removes although other nodes have announced names in them."""
        places: dict[str, tuple[int, bytes]] = {}
        stored = (*record.stored, *self._unseen(record))
        for path in (*stored, *self._outdated.left_behind(record)):
            above, _, last = path.rpartition("/")
            if above not in places:
                places[above] = self._outdated.nearest(above)
            directory, name = places[above]
            self.outdate(directory, name or last.encode())
        for path in dict.fromkeys(each.rpartition("/")[0] for each in stored):
            self._outdated.note_announced(path)

    def outdate(self, directory: int, name: bytes) -> None:
        """Have the store asked again for a name; for all names of the directory if it is empty."""
        self._emptied.forget(directory, name)
        self._answers.pop((directory, name), None)
        if self._subtrees.flat_listings:
            self._subtrees.name_changed(directory, name, self._directories_above)
        self._outdated.add(directory, name)
        if name:
            self.invalidate_name(directory, name)
        for flight, each in self._flights_over(directory, name):
            flight.announced.add(each)

    def outdate_emptied(self, path: str) -> None:
        """Have the store asked again for the directory of a name that this node has removed unasked, if that was the
        only name for which the directory exists. A user's removal keeps it (`NameChanges.keep_parent`)."""
        emptied = self._outdated.emptied(path.rpartition("/")[0])
        if emptied:
            above, _, name = emptied.rpartition("/")
            directory, missing = self._outdated.nearest(above)
            self.outdate(directory, missing or name.encode(*PATH))

    def moved(self, moves: Sequence[tuple[str, str]]) -> None:
        """Have the store asked again for what other nodes announced where directories were, and where they are now.

        The listing of a directory tells of the names that move with it. An object that was announced in it, and that
        the rename does not name, stays at its key; so does one that was announced where the directory comes."""
        tops = {path for move in moves for path in move if path in self.announced}
        below = [*self._outdated.announced_below(tops)] if tops else []
        sources, targets, is_many = dict(moves), {target for _, target in moves}, len(below) > OUTDATED_AT_ONCE
        paths = dict.fromkeys(
            path if top in targets else top
            for top, path in below
            if is_many or top in targets or not self._is_whole(sources[top] + path[len(top) :])
        )
        steps = self._outdate_paths(paths)
        if next(steps, self) is not self:
            self._nursery.start_soon(self._outdate_rest, steps)

    def _outdate_paths(self, paths: Iterable[str]) -> Generator[None, None, None]:
        """Outdate the directories of these paths, or the names of missing ones, some at a time."""
        for number, path in enumerate(paths, 1):
            self.outdate(*self._outdated.nearest(path))
            if number % OUTDATED_AT_ONCE == 0:
                yield

    async def _outdate_rest(self, steps: Generator[None, None, None]) -> None:
        try:
            await finish_paced(steps)
        except LakeError as error:
            log.warning("some directories that moved do not show what other nodes stored there: %s", error)

    def _is_whole(self, path: str) -> bool:
        """Return whether there is a directory at a path whose listing counts for all of its names."""
        directory = self.directory(path)
        listing = None if directory is None else self.tree.listing(directory)
        return directory is not None and listing is not None and self._whole_ns(directory, listing) > 0

    def is_announced(self, path: str) -> bool:
        """Return whether a commit announced a plain object at a path that the store was not asked for since."""
        above, _, name = path.rpartition("/")
        directory, missing = self._outdated.nearest(above)
        return not missing and name.encode(*PATH) in self._outdated.of(directory)[0]

    def _unseen(self, record: Record) -> Iterator[str]:
        """Yield paths at which a record names a plain object that this node does not have, or removes another one than
        this node has, which may have been replaced by that; none of a large record."""
        for each in record.operations if len(record.operations) <= STORED_MAX else ():
            if (isinstance(each, Put) and each.object == OWN) or (isinstance(each, Remove) and each.hides):
                entry = self.at(each.path)
                absent = each.hides if isinstance(each, Remove) else None
                if each.hides != (entry.etag if entry is not None and entry.is_plain else absent):
                    yield each.path

    def _directories_above(self, directory: int) -> Iterator[tuple[int, bytes]]:
        while directory != ROOT_INODE and (entry := self.tree.entry(directory)) is not None:
            directory = entry.parent
            yield directory, entry.name

    def renew_inode(self, entry: Entry) -> None:
        """Give the present version of a name a new inode, because the kernel keeps the size of a known inode. Raises
        CacheError."""
        batch = Batch()
        renew_inode(self.tree, batch, entry)
        self._db.commit(batch)
        self.events.invalidate_name(entry.parent, entry.name)

    def _touch_listed(self, directory: int, changed_ns: int) -> None:
        """Set the times of a directory in which a LIST showed changed names by this time, unless they are later. Raises
        CacheError."""
        entry = self.tree.entry(directory)
        since_ns = 0 if entry is None else max(entry.mtime_ns, entry.stamp)
        if changed_ns > since_ns and (entry is not None or directory == ROOT_INODE):
            batch = Batch()
            self.touch(directory, batch, changed_ns)
            self._db.commit_volatile(batch)

    def touch(self, directory: int, batch: Batch | None = None, at_ns: int = 0) -> None:
        """Set the times of a directory whose names change: with ``batch``, or at once as `record_beside` does."""
        if directory == ROOT_INODE:
            now = self._clock_ns()
            self.root = msgspec.structs.replace(self.root, mtime_ns=now, ctime_ns=now)
            for listener in self.events.directory_updated:
                listener(self.root)
            return
        entry = self.tree.entry(directory)
        if entry is not None:
            now_or_later = Batch() if batch is None else batch
            now = at_ns or self._clock_ns()
            self.tree.update(now_or_later, msgspec.structs.replace(entry, mtime_ns=now, ctime_ns=now))
            if batch is None:
                self.record_beside(now_or_later)

    def _renew_redated(self, entry: Entry) -> None:
        try:
            self.renew_inode(entry)
        except CacheError as error:
            log.warning("%s goes on showing the mtime that it had: %s", os.fsdecode(entry.name), error)

    def is_row_removed(self, entry: Entry) -> bool:
        """Return whether a commit removed the version that a row has. The row stays while this node has newer bytes."""
        if entry.flags & NO_OBJECT:
            return False
        tombstone = self.tree.tombstones.get(self.key(entry).encode("utf-8", "surrogatepass"))
        if tombstone is None:
            return False
        if not entry.is_plain:
            return 0 < entry.stamp < tombstone.stamp
        if not entry.stamp and entry.is_dated_by_store:  # a listing showed it, and it may have been put there again
            return tombstone.hides(entry.etag, entry.ctime_ns, by_date=False)
        gone = tombstone.when_ended(entry.etag)
        return bool(gone) and (gone > entry.stamp or not entry.flags & Flag.PUT_AGAIN)

    def record_beside(self, batch: Batch) -> None:
        """Commit a batch that only accompanies a change of names in effect, such as times; failures are logged."""
        try:
            self._db.commit(batch)
        except CacheError as error:
            log.warning("a change of names is in effect, but not what accompanies it, such as times: %s", error)

    def made(self, directory: Entry) -> None:
        """Record a directory that this node has just made: it exists, and is empty unless other nodes announced a name
        in it since the lookup. The directory that contains it gets the present time."""
        is_absent = self._listed_ns(directory.parent, directory.name) > 0
        is_empty = is_absent or self.path_of(directory) not in self._outdated.announced
        batch = Batch()
        self.tree.set_listing(batch, directory.inode, Listing(self._clock_ns() if is_empty else 0, 0))
        self.touch(directory.parent, batch)
        self.record_beside(batch)
        self._remember_answer(directory.parent, directory.name, self._clock_ns())

    @property
    def is_disk_failing(self) -> bool:
        """True if names cannot be written to the local disk."""
        return self._db.is_failing

    @property
    def is_disk_full(self) -> bool:
        """True if they cannot because the disk is full."""
        return self._db.is_full

    def _path_of(self, directory: int) -> str | None:
        path = self.tree.path(directory)
        return None if path is None else os.fsdecode(b"/".join(path))

    @property
    def names_arriving(self) -> int:
        """Number of names that listings under way have merged so far."""
        return sum(flight.merge.names for flight in self._flights.values() if flight.merge is not None)

    def statistics(self) -> dict[str, object]:
        return {
            "hidden_keys": dict(zip(map(str, Hidden), self.tree.hidden, strict=True)),
            "listings_under_way": len(self._flights),
            "listing": described(self._flights, self._path_of, self._clock_ns()),
            "rocksdb": self._db.statistics(),
        }
