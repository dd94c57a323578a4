"""`fsck`: checks every byte of every commit, and every object that a name refers to, and reports the affected names.

It reads the lake as a fresh mount does, so it knows names from commits that can be read, from the index, from the
headers of a damaged pack, or from the cache of a node (``--cache-dir``). A pack that is missing as a whole, and that no
commit, index or cache refers to, leaves no trace.

Problems are collected by object. A name is affected if its present bytes are damaged, or if the last commit about it
cannot be read. Any program may delete a plain object at the own key of a file at any time, so a missing one is counted,
but is no damage. Nothing is changed here; see `fsck_repair`.

Mounts may write to the lake meanwhile. Therefore (*confirmed problems*) each problem is a suspicion at first: the
newest commits are applied and the objects in question are checked again, until two rounds in a row find the same. A
node deletes an object only after a commit by which no name has bytes in it; so a name that still refers to a missing
object after another poll of the commits is affected.

Memory: the names of the commits, and one bit for each inode and object number. Tasks of one trio loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path

from lakefs_fuse.admin.lake_view import LakeView, scratch_directory
from lakefs_fuse.admin.number_set import NumberSet
from lakefs_fuse.admin.snapshot_check import find_bad_objects
from lakefs_fuse.admin.snapshot_rows import snapshot_rows
from lakefs_fuse.admin.work import Report
from lakefs_fuse.commits.archive import commit_time, parse_commit_key
from lakefs_fuse.commits.archive_check import Audit, Fault, verify
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.index.index import (
    INDEX,
    KEPT,
    MANIFEST,
    describe_loss,
    fetch_files,
    fetch_manifest,
    list_objects,
    prefix_of,
    times_of,
)
from lakefs_fuse.commits.record import OBJECTS, THIS, Put, Record, Relocate, Remove
from lakefs_fuse.errors import DamagedCommit, NotFound, PreconditionFailed, StoreError, Unavailable
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.sorted_tables import missing_before
from lakefs_fuse.meta.tree import Tree, damaged_rows
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.protocol import Buffer, ObjectMeta
from lakefs_fuse.sync.nursery import for_each

AUDITS_AT_ONCE = 4
"""Each holds a window of 8 MiB."""
RECORDS_AT_ONCE = 16
PATHS_SHOWN_MAX = 1000
"""Names of one problem in the text of the result; its summary has all."""
ROUNDS_MAX = 10
"""Rounds of confirmation. A lake that changes so fast that no two rounds agree has to be checked again."""

UNKNOWN = "?"
"""The key of an object whose number is not in this cache."""


WAYS_OUT = (
    "names may be missing, so nothing is repaired, folded or collected. Restore what is missing or damaged below "
    ".lakefs/index/, from a version of the bucket or a copy of it; or write an index from the cache directory of a "
    "node that knows all names, after unmounting it: snapshot SOURCE --cache-dir DIR. If neither is possible, snapshot "
    "SOURCE --accept-loss goes on with the names that are left, for good"
)


class Kind(StrEnum):
    """The kinds of problem of an object; the names are final."""

    UNREADABLE = "unreadable"
    """No mount can use the commit."""
    DAMAGED = "damaged"
    """Bytes of files in it have another CRC-32."""
    MISSING = "missing"
    CHANGED = "changed"
    """The object is not at the version that names refer to: cut short, or replaced."""
    OUTSIDE = "outside"
    """A name or a record refers to bytes beyond the end."""
    HEADERS = "headers"
    """Only what `unzip` reads is damaged."""
    LATE = "late"
    """The commit became visible so late that neither the index nor running mounts have it."""
    INDEX = "index"
    """An object of an index is missing or damaged, which affects no name as long as there is another index, or all
    commits."""
    ROWS = "rows"
    """Rows of names from an index cannot be decoded, and mounts leave them out."""
    SNAPSHOT = "snapshot"
    """A named snapshot, or a version of a dataset, cannot be mounted, or lacks bytes of files, which affects no name of
    the lake."""
    FUTURE = "future"
    """Mounts leave the commit out because of its time."""


@dataclass(slots=True)
class Problem:
    """One problem of one object, with the ``paths`` of the affected names. ``repair`` is what was done about it."""

    key: str
    kind: Kind
    text: str
    paths: dict[str, None] = field(default_factory=dict)
    repair: str = ""

    def summary(self) -> dict[str, object]:
        return {
            "object": self.key,
            "kind": str(self.kind),
            "text": self.text,
            "paths": list(self.paths),
            "repair": self.repair,
        }


@dataclass(slots=True)
class Checked:
    """Result of a check."""

    commits: int = 0
    bytes_read: int = 0
    files: int = 0
    gone: int = 0
    unsettled: int = 0
    """Suspicions that were neither confirmed nor refuted: the objects changed between any two rounds."""
    names_missing: bool = False
    """Commits were collected, and no index that has them can be used."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Everything was checked, and nothing is damaged."""
        return not self.problems and not self.unsettled

    def summary(self) -> dict[str, object]:
        """The result for scripts; names are final."""
        return {
            "commits": self.commits,
            "bytes_read": self.bytes_read,
            "files": self.files,
            "deleted_outside": self.gone,
            "unsettled": self.unsettled,
            "names_missing": self.names_missing,
            "problems": [problem.summary() for problem in self.problems],
            "files_hurt": len({path for problem in self.problems for path in problem.paths}),
        }

    def describe(self) -> str:
        """The result as text for users, with the first PATHS_SHOWN_MAX affected names of each problem."""
        lines: list[str] = []
        for problem in self.problems:
            lines.append(f"{problem.key}: {problem.kind}: {problem.text}")
            lines += [f"    {path}" for path in islice(problem.paths, PATHS_SHOWN_MAX)]
            if len(problem.paths) > PATHS_SHOWN_MAX:
                lines.append(f"    … and {len(problem.paths) - PATHS_SHOWN_MAX:,} more, which --json names")
            if problem.repair:
                lines.append(f"  {problem.repair}")
        hurt = counted(len({path for problem in self.problems for path in problem.paths}), "file")
        found = counted(len(self.problems), "problem")
        verdict = f"{found}, {hurt} hurt, and names may be missing" if self.names_missing else f"{found}, {hurt} hurt"
        lines.append(
            f"{counted(self.commits, 'commit')} ({counted(self.bytes_read, 'byte')} read) and "
            f"{counted(self.files, 'file')} checked: {'clean' if self.is_clean else verdict}"
        )
        if self.names_missing:
            lines.append(WAYS_OUT)
        if any(problem.kind in (Kind.CHANGED, Kind.MISSING) for problem in self.problems):
            lines.append("if other tools have copied or encrypted the lake, run fsck --rebind")
        if self.gone:
            gone = counted(self.gone, "file is", "files are")
            lines.append(f"{gone} gone because others deleted plain objects, which is no damage")
        if self.unsettled:
            changing = counted(self.unsettled, "object was", "objects were")
            lines.append(f"{changing} written too fast to be checked: run fsck again")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Hurt:
    """A name whose bytes are damaged; ``crc`` is the CRC-32 that they should have, None if unknown."""

    path: str
    entry: Entry
    row: ObjectRow
    crc: int | None


class Checker:
    """One check of a lake."""

    def __init__(self, lake: LakeView, *, quick: bool, report: Report) -> None:
        self._lake, self._quick, self._report = lake, quick, report
        self.done = Checked()
        self.hurt: list[Hurt] = []
        self.commits: dict[str, ObjectMeta] = {}
        self._crcs: dict[str, dict[tuple[int, int], int]] = {}
        """The CRC-32 that damaged members should have, by key of the pack and extent."""
        self._applied: set[str] = set()
        """Keys of applied commits with files, in any version."""
        self._problems: dict[tuple[str, Kind], Problem] = {}
        self._found, self._intact = NumberSet(), NumberSet()
        """Inodes of files, and numbers of plain objects, that the store has at their version."""
        self._gone = NumberSet()
        """Inodes of files whose plain object the first round did not find in the store."""

    async def run(self) -> Checked:
        """Check the lake. Raises LakeError where the store does not answer."""
        self.commits.update((meta.key, meta) for meta in await self._lake.list_commits())
        await self._refresh()
        await for_each(list(self.commits.values()), self._check_listed, self._at_once)
        await self._list_plain()
        self._check_names()
        self._check_rows()
        await self._check_indexes()
        await self._check_snapshots()
        await self._confirm()
        self.done.problems = sorted(self._problems.values(), key=lambda problem: (problem.key, problem.kind))
        return self.done

    async def _refresh(self) -> None:
        await self._lake.refresh()
        self._applied = {row.key for row in self._lake.tree.objects.rows() if row.is_pack}

    @property
    def _at_once(self) -> int:
        return RECORDS_AT_ONCE if self._quick else AUDITS_AT_ONCE

    # -- confirmation

    async def _confirm(self) -> None:
        """Check the problems again until two rounds agree; drop those on which they do not."""
        if not self._problems and not self.done.gone:
            return
        for _ in range(ROUNDS_MAX):
            before = self._problems.keys()
            await self._check_again()
            if self._problems.keys() == before:
                return
        self.done.unsettled = len(self._problems.keys() - before)
        self._problems = {found: problem for found, problem in self._problems.items() if found in before}
        self.hurt = [hurt for hurt in self.hurt if any(hurt.path in each.paths for each in self._problems.values())]

    async def _check_again(self) -> None:
        """Check the objects of the problems, the names with bytes in them, and the affected names."""
        before, self._problems, self.hurt = self._problems, {}, []
        await self._refresh()
        paths = {path for problem in before.values() for path in problem.paths}
        keys = {key for key, _ in before if key != UNKNOWN and not key.startswith((INDEX, snapshots.SNAPSHOTS))}
        numbers = {row.number for row in self._lake.tree.objects.rows() if row.key in keys}
        numbers |= {entry.place for path in paths if (entry := self._lake.find(path)) is not None and entry.place}
        rows = [row for number in numbers if (row := self._lake.tree.objects.get(number)) is not None]
        await for_each(keys.union(row.key for row in rows), self._head, RECORDS_AT_ONCE)
        for key in keys:
            self._crcs.pop(key, None)
        await for_each([meta for key in keys if (meta := self.commits.get(key))], self._check_commit, self._at_once)
        self.done.gone = 0
        for path, entry in self._lake.files():
            if entry.flags & (Flag.SYMLINK | Flag.LOCAL):
                continue
            if not entry.place:
                self.done.gone += entry.inode in self._gone
            elif entry.place in numbers or path in paths:
                self._check_file(path, entry)
        if (INDEX, Kind.ROWS) in before:
            self._check_rows()
        if any(kind is Kind.INDEX for _, kind in before):
            await self._check_indexes()
        if any(kind is Kind.SNAPSHOT for _, kind in before):
            await self._check_snapshots()

    async def _head(self, key: str) -> None:
        """Replace what LIST told of a key by its present version."""
        found: ObjectMeta | None = None
        try:
            found = await self._lake.client.head(key)
        except NotFound:
            pass
        except Unavailable:
            raise
        except StoreError:
            return  # only LIST knows it
        if parse_commit_key(key) is None:
            self._record_version(key, found)
        elif found is None:
            self.commits.pop(key, None)
        else:
            self.commits[key] = found

    def _record_version(self, key: str, found: ObjectMeta | None) -> None:
        for row in self._lake.tree.objects.versions(key):
            self._intact.discard(row.number)
            if found is not None and (row.etag, row.size) == (found.etag, found.size):
                self._intact.add(row.number)

    def _problem(self, key: str, kind: Kind, text: str) -> Problem:
        return self._problems.setdefault((key, kind), Problem(key, kind, text))

    # -- commits

    async def _check_listed(self, meta: ObjectMeta) -> None:
        await self._check_commit(meta)
        self.done.commits += meta.key in self.commits
        self._report("checking commits", self.done.commits, self.done.bytes_read)

    async def _check_commit(self, meta: ObjectMeta) -> None:
        try:
            if self._quick:
                await self._check_record(meta, None)
            else:
                await self._audit(meta)
        except (NotFound, PreconditionFailed):
            self.commits.pop(meta.key, None)  # collected meanwhile
            return
        except Unavailable:
            raise
        except StoreError as error:
            self._problem(meta.key, Kind.UNREADABLE, f"the store cannot read it: {error}")
        if self._is_future(meta.key):
            self._problem(meta.key, Kind.FUTURE, "its time lies in the future: mounts leave it out until then")

    async def _audit(self, meta: ObjectMeta) -> None:
        async def fetch(start: int, end: int) -> Buffer:
            data = (await self._lake.client.get(meta.key, start, end, etag=meta.etag)).data
            self.done.bytes_read += len(data)
            return data

        audit = await verify(meta.key, meta.size, fetch)
        for member in audit.members:
            if not member.sound:
                self._crcs.setdefault(meta.key, {})[member.offset, member.size] = member.crc
        for problem in audit.problems:
            if problem.fault is Fault.DIRECTORY:
                self._problem(meta.key, Kind.HEADERS, problem.text)
            elif problem.fault is Fault.OUTSIDE:
                found = self._problem(meta.key, Kind.OUTSIDE, problem.text)
                found.paths.update(dict.fromkeys(self._not_superseded(meta.key, problem.paths)))
        if audit.record is None or any(problem.fault in (Fault.END, Fault.OUTSIDE) for problem in audit.problems):
            await self._check_record(meta, audit)
        else:
            self._check_applied(meta, audit.record)

    async def _check_record(self, meta: ObjectMeta, audit: Audit | None) -> None:
        """Check that a mount can apply the commit; else report every name that it is known to be about."""
        try:
            self._check_applied(meta, await self._lake.log.fetch(meta))
        except DamagedCommit as error:
            text = str(error).removeprefix(meta.key + ": ")
            problem = self._problem(meta.key, Kind.UNREADABLE, f"no mount can use it: {text}")
            paths: list[str] = []
            if audit is not None and audit.record is not None:
                paths = [each.path for each in audit.record.operations if not isinstance(each, Remove)]
            elif audit is not None:
                paths = [member.path for member in audit.members]
                problem.text += "; files whose headers are lost, too, may have been in it"
            problem.paths.update(dict.fromkeys(self._not_superseded(meta.key, paths)))

    def _check_applied(self, meta: ObjectMeta, record: Record) -> None:
        """Check that a commit was applied. One with files leaves a row of its object whatever becomes of them; what
        others say is in names or their tombstones, as `gc` asks before it deletes them."""
        if meta.key in self._applied or self._is_future(meta.key):
            return
        paths = [each.path for each in record.operations if isinstance(each, Put | Relocate) and each.object == THIS]
        if paths:
            lost = self._not_superseded(meta.key, paths)
        else:
            paths = lost = [each.path for each in record.operations if not self._lake.is_known(each, record.time)]
        if paths:
            problem = self._problem(meta.key, Kind.LATE, "it came into sight too late for the index and for mounts")
            problem.paths.update(dict.fromkeys(lost))

    def _is_future(self, key: str) -> bool:
        return commit_time(key) > self._lake.clock.ahead_ns()

    def _not_superseded(self, key: str, paths: list[str] | tuple[str, ...]) -> list[str]:
        """The paths that no later commit is about."""
        time_ns = commit_time(key)
        left: list[str] = []
        for path in paths:
            entry = self._lake.entry_at(path)
            tombstone = self._lake.tree.tombstones.get(path.encode("utf-8", "surrogatepass"))
            if (entry is None or entry.stamp <= time_ns) and (tombstone is None or tombstone.newest <= time_ns):
                left.append(path)
        return left

    # -- indexes

    async def _check_indexes(self) -> None:
        """Each that has a manifest is whole. Where none has what was collected, all that may be restored is named."""
        missing = missing_before(self._lake.fs.database)
        self.done.names_missing = missing > 0
        found = await list_objects(self._lake.client)
        remedy = "restore it" if missing else "run snapshot twice, which replaces it"
        if missing:
            self._problem(INDEX, Kind.INDEX, describe_loss(missing))
        for time_ns in sorted(found, reverse=True)[: KEPT if missing else 0]:
            if not any(meta.key == prefix_of(time_ns) + MANIFEST for meta in found[time_ns]):
                text = "there is none; if it was deleted, restore it"
                self._problem(prefix_of(time_ns) + MANIFEST, Kind.INDEX, text)
        sizes = {meta.key: meta.size for metas in found.values() for meta in metas}
        for time_ns in times_of(found):
            try:
                await self._check_index(time_ns, sizes, remedy)
            except NotFound:
                continue  # without a manifest it does not exist
            except DamagedCommit as error:
                self._problem(prefix_of(time_ns), Kind.INDEX, f"{error}: {remedy}")

    async def _check_index(self, time_ns: int, sizes: Mapping[str, int], remedy: str) -> None:
        """``sizes`` of all objects of indexes, by key. Raises NotFound, DamagedCommit."""
        lake = self._lake
        manifest = await fetch_manifest(lake.client, time_ns)
        if max(manifest.time, manifest.newest) > lake.clock.ahead_ns():
            text = "its time, or that of its newest commit, lies in the future, so mounts do without it if they can"
            self._problem(prefix_of(time_ns), Kind.INDEX, f"{text}: run snapshot twice, which replaces it")
        bad = [file for file in manifest.all_files() if sizes.get(manifest.key_of(file)) != file.size]
        for file in bad:
            size = sizes.get(manifest.key_of(file))
            text = "it is missing" if size is None else f"it has {size:,} bytes, and had {file.size:,}"
            self._problem(manifest.key_of(file), Kind.INDEX, f"{text}: {remedy}")
        if bad or self._quick:
            return
        with scratch_directory(lake.node, lake.scratch) as directory:
            await fetch_files(lake.client, lake.node.threads, manifest, Path(directory))
        self.done.bytes_read += manifest.bytes

    async def _check_snapshots(self) -> None:
        """Each can be read, and the store has every object below `.lakefs/` that it names."""
        for name in await snapshots.names(self._lake.client):
            try:
                await self._check_snapshot(name)
            except NotFound:
                continue  # without a manifest it does not exist
            except DamagedCommit as error:
                self._problem(snapshots.prefix_of(name), Kind.SNAPSHOT, str(error))

    async def _check_snapshot(self, name: str) -> None:
        lake = self._lake
        manifest = await snapshots.fetch_manifest(lake.client, name)
        async with snapshot_rows(lake.client, lake.node, name, manifest, lake.scratch) as database:
            bad = await find_bad_objects(lake.client, Tree(database).objects)
        self.done.bytes_read += manifest.bytes
        if await lake.client.find(snapshots.prefix_of(name) + snapshots.OBJECTS) is None:
            text = f"its list of objects is gone, so gc deletes nothing: {snapshots.removal_of(name)} deletes it"
            self._problem(snapshots.prefix_of(name), Kind.SNAPSHOT, text)
        elif bad.count:
            told = manifest.dataset
            how = "" if told is None else f": `dataset verify SOURCE {told.name}@{told.version}` lists the files"
            text = f"the store lacks {bad.count:,} of its objects, {bad.objects[0].row.key} among them{how}"
            self._problem(snapshots.prefix_of(name), Kind.SNAPSHOT, text)

    # -- names

    async def _list_plain(self) -> None:
        """Find the plain objects that the store has at the version that names refer to."""
        for prefix in ("", OBJECTS):
            async for page in self._lake.client.list_all(prefix):
                self._record_found(page.objects, everything=bool(prefix))

    def _record_found(self, metas: Sequence[ObjectMeta], *, everything: bool) -> None:
        for meta in metas:
            if not everything and meta.key.startswith(RESERVED_PREFIX):
                continue
            row = self._lake.tree.objects.find(meta.key, meta.etag)
            if row is not None and row.size == meta.size:
                self._intact.add(row.number)
            entry = self._lake.entry_at(meta.key)
            if entry is not None:
                self._found.add(entry.inode)

    def _check_rows(self) -> None:
        tree, count = self._lake.tree, 0
        for key, why in damaged_rows(self._lake.fs.database):
            count += 1
            problem = self._problem(INDEX, Kind.ROWS, f"row {key[:80]!r}: {why}")
            path = tree.path_of_row(key)
            if path is not None:
                problem.paths[b"/".join(path).decode("utf-8", "surrogateescape")] = None
        if count:
            rows = counted(count, "row")
            problem.text = f"{rows} that mounts took from it cannot be read; one of them: {problem.text}"

    def _check_names(self) -> None:
        for path, entry in self._lake.files():
            if entry.flags & (Flag.SYMLINK | Flag.LOCAL):
                continue
            self.done.files += 1
            if entry.place:
                self._check_file(path, entry)
            elif entry.inode not in self._found:
                self.done.gone += 1
                self._gone.add(entry.inode)

    def _check_file(self, path: str, entry: Entry) -> None:
        row = self._lake.tree.objects.get(entry.place)
        if row is None:
            self._problem(UNKNOWN, Kind.MISSING, "an object that this cache does not know").paths[path] = None
            return
        kind, text, crc = self._what_is_wrong(entry, row)
        if kind is not None:
            self._problem(row.key, kind, text).paths[path] = None
            self.hurt.append(Hurt(path, entry, row, crc))

    def _what_is_wrong(self, entry: Entry, row: ObjectRow) -> tuple[Kind | None, str, int | None]:
        crc = self._crcs.get(row.key, {}).get((entry.offset, entry.size))
        if entry.offset + entry.size > row.size:
            return Kind.OUTSIDE, "names refer to bytes behind its end", None
        if not row.is_pack:
            if row.number in self._intact:
                return None, "", None
            return Kind.MISSING, "the plain object, of a file that was renamed, is gone or was replaced", None
        meta = self.commits.get(row.key)
        if meta is None:
            return Kind.MISSING, "the pack is gone", None
        if (meta.etag, meta.size) != (row.etag, row.size):
            text = f"{meta.size:,} bytes where names refer to {row.size:,}" if meta.size != row.size else "replaced"
            return Kind.CHANGED, text, crc
        if crc is not None:
            return Kind.DAMAGED, "bytes of files are damaged or missing", crc
        return None, "", None
