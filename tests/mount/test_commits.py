"""Commits as users see them: packs, atomic renames, and several nodes on one lake.

Sizes are small; LAKEFS_TEST_PACKED_FILES (default 200) and LAKEFS_TEST_RENAMES (default 3) raise them.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import contains
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import PART_BYTES, Lake, eventually, noise, scale, start_writeback
from tests.servers import Server, latency
from tests.tiers import sized

FILES = scale("PACKED_FILES", 600, short=200)
RENAMES = scale("RENAMES", 20, short=3)
PLAIN = FILES // sized(12, 4)
WRITERS = 16
COMMITS = ".lakefs/commits/"
RENAME_EXCHANGE = 2
RENAME_NOREPLACE = 1
libc = ctypes.CDLL(None, use_errno=True)


def renameat2(old: Path, new: Path, flags: int) -> None:
    if libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(new))


@contextmanager
def another(lake: Lake, tmp_path: Path, *options: str) -> Iterator[Lake]:
    """A second node on the same lake, mounted."""
    directory = tmp_path / f"other-{time.monotonic_ns()}"
    other = Lake(lake.outside, lake.source, directory, *lake.options, *options)
    try:
        yield other.mount()
    finally:
        other.close()


def sync(directory: Path) -> None:
    """fsync of a directory: every change of a name is in the store after it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def commits(lake: Lake) -> list[str]:
    return sorted(key for key in lake.outside.objects() if key.startswith(COMMITS) and key.endswith(".zip"))


def content(index: int) -> bytes:
    return noise(200 + index % 50, index)


def write_together(directory: Path, files: int) -> None:
    """Sixteen threads, each with its share."""

    def write(first: int) -> None:
        for index in range(first, files, WRITERS):
            (directory / f"f{index:06d}").write_bytes(content(index))

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))


def packed(lake: Lake) -> dict[str, bytes]:
    """What any ZIP program finds in the commits of a bucket."""
    found: dict[str, bytes] = {}
    for key in commits(lake):
        with zipfile.ZipFile(io.BytesIO(lake.outside.read(key))) as archive:
            assert archive.testzip() is None
            found |= {name: archive.read(name) for name in archive.namelist() if name != ".lakefs/record"}
    return found


@pytest.mark.long  # test_uploads.py shows it
def test_files_that_close_together_share_packs(make_lake: LakeMaker, seaweed: Server, tmp_path: Path) -> None:
    """One PUT for a batch of files; another node, and unzip, read every one of them."""
    with latency(seaweed, tmp_path / "proxy") as slow:
        lake = make_lake("seaweedfs", "--refresh", "3600", through=slow).mount()
        directory = lake.path / "data"
        directory.mkdir()
        before, began_s = lake.puts(), time.monotonic()
        write_together(directory, FILES)
        puts = lake.puts() - before
        # One batch at a time, and each takes 20 ms: more of them only where files close more slowly than 1.5 ms apart.
        batches = max(FILES * 1500 // 20_000, int((time.monotonic() - began_s) / 0.02))
        assert puts <= min(batches + WRITERS, FILES // 3)
        assert lake.number("commits.files_packed") >= FILES - WRITERS
        stored = packed(lake)
        with another(lake, tmp_path) as reader:
            assert sorted(os.listdir(reader.path / "data")) == [f"f{index:06d}" for index in range(FILES)]
            plain = lake.outside.objects()
            for index in range(FILES):
                path = f"data/f{index:06d}"
                assert (reader.path / path).read_bytes() == content(index)
                assert (
                    stored[path] == content(index) if path not in plain else lake.outside.read(path) == content(index)
                )


def test_a_lone_small_file_is_a_plain_object(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs").mount()
    (lake.path / "config.json").write_text("{}")
    assert lake.outside.read("config.json") == b"{}"
    assert commits(lake) == []


def test_packing_by_option_and_rule(make_lake: LakeMaker, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npath = "plain/**"\npack = "never"\n')
    lake = make_lake("file", "--pack", "always", "--pack-threshold", "1KiB", "--rules", str(rules)).mount()
    for name in ("plain", "packed"):
        (lake.path / name).mkdir()
        (lake.path / name / "small").write_bytes(b"x" * 1024)
        (lake.path / name / "large").write_bytes(b"x" * 1025)
    assert {key for key in lake.outside.objects() if not key.startswith(COMMITS)} == {
        "plain/small", "plain/large", "packed/large",
    }  # fmt: skip


def test_rename_is_one_put(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Of a file, of a directory with plain and packed files in it, over an existing file."""
    lake = make_lake("seaweedfs", "--refresh", "3600").mount()
    tree = lake.path / "run.tmp"
    (tree / "deep").mkdir(parents=True)
    (tree / "alone").write_bytes(b"alone")
    write_together(tree / "deep", 48)
    (tree / "link").symlink_to("alone")
    (lake.path / "final.txt").write_bytes(b"old")
    (lake.path / "new.txt").write_bytes(b"new")
    sync(lake.path)
    before = lake.stats()["store"]
    tree.rename(lake.path / "run")
    (lake.path / "new.txt").rename(lake.path / "final.txt")
    after = lake.stats()["store"]
    assert isinstance(before, dict) and isinstance(after, dict)
    assert after["requests"]["put"] - before["requests"]["put"] == 2
    with another(lake, tmp_path) as reader:
        for node in (lake.path, reader.path):
            assert sorted(os.listdir(node)) == ["final.txt", "run"]
            assert (node / "final.txt").read_bytes() == b"new"
            assert (node / "run" / "link").read_bytes() == b"alone"
            assert sorted(os.listdir(node / "run" / "deep")) == [f"f{index:06d}" for index in range(48)]
            for index in range(48):
                assert (node / "run" / "deep" / f"f{index:06d}").read_bytes() == content(index)


def test_rename_as_posix_says(shared_lake: Lake) -> None:
    root = shared_lake.path / f"posix-{time.monotonic_ns()}"
    for name in ("empty", "full"):
        (root / name).mkdir(parents=True)
    (root / "full" / "x").write_bytes(b"x")
    (root / "file").write_bytes(b"file")
    (root / "other").write_bytes(b"other")
    with pytest.raises(FileExistsError):
        renameat2(root / "file", root / "other", RENAME_NOREPLACE)
    with pytest.raises(IsADirectoryError):
        (root / "file").rename(root / "empty")
    with pytest.raises(NotADirectoryError):
        (root / "empty").rename(root / "file")
    with pytest.raises(OSError, match="not empty"):
        (root / "empty").rename(root / "full")
    with pytest.raises(OSError, match="Invalid argument"):
        (root / "full").rename(root / "full" / "below")
    with pytest.raises(FileNotFoundError):
        (root / "nothing").rename(root / "anything")
    (root / "full").rename(root / "empty")
    assert (root / "empty" / "x").read_bytes() == b"x"
    renameat2(root / "file", root / "other", RENAME_EXCHANGE)
    assert ((root / "file").read_bytes(), (root / "other").read_bytes()) == (b"other", b"file")
    renameat2(root / "empty", root / "file", RENAME_EXCHANGE)
    assert (root / "file" / "x").read_bytes() == b"x"
    assert (root / "empty").read_bytes() == b"other"
    os.rename(root / "other", root / "other")
    assert sorted(os.listdir(root)) == ["empty", "file", "other"]


def test_a_file_is_renamed_while_it_is_written(shared_lake: Lake) -> None:
    """Handles stay; what is written after goes to the new name; the old name can be used again at once."""
    root = shared_lake.path / f"open-{time.monotonic_ns()}"
    root.mkdir()
    with open(root / "old", "wb") as file:
        file.write(b"before ")
        file.flush()
        (root / "old").rename(root / "new")
        (root / "old").write_bytes(b"another")
        file.write(b"after")
    assert (root / "new").read_bytes() == b"before after"
    assert (root / "old").read_bytes() == b"another"
    with open(root / "new", "rb") as reader:
        (root / "old").rename(root / "new")
        assert reader.read() == b"before after"
    assert (root / "new").read_bytes() == b"another"
    assert os.listdir(root) == ["new"]


def test_a_large_file_is_renamed_while_it_is_uploaded(make_lake: LakeMaker, tmp_path: Path) -> None:
    """The upload goes on under the name it began with, and is seen under the new name only."""
    lake = make_lake("seaweedfs").mount()
    data = noise(2 * PART_BYTES + (8 << 20))
    with open(lake.path / "model.tmp", "wb") as file:
        file.write(data[: -(4 << 20)])
        file.flush()
        start_writeback(file.fileno())
        eventually(lambda: lake.number("store.requests.part") > 0, "a part goes up")
        (lake.path / "model.tmp").rename(lake.path / "model.pt")
        file.write(data[-(4 << 20) :])
    assert os.listdir(lake.path) == ["model.pt"]
    assert (lake.path / "model.pt").read_bytes() == data
    with another(lake, tmp_path) as reader:
        assert os.listdir(reader.path) == ["model.pt"]
        assert (reader.path / "model.pt").read_bytes() == data


@pytest.mark.long
def test_the_old_name_of_a_renamed_object_is_free(make_lake: LakeMaker, tmp_path: Path) -> None:
    """`mv log log.1; echo > log`, again and again: every file keeps its own bytes, whatever its size."""
    lake = make_lake("seaweedfs").mount()
    large = noise(20 << 20)
    log = lake.path / "log"
    for turn in range(3):
        log.write_bytes(b"%d" % turn)
        log.rename(lake.path / f"log.{turn}")
        log.write_bytes(large[turn:])
        log.rename(lake.path / f"large.{turn}")
    with another(lake, tmp_path) as reader:
        for node in (lake.path, reader.path):
            assert sorted(os.listdir(node)) == sorted(
                f"{name}.{turn}" for name in ("log", "large") for turn in range(3)
            )
            for turn in range(3):
                assert (node / f"log.{turn}").read_bytes() == b"%d" % turn
                assert (node / f"large.{turn}").read_bytes() == large[turn:]


def test_readers_see_all_of_the_old_or_all_of_the_new(make_lake: LakeMaker, tmp_path: Path) -> None:
    """One node exchanges a directory of many files with a new one; another lists and reads it all the time."""
    lake = make_lake("seaweedfs", "--pack", "always").mount()
    current, fresh, files = lake.path / "current", lake.path / "fresh", sized(20, 50)
    current.mkdir()

    def fill(directory: Path, generation: int) -> None:
        def write(index: int) -> None:
            (directory / f"file{index:02d}").write_text(f"{generation}")

        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(write, range(files)))

    fill(current, 0)
    sync(lake.path)
    wrong: list[str] = []
    seen: set[str] = set()
    done = threading.Event()
    with another(lake, tmp_path, "--refresh", "0.2") as reader:

        def read() -> None:
            while not done.is_set():
                fd = os.open(reader.path / "current", os.O_RDONLY | os.O_DIRECTORY)
                try:
                    names = os.listdir(fd)
                    texts = set()
                    for name in names:
                        opened = os.open(name, os.O_RDONLY, dir_fd=fd)
                        texts.add(os.read(opened, 100).decode())
                        os.close(opened)
                    if len(names) != files or len(texts) != 1:
                        wrong.append(f"{len(names)} names, generations {texts}")
                    seen.update(texts)
                except OSError as error:
                    wrong.append(repr(error))
                finally:
                    os.close(fd)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for generation in range(1, RENAMES + 1):
                fresh.mkdir()
                fill(fresh, generation)
                sync(lake.path)
                before = lake.puts()
                renameat2(fresh, current, RENAME_EXCHANGE)
                assert lake.puts() == before + 1
                fresh.rename(lake.path / f"retired-{generation}")
                eventually(partial(contains, seen, str(generation)), f"the reader sees generation {generation}")
        finally:
            done.set()
            thread.join()
    assert wrong == []


def test_nodes_see_each_others_changes(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Names, bytes and attributes, within the refresh period, though the kernel had remembered others."""
    lake = make_lake("seaweedfs", "--refresh", "0.3", "--metadata-ttl", "3600", "--pack", "always").mount()
    (lake.path / "a").mkdir()
    (lake.path / "a" / "x").write_text("one")
    with another(lake, tmp_path) as other:
        here, there = lake.path / "a", other.path / "a"
        assert (there / "x").read_text() == "one"
        assert not (there / "y").exists()
        (here / "y").write_text("two")
        eventually((there / "y").exists, "a new file is seen")
        (here / "x").write_text("three")
        eventually(lambda: (there / "x").read_text() == "three", "new bytes are seen")
        (here / "x").chmod(0o600)
        eventually(lambda: (there / "x").stat().st_mode & 0o777 == 0o600, "a new mode is seen")
        (there / "y").unlink()
        eventually(lambda: not (here / "y").exists(), "a deletion is seen")
        (there / "x").rename(there / "z")
        eventually(lambda: os.listdir(here) == ["z"], "a rename is seen")
        os.symlink("z", here / "l")
        eventually(lambda: (there / "l").is_symlink() and (there / "l").read_text() == "three", "a link is seen")
        os.setxattr(here / "z", "user.note", b"hello")
        eventually(lambda: os.listxattr(there / "z") == ["user.note"], "an extended attribute is seen")
        shutil.rmtree(here)
        eventually(lambda: not there.exists(), "a deleted directory is seen")


def test_what_was_changed_survives_a_crash(make_lake: LakeMaker, tmp_path: Path) -> None:
    """The daemon is killed before what it journaled went up: the next mount sends it."""
    lake = make_lake("seaweedfs").mount()
    (lake.path / "gone").write_text("gone")
    (lake.path / "kept").write_text("kept")
    sync(lake.path)
    (lake.path / "gone").unlink()
    (lake.path / "made").mkdir()
    os.symlink("kept", lake.path / "made" / "link")
    (lake.path / "kept").chmod(0o640)
    os.setxattr(lake.path / "kept", "user.note", b"x")
    lake.kill()
    lake.mount()
    expected = ["kept", "made"]
    assert sorted(os.listdir(lake.path)) == expected
    sync(lake.path)
    with another(lake, tmp_path) as other:
        assert sorted(os.listdir(other.path)) == expected
        assert os.readlink(other.path / "made" / "link") == "kept"
        assert (other.path / "kept").stat().st_mode & 0o777 == 0o640
        assert os.getxattr(other.path / "kept", "user.note") == b"x"
        assert (other.path / "kept").read_text() == "kept"


def tree_of(root: Path, precision: int) -> list[tuple[object, ...]]:
    """Everything that a copy is expected to keep: times of files and links, in parts of a second."""
    found: list[tuple[object, ...]] = []
    for path in sorted(root.rglob("*")):
        stat = path.lstat()
        link = os.readlink(path) if path.is_symlink() else ""
        time_kept = 0 if path.is_dir() else stat.st_mtime_ns * precision // 1_000_000_000
        size = 0 if path.is_dir() and not path.is_symlink() else stat.st_size
        found.append((str(path.relative_to(root)), oct(stat.st_mode), stat.st_uid, size, time_kept, link))
    return found


def make_tree(root: Path) -> None:
    (root / "bin").mkdir(parents=True)
    (root / "src" / "deep" / "er").mkdir(parents=True)
    for index in range(30):
        path = root / "src" / ("deep" if index % 2 else "deep/er") / f"module{index}.py"
        path.write_bytes(content(index) * 20)
        os.utime(path, ns=(1_600_000_000_000_000_000 + index, 1_500_000_000_123_456_000 + index))
    (root / "bin" / "run").write_text("#!/bin/sh\necho hi\n")
    (root / "bin" / "run").chmod(0o755)
    (root / "bin" / "private").write_text("secret")
    (root / "bin" / "private").chmod(0o600)
    (root / "link").symlink_to("bin/run")
    (root / "dangling").symlink_to("nowhere")
    for link in ("link", "dangling"):  # rsync sets no time of a link that differs by less than a second
        os.utime(root / link, ns=(1, 1_450_000_000_987_654_321), follow_symlinks=False)
    (root / "empty").mkdir()
    os.utime(root / "src", ns=(1, 1_400_000_000_000_000_000))


@pytest.mark.long
@pytest.mark.parametrize("how", ["tar", "cp", "rsync"])
def test_copies_keep_everything(make_lake: LakeMaker, tmp_path: Path, how: str) -> None:
    """Modes, times to the nanosecond and links, here, after a remount, and on another node."""
    source = tmp_path / "source"
    make_tree(source)
    lake = make_lake("seaweedfs").mount()
    target = lake.path / "copy"
    if how == "tar":
        subprocess.run(["tar", "-C", str(source), "-cf", str(tmp_path / "t.tar"), "."], check=True)
        target.mkdir()
        subprocess.run(["tar", "-C", str(target), "-xpf", str(tmp_path / "t.tar")], check=True)
    elif how == "cp":
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    else:
        subprocess.run(["rsync", "-a", f"{source}/", f"{target}/"], check=True)
    precision = 1 if how == "tar" else 1_000_000_000  # GNU tar's own format keeps whole seconds
    expected = tree_of(source, precision)
    for _ in range(2):
        assert tree_of(target, precision) == expected
        subprocess.run(["diff", "-r", "--no-dereference", str(source), str(target)], check=True)
        lake.remount(empty_cache=True)


@pytest.mark.long
def test_git_works(make_lake: LakeMaker) -> None:
    """Clone, commit, gc and fsck: lock files, renames over existing files, hard links refused politely."""
    lake = make_lake("seaweedfs").mount()
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.c",
           "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b.c", "HOME": str(lake.path)}  # fmt: skip

    def git(*args: str, cwd: Path) -> str:
        done = subprocess.run(["git", *args], cwd=cwd, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    origin, clone = lake.path / "origin", lake.path / "clone"
    origin.mkdir()
    git("init", "-q", cwd=origin)
    for turn in range(3):
        make_tree(origin / f"tree{turn}")
        git("add", ".", cwd=origin)
        git("commit", "-qm", f"turn {turn}", cwd=origin)
    git("clone", "-q", str(origin), str(clone), cwd=lake.path)
    git("gc", "-q", cwd=clone)
    git("fsck", "--strict", cwd=clone)
    assert git("status", "--porcelain", cwd=clone) == ""
    head = git("rev-parse", "HEAD", cwd=origin)
    lake.remount(empty_cache=True)
    assert git("rev-parse", "HEAD", cwd=clone) == head
    git("fsck", "--strict", cwd=clone)
    assert git("status", "--porcelain", cwd=clone) == ""


def test_removing_a_tree_takes_few_requests(make_lake: LakeMaker) -> None:
    """`rm -r`: names go in a few commits, each plain object by a DELETE of its own."""
    lake = make_lake("seaweedfs", "--refresh", "3600").mount()
    for directory in range(4):
        for index in range(PLAIN):
            lake.outside.replace(f"tree/d{directory}/plain{index:05d}", b"x")
    (lake.path / "tree" / "packed").mkdir()
    write_together(lake.path / "tree" / "packed", FILES // 2)
    sync(lake.path)
    stored = [key for key in lake.outside.objects() if key.startswith("tree/")]  # files closed alone are not packed
    before, began_s = lake.stats(), time.monotonic()
    subprocess.run(["rm", "-r", str(lake.path / "tree")], check=True)
    assert lake.cli("flush", str(lake.path)).returncode == 0
    after, seconds = lake.stats(), int(time.monotonic() - began_s)
    assert isinstance(before["store"], dict) and isinstance(after["store"], dict)
    made = sum(after["store"]["requests"].values()) - sum(before["store"]["requests"].values())
    assert made <= 30 + 2 * seconds + len(stored), "names are sent once a second"
    assert [key for key in lake.outside.objects() if key.startswith("tree/")] == []
    lake.remount(empty_cache=True)
    assert os.listdir(lake.path) == []


def test_others_objects_win_when_they_are_newer(make_lake: LakeMaker) -> None:
    """Another S3 client adds, replaces and deletes what commits had spoken of."""
    lake = make_lake("seaweedfs", "--metadata-ttl", "0.5", "--pack", "always").mount()
    for name in ("replaced", "removed", "kept"):
        (lake.path / name).write_text("ours")
    (lake.path / "removed").unlink()
    sync(lake.path)
    time.sleep(2.1)  # stores date objects to the second
    lake.outside.replace("replaced", b"theirs")
    lake.outside.replace("removed", b"theirs again")
    lake.outside.replace("added", b"new")
    eventually(lambda: sorted(os.listdir(lake.path)) == ["added", "kept", "removed", "replaced"], "names")
    eventually(lambda: (lake.path / "replaced").read_bytes() == b"theirs", "their bytes are seen")
    assert (lake.path / "removed").read_bytes() == b"theirs again"
    sync(lake.path)
    lake.outside.delete("replaced")
    eventually(lambda: not (lake.path / "replaced").exists(), "their deletion is seen")
    lake.remount(empty_cache=True)
    assert sorted(os.listdir(lake.path)) == ["added", "kept", "removed"]


@pytest.mark.long
def test_relocated_objects_are_at_the_keys_of_their_names(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Other S3 tools find a renamed object at its new key once the command ran; readers notice nothing."""
    lake = make_lake("seaweedfs", "--refresh", "0.3").mount()
    data = noise(20 << 20)
    (lake.path / "step.tmp").mkdir()
    (lake.path / "step.tmp" / "model.pt").write_bytes(data)
    (lake.path / "step.tmp" / "config.json").write_text("{}")
    (lake.path / "step.tmp" / "empty").touch()
    with another(lake, tmp_path) as other:
        os.listdir(other.path / "step.tmp")
        (lake.path / "step.tmp").rename(lake.path / "step")
        eventually((other.path / "step").exists, "the rename is seen")
        with open(other.path / "step" / "model.pt", "rb") as reader:
            head = reader.read(1000)
            done = lake.cli("relocate", str(lake.path), "--json")
            assert (done.returncode, json.loads(done.stdout)["files"]) == (0, 3), done.stderr
            assert {"step/model.pt", "step/config.json", "step/empty"} <= set(lake.outside.objects())
            assert head + reader.read() == data
        assert lake.outside.read("step/model.pt") == data
        for node in (lake.path, other.path):
            assert (node / "step" / "model.pt").read_bytes() == data
            assert os.listdir(node) == ["step"]
    lake.remount(empty_cache=True)
    assert (lake.path / "step" / "model.pt").read_bytes() == data
    assert os.listdir(lake.path) == ["step"]


def test_unzip_reads_a_pack(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Without this program: download the object, and any ZIP tool has the files."""
    lake = make_lake("seaweedfs", "--pack", "always").mount()
    write_together(lake.path, 20)
    for number, key in enumerate(commits(lake)):
        archive = tmp_path / f"{number}.zip"
        archive.write_bytes(lake.outside.read(key))
        subprocess.run(["unzip", "-tq", str(archive)], check=True, capture_output=True)
        subprocess.run(["unzip", "-qo", str(archive), "-d", str(tmp_path / "out")], check=True)
    for index in range(20):
        assert (tmp_path / "out" / f"f{index:06d}").read_bytes() == content(index)
