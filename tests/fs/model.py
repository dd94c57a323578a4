"""Operations on a mounted lake and on a plain directory side by side, and the comparison of both.

Every operation answers a plain value or an errno from either side; they must be equal. The lake is asked as the kernel
asks: a path is looked up name by name, `close` is flush and release.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from lakefs_fuse.errors import LakeError
from lakefs_fuse.fs.filesystem import AttributeChange, file_type_and_mode
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.store.local import LocalStore
from tests.fs.lakes import TTL_S, Clock, Lake, lake
from tests.write.drafting import noise

NS = 1_000_000_000
FILES = ("a", "b", "d/x", "d/y", "d/e/z", "d/e")
DIRECTORIES = ("d", "d/e", "b", "q")
PATHS = tuple(sorted({*FILES, *DIRECTORIES}))

Answer = object
"""What an operation tells: a value, or an errno as ``errno.ENOENT``'s name."""


@dataclass(frozen=True)
class Operation:
    """``what`` is a method of `Model`; the rest are its arguments."""

    what: str
    arguments: tuple[object, ...] = ()

    def __repr__(self) -> str:
        return f"{self.what}{self.arguments!r}"


@dataclass
class Handle:
    path: str
    ours: int
    theirs: int
    writable: bool


def name_of(code: int | None) -> str:
    return errno.errorcode.get(code or 0, str(code))


async def ours(call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except LakeError as error:
        return name_of(error.errno)


def theirs(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except OSError as error:
        return name_of(error.errno)


class Model:
    """The lake ``mounted`` over ``root/lake``, and the plain directory ``root/plain``."""

    def __init__(self, root: Path) -> None:
        self.store_dir, self.plain, self._caches = root / "lake", root / "plain", root / "caches"
        for directory in (self.store_dir, self.plain, self._caches):
            directory.mkdir(parents=True)
        self.store = LocalStore(str(self.store_dir))
        self.clock = Clock()
        self.handles: list[Handle] = []
        self.chosen_mtimes: dict[str, int] = {}
        self._mounts = 0
        self._stack = AsyncExitStack()
        self.mounted: Lake

    async def mount(self) -> None:
        cache = self._caches / str(self._mounts)
        self.mounted = await self._stack.enter_async_context(lake(self.store, cache, clock=self.clock))

    async def unmount(self) -> None:
        await self._stack.aclose()

    async def run(self, operations: list[Operation]) -> None:
        await self.mount()
        try:
            for operation in operations:
                await getattr(self, operation.what)(*operation.arguments)
            await self.compare_everything()
        finally:
            for handle in self.handles:
                os.close(handle.theirs)
            await self.unmount()

    # -- names

    def _forget_mtime(self, path: str) -> None:
        self.chosen_mtimes.pop(path, None)

    async def _resolve(self, path: str) -> Entry:
        parent, entry = ROOT_INODE, None
        for component in path.split("/"):
            entry, _ = await self.mounted.fs.lookup(parent, component.encode())
            if entry is None:
                raise FileNotFoundError
            parent = entry.inode
        assert entry is not None
        return entry

    async def _place(self, path: str) -> tuple[int, bytes]:
        above, _, name = path.rpartition("/")
        return ((await self._resolve(above)).inode if above else ROOT_INODE), name.encode()

    async def _ours(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            return await ours(call())
        except FileNotFoundError:
            return "ENOENT"

    async def _named(self, path: str, act: Callable[[int, bytes], Awaitable[Answer]]) -> Answer:
        async def call() -> Answer:
            return await act(*await self._place(path))

        return await self._ours(call)

    async def mkdir(self, path: str, mode: int) -> None:
        async def make(parent: int, name: bytes) -> Answer:
            await self.mounted.fs.mkdir(parent, name, mode, os.getuid(), os.getgid())
            return None

        def make_plain() -> Answer:
            os.mkdir(self.plain / path)
            os.chmod(self.plain / path, mode)
            return None

        expected = theirs(make_plain)
        assert await self._named(path, make) == expected

    async def rmdir(self, path: str) -> None:
        expected = theirs(lambda: os.rmdir(self.plain / path))
        assert await self._named(path, self.mounted.fs.rmdir) == expected

    async def unlink(self, path: str) -> None:
        expected = theirs(lambda: os.unlink(self.plain / path))
        assert await self._named(path, self.mounted.fs.unlink) == expected
        self._forget_mtime(path)

    async def stat(self, path: str) -> None:
        async def ask() -> Answer:
            entry = await self.mounted.fs.getattr((await self._resolve(path)).inode)
            size = 0 if entry.is_dir else entry.size
            mtime_ns = entry.mtime_ns if path in self.chosen_mtimes else 0
            return file_type_and_mode(entry, self.mounted.fs.config), size, mtime_ns

        def ask_plain() -> Answer:
            status = os.stat(self.plain / path)
            size = 0 if os.path.isdir(self.plain / path) else status.st_size
            return status.st_mode, size, status.st_mtime_ns if path in self.chosen_mtimes else 0

        assert await self._ours(ask) == theirs(ask_plain)

    async def read_directory(self, path: str, piece: int, remove: bool) -> None:
        """In pieces; with ``remove``, the first file of every piece is deleted while the listing goes on."""
        if not (self.plain / path).is_dir():
            return
        inode = (await self._resolve(path)).inode if path else ROOT_INODE
        names = sorted(os.listdir(self.plain / path))
        await self.mounted.fs.opendir(inode)
        seen: list[str] = []
        after = 0
        while True:
            entries = [entry for _, entry in zip(range(piece), self.mounted.fs.readdir(inode, after), strict=False)]
            if not entries:
                break
            seen += [entry.name.decode() for entry in entries]
            after = entries[-1].cookie
            files = [entry.name.decode() for entry in entries if not entry.is_dir]
            if remove and files:
                await self.unlink(f"{path}/{files[0]}" if path else files[0])
        assert sorted(seen) == names

    # -- files

    async def open(self, path: str, flags: int, create: bool) -> None:
        """Flags beyond the access mode: O_TRUNC, O_EXCL."""
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if (self.plain / path).is_dir() and not writable and not flags & os.O_TRUNC:
            return  # that is opendir
        created = os.O_CREAT if create else 0

        async def open_ours() -> Answer:
            fs = self.mounted.fs
            if create:
                parent, name = await self._place(path)
                handle, _ = await fs.create(parent, name, 0o644, flags | os.O_CREAT, os.getuid(), os.getgid())
                return handle
            return await fs.open((await self._resolve(path)).inode, flags)

        expected = theirs(lambda: os.open(self.plain / path, flags | created, 0o644))
        answer = await self._ours(open_ours)
        if isinstance(expected, int) and isinstance(answer, int):
            self.handles.append(Handle(path, answer, expected, writable))
            if flags & os.O_TRUNC or path not in self.chosen_mtimes:
                self._forget_mtime(path)
        else:
            if isinstance(expected, int):
                os.close(expected)
            assert answer == (expected if not isinstance(expected, int) else "success")

    def _handle(self, which: int) -> Handle | None:
        return self.handles[which % len(self.handles)] if self.handles else None

    async def write(self, which: int, offset: int, data: bytes) -> None:
        handle = self._handle(which)
        if handle is None or not handle.writable:
            return
        written = os.pwrite(handle.theirs, data, offset)
        assert await ours(self.mounted.fs.write(handle.ours, offset, data)) == written
        self._forget_mtime(handle.path)

    async def read(self, which: int, offset: int, length: int) -> None:
        handle = self._handle(which)
        if handle is None:
            return
        expected = theirs(lambda: os.pread(handle.theirs, length, offset))
        if expected == "EBADF":  # opened write-only: the kernel refuses
            return
        assert bytes(await self.mounted.fs.read(handle.ours, offset, length)) == expected

    async def truncate_handle(self, which: int, size: int) -> None:
        handle = self._handle(which)
        if handle is None or not handle.writable:
            return
        os.ftruncate(handle.theirs, size)
        inode = self.mounted.fs.handle(handle.ours).file.entry.inode
        await self.mounted.fs.setattr(inode, AttributeChange(size=size), handle.ours)
        self._forget_mtime(handle.path)

    async def truncate(self, path: str, size: int) -> None:
        await self._set(path, AttributeChange(size=size), lambda: os.truncate(self.plain / path, size))
        self._forget_mtime(path)

    async def chmod(self, path: str, mode: int) -> None:
        await self._set(path, AttributeChange(mode=mode), lambda: os.chmod(self.plain / path, mode))

    async def utime(self, path: str, mtime_ns: int) -> None:
        def set_plain() -> None:
            os.utime(self.plain / path, ns=(mtime_ns, mtime_ns))
            if (self.plain / path).is_file():
                self.chosen_mtimes[path] = mtime_ns

        await self._set(path, AttributeChange(mtime_ns=mtime_ns, atime_ns=mtime_ns), set_plain)

    async def _set(self, path: str, change: AttributeChange, set_plain: Callable[[], None]) -> None:
        async def call() -> Answer:
            await self.mounted.fs.setattr((await self._resolve(path)).inode, change)
            return None

        expected = theirs(set_plain)
        assert await self._ours(call) == expected

    async def flush(self, which: int) -> None:
        handle = self._handle(which)
        if handle is not None:
            assert await ours(self.mounted.fs.flush(handle.ours)) is None

    async def fsync(self, which: int) -> None:
        handle = self._handle(which)
        if handle is not None:
            assert await ours(self.mounted.fs.fsync(handle.ours)) is None

    async def close(self, which: int) -> None:
        handle = self._handle(which)
        if handle is None:
            return
        self.handles.remove(handle)
        os.close(handle.theirs)
        assert await ours(self.mounted.close(handle.ours)) is None

    async def save(self, path: str, seed: int, size: int, chunk: int) -> None:
        """A whole file as programs write one: emptied, then front to back in chunks, then closed."""
        before = len(self.handles)
        await self.open(path, os.O_RDWR | os.O_TRUNC, True)
        if len(self.handles) > before:
            data = noise(seed, size)
            for at in range(0, size, chunk):
                await self.write(before, at, data[at : at + chunk])
            await self.close(before)

    async def patch(self, path: str, changes: list[tuple[int, bytes]], close: bool) -> None:
        """A few bytes here and there of a file that exists."""
        before = len(self.handles)
        await self.open(path, os.O_RDWR, False)
        if len(self.handles) > before:
            for offset, data in changes:
                await self.write(before, offset, data)
            if close:
                await self.close(before)

    # -- the mount

    async def expire(self) -> None:
        self.clock.advance(TTL_S + 1)

    async def remount(self, empty: bool) -> None:
        while self.handles:
            await self.close(0)
        await self.unmount()
        self._stack = AsyncExitStack()
        self._mounts += empty
        await self.mount()

    # -- the comparison

    async def compare_everything(self) -> None:
        for which, handle in enumerate(self.handles):
            if handle.writable:
                await self.flush(which)
        while self.handles:
            await self.close(0)
        await self.compare_tree()
        self.compare_store()
        told = self.mounted.fs.statistics()
        assert told["dirty"] == {"files": 0, "bytes": 0, "failed": 0, "orphans": 0}
        assert told["staging"]["bytes"] == 0  # type: ignore[index]
        assert told["cache"]["damaged"] == 0  # type: ignore[index]
        await self.remount(True)
        await self.compare_tree()
        assert list(self._caches.glob("*/meta.damaged*")) == []

    async def compare_tree(self) -> None:
        for directory, below, files in os.walk(self.plain):
            path = os.path.relpath(directory, self.plain)
            path = "" if path == "." else path
            assert await self.mounted.names(path) == sorted(below + files)
            for name in below + files:
                await self.stat(f"{path}/{name}" if path else name)
            for name in files:
                plain = Path(directory, name).read_bytes()
                assert await self.mounted.read(f"{path}/{name}" if path else name) == plain

    def compare_store(self) -> None:
        """Objects are files: everything, and nothing else, lies in the store under its own name."""
        assert self.store.list_multipart("") == []
        stored = {meta.key: meta for meta in self.store.list_page("").objects if not meta.key.endswith("/")}
        plain = {str(path.relative_to(self.plain)): path for path in self.plain.rglob("*") if path.is_file()}
        assert sorted(stored) == sorted(plain)
        for key, path in plain.items():
            data = path.read_bytes()
            assert bytes(self.store.get(key, 0, max(1, len(data))).data) == data

    def remove(self) -> None:
        shutil.rmtree(self.store_dir.parent)
