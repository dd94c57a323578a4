"""The policies in deploy/iam, each on a server that enforces it (moto), and what a reader may never send."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests import servers
from tests.faults import Faults, faulty
from tests.mount.lakes import LARGE_BYTES, Bucket, Lake, eventually, hasten_maintenance, noise
from tests.mount.posix_errors import error_of
from tests.servers import Server

POLICIES = Path(__file__).parents[2] / "deploy" / "iam"
PREFIX = "some/lake"
SEASONED = {"small": noise(3000), "large": noise(LARGE_BYTES, 1), "packed/1": noise(500, 2), "packed/2": noise(600, 3)}


class Guarded:
    """A moto server on which users have keys and policies; the bucket holds a lake that was filled before."""

    def __init__(self, server: Server, directory: Path) -> None:
        self._server, self._directory, self._made = server, directory, 0
        self.bucket = "guarded"

    def guard(self, yes: bool) -> None:
        """Whether requests are checked from now on."""
        count = b"0" if yes else b"inf"
        url = f"{self._server.url}/moto-api/reset-auth"
        request = urllib.request.Request(url, data=count, headers={"Content-Type": "text/plain"})
        urllib.request.urlopen(request, timeout=20).close()

    def keys_of(self, role: str) -> dict[str, str]:
        """Credentials of a new user with a policy of deploy/iam."""
        iam = boto3.client(
            "iam", endpoint_url=self._server.url, region_name=servers.REGION,
            aws_access_key_id=servers.ACCESS_KEY, aws_secret_access_key=servers.SECRET_KEY,
        )  # fmt: skip
        self._made += 1
        name = f"{role}-{self._made}"
        policy = (POLICIES / f"{role}.json").read_text().replace("BUCKET", self.bucket).replace("PREFIX", PREFIX)
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName=role, PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        iam.close()
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def lake(self, *options: str, through: Server | None = None) -> Lake:
        self._made += 1
        outside = Bucket(self._server, self.bucket, PREFIX + "/")
        url = (through or self._server).url
        directory = self._directory / f"node-{self._made}"
        return Lake(outside, outside.source, directory, "--endpoint-url", url, "--region", servers.REGION, *options)


@pytest.fixture(scope="module")
def moto_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A moto of its own: whether it checks credentials is the same for all its clients."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(moto_apart: Server, dev_fuse: Path, tmp_path_factory: pytest.TempPathFactory) -> Guarded:
    made = Guarded(moto_apart, tmp_path_factory.mktemp("guarded"))
    servers.make_bucket(moto_apart, made.bucket)
    lake = made.lake("--pack", "always", "--pack-threshold", "1000")
    try:
        lake.mount()
        for name, data in SEASONED.items():
            (lake.path / name).parent.mkdir(exist_ok=True)
            (lake.path / name).write_bytes(data)
        lake.umount()
    finally:
        lake.close()
    return made


@pytest.fixture
def checked(guarded: Guarded) -> Iterator[Guarded]:
    """Requests are checked while the test runs; what it needs besides is made before by `as_role`."""
    try:
        yield guarded
    finally:
        guarded.guard(False)


def as_role(guarded: Guarded, role: str, *options: str, through: Server | None = None) -> Lake:
    """A lake of a user with a role, not mounted yet; requests are checked from here on."""
    lake = guarded.lake(*options, through=through)
    lake.env |= guarded.keys_of(role)
    guarded.guard(True)
    return lake


@pytest.fixture
def counted(moto_apart: Server) -> Iterator[tuple[Server, Faults]]:
    with faulty(moto_apart) as pair:
        yield pair


def test_policy_reader_reads_and_sends_no_write(checked: Guarded, counted: tuple[Server, Faults]) -> None:
    lake = as_role(checked, "reader", "--read-only", through=counted[0])
    try:
        assert lake.try_mount().returncode == 0, lake.log()
        lake.pid = lake.number("daemon.pid")
        assert {path.name for path in lake.path.iterdir()} == {"small", "large", "packed"}
        for name, data in SEASONED.items():
            assert (lake.path / name).read_bytes() == data
        assert error_of(lambda: (lake.path / "new").write_bytes(b"x")) == "EROFS"
        lake.umount()
        assert set(counted[1].counts) <= {"GET", "HEAD"}
    finally:
        lake.close()


def test_policy_reader_mounted_read_write_mounts_and_fails_at_close(checked: Guarded) -> None:
    """What the store can do is known from the lake record, so that nothing is probed by writing."""
    lake = as_role(checked, "reader")
    try:
        assert lake.try_mount().returncode == 0, lake.log()
        lake.pid = lake.number("daemon.pid")
        assert (lake.path / "small").read_bytes() == SEASONED["small"]
        with pytest.raises(PermissionError), (lake.path / "new").open("wb") as file:
            file.write(b"x")
        (lake.path / "new").unlink()
        lake.umount()
    finally:
        lake.close()
    assert "AccessDenied" in lake.log()


def test_policy_writer_writes_renames_and_removes(checked: Guarded) -> None:
    lake = as_role(checked, "writer")
    try:
        assert lake.try_mount().returncode == 0, lake.log()
        lake.pid = lake.number("daemon.pid")
        here = lake.path / "written"
        here.mkdir()
        (here / "small").write_bytes(b"small")
        (here / "large").write_bytes(noise(LARGE_BYTES, 7))
        (here / "small").rename(here / "renamed")
        (here / "gone").write_bytes(b"gone")
        (here / "gone").unlink()
        assert {path.name for path in here.iterdir()} == {"renamed", "large"}
        lake.umount()
    finally:
        lake.close()
    checked.guard(False)
    assert lake.outside.read("written/large") == noise(LARGE_BYTES, 7)
    assert "written/gone" not in lake.outside.objects()


def collect(lake: Lake) -> tuple[int, str, dict[str, int]]:
    done = lake.cli("gc", lake.source, *lake.options, "--grace", "0", "--json")
    return done.returncode, done.stderr, json.loads(done.stdout) if done.stdout else {}


@pytest.mark.long  # which runs seven commands
def test_policy_writer_may_not_collect_garbage_and_maintainer_may(checked: Guarded) -> None:
    lake = checked.lake("--pack", "always")
    try:
        lake.mount()
        (lake.path / "dead").write_bytes(noise(5000))
        (lake.path / "dead").unlink()
        lake.umount()
    finally:
        lake.close()
    code, said, _ = collect(as_role(checked, "writer"))
    assert code == 1
    assert "deleting is refused" in said
    assert "deploy/iam/maintainer.json" in said
    assert "Traceback" not in said
    checked.guard(False)
    code, said, done = collect(as_role(checked, "maintainer"))
    assert code == 0, said
    assert done["commits_deleted"] > 0


@pytest.mark.long  # daemon/test_maintenance.py shows it
def test_mount_of_policy_writer_folds_and_leaves_collection_to_one_that_may_delete(
    checked: Guarded, tmp_path: Path
) -> None:
    lake = hasten_maintenance(as_role(checked, "writer"), tmp_path, interval_s=0.2, commits_max=1)
    try:
        assert lake.try_mount().returncode == 0, lake.log()
        lake.pid = lake.number("daemon.pid")
        (lake.path / "maintained-0").write_bytes(b"bytes")
        for step in range(5):
            (lake.path / f"maintained-{step}").rename(lake.path / f"maintained-{step + 1}")
        lake.sync()
        eventually(lambda: "may not delete" in maintenance_of(lake)["overdue_because"], "it is told", 60)
        found = maintenance_of(lake)
        assert (found["due"], found["last_error"]) == ("a collection", "")
        assert found["last_fold_s"]
        assert (lake.path / "maintained-5").read_bytes() == b"bytes"
        lake.umount()
    finally:
        lake.close()
    assert lake.log().count("these credentials may not delete commits") >= 1
    checked.guard(False)
    assert [key for key in lake.outside.objects() if key.startswith(".lakefs/index/") and key.endswith("/manifest")]


def maintenance_of(lake: Lake) -> dict[str, Any]:
    found = lake.stats()["maintenance"]
    assert isinstance(found, dict)
    return found
