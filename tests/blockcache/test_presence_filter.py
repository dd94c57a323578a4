"""What is not in the cache is known without the disk, and what is there is never taken for absent."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from lakefs_fuse.blockcache import eviction
from lakefs_fuse.blockcache.cache import BlockCache, CacheState, Version
from lakefs_fuse.blockcache.cache_directory import PRESENCE_BITS, SCAN_DIRECTORIES, PresenceFilter
from lakefs_fuse.blockcache.cache_file import name_digest
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.vfs import open as opening
from lakefs_fuse.vfs.open import begin_counting
from tests.blockcache.reading import MIB, cache_files, content, make_cache, read_block, write_block


def small(number: int) -> Version:
    return Version(f"k{number}", "e", 100)


def number_of(version: Version) -> int:
    return eviction.directory_number(name_digest(version))


def keep(cache: BlockCache, number: int) -> None:
    write_block(cache, small(number), 0, content(number, 100))


def test_all_that_was_added_may_be_there_and_nearly_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(1)
    here, elsewhere = [[rng.randbytes(16) for _ in range(20_000)] for _ in range(2)]
    presence = PresenceFilter()
    for digest in here:
        presence.add(digest)
    again = PresenceFilter()
    saved = presence.save(str(tmp_path / "presence"))
    assert again.load(str(tmp_path / "presence"), saved)
    for each in (presence, again):
        assert all(each.may_have(digest) for digest in here)
        assert sum(each.may_have(digest) for digest in elsewhere) < 3 * 20_000 * 20_000 / PRESENCE_BITS
    assert not again.load(str(tmp_path / "presence"), saved), "it was there for one start"


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: b"",
        lambda saved: saved[:-1],
        lambda saved: saved + b"\0",
        lambda saved: bytes(len(saved)),
        lambda saved: saved[:-1] + b"\1",
        lambda saved: saved[:1000] + b"\1" + saved[1001:],
    ],
)
def test_what_is_not_as_it_was_saved_is_not_believed(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "presence"
    saved = PresenceFilter()
    saved.add(bytes(16))
    answer = saved.save(str(path))
    path.write_bytes(damage(path.read_bytes()))
    presence = PresenceFilter()
    assert not presence.load(str(path), answer)
    assert not presence.may_have(bytes(16))
    assert not path.exists()


def test_a_file_that_somebody_else_put_there_is_no_failure(tmp_path: Path) -> None:
    cache, other = make_cache(tmp_path), make_cache(tmp_path)
    keep(other, 0)
    assert read_block(cache, small(0), 0) is None, "it does not know"
    keep(cache, 0)
    assert cache.state is CacheState.OK
    assert read_block(cache, small(0), 0) == content(0, 100)
    keep(other, 1)
    for path in cache_files(tmp_path):
        path.write_bytes(b"no cache file")
    keep(cache, 1)
    assert cache.state is CacheState.OK
    assert read_block(cache, small(1), 0) == content(1, 100)
    cache.close()
    assert not make_cache(tmp_path, scanned=False).counted


def test_what_is_not_there_is_known_once_the_cache_is_counted(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, scanned=False)
    assert cache.may_have(small(0)), "not known yet"
    cache.scan()
    assert not cache.may_have(small(0))
    keep(cache, 0)
    assert cache.may_have(small(0))
    assert not cache.may_have(small(1))


def test_it_is_known_after_a_clean_end_and_found_out_after_another(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    keep(cache, 0)
    staged = tmp_path / "staged"
    staged.write_bytes(bytes(100))
    assert cache.adopt(staged, small(1), [7])
    keep(cache, 2)
    assert cache.transfer(small(2), small(3))
    for _ in range(2):
        cache.close()
        cache = make_cache(tmp_path, scanned=False)
        assert [cache.may_have(small(number)) for number in (0, 1, 3, 4)] == [True, True, True, False]
    crashed = make_cache(tmp_path, scanned=False)
    assert crashed.may_have(small(4)), "not known yet"
    crashed.scan()
    assert [crashed.may_have(small(number)) for number in range(5)] == [True, True, False, True, False]
    crashed.close()
    os.unlink(tmp_path / "presence")
    lost = make_cache(tmp_path, scanned=False)
    assert not lost.counted
    assert lost.may_have(small(4))


def test_files_made_while_it_is_counted_are_known(tmp_path: Path) -> None:
    before = make_cache(tmp_path)
    for number in range(300):
        keep(before, number)
    cache = make_cache(tmp_path, scanned=False)
    wrong: list[int] = []

    def look(begin: int) -> None:
        for number in range(begin, begin + 300):
            keep(cache, 1000 + number)
            if not (cache.may_have(small(1000 + number)) and cache.may_have(small(number % 300))):
                wrong.append(number)

    threads = [threading.Thread(target=look, args=(begin,)) for begin in (0, 300)]
    for thread in threads:
        thread.start()
    cache.scan()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.counted
    assert all(cache.may_have(small(number)) for number in (*range(300), *range(1000, 1600)))
    assert not cache.may_have(small(999_999))
    assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in cache_files(tmp_path))


def test_where_an_earlier_layout_had_files_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "ab" / "cd").mkdir(parents=True)
    (tmp_path / "ab" / "cd" / ("0" * 28)).write_bytes(bytes(MIB))
    (tmp_path / "no").mkdir()
    make_cache(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["no"]


def test_a_scan_that_failed_is_not_believed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that failed at its very end."""
    first = eviction.FAN_OUT - SCAN_DIRECTORIES
    keep(make_cache(tmp_path), next(n for n in itertools.count() if number_of(small(n)) >= first))
    (last,) = {path.parent for path in cache_files(tmp_path)}
    again = make_cache(tmp_path, scanned=False)
    scandir = os.scandir

    def fail(path: str) -> Iterator[os.DirEntry[str]]:
        if path == str(last):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        again.scan()
    assert not again.counted
    again.close()
    assert not make_cache(tmp_path, scanned=False).counted


async def test_scan_that_failed_is_repeated_until_all_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(make_cache(tmp_path), 0)
    cache, calls = make_cache(tmp_path, scanned=False), list[None]()
    directories_from = eviction.directories_from

    def fail_twice(root: str, first: int, count: int) -> list[tuple[int, str]]:
        calls.append(None)
        if len(calls) <= 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return directories_from(root, first, count)

    monkeypatch.setattr(eviction, "directories_from", fail_twice)
    monkeypatch.setattr(opening, "FAILED_RETRY_S", 0.01)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            begin_counting(cache, nursery, WorkerThreads())
    assert cache.counted
    assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in cache_files(tmp_path)) > 0


def test_scan_lets_others_pin_and_write_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(make_cache(tmp_path), 0)
    large, ended = Version("large", "e", 2 * MIB), list[bool]()
    cache = make_cache(tmp_path, scanned=False)
    write_block(cache, large, 0, bytes(MIB))
    files = eviction.files

    def pin_and_write(number: int) -> None:
        cache.pin(large)
        cache.unpin(large)
        if number == number_of(large):
            write_block(cache, large, 1, bytes(MIB))

    def found(path: str, number: int) -> list[eviction.Candidate]:
        some = list(files(path, number))
        thread = threading.Thread(target=pin_and_write, args=(number,))
        thread.start()
        thread.join(2)
        ended.append(not thread.is_alive())
        return some

    monkeypatch.setattr(eviction, "files", found)
    cache.scan()
    assert len(ended) == 2
    assert all(ended)
    assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in cache_files(tmp_path)) > 2 * MIB


def test_scan_lists_the_root_once_for_some_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(SCAN_DIRECTORIES + 1):
        (tmp_path / f"{number * 200:03x}").mkdir()
    cache, listed = make_cache(tmp_path, scanned=False), list[str]()
    listdir = os.listdir

    def counted(path: str) -> list[str]:
        listed.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    cache.scan()
    assert cache.counted
    assert len(listed) == 3  # and once for an earlier layout


def test_a_count_of_an_earlier_layout_is_not_believed(tmp_path: Path) -> None:
    make_cache(tmp_path).close()
    (tmp_path / "usage").write_bytes(b'{"bytes_used":4096}')
    assert not make_cache(tmp_path, scanned=False).counted
