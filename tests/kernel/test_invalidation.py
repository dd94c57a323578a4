"""What the kernel is told, and when; the kernel is a list here, and time is the test's."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio.testing
from trio.testing import MockClock

from lakefs_fuse.errors import CacheError
from lakefs_fuse.kernel import invalidation as invalidating
from lakefs_fuse.kernel.invalidation import AGAIN_S, Invalidations
from lakefs_fuse.vfs import changed_names
from lakefs_fuse.vfs.changed_names import ChangedNames


@dataclass
class Kernel:
    """What it was told, with the time since the beginning."""

    directory: Path
    """Where names that wait may lie."""
    directories: list[tuple[float, int]] = field(default_factory=list)
    names: list[tuple[float, int, bytes]] = field(default_factory=list)
    told: int = 0
    began: float = 0.0

    async def tell(self, directories: Iterable[int], names: Iterable[tuple[int, bytes]]) -> int:
        now = round(trio.current_time() - self.began, 3)
        new = [(now, directory) for directory in directories]
        named = [(now, *name) for name in names]
        self.directories += new
        self.names += named
        return len(new) + len(named)

    def count(self, told: int) -> None:
        self.told += told


@asynccontextmanager
async def telling(kernel: Kernel) -> AsyncIterator[Invalidations]:
    kernel.began = trio.current_time()
    invalidations = Invalidations(kernel.count, kernel.directory, notify=kernel.tell)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(invalidations.run)
        yield invalidations
        nursery.cancel_scope.cancel()


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


async def test_a_name_that_changed(kernel: Kernel, autojump_clock: MockClock) -> None:
    async with telling(kernel) as invalidations:
        invalidations.invalidate_name(7, b"a")
        invalidations.invalidate_name(7, b"b")
        await trio.sleep(10)
    assert kernel.names == [(0.0, 7, b"a"), (0.0, 7, b"b")]
    assert kernel.directories == [], "its listing was never asked for"
    assert kernel.told == 2


async def test_a_listing_goes_with_its_ttl_and_once_more(kernel: Kernel, autojump_clock: MockClock) -> None:
    async with telling(kernel) as invalidations:
        invalidations.add_listing(7, 60.0)
        await trio.sleep(59)
        assert kernel.directories == []
        await trio.sleep(10)
        assert kernel.directories == [(60.0, 7), (60.0 + AGAIN_S, 7)]
        assert len(invalidations) == 0
        await trio.sleep(1000)
    assert len(kernel.directories) == 2


async def test_a_listing_of_which_a_name_changed(kernel: Kernel, autojump_clock: MockClock) -> None:
    async with telling(kernel) as invalidations:
        invalidations.add_listing(7, 60.0)
        await trio.sleep(5)
        for index in range(100):
            invalidations.invalidate_name(7, b"%d" % index)
        await trio.sleep(20)
    assert kernel.directories == [(5.0, 7), (5.0 + AGAIN_S, 7)], "a reply on its way may bring old names back"


async def test_a_listing_that_was_asked_for_again_counts_longer(kernel: Kernel, autojump_clock: MockClock) -> None:
    async with telling(kernel) as invalidations:
        invalidations.add_listing(7, 60.0)
        await trio.sleep(50)
        invalidations.add_listing(7, 60.0)
        invalidations.add_listing(7, 10.0)
        await trio.sleep(100)
    assert kernel.directories == [(110.0, 7), (110.0 + AGAIN_S, 7)]


async def test_one_that_goes_sooner_than_those_before(kernel: Kernel, autojump_clock: MockClock) -> None:
    async with telling(kernel) as invalidations:
        invalidations.add_listing(7, 60.0)
        await trio.sleep(1)
        invalidations.add_listing(8, 2.0)
        await trio.sleep(20)
    assert kernel.directories == [(3.0, 8), (3.0 + AGAIN_S, 8)]


async def test_only_so_many_are_remembered(
    kernel: Kernel, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invalidating, "DIRECTORIES_MAX", 3)
    async with telling(kernel) as invalidations:
        for directory in (1, 2, 3, 4):
            invalidations.add_listing(directory, 60.0)
            await trio.sleep(1)
        assert kernel.directories == [(3.0, 1)]
        assert len(invalidations) == 3


@pytest.mark.parametrize("bytes_in_memory_max", [1 << 20, 100])
async def test_wait_notified_after_a_step_of_many_names_returns_when_the_kernel_was_notified_of_all(
    kernel: Kernel, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, bytes_in_memory_max: int
) -> None:
    """Names that change together wait in memory, then in a file. A later one does not wait for all of them."""
    monkeypatch.setattr(invalidating, "NAMES_MAX", 7)
    monkeypatch.setattr(changed_names, "CHANGED_NAMES_BYTES_MAX", bytes_in_memory_max)
    names, sizes = [(index % 3, b"%d" % index) for index in range(50)], list[int]()

    async def notify(directories: Iterable[int], names: Iterable[tuple[int, bytes]]) -> int:
        await trio.sleep(1)
        sizes.append(await kernel.tell(directories, names))
        return sizes[-1]

    invalidations = Invalidations(kernel.count, kernel.directory, notify=notify)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(invalidations.run)
        for round_number in (1, 2):
            for name in names * 2:
                invalidations.invalidate_name(*name)
            await trio.sleep(1.5)
            invalidations.invalidate_name(9, b"later")
            await invalidations.wait_notified()
            told = [(parent, name) for _, parent, name in kernel.names]
            assert set(told) == {*names, (9, b"later")}, round_number
            assert told.index((9, b"later")) < len(told) / 2
            assert max(sizes) == 2 * 7
            kernel.names.clear()
        nursery.cancel_scope.cancel()
    assert list(kernel.directory.iterdir()) == []


async def test_names_that_the_disk_does_not_take_wait_in_memory(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(invalidating, "NAMES_MAX", 2)
    monkeypatch.setattr(changed_names, "CHANGED_NAMES_BYTES_MAX", 0)
    kernel.directory = tmp_path / "gone"
    async with telling(kernel) as invalidations:
        for name in (b"a", b"b", b"c", b"d"):
            invalidations.invalidate_name(9, name)
        await invalidations.wait_notified()
    assert {name for _, _, name in kernel.names} == {b"a", b"b", b"c", b"d"}
    assert caplog.text.count("kept in memory") == 1
    caplog.clear()


async def test_wait_notified_fails_where_the_disk_lost_names(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then nobody may rely on what the kernel shows; later changes are not concerned."""

    def fail(changed: ChangedNames) -> Iterator[tuple[int, bytes]]:
        for _ in range(changed.count):
            raise CacheError("Input/output error")
        yield 0, b""

    monkeypatch.setattr(invalidating, "NAMES_MAX", 2)
    async with telling(kernel) as invalidations:
        with monkeypatch.context() as failing:
            failing.setattr(ChangedNames, "names", fail)
            for name in (b"a", b"b", b"c"):
                invalidations.invalidate_name(9, name)
            with pytest.raises(CacheError, match="the local disk failed"):
                await invalidations.wait_notified()
        for name in (b"d", b"e", b"f"):
            invalidations.invalidate_name(9, name)
        await invalidations.wait_notified()
    assert [name for _, _, name in kernel.names] == [b"a", b"b", b"d", b"e", b"f"]
    assert "Input/output error" in caplog.text
    caplog.clear()


async def test_wait_notified_returns_after_what_was_invalidated_before(
    kernel: Kernel, autojump_clock: MockClock
) -> None:
    async def notify(directories: Iterable[int], names: Iterable[tuple[int, bytes]]) -> int:
        await trio.sleep(2)
        return await kernel.tell(directories, names)

    invalidations, began = Invalidations(kernel.count, kernel.directory, notify=notify), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(invalidations.run)
        await invalidations.wait_notified()
        assert trio.current_time() == began
        invalidations.invalidate_name(7, b"a")
        await trio.sleep(1)
        await invalidations.wait_notified()
        assert [name for *_, name in kernel.names] == [b"a"]
        for name in (b"b", b"c"):
            invalidations.invalidate_name(7, name)
            await trio.sleep(1)
        await invalidations.wait_notified()
        assert [name for *_, name in kernel.names] == [b"a", b"b", b"c"]
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began == 6


async def test_many_write_outs_leave_threads_to_the_write_requests_for_which_they_wait(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 concurrent links of open files had all of trio's threads, and each waited for a WRITE that needed one."""
    written = threading.Event()
    monkeypatch.setattr(invalidating, "notify_kernel", lambda *_: written.wait(10) or pytest.fail("nothing is written"))
    with trio.fail_after(5):
        async with telling(kernel) as invalidations, trio.open_nursery() as nursery:
            for inode in range(60):
                nursery.start_soon(invalidations.write_out, inode)
            await trio.testing.wait_all_tasks_blocked()
            await trio.to_thread.run_sync(written.set)
