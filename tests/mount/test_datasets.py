"""Datasets of a real lake: made, mounted, read after everything was replaced, removed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.counting import costs
from tests.mount.lakes import CLI, Lake, eventually, noise
from tests.mount.writeback_lakes import FOR_EVER, OPTIONS, flush
from tests.servers import Server

FILES = {f"part-{index}/{index}": noise(3000, index) for index in range(4)} | {"large": noise(3 << 20, 9)}

NAME = "im-that-no-other-test-mounts"
"""A command that finds a mount by its dataset sees the mounts of tests that run beside it."""
WARM = f"{NAME}@1"


def run(lake: Lake, action: str, *args: str) -> dict[str, object]:
    options = lake.options if lake.source.startswith("s3:") else ()
    done = lake.cli("dataset", action, lake.source, *options, *args, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def fill(lake: Lake) -> None:
    for path, data in FILES.items():
        (lake.path / "data" / path).parent.mkdir(parents=True, exist_ok=True)
        (lake.path / "data" / path).write_bytes(data)
    lake.outside.replace("data/plain", b"a plain object")
    lake.settle()


def shown(root: Path) -> dict[str, bytes]:
    return {
        str(Path(directory, name).relative_to(root)): Path(directory, name).read_bytes()
        for directory, _, names in os.walk(root)
        for name in names
    }


@pytest.mark.long  # admin/test_datasets.py shows it
@pytest.mark.usefixtures("with_hooks")
@pytest.mark.parametrize("store", ["file", "seaweedfs"])
def test_dataset_is_read_after_another_mount_has_replaced_and_removed_its_files(
    make_lake: LakeMaker, store: str
) -> None:
    lake = make_lake(store).mount()
    fill(lake)
    made = run(lake, "create", "im", "data")
    assert (made["dataset"], made["files"]) == ("im@1", len(FILES) + 1)
    for path in FILES:
        (lake.path / "data" / path).unlink()
    lake.outside.replace("data/plain", b"another one")
    lake.settle()
    options = lake.options if lake.source.startswith("s3:") else ()
    for _ in range(2):  # the first run sees what is dead, the second deletes it
        assert lake.cli("gc", lake.source, *options, "--grace", "0", "--uploads-older-than", "0").returncode == 0
    verified = run(lake, "verify", "im", "--read")
    assert (verified["ok"], verified["bytes_read"]) == (True, made["bytes"])
    lake.umount()
    lake.cache_dir = lake.cache_dir.with_name("cache-im")
    lake.mount("--dataset", "im@1")
    eventually(lambda: bool(run(lake, "status", "im")["nodes"]), "the node is in the status")  # no other PUT meanwhile
    expected = FILES | {"plain": b"a plain object"}
    assert shown(lake.path) == expected
    told = os.statvfs(lake.path)
    assert (told.f_blocks, told.f_bavail) == (-(-sum(map(len, expected.values())) // told.f_frsize), 0)
    os.listdir(lake.path)
    with costs(lake):
        assert shown(lake.path) == expected
    with pytest.raises(OSError, match="Read-only"):
        (lake.path / "new").write_bytes(b"")
    state = lake.stats()["immutable"]
    assert isinstance(state, dict)
    assert state["dataset"] == "im@1"


def test_mount_of_a_dataset_says_what_is_wrong(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount()
    fill(lake)
    run(lake, "create", "im", "data")
    lake.umount()
    for args, said in (
        (("--dataset", "im@2"), "there is no dataset im@2; there are: im@1"),
        (("--dataset", "im"), "im has no version: say which"),
        (("--dataset", "../x@1"), "expected NAME or NAME@VERSION"),
        (("--dataset", "im@1", "--snapshot", "v1"), "exclude each other"),
        (("--dataset", "im@1", "--durability", "writeback"), "--durability: a --dataset mount writes nothing"),
    ):
        refused = lake.try_mount(*args)
        assert refused.returncode == 2
        assert said in refused.stderr
    assert lake.cli("dataset", "rm", lake.source, "im@1").returncode == 0
    assert run(lake, "ls") | {"seconds": 0} == {"datasets": [], "seconds": 0}


def test_path_in_a_mount_of_a_dataset_names_no_file_of_the_lake(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount()
    fill(lake)
    (lake.path / "part-0").mkdir()
    (lake.path / "part-0" / "another").write_bytes(b"of the lake")
    lake.settle()
    run(lake, "create", "im", "data")
    lake.umount()
    lake.cache_dir = lake.cache_dir.with_name("cache-im")
    lake.mount("--dataset", "im@1")
    below = str(lake.path / "part-0")
    for args in (("dataset", "create", str(lake.path), "x", "part-0"), ("pack", below), ("log", below)):
        refused = lake.cli(*args)
        assert refused.returncode == 2, args
        assert (
            f"shows the dataset im@1, whose paths are not those of the lake: name the lake by its URL, {lake.source}"
            in (refused.stderr)
        )
    shown_by_root = lake.cli("dataset", "ls", str(lake.path))
    assert "im@1" in shown_by_root.stdout


def test_dataset_that_is_warm_is_read_without_the_store_and_its_node_is_in_the_status(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount()
    fill(lake)
    run(lake, "create", NAME, "data")
    lake.umount()
    refused = lake.cli("dataset", "warm", WARM)
    assert refused.returncode == 1
    assert f"{WARM} is not mounted on this node" in refused.stderr
    lake.cache_dir = lake.cache_dir.with_name("cache-im")
    lake.mount("--dataset", WARM)
    eventually(lambda: bool(run(lake, "status", NAME)["nodes"]), "the node is in the status")
    done = lake.cli("dataset", "warm", WARM)
    assert done.returncode == 0, done.stderr
    assert f"{len(FILES) + 1} files" in done.stdout
    before = lake.number("store.requests.get")
    assert shown(lake.path) == FILES | {"plain": b"a plain object"}
    assert lake.number("store.requests.get") == before
    assert lake.cli("dataset", "pin", str(lake.path)).returncode == 0
    pinned = json.loads(lake.cli("cache", "ls", str(lake.path), "--json").stdout)[0]["paths"][0]
    assert (pinned["pinned"], pinned["local_bytes"]) == ("yes", pinned["bytes"])
    by_name = subprocess.run(
        [*CLI, "dataset", "pin", lake.path.name], env=lake.env, cwd=lake.path.parent, capture_output=True, check=False
    )
    assert by_name.returncode == 0, by_name.stderr
    refused = lake.cli("dataset", "pin", str(lake.path / "part-0"))
    assert refused.returncode == 2
    assert "is not where a dataset is mounted" in refused.stderr
    lake.umount()
    lake.mount("--dataset", WARM)
    eventually(lambda: node_of(lake)["share"] == 1.0, "all is local")
    assert node_of(lake)["mountpoint"] == str(lake.path)
    lake.umount()
    assert node_of(lake)["mounted"] is False


def test_create_of_a_path_in_a_mount_stores_what_was_written_there_first(
    make_lake: LakeMaker, faults: tuple[Server, Faults]
) -> None:
    lake = make_lake("seaweedfs", *OPTIONS, "--writeback-delay", "10m", through=faults[0]).mount()
    data = lake.path / "data"
    data.mkdir()
    (data / "old").write_bytes(b"old")
    flush(lake)
    (data / "old").write_bytes(b"newer")
    (data / "added").write_bytes(b"added")
    faults[1].forbid(FOR_EVER, method="PUT")
    refused = lake.cli("dataset", "create", str(lake.path), "im", "data")
    assert refused.returncode == 1
    assert "no version was made" in refused.stderr
    absolute = lake.cli("dataset", "create", str(lake.path), "im", str(data))
    assert absolute.returncode == 2
    assert f"PATH is relative to SOURCE: `lakefs-fuse dataset create {lake.path} im data`" in absolute.stderr
    faults[1].clear()
    for source, path in ((lake.path, "data"), (data, "")):
        (data / "old").write_bytes(b"newest")
        made = lake.cli("dataset", "create", str(source), "im", path, "--json")
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["bytes"] == len(b"newest" + b"added")


def node_of(lake: Lake) -> dict[str, object]:
    nodes = run(lake, "status", WARM)["nodes"]
    assert isinstance(nodes, list)
    (node,) = nodes
    assert isinstance(node, dict)
    return node
