"""Changes of names: renames, links and attributes, as this node, another node and a fresh one see them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits.objects.deletion_queue import CAUGHT_UP_S
from lakefs_fuse.errors import FileError, Unavailable
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.vfs.namespace.subtree_listing import KEYS_MAX
from tests.memory_store import Failures, MemoryStore, Pause, Request, When
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import RENAME_EXCHANGE, RENAME_NOREPLACE, TTL_S, Clock, Lake, entries_of, lake, two_lakes

LARGE = 300 * 1024


def is_commit(request: Request) -> bool:
    return request.what == "put" and request.key.startswith(".lakefs/commits/")


async def same_for_all(store: MemoryStore, root: Path, clock: Clock, *mounted: Lake) -> dict[str, object]:
    """Every mount, once it polled, and a fresh one show the same."""
    for each in mounted:
        await each.sync()
    clock.advance(TTL_S + 1)
    for each in mounted:
        await each.poll()
    trees = [await each.tree() for each in mounted]
    async with lake(store, root / f"fresh{len(store.requests)}", clock=clock) as fresh:
        trees.append(await fresh.tree())
    assert all(tree == trees[0] for tree in trees)
    return trees[0]


@pytest.mark.parametrize("size", [0, 5, LARGE])
async def test_a_rename_is_one_put_and_moves_no_bytes(tmp_path: Path, size: int) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.write("old", noise(1, size))
        assert await two.read("old") == noise(1, size)
        inode = (await one.found("old")).inode
        before = len(store.requests)
        await one.rename("old", "new")
        changing = [request.what for request in store.requests[before:] if request.what not in ("list", "head", "get")]
        assert changing == ["put"]
        assert (await one.found("new")).inode == inode
        assert await one.lookup("old") is None
        await two.poll()
        assert await two.read("new") == noise(1, size)
        assert await two.lookup("old") is None
        assert await same_for_all(store, tmp_path, clock, one, two) == {"new": noise(1, size)}


async def test_a_directory_of_everything_is_renamed(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("d/theirs", b"theirs")
    store.give("d/deep/er/one", b"one")
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await two.tree()
        await one.write("d/mine", b"mine")
        await one.symlink("d/link", "mine")
        await one.mkdir("d/empty")
        await one.setattr("d/mine", mode=0o600)
        await one.set_xattr("d/mine", "user.a", b"1")
        before = await one.tree("d")
        store.requests.clear()
        await one.rename("d", "e")
        assert sum(is_commit(request) for request in store.requests) == 1
        await two.poll()
        assert await two.tree("e") == {"e" + path[1:]: seen for path, seen in before.items()}
        tree = await same_for_all(store, tmp_path, clock, one, two)
        assert tree == {"e": None, **{"e" + path[1:]: seen for path, seen in before.items()}}
        assert (await two.getattr("e/mine")).mode == 0o600
        assert await two.xattrs("e/mine") == {"user.a": b"1"}


async def test_renaming_over_something(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        for name in ("a", "b"):
            await one.write(name, name.encode())
        await one.mkdir("empty")
        await one.mkdir("full")
        await one.write("full/x", b"x")
        refusals = [
            ("a", "b", RENAME_NOREPLACE, errno.EEXIST),
            ("a", "empty", 0, errno.EISDIR),
            ("empty", "a", 0, errno.ENOTDIR),
            ("empty", "full", 0, errno.ENOTEMPTY),
            ("absent", "a", 0, errno.ENOENT),
            ("a", "absent", RENAME_EXCHANGE, errno.ENOENT),
            ("a", "b", RENAME_NOREPLACE | RENAME_EXCHANGE, errno.EINVAL),
            ("a", ".lakefs", 0, errno.EPERM),
        ]
        for old, new, flags, code in refusals:
            with pytest.raises(FileError) as caught:
                await one.rename(old, new, flags)
            assert (old, new, caught.value.errno) == (old, new, code)
        reader = await one.open("b")
        await one.rename("a", "b")
        assert await one.read_handle(reader) == b"b"
        assert await one.read("b") == b"a"
        await one.close(reader)
        await one.rename("full", "empty")
        tree = await same_for_all(store, tmp_path, clock, one, two)
        assert tree == {"b": b"a", "empty": None, "empty/x": b"x"}


@pytest.mark.parametrize(
    ("old", "new", "flags"),
    [
        ("b", "a", 0),
        ("open", "a", 0),
        ("f", "e", 0),
        ("d/x", "a", 0),
        ("a", "b", RENAME_EXCHANGE),
        ("a", "e", RENAME_EXCHANGE),
        ("open", "a", RENAME_EXCHANGE),
        ("d/x", "a", RENAME_EXCHANGE),
    ],
)
async def test_name_that_a_rename_replaces_keeps_its_place_in_listings(
    tmp_path: Path, old: str, new: str, flags: int
) -> None:
    """A program that reads the directory meanwhile sees such a name once."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        for directory in ("d", "e", "f"):
            await one.mkdir(directory)
        for name in ("a", "b", "d/x"):
            await one.write(name, name.encode())
        handle = await one.create("open")
        await one.sync()
        await two.poll()
        places = [{entry.name: entry.cookie for entry in await m.read_directory(ROOT_INODE)} for m in (one, two)]
        await one.rename(old, new, flags)
        await one.sync()
        await two.poll()
        for m, before in zip((one, two), places, strict=True):
            after = {entry.name: entry.cookie for entry in await m.read_directory(ROOT_INODE)}
            stay = after.keys() & before.keys()
            assert m is two or new.encode() in stay
            assert {name: after[name] for name in stay} == {name: before[name] for name in stay}
        await one.close(handle)


async def test_an_exchange_of_a_directory_and_a_link(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.mkdir("d")
        await one.write("d/f", b"f")
        await one.symlink("l", "nowhere")
        await one.rename("d", "l", RENAME_EXCHANGE)
        expected = {"l": None, "l/f": b"f", "d": "nowhere"}
        assert await same_for_all(store, tmp_path, clock, one, two) == expected
        # the object of `l/f` lies at `d/f`: that makes no directory of the link
        assert store.data("d/f") == b"f"


@pytest.mark.parametrize("is_source", [True, False])
async def test_exchange_of_a_file_being_written_shows_none_of_it(tmp_path: Path, is_source: bool) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        store.give("d/stored", b"stored")
        handle = await one.create("new")
        await one.fs.write(handle, 0, b"half")
        ends = ("new", "d/stored") if is_source else ("d/stored", "new")
        await one.rename(*ends, RENAME_EXCHANGE)
        assert await one.tree() == {"new": b"stored", "d": None, "d/stored": b"half"}
        await two.poll()
        clock.advance(2 * TTL_S)
        assert await two.tree() == {"new": b"stored", "d": None}
        await one.fs.write(handle, 4, b" and half")
        await one.close(handle)
        expected = {"new": b"stored", "d": None, "d/stored": b"half and half"}
        assert await same_for_all(store, tmp_path, clock, one, two) == expected


async def test_exchange_of_two_files_being_written_is_made_here(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        a, b = await one.create("a"), await one.create("b")
        await one.fs.write(a, 0, b"from a")
        await one.rename("a", "b", RENAME_EXCHANGE)
        await one.fs.write(b, 0, b"from b")
        assert await one.tree() == {"a": b"from b", "b": b"from a"}
        assert not one.commits()["written"]
        await one.close(a)
        await one.close(b)
        assert await same_for_all(store, tmp_path, clock, one, two) == {"a": b"from b", "b": b"from a"}


async def test_a_file_is_renamed_while_it_is_written(tmp_path: Path) -> None:
    """As savers do: temporary file, chmod, rename, close."""
    store, clock = MemoryStore(), Clock()
    store.give("d/model", b"old")
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        handle = await one.create("d/temporary")
        await one.fs.write(handle, 0, noise(2, LARGE))
        await one.setattr("d/temporary", mode=0o640)
        await one.rename("d/temporary", "d/model")
        assert await two.read("d/model") == b"old"
        assert await one.read("d/model") == noise(2, LARGE)
        await one.close(handle)
        tree = await same_for_all(store, tmp_path, clock, one, two)
        assert tree == {"d": None, "d/model": noise(2, LARGE)}
        assert (await two.getattr("d/model")).mode == 0o640


async def test_its_directory_is_renamed_while_a_file_is_written(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.mkdir("tmp")
        await one.write("tmp/done", b"done")
        handle = await one.create("tmp/open")
        await one.fs.write(handle, 0, noise(3, LARGE))
        with trio.fail_after(10):  # its upload began under the old name
            while not store.parts_sent():
                await trio.sleep(0.002)
        await one.rename("tmp", "final")
        assert await one.names("final") == ["done", "open"]
        await one.fs.write(handle, LARGE, b"more")
        await one.close(handle)
        tree = await same_for_all(store, tmp_path, clock, one, two)
        assert tree == {"final": None, "final/done": b"done", "final/open": noise(3, LARGE) + b"more"}
        assert store.uploads == {}


async def test_a_rename_that_failed_changed_nothing(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("d/a", b"a")
    store.give("b", b"b")
    async with lake(store, tmp_path / "one", clock=clock, retry_timeout_s=0) as one:
        before = await one.tree()
        for old, new in (("d", "e"), ("d/a", "b"), ("d/a", "new")):
            store.hook = Failures(is_commit, Unavailable("away"))
            with pytest.raises(Unavailable):
                await one.rename(old, new)
            assert await one.tree() == before
        assert await same_for_all(store, tmp_path, clock, one) == before


async def test_rename_that_would_make_a_path_below_too_long_is_refused(tmp_path: Path) -> None:
    """Stores take no such key, and no node would read the commit."""
    async with lake(MemoryStore(), tmp_path, pack="always") as m:
        path = "d"
        await m.mkdir(path)
        for _ in range(5):
            path += "/" + "x" * 198
            await m.mkdir(path)
        await m.write(f"{path}/f", b"deep")
        before = await m.tree()
        with pytest.raises(FileError) as caught:
            await m.rename("d", "d" * 40)
        assert caught.value.errno == errno.ENAMETOOLONG
        assert await m.tree() == before
        await m.rename("d", "e" * 10)
        assert await m.read(path.replace("d", "e" * 10, 1) + "/f") == b"deep"


async def test_readers_see_the_old_or_the_new_directory_and_no_mixture(tmp_path: Path) -> None:
    """Also one that looks before and after each request which changes the store."""
    store, clock, seen = MemoryStore(), Clock(), list[list[str]]()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):

        async def look() -> None:
            await two.poll()
            read = []
            for directory in await two.names():
                if directory == "live":
                    read = [(await two.read(f"live/{name}")).decode() for name in await two.names("live")]
            if not seen or seen[-1] != read:
                seen.append(read)

        def look_at_change(request: Request, _when: When) -> None:
            if request.what in ("put", "delete", "copy"):
                trio.from_thread.run(look)

        for number in range(5):
            await one.mkdir(f"new{number}")
            for name in range(5):
                await one.write(f"new{number}/f{name}", str(number).encode())
            await one.sync()
            store.hook = look_at_change
            if number:
                await one.rename("live", f"old{number}")
            await one.rename(f"new{number}", "live")
            await one.sync()
            store.hook = lambda _request, _when: None
        assert seen == [each for number in range(5) for each in ([], [str(number)] * 5)]


async def test_a_name_is_removed_and_made_again_before_any_commit(tmp_path: Path) -> None:
    """The removal's deletion must not hit what came after it."""
    store, clock = MemoryStore(), Clock()
    store.give("f", b"old")
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        assert await two.read("f") == b"old"
        for number in range(3):
            await one.unlink("f")
            await one.write("f", str(number).encode())
        assert await same_for_all(store, tmp_path, clock, one, two) == {"f": b"2"}
        await one.unlink("f")
        await one.fs.sync_names()
        await one.write("f", b"after")
        assert await same_for_all(store, tmp_path, clock, one, two) == {"f": b"after"}


async def test_a_new_file_under_a_name_whose_object_was_renamed_away(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.write("a", noise(4, LARGE))
        await one.rename("a", "b")
        await one.write("a", noise(5, LARGE))
        expected = {"a": noise(5, LARGE), "b": noise(4, LARGE)}
        assert await same_for_all(store, tmp_path, clock, one, two) == expected
        handle = await one.open("b", os.O_RDWR | os.O_TRUNC)
        await one.fs.write(handle, 0, b"new")
        await one.close(handle)
        await one.unlink("a")
        assert await same_for_all(store, tmp_path, clock, one, two) == {"b": b"new"}
        assert entries_of(store) == ["b"]
        assert not [key for key in store.objects if key.startswith(".lakefs/objects/")]


async def test_links_attributes_and_refusals(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.symlink("l", "tärget")
        await one.write("f", b"x")
        assert await one.readlink("l") == "tärget"
        for path, target, code in (
            ("l", "x", errno.EEXIST),
            ("m", "", errno.ENOENT),
            ("m", "x" * 4096, errno.ENAMETOOLONG),
        ):
            with pytest.raises(FileError) as caught:
                await one.symlink(path, target)
            assert caught.value.errno == code
        with pytest.raises(FileError) as caught:
            await one.readlink("f")
        assert caught.value.errno == errno.EINVAL
        await one.set_xattr("f", "user.a", b"1")
        await one.set_xattr("f", "user.b", b"2")
        for name, value, code in (
            ("security.x", b"", errno.EOPNOTSUPP),
            ("user.lakefs.x", b"", errno.EPERM),
            ("user.c", None, errno.ENODATA),
            ("user.c", b"x" * 70_000, errno.ENOSPC),
        ):
            with pytest.raises(FileError) as caught:
                await one.set_xattr("f", name, value)
            assert (name, caught.value.errno) == (name, code)
        await one.set_xattr("f", "user.b", None)
        await one.setattr("f", mode=0o600, uid=7, gid=8, mtime_ns=1_500_000_000_123_456_789, atime_ns=1)
        await same_for_all(store, tmp_path, clock, one, two)
        entry = await two.getattr("f")
        assert (entry.mode, entry.uid, entry.gid, entry.mtime_ns) == (0o600, 7, 8, 1_500_000_000_123_456_789)
        assert await two.xattrs("f") == {"user.a": b"1"}


async def test_attributes_survive_a_rewrite(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        handle = await one.create("f")
        await one.set_xattr("f", "user.early", b"1")
        await one.fs.write(handle, 0, b"x")
        await one.fs.flush(handle)
        await one.fs.write(handle, 0, b"y")
        await one.set_xattr("f", "user.late", b"2")
        await one.close(handle)
        await one.setattr("f", mode=0o600)
        handle = await one.open("f", os.O_RDWR | os.O_TRUNC)
        await one.fs.write(handle, 0, b"z")
        await one.close(handle)
        assert await same_for_all(store, tmp_path, clock, one, two) == {"f": b"z"}
        for each in (one, two):
            assert (await each.getattr("f")).mode == 0o600
            assert await each.xattrs("f") == {"user.early": b"1", "user.late": b"2"}


@pytest.mark.parametrize("is_stored", [False, True])
async def test_extended_attributes_of_an_open_file_without_a_name_stay_in_memory(
    tmp_path: Path, is_stored: bool
) -> None:
    async with lake(MemoryStore(), tmp_path) as m:
        handle = await m.create("f")
        await m.set_xattr("f", "user.early", b"1")
        if is_stored:
            await m.close(handle)
            handle = await m.open("f", os.O_RDWR)
        inode = (await m.found("f")).inode
        await m.unlink("f")
        assert m.fs.xattr_names(inode) == ["user.early"]
        await m.fs.set_xattr(inode, "user.late", b"2")
        await m.fs.set_xattr(inode, "user.early", None)
        assert (m.fs.xattr_names(inode), m.fs.xattr(inode, "user.late")) == (["user.late"], b"2")
        await m.close(handle)
        await m.fs.sync_names()
        assert m.fs.namespace.tree.xattrs(inode) == {}  # no row that nothing would remove


async def test_others_replace_a_file_while_its_attributes_are_set_here(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.write("f", b"first")
        await two.poll()
        await two.setattr("f", mode=0o600)  # not committed yet
        handle = await one.open("f", os.O_RDWR | os.O_TRUNC)
        await one.fs.write(handle, 0, b"second")
        await one.close(handle)
        await two.poll()
        assert await same_for_all(store, tmp_path, clock, one, two) == {"f": b"second"}
        assert (await one.getattr("f")).mode == (await two.getattr("f")).mode


async def test_files_that_close_together_share_a_commit(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.mkdir("d")
        await one.fs.sync_names()
        store.requests.clear()
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one.write, f"d/{number}", noise(number, 1000))
        puts = [request for request in store.requests if request.what == "put"]
        assert len(puts) <= 6
        await one.write("alone", b"alone")
        assert store.data("alone") == b"alone"
        tree = await same_for_all(store, tmp_path, clock, one, two)
        assert tree == {"d": None, "alone": b"alone", **{f"d/{number}": noise(number, 1000) for number in range(40)}}


async def test_a_file_is_removed_while_its_pack_is_on_its_way(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        handle = await one.create("f")
        await one.fs.write(handle, 0, b"x")
        store.hook = pause = Pause(is_commit)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.close, handle)
            await reached(pause.reached)
            nursery.start_soon(one.unlink, "f")
            await trio.sleep(0.02)
            pause.resume()
        assert await same_for_all(store, tmp_path, clock, one, two) == {}
        assert one.fs.unfinished() == []


async def test_what_two_nodes_did_to_one_directory(tmp_path: Path) -> None:
    """A file is made in a directory before another node renames it, and has not heard of it: it goes along."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.mkdir("d")
        await one.write("d/a", b"a")
        await two.poll()
        await two.tree()
        clock.advance(1)
        await two.write("d/b", b"b")
        clock.advance(1)
        await one.rename("d", "e")
        tree = await same_for_all(store, tmp_path, clock, one, two)
        assert tree == {"e": None, "e/a": b"a", "e/b": b"b"}


async def test_a_renamed_directory_takes_along_what_other_nodes_put_there(tmp_path: Path) -> None:
    """Shards of several nodes are published by one rename, although the listing is not old yet."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.mkdir("tmp")
        await one.write("tmp/rank0", b"0")
        await one.fs.sync_names()
        await two.poll()
        await two.write("tmp/rank1", b"1")
        await two.mkdir("tmp/deep")
        await two.write("tmp/deep/rank2", b"2")
        await two.fs.sync_names()
        clock.advance(1)
        await one.rename("tmp", "final")
        tree = await same_for_all(store, tmp_path, clock, one, two)
        wanted = {"final": None, "final/rank0": b"0", "final/rank1": b"1", "final/deep": None, "final/deep/rank2": b"2"}
        assert tree == wanted


async def test_a_renamed_directory_takes_along_a_directory_that_appeared_since_a_flat_listing(tmp_path: Path) -> None:
    """The flat listing is not old yet, and does not know what is in that directory."""
    store, clock = MemoryStore(), Clock()
    for key in ("d/x", "other/x"):
        store.give(key, b"x")
    async with lake(store, tmp_path, clock=clock) as m:
        assert await m.names("other") == await m.names("d") == ["x"]
        directory = await m.found("d")
        clock.advance(TTL_S + 1)
        await m.read_directory(directory.inode)
        await m.fs.namespace.lookup(ROOT_INODE, b"d", ask=True)
        clock.advance(1)
        store.give("d/new/deep/y", b"y")
        await m.rename("d", "e")
        tree = await m.tree("e")
        assert tree == {"e/x": b"x", "e/new": None, "e/new/deep": None, "e/new/deep/y": b"y"}


async def test_rename_lists_no_directory_again_for_a_file_whose_name_ends_as_a_placeholder(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    for number in range(KEYS_MAX):
        store.give(f"many/{number}", b"")  # so that each directory is listed by itself
    store.give("d/notes.lakefs-directory", b"text")
    async with lake(store, tmp_path, clock=clock) as m:
        assert await m.names("d") == ["notes.lakefs-directory"]
        clock.advance(1)
        before = len(store.requests)
        await m.rename("d", "e")
        listed = [each.key for each in store.requests[before:] if each.what == "list"]
        assert listed.count("d/") == 1, "nothing is unknown"


async def expired(clock: Clock, *mounted: Lake) -> None:
    """What was listed has to be asked for again."""
    clock.advance(TTL_S + 1)
    for each in mounted:
        await each.poll()


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "looked up"])
async def test_a_directory_goes_when_only_renamed_objects_lie_below_its_key(tmp_path: Path, listed: bool) -> None:
    """They are not copied to their new keys here, so every LIST goes on showing the directory."""

    async def shows(each: Lake) -> bool:
        return "d" in await each.names() if listed else await each.lookup("d") is not None

    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        for path in ("d/1", "d/deep/2", "d/deep/er/3"):
            store.give(path, path.encode())
        for each in (one, two):
            assert await shows(each)
            assert [await each.names(path) for path in ("d", "d/deep", "d/deep/er")] == [
                ["1", "deep"],
                ["2", "er"],
                ["3"],
            ]
        await one.rename("d", "e")
        await expired(clock, one, two)
        assert not await shows(one) and not await shows(two)
        store.give("d/deep/er/4", b"theirs")  # by another client, for a while
        await expired(clock, one, two)
        for each in (one, two):
            assert await shows(each)
            assert await each.names("d/deep/er") == ["4"]
        store.take("d/deep/er/4")
        await expired(clock, one, two)
        for each in (one, two):
            assert await each.names("d/deep/er") == []
        await expired(clock, one, two)
        assert not await shows(one) and not await shows(two)
        moved = {"e/1": b"d/1", "e/deep/2": b"d/deep/2", "e/deep/er/3": b"d/deep/er/3"}
        expected = {"e": None, "e/deep": None, "e/deep/er": None, **moved}
        assert await same_for_all(store, tmp_path, clock, one, two) == expected


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "looked up"])
async def test_an_empty_directory_that_gets_a_file_again_is_the_same(tmp_path: Path, listed: bool) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never") as one:
        store.give("d/1", b"1")
        store.give("d/2", b"2")
        if listed:
            assert await one.names() == ["d"]
        assert await one.names("d") == ["1", "2"]
        await one.rename("d/1", "moved")
        store.take("d/2")
        await expired(clock, one)
        assert await one.names("d") == []
        inode = (await one.found("d")).inode
        store.give("d/3", b"3")
        await expired(clock, one)
        if listed:
            assert await one.names() == ["d", "moved"]
        assert (await one.found("d")).inode == inode
        assert await one.names("d") == ["3"]


async def rewrite(m: Lake, path: str, data: bytes) -> None:
    """Replaced in place by a plain object."""
    handle = await m.open(path, os.O_RDWR | os.O_TRUNC)
    await m.fs.write(handle, 0, data)
    await m.close(handle)


@pytest.mark.parametrize("how", ["renamed", "renamed over", "replaced by a link", "directory renamed"])
async def test_a_file_is_listed_rewritten_and_changes_its_name_within_a_second(tmp_path: Path, how: str) -> None:
    """The other node knows a version that the commit does not name, and that LastModified does not call older."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.mkdir("d")
        await one.write("d/kept", b"kept")
        await one.sync()
        clock.advance(10)
        await one.write("d/f", b"first")
        await two.poll()
        assert await two.names("d") == ["f", "kept"]
        clock.advance(0.2)
        await rewrite(one, "d/f", b"second")
        clock.advance(0.2)
        if how == "renamed":
            await one.rename("d/f", "d/g")
        elif how == "renamed over":
            await one.write("d/t", b"third")
            await one.rename("d/t", "d/f")
        elif how == "replaced by a link":
            await one.unlink("d/f")
            await one.symlink("d/f", "nowhere")
        if how == "directory renamed":
            await one.rename("d", "e")
        expected = await one.tree()
        assert await same_for_all(store, tmp_path, clock, one, two) == expected


async def test_what_another_client_put_in_the_second_of_a_commit_is_kept(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.write("f", b"first")
        assert await one.names() == ["f"]
        clock.advance(0.2)
        theirs = store.give("f", b"theirs")
        assert await two.tree() == {"f": b"theirs"}
        clock.advance(0.2)
        await one.rename("f", "g")  # it has not looked since
        asked = store.count("head", "f")
        await two.poll()
        assert (await two.found("f")).etag == theirs.etag
        assert asked < store.count("head", "f") <= asked + 5  # it waits for who may know more, for a second


async def test_file_that_two_nodes_remove_while_one_writes_it_is_gone_on_both(tmp_path: Path) -> None:
    """Its row stays for who writes it, when the other's removal is heard of, until that program removes it, too."""
    store = MemoryStore()
    async with lake(store, tmp_path / "1", pack="always") as one, lake(store, tmp_path / "2", pack="always") as two:
        await one.write("f", b"before")
        await two.poll()
        handle = await two.open("f", os.O_RDWR)
        await two.fs.write(handle, 0, b"later")
        await one.unlink("f")
        await one.fs.sync_names()
        await two.poll()
        await two.unlink("f")
        await two.close(handle)
        await two.fs.sync_names()
        assert await two.names() == await one.names() == []
        await one.poll()
        await one.write("f", b"next")
        await two.poll()
        assert await two.read("f") == b"next"


async def test_file_that_another_node_removes_while_a_rename_over_it_fails_keeps_its_name(tmp_path: Path) -> None:
    """It is being written. Its row stays when the rename hears of the removal, although that was about to replace it;
    else its bytes would be stored later, over those of a new file of that name."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        for name in ("f", "g"):
            await one.write(name, b"before")
        await two.poll()
        handle = await two.open("f", os.O_RDWR)
        await two.fs.write(handle, 0, b"second")
        clock.advance(CAUGHT_UP_S + 1)
        await one.unlink("f")
        await one.rename("g", "h")
        await one.fs.sync_names()
        with pytest.raises(FileError) as caught:
            await two.rename("g", "f")
        assert caught.value.errno == errno.ENOENT
        assert await two.names() == ["f", "h"]
        later = await two.open("f", os.O_RDWR | os.O_TRUNC)
        await two.fs.write(later, 0, b"third")
        await two.close(later)
        await two.close(handle)
        await two.fs.make_durable()
        assert await two.read("f") == b"third"
        await one.poll()
        assert await one.tree() == {"f": b"third", "h": b"before"}


async def test_file_whose_directory_another_node_renames_while_a_rename_over_it_fails_goes_along(
    tmp_path: Path,
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.mkdir("d")
        for name in ("d/f", "g"):
            await one.write(name, b"before")
        await two.poll()
        handle = await two.open("d/f", os.O_RDWR)
        await two.fs.write(handle, 0, b"second")
        clock.advance(CAUGHT_UP_S + 1)
        await one.rename("d", "e")
        await one.rename("g", "h")
        await one.fs.sync_names()
        with pytest.raises(FileError) as caught:
            await two.rename("g", "d/f")
        assert caught.value.errno == errno.ENOENT
        await two.close(handle)
        await two.fs.make_durable()
        await one.poll()
        for m in (one, two):
            assert await m.tree() == {"e": None, "e/f": b"second", "h": b"before"}
