"""Names that other nodes announced since their directory was listed: the store must be asked for these again.

What always holds (*an outdated listing says so*): the listing row of a directory with outdated names is dated 0, so
that a new daemon lists the directory again; the age of the listing for its other names is kept in memory. If the disk
refuses that date, memory counts all the same, but a new daemon then relies on the row. Once the store was asked for
each outdated name, the row gets its date back. A name stays outdated while a file that is being written here stands in
for the object that the store shows: that is seen once the file has another name, or none. Names in directories that
were never listed are not kept, because no listing counts there. Paths of directories are kept in any case, the last
DIRECTORIES_MAX: an announced object stays at its key when the directory moves away or is removed, and the listing of
one that comes there says nothing of it.

Trio thread only; what is here changes between two awaits. A crash leaves the rows.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass, field
from itertools import islice

from lakefs_fuse.commits.record import STORED_MAX, Record, Remove
from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import ROOT_INODE, Flag
from lakefs_fuse.meta.tree import Tree

DIRECTORIES_MAX = 4096
NAMES_MAX = 1024
"""Maximum outdated names of a directory; beyond, and in the directories announced longest ago, all names are
outdated."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outdated:
    """The names of one directory, which was last listed at ``listed_ns``; 0 if that counts for none of its names."""

    listed_ns: int
    names: set[bytes] = field(default_factory=set)


class OutdatedNames:
    """See the module's head."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.directories: OrderedDict[int, _Outdated] = OrderedDict()
        """Outdated names by inode of the directory, at least one each. For readers."""
        self.announced: OrderedDict[str, bool] = OrderedDict()
        """Paths of directories in which other nodes have stored objects, and, with False, of those above. For readers.
        """

    def note_announced(self, path: str) -> None:
        """Record that another node has stored an object in the directory at a path."""
        is_stored_in = True
        while path:
            self.announced[path] = is_stored_in or self.announced.get(path, False)
            self.announced.move_to_end(path)
            path, is_stored_in = path.rpartition("/")[0], False
        while len(self.announced) > DIRECTORIES_MAX:
            self.announced.popitem(last=False)

    def announced_below(self, tops: Container[str]) -> Iterator[tuple[str, str]]:
        """Yield the directories in which other nodes have stored objects, at or below one of the paths ``tops``, each
        after that path."""
        for path, is_stored_in in self.announced.items():
            above = path if is_stored_in else ""
            while above:
                if above in tops:
                    yield above, path
                above = above.rpartition("/")[0]

    def left_behind(self, record: Record) -> Iterator[str]:
        """Yield directories that have lost the only names for which they exist, and those with announced names that a
        record moves or removes. Of a large record, only those that it moves."""
        operations = record.operations if len(record.operations) <= STORED_MAX else ()
        removed = [each for each in operations if isinstance(each, Remove)]
        above = dict.fromkeys(each.path.rpartition("/")[0] for each in removed)
        for emptied in map(self.emptied, above):
            if emptied:
                yield emptied
        gone = (path for path in above if path and self._tree.directory(path.encode(*schema.PATH)) is None)
        named = (each.path for each in removed if each.directory)
        for path in dict.fromkeys((*(source for source, _ in record.moves), *named, *gone)):
            if path in self.announced:
                yield path

    def emptied(self, path: str) -> str:
        """Return the topmost directory, at a path or above it, that a listing showed, that no commit makes, and in
        which there is no known name; empty if there is none."""
        emptied = ""
        while path:
            directory = self._tree.directory(path.encode(*schema.PATH))
            entry = None if directory is None else self._tree.entry(directory)
            if entry is not None:
                children = list(islice(self._tree.children(entry.inode), 2))
                if entry.stamp or entry.flags & Flag.MARKER or len(children) > bool(emptied):
                    break
                emptied = path
            path = path.rpartition("/")[0]
        return emptied

    def nearest(self, path: str) -> tuple[int, bytes]:
        """Return the deepest known directory on a path, and the next name on it; empty if the path is that
        directory."""
        directory = ROOT_INODE
        for name in path.encode(*schema.PATH).split(b"/") if path else ():
            entry = self._tree.named(directory, name + b"/")
            if entry is None:
                return directory, name
            directory = entry.inode
        return directory, b""

    def of(self, directory: int) -> tuple[Collection[bytes], int]:
        """Return the outdated names of a directory, and when it was listed; (), 0 if all names are, or none is."""
        outdated = self.directories.get(directory)
        return ((), 0) if outdated is None else (outdated.names, outdated.listed_ns)

    def among(self, directory: int, names: set[bytes]) -> set[bytes]:
        """Return those of some names in a directory that are outdated."""
        outdated, _ = self.of(directory)
        return names if b"" in outdated else {name for name in names if name in outdated}

    def listed_ns(self, directory: int, name: bytes) -> int:
        """Return when an outdated directory was listed; 0 for a name that is outdated."""
        names, listed_ns = self.of(directory)
        return 0 if name in names else listed_ns

    def add(self, directory: int, *names: bytes) -> None:
        """Record that another node has stored objects at or below these names."""
        if not names or (listing := self._tree.listing(directory)) is None:
            return
        outdated = self.directories.get(directory)
        if outdated is None:
            if not listing.at_ns:
                return
            outdated = self.directories[directory] = _Outdated(listing.at_ns)
        outdated.names.update(names)
        if b"" in names:
            outdated.listed_ns = 0
        if listing.at_ns:
            self._date(directory, 0)
        if len(outdated.names) > NAMES_MAX:
            del self.directories[directory]
        elif len(self.directories) > DIRECTORIES_MAX:
            self.directories.popitem(last=False)

    def discard(self, directory: int, name: bytes) -> None:
        """Record that the store was asked for a name since it was announced."""
        outdated = self.directories.get(directory)
        if outdated is None or name not in outdated.names:
            return
        outdated.names.discard(name)
        if not outdated.names:
            del self.directories[directory]
            self._date(directory, outdated.listed_ns)

    def name_if_emptied(self, directory: int) -> Iterator[tuple[int, bytes]]:
        """Yield a directory, as a name in the one above, if there are only removed names in it, and it exists because
        of a key that was visible when the one above was listed, or that a commit told of."""
        entry = self._tree.entry(directory)
        if entry is None or entry.stamp or entry.flags & Flag.MARKER:
            return
        if next(self._tree.children(directory), None) is None:
            above = b"".join(name + b"/" for name in self._tree.path(directory) or ())
            if next(self._tree.tombstones.below(above), None) is not None:
                yield entry.parent, entry.name

    def forget(self, directory: int) -> None:
        """Record that a directory was listed again, or must be."""
        self.directories.pop(directory, None)

    def _date(self, directory: int, at_ns: int) -> None:
        self._tree.drop_mirror(directory)
        batch = Batch()
        try:
            self._tree.date_listing(batch, directory, at_ns)
            self._tree.database.commit_volatile(batch)
        except CacheError as error:
            log.warning("a directory of which other nodes told could not be marked as outdated on the disk: %s", error)
