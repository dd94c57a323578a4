"""Names through the kernel: directories, removal, renames, symbolic links and extended attributes."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
from functools import partial

from tests.mount import lakes
from tests.mount.conftest import LakeMaker, Place
from tests.mount.lakes import eventually, noise
from tests.mount.posix_errors import error_of, opened
from tests.tiers import sized


def test_unlink_while_open(here: Place) -> None:
    """Also of what another client stored, and nobody has read: it is more than OPEN fetches."""
    data = noise(5 << 20)
    file = here.path / "gone"
    here.outside.replace(here.prefix + "gone", data)
    assert here.lake.cli("refresh", str(here.path)).returncode == 0
    fd = os.open(file, os.O_RDONLY)
    file.unlink()
    assert not file.exists()
    here.settle()
    assert here.names() == set()
    assert os.pread(fd, len(data), 0) == data
    os.close(fd)


def test_unlink_while_it_is_written(here: Place) -> None:
    file = here.path / "temporary"
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"scratch")
    file.unlink()
    os.write(fd, b" space")
    assert os.pread(fd, 100, 0) == b"scratch space"
    os.close(fd)
    assert here.names() == set()
    assert not file.exists()
    assert list(here.path.iterdir()) == []


def test_a_new_file_under_the_name_of_one_that_is_open(here: Place) -> None:
    file = here.path / "name"
    file.write_bytes(b"old" * 1000)
    with file.open("rb", buffering=0) as old:
        file.unlink()
        file.write_bytes(b"new")
        assert old.read() == b"old" * 1000
    assert file.read_bytes() == b"new"
    assert here.stored("name") == b"new"


def test_directories(here: Place) -> None:
    inner = here.path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "f").write_bytes(b"x")
    assert error_of(inner.rmdir) == "ENOTEMPTY"
    assert error_of(inner.mkdir) == "EEXIST"
    assert [child.name for child in (here.path / "a").iterdir()] == ["b"]
    (inner / "f").unlink()
    assert inner.is_dir(), "a directory that its last file has left stays"
    inner.rmdir()
    (here.path / "a").rmdir()
    assert list(here.path.iterdir()) == []
    here.settle()
    assert here.names() == set()


def test_an_empty_directory_is_kept_for_everybody(make_lake: LakeMaker) -> None:
    """By the commit that made it: no marker object lies in the store."""
    lake = make_lake("seaweedfs").mount()
    (lake.path / "a" / "b").mkdir(mode=0o750, parents=True)
    (lake.path / "c").mkdir()
    (lake.path / "c").rmdir()
    lake.remount(empty_cache=True)
    assert lake.plain() == {}
    assert [entry.name for entry in lake.path.iterdir()] == ["a"]
    assert [entry.name for entry in (lake.path / "a").iterdir()] == ["b"]
    assert stat.S_IMODE((lake.path / "a" / "b").stat().st_mode) == 0o750


def test_rmdir_loses_nothing_that_others_put_there(make_lake: LakeMaker) -> None:
    """A listing within the TTL does not show it yet; the directory is there again when the next one does."""
    lake = make_lake("seaweedfs", "--metadata-ttl", "1").mount()
    directory = lake.path / "busy"
    directory.mkdir()
    lake.sync()
    assert list(directory.iterdir()) == []
    lake.outside.replace("busy/theirs", b"x")
    try:
        directory.rmdir()
    except OSError as error:
        assert error.errno == errno.ENOTEMPTY
    lake.sync()
    eventually((directory / "theirs").exists, "seen after the TTL")
    assert (directory / "theirs").read_bytes() == b"x"
    assert error_of(directory.rmdir) == "ENOTEMPTY"
    lake.remount(empty_cache=True)
    assert (directory / "theirs").read_bytes() == lake.outside.read("busy/theirs") == b"x"


def test_what_an_object_store_cannot_do(here: Place) -> None:
    file = here.path / "file"
    file.write_bytes(b"x")
    assert error_of(lambda: os.mkfifo(here.path / "fifo")) == "EPERM"
    assert here.names() == {"file"}


REQUESTS = ("get", "put", "part", "delete", "list", "head", "other")


def cost_of(here: Place, *command: str) -> dict[str, int]:
    """Requests that a command makes, by kind; zeros are left out, and what other mounts are told of earlier commits."""
    before = here.lake.stats()
    subprocess.run(command, cwd=here.path, check=True)
    after = here.lake.stats()
    made = {
        kind: lakes.number(after, f"store.requests.{kind}") - lakes.number(before, f"store.requests.{kind}")
        for kind in REQUESTS
    }
    for told in ("commits.announcements", "commits.bundles_written"):
        made["put"] -= lakes.number(after, told) - lakes.number(before, told)
    return {kind: count for kind, count in made.items() if count}


def test_mv_is_one_put(here: Place) -> None:
    """A file, a directory and what is in it; no byte is copied, and nothing has its old name any more. What others put
    into a directory meanwhile is asked for: one LIST for its keys, one for commits."""
    data = noise(300_000)
    (here.path / "file").write_bytes(data)
    (here.path / "dir" / "below").mkdir(parents=True)
    for index in range(20):
        (here.path / "dir" / "below" / f"{index}").write_bytes(noise(1000, index))
    here.settle()
    inode = (here.path / "file").stat().st_ino
    written = here.count("store.bytes.written")
    assert cost_of(here, "mv", "file", "other") == {"put": 1}
    assert cost_of(here, "mv", "dir", "renamed") == {"put": 1, "list": 2}
    # Less than the bytes of either: a bundle of earlier commits may be stored meanwhile.
    assert here.count("store.bytes.written") - written < 20_000
    assert {entry.name for entry in here.path.iterdir()} == {"other", "renamed"}
    assert error_of(opened(here.path / "file", os.O_RDONLY)) == "ENOENT"
    assert (here.path / "other").read_bytes() == data
    assert (here.path / "other").stat().st_ino == inode
    for index in range(20):
        assert (here.path / "renamed" / "below" / f"{index}").read_bytes() == noise(1000, index)


def test_rename_replaces_what_is_there(here: Place) -> None:
    """As programs do that write a temporary file first; who has the old version open goes on reading it."""
    new, old = here.path / "new", here.path / "f"
    old.write_bytes(noise(200_000, 1))
    new.write_bytes(noise(100_000, 2))
    with old.open("rb", buffering=0) as reader:
        os.replace(new, old)
        assert reader.read() == noise(200_000, 1)
    assert old.read_bytes() == noise(100_000, 2)
    assert [entry.name for entry in here.path.iterdir()] == ["f"]
    (here.path / "full").mkdir()
    (here.path / "full" / "f").write_bytes(b"x")
    (here.path / "empty").mkdir()
    assert error_of(lambda: os.rename(here.path / "empty", here.path / "full")) == "ENOTEMPTY"
    assert error_of(lambda: os.rename(old, here.path / "empty")) == "EISDIR"
    assert error_of(lambda: os.rename(here.path / "empty", old)) == "ENOTDIR"
    assert error_of(lambda: os.rename(here.path / "full", here.path / "full" / "below")) == "EINVAL"
    assert error_of(lambda: os.rename(here.path / "missing", old)) == "ENOENT"
    os.rename(here.path / "full", here.path / "empty")
    assert (here.path / "empty" / "f").read_bytes() == b"x"


def test_changes_in_a_directory_while_it_is_renamed_are_made_there(here: Place) -> None:
    """A program that works in the directory does not see that it gets another name."""
    directory = here.path / "a"
    directory.mkdir()
    renamed = threading.Event()

    def rename() -> None:
        try:
            for number in range(10):
                os.rename(here.path / "ab"[number % 2], here.path / "ba"[number % 2])
        finally:
            renamed.set()

    fd, number, thread = os.open(directory, os.O_RDONLY), 0, threading.Thread(target=rename)
    thread.start()
    while not renamed.is_set():
        number += 1
        with open(f"f{number}", "wb", opener=partial(os.open, dir_fd=fd)) as file:
            file.write(b"new")
        os.mkdir(f"d{number}", dir_fd=fd)
        os.symlink("target", f"l{number}", dir_fd=fd)
        if number > 1:
            os.unlink(f"f{number - 1}", dir_fd=fd)
            os.rmdir(f"d{number - 1}", dir_fd=fd)
            os.unlink(f"l{number - 1}", dir_fd=fd)
    thread.join()
    os.close(fd)
    assert [child.name for child in here.path.iterdir()] == ["a"]
    assert sorted(child.name for child in directory.iterdir()) == [f"{kind}{number}" for kind in "dfl"]


def test_symbolic_links(here: Place) -> None:
    (here.path / "dir").mkdir()
    (here.path / "dir" / "file").write_bytes(b"through the link")
    (here.path / "link").symlink_to("dir/file")
    (here.path / "into").symlink_to("dir")
    (here.path / "nowhere").symlink_to("/does/not/exist")
    assert os.readlink(here.path / "link") == "dir/file"
    assert (here.path / "link").read_bytes() == (here.path / "into" / "file").read_bytes() == b"through the link"
    assert stat.S_ISLNK((here.path / "link").lstat().st_mode)
    assert (here.path / "link").lstat().st_size == len("dir/file")
    assert error_of(opened(here.path / "nowhere", os.O_RDONLY)) == "ENOENT"
    assert error_of(lambda: (here.path / "link").symlink_to("other")) == "EEXIST"
    assert error_of(lambda: os.readlink(here.path / "dir")) == "EINVAL"
    (here.path / "into").unlink()
    assert (here.path / "dir" / "file").exists()
    assert {entry.name for entry in here.path.iterdir()} == {"dir", "link", "nowhere"}


def test_extended_attributes(here: Place) -> None:
    """Of files, directories and what is open; setfattr and getfattr work."""
    file, directory = here.path / "file", here.path / "dir"
    file.write_bytes(b"x")
    directory.mkdir()
    subprocess.run(["setfattr", "-n", "user.label", "-v", "cat", "file", "dir"], cwd=here.path, check=True)
    told = subprocess.run(
        ["getfattr", "--only-values", "-n", "user.label", "file"], cwd=here.path, capture_output=True, check=True
    )
    assert told.stdout == b"cat"
    for path in (file, directory):
        os.setxattr(path, "user.bytes", bytes(range(256)))
        assert sorted(os.listxattr(path)) == ["user.bytes", "user.label"]
        assert os.getxattr(path, "user.bytes") == bytes(range(256))
        assert error_of(partial(os.setxattr, path, "user.label", b"", os.XATTR_CREATE)) == "EEXIST"
        assert error_of(partial(os.setxattr, path, "user.none", b"", os.XATTR_REPLACE)) == "ENODATA"
        assert error_of(partial(os.getxattr, path, "user.none")) == "ENODATA"
        os.removexattr(path, "user.bytes")
        assert os.listxattr(path) == ["user.label"]
    with (here.path / "written").open("wb") as stream:
        os.setxattr(stream.fileno(), "user.label", b"dog")
        stream.write(b"bytes")
    assert os.getxattr(here.path / "written", "user.label") == b"dog"
    file.write_bytes(b"other bytes")
    assert os.getxattr(file, "user.label") == b"cat", "they belong to the file, whatever is in it"
    assert error_of(lambda: os.setxattr(file, "trusted.label", b"")) in ("EOPNOTSUPP", "ENOTSUP", "EPERM")


def test_listing_while_deleting(here: Place) -> None:
    """`rm -r` deletes while it lists: nothing is skipped, nothing comes twice."""
    (here.path / "many").mkdir()
    count = sized(100, 200)  # several READDIRPLUS
    for number in range(count):
        (here.path / "many" / f"{number:03d}").touch()
    seen = []
    with os.scandir(here.path / "many") as entries:
        for entry in entries:
            seen.append(entry.name)
            os.unlink(entry.path)
    assert sorted(seen) == [f"{number:03d}" for number in range(count)]
    assert list((here.path / "many").iterdir()) == []
    here.settle()
    assert here.names() == set()
