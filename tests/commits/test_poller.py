"""Commits of other nodes: all of them, in order, once; and what cannot be read harms nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.commits import poller
from lakefs_fuse.commits.applier import Applier
from lakefs_fuse.commits.archive import RECORD_BYTES_MAX, commit_key, parse_commit_key
from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.doubt import Doubt
from lakefs_fuse.commits.gc_record import RECORDS
from lakefs_fuse.commits.hybrid_clock import COMMIT_AHEAD_MAX_S
from lakefs_fuse.commits.name_history import DOUBTS_AT_ONCE
from lakefs_fuse.commits.poller import FETCHED_MAX
from lakefs_fuse.commits.record import COMMITS, OWN, THIS, ObjectRef, Operation, Put, Record, Relocate, Remove, SetAttr
from lakefs_fuse.errors import Unavailable
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.sorted_tables import are_names_outdated
from lakefs_fuse.store.protocol import ObjectMeta
from tests.commits.archives import commit_of
from tests.commits.committing import Daemon, Site, until
from tests.commits.nodes import at, plain
from tests.commits.records import record_of
from tests.memory_store import Failures, Request, When

HOUR_S = 3600


def commit(site: Site, seconds: float, path: str, *, size: int = 3, writer: str = "00000abc") -> str:
    """Somebody's commit of one file appears in the store."""
    return commit_also(site, seconds, {path: b"x" * size}, writer=writer)


def commit_also(
    site: Site, seconds: float, files: dict[str, bytes], *operations: Operation, writer: str = "00000abc"
) -> str:
    """Somebody's commit appears in the store."""
    record: Record = msgspec.structs.replace(record_of(time=at(seconds)), writer=writer)
    key = commit_key(at(seconds), writer)
    site.store.give(key, commit_of(files, record=record, more=operations))
    return key


def listed(site: Site, node: Daemon, seconds: float, key: str = "f") -> str:
    """Somebody puts a plain object, dated to the second, and the node lists it; answers its ETag."""
    site.clock.seconds = int(seconds)
    etag = site.store.give(key, b"x").etag
    site.clock.seconds = seconds
    node.list(plain(key, etag, seconds), seconds=seconds)
    return etag


async def test_new_ones_are_applied_once_in_the_order_of_their_times(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        commit(site, 2, "f", size=2)
        commit(site, 1, "f", size=1)
        commit(site, 1.5, "g")
        assert await a.poller.poll() == 3
        assert a.found("f").size == 2
        assert a.watcher.told == [b"f", b"g", b"f"]
        assert await a.poller.poll() == 0
        assert (a.metrics.polls, a.metrics.applied) == (2, 3)
        assert site.store.count("get") == 3


async def test_poll_reads_rows_once_for_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        reads = 0
        database = a.database
        for name in ("get", "get_many"):
            read = getattr(database, name)

            def counted(keys: object, read: Callable[[object], object] = read) -> object:
                nonlocal reads
                reads += 1
                return read(keys)

            monkeypatch.setattr(database, name, counted)
        needed = []
        for count in (1, 20):
            for number in range(count):
                commit(site, count + number, f"f{number}")
            assert await a.poller.poll() == count
            reads = 0
            assert await a.poller.poll() == 0
            needed.append(reads)
        assert needed[0] == needed[1]


async def test_poll_asks_what_a_large_commit_hides_in_short_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered between them."""
    site, turns, count, asked = Site(tmp_path), 0, 5000, Counter[int]()
    doubts = Applier.doubts

    def counted(applier: Applier, record: Record) -> Iterator[list[Doubt]]:
        for some in doubts(applier, record):
            asked[turns] += DOUBTS_AT_ONCE
            yield some

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    monkeypatch.setattr(Applier, "doubts", counted)
    with site.daemon("a") as a:
        commit_also(site, 1, {}, *(Remove(f"f{number}", hides="e" * 32) for number in range(count)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_turns)
            assert await a.poller.poll() == 1
            nursery.cancel_scope.cancel()
    assert count <= asked.total() < count + DOUBTS_AT_ONCE
    assert max(asked.values()) <= 2 * DOUBTS_AT_ONCE  # the poll may come first in one turn and last in the next


@pytest.mark.parametrize("forget", ["forget_all", "forget_since", "forget_after"])
async def test_poll_after_rows_were_forgotten_applies_again(tmp_path: Path, forget: str) -> None:
    site = Site(tmp_path)
    site.clock.seconds = HOUR_S
    with site.daemon("a") as a:
        commit(site, 1, "f")
        commit(site, HOUR_S, "g")
        assert [await a.poller.poll() for _ in range(3)] == [2, 0, 0]
        commits = a.applier.commits
        if forget == "forget_all":
            commits.forget_all()
        else:
            getattr(commits, forget)(at(0))
        assert [await a.poller.poll() for _ in range(3)] == [2, 0, 0]


async def test_poll_after_rows_were_forgotten_goes_back_for_a_day(tmp_path: Path) -> None:
    """And not for what may be years of commits."""
    site = Site(tmp_path)
    site.clock.seconds = 30 * HOUR_S
    with site.daemon("a") as a:
        for hours in range(31):
            commit(site, hours * HOUR_S, f"f{hours}")
        assert await a.poller.poll() == 31
        for _ in range(2):
            a.applier.commits.forget_after(at(0))
        assert await a.poller.poll() == 25


async def test_poll_during_which_rows_are_forgotten_is_followed_by_one_that_applies_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    site.clock.seconds = HOUR_S
    with site.daemon("a") as a:
        commit(site, 1, "f")
        commit(site, HOUR_S - 1, "g")
        await a.poller.poll()
        commit(site, HOUR_S, "h")
        apply = a.applier.apply

        def forget_first(record: Record, this: ObjectRef, **options: object) -> None:
            a.applier.commits.forget_after(at(0))
            apply(record, this, **options)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(a.applier, "apply", forget_first)
            assert await a.poller.poll() == 1
        assert [await a.poller.poll() for _ in range(2)] == [2, 0]


async def test_many_are_fetched_in_pieces_and_listed_in_pages(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.store.page_keys_max = 7
    with site.daemon("a") as a:
        for number in range(2 * FETCHED_MAX + 5):
            commit(site, number / 10, f"f{number}")
        assert await a.poller.poll() == 2 * FETCHED_MAX + 5
        assert len(a.shown()) == 2 * FETCHED_MAX + 5


async def test_large_records_are_fetched_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches: list[tuple[str, int]] = []

    fetch = CommitLog.fetch

    async def fetched(log: CommitLog, meta: ObjectMeta, *, bytes_max: int) -> Record:
        named = parse_commit_key(meta.key)
        assert named is not None
        fetches.append((named[1], bytes_max))
        return await fetch(log, meta, 0, bytes_max=bytes_max)

    monkeypatch.setattr(CommitLog, "fetch", fetched)
    monkeypatch.setattr(poller, "FETCHED_BYTES_MAX", 1000)
    site = Site(tmp_path)
    with site.daemon("a") as a:
        for number in range(4):
            files = {f"f{number}-{name}": b"x" for name in range(40 if number % 2 else 1)}
            commit_also(site, number, files, writer=f"0000000{number}")
        assert await a.poller.poll() == 4
        assert [a.found(f"f{number}-0").size for number in range(4)] == [1] * 4
    together = {(f"0000000{number}", 1000) for number in range(4)}
    assert set(fetches[:4]) == together
    assert fetches[4:] == [("00000001", RECORD_BYTES_MAX), ("00000003", RECORD_BYTES_MAX)], "those that are large"


async def test_a_late_one_inside_the_window_is_found(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        site.clock.seconds = 1000
        commit(site, 1000, "now")
        await a.poller.poll()
        commit(site, 1000 - 119, "late")
        assert await a.poller.poll() == 1
        assert sorted(a.shown()) == ["late", "now"]


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_commit_made_here_after_an_outage_hides_none_that_was_made_during_it(
    tmp_path: Path, restarts: bool
) -> None:
    """No poll came through for longer than the window; then this node commits before it polls again."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        await a.poller.poll()
        commit(site, 10, "theirs")
        site.clock.seconds = HOUR_S
        await a.committer.commit(Change(operations=[Remove(path="ours")]))
        if not restarts:
            assert await a.poller.poll() == 1
            assert list(a.shown()) == ["theirs"]
    with site.daemon("a") as a:
        assert await a.poller.poll() == restarts
        assert list(a.shown()) == ["theirs"]


async def test_poll_at_the_end_of_the_window_knows_every_commit(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        commit(site, 1, "f")
        for seconds, complete in ((2, 0), (120.9, 0), (121, at(1)), (122, at(1))):
            site.clock.seconds = seconds
            await a.poller.poll()
            assert a.applier.commits.complete() == complete
        commit(site, 3, "g")
        await a.poller.poll()
        assert a.applier.commits.complete() == at(1)


async def test_an_old_lake_is_not_listed_whole_by_every_poll(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.clock.seconds = HOUR_S
    with site.daemon("a") as a:
        for number in range(30):
            commit(site, number * 100, f"f{number}")
        await a.poller.poll()
        listed: list[str] = []
        list_page = site.store.list_page

        def watch(prefix: str, *, start_after: str = "", **options: object) -> object:
            page = list_page(prefix, start_after=start_after, **options)  # type: ignore[arg-type]
            listed.extend(meta.key for meta in page.objects)
            return page

        site.store.list_page = watch  # type: ignore[assignment, method-assign]
        assert await a.poller.poll() == 0
        assert all(key.startswith(COMMITS) for key in listed)
        assert len([key for key in listed if key.endswith(".zip")]) == 2


async def test_a_restarted_node_goes_on_where_it_was(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        commit(site, 1, "f")
        await a.poller.poll()
    gets = site.store.count("get")
    with site.daemon("a") as a:
        assert await a.poller.poll() == 0
        assert site.store.count("get") == gets
        commit(site, 2, "g")
        assert await a.poller.poll() == 1


async def test_heard_after_the_machine_was_suspended_polls(tmp_path: Path) -> None:
    """The time that timers count stands still meanwhile."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        await a.poller.poll()
        await a.poller.catch_up(60.0)
        assert a.metrics.polls == 1
        commit(site, 1, "f")
        site.clock.seconds = HOUR_S
        await a.poller.catch_up(60.0)
        assert list(a.shown()) == ["f"]


async def test_rows_of_commits_before_the_window_go_where_nobody_else_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        for number in range(10):
            site.clock.seconds = number * HOUR_S
            await a.committer.commit(Change(operations=[Remove(f"f{number}")]))
            await a.poller.poll()
        assert len(list(a.database.scan(b"A", b"B"))) == 1
        monkeypatch.setattr(a.database, "commit", refuse)
        await a.poller.poll()


def refuse(batch: Batch) -> None:
    raise AssertionError("a poll wrote although nothing is new")


# -- plain objects that a commit's writer did not know of


async def test_a_file_written_here_is_as_old_as_the_store_says(tmp_path: Path) -> None:
    """Its row has the time at which it was written, which says more than the second that everybody else goes by."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        listed(site, a, 1.7)
        batch = Batch()
        a.tree.update(batch, msgspec.structs.replace(a.found("f"), ctime_ns=at(1.7)))
        a.database.commit(batch)
        commit(site, 2.5, "f", size=7)
        await a.poller.poll()
        assert a.found("f").size == 7


async def test_new_attributes_make_a_plain_object_no_younger(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        etag = listed(site, a, 1)
        commit_also(site, 9, {}, SetAttr("f", OWN, 0, 1, etag, 0o600, 0, 0, 0))
        await a.poller.poll()
        commit(site, 5, "f", size=7, writer="00000def")
        await a.poller.poll()
        assert a.found("f").size == 7


async def test_attributes_of_a_replaced_object_leave_the_file_that_was_packed_since(tmp_path: Path) -> None:
    """Nothing lies at the key any more, which does not say that the version of which a commit told was replaced."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        commit_also(site, 1, {}, Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides="new"))
        commit_also(site, 2, {}, SetAttr("f", OWN, 0, 1, "old", 0o600, 0, 0, 0))
        packed = Relocate("f", OWN, 0, "new", THIS, 0, 1, 0o644, 0, 0, 0, hides="new")
        commit_also(site, 3, {}, packed)
        assert await a.poller.poll() == 3
        assert (a.found("f").place > 0, a.found("f").mode) == (True, 0o644)


@pytest.mark.parametrize(("attributed_s", "packed_s"), [(2, 3), (3, 2)])
async def test_object_that_replaced_one_with_other_attributes_is_followed_into_its_pack(
    tmp_path: Path, attributed_s: float, packed_s: float
) -> None:
    """No commit told of either, and nothing lies at the key any more."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        commit_also(site, attributed_s, {}, SetAttr("f", OWN, 0, 1, "old", 0o600, 0, 0, 0))
        assert await a.poller.poll() == 1
        packed = Relocate("f", OWN, 0, "new", THIS, 0, 1, 0o644, 0, 0, 0, hides="new")
        commit_also(site, packed_s, {}, packed, writer="00000def")
        assert await a.poller.poll() == 1
        assert (a.found("f").place > 0, a.found("f").mode) == (True, 0o644)


async def test_attributes_of_the_object_that_lies_there_outlast_a_relocation_of_another(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        etag = listed(site, a, 1)
        commit_also(site, 2, {}, SetAttr("f", OWN, 0, 1, etag, 0o600, 0, 0, 0))
        commit_also(site, 3, {}, Relocate("f", OWN, 0, "before", THIS, 0, 1, 0o644, 0, 0, 0, hides="before"))
        assert await a.poller.poll() == 2
        assert (a.found("f").place, a.found("f").etag, a.found("f").mode) == (0, etag, 0o600)


async def test_a_commit_waits_for_an_older_one_about_what_was_put_in_its_second(tmp_path: Path) -> None:
    """Somebody who knew the plain object removed it; somebody who did not packed a file of that name after that."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        etag = listed(site, a, 1.1)
        commit(site, 1.5, "f", size=7)
        site.clock.seconds = 1.6
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.poller.poll)
            await until(lambda: site.store.count("head") > 0)
            assert a.found("f").etag == etag
            commit_also(site, 1.3, {}, Remove("f", hides=etag), writer="00000def")
        assert a.found("f").size == 7
        site.store.take("f")
        a.list(seconds=2)
        assert list(a.shown()) == ["f"]


async def test_a_commit_does_not_wait_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody removes what was put in its second: then that came later."""
    monkeypatch.setattr(poller, "DOUBT_S_MAX", 0.5)
    site = Site(tmp_path)
    with site.daemon("a") as a:
        etag = listed(site, a, 1.1)
        commit(site, 1.5, "f", size=7)
        commit(site, 1.6, "g")
        site.clock.seconds = 1.7
        assert await a.poller.poll() == 2
        assert site.store.count("head") > 1
        assert a.found("f").etag == etag
        assert a.find("g") is not None


# -- what is left out


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "text"])
async def test_a_damaged_one_is_told_once_and_left_out(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        commit(site, 1, "before")
        key = commit(site, 2, "damaged")
        commit(site, 3, "after")
        body = site.store.data(key)
        flipped = bytearray(body)
        flipped[body.index(b".lakefs/record") + 40] ^= 0xFF
        site.store.give(key, {"cut": body[:-10], "empty": b"", "flipped": bytes(flipped), "text": b"hello"}[damage])
        await a.poller.poll()
        assert sorted(a.shown()) == ["after", "before"]
        assert a.metrics.damaged == 1
        assert [record.levelname for record in caplog.records if key in record.getMessage()] == ["ERROR"]
        await a.poller.poll()
        assert a.metrics.damaged == 1
        caplog.clear()


@pytest.mark.parametrize("restarts", [False, True])
async def test_damaged_commit_that_is_whole_again_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, restarts: bool
) -> None:
    """Three answers in a row were damaged on their way, and polls are past its time since."""
    monkeypatch.setattr(poller, "REFUSED_AGAIN_S", 1e9 if restarts else 0.0)
    site = Site(tmp_path)
    with site.daemon("a") as a:
        key = commit(site, 1, "f")
        body = site.store.data(key)
        site.store.give(key, b"hello")
        for hours in range(2):
            site.clock.seconds = hours * HOUR_S + 2
            commit(site, site.clock.seconds, f"g{hours}")
            await a.poller.poll()
        assert sorted(a.shown()) == ["g0", "g1"]
        assert a.metrics.damaged == 1
        assert [record.levelname for record in caplog.records if key in record.getMessage()] == ["ERROR"]
        if not restarts:
            site.store.give(key, body)
            await a.poller.poll()
            assert sorted(a.shown()) == ["f", "g0", "g1"]
    if restarts:
        with site.daemon("a") as a:
            await a.poller.poll()
            assert a.metrics.damaged == 1, "said again"
        site.store.give(key, body)
    with site.daemon("a") as a:
        await a.poller.poll()
        assert sorted(a.shown()) == ["f", "g0", "g1"]
        assert (a.metrics.damaged, a.applier.commits.refused()) == (0, [])
        heads = site.store.count("head")
        a.applier.commits.forget_all()
        assert await a.poller.poll() == 3
        assert site.store.count("head") == heads
    caplog.clear()


async def test_commit_that_was_left_out_and_is_gone_outdates_the_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another node could read it, and collected it."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        key = commit(site, 1, "f")
        site.store.give(key, b"hello")
        commit(site, 10**8, "future")
        await a.poller.poll()
        assert len(a.applier.commits.refused()) == 2
    site.store.take(key)
    with site.daemon("a") as a:
        await a.poller.poll()
        assert are_names_outdated(a.database)
        assert a.applier.commits.refused() == [(at(10**8), "00000abc")]
    caplog.clear()


async def test_poll_commit_from_the_future_is_left_out_until_its_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock that is wrong must not decide what is newest for everybody, nor hide what others commit meanwhile."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        commit(site, 1, "f")
        commit(site, COMMIT_AHEAD_MAX_S + 10, "f", size=9)
        commit(site, 10**8, "f", size=10)
        commit(site, COMMIT_AHEAD_MAX_S - 10, "ahead")
        assert await a.poller.poll() == 2
        assert a.found("f").size == 3
        assert a.find("ahead") is not None
        assert a.metrics.future == 2
        assert at(COMMIT_AHEAD_MAX_S - 10) < a.clock.now() < at(COMMIT_AHEAD_MAX_S)
        commit(site, 2, "g")
        assert await a.poller.poll() == 1
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        site.clock.seconds = 10
        assert await a.poller.poll() == 1
        assert a.found("f").size == 9
        caplog.clear()


async def test_clock_is_compared_with_the_stores_once_a_commit_from_the_future_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A virtual machine that was paused counts no time: its clock is behind, and what others committed is ahead."""
    monkeypatch.setattr(poller, "CONFIRM_S", 0.0)
    site, asked = Site(tmp_path), 0

    async def read_time(_: CommitLog) -> None:
        nonlocal asked
        asked += 1

    monkeypatch.setattr(CommitLog, "read_time", read_time)
    with site.daemon("a") as a:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.poller.run)
            await until(lambda: a.metrics.polls > 3)
            assert asked == 0
            commit(site, 300, "f")
            await until(lambda: asked > 0)
            polls = a.metrics.polls
            await until(lambda: a.metrics.polls > polls + 3)
            nursery.cancel_scope.cancel()
        assert asked == 1
    caplog.clear()


async def test_poll_many_commits_from_the_future_cost_one_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    site.store.page_keys_max = 7
    with site.daemon("a") as a:
        for number in range(30):
            commit(site, 10**8 + number, f"f{number}")
        assert await a.poller.poll() == 0
        assert site.store.count("list") == 1
        assert a.metrics.future == 7
        caplog.clear()


async def test_other_objects_among_the_commits_are_passed_over(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        for name in ("note.txt", "0000.zip", "zz" * 8 + "-00000abc.zip", "", "sub/" + "0" * 16 + "-00000abc.zip"):
            site.store.give(COMMITS + name, b"x")
        commit(site, 1, "f")
        assert await a.poller.poll() == 1
        assert a.metrics.damaged == 0


async def test_one_that_is_collected_between_list_and_get(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        key = commit(site, 1, "collected")
        commit(site, 2, "kept")

        def collect(request: Request, when: When) -> None:
            if request.what == "list" and when == "after":
                site.store.take(key)

        site.store.hook = collect
        await a.poller.poll()
        assert list(a.shown()) == ["kept"]
        assert a.metrics.damaged == 0


async def test_a_store_that_is_away_is_asked_again(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        commit(site, 1, "f")
        site.store.hook = Failures(lambda request: True, Unavailable("away"), count=3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.poller.run)
            await until(lambda: bool(a.shown()))
            nursery.cancel_scope.cancel()
        assert list(a.shown()) == ["f"]


async def test_a_get_that_failed_applies_nothing_of_its_batch_out_of_order(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a:
        commit(site, 1, "f", size=1)
        commit(site, 2, "f", size=2)
        site.store.hook = Failures(lambda request: request.what == "get", Unavailable("away"))
        with pytest.raises(Unavailable):
            await a.poller.poll()
        await a.poller.poll()
        assert a.found("f").size == 2


async def test_the_lag_is_told(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.clock.seconds = 10
    with site.daemon("a") as a:
        commit(site, 7, "f")
        await a.poller.poll()
        assert a.metrics.lag_s == pytest.approx(3)


@pytest.mark.parametrize(
    ("hours", "collected_s", "is_outdated"),
    [(0.9, 1000, False), (1.1, 1000, True), (1.1, -200, False), (170.0, 1000, True), (170.0, None, False)],
)
async def test_node_that_was_away_while_commits_were_collected_reads_all_names_at_its_next_mount(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hours: float, collected_s: float | None, is_outdated: bool
) -> None:
    """Commits of ``collected_s`` after it was last there may be gone. After a week an error says so."""
    caplog.set_level(logging.INFO)
    site = Site(tmp_path)
    site.clock.seconds = HOUR_S
    with site.daemon("a") as a:
        commit(site, HOUR_S, "f")
        await a.poller.poll()
        if collected_s is not None:
            site.store.give(f"{RECORDS}{at(1):016x}-{at(HOUR_S + collected_s):016x}", b"")
        site.clock.seconds += hours * HOUR_S
        await a.poller.poll()
        logged = [each.levelname for each in caplog.records if "has not heard of others" in each.message]
        assert logged == (["ERROR" if hours > 168 else "INFO"] if is_outdated else [])
        assert are_names_outdated(a.database) == is_outdated
        caplog.clear()
        await a.poller.poll()
        assert caplog.text == ""
