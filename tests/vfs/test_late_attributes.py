"""Attributes that are set while the bytes of an accepted file are on their way, and the daemon dies before it knows; or
while the store is asked for those that an object has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.commits import committer
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import MTIME_NS_MAX, MTIME_NS_MIN
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.writeback import publisher
from lakefs_fuse.vfs.writeback.publisher import Publisher
from lakefs_fuse.vfs.writeback.stored_version import Publication
from tests.memory_store import MemoryStore, Pause, Request
from tests.upload.drafting import reached
from tests.vfs.lakes import Clock, lake, permissions, two_lakes
from tests.vfs.writing_back import LARGE, NEVER_S, die, rewrite, until, writing_back

NS = 1_000_000_000
CHOSEN_NS = 1_600_000_000 * NS + 5


@pytest.mark.parametrize("there", [False, True], ids=["new", "rewritten"])
@pytest.mark.parametrize("pack", ["always", "never"])
@pytest.mark.parametrize("what", ["mode", "mtime", "xattr"])
async def test_they_are_told_by_the_next_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, pack: str, there: bool
) -> None:
    store, left = MemoryStore(), tmp_path / "left"

    def dying(name: str) -> None:
        if name == ("commit.sent" if pack == "always" else "publish.sent") and store.hook is pause:
            store.hook = lambda _request, _when: None
            die(tmp_path / "cache", left)

    def sends(request: Request) -> bool:
        return request.what == "put" and (request.key == "f" or request.key.startswith(".lakefs/commits/"))

    pause = Pause(sends)
    for module in (committer, publisher):
        monkeypatch.setattr(module, "reached", dying)
    async with writing_back(store, tmp_path / "cache", pack=pack) as m:
        if there:
            await m.write("f", b"old")
            await m.fs.make_durable()
            await m.sync()
        store.hook = pause
        await (rewrite if there else type(m).write)(m, "f", b"bytes")
        await reached(pause.reached)
        if what == "mode":
            await m.setattr("f", mode=0o600)
        elif what == "mtime":
            await m.setattr("f", mtime_ns=CHOSEN_NS, atime_ns=1)
        else:
            await m.set_xattr("f", "user.a", b"late")
        pause.resume()
        await until(left.exists)
    async with writing_back(store, left, pack=pack) as m:
        await m.fs.make_durable()
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"f": b"bytes"}
        entry = await other.getattr("f")
        assert (permissions(entry) == 0o600) == (what == "mode")
        assert (entry.mtime_ns == CHOSEN_NS) == (what == "mtime")
        assert await other.xattrs("f") == ({"user.a": b"late"} if what == "xattr" else {})


@pytest.mark.parametrize("when", ["before", "after"])
async def test_of_two_the_later_stays_though_it_was_held_when_the_earlier_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The later waits for a file that is still on its way; the pack that has the bytes tells it, and passes it."""
    store, left = MemoryStore(), tmp_path / "left"
    slow = Clock()
    slow.advance(-1000)  # the store's dates are all later than what this node does
    record = Publisher._record  # noqa: SLF001  # no failpoint has both sides of it

    def dying(self: Publisher, published: Sequence[Publication]) -> tuple[list[Draft], LakeError | None]:
        recorded = record(self, published) if when == "after" else None
        if not left.exists():
            die(tmp_path / "cache", left)
        return recorded or record(self, published)

    pause = Pause(lambda request: request.what == "upload_part")
    async with writing_back(store, tmp_path / "cache", pack="always", delay_s=NEVER_S, clock=slow) as m:
        await m.write("f", b"old")
        await m.write("gone", b"")
        await m.fs.make_durable()
        await m.sync()
        store.hook = pause
        await rewrite(m, "f", b"new")
        await m.set_xattr("f", "user.a", b"earlier")
        handle = await m.create("large")
        await m.fs.write(handle, 0, bytes(LARGE))
        await m.close(handle)
        await m.unlink("gone")  # waits for it, and what comes after waits, too
        await m.set_xattr("f", "user.a", b"later")
        monkeypatch.setattr(Publisher, "_record", dying)
        with trio.move_on_after(1):
            await m.fs.make_durable("f")
        assert left.exists()
        monkeypatch.undo()
        pause.resume()
    store.hook = lambda _request, _when: None
    async with writing_back(store, left, pack="always", clock=slow) as m:
        assert await m.xattrs("f") == {"user.a": b"later"}
        await m.fs.make_durable()
        await m.sync()
        assert await m.xattrs("f") == {"user.a": b"later"}
    async with lake(store, tmp_path / "other") as other:
        assert await other.xattrs("f") == {"user.a": b"later"}
        assert (await other.tree())["f"] == b"new"


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_times_that_no_lake_keeps_hurt_no_other_file_of_their_commit(tmp_path: Path, durability: str) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "writer", pack="always", durability=durability) as writer:
        for name, year in ("past", 1600), ("near", 2120), ("far", 2300):
            await writer.write(name, name.encode())
            await writer.setattr(name, mtime_ns=int((year - 1970) * 365.25 * 86400) * NS, atime_ns=1)
        await writer.write("whole", b"whole")
        await writer.mkdir("d")
        await writer.fs.make_durable()
        await writer.sync()
        shown = {name: (await writer.getattr(name)).mtime_ns for name in await writer.names()}
    assert (shown["past"], shown["near"], shown["far"]) == (MTIME_NS_MIN, MTIME_NS_MAX, MTIME_NS_MAX)
    async with lake(store, tmp_path / "reader") as reader:
        assert await reader.names() == ["d", "far", "near", "past", "whole"]
        for name in "far", "near", "past", "whole":
            assert await reader.read(name) == name.encode()
            assert (await reader.getattr(name)).mtime_ns == shown[name]


async def test_new_name_of_an_object_that_its_store_dates_in_the_far_future_is_seen_by_all(tmp_path: Path) -> None:
    """As a store that is a directory does for a file with such an mtime."""
    store = MemoryStore()
    store.put("f", b"bytes")
    data, meta = store.objects["f"]
    store.objects["f"] = data, msgspec.structs.replace(meta, mtime_ns=1 << 65)
    async with two_lakes(store, tmp_path) as (one, two):
        assert await one.names() == ["f"]
        await one.rename("f", "g")
        await one.sync()
        await two.poll()
        assert "g" in await two.names()
        assert await two.read("g") == b"bytes"


async def test_attributes_set_before_an_earlier_head_is_answered_stay(tmp_path: Path) -> None:
    store, heads = MemoryStore(), count()
    store.give("f", b"bytes", {"mode": str(0o100644), "mtime": "1000.0"})
    async with two_lakes(store, tmp_path) as (one, two):
        inode = (await one.found("f")).inode
        pause = store.hook = Pause(lambda request: request.what == "head" and next(heads) == 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.fs.getattr, inode)
            await reached(pause.reached)
            await one.setattr("f", mode=0o755, mtime_ns=CHOSEN_NS, atime_ns=1)
            await one.fs.sync_names()
            pause.resume()
        assert (permissions(await one.getattr("f")), (await one.getattr("f")).mtime_ns) == (0o755, CHOSEN_NS)
        await one.rename("f", "g")
        await two.poll()
        assert (permissions(await two.getattr("g")), (await two.getattr("g")).mtime_ns) == (0o755, CHOSEN_NS)
