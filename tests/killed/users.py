"""A user who changes a lake at random, and knows what must be there after any kill.

What always holds: `User.certain` is what was acknowledged; with `User.pending`, where it is not None, all of that was
done to it or nothing. Files are named a to e and directories p to s: a store that is a local directory cannot hold a
key below another key, which a renamed file may leave for a while.
"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from tests.vfs.lakes import Lake

FILES, DIRECTORIES = "abcde", "pqrs"
SIZES = (0, 1, 50, 3000, 70_000, 200_000)
MODES = (0o600, 0o640, 0o644, 0o750, 0o755)
HANDLES_MAX = 3


@dataclass(frozen=True)
class Node:
    """A name as an observer sees it. ``mtime_ns`` is None where nobody chose one; ``unclosed`` are bytes that were
    written since, through a handle with that number."""

    kind: str
    content: bytes | str = b""
    mode: int = 0o644
    mtime_ns: int | None = None
    xattrs: dict[str, bytes] = field(default_factory=dict)
    unclosed: bytes | None = None
    handle: int = 0


Model = dict[str, Node]


@dataclass(frozen=True)
class Step:
    """``act`` makes ``after`` of what was there."""

    text: str
    act: Callable[[Lake], Awaitable[object]]
    after: Model


class User:
    """See the module's head. Everything is below the directory ``name``."""

    def __init__(self, name: str, rng: random.Random, certain: Model, pending: Model | None) -> None:
        self.name, self._rng = name, rng
        self.certain, self.pending = certain, pending
        self._handles: dict[int, int] = {}
        self._count = 0
        usual, often, rare = 2, 4, 1
        self._makers: list[Callable[[], Step | None]] = [
            *[self._create] * often, *[self._overwrite] * often, *[self._append] * usual, *[self._truncate] * rare,
            *[self._rename] * often, *[self._rename_directory] * usual, *[self._unlink] * usual, *[self._mkdir] * usual,
            *[self._rmdir] * rare, *[self._chmod] * usual, *[self._utime] * rare, *[self._set_xattr] * rare,
            *[self._symlink] * rare, *[self._hold] * usual, *[self._let_go] * usual, *[self._fsync] * rare,
        ]  # fmt: skip

    def step(self) -> Step:
        while (made := self._rng.choice(self._makers)()) is None:
            pass
        return made

    def pause_s(self, choices: tuple[float, ...]) -> float:
        """Until the next step."""
        return self._rng.choice(choices) * self._rng.random()

    # -- choosing

    def _of(self, *kinds: str, closed: bool = False) -> str | None:
        names = [
            path
            for path, node in self.certain.items()
            if node.kind in kinds and not (closed and node.unclosed is not None)
        ]
        return self._rng.choice(names) if names else None

    def _new_name(self, letters: str) -> str:
        above = self._rng.choice([self.name, *(path for path, node in self.certain.items() if node.kind == "dir")])
        return f"{above}/{self._rng.choice(letters)}"

    def _data(self) -> bytes:
        self._count += 1
        size = self._rng.choice(SIZES)
        return (f"{self.name}-{self._rng.getrandbits(32):08x}-{self._count}-".encode() * (size // 8 + 1))[:size]

    def _with(self, path: str, **changes: object) -> Model:
        return self.certain | {path: replace(self.certain[path], **changes)}  # type: ignore[arg-type]

    # -- bytes

    def _create(self) -> Step | None:
        path, data = self._new_name(FILES), self._data()
        if path in self.certain:
            return None
        return Step(f"create {path}", lambda lake: lake.write(path, data), self.certain | {path: Node("file", data)})

    def _overwrite(self) -> Step | None:
        path, data = self._of("file", closed=True), self._data()
        if path is None:
            return None

        async def act(lake: Lake) -> None:
            handle = await lake.open(path, os.O_RDWR | os.O_TRUNC)
            await lake.fs.write(handle, 0, data)
            await lake.close(handle)

        return Step(f"overwrite {path}", act, self._with(path, content=data, mtime_ns=None))

    def _append(self) -> Step | None:
        path, data = self._of("file", closed=True), self._data() or b"z"
        if path is None:
            return None
        before = self.certain[path].content
        assert isinstance(before, bytes)

        async def act(lake: Lake) -> None:
            handle = await lake.open(path, os.O_RDWR)
            await lake.fs.write(handle, len(before), data)
            await lake.close(handle)

        return Step(f"append {path}", act, self._with(path, content=before + data, mtime_ns=None))

    def _truncate(self) -> Step | None:
        path = self._of("file", closed=True)
        if path is None:
            return None
        before = self.certain[path].content
        assert isinstance(before, bytes)
        size = self._rng.randrange(len(before) + 100)
        after = self._with(path, content=(before + bytes(size))[:size], mtime_ns=None)
        return Step(f"truncate {path} to {size}", lambda lake: lake.setattr(path, size=size), after)

    def _hold(self) -> Step | None:
        """Opened and emptied, written to, and kept open: until it is closed, a death leaves what was there."""
        path, data = self._of("file", closed=True), self._data()
        if path is None or len(self._handles) == HANDLES_MAX:
            return None
        self._count += 1
        number = self._count

        async def act(lake: Lake) -> None:
            self._handles[number] = await lake.open(path, os.O_RDWR | os.O_TRUNC)
            await lake.fs.write(self._handles[number], 0, data)

        return Step(f"hold {path}", act, self._with(path, unclosed=data, handle=number))

    def _let_go(self) -> Step | None:
        return self._through_handle("close", lambda lake, number: lake.close(self._handles.pop(number)), closes=True)

    def _fsync(self) -> Step | None:
        return self._through_handle("fsync", lambda lake, number: lake.fs.fsync(self._handles[number]), closes=False)

    def _through_handle(
        self, what: str, call: Callable[[Lake, int], Awaitable[object]], *, closes: bool
    ) -> Step | None:
        if not self._handles:
            return None
        number = next(iter(self._handles))
        after = {
            path: replace(node, content=node.unclosed, mtime_ns=None, unclosed=None if closes else node.unclosed)
            if node.handle == number and node.unclosed is not None
            else node
            for path, node in self.certain.items()
        }
        return Step(f"{what} {number}", lambda lake: call(lake, number), after)

    # -- names

    def _rename(self) -> Step | None:
        old, other = self._of("file", "link"), self._of("file", "link")
        new = other if other is not None and self._rng.random() < 0.5 else self._new_name(FILES)
        if old is None or old == new:
            return None
        after = {path: node for path, node in self.certain.items() if path != old} | {new: self.certain[old]}
        return Step(f"rename {old} {new}", lambda lake: lake.rename(old, new), after)

    def _rename_directory(self) -> Step | None:
        old, new = self._of("dir"), self._new_name(DIRECTORIES)
        if old is None or new in self.certain or f"{new}/".startswith(f"{old}/"):
            return None
        after = {
            new + path[len(old) :] if f"{path}/".startswith(f"{old}/") else path: node
            for path, node in self.certain.items()
        }
        return Step(f"rename {old}/ {new}/", lambda lake: lake.rename(old, new), after)

    def _unlink(self) -> Step | None:
        path = self._of("file", "link")
        return None if path is None else self._gone(f"unlink {path}", lambda lake: lake.unlink(path), path)

    def _rmdir(self) -> Step | None:
        path = self._of("dir")
        if path is None or any(other.startswith(f"{path}/") for other in self.certain):
            return None
        return self._gone(f"rmdir {path}", lambda lake: lake.rmdir(path), path)

    def _gone(self, text: str, act: Callable[[Lake], Awaitable[object]], path: str) -> Step:
        return Step(text, act, {other: node for other, node in self.certain.items() if other != path})

    def _mkdir(self) -> Step | None:
        path = self._new_name(DIRECTORIES)
        if path in self.certain:
            return None
        return Step(f"mkdir {path}", lambda lake: lake.mkdir(path), self.certain | {path: Node("dir", mode=0o755)})

    def _symlink(self) -> Step | None:
        path, target = self._new_name(FILES), f"to-{self._rng.getrandbits(32):08x}"
        if path in self.certain:
            return None
        after = self.certain | {path: Node("link", target, 0o777)}
        return Step(f"symlink {path}", lambda lake: lake.symlink(path, target), after)

    # -- attributes

    def _chmod(self) -> Step | None:
        path, mode = self._of("file", "dir", closed=True), self._rng.choice(MODES)
        if path is None:
            return None
        return Step(f"chmod {path} {mode:o}", lambda lake: lake.setattr(path, mode=mode), self._with(path, mode=mode))

    def _utime(self) -> Step | None:
        path, time_ns = self._of("file", closed=True), 1_400_000_000_000_000_000 + self._rng.randrange(10**17)
        if path is None:
            return None
        after = self._with(path, mtime_ns=time_ns)
        return Step(f"utime {path}", lambda lake: lake.setattr(path, mtime_ns=time_ns, atime_ns=time_ns), after)

    def _set_xattr(self) -> Step | None:
        path, value = self._of("file", closed=True), self._rng.randbytes(8)
        if path is None:
            return None
        after = self._with(path, xattrs=self.certain[path].xattrs | {"user.x": value})
        return Step(f"set xattr of {path}", lambda lake: lake.set_xattr(path, "user.x", value), after)


def settled(model: Model) -> Model:
    """What a death leaves of it: nobody has anything open."""
    return {path: replace(node, unclosed=None, handle=0) for path, node in model.items()}


async def seen(lake: Lake, top: str) -> Model:
    """Everything below a directory. Raises Missing, and FileError."""
    found: Model = {}
    for name in await lake.names(top):
        path = f"{top}/{name}"
        entry = await lake.getattr(path)
        if entry.is_dir:
            found |= {path: Node("dir", mode=entry.mode)} | await seen(lake, path)
        elif entry.is_symlink:
            found[path] = Node("link", await lake.readlink(path), 0o777)
        else:
            data, xattrs = await lake.read(path), await lake.xattrs(path)
            found[path] = Node("file", data, entry.mode, entry.mtime_ns, xattrs)
    return found


def differences(expected: Model, found: Model) -> list[str]:
    """In words."""
    told = []
    for path in sorted(expected.keys() | found.keys()):
        want, got = expected.get(path), found.get(path)
        if want is None or got is None:
            told.append(f"{path}: {'is there' if want is None else 'is not there'}")
        elif (want.kind, want.content) != (got.kind, got.content):
            told.append(f"{path}: {want.kind} {want.content[:30]!r}… became {got.kind} {got.content[:30]!r}…")
        elif want.kind != "link" and want.mode != got.mode:
            told.append(f"{path}: mode {want.mode:o} became {got.mode:o}")
        elif want.mtime_ns not in (None, got.mtime_ns):
            told.append(f"{path}: mtime {want.mtime_ns} became {got.mtime_ns}")
        elif want.xattrs != got.xattrs:
            told.append(f"{path}: extended attributes {want.xattrs} became {got.xattrs}")
    return told
