"""Choice of the cache files to evict: approximate LRU without a list of the files.

The cache's directory has up to 4,096 directories of files (no more: each takes up a block of the disk, and making one
costs as much as making a file), each file's mtime is when it was last used. A sample is the files of some adjacent
directories, from a random one on; its oldest quarter goes. With few files the sample is all of them, and the choice
exact. Memory: one sample, whatever the size of the cache. Blocking, for worker threads;
`cache_directory.CacheDirectory` calls it with its files lock held. Directories that disappear during the scan are no
error.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lakefs_fuse.blockcache.cache_file import DamagedFile, punch, read_hashes, read_layout
from lakefs_fuse.blockcache.fetches import runs
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, BlockSet, block_range
from lakefs_fuse.environment import local_disk as disk

FAN_OUT = 1 << 12
SAMPLE_FILES = 32
EXAMINED_FILES_MAX = 1 << 14
"""If nearly all files are spared, at most this many are examined under the lock: that takes about 50 ms."""
LARGE_BYTES = 256 << 20
"""A larger file loses ranges instead of all blocks."""
RANGE_BYTES = 64 << 20
_DIRECTORY_CHARS, _NAME_CHARS = 3, 29


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cache file that may be evicted; ``digest`` is its name."""

    used_ns: int
    allocated_bytes: int
    path: str
    digest: bytes


def directory_number(digest: bytes) -> int:
    """Place of a file's directory in the order of `directories`."""
    return digest[0] << 4 | digest[1] >> 4


def directory_path(root: str, number: int) -> str:
    """Path of the directory with this number."""
    return f"{root}/{number:03x}"


def file_path(root: str, digest: bytes) -> str:
    """Path of the file with this name digest."""
    name = digest.hex()
    return f"{root}/{name[:_DIRECTORY_CHARS]}/{name[_DIRECTORY_CHARS:]}"


def directories(root: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Number and path of each existing directory, in order, from number ``start`` and wrapping around."""
    numbers = _numbers(root)
    first = bisect_left(numbers, start)
    for number in (*numbers[first:], *numbers[:first]):
        yield number, directory_path(root, number)


def directories_from(root: str, first: int, count: int) -> list[tuple[int, str]]:
    """Number and path of the first ``count`` directories there are from number ``first`` on."""
    numbers = _numbers(root)
    begin = bisect_left(numbers, first)
    return [(number, directory_path(root, number)) for number in numbers[begin : begin + count]]


def remove_earlier(root: str) -> None:
    """Delete files of an earlier layout (`ab/cd/…`), which would be neither read nor evicted."""
    for name in os.listdir(root):
        if len(name) == 2 and not set(name) - set("0123456789abcdef"):
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)


def files(path: str, number: int) -> Iterator[Candidate]:
    """The cache files of one directory."""
    try:
        entries = os.scandir(path)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            digest = _digest(number, entry.name)
            if digest is None:
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield Candidate(found.st_mtime_ns, disk.stat_allocated_bytes(found), entry.path, digest)


def oldest(root: str, rng: random.Random, spared: Callable[[Candidate], bool]) -> list[Candidate]:
    """The next files to evict, oldest first; none if all examined files are ``spared``. Raises OSError."""
    sample: list[Candidate] = []
    examined = 0
    for number, path in directories(root, rng.randrange(FAN_OUT)):
        found = list(files(path, number))
        sample += (candidate for candidate in found if not spared(candidate))
        examined += len(found)
        if len(sample) >= SAMPLE_FILES or examined >= EXAMINED_FILES_MAX:
            break
    sample.sort(key=lambda candidate: candidate.used_ns)
    return sample[: max(1, len(sample) // 4)]


def punch_range(candidate: Candidate, rng: random.Random) -> bool:
    """Evict one range of a large file; False where it must be evicted whole. Raises OSError."""
    try:
        fd = os.open(candidate.path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        layout, _ = read_layout(fd)
        step = RANGE_BYTES // BLOCK_BYTES
        starts = range(0, layout.blocks, step)
        turn = rng.randrange(len(starts))
        for start in (*starts[turn:], *starts[:turn]):
            stop = min(start + step, layout.blocks)
            if any(read_hashes(fd, layout, start, stop)):
                return punch(fd, layout, start, stop)
        return False
    except DamagedFile:
        return False
    finally:
        os.close(fd)


def punch_blocks(path: str, blocks: BlockSet) -> bool:
    """Free the space of these blocks of a file; False, without a change, if it has no other block, so that the file can
    be removed. Raises OSError."""
    fd = os.open(path, os.O_RDWR)
    try:
        layout, _ = read_layout(fd)
        here = [expected != 0 for expected in read_hashes(fd, layout, 0, layout.blocks)]
        digits = f"{blocks & block_range(0, layout.blocks):0{layout.blocks}b}"  # the last one is of block 0
        gone = [is_here and digit == "1" for is_here, digit in zip(here, reversed(digits), strict=True)]
        if gone == here:
            return False
        for first, stop in runs(0, gone, layout.blocks):
            punch(fd, layout, first, stop)
        return True
    except DamagedFile:
        return False
    finally:
        os.close(fd)


def _numbers(root: str) -> list[int]:
    return sorted(number for name in os.listdir(root) if (number := _number(name)) is not None)


def _number(name: str) -> int | None:
    try:
        number = int(name, 16)
    except ValueError:
        return None
    return number if name == f"{number:03x}" else None


def _digest(number: int, name: str) -> bytes | None:
    if len(name) != _NAME_CHARS:
        return None
    try:
        return bytes.fromhex(f"{number:03x}{name}")
    except ValueError:
        return None
