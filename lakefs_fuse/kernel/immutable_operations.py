"""Requests of an immutable mount: every reply may be cached without a time limit.

With the hooks the reply to OPEN and to OPENDIR is ENOSYS: the kernel then sends no more of them, and READ and READDIR
arrive with the inode as their handle. Without the hooks the handle is the inode, too. The reply to FLUSH is always
ENOSYS. No request changes anything, because the mount is read-only for the kernel, too.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, whose calls it receives)
import pyfuse3
import trio

from lakefs_fuse.errors import CacheError
from lakefs_fuse.kernel.features import KernelFeatures
from lakefs_fuse.kernel.invalidation import notify_kernel
from lakefs_fuse.kernel.native.hooks import Feature
from lakefs_fuse.kernel.operations import Sleeper, upcall
from lakefs_fuse.kernel.page_cache_push import PageCachePush
from lakefs_fuse.kernel.readdir import RowReplies
from lakefs_fuse.kernel.reply import absent_for, attributes_of, reply_dots, size_reply
from lakefs_fuse.kernel.waiting_requests import Ends, WaitingRequests
from lakefs_fuse.meta.barrier import Barrier
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.vfs.changed_names import ChangedNames
from lakefs_fuse.vfs.immutable.filesystem import ImmutableFilesystem

FOREVER_S = 10 * 365 * 86400.0
log = logging.getLogger(__name__)


class ImmutableOperations(pyfuse3.Operations):
    """One coroutine for each kind of request; see the module's head."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    """There is nothing to write; with it the kernel would ask for attributes after every close."""
    enable_acl = False

    def __init__(self, fs: ImmutableFilesystem, kernel: KernelFeatures) -> None:
        super().__init__()
        self.fs = fs
        self.page_cache_push = PageCachePush(fs)
        self._rows = RowReplies(fs)
        self._kernel = kernel
        fs.statistics_requested.append(self._statistics)
        self.metrics = fs.metrics
        self.upcalls = fs.metrics.upcalls
        self.waiting = list[Callable[[], None]]()
        self.barrier = Barrier(lambda _: None, lambda _: None)  # never up: a state is complete before it is shown
        self.requests = WaitingRequests(lambda *_: None, lambda *_: 0)  # nothing is changed
        self.idleness: Sleeper = fs.idleness
        fs.refreshed.append(self._invalidate_names)

    def _statistics(self) -> dict[str, object]:
        kernel = {**self._kernel.describe(), "interrupted": self.requests.interrupted}
        return {"kernel": kernel, "pushing": self.page_cache_push.describe()}

    async def _invalidate_names(self, changed: ChangedNames) -> None:
        """Invalidate names in a thread, because the kernel may make it wait for a request that is being served. Raises
        CacheError if the local disk lost some of the names."""
        try:
            self.metrics.namespace.invalidations += await trio.to_thread.run_sync(self._invalidate, changed)
        except CacheError as error:
            message = "the local disk failed, so programs may see names as they were before: unmount, and mount again"
            log.error("%s (%s)", message, error)
            raise CacheError(message) from error

    def _invalidate(self, changed: ChangedNames) -> int:
        """Invalidate names, each before the listing that contains it; return how many of both the kernel knew. The
        kernel drops a name only when no READDIR is in progress, so that none can restore the old listing. The top has
        no name in the mount, so its attributes are invalidated in any case."""
        known = 0
        named = ((ROOT_INODE if parent == self.fs.top else parent, name) for parent, name in changed.names())
        for parent, names in groupby(named, key=itemgetter(0)):
            known += notify_kernel((), names)
            known += notify_kernel((parent,), ())
        return known + notify_kernel((ROOT_INODE,), ())

    # -- names and attributes

    @upcall("lookup")
    async def lookup(self, parent_inode: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
        entry = self.fs.lookup(parent_inode, name)
        return absent_for(FOREVER_S) if entry is None else attributes_of(entry, self.fs, FOREVER_S)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self.upcalls["forget"] += 1

    @upcall("getattr")
    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        return attributes_of(await self.fs.getattr(inode), self.fs, FOREVER_S)

    @upcall("readlink")
    async def readlink(self, inode: int, ctx: object) -> bytes:
        return self.fs.readlink(inode)

    @upcall("getxattr")
    async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
        return self.fs.xattr(inode, os.fsdecode(name))

    @upcall("listxattr")
    async def listxattr(self, inode: int, ctx: object) -> Sequence[bytes]:
        return [os.fsencode(name) for name in self.fs.xattr_names(inode)]

    @upcall("statfs")
    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        return size_reply(await self.fs.size())

    # -- directories

    @upcall("opendir")
    async def opendir(self, inode: int, ctx: object) -> int:
        if Feature.STATELESS_OPENDIR in hooks.granted():
            raise pyfuse3.FUSEError(errno.ENOSYS)
        self.fs.directory(inode)
        return inode

    @upcall("readdir")
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        after = reply_dots(token, start_id, fh, self.fs.parent(fh))
        if self._rows.possible:
            self._rows.reply(token, *self.fs.listed(fh), after, FOREVER_S)
            return
        for entry in self.fs.readdir(fh, after):
            attributes = attributes_of(entry, self.fs, FOREVER_S)
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(entry.name), attributes, entry.cookie):
                break

    @upcall("releasedir")
    async def releasedir(self, fh: int) -> None:
        pass

    @upcall("fsyncdir")
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        pass

    # -- files

    @upcall("open")
    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        if Feature.STATELESS_OPEN in hooks.granted():
            raise pyfuse3.FUSEError(errno.ENOSYS)
        self.fs.entry(inode)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), keep_cache=True)

    @upcall("read", ends=Ends.KILL)
    async def read(self, fh: int, off: int, size: int) -> Any:
        around = off == 0 and self.page_cache_push.is_due(fh)
        data = await self.fs.read(fh, off, size, around=around)
        self.page_cache_push.count_read(fh, off)
        return data

    @upcall("flush")
    async def flush(self, fh: int) -> None:
        raise pyfuse3.FUSEError(errno.ENOSYS)

    @upcall("release")
    async def release(self, fh: int) -> None:
        pass

    @upcall("fsync")
    async def fsync(self, fh: int, datasync: bool) -> None:
        pass
