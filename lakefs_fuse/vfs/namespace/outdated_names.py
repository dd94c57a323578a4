"""Names that other nodes announced since their directory was listed: the store must be asked for these again.

What always holds (*an outdated listing says so*): the listing row of a directory with outdated names is dated 0, so
that a new daemon lists the directory again; the age of the listing for its other names is kept in memory. If the disk
refuses that date, memory counts all the same, but a new daemon then relies on the row. Once the store was asked for
each outdated name, the row gets its date back. Names in directories that were never listed are not kept, because no
listing counts there. Paths of directories are kept in any case: an announced object stays at its key when another
node's commit moves the directory away or removes it.

Trio thread only; what is here changes between two awaits. A crash leaves the rows.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.tree import Tree

DIRECTORIES_MAX = 4096
NAMES_MAX = 1024
"""Maximum outdated names of a directory; beyond, and in the directories announced longest ago, all names are
outdated."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outdated:
    """The names of one directory, which was last listed at ``listed_ns``."""

    listed_ns: int
    names: set[bytes] = field(default_factory=set)


class OutdatedNames:
    """See the module's head."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.directories: OrderedDict[int, _Outdated] = OrderedDict()
        """Outdated names by inode of the directory, at least one each. For readers."""
        self._announced: OrderedDict[str, None] = OrderedDict()

    def note_announced(self, path: str) -> None:
        """Record that another node has stored an object in the directory at a path."""
        while path:
            self._announced[path] = None
            self._announced.move_to_end(path)
            path = path.rpartition("/")[0]
        while len(self._announced) > DIRECTORIES_MAX:
            self._announced.popitem(last=False)

    def was_announced(self, path: str) -> bool:
        """Return whether another node has stored an object in or below the directory at a path."""
        return path in self._announced

    def of(self, directory: int) -> tuple[Collection[bytes], int]:
        """Return the outdated names of a directory, and when it was listed; (), 0 if all names are, or none is."""
        outdated = self.directories.get(directory)
        return ((), 0) if outdated is None else (outdated.names, outdated.listed_ns)

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
