"""`lakefs-fuse wait`: one mount waits for what another mount, or another S3 client, writes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lakefs_fuse.cli.daemons import open_daemon
from lakefs_fuse.control import protocol
from lakefs_fuse.control.runtime import client_socket_paths
from lakefs_fuse.product import XATTR_VERSION
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, eventually
from tests.mount.test_commits import another

OPTIONS = ("--refresh", "1", "--metadata-ttl", "4", "--pack", "always")
TIMEOUT = ("--timeout", "60s")
CLIENTS = 100


@pytest.fixture
def nodes(make_lake: LakeMaker, tmp_path: Path) -> Iterator[tuple[Lake, Lake]]:
    """The one that waits, and another."""
    lake = make_lake("file", *OPTIONS).mount()
    with another(lake, tmp_path) as other:
        yield lake, other


@contextmanager
def waiting(lake: Lake, path: str, *options: str) -> Iterator[Future[subprocess.CompletedProcess[str]]]:
    """A wait under way, which has ended with success after the block."""
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(lake.cli, "wait", str(lake.path / path), *TIMEOUT, *options)
        yield wait
        done = wait.result()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_wait_for_file_of_another_mount_ends_when_it_can_be_read(nodes: tuple[Lake, Lake]) -> None:
    lake, other = nodes
    for path in ("ckpt/step1/model.pt", "ckpt/step2/model.pt"):
        assert not (lake.path / path).exists(), "the kernel remembers that"
        with waiting(lake, path) as wait:
            with pytest.raises(TimeoutError):
                wait.result(0.5)
            (other.path / path).parent.mkdir(parents=True)
            (other.path / path).write_bytes(b"weights of " + path.encode())
        assert (lake.path / path).read_bytes() == b"weights of " + path.encode()


def test_wait_for_directory_that_another_mount_renames_into_place_ends(nodes: tuple[Lake, Lake]) -> None:
    lake, other = nodes
    (other.path / "tmp").mkdir()
    (other.path / "tmp" / "shard").write_bytes(b"shard")
    with waiting(lake, "step3/shard"):
        (other.path / "tmp").rename(other.path / "step3")
    assert (lake.path / "step3" / "shard").read_bytes() == b"shard"


def test_wait_for_version_of_another_mount_ends_when_open_reads_it(nodes: tuple[Lake, Lake]) -> None:
    lake, other = nodes
    for data in (b"first", b"second", b"third"):
        (other.path / "config").write_bytes(data)
        version = os.getxattr(other.path / "config", XATTR_VERSION).decode()
        with waiting(lake, "config", "--version", version):
            pass
        assert (lake.path / "config").read_bytes() == data
        assert os.getxattr(lake.path / "config", XATTR_VERSION).decode() == version


def test_wait_for_etag_of_another_client_ends_when_open_reads_it(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", "--refresh", "1", "--metadata-ttl", "1").mount()
    lake.outside.replace("config", b"old")
    assert (lake.path / "config").read_bytes() == b"old"
    lake.outside.replace("config", b"new")
    etag = lake.outside.versions()["config"][0]
    with waiting(lake, "config", "--version", f'"{etag}"'):
        pass
    assert (lake.path / "config").read_bytes() == b"new"


def test_wait_for_object_of_another_client_lists_its_directory_once_in_each_ttl(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--refresh", "1h", "--metadata-ttl", "3").mount()
    lake.outside.replace("d/other", b"")
    with ExitStack() as stack:
        waits = []
        for _ in range(CLIENTS):
            client = stack.enter_context(open_daemon(str(lake.path)))
            waits.append(client.follow(protocol.WaitPath("d/f")))
            assert next(waits[-1]) == protocol.NOTHING
        before = lake.number("store.requests.list")
        lake.outside.replace("d/f", b"bytes")
        assert [[*replies][-1] for replies in waits] == [protocol.Done()] * CLIENTS
    assert lake.number("store.requests.list") - before <= 4
    assert (lake.path / "d" / "f").read_bytes() == b"bytes"


def test_wait_follows_link_that_appears(nodes: tuple[Lake, Lake]) -> None:
    lake, other = nodes
    with waiting(lake, "latest/model.pt") as wait:
        (other.path / "latest").symlink_to("step9")
        eventually((lake.path / "latest").is_symlink, "the link is seen")
        with pytest.raises(TimeoutError):
            wait.result(1.5)
        (other.path / "step9").mkdir()
        (other.path / "step9" / "model.pt").write_bytes(b"")


def test_wait_that_ctrl_c_ends_frees_the_daemon(lake: Lake) -> None:
    paths = {str(path) for path in client_socket_paths(str(lake.path), os.geteuid())}

    def connections() -> int:
        """Of the daemon, with clients; see proc_net(5)."""
        fields = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return sum(each[5] == "03" and each[7:8] != [] and each[7] in paths for each in fields)

    eventually(lambda: connections() == 0, "the clients of the test have ended")
    with subprocess.Popen(
        [*lake.command, "wait", str(lake.path / "never")], stderr=subprocess.PIPE, text=True, env=lake.env
    ) as program:
        try:
            eventually(lambda: connections() == 1, "the program asks")
            program.send_signal(signal.SIGINT)
            assert program.communicate(timeout=20)[1].strip() == "lakefs-fuse: interrupted"
        finally:
            program.kill()
    assert program.returncode == 130
    eventually(lambda: connections() == 0, "the daemon has noticed")


def test_wait_that_takes_too_long_is_one_line(lake: Lake) -> None:
    done = lake.cli("wait", str(lake.path / "d" / "never"), "--timeout", "1s")
    assert (done.returncode, done.stdout) == (1, "")
    said = re.escape(f"lakefs-fuse: {lake.path}/d/never: after ") + r"(1|0\.\d) s it does not exist\n"
    assert re.fullmatch(said, done.stderr), "what was left of a second when the daemon was asked"


def test_wait_outside_of_a_mount_and_in_an_immutable_one_is_refused(make_lake: LakeMaker, tmp_path: Path) -> None:
    outside = make_lake("file").cli("wait", str(tmp_path / "f"))
    assert outside.returncode == 1
    assert "is not inside a mount" in outside.stderr
    lake = make_lake("file", "--immutable")
    lake.outside.replace("f", b"")
    refused = lake.mount().cli("wait", str(lake.path / "f"))
    assert refused.returncode == 2
    assert "is an immutable mount" in refused.stderr
    assert os.getxattr(lake.path / "f", XATTR_VERSION)


def test_wait_ends_with_the_mount(lake: Lake) -> None:
    with open_daemon(str(lake.path)) as client:
        replies = client.follow(protocol.WaitPath("never"))
        next(replies)
        lake.umount()
        assert [*replies][-1] == protocol.Failed(message="the mount has ended")
