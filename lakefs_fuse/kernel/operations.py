"""Protocol adapter only: requests become calls of `Filesystem`, entries become attributes, and errors become errnos.

The kernel's write-back cache is on: it sends large writes, keeps written pages in the page cache, and owns the size and
the mtime of a file as long as it knows the inode. Invariant *one version, one inode*: another version of a file has
another inode. The timeout of a reply is the rest of the TTL of the listing that it came from. Only FUSEError leaves a
handler (`upcall`): any other exception would end the daemon.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import struct
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, cast

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, whose calls it receives)
import pyfuse3

from lakefs_fuse.errors import LakeError
from lakefs_fuse.kernel.create_offload import CreateOffload
from lakefs_fuse.kernel.features import KernelFeatures
from lakefs_fuse.kernel.invalidation import Invalidations, invalidate_attributes
from lakefs_fuse.kernel.leases import Leases
from lakefs_fuse.kernel.native.hooks import Feature
from lakefs_fuse.kernel.readdir import RowReplies
from lakefs_fuse.kernel.reply import (
    DOTDOT_COOKIE,
    SECTOR_BYTES,
    absent_for,
    attributes_of,
    reply_dots,
    size_reply,
)  # fmt: skip
from lakefs_fuse.kernel.waiting_requests import Ends, Kind, WaitingRequests
from lakefs_fuse.meta.barrier import About, Barrier
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.vfs.files.open_file import Handle
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.ops.attributes import AttributeChange

UNREMARKABLE = (
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ESTALE, errno.ENODATA, errno.EOPNOTSUPP, errno.ENAMETOOLONG
)  # fmt: skip
"""Errors of everyday use, which are not logged."""
WRITE_OUT = struct.Struct("=II")
"""``struct fuse_write_out`` of linux/fuse.h: bytes, padding."""
log = logging.getLogger(__name__)


class Sleeper(Protocol):
    """A mount that may be idle, and must then be woken before it answers."""

    @property
    def is_idle(self) -> bool: ...

    async def wake(self) -> None: ...


class Counted(Protocol):
    """Handlers of requests, with what `upcall` needs."""

    upcalls: dict[str, int]
    barrier: Barrier
    idleness: Sleeper
    waiting: list[Callable[[], None]]
    """Called when a handler first waits."""
    requests: WaitingRequests


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Counted)
Handler: TypeAlias = "Callable[Concatenate[S, P], Coroutine[Any, Any, T]]"


@types.coroutine
def handled(
    work: Coroutine[Any, Any, T],
    waiting: Sequence[Callable[[], None]],
    requests: WaitingRequests,
    kind: Kind,
    arguments: tuple[object, ...],
) -> Generator[Any, Any, T]:
    """Run the handler of a request. When it first waits, call ``waiting``, and register the request until it ends.
    Raises FUSEError(EINTR) if the request was interrupted."""
    request = None
    try:
        trap = work.send(None)
        for listener in waiting:
            listener()
        request = requests.add(kind, arguments)
        while True:
            try:
                result = yield trap
            except BaseException as error:
                trap = work.throw(error)
            else:
                trap = work.send(result)
    except StopIteration as done:
        if request is not None and requests.remove(request):
            raise pyfuse3.FUSEError(errno.EINTR) from None
        value: T = done.value
        return value
    except BaseException:
        if request is not None:
            requests.remove(request)
        raise


def upcall(
    name: str,
    *,
    about: About | None = None,
    reads: bool = False,
    wakes: bool = True,
    ends: Ends = Ends.KEYBOARD,
    parents: tuple[int, ...] = (),
    by_handle: bool = False,
) -> Callable[[Handler[S, P, T]], Handler[S, P, T]]:
    """Count a request and turn its errors into errnos. A request waits while a commit is applied to the inode or name
    that it is ``about`` (its first argument, or for a name its first two), and unless it only ``reads`` while one is
    made of it. The first request after a pause wakes the mount, and waits for its poll, unless the result cannot depend
    on a poll (not ``wakes``). The library's facts about the request are kept from its arrival. The last three
    parameters are those of `Kind`."""
    kind = Kind(name, ends, parents, by_handle)

    def decorate(handler: Handler[S, P, T]) -> Handler[S, P, T]:
        async def wait_and_handle(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
            with hooks.keep_request_facts():
                if wakes and self.idleness.is_idle:
                    await self.idleness.wake()
                if parents:
                    await self.requests.wait_unlocked(kind, args)
                if about is not None and self.barrier.is_up:
                    subject = args[: 2 if about is About.NAME else 1]
                    await self.barrier.wait_for(about, *subject, reads=reads)  # type: ignore[arg-type]
                self.requests.refuse_interrupted()
                return await handler(self, *args, **kwargs)

        @functools.wraps(handler)
        async def answered(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
            self.upcalls[name] += 1
            waits = (wakes and self.idleness.is_idle) or (about is not None and self.barrier.is_up)
            waits = waits or (parents != () and self.requests.is_any_interrupted)
            work = (wait_and_handle if waits else handler)(self, *args, **kwargs)
            try:
                return await handled(work, self.waiting, self.requests, kind, args)
            except pyfuse3.FUSEError:
                raise
            except LakeError as error:
                if error.errno not in UNREMARKABLE:
                    log.warning("%s: %s", name, error)
                raise pyfuse3.FUSEError(error.errno) from error
            except Exception as error:
                log.exception("%s failed", name)
                raise pyfuse3.FUSEError(errno.EIO) from error

        return cast("Handler[S, P, T]", answered)

    return decorate


class Operations(pyfuse3.Operations):
    """One coroutine for each kind of request; see the module's head."""

    supports_dot_lookup = False
    enable_acl = False

    def __init__(self, fs: Filesystem, kernel: KernelFeatures) -> None:
        super().__init__()
        self.fs = fs
        self.config = fs.config
        self.enable_writeback_cache = kernel.writeback_cache
        self.upcalls = fs.metrics.upcalls
        self.waiting = list[Callable[[], None]]()
        self.barrier = fs.namespace.tree.barrier
        self.idleness: Sleeper = fs.namespace.idleness
        self._metrics = fs.metrics.namespace
        self._renumbered = dict[int, None]()
        """Files that show the inode number of another, or did so when they were last shown, the oldest first."""
        self.invalidations = Invalidations(self._count_invalidations, fs.config.cache_dir)
        self.requests = WaitingRequests(self.invalidations.invalidate_name, self._directory_of)
        fs.events.name_changed.append(self.invalidations.invalidate_name)
        fs.events.kernel_told.append(self.invalidations.wait_notified)
        fs.events.pages_wanted.append(self.invalidations.write_out)
        fs.events.statistics_requested.append(self._statistics)
        self._kernel = kernel
        self._answered: dict[str, int] = {}
        self._leases = Leases(fs)
        self._rows = RowReplies(fs)
        self.create_offload = CreateOffload(fs, self._leases, self.requests)
        fs.namespace.idleness.watch(self._questions)

    def _count_invalidations(self, count: int) -> None:
        self._metrics.invalidations += count

    def _questions(self) -> int:
        """Return how many requests programs have waited for; without statfs, which monitoring sends to every mount."""
        self._count_answered()
        return sum(self.upcalls.values()) - self.upcalls["forget"] - self.upcalls["statfs"]

    def _count_answered(self) -> None:
        """Count the requests that the library handled."""
        for name, now in hooks.answered().items():
            if now > self._answered.get(name, 0):
                self.upcalls[name] += now - self._answered.get(name, 0)
                self._answered[name] = now

    def _statistics(self) -> dict[str, object]:
        """Return the values of ``kernel`` for `stats`."""
        self._count_answered()
        held, interrupted = len(self.invalidations), self.requests.interrupted
        return {"kernel": {**self._kernel.describe(), "listings_held_max": held, "interrupted": interrupted}}

    def _directory_of(self, parent: int, name: bytes) -> int:
        """Return the inode of the directory of this name, as far as this node knows; 0 if there is none."""
        try:
            entry = self.fs.namespace.tree.child(parent, name)
        except LakeError:
            return 0
        return entry.inode if entry is not None and entry.is_dir else 0

    # -- names and attributes

    def _attributes(self, entry: Entry, timeout_s: float) -> pyfuse3.EntryAttributes:
        attributes = attributes_of(entry, self.fs, timeout_s)
        if not entry.is_dir:
            attributes.st_blocks = -(-self.fs.data_bytes(entry) // SECTOR_BYTES)
            attributes.st_nlink *= self.fs.link_count(entry.inode)
            self._show_number(entry, attributes)
        return attributes

    def _show_number(self, entry: Entry, attributes: pyfuse3.EntryAttributes) -> None:
        """Have a linked file show the inode number of its source while both are unchanged, which is checked each time.
        To make room in the library, the files that were shown longest ago, some of them removed since, show their own
        numbers again."""
        number = self.fs.shown_number(entry)
        if number == entry.inode:
            if entry.inode in self._renumbered:
                self._show_own_number(entry.inode)
            return
        self._renumbered.pop(entry.inode, None)
        while not (is_shown := hooks.show_number(entry.inode, number)) and self._renumbered:
            self._show_own_number(next(iter(self._renumbered)))
        if is_shown:
            self._renumbered[entry.inode] = None
            attributes.attr_timeout = 0

    def _show_own_number(self, inode: int) -> None:
        del self._renumbered[inode]
        hooks.show_number(inode, 0)

    async def _invalidate_link_counts(self) -> None:
        """Other names of a file are other inodes, whose attributes the kernel keeps when it links or unlinks one."""
        if changed := list(self.fs.changed_link_counts):
            self.fs.changed_link_counts.clear()
            await invalidate_attributes(changed)

    @upcall("lookup", about=About.NAME, reads=True)
    async def lookup(self, parent_inode: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
        entry, fresh_s = await self.fs.lookup(parent_inode, name)
        if entry is not None:
            attributes = self._attributes(entry, fresh_s)
            if entry.is_dir:
                self._leases.lease_directory(parent_inode, name, attributes)
            return attributes
        if fresh_s <= 0:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return absent_for(fresh_s)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self.upcalls["forget"] += 1

    @upcall("getattr", about=About.INODE, reads=True)
    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        entry = await self.fs.stat(inode)
        attributes = self._attributes(entry, self.fs.attribute_fresh_s(entry))
        self._leases.lease_attributes(entry, attributes)
        return attributes

    @upcall("setattr")
    async def setattr(
        self, inode: int, attr: Any, fields: pyfuse3.SetattrFields, fh: int | None, ctx: Any
    ) -> pyfuse3.EntryAttributes:
        kills_privileges = hooks.kills_privileges()
        await self.barrier.wait_for(About.INODE, inode)
        change = AttributeChange(
            size=attr.st_size if fields.update_size else None,
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            ctime_ns=attr.st_ctime_ns if fields.update_ctime else None,
            kills_privileges=kills_privileges,
        )
        if change == AttributeChange(ctime_ns=change.ctime_ns) and fields.update_ctime:
            change = AttributeChange(ctime_ns=change.ctime_ns, chowned_by=ctx.uid)
        try:
            entry = await self.fs.setattr(inode, change, fh, confirm=self.requests.confirm)
        finally:
            hooks.forget_attributes(inode)  # a GETATTR may have been answered meanwhile
        attributes = self._attributes(entry, self.fs.attribute_fresh_s(entry))
        self._leases.lease_attributes(entry, attributes)
        return attributes

    async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
        return await (self._getxattr(inode, name) if name else self._copy_file_range(hooks.copy_request()))

    @upcall("getxattr", about=About.INODE, reads=True)
    async def _getxattr(self, inode: int, name: bytes) -> bytes:
        return self.fs.xattr(inode, os.fsdecode(name))

    @upcall("copy_file_range", ends=Ends.REPLY)
    async def _copy_file_range(self, copy: hooks.CopyRequest) -> bytes:
        """Handle COPY_FILE_RANGE, which dispatch.c passes on as GETXATTR; return a ``struct fuse_write_out``."""
        copied = await self.fs.copy_range(copy.source, copy.offset, copy.target, copy.target_offset, copy.bytes)
        return WRITE_OUT.pack(copied, 0)

    @upcall("listxattr", about=About.INODE, reads=True)
    async def listxattr(self, inode: int, ctx: object) -> Sequence[bytes]:
        return [os.fsencode(name) for name in self.fs.xattr_names(inode)]

    @upcall("setxattr", about=About.INODE)
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: object) -> None:
        await self.fs.set_xattr(inode, os.fsdecode(name), value, confirm=self.requests.confirm)

    @upcall("removexattr", about=About.INODE)
    async def removexattr(self, inode: int, name: bytes, ctx: object) -> None:
        await self.fs.set_xattr(inode, os.fsdecode(name), None, confirm=self.requests.confirm)

    # -- directories

    @upcall("opendir", about=About.DIRECTORY, reads=True)
    async def opendir(self, inode: int, ctx: object) -> int:
        if Feature.STATELESS_OPENDIR in hooks.granted():
            raise pyfuse3.FUSEError(errno.ENOSYS)  # the kernel sends none again, and keeps listings
        await self.fs.opendir(inode)
        return inode

    @upcall("readdir", about=About.DIRECTORY, reads=True)
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if not start_id:
            await self.fs.opendir(fh)
        await self.fs.more_names(fh, 0 if start_id == DOTDOT_COOKIE else start_id)
        fresh_s = self.fs.listing_fresh_s(fh)
        if not start_id and Feature.STATELESS_OPENDIR in hooks.granted():
            self.invalidations.add_listing(fh, fresh_s)
        after = reply_dots(token, start_id, fh, self.fs.entry(fh).parent or fh)
        if self._rows.possible and not self.fs.knows_holes_in(fh) and not self.fs.knows_links_in(fh):
            tree = self.fs.namespace.tree
            self._rows.reply(token, tree, fh, after, fresh_s, self.fs.files_in_use, self.fs.row_of)
            return
        for entry in self.fs.readdir(fh, after):
            attributes = self._attributes(entry, fresh_s)
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(entry.name), attributes, entry.cookie):
                break

    @upcall("releasedir")
    async def releasedir(self, fh: int) -> None:
        pass

    @upcall("fsyncdir")
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self.fs.sync_directory(fh)

    @upcall("mkdir", about=About.NAME, parents=(0,))
    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        entry = await self.fs.mkdir(parent, name, mode, ctx.uid, ctx.gid)
        self._leases.lease_new_directory(entry)
        attributes = self._attributes(entry, self.config.metadata_ttl_s)
        self._leases.lease_directory(parent, name, attributes)
        return attributes

    @upcall("rmdir", about=About.NAME, parents=(0,))
    async def rmdir(self, parent: int, name: bytes, ctx: object) -> None:
        await self.fs.rmdir(parent, name)

    @upcall("unlink", about=About.NAME, parents=(0,))
    async def unlink(self, parent: int, name: bytes, ctx: object) -> None:
        await self.fs.unlink(parent, name)
        await self._invalidate_link_counts()

    @upcall("rename", parents=(0, 2))
    async def rename(
        self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int, ctx: object
    ) -> None:
        await self.barrier.wait_lowered()
        await self.fs.rename(parent_old, name_old, parent_new, name_new, flags)
        await self._invalidate_link_counts()

    @upcall("symlink", about=About.NAME, parents=(0,))
    async def symlink(self, parent: int, name: bytes, target: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        entry = await self.fs.symlink(parent, name, target, ctx.uid, ctx.gid)
        return self._attributes(entry, self.config.metadata_ttl_s)

    @upcall("readlink", about=About.INODE, reads=True)
    async def readlink(self, inode: int, ctx: object) -> bytes:
        return self.fs.readlink(inode)

    @upcall("link", about=About.INODE, parents=(1,))
    async def link(self, inode: int, new_parent: int, new_name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        await self.barrier.wait_for(About.NAME, new_parent, new_name)
        try:
            entry = await self.fs.link(inode, new_parent, new_name)
        finally:
            hooks.forget_attributes(inode)
        await self._invalidate_link_counts()
        return self._attributes(entry, self.config.metadata_ttl_s)

    @upcall("mknod", about=About.NAME, parents=(0,))
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

    @upcall("open", about=About.INODE, reads=True)
    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            await self.barrier.wait_for(About.INODE, inode)
        handle = await self.fs.open(inode, flags, ctx.pid)
        if self.requests.is_interrupted():  # the kernel does not know the handle
            await self.fs.release(handle)
            self.requests.refuse_interrupted()
        if flags & os.O_TRUNC == 0:
            self._leases.lease_open(inode, handle)
        return self._file_info(handle)

    def _file_info(self, handle: int) -> pyfuse3.FileInfo:
        is_uncached = self.fs.is_handle(handle) and self.fs.handle(handle).is_published_while_open
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), keep_cache=not is_uncached, direct_io=is_uncached)

    @upcall("create", parents=(0,))
    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        await self.barrier.wait_for(About.NAME, parent, name)
        handle, entry = await self.fs.create(
            parent, name, mode, flags, ctx.uid, ctx.gid, ctx.pid, confirm=self.requests.confirm
        )
        self._leases.count_created(self.fs.handle(handle).file)
        return self._file_info(handle), self._attributes(entry, self.config.metadata_ttl_s)

    @upcall("read", ends=Ends.KILL, by_handle=True)
    async def read(self, fh: int, off: int, size: int) -> Any:
        return await self.fs.read(fh, off, size)

    @upcall("write", ends=Ends.REPLY)
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        sends_times = hooks.is_cached_write() and self.enable_writeback_cache
        return await self.fs.write(fh, off, buf, kills_privileges=hooks.kills_privileges(), sets_times=not sends_times)

    @upcall("flush", by_handle=True)
    async def flush(self, fh: int) -> None:
        await self.fs.flush(fh, self._is_written_on, self._killed_by)

    @staticmethod
    def _killed_by(others: Sequence[int]) -> int:
        """Return the signal that is killing the process that closes a descriptor; 0 for none. It is 0, too, if one of
        the threads ``others`` belongs to another process. Call it before the handler's first await."""
        closer = hooks.flush_pid()
        signal = hooks.killed_by(closer)
        process = hooks.process_of(closer) if signal and others else 0
        return 0 if any(hooks.process_of(thread) not in (0, process) for thread in others) else signal

    def _is_written_on(self, handle: Handle) -> bool:
        """Return whether a descriptor is closed although its writer has not finished. Call it before the handler's
        first await. A child process closes inherited descriptors while its parent still writes; a shell opens a file
        for a command, duplicates the descriptor and closes the first one before anything was written; it may leave that
        to execve(2). Publishing then would show other nodes a part of a file. The last close of all always publishes.
        """
        closer = hooks.flush_pid() if hooks.active() else 0
        if not closer:
            return False
        if closer != handle.opener:
            opener = hooks.process_of(handle.opener)
            if opener and not handle.closed_by_opener and hooks.process_of(closer) not in (0, opener):
                return True
        if handle.file.is_untouched:
            path = os.path.join(self.config.mountpoint, handle.file.key)
            if hooks.keeps_open(closer, path):
                return True
        handle.closed_by_opener = True
        return False

    @upcall("release", ends=Ends.REPLY)
    async def release(self, fh: int) -> None:
        if self.requests.is_any_interrupted:
            await self.requests.wait_handle_unused(fh)
        await self.fs.release(fh)

    @upcall("fsync", by_handle=True)
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self.fs.fsync(fh)

    @upcall("statfs", wakes=False)
    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        return size_reply(await self.fs.size())
