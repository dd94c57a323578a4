"""The cost of small benchmark workloads: FUSE requests, store requests and bytes.

Bounds are the costs of today, with room where they depend on scheduling: a change that adds requests fails here.
`tests/mount/test_metadata.py` counts listings, `tests/mount/test_writeback.py` write-back.
"""

from __future__ import annotations

import math
import os

import pytest

from scripts.bench import workloads
from scripts.bench.results import Results, Sample
from scripts.bench.sizes import MIB
from scripts.bench.stage import DIRECTORIES
from tests.bench.conftest import TINY
from tests.mount.lakes import PART_BYTES

FILES = TINY.files
PAGE = 1
"""LIST with which the second name of a directory is asked for, besides its own, where nobody has listed it."""
POLL = 1
"""LIST for commits, which may fall into a workload on a slow machine."""
ANNOUNCEMENT = 1
"""PUT by which others hear of plain objects, a second after they were stored: perhaps in the next workload."""
SMALL_READS = 16
"""READs of less than 1 MiB, at the ends of what the kernel reads at once."""
FIRST_EPOCH, SECOND_EPOCH = workloads.first_epoch(TINY.readers[0]), workloads.second_epoch(TINY.readers[0])


class Cost:
    """Of one workload for one of ours, once."""

    def __init__(self, found: Results, workload: str, peer: str = "lakefs") -> None:
        series = found.of(workload, peer)
        assert series.failures == []
        (self.sample,) = series.samples
        assert self.sample.stopped_after_s is None
        assert not self.sample.undurable

    @property
    def requests(self) -> dict[str, int]:
        assert self.sample.store is not None
        return self.sample.store.requests

    @property
    def upcalls(self) -> dict[str, int]:
        assert self.sample.daemon is not None
        assert self.sample.daemon.upcalls is not None
        return {kind: count for kind, count in self.sample.daemon.upcalls.items() if kind != "forget"}

    def asks_at_most(self, **most: int) -> None:
        """Store requests, and of no other kind. After a LIST that shows what was stored a moment ago, as all is here,
        commits are listed as well: what was committed before that comes first."""
        most["list"] = 2 * most.get("list", 0)
        assert {kind: count for kind, count in self.requests.items() if count > most.get(kind, 0)} == {}

    def calls_at_most(self, **most: int) -> None:
        """Upcalls, and of no other kind."""
        assert {kind: count for kind, count in self.upcalls.items() if count > most.get(kind, 0)} == {}


def transferred(sample: Sample) -> int:
    assert sample.store is not None
    return sample.store.read_bytes + sample.store.written_bytes


def test_first_epoch_of_plain_objects(found: Results) -> None:
    cost = Cost(found, FIRST_EPOCH)
    assert cost.sample.operations == FILES
    cost.asks_at_most(get=FILES, list=(DIRECTORIES + 2) * (2 + PAGE) + POLL)
    cost.calls_at_most(lookup=FILES + DIRECTORIES, getattr=0, open=FILES, read=FILES, flush=FILES, release=FILES)
    assert transferred(cost.sample) < 1.1 * cost.sample.bytes


def test_first_epoch_of_packed_files(found: Results) -> None:
    cost = Cost(found, FIRST_EPOCH, "lakefs packed")
    assert cost.sample.operations == FILES
    cost.asks_at_most(get=math.ceil(cost.sample.bytes / MIB) + 1)
    assert transferred(cost.sample) < 1.1 * cost.sample.bytes


@pytest.mark.parametrize("peer", ["lakefs", "lakefs packed"])
def test_second_epoch(found: Results, peer: str) -> None:
    cost = Cost(found, SECOND_EPOCH, peer)
    assert cost.sample.operations == FILES
    cost.asks_at_most()
    cost.calls_at_most(open=FILES, flush=FILES, release=FILES, read=FILES // 4)  # the kernel may drop what it likes


@pytest.mark.parametrize("peer", ["lakefs", "lakefs packed"])
def test_an_epoch_after_a_restart(found: Results, peer: str) -> None:
    cost = Cost(found, workloads.epoch_after_restart(TINY.readers[0]), peer)
    assert cost.sample.operations == FILES
    cost.asks_at_most()
    cost.calls_at_most(lookup=FILES + DIRECTORIES, open=FILES, read=FILES, flush=FILES, release=FILES)


@pytest.mark.long  # `mount/test_immutable.py` counts upcalls of one
def test_epochs_of_an_immutable_mount(found: Results) -> None:
    first = Cost(found, FIRST_EPOCH, "lakefs immutable")
    first.asks_at_most(get=FILES)
    first.calls_at_most(lookup=FILES + DIRECTORIES, open=TINY.readers[0], read=FILES, flush=TINY.readers[0])
    second = Cost(found, SECOND_EPOCH, "lakefs immutable")
    assert second.sample.operations == FILES
    second.asks_at_most()
    second.calls_at_most(read=FILES // 50)


def test_large_files(found: Results) -> None:
    blocks = TINY.large_bytes // MIB
    cold = Cost(found, workloads.THROUGH_COLD)
    assert cold.sample.bytes == TINY.large_bytes
    cold.asks_at_most(get=blocks // 2, list=1)
    reads = blocks + 2 if os.geteuid() == 0 else 8 * blocks  # to make the kernel read further ahead takes root
    cold.calls_at_most(lookup=1, open=1, read=reads, flush=1, release=1)
    assert transferred(cold.sample) < 1.02 * TINY.large_bytes
    warm = Cost(found, workloads.THROUGH_WARM)
    warm.asks_at_most()
    warm.calls_at_most(open=1, read=3 * blocks // 4, flush=1, release=1)  # of pages that the kernel has dropped


def test_pieces_of_a_large_file(found: Results) -> None:
    """Too few for the file to be fetched whole."""
    pieces = TINY.pieces
    cold = Cost(found, workloads.SCATTERED_COLD)
    cold.asks_at_most(get=pieces, list=1 + PAGE)
    cold.calls_at_most(lookup=1, open=pieces, read=pieces, flush=pieces, release=pieces)
    assert transferred(cold.sample) < 1.02 * pieces * MIB, "a block for each at most"
    warm = Cost(found, workloads.SCATTERED_WARM)
    warm.asks_at_most()
    warm.calls_at_most(open=pieces, flush=pieces, release=pieces)


@pytest.mark.long  # `mount/test_torch.py` counts the same of one checkpoint
def test_a_checkpoint(found: Results) -> None:
    size = TINY.checkpoint_bytes
    saved = Cost(found, workloads.SAVE)
    saved.asks_at_most(part=math.ceil(size / PART_BYTES), upload=2, list=1 + PAGE, put=ANNOUNCEMENT)
    assert saved.upcalls["write"] <= size // MIB + 3
    assert transferred(saved.sample) < 1.01 * size
    loaded = Cost(found, workloads.LOAD)
    loaded.asks_at_most(list=1, put=ANNOUNCEMENT)
    # The kernel may drop what it likes; what it has not dropped is not read: `tests/mount/test_torch.py`.
    loaded.calls_at_most(getattr=1, open=1, flush=1, release=1, read=size // MIB + SMALL_READS)
    elsewhere = Cost(found, workloads.LOAD_COLD)
    elsewhere.asks_at_most(get=size // MIB // 2, list=1, put=ANNOUNCEMENT)
    assert transferred(elsewhere.sample) < 1.02 * size


@pytest.mark.long  # `mount/test_torch.py` counts the same of one file
def test_ranks(found: Results) -> None:
    cost = Cost(found, workloads.RANKS)
    parts = TINY.ranks * math.ceil(TINY.shard_bytes / PART_BYTES)
    cost.asks_at_most(part=parts, upload=2 * TINY.ranks, list=TINY.ranks + PAGE, put=ANNOUNCEMENT * TINY.ranks)
    assert transferred(cost.sample) < 1.01 * TINY.ranks * TINY.shard_bytes


def test_writing_small_files(found: Results) -> None:
    files = TINY.written_files
    cost = Cost(found, workloads.WRITE)
    assert cost.sample.operations == files
    # Files that are closed together share a PUT. How many are depends on when the machine lets the writers close them.
    cost.asks_at_most(put=files * 3 // 4, list=1)
    each = dict.fromkeys(("create", "write", "setattr", "flush", "release", "getxattr"), files)
    cost.calls_at_most(mkdir=1, lookup=files + 2, getattr=2 * files + 2, **each)
    assert transferred(cost.sample) < 1.05 * cost.sample.bytes


def test_names_go_and_change(found: Results) -> None:
    removed = Cost(found, workloads.REMOVE)
    # Names are sent once a second, and what they leave is deleted then, each object as the version that was removed,
    # until all of it is in the store. The first second may begin before. Of a directory the marker is looked at first.
    assert removed.sample.durable_s is not None
    times = 2 + math.floor(removed.sample.durable_s)
    removed.asks_at_most(delete=TINY.tree_files + times, head=DIRECTORIES, list=1 + times + PAGE, put=times)
    assert removed.upcalls["unlink"] == TINY.tree_files
    renamed = Cost(found, workloads.RENAME)
    renamed.asks_at_most(list=5, put=1)
    renamed.calls_at_most(lookup=2, getattr=1, rename=1)
