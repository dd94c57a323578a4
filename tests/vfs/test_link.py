"""link(2): a second name, which one node alone gets; afterwards the names are two files."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.errors import FileError, Unavailable
from lakefs_fuse.meta import database
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.vfs.ops import link as linking
from tests.fakes import delete_all_due, node_of
from tests.memory_store import Failures, MemoryStore, Pause, Request, When
from tests.meta.full_disk import FullDisk
from tests.tiers import sized
from tests.vfs.lakes import Clock, Lake, lake, two_lakes
from tests.vfs.writing_back import rewrite

LARGE = b"large" * 40_000
ABLE = Capabilities(name="memory", put_if_match=True, complete_if_match=True, delete_if_match=True)
NAMES = sized(100, 1000)


async def link(m: Lake, source: str, target: str) -> Entry:
    return await m.fs.link((await m.found(source)).inode, *await m.parent(target))


async def link_errno(m: Lake, source: str, target: str) -> int:
    """0 where the link was made."""
    try:
        await link(m, source, target)
    except FileError as error:
        return error.errno
    return 0


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("pack", ["never", "always"])
async def test_linked_name_is_in_the_store_and_each_name_outlives_the_other(
    tmp_path: Path, pack: str, durability: str
) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack=pack, durability=durability) as (one, two):
        await one.write("f", b"first")
        await one.setattr("f", mode=0o600)
        await one.set_xattr("f", "user.about", b"f")
        linked = await link(one, "f", "g")
        assert store.data("g") == b"first", "its key is taken when link() returns"
        assert linked.inode != (await one.found("f")).inode
        assert [one.fs.link_count((await one.found(name)).inode) for name in "fg"] == [2, 2]
        assert (await one.getattr("g")).mode == 0o600
        assert await one.xattrs("g") == {"user.about": b"f"}
        await rewrite(one, "f", b"second")
        await one.fs.make_durable()
        await two.poll()
        assert await two.tree() == {"f": b"second", "g": b"first"}
        await two.unlink("f")
        await two.sync()
        await one.poll()
        assert await one.tree() == {"g": b"first"}
        assert one.fs.link_count((await one.found("g")).inode) == 1


async def test_of_two_nodes_that_link_one_name_each_time_one_wins_and_the_other_keeps_its_source(
    tmp_path: Path,
) -> None:
    async with two_lakes(MemoryStore(ABLE), tmp_path, pack="never") as (one, two):
        for node, text in ((one, b"one"), (two, b"two")):
            await node.write(text.decode(), text)
        for number in range(NAMES):
            answers: dict[str, int] = {}

            async def try_link(node: Lake, source: str, target: str, answers: dict[str, int] = answers) -> None:
                answers[source] = await link_errno(node, source, target)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(try_link, one, "one", f"{number}")
                nursery.start_soon(try_link, two, "two", f"{number}")
            assert sorted(answers.values()) == [0, errno.EEXIST]
            winner = next(source for source, code in answers.items() if not code)
            for node in (one, two):
                assert await node.read(f"{number}") == winner.encode(), "the loser sees it, too"
        assert await one.read("one") == b"one"
        assert await two.read("two") == b"two"


async def test_large_file_is_linked_by_a_copy_of_the_store_that_two_nodes_cannot_both_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "SENT_BYTES_MAX", 100)
    monkeypatch.setattr(linking, "COPY_PART_BYTES", 64 << 10)
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never") as (one, two):
        await one.write("f", LARGE)
        await two.write("f2", LARGE)
        said = len(store.requests)
        assert await link_errno(one, "f", "g") == 0
        assert not [each for each in store.requests[said:] if each.what in ("get", "upload_part")]
        assert await link_errno(two, "f2", "g") == errno.EEXIST
        assert not store.uploads
        async with lake(store, tmp_path / "fresh") as fresh:
            assert await fresh.read("g") == LARGE


async def test_name_that_the_kernel_caches_as_absent_is_announced_to_the_loser(tmp_path: Path) -> None:
    """Of a directory that was never listed nothing else tells of it."""
    store = MemoryStore()
    store.give("d/other", b"x")
    async with two_lakes(store, tmp_path, pack="never") as (one, two):
        await two.write("f", b"other")
        assert await two.lookup("d/g") is None
        await one.write("d/g", b"first")
        two.changes.clear()
        assert await link_errno(two, "f", "d/g") == errno.EEXIST
        assert ((await two.found("d")).inode, b"g") in two.changes
        assert await two.read("d/g") == b"first"


async def test_packed_file_is_not_linked_over(tmp_path: Path) -> None:
    """Its key is free: the commit that tells of it is asked for."""
    async with two_lakes(MemoryStore(), tmp_path, pack="always") as (one, two):
        await two.write("f", b"other")
        await two.names()
        await one.write("g", b"first")
        assert await link_errno(two, "f", "g") == errno.EEXIST
        assert await two.read("g") == b"first"


@pytest.mark.parametrize(
    ("mode", "condition", "code"),
    [("auto", False, errno.EPERM), ("local", False, 0), ("refuse", True, errno.EPERM), ("auto", True, 0)],
)
async def test_store_without_conditions_refuses_links_unless_they_are_local(
    tmp_path: Path, mode: str, condition: bool, code: int
) -> None:
    store = MemoryStore(Capabilities(name="memory", put_if_absent=condition, complete_if_absent=condition))
    async with lake(store, tmp_path, pack="never", hard_links=mode) as m:
        await m.write("f", b"first")
        await m.mkdir("d")
        await m.symlink("s", "f")
        assert await link_errno(m, "f", "g") == code
        assert await link_errno(m, "d", "e") == errno.EPERM
        assert await link_errno(m, "s", "t") == errno.EPERM
        if not code:
            assert await link_errno(m, "f", "g") == errno.EEXIST
            assert await m.read("g") == b"first"


async def test_name_that_was_removed_can_be_linked_by_one_node(tmp_path: Path) -> None:
    """The object of the removed file lies there still, and is replaced as that version."""
    store = MemoryStore(ABLE)
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, pack="never", delete_after_s=300.0) as (one, two):
        await one.write("g", b"removed")
        await one.write("f", b"one")
        await two.write("f2", b"two")
        await one.unlink("g")
        await one.fs.sync_names()
        await two.poll()
        assert await link_errno(two, "f2", "g") == 0
        assert await link_errno(one, "f", "g") == errno.EEXIST
        for node in (one, two):
            await node.fs.make_durable()
            await node.poll()
            assert await node.read("g") == b"two"


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_name_that_was_removed_can_be_linked_to_equal_bytes_at_once_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, is_copied: bool
) -> None:
    """The removed object has the ETag of the new one, and the store dates to the second."""
    monkeypatch.setattr(linking, "SENT_BYTES_MAX", 0 if is_copied else linking.SENT_BYTES_MAX)
    store, clock = MemoryStore(ABLE), Clock()
    store.equal_bytes_have_equal_etags = True
    config = {"pack": "never", "delete_after_s": 60.0, "durability": durability}
    async with two_lakes(store, tmp_path, clock=clock, **config) as (one, two):
        await one.write("f", b"same")
        for _ in range(10):
            assert await link_errno(one, "f", "g") == 0
            assert await link_errno(two, "f", "g") == errno.EEXIST
            await one.unlink("g")
        assert await link_errno(one, "f", "g") == 0
        await one.fs.make_durable()
        await two.poll()
        assert await two.tree() == {"f": b"same", "g": b"same"}
        for _ in range(10):
            await two.unlink("g")
            await two.fs.sync_names()
            await one.poll()
            assert await link_errno(one, "f", "g") == 0
            await one.fs.sync_names()
            await two.poll()
        clock.advance(301)
        await one.sync()
        await two.sync()
        assert [key for key in store.objects if key.startswith(OBJECTS)] == [], "no claim is left"
        for node in (one, two):
            assert await node.tree() == {"f": b"same", "g": b"same"}


async def test_removal_is_committed_before_its_object_is_replaced(tmp_path: Path) -> None:
    """Otherwise its commit would be later than the new object, and other nodes would take that for the removed one."""
    store = MemoryStore(ABLE)
    store.equal_bytes_have_equal_etags = True
    store.hook = pause = Pause(lambda request: request.what == "put" and request.key.startswith(OBJECTS))
    async with two_lakes(store, tmp_path, pack="never", delete_after_s=60.0) as (one, two):
        for name in "fg":
            await one.write(name, b"same")
        await one.unlink("g")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link, one, "f", "g")
            await trio.to_thread.run_sync(pause.reached.wait)
            await two.poll()
            assert await two.names() == ["f"]
            pause.resume()


async def test_object_of_a_removed_file_is_claimed_by_one_node_even_if_that_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "CLAIM_PAUSES_S", (0.01, 0.01))
    store, clock = MemoryStore(ABLE), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=60.0) as (one, two):
        await one.write("f", b"one")
        await two.write("f2", b"two")
        await one.write("g", b"removed")
        await one.unlink("g")
        await one.fs.sync_names()
        replaces = iter([False, True])  # the first PUT is refused, because the removed object is there
        store.hook = Failures(
            lambda request: request.what == "put" and request.key == "g" and next(replaces, True),
            Unavailable("away"), count=1000,
        )  # fmt: skip
        with pytest.raises(Unavailable):
            await link(one, "f", "g")
        store.hook = lambda _request, _when: None
        await two.poll()
        assert await link_errno(two, "f2", "g") == errno.EBUSY
        clock.advance(61)
        await delete_all_due(one.parts.deletions)
        assert await link_errno(two, "f2", "g") == 0


async def test_bytes_that_were_removed_before_and_are_there_again_are_not_replaced(tmp_path: Path) -> None:
    """Their ETag is that of the version that was removed first, and the store dates to the second. The object that a
    link has put has a time in its metadata, and others do not."""
    store = MemoryStore(ABLE)
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, pack="never", delete_after_s=300.0) as (one, two):
        await one.write("g", b"first")
        await one.write("same", b"first")
        await two.write("f", b"second")
        await two.write("f2", b"third")
        await one.unlink("g")
        await one.fs.sync_names()
        await two.poll()
        assert await link_errno(two, "f", "g") == 0
        await two.unlink("g")
        await two.fs.sync_names()
        await one.poll()
        assert await link_errno(one, "same", "g") == 0
        assert await link_errno(two, "f2", "g") == errno.EEXIST
        for node in (one, two):
            await node.fs.make_durable()
            await node.poll()
            assert await node.read("g") == b"first"
        await one.unlink("g")
        await one.fs.sync_names()
        await two.poll()
        assert await link_errno(two, "f", "g") == 0
        await two.unlink("g")
        await two.fs.sync_names()
        await one.poll()
        store.give("g", b"first")
        assert await link_errno(two, "f2", "g") == errno.EBUSY


async def test_key_of_a_renamed_file_is_not_taken(tmp_path: Path) -> None:
    async with two_lakes(MemoryStore(ABLE), tmp_path, pack="never") as (one, two):
        await one.write("g", b"renamed")
        await one.write("f", b"one")
        await one.rename("g", "h")
        await two.poll()
        for node in (one, two):
            assert await link_errno(node, "f", "g") == errno.EBUSY
        assert await two.read("h") == b"renamed"


@asynccontextmanager
async def linking_paused(
    store: MemoryStore, m: Lake, source: str, target: str, before: str
) -> AsyncIterator[list[int]]:
    """Link in the background, paused during the block before the PUT of a key with the prefix ``before``. After the
    block the list has what `link_errno` returned."""
    store.hook = pause = Pause(lambda each: each.what == "put" and each.key.startswith(before), "before")
    found = list[int]()

    async def run() -> None:
        found.append(await link_errno(m, source, target))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.to_thread.run_sync(pause.reached.wait)
        store.hook = lambda _request, _when: None
        yield found
        pause.resume()


@pytest.mark.parametrize("paused", ["g", OBJECTS])
async def test_key_of_a_file_that_another_node_renames_during_the_link_is_not_taken(
    tmp_path: Path, paused: str
) -> None:
    """The rename comes while the name is found to be taken, or while the removed version is claimed, by a node that has
    not heard of the removal."""
    store = MemoryStore(ABLE)
    async with (
        two_lakes(store, tmp_path, pack="never", delete_after_s=300.0) as (one, two),
        lake(store, tmp_path / "three", delete_after_s=300.0) as three,
    ):
        await two.write("f", b"two")
        assert await two.names() == ["f"]
        await one.write("g", b"renamed")
        assert await one.names() == ["f", "g"]  # a listing in the background would hear of the removal, if it came late
        if paused == OBJECTS:
            await three.unlink("g")
            await three.fs.sync_names()
            await two.poll()
        async with linking_paused(store, two, "f", "g", paused) as found:
            await one.rename("g", "h")
            await one.sync()
            if paused == OBJECTS:
                await two.poll()
        assert found == [errno.EBUSY]
        assert store.data("g") == b"renamed" == await one.read("h")


async def test_name_to_which_another_node_renames_a_file_during_the_claim_is_not_replaced(tmp_path: Path) -> None:
    store = MemoryStore(ABLE)
    async with two_lakes(store, tmp_path, pack="never", delete_after_s=300.0) as (one, two):
        await two.write("f", b"two")
        await one.write("g", b"removed")
        await one.write("h", b"renamed")
        await one.unlink("g")
        await one.fs.sync_names()
        await two.poll()
        async with linking_paused(store, two, "f", "g", OBJECTS) as found:
            await one.rename("h", "g")
            await one.fs.sync_names()
            await two.poll()
        assert found == [errno.EEXIST]
        for node in (one, two):
            assert await node.read("g") == b"renamed"


async def test_what_was_acknowledged_before_is_in_the_store_before_the_link(tmp_path: Path) -> None:
    """The files that a version of a table names, in another directory."""
    store = MemoryStore()
    store.hook = pause = Pause(lambda request: request.what == "put" and request.key == "data")
    async with lake(store, tmp_path, pack="never", durability="writeback") as m, trio.open_nursery() as nursery:
        await m.mkdir("log")
        await m.write("data", b"data")
        await m.write("log/tmp", b"names data")
        await trio.to_thread.run_sync(pause.reached.wait)
        nursery.start_soon(link, m, "log/tmp", "log/1")
        await trio.sleep(0.1)
        assert "log/1" not in [each.key for each in store.requests if each.what == "put"]
        pause.resume()
    assert store.data("log/1") == b"names data"


async def test_link_whose_answer_is_lost_succeeds_and_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = MemoryStore(ABLE)
    async with lake(store, tmp_path, pack="never") as m:
        await m.write("f", b"first")
        put_g = lambda request: request.what == "put" and request.key == "g"  # noqa: E731
        store.hook = Failures(put_g, Unavailable("lost"), count=1, when="after")
        assert await link_errno(m, "f", "g") == 0
        store.hook = Failures(lambda request: request.key == "h", Unavailable("away"), count=1000)
        with pytest.raises(Unavailable):
            await link(m, "f", "h")
        store.hook = lambda _request, _when: None
        assert sorted(await m.names()) == ["f", "g"]


async def test_failed_link_over_a_removed_file_keeps_its_object_until_the_removal_is_committed(tmp_path: Path) -> None:
    """Other nodes have the file still, and only this node's cache directory knows that it was removed."""
    store, clock = MemoryStore(ABLE), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=300.0) as (one, two):
        await one.write("f", b"first")
        await one.write("g", b"removed")
        assert await two.read("g") == b"removed"
        store.hook = Failures(lambda request: request.what == "put", Unavailable("away"), count=1000)
        await one.unlink("g")
        with pytest.raises(Unavailable):
            await link(one, "f", "g")
        clock.advance(301)
        await delete_all_due(one.parts.deletions)
        assert store.data("g") == b"removed"
        store.hook = lambda _request, _when: None
        await one.fs.sync_names()
        clock.advance(301)
        await delete_all_due(one.parts.deletions)
        assert "g" not in store.objects


async def test_dirty_source_is_stored_first(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, pack="never") as m:
        handle = await m.create("f")

        async def write_out(inode: int) -> None:
            assert inode == (await m.found("f")).inode
            await m.fs.write(handle, 0, b"so far")

        m.fs.events.pages_wanted.append(write_out)
        await link(m, "f", "g")
        m.fs.events.pages_wanted.clear()
        await m.fs.write(handle, 6, b" and on")
        await m.close(handle)
        assert (await m.read("f"), await m.read("g")) == (b"so far and on", b"so far")


async def test_link_that_another_node_renames_meanwhile_is_not_undone(tmp_path: Path) -> None:
    store, clock = MemoryStore(ABLE), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.write("f", b"first")
        await two.poll()
        store.hook = pause = Pause(
            lambda request: request.what == "put" and request.key.startswith(".lakefs/commits/"), "before"
        )
        async with trio.open_nursery() as nursery:
            await link(one, "f", "g")
            nursery.start_soon(one.fs.sync_names)
            await trio.to_thread.run_sync(pause.reached.wait)
            store.hook = lambda _request, _when: None
            clock.advance(100)
            await two.rename("g", "h")
            pause.resume()
        await one.poll()
        await two.poll()
        await one.poll()
        for node in (one, two):
            assert await node.tree() == {"f": b"first", "h": b"first"}


async def test_directory_to_which_a_linked_file_is_renamed_has_a_linked_file(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, pack="never") as m:
        directory = (await m.mkdir("d")).inode
        await m.write("f", b"first")
        await link(m, "f", "g")
        assert [m.fs.knows_links_in(inode) for inode in (ROOT_INODE, directory)] == [True, False]
        await m.rename("g", "d/g")
        assert [m.fs.knows_links_in(inode) for inode in (ROOT_INODE, directory)] == [True, True]
        await m.rename("f", "d/f")
        assert [m.fs.knows_links_in(inode) for inode in (ROOT_INODE, directory)] == [False, True]
        await m.unlink("d/f")
        assert [m.fs.knows_links_in(inode) for inode in (ROOT_INODE, directory)] == [False, False]


async def test_counting_many_links_of_one_file_reads_each_entry_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """READDIR asks for each name, in one step."""
    async with lake(MemoryStore(), tmp_path, pack="never") as m:
        await m.write("f", b"first")
        linked = [(await link(m, "f", f"{number}")).inode for number in range(20)]
        tree, read = m.fs.namespace.tree, list[int]()
        entry_of = tree.entry

        def count(inode: int) -> Entry | None:
            read.append(inode)
            return entry_of(inode)

        monkeypatch.setattr(tree, "entry", count)
        assert {m.fs.link_count(inode) for inode in linked} == {21}
        assert not m.fs.knows_links_in(linked[0])
        assert m.fs.knows_links_in(ROOT_INODE)
        assert len(read) <= 21, "nothing was written since the rows were read"
        monkeypatch.undo()
        monkeypatch.setattr(linking, "LINKED_MAX", 10)
        last = await link(m, "f", "last")
        assert m.fs.link_count(last.inode) == 10
        for number in range(20):
            await m.unlink(f"{number}")
        await m.unlink("f")
        assert m.fs.link_count(last.inode) == 1
        assert not m.fs.knows_links_in(last.parent)


@pytest.mark.parametrize("is_synced", [True, False])
async def test_link_of_an_open_file_whose_name_another_node_has_is_ebusy(tmp_path: Path, is_synced: bool) -> None:
    """EEXIST would say that the new name is taken."""
    async with two_lakes(MemoryStore(ABLE), tmp_path) as (one, two):
        ours = await one.create("tmp", os.O_RDWR | os.O_EXCL)
        await one.fs.write(ours, 0, b"ours")
        await two.write("tmp", b"theirs")
        if is_synced:
            with pytest.raises(FileError):
                await one.fs.fsync(ours)
        assert await link_errno(one, "tmp", "version") == errno.EBUSY
        with pytest.raises(FileError) as caught:
            await one.close(ours)
        assert caught.value.errno == errno.EEXIST
        assert await one.names() == await two.names() == ["tmp"]
        assert await one.read("tmp") == b"theirs"


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("pack", ["never", "always"])
async def test_link_succeeds_where_the_disk_gets_full_once_the_store_has_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str, is_busy: bool
) -> None:
    """It failed with ENOSPC, and the next try with EEXIST: the program gave up a name that it had. ``is_busy``: another
    change waits for its commit."""
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()

    def fill(request: Request, when: When) -> None:
        disk.is_full = disk.is_full or (when == "after" and (request.what, request.key) == ("put", "g"))

    node = replace(node_of(clock, "full"), engines=disk)
    async with lake(store, tmp_path / "1", clock=clock, node=node, pack=pack) as m:
        await m.write("f", b"first")
        await m.setattr("f", mode=0o600)
        await m.write("other", b"other")
        await m.sync()
        if is_busy:
            await m.setattr("other", mode=0o600)
        store.hook = fill
        assert await link_errno(m, "f", "g") == 0
        assert disk.is_full
        assert await m.tree() == {"f": b"first", "g": b"first", "other": b"other"}
        assert (await m.getattr("g")).mode == 0o600
        disk.is_full = False
        clock.advance(2)
        await m.sync()
        async with lake(store, tmp_path / "2", clock=clock) as other:
            assert await other.tree() == await m.tree()
            assert (await other.getattr("g")).mode == 0o600
