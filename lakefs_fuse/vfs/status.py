"""Counters and gauges of a filesystem, and its files that are not durable. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from operator import itemgetter

import msgspec

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.meta.object_table import NUMBER_MAX, Objects
from lakefs_fuse.metrics import Metrics, Unfinished
from lakefs_fuse.quantity import counted
from lakefs_fuse.staging.draft_record import DraftRecord, DraftState
from lakefs_fuse.staging.refused_ranges import RefusedRanges
from lakefs_fuse.staging.staging_area import Staging, StagingState
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.lake_size import LakeSizes
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.writeback.orphans import Orphans
from lakefs_fuse.vfs.writeback.queue import VersionState, WriteBackQueue

NS = 1_000_000_000
FILES_A_STEP, ROWS_A_STEP = 2000, 200
"""A row takes about 10 µs, and a file without one 1 to 4 µs."""
ENDED = frozenset({DraftState.PUBLISHED, DraftState.DISCARDED})


class Status:
    """Reads counters and drafts for `stats` and `dirty`, and the size of the lake for df(1)."""

    def __init__(
        self,
        metrics: Metrics,
        sections: Mapping[str, Callable[[], Mapping[str, object]]],
        files: FileTable,
        orphans: Orphans,
        committer: Committer,
        writeback: WriteBackQueue,
        clock: Clock,
        sizes: LakeSizes,
    ) -> None:
        """``sections`` are counters of other parts, by their names."""
        self.metrics, self._sections = metrics, sections
        self._files, self._orphans, self._committer = files, orphans, committer
        self._writeback, self._clock, self.lake_size = writeback, clock, sizes.size

    def statistics(self) -> Generator[None, None, dict[str, object]]:
        """Nested plain values, in steps; names are final once released."""
        dirty = yield from self._of_drafts()
        writeback = yield from self._of_writeback()
        return {
            **self.metrics.as_dict(),
            **{name: section() for name, section in self._sections.items()},
            "dirty": {**dirty, "orphans": len(self._orphans.records)},
            "writeback": {**msgspec.to_builtins(self.metrics.writeback), **writeback},
            "files": {"in_use": len(self._files)},
        }

    def list_unfinished(self, rows_max: int | None) -> Generator[None, None, list[Unfinished]]:
        """Files being written and orphans, oldest first, in steps; ``rows_max``: no more than these. What ends between
        two steps is left out."""
        found: list[tuple[int, Draft | DraftRecord]] = []
        for number, file in enumerate(list(self._files.in_use()), 1):
            found += [(each.draft.created_ns, each.draft) for each in file.versions if each.draft is not None]
            if not number % FILES_A_STEP:
                yield
        found += [(record.created_ns, record) for record in self._orphans.records.values()]
        yield
        found.sort(key=itemgetter(0))
        now, rows = self._clock.wall_ns(), list[Unfinished]()
        for number, (_, each) in enumerate(found[:rows_max], 1):
            if isinstance(each, DraftRecord):
                rows.append(self._of_orphan(each, now))
            elif each.state not in ENDED:
                rows.append(self._of_draft(each, now))
            if not number % ROWS_A_STEP:
                yield
        if self._committer.journal.operations:
            error = str(self._committer.error or "")
            what = counted(self._committer.journal.operations, "change of names", "changes of names")
            rows.append(Unfinished("names", what, 0, "journaled", 0.0, error, 0, 0))
        return rows[:rows_max]

    def _of_drafts(self) -> Generator[None, None, dict[str, int]]:
        """The totals of files that are not in the store, in steps; versions behind others count."""
        files = size_bytes = failed = 0
        for number, file in enumerate(list(self._files.in_use()), 1):
            for draft in [each.draft for each in file.versions if each.draft is not None]:
                files, size_bytes, failed = files + 1, size_bytes + draft.size, failed + self._is_failed(draft)
            if not number % FILES_A_STEP:
                yield
        return {"files": files, "bytes": size_bytes, "failed": failed}

    def _is_failed(self, draft: Draft) -> bool:
        return bool(draft.refused) or (draft.error is not None and not self._only_waits(draft))

    def _only_waits(self, draft: Draft) -> bool:
        """An attempt failed for a reason that is not the file's own, and is made again."""
        item = self._writeback.item_of(draft)
        return draft.state is DraftState.FAILED and item is not None and not item.is_refused

    def _of_writeback(self) -> Generator[None, None, dict[str, object]]:
        """The totals of acknowledged files that are not in the store, in steps."""
        files = size_bytes = failed = 0
        oldest_s, now = 0.0, self._clock.wall_ns()
        for number, item in enumerate(list(self._writeback.items), 1):
            if item.state is not VersionState.ENDED:
                files, size_bytes, failed = files + 1, size_bytes + item.draft.size, failed + item.is_refused
                oldest_s = max(oldest_s, (now - item.draft.created_ns) / NS, item.waited_s)
            if not number % FILES_A_STEP:
                yield
        totals = {"files": files, "bytes": size_bytes, "oldest_s": oldest_s, "failed": failed}
        return {**totals, "waiting_because": str(self._writeback.error or "")}

    def _of_draft(self, draft: Draft, now: int) -> Unfinished:
        state = DraftState.FAILED if draft.refused else draft.state
        done = draft.parts.records()
        waits_for = self._writeback.error if self._writeback.item_of(draft) is not None else None
        error = draft.error or draft.outage.error or waits_for
        return Unfinished(
            id=draft.id,
            path=draft.target.path or draft.target.key,
            bytes=draft.size,
            state=str(DraftState.ACKNOWLEDGED if self._only_waits(draft) else state),
            age_s=(now - draft.created_ns) / NS,
            error=draft.refused.describe() if draft.refused else str(error or ""),
            parts_done=len(done),
            bytes_done=sum(part.length for part in done),
            missing=draft.refused.bytes_missing,
        )

    def _of_orphan(self, record: DraftRecord, now: int) -> Unfinished:
        refused = RefusedRanges(record.refused, record.refused_errno, record.refused_why)
        return Unfinished(
            id=record.id,
            path=record.path or record.key,
            bytes=record.size,
            state="orphan",
            age_s=(now - record.created_ns) / NS,
            error=refused.describe() if refused else record.error,
            parts_done=len(record.parts),
            bytes_done=sum(part.length for part in record.parts),
            missing=refused.bytes_missing,
        )


def cache_section(metrics: Metrics, cache: BlockCache) -> dict[str, object]:
    found = cache.statistics()
    return {
        **msgspec.to_builtins(metrics.cache),
        **msgspec.to_builtins(found),
        "bytes": found.bytes_used,
        "state": found.state.name.lower(),
    }


def commit_section(
    metrics: Metrics, committer: Committer, deletions: DeletionQueue, objects: Objects
) -> dict[str, object]:
    return {
        **msgspec.to_builtins(metrics.commits),
        "writer": committer.writer,
        "bundles_written": committer.bundles_written,
        "digests_written": committer.digests_written,
        "operations_waiting": committer.journal.operations,
        "deletions_waiting": deletions.waiting,
        "packs_known": objects.packs,
        "pack_bytes": objects.bytes_packed,
        "pack_bytes_live": objects.bytes_live,
        "pack_bytes_dead": max(0, objects.bytes_packed - objects.bytes_live),
        "object_numbers": objects.last_number,
        "object_numbers_max": NUMBER_MAX,
    }


def staging_section(staging: Staging, namespace: Namespace) -> dict[str, object]:
    """A disk on which names cannot be written counts, too."""
    state = staging.state
    if namespace.is_disk_failing:
        state = StagingState.FULL if namespace.is_disk_full else StagingState.FAILED
    free_bytes, needed_bytes = staging.disk_room()
    return {
        "bytes": staging.bytes_used,
        "bytes_max": staging.bytes_max,
        "files_open": len(staging.descriptors),
        "files_open_max": staging.descriptors.open_max,
        "disk_free_bytes": free_bytes,
        "disk_needed_bytes": needed_bytes,
        "state": str(state),
    }
