"""Partial files are never visible, whichever process holds, inherits or closes their descriptors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.mount.conftest import LakeMaker, Place, new_place
from tests.mount.lakes import noise


@contextmanager
def watching(here: Place, name: str) -> Iterator[set[bytes]]:
    """Every content that the store shows of a file while the body runs."""
    seen: set[bytes] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            if name in here.names():
                seen.add(here.stored(name))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def test_shell_redirection_publishes_once(here_with_hooks: Place) -> None:
    here = here_with_hooks
    published, put = here.count("upload.publishes"), here.lake.puts()
    with watching(here, "f") as seen:
        subprocess.run(["bash", "-c", "(sleep 0.3; echo one; sleep 0.3; echo two) > f"], cwd=here.path, check=True)
        assert here.stored("f") == b"one\ntwo\n"
    assert seen <= {b"one\ntwo\n"}
    assert here.count("upload.publishes") == published + 1
    assert here.lake.puts() == put + 1


def test_shell_redirection_over_an_existing_file(here_with_hooks: Place) -> None:
    here = here_with_hooks
    (here.path / "f").write_bytes(b"the old version\n")
    with watching(here, "f") as seen:
        subprocess.run(["sh", "-c", "(sleep 0.2; echo one; sleep 0.2; echo two) > f"], cwd=here.path, check=True)
    assert seen == {b"the old version\n", b"one\ntwo\n"} or seen == {b"the old version\n"}
    assert here.stored("f") == b"one\ntwo\n"


def test_shell_loops_and_pipes(here_with_hooks: Place) -> None:
    here = here_with_hooks
    script = """
    for i in 1 2 3; do echo $i; sleep 0.1; done > loop
    { echo a; /bin/echo b; (echo c); } > group
    exec 3> held; echo first >&3; /bin/echo second >&3; sleep 0.2; echo third >&3; exec 3>&-
    seq 5 | tee teed > /dev/null
    echo more >> loop
    """
    with watching(here, "group") as seen:
        subprocess.run(["bash", "-ec", script], cwd=here.path, check=True)
    assert seen <= {b"a\nb\nc\n"}
    assert here.stored("held") == b"first\nsecond\nthird\n"
    assert here.stored("loop") == b"1\n2\n3\nmore\n"
    assert here.stored("group") == b"a\nb\nc\n"
    assert here.stored("teed") == b"1\n2\n3\n4\n5\n"


def test_a_child_that_inherits_a_descriptor_does_not_publish(here_with_hooks: Place) -> None:
    """`subprocess.run` in the middle of writing a checkpoint: the child closes everything it inherited."""
    here = here_with_hooks
    published = here.count("upload.publishes")
    data = noise(200_000)
    with (here.path / "model").open("wb", buffering=0) as stream:
        stream.write(data[:100_000])
        os.set_inheritable(stream.fileno(), True)
        for close_fds in (True, False):
            subprocess.run(["true"], close_fds=close_fds, check=True)
        assert here.names() == set()
        stream.write(data[100_000:])
    assert here.stored("model") == data
    assert here.count("upload.publishes") == published + 1


EXECUTED = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
os.write(fd, b"x" * int(sys.argv[2]))
if sys.argv[3] == "duplicated":
    os.dup2(fd, 1)
os.execvp("echo", ["echo", "out"])
"""


@pytest.mark.parametrize("name", ["file", "model.pt"])
@pytest.mark.parametrize("written", [0, 300_000])
@pytest.mark.parametrize("descriptors", ["one", "duplicated"])
def test_execve_that_closes_the_descriptor_of_a_new_file_ends(
    make_lake: LakeMaker, name: str, written: int, descriptors: str
) -> None:
    """Until the reply to FLUSH, the kernel holds a lock for which readers of files in /proc/PID wait."""
    lake = make_lake("file").mount()
    command = [sys.executable, "-c", EXECUTED, str(lake.path / name), str(written), descriptors]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        assert program.wait(20) == 0
    finally:
        if program.poll() is None:
            os.kill(lake.pid, signal.SIGKILL)  # nothing else ends a program that waits for its reply
    expected = b"x" * written + (b"out\n" if descriptors == "duplicated" else b"")
    assert (lake.path / name).read_bytes() == expected


def test_redirection_left_to_execve_publishes_once(here_with_hooks: Place) -> None:
    here = here_with_hooks
    published = here.count("upload.publishes")
    command = [sys.executable, "-c", EXECUTED, str(here.path / "f"), "0", "duplicated"]
    with watching(here, "f") as seen:
        subprocess.run(command, check=True)
        assert here.stored("f") == b"out\n"
    assert seen <= {b"out\n"}
    assert here.count("upload.publishes") == published + 1


def test_without_the_hooks_every_close_publishes(make_lake: LakeMaker) -> None:
    """Nobody can tell then who closes; what is stored at last is right all the same."""
    lake = make_lake("file")
    lake.env["LAKEFS_FUSE_HOOKS"] = "off"
    here = new_place(lake.mount())
    published = here.count("upload.publishes")
    data = noise(200_000)
    with (here.path / "model").open("wb", buffering=0) as stream:
        stream.write(data[:100_000])
        subprocess.run(["true"], check=True)
        assert here.stored("model") == data[:100_000]
        stream.write(data[100_000:])
    assert here.stored("model") == data
    assert here.count("upload.publishes") == published + 2


def test_forked_writers_share_one_file(here_with_hooks: Place) -> None:
    """Each child writes its slice and ends; the parent's close publishes all of it, once."""
    here = here_with_hooks
    published = here.count("upload.publishes")
    piece, count = 50_000, 4
    fd = os.open(here.path / "shared", os.O_CREAT | os.O_WRONLY)
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                os.pwrite(fd, noise(piece, number), number * piece)
                os.close(fd)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert here.names() == set()
    os.close(fd)
    assert here.stored("shared") == b"".join(noise(piece, number) for number in range(count))
    assert here.count("upload.publishes") == published + 1


def test_the_child_goes_on_where_the_parent_closed(here: Place) -> None:
    """A daemon that forks into the background with its log open: what it writes at last is stored when it ends."""
    fd = os.open(here.path / "log", os.O_CREAT | os.O_WRONLY)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(write_end)
            os.read(read_end, 1)
            os.write(fd, b"child\n")
            os.close(fd)
        finally:
            os._exit(0)
    os.write(fd, b"parent\n")
    os.close(fd)
    assert here.stored("log") == b"parent\n", "close() of the one who opened it is a promise"
    os.close(write_end)
    os.close(read_end)
    assert os.waitpid(child, 0)[1] == 0
    assert here.stored("log") == b"parent\nchild\n"


def test_a_duplicate_closed_in_mid_write(here: Place) -> None:
    """Closing a duplicate in the writer's own process is a flush like any other: durable, but never torn."""
    fd = os.open(here.path / "f", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"one\n")
    os.close(os.dup(fd))
    os.write(fd, b"two\n")
    os.close(fd)
    assert here.stored("f") == b"one\ntwo\n"


def test_nothing_is_visible_before_close(here: Place) -> None:
    old, new = noise(3_000_000, 1), noise(3_000_000, 2)
    file = here.path / "f"
    file.write_bytes(old)
    with file.open("r+b", buffering=0) as stream:
        for at in range(0, len(new), 500_000):
            stream.write(new[at : at + 500_000])
            assert here.stored("f") == old
    assert here.stored("f") == new


def test_two_writers_of_one_file(here: Place) -> None:
    """The first close shows what both have written up to then; the last one the rest."""
    file = here.path / "f"
    file.write_bytes(bytes(10))
    first, second = os.open(file, os.O_WRONLY), os.open(file, os.O_WRONLY)
    os.pwrite(first, b"aaaaa", 0)
    os.pwrite(second, b"bbb", 5)
    os.close(first)
    assert here.stored("f")[:5] == b"aaaaa"
    os.pwrite(second, b"cc", 8)
    os.close(second)
    assert here.stored("f") == b"aaaaabbbcc"


def test_reading_descriptors_do_not_publish(here_with_hooks: Place) -> None:
    here = here_with_hooks
    with (here.path / "f").open("wb", buffering=0) as stream:
        stream.write(b"half")
        assert (here.path / "f").read_bytes() == b"half"
        subprocess.run(["cat", str(here.path / "f")], stdout=subprocess.DEVNULL, check=True)
        time.sleep(0.05)
        assert here.names() == set()
    assert here.stored("f") == b"half"
