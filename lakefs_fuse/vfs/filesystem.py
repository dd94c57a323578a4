"""What each file operation means. Inodes and names in, entries and bytes out; errors are `LakeError` with an errno.

The kernel serialises changes of one directory; listings, publishing and other readers may run between any two awaits,
so whatever an operation learnt before an await it looks up again after it. Trio thread only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping

import msgspec

from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.deletion_queue import Deletions
from lakefs_fuse.config import MountConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import ConfigError, FileError, LakeError, NotFound, Unavailable
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.entry import ROOT_INODE, UNSET, Entry, Flag
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.product import PLACEHOLDER
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer, ObjectMeta
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.open_file import READING, Handle, OpenFile
from lakefs_fuse.vfs.namespace.attributes import PERMISSIONS, without_privileges
from lakefs_fuse.vfs.namespace.metadata_fetch import ask_all, is_unasked
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.ops.changes import Changes
from lakefs_fuse.vfs.ops.create import NewFiles
from lakefs_fuse.vfs.ops.io import FileIO
from lakefs_fuse.vfs.ops.open_leases import LENT, Lending, inode_of
from lakefs_fuse.vfs.status import Status
from lakefs_fuse.vfs.views import Unfinished
from lakefs_fuse.vfs.writeback.orphans import Recovery
from lakefs_fuse.vfs.writeback.queue import WriteBack
from lakefs_fuse.vfs.writeback.reconciliation import path_of

LATE_TIMES_NS = 60_000_000_000
"""An mtime set alone and this close to now is the kernel reporting its own writes, not a user choosing a time."""

DELETION_S_MAX = 5.0
"""Making a lake durable waits so long for one request that deletes objects which no name means any more."""


class AttributeChange(msgspec.Struct, frozen=True):
    """What setattr shall set; None is left alone. Sizes in bytes, times in ns since 1970."""

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


class Filesystem:
    """See the module's head. Made by `opening.open_filesystem`."""

    def __init__(
        self,
        config: MountConfig,
        metrics: Metrics,
        client: StoreClient,
        namespace: Namespace,
        drafts: Drafts,
        recovery: Recovery,
        committer: Committer,
        deletions: Deletions,
        writeback: WriteBack,
        status: Status,
        io: FileIO,
        changes: Changes,
        new_files: NewFiles,
        clock: Clock,
    ) -> None:
        self.config, self.metrics, self.events = config, metrics, namespace.events
        self._committer, self._deletions, self._writeback = committer, deletions, writeback
        self._client, self._ns, self._files = client, namespace, drafts.files
        self._drafts, self._io = drafts, io
        self._recovery, self._status, self._clock_ns = recovery, status, clock.wall_ns
        self.changes, self.new_files, self._unlinked = changes, new_files, changes.unlinked
        self.lending = Lending(self._files, namespace, io, self.entry)
        self._handles: dict[int, Handle] = {}
        self._handle_next = 1

    # -- names and attributes

    def entry(self, inode: int) -> Entry:
        """What is known of an inode. Raises FileError(ESTALE) where no name leads to it, it is not open, and this node
        did not unlink it a while ago."""
        file = self._files.get(inode)
        if file is not None:
            return file.current
        entry = self._ns.root if inode == ROOT_INODE else self._ns.tree.entry(inode)
        if entry is None:
            entry = self._unlinked.get(inode)
        if entry is None:
            raise FileError(errno.ESTALE)
        return entry

    def is_unlinked(self, inode: int) -> bool:
        """No name leads to the inode any more, because this node took it away."""
        return inode in self._unlinked

    def _directory(self, inode: int) -> Entry:
        """Raises FileError(ENOENT) for a directory that was removed."""
        entry = self.entry(inode)
        if self.is_unlinked(inode):
            raise FileError(errno.ENOENT)
        if not entry.is_dir:
            raise FileError(errno.ENOTDIR)
        return entry

    async def lookup(self, parent: int, name: bytes) -> tuple[Entry | None, float]:
        """The entry of a name (None: there is none), and for how many seconds that may be remembered. Raises
        FileError(ENAMETOOLONG) where there can be none."""
        self._directory(parent)
        entry, fresh_s = await self._ns.lookup(parent, name)
        if entry is None:
            self._ns.check_length(parent, name)
        if entry is not None and self.config.attributes == "objects":
            return await self.getattr(entry.inode), fresh_s
        return (self.entry(entry.inode) if entry else None), fresh_s

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
        key = self._marker_key(entry) if extent is None else extent.version.key
        try:
            meta: ObjectMeta | None = await self._client.head(key)
        except NotFound:
            meta = ObjectMeta(key, 0, "", 0) if entry.is_dir else None
        now = self.entry(inode)
        if not now.is_dir and (extent is None or extent != self._ns.extent(now)):
            return
        if meta is not None and (extent is None or extent.version.etag == meta.etag):
            self._files.learn(now, meta)
        elif self.config.allow_other:  # the version there now decides whether another user is refused
            await self._io.renew(now)

    def _marker_key(self, entry: Entry) -> str:
        key = self._ns.key(entry)
        return key if self._client.capabilities.lists_markers else key + PLACEHOLDER

    def attribute_fresh_s(self, entry: Entry) -> float:
        """For how many seconds the attributes of an entry may be remembered."""
        inode = entry.inode
        if inode == ROOT_INODE or self._files.get(inode) is not None or self.is_unlinked(inode):
            return self.config.metadata_ttl_s
        return max(self._ns.listing_fresh_s(entry.parent), self._ns.answer_fresh_s(entry.parent, entry.name))

    async def opendir(self, inode: int) -> None:
        """The directory can be read when this returns; its first listing may go on (see `more_names`)."""
        self._directory(inode)
        if self.config.attributes == "objects":
            await self._ns.ensure_listed(inode, strictly=False)
            await ask_all(self._ns.tree.children(inode), self.getattr)
        else:
            await self._ns.begin_reading(inode)

    async def more_names(self, inode: int, after: int) -> None:
        """What `readdir` answers now begins with the next entry beyond ``after``, if there is any."""
        await self._ns.wait_for_more(inode, after)

    def listing_fresh_s(self, inode: int) -> float:
        """For how many seconds more the listing of a directory may be remembered."""
        return self._ns.listing_fresh_s(inode)

    def readdir(self, inode: int, after: int) -> Iterator[Entry]:
        """Entries with cookies beyond ``after``, in cookie order, attributes of files being written included."""
        for entry in self._ns.tree.children(inode, after):
            if entry.flags & Flag.SHADOWED:
                continue
            file = self._files.get(entry.inode)
            yield entry if file is None else file.current

    @property
    def files_in_use(self) -> Mapping[int, OpenFile]:
        """By inode; not to be changed. Their rows, as a directory's reader sees them, are those of `row_of`."""
        return self._files.by_inode

    def data_bytes(self, entry: Entry) -> int:
        """Bytes of a file that are not known to be holes."""
        file = self._files.get(entry.inode)
        return self._files.holes.data_bytes(entry, file.draft if file is not None else None)

    def knows_holes_in(self, directory: int) -> bool:
        """Some file in it is known to have holes."""
        return self._files.holes.any_in(directory)

    def row_of(self, inode: int) -> bytes:
        """The row of a file in use, with the size that it has now."""
        return self._files.by_inode[inode].current.pack()

    async def setattr(self, inode: int, change: AttributeChange, handle: int | None = None) -> Entry:
        """Size, mode, owner, times. Without an open writer the change is durable when this returns."""
        self._refuse_read_only()
        entry = await self.getattr(inode)
        if not entry.is_dir:
            change = self._without_privileges(entry, change)
        file = self._files.get(inode)
        if change.size is None and self.is_unlinked(inode):
            return self._set_unlinked(entry, change)
        if change.size is None and (file is None or (file.draft is None and not file.unlinked)):
            return self._set_attributes(entry, change)
        if entry.is_dir:
            raise FileError(errno.EISDIR)
        file = self._files.acquire(entry, writer=False)
        try:
            if change.size is not None:
                await self._io.truncate(file, change.size)
                file.written(self._clock_ns())
            changed = self._changed(file.entry, change)
            if changed != file.entry:
                kept = file.draft is None or self._is_chosen(change)
                flags = changed.flags | (Flag.MTIME_KEPT if kept else 0)
                file.entry = msgspec.structs.replace(changed, flags=flags, ctime_ns=self._ctime_ns(change))
                draft = self._drafts.draft(file)
                if draft.accepted:
                    draft.save(sync=True)
            if file.draft is not None and not file.writers:
                await self._io.close(file)
        finally:
            await self._io.release(file, writer=False)
        return file.current

    def _without_privileges(self, entry: Entry, change: AttributeChange) -> AttributeChange:
        if (change.chowned_by, change.uid, change.gid) == (None, None, None) and not change.kills_privileges:
            return change
        mode = self._mode(entry) if change.mode is None else change.mode
        owner = self.default_uid if entry.uid == UNSET else entry.uid
        if change.chowned_by not in (None, 0, owner) and mode != without_privileges(mode):
            raise FileError(errno.EPERM)
        return msgspec.structs.replace(change, mode=without_privileges(mode))

    async def _kill_privileges(self, entry: Entry) -> Entry:
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
        if change.mtime_ns is not None and change.mtime_ns != entry.mtime_ns:
            now["mtime_ns"] = change.mtime_ns
        return msgspec.structs.replace(entry, **now)

    def _ctime_ns(self, change: AttributeChange) -> int:
        return self._clock_ns() if change.ctime_ns is None else change.ctime_ns

    def _is_chosen(self, change: AttributeChange) -> bool:
        if change.mtime_ns is None:
            return False
        return change.atime_ns is not None or abs(change.mtime_ns - self._clock_ns()) > LATE_TIMES_NS

    def _set_attributes(self, entry: Entry, change: AttributeChange) -> Entry:
        if entry.inode == ROOT_INODE:
            raise FileError(errno.EPERM, "the root's attributes are options of the mount")
        changed = self._changed(entry, change)
        if changed == entry:
            self.changes.note_changed(entry.inode)
            return self.entry(entry.inode)
        return self.changes.set_attributes(changed)

    def _set_unlinked(self, entry: Entry, change: AttributeChange) -> Entry:
        """Attributes of an inode without a name are seen by those who have it open, and stored nowhere."""
        changed = msgspec.structs.replace(self._changed(entry, change), ctime_ns=self._ctime_ns(change))
        self._unlinked.put(changed)
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

    def _refuse_read_only(self) -> None:
        if self.config.read_only:
            raise FileError(errno.EROFS)

    # -- changes of names

    async def mkdir(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> Entry:
        self._refuse_read_only()
        if self._is_setgid(above := self._directory(parent)):
            mode, gid = mode | stat.S_ISGID, self._gid(above)
        return await self.changes.mkdir(parent, name, mode, uid, gid)

    async def rmdir(self, parent: int, name: bytes) -> None:
        self._refuse_read_only()
        self._directory(parent)
        await self.changes.rmdir(parent, name)

    async def unlink(self, parent: int, name: bytes) -> None:
        """The name is gone here when this returns, and from the store soon after; who has the file open keeps it."""
        self._refuse_read_only()
        self._directory(parent)
        await self.changes.unlink(parent, name)

    async def rename(self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int = 0) -> None:
        """In the store when this returns, at once for every observer. ``flags`` as renameat2(2)."""
        self._refuse_read_only()
        self._directory(parent_old)
        self._directory(parent_new)
        await self.changes.rename(parent_old, name_old, parent_new, name_new, flags)

    async def symlink(self, parent: int, name: bytes, target: bytes, uid: int, gid: int) -> Entry:
        self._refuse_read_only()
        above = self._directory(parent)
        gid = self._gid(above) if self._is_setgid(above) else gid
        return await self.changes.symlink(parent, name, target, uid, gid)

    def _is_setgid(self, directory: Entry) -> bool:
        """What is made in the directory gets its group, and directories that bit as well."""
        return bool(file_type_and_mode(directory, self.config) & stat.S_ISGID)

    def _gid(self, entry: Entry) -> int:
        return self.default_gid if entry.gid == UNSET else entry.gid

    def readlink(self, inode: int) -> bytes:
        return self.changes.readlink(self.entry(inode))

    def xattr(self, inode: int, name: str) -> bytes:
        return self.changes.xattr(self.entry(inode), name)

    def xattr_names(self, inode: int) -> list[str]:
        return self.changes.xattr_names(self.entry(inode))

    async def set_xattr(self, inode: int, name: str, value: bytes | None) -> None:
        """``value`` None removes it."""
        self._refuse_read_only()
        self.changes.set_xattr(await self.getattr(inode), name, value)

    async def sync_directory(self, inode: int) -> None:
        """Every change of a name made before is in the store when this returns, and so is every file that write-back
        accepted at or below the directory. Raises LakeError."""
        if not self.is_unlinked(inode):
            await self._writeback.drain(self._writeback.below(self._ns.prefix(inode).removesuffix("/")))
        await self.sync_names()

    async def sync_names(self) -> None:
        """Every change of a name made before is in the store when this returns. Raises LakeError."""
        if self.config.read_only:
            return
        while self._committer.held_until:
            await self._writeback.drain(list(self._writeback.items))
        await self._committer.flush()

    # -- files

    def _new_handle(self, file: OpenFile, writable: bool, opener: int) -> int:
        number, self._handle_next = self._handle_next, self._handle_next + 1
        number |= 0 if writable else READING
        self._handles[number] = Handle(file, writable, Readahead(), opener)
        return number

    def handle(self, number: int) -> Handle:
        try:
            return self._handles[number]
        except KeyError:
            raise FileError(errno.EBADF) from None

    async def open(self, inode: int, flags: int, opener: int = 0, *, kills_privileges: bool = False) -> int:
        """A handle, pinned to the version that the name has now. Raises FileError(ESTALE) where that is not this
        inode any more; the kernel then looks the name up again."""
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if writable or flags & os.O_TRUNC:
            self._refuse_read_only()
        entry = self.entry(inode)
        if entry.is_dir:
            raise FileError(errno.EISDIR)
        if self._files.get(inode) is None:
            now, _ = await self._ns.lookup(entry.parent, entry.name)
            if now is None or now.inode != inode:
                raise FileError(errno.ESTALE)
            entry = now
        if writable or flags & os.O_TRUNC:
            entry = await self.getattr(inode)  # the next version takes over what this one's metadata says
        if kills_privileges:
            entry = await self._kill_privileges(entry)
        file = self._files.acquire(entry, writer=writable)
        try:
            if flags & os.O_TRUNC and file.current.size:
                await self._io.truncate(file, 0)
                file.written(self._clock_ns())
            elif not writable and file.draft is None:
                await self._io.check_version(file.entry)
        except BaseException:
            await self._io.release(file, writer=writable)
            raise
        return self._new_handle(file, writable, opener)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, uid: int, gid: int, opener: int = 0, *,
        kills_privileges: bool = False,
    ) -> tuple[int, Entry]:  # fmt: skip
        """Seen on this node at once, in the store when it is closed. A file that is there already may lose suid."""
        self._refuse_read_only()
        above = self._directory(parent)
        gid = self._gid(above) if self._is_setgid(above) else gid
        key = self.changes.checked_path(parent, name)
        exclusive = bool(flags & os.O_EXCL)
        if self._writeback.is_for(key):
            await self._writeback.wait_room(self.config.staging_timeout_s)
        known, _ = await self._ns.lookup(parent, name, ask=exclusive)
        if known is not None:
            if exclusive:
                raise FileError(errno.EEXIST)
            number = await self.open(known.inode, flags, opener, kills_privileges=kills_privileges)
            return number, self.entry(known.inode)
        if self._writeback.is_for(key) and self._ns.tree.listing(parent) is None:
            self._ns.list_soon(parent)  # so that names can be made while the store is away
        if_absent = exclusive and self._client.capabilities.put_if_absent
        file = self.new_files.make(parent, name, key, mode, uid, gid, if_absent=if_absent)
        return self._new_handle(file, True, opener), file.entry

    def hold(self, file: OpenFile, number: int, opener: int, *, closed_by_opener: bool = False) -> None:
        """Whoever has this handle, which was given out elsewhere and is counted, is a writer of the file."""
        self._handles[number] = Handle(file, True, Readahead(), opener, closed_by_opener)

    def is_handle(self, number: int) -> bool:
        return number in self._handles

    async def read(self, number: int, offset: int, length: int) -> Buffer:
        if number & LENT:
            return await self.lending.read(number, offset, length)
        handle = self.handle(number)
        return await self._io.read(handle.file, offset, length, handle.readahead)

    async def write(self, number: int, offset: int, data: Buffer, *, kills_privileges: bool = False) -> int:
        file = self.handle(number).file
        if kills_privileges:
            await self._kill_privileges(file.current)
        await self._io.write(file, offset, data)
        file.written(self._clock_ns())
        return len(data)

    async def flush(self, number: int) -> None:
        """What close() waits for: afterwards the bytes are in the store, or under write-back on the local disk, or the
        error is answered."""
        handle = self.handle(number)
        if handle.writable:
            await self._io.close(handle.file)

    async def fsync(self, number: int) -> None:
        await (self._publish_leased(number) if number & LENT else self._io.publish(self.handle(number).file))

    async def _publish_leased(self, number: int) -> None:
        file = self._files.acquire(self.entry(inode_of(number)), writer=False)
        try:
            await self._io.publish(file)
        finally:
            await self._io.release(file, writer=False)

    async def release(self, number: int) -> None:
        if number & LENT:
            await self.lending.release(number)
        handle = self._handles.pop(number, None)
        if handle is not None:
            await self._io.release(handle.file, writer=handle.writable)

    # -- what works on the whole lake

    @property
    def namespace(self) -> Namespace:
        return self._ns

    @property
    def database(self) -> Database:
        return self._ns.database

    async def look_again(self) -> None:
        """Everything that others have committed is in effect here when this returns. Raises LakeError."""
        await self._io.poll()

    # -- what the control socket asks

    def statistics(self) -> dict[str, object]:
        self._request_names()
        added = [listener() for listener in self.events.statistics_requested]  # may count, so before the rest
        return {key: value for each in (self._status.statistics(), *added) for key, value in each.items()}

    def unfinished(self) -> list[Unfinished]:
        self._request_names()
        return self._status.unfinished()

    def _request_names(self) -> None:
        for listener in self.events.names_requested:
            listener()

    async def make_durable(self, path: str = "") -> None:
        """Publish every file at or below ``path`` (relative to the root) that is not durable. Raises LakeError for
        the first that cannot be; the others are published all the same. Of the whole lake, objects whose names are gone
        are deleted if that does not take long: they are hidden, and the next mount goes on with them."""
        self._request_names()
        failed: LakeError | None = None
        below = path.strip("/")
        try:
            await self._writeback.drain(self._writeback.below(below))
        except LakeError as error:
            failed = error
        for file in self._files.dirty():
            ours = not below or file.key == below or file.key.startswith(below + "/")
            if ours and not (failed is not None and file.draft is not None and file.draft.accepted):
                if file.is_incomplete and not file.handles:
                    await self._io.set_aside(file)
                try:
                    await self._io.publish(file)
                except LakeError as error:
                    failed = failed or error
        for record in self._recovery.incomplete_below(below):
            message = f"{path_of(record)} is an orphan of which writes failed: see `lakefs-fuse orphans`"
            failed = failed or FileError(record.refused_errno, message)
        if failed is None:
            await self.sync_names()
        if failed is None and not below and not self.config.read_only:
            await self._deletions.hasten(DELETION_S_MAX)
        if failed is not None:
            raise failed

    async def refresh(self) -> dict[str, object]:
        """Raises ConfigError: only an immutable mount is moved on by hand."""
        raise ConfigError(
            f"{self.config.mountpoint} is not an immutable mount: it shows by itself what others change, within "
            f"--refresh ({self.config.refresh_s:g} s) and --metadata-ttl ({self.config.metadata_ttl_s:g} s)"
        )

    async def finish_orphan(self, orphan_id: str, *, incomplete: bool = False) -> None:
        self._refuse_read_only()
        await self._recovery.finish(orphan_id, incomplete=incomplete)

    async def abort_orphan(self, orphan_id: str) -> None:
        self._refuse_read_only()
        await self._recovery.abort(orphan_id)


def file_type_and_mode(entry: Entry, config: MountConfig) -> int:
    """st_mode of an entry, with the mount's defaults where nobody has said."""
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
