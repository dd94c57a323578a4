"""The cache stays within its bounds, and what goes is what was used longest ago and is not open."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from lakefs_fuse.blockcache import eviction
from lakefs_fuse.blockcache.cache import BlockCache, CacheState, Version
from lakefs_fuse.blockcache.cache_file import name_digest, read_layout
from lakefs_fuse.metrics import CacheMetrics
from tests.blockcache.reading import (
    MIB,
    block_of,
    cache_files,
    content,
    make_cache,
    read_block,
    write_block,
    write_blocks,
)
from tests.fakes import NS, FakeClock, FakeDisk


def version(number: int, size: int = 100_000) -> Version:
    return Version(f"key-{number}", "etag", size)


def write(cache: BlockCache, number: int, size: int = 100_000) -> None:
    write_block(cache, version(number, size), 0, content(number, size))


def here(cache: BlockCache, number: int, size: int = 100_000) -> bool:
    return cache.has_blocks(version(number, size), 0, 1)[0]


def used_at(directory: Path, cached: Version, when_s: float) -> None:
    os.utime(eviction.file_path(str(directory), name_digest(cached)), (when_s, when_s))


def test_the_bound_holds_while_writing(tmp_path: Path) -> None:
    metrics = CacheMetrics()
    cache = make_cache(tmp_path, metrics, bytes_max=3 * MIB)
    for number in range(100):
        write(cache, number)
        assert cache.files.bytes_used <= 3 * MIB
        assert here(cache, number)
    assert cache.state is CacheState.OK
    on_disk = sum(path.stat().st_blocks * 512 for path in cache_files(tmp_path))
    assert cache.files.bytes_used == on_disk > 2 * MIB
    assert metrics.evicted_bytes > 6 * MIB


def test_the_oldest_go_first_and_reading_is_use(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    for number in range(20):
        write(cache, number)
    cache.close()
    for number in range(20):
        used_at(tmp_path, version(number), 1_000_000 + number)
    again = make_cache(tmp_path)
    assert read_block(again, version(0), 0) is not None
    again.evict(5 * 100_000)
    assert [number for number in range(20) if not here(again, number)] == [1, 2, 3, 4, 5]


def test_a_file_is_touched_at_most_once_a_minute(tmp_path: Path) -> None:
    clock = FakeClock(2_000_000_000 * NS)
    cache = make_cache(tmp_path, scanned=False, clock=clock)
    write(cache, 0)
    (path,) = cache_files(tmp_path)
    made_s = path.stat().st_mtime
    for seconds, touched_s in [(0, made_s), (59, made_s), (1, 2e9 + 60), (59, 2e9 + 60), (1, 2e9 + 120)]:
        clock.advance(seconds)
        read_block(cache, version(0), 0)
        assert path.stat().st_mtime == touched_s


def test_open_versions_are_spared_and_then_the_cache_is_full(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, bytes_max=MIB)
    for number in range(5):
        cache.pin(version(number))
        write(cache, number)
    assert cache.evict(10 * MIB) == 0
    assert all(here(cache, number) for number in range(5))
    write_block(cache, Version("big", "e", MIB), 0, content("big", MIB))
    assert cache.state is CacheState.FULL
    assert cache.statistics().versions_pinned == 5
    cache.pin(version(0))
    for number in range(5):
        cache.unpin(version(number))
    assert cache.evict(10 * MIB) > 0
    assert [number for number in range(5) if here(cache, number)] == [0]
    cache.unpin(version(0))
    with pytest.raises(KeyError):
        cache.unpin(version(0))


def test_evict_while_other_blocks_are_kept_than_before_removes_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path, seed=5)
    every = [version(number, 2 * MIB) for number in range(8)]
    for each in every:
        write_blocks(cache, each, 0, [content("a", MIB), content("b", MIB)])
    cache.files.keep({name_digest(each): 0b01 for each in every})
    punch_blocks, punched = eviction.punch_blocks, list[str]()

    def punch_and_keep_others(path: str, blocks: int) -> bool:
        done = punch_blocks(path, blocks)
        punched.append(path)
        cache.files.keep({name_digest(every[-1]): 0b11})
        return done

    monkeypatch.setattr(eviction, "punch_blocks", punch_and_keep_others)
    assert MIB <= cache.evict(64 * MIB) < 2 * MIB
    last = eviction.file_path(str(tmp_path), name_digest(every[-1]))
    assert punched[0] in [eviction.file_path(str(tmp_path), name_digest(each)) for each in every[:-2]]
    assert punched[1:] == [last], "and of those between, which are not kept, whole files are for the next eviction"
    assert cache.has_blocks(every[-1], 0, 2) == [True, True]


def test_free_space_of_the_disk_is_kept(tmp_path: Path) -> None:
    disk = FakeDisk(room=100 * MIB)
    cache = make_cache(tmp_path, bytes_max=1 << 40, free_bytes_min=90 * MIB, disk=disk)
    for number in range(20):
        write(cache, number)
    disk.room = 90 * MIB - 500_000  # somebody else fills the disk
    assert cache.evict() >= 500_000
    assert cache.statistics().bytes_used > 0
    disk.room = 0
    write(cache, 100)
    assert cache.files.bytes_used == 0
    assert cache.state is CacheState.FULL
    assert not here(cache, 100)


def test_large_files_lose_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "LARGE_BYTES", 4 * MIB)
    monkeypatch.setattr(eviction, "RANGE_BYTES", 2 * MIB)
    cache = make_cache(tmp_path, seed=4)
    data = content("large", 9 * MIB + 5)
    large = Version("large", "etag", len(data))
    for index in range(large.blocks):
        write_block(cache, large, index, block_of(data, index))
    before = cache.files.bytes_used
    freed = cache.evict(1)
    assert 0 < freed <= 2 * MIB
    assert cache.files.bytes_used == before - freed
    blocks = cache.read_blocks(large, 0, large.blocks)
    assert blocks.count(None) in (1, 2)
    assert all(block in (None, block_of(data, index)) for index, block in enumerate(blocks))
    assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in cache_files(tmp_path))
    while cache.evict(1):
        assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in cache_files(tmp_path))
    assert cache_files(tmp_path) == []
    assert cache.files.bytes_used == 0


def test_drop_of_blocks_of_a_very_large_file_is_linear(tmp_path: Path) -> None:
    cache, large = make_cache(tmp_path), Version("large", "e", 1 << 40)
    write_block(cache, large, 0, content("large", MIB))
    path = eviction.file_path(str(tmp_path), name_digest(large))
    with open(path, "r+b") as file:
        layout, _ = read_layout(file.fileno())
        os.pwrite(file.fileno(), b"x" * (8 * large.blocks), layout.hash_at(0))
    began_s = time.thread_time()
    cache.drop([(large, 1 | 1 << (large.blocks - 1))])
    assert time.thread_time() - began_s < 3
    assert cache.has_blocks(large, 0, 2) == [False, True]
    assert cache.has_blocks(large, large.blocks - 2, large.blocks) == [True, False]


def test_large_files_go_whole_where_there_are_no_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "LARGE_BYTES", MIB)
    monkeypatch.setattr("lakefs_fuse.environment.local_disk.punch_hole", lambda *_: False)
    cache = make_cache(tmp_path)
    write_blocks(cache, Version("large", "e", 3 * MIB), 0, [bytes(MIB)] * 3)
    assert cache.evict(1) >= 3 * MIB
    assert cache_files(tmp_path) == []


def test_sampling_finds_old_files_among_many(tmp_path: Path) -> None:
    """With many files the choice is approximate: of what goes, nearly nothing is from the newer half."""
    cache = make_cache(tmp_path)
    for number in range(600):
        write_block(cache, version(number, 10), 0, content(number, 10))
        used_at(tmp_path, version(number, 10), 1_000_000 + number)
    cache.evict(cache.files.bytes_used // 5)
    gone = [number for number in range(600) if not cache.has_blocks(version(number, 10), 0, 1)[0]]
    assert len(gone) >= 100
    assert sum(number >= 300 for number in gone) < len(gone) // 4


def test_directories_go_around_once_from_anywhere(tmp_path: Path) -> None:
    numbers = [0x000, 0x001, 0x123, 0x12F, 0xFFF]
    for number in numbers:
        (tmp_path / f"{number:03x}").mkdir()
    (tmp_path / "usage").write_bytes(b"")
    for foreign in ("zzz", "12", "ABC", "0123"):
        (tmp_path / foreign).mkdir()
    for start in (0, 1, 0x122, 0x123, 0x124, 0x12F, 0x130, 0xFFF):
        found = [number for number, _ in eviction.directories(str(tmp_path), start)]
        assert found == [*(n for n in numbers if n >= start), *(n for n in numbers if n < start)]
        for count in (0, 1, 3, 16):
            some = eviction.directories_from(str(tmp_path), start, count)
            assert some == [(n, f"{tmp_path}/{n:03x}") for n in numbers if n >= start][:count]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "000").mkdir()
    foreign = tmp_path / "000" / "notes.txt"
    foreign.write_text("mine")
    cache = make_cache(tmp_path)
    assert cache.files.bytes_used == 0
    assert cache.evict(1) == 0
    assert foreign.read_text() == "mine"


def test_an_empty_cache_is_counted_with_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a thread its turn, and until it is counted nothing is fetched whole."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: object) -> Any:
            nonlocal calls
            calls += 1
            return real(*given)

        return call

    cache = make_cache(tmp_path, scanned=False)
    for name in ("listdir", "scandir", "stat"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    cache.scan()
    assert calls <= 300


def test_write_that_was_counted_is_not_reserved_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one writer finds no room because the bytes of another count twice for a moment."""
    cache = make_cache(tmp_path, bytes_max=3 * MIB)
    unreserve, found = cache.files.unreserve, list[bool]()

    def look(wanted: int) -> None:
        found.append(cache.has_room([version(1, MIB)]))
        unreserve(wanted)

    monkeypatch.setattr(cache.files, "unreserve", look)
    write(cache, 0, MIB)
    assert found == [True]


def test_search_among_spared_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "EXAMINED_FILES_MAX", 50)
    cache = make_cache(tmp_path)
    for number in range(200):
        write(cache, number, 100)
    examined = list[eviction.Candidate]()
    monkeypatch.setattr(
        eviction, "files", lambda path, number, found=eviction.files: _noted(found(path, number), examined)
    )
    cache.files.spare_since(0)
    assert cache.evict(MIB) == 0
    assert 50 <= len(examined) < 60
    cache.files.spare_since(None)
    assert cache.evict(1) > 0


def _noted(found: Iterable[eviction.Candidate], examined: list[eviction.Candidate]) -> list[eviction.Candidate]:
    some = list(found)
    examined += some
    return some


def test_room_that_another_writer_took_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(room=100 * MIB)
    cache = make_cache(tmp_path, bytes_max=64 * MIB, disk=disk)
    for number in range(20):
        write(cache, number)

    def oldest(*arguments: Any, found: Callable[..., list[eviction.Candidate]] = eviction.oldest) -> Any:
        disk.room = 10 * MIB if len(cache_files(tmp_path)) <= 5 else 0  # what was freed before is gone already
        return found(*arguments)

    monkeypatch.setattr(eviction, "oldest", oldest)
    disk.room = 0
    write(cache, 100)
    assert here(cache, 100)
    assert cache.state is CacheState.OK
