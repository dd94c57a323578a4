"""Operations that are read and written together leave what they leave one after the other."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lakefs_fuse.commits import apply_record
from lakefs_fuse.commits.record import OWN, THIS, Mkdir, ObjectRef, Operation, Put, Record, Relocate, Remove, SetAttr
from lakefs_fuse.commits.record import Symlink as Link
from lakefs_fuse.meta.database import Batch
from tests.commits.nodes import Node, archive, at, plain
from tests.tiers import examples

PATHS = ("a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "n/a", "n")
OBJECTS = [ObjectRef(), ObjectRef("x", "ex", 9), ObjectRef("d/a", "ea", 1), ObjectRef("x", "ex", 9)]
paths, etags, times = st.sampled_from(PATHS), st.sampled_from(["", "ea", "eb"]), st.integers(1, 3)
places = st.sampled_from([(OWN, 0), (THIS, 3), (1, 2), (2, 0), (3, 4)])
xattrs = st.sampled_from([{}, {"user.x": b"1"}])
operations = st.one_of(
    st.builds(
        lambda path, place, etag, time, extra: Put(path, place[0], place[1], 1, 0o600, 1, 1, time, etag, extra),
        paths, places, etags, times, xattrs,
    ),
    st.builds(lambda path, time, extra: Mkdir(path, 0o700, 1, 1, time, extra), paths, times, xattrs),
    st.builds(lambda path, etag, time: Link(path, "t", 1, 1, time, etag), paths, etags, times),
    st.builds(Remove, paths, st.booleans(), etags),
    st.builds(
        lambda path, place, etag, time, extra: SetAttr(path, place[0], place[1], 1, etag, 0o640, 1, 1, time, extra),
        paths, places, etags, times, xattrs,
    ),
    st.builds(
        lambda path, before, place, etag, time: Relocate(
            path, before[0], before[1], etag, place[0], place[1], 1, 0o600, 1, 1, time, "eb"
        ),
        paths, places, places, etags, times,
    ),
)  # fmt: skip
records = st.lists(st.lists(operations, min_size=1, max_size=12), min_size=1, max_size=3)


def left_by(node: Node, changes: list[list[Operation]], listed: list[str]) -> tuple[object, ...]:
    """What commits of these changes leave of a directory that was listed before."""
    node.list(*[plain(path, f"e{path[-1]}", 1.5) for path in listed])
    for number, change in enumerate(changes):
        record = Record(writer=f"0000000{number}", time=at(number + 1), objects=OBJECTS, operations=change)
        node.applier.apply(record, archive(record.time, record.writer), whole=True)
    stamps = {path: (entry.stamp, entry.flags, entry.ctime_ns) for path, entry in node.tree.below(1, "")}
    hidden, removed = node.tree.hidden, list(node.tree.tombstones.below(b""))
    assert node.counts() == node.counted_anew()
    return node.shown(), stamps, hidden, removed, node.counts()


def put(path: str) -> Put:
    return Put(path, THIS, 3, 1, 0o600, 1, 1, 1)


@settings(max_examples=examples(200))
@example(changes=[[put("d/a")], [Remove("d/a"), put("d/b")]], listed=[])
@example(changes=[[put("d/b"), Remove("d/b"), put("d"), put("d/a")]], listed=[])
@given(changes=records, listed=st.lists(st.sampled_from(["a", "b", "n"]), unique=True))
def test_apply_of_operations_together_leaves_what_one_by_one_leaves(
    tmp_path_factory: pytest.TempPathFactory, changes: list[list[Operation]], listed: list[str]
) -> None:
    left = []
    for together_max in (1, 512):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apply_record, "TOGETHER_MAX", together_max)
            node = Node(tmp_path_factory.mktemp("node") / "meta")
            left.append(left_by(node, changes, listed))
            node.close()
    assert left[0] == left[1]


def test_apply_of_removals_together_writes_one_batch(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path_factory.mktemp("node") / "meta")
    names = [f"d/{number}" for number in range(100)]
    node.commit(1, *[Put(name, THIS, number, 1, 0, 0, 0, 0) for number, name in enumerate(names)])
    batches: list[Batch] = []
    commit = node.database.commit

    def counted(batch: Batch, *, sync: bool = False) -> None:
        batches.append(batch)
        commit(batch, sync=sync)

    monkeypatch.setattr(node.database, "commit", counted)
    gone = [Remove(f"gone/{number}", directory=True) for number in range(100)]
    node.commit(2, *[Remove(name) for name in names], *gone)
    assert node.shown() == {}
    assert len(batches) <= 4  # the names, their directory, the note that the commit is applied
    node.close()
