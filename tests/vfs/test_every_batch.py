"""A death after each single write to the metadata cache: an operation was done then, or it was not, for everybody.

Each runs once on a mount under write-back, with files that are stored and files that wait; what it leaves on the disk
and in the store after every write is mounted again, stored, and read from another node. `LAKEFS_TEST_AGAIN=99`: and
dies again, after each write of that mount until all is stored (two minutes).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from lakefs_fuse.meta.database import Batch, Database
from tests.killed.users import Model, differences, seen
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock, Lake, lake
from tests.vfs.writing_back import NEVER_S, Outage, die, rewrite, told, writing_back

pytestmark = pytest.mark.usefixtures("noted_one_by_one")

TOP = "top"
AGAIN = range(int(os.environ.get("LAKEFS_TEST_AGAIN", "0")))
"""Of the first deaths, those after which there is another."""
CHOSEN_NS = 1_600_000_000_123_456_789
Operation = Callable[[Lake], Awaitable[object]]


async def append(m: Lake, path: str) -> None:
    handle = await m.open(path, os.O_RDWR)
    await m.fs.write(handle, (await m.getattr(path)).size, b" and more")
    await m.close(handle)


OPERATIONS: dict[str, Operation] = {
    "create": lambda m: m.write("top/new", b"new"),
    "rewrite stored": lambda m: rewrite(m, "top/stored", b"again"),
    "rewrite waiting": lambda m: rewrite(m, "top/waiting", b"again"),
    "append to stored": lambda m: append(m, "top/stored"),
    "append to rewritten": lambda m: append(m, "top/rewritten"),
    "truncate stored": lambda m: m.setattr("top/stored", size=2),
    "chmod stored": lambda m: m.setattr("top/stored", mode=0o600),
    "chmod rewritten": lambda m: m.setattr("top/rewritten", mode=0o600),
    "utime waiting": lambda m: m.setattr("top/waiting", mtime_ns=CHOSEN_NS, atime_ns=CHOSEN_NS),
    "chmod directory": lambda m: m.setattr("top/dir", mode=0o700),
    "xattr of stored": lambda m: m.set_xattr("top/stored", "user.a", b"1"),
    "xattr of waiting": lambda m: m.set_xattr("top/waiting", "user.a", b"1"),
    "xattr of rewritten": lambda m: m.set_xattr("top/rewritten", "user.b", b"1"),
    "no xattr of rewritten": lambda m: m.set_xattr("top/rewritten", "user.b", None),
    "mkdir": lambda m: m.mkdir("top/dir/new"),
    "rmdir": lambda m: m.rmdir("top/empty"),
    "symlink": lambda m: m.symlink("top/new", "there"),
    "unlink stored": lambda m: m.unlink("top/stored"),
    "unlink waiting": lambda m: m.unlink("top/waiting"),
    "unlink rewritten": lambda m: m.unlink("top/rewritten"),
    "unlink link": lambda m: m.unlink("top/link"),
    "rename stored": lambda m: m.rename("top/stored", "top/dir/new"),
    "rename waiting": lambda m: m.rename("top/waiting", "top/dir/new"),
    "rename rewritten": lambda m: m.rename("top/rewritten", "top/dir/new"),
    "rename link": lambda m: m.rename("top/link", "top/dir/new"),
    "rename stored over waiting": lambda m: m.rename("top/stored", "top/waiting"),
    "rename stored over rewritten": lambda m: m.rename("top/stored", "top/rewritten"),
    "rename waiting over stored": lambda m: m.rename("top/waiting", "top/stored"),
    "rename waiting over rewritten": lambda m: m.rename("top/waiting", "top/rewritten"),
    "rename rewritten over stored": lambda m: m.rename("top/rewritten", "top/stored"),
    "rename rewritten over waiting": lambda m: m.rename("top/rewritten", "top/waiting"),
    "rename link over rewritten": lambda m: m.rename("top/link", "top/rewritten"),
    "rename empty directory": lambda m: m.rename("top/empty", "top/dir/new"),
    "rename directory": lambda m: m.rename("top/dir", "top/moved"),
    "exchange": lambda m: m.rename("top/stored", "top/dir/stored", 2),
}  # fmt: skip

SHORT = {
    "create", "rewrite stored", "append to rewritten", "truncate stored", "chmod rewritten", "xattr of waiting",
    "no xattr of rewritten", "mkdir", "symlink", "unlink waiting", "unlink rewritten", "rename waiting",
    "rename stored over waiting", "rename rewritten over stored", "rename directory", "exchange",
}  # fmt: skip
"""Of each kind of operation one or two, the one with the most rows first; the simulation kills nodes after others."""


async def prepare(m: Lake) -> None:
    """Some of everything, all stored."""
    for path in (TOP, "top/dir", "top/dir/below", "top/empty"):
        await m.mkdir(path)
    for path in ("top/stored", "top/rewritten", "top/dir/stored", "top/dir/below/stored"):
        await m.write(path, path.encode())
    await m.symlink("top/link", "target")
    await m.set_xattr("top/rewritten", "user.b", b"2")
    await m.fs.make_durable()
    await m.sync()


def as_left(store: MemoryStore) -> MemoryStore:
    """As it is now, whatever comes to it later."""
    left = MemoryStore(store.capabilities)
    left.objects, left.uploads, left.serial = copy(store.objects), deepcopy(store.uploads), store.serial
    return left


async def look(m: Lake) -> Model:
    """Times count where they were chosen."""
    found = await seen(m, TOP)
    unchosen = {path: replace(node, mtime_ns=None) for path, node in found.items() if node.mtime_ns != CHOSEN_NS}
    return found | unchosen


class Deaths:
    """What the cache directory and the store are after each write to the metadata cache, while `seen` lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path, store: MemoryStore) -> None:
        self._monkeypatch, self._cache, self._store = monkeypatch, cache, store
        self.left: list[tuple[Path, MemoryStore]] = []

    @contextmanager
    def seen(self) -> Iterator[None]:
        with self._monkeypatch.context() as patched:
            for name in ("commit", "commit_volatile"):
                patched.setattr(Database, name, self._followed(getattr(Database, name)))
            yield

    def _followed(self, commit: Callable[..., None]) -> Callable[..., None]:
        def committed(database: Database, batch: Batch, **how: bool) -> None:
            is_empty = not batch
            commit(database, batch, **how)
            if not is_empty:
                dead = die(self._cache, self._cache.with_name(f"{self._cache.name}.{len(self.left)}"))
                self.left.append((dead, as_left(self._store)))

        return committed


async def check(clock: Clock, pack: str, dead: Path, store: MemoryStore, outcomes: list[Model]) -> None:
    """What a daemon left is one of the outcomes, and stays that, here and elsewhere."""

    def wrong(found: Model) -> list[str]:
        return min((differences(each, found) for each in outcomes), key=len)

    async with writing_back(store, dead, clock=clock, pack=pack) as m:
        assert not (lines := wrong(await look(m))), f"{dead.name}: {lines}"
        await m.fs.make_durable()
        await m.sync()
        assert told(m)["conflicts"] == 0
        found = await look(m)
        assert not (lines := wrong(found)), f"{dead.name}, stored: {lines}"
    async with lake(store, dead.with_name(f"{dead.name}-other"), clock=clock) as other:
        assert not (lines := differences(found, await look(other))), f"{dead.name}, elsewhere: {lines}"


@pytest.mark.parametrize("pack", ["never", pytest.param("always", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in OPERATIONS]
)
async def test_it_is_done_or_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pack: str) -> None:
    store, clock, cache = MemoryStore(), Clock(), tmp_path / "cache"
    async with writing_back(store, cache, clock=clock, pack=pack) as m:
        await prepare(m)
    deaths = Deaths(monkeypatch, cache, store)
    async with writing_back(store, cache, clock=clock, pack=pack, delay_s=NEVER_S) as m:
        if name != "exchange":  # which is made in the store
            Outage(store)
        await rewrite(m, "top/rewritten", b"rewritten")
        await m.write("top/waiting", b"waiting")
        before = await look(m)
        with deaths.seen():
            await OPERATIONS[name](m)
        after = await look(m)
    assert before != after
    assert deaths.left
    for number, (dead, its_store) in enumerate(deaths.left):
        again = Deaths(monkeypatch, dead, its_store)
        if number in AGAIN:
            with again.seen():
                async with writing_back(its_store, dead, clock=clock, pack=pack) as m:
                    await m.fs.make_durable()
                    await m.sync()
        for dead_again, store_again in again.left:
            await check(clock, pack, dead_again, store_again, [before, after])
        await check(clock, pack, dead, its_store, [before, after])
