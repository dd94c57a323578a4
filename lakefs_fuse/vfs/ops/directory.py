"""Creates and removes directories and symbolic links, and removes the names of files.

What always holds: the kernel serialises changes of one directory; everything learnt before an await is looked up again
after it. A change is in effect on this node, and journaled for the store (`NameChanges`), when the call returns. A name
that no other node can see (a file just created) is removed on this node only. Trio thread only. A crash leaves the
committer's journal.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import msgspec

from lakefs_fuse.commits.record import Mkdir, Remove, Symlink
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.meta.tombstones import NS
from lakefs_fuse.product import PLACEHOLDER
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.namespace.attributes import PERMISSIONS
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder
from lakefs_fuse.vfs.ops.clone import Clones
from lakefs_fuse.vfs.ops.link import Links
from lakefs_fuse.vfs.ops.name_changes import NameChanges
from lakefs_fuse.vfs.ops.rename import Renames
from lakefs_fuse.vfs.ops.unlink import Unlinker

TARGET_BYTES_MAX = 4095
"""Maximum for the target of a symbolic link: PATH_MAX without its NUL."""


class Directories:
    """Creates and removes names; see the module's head."""

    def __init__(
        self,
        namespace: Namespace,
        files: FileTable,
        names: NameChanges,
        unlinker: Unlinker,
        renames: Renames,
        clones: Clones,
        links: Links,
        clock: Clock,
    ) -> None:
        self._ns, self._files, self._names, self._unlinker = namespace, files, names, unlinker
        self.renames, self.clones, self.links, self._clock = renames, clones, links, clock

    # -- directories

    async def mkdir(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> Entry:
        path = await self._ns.ensure_absent(parent, name)
        self._ns.keys.checked_key(path + "/", PLACEHOLDER)
        builder = ChangeBuilder(self._ns.tree)
        builder.operations.append(Mkdir(path, mode & PERMISSIONS, uid, gid, self._clock.wall_ns()))
        self._names.enqueue_all(builder)
        entry = self._made(parent, name + b"/")
        self._ns.made(entry)
        return entry

    def _made(self, parent: int, sort_name: bytes) -> Entry:
        entry = self._ns.tree.named(parent, sort_name)
        if entry is None:
            raise FileError(errno.ENOSPC, f"{sort_name!r} is made once the disk of the cache directory has room")
        return entry

    async def rmdir(self, parent: int, name: bytes) -> None:
        entry, _ = await self._ns.lookup(parent, name)
        if entry is None:
            raise FileError(errno.ENOENT)
        if not entry.is_dir:
            raise FileError(errno.ENOTDIR)
        await self._ns.check_empty(entry)
        found = self._ns.tree.named(parent, name + b"/")
        if found is None or found.inode != entry.inode:  # another node renamed it meanwhile
            raise FileError(errno.ENOENT)
        if not self._ns.is_listed(entry.inode):
            raise FileError(errno.ESTALE)  # a name in it was announced meanwhile: the kernel looks it up again
        entry = found
        path = self._ns.path_of(entry)
        builder = ChangeBuilder(self._ns.tree)
        self._names.keep_parent(builder, entry)
        builder.operations.append(Remove(path, directory=True))
        # The marker is deleted even if it was not listed: some stores keep showing the prefix of a removed directory.
        self._names.enqueue_all(builder, [Deletion(key, "") for key in self._ns.keys.marker_keys(path)])
        self._unlinker.forget_name(entry)
        self._ns.touch(parent)

    # -- files and symbolic links

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove the name of a file or symbolic link. Programs that have the file open can still use it."""
        entry, _ = await self._ns.lookup(parent, name)
        if entry is None:
            raise FileError(errno.ENOENT)
        if entry.is_dir:
            raise FileError(errno.EISDIR)
        file = self._files.hold(entry.inode)
        if file is None:
            await self._unlink(entry)
        else:
            await self._unlinker.unlink(file, self._leave_name if file.has_lost_name else self._unlink)
        self._unlinker.forget_name(entry)

    async def _unlink(self, entry: Entry, late: Sequence[ObjectMeta] = ()) -> None:
        """Remove the row of a name, and journal the removal if other nodes may see the name. ``late`` are objects at
        the key other than the version of the row."""
        row = self._ns.tree.named(entry.parent, entry.name)
        if row is None:
            return
        batch = Batch()
        self._ns.touch(row.parent, batch)
        self._unlinker.journal_dropped(batch, self._files.get(entry.inode))
        path, beside = self._ns.path_of(row), list(late)
        if row.is_local and beside:
            row = msgspec.structs.replace(row, etag=beside.pop().etag)
        if row.is_local and not (row.etag or row.stamp or self._names.is_visible(path)):
            self._ns.changing(row.parent, row.name)
            self._ns.tree.remove(batch, row)
            self._ns.database.commit(batch)
            return
        builder = ChangeBuilder(self._ns.tree)
        self._names.keep_parent(builder, row)
        builder.remove(path, row, self._ns.own_etag(path))
        builder.operations += [Remove(path, hides=meta.etag, dated_s=meta.mtime_ns // NS) for meta in beside]
        doomed = self._names.orphaned(path, row) + [Deletion(path, meta.etag) for meta in beside]
        self._names.enqueue_all(builder, doomed, batch)

    async def _leave_name(self, entry: Entry, _: Sequence[ObjectMeta] = ()) -> None:
        """Take the name from the file of the entry: another client has it, and keeps it."""
        row = self._ns.tree.named(entry.parent, entry.name)
        if row is None:
            return
        self._ns.changing(row.parent, row.name)
        if row.is_local:
            batch = Batch()
            self._ns.tree.remove(batch, row)
            self._ns.tree.forget_listing(batch, row.parent)
            self._ns.database.commit(batch)
        else:
            self._ns.renew_inode(row)
        self._ns.touch(row.parent)
        self._ns.invalidate_name(row.parent, row.name)

    async def symlink(self, parent: int, name: bytes, target: bytes, uid: int, gid: int) -> Entry:
        if not 0 < len(target) <= TARGET_BYTES_MAX:
            raise FileError(errno.ENAMETOOLONG if target else errno.ENOENT)
        try:
            text = target.decode()
        except UnicodeDecodeError as error:
            raise FileError(errno.EILSEQ, "targets of symbolic links are UTF-8") from error
        path = await self._ns.ensure_absent(parent, name)
        builder = ChangeBuilder(self._ns.tree)
        hides = self._ns.own_etag(path)
        builder.operations.append(Symlink(path, text, uid, gid, self._clock.wall_ns(), hides=hides))
        self._names.enqueue_all(builder)
        self._ns.touch(parent)
        return self._made(parent, name)

    def readlink(self, entry: Entry) -> bytes:
        """Return the target of a symbolic link. Raises FileError: EINVAL for others, ESTALE if it was removed."""
        if not entry.is_symlink:
            raise FileError(errno.EINVAL)
        target = self._ns.tree.target(entry.inode)
        if not target:
            raise FileError(errno.ESTALE)
        return target
