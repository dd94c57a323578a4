"""How a mount is found in mountinfo, and ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lakefs_fuse.control import mounts
from lakefs_fuse.control.mounts import Mount
from lakefs_fuse.errors import LakeError


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One mount, of device 0:99, that is in use: whether it was to be detached lazily, of each attempt."""
    attempts: list[bool] = []

    def detach(point: str, *, lazy: bool) -> None:
        attempts.append(lazy)
        if not lazy:
            raise LakeError(f"{point} is in use")

    monkeypatch.setattr(mounts, "detach", detach)
    monkeypatch.setattr(mounts, "read_mounts", lambda: [Mount("/mnt/lake", "fuse.lakefs", "lake", 0, "0:99")])
    return attempts


def test_unmount_of_a_mount_in_use_detaches_it(detached: list[bool]) -> None:
    mounts.unmount("/mnt/lake", "0:99")
    assert detached == [False, True]


def test_unmount_of_a_detached_mount_leaves_another_in_its_place(detached: list[bool]) -> None:
    mounts.unmount("/mnt/lake", "0:98")
    assert detached == []


def test_detach_without_umount_asks_fusermount3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LakeError, match="fusermount3 is missing"):
        mounts.detach("/mnt/lake", lazy=False)


def test_detach_that_cannot_start_a_program_raises_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(LakeError, match="cannot be started: Resource temporarily unavailable"):
        mounts.detach("/mnt/lake", lazy=False)
