"""Checks that the store has what a version of a dataset names, and with ``reads`` that the bytes have their sums.

Sums are those that the store and packs keep: CRC-32 of files in packs, and ETags that are MD5s. A file of another
object has its size alone, and counts as unproven. Memory holds READ_FILES files and the first PROBLEMS_MAX problems.
Tasks of one trio loop; nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import trio

from lakefs_fuse.admin.checkpoints import Checked, Job, Report, Verifier, judge_doubts
from lakefs_fuse.admin.extent_reader import Moving
from lakefs_fuse.admin.snapshot_check import BadObject, BadObjects, find_bad_objects
from lakefs_fuse.admin.work import Work
from lakefs_fuse.commits.index.index import Dataset
from lakefs_fuse.errors import DamagedCommit
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.meta.tree import Tree, damaged_rows
from lakefs_fuse.quantity import counted
from lakefs_fuse.vfs.namespace.key_mapping import extent_of

PROBLEMS_MAX = 1000
READ_FILES = 1000
NAMES_PER_STEP = 512


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that cannot be read as it was: its object is ``missing`` or ``changed``, or its bytes are ``damaged``."""

    path: str
    kind: str
    key: str
    text: str


@dataclass(slots=True)
class Verified:
    """The result. ``files_hurt`` are all, of which the first are in ``problems``."""

    name: str
    objects: int = 0
    objects_bad: int = 0
    files: int = 0
    files_hurt: int = 0
    problems: list[Problem] = field(default_factory=list)
    read: Checked | None = None
    """What reading found, if bytes were read."""

    def add(self, problem: Problem) -> None:
        self.files_hurt += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)

    def summary(self) -> dict[str, object]:
        """The result for scripts; names are final."""
        read = self.read
        return {
            "dataset": self.name,
            "ok": not self.files_hurt,
            "objects": self.objects,
            "objects_bad": self.objects_bad,
            "files": self.files,
            "files_hurt": self.files_hurt,
            "bytes_read": 0 if read is None else read.bytes,
            "proofs": {} if read is None else dict(sorted(read.proofs.items())),
            "unproven": 0 if read is None else read.unproven,
            "problems": [
                {"path": each.path, "kind": each.kind, "object": each.key, "text": each.text} for each in self.problems
            ],
        }

    def describe(self) -> str:
        """The result as text for users."""
        lines = [f"{each.path}: {each.kind}: {each.text} ({each.key})" for each in self.problems]
        if self.files_hurt > len(self.problems):
            lines.append(f"… and {counted(self.files_hurt - len(self.problems), 'more file')}")
        lost = f"{counted(self.files_hurt, 'file')} of {counted(self.objects_bad, 'object')}"
        hurt = f"{lost} {'is' if self.files_hurt == 1 else 'are'} lost" if self.objects_bad else "ok"
        if self.files_hurt and not self.objects_bad:
            hurt = f"{counted(self.files_hurt, 'file is', 'files are')} damaged"
        lines.append(f"{self.name}: {hurt}: {counted(self.files, 'file')}, {counted(self.objects, 'object')} checked")
        if self.read is not None:
            proofs = [f"{name} {count:,}" for name, count in sorted(self.read.proofs.items())]
            proofs += [f"{self.read.unproven:,} by their size only"] if self.read.unproven else []
            read = counted(self.read.bytes, "byte")
            lines.append(f"{read} read; files by what proves them: {', '.join(proofs) or 'none'}")
        if self.objects_bad:
            lines.append("if other tools have copied or encrypted the lake, run `lakefs-fuse fsck --rebind`")
        return "\n".join(lines)


async def verify(work: Work, name: str, told: Dataset, tree: Tree, *, reads: bool) -> Verified:
    """Check a version by its rows. Raises LakeError: DamagedCommit where rows cannot be decoded; what the store raises
    where it does not answer."""
    done = Verified(name, files=told.files)
    for key, why in damaged_rows(tree.database):
        raise DamagedCommit(f"{name} has rows that cannot be read, {key[:40]!r} among them: {why}")
    work.report("comparing objects", 0, 0)
    bad = await find_bad_objects(work.client, tree.objects)
    done.objects, done.objects_bad = bad.checked, bad.count
    if bad.count:
        await _name_files(tree, bad, done)
    if reads:
        await _read(work, told, tree, bad, done)
    return done


async def _name_files(tree: Tree, bad: BadObjects, done: Verified) -> None:
    faults: dict[int, BadObject] = {each.row.number: each for each in bad.objects}
    for number, (path, entry) in enumerate(tree.below(ROOT_INODE, ""), 1):
        if number % NAMES_PER_STEP == 0:
            await trio.lowlevel.checkpoint()
        if not entry.place or entry.place not in bad.numbers:
            continue
        fault, row = faults.get(entry.place), tree.objects.get(entry.place)
        key = "" if row is None else row.key
        if fault is None:
            done.add(Problem(_text(path), "changed", key, "the object is gone or was replaced"))
        else:
            done.add(Problem(_text(path), fault.kind, key, fault.text))


async def _read(work: Work, told: Dataset, tree: Tree, bad: BadObjects, done: Verified) -> None:
    verifier = Verifier(work.client, work, told.bytes, told.files, is_of_checkpoints=False)
    report = Report(done.name)
    checked = report.begin(done.name)
    jobs = _jobs(tree, bad, checked)
    while some := list(islice(jobs, READ_FILES)):
        await verifier.run(some)
        checked.shorten_doubts(PROBLEMS_MAX)
        _move_problems(checked, done)
    judge_doubts(report, None)
    _move_problems(checked, done)
    done.files_hurt += checked.problems_more
    done.read = checked


def _move_problems(checked: Checked, done: Verified) -> None:
    for path, text in checked.problems:
        done.add(Problem(_text(path), "damaged", "", text))
    checked.problems.clear()


def _jobs(tree: Tree, bad: BadObjects, checked: Checked) -> Iterator[Job]:
    """The files whose objects are there."""
    for path, entry in tree.below(ROOT_INODE, ""):
        if entry.is_dir or entry.place in bad.numbers:
            continue
        extent = extent_of(tree, entry)
        if extent is not None:
            yield Job(Moving(path, entry, extent), None, checked)


def _text(path: str) -> str:
    return path.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
