"""A daemon whose clock was wrong when it began: what it dated too far ahead is committed again by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits.archive import Member, commit_key
from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.hybrid_clock import CONFIRM_S, NS, WINDOW_NS
from lakefs_fuse.commits.record import OWN, Put, Remove
from lakefs_fuse.errors import StoreError, Unsupported
from lakefs_fuse.meta.sorted_tables import drop_names
from tests.commits.committing import Clock, Daemon, Site
from tests.commits.nodes import at, put
from tests.memory_store import Failures, Pause
from tests.upload.drafting import reached

YEARS_S = 12 * 365 * 86400.0


class Machine:
    """A wall clock that jumps, and a clock that does not."""

    def __init__(self, site: Site) -> None:
        self.wall, self.steady = site.clock, Clock()

    def pass_s(self, seconds: float) -> None:
        self.wall.seconds += seconds
        self.steady.seconds += seconds

    def jump(self, seconds: float) -> None:
        self.wall.seconds += seconds


async def pack(node: Daemon, **files: bytes) -> None:
    members = [Member(path, data, len(data)) for path, data in files.items()]
    puts = [put(path, len(data), offset=number) for number, (path, data) in enumerate(files.items())]
    await node.committer.commit(Change(operations=list(puts)), members)


async def settle_clock(node: Daemon, machine: Machine) -> None:
    """Two answers of the store, as the poller asks for them."""
    await node.poller.correct_clock()
    machine.pass_s(CONFIRM_S)
    await node.poller.correct_clock()


def own_keys(site: Site, node: Daemon) -> list[str]:
    return [key for key in site.commits() if node.writer in key]


@pytest.mark.parametrize("tells_time", [True, False])
async def test_redate_after_a_start_in_the_future_commits_the_same_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tells_time: bool
) -> None:
    """The store's clock is the machine's, as of a local directory; or the store does not tell its time."""
    site = Site(tmp_path)
    machine = Machine(site)

    def no_time() -> int:
        raise Unsupported("no Date")

    if not tells_time:
        monkeypatch.setattr(site.store, "time_ns", no_time)
    with site.daemon("right") as right:
        await pack(right, old=b"old", both=b"0", mode=b"m")
        machine.pass_s(1)
        machine.jump(YEARS_S)
        with site.daemon("a", steady=machine.steady) as a:
            await a.poller.correct_clock()
            await a.poller.poll()
            await pack(a, new=b"new", both=b"1")
            a.committer.enqueue(a.chmod("mode", 0o600))
            a.enqueue(Remove("old"))
            machine.pass_s(1)
            await a.committer.flush()
            machine.jump(-YEARS_S)
            machine.pass_s(1)
            await pack(a, later=b"later")  # dated as the others: nobody knows yet which of the two times is right
            machine.pass_s(2)
            await pack(right, both=b"22")
            assert await right.poller.poll() == 0
            assert all(key > commit_key(at(YEARS_S / 2), "00000000") for key in own_keys(site, a))

            await settle_clock(a, machine)
            await pack(a, last=b"last")
            await a.poller.poll()
            site.clock.seconds += 1
            await right.poller.poll()
            expected = {"both": 2, "new": 3, "later": 5, "last": 4, "mode": 1}
            assert {path: right.found(path).size for path in right.shown()} == expected
            assert right.shown() == a.shown()
            assert right.found("mode").mode == 0o600
            assert a.metrics.redated == 3
            assert a.metrics.clock_jumps == 1
            assert own_keys(site, a)[-1] > commit_key(at(YEARS_S / 2), "00000000")  # the originals stay

            machine.pass_s(1)  # and what is committed from now on counts at once, here and there
            await pack(right, new=b"4444")
            await a.poller.poll()
            assert a.found("new").size == 4
            machine.pass_s(1)
            right.committer.enqueue(right.chmod("mode", 0o644))
            await right.committer.flush()
            await a.poller.poll()
            assert a.found("mode").mode == 0o644
    caplog.clear()


async def test_redate_that_failed_is_done_with_the_next_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    machine = Machine(site)
    machine.jump(YEARS_S)
    with site.daemon("a", steady=machine.steady) as a, site.daemon("b") as b:
        await a.poller.correct_clock()
        await pack(a, new=b"new")
        machine.jump(-YEARS_S)
        await settle_clock(a, machine)
        site.store.hook = Failures(lambda request: request.what == "put", StoreError("no"), count=1)
        with pytest.raises(StoreError):
            await pack(a, last=b"last")
        assert b.shown() == {}
        await pack(a, last=b"last")
        await b.poller.poll()
        assert sorted(b.shown()) == ["last", "new"]
    caplog.clear()


async def test_redate_before_commits_again_what_the_last_daemon_dated_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    machine = Machine(site)
    machine.jump(YEARS_S)
    with site.daemon("a") as a:
        await a.committer.redate_before()
        await pack(a, new=b"new")
        meta = site.store.give("plain", b"1")
        await a.committer.commit(Change(operations=[Put("plain", OWN, 0, 1, 0o600, 0, 0, 0, hides=meta.etag)]))
    machine.jump(-YEARS_S)
    with site.daemon("b") as b:
        await b.poller.poll()
        assert not await b.committer.redate_before()
    with site.daemon("a") as a:
        drop_names(a.database)
        await a.poller.poll()
        assert await a.committer.redate_before()
        machine.pass_s(1)
        with site.daemon("c") as c:
            await c.poller.poll()
            assert sorted(c.shown()) == ["new", "plain"]
    caplog.clear()


async def test_repetition_that_is_stored_late_is_repeated_without_what_others_changed_since(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Mounts whose polls were past its time never saw what was committed again."""
    site = Site(tmp_path)
    machine = Machine(site)
    machine.jump(YEARS_S)
    with site.daemon("a") as a:
        await a.committer.redate_before()
        await pack(a, new=b"new", both=b"1")
    machine.jump(-YEARS_S)
    with site.daemon("a") as a, site.daemon("b") as b:
        drop_names(a.database)
        await a.poller.poll()
        await b.poller.poll()
        pause = site.store.hook = Pause(lambda request: request.what == "put" and a.writer in request.key)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.committer.redate_before)
            await reached(pause.reached)
            machine.pass_s(2 * WINDOW_NS / NS)
            await pack(b, both=b"22")
            await b.poller.poll()
            machine.pass_s(1)
            pause.resume()
        for _ in range(2):
            machine.pass_s(1)
            await b.poller.poll()
            await a.poller.poll()
        assert {path: b.found(path).size for path in b.shown()} == {"new": 3, "both": 2}
        assert b.shown() == a.shown()
    caplog.clear()
