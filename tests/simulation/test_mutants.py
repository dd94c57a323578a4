"""Every mutant fits the product as it is now: its texts occur once, and what replaces them compiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.simulation.mutant import PACKAGE, Mutant, MutantError, Replacement, apply, load_mutants, mutate

ALL = load_mutants()


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_mutant_of_this_source_compiles_and_differs(mutant: Mutant) -> None:
    assert mutant.breaks.strip()
    for file, source in mutate(mutant).items():
        assert source != (PACKAGE / file).read_text()
        compile(source, file, "exec", dont_inherit=True)


def test_mutants_of_one_source_are_different() -> None:
    assert len({str(mutate(mutant)) for mutant in ALL}) == len(ALL)


def test_apply_to_a_directory_makes_a_package_that_is_imported(tmp_path: Path) -> None:
    mutant = ALL[0]
    apply(mutant, tmp_path)
    (change,) = mutant.change
    assert change.replace in (tmp_path / "lakefs_fuse" / change.file).read_text()
    assert change.find in (PACKAGE / change.file).read_text()
    names = {path.name for path in PACKAGE.rglob("*.so")}
    assert {path.name for path in (tmp_path / "lakefs_fuse").rglob("*.so")} == names
    source = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lakefs_fuse; print(lakefs_fuse.__file__)"
    imported = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert imported.stdout.strip() == str(tmp_path / "lakefs_fuse" / "__init__.py")


@pytest.mark.parametrize(
    ("find", "said"), [("no such text", "0 times, not once"), ("import", "times, not once"), ("", "0 times, not once")]
)
def test_mutate_with_a_text_that_is_not_there_once_raises(find: str, said: str) -> None:
    moved = replace(ALL[0], change=[Replacement(ALL[0].change[0].file, find, "")])
    with pytest.raises(MutantError, match=f"{ALL[0].name}: .*{said}"):
        mutate(moved)


def test_mutate_of_a_file_that_moved_raises(tmp_path: Path) -> None:
    moved = replace(ALL[0], change=[Replacement("commits/elsewhere.py", "a", "b")])
    with pytest.raises(MutantError, match=r"there is no commits/elsewhere\.py"):
        apply(moved, tmp_path)
    assert not list(tmp_path.iterdir())
