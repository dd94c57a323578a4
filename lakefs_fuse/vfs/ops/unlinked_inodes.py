"""Inodes that this node took the last name from, and that the kernel may still hold.

The kernel writes the times of an inode back after its name is gone, and asks for the attributes of a directory that a
process still works in. Both get an answer here, with a link count of 0; what is set is dropped with the inode. Inodes
that another node removed are not here: ESTALE makes the kernel look the name up again. Of more than `INODES_MAX` the
oldest is forgotten, and is ESTALE from then on. Trio thread only; nothing survives a crash.
"""

from __future__ import annotations

from lakefs_fuse.meta.entry import Entry

INODES_MAX = 16_384
"""About 8 MiB. The kernel holds an unlinked inode for milliseconds, or for as long as a process has it open."""


class UnlinkedInodes:
    """See the module's head."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def __contains__(self, inode: int) -> bool:
        return inode in self._entries

    def get(self, inode: int) -> Entry | None:
        """The entry that the inode had last."""
        return self._entries.get(inode)

    def put(self, entry: Entry) -> None:
        """The name of the entry is gone, or its attributes are these now."""
        self._entries.pop(entry.inode, None)
        self._entries[entry.inode] = entry
        if len(self._entries) > INODES_MAX:
            del self._entries[next(iter(self._entries))]
