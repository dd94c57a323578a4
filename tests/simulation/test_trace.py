"""Which commit is the newest of a path, as the oracle asks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from lakefs_fuse.commits.archive import commit_key
from lakefs_fuse.commits.record import ANY, Mkdir, ObjectRef, Operation, Put, Remove
from tests.commits.archives import commit_of
from tests.commits.records import TIME, WRITER, record_of
from tests.simulation.trace import Commits

OBJECTS = (ObjectRef("old", "before", 100), ObjectRef("old", "after", 100))


def commit(time: int, *operations: Operation, moves: Sequence[tuple[str, str]] = ()) -> dict[str, bytes]:
    record = replace(record_of(*operations, objects=OBJECTS, time=time), moves=list(moves))
    return {commit_key(time, WRITER): commit_of({}, record=record)}


@pytest.mark.parametrize("replaces", [1, ANY])
def test_newest_commit_of_a_path_is_not_one_of_a_single_version(replaces: int) -> None:
    removed = commit(TIME, Remove("new"))
    replaced = commit(TIME + 1, Put("new", 2, 0, 100, 0o644, 1, 2, 3, replaces=replaces))
    newest = Commits().newest("new", removed | replaced)
    assert newest is not None
    assert type(newest[1]) is (Put if replaces == ANY else Remove)


@pytest.mark.parametrize("last", [Mkdir("d", 0o755, 1, 2, 3), Remove("d", directory=True), Remove("d")])
@pytest.mark.parametrize("is_made", [True, False])
def test_directory_is_made_unless_a_later_commit_removes_it(last: Operation, is_made: bool) -> None:
    made = commit(TIME, *[Mkdir("d", 0o755, 1, 2, 3)][: int(is_made)], Mkdir("d/e", 0o755, 1, 2, 3))
    found = Commits().is_directory_made("d", made | commit(TIME + 1, last))
    assert found == (isinstance(last, Mkdir) or (is_made and not getattr(last, "directory", False)))


@pytest.mark.parametrize("old", ["d", "d/e"])
@pytest.mark.parametrize("removed", ["d", "d/e"])
@pytest.mark.parametrize("is_directory", [True, False])
def test_directory_is_moved_by_a_commit_that_removes_it_at_its_old_name(
    old: str, removed: str, is_directory: bool
) -> None:
    commits = commit(TIME, Remove(removed, directory=is_directory), moves=[("d", "g")])
    new = "g" + old[1:]
    assert Commits().is_directory_moved(old, new, commits) == (is_directory and removed == old)
    assert not Commits().is_directory_moved(old, f"{new}g", commits)
    assert not Commits().is_directory_moved(new, old, commits)
    assert not Commits().is_directory_moved(old, new, commits | commit(TIME + 1, moves=[("d", "g")]))
