"""`lakefs-fuse doctor`: on a machine, on a store, and on mounts that are well and that are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lakefs_fuse.store.probe import PROBES
from tests import servers
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import CLI, Bucket, Lake, eventually, is_running

TOKEN = "cache-token-never-to-be-seen"
SIGNED = "X-Amz-Signature=0123456789abcdef"


def checks_of(lake: Lake, *arguments: str, expected: int = 0) -> dict[str, dict[str, Any]]:
    """What ``doctor --json`` prints, by check."""
    done = lake.cli("doctor", *arguments, "--json")
    assert done.returncode == expected, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] == (expected == 0)
    return {result["check"]: result for result in answer["checks"]}


def store_options(lake: Lake) -> list[str]:
    at = lake.options.index("--endpoint-url")
    return [*lake.options[at : at + 2], "--region", servers.REGION]


def failed(found: dict[str, dict[str, Any]]) -> set[str]:
    return {check for check, result in found.items() if result["severity"] == "failed"}


def test_mount_that_is_well_passes_and_its_bundle_has_no_secret(make_lake: LakeMaker, tmp_path: Path) -> None:
    lake = make_lake("seaweedfs")
    lake.env["LAKEFS_CLUSTER_CACHE_TOKEN"] = TOKEN
    lake.mount()
    (lake.path / "f").write_bytes(b"x")
    rotated = lake.log_file.with_name("log.1")
    rotated.write_text(f"planted {servers.SECRET_KEY} {TOKEN} {SIGNED} https://user:pass-word@host/\n")
    found = checks_of(lake, str(lake.path), "--no-throughput", "--bundle", str(tmp_path / "report.zip"))
    assert failed(found) == set()
    assert {"mount.daemon", "mount.backlog", "mount.cache", "machine.dev-fuse", "cache.speed", "store.put",
            "store.delete", "store.lifecycle", "store.credentials"} <= set(found)  # fmt: skip
    assert "store.throughput" not in found
    assert not any(key.startswith(PROBES) for key in lake.outside.objects()), "nothing is left behind"
    assert lake.outside.uploads() == []
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        members = {name: archive.read(name).decode() for name in archive.namelist()}
    assert "planted ***" in members["logs/log.1"]
    assert "mounted s3://" in members["logs/log"]
    assert json.loads(members["stats.json"])["daemon"]["pid"] == lake.pid
    assert json.loads(members["configuration.json"])["store"]["source"]["bucket"]
    for name, text in members.items():
        for secret in (servers.SECRET_KEY, servers.ACCESS_KEY, TOKEN, SIGNED, "pass-word"):
            assert secret not in text, name


def test_mount_whose_daemon_died_fails_and_says_what_to_do(make_lake: LakeMaker, tmp_path: Path) -> None:
    lake = make_lake("file").mount()
    os.kill(lake.pid, signal.SIGKILL)
    eventually(lambda: not is_running(lake.pid), "the end of the daemon")
    said = f"FAILED   mount.daemon: the daemon of {lake.path} is dead: run `lakefs-fuse umount"
    eventually(lambda: said in lake.cli("doctor", str(lake.path)).stdout, "the end of its threads and its supervisor")
    done = lake.cli("doctor", str(lake.path), "--bundle", str(tmp_path / "report.zip"))
    assert done.returncode == 1
    assert said in done.stdout
    assert "skipped  store.list" in done.stdout
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        assert "checks.json" in archive.namelist()


def test_store_is_checked_by_its_url_with_throughput(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    found = checks_of(lake, lake.source, "--cache-dir", str(lake.cache_dir))
    assert failed(found) == set()
    assert found["store.throughput"]["values"]["up_bytes_s"] > 1_000_000
    assert found["cache.permissions"]["text"].startswith("made by the first mount")
    assert lake.outside.objects() == {}
    assert not lake.cache_dir.exists()


def test_credentials_that_may_only_read_pass_with_read_only(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs")
    lake.env["AWS_ACCESS_KEY_ID"] = servers.READ_ONLY_ACCESS_KEY
    assert failed(checks_of(lake, lake.source, *store_options(lake), "--read-only")) == set()


def test_store_that_cannot_be_reached_fails_and_the_machine_is_checked(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs")
    lake.env["AWS_SECRET_ACCESS_KEY"] = "this-is-not-the-secret-key"
    found = checks_of(lake, lake.source, *store_options(lake), expected=1)
    assert failed(found) == {"store.bucket"}
    assert "check AWS_SECRET_ACCESS_KEY" in found["store.bucket"]["text"]
    assert found["machine.open-files"]["severity"] == "ok"
    del lake.env["AWS_ACCESS_KEY_ID"], lake.env["AWS_SECRET_ACCESS_KEY"]
    found = checks_of(lake, lake.source, *store_options(lake), expected=1)
    assert failed(found) == {"store.credentials"}
    assert "set AWS_ACCESS_KEY_ID" in found["store.credentials"]["text"]


def test_bucket_that_is_not_there_is_not_made(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs")
    for more in ([], ["--read-only"]):
        found = checks_of(lake, "s3://mistyped/lake", *store_options(lake), *more, expected=1)
        assert failed(found) == {"store.bucket"}
        assert "bucket 'mistyped' does not exist" in found["store.bucket"]["text"]
        assert found["store.requests"]["severity"] == "skipped"
    assert isinstance(lake.outside, Bucket)
    assert "mistyped" not in {each["Name"] for each in lake.outside.client.list_buckets()["Buckets"]}


def test_machine_alone_is_checked_without_a_target(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    found = checks_of(lake)
    assert not any(check.startswith(("store.", "mount.")) for check in found)
    assert "cache.permissions" not in found, "of no mount in particular"
    assert {"machine.kernel", "machine.libfuse", "machine.fast-paths", "cache.room"} <= set(found)
    done = lake.cli("doctor", "/mnt/lake", "--region", "eu-west-1")
    assert done.returncode == 2
    assert "--region goes with a source URL" in done.stderr
    done = lake.cli("doctor", "my-bucket")
    assert done.returncode == 2
    assert "my-bucket is neither a directory nor a URL: name a mountpoint, or a lake as s3://" in done.stderr


def test_explain_of_a_directory_that_was_never_mounted_assumes_nothing_of_it(make_lake: LakeMaker) -> None:
    done = make_lake("file").try_mount("--explain")
    assert "its capabilities are not known yet" in done.stdout
    assert "cannot: " not in done.stdout


@pytest.mark.long  # cli/test_explain.py shows it
def test_explain_tells_what_a_mount_would_do_and_makes_none(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs")
    done = lake.try_mount("--explain", "--json")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    assert not os.path.ismount(lake.path)
    assert not lake.cache_dir.exists()
    assert lake.outside.objects() == {}
    assert first["store"]["probed"] is False
    assert first["store"]["credentials"].startswith("from the environment")
    assert "handle_killpriv" in first["kernel"]["requested"]
    lake.mount()
    lake.umount()
    known = json.loads(lake.try_mount("--explain", "--json").stdout)
    assert known["store"]["probed"] is True
    assert known["store"]["capabilities"]["multipart"] is True
    assert servers.SECRET_KEY not in json.dumps(known)
    away = lake.try_mount("--explain", "--endpoint-url", f"http://127.0.0.1:{servers.free_port()}")
    assert away.returncode == 0
    assert "cannot be asked: " in away.stdout
    assert "nothing listens there" in away.stdout
    assert "--cache-size" in away.stdout


def test_doctor_whose_output_is_closed_leaves_nothing_behind(make_lake: LakeMaker) -> None:
    """As in `lakefs-fuse doctor SOURCE | head`."""
    lake = make_lake("file")
    lake.mount().umount()
    before = lake.outside.objects()
    reading, writing = os.pipe()
    doctor = subprocess.Popen(
        [*CLI, "doctor", lake.source],
        stdout=writing,
        stderr=subprocess.DEVNULL,
        env={**lake.env, "PYTHONUNBUFFERED": "1"},
    )
    os.close(writing)
    with open(reading, "rb") as output:
        while b"PUT" not in (line := output.readline()):
            assert line, "doctor has ended"
    doctor.wait(60)
    assert lake.outside.objects() == before
    assert lake.outside.uploads() == []
