"""Attributes of inodes: what is known of them, what the store has to be asked for, and how they are set.

LIST does not tell modes, owners or chosen times; a HEAD does, once for each version (`Attributes.getattr`). What always
holds: attributes of a file that is being written are its `OpenFile`'s, of any other its row's; those set on an inode
without a name are kept for open handles and stored nowhere. A crash leaves what was journaled. Trio thread only.
"""

from __future__ import annotations

import errno
import os
import stat

import msgspec

from lakefs_fuse.config import MountConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import FileError, NotFound, Unavailable
from lakefs_fuse.meta.entry import ROOT_INODE, UNSET, Entry, Flag, kept_ns
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.open_file import OpenFile, OpenState
from lakefs_fuse.vfs.namespace.attributes import PERMISSIONS, without_privileges
from lakefs_fuse.vfs.namespace.metadata_fetch import is_unasked
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.ops.io import FileIO
from lakefs_fuse.vfs.ops.name_changes import NameChanges
from lakefs_fuse.vfs.ops.unlink import UnlinkedInodes

LATE_TIMES_NS = 60_000_000_000
"""An mtime set alone and this close to now is the kernel reporting its own writes, not a user choosing a time."""


class AttributeChange(msgspec.Struct, frozen=True):
    """What setattr is to set; None is left alone. Sizes in bytes, times in ns since 1970."""

    size: int | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    atime_ns: int | None = None
    ctime_ns: int | None = None
    """When that was asked for, by the kernel's clock; None where it is not said."""
    kills_privileges: bool = False
    """Drops suid and sgid of a file. A change of its owner always does."""
    chowned_by: int | None = None
    """The caller of a chown(2) that keeps owner and group. It drops suid and sgid; where a file has them the caller has
    to be its owner. The kernel leaves both to us."""


class Attributes:
    """See the module's head."""

    def __init__(
        self,
        config: MountConfig,
        client: StoreClient,
        namespace: Namespace,
        drafts: Drafts,
        io: FileIO,
        names: NameChanges,
        inodes: UnlinkedInodes,
        clock: Clock,
    ) -> None:
        self.config, self._client, self._ns, self._clock = config, client, namespace, clock
        self._files, self._drafts, self._io, self._names, self._inodes = drafts.files, drafts, io, names, inodes

    def entry(self, inode: int) -> Entry:
        """What is known of an inode. Raises FileError(ESTALE) where no name leads to it, it is not open, and this node
        did not unlink it a while ago."""
        file = self._files.get(inode)
        if file is not None:
            return file.current
        entry = self._ns.root if inode == ROOT_INODE else self._ns.tree.entry(inode)
        if entry is None:
            entry = self._inodes.get(inode)
        if entry is None:
            raise FileError(errno.ESTALE)
        return entry

    def is_unlinked(self, inode: int) -> bool:
        """No name leads to the inode any more, because this node took it away. An inode whose name this node replaced
        by a rename may have got another one from a commit that was applied first."""
        return inode in self._inodes and self._ns.tree.entry(inode) is None

    def directory(self, inode: int) -> Entry:
        """Raises FileError(ENOENT) for a directory that was removed."""
        entry = self.entry(inode)
        if self.is_unlinked(inode):
            raise FileError(errno.ENOENT)
        if not entry.flags & Flag.DIRECTORY:
            raise FileError(errno.ENOTDIR)
        return entry

    def writable_directory(self, inode: int) -> Entry:
        """As `directory`, of one in which a name is to change. Raises FileError(EROFS), too."""
        self.refuse_read_only()
        return self.directory(inode)

    async def getattr(self, inode: int) -> Entry:
        """As `entry`, but asks the store, once for each version, for attributes that LIST does not tell."""
        entry = self.entry(inode)
        asks = is_unasked(entry) and not self.is_unlinked(inode)
        if asks and not self._files.is_dirty(entry) and not self._has_no_marker(entry):
            await self._learn(inode, entry)
        return self.entry(inode)

    async def stat(self, inode: int) -> Entry:
        """As `getattr`; while the store is away, what is known."""
        try:
            return self.entry(inode) if self._client.is_away else await self.getattr(inode)
        except Unavailable:
            return self.entry(inode)

    def _has_no_marker(self, entry: Entry) -> bool:
        """A directory that was listed, and nothing but its children came to light."""
        return entry.is_dir and not entry.flags & Flag.MARKER and self._ns.tree.listing(entry.inode) is not None

    async def _learn(self, inode: int, entry: Entry) -> None:
        extent = None if entry.is_dir else self._ns.extent(entry)
        key = self._ns.marker_keys(self._ns.key(entry).removesuffix("/"))[-1] if extent is None else extent.version.key
        try:
            meta: ObjectMeta | None = await self._client.head(key)
        except NotFound:
            meta = ObjectMeta(key, 0, "", 0) if entry.is_dir else None
        now = self.entry(inode)
        if not is_unasked(now):  # another request answered first, and they may have been set since
            return
        if not now.is_dir and (extent is None or extent != self._ns.extent(now)):
            return
        if meta is not None and (extent is None or extent.version.etag == meta.etag):
            self._files.learn(now, meta)
        elif self.config.allow_other:  # the version there now decides whether another user is refused
            await self._io.renew(now)

    def attribute_fresh_s(self, entry: Entry) -> float:
        """For how many seconds the attributes of an entry may be remembered."""
        inode = entry.inode
        if inode == ROOT_INODE or self._files.get(inode) is not None or self.is_unlinked(inode):
            return self.config.metadata_ttl_s
        return max(self._ns.listing_fresh_s(entry.parent), self._ns.answer_fresh_s(entry.parent, entry.name))

    async def setattr(self, inode: int, change: AttributeChange, handle: int | None = None) -> Entry:
        """Size, mode, owner, times. Without an open writer the change is durable when this returns."""
        self.refuse_read_only()
        entry = await self.getattr(inode)
        if not entry.is_dir:
            change = self._without_privileges(entry, change)
        file = self._files.get(inode)
        if change.size == entry.size and not entry.is_dir and not self._is_being_written(file):
            change = msgspec.structs.replace(change, size=None)
        if change.size is None and self.is_unlinked(inode):
            return self._set_unlinked(entry, change)
        if change.size is None and (file is None or file.state is OpenState.CLEAN):
            return self._set_attributes(entry, change)
        if entry.is_dir:
            raise FileError(errno.EISDIR)
        file = self._files.acquire(entry, writer=False)
        try:
            if change.size is not None:
                await self._io.truncate(file, change.size)
                file.written(self._clock.wall_ns())
            changed = self._changed(file.entry, change)
            if changed != file.entry:
                kept = file.draft is None or self._is_chosen(change)
                flags = changed.flags | (Flag.MTIME_KEPT if kept else 0)
                changed = msgspec.structs.replace(changed, flags=flags, ctime_ns=self._ctime_ns(change))
                self._change_draft(file, changed)
            if file.draft is not None and not file.writers:
                await self._io.close(file)
        finally:
            await self._io.release(file, writer=False)
        return file.current

    @staticmethod
    def _is_being_written(file: OpenFile | None) -> bool:
        """Setting the size that it has may take back writes that were refused beyond it."""
        return file is not None and (file.is_incomplete or (file.draft is not None and not file.draft.sequence))

    def _change_draft(self, file: OpenFile, changed: Entry) -> None:
        """Attributes of a version that is not stored yet. Raises LakeError; then they are as they were."""
        before, file.entry = file.entry, changed
        try:
            draft = self._drafts.draft(file)
            if draft.sequence:
                draft.save(sync=True)
        except BaseException:
            file.entry = before
            raise

    def _without_privileges(self, entry: Entry, change: AttributeChange) -> AttributeChange:
        if (change.chowned_by, change.uid, change.gid) == (None, None, None) and not change.kills_privileges:
            return change
        mode = self._mode(entry) if change.mode is None else change.mode
        owner = self.default_uid if entry.uid == UNSET else entry.uid
        if change.chowned_by not in (None, 0, owner) and mode != without_privileges(mode):
            raise FileError(errno.EPERM)
        return msgspec.structs.replace(change, mode=without_privileges(mode))

    async def kill_privileges(self, entry: Entry) -> Entry:
        if self._mode(entry) == without_privileges(self._mode(entry)):
            return entry
        return await self.setattr(entry.inode, AttributeChange(kills_privileges=True))

    def _mode(self, entry: Entry) -> int:
        return file_type_and_mode(entry, self.config) & PERMISSIONS

    def _changed(self, entry: Entry, change: AttributeChange) -> Entry:
        """Only differences count: the defaults that an unset attribute shows are not a change when they are set."""
        now: dict[str, int] = {}
        mode = self.config.dir_mode if entry.is_dir else self.config.file_mode
        shown = {"mode": mode, "uid": self.default_uid, "gid": self.default_gid}
        for name, default in shown.items():
            wanted = getattr(change, name)
            if wanted is not None:
                wanted = wanted & PERMISSIONS if name == "mode" else wanted
                held = getattr(entry, name)
                if wanted != (default if held == UNSET else held):
                    now[name] = wanted
        if change.mtime_ns is not None and kept_ns(change.mtime_ns) != entry.mtime_ns:
            now["mtime_ns"] = kept_ns(change.mtime_ns)
        return msgspec.structs.replace(entry, **now)

    def _ctime_ns(self, change: AttributeChange) -> int:
        return self._clock.wall_ns() if change.ctime_ns is None else kept_ns(change.ctime_ns)

    def _is_chosen(self, change: AttributeChange) -> bool:
        if change.mtime_ns is None:
            return False
        return change.atime_ns is not None or abs(change.mtime_ns - self._clock.wall_ns()) > LATE_TIMES_NS

    def _set_attributes(self, entry: Entry, change: AttributeChange) -> Entry:
        if entry.inode == ROOT_INODE:
            raise FileError(errno.EPERM, "the root's attributes are options of the mount")
        changed = self._changed(entry, change)
        if changed == entry:
            self._names.mark_changed(entry.inode)
            return self.entry(entry.inode)
        return self._names.set_attributes(changed)

    def _set_unlinked(self, entry: Entry, change: AttributeChange) -> Entry:
        """Attributes of an inode without a name are seen by those who have it open, and stored nowhere."""
        changed = msgspec.structs.replace(self._changed(entry, change), ctime_ns=self._ctime_ns(change))
        self._inodes.put(changed)
        file = self._files.get(entry.inode)
        if file is not None:
            file.entry = changed
        return changed

    @property
    def default_uid(self) -> int:
        return os.getuid() if self.config.uid is None else self.config.uid

    @property
    def default_gid(self) -> int:
        return os.getgid() if self.config.gid is None else self.config.gid

    def refuse_read_only(self) -> None:
        """Raises FileError(EROFS)."""
        if self.config.read_only:
            raise FileError(errno.EROFS, f"{self.config.mountpoint} is mounted read-only")

    def is_setgid(self, directory: Entry) -> bool:
        """What is made in the directory gets its group, and directories that bit as well."""
        return bool(file_type_and_mode(directory, self.config) & stat.S_ISGID)

    def gid_of(self, entry: Entry) -> int:
        return self.default_gid if entry.gid == UNSET else entry.gid


def file_type_and_mode(entry: Entry, config: MountConfig) -> int:
    """st_mode of an entry, with the mount's defaults where none was set."""
    mode = entry.mode
    if mode == UNSET:
        mode = config.dir_mode if entry.is_dir else unasked_mode(config) if is_unasked(entry) else config.file_mode
    return entry.file_type | mode & ~stat.S_IFMT(0xFFFF)


def unasked_mode(config: MountConfig) -> int:
    """Permissions of a file whose object was not asked for its mode.

    With ``allow_other`` they are the owner's only: the kernel sends GETATTR before it refuses another user, and the
    answer tells the mode.
    """
    return config.file_mode & stat.S_IRWXU if config.allow_other else config.file_mode
