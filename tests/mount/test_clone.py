"""`lakefs-fuse clone`: a copy that the store makes, seen at once here and whole on another node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import eventually
from tests.mount.test_commits import another

FILES = 400
LARGE_BYTES = 256 << 20
COUNTED = {
    "store.requests.part": 0,
    "store.requests.put": 6,
    "store.bytes.written": 100_000,
    "store.bytes.read": 100_000,
}
"""What a copy may cost: its commit, announcements, what repeats commits, and polls; no byte of a file."""


@pytest.mark.long  # vfs/test_clone.py shows it
@pytest.mark.parametrize("pack", ["auto", "always"])
def test_clone_is_equal_to_its_source_costs_no_byte_and_outlives_it(
    make_lake: LakeMaker, tmp_path: Path, pack: str
) -> None:
    lake = make_lake("seaweedfs", "--refresh", "1", "--pack", pack).mount()
    source, target = lake.path / "datasets/v1", lake.path / "datasets/v2"
    (source / "below").mkdir(parents=True)
    for number in range(FILES):
        (source / "below" / f"{number}.json").write_text(f"{number}\n" * 10)
    with (source / "model.bin").open("wb") as large:
        for number in range(LARGE_BYTES >> 20):
            large.write(bytes([number % 251]) * (1 << 20))
    (source / "link").symlink_to("below/0.json")
    assert not target.exists(), "the kernel remembers that"
    lake.cli("flush", str(lake.path))
    before = {name: lake.number(name) for name in COUNTED}
    done = lake.cli("clone", str(source), str(target))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    cost = {name: lake.number(name) - before[name] for name in COUNTED}
    assert all(cost[name] <= COUNTED[name] for name in COUNTED), cost
    subprocess.run(["diff", "-r", "--no-dereference", source, target], check=True)
    done = lake.cli("clone", str(source), str(target))
    assert done.returncode == 1
    assert "exists" in done.stderr
    done = lake.cli("clone", str(source), "/tmp/elsewhere")
    assert done.returncode == 1
    with another(lake, tmp_path) as other:
        copy = other.path / "datasets/v2"
        eventually(copy.exists, "the copy is not seen")
        (copy / "below/1.json").write_text("changed")
        subprocess.run(["diff", "-r", "--exclude=1.json", source, copy], check=True)
        shutil.rmtree(lake.path / "datasets/v1")
        lake.cli("flush", str(lake.path))
        assert (copy / "model.bin").stat().st_size == LARGE_BYTES
        done = lake.cli("gc", lake.source, *_store_options(lake.options), "--grace", "2")
        assert done.returncode == 0, done.stderr
        assert (copy / "below/2.json").read_text() == "2\n" * 10
    done = lake.cli("fsck", lake.source, *_store_options(lake.options))
    assert done.returncode == 0, done.stdout + done.stderr


def _store_options(options: tuple[str, ...]) -> tuple[str, ...]:
    at = options.index("--endpoint-url")
    return options[at : at + 2]


@pytest.mark.long  # vfs/test_copy_range.py shows it
@pytest.mark.parametrize("durability", ["close", "writeback"])
def test_cp_of_large_files_moves_no_byte(make_lake: LakeMaker, tmp_path: Path, durability: str) -> None:
    lake = make_lake("seaweedfs", "--refresh", "1", "--durability", durability).mount()
    source, target = lake.path / "v1", lake.path / "v2"
    source.mkdir()
    for name, mebibytes in (("large", LARGE_BYTES >> 20), ("small", 2)):
        with (source / name).open("wb") as file:
            for number in range(mebibytes):
                file.write(bytes([number % 251]) * (1 << 20))
    assert lake.cli("flush", str(lake.path)).returncode == 0
    before = {name: lake.number(name) for name in COUNTED}
    subprocess.run(["cp", "-r", source, target], check=True)
    assert lake.cli("flush", str(lake.path)).returncode == 0
    cost = {name: lake.number(name) - before[name] for name in COUNTED}
    assert all(cost[name] <= COUNTED[name] for name in COUNTED), cost
    assert lake.number("upcalls.copy_file_range") >= 2
    subprocess.run(["diff", "-r", source, target], check=True)
    with another(lake, tmp_path) as other:
        subprocess.run(["diff", "-r", other.path / "v1", other.path / "v2"], check=True)
    before = {name: lake.number(name) for name in COUNTED}
    with (target / "large").open("r+b") as changed:
        changed.write(b"changed")
    assert (source / "large").read_bytes()[:7] == bytes(7)


def test_cp_without_the_c_library_reads_and_writes(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    lake.env["LAKEFS_FUSE_HOOKS"] = "off"
    lake.mount()
    (lake.path / "one").write_bytes(bytes(3 << 20))
    subprocess.run(["cp", lake.path / "one", lake.path / "two"], check=True)
    assert (lake.path / "two").read_bytes() == bytes(3 << 20)
    assert lake.number("upcalls.copy_file_range") == 0
