"""Protocol adapter only: pyfuse3 requests to `fs.Filesystem` calls, entries to attributes, errors to errnos.

The kernel's write-back cache is on: it sends large writes, keeps what was written in the page cache, and owns the size
and the mtime of a file for as long as it knows the inode. That is right because another version of a file is another
inode here. Timeouts are what is left of the TTL of the listing that an answer came from.
No exception but FUSEError leaves a handler: anything else would end the daemon.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

from lakefs_fuse.fuse import direntries, hooks  # isort: skip  (loaded before pyfuse3, whose calls they receive)
import pyfuse3
import trio

from lakefs_fuse.errors import LakeError
from lakefs_fuse.fs.filesystem import AttributeChange, Filesystem, Handle, file_type_and_mode
from lakefs_fuse.fuse.rows_ahead import RowsAhead
from lakefs_fuse.meta.entry import UNSET, Entry
from lakefs_fuse.metrics import Metrics

DIRECTORY_BLKSIZE = 1 << 20
"""glibc reads directories in buffers of st_blksize, and newer kernels ask for as much at once."""
FILE_BLKSIZE = 128 << 10
STATFS_BLOCK = 1 << 20
STATFS_BLOCKS = 1 << 30
"""A lake has no size: 1 PiB is shown as free, so that nobody's free-space check refuses to write."""
INVALIDATIONS_MAX = 4096

P = ParamSpec("P")
T = TypeVar("T")
Handler: TypeAlias = "Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]]"
UNREMARKABLE = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ESTALE, errno.ENODATA, errno.EOPNOTSUPP)
"""Answers that are everyday life, and not worth a line in the log."""
log = logging.getLogger(__name__)


def upcall(name: str) -> Callable[[Handler[P, T]], Handler[P, T]]:
    """Count a request and answer its errors."""

    def decorate(handler: Handler[P, T]) -> Handler[P, T]:
        @functools.wraps(handler)
        async def answered(self: Operations, *args: P.args, **kwargs: P.kwargs) -> T:
            self.upcalls[name] += 1
            try:
                return await handler(self, *args, **kwargs)
            except pyfuse3.FUSEError:
                raise
            except LakeError as error:
                if error.errno not in UNREMARKABLE:
                    log.warning("%s: %s", name, error)
                raise pyfuse3.FUSEError(error.errno) from error
            except Exception as error:
                log.exception("%s failed", name)
                raise pyfuse3.FUSEError(errno.EIO) from error

        return cast("Handler[P, T]", answered)

    return decorate


class Operations(pyfuse3.Operations):
    """One coroutine for each kind of request; see the module's head."""

    supports_dot_lookup = False
    enable_writeback_cache = True
    enable_acl = False

    def __init__(self, fs: Filesystem, metrics: Metrics) -> None:
        super().__init__()
        self.fs = fs
        self.config = fs.config
        self.metrics = metrics
        self.upcalls = metrics.upcalls
        send, receive = trio.open_memory_channel[tuple[int, bytes]](INVALIDATIONS_MAX)
        self._invalid, self._invalid_queue = send, receive
        fs.on_change = self._forget_name
        fs.on_statistics = self._count_answered
        self._answered = 0
        self._nothing = pyfuse3.EntryAttributes()
        self._opens_directories = False
        """The kernel says when a directory is opened; else its first READDIR is that (and ``fh`` the inode)."""
        self._rows_ahead = RowsAhead(fs.namespace.tree)
        self._shown = direntries.Shown(
            fs.default_uid, fs.default_gid, self.config.dir_mode, self.config.file_mode, DIRECTORY_BLKSIZE, FILE_BLKSIZE
        )
        # An answer that is nobody's: whether what pyfuse3 adds to one goes through the library.
        pyfuse3.readdir_reply(pyfuse3.ReaddirToken(), pyfuse3.FileNameT(b"x"), self._nothing, 1)
        self._writes_rows = direntries.is_reached()

    def _count_answered(self) -> None:
        """Requests that the hooks answered are requests, too."""
        answered = hooks.xattrs_answered()
        self.upcalls["getxattr"] += answered - self._answered
        self._answered = answered

    # -- telling the kernel

    def _forget_name(self, parent: int, name: bytes) -> None:
        """A backlog is dropped: what the kernel knows ends with the TTL in any case."""
        try:
            self._invalid.send_nowait((parent, name))
        except (trio.WouldBlock, trio.BrokenResourceError):
            pass

    async def send_invalidations(self) -> None:
        """Runs beside the session. In a thread: the kernel may make it wait for a request that is being served."""
        async for parent, name in self._invalid_queue:
            try:
                await trio.to_thread.run_sync(
                    pyfuse3.invalidate_entry, pyfuse3.InodeT(parent), pyfuse3.FileNameT(name), abandon_on_cancel=True
                )
                self.metrics.namespace.invalidations += 1
            except OSError:
                pass  # the kernel does not know the name

    # -- names and attributes

    def _attributes(self, entry: Entry, timeout_s: float) -> pyfuse3.EntryAttributes:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = pyfuse3.InodeT(entry.inode)
        attributes.entry_timeout = attributes.attr_timeout = timeout_s
        attributes.st_mode = pyfuse3.ModeT(file_type_and_mode(entry, self.config))
        attributes.st_nlink = 1
        attributes.st_uid = self.fs.default_uid if entry.uid == UNSET else entry.uid
        attributes.st_gid = self.fs.default_gid if entry.gid == UNSET else entry.gid
        attributes.st_size = entry.size
        attributes.st_blocks = -(-entry.size // 512)
        attributes.st_blksize = DIRECTORY_BLKSIZE if entry.is_dir else FILE_BLKSIZE
        attributes.st_mtime_ns = attributes.st_atime_ns = entry.mtime_ns
        attributes.st_ctime_ns = entry.ctime_ns
        return attributes

    @upcall("lookup")
    async def lookup(self, parent_inode: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
        entry, fresh_s = await self.fs.lookup(parent_inode, name)
        if entry is not None:
            return self._attributes(entry, fresh_s)
        if fresh_s <= 0:
            raise pyfuse3.FUSEError(errno.ENOENT)
        absent = pyfuse3.EntryAttributes()
        absent.st_ino = pyfuse3.InodeT(0)
        absent.entry_timeout = fresh_s
        return absent

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self.upcalls["forget"] += 1

    @upcall("getattr")
    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        entry = await self.fs.stat(inode)
        return self._attributes(entry, self.fs.attribute_fresh_s(entry))

    @upcall("setattr")
    async def setattr(
        self, inode: int, attr: Any, fields: pyfuse3.SetattrFields, fh: int | None, ctx: object
    ) -> pyfuse3.EntryAttributes:
        change = AttributeChange(
            size=attr.st_size if fields.update_size else None,
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
        )
        entry = await self.fs.setattr(inode, change, fh)
        return self._attributes(entry, self.fs.attribute_fresh_s(entry))

    @upcall("getxattr")
    async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
        return self.fs.xattr(inode, os.fsdecode(name))

    @upcall("listxattr")
    async def listxattr(self, inode: int, ctx: object) -> Sequence[bytes]:
        return [os.fsencode(name) for name in self.fs.xattr_names(inode)]

    @upcall("setxattr")
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: object) -> None:
        await self.fs.set_xattr(inode, os.fsdecode(name), value)

    @upcall("removexattr")
    async def removexattr(self, inode: int, name: bytes, ctx: object) -> None:
        await self.fs.set_xattr(inode, os.fsdecode(name), None)

    # -- directories

    @upcall("opendir")
    async def opendir(self, inode: int, ctx: object) -> int:
        self._opens_directories = True
        await self.fs.opendir(inode)
        return inode

    @upcall("readdir")
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if not start_id and not self._opens_directories:
            await self.fs.opendir(fh)
        await self.fs.more_names(fh, start_id)
        fresh_s = self.fs.listing_fresh_s(fh)
        if self._writes_rows:
            self._reply_rows(fh, start_id, token, fresh_s)
            return
        for entry in self.fs.readdir(fh, start_id):
            attributes = self._attributes(entry, fresh_s)
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(entry.name), attributes, entry.cookie):
                break

    def _reply_rows(self, inode: int, after: int, token: pyfuse3.ReaddirToken, fresh_s: float) -> None:
        """As many entries as fit, without an object for each; the same bytes."""
        prefix, rows = self._rows_ahead.take(inode, after)
        direntries.give(rows, self.fs.files_in_use, self.fs.row_of, prefix, fresh_s, self._shown)
        try:
            pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b""), self._nothing, 0)
        finally:
            count, last = direntries.taken()
        if after and count:
            self._rows_ahead.begin(inode, last, count)

    @upcall("releasedir")
    async def releasedir(self, fh: int) -> None:
        pass

    @upcall("fsyncdir")
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self.fs.sync_directory(fh)

    @upcall("mkdir")
    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        entry = await self.fs.mkdir(parent, name, mode, ctx.uid, ctx.gid)
        return self._attributes(entry, self.config.metadata_ttl_s)

    @upcall("rmdir")
    async def rmdir(self, parent: int, name: bytes, ctx: object) -> None:
        await self.fs.rmdir(parent, name)

    @upcall("unlink")
    async def unlink(self, parent: int, name: bytes, ctx: object) -> None:
        await self.fs.unlink(parent, name)

    @upcall("rename")
    async def rename(
        self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int, ctx: object
    ) -> None:
        await self.fs.rename(parent_old, name_old, parent_new, name_new, flags)

    @upcall("symlink")
    async def symlink(self, parent: int, name: bytes, target: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        entry = await self.fs.symlink(parent, name, target, ctx.uid, ctx.gid)
        return self._attributes(entry, self.config.metadata_ttl_s)

    @upcall("readlink")
    async def readlink(self, inode: int, ctx: object) -> bytes:
        return self.fs.readlink(inode)

    @upcall("link")
    async def link(self, inode: int, new_parent: int, new_name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        raise pyfuse3.FUSEError(errno.EPERM)

    @upcall("mknod")
    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, ctx: Any) -> pyfuse3.EntryAttributes:
        if not stat.S_ISREG(mode):
            raise pyfuse3.FUSEError(errno.EPERM)
        handle, entry = await self.fs.create(parent, name, mode, os.O_WRONLY | os.O_EXCL, ctx.uid, ctx.gid)
        try:
            await self.fs.flush(handle)
        finally:
            await self.fs.release(handle)
        return self._attributes(self.fs.entry(entry.inode), self.config.metadata_ttl_s)

    # -- files

    @upcall("open")
    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        handle = await self.fs.open(inode, flags, ctx.pid)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), keep_cache=True)

    @upcall("create")
    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        handle, entry = await self.fs.create(parent, name, mode, flags, ctx.uid, ctx.gid, ctx.pid)
        info = pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), keep_cache=True)
        return info, self._attributes(entry, self.config.metadata_ttl_s)

    @upcall("read")
    async def read(self, fh: int, off: int, size: int) -> Any:
        return await self.fs.read(fh, off, size)

    @upcall("write")
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self.fs.write(fh, off, buf)

    @upcall("flush")
    async def flush(self, fh: int) -> None:
        closer = hooks.flush_pid() if hooks.active() else 0
        handle = self.fs.handle(fh)
        if handle.writable and closer and handle.opener and self._is_written_on(handle, closer):
            return
        await self.fs.flush(fh)

    def _is_written_on(self, handle: Handle, closer: int) -> bool:
        """A descriptor is closed, but this is not the close that its writer means.

        A child process closes what it inherited while its parent still writes; a shell opens a file for a command,
        duplicates the descriptor and closes the first one before anything was written. Publishing then would show
        others a part of a file. The last close of all always publishes.
        """
        if closer != handle.opener:
            opener = hooks.process_of(handle.opener)
            if opener and not handle.closed_by_opener and hooks.process_of(closer) not in (0, opener):
                return True
        if handle.file.is_untouched:
            path = os.path.join(self.config.mountpoint, handle.file.key)
            if hooks.holds(hooks.process_of(closer), path):
                return True
        handle.closed_by_opener = True
        return False

    @upcall("release")
    async def release(self, fh: int) -> None:
        await self.fs.release(fh)

    @upcall("fsync")
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self.fs.fsync(fh)

    @upcall("statfs")
    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        answer = pyfuse3.StatvfsData()
        answer.f_bsize = answer.f_frsize = STATFS_BLOCK
        answer.f_blocks = answer.f_bfree = answer.f_bavail = STATFS_BLOCKS
        answer.f_files = answer.f_ffree = answer.f_favail = STATFS_BLOCKS
        answer.f_namemax = 255
        return answer
