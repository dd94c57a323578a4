"""The block cache on real files: what is kept is answered whole or not at all, whatever happens to the files."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lakefs_fuse.blockcache import cache_directory as cache_files
from lakefs_fuse.blockcache import cache_file
from lakefs_fuse.blockcache.cache import BLOCK_BYTES, BlockCache, CacheState, Version, block_hash
from lakefs_fuse.blockcache.health import FAILED_RETRY_S, FULL_RETRY_S
from lakefs_fuse.errors import CacheError
from lakefs_fuse.metrics import CacheMetrics
from tests.blockcache.reading import MIB, block_of, content, make_cache, read_block, write_block, write_blocks
from tests.blockcache.reading import cache_files as files_in
from tests.fakes import FakeClock

SIZE = 2 * MIB + 777
DATA = content("blocks", SIZE)
VERSION = Version("dir/file", "etag-1", SIZE)


def fill(cache: BlockCache, version: Version = VERSION, data: bytes = DATA) -> None:
    for index in range(version.blocks):
        write_block(cache, version, index, block_of(data, index))


def test_blocks_come_back_and_absent_ones_do_not(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    assert read_block(cache, VERSION, 0) is None
    write_block(cache, VERSION, 2, block_of(DATA, 2))
    assert cache.read_blocks(VERSION, 0, 3) == [None, None, block_of(DATA, 2)]
    assert cache.has_blocks(VERSION, 0, 3) == [False, False, True]
    assert not cache.has_blocks(Version("dir/file", "etag-2", SIZE), 0, 3)[2]
    (path,) = files_in(tmp_path)
    assert path.stat().st_size == 2 * MIB + 4096 + 64 + 3 * (8 + 32 * 8)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_block_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    with pytest.raises(ValueError, match="cannot have"):
        write_block(cache, VERSION, 2, block_of(DATA, 1))
    assert read_block(cache, VERSION, 2) is None
    assert cache.statistics().state is CacheState.OK


def test_a_restart_keeps_blocks_and_a_clean_one_keeps_the_count(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache)
    used = cache.files.bytes_used
    cache.close()
    again = make_cache(tmp_path, scanned=False)
    assert again.counted
    assert again.files.bytes_used == used
    assert read_block(again, VERSION, 1) == block_of(DATA, 1)
    # No close: the next start has to count.
    crashed = make_cache(tmp_path, scanned=False)
    assert not crashed.statistics().counted
    crashed.scan()
    assert crashed.counted
    assert crashed.files.bytes_used == used == sum(path.stat().st_blocks * 512 for path in files_in(tmp_path))


def test_a_damaged_count_is_counted_again(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache)
    cache.close()
    (tmp_path / "usage").write_bytes(b"{ garbage")
    again = make_cache(tmp_path)
    assert again.files.bytes_used == cache.files.bytes_used


def test_the_scan_counts_each_file_once_while_others_write(tmp_path: Path) -> None:
    first = make_cache(tmp_path)
    for number in range(200):
        write_block(first, Version(f"k{number}", "e", 5000), 0, content(number, 5000))
    cache = make_cache(tmp_path, scanned=False)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set() or number < 300:
            number += 1
            write_block(cache, Version(f"k{number % 400}", "e", 5000), 0, content(number % 400, 5000))

    writer = threading.Thread(target=write)
    writer.start()
    cache.scan()
    stop.set()
    writer.join()
    assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in files_in(tmp_path))


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda path: flip(path, 5), {0}),
        (lambda path: flip(path, BLOCK_BYTES + 5), {1}),
        (lambda path: flip(path, 2 * MIB + 700), {2}),
        (lambda path: flip(path, 2 * MIB + 4096 + 64 + 9), {1}),
        (lambda path: flip(path, 2 * MIB + 4096 + 20), {0, 1, 2}),
        (lambda path: os.truncate(path, MIB), {0, 1, 2}),
        (lambda path: os.truncate(path, 0), {0, 1, 2}),
        (lambda path: os.truncate(path, 3 * MIB), {0, 1, 2}),
        (lambda path: path.write_bytes(b"garbage" * 1000), {0, 1, 2}),
    ],
)
def test_damage_is_found_counted_and_mended(tmp_path: Path, damage: Callable[[Path], None], lost: set[int]) -> None:
    cache = make_cache(tmp_path)
    fill(cache)
    cache.close()
    (path,) = files_in(tmp_path)
    damage(path)
    (tmp_path / "usage").unlink()
    metrics = CacheMetrics()
    again = make_cache(tmp_path, metrics)
    for _ in range(2):  # the second time it is absent, not damaged once more
        for index in range(3):
            assert read_block(again, VERSION, index) == (None if index in lost else block_of(DATA, index))
    assert metrics.damaged == 1
    fill(again)
    assert again.read_blocks(VERSION, 0, 3) == [block_of(DATA, index) for index in range(3)]
    assert metrics.damaged == 1
    assert again.files.bytes_used == sum(path.stat().st_blocks * 512 for path in files_in(tmp_path))


def test_a_file_changed_by_somebody_else_makes_the_count_doubtful(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    fill(cache)
    os.truncate(files_in(tmp_path)[0], MIB)
    cache.close()
    again = make_cache(tmp_path, scanned=False)
    assert again.counted
    assert read_block(again, VERSION, 0) is None
    again.close()
    third = make_cache(tmp_path, scanned=False)
    assert not third.statistics().counted
    third.scan()
    assert third.files.bytes_used == 0


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_a_file_under_another_versions_name_is_not_believed(tmp_path: Path) -> None:
    """File names are hashes without a key; whoever makes two collide gets a miss, not another file's bytes."""
    cache = make_cache(tmp_path)
    fill(cache)
    other = Version("other", "etag-1", SIZE)
    write_block(cache, other, 0, block_of(DATA, 1))
    cache.close()
    one, two = files_in(tmp_path)
    names = [cache_file.name_digest(VERSION).hex(), cache_file.name_digest(other).hex()]
    mine = one if one.name == names[0][4:] else two
    theirs = two if mine is one else one
    os.replace(theirs, mine)
    again = make_cache(tmp_path)
    assert read_block(again, VERSION, 0) is None


def test_two_open_versions_with_one_name_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "name_digest", lambda _: b"\x11" * 16)
    cache = make_cache(tmp_path)
    other = Version("other", "etag-1", SIZE)
    fill(cache)
    assert read_block(cache, other, 0) is None
    fill(cache)
    write_block(cache, other, 0, block_of(DATA, 1))
    assert read_block(cache, VERSION, 0) is None
    assert read_block(cache, other, 0) is None or read_block(cache, other, 0) == block_of(DATA, 1)


def test_adopt_makes_a_staged_file_the_cache_file(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache")
    fill(cache, data=content("older, to be replaced", SIZE))
    staged = tmp_path / "staged"
    staged.write_bytes(DATA + b"beyond the end")
    with staged.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(MIB), MIB)  # block 1 was punched out after its upload
    hashes = [block_hash(block_of(DATA, 0)), 0, block_hash(block_of(DATA, 2))]
    assert cache.adopt(staged, VERSION, hashes)
    assert not staged.exists()
    assert cache.read_blocks(VERSION, 0, 3) == [block_of(DATA, 0), None, block_of(DATA, 2)]
    assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in files_in(tmp_path / "cache"))
    with pytest.raises(ValueError, match="hashes"):
        cache.adopt(staged, VERSION, [1])


def test_adopt_removes_what_it_cannot_keep(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", bytes_max=MIB)
    staged = tmp_path / "staged"
    staged.write_bytes(DATA)
    assert not cache.adopt(staged, VERSION, [block_hash(block_of(DATA, index)) for index in range(3)])
    assert not staged.exists()
    assert cache.statistics().state is CacheState.FULL
    staged.write_bytes(b"")
    assert not cache.adopt(staged, Version("empty", "e", 0), [])
    assert not staged.exists()


def test_open_descriptors_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "FILES_OPEN_MAX", 8)
    before = len(os.listdir("/proc/self/fd"))
    cache = make_cache(tmp_path)
    for number in range(50):
        write_block(cache, Version(f"k{number}", "e", 10), 0, content(number, 10))
    assert cache.statistics().files_open == 8
    assert len(os.listdir("/proc/self/fd")) == before + 8
    assert all(read_block(cache, Version(f"k{n}", "e", 10), 0) == content(n, 10) for n in range(50))
    cache.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers, writers of the same blocks, drops and evictions: wrong bytes never, errors never."""
    monkeypatch.setattr(cache_files, "FILES_OPEN_MAX", 3)
    cache = make_cache(tmp_path, bytes_max=6 * MIB)
    versions = [Version(f"k{number}", "e", MIB + 100) for number in range(8)]
    data = [content(number, MIB + 100) for number in range(8)]
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            for step in range(60):
                number = (seed * 7 + step * 3) % 8
                index = step % 2
                write_block(cache, versions[number], index, block_of(data[number], index))
                block = read_block(cache, versions[number], index)
                if block is not None and block != block_of(data[number], index):
                    wrong.append(f"bytes of {number}")
                if step % 20 == seed:
                    cache.evict(1)
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.statistics().state is not CacheState.FAILED
    assert cache.files.bytes_used == sum(path.stat().st_blocks * 512 for path in files_in(tmp_path)) <= 6 * MIB


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, fail)


def test_a_full_disk_stops_writes_not_reads_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    cache = make_cache(tmp_path, scanned=False, clock=clock)
    write_block(cache, VERSION, 0, block_of(DATA, 0))
    cache.pin(VERSION)  # open, so that no room is made at its cost
    with monkeypatch.context() as patch:
        failing(patch, "pwrite", errno.ENOSPC)
        write_block(cache, VERSION, 1, block_of(DATA, 1))
        assert cache.statistics().state is CacheState.FULL
        assert cache.statistics().last_error == "No space left on device"
    assert read_block(cache, VERSION, 0) == block_of(DATA, 0)
    write_block(cache, VERSION, 1, block_of(DATA, 1))
    assert read_block(cache, VERSION, 1) is None, "not tried again at once"
    clock.advance(FULL_RETRY_S)
    write_block(cache, VERSION, 1, block_of(DATA, 1))
    assert cache.statistics().state is CacheState.OK
    assert read_block(cache, VERSION, 1) == block_of(DATA, 1)


def test_file_that_is_too_large_for_the_disk_costs_no_other_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path)
    write_block(cache, VERSION, 0, block_of(DATA, 0))
    with monkeypatch.context() as patch:
        failing(patch, "ftruncate", errno.EFBIG)
        write_block(cache, Version("large", "e", 1 << 40), 0, bytes(MIB))
    assert cache.state is CacheState.FULL
    assert cache.statistics().last_error == "File too large"
    assert read_block(cache, VERSION, 0) == block_of(DATA, 0)


WHOLE = Version("small", "etag", MIB + 777)
BOTH = [block_of(DATA, 0), block_of(DATA, 1)[:777]]


def test_adjacent_blocks_written_together_are_laid_out_like_single_ones(tmp_path: Path) -> None:
    blocks, one_by_one = make_cache(tmp_path / "blocks"), make_cache(tmp_path / "one")
    for index, data in enumerate(BOTH):
        write_block(one_by_one, WHOLE, index, data)
    write_blocks(blocks, WHOLE, 0, BOTH)
    for cache in (blocks, one_by_one):
        assert cache.read_blocks(WHOLE, 0, 2) == BOTH
    (one,), (other,) = files_in(tmp_path / "blocks"), files_in(tmp_path / "one")
    assert one.read_bytes() == other.read_bytes()
    assert blocks.files.bytes_used == one.stat().st_blocks * 512


def test_one_that_is_dropped_while_it_is_written_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(tmp_path)
    write = os.pwrite

    def drop(fd: int, data: bytes, offset: int) -> int:
        if offset == 0:
            cache.evict(1 << 40)
        return write(fd, data, offset)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwrite", drop)
    write_blocks(cache, WHOLE, 0, BOTH)
    assert cache.read_blocks(WHOLE, 0, 2) == [None, None]
    assert files_in(tmp_path) == []
    assert cache.files.bytes_used == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_quota_that_free_space_does_not_show_is_met_by_evicting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path)
    for number in range(4):
        write_block(cache, Version(f"k{number}", "e", MIB), 0, content(number, MIB))
    used = cache.files.bytes_used
    with monkeypatch.context() as patch:
        failing(patch, "pwrite", errno.EDQUOT)
        write_block(cache, VERSION, 0, block_of(DATA, 0))
    assert cache.state is CacheState.FULL
    assert used - 3 * MIB < cache.files.bytes_used <= used - MIB


def test_a_failing_disk_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    cache = make_cache(tmp_path, scanned=False, clock=clock)
    fill(cache)
    with monkeypatch.context() as patch:
        failing(patch, "pread", errno.EIO)
        assert read_block(cache, VERSION, 0) is None
    assert cache.statistics().state is CacheState.FAILED
    assert not cache.readable
    assert not cache.writable
    assert read_block(cache, VERSION, 0) is None
    clock.advance(FAILED_RETRY_S)
    assert read_block(cache, VERSION, 0) == block_of(DATA, 0)
    assert cache.statistics().state is CacheState.OK
    with monkeypatch.context() as patch:
        failing(patch, "pread", errno.EIO)
        assert read_block(cache, VERSION, 0) is None
    clock.set_wall(0)
    assert not cache.readable, "a clock that was set back neither shortens the pause nor lengthens it"
    clock.advance(FAILED_RETRY_S)
    assert read_block(cache, VERSION, 0) == block_of(DATA, 0)


def test_no_error_of_the_disk_leaves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("open", "pread", "pwrite", "ftruncate", "unlink", "rename", "makedirs", "fstat", "utime"):
        directory = tmp_path / name
        cache = make_cache(directory)
        write_block(cache, VERSION, 0, block_of(DATA, 0))
        staged = tmp_path / f"staged-{name}"
        staged.write_bytes(DATA)
        with monkeypatch.context() as patch:
            failing(patch, name, errno.EIO)
            write_block(cache, VERSION, 1, block_of(DATA, 1))
            write_block(cache, Version("new", "e", 10), 0, b"0123456789")
            cache.read_blocks(VERSION, 0, 3)
            cache.has_blocks(VERSION, 0, 3)
            cache.adopt(staged, VERSION, [0, 0, 0])
            cache.evict(1)
            cache.scan()
        assert read_block(cache, Version("other", "e", 10), 0) is None
        cache.close()


def test_an_unusable_directory_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match="cannot use the cache directory"):
        make_cache(tmp_path / "file" / "cache")
