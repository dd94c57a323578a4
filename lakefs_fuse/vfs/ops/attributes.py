"""Reads and sets the attributes of inodes, and asks the store for those that LIST does not return.

LIST returns no modes, owners or mtimes that programs chose. A HEAD does, once for each version (`Attributes.getattr`).
What always holds: a file in use has the attributes of its `OpenFile`, any other inode those of its row. Attributes set
on an inode without a name are kept in memory, for programs that still use it, and never stored. A crash leaves what was
journaled. Trio thread only.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable

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
"""An mtime set alone and this close to now comes from the kernel's own writes: no program chose it."""


class AttributeChange(msgspec.Struct, frozen=True):
    """The attributes that setattr sets; None leaves one unchanged. Sizes in bytes, times in ns since 1970."""

    size: int | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    atime_ns: int | None = None
    ctime_ns: int | None = None
    """The ctime that the kernel sent, by its own clock; None if it sent none."""
    kills_privileges: bool = False
    """Whether to drop suid and sgid of a file. A change of its owner or group always drops them."""
    chowned_by: int | None = None
    """Uid of the caller of a chown(2) that keeps owner and group; None for other requests. Such a call drops suid and
    sgid; if the file has either, the caller must be its owner or root. The kernel leaves both to the filesystem."""


class Attributes:
    """Reads and sets attributes; see the module's head."""

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
        """Return the entry of an inode as this node knows it. Raises FileError(ESTALE) if the inode has no name, is not
        in use, and is not among those that this node unlinked (`UnlinkedInodes`)."""
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
        """Return whether this node removed the last name of the inode. An inode that lost its name to a rename of this
        node may have another name, from a commit that was applied before; then it is not unlinked."""
        return inode in self._inodes and self._ns.tree.entry(inode) is None

    def directory(self, inode: int) -> Entry:
        """Return the entry of a directory. Raises FileError: ENOENT if this node removed it, ENOTDIR, ESTALE."""
        entry = self.entry(inode)
        if self.is_unlinked(inode):
            raise FileError(errno.ENOENT)
        if not entry.flags & Flag.DIRECTORY:
            raise FileError(errno.ENOTDIR)
        return entry

    def writable_directory(self, inode: int) -> Entry:
        """As `directory`, for a directory in which a name is to change. Also raises FileError(EROFS)."""
        self.refuse_read_only()
        return self.directory(inode)

    async def getattr(self, inode: int) -> Entry:
        """As `entry`, but ask the store, once for each version, for attributes that LIST does not return."""
        entry = self.entry(inode)
        asks = is_unasked(entry) and not self.is_unlinked(inode)
        if asks and not self._files.is_dirty(entry) and not self._has_no_marker(entry):
            await self._learn(inode, entry)
        return self.entry(inode)

    async def stat(self, inode: int) -> Entry:
        """As `getattr`; while the store is away, return what this node knows."""
        try:
            return self.entry(inode) if self._client.is_away else await self.getattr(inode)
        except Unavailable:
            return self.entry(inode)

    def _has_no_marker(self, entry: Entry) -> bool:
        """Return whether the entry is a listed directory for which no marker object was found."""
        return entry.is_dir and not entry.flags & Flag.MARKER and self._ns.tree.listing(entry.inode) is not None

    async def _learn(self, inode: int, entry: Entry) -> None:
        extent = None if entry.is_dir else self._ns.extent(entry)
        if extent is None:
            key = self._ns.keys.marker_keys(self._ns.key(entry).removesuffix("/"))[-1]
        else:
            key = extent.version.key
        try:
            meta: ObjectMeta | None = await self._client.head(key)
        except NotFound:
            meta = ObjectMeta(key, 0, "", 0) if entry.is_dir else None
        now = self.entry(inode)
        if not is_unasked(now):  # another request was answered first, and attributes may have been set since
            return
        if not now.is_dir and (extent is None or extent != self._ns.extent(now)):
            return
        if meta is not None and (extent is None or extent.version.etag == meta.etag):
            self._files.learn(now, meta)
        elif self.config.allow_other:  # the present version decides whether another user is refused
            await self._io.renew(now)

    def attribute_fresh_s(self, entry: Entry) -> float:
        """Return for how many seconds the kernel may cache the attributes of an entry."""
        inode = entry.inode
        if inode == ROOT_INODE or self._files.get(inode) is not None or self.is_unlinked(inode):
            return self.config.metadata_ttl_s
        fresh_s = max(self._ns.listing_fresh_s(entry.parent), self._ns.name_fresh_s(entry.parent, entry.name))
        if fresh_s <= 0 and entry.is_dir and self._files.is_dirty(entry):  # as LOOKUP answers
            return self.config.metadata_ttl_s
        return fresh_s

    async def setattr(
        self,
        inode: int,
        change: AttributeChange,
        handle: int | None = None,
        *,
        confirm: Callable[[], None] = lambda: None,
    ) -> Entry:
        """Set size, mode, owner and times of an inode. If it has a name and no open writer, a new size is stored (under
        write-back: acknowledged), and other changes are journaled, when this returns. ``confirm`` is called before
        anything is changed, and raises an error if the caller no longer waits. Raises LakeError."""
        self.refuse_read_only()
        entry = await self.getattr(inode)
        confirm()
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
                self._ns.keys.check_paths([file.key])
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
        """Return whether the file has refused writes or a draft that is not acknowledged. Setting its present size may
        then clear refused writes beyond it."""
        return file is not None and (file.is_incomplete or (file.draft is not None and not file.draft.sequence))

    def _change_draft(self, file: OpenFile, changed: Entry) -> None:
        """Change the attributes of a version that is not stored yet. Raises LakeError; then they are unchanged."""
        before, file.entry = file.entry, changed
        try:
            draft = self._drafts.draft(file)
            if draft.sequence:
                draft.save()
        except BaseException:
            file.entry = before
            raise

    def _without_privileges(self, entry: Entry, change: AttributeChange) -> AttributeChange:
        if (change.chowned_by, change.uid, change.gid) == (None, None, None) and not change.kills_privileges:
            return change
        mode = self._mode(entry) if change.mode is None else change.mode
        owner = self.config.default_uid if entry.uid == UNSET else entry.uid
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
        """Return the entry with the change. Setting an unset attribute to the default that it shows changes nothing."""
        now: dict[str, int] = {}
        mode = self.config.dir_mode if entry.is_dir else self.config.file_mode
        shown = {"mode": mode, "uid": self.config.default_uid, "gid": self.config.default_gid}
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
        """Set attributes of an inode without a name: programs that have it open see them, and they are never stored."""
        changed = msgspec.structs.replace(self._changed(entry, change), ctime_ns=self._ctime_ns(change))
        self._inodes.put(changed)
        file = self._files.get(entry.inode)
        if file is not None:
            file.entry = changed
        return changed

    def refuse_read_only(self) -> None:
        """Raise FileError(EROFS) on a read-only mount."""
        if self.config.read_only:
            raise FileError(errno.EROFS, f"{self.config.mountpoint} is mounted read-only")

    def is_setgid(self, directory: Entry) -> bool:
        """Return whether the directory is setgid: new names in it get its group, new directories are setgid as well."""
        return bool(file_type_and_mode(directory, self.config) & stat.S_ISGID)

    def gid_in(self, directory: Entry, gid: int) -> int:
        """Return the group of a new name in the directory, made by a process of the group ``gid``."""
        if not self.is_setgid(directory):
            return gid
        return self.config.default_gid if directory.gid == UNSET else directory.gid


def file_type_and_mode(entry: Entry, config: MountConfig) -> int:
    """Return the st_mode of an entry; if its mode was never set, with the mount's default."""
    mode = entry.mode
    if mode == UNSET:
        mode = config.dir_mode if entry.is_dir else unasked_mode(config) if is_unasked(entry) else config.file_mode
    return entry.file_type | mode & ~stat.S_IFMT(0xFFFF)


def unasked_mode(config: MountConfig) -> int:
    """Return the permissions of a file whose mode the store was not asked for.

    With ``allow_other`` only the owner has any: the kernel sends GETATTR before it refuses another user, and the answer
    has the mode.
    """
    return config.file_mode & stat.S_IRWXU if config.allow_other else config.file_mode
