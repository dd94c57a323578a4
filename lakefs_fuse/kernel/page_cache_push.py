"""Pushes small files into the page cache: those that share a pack's block with a file that is read. Reading a file
fetches a block of 1 MiB, which contains 10 to 100 other files. The bytes of those whose inode the kernel knows are
written into its page cache (FUSE_NOTIFY_STORE), so that reading them costs no request. For immutable mounts only, where
an inode is always the same version: on other mounts the bytes could be older than bytes written to the page since, and
would replace them.

It saves time only for files that the kernel knows (their directory was listed), and that are read before it evicts
their pages. If more than half of the files pushed recently were not known, only one block in PROBE_EACH is tried. The
only sign of an eviction is a READ of another file of the block. A block is pushed at most PUSHES_MAX times in ROUND_S,
which bounds the cost for a dataset that does not fit into memory.

Trio thread; the kernel is notified from a worker thread, because it may make that wait for a READ that is being
answered. A crash leaves nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import cast

from lakefs_fuse.kernel.native import hooks  # isort: skip  # noqa: F401  (loaded before pyfuse3, which it wraps)
import pyfuse3
import trio

from lakefs_fuse.errors import FileError
from lakefs_fuse.vfs.immutable.filesystem import ImmutableFilesystem

Bytes = bytes | bytearray | memoryview
log = logging.getLogger(__name__)
WAITING_MAX = 32
"""Maximum of files whose blocks wait to be pushed. Beyond that the oldest are dropped, because readers have passed
them."""
BLOCKS_MAX = 65_536
"""Blocks whose pushes are counted: 64 GiB of them."""
PUSHES_MAX = 3
ROUND_S = 600.0
PROBE_EACH = 32
JUDGED_FILES = 1024
"""After this many files the counts of earlier ones are halved, so a change shows after some 50 blocks."""


def store_files(files: Sequence[tuple[int, Bytes]]) -> list[int]:
    """Push files; return the sizes of those whose inode the kernel knew. Blocking."""
    known = []
    for inode, data in files:
        try:
            pyfuse3.notify_store(pyfuse3.InodeT(inode), 0, cast("bytes", data))
        except OSError:
            continue
        known.append(len(data))
    return known


class PageCachePush:
    """Pushes blocks of packs; see the module's head."""

    def __init__(
        self, fs: ImmutableFilesystem, *, store: Callable[[Sequence[tuple[int, Bytes]]], list[int]] = store_files
    ) -> None:
        self._fs, self._store = fs, store
        self._waiting: deque[int] = deque(maxlen=WAITING_MAX)
        self._requested = trio.Event()
        self._busy = False
        self._pushed: OrderedDict[tuple[int, int], tuple[float, int]] = OrderedDict()
        self._judged = self._judged_unknown = 0.0
        self._asked = 0
        self.files = self.bytes = self.unknown = 0
        """Since the mount began: what was pushed, and files that the kernel did not know."""

    def count_read(self, inode: int, offset: int) -> None:
        """Count a READ that was replied to; a READ of the beginning of a file may push its block."""
        try:
            block = self._fs.block_of(inode) if offset == 0 else None
        except FileError:
            return  # the file was removed while it was read
        if block is None:
            return
        self._asked += 1
        if self.pays or not self._asked % PROBE_EACH:
            self._request(inode, block)

    def is_due(self, inode: int) -> bool:
        """Return whether a READ of the beginning of a file will push its block."""
        block = self._fs.block_of(inode)
        return block is not None and self.pays and self._counted(block)[1] < PUSHES_MAX

    @property
    def pays(self) -> bool:
        """Whether the kernel knew at least half of the files that were pushed lately."""
        return 2 * self._judged_unknown <= self._judged

    def _counted(self, block: tuple[int, int]) -> tuple[float, int]:
        """Return when this round of a block began, and how often it was pushed in it."""
        now = trio.current_time()
        since, pushes = self._pushed.get(block, (now, 0))
        return (since, pushes) if now - since <= ROUND_S else (now, 0)

    def _request(self, inode: int, block: tuple[int, int]) -> None:
        since, pushes = self._counted(block)
        self._pushed[block] = since, min(pushes + 1, PUSHES_MAX)
        self._pushed.move_to_end(block)
        if len(self._pushed) > BLOCKS_MAX:
            self._pushed.popitem(last=False)
        if pushes < PUSHES_MAX:
            self._waiting.append(inode)
            self._requested.set()

    @property
    def under_way(self) -> int:
        """Blocks that wait, or are being pushed."""
        return len(self._waiting) + self._busy

    def describe(self) -> dict[str, object]:
        return {"under_way": self.under_way, "files": self.files, "bytes": self.bytes, "unknown": self.unknown}

    async def run(self) -> None:
        """Push blocks until cancelled."""
        while True:
            await self._requested.wait()
            while self._waiting:
                self._busy = True
                try:
                    await self._push(self._waiting.popleft())
                except Exception:  # no request depends on it, and the mount continues
                    log.exception("pushing the neighbours of a file to the kernel")
                self._busy = False
            self._requested = trio.Event()

    async def _push(self, inode: int) -> None:
        try:
            files = await self._fs.beside(inode)
        except FileError:
            return  # a READ of one of them gets the error
        if not files:
            return
        known = await trio.to_thread.run_sync(self._store, files)
        unknown = len(files) - len(known)
        self.files += len(known)
        self.bytes += sum(known)
        self.unknown += unknown
        self._judged += len(files)
        self._judged_unknown += unknown
        if self._judged > JUDGED_FILES:
            self._judged, self._judged_unknown = self._judged / 2, self._judged_unknown / 2
