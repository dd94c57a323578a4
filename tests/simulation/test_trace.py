"""Which commit is the newest of a path, as the oracle asks."""

from __future__ import annotations

import pytest

from lakefs_fuse.commits.archive import commit_key
from lakefs_fuse.commits.record import ANY, ObjectRef, Operation, Put, Remove
from tests.commits.archives import commit_of
from tests.commits.records import TIME, WRITER, record_of
from tests.simulation.trace import Commits

OBJECTS = (ObjectRef("old", "before", 100), ObjectRef("old", "after", 100))


def commit(time: int, *operations: Operation) -> dict[str, bytes]:
    return {commit_key(time, WRITER): commit_of({}, record=record_of(*operations, objects=OBJECTS, time=time))}


@pytest.mark.parametrize("replaces", [1, ANY])
def test_newest_commit_of_a_path_is_not_one_of_a_single_version(replaces: int) -> None:
    removed = commit(TIME, Remove("new"))
    replaced = commit(TIME + 1, Put("new", 2, 0, 100, 0o644, 1, 2, 3, replaces=replaces))
    newest = Commits().newest("new", removed | replaced)
    assert newest is not None
    assert type(newest[1]) is (Put if replaces == ANY else Remove)
