"""A store that is away, slow or refuses, and a staging disk that is small, full or broken, while programs write."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from lakefs_fuse.cli.daemons import LATE_S
from lakefs_fuse.config import parse_size
from lakefs_fuse.staging.staging_area import FREE_AGE_S
from tests.faults import Faults, faulty
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, PART_BYTES, Lake, eventually, noise, s3_lake, scale
from tests.mount.writeback_lakes import (
    FOR_EVER,
    OPTIONS,
    cpu_s,
    flush,
    requests,
    state,
    took_s,
    written_back,
)
from tests.servers import Server, StoppableStore, make_bucket

OUTAGE_S = scale("OUTAGE_S", 15)
SAVES = scale("SAVES", 200)
LARGE_BYTES = 2 * PART_BYTES + 8 * MIB
REQUESTS_S_MAX = 30.0
"""Attempts in a second, in the mean, of a daemon that has a dozen things to store, no store, and one second for each
request."""
CPU_SHARE_MAX = 0.25
"""Of one processor, for a daemon with nothing to do but to try again, on a busy machine."""


@pytest.fixture
def apart(dev_fuse: Path, stoppable: StoppableStore, tmp_path: Path) -> Iterator[tuple[Lake, Faults]]:
    """A lake on it, not mounted yet, and the proxy between."""
    make_bucket(stoppable.server, "outage")
    with faulty(stoppable.server) as (proxied, faults):
        with s3_lake(stoppable.server, "outage", tmp_path / "lake", *OPTIONS, through=proxied) as lake:
            yield lake, faults


WAITING = 150
"""Programs that wait for the store."""
FREE_S_MAX = 5.0
"""For a read and a write beside them, on a busy machine."""


def parts_stored(faults: Faults) -> Counter[str]:
    """How often the store took each part and said so, by key, upload and number."""
    return Counter(path for path in faults.stored if "partNumber=" in path and "/.lakefs/" not in path)


class Saves:
    """A training job that saves small files all the time, and now and then a large one."""

    def __init__(self, directory: Path, count: int, *, pause_s: float) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._count, self._pause_s = directory, count, pause_s
        self.done = 0
        self.slowest_s = 0.0

    def data(self, number: int) -> bytes:
        large = number % 60 == 20
        return noise(LARGE_BYTES if large else 60_000 + 10 * number, number)

    def run(self) -> None:
        for number in range(self._count):
            data = self.data(number)
            began = time.monotonic()
            (self._directory / f"save{number}").write_bytes(data)
            self.slowest_s = max(self.slowest_s, took_s(began))
            self.done = number + 1
            time.sleep(self._pause_s)


@pytest.mark.long
def test_the_store_is_stopped_in_the_middle_of_many_saves(
    apart: tuple[Lake, Faults], stoppable: StoppableStore
) -> None:
    """No error reaches the writer, everything is durable in the end, no part that was up is sent twice; meanwhile the
    daemon hardly works."""
    lake, faults = apart
    lake.mount()
    saves = Saves(lake.path / "ckpt", SAVES, pause_s=OUTAGE_S / SAVES)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(saves.run)
        eventually(lambda: saves.done >= SAVES // 4, "a quarter is written", 120)
        stoppable.stop()
        away_since = time.monotonic()
        writing.result()
        assert took_s(away_since) > OUTAGE_S / 3, "most were written while it was away"
        sent, worked_s, since = requests(lake), cpu_s(lake.pid), time.monotonic()
        time.sleep(max(5.0, OUTAGE_S - took_s(away_since)))
        idle_s = took_s(since)
        assert (requests(lake) - sent) / idle_s < REQUESTS_S_MAX
        assert (cpu_s(lake.pid) - worked_s) / idle_s < CPU_SHARE_MAX
    waiting = lake.number("writeback.files")
    assert waiting > SAVES // 4
    assert (lake.path / "ckpt" / f"save{SAVES - 1}").read_bytes() == saves.data(SAVES - 1), "local reads go on"
    stoppable.start()
    written_back(lake, 90)
    assert set(parts_stored(faults).values()) == {1}
    assert lake.number("upload.parts_repeated") == 0
    assert {state(path) for path in (lake.path / "ckpt").iterdir()} == {"durable"}
    assert lake.number("writeback.failed") == 0
    lake.remount(empty_cache=True)
    for number in range(SAVES):
        assert (lake.path / "ckpt" / f"save{number}").read_bytes() == saves.data(number)
    assert lake.outside.uploads() == []


def can_read(lake: Lake, key: str) -> bool:
    """A server that has just started answers 500 to some requests."""
    try:
        lake.outside.read(key)
    except (BotoCoreError, ClientError):
        return False
    return True


@pytest.mark.long
def test_parts_that_are_up_are_not_sent_again_by_the_next_daemon(
    apart: tuple[Lake, Faults], stoppable: StoppableStore
) -> None:
    lake, faults = apart
    lake.mount("--upload-limit", f"{12 * MIB}", "--uploads", "1")
    data = noise(5 * PART_BYTES + 99)
    (lake.path / "model").write_bytes(data)
    eventually(lambda: sum(parts_stored(faults).values()) >= 2, "two parts are up", 60)
    stoppable.stop()
    lake.kill()
    lake.env["AWS_MAX_ATTEMPTS"] = "1"
    refused = lake.try_mount()
    assert refused.returncode == 1, "there is no lake to look at"
    stoppable.start()
    eventually(lambda: can_read(lake, ".lakefs/lake"), "the store has begun to serve", 60)
    lake.mount()
    assert (lake.path / "model").read_bytes() == data
    written_back(lake)
    assert lake.outside.read("model") == data
    stored = parts_stored(faults)
    assert set(stored.values()) == {1}
    assert len(stored) == 6
    assert lake.outside.uploads() == []


@pytest.mark.long
def test_a_store_that_does_not_answer(apart: tuple[Lake, Faults], stoppable: StoppableStore) -> None:
    """Taken connections and no answers are an outage like any other."""
    lake, _ = apart
    lake.mount()
    saves = Saves(lake.path / "ckpt", 30, pause_s=0.02)
    (lake.path / "ckpt").mkdir(exist_ok=True)
    with stoppable.silent():
        saves.run()
        assert saves.slowest_s < 20
        worked_s, since = cpu_s(lake.pid), time.monotonic()
        time.sleep(6)
        assert (cpu_s(lake.pid) - worked_s) / took_s(since) < CPU_SHARE_MAX
        assert lake.number("writeback.files") == 30
    written_back(lake)
    for number in range(30):
        assert (lake.path / "ckpt" / f"save{number}").read_bytes() == saves.data(number)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["forbid", "slow_down"])
def test_a_store_that_says_no_for_a_while(make_lake: LakeMaker, faults: tuple[Server, Faults], kind: str) -> None:
    """403 (a key that was rotated), 503 SlowDown: everything waits, nothing fails."""
    lake = make_lake("seaweedfs", *OPTIONS, through=faults[0]).mount()
    saves = Saves(lake.path / "ckpt", 25, pause_s=0.0)
    getattr(faults[1], kind)(FOR_EVER)
    saves.run()
    eventually(lambda: lake.stats()["writeback"]["waiting_because"] != "", "why it waits is told", 30)  # type: ignore[index]
    since, worked_s, sent = time.monotonic(), cpu_s(lake.pid), requests(lake)
    time.sleep(4)
    assert (requests(lake) - sent) / took_s(since) < REQUESTS_S_MAX
    assert (cpu_s(lake.pid) - worked_s) / took_s(since) < CPU_SHARE_MAX
    stats = lake.stats()["writeback"]
    assert isinstance(stats, dict)
    assert (stats["files"], stats["failed"]) == (25, 0)
    faults[1].clear()
    written_back(lake)
    assert set(parts_stored(faults[1]).values()) <= {1}
    lake.remount(empty_cache=True)
    for number in range(25):
        assert (lake.path / "ckpt" / f"save{number}").read_bytes() == saves.data(number)


def used_bytes(lake: Lake) -> int:
    """What staging takes up on the disk."""
    total = 0
    for entry in os.scandir(lake.cache_dir / "staging"):
        try:
            total += entry.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@pytest.mark.long
def test_a_writer_that_is_faster_than_the_store(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    """Staging is bounded, the writer waits, and nothing fails."""
    lake = make_lake("seaweedfs", *OPTIONS, "--staging-size", "64MiB", through=faults[0]).mount()
    faults[1].bytes_s_max = 24 * MIB
    most, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.05):
            most = max(most, used_bytes(lake))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            began = time.monotonic()
            for number in range(8):
                (lake.path / f"f{number}").write_bytes(noise(16 * MIB, number))
            with (lake.path / "large").open("wb") as file:
                for number in range(16):
                    file.write(noise(8 * MIB, 100 + number))
            assert took_s(began) > 256 / 24 / 2, "it was held back"
        finally:
            stop.set()
        watching.result()
    assert most <= 66 * MIB
    assert lake.number("upload.writer_waits") > 0
    faults[1].bytes_s_max = 0
    flush(lake)
    for number in range(8):
        assert lake.outside.read(f"f{number}") == noise(16 * MIB, number)
    assert lake.outside.read("large") == b"".join(noise(8 * MIB, 100 + number) for number in range(16))


def staging_state(lake: Lake) -> str:
    staging = lake.stats()["staging"]
    assert isinstance(staging, dict)
    return str(staging["state"])


def write_until_full(directory: Path, size: int) -> tuple[dict[str, bytes], int]:
    """Files that were closed without an error, and the errno of the one that was not."""
    accepted: dict[str, bytes] = {}
    for number in range(1000):
        data = noise(size, number)
        try:
            (directory / f"f{number}").write_bytes(data)
        except OSError as error:
            return accepted, error.errno or 0
        accepted[f"f{number}"] = data
    raise AssertionError("it is never full")


@pytest.mark.long  # vfs/test_queue.py and staging/test_staging_area.py show it
def test_staging_is_full_for_too_long(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    """ENOSPC after --staging-timeout; what was accepted stays, is read, and goes when the store is back."""
    lake = make_lake(
        "seaweedfs", *OPTIONS, "--staging-size", "48MiB", "--staging-timeout", "3s", through=faults[0]
    ).mount()
    for method in ("PUT", "POST"):
        faults[1].reset(FOR_EVER, method=method)
    began = time.monotonic()
    accepted, code = write_until_full(lake.path, 5 * MIB)
    assert code == errno.ENOSPC
    assert 3 <= took_s(began) < 40
    assert 7 <= len(accepted) <= 9
    assert "staging was full for 3 s" in lake.log()
    assert staging_state(lake) == "full"
    for name, data in accepted.items():
        assert (lake.path / name).read_bytes() == data
    faults[1].clear()
    assert f"f{len(accepted)} is an orphan" in lake.cli("flush", str(lake.path)).stderr
    assert lake.cli("orphans", str(lake.path), "--all", "abort").returncode == 0
    flush(lake)
    lake.remount(empty_cache=True)
    for name, data in accepted.items():
        assert (lake.path / name).read_bytes() == data
    (lake.path / "again").write_bytes(noise(5 * MIB))
    flush(lake)
    assert lake.outside.read("again") == noise(5 * MIB)


@dataclass(frozen=True)
class Disk:
    """A disk with little room, and the mount options that say so."""

    path: Path
    options: tuple[str, ...]

    def fill(self, left: int) -> Path:
        """Another program's file, so that the daemon has only ``left`` bytes to use."""
        kept = parse_size(self.options[1])
        stat = os.statvfs(self.path)
        hog = self.path / "hog"
        with hog.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail * stat.f_frsize - kept - left))
        return hog


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    """96 MiB: of its own where root runs the tests, else of what is left of one in memory, which few others fill."""
    if os.geteuid():
        with tempfile.TemporaryDirectory(prefix="lakefs-test-", dir="/dev/shm") as directory:
            stat = os.statvfs(directory)
            kept = stat.f_bavail * stat.f_frsize - 96 * MIB
            yield Disk(Path(directory), ("--free-space", str(kept), "--cache-size", "16M"))
        return
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(disk)], check=True)
    try:
        yield Disk(disk, ("--free-space", "1M", "--cache-size", "16M"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.long  # staging/test_staging_area.py shows it
def test_the_staging_disk_fills(make_lake: LakeMaker, faults: tuple[Server, Faults], small_disk: Disk) -> None:
    """Others fill it: writers wait, then get ENOSPC; with room again everything goes on."""
    lake = make_lake("seaweedfs", *OPTIONS, "--staging-timeout", "3s", through=faults[0])
    lake.cache_dir = small_disk.path / "cache"
    lake.mount(*small_disk.options)
    for method in ("PUT", "POST"):
        faults[1].reset(FOR_EVER, method=method)
    (lake.path / "accepted").write_bytes(noise(4 * MIB, 2))
    hog = small_disk.fill(left=2 * MIB)
    time.sleep(2 * FREE_AGE_S)  # what the disk had free a moment ago counts until then
    began = time.monotonic()
    with pytest.raises(OSError) as raised:
        (lake.path / "f").write_bytes(noise(4 * MIB, 3))
    assert raised.value.errno == errno.ENOSPC
    assert took_s(began) < 30
    assert (lake.path / "accepted").read_bytes() == noise(4 * MIB, 2)
    assert staging_state(lake) == "full"
    if not os.geteuid():
        more = fill_with_names(lake, small_disk.path)
        assert staging_state(lake) == "full", "the disk has not failed"
        assert "answers with errors" not in (said := lake.cli("doctor", "--no-throughput", str(lake.path)).stdout)
        assert "the disk of the staging is full" in said
        more.unlink()
    hog.unlink()
    faults[1].clear()
    eventually(partial(can_make, lake.path / "made again"), "a name is written on a disk with room")
    (lake.path / "f").write_bytes(noise(4 * MIB, 4))
    flush(lake)
    assert lake.outside.read("accepted") == noise(4 * MIB, 2)
    assert lake.outside.read("f") == noise(4 * MIB, 4)
    assert "ok       cache.room" in lake.cli("doctor", "--no-throughput", str(lake.path)).stdout


@pytest.mark.long  # kernel/test_create_offload.py shows it
@pytest.mark.parametrize("durability", ["close", "writeback"])
def test_every_request_of_a_new_file_says_that_the_disk_is_full(
    make_lake: LakeMaker, small_disk: Disk, durability: str
) -> None:
    lake = make_lake("file", "--durability", durability, "--staging-timeout", "1s")
    lake.cache_dir = small_disk.path / "cache"
    lake.mount(*small_disk.options)
    (lake.path / "d").mkdir()
    (lake.path / "d" / "first").write_bytes(b"x")
    time.sleep(1)
    with (small_disk.path / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4 << 10))
    for number in range(6):
        failed = save(lake.path / "d" / f"f{number}", syncs=bool(number % 2))
        assert errno.ENOSPC in failed
        assert failed <= {0, errno.ENOSPC}


def save(path: Path, *, syncs: bool) -> set[int]:
    """Save a new file, as a program that goes on after an error. Return the errnos of its calls; 0 if one succeeds."""
    failed = set[int]()

    def call(what: Callable[[], object]) -> None:
        try:
            what()
            failed.add(0)
        except OSError as error:
            assert error.errno
            failed.add(error.errno)

    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        assert error.errno
        return {error.errno}
    call(partial(os.write, fd, bytes(5000)))
    if syncs:
        call(partial(os.fsync, fd))
    call(partial(os.close, fd))
    return failed


def fill_with_names(lake: Lake, disk: Path) -> Path:
    """Make directories until the disk has no room for a name; answers the file that took the rest of its room."""
    filler = disk / "filler"
    for number in range(1000):
        with filler.open("ab", buffering=0) as file:
            try:
                while file.write(bytes(64 << 10)) == 64 << 10:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
        try:
            (lake.path / f"{number}-{'x' * 200}").mkdir()
        except OSError as error:
            assert error.errno == errno.ENOSPC
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                (lake.path / "accepted").chmod(0o600)
            return filler
    raise AssertionError("it is never full")


def can_make(directory: Path) -> bool:
    try:
        directory.mkdir()
    except OSError:
        return False
    return True


def test_the_staging_disk_fails(make_lake: LakeMaker) -> None:
    """Writers get an error at once, readers go on; repaired, everything does."""
    lake = make_lake("seaweedfs", *OPTIONS, "--writeback-delay", "1s").mount()
    lake.outside.replace("theirs", b"of others")
    staging, gone = lake.cache_dir / "staging", lake.cache_dir / "gone"
    (lake.path / "accepted").write_bytes(noise(100_000, 1))
    assert (lake.path / "theirs").exists()
    staging.rename(gone)
    began = time.monotonic()
    with pytest.raises(OSError) as raised:
        (lake.path / "f").write_bytes(noise(2 * MIB, 2))
    assert raised.value.errno == errno.EIO
    assert took_s(began) < 5
    assert "the staging disk fails (No such file or directory)" in lake.log()
    assert staging_state(lake) == "failed"
    assert (lake.path / "theirs").read_bytes() == b"of others"
    assert (lake.path / "accepted").read_bytes() == noise(100_000, 1)
    gone.rename(staging)
    (lake.path / "f").write_bytes(noise(2 * MIB, 3))
    assert staging_state(lake) == "ok"
    flush(lake)
    lake.remount(empty_cache=True)
    assert (lake.path / "accepted").read_bytes() == noise(100_000, 1)
    assert (lake.path / "f").read_bytes() == noise(2 * MIB, 3)


@pytest.mark.long
def test_names_are_changed_while_the_store_is_away(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    """Whatever a training script does around a checkpoint works; renaming a directory with files that are not in the
    store yet waits for them."""
    lake = make_lake("seaweedfs", *OPTIONS, through=faults[0]).mount()
    root = lake.path
    (root / "old").mkdir()
    (root / "old" / "f").write_bytes(b"old")
    lake.sync()
    faults[1].reset(FOR_EVER)
    time.sleep(0.5)
    (root / "tmp").mkdir()
    (root / "tmp" / "model").write_bytes(noise(3 * MIB))
    (root / "tmp" / "config").write_bytes(b"{}")
    (root / "tmp" / "config").rename(root / "tmp" / "config.json")
    with (root / "tmp" / "config.json").open("ab") as file:
        file.write(b"\n")
    os.close(os.open(root / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    (root / "lock").unlink()
    (root / "tmp" / "model").chmod(0o600)
    (root / "latest.new").symlink_to("final")
    (root / "latest.new").replace(root / "latest")
    (root / "old" / "f").unlink()
    (root / "old").rmdir()
    assert not (root / "absent").exists()
    with ThreadPoolExecutor(1) as pool:
        renaming = pool.submit((root / "tmp").rename, root / "final")
        time.sleep(4)
        assert not renaming.done()
        faults[1].clear()
        renaming.result(60)
    for _ in range(2):
        assert sorted(os.listdir(root)) == ["final", "latest"]
        assert (root / "latest" / "model").read_bytes() == noise(3 * MIB)
        assert (root / "latest" / "model").stat().st_mode & 0o777 == 0o600
        assert (root / "latest" / "config.json").read_bytes() == b"{}\n"
        lake.remount(empty_cache=True)


@pytest.mark.long  # cli/test_mount_health.py and vfs/test_path_waits.py show it
def test_commands_that_wait_for_a_store_that_is_away_say_so(
    make_lake: LakeMaker, faults: tuple[Server, Faults]
) -> None:
    lake = make_lake("seaweedfs", "--retry-timeout", "8s", "--refresh", "1s", through=faults[0]).mount()
    assert "does not answer" not in lake.cli("stats", str(lake.path)).stdout
    faults[1].reset(FOR_EVER)
    eventually(lambda: bool(lake.number("store.away")), "every request has failed for a while", 30)
    assert "the store does not answer" in lake.cli("stats", str(lake.path)).stdout
    assert "the store does not answer" in lake.cli("doctor", "--no-throughput", str(lake.path)).stdout
    began = time.monotonic()
    refused = lake.cli("refresh", str(lake.path))
    assert refused.returncode == 1
    assert took_s(began) > LATE_S, "or nobody waits for a reason"
    assert refused.stderr.startswith("lakefs-fuse: the store does not answer, and is asked again"), refused.stderr
    faults[1].clear()
    assert lake.cli("refresh", str(lake.path)).stderr == ""


@pytest.mark.long  # cli/test_umount.py and vfs/test_replay.py show it
def test_unmounting_while_the_store_is_away(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    """It says what is not stored, and stays; --lazy goes, keeps the bytes, and the next mount stores them."""
    lake = make_lake("seaweedfs", *OPTIONS, through=faults[0]).mount()
    for method in ("PUT", "POST"):
        faults[1].reset(FOR_EVER, method=method)
    files = {"small": noise(30_000, 1), "large": noise(LARGE_BYTES, 2)}
    for name, data in files.items():
        (lake.path / name).write_bytes(data)
    began = time.monotonic()
    refused = lake.cli("umount", str(lake.path))
    assert refused.returncode == 1
    assert took_s(began) < 60
    for name in files:
        assert f"  {name}: " in refused.stderr
    assert f"{lake.path} stays mounted (--lazy detaches it and keeps the bytes in staging)" in refused.stderr
    assert (lake.path / "large").read_bytes() == files["large"]
    assert lake.number("writeback.files") == 2
    told = lake.cli("umount", "--lazy", str(lake.path), timeout_s=60)
    assert told.returncode == 0, told.stderr
    assert "the bytes stay in staging" in told.stderr
    assert not os.path.ismount(lake.path)
    eventually(lambda: not lake.serving(), "the daemon ends", 60)
    lake.pid = 0
    faults[1].clear()
    lake.mount()
    for name, data in files.items():
        assert (lake.path / name).read_bytes() == data
    written_back(lake)
    for name, data in files.items():
        assert lake.outside.read(name) == data


def test_programs_that_wait_for_a_store_that_hangs_keep_nobody_from_what_needs_none(
    make_lake: LakeMaker, faults: tuple[Server, Faults]
) -> None:
    proxied, controls = faults
    lake = make_lake("seaweedfs", through=proxied).mount()
    (lake.path / "kept").write_bytes(b"kept")
    stored = {f"{number}": noise(1000, number) for number in range(WAITING)}
    with ThreadPoolExecutor(8) as pool:
        for name, data in stored.items():
            pool.submit(lake.outside.replace, f"d/{name}", data)
    names = os.listdir(lake.path / "d")
    controls.hang(2 * WAITING, method="GET", containing="/d/")
    with ThreadPoolExecutor(WAITING) as pool:
        try:
            waiting = [pool.submit((lake.path / "d" / name).read_bytes) for name in names]
            eventually(lambda: lake.number("upcalls.read") >= WAITING, "all wait for the store")
            began = time.monotonic()
            assert (lake.path / "kept").read_bytes() == b"kept"
            (lake.path / "new").write_bytes(b"new")
            assert took_s(began) < FREE_S_MAX
            assert not any(each.done() for each in waiting)
        finally:
            controls.clear()
    assert {name: each.result() for name, each in zip(names, waiting, strict=True)} == stored
