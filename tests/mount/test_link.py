"""link(2) on real mounts: one winner for each name, and what publishes by it: Delta Lake and Lance."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, eventually
from tests.mount.test_commits import another, sync
from tests.tiers import sized

NAMES = sized(20, 1000)
ROUNDS = sized(40, 400)
APPENDS = sized(4, 30)


@pytest.fixture(params=["close", pytest.param("writeback", marks=pytest.mark.long)])
def nodes(make_lake: LakeMaker, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Lake, Lake]]:
    lake = make_lake("seaweedfs", "--refresh", "1", "--delete-after", "5m", "--durability", request.param).mount()
    with another(lake, tmp_path) as other:
        yield lake, other


def link_errno(source: Path, target: Path) -> int:
    try:
        os.link(source, target)
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.long  # vfs/test_link.py shows it
def test_of_two_mounts_that_link_one_name_one_wins_and_the_other_sees_it(nodes: tuple[Lake, Lake]) -> None:
    sources = [node.path / f"source{number}" for number, node in enumerate(nodes)]
    for number, source in enumerate(sources):
        source.write_text(f"of {number}")
    meeting = threading.Barrier(2)
    answers: list[list[int]] = [[], []]
    seen: list[list[str]] = [[], []]

    def run(number: int) -> None:
        for name in range(NAMES):
            target = nodes[number].path / f"{name}"
            meeting.wait()
            answers[number].append(link_errno(sources[number], target))
            seen[number].append(target.read_text())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in range(NAMES):
        both = [answers[number][name] for number in range(2)]
        assert sorted(both) == [0, errno.EEXIST], name
        assert seen[0][name] == seen[1][name] == f"of {both.index(0)}", name
    assert [source.read_text() for source in sources] == ["of 0", "of 1"]


def test_lock_file_that_is_linked_and_removed_has_one_holder(nodes: tuple[Lake, Lake]) -> None:
    """The bytes are the same each time, and the store dates to the second."""
    sources = [node.path / f"source{number}" for number, node in enumerate(nodes)]
    for source in sources:
        source.write_text("locked")
    locks, holders, refused = [node.path / "lock" for node in nodes], list[int](), set[int]()
    most_held, rounds = 0, list[int]()

    def run(number: int) -> None:
        nonlocal most_held
        while len(rounds) < ROUNDS:
            code = link_errno(sources[number], locks[number])
            if code:
                refused.add(code)
                time.sleep(0.01)
                continue
            holders.append(number)
            most_held = max(most_held, len(holders))
            rounds.append(number)
            time.sleep(0.002)
            holders.remove(number)
            locks[number].unlink()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most_held == 1, rounds
    assert refused <= {errno.EEXIST}
    for node in nodes:
        sync(node.path)
    eventually(lambda: not os.path.lexists(locks[0]), "the removal of the other node is heard of")
    for _ in range(10):
        assert link_errno(sources[0], locks[0]) == 0
        locks[0].unlink()


def test_linked_names_have_two_links_and_are_two_files(nodes: tuple[Lake, Lake]) -> None:
    lake, other = nodes
    one, two = lake.path / "one", lake.path / "two"
    one.write_text("first")
    os.link(one, two)
    assert [path.stat().st_nlink for path in (one, two)] == [2, 2]
    assert sorted(os.listdir(lake.path)) == ["one", "two"]
    assert [path.stat().st_nlink for path in (one, two)] == [2, 2]
    with one.open("a") as appended:
        appended.write(", more")
    assert two.read_text() == "first"
    one.unlink()
    assert two.stat().st_nlink == 1
    eventually((other.path / "two").exists, "the other mount does not see the link")
    assert (other.path / "two").read_text() == "first"


def test_linked_names_show_one_inode_number_until_one_changes(make_lake: LakeMaker) -> None:
    """`git clone` of a local repository compares the numbers of an object before and after it was linked."""
    lake = make_lake("file").mount()
    one, two, three = (lake.path / name for name in ("one", "two", "three"))
    one.write_text("first")
    before = one.lstat()
    os.link(one, two)
    os.link(two, three)
    after = [path.lstat() for path in (one, two, three)]
    assert {(each.st_ino, each.st_mode, each.st_mtime_ns) for each in after} == {
        (before.st_ino, before.st_mode, before.st_mtime_ns)
    }
    with os.scandir(lake.path) as entries:
        assert {entry.inode() for entry in entries} == {before.st_ino}
    three.chmod(0o600)
    two.write_text("other")
    assert len({path.lstat().st_ino for path in (one, two, three)}) == 3
    four = lake.path / "four"
    os.link(one, four)
    assert one.samefile(four)
    with one.open("a"):
        assert not one.samefile(four), "what is written now may be in the kernel alone"
    one.write_text("changed")
    assert not one.samefile(four)
    assert (four.read_text(), three.read_text()) == ("first", "first")
    five = lake.path / "five"
    os.link(four, five)
    four.unlink()
    assert five.read_text() == "first"


@pytest.mark.parametrize("durability", ["close", "writeback"])
def test_file_is_linked_with_what_was_written_before_it_is_closed(make_lake: LakeMaker, durability: str) -> None:
    """Its pages may be the kernel's alone, and its name the C library's."""
    lake = make_lake("file", "--durability", durability).mount()
    with (lake.path / "one").open("wb", buffering=0) as source:
        source.write(b"first")
        os.link(lake.path / "one", lake.path / "two")
        assert (lake.path / "two").read_bytes() == b"first"
        source.write(b", more")
    assert [(lake.path / name).read_bytes() for name in ("one", "two")] == [b"first, more", b"first"]
    assert lake.outside.read("two") == b"first"


def test_links_can_be_refused(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount("--hard-links", "refuse")
    (lake.path / "one").write_text("first")
    assert link_errno(lake.path / "one", lake.path / "two") == errno.EPERM


DELTA = """
import sys, pyarrow as pa
from deltalake import DeltaTable, write_deltalake
table, writer, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(count):
    while True:
        try:
            write_deltalake(table, pa.table({"writer": [writer], "number": [number]}), mode="append")
            break
        except Exception as error:
            if not any(word in str(error).lower() for word in ("commit", "conflict", "resource busy")): raise
"""
"""Both nodes may choose one temporary name, whose later link is EBUSY: nothing is appended, so it is repeated."""
LANCE = """
import sys, pyarrow as pa, lance
table, writer, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(count):
    while True:
        try:
            lance.write_dataset(pa.table({"writer": [writer], "number": [number]}), table, mode="append")
            break
        except OSError as error:
            if "File exists" not in str(error) and "concurrent writers" not in str(error): raise
"""


def append_from_both(nodes: tuple[Lake, Lake], name: str, program: str) -> None:
    """APPENDS from each node, beside each other."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(node.path / name), str(number), str(APPENDS)],
            stderr=subprocess.PIPE, text=True,
        )
        for number, node in enumerate(nodes)
    ]  # fmt: skip
    try:
        for each in running:
            _, said = each.communicate(timeout=300)
            assert each.returncode == 0, said
    finally:
        for each in running:
            with each:  # which waits, and closes the pipe
                each.kill()


def rows_of(table: object) -> list[tuple[int, int]]:
    read = table.to_pydict()  # type: ignore[attr-defined]
    return sorted(zip(read["writer"], read["number"], strict=True))


WANTED = sorted((writer, number) for writer in range(2) for number in range(APPENDS))


@pytest.mark.long
def test_delta_lake_loses_no_append_of_two_nodes(nodes: tuple[Lake, Lake]) -> None:
    deltalake = import_module("deltalake")
    arrow = import_module("pyarrow")
    deltalake.write_deltalake(str(nodes[0].path / "table"), arrow.table({"writer": [-1], "number": [-1]}))
    eventually((nodes[1].path / "table/_delta_log").exists, "the table is not seen")
    append_from_both(nodes, "table", DELTA)
    eventually(
        lambda: rows_of(deltalake.DeltaTable(str(nodes[1].path / "table")).to_pyarrow_table())[1:] == WANTED,
        "an append is missing",
    )
    compacted = deltalake.DeltaTable(str(nodes[0].path / "table"))
    compacted.optimize.compact()
    assert rows_of(compacted.to_pyarrow_table())[1:] == WANTED


@pytest.mark.long
def test_lance_loses_no_append_of_two_nodes(nodes: tuple[Lake, Lake]) -> None:
    lance = import_module("lance")
    arrow = import_module("pyarrow")
    lance.write_dataset(arrow.table({"writer": [-1], "number": [-1]}), str(nodes[0].path / "table"))
    eventually((nodes[1].path / "table/_versions").exists, "the table is not seen")
    append_from_both(nodes, "table", LANCE)
    eventually(
        lambda: rows_of(lance.dataset(str(nodes[1].path / "table")).to_table())[1:] == WANTED, "an append is missing"
    )
    compacted = lance.dataset(str(nodes[0].path / "table"))
    compacted.optimize.compact_files()
    assert rows_of(compacted.to_table())[1:] == WANTED


def test_link_count_of_each_name_is_right_at_once(lake: Lake) -> None:
    """The kernel kept the attributes of the first name for `--metadata-ttl`: programs that lock by link(2) compare its
    count with 2."""
    first, second, third = (lake.path / name for name in ("first", "second", "third"))
    first.write_bytes(b"bytes")
    assert first.stat().st_nlink == 1
    os.link(first, second)
    assert [path.stat().st_nlink for path in (first, second)] == [2, 2]
    os.link(second, third)
    assert [path.stat().st_nlink for path in (first, second, third)] == [3, 3, 3]
    second.unlink()
    assert [path.stat().st_nlink for path in (first, third)] == [2, 2]
    (lake.path / "other").write_bytes(b"other")
    (lake.path / "other").rename(third)
    assert [path.stat().st_nlink for path in (first, third)] == [1, 1]
