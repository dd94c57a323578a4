"""Errors of `lakefs-fuse mount`: one line with the remedy, an exit code, and no secret."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from tests import servers
from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import CLI, Lake, is_running
from tests.servers import Server


def refusal(lake: Lake, *options: str) -> str:
    """The one line on standard error; nothing is mounted and no daemon is left."""
    done = lake.try_mount("--retry-timeout", "1", *options)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("lakefs-fuse: ")
    assert done.stderr.count("\n") == 1 and done.stderr.endswith("\n")
    assert "Traceback" not in lake.log()
    assert not os.path.ismount(lake.path)
    assert not daemons_of(lake)
    assert servers.SECRET_KEY not in done.stderr
    return done.stderr


def daemons_of(lake: Lake) -> list[int]:
    """Processes that were started for this lake's cache directory or log and still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                opened = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
            except OSError:
                continue
            if str(lake.log_file) in opened and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


@pytest.fixture
def bucket(make_lake: LakeMaker) -> Lake:
    """A lake on SeaweedFS that is not mounted."""
    return make_lake("seaweedfs")


def test_no_such_bucket(bucket: Lake) -> None:
    bucket.source = "s3://there-is-no-such-bucket/prefix"
    said = refusal(bucket)
    assert "there-is-no-such-bucket" in said
    assert "does not exist" in said


def test_wrong_secret(bucket: Lake) -> None:
    bucket.env["AWS_SECRET_ACCESS_KEY"] = "this-is-not-the-secret-key"
    said = refusal(bucket)
    assert "refuse" in said or "denied" in said
    assert "this-is-not-the-secret-key" not in said + bucket.log()


def test_unknown_key(bucket: Lake) -> None:
    bucket.env["AWS_ACCESS_KEY_ID"] = "nobodyskey"
    said = refusal(bucket)
    assert "refuse" in said or "denied" in said


def test_no_credentials(bucket: Lake) -> None:
    del bucket.env["AWS_ACCESS_KEY_ID"], bucket.env["AWS_SECRET_ACCESS_KEY"]
    assert "credentials" in refusal(bucket)


def test_a_profile_that_does_not_exist(bucket: Lake) -> None:
    done = bucket.try_mount("--profile", "nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr and done.stderr.count("\n") == 1


def test_credentials_from_a_profile(bucket: Lake) -> None:
    del bucket.env["AWS_ACCESS_KEY_ID"], bucket.env["AWS_SECRET_ACCESS_KEY"]
    directory = Path(bucket.env["HOME"]) / ".aws"
    directory.mkdir()
    (directory / "credentials").write_text(
        f"[lake]\naws_access_key_id = {servers.ACCESS_KEY}\naws_secret_access_key = {servers.SECRET_KEY}\n"
    )
    bucket.mount("--profile", "lake")
    (bucket.path / "f").write_bytes(b"x")
    assert bucket.outside.read("f") == b"x"


def test_keys_that_may_only_read(bucket: Lake) -> None:
    """Refused before anybody writes, with the way out; a read-only mount works."""
    bucket.outside.replace("f", b"to be read")
    bucket.env["AWS_ACCESS_KEY_ID"] = servers.READ_ONLY_ACCESS_KEY
    assert "--read-only" in refusal(bucket)
    bucket.mount("--read-only")
    assert (bucket.path / "f").read_bytes() == b"to be read"
    with pytest.raises(OSError, match="Read-only"):
        (bucket.path / "g").write_bytes(b"")


def test_nobody_listens(bucket: Lake) -> None:
    port = servers.free_port()
    said = refusal(bucket, "--endpoint-url", f"http://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in said
    assert "endpoint" in said or "reach" in said


def test_a_host_that_does_not_exist(bucket: Lake) -> None:
    said = refusal(bucket, "--endpoint-url", "http://store.invalid:9000")
    assert "store.invalid" in said


def test_a_server_that_does_not_speak_http(bucket: Lake) -> None:
    """It takes the connection and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def hang_up() -> None:
            server.settimeout(0.1)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            said = refusal(bucket, "--endpoint-url", f"http://127.0.0.1:{server.getsockname()[1]}")
        finally:
            stop.set()
            thread.join()
    assert "did not answer" in said


def test_an_endpoint_that_is_no_url(bucket: Lake) -> None:
    done = bucket.try_mount("--endpoint-url", "ftp://127.0.0.1")
    assert done.returncode == 2
    assert "ftp://127.0.0.1" in done.stderr


def test_an_endpoint_needs_no_region(bucket: Lake) -> None:
    at = bucket.options.index("--region")
    bucket.options = bucket.options[:at] + bucket.options[at + 2 :]
    bucket.mount()
    (bucket.path / "f").write_bytes(b"x")
    assert bucket.outside.read("f") == b"x"


def test_a_ca_bundle_that_is_missing(bucket: Lake) -> None:
    done = bucket.try_mount("--ca-bundle", "/nonexistent/ca.pem")
    assert done.returncode == 2
    assert "/nonexistent/ca.pem" in done.stderr


def test_a_source_directory_that_is_missing(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    lake.source += "/missing"
    assert "missing" in refusal(lake)


@pytest.mark.parametrize("source", ["http://x/y", "s3://", "file://relative", "s3://user:pw@bucket", "/just/a/path"])
def test_a_source_that_is_none(make_lake: LakeMaker, source: str) -> None:
    lake = make_lake("file")
    lake.source = source
    done = lake.try_mount()
    assert done.returncode == 2
    assert "s3://bucket" in done.stderr
    assert "pw" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_mountpoint_that_is_missing_or_in_use(lake: Lake, make_lake: LakeMaker) -> None:
    other = make_lake("file")
    other.path = lake.path
    said = other.try_mount()
    assert said.returncode == 1
    assert "is in use" in said.stderr and "lakefs-fuse umount" in said.stderr
    other.path = lake.path.parent / "missing"
    assert "mkdir -p" in refusal(other)
    other.path = lake.path.parent / "log"
    assert "not a directory" in refusal(other)


def test_a_cache_directory_that_is_in_use(lake: Lake, make_lake: LakeMaker) -> None:
    other = make_lake("file")
    other.cache_dir = lake.cache_dir
    said = refusal(other)
    assert f"in use by the mount at {lake.path} (pid {lake.pid})" in said and f"umount {lake.path}" in said
    assert (lake.path.stat().st_mode & 0o777) == 0o755


def test_too_little_disk(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    said = refusal(lake, "--free-space", "1000T")
    assert "not enough disk" in said and "--free-space" in said


def test_a_cache_directory_of_another_lake(make_lake: LakeMaker) -> None:
    """Names and blocks of one lake never show up in another one."""
    lake = make_lake("file").mount()
    (lake.path / "f").write_bytes(b"of the first lake")
    lake.umount()
    other = make_lake("file")
    other.cache_dir = lake.cache_dir
    done = other.try_mount()
    if done.returncode == 0:
        other.pid = other.number("daemon.pid")
        assert os.listdir(other.path) == []
    else:
        assert "another lake" in done.stderr or "belongs" in done.stderr


def test_secrets_are_nowhere_to_be_seen(make_lake: LakeMaker) -> None:
    s3 = make_lake("seaweedfs")
    s3.command = list(CLI)  # A process that is started: its command line and environment are looked at.
    s3.mount()
    (s3.path / "f").write_bytes(b"x" * 1000)
    assert (s3.path / "f").read_bytes()
    process = Path(f"/proc/{s3.pid}")
    assert servers.SECRET_KEY.encode() not in (process / "cmdline").read_bytes()
    assert servers.SECRET_KEY.encode() in (process / "environ").read_bytes(), "which is open to its owner only"
    for text in (s3.log(), str(s3.stats()), s3.cli("stats", str(s3.path)).stdout):
        assert servers.SECRET_KEY not in text
    for path in s3.cache_dir.rglob("*"):
        if path.is_file():
            assert servers.SECRET_KEY.encode() not in path.read_bytes(), path
    mounts = Path("/proc/self/mounts").read_text()
    assert servers.SECRET_KEY not in mounts
    assert str(s3.path) in mounts


def test_the_log_of_a_store_that_fails_holds_no_signature(faults: tuple[Server, Faults], make_lake: LakeMaker) -> None:
    proxied, controls = faults
    lake = make_lake("seaweedfs", "--retry-timeout", "1", "--log-level", "DEBUG", through=proxied).mount()
    controls.reset(1000)
    with pytest.raises(OSError, match="Input/output"):
        (lake.path / "d").mkdir()
    controls.clear()
    log = lake.log()
    assert "did not answer" in log
    for secret in (servers.SECRET_KEY, "Signature=", "AWS4-HMAC-SHA256 Credential"):
        assert secret not in log


def test_commands_on_what_is_not_mounted(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    for command in (["stats"], ["umount"], ["orphans"], ["flush"]):
        done = lake.cli(*command, str(lake.path))
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "mount" in done.stderr
