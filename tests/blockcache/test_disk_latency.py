"""When a disk counts as prompt, on a clock that is turned by hand."""

from __future__ import annotations

import pytest

from lakefs_fuse.blockcache.disk_latency import PAUSE_S_FIRST, PAUSE_S_MAX, PROMPT_S, SLOW_S, WEIGHT, Promptness
from tests.fakes import FakeClock


class Disk:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.promptness = Promptness(self.clock)

    def read(self, seconds: float, times: int = 1) -> bool:
        """Whether it is prompt after so many reads."""
        for _ in range(times):
            with self.promptness.timed():
                self.clock.advance(seconds)
        return self.is_prompt()

    def is_prompt(self) -> bool:
        return self.promptness.is_prompt


def test_a_prompt_disk_stays_prompt() -> None:
    disk = Disk()
    assert disk.is_prompt()
    assert disk.read(PROMPT_S * 0.5, 1000)
    for _ in range(100):
        assert disk.read(PROMPT_S * 5)
        assert disk.read(PROMPT_S * 0.1, 50), "one that takes longer now and then is no matter"


def test_a_disk_that_is_slow_on_the_average_is_left_alone_for_a_while() -> None:
    disk = Disk()
    assert disk.read(PROMPT_S * 2, 5)
    assert not disk.read(PROMPT_S * 2, 6)
    disk.clock.advance(PAUSE_S_FIRST)
    assert disk.is_prompt(), "tried again"
    assert disk.read(PROMPT_S / 2, 100)


def test_one_read_that_hangs_is_enough() -> None:
    disk = Disk()
    disk.read(PROMPT_S / 10, 1000)
    assert not disk.read(SLOW_S * 1.01)
    disk.clock.advance(PAUSE_S_FIRST / 2)
    assert not disk.is_prompt()
    disk.clock.advance(PAUSE_S_FIRST)
    assert disk.is_prompt()
    assert not disk.read(1.0)


def pause_s(disk: Disk) -> float:
    """After one that hangs."""
    assert not disk.read(SLOW_S * 2)
    began = disk.clock.mono_s()
    while not disk.is_prompt():
        disk.clock.advance(0.01)
    return round(disk.clock.mono_s() - began, 6)


def test_a_disk_that_stays_slow_is_tried_less_and_less_often() -> None:
    disk = Disk()
    pauses = [pause_s(disk) for _ in range(10)]
    assert pauses[0] == pytest.approx(PAUSE_S_FIRST, abs=0.02)
    assert pauses[1] == pytest.approx(2 * PAUSE_S_FIRST, abs=0.02)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(PAUSE_S_MAX, abs=0.02)
    disk.read(PROMPT_S / 2, WEIGHT - 1)
    assert pause_s(disk) == pytest.approx(PAUSE_S_MAX, abs=0.02)
    disk.read(PROMPT_S / 2, WEIGHT)
    assert pause_s(disk) == pytest.approx(PAUSE_S_FIRST, abs=0.02), "it was prompt for a while"


def test_an_error_is_timed_as_well() -> None:
    disk = Disk()

    def fail() -> None:
        with disk.promptness.timed():
            disk.clock.advance(1)
            raise OSError("bad sector")

    with pytest.raises(OSError, match="bad sector"):
        fail()
    assert not disk.is_prompt()
