"""Attributes of directories, which the kernel asks for after each name that is added or removed."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, eventually, number
from tests.mount.test_commits import another

pytestmark = pytest.mark.usefixtures("with_hooks")
FILES = 20


def answered(lake: Lake) -> int:
    """GETATTR requests that never entered Python."""
    return number(lake.stats(), "kernel.answered.getattr")


def touch(directory: Path, name: str) -> None:
    """The kernel forgets the directory's attributes."""
    (directory / name).write_bytes(b"x")


@pytest.fixture
def lake(make_lake: LakeMaker) -> Lake:
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "0.2").mount()
    (lake.path / "d").mkdir()
    touch(lake.path / "d", "first")
    (lake.path / "d").stat()
    return lake


def test_they_are_answered_without_python(lake: Lake) -> None:
    touch(lake.path / "d", "second")
    before = answered(lake)
    for index in range(FILES):
        touch(lake.path / "d", f"f{index}")
    assert answered(lake) - before == FILES
    for index in range(FILES):
        (lake.path / "d" / f"f{index}").unlink()
    assert answered(lake) - before == 2 * FILES


@pytest.mark.parametrize("path", ["d", "."])
def test_times_of_a_directory_are_those_of_its_last_change(lake: Lake, path: str) -> None:
    directory = lake.path / path
    times: list[int] = [directory.stat().st_mtime_ns]
    changes: list[Callable[[], object]] = [
        lambda: touch(directory, "a"),
        (directory / "b").mkdir,
        lambda: (directory / "a").rename(directory / "c"),
        (directory / "c").unlink,
        (directory / "b").rmdir,
    ]
    for change in changes:
        began = time.time_ns()
        change()
        times.append(directory.stat().st_mtime_ns)
        assert began <= times[-1] <= time.time_ns()
        assert directory.stat().st_ctime_ns == times[-1]
    assert times == sorted(set(times))


def test_what_is_said_of_a_directory_counts_at_once(lake: Lake) -> None:
    directory = lake.path / "d"
    for mode in (0o700, 0o755, 0o1777):
        directory.chmod(mode)
        touch(directory, f"f{mode}")
        assert stat.S_IMODE(directory.stat().st_mode) == mode
    os.chown(directory, os.getuid(), os.getgid())
    for second in (-1.5, 0.0, 1e9 + 0.25):
        os.utime(directory, (second, second))
        assert directory.stat().st_mtime == second
    before = answered(lake)
    directory.rename(lake.path / "e")
    touch(lake.path / "e", "other")
    assert answered(lake) > before
    assert stat.S_IMODE((lake.path / "e").stat().st_mode) == 0o1777


def test_another_directory_of_the_name_has_its_own(lake: Lake) -> None:
    directory = lake.path / "d"
    directory.chmod(0o700)
    (directory / "first").unlink()
    inode = directory.stat().st_ino
    directory.rmdir()
    directory.mkdir(mode=0o755)
    touch(directory, "first")
    touch(directory, "second")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert directory.stat().st_ino != inode


def test_what_another_mount_says_of_it_is_seen(lake: Lake, tmp_path: Path) -> None:
    lake.sync()
    with another(lake, tmp_path) as other:
        (other.path / "d").chmod(0o711)
        other.sync()
        eventually(lambda: stat.S_IMODE((lake.path / "d").stat().st_mode) == 0o711, "it is seen")
        before = answered(lake)
        touch(lake.path / "d", "second")
        touch(lake.path / "d", "third")
        assert answered(lake) > before
        assert stat.S_IMODE((lake.path / "d").stat().st_mode) == 0o711


def test_they_are_asked_for_again_after_the_ttl(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "1").mount()
    (lake.path / "d").mkdir()
    touch(lake.path / "d", "first")
    (lake.path / "d").stat()
    time.sleep(1.5)
    before = answered(lake)
    fd = os.open(lake.path / "d", os.O_PATH)
    os.fstat(fd)
    os.close(fd)
    assert answered(lake) == before


def test_directory_removed_while_open_has_no_links_and_no_names(lake: Lake) -> None:
    fd = os.open(lake.path / "d", os.O_RDONLY | os.O_DIRECTORY)
    try:
        (lake.path / "d" / "first").unlink()
        (lake.path / "d").rmdir()
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []
    finally:
        os.close(fd)
