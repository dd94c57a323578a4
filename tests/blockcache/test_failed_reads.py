"""Which reads fail without another wait for a store that is away."""

from __future__ import annotations

import errno

import pytest
import trio
import trio.testing

from lakefs_fuse.blockcache.failed_reads import AGAIN_S_MAX, FAILURES_MAX, WAITED_S_MIN, FailedReads
from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.errors import AccessDenied, FileError, StoreError, Unavailable

FILE = Version("file", "etag", 1 << 20)
KIB = 1 << 10


def error_of(cause: StoreError) -> FileError:
    error = FileError(errno.EIO, str(cause))
    error.__cause__ = cause
    return error


def failed(*reads: tuple[int, int], waited_s: float = 60.0, cause: StoreError | None = None) -> FailedReads:
    failures = FailedReads()
    for start, end in reads:
        failures.add(FILE, start, end, error_of(cause or Unavailable("no answer")), waited_s)
    return failures


def is_refused(failures: FailedReads, start: int, end: int, version: Version = FILE) -> bool:
    try:
        failures.raise_again(version, start, end)
    except FileError as error:
        assert (error.errno, str(error)) == (errno.EIO, "no answer")
        return True
    return False


async def test_page_of_a_failed_read_is_refused_once(autojump_clock: trio.testing.MockClock) -> None:
    failures = failed((0, 128 * KIB), (128 * KIB, 256 * KIB))
    assert is_refused(failures, 0, 4 * KIB)
    assert not is_refused(failures, 0, 4 * KIB), "a program that reads again asks the store"
    assert not is_refused(failures, 128 * KIB, 132 * KIB, Version("file", "another", 1 << 20))
    assert is_refused(failures, 132 * KIB, 136 * KIB)
    assert not failures


async def test_read_and_page_after_a_failed_open_are_refused(autojump_clock: trio.testing.MockClock) -> None:
    failures = failed((0, 1))
    assert is_refused(failures, 0, 128 * KIB)
    assert is_refused(failures, 0, 4 * KIB)
    assert not is_refused(failures, 0, 128 * KIB)


async def test_failure_is_forgotten_after_a_moment(autojump_clock: trio.testing.MockClock) -> None:
    failures = failed((0, 128 * KIB))
    await trio.sleep(AGAIN_S_MAX * 1.1)
    assert not is_refused(failures, 0, 4 * KIB)
    assert not failures


@pytest.mark.parametrize(
    ("waited_s", "cause"), [(WAITED_S_MIN / 2, Unavailable("no answer")), (60.0, AccessDenied("no"))]
)
async def test_failure_that_cost_no_wait_is_not_kept(waited_s: float, cause: StoreError) -> None:
    assert not failed((0, 4 * KIB), waited_s=waited_s, cause=cause)


async def test_failures_are_bounded() -> None:
    failures = failed(*((number, number + 1) for number in range(FAILURES_MAX + 1)))
    assert not is_refused(failures, 0, 1)
    assert is_refused(failures, FAILURES_MAX, FAILURES_MAX + 1)
