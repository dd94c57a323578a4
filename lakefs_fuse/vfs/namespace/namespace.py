"""The names of a lake: the tree in RocksDB, and the decision when to ask the store.

A directory whose listing counts (`look_intervals`) answers everything, absent names included, without a request; the
kernel keeps an answer for the TTL at most. When it counts no more the directory is listed again, once for all requests.
A name in a directory that was never listed (or is very large) is asked for by itself; with the second the directory's
first page is fetched besides, which will do where it is the only one, and after a few such questions the directory is
listed in the background. Times of listings are wall clock and survive a restart; a time in the future counts as long
ago. While the store is away, what was listed before counts on. The first listing of a directory can be read while it
goes on (`listing_flight`). Of a name that another node announces the store is asked again, when it is needed
(`outdated_names`).

Changes this node makes go through `changing`, so that a LIST which began before them cannot undo them. All code between
two awaits is atomic; trio thread only.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice

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
from lakefs_fuse.meta.tree import Listing, Tree
from lakefs_fuse.metrics import NamespaceMetrics
from lakefs_fuse.product import PLACEHOLDER
from lakefs_fuse.store.client import StoreClient, is_copy
from lakefs_fuse.store.parallel_list import KEYS_MAX, ParallelList
from lakefs_fuse.store.protocol import ListPage, ObjectMeta
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.files.file_table import FileTable, renew_inode
from lakefs_fuse.vfs.namespace.absent_names import Absences, AbsentNames
from lakefs_fuse.vfs.namespace.commit_order import ANNOUNCED_NS, OrderedLists
from lakefs_fuse.vfs.namespace.key_mapping import (
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    Hidden,
    checked_key,
    checked_name,
    extent_of,
    is_reserved,
    path_of_key,
)
from lakefs_fuse.vfs.namespace.listing_flight import Flight, described
from lakefs_fuse.vfs.namespace.listing_merge import DirectoryMerge, Found, read_page
from lakefs_fuse.vfs.namespace.look_intervals import LookIntervals
from lakefs_fuse.vfs.namespace.outdated_names import OutdatedNames
from lakefs_fuse.vfs.namespace.subtree_listing import FlatListing, Place, SubtreeListings

NS = 1_000_000_000
RELIST_ENTRIES_MAX = 10_000
"""A directory up to this size is listed again by the request for one of its names; a larger one in the background."""
POINT_LOOKUPS_MAX = 4
"""This many single names of a directory are asked for before it is listed in the background."""
FIRST_PAGE_LOOKUPS = 2
"""With this many, its first page is fetched: all there is to know of most directories, for the price of one name."""
POINT_ANSWERS_MAX = 65_536
BACKGROUND_LISTINGS_MAX = 4
FIRST_PAGES_MAX = 16
SINGLE_NAME_KEYS = 100
HEADS_AT_ONCE = 16
AWAY = (Unavailable, AccessDenied)
"""What was listed before counts on where a LIST fails so: the store is away for a while, or a key has expired."""
AWAY_CHECK_S = 0.5
"""Who waits for a LIST looks so often whether the store is away."""
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
        self.announce_name = self.events.announce_name
        self.prefix, self.key, self.path_of = tree.prefix, tree.key, tree.path_of
        self.extent = partial(extent_of, tree)
        self.events.listing_dropped.append(self._mark_listings_stale)
        self.events.redated_file_closed.append(self._renew_redated)
        self.root = Entry(ROOT_INODE, 0, b"", ROOT_INODE, Flag.DIRECTORY | Flag.ATTRIBUTES_KNOWN | Flag.MARKER)
        """It has no row; its times are those of the mount's own changes."""
        self.database = self._db = database
        self._client, self._metrics, self._nursery = client, metrics, nursery
        self._ttl_ns = int(config.metadata_ttl_s * NS)
        self._clock_ns = self.now_ns = clock.wall_ns
        self._keep = files.is_dirty
        self._flights: dict[int, Flight] = {}
        self._watched: dict[int, list[Flight]] = {}
        self._answers: dict[tuple[int, bytes], int] = {}
        self._asked: dict[int, set[bytes]] = {}
        self._background: dict[int, Flight] = {}
        self._failing = False
        self._outdated, self._absent = OutdatedNames(tree), AbsentNames()
        self.events.listing_dropped.append(self._outdated.forget)
        self.events.commit_applied.append(self._take_announcements)
        self._looks = LookIntervals(config.metadata_ttl_s, config.foreign_s)
        self._new_object_ns = 0
        """When a LIST has shown a new object last, before which others may have been stored."""
        self._lists = OrderedLists(client, self.events, self._note_new_object)
        self._subtrees = SubtreeListings(self._lists, self._clock_ns, self._looks.first_ns, self.events.unlisted_keys)
        self._source_prefix_bytes = len(config.store.source.prefix.encode())
        self._told_of_long = False
        self.touch(ROOT_INODE)

    # -- keys

    def checked_key(self, prefix: str, component: str) -> str:
        """The key of a name below a prefix. Raises FileError(ENAMETOOLONG) where no store would take it."""
        try:
            return checked_key(prefix, component, self._source_prefix_bytes)
        except FileError:
            self._tell_of_long(prefix + component)
            raise

    def checked_path(self, directory: int, name: bytes) -> str:
        """The path, and key, of a new name. Raises FileError: ENAMETOOLONG for a store, prefix included; EILSEQ, EPERM
        (reserved); EINVAL where this store would change a character of it, so that no file is written that cannot be
        kept."""
        component = checked_name(directory, name)
        refused = self._client.capabilities.characters_refused
        if any(character in component for character in refused):
            raise FileError(errno.EINVAL, f"this store cannot hold names with any of {refused!r}")
        return self.checked_key(self.prefix(directory), component)

    @property
    def takes_plain_names(self) -> bool:
        """Printable ASCII but the backslash: every such name can be kept in this store."""
        refused = self._client.capabilities.characters_refused
        return not any(" " <= each <= "~" and each not in "\\/" for each in refused)

    def check_paths(self, paths: Iterable[str]) -> None:
        """Raises FileError(ENAMETOOLONG) for a path that no other node would read."""
        for path in paths:
            if self._source_prefix_bytes + len(path.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX:
                self.checked_key("", path)

    def marker_keys(self, path: str) -> list[str]:
        """Keys of objects that may mark the directory at a path: the one that this store lists last."""
        lists_markers = self._client.capabilities.lists_markers
        return [path + "/"] if lists_markers else [path + "/", f"{path}/{PLACEHOLDER}"]

    async def check_empty(self, entry: Entry) -> None:
        """Raises FileError(ENOTEMPTY); keys that cannot be shown count too, as they would bring the directory back."""
        await self.ensure_listed(entry.inode, strictly=False)
        self.check_known_empty(entry)

    def check_known_empty(self, entry: Entry) -> None:
        """As `check_empty`, by what is known of the directory."""
        listing = self.tree.listing(entry.inode)
        if self.tree.has_children(entry.inode) or (listing is not None and listing.hides_keys):
            raise FileError(errno.ENOTEMPTY)

    def is_listed(self, directory: int) -> bool:
        """Whether a directory was listed, and other nodes have announced nothing in it since. While the store is away,
        the listing counts on although they have."""
        listing = self.tree.listing(directory)
        return listing is not None and (self._whole_ns(directory, listing) > 0 or self._counts_on(directory))

    def check_length(self, directory: int, name: bytes) -> None:
        """Raises FileError(ENAMETOOLONG) for a name that cannot be in a directory, or have a key there."""
        if len(name) > NAME_BYTES_MAX:
            raise FileError(errno.ENAMETOOLONG)
        try:
            component = name.decode()
        except UnicodeDecodeError:
            return
        self.checked_key(self.prefix(directory), component)

    def _tell_of_long(self, key: str) -> None:
        """Once for a mount: programs get the errno each time."""
        if not self._told_of_long:
            self._told_of_long = True
            log.warning(
                "keys hold at most %d bytes, the lake's prefix included; longer names cannot be made, changed or "
                "removed here, which is said once: %.60s…", KEY_BYTES_MAX, key,
            )  # fmt: skip

    def directory(self, path: str) -> int | None:
        """Inode of a directory by its path; None where it is not known."""
        return self.tree.directory(path.encode("utf-8", "surrogatepass"))

    def at(self, path: str) -> Entry | None:
        """What is known under a path; None for nothing, and for the root."""
        return self.tree.resolve([name.encode("utf-8", "surrogatepass") for name in path.split("/")])

    def own_etag(self, path: str, parent: int | None = None) -> str:
        """ETag of the plain object that is known to lie at a path's own key, seen or hidden, or that may come there;
        empty for none. ``parent`` is the inode of its directory, where that is known."""
        return self.tree.own_etags([path], parent)[0]

    # -- freshness

    def fresh_s(self, directory: int, *, within_ttl: bool = False) -> float:
        """How long the last listing of a directory is still valid, in seconds, the TTL at most; 0 if the store must be
        asked again. ``within_ttl``: though it may count longer, only one of the TTL does here."""
        listing = self.tree.listing(directory)
        return (
            0.0 if listing is None else self._listed_fresh_s(directory, self._whole_ns(directory, listing), within_ttl)
        )

    def answer_fresh_s(self, directory: int, name: bytes, *, within_ttl: bool = False) -> float:
        """How long the entry of a name is still valid, in seconds, by a listing or a lookup of it alone; as
        `fresh_s`."""
        listed_ns = self._listed_ns(directory, name)
        return max(self._listed_fresh_s(directory, listed_ns, within_ttl), self._answer_fresh_s(directory, name))

    def _listed_ns(self, directory: int, name: bytes) -> int:
        """When a directory was listed; 0 where that says nothing of a name."""
        listing = self.tree.listing(directory)
        if listing is None:
            return 0
        return self._whole_ns(directory, listing) or self._outdated.listed_ns(directory, name)

    def _whole_ns(self, directory: int, listing: Listing) -> int:
        """When a directory was listed, if that counts for all of its names; else 0."""
        return 0 if directory in self._outdated.directories else listing.at_ns

    def _listed_fresh_s(self, directory: int, listed_ns: int, within_ttl: bool = False) -> float:
        """How long a listing of that time counts; no longer than the TTL where a flat listing costs nothing."""
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
        """For how many seconds an answer of that time counts, the TTL at most."""
        age_ns = self._clock_ns() - asked_ns
        return max(0, min(self._ttl_ns, interval_ns - age_ns)) / NS if age_ns >= 0 else 0.0

    def listing_fresh_s(self, directory: int) -> float:
        """As `fresh_s`, of what is read of a directory now: its first listing, while it goes on, included."""
        flight = self._flights.get(directory)
        return self._flight_fresh_s(flight) if flight is not None and flight.is_readable else self.fresh_s(directory)

    def _flight_fresh_s(self, flight: Flight) -> float:
        return self._fresh_s(flight.began_ns, self._looks.first_ns)

    def _answer_fresh_s(self, directory: int, name: bytes) -> float:
        asked_ns = self._answers.get((directory, name))
        return 0.0 if asked_ns is None else self._fresh_s(asked_ns, self._looks.first_ns)

    def _note_new_object(self) -> None:
        self._new_object_ns = self._clock_ns()

    def _doubts_absence(self, directory: int, name: bytes) -> bool:
        """Whether what is known of a name may lack what was stored before a new object that was seen since."""
        if not 0 <= self._clock_ns() - self._new_object_ns < ANNOUNCED_NS:
            return False
        return max(self._listed_ns(directory, name), self._answers.get((directory, name), 0)) < self._new_object_ns

    # -- asking

    async def lookup(
        self, directory: int, name: bytes, *, ask: bool = False, within_ttl: bool = False
    ) -> tuple[Entry | None, float]:
        """The entry of a name, and for how many seconds that answer counts. ``ask`` asks the store in any case,
        ``within_ttl`` as in `fresh_s`."""
        try:
            component = name.decode("utf-8")
        except UnicodeDecodeError:
            return None, self._ttl_ns / NS
        if is_reserved(directory, component) or len(name) > NAME_BYTES_MAX:
            return None, self._ttl_ns / NS
        if not ask:
            entry = self.tree.child(directory, name)
            if entry is not None and not entry.flags & Flag.DIRECTORY and self._keep(entry):
                return entry, self._ttl_ns / NS
            fresh_s = self.answer_fresh_s(directory, name, within_ttl=within_ttl)
            flight = self._flights.get(directory)
            if (
                flight is not None
                and entry is not None
                and flight.brought(entry.cookie)
                and name not in flight.announced
            ):
                fresh_s = max(fresh_s, self._flight_fresh_s(flight))
            is_doubted = entry is None and self._doubts_absence(directory, name)
            if fresh_s > 0 and not is_doubted and not (entry is not None and entry.flags & Flag.LOCAL):
                return entry, fresh_s
            if entry is not None and entry.is_dir and self._keep(entry):  # which looks at all files in use
                return entry, self._ttl_ns / NS
            listing = self.tree.listing(directory)
            if is_doubted and listing is not None and listing.entries <= RELIST_ENTRIES_MAX:
                with suppress(*AWAY):
                    await self.list_directory(directory, since_ns=self._new_object_ns)
                return self.tree.child(directory, name), self.answer_fresh_s(directory, name)
            if listing is None or not self._are_few_outdated(directory, listing):
                if listing is not None and listing.entries <= RELIST_ENTRIES_MAX:
                    await self._list_again(directory)
                    return self.tree.child(directory, name), self.answer_fresh_s(directory, name)
                if flight is None and not self._client.is_away and self._subtrees.is_shared(self._place(directory)):
                    await self.list_directory(directory, within_ttl=True)
                    return self.tree.child(directory, name), self.answer_fresh_s(directory, name)
                self._consider_background_listing(directory, name)
        if not self._counts_on(directory):
            try:
                await self._ask_for_name(directory, name, component)
            except AWAY:
                if self.tree.listing(directory) is None:
                    raise
        entry = self.tree.child(directory, name)
        if ask and entry is not None and self._absent.discard(directory, name):
            self.announce_name(directory, name)
        return entry, self._answer_fresh_s(directory, name)

    async def ensure_absent(self, directory: int, name: bytes) -> str:
        """The path of a new name when the answer is known: another node may have renamed the directory in the meantime.
        Raises FileError: EEXIST, and as `checked_path`; LakeError."""
        self.checked_path(directory, name)
        if (await self.lookup(directory, name))[0] is not None:
            raise FileError(errno.EEXIST)
        return self.checked_path(directory, name)

    async def lookup_in_store(self, directory: int, name: bytes) -> Entry | None:
        """The entry of a name, as the store has it now. That is one request, which begins after the call: a HEAD where
        no such name is known, by an answer that counts still, else a LIST. The HEAD misses a directory that another
        program made since that answer."""
        known = self.tree.child(directory, name)
        if known is None and self.answer_fresh_s(directory, name) > 0 and not self._counts_on(directory):
            prefix = self.prefix(directory)
            try:
                meta = await self._client.find(self.checked_key(prefix, name.decode()))
            except AWAY:
                if self.tree.listing(directory) is None:
                    raise
                return self.tree.child(directory, name)
            if (meta is None or self._is_removed(meta)) and not self._is_moved(directory, prefix):
                return self.tree.child(directory, name)
        return (await self.lookup(directory, name, ask=True))[0]

    def _counts_on(self, directory: int) -> bool:
        """The store is away, and the directory was listed before; a LIST goes on asking for it."""
        if not self._client.is_away or self.tree.listing(directory) is None:
            return False
        self.list_soon(directory)
        return True

    async def _list_again(self, directory: int) -> None:
        """A directory that was listed before is listed again when this returns, or the store is away."""
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
        """To ask for each outdated name takes no more requests than a LIST of the directory, which is not due yet."""
        names, listed_ns = self._outdated.of(directory)
        return 0 < len(names) <= max(1, listing.entries // KEYS_MAX) and self._listed_fresh_s(directory, listed_ns) > 0

    async def _update_listing(self, directory: int) -> None:
        """As `_list_again`, by as few requests as that takes."""
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
        """List a directory in the background, unless too many are."""
        if directory in self._flights or self._may_list():
            self._listing(directory)

    def _may_list(self) -> bool:
        """One more directory in the background, to its end."""
        return sum(flight.is_wanted for flight in self._background.values()) < BACKGROUND_LISTINGS_MAX

    def _listing(self, directory: int) -> Flight:
        """The LIST of a directory that is under way, or a new one; it goes to its end."""
        flight = self._flights.get(directory) or self._begin_listing(directory)
        flight.is_wanted = True
        return flight

    def _begin_listing(self, directory: int, *, is_wanted: bool = True) -> Flight:
        flight = self._flights[directory] = Flight(self._clock_ns(), is_wanted)
        self._background[directory] = flight
        self._nursery.start_soon(self._list_in_background, directory, flight)
        return flight

    def _consider_background_listing(self, directory: int, name: bytes) -> None:
        """A name of a directory is asked for; again and again the same one does not count."""
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
        """One LIST answers for the file and the directory of a name, unless many keys lie between them."""
        self._metrics.point_lookups += 1
        prefix = self.prefix(directory)
        asked_ns = self._clock_ns()
        flight = Flight(asked_ns)
        key = self.checked_key(prefix, component)
        self._subtrees.directory_asked(directory)
        with self._watching(directory, flight):
            page = await self._lists.list_page(key, delimiter="/", keys_max=SINGLE_NAME_KEYS)
            found = [item for item in read_page(page, directory, prefix).found if item.sort_name in (name, name + b"/")]
            if page.next_token is not None and not any(item.meta is None for item in found):
                below = await self._client.list_page(key + "/", keys_max=1)
                if below.objects or below.prefixes:
                    found.append(Found(name + b"/", None))
            if page.next_token is not None and not self._client.capabilities.sorted_listing:
                found += await self._head_if_missing(found, name, key)
            is_whole = not self._is_moved(directory, prefix) and await self._merge_one(directory, name, found, flight)
        if not is_whole or self._is_moved(directory, prefix):
            await self._ask_for_name(directory, name, component)
            return
        if name not in flight.announced:
            self._remember_answer(directory, name, asked_ns)
            self._outdated.discard(directory, name)
        if self.tree.listing(directory) is None and self.tree.child(directory, name) is None:
            self._absent.add(directory, name, self._db.inode_next - 1)

    async def _merge_one(self, directory: int, name: bytes, found: list[Found], flight: Flight) -> bool:
        """Whether all that was found is below the directory still: it may be renamed meanwhile."""
        prefix, merge = self.prefix(directory), self._merge(directory, flight)
        if not await self._take_steps(merge.apply_one(name, found), directory, prefix):
            return False
        await self._ask_about_overriding(merge, directory, prefix)
        if self._finds_foreign(merge, directory, flight):
            self._looks.reset(directory)
        await self._look_below_ghosts(merge, directory, prefix)
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
        self._answers.pop((directory, name), None)
        self._answers[directory, name] = asked_ns
        if len(self._answers) > POINT_ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]

    async def ensure_listed(self, directory: int, *, strictly: bool = True) -> float:
        """List a directory unless that was done within the TTL; returns for how many seconds that counts. Unless
        ``strictly``, what is known of it will do while the store is away."""
        fresh_s = self.fresh_s(directory, within_ttl=True)
        if fresh_s > 0:
            return fresh_s
        if strictly or self.tree.listing(directory) is None:
            await self.list_directory(directory, within_ttl=True)
        else:
            await self._update_listing(directory)
        return self.fresh_s(directory)

    async def begin_reading(self, directory: int) -> None:
        """As `ensure_listed`, not strictly; but a first listing goes on when this returns."""
        if self.fresh_s(directory) > 0:
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
        """There are names with cookies beyond ``after``, or there will be none, when this returns. Raises what ended
        the listing before it was complete."""
        while self.tree.listing(directory) is None and self.tree.path(directory) is not None:
            flight = self._listing(directory)
            if flight.is_readable and next(self.tree.children(directory, after), None) is not None:
                return
            await flight.more()
            if flight.error is not None:
                raise flight.error

    async def list_directory(self, directory: int, *, within_ttl: bool = False, since_ns: int = 0) -> None:
        """LIST a directory to its end and merge the changes; concurrent callers wait for the same LIST. One LIST for
        several directories will do if it began now or later (``since_ns``), or ``within_ttl``."""
        while (flight := self._flights.get(directory)) is not None:
            flight.is_wanted = True
            await flight.done.wait()
            if flight.error is not None:
                raise flight.error
            is_whole = not flight.is_interrupted
            if is_whole and (within_ttl or (not flight.is_dated_back and flight.began_ns >= since_ns)):
                return
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
            if await self._list_below(directory, prefix, flight, flat):
                return

    def _place(self, directory: int) -> Place:
        names, at = list[tuple[int, bytes]](), directory
        while (entry := self.tree.entry(at)) is not None:
            names.append((entry.parent, entry.name))
            at = entry.parent
        return Place(directory, self.prefix(directory), names)

    async def _list_below(self, directory: int, prefix: str, flight: Flight, flat: FlatListing | None) -> bool:
        """Whether all that was found is below the directory still: it may be renamed meanwhile."""
        is_deep = _is_long(prefix + "x" * NAME_BYTES_MAX)
        merge = flight.merge = self._merge(directory, flight)

        def take(page: ListPage) -> None:
            if self._is_moved(directory, prefix):
                return
            merge.apply(read_page(page, directory, prefix))
            if is_deep and (long := next((each.key for each in page.objects if _is_long(each.key)), None)):
                self._tell_of_long(long)
            flight.told()

        if flat is not None:
            take(flat.page(prefix))
        else:
            pages = ParallelList(self._lists, prefix, take)
            flight.progress = pages.progress
            if not await pages.run(goes_on=lambda: flight.is_wanted):
                return True
        await self._look_below_ghosts(merge, directory, prefix, flat)
        await self._ask_about_overriding(merge, directory, prefix)
        if not await self._take_steps(merge.remove_missing(), directory, prefix):
            return False
        self._touch_listed(directory, merge.changed_ns)
        is_first = self.tree.listing(directory) is None
        listing, absences = merge.complete(), self._absent.pop(directory) if is_first else None
        if is_first or flat is not None or self._finds_foreign(merge, directory, flight):
            self._looks.reset(directory)
        elif listing.entries > KEYS_MAX or self._subtrees.is_in_large(prefix):
            self._looks.lengthen(directory)
        self._outdated.forget(directory)
        self._outdated.add(directory, *flight.announced)
        if flight.is_stale:
            batch = Batch()
            self.tree.forget_listing(batch, directory)
            self._db.commit_volatile(batch)
        self._asked.pop(directory, None)
        if absences is not None:
            with trio.CancelScope(shield=True):
                await self._announce_added(directory, absences)
        return True

    async def _announce_added(self, directory: int, absences: Absences) -> None:
        """The kernel may hold as absent what a first listing brought."""
        for name in absences.names:
            if self.tree.child(directory, name) is not None:
                self.announce_name(directory, name)
        if absences.is_any:
            for children in self.tree.children_in_steps(directory, absences.after):
                for child in children:
                    if not child.stamp and not child.is_local:
                        self.announce_name(directory, child.name)
                await trio.lowlevel.checkpoint()

    def _finds_foreign(self, merge: DirectoryMerge, directory: int, flight: Flight) -> bool:
        """A LIST shows what no commit told or announced."""
        announced, _ = self._outdated.of(directory)
        return any(name not in announced and name not in flight.announced for name in merge.differences)

    def _is_moved(self, directory: int, prefix: str) -> bool:
        """The directory is not the one at this path any more. Raises FileError(ESTALE) if it is gone."""
        if self.tree.path(directory) is None:
            raise FileError(errno.ESTALE)
        return self.prefix(directory) != prefix

    async def _take_steps(self, steps: Iterator[None], directory: int, prefix: str) -> bool:
        """Take the steps of a merge, with other tasks between two of them. Returns whether all were taken: not when the
        directory is not the one at this path any more. Raises FileError(ESTALE) if it is gone."""
        if self._is_moved(directory, prefix):
            return False
        for _ in steps:
            await trio.lowlevel.checkpoint()
            if self._is_moved(directory, prefix):
                return False
        return True

    async def _look_below_ghosts(
        self, merge: DirectoryMerge, directory: int, prefix: str, flat: FlatListing | None = None
    ) -> None:
        for name in merge.ghosts:
            below = prefix + name.decode("utf-8", "surrogatepass") + "/"
            token: str | None = None
            while True:
                if flat is not None:
                    page = ListPage(flat.below(below), (), None)
                else:
                    page = await self._client.list_page(below, token=token)
                if self._is_moved(directory, prefix):
                    return
                token = page.next_token
                if any(not self._is_removed(meta) for meta in page.objects):
                    merge.add_directory(name)
                    break
                if token is None:
                    if not await self._take_steps(merge.drop_directory(name), directory, prefix):
                        return
                    break

    async def _ask_about_overriding(self, merge: DirectoryMerge, directory: int, prefix: str) -> None:
        """What another program put in place of bytes elsewhere counts; a copy that no commit names does not, nor does a
        later version of a file that was renamed from there, whose writer had not heard of that: it is that file."""
        listed, found = merge.overriding, list[ObjectMeta]()

        async def ask(meta: ObjectMeta) -> None:
            now = await self._client.find(meta.key)
            if now is not None and not is_copy(now) and not is_of_renamed(self.tree, now):
                found.append(now)

        if listed:
            await for_each(listed, ask, min(HEADS_AT_ONCE, len(listed)))
        if found and not self._is_moved(directory, prefix):
            merge.apply_overriding(found)

    def _is_removed(self, meta: ObjectMeta) -> bool:
        path = path_of_key(meta.key).encode("utf-8", "surrogatepass")
        tombstone = self.tree.tombstones.get(path)
        return tombstone is not None and tombstone.hides(meta.etag, meta.mtime_ns)

    def _merge(self, directory: int, flight: Flight) -> DirectoryMerge:
        return DirectoryMerge(
            self.tree,
            self._metrics,
            directory,
            prefix=self.prefix(directory),
            now_ns=flight.began_ns,
            touched=flight.touched,
            keep=self._keep,
            events=self.events,
        )

    # -- changing

    @contextmanager
    def _watching(self, directory: int, flight: Flight) -> Iterator[None]:
        """While it is entered, names changed in the directory, and those of directories in it below which something
        was changed, are added to the flight's ``touched``."""
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
        """This node changes a name now: LISTs under way must not undo it. That of a directory above may not know of
        anything below it yet, and would take the directories between away. With ``is_stored`` the store has just
        confirmed an object of this node, which is as good as a lookup."""
        self._answers.pop((directory, name), None)
        if directory in self._absent.directories:
            self._absent.discard(directory, name)  # the kernel asked for the change, or is notified of it
        if is_stored:
            self._remember_answer(directory, name, self._clock_ns())
        if self._subtrees.flat_listings:
            self._subtrees.name_changed(directory, name, self._directories_above)
        while self._watched:
            for flight in self._watched.get(directory, ()):
                flight.touched.add(name)
            at = self.tree.entry(directory) if directory != ROOT_INODE else None
            if at is None:
                break
            directory, name = at.parent, at.name

    def _take_announcements(self, record: Record) -> None:
        """Another node has stored plain objects, of which its commit tells: those that no operation names, and those of
        operations which had no effect here, because of a change that is in no commit yet, perhaps. Or it has taken away
        what a directory is there for, or a directory in which others have stored something that it does not name."""
        places: dict[bytes, tuple[int, bytes]] = {}
        stored = (*record.stored, *self._unseen(record))
        for path in (*stored, *self._emptied(record), *self._left_behind(record)):
            above, _, last = path.encode().rpartition(b"/")
            if above not in places:
                places[above] = self._nearest(above)
            directory, name = places[above]
            name = name or last
            self._answers.pop((directory, name), None)
            if self._subtrees.flat_listings:
                self._subtrees.name_changed(directory, name, self._directories_above)
            self._outdated.add(directory, name)
            self.announce_name(directory, name)
            while self._watched:
                for flight in self._watched.get(directory, ()):
                    flight.announced.add(name)
                at = self.tree.entry(directory) if directory != ROOT_INODE else None
                if at is None:
                    break
                directory, name = at.parent, at.name
        for path in dict.fromkeys(each.rpartition("/")[0] for each in stored):
            self._outdated.note_announced(path)

    def is_announced(self, path: str) -> bool:
        """Whether a commit announced a plain object there, and the store was not asked for it since."""
        above, _, name = path.encode("utf-8", "surrogatepass").rpartition(b"/")
        directory, missing = self._nearest(above)
        return not missing and name in self._outdated.of(directory)[0]

    def _unseen(self, record: Record) -> Iterator[str]:
        """Paths that a record says are plain objects, and that are not these here; of a large record none."""
        for each in record.operations if len(record.operations) <= STORED_MAX else ():
            if isinstance(each, Put) and each.object == OWN:
                entry = self.at(each.path)
                if entry is None or not entry.is_plain or entry.etag != each.hides:
                    yield each.path

    def _emptied(self, record: Record) -> Iterator[str]:
        """Directories that a listing showed and no commit makes, and in which a record leaves nothing that is known; of
        a large record none."""
        operations = record.operations if len(record.operations) <= STORED_MAX else ()
        for above in dict.fromkeys(each.path.rpartition("/")[0] for each in operations if isinstance(each, Remove)):
            path, emptied = above, ""
            while path:
                directory = self.directory(path)
                entry = None if directory is None else self.tree.entry(directory)
                if entry is not None:
                    children = list(islice(self.tree.children(entry.inode), 2))
                    if entry.stamp or entry.flags & Flag.MARKER or len(children) > bool(emptied):
                        break
                    emptied = path
                path = path.rpartition("/")[0]
            if emptied:
                yield emptied

    def _left_behind(self, record: Record) -> Iterator[str]:
        """Directories that a record moves or removes, or that went with the last name that is known in them, where
        something was announced before; of what a large one removes none."""
        operations = record.operations if len(record.operations) <= STORED_MAX else ()
        removed = [each for each in operations if isinstance(each, Remove)]
        above = dict.fromkeys(each.path.rpartition("/")[0] for each in removed)
        gone = (path for path in above if path and self.directory(path) is None)
        named = (each.path for each in removed if each.directory)
        for path in dict.fromkeys((*(source for source, _ in record.moves), *named, *gone)):
            if self._outdated.was_announced(path):
                yield path

    def _nearest(self, path: bytes) -> tuple[int, bytes]:
        """The deepest known directory on a path, and the name in it that leads on; none where that is the path's."""
        directory = ROOT_INODE
        for name in path.split(b"/") if path else ():
            entry = self.tree.named(directory, name + b"/")
            if entry is None:
                return directory, name
            directory = entry.inode
        return directory, b""

    def _directories_above(self, directory: int) -> Iterator[int]:
        while directory != ROOT_INODE and (entry := self.tree.entry(directory)) is not None:
            directory = entry.parent
            yield directory

    def renew_inode(self, entry: Entry) -> None:
        """Give the present version of a name a new inode, because the kernel keeps the size of an inode that it knows.
        Raises CacheError."""
        batch = Batch()
        renew_inode(self.tree, batch, entry)
        self._db.commit(batch)
        self.events.announce_name(entry.parent, entry.name)

    def _touch_listed(self, directory: int, changed_ns: int) -> None:
        """A LIST shows that names came or went by this time: the times of the directory move, unless they were set
        later."""
        entry = self.tree.entry(directory)
        since_ns = 0 if entry is None else max(entry.mtime_ns, entry.stamp)
        if changed_ns > since_ns and (entry is not None or directory == ROOT_INODE):
            batch = Batch()
            self.touch(directory, batch, changed_ns)
            self._db.commit_volatile(batch)

    def touch(self, directory: int, batch: Batch | None = None, at_ns: int = 0) -> None:
        """Set the times of a directory whose names change, immediately, as `record_beside` does, or with ``batch``."""
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

    def is_removed(self, entry: Entry) -> bool:
        """A commit removed the version that a file is; its row stays for as long as there are newer bytes here."""
        if entry.flags & NO_OBJECT:
            return False
        tombstone = self.tree.tombstones.get(self.key(entry).encode("utf-8", "surrogatepass"))
        if tombstone is None:
            return False
        if not entry.is_plain:
            return 0 < entry.stamp < tombstone.stamp
        if not entry.stamp and entry.is_dated_by_store:  # as a listing showed it, perhaps put there again since
            return tombstone.hides(entry.etag, entry.ctime_ns, by_date=False)
        gone = tombstone.when_gone(entry.etag)
        return bool(gone) and (gone > entry.stamp or not entry.flags & Flag.PUT_AGAIN)

    def record_beside(self, batch: Batch) -> None:
        """Record what only accompanies a change of names that is in effect: the call succeeds although this fails."""
        try:
            self._db.commit(batch)
        except CacheError as error:
            log.warning("a change of names is in effect, but not what accompanies it, such as times: %s", error)

    def made(self, directory: Entry) -> None:
        """This node has just made a directory: it is known to be there, and to hold nothing. The times of the directory
        that it is in are now."""
        batch = Batch()
        self.tree.set_listing(batch, directory.inode, Listing(self._clock_ns(), 0))
        self.touch(directory.parent, batch)
        self.record_beside(batch)
        self._remember_answer(directory.parent, directory.name, self._clock_ns())

    @property
    def is_disk_failing(self) -> bool:
        """Names cannot be written to the local disk."""
        return self._db.is_failing

    @property
    def is_disk_full(self) -> bool:
        """They cannot, because it has no room."""
        return self._db.is_full

    def _path_of(self, directory: int) -> str | None:
        path = self.tree.path(directory)
        return None if path is None else os.fsdecode(b"/".join(path))

    @property
    def names_arriving(self) -> int:
        """Of listings that have not ended."""
        return sum(flight.merge.names for flight in self._flights.values() if flight.merge is not None)

    def statistics(self) -> dict[str, object]:
        return {
            "hidden_keys": dict(zip(map(str, Hidden), self.tree.hidden, strict=True)),
            "listings_under_way": len(self._flights),
            "listing": described(self._flights, self._path_of, self._clock_ns()),
            "rocksdb": self._db.statistics(),
        }


def _is_long(key: str) -> bool:
    return len(key.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX
