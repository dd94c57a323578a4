"""Counts that say how hard the source is to follow: their bounds go down, or say why not."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.measure_journeys import measure
from scripts.measure_mechanisms import MECHANISMS
from scripts.measure_structure import ROOT, assigned_outside, cycles, modules, nodes_of, statements, widest_constructor

CLOSE = 32, 68
"""One each for the question whether the file is a checkpoint, whose writer may have been killed, for reading staged
bytes to the end (`local_disk.pread_all`), for what of earlier commits is not settled (`Committer.reconcile`), for a
draft's target, which methods change whose names say why, for `ObjectWriter`, which is not in `Publisher`'s module: the
two were 965 lines; for the barrier of the tree, at which a stored file waits for the rename of its directory; and for
the requests that wait (`WaitingRequests`), of a rename too. One switch for `ObjectHistories`, a class where there were
functions on another's attribute."""
RENAME = 40, 272
"""One each for the rule which keys are markers of directories, for the rules of files, apart from the rows that they
change, for histories of names, and for the steps in which a directory is renamed behind the barrier; switches also
for the clock of `Poller.catch_up`, for `count_repeated`, which is beside what operations mean, for the file that had
each name before, with which its history begins, for the target of a commit, which is not sent over itself, for the
time at which the node last heard of others, and for the first entry of a directory, of which the tree hears when a
batch is committed."""
CYCLES = 0
ASSIGNED_OUTSIDE = 0
PARAMETERS = 8


async def test_requests_cross_no_more_modules_than_before(tmp_path: Path) -> None:
    """Bounds: modules, and switches with some room for what runs beside."""
    journeys = await measure(tmp_path)
    for name, (most, switches) in {"close": CLOSE, "rename": RENAME}.items():
        found = journeys[name]
        assert 10 < len(found.modules) <= most, sorted(found.modules)
        assert found.switches <= switches, f"{name}: {found.switches} switches"


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Trees of the whole source are a million objects and no garbage: each collection would visit them all."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    gc.enable()


@pytest.mark.usefixtures("without_collection")
def test_source_has_no_more_knots_than_before() -> None:
    trees = modules(ROOT)
    assert len(cycles(trees)) <= CYCLES, cycles(trees)
    assert len(assigned_outside(trees)) <= ASSIGNED_OUTSIDE, assigned_outside(trees)
    assert widest_constructor(trees)[0] <= PARAMETERS, widest_constructor(trees)


def test_only_its_methods_change_a_draft_target() -> None:
    """Whether O_EXCL is decided, and what a version replaces, is said by the name of a method. The store client keeps
    its attempts in a target."""
    fields = {"key", "describe", "replaces", "copied_from", "expected", "removed", "hidden_ns", "if_absent", "path"}
    changes = re.compile(rf"\btarget\.({'|'.join(fields)})\b(, [\w.]+)* = ")
    found = [path for path in (ROOT / "lakefs_fuse").rglob("*.py") if changes.search(path.read_text())]
    assert changes.search("draft.target.if_absent = False") and not found


def test_mechanisms_that_are_measured_exist_in_the_product() -> None:
    """The table finds what each of them replaces when it is imported."""
    assert len({mechanism.name for mechanism in MECHANISMS}) == len(MECHANISMS) > 30


def test_measures_of_a_source_that_is_known() -> None:
    one = ast.parse(
        '"""Text."""\nfrom lakefs_fuse import two\nclass A:\n    def __init__(self, x, *, y):\n        self.hook = x\n'
    )
    two = ast.parse("def late(a):\n    import lakefs_fuse.one\n    a.hook, a.other = 1, 2\n")
    record = ast.parse("class B(msgspec.Struct):\n    other: int\n    def f(self):\n        self.hook.other = 1\n")
    trees = {"lakefs_fuse.one": one, "lakefs_fuse.two": two, "lakefs_fuse.three": record}
    assert [statements(tree) for tree in trees.values()] == [4, 3, 4]
    assert cycles(trees) == [["lakefs_fuse.one", "lakefs_fuse.two"]]
    assert assigned_outside(trees) == {"hook": ["lakefs_fuse.two:3 a.hook"]}
    assert widest_constructor(trees) == (2, "lakefs_fuse.one.A")
