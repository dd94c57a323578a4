"""What a rename changes, case by case, without a lake."""

from __future__ import annotations

import msgspec
import pytest

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.record import Mkdir, ObjectRef, Operation, Put, Remove, Symlink
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.vfs.namespace.operations import RowSnapshot
from lakefs_fuse.vfs.ops.rename_plan import (
    LocalRename,
    LocalRenameFacts,
    MovedName,
    RenameFacts,
    Route,
    plan_in_steps,
    plan_local_rename,
    route_of,
)

FILE = Entry(ROOT_INODE, 2, b"f", 2, size=5, mtime_ns=7, etag="e2")
OTHER = Entry(ROOT_INODE, 3, b"g", 3, size=6, mtime_ns=8, etag="e3")
DIRECTORY = Entry(ROOT_INODE, 4, b"d", 4, Flag.DIRECTORY, mode=0o755, mtime_ns=9)
BELOW = Entry(4, 5, b"f", 5, size=5, mtime_ns=7, etag="e5")
LOCAL = Entry(4, 6, b"new", 6, Flag.LOCAL, mtime_ns=7)
COVERING = msgspec.structs.replace(LOCAL, etag="old")
OVERRIDING = msgspec.structs.replace(LOCAL, flags=Flag.LOCAL | Flag.OVERRIDING)
LINK = Entry(ROOT_INODE, 7, b"l", 7, Flag.SYMLINK, mtime_ns=7)
PACKED = Entry(ROOT_INODE, 8, b"p", 8, size=5, mtime_ns=7, place=1, offset=40)
ELSEWHERE = Entry(ROOT_INODE, 9, b"r", 9, size=5, mtime_ns=7, place=2)
PACK = ObjectRow(1, ".lakefs/commits/p.zip", "pe", 100)
MOVED = ObjectRow(2, "first/key", "me", 5)
THIRD = 1
"""Index of the first object beside those that every change has."""


def put(path: str, entry: Entry, **more: object) -> Operation:
    return Put(path, **{  # type: ignore[arg-type]
        "object": THIRD, "offset": entry.offset, "size": entry.size, "mode": entry.mode, "uid": entry.uid,
        "gid": entry.gid, "mtime_ns": entry.mtime_ns, **more,
    })  # fmt: skip


def mkdir(path: str, entry: Entry) -> Operation:
    return Mkdir(path, entry.mode, entry.uid, entry.gid, entry.mtime_ns)


def end(before: str, after: str, entry: Entry, **more: object) -> MovedName:
    return MovedName(before, after, entry, is_end=True, **more)  # type: ignore[arg-type]


CASES: dict[str, tuple[RenameFacts, Change]] = {
    "a plain object stays at its key": (
        RenameFacts((end("f", "n", FILE),)),
        Change(
            operations=[put("n", FILE), Remove("f", hides="e2")],
            objects=[ObjectRef(), ObjectRef("f", "e2", 5)], moves=[("f", "n")],
        ),
    ),
    "what lies under the new name is hidden, and goes": (
        RenameFacts((end("f", "g", FILE, hides="e3"),), replaced=(Deletion("g", "e3", due_ns=9),)),
        Change(
            operations=[put("g", FILE, hides="e3"), Remove("f", hides="e2")],
            objects=[ObjectRef(), ObjectRef("f", "e2", 5)], moves=[("f", "g")], doomed=[Deletion("g", "e3", due_ns=9)],
        ),
    ),
    "a name in a pack goes on meaning its member": (
        RenameFacts((end("p", "n", PACKED),), RowSnapshot({1: PACK})),
        Change(
            operations=[put("n", PACKED), Remove("p", by_date=True)],
            objects=[ObjectRef(), ObjectRef(PACK.key, "pe", 100)], moves=[("p", "n")],
        ),
    ),
    "a symbolic link keeps its target and attributes": (
        RenameFacts((end("l", "n", LINK),), RowSnapshot({}, {7: b"t"}, {7: {"user.x": b"1"}})),
        Change(
            operations=[
                Symlink("n", "t", LINK.uid, LINK.gid, 7, xattrs={"user.x": b"1"}), Remove("l", by_date=True),
            ],
            moves=[("l", "n")],
        ),
    ),
    "a directory comes before what is in it, and goes after it": (
        RenameFacts((end("d", "n", DIRECTORY), MovedName("d/f", "n/f", BELOW))),
        Change(
            operations=[
                mkdir("n", DIRECTORY), put("n/f", BELOW), Remove("d/f", hides="e5"), Remove("d", directory=True),
            ],
            objects=[ObjectRef(), ObjectRef("d/f", "e5", 5)], moves=[("d", "n")],
        ),
    ),
    "a file below that is not stored yet moves here only": (
        RenameFacts((end("d", "n", DIRECTORY), MovedName("d/new", "n/new", LOCAL))),
        Change(operations=[mkdir("n", DIRECTORY), Remove("d", directory=True)], moves=[("d", "n")]),
    ),
    "what such a file covers stays behind hidden": (
        RenameFacts(
            (
                end("d", "n", DIRECTORY),
                MovedName("d/new", "n/new", COVERING, orphans=(Deletion("d/new", "old"),)),
            )
        ),
        Change(
            operations=[mkdir("n", DIRECTORY), Remove("d/new", hides="old"), Remove("d", directory=True)],
            moves=[("d", "n")], doomed=[Deletion("d/new", "old")],
        ),
    ),
    "the directory that only this name made visible stays": (
        RenameFacts((end("d/f", "n", BELOW),), parent=("d", DIRECTORY)),
        Change(
            operations=[put("n", BELOW), mkdir("d", DIRECTORY), Remove("d/f", hides="e5")],
            objects=[ObjectRef(), ObjectRef("d/f", "e5", 5)], moves=[("d/f", "n")],
        ),
    ),
    "in an exchange a file that is not stored yet moves here only": (
        RenameFacts((end("f", "g", COVERING, orphans=(Deletion("f", "old"),)), end("g", "f", OTHER, hides="old"))),
        Change(
            operations=[put("f", OTHER, hides="old"), Remove("g", hides="e3")],
            objects=[ObjectRef(), ObjectRef("g", "e3", 6)], moves=[("f", "g"), ("g", "f")],
            doomed=[Deletion("f", "old")],
        ),
    ),
    "an exchange removes no name": (
        RenameFacts((end("f", "g", FILE, hides="e3"), end("g", "f", OTHER, hides="e2"))),
        Change(
            operations=[
                put("g", FILE, hides="e3"),
                put("f", OTHER, object=THIRD + 1, hides="e2"),
            ],
            objects=[ObjectRef(), ObjectRef("f", "e2", 5), ObjectRef("g", "e3", 6)], moves=[("f", "g"), ("g", "f")],
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("names_max", [1, 100])
def test_plan_in_steps_of_the_same_facts_is_the_same_change(case: str, names_max: int) -> None:
    facts, wanted = CASES[case]
    for _ in range(2):
        steps = plan_in_steps(facts, names_max)
        with pytest.raises(StopIteration) as end:
            while True:
                next(steps)
        assert end.value.value == wanted


LOCAL_CASES: dict[str, tuple[LocalRenameFacts, LocalRename]] = {
    "a name that nobody saw": (LocalRenameFacts("new", LOCAL), LocalRename(None, LOCAL)),
    "a name that a commit may show": (
        LocalRenameFacts("new", LOCAL, is_visible=True),
        LocalRename(Change(operations=[Remove("new")]), LOCAL),
    ),
    "what the file had replaced is hidden": (
        LocalRenameFacts("new", msgspec.structs.replace(LOCAL, etag="old", stamp=4), orphans=(Deletion("new", "old"),)),
        LocalRename(Change(operations=[Remove("new", hides="old")], doomed=[Deletion("new", "old")]), LOCAL),
    ),
    "over a plain object": (
        LocalRenameFacts("new", LOCAL, there=msgspec.structs.replace(OTHER, stamp=3), there_etag="e3"),
        LocalRename(None, msgspec.structs.replace(LOCAL, etag="e3", stamp=3)),
    ),
    "over a member of a pack": (
        LocalRenameFacts("new", LOCAL, there=PACKED, there_row=PACK),
        LocalRename(None, OVERRIDING),
    ),
    "what the file had replaced was in a pack": (
        LocalRenameFacts("new", msgspec.structs.replace(OVERRIDING, etag="old", stamp=4)),
        LocalRename(Change(operations=[Remove("new", hides="old", by_date=True)]), LOCAL),
    ),
    "over an object at another key": (
        LocalRenameFacts("new", LOCAL, there=ELSEWHERE, there_row=MOVED),
        LocalRename(None, msgspec.structs.replace(OVERRIDING, place=2), "first/key"),
    ),
}


@pytest.mark.parametrize("case", LOCAL_CASES)
def test_plan_local_rename_of_the_same_facts_is_the_same_plan(case: str) -> None:
    facts, wanted = LOCAL_CASES[case]
    assert plan_local_rename(facts) == wanted
    assert plan_local_rename(facts) == wanted


@pytest.mark.parametrize(
    ("ends", "is_writeback", "is_held", "wanted"),
    [
        ([LOCAL], False, False, Route.LOCAL),
        ([LOCAL], True, True, Route.LOCAL),
        ([FILE], True, False, Route.JOURNALED),
        ([FILE], True, True, Route.JOURNALED),
        ([FILE, OTHER], True, False, Route.COMMITTED),
        ([FILE, OTHER], True, True, Route.HELD),
        ([FILE], False, True, Route.HELD),
        ([FILE], False, False, Route.COMMITTED),
        ([LOCAL, FILE], False, False, Route.COMMITTED),
        ([FILE, LOCAL], True, True, Route.HELD),
        ([LOCAL, COVERING], False, False, Route.HELD),
    ],
)
def test_route_of_a_rename(ends: list[Entry], is_writeback: bool, is_held: bool, wanted: Route) -> None:
    for _ in range(2):
        assert route_of(ends, is_writeback=is_writeback, is_held=is_held) is wanted
