"""The files of the block cache as a set: opened, created, removed, counted, kept within the bounds.

What always holds:

* memory does not grow with the number of files: at most ``FILES_OPEN_MAX`` idle descriptors, one eviction sample, and a
  filter that rules out most absent files (`PresenceFilter`);
* a file counts with its disk space from the moment its directory was scanned;
* files of pinned (open) versions, and kept blocks, are not evicted.

Calls block and are for worker threads, many concurrently; `pin`, `unpin`, `reading_now` and the gauges are quick enough
for the trio thread. There are two locks, always acquired in this order: ``_files_lock`` for opening, creating,
replacing and removing files (held during such disk operations, and by `scan` for the stats of 1/256 of the files), then
``_lock`` for what is in memory (held for one stat at most). Block data moves under neither. Errors of the disk are
raised as OSError.

A crash leaves the files as they are. Only the count of the space is lost, and counted again by `scan`.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path

import msgspec
import xxhash

from lakefs_fuse.blockcache import eviction
from lakefs_fuse.blockcache.cache_file import CacheFile, DamagedFile, name_digest, relabel, seal
from lakefs_fuse.blockcache.object_version import BlockSet, Version
from lakefs_fuse.environment import local_disk
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.disk import Disk
from lakefs_fuse.errors import MALFORMED
from lakefs_fuse.metrics import CacheMetrics

_log = logging.getLogger(__name__)

NS = 1_000_000_000
FILES_OPEN_MAX = 256
TOUCH_S = 60.0
"""Minimum interval between two writes of a file's time of use."""
SLACK_BYTES_MAX = 256 << 20
"""A write without space frees this much more (or 1/64 of the cache), so that the next one need not evict."""
WRITTEN_BYTES_MAX = 32 << 20
"""Bytes that are being written count twice against the free space of the disk: as reserved, and as written."""
EVICTIONS_MAX = 3
"""Attempts of one write to free space: another write may have used the freed space."""
KEPT_EXAMINED_MAX = 256
"""Files with kept blocks that are searched for other blocks at a time: about 10 ms."""
SCAN_DIRECTORIES = 16
"""Counted under one hold of the files lock; of those that exist."""
PRESENCE_BITS = 1 << 24
"""Of the filter."""
PRESENCE_BYTES = PRESENCE_BITS // 8
_USAGE_NAME, _PRESENCE_NAME = "usage", "presence"


class _Usage(msgspec.Struct, frozen=True):
    """``presence`` is the checksum that its `save` returned: both belong together."""

    bytes_used: int
    presence: int


@contextmanager
def _locked_nowait(lock: threading.Lock) -> Iterator[None]:
    """Hold the lock. Raises BlockingIOError if another thread has it."""
    if not lock.acquire(blocking=False):
        raise BlockingIOError
    try:
        yield
    finally:
        lock.release()


class CacheDirectory:
    """See the module's head."""

    def __init__(
        self,
        root: str,
        *,
        bytes_max: int,
        free_bytes_min: int,
        metrics: CacheMetrics,
        clock: Clock,
        rng: random.Random,
        disk: Disk,
    ) -> None:
        self.bytes_max = bytes_max
        self._free_bytes_min = free_bytes_min
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._disk = disk
        self._root = root
        self._open_max = min(FILES_OPEN_MAX, disk.descriptors_max)
        self._files_lock = threading.Lock()
        self._lock = threading.Lock()
        self._open: OrderedDict[bytes, CacheFile] = OrderedDict()
        self._pins: dict[bytes, int] = {}
        self._kept: dict[bytes, BlockSet] = {}
        self._spared_since_ns: int | None = None
        self._presence = PresenceFilter()
        self._bytes_used = 0
        self._bytes_reserved = 0
        self._counted_up_to = 0
        self._doubtful = False
        """Another process changed a file: count again at the next start."""
        self.closed = False
        os.makedirs(root, mode=0o700, exist_ok=True)
        self._load_usage()

    # -- gauges and pins

    @property
    def bytes_used(self) -> int:
        """Disk space of the files, as far as counted."""
        return max(0, self._bytes_used)

    @property
    def counted(self) -> bool:
        """Whether `scan` is not needed (any more)."""
        return self._counted_up_to == eviction.FAN_OUT

    @property
    def files_open(self) -> int:
        """Descriptors held."""
        return len(self._open)

    @property
    def versions_pinned(self) -> int:
        """Versions that eviction spares."""
        return len(self._pins)

    def may_have(self, version: Version) -> bool:
        """Whether a file of the version may exist; True until all files are counted. False: there is none."""
        return not self.counted or self._presence.may_have(name_digest(version))

    def pin(self, version: Version) -> None:
        """Do not evict the version until as many calls of `unpin`. Lost with the process."""
        digest = name_digest(version)
        with self._lock:
            self._pins[digest] = self._pins.get(digest, 0) + 1

    def unpin(self, version: Version) -> None:
        """Undo one `pin`. Raises KeyError without one."""
        digest = name_digest(version)
        with self._lock:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]

    def keep(self, blocks: dict[bytes, BlockSet]) -> None:
        """Do not evict these blocks, by the name digests of their versions; replaces the previous set. Lost with the
        process."""
        with self._lock:
            self._kept = blocks

    def kept_blocks(self, version: Version) -> BlockSet:
        """The blocks of a version that `keep` set."""
        return self._kept.get(name_digest(version), 0)

    def spare_since(self, since_ns: int | None) -> None:
        """Do not evict files used since this time (wall clock); None ends that."""
        self._spared_since_ns = since_ns

    @property
    def capacity_bytes(self) -> int:
        """The space that the files may use if all others are evicted: the bound, or the space of the disk."""
        with self._lock:
            free = self._disk.free_bytes(self._root) - self._free_bytes_min - WRITTEN_BYTES_MAX
            return min(self.bytes_max, max(0, self.bytes_used + free))

    def count_damaged(self) -> None:
        """A block or file was found damaged."""
        with self._lock:
            self._metrics.damaged += 1

    # -- files

    def reading(self, version: Version) -> AbstractContextManager[CacheFile | None]:
        """The version's file, kept open for the block; None where there is none, or a damaged one, now removed."""
        file = self._acquire_open(version, name_digest(version))
        if file is None:
            with self._files_lock:
                file = self._open_file(version)
        return self._in_use(file)

    def reading_now(self, version: Version, *, prompt: bool) -> AbstractContextManager[CacheFile | None]:
        """As `reading`, for the trio thread. Raises BlockingIOError instead of waiting for a lock, or for a disk
        that is not ``prompt``."""
        return self._in_use(self._ready(version, prompt))

    @contextmanager
    def _in_use(self, file: CacheFile | None) -> Iterator[CacheFile | None]:
        try:
            if file is not None:
                self._touch(file)
            yield file
        finally:
            if file is not None:
                self._release(file)

    def _ready(self, version: Version, prompt: bool) -> CacheFile | None:
        digest = name_digest(version)
        with _locked_nowait(self._lock):
            file = self._open.get(digest)
            if file is not None:
                if file.version != version or (not prompt and self._is_due(file)):
                    raise BlockingIOError
                file.begin_use()
                self._open.move_to_end(digest)
                return file
        if not prompt:
            raise BlockingIOError
        with _locked_nowait(self._files_lock):
            return self._open_file(version)

    def inspect(self, version: Version, *, is_use: bool) -> tuple[BlockSet, int]:
        """Cached blocks of the version, by the index of its file, and when they were last used (wall clock in ns).
        ``is_use`` sets that to now. The file stays closed. Raises OSError."""
        if not self.may_have(version):
            return 0, 0
        file = CacheFile.open_quietly(eviction.file_path(self._root, name_digest(version)), version)
        if file is None:
            return 0, 0
        try:
            if is_use:
                self._touch(file)
            return file.block_set(), int(file.touched_s * NS)
        finally:
            file.close()

    @contextmanager
    def writing(self, version: Version, *, reserved: int = 0) -> Iterator[CacheFile]:
        """The version's file for the block, created if there is none. Its size is counted again at the end, instead of
        the ``reserved`` bytes."""
        file = self._acquire_open(version, name_digest(version))
        if file is None:
            with self._files_lock:
                file = self._open_file(version) or self._made_file(version)
        try:
            yield file
        finally:
            self._account(file, reserved)
            self._release(file)

    def adopt(self, path: str, version: Version, hashes: Sequence[int]) -> None:
        """Make ``path``, which holds the version's bytes, its file by renaming it. Raises OSError, ENOSPC too."""
        digest = name_digest(version)
        fd = os.open(path, os.O_RDWR)
        try:
            seal(fd, version, hashes)
            allocated = local_disk.allocated_bytes(fd)
        finally:
            os.close(fd)
        with self._files_lock:
            excess = self._excess(allocated, 0)
            if excess > 0 and self._evict(excess) < excess:
                raise OSError(errno.ENOSPC, "no room in the cache for a file just written")
            self._remove(digest)
            self._move_in(path, digest)
            with self._lock:
                self._count(digest, allocated)

    def transfer(self, old: Version, new: Version) -> bool:
        """Make the file of ``old``, in use or not, that of ``new``; False where there is none. Raises OSError."""
        source, target = name_digest(old), name_digest(new)
        path = eviction.file_path(self._root, source)
        with self._files_lock:
            try:
                relabel(path, old, new)
            except FileNotFoundError:
                return False
            except DamagedFile as error:
                _log.warning("block cache: file of %s dropped: %s", old.key, error)
                self._remove(source)
                self.count_damaged()
                return False
            self._remove(target)
            allocated = local_disk.allocated_bytes(self._move_in(path, target))
            with self._lock:
                file = self._open.pop(source, None)
                if source in self._kept:
                    self._kept[target] = self._kept.pop(source)
                if file is not None:  # its readers and writers continue: the bytes are the same
                    file.rename(new, target)
                    self._open[target] = file
                    allocated = file.accounted_bytes  # what its writers added since is counted when they end
                self._count(source, -allocated)
                self._count(target, allocated)
        return True

    def _move_in(self, path: str, digest: bytes) -> str:
        """Rename ``path`` to the file of this name, under the files lock; returns its new path. Raises OSError."""
        target = eviction.file_path(self._root, digest)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        with self._lock:
            self._presence.add(digest)
        os.rename(path, target)
        return target

    def close(self) -> None:
        """Close the files and save the count for the next start. No other call may be running or follow."""
        with self._files_lock, self._lock:
            if self.closed:
                return
            self.closed = True
            for file in self._open.values():
                file.close()
            self._open.clear()
        if self.counted and not self._doubtful:
            saved = self._presence.save(f"{self._root}/{_PRESENCE_NAME}")
            path = f"{self._root}/{_USAGE_NAME}"
            Path(path + ".new").write_bytes(msgspec.json.encode(_Usage(self.bytes_used, saved)))
            os.replace(path + ".new", path)

    def _acquire_open(self, version: Version, digest: bytes) -> CacheFile | None:
        with self._lock:
            file = self._open.get(digest)
            if file is None or file.version != version:  # names are hashes, for which an attacker may create collisions
                return None
            file.begin_use()
            self._open.move_to_end(digest)
            return file

    def _open_file(self, version: Version, *, look: bool = False) -> CacheFile | None:
        """The file on disk, in use; under the files lock. ``look``: ask the disk even if `may_have` is false."""
        digest = name_digest(version)
        file = self._acquire_open(version, digest)
        if file is not None or not (look or self.may_have(version)):
            return file
        try:
            file = CacheFile.open(eviction.file_path(self._root, digest), version, digest)
        except DamagedFile as error:
            _log.warning("block cache: file of %s dropped: %s", version.key, error)
            self._doubtful = True
            self._remove(digest)
            self.count_damaged()
        if file is not None:
            self._keep_open(file)
        return file

    def _made_file(self, version: Version) -> CacheFile:
        """Create the file, under the files lock; another process may have created it since."""
        try:
            return self._create_file(version)
        except FileExistsError:
            self._doubtful = True
            return self._open_file(version, look=True) or self._create_file(version)

    def _create_file(self, version: Version) -> CacheFile:
        """Create the file, under the files lock, if there is none."""
        digest = name_digest(version)
        with self._lock:
            self._presence.add(digest)
        file = CacheFile.create(eviction.file_path(self._root, digest), version, digest, self._now_s())
        with self._lock:
            self._count(digest, file.accounted_bytes)
        self._keep_open(file)
        return file

    def _keep_open(self, file: CacheFile) -> None:
        with self._lock:
            file.begin_use()
            self._open[file.digest] = file
            surplus = max(0, len(self._open) - self._open_max)
            idle = list(islice((other for other in self._open.values() if other.is_idle), surplus))
            for other in idle:
                del self._open[other.digest]
        for other in idle:
            other.close()

    def _release(self, file: CacheFile) -> None:
        with self._lock:
            close = file.end_use()
        if close:
            self._disk.close_removed(file.fd)

    def _is_due(self, file: CacheFile) -> bool:
        return abs(self._now_s() - file.touched_s) >= TOUCH_S

    def _now_s(self) -> float:
        return self._clock.wall_ns() / NS

    def _touch(self, file: CacheFile) -> None:
        if self._is_due(file):
            file.touch(self._now_s())

    def _remove(self, digest: bytes) -> int:
        """Remove a file, in use or not, under the files lock; returns bytes freed."""
        path = eviction.file_path(self._root, digest)
        with self._lock:
            file = self._open.pop(digest, None)
            if file is not None:
                file.mark_removed()
            idle = file is not None and file.is_idle
        try:
            allocated = local_disk.allocated_bytes(path)
            os.unlink(path)
        except FileNotFoundError:
            allocated = 0
        finally:
            if idle and file is not None:
                file.close()
        with self._lock:
            self._count(digest, -(file.accounted_bytes if file is not None else allocated))
        try:
            os.rmdir(os.path.dirname(path))
        except OSError:
            pass  # not empty, as a rule
        return allocated

    # -- space

    def reserve(self, wanted: int, *, spared_s: float = 0) -> bool:
        """Reserve space for a write until `unreserve`. It evicts if necessary, except files used in the last
        ``spared_s``, or nothing if that is infinite; False if that is not enough."""
        if self._reserve(wanted):
            return True
        if spared_s == math.inf:
            return False
        with self._files_lock:
            slack = min(SLACK_BYTES_MAX, self.bytes_max // 64)
            for _ in range(EVICTIONS_MAX):
                if self._reserve(wanted):
                    return True
                if not self._evict(self._excess(wanted, wanted) + slack, spared_s):
                    break
            return self._reserve(wanted)

    def unreserve(self, wanted: int) -> None:
        """End a reservation whose bytes were not written."""
        with self._lock:
            self._bytes_reserved -= wanted

    def evict(self, wanted: int) -> int:
        """Free what the bounds ask for, and at least ``wanted`` bytes if there is so much; returns bytes freed."""
        with self._files_lock:
            return self._evict(max(wanted, self._excess(0, 0)))

    def scan(self) -> None:
        """Count the space in use, unless the last `close` saved the count. All other calls may run at the same time."""
        with self._lock:
            if self.counted:
                return
            self._counted_up_to = self._bytes_used = 0
        while self._counted_up_to < eviction.FAN_OUT:
            with self._files_lock:
                if self.closed:
                    return
                some = eviction.directories_from(self._root, self._counted_up_to, SCAN_DIRECTORIES)
                for number, path in some:
                    self._add_found(list(eviction.files(path, number)), number + 1)
                if len(some) < SCAN_DIRECTORIES:
                    self._add_found([], eviction.FAN_OUT)
        eviction.remove_earlier(self._root)

    def _add_found(self, files: Sequence[eviction.Candidate], counted_up_to: int) -> None:
        """Count files, under the files lock, so that none was created, removed or opened since they were found. The
        growth of an open file since then is already counted, or will be when its writer ends."""
        with self._lock:
            for found in files:
                file = self._open.get(found.digest)
                self._bytes_used += found.allocated_bytes if file is None else file.accounted_bytes
                self._presence.add(found.digest)
            self._counted_up_to = counted_up_to

    def _load_usage(self) -> None:
        path = Path(self._root, _USAGE_NAME)
        try:
            usage = msgspec.json.decode(path.read_bytes(), type=_Usage)
        except FileNotFoundError:
            return
        except MALFORMED:
            path.unlink()
            return
        path.unlink()  # so that the next start detects a crash from now on
        if not self._presence.load(f"{self._root}/{_PRESENCE_NAME}", usage.presence):
            return
        self._bytes_used = usage.bytes_used
        self._counted_up_to = eviction.FAN_OUT

    def _count(self, digest: bytes, change: int) -> None:
        """Add to the space in use, under ``_lock``, unless the file's directory is still to be scanned."""
        if eviction.directory_number(digest) < self._counted_up_to:
            self._bytes_used += change

    def _account(self, file: CacheFile, reserved: int) -> None:
        with self._lock:
            self._bytes_reserved -= reserved
            if not file.dead:
                self._count(file.digest, file.set_allocated(local_disk.allocated_bytes(file.fd)))

    def _excess(self, room: int, disk_room: int) -> int:
        """Bytes to free before the cache may grow by ``room``; the disk grows by ``disk_room``."""
        over = self._bytes_used + self._bytes_reserved + room - self.bytes_max
        short = self._free_bytes_min + self._bytes_reserved + disk_room - self._disk.free_bytes(self._root)
        return max(over, short)

    def has_room(self, wanted: int) -> bool:
        """Whether this many bytes fit without eviction; False until all files are counted."""
        with self._lock:
            return self.counted and self._excess(wanted, wanted) <= 0

    def _reserve(self, wanted: int) -> bool:
        with self._lock:
            if self._excess(wanted, wanted) > 0:
                return False
            self._bytes_reserved += wanted
            return True

    def _is_spared(self, candidate: eviction.Candidate) -> bool:
        with self._lock:
            since_ns = self._spared_since_ns
            if candidate.digest in self._pins or candidate.digest in self._kept:
                return True
            return since_ns is not None and candidate.used_ns >= since_ns

    def _evict(self, wanted: int, spared_s: float = 0) -> int:
        """Free at least ``wanted`` bytes if possible, under the files lock. With ``spared_s`` only of files that were
        not used for this time, as long as each sample contains some."""
        freed, latest_ns = 0, (self._clock.wall_ns() - int(spared_s * NS) if spared_s else None)
        while freed < wanted:
            victims = eviction.oldest(self._root, self._rng, self._is_spared)
            if latest_ns is not None:
                victims = [victim for victim in victims if victim.used_ns <= latest_ns]
            if not victims:
                freed += 0 if spared_s else self._evict_beside_kept(wanted - freed)
                break
            for victim in victims:
                if freed < wanted:
                    freed += self._evict_one(victim)
        with self._lock:
            self._metrics.evicted_bytes += freed
        return freed

    def _evict_beside_kept(self, wanted: int) -> int:
        """Free blocks that are not kept, in files with kept blocks. `keep` may be called at the same time."""
        freed, digests = 0, list(self._kept)
        start = self._rng.randrange(len(digests)) if digests and self._spared_since_ns is None else len(digests)
        for digest in digests[start : start + KEPT_EXAMINED_MAX]:
            with self._lock:
                kept = 0 if digest in self._pins else self._kept.get(digest, 0)
            if freed < wanted and kept:
                freed += self._drop(digest, ~kept)
        return freed

    def drop(self, version: Version, blocks: BlockSet) -> int | None:
        """Remove these blocks, unless they are kept; returns the bytes freed, or None if the version is pinned. Raises
        OSError."""
        digest = name_digest(version)
        with self._files_lock:
            with self._lock:
                if digest in self._pins:
                    return None
                kept = self._kept.get(digest, 0)
            if not blocks & ~kept:
                return 0
            is_all = not kept and blocks.bit_count() == version.blocks
            freed = self._remove(digest) if is_all else self._drop(digest, blocks & ~kept)
            with self._lock:
                self._metrics.evicted_bytes += freed
            return freed

    def _drop(self, digest: bytes, blocks: BlockSet) -> int:
        """Under the files lock; returns bytes freed."""
        path = eviction.file_path(self._root, digest)
        before = local_disk.allocated_bytes(path) if os.path.exists(path) else 0
        if not before or not eviction.punch_blocks(path, blocks):
            return self._remove(digest) if before else 0
        with self._lock:
            now, file = local_disk.allocated_bytes(path), self._open.get(digest)
            self._count(digest, file.set_allocated(now) if file else now - before)
        return before - now

    def _evict_one(self, victim: eviction.Candidate) -> int:
        if victim.allocated_bytes > eviction.LARGE_BYTES and eviction.punch_range(victim, self._rng):
            with self._lock:
                now = local_disk.allocated_bytes(victim.path)
                file = self._open.get(victim.digest)
                self._count(victim.digest, file.set_allocated(now) if file else now - victim.allocated_bytes)
            if now < victim.allocated_bytes:
                return victim.allocated_bytes - now
        return self._remove(victim.digest)


class PresenceFilter:
    """A filter in memory of the versions that have a file in the cache, so that a miss costs no disk access.

    What always holds (*no false negatives*): a version with a file is never reported absent. One without may be
    reported present, more often the more files were made since the directory was last scanned: 1 in 16 after a million.
    So is one whose file was evicted: only the disk has the exact answer. The filter has a fixed size. Names of files
    are hashes already, so their own bits are used. `add` is called under a lock, `may_have` from any thread."""

    def __init__(self) -> None:
        self._bits = bytearray(PRESENCE_BYTES)

    def add(self, digest: bytes) -> None:
        """Add the file of this name, which exists or is about to be created."""
        place = _place(digest)
        self._bits[place >> 3] |= 1 << (place & 7)

    def may_have(self, digest: bytes) -> bool:
        """False: no file of this name is there."""
        place = _place(digest)
        return self._bits[place >> 3] >> (place & 7) & 1 == 1

    def save(self, path: str) -> int:
        """Write the filter to a file; returns a checksum for `load`. Raises OSError."""
        with open(path, "wb") as file:
            file.write(self._bits)
        return xxhash.xxh3_64_intdigest(self._bits)

    def load(self, path: str, saved: int) -> bool:
        """Read what `save` wrote, with checksum ``saved``; False, without a change, where it is missing or differs.
        The file is deleted, because it will soon be out of date. Raises OSError."""
        try:
            with open(path, "rb") as file:
                bits = file.read()
            os.unlink(path)
        except FileNotFoundError:
            return False
        if len(bits) != PRESENCE_BYTES or xxhash.xxh3_64_intdigest(bits) != saved:
            return False
        self._bits[:] = bits
        return True


def _place(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") % PRESENCE_BITS
