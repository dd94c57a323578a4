"""The model of a directory, over a mount that accepts files and stores them later, dies, and loses its store.

What was accepted is there for every reader of the node, always, and after a death. What was not is an orphan after a
death, and the name has what was accepted before it, if anything. What a second node sees is compared once everything
was published. A death is a copy of the cache directory, made while nothing of the mount's own loop can run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import trio

from lakefs_fuse.config import Rule
from lakefs_fuse.errors import Unavailable
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.store.protocol import Capabilities, ObjectStore
from tests.memory_store import MemoryStore
from tests.vfs.lakes import RENAME_EXCHANGE, lake
from tests.vfs.model import Model
from tests.vfs.writing_back import CHANGES, die

SETTLE_S_MAX = 20.0
MIXED = (Rule(path="d/**", durability="writeback"), Rule(path="a", durability="writeback"))


class Line:
    """A mount's way to its store. ``away``: nothing can be changed there; ``cut``: the mount is dead."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.away = self.cut = False

    def __getattr__(self, name: str) -> object:
        call = getattr(self._store, name)
        if not callable(call) or name == "close":
            return call

        def checked(*arguments: object, **named: object) -> object:
            if self.cut or (self.away and name in CHANGES):
                raise Unavailable("the store is away")
            return call(*arguments, **named)

        return checked


class WriteBackModel(Model):
    """See the module's head. ``mixed``: only some paths are under write-back, and the store does not go away."""

    def __init__(self, root: Path, *, in_memory: bool, pack: str, mixed: bool, delay_s: float) -> None:
        super().__init__(root, in_memory=in_memory, pack=pack)
        self.mixed = mixed
        self.settings |= {"orphans": "abort", "writeback_delay_s": delay_s, "retry_timeout_s": 0.0}
        self.settings |= {"rules": MIXED} if mixed else {"durability": "writeback"}
        self.line = Line(self.store)
        self.before: dict[int, bytes | None] = {}
        """By inode of the plain file: what was accepted, None where nothing was, of files that changed since."""

    async def mount(self) -> None:
        away, self.line = self.line.away, Line(self.store)
        self.line.away = away
        if isinstance(self.store, MemoryStore):
            self.store.clock = self.clock
            capabilities = self.store.capabilities
        else:
            capabilities = Capabilities(name="local")
        store = cast(ObjectStore, self.line)
        mount = lake(store, self.cache, clock=self.clock, capabilities=capabilities, **self.settings)  # type: ignore[arg-type]
        self.mounted = await self._stack.enter_async_context(mount)

    # -- what happens to a mount

    async def outage(self, away: bool) -> None:
        self.line.away = away and not self.mixed

    async def back(self) -> None:
        await self.outage(False)

    async def breathe(self) -> None:
        """What can go on in the background does."""
        await trio.sleep(0.02)

    async def crash(self, handles_first: bool) -> None:
        if handles_first:
            while self.handles:
                await self.close(0)
        self.line.cut = True
        self.crashes += 1
        following = self._caches / str(self._mounts + 1)
        die(self.cache, following)
        self._mounts += 1
        await self.unmount()
        self._stack = AsyncExitStack()
        while self.handles:
            os.close(self.handles.pop().theirs)
        await self.mount()
        await self._forget_unaccepted()
        await self.compare_tree(self.mounted)

    async def _forget_unaccepted(self) -> None:
        """What was never accepted is not there; what was accepted before is. Then both sides go on without it."""
        for directory, _, files in os.walk(self.plain):
            for name in files:
                plain = Path(directory, name)
                number = os.lstat(plain).st_ino
                if number not in self.before:
                    continue
                path = str(plain.relative_to(self.plain))
                accepted = self.before[number]
                if accepted is not None:
                    assert await self.mounted.read(path) == accepted, path
                if await self.mounted.lookup(path) is not None:
                    await self.mounted.unlink(path)
                plain.unlink()
                self._forget_mtime(path)
        self.before.clear()

    async def remount(self, empty: bool) -> None:
        await self.back()
        while self.handles:
            await self.close(0)
        if empty:
            await self.settle()
        await super().remount(empty)
        self.before.clear()

    async def settle(self) -> None:
        await self.back()
        await super().settle()
        with trio.fail_after(SETTLE_S_MAX):
            await self.mounted.fs.make_durable()
        await self.mounted.sync()
        if not self.handles:
            await self._discarded()
        self.before.clear()

    async def _discarded(self) -> None:
        """What nobody wants goes in the background: it does, whatever became of the mount."""
        with trio.fail_after(SETTLE_S_MAX):
            while self.uploads_with_parts() or self.mounted.parts.staging.bytes_used:
                await trio.sleep(0.01)

    async def compare_everything(self) -> None:
        await self.back()
        while self.handles:
            await self.close(0)
        await super().compare_everything()

    async def sync_names(self) -> None:
        await self.back()
        await super().sync_names()

    # -- what is accepted when

    def _changes(self, plain: Path | int) -> None:
        """A file that is not closed yet is about to change."""
        try:
            status = os.stat(plain)
        except OSError:
            return
        if not stat.S_ISREG(status.st_mode) or status.st_ino in self.before:
            return
        if isinstance(plain, int):
            plain = Path(f"/proc/self/fd/{plain}")
        self.before[status.st_ino] = plain.read_bytes()

    async def open(self, path: str, flags: int, create: bool) -> None:
        plain = self.plain / path
        is_new = not os.path.lexists(plain)
        if flags & os.O_TRUNC and not flags & os.O_EXCL:
            self._changes(plain)
        await super().open(path, flags, create)
        if is_new and os.path.lexists(plain):
            self.before[os.lstat(plain).st_ino] = None

    async def write(self, which: int, offset: int, data: bytes) -> None:
        handle = self._handle(which)
        if handle is not None and handle.writable:
            self._changes(handle.theirs)
        await super().write(which, offset, data)

    async def truncate_handle(self, which: int, size: int) -> None:
        handle = self._handle(which)
        if handle is not None and handle.writable:
            self._changes(handle.theirs)
        await super().truncate_handle(which, size)

    def _writers(self, number: int) -> bool:
        return any(handle.writable and os.fstat(handle.theirs).st_ino == number for handle in self.handles)

    async def truncate(self, path: str, size: int) -> None:
        self._changes(self.plain / path)
        await super().truncate(path, size)
        if (self.plain / path).is_file():
            number = os.stat(self.plain / path).st_ino
            if not self._writers(number):
                self.before.pop(number, None)

    async def _set(self, path: str, change: object, set_plain: Callable[[], None]) -> None:
        await super()._set(path, change, set_plain)  # type: ignore[arg-type]
        if (self.plain / path).is_file():
            number = os.stat(self.plain / path).st_ino
            if not self._writers(number):
                self.before.pop(number, None)

    def _accepted(self, which: int, *, writable: bool) -> None:
        handle = self._handle(which)
        if handle is not None and (handle.writable or not writable):
            self.before.pop(os.fstat(handle.theirs).st_ino, None)

    async def flush(self, which: int) -> None:
        await super().flush(which)
        self._accepted(which, writable=True)

    async def fsync(self, which: int) -> None:
        await self.back()
        await super().fsync(which)
        self._accepted(which, writable=False)

    async def close(self, which: int) -> None:
        handle = self._handle(which)
        number = os.fstat(handle.theirs).st_ino if handle is not None and handle.writable else 0
        await super().close(which)
        self.before.pop(number, None)

    # -- what has to reach the store

    async def rename(self, old: str, new: str, flags: int) -> None:
        if flags == RENAME_EXCHANGE or (self.plain / old).is_dir():
            await self.back()
        await super().rename(old, new, flags)

    async def second_mount_sees(self) -> None:
        await self.back()
        await super().second_mount_sees()

    async def state(self, path: str) -> None:
        """What a file says of itself fits what is known of it."""
        entry: Entry | None = await self.mounted.lookup(path) if (self.plain / path).is_file() else None
        if entry is None or entry.is_dir or entry.is_symlink:
            return
        told = self.mounted.fs.xattr(entry.inode, "user.lakefs.state").decode()
        place = self.mounted.fs.xattr(entry.inode, "user.lakefs.location").decode()
        assert told in ("dirty", "uploading", "durable", "failed")
        is_here = place == "memory" or place.startswith(f"file://{self.cache}/staging/")
        assert is_here == (told != "durable"), (told, place)
