"""What a power cut and a kill leave of a cache directory, and of a whole node on the models of disk and engine."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from lakefs_fuse.meta.database import Batch, RocksEngines
from lakefs_fuse.vfs.writeback import queue as writeback
from tests.fakes import FakeClock, node_of, open_database
from tests.memory_store import MemoryStore
from tests.simulation.forgetful_disk import (
    PAGE_BYTES,
    REMOVED_MAX,
    FileState,
    ForgetfulDisk,
    copy_after_kill,
)
from tests.simulation.memory_engine import MemoryEngines
from tests.upload.drafting import noise
from tests.vfs.lakes import Clock
from tests.vfs.writing_back import NEVER_S, Outage, stored, writing_back

CUTS = 200
"""Power cuts of one directory; what may happen with a file happens in some of them."""
OLD, NEW = b"o" * PAGE_BYTES, b"n" * PAGE_BYTES
HOLE = bytes(PAGE_BYTES)


class CacheDirectory:
    """A cache directory on a forgetful disk."""

    def __init__(self, directory: Path) -> None:
        self.path, self._copies = directory / "cache", directory / "copies"
        self.disk = ForgetfulDisk(random.Random(1), room=1 << 40)
        self.staging = self.path / "staging"
        self.staging.mkdir(parents=True)

    def write(self, name: str, data: bytes, *, sync: bool) -> Path:
        path = self.staging / name
        with open(os.open(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.truncate(len(data))
            file.write(data)
            file.flush()
            if sync:
                self.disk.sync_data(file.fileno())
        return path

    def outcomes(self, name: str, source: Path | None = None, cuts: int = CUTS) -> set[bytes | None]:
        """All bytes that a file of staging has after power cuts; None where it is missing."""
        found = set()
        self._copies.mkdir(exist_ok=True)
        for seed in range(cuts):
            target = self._copies / f"{len(os.listdir(self._copies))}"
            self.disk.copy_after_power_cut(source or self.path, target, random.Random(seed))
            path = target / "staging" / name
            found.add(path.read_bytes() if path.exists() else None)
        return found


@pytest.fixture
def cache(tmp_path: Path) -> CacheDirectory:
    return CacheDirectory(tmp_path)


def test_synced_file_survives_as_it_is(cache: CacheDirectory) -> None:
    cache.write("draft", OLD, sync=True)
    assert cache.outcomes("draft") == {OLD}


def test_unsynced_pages_arrive_in_any_subset(cache: CacheDirectory) -> None:
    cache.write("draft", OLD * 3, sync=True)
    cache.write("draft", NEW + OLD + NEW, sync=False)
    assert cache.outcomes("draft") == {OLD * 3, NEW + OLD * 2, OLD * 2 + NEW, NEW + OLD + NEW}


def test_growth_since_the_sync_may_be_lost_or_be_a_hole(cache: CacheDirectory) -> None:
    cache.write("segment-1", OLD, sync=True)
    cache.write("segment-1", OLD + NEW, sync=False)
    found = cache.outcomes("segment-1")
    assert {OLD, OLD + NEW, OLD + HOLE} <= found
    assert all(data is not None and data.startswith(OLD) for data in found), "what was synced"


def test_truncation_since_the_sync_may_be_lost(cache: CacheDirectory) -> None:
    path = cache.write("draft", OLD * 2, sync=True)
    os.truncate(path, 5)
    found = cache.outcomes("draft")
    assert {OLD[:5], OLD * 2} <= found
    assert all(data is not None and OLD[:5] <= data <= OLD * 2 for data in found)


def test_unsynced_file_may_be_missing_empty_or_in_part(cache: CacheDirectory) -> None:
    cache.write("draft", NEW * 2, sync=False)
    found = cache.outcomes("draft")
    assert {None, b"", NEW * 2, NEW + HOLE, HOLE + NEW, HOLE * 2} <= found
    assert any(data is not None and 0 < len(data) < 2 * PAGE_BYTES for data in found)


def test_removed_file_may_be_back_as_it_was_synced(cache: CacheDirectory) -> None:
    cache.write("draft", OLD, sync=True)
    cache.write("draft", NEW, sync=False).unlink()
    assert cache.outcomes("draft") == {None, OLD}


def test_renamed_file_may_be_back_under_its_old_name(cache: CacheDirectory) -> None:
    (cache.path / "blocks").mkdir()
    cache.write("draft", OLD, sync=True).rename(cache.path / "blocks" / "block")
    assert cache.outcomes("draft") == {None, OLD}


def test_file_in_the_place_of_a_removed_one_was_never_synced(cache: CacheDirectory) -> None:
    cache.write("draft", OLD, sync=True).rename(cache.staging / "other")
    cache.write("draft", NEW, sync=False)
    found = cache.outcomes("draft")
    assert {None, b"", HOLE, NEW, OLD} <= found
    assert all(data is None or len(set(data)) < 2 for data in found), "of one file or of the other"


def test_removed_files_are_remembered_up_to_a_bound(cache: CacheDirectory) -> None:
    for number in range(4 * REMOVED_MAX):
        cache.write(f"{number}", b"x", sync=True).unlink()
    assert cache.outcomes("0", cuts=10) == {None}
    assert cache.outcomes(f"{4 * REMOVED_MAX - 1}", cuts=10) == {None, b"x"}


def test_attributes_are_those_of_the_sync_or_of_now(cache: CacheDirectory) -> None:
    path = cache.write("draft", OLD, sync=False)
    os.setxattr(path, "user.key", b"name")
    os.chmod(path, 0o600)
    cache.write("draft", OLD, sync=True)
    os.setxattr(path, "user.ended", b"1")
    found = set()
    for seed in range(CUTS):
        cache.disk.copy_after_power_cut(cache.path, cache.path.with_name(f"{seed}"), random.Random(seed))
        state = FileState.of(cache.path.with_name(f"{seed}") / "staging" / "draft")
        assert state.mode == 0o600
        found.add(tuple(name for name, _ in state.xattrs))
    assert {tuple(sorted(names)) for names in found} == {("user.key",), ("user.ended", "user.key")}


def test_copy_after_a_power_cut_is_durable(cache: CacheDirectory) -> None:
    cache.write("draft", OLD, sync=True)
    cache.write("draft", NEW * 9, sync=False)
    cache.disk.copy_after_power_cut(cache.path, cache.path.with_name("next"), random.Random(2))
    left = cache.path.with_name("next") / "staging" / "draft"
    assert cache.outcomes("draft", cache.path.with_name("next")) == {left.read_bytes()}


def test_copy_after_a_kill_is_exact_and_still_not_synced(cache: CacheDirectory) -> None:
    cache.write("synced", OLD, sync=True)
    cache.write("draft", OLD, sync=True)
    cache.write("draft", NEW, sync=False)
    cache.write("gone", OLD, sync=True).unlink()
    (cache.path / "lock").write_bytes(b"/mountpoint")
    second = cache.path.with_name("next")
    cache.disk.copy_after_kill(cache.path, second)
    assert (second / "lock").read_bytes() == b"/mountpoint"
    assert sorted(os.listdir(second / "staging")) == ["draft", "synced"]
    assert (second / "staging" / "draft").read_bytes() == NEW
    assert cache.outcomes("synced", second, 20) == {OLD}
    assert cache.outcomes("draft", second, 20) == {OLD, NEW}
    assert cache.outcomes("gone", second, 20) == {None, OLD}


def test_same_seed_leaves_the_same_directory(cache: CacheDirectory) -> None:
    for number in range(20):
        cache.write(f"{number}", noise(number, 3 * PAGE_BYTES), sync=number % 2 == 0)
    copies = [cache.path.with_name(name) for name in ("one", "two")]
    for copied in copies:
        cache.disk.copy_after_power_cut(cache.path, copied, random.Random(7))
    one, two = ({path.name: path.read_bytes() for path in (each / "staging").iterdir()} for each in copies)
    assert one == two


def test_temporary_file_is_synced_without_a_name(cache: CacheDirectory) -> None:
    with cache.disk.temporary_file(cache.staging) as file:
        file.write(b"x")
        cache.disk.sync_data(file.fileno())
    assert cache.disk.temporary_name("a-") == ForgetfulDisk(random.Random(1)).temporary_name("a-")
    assert cache.disk.free_bytes(cache.path) == 1 << 40


def test_close_of_a_large_removed_file_is_not_left_to_a_thread(cache: CacheDirectory) -> None:
    path = cache.write("draft", bytes(range(256)) * (4 << 12), sync=True)
    fd = os.open(path, os.O_RDWR)
    path.unlink()
    cache.disk.close_removed(fd)
    assert not cache.disk.is_freeing
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_rocksdb_of_a_copy_has_everything_committed_while_the_original_is_open(tmp_path: Path) -> None:
    node = replace(node_of(FakeClock()), engines=RocksEngines())
    database = open_database(tmp_path / "0" / "meta", "lake", node)
    database.end_loss()
    for life in range(3):
        for number in range(300):
            database.commit(Batch({b"X%d-%d" % (life, number): noise(number, 2000)}))
        copy_after_kill(tmp_path / f"{life}", tmp_path / f"{life + 1}")
        copied = open_database(tmp_path / f"{life + 1}" / "meta", "lake", node)
        assert not copied.lost_rows
        assert list(copied.scan(b"X", b"Y")) == list(database.scan(b"X", b"Y"))
        database = copied
    database.close()


@pytest.mark.parametrize("seed", range(2))
async def test_node_keeps_what_it_acknowledged_through_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Closed files are there, whole, in a lake that the node could not reach before."""
    monkeypatch.setattr(writeback, "PAUSE_S_FIRST", 0.01)
    clock, engines, rng = Clock(), MemoryEngines(), random.Random(seed)
    disk = ForgetfulDisk(random.Random(seed))
    node = replace(node_of(clock, f"{seed}"), disk=disk, engines=engines)
    store, after = MemoryStore(), tmp_path / "after"
    outage = Outage(store)
    data = {f"{number}": noise(number, 70_000 * (number % 3) + 500) for number in range(6)}
    async with writing_back(store, tmp_path / "cache", delay_s=NEVER_S, clock=clock, node=node) as m:
        for name, written in data.items():
            await m.write(name, written)
        await m.create("open")
        disk.copy_after_power_cut(tmp_path / "cache", after, rng)
        engines.copy(tmp_path / "cache", after, rng)
    outage.away = False
    async with writing_back(store, after, clock=clock, node=node) as m:
        await stored(m)
        assert set(await m.names()) - {"open"} == set(data)
        for name, written in data.items():
            assert await m.read(name) == written
