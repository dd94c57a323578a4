"""Who sees a plain object of another node sees what that had done before."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.errors import AccessDenied, Unavailable
from lakefs_fuse.store.protocol import Capabilities
from tests.memory_store import Failures, MemoryStore, Pause, Request, When
from tests.upload.drafting import reached
from tests.vfs.lakes import TTL_S, Clock, Lake, lake, two_lakes

RETRY_S = 20.0


def a_table() -> MemoryStore:
    store = MemoryStore()
    store.give("data/0", b"x")
    store.give("versions/0", b"x")
    return store


def polls(store: MemoryStore, since: int) -> int:
    return sum(each.what == "list" and each.key.startswith(COMMITS) for each in store.requests[since:])


def own_polls(m: Lake) -> int:
    """Polls of this node alone: another one may announce meanwhile what it has stored."""
    commits = m.fs.statistics()["commits"]
    assert isinstance(commits, dict)
    return int(commits["polls"])


async def test_rename_is_seen_by_who_sees_what_was_stored_after_it(tmp_path: Path) -> None:
    """As tables are written: data files are renamed to their names, then a manifest is stored."""
    store = a_table()
    async with two_lakes(store, tmp_path) as (one, two):
        assert await two.names("data") == ["0"]
        await one.write("data/.tmp", b"bytes")
        await one.rename("data/.tmp", "data/1")
        assert await two.lookup("data/1") is None
        await one.write("versions/1", b"data/1")
        assert await two.names("versions") == ["0", "1"]
        assert await two.read("data/1") == b"bytes"
        assert await two.names("data") == ["0", "1"]


@pytest.mark.parametrize("is_listed", [True, False])
async def test_object_is_found_by_who_sees_what_was_stored_after_it(tmp_path: Path, is_listed: bool) -> None:
    """Before any commit tells of the two."""
    clock, store = Clock(), a_table()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        assert await two.names("data") == ["0"]
        clock.advance(1)
        await one.write("data/1", b"bytes")
        await one.write("versions/_SUCCESS", b"")
        before = len(store.requests)
        assert await two.lookup("data/1") is None, "its listing counts"
        assert len(store.requests) == before
        if is_listed:
            assert "_SUCCESS" in await two.names("versions")
        else:
            assert await two.lookup("versions/_SUCCESS") is not None
        clock.advance(1)
        assert await two.read("data/1") == b"bytes"
        before = len(store.requests)
        for _ in range(2):
            assert await two.lookup("data/2") is None
        asked = [each.key for each in store.requests[before:] if each.key.startswith("data")]
        assert asked == [], "the listing began after that object was seen"


async def test_only_what_is_new_and_unknown_costs_a_poll(tmp_path: Path) -> None:
    clock, store = Clock(), MemoryStore()
    store.clock = clock
    for number in range(50):
        store.give(f"old/{number:02}", b"x")
    clock.advance(100)
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        before = own_polls(two)
        assert len(await two.names("old")) == 50
        assert own_polls(two) == before
        await one.write("old/new", b"x")
        await one.parts.committer.flush_announcements()
        await two.poll()
        before = own_polls(two)
        assert await two.read("old/new") == b"x"
        clock.advance(TTL_S + 1)
        assert len(await two.names("old")) == 51
        assert own_polls(two) == before, "a commit told of it"
        await one.write("old/newer", b"x")
        clock.advance(TTL_S + 1)
        for _ in range(2):
            assert len(await two.names("old")) == 52
            assert own_polls(two) == before + 1
            clock.advance(TTL_S + 1)


async def test_names_are_listed_though_commits_cannot_be(tmp_path: Path) -> None:
    store = a_table()
    async with two_lakes(store, tmp_path) as (_, two):
        store.give("versions/1", b"x")
        store.hook = Failures(
            lambda request: request.key.startswith(COMMITS), AccessDenied("no LIST of commits"), count=1000
        )
        assert await two.names("versions") == ["0", "1"]
        assert isinstance(store.hook, Failures)
        assert store.hook.left < 1000, "it was tried"


async def test_new_object_whose_name_ends_as_a_marker_costs_a_poll(tmp_path: Path) -> None:
    store = a_table()
    async with two_lakes(store, tmp_path) as (_, two):
        store.give("versions/1.lakefs-directory", b"x")
        before = len(store.requests)
        assert "1.lakefs-directory" in await two.names("versions")
        assert polls(store, before) == 1


@pytest.mark.parametrize("has_preconditions", [True, False])
async def test_a_commit_whose_response_is_lost_is_not_sent_over_itself(tmp_path: Path, has_preconditions: bool) -> None:
    """Its object would have another ETag where ETags are not made of the bytes, and a node that has read it already
    could not read the files in it any more."""
    able = Capabilities(name="memory", put_if_absent=has_preconditions, put_if_match=has_preconditions)
    store, clock = MemoryStore(able), Clock()
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="always", retry_timeout_s=RETRY_S) as one,
        lake(store, tmp_path / "two", clock=clock) as two,
    ):
        lost, again = threading.Event(), Pause(lambda request: lost.is_set() and request.what in ("head", "put"))

        def lose_response(request: Request, when: When) -> None:
            again(request, when)
            if when == "after" and request.what == "put" and not lost.is_set():
                lost.set()
                raise Unavailable("the response was lost")

        store.hook = lose_response
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.write, "file", b"packed")
            await reached(again.reached)
            await two.poll()
            again.resume()
        await one.sync()
        assert sum(request.what == "put" for request in store.requests) == 1
        assert await two.read("file") == b"packed"
