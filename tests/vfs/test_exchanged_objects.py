"""Exchanges of two names beside writes in place of one of the files, later than the exchange, of which their writer has
not heard."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakefs_fuse.errors import FileError
from tests.memory_store import MemoryStore, Pause, Request, When
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import RENAME_EXCHANGE, TTL_S, Clock, Lake, held_fresh, lake, unheard_commits
from tests.vfs.writing_back import LARGE, rewrite, writing_back

LATE_S = 100.0
"""No commit can be dated so far back."""


async def store_both(one: Lake, two: Lake, clock: Clock, *, told: bool, elsewhere: str) -> None:
    """Files ``a`` and ``b`` are in the store, and both nodes have heard of them. ``told``: others were removed there
    before, so commits tell of what is written. ``elsewhere`` is the name whose bytes are at another key."""
    if told:
        for name in "ab":
            await one.write(name, b"before")
        await one.sync()
        for name in "ab":
            await one.unlink(name)
        await one.sync()
        clock.advance(5)
    for name in "ab":
        await one.write("z" if name == elsewhere else name, b"first " + name.encode())
    if elsewhere:
        await one.rename("z", elsewhere)
    await one.sync()
    await two.poll()
    assert await two.names() == ["a", "b"]
    clock.advance(5)


async def exchange_and_rewrite(one: Lake, two: Lake, clock: Clock, store: MemoryStore, rewritten: str) -> None:
    """One node exchanges the names, and the other writes one of the files in place a while later."""
    with unheard_commits(store), held_fresh(one), held_fresh(two):
        await one.rename("a", "b", RENAME_EXCHANGE)
        clock.advance(3)
        for name in rewritten:
            await rewrite(two, name, b"second " + name.encode())
        await two.fs.sync_names()
        clock.advance(3)
        await one.sync()


async def shown_by_all(lakes: list[Lake], clock: Clock, expected: dict[str, bytes]) -> None:
    """All nodes show these files once the bytes of both names were asked for."""
    for _ in range(2):
        for m in lakes:
            await m.poll()
            await m.parts.renamed.wait_adopted()
            clock.advance(2 * TTL_S)
            for name in expected:
                try:
                    await m.read(name)
                except FileError:  # its bytes are replaced
                    await m.parts.renamed.wait_adopted()
    for m in lakes:
        await m.poll()
        clock.advance(2 * TTL_S)
        assert await m.tree() == expected


@pytest.mark.parametrize("late_s", [0.0, LATE_S])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("rewritten", "elsewhere"), [("a", ""), ("b", ""), ("a", "b"), ("b", "a"), ("ab", "")])
async def test_exchanged_file_has_what_was_written_in_its_place_and_the_other_stays(
    tmp_path: Path, rewritten: str, elsewhere: str, told: bool, late_s: float
) -> None:
    store, clock = MemoryStore(), Clock()
    expected = {"a": b"first b", "b": b"first a"}
    expected |= {"b" if name == "a" else "a": b"second " + name.encode() for name in rewritten}
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="never") as one,
        lake(store, tmp_path / "two", clock=clock, pack="never") as two,
    ):
        await store_both(one, two, clock, told=told, elsewhere=elsewhere)
        await exchange_and_rewrite(one, two, clock, store, rewritten)
        clock.advance(late_s)
        await shown_by_all([two, one], clock, expected)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


@pytest.mark.parametrize("late_s", [0.0, LATE_S])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("rewritten", "elsewhere"), [("a", ""), ("b", ""), ("a", "b"), ("b", "a")])
async def test_exchanged_file_has_what_a_node_that_was_lost_wrote_in_its_place_and_the_other_stays(
    tmp_path: Path, rewritten: str, elsewhere: str, told: bool, late_s: float
) -> None:
    """Who reads finds it."""
    store, clock = MemoryStore(), Clock()
    expected = {"a": b"first b", "b": b"first a"}
    expected["b" if rewritten == "a" else "a"] = b"second " + rewritten.encode()
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="never") as one,
        lake(store, tmp_path / "three", clock=clock, pack="never") as three,
    ):
        async with lake(store, tmp_path / "two", clock=clock, pack="never") as two:
            await store_both(one, two, clock, told=told, elsewhere=elsewhere)
            await exchange_and_rewrite(one, two, clock, store, rewritten)
        clock.advance(late_s)
        await shown_by_all([one, three], clock, expected)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_exchanged_file_that_is_renamed_while_another_node_stores_its_bytes_again_leaves_no_old_name(
    tmp_path: Path,
) -> None:
    """The node that renames it has not heard of the exchange before its upload begins, and replaces at the old key the
    same bytes that the third node had put there again."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    pause = Pause(lambda request: request.what == "create_multipart")
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="never") as one,
        writing_back(store, tmp_path / "two", clock=clock) as two,
        lake(store, tmp_path / "three", clock=clock, pack="never") as three,
    ):
        for name in "ab":
            await one.write(name, b"first " + name.encode())
        await one.sync()
        for m in (two, three):
            await m.poll()
            assert await m.names() == ["a", "b"]
        clock.advance(5)
        with held_fresh(two), held_fresh(three):
            with unheard_commits(store):
                await one.rename("a", "b", RENAME_EXCHANGE)
                clock.advance(1)
                unheard = store.hook

                def hold(request: Request, when: When) -> None:
                    unheard(request, when)
                    pause(request, when)

                store.hook = hold
                handle = await two.open("a", os.O_RDWR)
                await two.fs.write(handle, len(b"first a"), noise(1, LARGE))
                await two.close(handle)
                await reached(pause.reached)
                await two.rename("a", "c")
            await two.poll()
            with unheard_commits(store):
                await rewrite(three, "a", b"first a")
                await three.sync()
                clock.advance(5)
                pause.resume()
                await two.sync()
        expected = dict.fromkeys("bc", b"first a" + noise(1, LARGE))
        await shown_by_all([one, two, three], clock, expected)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected
