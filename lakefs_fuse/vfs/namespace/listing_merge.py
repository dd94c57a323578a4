"""Merges one LIST of a directory into the tree; only differences are written.

Pages may come in any order, and contain the same name twice. Each name costs one point lookup. The cookie of each known
name that the LIST confirms is kept (8 bytes). Names that it did not confirm are removed at its end, in steps of about
CHILDREN_AT_ONCE rows, and everything below a directory before the directory itself. A crash between two steps leaves
names that the next LIST removes; a change by this node between them (``touched``) ends the removal. Names that this
node changed since the LIST began (``touched``), and files that are being written (``keep``), stay as they are, because
the page is older than this node's state.

A file that a directory of the same name hides keeps a row that says so (*hidden files have rows*), so that it is shown
when the directory goes, whatever takes that away.

Another version of a file gets another inode, so that no open handle and no page of the kernel mixes two versions.

A name stays as commits set it, unless the LIST shows a plain object that the commit did not know and that is not older.
By the same rule, names that commits removed stay removed. A directory that may contain only removed names is one of
`ghosts`: the caller lists below it, and calls `add_directory` if there is a visible name. An object that would count in
place of bytes elsewhere is one of `overriding`: the caller fetches its metadata. A copy by `unpack` or `relocate`
counts only once a commit names it, and a later version of a file that was renamed from there belongs to that file.

Trio thread only; each step is committed when it ends.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import msgspec
import xxhash

from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import PENDING, Entry, Flag
from lakefs_fuse.meta.tombstones import NS, bury, with_unlisted
from lakefs_fuse.meta.tree import CHILDREN_AT_ONCE, Listing, Tree
from lakefs_fuse.metrics import NamespaceMetrics
from lakefs_fuse.product import PLACEHOLDER, RESERVED_NAME
from lakefs_fuse.store.protocol import ListPage, ObjectMeta
from lakefs_fuse.vfs.change_events import ChangeEvents
from lakefs_fuse.vfs.namespace.key_mapping import NAME_BYTES_MAX, Hidden, is_reserved, why_hidden
from lakefs_fuse.vfs.namespace.outdated_names import NAMES_MAX

OVERRIDING_MAX = 1000
"""Maximum of objects of one LIST that get a HEAD before they replace bytes elsewhere; further ones replace them
immediately."""
DIFFERENCES_MAX = NAMES_MAX + 1
"""More names than can have been announced."""
STEP_ROWS = 3 * CHILDREN_AT_ONCE
"""Maximum rows that one step changes; a name has three."""
STEP_COOKIES = 16_384
"""Cookies that one step passes, which takes 10 ms."""
EARLIER_MAX = 1000
"""Maximum known names of a directory that was never listed; with more, its first listing is read once it is
complete."""
RUN_COOKIES = 4096
"""Sorting as many takes about 1 ms."""


class CookieRuns:
    """Cookies in 8 bytes each, added in any order and read in ascending order. For one task at a time.

    RUN_COOKIES at a time are sorted when they are added, and reading merges these runs. So no step takes long, and
    Python objects exist only for the runs, and for one cookie of each.
    """

    def __init__(self) -> None:
        self._newest = array("Q")
        self._runs: list[array[int]] = []

    def add(self, cookie: int) -> None:
        """Add a cookie, which may have been added before."""
        self._newest.append(cookie)
        if len(self._newest) >= RUN_COOKIES:
            self._end_run()

    def ascending(self) -> Iterator[int]:
        """Yield each added cookie once. No cookie may be added meanwhile."""
        self._end_run()
        before = -1
        for cookie in heapq.merge(*self._runs):
            if cookie != before:
                yield cookie
            before = cookie

    def _end_run(self) -> None:
        run, self._newest = array("Q", sorted(self._newest)), array("Q")
        if self._runs and run and self._runs[-1][-1] <= run[0]:  # a LIST mostly shows names in the order of cookies
            self._runs[-1].extend(run)
        elif run:
            self._runs.append(run)


class Found(msgspec.Struct, frozen=True, gc=False):
    """A name in a LIST page: a file with its object, or a directory (``meta`` None)."""

    sort_name: bytes
    meta: ObjectMeta | None

    @property
    def name(self) -> bytes:
        return self.sort_name if self.meta is not None else self.sort_name[:-1]


@dataclass(slots=True)
class PageNames:
    """The names of one page in order, whether it contains the directory's own marker, and its hidden keys."""

    found: list[Found]
    marker: bool
    hidden: list[tuple[Hidden, str]]


def read_page(page: ListPage, directory: int, prefix: str) -> PageNames:
    """Sort a page's keys into names, markers and keys that cannot be paths."""
    names = PageNames([], False, [])
    found, skip = names.found, len(prefix)
    for meta in page.objects:
        component = meta.key[skip:]
        name = component.encode("utf-8", "surrogatepass")
        if len(name) <= NAME_BYTES_MAX and component not in _ODD and b"\0" not in name:
            found.append(Found(name, meta))
        elif component in ("", PLACEHOLDER):
            names.marker = True
        else:
            _sort_in(names, directory, component, meta)
    for common in page.prefixes:
        _sort_in(names, directory, common[skip:-1], None)
    once = {each.sort_name: each for each in found}  # some servers repeat keys within a page
    if len(once) != len(found):
        names.found = list(once.values())
    return names


_ODD = frozenset(("", ".", "..", PLACEHOLDER, RESERVED_NAME))
"""Components that may not be names of files."""


def _sort_in(names: PageNames, directory: int, component: str, meta: ObjectMeta | None) -> None:
    reason = why_hidden(component)
    if reason is not None:
        names.hidden.append((reason, component))
    elif not is_reserved(directory, component):
        names.found.append(Found(component.encode("utf-8", "surrogatepass") + (b"" if meta else b"/"), meta))


class DirectoryMerge:
    """The merge of one directory. `apply` pages in order, then `remove_missing` and `complete`; or `apply_one` for a
    single name."""

    def __init__(
        self,
        tree: Tree,
        metrics: NamespaceMetrics,
        directory: int,
        *,
        prefix: str,
        now_ns: int,
        touched: Collection[bytes] = (),
        keep: Callable[[Entry], bool] = lambda _: False,
        events: ChangeEvents | None = None,
    ) -> None:
        """``prefix`` is that of the directory."""
        self._db, self._tree, self._metrics = tree.database, tree, metrics
        self._directory = directory
        self._now_ns = now_ns
        self._touched = touched
        self._keep = keep
        self._events = events or ChangeEvents()
        self._strays = [key for key in self._events.unlisted_keys() if key.startswith(prefix)]
        """Keys at which objects do not count: they will have bytes of other names, or copies that no commit names
        yet."""
        self._prefix = prefix.encode("utf-8", "surrogatepass")
        self._outsiders: list[Entry] = []
        self.overriding: list[ObjectMeta] = []
        """Objects that count in place of bytes elsewhere unless they are copies: see `apply_overriding`."""
        self.ghosts: list[bytes] = []
        self._was_listed = tree.listing(directory) is not None
        self.differences: set[bytes] = set()
        """Names that this LIST shows differently from the last one, DIFFERENCES_MAX at most."""
        self.kept: set[bytes] = set()
        """Names of files that are being written here, where this LIST shows another object."""
        self.passed: set[bytes] = set()
        """Names that a change since this LIST began has removed, where it shows an object that does not count as
        removed."""
        self.changed_ns = 0
        """When a name was last added or removed since an earlier LIST, as far as that is known; 0 if none was."""
        self.first_cookie = tree.database.inode_next
        """Names that this LIST adds get cookies from here on."""
        self._confirmed = CookieRuns()
        self._confirmed_count = 0
        """How many confirmed names `remove_missing` has passed."""
        self.names = 0
        """Number of names found so far that were not known before, as a measure of progress."""
        self._hidden: dict[Hidden, set[int]] = {}
        self._shadowed: set[bytes] = set()
        """Names of files that directories of the same name hid at some time during this LIST."""
        self._places: dict[bytes, int] = {}
        """Cookies of files that a directory of the same name replaced: it keeps the cookie, which readers may have
        read."""
        self._pages = 0
        self._is_blank = False
        """True if the directory had no known names when the LIST began."""
        self._earlier: set[int] | None = None
        self._look_at_earlier()

    def _look_at_earlier(self) -> None:
        """Collect the names of a never listed directory that are known already, if they are few."""
        if self._was_listed:
            return
        earlier = list(islice(self._tree.children(self._directory), EARLIER_MAX + 1))
        if len(earlier) <= EARLIER_MAX:
            self._earlier = {entry.cookie for entry in earlier if entry.flags & Flag.LISTED or _needs_object(entry)}
            self._is_blank = not earlier and not self._strays

    @property
    def is_readable(self) -> bool:
        """Return whether a first listing has confirmed all names known before, so that it can be read: see
        `listing_flight`."""
        return self._pages > 0 and self._earlier is not None and not self._earlier

    def apply(self, names: PageNames) -> None:
        """Merge one page, and commit it. Raises CacheError."""
        for reason, component in names.hidden:
            self._hidden.setdefault(reason, set()).add(
                xxhash.xxh3_64_intdigest(component.encode("utf-8", "surrogatepass"))
            )
        directories = {found.name for found in names.found if found.meta is None and not self._is_ghost(found.name)}
        if directories or (names.found and self._has_removed()):
            self._is_blank = False
        batch = Batch()
        if self._is_blank:
            self._merge_first(batch, names.found)
        else:
            self._merge_all(batch, names.found, directories)
        if names.marker:
            self._mark(batch)
        self._db.commit_volatile(batch)
        for hidden in names.found if directories else ():
            if hidden.meta is not None and hidden.name in directories:  # after its directory, which hides it
                self._merge_alone(hidden)
        self._report_overridden()
        self._pages += 1
        self._metrics.listing_pages += 1

    def _has_removed(self) -> bool:
        """Return whether commits have removed any name below the directory."""
        return next(self._tree.tombstones.below(self._prefix), None) is not None

    def remove_missing(self) -> Iterator[None]:
        """Remove names that no page contained, in steps of some milliseconds. Raises CacheError."""
        confirmed = self._confirmed.ascending()
        at = next(confirmed, None)
        for some in self._tree.needing_object(self._directory, self.first_cookie):
            batch = Batch()
            for cookie in some:
                while at is not None and at < cookie:
                    self._confirmed_count += 1
                    at = next(confirmed, None)
                entry = None if at == cookie else self._tree.at(self._directory, cookie)
                if entry is None:
                    continue
                if entry.is_dir:
                    self._db.commit_volatile(batch)
                    batch = Batch()
                    yield from self._directory_vanished(entry)
                elif entry.name not in self._touched and _needs_object(entry):
                    self._drop_version(batch, entry)
                if len(batch.rows) >= STEP_ROWS:
                    self._db.commit_volatile(batch)
                    batch = Batch()
                    yield
            self._db.commit_volatile(batch)
            yield
        self._confirmed_count += at is not None
        for number, _ in enumerate(confirmed, 1):
            self._confirmed_count += 1
            if number % STEP_COOKIES == 0:
                yield

    def complete(self) -> Listing:
        """Record that the directory was listed at the time at which the merge began. Call `remove_missing` before.
        Raises CacheError."""
        batch = Batch()
        hidden = {reason: len(keys) for reason, keys in self._hidden.items()}
        files = self._tree.named_many((self._directory, name) for name in self._shadowed)
        shadowed = [file for file in files if file is not None and file.flags & Flag.SHADOWED]
        listing = Listing(
            self._now_ns,
            self.names + self._confirmed_count - sum(file.cookie < self.first_cookie for file in shadowed),
            hidden.get(Hidden.COMPONENT, 0),
            hidden.get(Hidden.NUL, 0),
            hidden.get(Hidden.LONG, 0),
            len(shadowed),
        )
        self._tree.set_listing(batch, self._directory, listing)
        self._db.commit_volatile(batch)
        self._metrics.listings += 1
        return listing

    def apply_one(self, name: bytes, found: Iterable[Found]) -> Iterator[None]:
        """Merge the answer about one name: ``found`` is its file, its directory, both or nothing. In steps as in
        `remove_missing`. Raises CacheError."""
        self._is_blank = False
        here = {item.sort_name: item for item in found}
        if name + b"/" in here and name not in self._touched and self._is_ghost(name):
            del here[name + b"/"]
            self.ghosts.append(name)
        for sort_name in (name, name + b"/"):  # removals first: a directory would hide the file that replaced it
            entry = self._tree.named(self._directory, sort_name)
            if sort_name == name + b"/" and name in self.ghosts:
                continue  # the caller looks below it
            if entry is None or sort_name in here:
                continue
            if entry.is_dir:
                yield from self._directory_vanished(entry)
            elif name not in self._touched and _needs_object(entry):
                batch = Batch()
                self._drop_version(batch, entry)
                self._db.commit_volatile(batch)
        for each in filter(None, map(here.get, (name + b"/", name))):
            self._merge_alone(each)
        self._report_overridden()

    def _report_overridden(self) -> None:
        outsiders, self._outsiders = self._outsiders, []
        for entry in outsiders:
            for listener in self._events.object_overridden:
                listener(entry)

    def apply_overriding(self, objects: Iterable[ObjectMeta]) -> None:
        """Merge those of `overriding` that count, as a HEAD has shown. Raises CacheError."""
        batch = Batch()
        for meta in objects:
            name = meta.key.encode("utf-8", "surrogatepass")[len(self._prefix) :]
            entry = self._tree.named(self._directory, name)
            if entry is None or name in self._touched:
                continue
            counts = _is_outside(entry) and not _is_hidden(entry, meta) and not self._is_ours(entry, meta)
            if counts and not self._is_object_removed(name, meta, known=entry):  # by a commit applied since
                self._replaced(batch, entry, meta)
        self._db.commit_volatile(batch)
        self._report_overridden()

    def add_directory(self, name: bytes) -> None:
        """Show a ghost directory, because a visible name is below it. Raises CacheError."""
        batch = Batch()
        if name not in self._touched and self._may_have(batch, name):
            self._show_directory(batch, self._tree.named(self._directory, name + b"/"), name)
        self._db.commit_volatile(batch)

    def drop_directory(self, name: bytes) -> Iterator[None]:
        """Remove a ghost directory, because no visible name is below it. In steps as in `remove_missing`."""
        entry = self._tree.named(self._directory, name + b"/")
        if entry is not None:
            yield from self._directory_vanished(entry)

    def _mark(self, batch: Batch) -> None:
        entry = self._tree.entry(self._directory)
        if entry is not None and not entry.flags & Flag.MARKER:
            self._tree.update(batch, msgspec.structs.replace(entry, flags=entry.flags | Flag.MARKER))

    def _drop_version(self, batch: Batch, entry: Entry) -> None:
        """Handle a file whose plain object no longer exists. A file that is being written here becomes one that
        replaces nothing, so that no commit names that object."""
        if not self._keep(entry):
            self._drop(batch, entry, self._prefix)
        elif entry.is_plain:
            self._note_unlisted(batch, entry, self._prefix)
            self._tree.update(batch, msgspec.structs.replace(entry, flags=entry.flags | Flag.LOCAL, etag="", stamp=0))

    def _drop(self, batch: Batch, entry: Entry, prefix: bytes) -> None:
        """Remove the row of a name. ``prefix`` is that of its directory."""
        self._note_unlisted(batch, entry, prefix)
        self._tree.remove(batch, entry)
        if entry.flags & Flag.SHADOWED:
            return
        self._tree.show_file(batch, entry)
        self._metrics.entries_removed += 1
        if self._was_listed and entry.parent == self._directory:
            self.changed_ns = self._now_ns
        self._differs(entry)

    def _note_unlisted(self, batch: Batch, entry: Entry, prefix: bytes) -> None:
        """Keep in the tombstone that an object is no longer listed: for other nodes its commit counts until another
        ends it."""
        if entry.is_plain and entry.etag and 0 < entry.stamp < PENDING:
            path = prefix + entry.name
            tombstone = with_unlisted(self._tree.tombstones.get(path), entry.etag, entry.stamp)
            self._tree.tombstones.write(batch, {path: tombstone})

    def _directory_vanished(self, entry: Entry) -> Iterator[None]:
        """Handle a directory without keys below it: the names below it that commits set stay, and so does it then."""
        if entry.name in self._touched:
            return
        is_shown = entry.flags & (Flag.LISTED | Flag.MARKER)
        if not is_shown and (entry.stamp or (yield from self._stays(entry.inode))):
            return
        levels = [array("Q", [entry.inode])]
        while levels[-1] and entry.name not in self._touched:
            levels.append((yield from self._remove_plain(entry.name, levels[-1])))
        for level in reversed(levels):
            yield from self._remove_empty(entry.name, level)
        current = self._tree.named(self._directory, entry.name + b"/")
        if current is not None and current.flags & is_shown and entry.name not in self._touched:
            batch = Batch()
            flags = current.flags & ~(Flag.LISTED | Flag.MARKER)
            self._tree.update(batch, msgspec.structs.replace(current, flags=flags))
            self._db.commit_volatile(batch)

    def _stays(self, top: int) -> Generator[None, None, bool]:
        """Return whether some name below a directory exists whatever the LIST shows."""
        waiting, left = array("Q", [top]), CHILDREN_AT_ONCE
        while waiting:
            directory, after, is_whole = waiting.pop(), 0, False
            while not is_whole:
                passed = 0
                for child in islice(self._tree.children(directory, after), left):
                    passed, after = passed + 1, child.cookie
                    if child.is_dir and not child.stamp:
                        waiting.append(child.inode)
                    elif child.is_dir or self._keep(child) or not _needs_object(child):
                        return True
                is_whole = passed < left
                left -= passed + 1
                if left <= 0:
                    left = CHILDREN_AT_ONCE
                    yield
        return False

    def _remove_plain(self, top: bytes, level: Iterable[int]) -> Generator[None, None, array[int]]:
        """Remove the listed files of some directories at or below ``top``, a name of this one. Returns the directories
        in them."""
        below, batch, left = array("Q"), Batch(), CHILDREN_AT_ONCE
        for directory in level:
            prefix = self._prefix_of(directory)
            for children in chain(self._tree.children_in_steps(directory), [list[Entry]()]):
                for child in children:
                    if child.is_dir:
                        below.append(child.inode)
                    elif _needs_object(child) and not self._keep(child):
                        self._drop(batch, child, prefix)
                        self._add_difference(top)
                left -= len(children) + 1
                if left <= 0:
                    self._db.commit_volatile(batch)
                    yield
                    if top in self._touched:
                        return array("Q")
                    batch, left = Batch(), CHILDREN_AT_ONCE
        self._db.commit_volatile(batch)
        return below

    def _remove_empty(self, top: bytes, level: Iterable[int]) -> Iterator[None]:
        """Remove those directories of a level that no commit made and that are empty."""
        batch, left = Batch(), CHILDREN_AT_ONCE
        for directory in level:
            if top in self._touched:
                break
            entry = self._tree.entry(directory)
            if entry is not None and not entry.stamp and next(self._tree.children(directory), None) is None:
                self._drop(batch, entry, b"")
            left -= 1
            if left <= 0:
                self._db.commit_volatile(batch)
                yield
                batch, left = Batch(), CHILDREN_AT_ONCE
        self._db.commit_volatile(batch)

    def _prefix_of(self, directory: int) -> bytes:
        return b"".join(name + b"/" for name in self._tree.path(directory) or ())

    def _merge(self, batch: Batch, found: Found) -> None:
        """Merge one found name, by the rules of docs/format.md, "Plain objects and commits".

        `FileRules._is_unknown` (`commits.file_rules`) applies commits to listed objects by the same rules."""
        entry = self._tree.named(self._directory, found.sort_name)
        if entry is not None and entry.cookie < self.first_cookie:
            self._confirmed.add(entry.cookie)
            if self._earlier is not None:
                self._earlier.discard(entry.cookie)
        if found.name in self._touched:
            if entry is None and found.meta is not None and found.meta.key not in self._strays:
                self.passed |= set() if self._is_object_removed(found.name, found.meta) else {found.name}
            return
        if entry is not None and entry.flags & Flag.SHADOWED:
            self._shadowed.add(found.name)
        if found.meta is None:
            self._merge_directory(batch, entry, found.name)
        elif entry is None:
            self._merge_new_file(batch, found.name, found.meta)
        elif entry.flags & Flag.ATTRIBUTED and not entry.stamp and self._is_object_removed(found.name, found.meta):
            self._gone(batch, entry)  # a commit set attributes of a version that no LIST had shown
        elif not (_is_it(entry, found.meta) or _is_hidden(entry, found.meta) or self._is_ours(entry, found.meta)):
            if self._is_object_removed(found.name, found.meta, known=entry):
                self._gone(batch, entry)
            elif _is_outside(entry) and len(self.overriding) < OVERRIDING_MAX and not self._keep(entry):
                self.overriding.append(found.meta)
            else:
                self._replaced(batch, entry, found.meta)

    def _merge_all(self, batch: Batch, found: list[Found], directories: set[bytes]) -> None:
        """Merge all but the files that these ``directories`` hide."""
        for each in found:
            if each.meta is None or each.sort_name not in directories:
                self._merge(batch, each)

    def _merge_alone(self, found: Found) -> None:
        batch = Batch()
        self._merge(batch, found)
        self._db.commit_volatile(batch)

    def _merge_first(self, batch: Batch, found: list[Found]) -> None:
        """Merge files into a directory of which only files are known, and none as removed; this is the fastest way."""
        files = [
            (each.sort_name, each.meta.size, each.meta.mtime_ns, each.meta.etag)
            for each in found
            if each.meta is not None and each.sort_name not in self._touched
        ]
        added = self._tree.insert_plain(batch, self._directory, files)
        self.names += added
        self._metrics.entries_added += added
        for each in found:
            if each.sort_name in self._touched:
                self._merge(batch, each)

    def _is_ours(self, entry: Entry, meta: ObjectMeta) -> bool:
        """Return whether the object is a copy of the name's own bytes, which a commit will name, or one that this node
        has stored, or may have, and has not committed yet."""
        if meta.key in self._strays:
            return True
        row = self._tree.objects.get(entry.place) if entry.place else None
        return row is not None and not entry.offset and (row.etag, row.size) == (meta.etag, meta.size)

    def _gone(self, batch: Batch, entry: Entry) -> None:
        """Handle a file whose key has an object that counts as removed: its own plain object no longer exists."""
        if entry.is_plain:
            self._drop_version(batch, entry)

    def _is_object_removed(self, name: bytes, meta: ObjectMeta, known: Entry | None = None) -> bool:
        return is_object_removed(self._tree, self._prefix + name, meta, known)

    def _merge_new_file(self, batch: Batch, name: bytes, meta: ObjectMeta) -> None:
        if self._is_object_removed(name, meta) or meta.key in self._strays:
            return
        is_hidden = self._tree.named(self._directory, name + b"/") is not None
        entry = self._tree.insert(
            batch, self._directory, name, Flag.SHADOWED if is_hidden else 0,
            size=meta.size, mtime_ns=meta.mtime_ns, ctime_ns=meta.mtime_ns, etag=meta.etag,
        )  # fmt: skip
        if is_hidden:
            self._shadowed.add(name)
        else:
            self._added(entry)

    def _merge_directory(self, batch: Batch, entry: Entry | None, name: bytes) -> None:
        if self._is_ghost(name):
            self.ghosts.append(name)
            if entry is not None and self._earlier is not None:
                self._earlier.add(entry.cookie)  # it may be removed, so nothing is read before that is known
        elif self._may_have(batch, name):
            self._show_directory(batch, entry, name)

    def _show_directory(self, batch: Batch, entry: Entry | None, name: bytes) -> None:
        if entry is None:
            self._insert_directory(batch, name)
        elif not entry.flags & Flag.LISTED:
            self._tree.update(batch, msgspec.structs.replace(entry, flags=entry.flags | Flag.LISTED))

    def _is_ghost(self, name: bytes) -> bool:
        """Return whether a directory that a LIST shows may contain nothing but removed names."""
        entry = self._tree.named(self._directory, name + b"/")
        if entry is not None and not self._is_bare(entry):
            return False
        return next(self._tree.tombstones.below(self._prefix + name + b"/"), None) is not None

    def _is_bare(self, directory: Entry) -> bool:
        """Return whether no commit made the directory, and it is known to contain only directories of this kind, down
        to ones that were empty when they were listed.

        In a directory that was never listed, a plain object that a commit named may no longer exist: its first file
        stands for all."""
        levels, entry = list[_Level](), directory
        while True:
            if entry.stamp:
                return False
            is_listed = self._tree.listing(entry.inode) is not None
            levels.append(_Level(self._tree.children(entry.inode), is_listed, is_listed))
            while (child := next(levels[-1].children, None)) is None or not child.is_dir:
                ended = levels.pop()
                stands_for_all = child is not None and _needs_object(child) and not self._keep(child)
                if not (ended.is_known if child is None else stands_for_all and not ended.is_listed):
                    return False
                if not levels:
                    return True
                levels[-1].is_known = True
            entry = child

    def _may_have(self, batch: Batch, name: bytes) -> bool:
        """Make room for a directory: it hides the file of its name. Returns False if that is being written here."""
        file = self._tree.named(self._directory, name)
        if file is None or file.flags & Flag.SHADOWED:
            return True
        if self._keep(file):
            return False
        hidden = msgspec.structs.replace(file, flags=file.flags | Flag.SHADOWED)
        if file.cookie < self.first_cookie:
            self._tree.update(batch, hidden)
        else:
            self._places[name] = file.cookie
            self._tree.detach(batch, file)
            self._tree.attach(batch, hidden, self._directory, name)
        self._shadowed.add(name)
        self._events.invalidate_name(self._directory, name)
        return True

    def _insert_directory(self, batch: Batch, name: bytes) -> None:
        flags, now_ns = Flag.DIRECTORY | Flag.LISTED, self._now_ns
        self._added(
            self._tree.insert(
                batch, self._directory, name, flags,
                cookie=self._places.pop(name, 0), mtime_ns=now_ns, ctime_ns=now_ns,
            )
        )  # fmt: skip

    def _added(self, entry: Entry) -> None:
        self.names += 1
        self._metrics.entries_added += 1
        if self._was_listed:
            self.changed_ns = max(self.changed_ns, entry.ctime_ns)  # its LastModified
            self._differs(entry)

    def _differs(self, entry: Entry) -> None:
        if entry.parent == self._directory:
            self._add_difference(entry.name)
        self._events.invalidate_name(entry.parent, entry.name)

    def _add_difference(self, name: bytes) -> None:
        if len(self.differences) < DIFFERENCES_MAX:
            self.differences.add(name)

    def _replaced(self, batch: Batch, entry: Entry, meta: ObjectMeta) -> None:
        if self._keep(entry):
            self.kept.add(entry.name)
            return
        is_outside = _is_outside(entry)
        fresh = Entry(
            entry.parent, entry.cookie, entry.name, entry.inode,
            entry.flags & Flag.SHADOWED | (Flag.OVERRIDING if is_outside else entry.flags & Flag.OVERRIDING),
            size=meta.size, mtime_ns=meta.mtime_ns, ctime_ns=meta.mtime_ns, etag=meta.etag,
        )  # fmt: skip
        renewed = self._tree.renew_inode(batch, fresh)
        if fresh.flags & Flag.OVERRIDING:  # no commit tells of the object, or of the one before it
            self._outsiders.append(renewed)
        if is_outside:
            self._bury_overridden(batch, entry)
        else:
            self._note_unlisted(batch, entry, self._prefix)
        self._metrics.entries_changed += 1
        self._differs(entry)

    def _bury_overridden(self, batch: Batch, entry: Entry) -> None:
        """Bury a file elsewhere that an object has replaced. The object that it hid stays gone: a writer that puts the
        same bytes there again has to say so. If the new object goes by an older commit, the commit of the file is
        applied again (`Application`)."""
        path, floor = self._prefix + entry.name, entry.stamp if entry.stamp < PENDING else 0
        tombstone = bury(self._tree.tombstones.get(path), floor=floor, etag=entry.etag, at=entry.stamp)
        self._tree.tombstones.write(batch, {path: tombstone})


def is_object_removed(
    tree: Tree, path: bytes, meta: ObjectMeta, known: Entry | None, *, is_newer_than_pending: bool = False
) -> bool:
    """Return whether an object at a path, of which ``known`` is the file, counts as removed. If a commit says that the
    file is the object at its key, only an object that a commit named does. ``is_newer_than_pending``: no change that is
    in no commit yet removes it."""
    tombstone = tree.tombstones.get(path)
    if tombstone is None:
        return False
    if is_newer_than_pending:
        tombstone = tombstone.committed
    is_told = known is not None and known.is_plain and known.stamp > 0
    return tombstone.hides(meta.etag, meta.mtime_ns, is_told=is_told)


def _is_outside(entry: Entry) -> bool:
    """Return whether a commit says that the name is not the plain object at its key."""
    return entry.stamp > 0 and not entry.is_plain


@dataclass(slots=True)
class _Level:
    """A directory on the way down. ``is_known``: it was listed, or a bare directory is known in it."""

    children: Iterator[Entry]
    is_listed: bool
    is_known: bool


def _needs_object(entry: Entry) -> bool:
    """Return whether the entry exists only as long as a LIST shows its object. An uncommitted change made here
    stays."""
    return entry.is_local or (entry.is_plain and entry.stamp < PENDING)


def _is_it(entry: Entry, meta: ObjectMeta) -> bool:
    """Return whether the entry is this plain object."""
    return entry.is_plain and (entry.etag, entry.size) == (meta.etag, meta.size)


def _is_hidden(entry: Entry, meta: ObjectMeta) -> bool:
    """Return whether a commit that knew this plain object, or is newer, says that the name is another file."""
    if entry.stamp >= PENDING:
        return True
    if not entry.stamp or entry.is_plain:
        return False
    return entry.etag == meta.etag or meta.mtime_ns + NS <= entry.stamp
