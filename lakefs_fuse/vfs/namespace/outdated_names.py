"""Names that other nodes announced since their directory was listed: the store must be asked for these again.

What always holds (*an outdated listing says so*): the row of the listing of a directory with outdated names is dated 0,
so that a daemon that starts lists the directory again; what is kept here is how old the listing is for other names. If
the disk refuses that date, what is kept here counts all the same, but a daemon that starts then believes the row. Once
each outdated name was asked for by itself the row has its date again. Names of directories that were never listed
are not kept, as nothing is believed of them. The paths of directories are kept in either case: what was announced stays
where it was stored when another node's commit moves the directory away, or removes it.

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
"""Of each; of a directory with more, and of those announced longest ago, all names are outdated."""
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
        """By inode, each with one outdated name at least. For readers."""
        self._announced: OrderedDict[str, None] = OrderedDict()

    def note_announced(self, path: str) -> None:
        """Another node has stored something in the directory at a path."""
        while path:
            self._announced[path] = None
            self._announced.move_to_end(path)
            path = path.rpartition("/")[0]
        while len(self._announced) > DIRECTORIES_MAX:
            self._announced.popitem(last=False)

    def was_announced(self, path: str) -> bool:
        """Another node has stored something in, or below, the directory at a path."""
        return path in self._announced

    def of(self, directory: int) -> tuple[Collection[bytes], int]:
        """The outdated names of a directory, and when it was listed; none where all of it is outdated."""
        outdated = self.directories.get(directory)
        return ((), 0) if outdated is None else (outdated.names, outdated.listed_ns)

    def listed_ns(self, directory: int, name: bytes) -> int:
        """When an outdated directory was listed; 0 for a name that is outdated."""
        names, listed_ns = self.of(directory)
        return 0 if name in names else listed_ns

    def add(self, directory: int, *names: bytes) -> None:
        """Another node has stored these."""
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
        """The store was asked for a name since it was announced."""
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
