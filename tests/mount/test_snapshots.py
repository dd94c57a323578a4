"""Named snapshots: taken, mounted, kept from gc, deleted."""

from __future__ import annotations

import json
import os

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.counting import costs
from tests.mount.lakes import Directory, Lake, noise


def fill(lake: Lake, text: str) -> None:
    (lake.path / "d").mkdir(exist_ok=True)
    for index in range(5):
        (lake.path / "d" / f"{index}").write_bytes(noise(2000, index) + text.encode())
    lake.settle()


def expected(text: str) -> dict[str, bytes]:
    return {f"{index}": noise(2000, index) + text.encode() for index in range(5)}


def shown(lake: Lake, path: str = "d") -> dict[str, bytes]:
    return {name: (lake.path / path / name).read_bytes() for name in os.listdir(lake.path / path)}


def admin(lake: Lake, command: str, *args: str) -> dict[str, object]:
    options = lake.options if lake.source.startswith("s3:") else ()
    done = lake.cli(command, lake.source, *options, *args, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def below(lake: Lake, what: str) -> set[str]:
    """Files of ours in a local directory."""
    assert isinstance(lake.outside, Directory)
    return {path.name for path in (lake.outside.root / ".lakefs" / what).rglob("*") if path.is_file()}


def packs_of(lake: Lake) -> set[str]:
    return {name for name in below(lake, "commits") if name.endswith(".zip")}


@pytest.mark.long  # admin/test_snapshot.py shows it
@pytest.mark.usefixtures("with_hooks")
@pytest.mark.parametrize("store", [pytest.param("file", marks=pytest.mark.long), "seaweedfs"])
def test_a_snapshot_is_what_the_lake_was(make_lake: LakeMaker, store: str) -> None:
    lake = make_lake(store).mount("--pack", "always")
    fill(lake, "first")
    lake.outside.replace("plain", b"a plain object")
    made = admin(lake, "snapshot", "--name", "v1")
    assert (made["name"], made["names"]) == ("v1", 7)
    fill(lake, "second")
    (lake.path / "d" / "0").unlink()
    (lake.path / "e").mkdir()
    lake.settle()
    for _ in range(2):  # the first run sees what is dead, the second deletes it
        admin(lake, "gc", "--grace", "0")
    lake.umount()
    lake.cache_dir = lake.cache_dir.with_name("cache-v1")
    lake.mount("--immutable", "--snapshot", "v1")
    assert sorted(os.listdir(lake.path)) == ["d", "plain"]
    assert shown(lake) == expected("first")
    assert (lake.path / "plain").read_bytes() == b"a plain object"
    os.listdir(lake.path / "d")
    with costs(lake):
        assert shown(lake) == expected("first")
    refused = lake.cli("refresh", str(lake.path))
    assert refused.returncode == 2
    assert "shows the snapshot v1, which does not change" in refused.stderr
    lake.remount("--immutable", "--snapshot", "v1")
    assert shown(lake) == expected("first")
    assert lake.number("store.requests.list") <= 3, "what was taken in is there still"


def test_a_snapshot_of_a_mount_has_what_was_written_there(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--durability", "writeback", "--writeback-delay", "10m").mount()
    (lake.path / "file").write_bytes(b"acknowledged")
    assert lake.number("dirty.files") == 1
    made = lake.cli("snapshot", str(lake.path), "--name", "v1", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["names"] == 1
    assert lake.number("dirty.files") == 0


def test_what_a_deleted_snapshot_kept_is_given_back(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount("--pack", "always")
    fill(lake, "first")
    admin(lake, "snapshot", "--name", "v1")
    admin(lake, "snapshot", "--name", "v2")
    listed = admin(lake, "snapshot", "--list")["snapshots"]
    assert isinstance(listed, list)
    assert [each["name"] for each in listed] == ["v1", "v2"]
    fill(lake, "second")
    for _ in range(2):
        assert admin(lake, "gc", "--grace", "0")["files_moved"] == 0
    kept = packs_of(lake)
    for name in ("v1", "v2"):
        admin(lake, "snapshot", "--delete", name)
    for _ in range(2):
        admin(lake, "gc", "--grace", "0")
    assert packs_of(lake) < kept
    assert below(lake, "snapshots") == set()
    assert shown(lake) == expected("second")


def test_names_of_snapshots(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount()
    fill(lake, "first")
    admin(lake, "snapshot", "--name", "v1")
    for args, said in (
        (("--name", "v1"), "there is a snapshot v1 already"),
        (("--name", "a/b"), "cannot be the name of a snapshot"),
        (("--name", ".."), "cannot be the name of a snapshot"),
        (("--delete", "v2"), "there is no snapshot v2"),
        (("--name", "v2", "--list"), "give one of them"),
    ):
        refused = lake.cli("snapshot", lake.source, *args)
        assert refused.returncode == 2
        assert said in refused.stderr
    lake.umount()
    refused = lake.try_mount("--immutable", "--snapshot", "v3")
    assert refused.returncode == 2
    assert "there is no snapshot v3; there are: v1" in refused.stderr
    refused = lake.try_mount("--snapshot", "v1")
    assert refused.returncode == 2
    assert "--snapshot needs --immutable" in refused.stderr
