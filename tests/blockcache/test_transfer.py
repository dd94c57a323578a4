"""Blocks of one version become those of another that is the same bytes, whoever reads meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakefs_fuse.blockcache import eviction
from lakefs_fuse.blockcache.cache import Version
from lakefs_fuse.blockcache.cache_file import name_digest, relabel
from lakefs_fuse.metrics import CacheMetrics
from tests.blockcache.reading import MIB, block_of, cache_files, content, make_cache, read_block, write_block

DATA = content("moved", 2 * MIB + 100)
OLD, NEW = Version("old", "etag", len(DATA)), Version("new", "other", len(DATA))


def test_the_blocks_are_the_other_versions(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    for index in (0, 2):
        write_block(cache, OLD, index, block_of(DATA, index))
    used = cache.files.bytes_used
    assert cache.transfer(OLD, NEW)
    assert cache.has_blocks(OLD, 0, 3) == [False] * 3
    assert cache.read_blocks(NEW, 0, 3) == [block_of(DATA, 0), None, block_of(DATA, 2)]
    assert cache.files.bytes_used == used == sum(path.stat().st_blocks * 512 for path in cache_files(tmp_path))
    write_block(cache, NEW, 1, block_of(DATA, 1))
    cache.close()
    assert all(make_cache(tmp_path).has_blocks(NEW, 0, 3))


def test_what_was_there_of_the_new_one_goes(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    write_block(cache, NEW, 1, block_of(DATA, 1))
    write_block(cache, OLD, 0, block_of(DATA, 0))
    assert cache.transfer(OLD, NEW)
    assert cache.has_blocks(NEW, 0, 3) == [True, False, False]
    assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in cache_files(tmp_path))


def test_a_reader_of_the_old_one_goes_on(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    write_block(cache, OLD, 0, block_of(DATA, 0))
    with cache.files.reading(OLD) as file:
        assert file is not None
        assert cache.transfer(OLD, NEW)
        assert file.read_block(0, file.hashes(0, 1)[0]) == (block_of(DATA, 0), False)
        file.write_block(1, block_of(DATA, 1))
    assert cache.read_blocks(NEW, 0, 2) == [block_of(DATA, 0), block_of(DATA, 1)]
    assert cache.files.files_open == 1


def test_blocks_that_a_writer_of_the_old_version_adds_are_counted(tmp_path: Path) -> None:
    """Or the removal of the file subtracts more than was added, and the cache exceeds its bound by the difference."""
    cache, other = make_cache(tmp_path), Version("other", "etag", len(DATA))
    for index in range(3):
        write_block(cache, other, index, block_of(DATA, index))
    whole = cache.files.bytes_used
    with cache.files.writing(OLD) as file:
        file.write_block(0, block_of(DATA, 0))
        assert cache.transfer(OLD, NEW)
        file.write_block(1, block_of(DATA, 1))
    on_disk = sum(path.stat().st_blocks * 512 for path in cache_files(tmp_path))
    assert cache.files.bytes_used == on_disk > whole + 2 * MIB
    write_block(cache, NEW, 2, block_of(DATA, 2))
    assert cache.files.bytes_used == 2 * whole
    assert cache.drop([(NEW, 0b111)]) == [whole]
    assert cache.files.bytes_used == whole


def test_nothing_to_transfer(tmp_path: Path) -> None:
    metrics = CacheMetrics()
    cache = make_cache(tmp_path, metrics)
    assert not cache.transfer(OLD, NEW)
    with pytest.raises(ValueError, match="not the same"):
        cache.transfer(OLD, Version("new", "other", 1))
    write_block(cache, OLD, 0, block_of(DATA, 0))
    cache.close()
    (path,) = cache_files(tmp_path)
    path.write_bytes(b"garbage")
    again = make_cache(tmp_path, metrics)
    assert not again.transfer(OLD, NEW)
    assert metrics.damaged == 1
    assert cache_files(tmp_path) == []


def test_a_crash_between_the_two_steps_loses_blocks_and_nothing_else(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    write_block(cache, OLD, 0, block_of(DATA, 0))
    cache.close()
    relabel(eviction.file_path(str(tmp_path), name_digest(OLD)), OLD, NEW)
    again = make_cache(tmp_path)
    assert read_block(again, OLD, 0) is None
    assert read_block(again, NEW, 0) is None
    write_block(again, OLD, 0, block_of(DATA, 0))
    assert read_block(again, OLD, 0) == block_of(DATA, 0)
