"""Bits that change on the way from the store: detected before the bytes are served."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults import Faults, faulty
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, Lake, noise
from tests.servers import Server

COMMITS = ".lakefs/commits/"
A_PACK, PLAIN_FILE = ".zip", "/plain"
"""In the URLs of their GETs, and not in those of a LIST: what that answers has no sum."""
FILES = {f"d/{number}": noise(30_000 + number, number) for number in range(8)}
PLAIN = noise(3 * MIB + 5, 77)


@dataclass(frozen=True)
class Flipped:
    """A lake with packed files and a plain one, in a mount that has cached none of their bytes."""

    lake: Lake
    faults: Faults

    def expect_refused(self, name: str) -> None:
        with pytest.raises(OSError) as caught:
            (self.lake.path / name).read_bytes()
        assert caught.value.errno == errno.EIO


@pytest.fixture
def flipped(seaweed: Server, make_lake: LakeMaker) -> Iterator[Flipped]:
    with faulty(seaweed) as (proxied, faults):
        lake = make_lake("seaweedfs", "--pack", "always", "--refresh", "1h", through=proxied).mount()
        (lake.path / "d").mkdir()
        for name, data in FILES.items():
            (lake.path / name).write_bytes(data)
        lake.outside.replace("plain", PLAIN)
        faults.flip(1, method="GET", containing=A_PACK)
        lake.remount(empty_cache=True)
        assert faults.injected["flip"] == 1, "of a commit's record"
        faults.clear()
        yield Flipped(lake, faults)
        faults.clear()


def test_mount_with_a_flipped_bit_in_an_answer_asks_again(flipped: Flipped) -> None:
    lake, faults = flipped.lake, flipped.faults
    assert {f"d/{path.name}" for path in (lake.path / "d").iterdir()} == FILES.keys(), "no commit was left out"
    gets = lake.number("store.requests.get")
    faults.flip(1, method="GET", containing=PLAIN_FILE)
    assert (lake.path / "plain").read_bytes() == PLAIN
    faults.flip(1, method="GET", containing=A_PACK)
    assert {name: (lake.path / name).read_bytes() for name in FILES} == FILES
    assert faults.injected["flip"] == lake.number("cache.wrong_sums") == 2
    packs = sum(key.startswith(COMMITS) and key.endswith(".zip") for key in lake.outside.objects())
    assert lake.number("store.requests.get") <= gets + 2 + 1 + packs


def test_mount_with_a_flipped_bit_in_every_answer_is_eio_and_keeps_nothing(flipped: Flipped) -> None:
    lake, faults = flipped.lake, flipped.faults
    for name in (PLAIN_FILE, A_PACK):
        faults.flip(1 << 20, method="GET", containing=name)
    flipped.expect_refused("plain")
    flipped.expect_refused("d/3")
    assert lake.number("cache.wrong_sums") >= 6
    faults.clear()
    assert (lake.path / "plain").read_bytes() == PLAIN
    assert {name: (lake.path / name).read_bytes() for name in FILES} == FILES
