"""A commit of many operations is applied in steps: bounded ones, and who asks about its directories waits for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits.applier import STEP_OPERATIONS
from lakefs_fuse.commits.apply_record import CARRIED_PER_OPERATION, Application
from lakefs_fuse.commits.change import Change, merged
from lakefs_fuse.commits.name_history import DOUBTS_AT_ONCE
from lakefs_fuse.commits.record import Mkdir, Operation, Record, Remove, Symlink
from lakefs_fuse.meta import tree
from lakefs_fuse.meta.barrier import About
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from tests.commits.nodes import Node, archive, at, plain, put

OPERATIONS = 20 * STEP_OPERATIONS + 7
WRITER = "00000002"
NAMES = 5 * STEP_OPERATIONS * CARRIED_PER_OPERATION


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "meta")
    made.commit(0, put("big/before"), put("big/kept"), put("other/file"), Mkdir("big/empty", 0o755, 0, 0, 0))
    yield made
    made.database.close()


def large() -> Record:
    """Files, directories and links in one directory, some of them below one that nobody has yet."""
    kinds: tuple[Callable[[int], Operation], ...] = (
        lambda number: put(f"big/{number}"),
        lambda number: Mkdir(f"big/{number}", 0o700, 0, 0, 0),
        lambda number: Symlink(f"new/{number}", "x", 0, 0, 0),
    )
    operations: list[Operation] = [Remove("big/before"), Remove("big/empty", directory=True)]
    operations += [kinds[number % 3](number) for number in range(OPERATIONS)]
    return Record(writer=WRITER, time=at(10), operations=operations)


async def apply(node: Node, record: Record) -> None:
    await node.applier.apply_in_steps(record, archive(record.time, record.writer))


async def test_apply_in_steps_changes_few_names_at_a_time(node: Node) -> None:
    counts: list[int] = []

    async def watch() -> None:
        while not node.applier.commits.is_applied(at(10), WRITER):
            counts.append(len(node.shown()))
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        nursery.start_soon(apply, node, large())
    grown = [after - before for before, after in pairwise(counts)]
    assert len(counts) >= OPERATIONS // STEP_OPERATIONS - 1
    assert max(grown) <= 2 * STEP_OPERATIONS + 1  # the look may come first in one turn and last in the next


async def test_apply_in_steps_request_about_its_directories_waits_for_all(node: Node) -> None:
    barrier, seen = node.tree.barrier, dict[str, int]()
    big, gone = node.inode("big"), node.found("big/before").inode
    asked = {
        "listing": (About.DIRECTORY, big, b""),
        "name": (About.NAME, big, b"12"),
        "missing directory": (About.NAME, ROOT_INODE, b"new"),
        "attributes": (About.INODE, gone, b""),
        "another directory": (About.DIRECTORY, node.inode("other"), b""),
        "another name": (About.NAME, big, b"kept"),
        "another inode": (About.INODE, node.inode("big/kept"), b""),
    }

    async def ask(what: str, about: About, inode: int, name: bytes) -> None:
        await barrier.wait_for(about, inode, name)
        seen[what] = len(node.shown())

    async def ask_all() -> None:
        while not barrier.is_up:
            await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            for what, request in asked.items():
                nursery.start_soon(ask, what, *request)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(apply, node, large())
        nursery.start_soon(ask_all)
    everything = len(node.shown())
    others = {what for what in asked if what.startswith("another")}
    assert {what for what in asked if seen[what] < everything} - {"attributes"} == others
    assert not barrier.is_up


@pytest.mark.parametrize("steps", [1, 2, 4])
async def test_apply_in_steps_crash_between_two_is_mended_by_the_next(node: Node, tmp_path: Path, steps: int) -> None:
    record = large()
    whole = Node(tmp_path / "whole")
    whole.commit(0, put("big/before"), put("big/kept"), put("other/file"), Mkdir("big/empty", 0o755, 0, 0, 0))
    whole.apply(record)
    expected = whole.shown()
    whole.database.close()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(apply, node, record)
            for _ in range(steps + 1):
                await trio.lowlevel.checkpoint()
            scope.cancel()
    assert not node.applier.commits.is_applied(record.time, record.writer)
    assert not node.tree.barrier.is_up
    node.database.close()
    again = Node(tmp_path / "meta")
    await apply(again, record)
    assert again.shown() == expected
    again.database.close()


async def test_apply_in_steps_crash_after_an_object_is_removed_shows_what_it_covered(tmp_path: Path) -> None:
    """The object counted over the file by its date."""
    node = Node(tmp_path / "meta")
    node.list(plain("f", "e1", 20))
    node.commit(10, put("f"))
    names = [Mkdir(f"d{number}", 0o755, 0, 0, 0) for number in range(OPERATIONS)]
    record = Record(writer=WRITER, time=at(30), operations=[Remove("f", hides="e1"), *names])
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(apply, node, record)
            while not node.found("f").place:
                await trio.lowlevel.checkpoint()
            scope.cancel()
    assert not node.applier.commits.is_applied(record.time, record.writer)
    node.database.close()
    again = Node(tmp_path / "meta")
    assert again.found("f").place
    again.database.close()


async def test_apply_in_steps_change_made_here_meanwhile_is_newer(node: Node) -> None:
    record = large()
    here = node.rename("other/file", "other/renamed")
    mine = Change(operations=[Symlink("big/6", "mine", 0, 0, 0), Remove("big/3")])

    async def change() -> None:
        while not node.tree.barrier.is_up:
            await trio.lowlevel.checkpoint()
        node.apply_pending(1, here)
        node.apply_pending(2, mine)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(apply, node, record)
        nursery.start_soon(change)
    assert node.find("other/renamed") is not None
    assert node.find("other/file") is None
    assert node.tree.named(node.inode("big"), b"3") is None
    assert node.found("big/6").is_symlink
    assert node.applier.commits.is_applied(record.time, record.writer)


def renamed(node: Node) -> Record:
    """The rename of a directory of many files, plain ones and in a pack, as another node commits it."""
    node.list(*(plain(f"big/plain{number}", f"e{number}", 0) for number in range(NAMES)), directory="big")
    node.commit(1, *(put(f"big/sub/{number}") for number in range(NAMES)))
    return merged([node.rename("big", "moved")], WRITER, at(10))


def steps(node: Node, record: Record, *, until: str) -> int:
    """Apply so many steps that a path has just come to be; answers their number."""
    application = Application(node.applier.paths, record, archive(record.time, WRITER), record.time, whole=True)
    for number, _ in enumerate(application.steps(STEP_OPERATIONS), 1):
        node.applier.paths.forget_paths()
        if node.find(until) is not None:
            return number
    raise AssertionError(f"{until} never came")


async def test_moves_are_checked_in_steps_and_made_in_one(node: Node) -> None:
    record = renamed(node)
    inodes = {path: entry.inode for path, entry in node.tree.below(node.inode("big"), "moved")}
    assert steps(node, record, until="moved/sub/0") >= 2 * 2 * NAMES // (STEP_OPERATIONS * CARRIED_PER_OPERATION)
    assert node.find("big") is None
    await apply(node, record)
    assert {path: entry.inode for path, entry in node.tree.below(node.inode("moved"), "moved")} == inodes


@pytest.mark.parametrize("at_step", [1, 8, 18, 23])
async def test_moves_what_is_changed_between_two_steps_is_checked_again(node: Node, at_step: int) -> None:
    """A file that the record does not name is not carried along."""
    record = renamed(node)
    application = Application(node.applier.paths, record, archive(record.time, WRITER), record.time, whole=True)
    for number, _ in enumerate(application.steps(STEP_OPERATIONS), 1):
        node.applier.paths.forget_paths()
        if number == at_step:
            assert node.find("moved") is None
            mine = Change(operations=[put("big/sub/mine"), Remove("big/sub/7")])
            node.apply_pending(1, mine)
    shown = node.shown()
    assert "big/sub/mine" in shown
    assert {path for path in shown if path.startswith("moved/")} >= {f"moved/plain{number}" for number in range(NAMES)}
    assert not any(path.startswith("big/plain") for path in shown)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("at_step", [1, 18, *(pytest.param(step, marks=pytest.mark.long) for step in (8, 23))])
async def test_moves_the_source_itself_is_checked_again(node: Node, at_step: int, replaced: bool) -> None:
    """Its attributes were changed here since, or another directory has its name."""
    record = renamed(node)
    application = Application(node.applier.paths, record, archive(record.time, WRITER), record.time, whole=True)
    for number, _ in enumerate(application.steps(STEP_OPERATIONS), 1):
        node.applier.paths.forget_paths()
        if number != at_step:
            continue
        assert node.find("moved") is None
        if replaced:
            node.apply_pending(1, node.rename("big", "aside"))
        operation = put("big/mine") if replaced else Mkdir("big", 0o711, 0, 0, 0)
        node.apply_pending(2, Change(operations=[operation]))
    assert node.find("big/mine") if replaced else node.found("big").mode & 0o777 == 0o711


async def test_moves_a_crash_before_the_rows_move_is_mended(node: Node, tmp_path: Path) -> None:
    record = renamed(node)
    whole = Node(tmp_path / "whole")
    whole.commit(0, put("big/before"), put("big/kept"), put("other/file"), Mkdir("big/empty", 0o755, 0, 0, 0))
    assert renamed(whole) == record
    whole.apply(record)
    application = Application(node.applier.paths, record, archive(record.time, WRITER), record.time, whole=True)
    some = application.steps(STEP_OPERATIONS)
    for _ in range(20):
        next(some)
    assert node.find("moved") is None
    assert node.tree.objects.find("big/plain5", "e5") is not None  # freed from its key
    some.close()
    node.database.close()
    again = Node(tmp_path / "meta")
    await apply(again, record)
    assert again.shown() == whole.shown()
    again.database.close()
    whole.database.close()


async def test_doubts_read_the_rows_of_many_names_together(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    record = renamed(node)
    counts = list[int]()
    get_many = Database.get_many

    def count(database: Database, keys: Sequence[bytes]) -> list[bytes | None]:
        counts.append(len(keys))
        return get_many(database, keys)

    monkeypatch.setattr(Database, "get_many", count)
    assert not any(node.applier.doubts(record))
    groups = -(-len(record.operations) // DOUBTS_AT_ONCE)
    assert 0 < len(counts) <= 2 * groups, "names, and the rows to which they lead"
    assert max(counts) <= DOUBTS_AT_ONCE
    assert sum(counts) <= 2 * (2 * NAMES + 8), "no names in a missing directory"


async def test_apply_in_steps_reads_a_row_once_to_check_and_once_to_change(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed files have nothing at their own keys that a rename has to free."""
    node.commit(1, *(put(f"big/{number}") for number in range(NAMES)))
    record = merged([node.rename("big", "moved")], WRITER, at(10))
    unpack, names = tree.unpack_entry, list[bytes]()

    def count(parent: int, cookie: int, row: bytes) -> Entry:
        entry = unpack(parent, cookie, row)
        names.append(entry.name)
        return entry

    monkeypatch.setattr(tree, "unpack_entry", count)
    await apply(node, record)
    assert Counter(names)[b"7"] == 2
    assert 2 * NAMES <= len(names) < 2.5 * NAMES


async def test_apply_in_steps_looks_a_directory_up_once_in_a_turn(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, linked = list[int](), Database.linked

    def count(database: Database, links: Sequence[tuple[bytes, bytes]], length: int) -> tuple[bytes, bytes] | None:
        lookups.append(len(links))
        return linked(database, links, length)

    monkeypatch.setattr(Database, "linked", count)
    names = [Symlink(f"new/{number}", "x", 0, 0, 0) for number in range(OPERATIONS)]
    await apply(node, Record(writer=WRITER, time=at(10), operations=names))
    assert len(lookups) < OPERATIONS / 4
