"""Changes on their way into the store: once each, in order, whatever fails and whoever dies."""

from __future__ import annotations

import errno
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio.testing
from trio.testing import MockClock

from lakefs_fuse.commits import committer
from lakefs_fuse.commits.applier import STEP_OPERATIONS
from lakefs_fuse.commits.archive import Member
from lakefs_fuse.commits.change import OPERATIONS_AT_ONCE, Change, merged
from lakefs_fuse.commits.change_journal import ChangeJournal
from lakefs_fuse.commits.committer import Gathering
from lakefs_fuse.commits.record import OWN, THIS, Mkdir, ObjectRef, Operation, Put, Relocate, Remove, SetAttr, Symlink
from lakefs_fuse.environment import failpoints
from lakefs_fuse.errors import AccessDenied, CacheError, FileError, Unavailable
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import PENDING, ROOT_INODE
from lakefs_fuse.meta.rows import Deletion
from tests.commits.committing import Daemon, Site, until
from tests.commits.nodes import at
from tests.fakes import delete_all_due
from tests.memory_store import Failures, Pause, Request, When
from tests.upload.drafting import reached


def mkdir(path: str) -> Mkdir:
    return Mkdir(path, 0o755, 0, 0, 0)


def link(path: str, target: str = "x") -> Symlink:
    return Symlink(path, target, 0, 0, 0)


def is_put(request: Request) -> bool:
    return request.what == "put"


async def seen_by_others(site: Site) -> dict[str, tuple[object, ...]]:
    """What a mount without any cache makes of the store."""
    site.clock.seconds += 1
    with site.daemon(f"fresh{len(list(site.root.iterdir()))}") as fresh:
        await fresh.poller.poll()
        return fresh.shown()


# -- what is promised


async def test_a_change_is_here_at_once_and_everywhere_after_flush(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        a.enqueue(mkdir("d"), link("d/l"))
        assert sorted(a.shown()) == ["d/", "d/l"]
        assert (site.commits(), a.committer.journal.operations) == ([], 2)
        await a.committer.flush()
        assert (len(site.commits()), a.committer.journal.operations) == (1, 0)
        assert all(a.found(path).stamp == at(0) for path in ("d", "d/l"))
        assert await seen_by_others(site) == a.shown()
        assert await a.poller.poll() == 0  # its own is applied


async def test_what_gathers_is_one_commit_in_order(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        for number in range(50):
            a.enqueue(link("l", str(number)))
            a.enqueue(Remove("l"))
        a.enqueue(link("l", "last"))
        await a.committer.commit(Change(operations=[link("m")]))
        assert len(site.commits()) == 1
        assert a.metrics.operations_batch_max == 102
        assert await seen_by_others(site) == a.shown()
        assert a.tree.target(a.found("l").inode) == b"last"


@pytest.mark.parametrize("with_own", [False, True])
async def test_many_journaled_changes_are_sent_in_order_in_several_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_own: bool
) -> None:
    monkeypatch.setattr(committer, "OPERATIONS_AT_ONCE", 10)
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        a.enqueue(*(mkdir(f"d{number}") for number in range(25)))
        wanted = [f"d{number}" for number in range(25)]
        for number in range(22):
            a.enqueue(link("l", str(number)))
            a.enqueue(link(f"l{number}"), doomed=(Deletion(f"gone{number}", "etag"),))
            wanted += ["l", f"l{number}"]
        if with_own:
            planned: list[int] = []

            def plan() -> Change:
                planned.append(len(site.commits()))
                return Change(operations=[link("own")])

            await a.committer.commit(plan)
            wanted.append("own")
            assert planned == [5]
        else:
            await a.committer.flush()
        assert a.committer.journal.operations == 0
        records = [await b.log.fetch(await b.log.head(key)) for key in site.commits()]
        assert [len(each.operations) for each in records] == [25, 10, 10, 10, 10, 4 + with_own]
        assert [each.path for record in records for each in record.operations] == wanted
        assert len(a.doomed()) == 22
        await b.poller.poll()
        assert a.shown() == b.shown()


async def test_sent_by_itself_after_the_delay(tmp_path: Path, mock_clock: MockClock) -> None:
    site = Site(tmp_path)
    with site.daemon("a", delay_s=0.3) as a:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.run)
            a.enqueue(link("l"))
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(0.2)
            a.enqueue(link("m"))
            await trio.testing.wait_all_tasks_blocked()
            assert site.commits() == []
            mock_clock.rate = 1
            await until(lambda: not a.committer.journal.operations)
            assert len(site.commits()) == 1
            nursery.cancel_scope.cancel()


async def test_objects_stored_within_the_delay_are_announced_in_one_commit(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a", delay_s=0.2) as a, site.daemon("b") as b:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.run_announcements)
            for number in range(1000):
                a.committer.announce_stored(f"d/{number}")
            await until(lambda: len(site.commits()) == 1)
            await trio.sleep(0.5)
            assert (len(site.commits()), a.committer.journal.operations) == (1, 0)
            nursery.cancel_scope.cancel()
        records = [await b.log.fetch(await b.log.head(key)) for key in site.commits()]
        assert [(len(each.stored), len(each.operations)) for each in records] == [(1000, 0)]
        assert await b.poller.poll() == 1


async def test_announcements_and_changes_of_names_share_commits(tmp_path: Path) -> None:
    """As while an archive is unpacked: files are stored, and directories made, at all times."""
    site, delay_s = Site(tmp_path), 0.25
    with site.daemon("a", delay_s=delay_s) as a:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.run_announcements)
            nursery.start_soon(a.committer.run)
            began_s = trio.current_time()
            for number in range(24):
                a.committer.announce_stored(f"f{number}")
                if number % 5 == 2:
                    a.enqueue(mkdir(f"d{number}"))
                await trio.sleep(delay_s / 4)
            await trio.sleep(2 * delay_s)
            most = (trio.current_time() - began_s) / delay_s + 1
            nursery.cancel_scope.cancel()
        records = [await a.log.fetch(await a.log.head(key)) for key in site.commits()]
        assert {path for each in records for path in each.stored} == {f"f{number}" for number in range(24)}
        assert len(records) <= most, "one in each delay"


async def test_announcement_that_fails_unexpectedly_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "PAUSE_S_MAX", 0.01)
    site = Site(tmp_path)
    with site.daemon("a", delay_s=0.01) as a:
        site.store.hook = Failures(is_put, RuntimeError("unexpected"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.run_announcements)
            a.committer.announce_stored("f")
            await until(lambda: len(site.commits()) == 1)
            nursery.cancel_scope.cancel()


async def test_announcement_under_way_holds_up_no_commit(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        site.store.hook = pause = Pause(is_put)
        a.committer.announce_stored("f")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.flush_announcements)
            await reached(pause.reached)
            assert not a.committer.unsure
            async with a.committer.quiet():
                pause.resume()
        assert len(site.commits()) == 1


async def test_object_stored_again_while_it_is_announced_is_announced_again(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        a.committer.announce_stored("f")

        def store_again(request: Request, when: When) -> None:
            if is_put(request) and when == "after":
                site.store.hook = lambda _request, _when: None
                trio.from_thread.run_sync(a.committer.announce_stored, "f")

        site.store.hook = store_again
        await a.committer.flush_announcements()
        await a.committer.flush_announcements()
        await a.committer.flush_announcements()
        assert len(site.commits()) == 2


async def test_a_commit_that_failed_happened_nowhere(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        site.store.hook = Failures(is_put, AccessDenied("no"))
        with pytest.raises(AccessDenied):
            await a.committer.commit(Change(operations=[link("l")]))
        assert (a.shown(), site.commits(), a.metrics.failures) == ({}, [], 1)
        assert isinstance(a.committer.error, AccessDenied)

        def refuse() -> Change:
            raise FileError(2)

        with pytest.raises(FileError):
            await a.committer.commit(refuse)
        await a.committer.commit(Change(operations=[link("l")]))
        assert list(a.shown()) == ["l"]
        assert a.committer.error is None


async def test_what_is_journaled_is_tried_until_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "PAUSE_S_FIRST", 0.01)
    site = Site(tmp_path)
    with site.daemon("a", delay_s=0.01) as a:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.run)
            site.store.hook = failures = Failures(is_put, Unavailable("away"), count=5)
            a.enqueue(link("l"))
            await until(lambda: failures.left < 3)
            assert (site.commits(), list(a.shown())) == ([], ["l"])
            failed = a.committer.error
            assert failed is not None
            await until(lambda: not a.committer.journal.operations)
            assert len(site.commits()) == 1
            assert a.committer.error is None
            nursery.cancel_scope.cancel()


async def test_a_change_made_while_a_commit_is_on_its_way_is_in_the_next(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        a.enqueue(link("l", "first"))
        site.store.hook = pause = Pause(is_put)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.flush)
            await reached(pause.reached)
            a.enqueue(link("l", "second"))
            pause.resume()
        assert a.committer.journal.operations == 1
        assert a.found("l").stamp == PENDING | 2
        await a.committer.flush()
        assert len(site.commits()) == 2
        assert await seen_by_others(site) == a.shown()
        assert a.tree.target(a.found("l").inode) == b"second"


async def test_bytes_go_along(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        a.enqueue(mkdir("d"))
        members = [Member(f"d/{number}", b"x" * number, number, 0o644, 0, 0, 0) for number in range(3)]
        puts = [Put(f"d/{number}", THIS, number, number, 0o644, 0, 0, 0) for number in range(3)]
        made = await a.committer.commit(Change(operations=list(puts)), members)
        for number in range(3):
            entry = a.found(f"d/{number}")
            assert made.body[entry.offset : entry.offset + number] == b"x" * number
        assert site.store.data(made.ref.key) == made.body
        assert await seen_by_others(site) == a.shown()


async def test_a_late_commit_is_said_again(tmp_path: Path) -> None:
    """Its PUT took so long that others may have stopped looking for its time."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        site.store.hook = pause = Pause(is_put)
        async with trio.open_nursery() as nursery:
            member = Member("f", b"bytes", 5, 0o644, 0, 0, 0)
            change = Change(operations=[Put("f", THIS, 0, 5, 0o644, 0, 0, 0)])
            nursery.start_soon(a.committer.commit, change, [member])
            await reached(pause.reached)
            site.clock.seconds = 300
            async with trio.open_nursery() as other:
                other.start_soon(b.committer.commit, Change(operations=[link("later")]))
                pause.resume()
        assert await b.poller.poll() >= 1
        assert b.found("f").size == 5
        assert await seen_by_others(site) == b.shown()


async def test_a_late_commit_is_not_said_again_over_what_came_after_it(tmp_path: Path) -> None:
    """Another node saw it before its writer had an answer, and removed one of the names."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        await a.poller.poll()
        site.store.hook = pause = Pause(is_put, "after")
        async with trio.open_nursery() as nursery:
            members = [Member(name, b"bytes", 5, 0o644, 0, 0, 0) for name in "fg"]
            change = Change(operations=[Put(name, THIS, 0, 5, 0o644, 0, 0, 0) for name in "fg"])
            nursery.start_soon(a.committer.commit, change, members)
            await reached(pause.reached)
            site.store.hook = lambda request, at: None
            site.clock.seconds = 1
            assert await b.poller.poll() == 1
            b.enqueue(Remove("f"))
            await b.committer.flush()
            site.clock.seconds = 300
            pause.resume()
        await a.poller.poll()
        await b.poller.poll()
        assert sorted(a.shown()) == sorted(b.shown()) == ["g"]
        assert await seen_by_others(site) == b.shown()


async def test_late_rename_that_is_said_again_leaves_what_came_to_the_earlier_name(tmp_path: Path) -> None:
    """Another node saw it before its writer had an answer, and put another file there."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        member = Member("f", b"bytes", 5, 0o644, 0, 0, 0)
        await a.committer.commit(Change(operations=[Put("f", THIS, 0, 5, 0o644, 0, 0, 0)]), [member])
        site.store.hook = pause = Pause(is_put, "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.commit, a.rename("f", "g"))
            await reached(pause.reached)
            site.store.hook = no_fault
            site.clock.seconds = 1
            assert await b.poller.poll() == 2
            await b.committer.commit(Change(operations=[link("f")]))
            await a.poller.poll()
            site.clock.seconds = 300
            pause.resume()
        await a.poller.poll()
        await b.poller.poll()
        assert sorted(a.shown()) == sorted(b.shown()) == ["f", "g"]
        assert await seen_by_others(site) == b.shown() == a.shown()


async def test_late_rename_that_is_said_again_leaves_a_file_that_is_created_meanwhile(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        member = Member("f", b"bytes", 5, 0o644, 0, 0, 0)
        await a.committer.commit(Change(operations=[Put("f", THIS, 0, 5, 0o644, 0, 0, 0)]), [member])
        site.store.hook = pause = Pause(is_put)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.commit, a.rename("f", "g"))
            await reached(pause.reached)
            site.store.hook = again = Pause(is_put)
            site.clock.seconds = 300
            pause.resume()
            await reached(again.reached)
            created = a.dirty("f")
            again.resume()
        assert a.found("f").inode == created.inode
        assert a.found("g").size == 5


@pytest.mark.parametrize(
    "operation",
    [Remove("f", by_date=True), link("f"), Put("f", 1, 0, 1, 0o644, 0, 0, 0)],
    ids=["removal", "link", "rename"],
)
async def test_late_change_of_names_that_is_said_again_leaves_an_object_that_is_stored_meanwhile(
    tmp_path: Path, operation: Operation
) -> None:
    """The machine was suspended while it sent the commit. No commit names what another node has created since."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        site.store.hook = pause = Pause(is_put)
        async with trio.open_nursery() as nursery:
            objects = [ObjectRef(), ObjectRef("elsewhere", "e0", 1)]
            change = Change(operations=[Remove("g"), operation], objects=objects)
            nursery.start_soon(a.committer.commit, change)
            await reached(pause.reached)
            site.store.hook = no_fault
            site.clock.seconds = 200
            theirs = site.store.put("f", b"theirs")
            site.clock.seconds = 300
            pause.resume()
        assert len(site.commits()) == 2
        await b.committer.commit(Change(operations=[link("later")]))
        for each in (a, b):
            await each.poller.poll()
            each.list(theirs)
            assert each.found("f").etag == theirs.etag


LATE_S = 300


async def commit_late(
    site: Site, daemon: Daemon, *operations: Operation, then: Callable[[Request, When], None]
) -> None:
    """The PUT takes LATE_S; from its answer on requests meet ``then``."""
    site.store.hook = pause = Pause(is_put)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.committer.commit, Change(operations=list(operations)))
        await reached(pause.reached)
        site.clock.seconds += LATE_S
        site.store.hook = then
        pause.resume()
    site.store.hook = no_fault


async def poll_past(daemon: Daemon) -> None:
    """Commits of the daemon's own move its polls on: it does not find what is LATE_S older."""
    await daemon.committer.commit(Change(operations=[link("later")]))
    assert await daemon.poller.poll() == 0


def no_fault(_request: Request, _when: When) -> None: ...


@pytest.mark.parametrize("by_itself", [False, True])
async def test_late_commit_whose_repetition_fails_is_repeated_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_itself: bool
) -> None:
    monkeypatch.setattr(committer, "PAUSE_S_FIRST", 0.01)
    site = Site(tmp_path)
    with site.daemon("a", delay_s=0.01) as a, site.daemon("b") as b:
        away = Failures(lambda request: request.what in ("list", "head"), Unavailable("away"), count=1000)
        await commit_late(site, a, link("l"), then=away)
        assert list(a.shown()) == ["l"]
        await poll_past(b)
        if by_itself:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.committer.run)
                await until(lambda: len(site.commits()) == 3)
                nursery.cancel_scope.cancel()
        else:
            await a.committer.flush()
        await b.poller.poll()
        assert sorted(b.shown()) == ["l", "later"]
        await a.committer.flush()
        assert len(site.commits()) == 3


@pytest.mark.parametrize("is_journaled", [False, True])
async def test_late_commit_that_was_not_repeated_is_repeated_by_the_next_daemon(
    tmp_path: Path, is_journaled: bool
) -> None:
    site = Site(tmp_path)
    with site.daemon("b") as b:
        with site.daemon("a") as a:
            if is_journaled:
                a.enqueue(link("l"))
            away = Failures(lambda request: request.what in ("list", "head"), Unavailable("away"), count=1000)
            await commit_late(site, a, link("m"), then=away)
            site.kill(a, "dead")
        await poll_past(b)
        with site.daemon("dead") as next_one:
            await next_one.committer.reconcile_journal()
            assert len(site.commits()) == 2
            await next_one.committer.flush()
            await b.poller.poll()
            assert sorted(b.shown()) == ["l"] * is_journaled + ["later", "m"]
            site.kill(next_one, "dead again")
        with site.daemon("dead again") as last:
            await last.committer.reconcile_journal()
            await last.committer.flush()
        assert len(site.commits()) == 3


@pytest.mark.parametrize("is_journaled", [False, True])
async def test_late_commit_whose_answer_is_lost_is_repeated_by_the_next_daemon(
    tmp_path: Path, is_journaled: bool
) -> None:
    """The network goes away again, and the machine is restarted. It is a rename, or a pack, that waited for nothing."""
    site = Site(tmp_path)
    with site.daemon("b") as b:
        with site.daemon("a") as a:
            await a.poller.poll()
            if is_journaled:
                a.enqueue(link("l"))
            with pytest.RaisesGroup(Unavailable):
                await commit_late(site, a, link("m"), then=Away(mute=True))
            site.kill(a, "dead")
        site.store.hook = no_fault
        await poll_past(b)
        with site.daemon("dead") as next_one:
            await next_one.committer.reconcile_journal()
            assert sorted(next_one.shown()) == ["l"] * is_journaled + ["m"]
            await next_one.committer.flush()
            await b.poller.poll()
            assert sorted(b.shown()) == ["l"] * is_journaled + ["later", "m"]
            site.kill(next_one, "dead again")
        with site.daemon("dead again") as last:
            await last.committer.reconcile_journal()
            await last.committer.flush()
        assert len(site.commits()) == 3


@pytest.mark.parametrize("is_journaled", [False, True])
async def test_late_commit_whose_answer_is_lost_is_repeated_when_it_is_found(
    tmp_path: Path, is_journaled: bool
) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        if is_journaled:
            a.enqueue(link("l"))
        with pytest.RaisesGroup(Unavailable):
            await commit_late(site, a, link("m"), then=Away(mute=True))
        site.store.hook = no_fault
        await poll_past(b)
        await a.committer.flush()
        await b.poller.poll()
        assert sorted(b.shown()) == ["l"] * is_journaled + ["later", "m"]
        assert await seen_by_others(site) == b.shown()


# -- commits that belong to another node's


async def time_of_others(site: Site, daemon: Daemon, other: Daemon) -> int:
    """Of a commit of the other node, which the daemon has heard of."""
    await other.committer.commit(Change(operations=[link("others")]))
    await daemon.poller.poll()
    return daemon.found("others").stamp


@pytest.mark.parametrize("is_stored", [False, True])
async def test_commit_as_of_after_one_that_failed_has_another_key(tmp_path: Path, is_stored: bool) -> None:
    """The failed one may be in the store, or come there later."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        time = await time_of_others(site, a, b)
        site.store.hook = Away(mute=True) if is_stored else Failures(is_put, Unavailable("away"))
        with pytest.raises(Unavailable):
            await a.committer.commit_as_of(lambda: (Change(operations=[link("l")]), time))
        site.store.hook = no_fault
        await a.committer.commit_as_of(lambda: (Change(operations=[link("m")]), time))
        sent = [request.key for request in site.store.requests if is_put(request)]
        assert len(sent) == len(set(sent)) == 3
        await b.poller.poll()
        assert sorted(b.shown()) == ["l"] * is_stored + ["m", "others"]
        assert await seen_by_others(site) == b.shown() == a.shown()


async def test_commit_as_of_that_the_disk_does_not_record_is_recorded_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        time = await time_of_others(site, a, b)
        with monkeypatch.context() as patched, pytest.raises(CacheError):
            patched.setattr(a.database, "commit", full)
            await a.committer.commit_as_of(lambda: (Change(operations=[link("l")]), time))
        assert a.committer.may_have("l")
        await a.committer.reconcile()
        assert (sorted(a.shown()), a.committer.may_have("l")) == (["l", "others"], False)
        assert await seen_by_others(site) == a.shown()


@pytest.mark.parametrize("waits_for_turn", [False, True])
async def test_commit_as_of_that_takes_long_is_heard_by_polls_past_its_time(
    tmp_path: Path, waits_for_turn: bool
) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        time = await time_of_others(site, a, b)
        site.store.hook = pause = Pause(is_put)
        async with trio.open_nursery() as nursery:
            if waits_for_turn:
                nursery.start_soon(a.committer.commit, Change(operations=[link("l")]))
                await reached(pause.reached)
            nursery.start_soon(a.committer.commit_as_of, lambda: (Change(operations=[link("m")]), time))
            await reached(pause.reached)
            await trio.testing.wait_all_tasks_blocked()
            site.store.hook = no_fault
            site.clock.seconds += LATE_S
            await poll_past(b)
            pause.resume()
        await a.committer.flush()
        await b.poller.poll()
        assert sorted(b.shown()) == ["l"] * waits_for_turn + ["later", "m", "others"]
        assert await seen_by_others(site) == b.shown()


# -- deaths


async def flush_and_die(site: Site, daemon: Daemon, when: When) -> None:
    """Just before the store makes the commit, or after it, and nobody hears of that. What is left is "dead"."""
    site.store.hook = pause = Pause(is_put, when)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.committer.flush)
        await reached(pause.reached)
        site.kill(daemon, "dead")
        nursery.cancel_scope.cancel()
        pause.resume()
    site.store.hook = lambda request, at: None


@pytest.mark.parametrize("when", ["journaled", "sending", "stored"])
async def test_a_death_at_any_step_makes_the_change_once(tmp_path: Path, when: str) -> None:
    site = Site(tmp_path)
    site.store.give("f", b"old")
    etag = site.store.head("f").etag
    with site.daemon("a") as a:
        a.enqueue(mkdir("d"), link("l"))
        a.enqueue(Remove("f", hides=etag), doomed=(Deletion("f", etag),))
        if when == "journaled":
            site.kill(a, "dead")
        else:
            await flush_and_die(site, a, "before" if when == "sending" else "after")
            if when == "sending":  # it never left
                for key in site.commits():
                    site.store.take(key)
        shown = a.shown()
    assert len(site.commits()) == (when == "stored")
    site.clock.seconds += 5
    with site.daemon("dead") as next_one:
        await next_one.poller.poll()
        assert next_one.shown() == shown
        assert next_one.committer.journal.operations == 3
        await next_one.committer.flush()
        assert next_one.committer.journal.operations == 0
        assert len(site.commits()) == 1
        assert next_one.shown() == shown
        assert next_one.doomed() == ["f"]
        assert all(next_one.found(path).stamp < PENDING for path in ("d", "l"))
        await delete_all_due(next_one.deletions)
        assert "f" not in site.store.objects
        await next_one.committer.flush()
        assert len(site.commits()) == 1
    assert await seen_by_others(site) == shown


async def test_a_commit_that_is_damaged_when_it_is_found_is_sent_again(tmp_path: Path) -> None:
    """Nobody applies it."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        a.enqueue(link("l"))
        await flush_and_die(site, a, "after")
        shown = a.shown()
    (damaged,) = site.commits()
    site.store.give(damaged, b"\0" * 1000)
    site.clock.seconds += 5
    with site.daemon("dead") as next_one:
        await next_one.committer.reconcile_journal()
        assert next_one.committer.journal.operations == 1
        await next_one.committer.flush()
        assert (len(site.commits()), next_one.committer.journal.operations) == (2, 0)
        assert next_one.shown() == shown
    assert await seen_by_others(site) == shown


class Away:
    """Answers of PUTs are lost, and (``mute``) nothing else is answered either."""

    def __init__(self, *, mute: bool) -> None:
        self.mute = mute

    def __call__(self, request: Request, when: When) -> None:
        if when == "after" and is_put(request):
            raise Unavailable("lost")
        if self.mute and not is_put(request):
            raise Unavailable("away")


async def test_a_lost_answer_is_asked_for(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        a.enqueue(link("l"))
        site.store.hook = Away(mute=False)
        await a.committer.commit(Change(operations=[link("m")]))
        assert (len(site.commits()), a.committer.journal.operations, sorted(a.shown())) == (1, 0, ["l", "m"])
        site.store.hook = lambda request, when: None
        assert await seen_by_others(site) == a.shown()


@pytest.mark.parametrize("is_journaled", [False, True])
async def test_large_commit_whose_answer_was_lost_is_applied_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_journaled: bool
) -> None:
    """The outcome of a rename of many names is known minutes later, when programs use the mount again."""
    steps: list[str] = []
    monkeypatch.setattr(failpoints, "reached", steps.append)
    site = Site(tmp_path)
    with site.daemon("a") as a:
        await a.poller.poll()
        if is_journaled:
            a.enqueue(link("l"))
        many = Change(operations=[link(f"{number}") for number in range(OPERATIONS_AT_ONCE + 1)])
        site.store.hook = Away(mute=True)
        with pytest.raises(Unavailable):
            await a.committer.commit(many)
        site.store.hook = no_fault
        await a.committer.reconcile()
        assert len(a.shown()) == len(many.operations) + is_journaled
        assert len(steps) >= OPERATIONS_AT_ONCE // STEP_OPERATIONS and not a.tree.barrier.is_up
        assert await seen_by_others(site) == a.shown()


@pytest.mark.parametrize("by_itself", [False, True])
async def test_large_commit_that_is_late_is_repeated_once_its_caller_has_lowered_the_barrier(
    tmp_path: Path, by_itself: bool
) -> None:
    site = Site(tmp_path)
    with site.daemon("a", delay_s=0.01) as a, site.daemon("b") as b:
        barrier = a.tree.barrier
        site.store.hook = pause = Pause(is_put)

        def planned() -> Change:
            barrier.add(ROOT_INODE, b"0")
            return Change(operations=[link(f"{number}") for number in range(OPERATIONS_AT_ONCE + 1)])

        async def commit() -> None:
            await a.committer.commit(planned, in_steps=True)
            barrier.lower()

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(commit)
                await reached(pause.reached)
                site.store.hook = no_fault
                site.clock.seconds = LATE_S
                pause.resume()
            await poll_past(b)
            if by_itself:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(a.committer.run)
                    await until(lambda: len(site.commits()) == 3)
                    nursery.cancel_scope.cancel()
            else:
                await a.committer.flush()
        await b.poller.poll()
        await a.poller.poll()
        assert len(site.commits()) == 3 and a.shown() == b.shown() == await seen_by_others(site)


async def test_nothing_is_sent_again_before_it_is_known(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        await a.poller.poll()
        a.enqueue(link("l", "first"))
        site.store.hook = Away(mute=True)
        for _ in range(3):
            with pytest.raises(Unavailable):
                await a.committer.flush()
        assert (len(site.commits()), a.committer.journal.operations) == (1, 1)
        site.store.hook = lambda request, when: None
        a.enqueue(link("m"))
        await a.committer.flush()
        assert (len(site.commits()), a.committer.journal.operations) == (2, 0)
        assert await seen_by_others(site) == a.shown()
        a.enqueue(Remove("l"))
        await a.committer.flush()
        assert await seen_by_others(site) == a.shown()


@pytest.mark.parametrize("is_stored", [False, True])
async def test_commit_cancelled_between_two_attempts_is_asked_for(tmp_path: Path, is_stored: bool) -> None:
    """Its caller is gone, and the answer to the first attempt was lost."""
    site = Site(tmp_path)
    with site.daemon("a", retry_timeout_s=60.0) as a:
        site.store.hook = Failures(is_put, Unavailable("lost"), count=1000, when="after" if is_stored else "before")
        doomed = Deletion("x", site.store.give("x").etag)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.commit, Change(operations=[link("l")], doomed=[doomed]))
            await until(lambda: a.client.metrics.errors > 0)
            nursery.cancel_scope.cancel()
        site.store.hook = no_fault
        assert a.committer.may_have("l")
        await a.committer.reconcile()
        assert (list(a.shown()), a.doomed()) == ((["l"], ["x"]) if is_stored else ([], []))
        assert not a.committer.may_have("l")
        assert await seen_by_others(site) == a.shown()


async def test_a_lost_answer_of_a_commit_with_journaled_changes(tmp_path: Path) -> None:
    """Who asked for the commit is told of an error; it appears all the same, as a whole."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        await a.poller.poll()
        a.enqueue(link("l"))
        site.store.hook = Away(mute=True)
        with pytest.raises(Unavailable):
            await a.committer.commit(Change(operations=[link("m")]))
        assert list(a.shown()) == ["l"]
        site.store.hook = lambda request, when: None
        await a.committer.flush()
        assert len(site.commits()) == 1
        await a.poller.poll()
        assert sorted(a.shown()) == ["l", "m"]
        assert await seen_by_others(site) == a.shown()


@pytest.mark.parametrize("is_journaled", [False, True])
@pytest.mark.parametrize("written", range(6))
async def test_commit_that_the_disk_does_not_record_is_recorded_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_journaled: bool, written: int
) -> None:
    """It is in the store, and the disk fails after some writes. `reconcile` is what writers of files call."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        first, second = (Deletion(key, site.store.give(key).etag) for key in ("x", "y"))
        if is_journaled:
            a.enqueue(link("l"), doomed=(first,))
        commit, left = a.database.commit, math.inf

        def fail(batch: Batch, *, sync: bool = False) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CacheError("no room")
            commit(batch, sync=sync)

        def sent(request: Request, when: When) -> None:
            nonlocal left
            if is_put(request) and when == "after":
                left = written

        site.store.hook = sent
        with monkeypatch.context() as patched:
            patched.setattr(a.database, "commit", fail)
            patched.setattr(a.database, "commit_volatile", fail)
            await a.committer.commit(Change(operations=[link("m")], doomed=[second]))
        site.store.hook = no_fault
        await a.committer.reconcile()
        journal = a.committer.journal
        assert (sorted(a.shown()), a.doomed()) == (["l"] * is_journaled + ["m"], ["x"] * is_journaled + ["y"])
        assert (journal.operations, journal.sending, a.committer.may_have("m")) == (0, None, False)
        assert all(a.found(path).stamp == at(0) for path in a.shown())
        assert await a.poller.poll() == 0
        assert await seen_by_others(site) == a.shown()


async def test_change_that_was_sent_when_the_daemon_died_is_not_put_in_effect_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had stored an object. Another node saw that, and put a link in its place, of which the daemon had heard."""
    site = Site(tmp_path)

    def fail(*_: object) -> None:
        raise CacheError("the machine lost its power")

    with site.daemon("a") as a, site.daemon("b") as b:
        a.enqueue(Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides="e1"))
        site.clock.seconds = 1
        await b.committer.commit(Change(operations=[Remove("f", hides="e1"), link("f", "b")]))
        await a.poller.poll()
        site.clock.seconds = 2
        with monkeypatch.context() as patched, pytest.raises(CacheError):
            patched.setattr(ChangeJournal, "delete", fail)
            await a.committer.flush()
    with site.daemon("a") as a:
        await a.committer.reconcile_journal()
        await a.poller.poll()
        assert a.tree.target(a.found("f").inode) == b"b"
        assert a.shown() == await seen_by_others(site)


async def test_journaled_change_that_another_node_replaced_is_not_put_in_effect_again(tmp_path: Path) -> None:
    """It had stored an object, and died before it told others, and after it heard that another put a link there."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        a.enqueue(Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides="e1"))
        site.clock.seconds = 1
        await b.committer.commit(Change(operations=[Remove("f", hides="e1"), link("f", "b")]))
        await a.poller.poll()
        assert a.tree.target(a.found("f").inode) == b"b"
    site.clock.seconds = 2
    with site.daemon("a") as a:
        assert a.tree.target(a.found("f").inode) == b"b"
        await a.committer.flush()
        assert a.shown() == await seen_by_others(site)


async def test_file_that_was_moved_when_the_machine_died_counts_beside_a_late_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row had moved to its new name, and what is left behind at the old one was lost. Another node had put a link
    over the earlier version, before the commit that tells of the file and its rename."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        for second, etag in enumerate(("e0", "e1"), 1):
            site.clock.seconds = second
            a.enqueue(Remove("f"), Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides=etag))
            await a.committer.flush()
        await b.poller.poll()
        a.enqueue(Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides="e2"))
        commit, writes = a.database.commit, 0

        def fail_fifth(batch: Batch, *, sync: bool = False) -> None:
            nonlocal writes
            writes += 1
            if writes > 4:  # the fourth has moved the row
                raise CacheError("the machine lost its power")
            commit(batch, sync=sync)

        with monkeypatch.context() as patched:
            patched.setattr(a.database, "commit", fail_fifth)
            patched.setattr(a.database, "commit_volatile", fail_fifth)
            moved = Put("g", 1, 0, 1, 0o644, 0, 0, 0)
            objects = [ObjectRef(), ObjectRef("f", "e2", 1)]
            site.store.give("f")
            a.committer.enqueue(
                Change(operations=[moved, Remove("f", hides="e2")], objects=objects, moves=[("f", "g")])
            )
        site.clock.seconds = 3
        await b.committer.commit(Change(operations=[Symlink("f", "b", 0, 0, 0, "e1")]))
    site.clock.seconds = 4
    with site.daemon("a") as a:
        await a.committer.flush()
        await a.poller.poll()
        assert list(a.shown()) == ["g"]
        assert a.shown() == await seen_by_others(site)


async def test_others_see_changes_of_two_nodes_in_the_order_of_their_commits(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        for daemon in (a, b):
            await daemon.poller.poll()
        a.enqueue(link("l", "a"))
        b.enqueue(link("l", "b"))
        site.clock.seconds = 1
        await b.committer.flush()
        site.clock.seconds = 2
        await a.committer.flush()
        for daemon in (a, b):
            await daemon.poller.poll()
        assert a.shown() == b.shown() == await seen_by_others(site)
        assert a.tree.target(a.found("l").inode) == b"a"


async def test_attributes_set_on_two_nodes(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        member = Member("f", b"x", 1, 0o644, 0, 0, 0)
        await a.committer.commit(Change(operations=[Put("f", THIS, 0, 1, 0o644, 0, 0, 0)]), [member])
        await b.poller.poll()
        site.clock.seconds = 1
        a.committer.enqueue(a.chmod("f", 0o600))
        site.clock.seconds = 2
        b.committer.enqueue(b.chmod("f", 0o640))
        await b.committer.flush()
        await a.poller.poll()
        site.clock.seconds = 3
        await a.committer.flush()
        await b.poller.poll()
        assert a.shown() == b.shown() == await seen_by_others(site)
        assert a.found("f").mode == 0o600


PACKED_DELAY_S = 0.01


@asynccontextmanager
async def with_files_for_pack(root: Path) -> AsyncIterator[tuple[Site, Daemon]]:
    """A daemon that commits by itself, and has small files that wait for a pack."""
    site = Site(root)
    with site.daemon("a", delay_s=PACKED_DELAY_S) as a:
        a.acknowledged.has_files_for_pack = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.run)
            yield site, a
            nursery.cancel_scope.cancel()


async def test_new_directories_are_sent_with_the_pack_that_files_wait_for(tmp_path: Path) -> None:
    async with with_files_for_pack(tmp_path) as (site, a):
        for number in range(3):
            a.enqueue(mkdir(f"d{number}"))
            await trio.sleep(5 * PACKED_DELAY_S)
        assert site.commits() == []
        member = Member("d0/f", b"x", 1, 0o644, 0, 0, 0)
        await a.committer.commit(Change(operations=[Put("d0/f", THIS, 0, 1, 0o644, 0, 0, 0)]), [member])
        assert (len(site.commits()), a.committer.journal.operations) == (1, 0)
        a.acknowledged.has_files_for_pack = False
        a.enqueue(mkdir("later"))
        await until(lambda: len(site.commits()) == 2)
        assert await seen_by_others(site) == a.shown()


async def test_names_of_files_and_many_directories_do_not_wait_for_a_pack(tmp_path: Path) -> None:
    async with with_files_for_pack(tmp_path) as (site, a):
        a.enqueue(mkdir("d"))
        a.enqueue(link("d/l"))
        await until(lambda: len(site.commits()) == 1)
        site.clock.seconds += 1
        a.enqueue(*(mkdir(f"d{number}") for number in range(committer.WITH_PACK_OPERATIONS_MAX + 1)))
        await until(lambda: len(site.commits()) == 2)


async def test_directories_do_not_wait_for_a_pack_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "WITH_PACK_S_MAX", 10 * PACKED_DELAY_S)
    async with with_files_for_pack(tmp_path) as (site, a):
        a.enqueue(mkdir("d"))
        await until(lambda: len(site.commits()) == 1)


async def test_change_ahead_of_held_ones_that_the_disk_refuses_leaves_these_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise CacheError("no room")

    with site.daemon("a") as a:
        a.acknowledged.durable_up_to = 0
        a.committer.enqueue(Change(operations=[link("l")], after=1))
        with monkeypatch.context() as patched:
            patched.setattr(a.database, "commit", fail)
            with pytest.raises(CacheError):
                a.committer.enqueue(Change(operations=[link("l", "newer")], ahead=True))
        a.acknowledged.durable_up_to = 1
        await a.committer.flush()
        assert list(a.shown()) == ["l"]
        assert await seen_by_others(site) == a.shown()


@pytest.mark.parametrize("is_journaled", [True, False])
@pytest.mark.parametrize("was_contested", [True, False])
async def test_operation_superseded_in_a_held_change_shows_nothing_when_a_commit_of_before_comes_late(
    tmp_path: Path, was_contested: bool, is_journaled: bool
) -> None:
    """The newer version was stored before another node removed it, and is committed after that."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        if was_contested:
            for target in ("one", "two"):
                a.enqueue(link("f", target))
                await a.committer.flush()
            a.enqueue(Remove("f"))
            await a.committer.flush()
            await b.poller.poll()
            site.clock.seconds = 1
        a.acknowledged.durable_up_to = 0
        a.committer.enqueue(Change(operations=[link("f", "held")], after=1))
        site.clock.seconds = 2
        b.enqueue(Remove("f", hides="e"))
        await b.committer.flush()
        site.clock.seconds = 4
        newer = Change(operations=[Put("f", OWN, 0, 1, 0o644, 0, 0, 0, "e")], ahead=is_journaled)
        if is_journaled:
            a.committer.enqueue(newer)
            await a.committer.flush()
        else:
            await a.committer.commit(newer)
        await a.poller.poll()
        assert a.shown() == await seen_by_others(site) == {}


async def test_attributes_set_again_behind_what_is_held(tmp_path: Path) -> None:
    """The first are sent without the second, which are newer here all the while."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        member = Member("f", b"x", 1, 0o644, 0, 0, 0)
        await a.committer.commit(Change(operations=[Put("f", THIS, 0, 1, 0o644, 0, 0, 0)]), [member])
        a.acknowledged.durable_up_to = 0
        a.committer.enqueue(a.chmod("f", 0o640))
        a.committer.enqueue(Change(operations=[link("held")], after=1))
        a.committer.enqueue(a.chmod("f", 0o600))
        site.clock.seconds = 5
        await a.committer.flush()
        assert a.committer.journal.operations == 2
        assert a.found("f").mode == 0o600
        a.acknowledged.durable_up_to = 1
        await a.committer.flush()
        assert a.found("f").mode == 0o600
        assert await seen_by_others(site) == a.shown()


# -- records of several changes


def test_places_are_those_of_the_whole_record() -> None:
    one, two = ObjectRef("one", "1", 10), ObjectRef("two", "2", 20)
    changes = [
        Change(operations=[Put("a", 1, 3, 1, 0, 0, 0, 0)], objects=[ObjectRef(), one]),
        Change(
            operations=[
                SetAttr("b", 2, 0, 1, "", 0, 0, 0, 0),
                Relocate("c", 1, 5, "", THIS, 1, 2, 0, 0, 0, 0),
                Put("d", THIS, 0, 1, 0, 0, 0, 0),
                Put("e", -1, 0, 1, 0, 0, 0, 0, "own"),
            ],
            objects=[ObjectRef(), two, one],
            moves=[("x", "y")],
        ),
    ]
    record = merged(changes, "00000001", 5, [111, 222])
    assert record.objects == [ObjectRef(), one, two]
    put_a, set_b, relocate_c, put_d, put_e = record.operations
    assert isinstance(put_a, Put)
    assert isinstance(set_b, SetAttr)
    assert isinstance(relocate_c, Relocate)
    assert isinstance(put_d, Put)
    assert isinstance(put_e, Put)
    assert (put_a.object, put_a.offset) == (1, 3)
    assert set_b.object == 1
    assert (relocate_c.from_object, relocate_c.from_offset, relocate_c.offset) == (2, 5, 222)
    assert (put_d.object, put_d.offset) == (THIS, 111)
    assert (put_e.object, put_e.hides) == (-1, "own")
    assert record.moves == [("x", "y")]


def full(batch: Batch, *, sync: bool = False) -> None:
    raise CacheError("no room")


def test_a_full_disk_refuses_the_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        with monkeypatch.context() as patch:
            patch.setattr(a.database, "commit", full)
            with pytest.raises(CacheError):
                a.enqueue(link("l"))
        assert (a.shown(), a.committer.journal.operations) == ({}, 0)
        a.enqueue(link("l"))
        assert list(a.shown()) == ["l"]


@pytest.mark.parametrize("then", ["enqueue", "commit", "nothing"])
async def test_change_that_is_journaled_when_the_disk_fails_is_in_effect_before_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Others would have it, and this node would not."""
    site = Site(tmp_path)
    with site.daemon("a", delay_s=0.01) as a:
        a.enqueue(link("l"))
        await a.committer.flush()
        commit, writes = a.database.commit, 0

        def fail_second(batch: Batch, *, sync: bool = False) -> None:
            nonlocal writes
            writes += 1
            if writes == 2:
                raise CacheError("no room")
            commit(batch, sync=sync)

        monkeypatch.setattr(a.database, "commit", fail_second)
        monkeypatch.setattr(a.database, "commit_volatile", fail_second)
        a.enqueue(Remove("l"))
        assert list(a.shown()) == ["l"]
        a.watcher.told.clear()
        if then == "enqueue":  # what it says was looked up before
            with pytest.raises(CacheError):
                a.enqueue(link("m"))
        elif then == "commit":
            await a.committer.commit(lambda: Change(operations=[link("m")] if not a.shown() else []))
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.committer.run)
                await until(lambda: not a.committer.journal.operations)
                nursery.cancel_scope.cancel()
        assert b"l" in a.watcher.told
        assert list(a.shown()) == ["m"] * (then == "commit")
        await a.committer.flush()
        assert await seen_by_others(site) == a.shown()


async def test_pauses_of_gathering_grow_while_more_comes_at_once(autojump_clock: MockClock) -> None:
    assert autojump_clock is not None
    gathering = Gathering(1.0, 0.05)

    async def paused_s() -> float:
        began_s = trio.current_time()
        await gathering.pause()
        return round(trio.current_time() - began_s, 3)

    assert [await paused_s() for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    await trio.sleep(2.5)
    assert await paused_s() == 0.05
    await trio.sleep(0.2)
    assert await paused_s() == 0.05
    gathering = Gathering(1.0, 1.0)
    assert [await paused_s() for _ in range(3)] == [1.0] * 3


@pytest.mark.parametrize(
    "operation",
    [mkdir("a/../b"), mkdir("d/" + "x" * 1025), mkdir(".lakefs/x"), link("l", "x" * 5000), Remove("a\ud800")],
)
async def test_change_that_no_node_could_read_is_refused_and_others_are_sent(
    tmp_path: Path, operation: Operation
) -> None:
    """Its commit would be lost for all nodes, with the other changes in it, and none could repair it."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        a.enqueue(mkdir("before"))
        for refused in (partial(a.enqueue, operation), partial(a.committer.commit, Change(operations=[operation]))):
            with pytest.raises(FileError) as raised:
                if made := refused():
                    await made
            assert raised.value.errno == errno.EINVAL
        await a.committer.flush()
        assert sorted(await seen_by_others(site)) == sorted(a.shown()) == ["before/"]
