"""Pieces of blocks that are read by themselves, and what the cache reads without a thread."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lakefs_fuse.blockcache import cache_directory as cache_files
from lakefs_fuse.blockcache import cache_file, eviction
from lakefs_fuse.blockcache.cache import BlockCache, CacheState, Version, block_hash
from lakefs_fuse.blockcache.cache_file import PIECE_BYTES
from lakefs_fuse.blockcache.health import FAILED_RETRY_S
from lakefs_fuse.metrics import CacheMetrics
from tests.blockcache.reading import MIB, block_of, content, make_cache, read_block, write_block
from tests.blockcache.reading import cache_files as files_in
from tests.blockcache.test_cache import BOTH, DATA, SIZE, VERSION, WHOLE, failing, fill, flip
from tests.fakes import FakeClock


def part(cache: BlockCache, start: int, end: int) -> bytes | None:
    data = cache.read_part(VERSION, start, end)
    return None if data is None else bytes(data)


SMALL = Version("small", "etag", 5000)


PARTS = [
    (0, 1), (5, 70_000), (PIECE_BYTES, 2 * PIECE_BYTES), (MIB - 1, MIB + 1), (100, 2 * MIB + 5),
    (2 * MIB + 1, SIZE), (SIZE - 1, SIZE), (0, SIZE),
]  # fmt: skip


@pytest.fixture
def disk_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each read of a file brought."""
    found: list[int] = []
    pread = os.pread

    def counting(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        found.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counting)
    return found


@pytest.mark.parametrize(("start", "end"), PARTS)
def test_a_part_is_read_by_itself(tmp_path: Path, disk_reads: list[int], start: int, end: int) -> None:
    cache = make_cache(tmp_path)
    assert part(cache, start, end) is None
    fill(cache)
    disk_reads.clear()
    assert part(cache, start, end) == DATA[start:end]
    pieces = (end - start) // PIECE_BYTES + 2
    assert sum(disk_reads) <= pieces * (PIECE_BYTES + 8)


def test_a_part_is_answered_only_if_it_is_what_was_written(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    write_block(cache, VERSION, 0, block_of(DATA, 0))
    assert part(cache, MIB - 10, MIB + 10) is None, "half of it is not there"
    fill(cache)
    (path,) = files_in(tmp_path)
    flip(path, PIECE_BYTES + 5)
    assert part(cache, PIECE_BYTES, PIECE_BYTES + 10) is None
    assert part(cache, 0, PIECE_BYTES) == DATA[:PIECE_BYTES], "the next one is damaged"
    assert part(cache, 0, PIECE_BYTES + 1) is None
    assert read_block(cache, VERSION, 0) is None, "and the block with it"
    assert part(cache, 0, PIECE_BYTES) is None, "so it is fetched again, whole"
    fill(cache)
    assert part(cache, 0, PIECE_BYTES + 1) == DATA[: PIECE_BYTES + 1]
    flip(path, 2 * MIB + 4096 + 64 + 3 * 8 + 8)
    assert part(cache, PIECE_BYTES, PIECE_BYTES + 10) is None
    assert read_block(cache, VERSION, 0) == block_of(DATA, 0), "only what is known of a piece is damaged"
    os.truncate(path, 0)
    assert part(cache, 0, 10) is None
    assert cache.statistics().state is CacheState.OK


def test_room_is_made_on_a_disk_that_takes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of pieces of blocks that were never here takes room to forget."""
    monkeypatch.setattr(eviction, "LARGE_BYTES", 8 * MIB)
    monkeypatch.setattr(eviction, "RANGE_BYTES", 4 * MIB)
    cache = make_cache(tmp_path)
    large = Version("large", "e", 600 * MIB)
    for index in range(0, 64, 2):
        write_block(cache, large, index, content(index, MIB))
    used, pwrite = cache.files.bytes_used, os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) > 4 * 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    assert cache.evict(MIB) >= MIB
    assert used - 4 * MIB <= cache.files.bytes_used < used
    assert cache.state is CacheState.OK


def test_what_is_known_of_pieces_is_mended(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache)
    (path,) = files_in(tmp_path)
    flip(path, 2 * MIB + 4096 + 64 + 3 * 8 + 8)
    assert part(cache, PIECE_BYTES, PIECE_BYTES + 10) is None
    assert cache.read_blocks(VERSION, 0, 1, parts_to_come=True) == [block_of(DATA, 0)]
    assert part(cache, PIECE_BYTES, PIECE_BYTES + 10) == DATA[PIECE_BYTES : PIECE_BYTES + 10]


def test_a_bad_disk_is_noticed_without_a_thread_and_a_mended_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    cache = make_cache(tmp_path, scanned=False, clock=clock)
    write_block(cache, SMALL, 0, content("small", 5000))
    with monkeypatch.context() as patch:
        failing(patch, "pread", errno.EIO)
        assert cache.read_all_now(SMALL) is None
        assert cache.state is CacheState.FAILED
        assert cache.statistics().last_error == "Input/output error"
    clock.advance(FAILED_RETRY_S)
    write_block(cache, SMALL, 0, content("small", 5000))
    clock.advance(FAILED_RETRY_S)
    assert cache.read_all_now(SMALL) == content("small", 5000)
    assert cache.statistics().state is CacheState.OK


def test_a_file_whose_use_cannot_be_noted_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    cache = make_cache(tmp_path, scanned=False, clock=clock)
    write_block(cache, SMALL, 0, content("small", 5000))
    clock.advance(10 * cache_files.TOUCH_S)
    with monkeypatch.context() as patch:
        failing(patch, "utime", errno.EROFS)
        assert cache.read_all_now(SMALL) is None
    with cache.files.reading(SMALL) as file:
        assert file is not None
        assert file.users == 1


def test_a_part_of_what_was_evicted_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "LARGE_BYTES", 8 * MIB)
    monkeypatch.setattr(eviction, "RANGE_BYTES", 2 * MIB)
    cache = make_cache(tmp_path)
    large = Version("large", "e", eviction.LARGE_BYTES + MIB)
    for index in range(large.blocks):
        write_block(cache, large, index, bytes(MIB))
    cache.evict(MIB)
    here = cache.has_blocks(large, 0, large.blocks)
    assert {True, False} == set(here)
    assert [cache.read_part(large, index * MIB, index * MIB + 10) is not None for index in range(len(here))] == here


def adopted(cache: BlockCache, directory: Path) -> None:
    staged = directory / "staged"
    staged.write_bytes(DATA)
    assert cache.adopt(staged, VERSION, [block_hash(block_of(DATA, index)) for index in range(3)])


def test_parts_of_an_adopted_file_are_known_once_its_blocks_were_read(tmp_path: Path, disk_reads: list[int]) -> None:
    cache = make_cache(tmp_path / "cache")
    adopted(cache, tmp_path)
    assert cache.read_blocks(VERSION, 0, 1) == [block_of(DATA, 0)]
    assert part(cache, 5, 10) is None
    for _ in range(2):
        assert cache.read_blocks(VERSION, 0, 1, parts_to_come=True) == [block_of(DATA, 0)]
        assert cache.read_blocks(VERSION, 2, 3, parts_to_come=True) == [block_of(DATA, 2)]
    assert part(cache, 5, 10) == DATA[5:10]
    assert part(cache, SIZE - 5, SIZE) == DATA[-5:]
    assert part(cache, MIB, MIB + 5) is None
    assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in files_in(tmp_path / "cache"))


def test_what_parts_are_not_kept_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(tmp_path / "cache")
    adopted(cache, tmp_path)
    failing(monkeypatch, "pwrite", errno.ENOSPC)
    assert cache.read_blocks(VERSION, 0, 1, parts_to_come=True) == [block_of(DATA, 0)]
    assert cache.state is CacheState.OK


def test_a_file_of_the_earlier_format_is_read_by_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(tmp_path)
    with monkeypatch.context() as patch:
        real = cache_file.Layout.for_size
        patch.setattr(cache_file.Layout, "for_size", lambda size, form=None: real(size, cache_file.BLOCKS_ONLY))
        fill(cache)
        fill(cache, WHOLE, b"".join(BOTH))
        cache.close()
    assert sorted(path.stat().st_size for path in files_in(tmp_path)) == [
        MIB + 4096 + 64 + 2 * 8, 2 * MIB + 4096 + 64 + 3 * 8,
    ]  # fmt: skip
    metrics = CacheMetrics()
    again = make_cache(tmp_path, metrics)
    assert part(again, 5, 10) is None
    assert again.read_blocks(VERSION, 0, 3, parts_to_come=True) == [block_of(DATA, index) for index in range(3)]
    assert part(again, 5, 10) is None
    assert again.read_blocks(WHOLE, 0, 2) == BOTH
    write_block(again, VERSION, 1, block_of(DATA, 1))
    moved = Version("moved", "e", SIZE)
    assert again.transfer(VERSION, moved)
    assert again.read_blocks(moved, 0, 3) == [block_of(DATA, index) for index in range(3)]
    assert metrics.damaged == 0
