"""`checkpoint` without a mount: lists the checkpoints of a lake as a fresh mount sees them, and verifies them.

Verifying reads every byte of every file from its object in the store, at the version of the name, past all caches.
Nothing is written. Memory: the names of the files in question, and `FILES_AT_ONCE` times `WINDOWS` windows of their
bytes. Tasks of one trio loop; sums are computed in worker threads.
"""

from __future__ import annotations

import zipfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from lakefs_fuse.admin.checkpoint_sums import (
    ZIP_MAGIC,
    Check,
    Finding,
    TailTooShort,
    Verdict,
    broken,
    etag_check,
    parse_sha256sums,
    read_directory,
    safetensors_check,
    sha256_check,
    zip_check,
)
from lakefs_fuse.admin.extent_reader import ExtentReader, Moving, chunks
from lakefs_fuse.admin.lake_view import LakeView, open_lake_view
from lakefs_fuse.admin.work import Work
from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.checkpoints.model import Listing, Seen, is_checkpoint, make_listing, marker_names
from lakefs_fuse.checkpoints.names import linked_names
from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.config import KIB, MIB
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.errors import MALFORMED, DamagedCommit, LakeError, NotFound, PreconditionFailed
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import StoreClient, token_of
from lakefs_fuse.sync.nursery import for_each

WINDOW_BYTES = 4 * MIB
WINDOWS = 4
"""Fetched at once of one file."""
FILES_AT_ONCE = 3
TAIL_BYTES = 256 * KIB
DIRECTORY_BYTES_MAX = 256 * MIB
"""Of a ZIP; a checkpoint of a million tensors has less."""
SUMS_NAME = "SHA256SUMS"
SUMS_BYTES_MAX = 64 * MIB
INDEX_SUFFIX = ".index.json"
NO_CHECKPOINT = "no checkpoint of this name is in the store: name one that `checkpoint ls` shows, or give --match"
PROBLEMS_SHOWN_MAX = 20
"""Of one checkpoint, in the text for people."""

Fetch = Callable[[int, int], Awaitable[bytes]]
"""Bytes [start, end) of a file."""


@dataclass(slots=True)
class Found:
    """A checkpoint in the store; ``files`` by their paths in it, a checkpoint that is a file by its own name. ``links``
    are paths of symbolic links in it, which are not followed."""

    seen: Seen
    files: dict[str, Entry] = field(default_factory=dict)
    links: frozenset[str] = frozenset()


@dataclass(slots=True)
class Place:
    """The directory of the checkpoints."""

    listing: Listing
    found: dict[str, Found]
    sums: Entry | None


async def run_checkpoint(work: Work, args: protocol.CheckpointArgs) -> protocol.Finished:
    """`ls` and `latest`. Raises LakeError."""
    async with open_lake_view(work.client, work.store, node=work.node, scratch=work.scratch) as lake:
        listing = (await find_checkpoints(lake, work, args.url, args.marker, args.match)).listing
    if args.action == "ls":
        lines = [
            f"{item.name}{'/' if item.kind == 'directory' else ''}: {counted(item.files, 'file')}, "
            f"{counted(item.bytes, 'byte')}, "
            + (("complete, newest" if item.name == listing.latest else "complete") if item.complete else item.reason)
            for item in listing.checkpoints
        ]
        text = "\n".join(lines) or f"{args.url}: no checkpoints"
        return protocol.Finished(summary=msgspec.to_builtins(listing), text=protocol.printable(text))
    newest = listing.newest
    if newest is None:
        raise LakeError(f"{args.url} has no complete checkpoint ({len(listing.checkpoints)} incomplete)")
    return protocol.Finished(summary=msgspec.to_builtins(newest), text=protocol.printable(newest.path))


async def find_checkpoints(lake: LakeView, work: Work, url: str, marker: str | None, match: str | None) -> Place:
    """Find the checkpoints in ``work.path``. Raises LakeError."""
    asked = marker_names(marker)
    above = work.path + "/" if work.path else ""
    here = f"/{work.path}"
    found: dict[str, Found] = {}
    linked: set[str] = set()
    links: dict[str, set[str]] = {}
    sums: Entry | None = None
    async for path, entry in lake.listed_files(work.path):
        if path == work.path:
            raise LakeError(f"{url} is not a directory: give the one that holds the checkpoints")
        name, slash, inside = path[len(above) :].partition("/")
        if entry.is_symlink:
            if slash:
                links.setdefault(name, set()).add(inside)
            else:
                linked |= linked_names(here, lake.tree.target(entry.inode).decode("utf-8", "replace"))
            continue
        if name == SUMS_NAME and not slash:
            sums = entry
        if not is_checkpoint(name, match, is_dir=bool(slash)):
            continue
        item = found.setdefault(name, Found(Seen(name=name, is_dir=bool(slash))))
        item.seen.add(path.rpartition("/")[2], entry.size, entry.mtime_ns)
        item.files[inside or name] = entry
        if inside in asked:
            item.seen.markers.add(inside)
    for name in linked & found.keys():
        found[name].seen.linked = True
    for name in links.keys() & found.keys():
        found[name].links = frozenset(links[name])
    seen, now_ns = [item.seen for item in found.values()], work.node.clock.wall_ns()
    listing = make_listing(url, seen, marker=marker, match=match, now_ns=now_ns)
    return Place(listing, found, sums)


# -- results of verifying


@dataclass(slots=True)
class Doubt:
    """A file whose ETag is not the MD5 of its bytes: damaged, if the ETags of the store are MD5s."""

    path: str
    problem: str
    parts: bool


@dataclass(slots=True)
class Checked:
    """Result for one checkpoint. ``proofs`` counts files by the checks that they passed; ``unproven`` files have the
    right size, and no check applies to them."""

    name: str
    files: int = 0
    bytes: int = 0
    proofs: dict[str, int] = field(default_factory=dict)
    unproven: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)
    problems_more: int = 0
    """Files with problems beyond those in ``problems``."""
    doubts: list[Doubt] = field(default_factory=list)
    etags: set[bool] = field(default_factory=set)
    """Kinds of ETag that matched: of objects in one piece (False), in parts (True)."""
    _doubts_more: dict[bool, int] = field(default_factory=dict)
    """How many doubts were dropped of each kind, as in ``etags``."""

    def problem(self, path: str, text: str) -> None:
        self.problems.append((path, text))

    def shorten_doubts(self, doubts_max: int) -> None:
        """Keep the first doubts, and only count the others."""
        for doubt in self.doubts[doubts_max:]:
            self._doubts_more[doubt.parts] = self._doubts_more.get(doubt.parts, 0) + 1
        del self.doubts[doubts_max:]

    def judge_doubts(self, is_known: Callable[[bool], bool]) -> None:
        """Doubts about objects whose ETags are known to be MD5s are problems. ``is_known`` takes whether an object was
        stored in parts."""
        for doubt in self.doubts:
            if is_known(doubt.parts):
                self.problem(doubt.path, doubt.problem)
        self.problems_more += sum(count for parts, count in self._doubts_more.items() if is_known(parts))

    def file(
        self,
        path: str,
        size: int,
        findings: Sequence[Finding],
        *,
        crc32: bool = False,
        ours: bool = False,
        etag: str = "",
    ) -> None:
        """Record a file whose bytes were all read.

        ``crc32``: they match the CRC-32 in its pack. ``ours``: this program stored it, so its sizes of parts are
        known."""
        self.files += 1
        self.bytes += size
        parts = "-" in etag
        right = [finding.name for finding in findings if finding.verdict is Verdict.RIGHT] + ["crc32"] * crc32
        for name in right:
            self.proofs[name] = self.proofs.get(name, 0) + 1
        if "etag" in right:
            self.etags.add(parts)
        strong = {"sha256", "zip", "crc32"} & set(right)
        self.unproven += not {"etag", *strong} & set(right)
        for finding in findings:
            if finding.verdict is not Verdict.WRONG:
                continue
            if finding.name != "etag":
                self.problem(path, finding.problem)
            elif not strong and (ours or not parts):
                self.doubts.append(Doubt(path, finding.problem, parts))


@dataclass(slots=True)
class Report:
    """Result of a run; ``skipped`` checkpoints were not read, with the reasons."""

    path: str
    checkpoints: list[Checked] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def begin(self, name: str) -> Checked:
        self.checkpoints.append(Checked(name))
        return self.checkpoints[-1]

    @property
    def bad(self) -> list[str]:
        return [checked.name for checked in self.checkpoints if checked.problems]

    def summary(self) -> dict[str, object]:
        """The result for scripts; names are final."""
        return {
            "path": self.path,
            "bad": self.bad,
            "skipped": [{"name": name, "reason": reason} for name, reason in sorted(self.skipped.items())],
            "files": sum(checked.files for checked in self.checkpoints),
            "bytes": sum(checked.bytes for checked in self.checkpoints),
            "checkpoints": [
                {
                    "name": checked.name,
                    "ok": not checked.problems,
                    "files": checked.files,
                    "bytes": checked.bytes,
                    "proofs": dict(sorted(checked.proofs.items())),
                    "unproven": checked.unproven,
                    "problems": [{"path": path, "problem": text} for path, text in checked.problems],
                }
                for checked in self.checkpoints
            ],
        }

    def describe(self) -> str:
        """The result as text for users."""
        lines: list[str] = []
        for checked in self.checkpoints:
            proofs = [f"{name} {count:,}" for name, count in sorted(checked.proofs.items())]
            if checked.unproven:
                proofs.append(f"{checked.unproven:,} by their size only")
            how = f" ({', '.join(proofs)})" if proofs else ""
            lines.append(
                f"{checked.name}: {'BAD' if checked.problems else 'ok'}, {counted(checked.files, 'file')}, "
                f"{counted(checked.bytes, 'byte')}{how}"
            )
            lines += [f"  {path}: {text}" for path, text in checked.problems[:PROBLEMS_SHOWN_MAX]]
            if len(checked.problems) > PROBLEMS_SHOWN_MAX:
                lines.append(f"  … and {len(checked.problems) - PROBLEMS_SHOWN_MAX} more")
        lines += [f"{name}: not verified: {reason}" for name, reason in sorted(self.skipped.items())]
        return "\n".join(lines) or f"{self.path}: no checkpoints"


def judge_doubts(report: Report, md5_etags: bool | None) -> None:
    """Report doubts as problems if ETags of the store are known to be MD5s, from a mount or from other files.

    Else an ETag may be anything, as that of an encrypted object is, and proves nothing."""
    shown = {parts for checked in report.checkpoints for parts in checked.etags}
    for checked in report.checkpoints:
        checked.judge_doubts(lambda parts: bool(md5_etags) or parts in shown)


# -- verifying


@dataclass(slots=True)
class Job:
    """One file to read, and the result that it belongs to."""

    file: Moving
    sha256: str | None
    checked: Checked


async def run_verify(work: Work, args: protocol.VerifyArgs) -> protocol.Finished:
    """`verify`. Raises LakeError where the store does not answer."""
    async with open_lake_view(work.client, work.store, node=work.node, scratch=work.scratch) as lake:
        place = await find_checkpoints(lake, work, args.url, args.marker, args.match)
        report = Report(args.url)
        jobs = await _jobs(lake, place, args, report)
        verifier = Verifier(work.client, work, sum(job.file.source.size for job in jobs), len(jobs))
        await verifier.run(jobs)
    judge_doubts(report, args.md5_etags)
    return work.finished(report.summary(), report.describe(), failed=bool(report.bad))


async def _jobs(lake: LakeView, place: Place, args: protocol.VerifyArgs, report: Report) -> list[Job]:
    """The files to read, those of the oldest checkpoint last."""
    known = {item.name: item for item in place.listing.checkpoints}
    if args.names:
        chosen = [name.rstrip("/") for name in dict.fromkeys(args.names)]
    else:
        chosen = [item.name for item in place.listing.checkpoints if item.complete]
        report.skipped = {item.name: item.reason for item in place.listing.checkpoints if not item.complete}
        for name in args.not_stored:
            report.skipped[name] = "not all of it is in the store yet"
        chosen = [name for name in chosen if name not in report.skipped]
    outer = await _read_sums(lake, place.sums)
    jobs: list[Job] = []
    for name in chosen:
        found = known.get(name)
        checked = report.begin(name)
        if name in args.not_stored:
            checked.problem(name, "not all of it is in the store yet")
        if found is None:
            checked.problem(name, NO_CHECKPOINT)
            continue
        if not found.complete:
            checked.problem(name, f"incomplete: {found.reason}")
        jobs += await _jobs_of(lake, place.found[name], outer, checked)
    return jobs


async def _jobs_of(lake: LakeView, found: Found, outer: dict[str, str], checked: Checked) -> list[Job]:
    seen, files = found.seen, found.files
    sums = {path: outer[name] for path in files if (name := f"{seen.name}/{path}" if seen.is_dir else path) in outer}
    if seen.is_dir:
        inner = await _read_sums(lake, files.get(SUMS_NAME))
        for path in inner.keys() - files.keys() - found.links:
            checked.problem(path, f"missing, though {SUMS_NAME} has it")
        sums |= inner
        for index in [path for path in files if path.endswith(INDEX_SUFFIX) and "/" not in path]:
            for shard in await _shards(lake, files[index]):
                if shard not in files and shard not in found.links:
                    checked.problem(shard, f"missing, though {index} names it")
    jobs = []
    for path, entry in files.items():
        extent = lake.namespace.extent(entry)
        if extent is not None:
            jobs.append(Job(Moving(path, entry, extent), sums.get(path), checked))
    return jobs


async def _read_small(lake: LakeView, entry: Entry | None) -> bytes:
    """The bytes of a small file; empty if it is missing, too large, or damaged, which its own check reports."""
    extent = lake.namespace.extent(entry) if entry is not None else None
    if entry is None or extent is None or extent.size > SUMS_BYTES_MAX:
        return b""
    (read,) = await ExtentReader(lake.client).read([Moving("", entry, extent)])
    return read.data if read is not None else b""


async def _read_sums(lake: LakeView, entry: Entry | None) -> dict[str, str]:
    return parse_sha256sums(await _read_small(lake, entry))


async def _shards(lake: LakeView, entry: Entry) -> set[str]:
    """The files that an index of shards names, in the format of Hugging Face."""
    try:
        document = msgspec.json.decode(await _read_small(lake, entry))
    except MALFORMED:
        return set()
    shards = document.get("weight_map") if isinstance(document, dict) else None
    return {shard for shard in shards.values() if isinstance(shard, str)} if isinstance(shards, dict) else set()


class Verifier:
    """Reads files and checks them."""

    def __init__(
        self, client: StoreClient, work: Work, bytes_total: int, files_total: int, *, is_of_checkpoints: bool = True
    ) -> None:
        """Files that are not ``is_of_checkpoints`` may be anything, whatever their bytes begin with."""
        self._client, self._work, self._is_of_checkpoints = client, work, is_of_checkpoints
        self._bytes_total, self._files_total = bytes_total, files_total
        self._bytes = self._files = 0
        self._packed = ExtentReader(client)

    async def run(self, jobs: Sequence[Job]) -> None:
        """Verify all files. Raises LakeError where the store does not answer."""
        packed = [job for job in jobs if job.file.source.version.key.startswith(COMMITS)]
        plain = [job for job in jobs if not job.file.source.version.key.startswith(COMMITS)]
        await for_each(plain, self._verify_plain, FILES_AT_ONCE)
        await self._verify_packed(packed)

    def _progress(self, size: int, files: int = 0) -> None:
        self._bytes += size
        self._files += files
        self._work.progress(
            protocol.Progress(
                what="verifying",
                files_done=self._files,
                bytes_done=self._bytes,
                files_total=self._files_total,
                bytes_total=self._bytes_total,
            )
        )

    # -- in packs

    async def _verify_packed(self, jobs: Sequence[Job]) -> None:
        at = 0
        for chunk in chunks([job.file for job in jobs]):
            for job, read in zip(jobs[at : at + len(chunk)], await self._packed.read(chunk), strict=True):
                if read is None:
                    job.checked.file(job.file.path, job.file.source.size, [])
                    job.checked.problem(job.file.path, "its bytes in the pack are not those of its CRC-32, or gone")
                else:
                    checks = await self._checks(job, read.data[:8], partial(_from_memory, read.data))
                    await self._work.node.threads.run(_feed, checks, [memoryview(read.data)])
                    findings = [check.finish() for check in checks]
                    job.checked.file(job.file.path, job.file.source.size, findings, crc32=True)
                self._progress(job.file.source.size, 1)
            at += len(chunk)

    # -- plain objects

    async def _verify_plain(self, job: Job) -> None:
        try:
            await self._stream(job)
        except (NotFound, PreconditionFailed):
            job.checked.problem(job.file.path, "its object was removed or replaced")
        except DamagedCommit as error:
            job.checked.problem(job.file.path, str(error))
        self._progress(0, 1)

    async def _stream(self, job: Job) -> None:
        version, size = job.file.source.version, job.file.source.size
        meta = await self._client.head(version.key)
        if meta.etag != version.etag or meta.size != size:
            raise PreconditionFailed(f"{version.key} is another version")
        ours = bool(token_of(meta))
        etag = etag_check(version.etag, size, ours=ours)
        checks: list[Check] = [etag] if etag is not None else []
        if not size:
            checks += await self._checks(job, b"", partial(self._fetch, job.file.source))
        at = 0
        while at < size:
            datas = await self._windows(job.file.source, at, min(size, at + WINDOWS * WINDOW_BYTES))
            if not at:
                checks += await self._checks(job, bytes(datas[0][:8]), partial(self._fetch, job.file.source))
            await self._work.node.threads.run(_feed, checks, datas)
            length = sum(map(len, datas))
            at += length
            self._progress(length)
        job.checked.file(job.file.path, size, [check.finish() for check in checks], ours=ours, etag=version.etag)

    async def _windows(self, extent: Extent, start: int, end: int) -> list[memoryview]:
        starts = range(start, end, WINDOW_BYTES)
        datas = [memoryview(b"")] * len(starts)

        async def fetch(index: int) -> None:
            at = starts[index]
            datas[index] = memoryview(await self._fetch(extent, at, min(end, at + WINDOW_BYTES)))

        await for_each(range(len(starts)), fetch, WINDOWS)
        return datas

    async def _fetch(self, extent: Extent, start: int, end: int) -> bytes:
        version = extent.version
        fetched = await self._client.get(version.key, extent.offset + start, extent.offset + end, etag=version.etag)
        if len(fetched.data) != end - start:
            raise DamagedCommit(f"the store gave {len(fetched.data)} bytes for {end - start} from byte {start} on")
        return bytes(fetched.data)

    # -- checks

    async def _checks(self, job: Job, head: bytes, fetch: Fetch) -> list[Check]:
        checks: list[Check] = [sha256_check(job.sha256)] if job.sha256 is not None else []
        if not self._is_of_checkpoints:
            return checks
        if job.file.path.endswith(".safetensors"):
            checks.append(safetensors_check(job.file.source.size))
        if head[:4] == ZIP_MAGIC:
            checks.append(await _zip_check(job.file.source.size, fetch))
        return checks


async def _zip_check(size: int, fetch: Fetch) -> Check:
    start = max(0, size - TAIL_BYTES)
    while True:
        try:
            return zip_check(read_directory(await fetch(start, size), size))
        except TailTooShort as error:
            if error.start >= start or size - error.start > DIRECTORY_BYTES_MAX:
                return broken("zip", "the directory of the ZIP cannot be read")
            start = error.start
        except zipfile.BadZipFile:
            return broken("zip", "the ZIP has no directory at its end: it was cut short")


async def _from_memory(data: bytes, start: int, end: int) -> bytes:
    return data[start:end]


def _feed(checks: Sequence[Check], datas: Sequence[memoryview]) -> None:
    for data in datas:
        for check in checks:
            check.feed(data)
