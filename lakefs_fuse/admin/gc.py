"""`gc`: deletes what no name refers to; safe while mounts run, and when killed at any point.

What always holds (*dead for a grace period*): a commit object is deleted only if, with all commits applied, no name has
bytes in it; an earlier run, at least a grace period ago, found the same (`GcRecord`); every name in its record is known
as it left it, or as later commits did; and an index written since says the same. While a commit cannot be read, or lies
in the future, none is deleted, because its references are unknown. What named snapshots refer to is neither deleted nor
rewritten. Commits, snapshots, record and newest index are read again before each batch of deletions, and once more if
the process was stopped meanwhile.

The steps, and what being killed in or after each leaves:

1. **Rewrite.** Live files of packs with a share of live bytes below ``live_below`` move into new packs. Killed before a
   commit: nothing. After it: files in the new pack; the old one has fewer live bytes, and the next run continues.
2. **Fold**, if commits are dead that are in no index: writes an index, whose horizon says that commits before it may be
   missing. Killed before its manifest: no index. After it: one more index, and nothing is missing yet.
3. **Record** what is dead, and since when. Killed before: grace periods begin later.
4. **Wait** for the grace period, if asked to, and check again: a commit of the meantime may refer to it.
5. **Delete** dead commit objects after their grace period, in batches. Killed half-way: some are deleted; each of them
   was in an index, and a mount that knows less than the horizon loads the index.
6. **Bundles** whose commits are all in an index: copies, which nobody needs then. Killed half-way: some are deleted.
7. **Superseded objects**: plain objects that commits hide (`superseded_objects`); unreferenced objects under
   ``.lakefs/objects/`` and unfinished uploads, both only when days old, because the commit of an upload comes after it.
   An object goes only if a run that was a grace period earlier found it unreferenced, too (*unreferenced for a grace
   period*): its last name may be another one than that of its key, and a mount that has not heard of the end of that
   name may rename it. Killed half-way: grace periods begin later.
8. **Unfinished snapshots** of commands that were killed a day ago or more, and what they kept from then on; records of
   nodes that mount datasets no more.
9. **Time of the collection**, for those who ask whether the lake is due for the next one (`maintenance`).

A grace period of 0 is for lakes that are mounted nowhere: a mount that has not polled may fail to read what was moved.
Tasks of one trio loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import trio

from lakefs_fuse.admin.lake_view import LakeView
from lakefs_fuse.admin.maintenance import CollectionRecord, write_collection
from lakefs_fuse.admin.relocation import Moved, Relocator
from lakefs_fuse.admin.superseded_objects import Swept, delete, sweep
from lakefs_fuse.admin.work import NS, Report
from lakefs_fuse.commits.archive import commit_time
from lakefs_fuse.commits.bundles import parse_bundle
from lakefs_fuse.commits.gc_record import (
    DEAD_MAX,
    UNREFERENCED_MAX,
    GcRecord,
    GcRecordReader,
    deletion_refused,
    write_gc_record,
)
from lakefs_fuse.commits.hybrid_clock import WINDOW_NS
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.index.index import UNFINISHED_NS, Manifest, manifests
from lakefs_fuse.commits.index.node_records import remove_records
from lakefs_fuse.commits.listing_digest import parse_digest
from lakefs_fuse.commits.record import (
    COMMITS,
    OBJECTS,
    THIS,
    Put,
    Relocate,
)
from lakefs_fuse.control.worker_protocol import GcArgs
from lakefs_fuse.errors import DamagedCommit, LakeError, NotFound, PreconditionFailed
from lakefs_fuse.meta.sorted_tables import marks_of
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import DELETE_KEYS_MAX
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.upload.spilled_parts import SPILLED

MEMBER_BYTES = 245
"""Overhead of a file that was moved, besides three times its name: headers, directory and record."""
PACK_BYTES = 210
"""Overhead of a pack besides its members. Both as measured, so that what was moved is not moved again."""
RECORDS_AT_ONCE = 16
ROWS_AT_ONCE = 10_000
"""Rows that one batch deletes."""
CHECK_S_MAX = 60.0
"""Maximum time that the check of a batch may take before its deletion; after it the batch is checked again, as after a
pause of the process."""
CHECKS_MAX = 10
"""Checks of one batch: where none is done in time, the run ends with an error."""

Fold = Callable[[int], Awaitable[None]]
"""Writes an index of the view, with this horizon."""
IsDead = Callable[[ObjectMeta], bool]


@dataclass(slots=True)
class Collected:
    """Result of a run, or of a dry run. ``bytes_later`` are in commit objects in their grace period."""

    moved: Moved = field(default_factory=Moved)
    packs_rewritten: int = 0
    commits_deleted: int = 0
    bytes_commits: int = 0
    commits_later: int = 0
    bytes_later: int = 0
    unreadable: int = 0
    late: int = 0
    plain: Swept = field(default_factory=Swept)
    unreferenced: Swept = field(default_factory=Swept)
    later: Swept = field(default_factory=Swept)
    """Superseded objects in their grace period."""
    uploads_aborted: int = 0
    folded: bool = False

    @property
    def bytes_deleted(self) -> int:
        return self.bytes_commits + self.plain.bytes + self.unreferenced.bytes

    def summary(self) -> dict[str, object]:
        """The result for scripts; names are final."""
        return {
            "bytes_given_back": self.bytes_deleted - self.moved.bytes_written,
            "bytes_deleted": self.bytes_deleted,
            "packs_rewritten": self.packs_rewritten,
            "files_moved": self.moved.files,
            "bytes_written": self.moved.bytes_written,
            "files_damaged": self.moved.damaged,
            "commits_deleted": self.commits_deleted,
            "commits_later": self.commits_later,
            "bytes_later": self.bytes_later + self.later.bytes,
            "commits_unreadable": self.unreadable,
            "commits_late": self.late,
            "objects_deleted": self.plain.objects + self.unreferenced.objects,
            "objects_later": self.later.objects,
            "uploads_aborted": self.uploads_aborted,
            "folded": self.folded,
        }

    def describe(self, *, dry_run: bool) -> str:
        """The result as text for users."""
        would = "would be " if dry_run else ""
        lines = [
            f"{counted(self.bytes_deleted, 'byte')} {would}deleted: {counted(self.commits_deleted, 'commit')}, "
            f"{counted(self.plain.objects + self.unreferenced.objects, 'plain object')}, "
            f"{counted(self.uploads_aborted, 'upload')}; "
            f"{counted(self.moved.bytes_written, 'byte')} {would}written: the live files of "
            f"{counted(self.packs_rewritten, 'pack')}"
        ]
        if self.commits_later or self.later.objects:
            lines.append(
                f"{counted(self.bytes_later + self.later.bytes, 'byte')} in "
                f"{counted(self.commits_later, 'dead commit')} and {counted(self.later.objects, 'object')} "
                "are deleted by a run after the grace period (--grace, --wait)"
            )
        if self.unreadable:
            unreadable = counted(self.unreadable, "commit")
            lines.append(f"nothing was deleted, because {unreadable} cannot be read: run fsck")
        if self.late:
            late = counted(self.late, "commit was", "commits were")
            lines.append(f"{late} left, with changes that are not in the lake: run fsck")
        if self.moved.damaged:
            damaged = counted(self.moved.damaged, "file with damaged bytes was", "files with damaged bytes were")
            lines.append(f"{damaged} left in place: run fsck")
        return "\n".join(lines)


class Collector:
    """One run over a lake: rewrite, fold, record, wait, delete."""

    def __init__(
        self,
        lake: LakeView,
        options: GcArgs,
        *,
        fold: Fold,
        always_folds: bool = False,
        report: Report,
        sleep: Callable[[float], Awaitable[None]] = trio.sleep,
    ) -> None:
        """With ``always_folds`` also where every commit that is dead is in an index."""
        self._lake, self._options, self._fold, self._report, self._sleep = lake, options, fold, report, sleep
        self._always_folds = always_folds
        self._contained: set[str] = set()
        """Dead commits whose records were checked, by this run or an earlier one."""
        self._late: set[str] = set()
        self._named_since: set[str] = set()
        """Objects to which dead commits refer that no earlier search had found dead: since that search they had a name,
        perhaps by a node that had not heard of the end of the last one."""
        self._kept = snapshots.KeptObjects(lake.client)
        """Objects that named snapshots refer to."""
        self._gc_records = GcRecordReader(lake.client)
        self._recorded: dict[str, int] = {}
        """`GcRecord.dead`, as of the last check."""
        self._known: dict[str, tuple[str, int]] = {}
        self._found: dict[str, tuple[str, int]] = {}
        """`GcRecord.unreferenced`, as the last search left it, and as this one does."""
        self._horizon = 0
        """Of the gc record at the beginning, then of the newest index as of the last check."""
        self.done = Collected()

    async def run(self) -> Collected:
        """Collect, and return what was done. Raises LakeError; what was done before stays done."""
        options, began_s = self._options, self._lake.node.clock.mono_s()
        old = await self._gc_records.read()
        self._recorded, self._horizon = old.dead, old.horizon
        self._contained.update(old.dead)
        await self._kept.refresh()
        named = {row.key for row in self._lake.tree.objects.rows() if row.is_pack and row.entries > 0}
        self._known = {
            key: (etag, since)
            for key, (etag, since) in old.unreferenced.items()
            if not self._lake.references(key, etag)
        }
        await self._rewrite()
        dead = await self._find_dead()
        named |= self._named_since
        self._known = {key: each for key, each in self._known.items() if key not in self._named_since}
        self._named_since.clear()
        gc_record = await self._fold_dead(old, dead, named)
        if options.wait and options.grace_s and not options.dry_run:
            gc_record = await self._delete_objects(gc_record)
            if since := [*gc_record.dead.values(), *(since for _, since in gc_record.unreferenced.values())]:
                self._report("waiting for the grace period", 0, 0)
                await self._sleep(max(0.0, options.grace_s - (self._lake.clock.wall_ns() - max(since)) / NS))
        await self._delete_dead(gc_record)
        await self._delete_bundles()
        await self._delete_objects(gc_record)
        await self._delete_spills()
        if not options.dry_run:
            now_ns = self._lake.clock.wall_ns()
            await snapshots.remove_unfinished(self._lake.client, now_ns - UNFINISHED_NS)
            await remove_records(self._lake.client, expired_ns=now_ns)
        await self._abort_uploads()
        self.done.late = len(self._late)
        if not options.dry_run and not self.done.unreadable:
            await self._record_collection(int(self._lake.node.clock.mono_s() - began_s))
        return self.done

    async def _record_collection(self, took_s: int) -> None:
        lake = self._lake
        record = CollectionRecord(
            time=lake.clock.wall_ns(),
            newest=marks_of(lake.fs.database).newest,
            took_s=took_s,
        )
        await write_collection(lake.client, record)

    # -- rewriting

    async def _rewrite(self) -> None:
        chosen = self._choose()
        self.done.packs_rewritten = len(chosen)
        if not chosen:
            return
        if self._options.dry_run:
            self.done.moved = Moved(bytes_written=sum(chosen.values()))
            self.done.commits_later = len(chosen)
            self.done.bytes_later = sum(
                row.size for row in self._lake.tree.objects.rows() if row.number in chosen
            )  # fmt: skip
            return
        relocator = Relocator(
            self._lake, report=lambda moved: self._report("rewriting packs", moved.files, moved.bytes)
        )
        for path, entry in self._lake.files():
            if entry.place in chosen:
                await relocator.add(path, entry)
        self.done.moved = await relocator.finish()

    def _choose(self) -> dict[int, int]:
        """Numbers of the packs to rewrite, with the bytes that their live files take in another pack."""
        below = self._options.live_below
        rows = {
            row.number: row.size
            for row in self._lake.tree.objects.rows()
            if row.is_pack and row.entries > 0 and row.bytes_live < below * row.size and row.key not in self._kept
        }
        if not rows:
            return {}
        live = dict.fromkeys(rows, 0)
        for path, entry in self._lake.files():
            if entry.place in live:
                live[entry.place] += entry.size + MEMBER_BYTES + 3 * len(path.encode("utf-8", "surrogatepass"))
        chosen = {number: size for number, size in live.items() if size < below * rows[number]}
        before = sum(rows[number] for number in chosen)
        return chosen if sum(chosen.values()) + PACK_BYTES < below * before else {}

    # -- what is dead

    async def _find_dead(self) -> list[ObjectMeta]:
        """Commit objects that no name has bytes in, after all commits were applied: those of the gc record first, then
        the oldest, DEAD_MAX at most."""
        lake = self._lake
        commits = sorted(await lake.list_commits(), key=self._order)
        await lake.refresh()
        if not self._options.dry_run:
            self._forget_deleted({meta.key for meta in commits})
        await self._kept.refresh()
        dead: list[ObjectMeta] = []

        async def check(meta: ObjectMeta) -> None:
            if len(dead) < DEAD_MAX and self._is_unreferenced(meta) and await self._is_contained(meta):
                dead.append(meta)

        await for_each(commits, check, RECORDS_AT_ONCE)
        self.done.unreadable = max(self.done.unreadable, lake.refused)
        return [] if self.done.unreadable else sorted(dead, key=self._order)[:DEAD_MAX]

    def _order(self, meta: ObjectMeta) -> tuple[bool, str]:
        return meta.key not in self._recorded, meta.key

    def _forget_deleted(self, commits: Collection[str]) -> None:
        """Drop the rows of packs that earlier runs deleted: the next index has none of them."""
        objects = self._lake.tree.objects
        gone = [
            row
            for row in objects.rows()
            if row.is_pack and row.entries <= 0 and row.key not in commits and commit_time(row.key) < self._horizon
        ]
        for at in range(0, len(gone), ROWS_AT_ONCE):
            objects.forget_packs(gone[at : at + ROWS_AT_ONCE])

    async def _is_contained(self, meta: ObjectMeta) -> bool:
        """Whether every change of a commit, or a later one, is in the view, so that an index contains it.

        Checked once, when the commit is first found dead. False for a commit that came too late for an index."""
        if meta.key in self._contained:
            return True
        try:
            record = await self._lake.log.fetch(meta)
        except (NotFound, PreconditionFailed):
            return False
        except DamagedCommit:
            self.done.unreadable += 1
            return False
        has_row = self._lake.tree.objects.find(meta.key, meta.etag) is not None
        for operation in record.operations:
            if isinstance(operation, Put) and operation.object > THIS:
                self._named_since.add(record.objects[operation.object].key)
            own = isinstance(operation, Put | Relocate) and operation.object == THIS
            if (own and not has_row) or not self._lake.is_known(operation, record.time):
                self._late.add(meta.key)
                return False
        self._contained.add(meta.key)
        return True

    async def _fold_dead(self, old: GcRecord, dead: list[ObjectMeta], named: Collection[str]) -> GcRecord:
        """Fold dead commits into an index, and record since when they are dead: of those that were ``named`` when this
        run began, or since the last one, since now, though an earlier run found them dead before."""
        lake = self._lake
        now = lake.clock.wall_ns()
        noted = {key: time_ns for key, time_ns in old.dead.items() if key not in named}
        since = {meta.key: min(now, noted.get(meta.key, now)) for meta in dead}
        if self.done.unreadable:
            since = noted  # grace periods go on
        newest = max((commit_time(key) for key in since), default=0)
        index = await self._newest_index()
        folded = max(old.horizon, 0 if index is None else index.horizon)
        horizon = max(folded, newest + 1) if since else folded
        gc_record = GcRecord(horizon=horizon, dead=since, unreferenced=self._known)
        if self._options.dry_run:
            return gc_record
        is_needed = bool(since) and (horizon > folded or index is None)
        if is_needed or self._always_folds:
            self._report("folding commits into an index", 0, 0)
            await self._fold(horizon)
            self.done.folded = True
        if gc_record != old:
            await write_gc_record(lake.client, gc_record, lake.clock.now())
        return gc_record

    async def _newest_index(self) -> Manifest | None:
        """The one that readers begin with: not one that is dated too far ahead."""
        lake = self._lake
        return next(iter(await manifests(lake.client, count_max=1, until_ns=lake.clock.ahead_ns())), None)

    # -- deleting

    async def _delete_dead(self, gc_record: GcRecord) -> None:
        if not gc_record.dead or self.done.unreadable:
            return
        now = self._lake.clock.wall_ns()
        doomed: list[ObjectMeta] = []
        # Found again, because other nodes may have committed while this run folded or waited.
        for meta in await self._find_dead():
            since = gc_record.dead.get(meta.key)
            if (
                since is None
                or meta.key in self._named_since
                or (now - since) / NS < self._options.grace_s
                or commit_time(meta.key) >= gc_record.horizon
            ):
                self.done.commits_later += 1
                self.done.bytes_later += meta.size
            else:
                doomed.append(meta)
        swept = Swept()
        await self._delete_batches(doomed, self._is_dead_commit, swept)
        _require_deleted(swept)
        self.done.commits_deleted, self.done.bytes_commits = swept.objects, swept.bytes

    async def _delete_bundles(self) -> None:
        """Delete bundles of commits that no mount reads again which begins with the newest index, and old digests."""
        newest = await self._newest_index()
        if newest is None:
            return
        until = newest.newest - WINDOW_NS
        async for page in self._lake.client.list_all(COMMITS):
            bundles = (parse_bundle(meta) for meta in page.objects)
            digests = (parse_digest(meta) for meta in page.objects)
            doomed = [bundle.meta for bundle in bundles if bundle is not None and bundle.last < until]
            doomed += (digest.meta for digest in digests if digest is not None and digest.time < until)
            await delete(self._lake, doomed, self.done.unreferenced, dry_run=self._options.dry_run)
            _require_deleted(self.done.unreferenced)

    async def _delete_batches(self, found: Sequence[ObjectMeta], is_dead: IsDead, swept: Swept) -> None:
        """Delete objects in batches, each after another check that it is dead."""
        for at in range(0, len(found), DELETE_KEYS_MAX):
            batch = found[at : at + DELETE_KEYS_MAX]
            if not self._options.dry_run:
                await self._check_references()
                if self._lake.refused:
                    self.done.unreadable = max(self.done.unreadable, self._lake.refused)
                    return
                batch = [meta for meta in batch if is_dead(meta)]
            if batch:
                await delete(self._lake, batch, swept, dry_run=self._options.dry_run)

    async def _check_references(self) -> None:
        """Read the references until that is done in time. Raises LakeError, also where it never is."""
        for _ in range(CHECKS_MAX):
            began_s = self._lake.node.clock.mono_s()
            await self._read_references()
            if (took_s := self._lake.node.clock.mono_s() - began_s) <= CHECK_S_MAX or self._lake.refused:
                return
        raise LakeError(
            f"reading what refers to objects takes {took_s:.0f} s, and {CHECK_S_MAX:.0f} s at most are allowed before "
            "a deletion: collect garbage on a machine that is closer to the store"
        )

    async def _read_references(self) -> None:
        """Read what other processes wrote: commits, snapshots, gc records, the newest index. Raises LakeError."""
        self._recorded = (await self._gc_records.read()).dead
        newest = await self._newest_index()
        self._horizon = 0 if newest is None else newest.horizon
        await self._kept.refresh()
        await self._lake.refresh()

    def _is_dead_commit(self, meta: ObjectMeta) -> bool:
        return meta.key in self._recorded and commit_time(meta.key) < self._horizon and self._is_unreferenced(meta)

    def _is_unreferenced(self, meta: ObjectMeta) -> bool:
        return meta.key not in self._kept and not self._lake.is_needed(meta.key)

    async def _delete_objects(self, gc_record: GcRecord) -> GcRecord:
        """Delete superseded objects after their grace period, and record since when the others are."""
        lake, options = self._lake, self._options
        self._report("finding superseded objects", 0, 0)
        self._found, self.done.later = {}, Swept()
        await sweep(
            lake, "", self.done.plain, grace_s=options.grace_s, removed=True, is_due=self._is_due,
            dry_run=options.dry_run,
        )  # fmt: skip
        _require_deleted(self.done.plain)
        await self._delete_unreferenced()
        if lake.refused:
            return gc_record  # what was found may be a part
        self._known = self._found
        after = msgspec.structs.replace(gc_record, unreferenced=self._found)
        if after != gc_record and not options.dry_run:
            await write_gc_record(lake.client, after, lake.clock.now())
        return after

    def _is_due(self, meta: ObjectMeta) -> bool:
        """An unreferenced object was so a grace period ago. Another one is recorded, if there is room."""
        now = self._lake.clock.wall_ns()
        etag, since = self._known.get(meta.key, ("", now))
        is_known = etag == meta.etag and meta.key not in self._named_since
        since = min(now, max(since, meta.mtime_ns)) if is_known else now
        if (now - since) / NS >= self._options.grace_s:
            return True
        if len(self._found) < UNREFERENCED_MAX:
            self._found[meta.key] = (meta.etag, since)
        self.done.later.add(1, meta.size)
        return False

    async def _delete_unreferenced(self) -> None:
        lake, older_s = self._lake, self._options.uploads_older_s
        async for page in lake.client.list_all(OBJECTS):
            doomed = [
                meta
                for meta in page.objects
                if not lake.refused
                and self._is_unreferenced(meta)
                and self._is_older(meta.mtime_ns, older_s)
                and self._is_due(meta)
            ]
            await self._delete_batches(doomed, self._is_unreferenced, self.done.unreferenced)
            _require_deleted(self.done.unreferenced)

    async def _delete_spills(self) -> None:
        """Delete spilled parts of dead nodes; living nodes keep files open for less than that time."""
        lake, options = self._lake, self._options
        async for page in lake.client.list_all(SPILLED):
            doomed = [meta for meta in page.objects if self._is_older(meta.mtime_ns, options.uploads_older_s)]
            await delete(lake, doomed, self.done.unreferenced, dry_run=options.dry_run)
            _require_deleted(self.done.unreferenced)

    async def _abort_uploads(self) -> None:
        for upload in await self._lake.client.list_multipart(""):
            if self._is_older(upload.started_ns, self._options.uploads_older_s):
                if not self._options.dry_run:
                    await self._lake.client.abort_multipart(upload.key, upload.upload_id)
                self.done.uploads_aborted += 1

    def _is_older(self, time_ns: int, age_s: float) -> bool:
        return (self._lake.clock.wall_ns() - time_ns) / NS >= age_s


def _require_deleted(swept: Swept) -> None:
    """Raises LakeError where the store refused to delete objects."""
    if swept.failed:
        raise deletion_refused(swept.failed, swept.why)
