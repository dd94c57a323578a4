"""Mutants of the product: small changes, each of which loses, resurrects or tears something.

A simulation that finds nothing proves little unless it finds these. Each is a file below `mutants`: its ``name``, the
``profile`` of the workload that should find it, what it ``breaks`` and by which sequence of events, and its changes:
texts that occur exactly once in a file of the package, with what replaces them.

What always holds (*no mutant in place*): the package that runs the tests is only read. `apply` makes a copy, for a
process of its own to import: its ``sys.path`` begins with the target. Callable from any thread; nothing is kept.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

import lakefs_fuse

PACKAGE = Path(lakefs_fuse.__file__).parent
MUTANTS = Path(__file__).parent / "mutants"

Profile: TypeAlias = Literal["packs", "turns", "mixed", "writeback", "crash", "faulty", "power", "directed", "foreign"]


class MutantError(Exception):
    """A mutant does not fit the product as it is now."""


class Replacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text of ``file``, which is relative to the package, and what replaces it."""

    file: str
    find: str
    replace: str


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module's head."""

    name: str
    profile: Profile
    breaks: str
    change: list[Replacement]


def load_mutants() -> list[Mutant]:
    """All mutants, by name. Raises msgspec.ValidationError, or MutantError where a name is not that of its file."""
    mutants = []
    for path in sorted(MUTANTS.glob("*.toml")):
        mutant = msgspec.convert(tomllib.loads(path.read_text()), Mutant)
        if mutant.name != path.stem or not mutant.change:
            raise MutantError(f"{path.name}: it is named {mutant.name!r} and has {len(mutant.change)} changes")
        mutants.append(mutant)
    return mutants


def mutate(mutant: Mutant) -> dict[str, str]:
    """The changed files by their paths in the package. Raises MutantError where a text to be replaced does not occur
    exactly once."""
    sources: dict[str, str] = {}
    for change in mutant.change:
        path = PACKAGE / change.file
        if not path.is_file():
            raise MutantError(f"{mutant.name}: there is no {change.file}")
        source = sources.get(change.file) or path.read_text()
        count = source.count(change.find) if change.find else 0
        if count != 1:
            raise MutantError(f"{mutant.name}: {change.file} has {count} times, not once:\n{change.find}")
        sources[change.file] = source.replace(change.find, change.replace)
    return sources


def apply(mutant: Mutant, target: Path) -> None:
    """Copy the package, compiled libraries included, to ``target``/lakefs_fuse, and make the mutant's changes there.
    Raises MutantError, before anything is copied, where it does not fit; FileExistsError where a copy is there."""
    sources = mutate(mutant)
    copy = target / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, source in sources.items():
        (copy / file).write_text(source)
