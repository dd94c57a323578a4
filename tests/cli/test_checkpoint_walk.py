"""The checkpoints of a directory by ordinary system calls; any filesystem with extended attributes does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lakefs_fuse.checkpoints.model import Checkpoint, Listing
from lakefs_fuse.cli import checkpoint, run, worker
from lakefs_fuse.cli.checkpoint_walk import delete, find_checkpoints
from lakefs_fuse.control.worker_protocol import Finished
from lakefs_fuse.errors import LakeError
from lakefs_fuse.product import XATTR_STATE


def put(path: Path, size: int = 10, when_s: float | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    if when_s is not None:
        os.utime(path, (when_s, when_s))


def look(path: Path, marker: str | None = None, match: str | None = None) -> Listing:
    return find_checkpoints(str(path), marker=marker, match=match)


def item(found: Listing, name: str) -> Checkpoint:
    (made,) = (each for each in found.checkpoints if each.name == name)
    return made


def test_files_and_directories_of_shards(tmp_path: Path) -> None:
    put(tmp_path / "step1.pt", 100, 1000)
    put(tmp_path / "step2" / "rank0.pt", 20, 3000)
    put(tmp_path / "step2" / "deep" / "rank1.pt", 30, 2000)
    put(tmp_path / "config.json")
    (tmp_path / "step3").mkdir()
    (tmp_path / "last.pt").symlink_to("step1.pt")
    found = look(tmp_path)
    assert [made.name for made in found.checkpoints] == ["step3", "step2", "step1.pt"]
    shards = item(found, "step2")
    assert (shards.kind, shards.files, shards.bytes, shards.mtime, shards.step) == ("directory", 2, 50, 3000.0, 2)
    assert shards.path == str(tmp_path / "step2")
    assert shards.complete
    assert item(found, "step1.pt").linked
    assert found.latest == "step2"
    assert [made.name for made in look(tmp_path, match="*.json").checkpoints] == ["config.json"]


@pytest.mark.parametrize(
    "target", ["step1/deep/a.pt", "./step1", "../ckpt/step1/deep/a.pt", "REAL/step1/deep", "LINK/step1/deep"]
)
def test_checkpoint_into_which_a_link_leads_is_linked(tmp_path: Path, target: str) -> None:
    put(tmp_path / "ckpt" / "step1" / "deep" / "a.pt")
    put(tmp_path / "ckpt" / "step2" / "deep" / "a.pt")
    (tmp_path / "place").symlink_to("ckpt")
    real, link = str(tmp_path / "ckpt"), str(tmp_path / "place")
    (tmp_path / "ckpt" / "best.pt").symlink_to(target.replace("REAL", real).replace("LINK", link))
    found = look(tmp_path / "place")
    assert [made.name for made in found.checkpoints if made.linked] == ["step1"]


def test_markers_lie_directly_in_the_directory(tmp_path: Path) -> None:
    put(tmp_path / "1" / "a")
    put(tmp_path / "1" / "_SUCCESS", 0)
    put(tmp_path / "2" / "sub" / "_SUCCESS", 0)
    found = look(tmp_path)
    assert (found.markers, found.latest) == (["_SUCCESS"], "1")
    assert item(found, "2").reason == "no _SUCCESS"
    assert look(tmp_path, marker="a").latest == "1"


def test_what_the_mount_says_of_a_file_counts(tmp_path: Path) -> None:
    put(tmp_path / "1" / "a")
    put(tmp_path / "1" / "b")
    put(tmp_path / "2.pt")
    os.setxattr(tmp_path / "1" / "a", XATTR_STATE, b"uploading")
    os.setxattr(tmp_path / "1" / "b", XATTR_STATE, b"dirty")
    os.setxattr(tmp_path / "2.pt", XATTR_STATE, b"durable")
    found = look(tmp_path)
    first = item(found, "1")
    assert (first.complete, first.where, first.state) == (False, "node", "dirty")
    assert first.reason == "not in the store yet (1 dirty, 1 uploading)"
    assert item(found, "2.pt").complete


def test_states_are_asked_for_by_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 4):
        for shard in range(5):
            put(tmp_path / f"step{step}" / "shards" / f"{shard}.pt")
    dirty = {str(tmp_path), str(tmp_path / "step3"), str(tmp_path / "step3" / "shards" / "4.pt")}
    asked: list[str] = []

    def getxattr(path: str, name: str, *, follow_symlinks: bool) -> bytes:
        assert (name, follow_symlinks) == (XATTR_STATE, False)
        asked.append(path)
        return b"dirty" if path in dirty else b"durable"

    monkeypatch.setattr(os, "getxattr", getxattr)
    assert item(look(tmp_path), "step3").reason == "not in the store yet (1 dirty)"
    assert len(asked) == 1 + 3 + 5
    dirty.clear()
    asked.clear()
    assert look(tmp_path).latest == "step3"
    assert asked == [str(tmp_path)]


def test_deleting(tmp_path: Path) -> None:
    put(tmp_path / "1" / "deep" / "a")
    put(tmp_path / "2.pt")
    outside = tmp_path.parent / "outside"
    put(outside / "kept")
    (tmp_path / "1" / "link").symlink_to(outside)
    for made in look(tmp_path).checkpoints:
        delete(str(tmp_path), made)
        delete(str(tmp_path), made)  # gone already
    assert list(tmp_path.iterdir()) == []
    assert (outside / "kept").exists()


def test_deleting_beside_another_run_deletes_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("1/a", "1/b", "1/below/c", "1/below/deep/d"):
        put(tmp_path / name)
    unlink, rmdir = os.unlink, os.rmdir

    def unlink_late(path: str) -> None:
        unlink(path)
        raise FileNotFoundError(path)

    def rmdir_late(path: str) -> None:
        rmdir(path)
        raise FileNotFoundError(path)

    made = item(look(tmp_path), "1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_late)
        patch.setattr(os, "rmdir", rmdir_late)
        delete(str(tmp_path), made)
    assert list(tmp_path.iterdir()) == []


def test_deleting_a_directory_with_a_long_name(tmp_path: Path) -> None:
    put(tmp_path / ("あ" * 85) / "a")
    (made,) = look(tmp_path).checkpoints
    delete(str(tmp_path), made)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_half_deleted_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        put(tmp_path / f"step{step}" / "a")
        put(tmp_path / f"step{step}" / "b")

    def fail(path: str) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "unlink", fail)
    with pytest.raises(PermissionError):
        delete(str(tmp_path), item(look(tmp_path), "step1"))
    monkeypatch.undo()
    found = look(tmp_path)
    assert [made.reason for made in found.checkpoints if made.name != "step2"] == ["being deleted"]
    for made in found.checkpoints:
        if made.name != "step2":
            delete(str(tmp_path), made)
    assert [path.name for path in tmp_path.iterdir()] == ["step2"]


def test_prune_prints_names_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "locate", lambda path: ("/", ""))
    put(tmp_path / "step1\x1b[2J" / "a")
    put(tmp_path / "step2" / "a")
    assert run(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert capsys.readouterr().out == f"deleted {tmp_path}/step1\\x1b[2J (10 B)\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_latest_prints_the_path_as_it_is_and_escaped_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    name = "step1\\\u00a0\x1b"
    put(tmp_path / name / "a")
    monkeypatch.setattr(checkpoint, "locate", lambda path: ("/", ""))
    answer = Finished(summary={}, text=f"{tmp_path}/{name}")
    monkeypatch.setattr(worker, "run_child", lambda *args, **more: answer)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    shown = "step1\\\\\\xa0\\x1b" if is_terminal else name
    for place in (str(tmp_path), "s3://bucket/ckpt"):
        assert run(["checkpoint", "latest", place]) == 0
        assert capsys.readouterr().out == f"{tmp_path}/{shown}\n"


def test_what_cannot_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="No such file"):
        look(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("ls", "/"), 1, "not inside a mount"),
        (("prune", "/"), 2, "give --keep N"),
        (("prune", "s3://bucket/ckpt", "--keep", "1"), 2, "through a mount"),
        (("prune", "/", "--keep", "0"), 2, "0"),
        (("latest", "/", "--region", "x"), 2, "--region goes with a source URL"),
    ],
)
def test_usage(args: tuple[str, ...], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", *args]) == code
    assert text in capsys.readouterr().err
