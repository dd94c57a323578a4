"""Journals changes of names for the committer, on behalf of every operation that changes a name.

A change is in effect on this node when the call returns, and in the store a second later, or with a pack
(`Committer`). What always holds: under write-back, a change waits for the versions acknowledged before it, unless it
only makes directories or sets attributes. A path that no other node would read is refused before it is journaled. A
crash leaves the committer's journal. Trio thread only.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.record import Mkdir, SetAttr
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue


class NameChanges:
    """Journals changes of names; see the module's head."""

    def __init__(self, namespace: Namespace, committer: Committer, writeback: WriteBackQueue, clock: Clock) -> None:
        self._ns, self._committer, self._writeback, self._clock = namespace, committer, writeback, clock

    def is_visible(self, path: str) -> bool:
        """Return whether a commit of this node whose answer was lost may show something under the path."""
        return self._committer.may_have(path)

    def enqueue_all(
        self, builder: ChangeBuilder, doomed: list[Deletion] | None = None, batch: Batch | None = None
    ) -> None:
        """As `enqueue`, for the operations that a builder gathered."""
        self.enqueue(msgspec.structs.replace(builder.change(), doomed=doomed or []), batch)

    def enqueue(self, change: Change, batch: Batch | None = None) -> None:
        """Journal a change, in one write with ``batch``, and apply it here. Raises CacheError, and
        FileError(ENAMETOOLONG) for a path that no other node would read."""
        self._ns.keys.check_paths([each.path for each in change.operations])
        if len(self._writeback):
            shown = [each.path for each in change.operations if not isinstance(each, Mkdir | SetAttr)]
            if any(self._writeback.is_for(path) for path in shown):
                change = msgspec.structs.replace(change, after=self._writeback.sequence)
        self._committer.enqueue(change, batch)

    async def flush(self) -> None:
        """Commit every change of a name that was made before, and return when it is in the store. Raises LakeError."""
        while self._committer.held_until:
            await self._writeback.drain(list(self._writeback.items))
        await self._committer.flush()

    async def announce(self) -> None:
        """Announce plain objects that were stored before. If that fails, other nodes see them when they list their
        directories."""
        with suppress(LakeError):
            await self._committer.flush_announcements()

    # -- what the removal of a name entails

    def hidden_parent(self, leaving: Entry) -> tuple[str, Entry] | None:
        """Return a name's directory, with its path, if only the name makes it visible to other nodes; else None."""
        above = None if leaving.parent == ROOT_INODE else self._ns.tree.entry(leaving.parent)
        if above is None or above.stamp or above.flags & Flag.MARKER:
            return None
        others = (child for child in self._ns.tree.children(leaving.parent) if child.cookie != leaving.cookie)
        return (self._ns.path_of(above), above) if all(child.flags & Flag.LOCAL for child in others) else None

    def keep_parent(self, builder: ChangeBuilder, leaving: Entry) -> None:
        """Add an operation that makes the name's directory, if other nodes would not see it without the name."""
        kept = self.hidden_parent(leaving)
        if kept is not None:
            builder.mkdir(*kept)

    def orphaned(self, path: str, entry: Entry) -> list[Deletion]:
        """Return the plain objects that may be unreferenced once the name is removed."""
        if entry.is_plain:
            return [Deletion(path, entry.etag)]
        doomed = [Deletion(path, entry.etag)] if entry.etag else []
        row = self._ns.tree.objects.get(entry.place) if entry.place else None
        if row is not None and not row.is_pack:
            doomed.append(Deletion(row.key, row.etag))
        return doomed

    # -- attributes of entries that are not being written

    def set_attributes(self, entry: Entry, xattrs: dict[str, bytes] | None = None) -> Entry:
        """Journal the entry's mode, owner and mtime; ``xattrs`` None keeps those that it has. Returns the new row."""
        builder = ChangeBuilder(self._ns.tree)
        builder.set_attributes(self._ns.path_of(entry), entry, xattrs)
        self.enqueue_all(builder)
        self.mark_changed(entry.inode)
        return self._ns.tree.entry(entry.inode) or entry

    def mark_changed(self, inode: int) -> None:
        """Set the ctime of a directory or symbolic link to now; the kernel keeps that of files."""
        entry = self._ns.tree.entry(inode)
        if entry is not None and entry.flags & (Flag.DIRECTORY | Flag.SYMLINK):
            batch = Batch()
            self._ns.tree.update(batch, msgspec.structs.replace(entry, ctime_ns=self._clock.wall_ns()))
            self._ns.record_beside(batch)
