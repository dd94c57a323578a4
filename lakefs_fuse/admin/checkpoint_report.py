"""What `checkpoint verify` found, gathered file by file and told at the end. No requests, no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lakefs_fuse.admin.checkpoint_sums import Finding, Verdict

PROBLEMS_SHOWN_MAX = 20


@dataclass(slots=True)
class Doubt:
    """An ETag that is no MD5 of these bytes: damage, if the store's ETags are MD5s."""

    path: str
    problem: str
    parts: bool


@dataclass(slots=True)
class Checked:
    """One checkpoint. ``proofs`` counts files by what showed them to be right; ``unproven`` files have the right size
    and nothing that could tell more."""

    name: str
    files: int = 0
    bytes: int = 0
    proofs: dict[str, int] = field(default_factory=dict)
    unproven: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    etags: set[bool] = field(default_factory=set)
    """Kinds of ETag that were right: of objects in one piece (False), in parts (True)."""

    def problem(self, path: str, text: str) -> None:
        self.problems.append((path, text))

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
        """All bytes of a file were read. ``crc32``: those in its pack are the right ones. ``ours``: this program stored
        it, so it knows how it was cut into parts."""
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
    """``skipped`` were not read, with why."""

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
        """For scripts; the names are final."""
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
        """For people."""
        lines: list[str] = []
        for checked in self.checkpoints:
            proofs = [f"{name} {count:,}" for name, count in sorted(checked.proofs.items())]
            if checked.unproven:
                proofs.append(f"{checked.unproven:,} by their size only")
            how = f" ({', '.join(proofs)})" if proofs else ""
            lines.append(
                f"{checked.name}: {'BAD' if checked.problems else 'ok'}, {checked.files:,} files, "
                f"{checked.bytes:,} bytes{how}"
            )
            lines += [f"  {path}: {text}" for path, text in checked.problems[:PROBLEMS_SHOWN_MAX]]
            if len(checked.problems) > PROBLEMS_SHOWN_MAX:
                lines.append(f"  … and {len(checked.problems) - PROBLEMS_SHOWN_MAX} more")
        lines += [f"{name}: not verified: {reason}" for name, reason in sorted(self.skipped.items())]
        return "\n".join(lines) or f"{self.path}: no checkpoints"


def mismatches_count(report: Report, md5_etags: bool | None) -> None:
    """Decide what wrong ETags mean. They are damage where the store is known to give MD5s: a mount found that out, or
    ETags of other files were right. Else they may be anything (of encrypted objects they are), and prove nothing."""
    shown = {parts for checked in report.checkpoints for parts in checked.etags}
    for checked in report.checkpoints:
        for doubt in checked.doubts:
            if md5_etags or doubt.parts in shown:
                checked.problem(doubt.path, doubt.problem)
