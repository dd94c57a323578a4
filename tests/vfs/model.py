"""Operations on a mounted lake and on a plain directory side by side, and the comparison of both.

Every operation answers a plain value or an errno from either side; they must be equal. The lake is asked as the kernel
asks: a path is looked up name by name, `close` is flush and release. A second lake over the same store polls now and
then, and must show the same as soon as it did.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.store.protocol import ObjectStore
from lakefs_fuse.vfs.ops.attributes import AttributeChange, file_type_and_mode
from tests.fakes import local_store
from tests.memory_store import MemoryStore
from tests.tiers import sized
from tests.upload.drafting import noise
from tests.vfs.lakes import RENAME_EXCHANGE, TTL_S, Clock, Lake, lake

NS = 1_000_000_000
FILES = ("a", "b", "d/x", "d/y", "d/e/z", "d/e")
DIRECTORIES = ("d", "d/e", "b", "q")
LIBC = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
TICK_S = 0.001
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


def searched(full: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Try ``full`` sequences an eighth or ten times in the tiers, the same every day.

    ``LAKEFS_MODEL_EXAMPLES`` sets another number, of others each time. With ``LAKEFS_MODEL_NO_SHRINK`` a failure is
    shown as it was found, for failures that depend on timing.
    """
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    if "LAKEFS_MODEL_NO_SHRINK" not in os.environ:
        phases.append(Phase.shrink)
    asked_for = os.environ.get("LAKEFS_MODEL_EXAMPLES")
    chosen = settings(
        max_examples=int(asked_for or sized(full // 8, full * 10)),
        deadline=None,
        derandomize=asked_for is None,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return lambda test: pytest.mark.filterwarnings("ignore:Generating overly large repr")(chosen(test))


@dataclass
class Handle:
    path: str
    ours: int
    theirs: int
    writable: bool


def refused_by_kernel(old: str, new: str, entries: list[Entry | None], flags: int) -> str:
    """What the kernel answers itself, knowing the directories: nothing moves into itself."""
    source, target = entries
    if source is None:
        return "ENOENT"
    if flags and flags != RENAME_EXCHANGE and target is not None:
        return "EEXIST"
    if flags == RENAME_EXCHANGE and target is None:
        return "ENOENT"
    if new.startswith(old + "/"):
        return "EINVAL"
    if old.startswith(new + "/"):
        return "EINVAL" if flags == RENAME_EXCHANGE else "ENOTEMPTY"
    return ""


def renameat2(old: Path, new: Path, flags: int) -> None:
    arguments = AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags
    if LIBC.renameat2(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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

    def __init__(self, root: Path, *, in_memory: bool, pack: str) -> None:
        self.plain, self._caches = root / "plain", root / "caches"
        self._store_dir = store_dir = root / "lake"
        for directory in (store_dir, self.plain, self._caches):
            directory.mkdir(parents=True)
        self.clock = Clock()
        self.store: ObjectStore
        if in_memory:
            self.store = MemoryStore(page_keys_max=3)
        else:
            self.store = local_store(str(store_dir), self.clock)
        self.settings: dict[str, object] = {"pack": pack}
        self.handles: list[Handle] = []
        self.chosen_mtimes: dict[str, int] = {}
        self._mounts = 0
        self._stack = AsyncExitStack()
        self.mounted: Lake
        self.second: Lake

    @property
    def cache(self) -> Path:
        """Of the mount that is there, or comes next."""
        return self._caches / str(self._mounts)

    async def mount(self) -> None:
        mount = lake(self.store, self.cache, clock=self.clock, **self.settings)  # type: ignore[arg-type]
        self.mounted = await self._stack.enter_async_context(mount)

    async def unmount(self) -> None:
        await self._stack.aclose()

    async def run(self, operations: list[Operation]) -> None:
        pack = {"pack": self.settings["pack"]}
        second = lake(self.store, self._caches / "second", clock=self.clock, **pack)  # type: ignore[arg-type]
        async with second as self.second:
            await self.mount()
            try:
                for operation in operations:
                    self.clock.advance(TICK_S)
                    await getattr(self, operation.what)(*operation.arguments)
                await self.compare_everything()
            finally:
                for handle in self.handles:
                    os.close(handle.theirs)
                await self.unmount()

    # -- names

    def _forget_mtime(self, path: str) -> None:
        self.chosen_mtimes.pop(path, None)

    async def _resolve(self, path: str, mounted: Lake | None = None) -> Entry:
        parent, entry = ROOT_INODE, None
        for component in path.split("/"):
            if entry is not None and entry.is_symlink:
                raise FileNotFoundError  # where links lead, there is nothing
            entry, _ = await (mounted or self.mounted).fs.lookup(parent, component.encode())
            if entry is None:
                raise FileNotFoundError
            parent = entry.inode
        assert entry is not None
        return entry

    async def _place(self, path: str) -> tuple[int, bytes]:
        above, _, name = path.rpartition("/")
        directory = await self._resolve(above) if above else None
        if directory is not None and directory.is_symlink:
            raise FileNotFoundError
        return (directory.inode if directory else ROOT_INODE), name.encode()

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

    async def rename(self, old: str, new: str, flags: int) -> None:
        expected = theirs(lambda: renameat2(self.plain / old, self.plain / new, flags))

        async def move() -> Answer:
            source, target = await self._place(old), await self._place(new)
            entries = [(await self.mounted.fs.lookup(*place))[0] for place in (source, target)]
            refused = refused_by_kernel(old, new, entries, flags)
            if refused:
                return refused
            await self.mounted.fs.rename(*source, *target, flags)
            return None

        answer = await self._ours(move)
        assert answer == expected, (old, new, flags, answer, expected)
        if expected is None and old != new:
            self._renamed(old, new, flags == RENAME_EXCHANGE)

    def _renamed(self, old: str, new: str, exchange: bool) -> None:
        moved = {old: new, new: old} if exchange else {old: new, new: ""}

        def now(path: str) -> str:
            for before, after in moved.items():
                if path == before or path.startswith(before + "/"):
                    return after + path[len(before) :] if after else ""
            return path

        self.chosen_mtimes = {now(path): mtime_ns for path, mtime_ns in self.chosen_mtimes.items() if now(path)}
        for handle in self.handles:
            handle.path = now(handle.path)

    async def symlink(self, path: str, target: str) -> None:
        async def make(parent: int, name: bytes) -> Answer:
            await self.mounted.fs.symlink(parent, name, target.encode(), os.getuid(), os.getgid())
            return None

        expected = theirs(lambda: os.symlink(target, self.plain / path))
        assert await self._named(path, make) == expected

    async def stat(self, path: str) -> None:
        assert await self._status(self.mounted, path) == theirs(lambda: self._plain_status(path))

    async def _status(self, mounted: Lake, path: str) -> Answer:
        """Type, mode, size or target, chosen mtime and extended attributes of a path."""

        async def ask() -> Answer:
            entry = await mounted.fs.getattr((await self._resolve(path, mounted)).inode)
            names = mounted.fs.xattr_names(entry.inode)
            xattrs = {name: mounted.fs.xattr(entry.inode, name) for name in names}
            mtime_ns = entry.mtime_ns if path in self.chosen_mtimes else 0
            if entry.is_symlink:
                return stat.S_IFLNK, mounted.fs.readlink(entry.inode), xattrs
            size = 0 if entry.is_dir else entry.size
            return file_type_and_mode(entry, mounted.fs.config), size, mtime_ns, xattrs

        return await self._ours(ask)

    def _plain_status(self, path: str) -> Answer:
        plain = self.plain / path
        status = os.lstat(plain)
        xattrs: dict[str, bytes] = {}
        if stat.S_ISLNK(status.st_mode):
            return stat.S_IFLNK, os.readlink(plain).encode(), xattrs
        xattrs = {name: os.getxattr(plain, name) for name in os.listxattr(plain) if name.startswith("user.")}
        size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
        return status.st_mode, size, status.st_mtime_ns if path in self.chosen_mtimes else 0, xattrs

    async def set_xattr(self, path: str, name: str, value: bytes | None) -> None:
        plain = self.plain / path
        if plain.is_symlink():
            return  # the kernel refuses user.* there

        def set_plain() -> None:
            if value is None:
                os.removexattr(plain, name)
            else:
                os.setxattr(plain, name, value)

        async def set_ours() -> Answer:
            await self.mounted.fs.set_xattr((await self._resolve(path)).inode, name, value)
            return None

        expected = theirs(set_plain)
        assert await self._ours(set_ours) == expected

    async def read_directory(self, path: str, piece: int, remove: bool) -> None:
        """In pieces; with ``remove``, the first file of every piece is deleted while the listing goes on."""
        if not (self.plain / path).is_dir() or (self.plain / path).is_symlink():
            return
        inode = (await self._resolve(path)).inode if path else ROOT_INODE
        names = sorted(os.listdir(self.plain / path))
        await self.mounted.fs.opendir(inode)
        seen: list[str] = []
        after = 0
        while True:
            await self.mounted.fs.more_names(inode, after)
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
        if (self.plain / path).is_symlink():
            return  # the kernel opens what it leads to
        if (self.plain / path).is_dir() and not writable and not flags & os.O_TRUNC:
            return  # that is opendir
        created = os.O_CREAT if create else 0
        sends_create = create and (flags & os.O_EXCL or not os.path.lexists(self.plain / path))

        async def open_ours() -> Answer:
            fs = self.mounted.fs
            if sends_create:
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
            if (self.plain / path).is_file() and not (self.plain / path).is_symlink():
                self.chosen_mtimes[path] = mtime_ns

        await self._set(path, AttributeChange(mtime_ns=mtime_ns, atime_ns=mtime_ns), set_plain)

    async def _set(self, path: str, change: AttributeChange, set_plain: Callable[[], None]) -> None:
        if (self.plain / path).is_symlink():
            return  # the kernel follows it

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

    # -- the mounts

    async def expire(self) -> None:
        self.clock.advance(TTL_S + 1)

    async def sync_names(self) -> None:
        await self.mounted.fs.sync_names()

    async def settle(self) -> None:
        """Everything is in the store, and what nobody wants is gone from it."""
        for which, handle in enumerate(self.handles):
            if handle.writable:
                await self.flush(which)
        await self.mounted.sync()

    async def second_mount_sees(self) -> None:
        """Once it polled; plain objects are found within the TTL."""
        await self.settle()
        await self.expire()
        await self.second.poll()
        await self.compare_tree(self.second, being_written={handle.path for handle in self.handles if handle.path})

    async def remount(self, empty: bool) -> None:
        while self.handles:
            await self.close(0)
        if empty:
            await self.mounted.sync()
        await self.unmount()
        self._stack = AsyncExitStack()
        self._mounts += empty
        await self.mount()

    # -- the comparison

    async def compare_everything(self) -> None:
        await self.settle()
        while self.handles:
            await self.close(0)
        await self.compare_tree(self.mounted)
        await self.mounted.sync()
        self.compare_store()
        told = self.mounted.fs.statistics()
        assert told["dirty"] == {"files": 0, "bytes": 0, "failed": 0, "orphans": 0}
        assert told["staging"]["bytes"] == 0  # type: ignore[index]
        assert told["cache"]["damaged"] == 0  # type: ignore[index]
        assert told["commits"]["damaged"] == 0  # type: ignore[index]
        await self.second_mount_sees()
        await self.remount(False)
        await self.compare_tree(self.mounted)
        await self.remount(True)
        await self.compare_tree(self.mounted)
        assert list(self._caches.glob("*/meta.damaged*")) == []

    async def compare_tree(self, mounted: Lake, being_written: frozenset[str] | set[str] = frozenset()) -> None:
        for directory, below, files in os.walk(self.plain):
            path = os.path.relpath(directory, self.plain)
            path = "" if path == "." else path
            assert await mounted.names(path) == sorted(below + files)
            for name in below + files:
                named = f"{path}/{name}" if path else name
                if named not in being_written:
                    assert await self._status(mounted, named) == self._plain_status(named), named
            for name in files:
                plain = Path(directory, name)
                if not plain.is_symlink():
                    assert await mounted.read(f"{path}/{name}" if path else name) == plain.read_bytes()

    crashes = 0
    """Daemons that died. Each may have stored a hidden object whose file the next one stores under its own name: a key
    that was reserved is free then. `gc` deletes the object."""

    def uploads_with_parts(self) -> list[str]:
        """Ids of unfinished uploads, but for those of which the daemon never learnt: these have no parts."""
        if isinstance(self.store, MemoryStore):
            return [upload_id for upload_id, upload in self.store.uploads.items() if upload.parts]
        ids = [upload.upload_id for upload in self.store.list_multipart("")]
        return [upload_id for upload_id in ids if any(self._store_dir.glob(f"**/{upload_id}/[0-9]*"))]

    def compare_store(self) -> None:
        """No part is left over, and a plain object under a file's own name is that file."""
        assert self.uploads_with_parts() == []
        token, keys = None, []
        while True:
            page = self.store.list_page("", token=token)
            keys += [meta.key for meta in page.objects if not meta.key.endswith("/")]
            token = page.next_token
            if token is None:
                break
        own = [key for key in keys if not key.startswith(".lakefs/")]
        used = {row.key for row in self.mounted.parts.namespace.tree.objects.rows() if row.entries}
        for key in own:
            plain = self.plain / key
            if key not in used:
                data = plain.read_bytes()
                assert bytes(self.store.get(key, 0, max(1, len(data))).data) == data
        left = {key for key in keys if key.startswith(OBJECTS)} - used
        assert len(left) <= self.crashes, left
