"""Changes of names on their way into commits: what every operation that changes a name shares.

A change is in effect on this node when the call returns, and in the store a second later, or with a pack
(`Committer`). What always holds: under write-back, what a change shows or takes away waits for what was acknowledged
before it; a path that no other node would read is refused before it is journaled. A crash leaves the committer's
journal. Trio thread only.
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
from lakefs_fuse.vfs.writeback.queue import WriteBack


class NameChanges:
    """See the module's head."""

    def __init__(self, namespace: Namespace, committer: Committer, writeback: WriteBack, clock: Clock) -> None:
        self._ns, self._committer, self._writeback, self._clock = namespace, committer, writeback, clock

    def is_visible(self, path: str) -> bool:
        """A commit that this node journaled may show something under the path."""
        return self._committer.may_have(path)

    def enqueue_all(
        self, builder: ChangeBuilder, doomed: list[Deletion] | None = None, batch: Batch | None = None
    ) -> None:
        """As `enqueue`, of what a builder gathered."""
        self.enqueue(msgspec.structs.replace(builder.change(), doomed=doomed or []), batch)

    def enqueue(self, change: Change, batch: Batch | None = None) -> None:
        """Journal a change, with ``batch``. Raises FileError(ENAMETOOLONG) for a path that no other node would read."""
        self._ns.check_paths([each.path for each in change.operations])
        if len(self._writeback):
            shown = [each.path for each in change.operations if not isinstance(each, Mkdir | SetAttr)]
            if any(self._writeback.is_for(path) for path in shown):
                change = msgspec.structs.replace(change, after=self._writeback.sequence)
        self._committer.enqueue(change, batch)

    async def flush(self) -> None:
        """Every change of a name made before is in the store when this returns. Raises LakeError."""
        while self._committer.held_until:
            await self._writeback.drain(list(self._writeback.items))
        await self._committer.flush()

    async def announce(self) -> None:
        """Other nodes are told of plain objects stored before, unless the store does not take that now: then they see
        these when they list the directories."""
        with suppress(LakeError):
            await self._committer.flush_announcements()

    # -- what a change of one name needs beside it

    def hidden_parent(self, leaving: Entry) -> tuple[str, Entry] | None:
        """The directory of a name, with its path, if only that name makes it visible to others."""
        above = None if leaving.parent == ROOT_INODE else self._ns.tree.entry(leaving.parent)
        if above is None or above.stamp or above.flags & Flag.MARKER:
            return None
        others = (child for child in self._ns.tree.children(leaving.parent) if child.cookie != leaving.cookie)
        return (self._ns.path_of(above), above) if all(child.flags & Flag.LOCAL for child in others) else None

    def keep_parent(self, builder: ChangeBuilder, leaving: Entry) -> None:
        """A directory that only its last name made visible is made to stay before that name goes."""
        kept = self.hidden_parent(leaving)
        if kept is not None:
            builder.mkdir(*kept)

    def orphaned(self, path: str, entry: Entry) -> list[Deletion]:
        """Plain objects that nothing references once the name is gone."""
        if entry.is_plain:
            return [Deletion(path, entry.etag)]
        doomed = [Deletion(path, entry.etag)] if entry.etag else []
        row = self._ns.tree.objects.get(entry.place) if entry.place else None
        if row is not None and not row.is_pack:
            doomed.append(Deletion(row.key, row.etag))
        return doomed

    # -- attributes of what is not being written

    def set_attributes(self, entry: Entry, xattrs: dict[str, bytes] | None = None) -> Entry:
        """The entry's mode, owner and mtime as given; ``xattrs`` None keeps those that it has."""
        builder = ChangeBuilder(self._ns.tree)
        builder.set_attributes(self._ns.path_of(entry), entry, xattrs)
        self.enqueue_all(builder)
        self.mark_changed(entry.inode)
        return self._ns.tree.entry(entry.inode) or entry

    def mark_changed(self, inode: int) -> None:
        """The ctime of a directory or symbolic link is now; of a file the kernel keeps it."""
        entry = self._ns.tree.entry(inode)
        if entry is not None and entry.flags & (Flag.DIRECTORY | Flag.SYMLINK):
            batch = Batch()
            self._ns.tree.update(batch, msgspec.structs.replace(entry, ctime_ns=self._clock.wall_ns()))
            self._ns.database.commit(batch)
