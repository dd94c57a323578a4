"""A lake whose index was deleted after gc had collected commits, as an administrator meets it and mends it."""

from __future__ import annotations

import json

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Directory, noise


def test_lost_manifests_are_told_and_restored(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--maintenance", "off").mount("--pack", "always")
    assert isinstance(lake.outside, Directory)
    (lake.path / "old").write_bytes(noise(2000, 1))
    lake.settle()
    (lake.path / "old").rename(lake.path / "new")
    (lake.path / "empty").mkdir()
    lake.settle()
    lake.umount()
    for _ in range(2):
        assert lake.cli("gc", lake.source, "--grace", "0").returncode == 0
    manifests = {path: path.read_bytes() for path in (lake.outside.root / ".lakefs" / "index").rglob("manifest")}
    assert manifests
    for path in manifests:
        path.unlink()

    lake.cache_dir = lake.cache_dir.with_name("cache-fresh")
    refused = lake.try_mount()
    assert (refused.returncode, "names may be missing" in refused.stderr) == (1, True), refused.stderr
    for command in (["gc", "--grace", "0"], ["snapshot"]):
        refused = lake.cli(command[0], lake.source, *command[1:])
        assert (refused.returncode, "names may be missing" in refused.stderr) == (1, True), refused.stderr
    checked = lake.cli("fsck", lake.source, "--json")
    assert (checked.returncode, json.loads(checked.stdout)["names_missing"]) == (1, True)

    shown = lake.try_mount("--read-only")
    assert (shown.returncode, "`lakefs-fuse fsck` names what to restore" in shown.stderr) == (0, True), shown.stderr
    lake.pid = lake.number("daemon.pid")
    assert lake.number("commits.names_missing") == 1
    assert (
        "FAILED   mount.commits: names may be missing" in lake.cli("doctor", str(lake.path), "--no-throughput").stdout
    )
    lake.umount()

    for path, data in manifests.items():
        path.write_bytes(data)
    lake.mount()
    assert (lake.path / "new").read_bytes() == noise(2000, 1)
    assert sorted(path.name for path in lake.path.iterdir()) == ["empty", "new"]
    assert lake.cli("fsck", lake.source).returncode == 0
