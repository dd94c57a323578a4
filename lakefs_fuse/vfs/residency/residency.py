"""Warming, inspection, eviction and pins of the block cache by path: what `lakefs-fuse cache` asks of a mount.

A warm walks its files twice: once to count what is missing and whether it fits, once to fetch it, some thousand objects
at a time, so that memory does not grow with the number of files. It begins only if all of it fits into the cache beside
what cannot be evicted, or is told to take as much as fits. One warm runs at a time, the others wait for their turn.

What always holds (*a warm evicts nothing of its own*): while it runs, blocks used since it began are not evicted,
including those that it found in the cache. Parts of the daemon call `Residency.warm`; tasks of its trio loop. A crash
leaves the blocks that were fetched, and a second warm asks for the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import trio

from lakefs_fuse.blockcache.object_version import BlockSet, Extent, Version, set_bytes
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.blockcache.warmer import Warmer, disk_bytes, with_rest_of_packs
from lakefs_fuse.errors import CacheError, LakeError
from lakefs_fuse.metrics import Warming, WarmMetrics
from lakefs_fuse.quantity import counted
from lakefs_fuse.sync.byte_rate import ByteRate
from lakefs_fuse.vfs.residency.pins import Pins
from lakefs_fuse.vfs.residency.selection import (
    Found,
    Names,
    Refused,
    Selected,
    find,
    visit_files,
    visit_matches,
    without_repetitions,
)
from lakefs_fuse.vfs.residency.upcoming_reads import UpcomingReads

OBJECTS_AT_ONCE = 4096
"""Objects whose blocks are planned and fetched together: about 3 MB of memory."""
FILES_AT_ONCE = 8192
"""Files that are inspected together."""
ROWS_MAX = 50_000
"""Paths in one answer, which is bounded."""
MARGIN_BYTES = 4 << 20
"""Of the capacity, for the indexes of files that are written at the same time."""
SINCE_NS = 61 * 1_000_000_000
"""A file that was used in the last minute is not marked as used again (`cache_directory.TOUCH_S`)."""
RECHECK_S = 600.0
"""What was removed or replaced without a notice is evictable so late at most."""
DEBOUNCE_S = 1.0
PAUSE_SHARE = 10
"""After a walk of the pins nothing is walked for this many times as long."""
RETRY_S = 60.0
log = logging.getLogger(__name__)


class WarmOptions(msgspec.Struct, frozen=True):
    """``bytes_s_max`` limits the rate (0: no limit); ``is_partial``: take as much as fits; ``is_background``: answer
    when it is known to fit; ``is_for_pins``: what does not exist is no error, and listings need not be new."""

    bytes_s_max: int = 0
    is_partial: bool = False
    is_background: bool = False
    is_for_pins: bool = False


class PathResidency(msgspec.Struct, frozen=True):
    """What of a path is on this node. ``kind`` is ``absent`` for a pin of what does not exist; ``used_s``: when any of
    it was last read or written there, since 1970; 0 for never; ``pinned``: yes, partly (some of what is below it), no.
    """

    path: str
    kind: str
    files: int
    bytes: int
    local_bytes: int
    used_s: float
    pinned: str


@dataclass(slots=True)
class _Share:
    """The part of one object that a batch requests."""

    blocks: BlockSet = 0
    files: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Batch:
    """Parts of objects; memory does not depend on how many files are in one pack."""

    shares: dict[Version, _Share] = field(default_factory=dict)

    def add(self, extent: Extent) -> None:
        share = self.shares.get(extent.version)
        if share is None:
            share = self.shares[extent.version] = _Share()
        share.blocks |= extent.block_set
        share.files += 1
        share.bytes += extent.size

    def wanted(self) -> dict[Version, BlockSet]:
        return with_rest_of_packs({version: share.blocks for version, share in self.shares.items()})


@dataclass(slots=True)
class _Job:
    """One warm. ``room_bytes`` is what is left of the capacity."""

    options: WarmOptions
    progress: Warming
    rate: ByteRate
    room_bytes: int = 0
    selection: Sequence[Selected] = ()
    fetched_bytes: int = 0
    left_out_files: int = 0
    left_out_bytes: int = 0
    gone_files: int = 0

    def summary(self) -> dict[str, object]:
        return {
            "files": self.progress.files_total,
            "bytes": self.progress.bytes_total,
            "fetched_bytes": self.fetched_bytes,
            "left_out_files": self.left_out_files,
            "left_out_bytes": self.left_out_bytes,
            "gone_files": self.gone_files,
        }


class Residency:
    """See the module's head."""

    def __init__(
        self,
        names: Names,
        reader: BlockReader,
        nursery: trio.Nursery,
        clock_ns: Callable[[], int],
        metrics: WarmMetrics,
        pins: Pins,
        upcoming: UpcomingReads,
        reserved_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """``reserved_bytes`` of the cache are kept by others than ``pins``."""
        self._names, self._nursery, self._clock_ns, self._metrics = names, nursery, clock_ns, metrics
        self._disk, self._cache, self._warmer = reader.disk, reader.disk.blocks, Warmer(reader)
        self.pins, self.upcoming, self._reserved_bytes = pins, upcoming, reserved_bytes
        self.read_ahead = upcoming.add
        self._turn = trio.Semaphore(1)
        self._waiting = 0
        self._running: Warming | None = None
        self._has_read_pins = False
        """Until then nothing is evicted where there were pins at the start."""
        self._scopes = dict[trio.CancelScope, None]()
        """Of the warms in the background."""

    def statistics(self) -> dict[str, object]:
        """Nested plain values; names are final once released."""
        running = Warming() if self._running is None else self._running
        return {
            **msgspec.to_builtins(self._metrics),
            "running": self._running is not None,
            "waiting": self._waiting,
            **msgspec.to_builtins(running),
        }

    # -- warming

    async def warm(
        self, selection: Sequence[tuple[str, str]], options: WarmOptions, progress: Warming | None = None
    ) -> dict[str, object]:
        """Bring the files of the selection (see `Selected`) into the cache; what came of it. Raises LakeError:
        FileError where a path does not exist, CacheError where not all of it fits, errors of the store."""
        named = await without_repetitions(selection)
        job = _Job(options, progress or Warming(), ByteRate(options.bytes_s_max), selection=named)
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            self._begin(job)
            await self._survey(job)
        except BaseException as error:
            self._end(job, error)
            raise
        if options.is_background:
            self._nursery.start_soon(self._fetch_in_background, job)
        else:
            await self._fetch(job)
        return job.summary()

    def stop(self) -> int:
        """End the warms in the background; how many there were."""
        count = len(self._scopes)
        for scope in self._scopes:
            scope.cancel()
        return count

    def _begin(self, job: _Job) -> None:
        self._running, job.progress.stage = job.progress, "counting"
        self._cache.files.spare_since(self._clock_ns() - SINCE_NS)

    def _end(self, job: _Job, error: BaseException | None) -> None:
        self._running, job.progress.stage = None, "ended"
        self._cache.files.spare_since(None)
        self._turn.release()
        if error is None:
            self._metrics.finished += 1
            self._metrics.last_error = ""
        elif isinstance(error, LakeError):
            self._metrics.failed += 1

    async def _survey(self, job: _Job) -> None:
        """Count the requested and the missing bytes. Raises LakeError: CacheError where it does not fit."""
        progress, wanted_bytes = job.progress, 0

        async def count(batch: _Batch) -> None:
            nonlocal wanted_bytes
            wanted = batch.wanted()
            missing = await self._warmer.missing(wanted)
            wanted_bytes += sum(self._cost(version, blocks) for version, blocks in wanted.items())
            for version, share in batch.shares.items():
                progress.files_total += share.files
                progress.bytes_total += share.bytes
                if version not in missing:
                    progress.files_done += share.files
            progress.fetch_bytes_total += sum(set_bytes(version, blocks) for version, blocks in missing.items())

        await self._visit_batches(job, count, strictly=not job.options.is_for_pins)
        job.room_bytes = self._cache.capacity_bytes - MARGIN_BYTES - self._reserved_bytes() - self.pins.disk_bytes
        progress.unfit_bytes = max(0, wanted_bytes - job.room_bytes)
        if progress.unfit_bytes and not job.options.is_partial:
            raise CacheError(
                f"{wanted_bytes >> 20} MiB of {counted(progress.files_total, 'file')} do not fit: the "
                f"cache has room for {max(0, job.room_bytes) >> 20} MiB (--cache-size, less what is pinned, and the "
                "free space of its disk). Nothing was fetched: name fewer files, or use --as-much-as-fits"
            )

    def _cost(self, version: Version, blocks: BlockSet) -> int:
        """Disk space of blocks that are not pinned: those have theirs."""
        left = blocks & ~self.pins.blocks_of(version)
        return disk_bytes(version, left) if left else 0

    async def _fetch_in_background(self, job: _Job) -> None:
        with trio.CancelScope() as scope:
            self._scopes[scope] = None
            try:
                await self._fetch(job)
            except LakeError as error:
                self._metrics.last_error = str(error)  # no client waits for it; every other error has been answered
                log.warning("warming in the background ended: %s", error)
            except Exception:
                log.exception("warming in the background")
            finally:
                del self._scopes[scope]

    async def _fetch(self, job: _Job) -> None:
        job.progress.stage, failure = "fetching", None
        try:
            if job.progress.fetch_bytes_total:
                await self._visit_batches(job, partial(self._fetch_batch, job), strictly=False)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end(job, failure)

    async def _fetch_batch(self, job: _Job, batch: _Batch) -> None:
        wanted, progress = batch.wanted(), job.progress
        for version in list(wanted):
            cost = self._cost(version, wanted[version])
            if cost > job.room_bytes:
                del wanted[version]
                job.left_out_files += batch.shares[version].files
                job.left_out_bytes += batch.shares[version].bytes
            else:
                job.room_bytes -= cost
        missing = await self._warmer.missing(wanted)
        left = {version: set_bytes(version, blocks) for version, blocks in missing.items()}

        def fetched(version: Version, count: int) -> None:
            job.fetched_bytes += count
            self._metrics.fetched_bytes += count
            first = min(count, left[version])  # what was not kept comes twice
            left[version] -= first
            progress.fetch_bytes_done += first
            if first and not left[version]:
                progress.files_done += batch.shares[version].files

        gone = [] if not missing else await self._warmer.fetch(missing, job.rate, fetched)
        job.gone_files += sum(batch.shares[version].files for version in gone)

    async def _visit_batches(self, job: _Job, see: Callable[[_Batch], Awaitable[None]], *, strictly: bool) -> None:
        """The stored bytes of the selection, OBJECTS_AT_ONCE objects at a time. Raises LakeError; ``strictly``, where
        some of it does not exist."""
        batch, is_for_pins = _Batch(), job.options.is_for_pins
        names = self.pins.names if is_for_pins else self._names
        refused: Refused | None = (lambda _: None) if is_for_pins else None  # `update_kept` has named it

        def add(found: Found) -> Awaitable[None] | None:
            nonlocal batch
            extent = names.extent(found.entry)
            if extent is None or not extent.size:
                return None
            batch.add(extent)
            if len(batch.shares) < OBJECTS_AT_ONCE:
                return None
            full, batch = batch, _Batch()
            return see(full)

        await visit_matches(names, job.selection, lambda top: visit_files(names, top, add, refused), strictly=strictly)
        if batch.shares:
            await see(batch)

    # -- what the control socket asks

    async def warm_paths(
        self, paths: Sequence[tuple[str, str]], progress: Warming, *, bytes_s_max: int, partial: bool, background: bool
    ) -> dict[str, object]:
        """As `warm`."""
        options = WarmOptions(bytes_s_max, is_partial=partial, is_background=background)
        return await self.warm(paths, options, progress)

    async def pin_paths(
        self, paths: Sequence[tuple[str, str]], progress: Warming, *, bytes_s_max: int, background: bool
    ) -> dict[str, object]:
        """Keep what is at these paths in the cache from now on, and warm it. Raises LakeError: what cannot be fetched
        now stays pinned, and is fetched later."""
        matched = dict[str, None]()

        async def add(found: Found) -> None:
            matched[found.path] = None
            self.pins.check_count(len(matched))

        await visit_matches(self._names, paths, add)
        async with self._turn:
            await self.pins.add(matched)
        return await self.warm_paths(
            [(path, "") for path in matched], progress, bytes_s_max=bytes_s_max, partial=False, background=background
        )

    async def unpin_paths(self, paths: Sequence[tuple[str, str]]) -> dict[str, object]:
        """See `Pins.remove`."""
        return {"unpinned": await self.pins.remove(paths), "pins": self.pins.statistics()}

    async def evict_paths(self, paths: Sequence[tuple[str, str]]) -> dict[str, object]:
        """Remove the blocks of files from the cache: none that is pinned, or of a version that is open. Counts the
        files that lost blocks, and those that still have some."""
        counts = {"files": 0, "freed_bytes": 0, "pinned_files": 0, "open_files": 0, "dirty_files": 0}
        some = list[tuple[str, Extent]]()

        def add(found: Found) -> Awaitable[None] | None:
            extent = self._names.extent(found.entry)
            counts["dirty_files"] += extent is None and self._names.size(found.entry) > 0
            if extent is not None and extent.size:
                some.append((found.path, extent))
            return self._evict(some, counts) if len(some) >= FILES_AT_ONCE else None

        selection = await without_repetitions(paths)
        await visit_matches(self._names, selection, lambda top: visit_files(self._names, top, add))
        await self._evict(some, counts)
        return dict(counts)

    async def _evict(self, some: list[tuple[str, Extent]], counts: dict[str, int]) -> None:
        wanted = dict[Version, BlockSet]()
        for _, extent in some:
            wanted[extent.version] = wanted.get(extent.version, 0) | extent.block_set
        before = await self._disk.inspect(list(wanted), is_use=False)
        freed = await self._disk.drop(list(wanted.items()))
        after = await self._disk.inspect(list(wanted), is_use=False)
        counts["freed_bytes"] += sum(each for each in freed if each is not None)
        had = {version: blocks for version, (blocks, _) in zip(wanted, before, strict=True)}
        has = {version: blocks for version, (blocks, _) in zip(wanted, after, strict=True)}
        for path, extent in some:
            counts["files"] += bool(had[extent.version] & ~has[extent.version] & extent.block_set)
            if has[extent.version] & extent.block_set:
                counts["open_files" if self.pins.covering(path) is None else "pinned_files"] += 1
        some.clear()

    async def list_paths(self, paths: Sequence[tuple[str, str]], *, pinned: bool) -> dict[str, object]:
        """As `inspect`, with the state of the cache and of the warms; ``pinned``: of the pins at and below paths."""
        if pinned:
            selected = dict.fromkeys(each for path, _ in paths for each in self.pins.below(path))
            rows = [await self._row_of_pin(path) for path in selected]
        else:
            rows = await self.inspect(paths)
        found = self._cache.statistics()
        return {
            "paths": [msgspec.to_builtins(row) for row in rows],
            "cache": {"bytes": found.bytes_used, "bytes_max": found.bytes_max},
            "warm": self.statistics(),
            "pins": self.pins.statistics(),
        }

    async def _row_of_pin(self, path: str) -> PathResidency:
        entry = await find(self._names, path)
        if entry is None:
            return PathResidency(path, "absent", 0, 0, 0, 0.0, "yes")
        return await self._inspect(Found(path, entry))

    # -- inspection

    async def inspect(self, selection: Sequence[tuple[str, str]]) -> list[PathResidency]:
        """A row for each path, and for each that a glob matches. Raises LakeError."""
        rows = list[PathResidency]()

        async def add(top: Found) -> None:
            if len(rows) == ROWS_MAX:
                raise CacheError(f"more than {ROWS_MAX} paths: name the directories that hold them")
            rows.append(await self._inspect(top))

        await visit_matches(self._names, selection, add)
        return rows

    async def _inspect(self, top: Found) -> PathResidency:
        count = size = local = used_ns = 0
        some = list[Extent]()

        async def add_some() -> None:
            nonlocal local, used_ns
            versions = list(dict.fromkeys(extent.version for extent in some))
            found = dict(zip(versions, await self._disk.inspect(versions, is_use=False), strict=True))
            for extent in some:
                blocks, at_ns = found[extent.version]
                here = extent.bytes_in(blocks)
                local += here
                used_ns = max(used_ns, at_ns if here else 0)
            some.clear()

        def add(file: Found) -> Awaitable[None] | None:
            nonlocal count, size, local
            extent, current = self._names.extent(file.entry), self._names.size(file.entry)
            count += 1
            size += current
            if extent is None:
                local += current  # in staging
            elif extent.size:
                some.append(extent)
            return add_some() if len(some) >= FILES_AT_ONCE else None

        await visit_files(self._names, top, add)
        await add_some()
        kind = "directory" if top.entry.is_dir else "symlink" if top.entry.is_symlink else "file"
        pinned = "yes" if self.pins.covering(top.path) is not None else "partly" if self.pins.below(top.path) else "no"
        return PathResidency(top.path, kind, count, size, local, used_ns / 1e9, pinned)

    # -- pins

    async def run(self) -> None:
        """Keep what the pins mean, and fetch what of it is missing, until cancelled. The store is asked for names only
        where some have changed."""
        is_changed, took_s = False, 0.0
        while True:
            began_s = trio.current_time()
            self.pins.clear_stale()
            if not await self._attempt(partial(self._keep, is_changed)):
                await trio.sleep(RETRY_S)
                self.pins.mark_stale()
            took_s, is_changed = trio.current_time() - began_s, False
            with trio.move_on_after(RECHECK_S if len(self.pins) else math.inf):
                await self.pins.wait_stale()
                is_changed = True
            await trio.sleep(max(DEBOUNCE_S, PAUSE_SHARE * took_s))

    async def _keep(self, is_changed: bool) -> None:
        if not self._has_read_pins:
            async with self._turn:  # a warm spares blocks as well
                if len(self.pins):
                    await self.pins.update_kept()
                self._cache.files.spare_since(None)
            self._has_read_pins = True
        if not len(self.pins):
            return
        await self.pins.update_kept(self._names if is_changed else None)
        paths = [(path, "") for path in self.pins.readable_paths]
        await self.warm(paths, WarmOptions(is_partial=True, is_for_pins=True))

    async def _attempt(self, call: Callable[[], Awaitable[object]]) -> bool:
        """False if it must be tried again."""
        try:
            await call()
            return True
        except LakeError as error:
            log.warning("keeping what is pinned: %s", error)
        except Exception:
            log.exception("keeping what is pinned")
        return False
