"""Faults of the network and of the store during reads and writes: survived, and counted."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.failing import Failing
from tests.mount.lakes import MIB, PART_BYTES, Lake, noise
from tests.servers import Server

COMMITS = ".lakefs/commits/"
KINDS = ("error_500", "slow_down", "reset", "truncate")
CONFLICTS = ("conflict", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("aborted", "odd_409")))
REFUSALS = ("error_500", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("slow_down", "reset")))
"""Requests that end without an effect: the client treats them alike, and reads see all of them in `make test`."""


def inject(faults: Faults, kind: str, n: int, *, method: str, containing: str) -> None:
    getattr(faults, kind)(n, method=method, containing=containing)


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_survives(failing: Failing, kind: str) -> None:
    data = noise(5 * MIB + 17, 5)
    path = failing.put_by_others("f", data)
    retries = failing.lake.number("store.retries")
    inject(failing.faults, kind, 2, method="GET", containing=failing.url("f"))
    assert path.read_bytes() == data
    assert failing.faults.injected[kind] == 2
    assert failing.lake.number("store.retries") >= retries + 2


def test_archived_object_is_an_error_at_once_that_says_what_to_do(failing: Failing) -> None:
    path = failing.put_by_others("f", noise(70_000, 5))
    failing.faults.archived(100, method="GET", containing=failing.url("f"))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        path.read_bytes()
    assert failing.faults.injected["archived"] < 10, "it is not tried again and again"
    assert "the object is archived (Glacier): restore it" in failing.lake.log()
    failing.faults.clear()
    assert len(path.read_bytes()) == 70_000


@pytest.mark.parametrize("kind", [*REFUSALS, "lose_answer"])
@pytest.mark.parametrize("size", [70_000, 2 * PART_BYTES + 9], ids=["one-put", "parts"])
def test_a_write_survives(failing: Failing, kind: str, size: int) -> None:
    """In a large file the fault hits parts, and the requests that begin and complete the upload. A PUT that arrived is
    not sent again."""
    data = noise(size, 6)
    puts = 1 if kind == "lose_answer" and size < PART_BYTES else 2
    faults, url = failing.faults, failing.url("f")
    retries = failing.lake.number("store.retries")
    inject(faults, kind, puts, method="PUT", containing=url)
    if size > PART_BYTES:
        inject(faults, kind, 1, method="POST", containing=url + "?uploads")
        inject(faults, kind, 1, method="POST", containing=url + "?uploadId")
    (failing.path / "f").write_bytes(data)
    assert failing.here.stored("f") == data
    assert faults.injected[kind] == (puts if size < PART_BYTES else 4)
    assert failing.lake.number("store.retries") >= retries + faults.injected[kind]
    assert failing.lake.number("dirty.files") == 0


@pytest.mark.parametrize("kind", CONFLICTS)
def test_completion_conflict_sends_parts_once(failing: Failing, kind: str) -> None:
    data = noise(2 * PART_BYTES + 9, 6)
    inject(failing.faults, kind, 1, method="POST", containing=failing.url("f") + "?uploadId")
    (failing.path / "f").write_bytes(data)
    assert failing.here.stored("f") == data
    assert failing.faults.injected[kind] == 1
    assert sorted(part_numbers(failing.faults, failing.url("f"))) == [1, 2, 3]


def test_three_completion_conflicts_send_parts_once(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    proxied, controls = faults
    data = noise(2 * PART_BYTES + 9, 6)
    lake = make_lake("seaweedfs", through=proxied).mount()
    controls.clear()
    controls.conflict(3, method="POST", containing="/f?uploadId")
    (lake.path / "f").write_bytes(data)
    assert lake.outside.read("f") == data
    assert controls.injected["conflict"] == 3
    assert sorted(part_numbers(controls, "/f")) == [1, 2, 3]


@pytest.mark.parametrize("kind", [CONFLICTS[0], CONFLICTS[-1]])
@pytest.mark.parametrize("size", [70_000, 2 * MIB], ids=["obstore", "boto3"])
def test_put_conflict_is_tried_again(failing: Failing, size: int, kind: str) -> None:
    data = noise(size, 6)
    inject(failing.faults, kind, 2, method="PUT", containing=failing.url("f"))
    (failing.path / "f").write_bytes(data)
    assert failing.here.stored("f") == data
    assert failing.faults.injected[kind] == 2


def test_completion_conflict_then_no_such_upload_begins_anew(failing: Failing) -> None:
    data = noise(2 * PART_BYTES + 9, 6)
    for kind in ("conflict", "gone"):
        inject(failing.faults, kind, 1, method="POST", containing=failing.url("f") + "?uploadId")
    (failing.path / "f").write_bytes(data)
    assert failing.here.stored("f") == data
    assert sorted(part_numbers(failing.faults, failing.url("f"))) == [1, 1, 2, 2, 3, 3]


def test_completion_conflict_without_end_fails_close_and_keeps_bytes(failing: Failing) -> None:
    data = noise(2 * PART_BYTES + 9, 6)
    inject(failing.faults, "conflict", 1_000_000, method="POST", containing=failing.url("f") + "?uploadId")
    with pytest.raises(OSError) as caught:
        (failing.path / "f").write_bytes(data)
    assert caught.value.errno == errno.EIO
    assert failing.lake.number("dirty.files") == 1
    sent = part_numbers(failing.faults, failing.url("f"))
    failing.faults.clear()
    assert failing.lake.cli("flush", str(failing.lake.path)).returncode == 0
    assert failing.here.stored("f") == data
    assert sorted(sent) == [1, 2, 3]
    assert part_numbers(failing.faults, failing.url("f")) == []


def part_numbers(faults: Faults, url: str) -> list[int]:
    """Of the parts of the object that were stored since faults were cleared."""
    found = (re.search(r"partNumber=(\d+)", path) for path in list(faults.stored) if url + "?" in path)
    return [int(match[1]) for match in found if match]


def commits(lake: Lake) -> list[str]:
    return sorted(key for key in lake.outside.objects() if key.startswith(COMMITS) and key.endswith(".zip"))


def tree_of(root: Path) -> dict[str, str | bytes | None]:
    """What every name below is: bytes of files, targets of links, None for directories."""
    found: dict[str, str | bytes | None] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        found[name] = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found


@pytest.mark.parametrize("kind", [*REFUSALS, "lose_answer"])
def test_names_survive(failing: Failing, kind: str) -> None:
    """Listings, mkdir, symlink, rename, unlink and rmdir: each happens once, in one commit, and nothing else does."""
    faults, lake, here = failing.faults, failing.lake, failing.path
    failing.put_by_others("d/f", b"in a directory")
    failing.put_by_others("old", b"renamed")
    failing.put_by_others("over", b"replaced")
    failing.put_by_others("gone", b"removed")
    if kind != "lose_answer":
        inject(faults, kind, 2, method="GET", containing="list-type")
        assert [entry.name for entry in (here / "d").iterdir()] == ["f"]
    changes: list[Callable[[], object]] = [
        (here / "made").mkdir,
        lambda: (here / "link").symlink_to("d2/f"),
        lambda: (here / "old").rename(here / "made" / "new"),
        lambda: (here / "d").rename(here / "d2"),
        lambda: (here / "made" / "new").replace(here / "over"),
        (here / "gone").unlink,
        (here / "made").rmdir,
    ]
    for change in changes:
        lake.sync()
        before, hit = commits(lake), faults.injected[kind]
        times = 1 if kind == "lose_answer" else 2  # it is asked for, and found
        inject(faults, kind, times, method="PUT", containing=".zip")
        change()
        lake.sync()
        assert faults.injected[kind] == hit + times
        made = set(commits(lake)) - set(before)
        assert len(made) == 1, "once, however often it was sent"
    expected = {"d2": None, "d2/f": b"in a directory", "link": "d2/f", "over": b"renamed"}
    assert tree_of(here) == expected
    assert lake.unfinished() == []
    lake.remount(empty_cache=True)
    assert tree_of(here) == expected


@pytest.mark.parametrize("kind", [*REFUSALS, "lose_answer"])
def test_the_deletion_of_objects_survives(failing: Failing, kind: str) -> None:
    paths = [failing.put_by_others(f"f{index}", b"x") for index in range(3)]
    for method in ("POST", "DELETE"):
        inject(failing.faults, kind, 2, method=method, containing="")
    for path in paths:
        path.unlink()
    assert list(failing.path.iterdir()) == []
    failing.lake.settle()
    assert failing.faults.injected[kind] == 2
    assert failing.here.names() == set()


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_rename_that_fails_did_not_happen(failing: Failing, kind: str) -> None:
    """Neither here nor for others, at once or later; what was journaled before it is not lost."""
    lake, here = failing.lake, failing.path
    failing.put_by_others("f", b"bytes")
    failing.put_by_others("target", b"keeps its bytes")
    failing.put_by_others("d/below", b"below")
    (here / "journaled").mkdir()
    inject(failing.faults, kind, 100_000, method="PUT", containing=COMMITS)
    for old, new in (("f", "g"), ("f", "target"), ("d", "e"), ("d", "journaled")):
        with (here / "target").open("rb", buffering=0) as reader:
            with pytest.raises(OSError) as raised:
                os.rename(here / old, here / new)
            assert raised.value.errno == errno.EIO
            assert reader.read() == b"keeps its bytes"
    expected = {"f": b"bytes", "target": b"keeps its bytes", "d": None, "d/below": b"below", "journaled": None}
    assert tree_of(here) == expected
    failing.faults.clear()
    lake.sync()
    assert tree_of(here) == expected
    lake.remount(empty_cache=True)
    assert tree_of(here) == expected
    os.rename(here / "f", here / "target")
    os.rename(here / "d", here / "journaled")
    expected = {"target": b"bytes", "journaled": None, "journaled/below": b"below"}
    assert tree_of(here) == expected
    lake.remount(empty_cache=True)
    assert tree_of(here) == expected


def test_a_rename_whose_answers_are_lost_is_asked_for(failing: Failing) -> None:
    """The store made it, and says so when asked: the call succeeds."""
    lake, here = failing.lake, failing.path
    failing.put_by_others("d/f", b"bytes")
    (here / "journaled").mkdir()
    failing.faults.lose_answer(100_000, method="PUT", containing=COMMITS)
    os.rename(here / "d", here / "e")
    failing.faults.clear()
    lake.sync()
    expected = {"e": None, "e/f": b"bytes", "journaled": None}
    assert tree_of(here) == expected
    lake.remount(empty_cache=True)
    assert tree_of(here) == expected


@pytest.mark.parametrize(
    "then", ["nothing", "replaced", *(pytest.param(then, marks=pytest.mark.long) for then in ("unlink", "again"))]
)
def test_a_rename_of_which_nothing_is_known_when_it_fails(failing: Failing, then: str) -> None:
    """Made in the store, but that could not even be asked: soon it is in effect, and whatever is done to the old name
    meanwhile takes no bytes from the new one."""
    lake, here = failing.lake, failing.path
    failing.put_by_others("f", b"bytes")
    (here / "journaled").mkdir()
    lake.sync()
    failing.faults.lose_answer(100_000, method="PUT", containing=COMMITS)
    failing.faults.reset(100_000, method="HEAD")
    with pytest.raises(OSError) as raised:
        os.rename(here / "f", here / "g")
    assert raised.value.errno == errno.EIO
    with contextlib.suppress(FileNotFoundError):  # it may be seen by now
        if then == "unlink":
            (here / "f").unlink()
        failing.faults.clear()
        if then == "again":
            os.rename(here / "f", here / "g")
    failing.faults.clear()
    if then == "replaced":
        (here / "f").write_bytes(b"new")
    lake.sync()
    possible = [{"g": b"bytes", "journaled": None}]
    if then == "replaced":  # the rename came before it, or while it was written
        possible = [{"f": b"new", "g": b"bytes", "journaled": None}, {"g": b"new", "journaled": None}]
    seen = tree_of(here)
    assert seen in possible
    lake.remount(empty_cache=True)
    assert tree_of(here) == seen


def test_names_are_changed_while_the_store_is_away(failing: Failing) -> None:
    """At once here; an fsync of a directory says that they are not in the store; when it is back they are."""
    lake, here = failing.lake, failing.path
    failing.put_by_others("gone", b"x")
    failing.put_by_others("kept", b"x").stat()
    assert sorted(os.listdir(here)) == ["gone", "kept"]
    failing.faults.slow_down(100_000, method="PUT")
    (here / "gone").unlink()
    (here / "link").symlink_to("kept")
    (here / "kept").chmod(0o600)
    os.setxattr(here / "kept", "user.note", b"hello")
    with pytest.raises(OSError) as raised:
        lake.sync()
    assert raised.value.errno == errno.EIO
    assert sorted(os.listdir(here)) == ["kept", "link"]
    (unfinished,) = lake.unfinished()
    assert unfinished["state"] == "journaled"
    assert unfinished["error"]
    assert lake.cli("flush", str(lake.path)).returncode == 1
    assert lake.cli("umount", str(lake.path)).returncode == 1, "it would not leave changes behind unasked"
    failing.faults.clear()
    lake.settle()
    assert lake.unfinished() == []
    assert failing.here.names() == {"kept"}
    lake.remount(empty_cache=True)
    assert sorted(os.listdir(here)) == ["kept", "link"]
    assert os.readlink(here / "link") == "kept"
    assert (here / "kept").stat().st_mode & 0o777 == 0o600
    assert os.getxattr(here / "kept", "user.note") == b"hello"


def test_a_truncated_listing_is_not_believed(failing: Failing) -> None:
    for index in range(20):
        failing.here.outside.replace(failing.url(f"d/{index}"), b"")
    failing.put_by_others("d/last", b"")
    failing.faults.truncate(2, method="GET", containing="list-type")
    assert len(list((failing.path / "d").iterdir())) == 21
    assert failing.faults.injected["truncate"] >= 1


def test_reads_that_cannot_be_saved_fail_and_the_daemon_lives(failing: Failing) -> None:
    data = noise(5 * MIB, 10)  # what is smaller is fetched when it is opened
    path = failing.put_by_others("f", data)
    fd = os.open(path, os.O_RDONLY)
    pid = failing.lake.number("daemon.pid")
    failing.faults.reset(100_000)
    with pytest.raises(OSError) as raised:
        os.pread(fd, 100, 0)
    assert raised.value.errno == errno.EIO
    assert [entry.name for entry in failing.path.iterdir()] == ["f"], "what is known counts on"
    failing.faults.clear()
    assert os.pread(fd, 100, 0) == data[:100]
    os.close(fd)
    assert path.read_bytes() == data
    (failing.path / "made").mkdir()
    assert failing.lake.number("daemon.pid") == pid


def test_an_object_that_vanishes_is_an_error_not_an_end(failing: Failing) -> None:
    path = failing.put_by_others("f", noise(5 * MIB))
    fd = os.open(path, os.O_RDONLY)
    failing.here.outside.delete(failing.url("f"))
    with pytest.raises(OSError) as raised:
        os.pread(fd, 100, 0)
    assert raised.value.errno == errno.ESTALE
    os.close(fd)
    (failing.path / "g").write_bytes(b"alive")
    assert failing.here.stored("g") == b"alive"


@pytest.mark.long
def test_stalls_in_the_middle_of_a_read_and_a_write(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    """A stalled answer counts as lost after twenty seconds, so both are waited for at once."""
    proxied, controls = faults
    read_data, write_data = noise(3 * MIB, 7), noise(PART_BYTES + 9, 8)
    lake = make_lake("seaweedfs", through=proxied)
    lake.outside.replace("read", read_data)
    lake.mount()
    controls.stall(1, method="GET", containing="/read")
    controls.stall(1, method="POST", containing="/write?uploadId")
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.append((lake.path / "read").read_bytes()))
    reader.start()
    (lake.path / "write").write_bytes(write_data)
    reader.join()
    assert controls.injected["stall"] == 2
    assert seen == [read_data]
    assert lake.outside.read("write") == write_data
    assert lake.number("store.retries") >= 2
