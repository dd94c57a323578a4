"""`lakefs-fuse cache` on real mounts: what is warm is read without the store."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import CLI, MIB, Lake, eventually, noise
from tests.mount.test_outage import Disk, small_disk
from tests.servers import Server

__all__ = ["small_disk"]

PACKED, PLAIN, LARGE = 60, 10, 9 * MIB + 5
SMALL_BYTES = 50_000


def gets(lake: Lake) -> int:
    return lake.number("store.requests.get")


def read_all(lake: Lake, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        assert (lake.path / path).read_bytes() == data, path


def cache(lake: Lake, *args: str, code: int = 0) -> str:
    done = lake.cli("cache", *args)
    assert done.returncode == code, f"{done.stdout}{done.stderr}\n{lake.log()}"
    return done.stdout if code == 0 else done.stderr


def listed(lake: Lake, *paths: str) -> list[dict[str, object]]:
    (found,) = json.loads(cache(lake, "ls", "--json", *paths))
    rows: list[dict[str, object]] = found["paths"]
    return rows


@pytest.fixture(params=["read-write", "immutable"])
def filled(request: pytest.FixtureRequest, make_lake: LakeMaker, tmp_path: Path) -> tuple[Lake, dict[str, bytes]]:
    """A lake with packs and plain objects, mounted with an empty cache."""
    lake = make_lake("seaweedfs")
    files = fill_unmounted(lake, tmp_path)
    lake.options += ("--immutable",) if request.param == "immutable" else ()
    return lake.mount(), files


def fill_unmounted(lake: Lake, directory: Path) -> dict[str, bytes]:
    """Files of a lake, of which nothing is mounted or cached afterwards."""
    source = directory / "source"
    files = {f"set/packed/{index % 4}/{index:03d}.bin": noise(SMALL_BYTES, index) for index in range(PACKED)}
    for path, data in files.items():
        (made := source / path).parent.mkdir(parents=True, exist_ok=True)
        made.write_bytes(data)
    lake.mount()
    done = lake.cli("ingest", str(source), str(lake.path))
    assert done.returncode == 0, done.stderr
    lake.umount()
    subprocess.run(["rm", "-r", str(lake.cache_dir)], check=True)
    plain = {f"set/plain/{index:03d}.bin": noise(SMALL_BYTES, 1000 + index) for index in range(PLAIN)}
    plain["set/plain/large.bin"] = noise(LARGE, 7)
    for path, data in plain.items():
        lake.outside.replace(path, data)
    return files | plain


@pytest.mark.parametrize("filled", ["read-write", pytest.param("immutable", marks=pytest.mark.long)], indirect=True)
def test_warm_then_reading_every_file_asks_the_store_for_nothing(filled: tuple[Lake, dict[str, bytes]]) -> None:
    lake, files = filled
    (before,) = listed(lake, str(lake.path / "set"))
    size = sum(map(len, files.values()))
    assert (before["files"], before["bytes"], before["local_bytes"]) == (len(files), size, 0)
    fetched = gets(lake)
    said = cache(lake, "warm", str(lake.path / "set"))
    assert f"{len(files)} files" in said
    packs = -(-PACKED * SMALL_BYTES // (8 * MIB)) + 1
    assert gets(lake) - fetched <= PLAIN + 2 + packs, "a pack comes in large GETs"
    (after,) = listed(lake, str(lake.path / "set"))
    assert after["local_bytes"] == size
    fetched = gets(lake)
    read_all(lake, files)
    assert gets(lake) == fetched
    assert "0 B fetched" in cache(lake, "warm", str(lake.path / "set"))
    assert gets(lake) == fetched, "what is there is not asked for again"


@pytest.mark.parametrize("filled", ["read-write", pytest.param("immutable", marks=pytest.mark.long)], indirect=True)
def test_warm_after_the_daemon_was_killed_fetches_only_the_rest(filled: tuple[Lake, dict[str, bytes]]) -> None:
    lake, files = filled
    some = [str(lake.path / "set" / "plain")]
    cache(lake, "warm", *some)
    lake.kill()
    lake.mount()
    fetched = gets(lake)
    cache(lake, "warm", str(lake.path / "set"))
    packs = -(-PACKED * SMALL_BYTES // (8 * MIB)) + 1
    assert 0 < gets(lake) - fetched <= packs
    fetched = gets(lake)
    read_all(lake, files)
    assert gets(lake) == fetched


def test_selection_by_glob_list_and_relative_path(make_lake: LakeMaker, tmp_path: Path) -> None:
    lake = make_lake("file")
    files = fill_unmounted(lake, tmp_path)
    lake.mount()
    root = str(lake.path)
    assert [row["path"] for row in listed(lake, f"{root}/set/*")] == ["set/packed", "set/plain"]
    assert len(listed(lake, f"{root}/set/**/00?.bin")) == 10 + 10
    assert len(listed(lake, f"{root}/**/large.bin")) == 1
    names = tmp_path / "names"
    names.write_bytes(b"\0".join(os.fsencode(path) for path in files))
    done = subprocess.run(
        [*CLI, "cache", "warm", "--files-from", str(names), "-0"],
        cwd=lake.path, env=lake.env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{len(files)} files" in done.stdout
    done = subprocess.run(
        [*CLI, "cache", "ls", "--json", "--files-from", "-"],
        cwd=lake.path / "set", input="plain/large.bin\n", env=lake.env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (found,) = json.loads(done.stdout)
    assert [(row["path"], row["local_bytes"]) for row in found["paths"]] == [("set/plain/large.bin", LARGE)]


def test_bad_input_is_named_and_nothing_is_fetched(make_lake: LakeMaker, tmp_path: Path) -> None:
    lake = make_lake("file").mount()
    (lake.path / "there").write_bytes(b"x" * 100)
    root = str(lake.path)
    said = cache(lake, "warm", f"{root}/there", f"{root}/absent", f"{root}/no*", code=1)
    assert f"{root}/absent does not exist, {root}/no* matches nothing" in said
    assert "is not inside a mount of this program" in cache(lake, "warm", str(tmp_path), code=1)
    assert "no path is given" in cache(lake, "warm", code=2)
    assert "[ without ]" in cache(lake, "ls", f"{root}/a[", code=2)
    assert "No such file" in cache(lake, "ls", "--files-from", str(tmp_path / "absent"), code=2)
    lake.umount()
    assert "is not inside a mount" in cache(lake, "warm", f"{root}/there", code=1)


def test_each_command_prints_json_of_each_mount(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    for name in ("a", "b"):
        lake.outside.replace(f"set/{name}", noise(SMALL_BYTES, 1))
    lake.mount()

    def asked(*arguments: str) -> dict[str, Any]:
        (answer,) = json.loads(cache(lake, *arguments, "--json", str(lake.path / "set")))
        assert answer["mountpoint"] == str(lake.path)
        found: dict[str, Any] = answer
        return found

    warmed = asked("warm")
    assert (warmed["files"], warmed["fetched_bytes"] >= 2 * SMALL_BYTES) == (2, True)
    assert asked("warm", "--stop")["stopped"] == 0
    assert asked("pin")["files"] == 2
    assert asked("evict")["pinned_files"] == 2
    assert asked("unpin")["unpinned"] == 1
    assert asked("evict")["freed_bytes"] > 0
    done = lake.cli("refresh", str(lake.path / "set"), "--json")
    assert json.loads(done.stdout) == {"mountpoint": str(lake.path), "path": "set", "exists": True}


def test_warm_that_does_not_fit_is_refused_or_takes_what_fits(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--cache-size", "32M")
    files = {f"d/{index:02d}": noise(4 * MIB, index) for index in range(12)}
    for path, data in files.items():
        lake.outside.replace(path, data)
    lake.mount()
    refused = cache(lake, "warm", f"{lake.path}/d", code=1)
    assert re.search(r"do not fit: the cache has room for \d+ MiB.*--as-much-as-fits", refused)
    assert lake.number("cache.bytes") == 0
    said = cache(lake, "warm", "--as-much-as-fits", f"{lake.path}/d")
    assert "did not fit" in said
    rows = listed(lake, f"{lake.path}/d/*")
    warm = [str(row["path"]) for row in rows if row["local_bytes"] == row["bytes"]]
    assert len(warm) >= 6
    assert f"{len(warm)} files" in said
    fetched = gets(lake)
    read_all(lake, {path: files[path] for path in warm})
    assert gets(lake) == fetched, "nothing that was warmed was evicted for something else"


def test_warm_makes_room_by_what_was_used_before(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--cache-size", "40M")
    files = {f"{part}/{index}": noise(4 * MIB, index) for part in "ab" for index in range(6)}
    for path, data in files.items():
        lake.outside.replace(path, data)
    lake.mount()
    cache(lake, "warm", f"{lake.path}/a")
    for made in lake.cache_dir.glob("blocks/*/*"):
        os.utime(made, (1e9, 1e9))
    cache(lake, "warm", f"{lake.path}/b")
    fetched = gets(lake)
    read_all(lake, {path: data for path, data in files.items() if path.startswith("b/")})
    assert gets(lake) == fetched


def test_warm_that_is_interrupted_leaves_nothing_running(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    for index in range(8):
        lake.outside.replace(f"d/{index}", noise(8 * MIB, index))
    lake.mount()
    command = [*CLI, "cache", "warm", "--limit", "2M", f"{lake.path}/d"]
    process = subprocess.Popen(command, env=lake.env, stderr=subprocess.PIPE)
    eventually(lambda: lake.number("warm.fetched_bytes") > 0, "it began")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert process.stderr is not None
    process.stderr.close()
    eventually(lambda: not lake.stats()["warm"]["running"], "it ended", 5)  # type: ignore[index]
    eventually(lambda: lake.number("reader.blocks_pending") == 0, "no GET is left", 5)
    assert lake.number("warm.fetched_bytes") < 32 * MIB


def test_warm_in_the_background_goes_on_and_can_be_stopped(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    for index in range(4):
        lake.outside.replace(f"d/{index}", noise(4 * MIB, index))
    lake.mount()
    assert "in the background" in cache(lake, "warm", "--background", "--limit", "2M", f"{lake.path}/d")
    assert "warming: " in cache(lake, "ls", f"{lake.path}/d")
    assert ": 1 stopped" in cache(lake, "warm", "--stop", str(lake.path))
    eventually(lambda: not lake.stats()["warm"]["running"], "it ended", 5)  # type: ignore[index]
    cache(lake, "warm", "--background", f"{lake.path}/d")
    eventually(lambda: listed(lake, f"{lake.path}/d")[0]["local_bytes"] == 16 * MIB, "all of it is there")


def test_pinned_files_stay_over_restarts_and_crashes(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--cache-size", "48M")
    files = {f"{part}/{index}": noise(4 * MIB, index) for part in ("kept", "other") for index in range(8)}
    for path, data in files.items():
        lake.outside.replace(path, data)
    lake.mount()
    kept = {path: data for path, data in files.items() if path.startswith("kept/")}
    said = cache(lake, "pin", f"{lake.path}/kept")
    assert said.startswith(f"{lake.path}/kept: 8 files")
    for again in (lake.remount, lake.kill):
        again()
        if again == lake.kill:
            lake.mount()
        read_all(lake, {path: data for path, data in files.items() if path.startswith("other/")})
        fetched = gets(lake)
        read_all(lake, kept)
        assert gets(lake) == fetched
    assert listed(lake, f"{lake.path}/kept")[0]["pinned"] == "yes"
    assert "pins: 1, 32.0 MiB of 36.0 MiB" in cache(lake, "ls", "--pinned", str(lake.path))
    assert "pins may take up 36 MiB" in cache(lake, "pin", f"{lake.path}/other", code=1)
    assert f"{lake.path}/kept: 1 pin ended; 0 are left" in cache(lake, "unpin", f"{lake.path}/kept")
    assert "is not pinned" in cache(lake, "unpin", f"{lake.path}/kept", code=2)


def test_pin_in_an_immutable_mount_follows_a_refresh(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--immutable")
    lake.outside.replace("d/a", noise(MIB, 1))
    lake.mount()
    cache(lake, "pin", f"{lake.path}/d")
    lake.outside.replace("d/b", noise(MIB, 2))
    assert lake.cli("refresh", str(lake.path)).returncode == 0
    eventually(lambda: listed(lake, f"{lake.path}/d")[0]["local_bytes"] == 2 * MIB, "the new file is there")
    assert lake.number("pins.files") == 2


def test_evict_frees_the_disk_at_once_and_leaves_pins(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    for index in range(4):
        lake.outside.replace(f"d/{index}", noise(4 * MIB, index))
    lake.mount()
    assert f"{lake.path}/nope does not exist" in cache(lake, "warm", f"{lake.path}/nope", code=1)
    assert "nope" not in cache(lake, "ls", f"{lake.path}/d"), "who asked has been told"
    assert cache(lake, "warm", f"{lake.path}/d/1", f"{lake.path}/d/0").startswith(f"2 paths in {lake.path}: 2 files")
    assert cache(lake, "warm", f"{lake.path}/d").startswith(f"{lake.path}/d: 4 files")
    cache(lake, "pin", f"{lake.path}/d/0")
    said = cache(lake, "evict", f"{lake.path}/d")
    assert re.match(re.escape(f"{lake.path}/d: ") + r"3 files evicted, 12\.\d MiB freed", said)
    assert "1 file stays: pinned" in said
    on_disk = sum(path.stat().st_blocks * 512 for path in lake.cache_dir.glob("blocks/*/*"))
    assert 4 * MIB <= on_disk < 5 * MIB
    assert lake.number("cache.bytes") == on_disk
    assert (lake.path / "d/3").read_bytes() == noise(4 * MIB, 3)


def test_warm_of_a_store_that_is_away_is_an_error_and_can_be_repeated(
    make_lake: LakeMaker, faults: tuple[Server, Faults]
) -> None:
    lake = make_lake("seaweedfs", "--retry-timeout", "1s", through=faults[0])
    for index in range(4):
        lake.outside.replace(f"d/{index}", noise(MIB, index))
    lake.mount()
    os.listdir(lake.path / "d")
    faults[1].reset(1_000_000, method="GET", containing="/d/")
    assert re.search(r"get 'd/\d'", cache(lake, "warm", f"{lake.path}/d", code=1))
    faults[1].clear()
    cache(lake, "warm", f"{lake.path}/d")
    fetched = gets(lake)
    read_all(lake, {f"d/{index}": noise(MIB, index) for index in range(4)})
    assert gets(lake) == fetched


def test_warm_on_a_disk_that_fills_ends_with_an_error_and_can_be_repeated(
    make_lake: LakeMaker, small_disk: Disk
) -> None:
    lake = make_lake("file")
    files = {f"d/{index}": noise(4 * MIB, index) for index in range(8)}
    for path, data in files.items():
        lake.outside.replace(path, data)
    lake.cache_dir = small_disk.path / "cache"
    lake.mount("--free-space", small_disk.options[1], "--cache-size", "1G")
    hog = small_disk.fill(left=20 * MIB)
    assert "do not fit" in cache(lake, "warm", f"{lake.path}/d", code=1)
    hog.unlink()
    command = [*CLI, "cache", "warm", "--limit", "4M", f"{lake.path}/d"]
    process = subprocess.Popen(command, env=lake.env, stderr=subprocess.PIPE, text=True)
    eventually(lambda: lake.number("warm.fetched_bytes") > 4 * MIB, "it began")
    hog = small_disk.fill(left=2 * MIB)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, "the cache disk did not keep" in said) == (1, True), said
    hog.unlink()
    cache(lake, "warm", f"{lake.path}/d")
    fetched = gets(lake)
    read_all(lake, files)
    assert gets(lake) == fetched
