"""Objects whose names are gone: deleted once nobody can want them, and never one that somebody put since."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.objects import deletion_queue as deletions
from lakefs_fuse.commits.record import OWN, Put, Remove
from lakefs_fuse.errors import AccessDenied, CacheFull, LakeError, Unavailable
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.rows import Deletion
from tests.commits.committing import Daemon, Site, until
from tests.commits.nodes import at, plain
from tests.fakes import delete_all_due
from tests.memory_store import Failures, Pause, Request
from tests.upload.drafting import reached


async def catch_up(_: float) -> None:
    """Every commit is in effect."""


def is_delete(request: Request) -> bool:
    return request.what == "delete"


def give(site: Site, *keys: str) -> list[Deletion]:
    return [Deletion(key, site.store.give(key, key.encode()).etag) for key in keys]


def doom(daemon: Daemon, *doomed: Deletion) -> None:
    for each in doomed:
        daemon.deletions.schedule(each)


async def test_they_go_and_are_forgotten(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        doom(a, *give(site, "x", "y", "d/z"))
        give(site, "kept")
        assert a.deletions.waiting == 3
        await delete_all_due(a.deletions)
        assert (list(site.store.objects), a.deletions.waiting, a.doomed()) == (["kept"], 0, [])
        assert a.metrics.objects_deleted == 3


async def test_one_request_takes_a_thousand(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        doom(a, *give(site, *(f"f{number}" for number in range(2100))))
        assert [await a.deletions.delete_due(catch_up) for _ in range(4)] == [1000, 1000, 100, 0]
        assert site.store.objects == {}


async def test_only_the_version_that_was_meant_where_it_is_checked(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        (same,), (other,) = give(site, "same"), give(site, "other")
        doom(a, Deletion("same", same.etag), Deletion("other", other.etag))
        doom(a, Deletion("gone", "etag"))
        give(site, "other")
        await delete_all_due(a.deletions)
        assert list(site.store.objects) == ["other"]
        assert a.deletions.waiting == 0


async def test_what_another_name_means_stays(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        (used,) = give(site, "used")
        number = a.tree.objects.number("used", used.etag, 4)
        change = a.change()
        change.operations.append(Put("renamed", OWN, 0, 4, 0o644, 0, 0, 0))
        a.commit(1, *change.operations)
        entry = a.found("renamed")
        batch = Batch()
        a.tree.update(batch, msgspec.structs.replace(entry, place=number))
        a.database.commit(batch)
        doom(a, used)
        await delete_all_due(a.deletions)
        assert (list(site.store.objects), a.deletions.waiting) == (["used"], 0)


async def test_object_that_another_node_renamed_while_the_machine_was_suspended_stays(tmp_path: Path) -> None:
    """The other node had not heard of the removal, and the deletion is due when the machine wakes."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        site.clock.seconds = 10
        (removed,) = give(site, "f")
        for node in (a, b):
            node.list(plain("f", removed.etag, 10), seconds=10)
        await a.poller.poll()
        await a.committer.commit(Change(operations=[Remove("f", hides=removed.etag)]))
        doom(a, msgspec.structs.replace(removed, due_ns=at(300), removed_ns=at(10)))
        site.clock.seconds = 11
        await b.committer.commit(b.rename("f", "g"))
        site.clock.seconds = 3600
        await a.deletions.delete_due(a.poller.catch_up)
        assert "f" in site.store.objects
        assert a.find("g") is not None


async def test_not_before_their_time(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        (later,) = give(site, "later")
        doom(a, Deletion("later", later.etag, due_ns=at(60)))
        await delete_all_due(a.deletions)
        assert list(site.store.objects) == ["later"]
        site.clock.seconds = 61
        await delete_all_due(a.deletions)
        assert site.store.objects == {}


async def test_deletion_that_could_not_leave_the_queue_is_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row stays where the disk is full, or the removal's in the journal; what is counted in memory does, too."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        doomed, removed = give(site, "x", "z")
        doom(a, doomed)
        a.enqueue(Remove("z", hides=removed.etag), doomed=(removed,))
        with monkeypatch.context() as full:
            full.setattr(a.database, "commit", refuse)
            for key in ("x", "z"):
                async with a.deletions.keeping(key):
                    """It is not written."""
            with pytest.raises(CacheFull):
                doom(a, *give(site, "y"))
        assert (a.deletions.waiting, a.deletions.superseded_etag("x")) == (1, doomed.etag)
        assert a.deletions.superseded_etag("z") == removed.etag
        await a.committer.flush()
        await delete_all_due(a.deletions)
        assert (sorted(key for key in site.store.objects if key in "xyz"), a.deletions.waiting) == (["y"], 0)


def refuse(batch: Batch) -> None:
    raise CacheFull("full")


async def test_what_failed_is_tried_again_after_a_restart(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        doom(a, *give(site, "x", "y"))
        site.store.hook = Failures(is_delete, Unavailable("away"))
        with pytest.raises(LakeError):
            await delete_all_due(a.deletions)
        assert a.deletions.waiting > 0
    with site.daemon("a") as a:
        assert a.deletions.waiting > 0
        await delete_all_due(a.deletions)
        assert (site.store.objects, a.deletions.waiting) == ({}, 0)


async def test_object_of_ours_that_a_snapshot_keeps_stays(tmp_path: Path) -> None:
    site = Site(tmp_path)
    keys = [f".lakefs/objects/{number}" for number in range(3)]
    site.store.give(".lakefs/snapshots/v1/objects", msgspec.msgpack.encode(keys[:1]))
    with site.daemon("a") as a:
        doom(a, *give(site, *keys, "plain"))
        await delete_all_due(a.deletions)
        assert (sorted(site.store.objects), a.deletions.waiting) == ([keys[0], ".lakefs/snapshots/v1/objects"], 0)


async def test_deletion_that_was_made_and_not_recorded_is_forgotten_by_the_next_daemon(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        doom(a, *give(site, "x"))
        site.store.hook = Failures(is_delete, Unavailable("its answer was lost"), when="after")
        with pytest.raises(LakeError):
            await delete_all_due(a.deletions)
        assert (site.store.objects, a.deletions.waiting) == ({}, 1)
    with site.daemon("a") as a:
        deleted = site.store.count("delete")
        await delete_all_due(a.deletions)
        assert (a.deletions.waiting, site.store.count("delete")) == (0, deleted)


@pytest.mark.parametrize("count", [1, 5])
async def test_same_bytes_that_were_put_since_the_removal_stay(tmp_path: Path, count: int) -> None:
    """They have the same ETag; the store dates them later. Asked for one by one, or listed."""
    site = Site(tmp_path)
    site.store.equal_bytes_have_equal_etags = True
    keys = [f"d/{number}" for number in range(count)]
    with site.daemon("a") as a:
        doom(a, *give(site, *keys))
        site.clock.seconds += 10
        give(site, keys[0])
        await delete_all_due(a.deletions)
        assert (list(site.store.objects), a.deletions.waiting) == ([keys[0]], 0)
        assert site.store.count("list") == (count > deletions.HEADS_MAX)


async def test_marker_that_was_put_since_the_removal_stays_and_others_go(tmp_path: Path) -> None:
    """Also one that the store does not have: it may show the prefix."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        give(site, "old/", "again/")
        doom(a, *(Deletion(key, "") for key in ("old/", "again/", "absent/")))
        site.clock.seconds += 10
        give(site, "again/")
        await delete_all_due(a.deletions)
        assert (list(site.store.objects), a.deletions.waiting) == (["again/"], 0)
        assert {each.key for each in site.store.requests if is_delete(each)} == {"old/", "absent/"}


async def test_what_the_store_refuses_does_not_hold_up_what_comes_after(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        refused, later = give(site, "refused", "later")
        doom(a, refused)
        site.store.hook = Failures(is_delete, AccessDenied("not you"))
        with pytest.raises(LakeError, match="refused"):
            await delete_all_due(a.deletions)
        doom(a, later)
        await delete_all_due(a.deletions)
        assert (list(site.store.objects), a.deletions.waiting) == (["refused"], 1)
        site.clock.seconds += 61
        await delete_all_due(a.deletions)
        assert (site.store.objects, a.deletions.waiting) == ({}, 0)


# -- keys that get new bytes


async def test_a_key_that_is_put_again_is_not_deleted(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        doom(a, *give(site, "x"))
        async with a.deletions.keeping("x"):
            give(site, "x")
            await delete_all_due(a.deletions)
        await delete_all_due(a.deletions)
        assert list(site.store.objects) == ["x"]
        assert a.deletions.waiting == 0


async def test_a_deletion_under_way_is_waited_for(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        doom(a, *give(site, "x"))
        site.store.hook = pause = Pause(is_delete)
        order: list[str] = []

        async def put_again() -> None:
            async with a.deletions.keeping("x"):
                order.append("put")
                give(site, "x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(delete_all_due, a.deletions)
            await reached(pause.reached)
            nursery.start_soon(put_again)
            await trio.sleep(0.02)
            assert order == []
            pause.resume()
        await delete_all_due(a.deletions)
        assert list(site.store.objects) == ["x"]


async def test_one_that_is_noted_while_the_key_is_put_waits(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        (old,) = give(site, "x")
        async with a.deletions.keeping("x"):
            doom(a, Deletion("x", old.etag))
            await delete_all_due(a.deletions)
            assert site.store.count("head", "x") == 0
            give(site, "x")
        await delete_all_due(a.deletions)
        assert list(site.store.objects) == ["x"]
        assert a.deletions.waiting == 0


async def test_a_removal_in_no_commit_yet_does_not_delete_what_came_after_it(tmp_path: Path) -> None:
    """Removed and put again before the commit; and after a death in between."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        (old,) = give(site, "x")
        a.enqueue(Remove("x", hides=old.etag), doomed=(old,))
        async with a.deletions.keeping("x"):
            give(site, "x")
        site.kill(a, "dead")
    with site.daemon("dead") as a:
        await a.committer.flush()
        await delete_all_due(a.deletions)
        assert "x" in site.store.objects


@pytest.mark.parametrize("error", [Unavailable("away"), CacheFull("full")])
async def test_bytes_that_did_not_come_leave_the_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: LakeError
) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        doom(a, *give(site, "x"))
        with monkeypatch.context() as full, pytest.raises(type(error)):
            async with a.deletions.keeping("x"):
                full.setattr(a.database, "commit", refuse)
                raise error
        await delete_all_due(a.deletions)
        assert (site.store.objects, a.deletions.waiting) == ({}, 0)


@pytest.mark.parametrize("is_committed_meanwhile", [False, True])
async def test_keeping_block_that_raises_leaves_a_journaled_removal_its_deletion(
    tmp_path: Path, is_committed_meanwhile: bool
) -> None:
    """Other nodes would lose the object before any commit tells that it was removed."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        (old,) = give(site, "x")
        a.enqueue(Remove("x", hides=old.etag), doomed=(old,))
        with pytest.raises(Unavailable):
            async with a.deletions.keeping("x"):
                if is_committed_meanwhile:
                    await a.committer.flush()
                raise Unavailable("away")
        assert a.doomed() == ["x"] * is_committed_meanwhile
        site.clock.seconds += 1000
        await delete_all_due(a.deletions)
        assert ("x" in site.store.objects) is not is_committed_meanwhile
        await a.committer.flush()
        await delete_all_due(a.deletions)
        assert ("x" in site.store.objects, a.deletions.waiting) == (False, 0)


async def test_keeping_block_in_which_the_removal_is_committed_drops_its_deletion(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.store.equal_bytes_have_equal_etags = True
    with site.daemon("a") as a:
        (old,) = give(site, "x")
        a.enqueue(Remove("x", hides=old.etag), doomed=(old,))
        async with a.deletions.keeping("x"):
            give(site, "x")
            await a.committer.flush()
            await delete_all_due(a.deletions)
        await delete_all_due(a.deletions)
        assert ("x" in site.store.objects, a.doomed()) == (True, [])


async def test_the_task_gathers_and_goes_on_after_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "PAUSE_S_FIRST", 0.01)
    monkeypatch.setattr(deletions, "GATHER_S", 0.05)
    site = Site(tmp_path)
    with site.daemon("a") as a:
        site.store.hook = failures = Failures(is_delete, Unavailable("away"), count=3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.deletions.run, catch_up)
            for key in ("x", "y"):
                doom(a, *give(site, key))
            await until(lambda: not a.deletions.waiting)
            assert (site.store.objects, failures.left) == ({}, 0)
            doom(a, *give(site, "z"))
            await until(lambda: not a.deletions.waiting)
            assert site.store.objects == {}
            nursery.cancel_scope.cancel()


async def test_task_rests_until_something_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "GATHER_S", 0.01)
    site = Site(tmp_path)
    with site.daemon("a") as a:
        (later,), (now,) = give(site, "later"), give(site, "now")
        doom(a, msgspec.structs.replace(later, due_ns=1 << 62))
        passes, delete_due = 0, a.deletions.delete_due

        async def counted(catch_up: Callable[[float], Awaitable[object]]) -> int:
            nonlocal passes
            passes += 1
            return await delete_due(catch_up)

        monkeypatch.setattr(a.deletions, "delete_due", counted)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.deletions.run, catch_up)
            await trio.sleep(0.3)
            assert passes == 1
            doom(a, now)
            await until(lambda: a.deletions.waiting == 1)
            assert list(site.store.objects) == ["later"]
            await a.deletions.hasten(1.0)
            nursery.cancel_scope.cancel()
