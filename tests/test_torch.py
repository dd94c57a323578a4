"""What `lakefs_fuse.torch` tells the daemons of mounts, and that samples come as they would without it."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import pytest

from lakefs_fuse import torch
from lakefs_fuse.control import protocol
from lakefs_fuse.control.mounts import Mount
from lakefs_fuse.errors import LakeError
from lakefs_fuse.torch import NAMES_MAX, ReadAhead, ReadAheadDataset

SAMPLES = 1000
OWNER = 4711
"""The user of the mount."""


class Daemon:
    """Takes the names of the mount at ``mountpoint``."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint, self.names = mountpoint, list[str]()
        self.is_mounted = True
        self.connections, self.longest = 0, 0
        self.asked_for = -1
        """The user whose daemon was looked for."""
        self.error: LakeError | None = None

    def __enter__(self) -> Daemon:
        self.connections += 1
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, request: protocol.ReadAhead) -> None:
        if self.error is not None:
            raise self.error
        protocol.encode(request)
        self.longest = max(self.longest, len(request.paths))
        self.names += request.paths


class Sampler:
    """A shuffled epoch, as a distributed sampler makes it."""

    def __init__(self, batch: int = 0) -> None:
        self.epoch, self.batch, self.asked = 0, batch, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES // (self.batch or 1)

    def __iter__(self) -> Iterator[object]:
        order = Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        for at in range(0, SAMPLES, self.batch or 1):
            self.asked += 1
            yield order[at : at + self.batch] if self.batch else order[at]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """Of a mount at ``lake``."""
    found = Daemon(str(tmp_path / "lake"))

    def connect(mountpoint: str, *, owner: int, **_: object) -> Daemon:
        assert mountpoint == found.mountpoint
        found.asked_for = owner
        return found

    def read_mounts() -> list[Mount]:
        root = Mount("/", "ext4", "/dev/sda", 0, "1:1")
        return [root, Mount(found.mountpoint, "fuse.lakefs", "s3://b", OWNER, "1:2")] if found.is_mounted else [root]

    monkeypatch.setattr(torch, "connect", connect)
    monkeypatch.setattr(torch, "read_mounts", read_mounts)
    monkeypatch.setattr(torch, "MOUNTS_S", 0.0)
    monkeypatch.setattr(torch, "RETRY_S", 0.0)
    return found


def names(order: Iterable[int]) -> list[str]:
    return [f"set/{index % 7}/{index:04}.bin" for index in order]


def paths(daemon: Daemon) -> list[str]:
    return [f"{daemon.mountpoint}/{name}" for name in names(range(SAMPLES))]


def wait_named(daemon: Daemon, count: int) -> None:
    deadline_s = time.monotonic() + 20
    while len(daemon.names) < count and time.monotonic() < deadline_s:
        time.sleep(0.01)


@pytest.mark.parametrize(("user", "asked_for"), [(0, OWNER), (OWNER, OWNER), (1000, 1000)])
def test_root_names_files_to_the_daemon_of_the_mounts_user(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, user: int, asked_for: int
) -> None:
    """Another user asks for a daemon of its own, which is not there."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    list(ReadAhead(Sampler(0), paths(daemon), ahead=1))
    wait_named(daemon, SAMPLES)
    assert daemon.asked_for == asked_for


@pytest.mark.parametrize("batch", [0, 32])
@pytest.mark.parametrize("ahead", [1, 100, 2 * SAMPLES])
def test_samples_come_in_their_order_and_their_files_are_named_in_it(daemon: Daemon, batch: int, ahead: int) -> None:
    sampler = Sampler(batch)
    reading = ReadAhead(sampler, paths(daemon), ahead=ahead)
    for epoch in range(2):
        reading.set_epoch(epoch)
        daemon.names.clear()
        found = list(reading)
        assert found == list(sampler)
        order = [index for item in found for index in (item if batch else [item])]
        wait_named(daemon, SAMPLES)
        assert daemon.names == names(order)
    assert len(reading) == len(sampler)
    assert daemon.longest <= NAMES_MAX
    assert daemon.connections <= 2 * (2 * SAMPLES // NAMES_MAX + 2)


def test_files_are_named_so_many_samples_ahead(daemon: Daemon) -> None:
    sampler, every = Sampler(), paths(daemon)
    reading = ReadAhead(sampler, lambda index: [every[index], every[index] + ".json"], ahead=100)
    asked = [sampler.asked for _ in reading]
    assert asked[:800] == list(range(101, 901))
    wait_named(daemon, 2 * SAMPLES)
    assert daemon.names[1] == daemon.names[0] + ".json"


def test_index_that_is_a_tuple_is_one_sample(daemon: Daemon) -> None:
    every = paths(daemon)
    indices = [(number, "crop") for number in range(100)]
    assert list(ReadAhead(indices, lambda index: every[index[0]])) == indices
    wait_named(daemon, 100)
    assert daemon.names == names(range(100))


def test_iteration_that_is_given_up_names_no_more_files(daemon: Daemon) -> None:
    for count, _ in enumerate(ReadAhead(Sampler(), paths(daemon), ahead=100)):
        if count == 10:
            break
    wait_named(daemon, 64)
    time.sleep(0.05)
    assert 64 <= len(daemon.names) <= 128


def test_daemon_that_does_not_take_names_delays_nothing(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon.error = LakeError("the daemon hangs")
    with caplog.at_level(logging.WARNING):
        assert len(list(ReadAhead(Sampler(), paths(daemon)))) == SAMPLES
        deadline_s = time.monotonic() + 20
        while "the daemon hangs" not in caplog.text and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert "files are not read ahead: the daemon hangs" in caplog.text


def test_files_that_are_in_no_mount_ask_no_daemon(daemon: Daemon) -> None:
    elsewhere = [f"/data/{index}" for index in range(SAMPLES)]
    assert len(list(ReadAhead(Sampler(), elsewhere))) == SAMPLES
    assert list(ReadAheadDataset(elsewhere, elsewhere).__getitems__([1, 2])) == ["/data/1", "/data/2"]
    assert daemon.connections == 0


def test_mount_that_is_made_or_ended_after_a_directory_was_read_is_found(daemon: Daemon) -> None:
    every, asked = paths(daemon), list[int]()
    for is_mounted, expected in ((False, 0), (True, 2), (False, 2), (True, 4)):
        daemon.is_mounted = is_mounted
        ReadAheadDataset(every, every).__getitems__([1, 2])
        asked.append(len(daemon.names))
        assert asked[-1] == expected


def test_paths_that_no_mount_has_are_no_error(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    every = [f"{daemon.mountpoint}/a\udcff", f"{daemon.mountpoint}/b"]
    assert ReadAheadDataset([1, 2], every).__getitems__([0, 1]) == [1, 2]
    assert daemon.names == ["b"]
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        for path in ("/a\0/b", b"/ab"):
            assert ReadAheadDataset([1], [path]).__getitems__([0]) == [1]  # type: ignore[list-item]
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == ["files are not read ahead"] * 2


class Images:
    """A dataset that notes what was named before it was read."""

    classes = ("cat", "dog")

    def __init__(self, daemon: Daemon) -> None:
        self._daemon, self.named_before = daemon, list[int]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        self.named_before.append(len(self._daemon.names))
        return index * 2


def test_dataset_names_a_batch_before_it_reads_the_first_of_it(daemon: Daemon) -> None:
    images = Images(daemon)
    reading = ReadAheadDataset(images, paths(daemon))
    assert (len(reading), reading.classes, reading[3]) == (SAMPLES, ("cat", "dog"), 6)
    assert reading.__getitems__([5, 900, 7]) == [10, 1800, 14]
    assert images.named_before == [0, 3, 3, 3]
    assert daemon.names == names([5, 900, 7])


class Resumable(Sampler):
    """As those of torchdata."""

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}


def test_position_of_a_sampler_that_is_ahead_is_not_shown(daemon: Daemon) -> None:
    """A loader that saved it would miss the samples that were drawn and not read."""
    sampler = Resumable()
    reading = ReadAhead(sampler, paths(daemon), ahead=100)
    next(iter(reading))
    assert sampler.state_dict() == {"asked": 101}
    assert not hasattr(reading, "state_dict")
    assert not hasattr(reading, "load_state_dict")
    assert reading.asked == 101


def test_wrapped_ones_can_be_copied_and_sent_to_workers() -> None:
    sampler = ReadAhead(Sampler(), ["a"] * SAMPLES)
    assert pickle.loads(pickle.dumps(ReadAheadDataset([1, 2], ["a", "b"])))[1] == 2
    assert list(copy.deepcopy(sampler)) == list(sampler) == list(pickle.loads(pickle.dumps(sampler)))
