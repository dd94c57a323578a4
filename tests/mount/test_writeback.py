"""Durability `writeback` as programs see it: what close() promises, and what reaches the store in which order."""

from __future__ import annotations

import errno
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import CLI, MIB, PART_BYTES, Lake, eventually, noise
from tests.mount.test_commits import another
from tests.mount.writeback_lakes import (
    FOR_EVER,
    OPTIONS,
    TTL_S,
    becomes,
    flush,
    location,
    state,
    sync_directory,
    took_s,
    written_back,
)
from tests.servers import Server
from tests.tiers import sized

LARGE_BYTES = 2 * PART_BYTES + 4321
PARTS_BYTES = sized(PART_BYTES + 4321, LARGE_BYTES)
"""Several parts."""
SMALL_FILES = 40
NAMES_DELAY_S = 1.1
CLOSE_S_MAX = 8.0
"""Far less than what the store is away for in these tests."""


@pytest.fixture
def back(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> Lake:
    """A mounted lake whose store fails on command, see `faults`."""
    return make_lake("seaweedfs", *OPTIONS, through=faults[0]).mount()


def away(faults: tuple[Server, Faults]) -> Faults:
    """The store takes no writes from now on."""
    controls = faults[1]
    for method in ("PUT", "POST"):
        controls.slow_down(FOR_EVER, method=method)
    return controls


def some_files() -> dict[str, bytes]:
    """One that goes into a pack, one that is a single request, one of several parts."""
    return {"small": noise(30_000, 1), "medium": noise(3 * MIB, 2), "large": noise(PARTS_BYTES, 3)}


def write_all(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)


def staged_bytes(location: str, lake: Lake) -> bytes:
    """What lies where `user.lakefs.location` says."""
    url, _, part = location.partition(" bytes ")
    path = Path(url.removeprefix("file://"))
    assert path.parent == lake.cache_dir / "staging"
    first, last = map(int, part.split("-")) if part else (0, path.stat().st_size - 1)
    return path.read_bytes()[first : last + 1]


def test_statfs_shows_what_staging_takes_while_the_store_is_away(
    make_lake: LakeMaker, faults: tuple[Server, Faults]
) -> None:
    lake = make_lake("seaweedfs", *OPTIONS, "--staging-size", "1GiB", through=faults[0]).mount()

    def free_bytes() -> int:
        told = os.statvfs(lake.path)
        return told.f_bavail * told.f_frsize

    assert free_bytes() == 1 << 50
    controls = away(faults)
    (lake.path / "model").write_bytes(noise(3 * MIB))
    eventually(lambda: free_bytes() <= (1 << 30) - 3 * MIB, "no more than fits is free")
    controls.clear()
    written_back(lake)
    assert free_bytes() == 1 << 50


def test_closed_means_on_the_local_disk(back: Lake, faults: tuple[Server, Faults]) -> None:
    """While the store takes nothing, close() answers, and everybody on this node reads what was written."""
    controls = away(faults)
    files = some_files()
    began = time.monotonic()
    write_all(back.path / "ckpt", files)
    assert took_s(began) < CLOSE_S_MAX
    assert sorted(os.listdir(back.path / "ckpt")) == sorted(files)
    for name, data in files.items():
        path = back.path / "ckpt" / name
        assert path.read_bytes() == data
        assert path.stat().st_size == len(data)
        assert state(path) in ("dirty", "uploading")
        assert staged_bytes(location(path), back) == data
    assert back.plain() == {}
    stats = back.stats()["writeback"]
    assert isinstance(stats, dict)
    assert (stats["files"], stats["bytes"]) == (3, sum(map(len, files.values())))
    assert 0 < stats["oldest_s"] < 60
    told = {str(file["path"]): file["state"] for file in back.unfinished() if file["state"] != "journaled"}
    assert told.keys() == {f"ckpt/{name}" for name in files}
    assert set(told.values()) <= {"accepted", "publishing", "failed"}, told
    controls.clear()
    flush(back)
    for name, data in files.items():
        assert state(back.path / "ckpt" / name) == "durable"
        assert location(back.path / "ckpt" / name) == f"{back.source}/ckpt/{name}"
        assert back.outside.read(f"ckpt/{name}") == data
    assert back.number("staging.bytes") == 0


def test_states_one_after_the_other(back: Lake, faults: tuple[Server, Faults]) -> None:
    """dirty while it is written, uploading while parts go, durable in the end; a write begins at dirty again."""
    controls = faults[1]
    controls.bytes_s_max = 3 * PART_BYTES // 2
    path = back.path / "model"
    with path.open("wb") as file:
        file.write(noise(LARGE_BYTES))
        file.flush()
        assert state(path) == "dirty"
    seen = [state(path)]
    deadline = time.monotonic() + 60
    while seen[-1] != "durable" and time.monotonic() < deadline:
        now = state(path)
        seen += [now] if now != seen[-1] else []
    assert [each for each in seen if each != "dirty"] == ["uploading", "durable"], seen
    assert location(path) == f"{back.source}/model"
    controls.bytes_s_max = 0
    away(faults)
    with path.open("r+b") as file:
        file.write(b"changed")
    assert state(path) in ("dirty", "uploading")
    controls.clear()
    becomes(path, "durable")
    assert back.outside.read("model")[:7] == b"changed"
    assert state(back.path) == "durable"  # of all that is below
    with pytest.raises(OSError) as raised:
        location(back.path)
    assert raised.value.errno == errno.ENODATA
    assert os.listxattr(path) == []


def test_a_file_that_the_store_refuses(back: Lake, faults: tuple[Server, Faults]) -> None:
    """It fails by itself, others pass, and asking for it tries again."""
    controls = faults[1]
    controls.refuse(FOR_EVER, containing="/refused")
    (back.path / "refused").write_bytes(noise(2 * MIB, 1))
    (back.path / "after").write_bytes(noise(2 * MIB, 2))
    becomes(back.path / "refused", "failed")
    becomes(back.path / "after", "durable")
    assert (back.path / "refused").read_bytes() == noise(2 * MIB, 1)
    assert back.number("writeback.failed") == 1
    told = back.cli("flush", str(back.path / "refused"))
    assert told.returncode == 1
    assert "refused: failed" in told.stderr
    assert "InvalidRequest" in told.stderr
    assert back.cli("umount", str(back.path)).returncode == 1
    controls.clear()
    flush(back, back.path / "refused")
    assert state(back.path / "refused") == "durable"
    assert back.outside.read("refused") == noise(2 * MIB, 1)


@pytest.mark.parametrize("how", ["fsync", "sync DIR", pytest.param("flush", marks=pytest.mark.long), "umount"])
def test_what_always_reaches_the_store(make_lake: LakeMaker, how: str) -> None:
    """… long before it would go by itself."""
    lake = make_lake("seaweedfs", *OPTIONS, "--writeback-delay", "10m").mount()
    files = {"a": noise(20_000, 1), "b": noise(30_000, 2)}
    write_all(lake.path / "ckpt", files)
    assert lake.outside.objects() == {}
    assert lake.number("writeback.files") == 2
    if how == "fsync":
        with (lake.path / "ckpt" / "b").open("r+b") as file:
            file.write(b"again")
            file.flush()
            os.fsync(file.fileno())
            files["b"] = b"again" + files["b"][5:]
            assert state(lake.path / "ckpt" / "b") == "durable"
    elif how == "sync DIR":
        sync_directory(lake.path / "ckpt")
    elif how == "flush":
        flush(lake, lake.path / "ckpt")
    else:
        lake.umount()
    if how != "umount":
        assert state(lake.path / "ckpt" / "a") == "durable", "what was accepted before in the same directory too"
        assert lake.number("writeback.files") == 0
        lake.kill()
    shutil.rmtree(lake.cache_dir)
    lake.mount()
    for name, data in files.items():
        assert (lake.path / "ckpt" / name).read_bytes() == data


def test_flush_of_one_file_leaves_others_alone(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", *OPTIONS, "--writeback-delay", "10m").mount()
    (lake.path / "a").mkdir()
    (lake.path / "a" / "f").write_bytes(b"one")
    (lake.path / "b").mkdir()
    (lake.path / "b" / "f").write_bytes(b"two")
    flush(lake, lake.path / "b" / "f")
    assert (state(lake.path / "b" / "f"), state(lake.path / "a" / "f")) == ("durable", "dirty")
    assert lake.plain() == {"b/f": 3}


def run_on_a_terminal(args: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Exit code and everything that a user would have seen."""
    here, there = pty.openpty()
    process = subprocess.Popen(
        [*CLI, *args], env={**env, "TERM": "xterm", "COLUMNS": "240"}, stdin=there, stdout=there, stderr=there, cwd="/"
    )
    os.close(there)
    seen = b""
    while select.select([here], [], [], 60)[0]:
        try:
            piece = os.read(here, 65536)
        except OSError:  # EIO: nobody has the other end any more
            break
        seen += piece
    os.close(here)
    return process.wait(60), seen.decode()


def test_flush_shows_how_far_it_is(back: Lake, faults: tuple[Server, Faults]) -> None:
    faults[1].bytes_s_max = PART_BYTES
    (back.path / "model").write_bytes(noise(LARGE_BYTES))
    code, seen = run_on_a_terminal(["flush", str(back.path / "model")], back.env)
    assert code == 0, seen
    assert f"storing {back.path / 'model'}" in seen
    assert re.search(rf"[\d.]+/{LARGE_BYTES // MIB}[\d.]+ MiB", seen), seen
    assert "1 file left" in seen
    assert back.outside.read("model") == noise(LARGE_BYTES)


@pytest.mark.long  # vfs/test_queue.py shows it
def test_flush_and_fsync_while_the_store_is_away(back: Lake, faults: tuple[Server, Faults]) -> None:
    """They answer with why, once a request was tried for --retry-timeout, and lose nothing."""
    controls = away(faults)
    files = some_files()
    write_all(back.path / "ckpt", files)
    for name in files:
        began = time.monotonic()
        told = back.cli("flush", str(back.path / "ckpt" / name))
        assert told.returncode == 1, told.stderr
        assert took_s(began) < 30
        assert f"ckpt/{name}: " in told.stderr
        assert "SlowDown" in told.stderr or "503" in told.stderr, told.stderr
        assert "Traceback" not in told.stderr
    with (back.path / "ckpt" / "small").open("rb") as file, pytest.raises(OSError) as raised:
        os.fsync(file.fileno())
    assert raised.value.errno == errno.EIO
    assert subprocess.run(["sync", str(back.path / "ckpt")], capture_output=True, check=False).returncode == 1
    gave_up = back.cli("flush", str(back.path), "--timeout", "0.3s")
    assert gave_up.returncode == 1
    assert "SlowDown" in gave_up.stderr or "503" in gave_up.stderr, gave_up.stderr
    for name, data in files.items():
        assert (back.path / "ckpt" / name).read_bytes() == data
    controls.clear()
    flush(back)
    for name, data in files.items():
        assert back.outside.read(f"ckpt/{name}") == data


LIST_PAUSE_S = 0.02
"""Shorter than any of the uploads that are watched, and long enough to leave a core to them."""


@pytest.mark.long  # vfs/test_writeback_order.py shows it
def test_others_see_files_whole_and_in_order(
    make_lake: LakeMaker, faults: tuple[Server, Faults], tmp_path: Path
) -> None:
    """A marker that is written last is in the store last, however large what came before it is. Another mount that sees
    the marker sees the rest, once what it had listed before is out of date."""
    lake = make_lake("seaweedfs", *OPTIONS, "--pack", "never", through=faults[0]).mount()
    faults[1].bytes_s_max = 40 * MIB
    shards = {f"rank{rank}": noise(MIB + rank * PART_BYTES, rank) for rank in range(sized(2, 3))}
    steps = [f"step{number}" for number in range(sized(2, 3))]
    stop, wrong = threading.Event(), list[str]()

    def watch() -> None:
        """The store, by LIST."""
        while not stop.is_set():
            seen = lake.plain()
            for step in steps:
                there = {key.removeprefix(f"{step}/"): size for key, size in seen.items() if key.startswith(step)}
                wrong.extend(key for key, size in there.items() if key != "done" and size != len(shards[key]))
                if "done" in there and len(there) <= len(shards):
                    wrong.append(f"{step}: {sorted(there)}")
            stop.wait(LIST_PAUSE_S)

    with another(lake, tmp_path, "--refresh", "0.2") as reader, ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            for step in steps:
                write_all(lake.path / step, {**shards, "done": b"ok"})
            for step in steps:
                eventually((reader.path / step / "done").exists, "the other node sees the marker", 60)
                time.sleep(TTL_S)
                for name, data in shards.items():
                    assert (reader.path / step / name).read_bytes() == data
            assert lake.number("writeback.files") == 0
        finally:
            stop.set()
        watching.result()
    assert wrong == []


@pytest.mark.long
def test_removals_and_renames_come_after_what_was_accepted(
    back: Lake, faults: tuple[Server, Faults], tmp_path: Path
) -> None:
    """`latest` is a link that is renamed over, and the old checkpoint goes: others never lack both."""
    (back.path / "step1").mkdir()
    (back.path / "step1" / "model").write_bytes(noise(100_000, 1))
    os.symlink("step1", back.path / "latest")
    flush(back)
    controls = away(faults)
    write_all(back.path / "step2", {"model": noise(3 * MIB, 2)})
    os.symlink("step2", back.path / "latest.new")
    os.replace(back.path / "latest.new", back.path / "latest")
    (back.path / "step1" / "model").unlink()
    (back.path / "step1").rmdir()
    assert (back.path / "latest" / "model").read_bytes() == noise(3 * MIB, 2)
    assert sorted(os.listdir(back.path)) == ["latest", "step2"]
    assert "step1/model" in back.plain()
    back.kill()
    controls.clear()
    with another(back, tmp_path) as reader:
        assert (reader.path / "latest" / "model").read_bytes() == noise(100_000, 1), "the old one, whole"
        back.mount()
        assert sorted(os.listdir(back.path)) == ["latest", "step2"]
        assert (back.path / "latest" / "model").read_bytes() == noise(3 * MIB, 2)
        flush(back)
        reader.remount(empty_cache=True)
        assert (reader.path / "latest" / "model").read_bytes() == noise(3 * MIB, 2)
        assert sorted(os.listdir(reader.path)) == ["latest", "step2"]


def test_by_path(make_lake: LakeMaker, faults: tuple[Server, Faults], tmp_path: Path) -> None:
    """Rules: checkpoints are written back, everything else is stored at close()."""
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npath = "ckpt/**"\ndurability = "writeback"\n')
    lake = make_lake("seaweedfs", "--rules", str(rules), *OPTIONS[2:], through=faults[0]).mount()
    (lake.path / "ckpt").mkdir()
    (lake.path / "data").mkdir()
    lake.sync()
    controls = away(faults)
    (lake.path / "ckpt" / "f").write_bytes(b"accepted")
    with pytest.raises(OSError) as raised:
        (lake.path / "data" / "f").write_bytes(b"stored")
    assert raised.value.errno == errno.EIO
    assert state(lake.path / "ckpt" / "f") == "dirty"
    assert state(lake.path / "data" / "f") == "failed"
    controls.clear()
    (lake.path / "data" / "g").write_bytes(b"stored")
    assert lake.outside.read("data/g") == b"stored"
    flush(lake)
    assert lake.outside.read("ckpt/f") == b"accepted"
    assert lake.outside.read("data/f") == b"stored"


@pytest.mark.usefixtures("with_hooks")  # or the programs that it runs close what they inherit of it, and accept it
def test_killed_and_mounted_again(back: Lake, faults: tuple[Server, Faults]) -> None:
    """Accepted files are there at once, with their attributes, and go on by themselves; what nobody closed is an
    orphan."""
    controls = away(faults)
    files = some_files()
    write_all(back.path / "ckpt", files)
    os.chmod(back.path / "ckpt" / "medium", 0o600)
    os.utime(back.path / "ckpt" / "medium", ns=(10**18, 10**18))
    os.setxattr(back.path / "ckpt" / "small", "user.note", b"hello")
    fd = os.open(back.path / "open", os.O_WRONLY | os.O_CREAT)
    os.write(fd, noise(2_000_000, 4))
    subprocess.run(["sync", "-f", str(back.path)], check=True)
    eventually(lambda: any(file["path"] == "open" and file["bytes"] for file in back.unfinished()), "it is written")
    back.kill()
    with pytest.raises(OSError):
        os.close(fd)  # its daemon is gone
    for method in ("PUT", "POST"):
        controls.clear()
        controls.slow_down(FOR_EVER, method=method, containing="ckpt")
    back.mount()
    for name, data in files.items():
        assert (back.path / "ckpt" / name).read_bytes() == data
        assert state(back.path / "ckpt" / name) in ("dirty", "uploading")
    assert back.number("writeback.replayed") == 3
    assert [file["path"] for file in back.unfinished() if file["state"] == "orphan"] == ["open"]
    assert not (back.path / "open").exists()
    controls.clear()
    written_back(back)
    back.cli("orphans", str(back.path), "--all", "abort")
    back.remount(empty_cache=True)
    for name, data in files.items():
        assert (back.path / "ckpt" / name).read_bytes() == data
    assert (back.path / "ckpt" / "medium").stat().st_mode & 0o777 == 0o600
    assert (back.path / "ckpt" / "medium").stat().st_mtime_ns == 10**18
    assert os.getxattr(back.path / "ckpt" / "small", "user.note") == b"hello"


@pytest.mark.parametrize(
    "size", [pytest.param(40_000, id="small"), pytest.param(LARGE_BYTES, id="parts", marks=pytest.mark.long)]
)
def test_a_newer_version_of_somebody_else(back: Lake, faults: tuple[Server, Faults], tmp_path: Path, size: int) -> None:
    """A node died with an accepted file, and another node stored that name meanwhile: both are kept, and it is said."""
    (back.path / "model").write_bytes(b"the version before")
    flush(back)
    controls = away(faults)
    (back.path / "model").write_bytes(noise(size, 1))
    back.kill()
    controls.clear()
    with another(back, tmp_path) as other:
        (other.path / "model").write_bytes(b"theirs")
        other.umount()
    back.mount()
    written_back(back)
    eventually(lambda: len(os.listdir(back.path)) == 2, "both versions are there")
    (conflict,) = [name for name in os.listdir(back.path) if name != "model"]
    assert re.fullmatch(r"model\.conflict-[0-9a-f]{8}", conflict)
    assert (back.path / "model").read_bytes() == b"theirs"
    assert (back.path / conflict).read_bytes() == noise(size, 1)
    assert back.number("writeback.conflicts") == 1
    assert (
        f"model was changed by another client since: both versions are kept, the one acknowledged here as {conflict}"
        in (back.log())
    )
    assert back.outside.uploads() == []
    back.remount(empty_cache=True)
    assert (back.path / "model").read_bytes() == b"theirs"
    assert (back.path / conflict).read_bytes() == noise(size, 1)


def test_written_again_and_again(make_lake: LakeMaker) -> None:
    """Only the newest version is stored, of those that waited; each was accepted."""
    lake = make_lake("seaweedfs", *OPTIONS, "--writeback-delay", "10m").mount()
    path = lake.path / "status.json"
    for number in range(20):
        path.write_text(f"step {number}")
        assert path.read_text() == f"step {number}"
    with path.open("a") as file:
        file.write(" and more")
    puts = lake.puts()
    flush(lake)
    assert lake.puts() <= puts + 2
    assert lake.number("writeback.superseded") == 20
    assert lake.outside.read("status.json") == b"step 19 and more"
    lake.kill()
    lake.mount()
    assert path.read_text() == "step 19 and more"


def test_many_small_files_share_packs(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", *OPTIONS, "--writeback-delay", "1s").mount()
    puts = lake.puts()
    began = time.monotonic()
    for number in range(300):
        (lake.path / f"f{number}").write_bytes(noise(5000, number))
    sync_directory(lake.path)
    assert lake.puts() - puts <= 8 + took_s(began), "one a second, by the delay"
    assert lake.number("writeback.files") == 0
    lake.remount(empty_cache=True)
    assert len(os.listdir(lake.path)) == 300
    assert (lake.path / "f123").read_bytes() == noise(5000, 123)


def test_programs_that_make_small_files_cost_a_pack_each(make_lake: LakeMaker, tmp_path: Path) -> None:
    """`tar -x` and `rsync -a`: directories and their attributes go with the files, however long the program takes."""
    source, archive = tmp_path / "source", tmp_path / "archive"
    for number in range(SMALL_FILES):
        path = source / f"d{number % 8}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise(2000, number))
    subprocess.run(["tar", "-cf", archive, "-C", source, "."], check=True)
    lake = make_lake("seaweedfs", *OPTIONS, "--writeback-delay", "1h").mount()
    programs: dict[str, list[str | Path]] = {
        "tar": ["tar", "-xf", archive, "-C"],
        "rsync": ["rsync", "-a", f"{source}/"],
    }
    for name in programs:
        (lake.path / name).mkdir()
    lake.sync()
    before = lake.number("store.requests.put")
    for name, command in programs.items():
        subprocess.run([*command, lake.path / name], check=True)
        time.sleep(NAMES_DELAY_S)  # in which they would be sent without the files
        flush(lake)
    assert lake.number("store.requests.put") - before <= 2 + 1, "one more where a busy machine comes to files late"


TORCH = """
import sys, torch
torch.set_num_threads(1)
def state():
    torch.manual_seed(3)
    return {f"layer{i}.weight": torch.rand(1_000_000) for i in range(10)}
if sys.argv[1] == "save":
    torch.save(state(), sys.argv[2])
else:
    saved, loaded = state(), torch.load(sys.argv[2])
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
"""


def torch_does(what: str, path: Path) -> None:
    subprocess.run([sys.executable, "-c", TORCH, what, str(path)], check=True)


@pytest.mark.long
def test_torch_saves_and_loads(make_lake: LakeMaker, tmp_path: Path) -> None:
    """The checkpoint just saved is loaded after a remount without a GET; without the cache directory, from the
    store."""
    lake = make_lake("seaweedfs", *OPTIONS).mount()
    torch_does("save", lake.path / "model.pt")
    lake.remount()
    torch_does("load", lake.path / "model.pt")
    assert lake.number("store.requests.get") == 0
    assert lake.number("store.bytes.read") == 0
    torch_does("save", lake.path / "again.pt")
    flush(lake, lake.path / "again.pt")
    with another(lake, tmp_path) as elsewhere:
        torch_does("load", elsewhere.path / "again.pt")
        assert elsewhere.number("store.bytes.read") > 40_000_000
    lake.kill()
    shutil.rmtree(lake.cache_dir)
    lake.mount()
    torch_does("load", lake.path / "again.pt")


@pytest.mark.parametrize("is_detached", [True, False])
def test_a_signal_stores_closed_files_of_a_mount_in_use(make_lake: LakeMaker, is_detached: bool) -> None:
    """One that a user had detached, too: it ends when the last file is closed, and then stores that."""
    lake = make_lake("file", *OPTIONS, "--writeback-delay", "10m").mount()
    (lake.path / "acknowledged").write_bytes(b"first")
    with open(lake.path / "open", "wb") as file:
        file.write(b"second")
        if is_detached:
            subprocess.run(["fusermount3", "-u", "-z", str(lake.path)], check=True)
        os.kill(lake.pid, signal.SIGTERM)
        eventually(lambda: lake.outside.objects().keys() == {"acknowledged"}, "the closed file is stored", 30)
        assert lake.serving()
    eventually(lambda: not lake.serving(), "the daemon ends", 60)
    lake.pid = 0
    assert lake.outside.read("open") == b"second"
    assert "Traceback" not in lake.log()


def test_a_signal_stores_everything_where_umount_is_missing(make_lake: LakeMaker, tmp_path: Path) -> None:
    """As in an image without the package `mount`."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "fusermount3").symlink_to(shutil.which("fusermount3") or "")
    lake = make_lake("file", *OPTIONS, "--writeback-delay", "10m")
    lake.env["PATH"] = str(programs)
    lake.mount()
    (lake.path / "acknowledged").write_bytes(b"first")
    os.kill(lake.pid, signal.SIGTERM)
    eventually(lambda: not lake.serving(), "the daemon ends", 60)
    lake.pid = 0
    assert lake.outside.read("acknowledged") == b"first"
    assert not os.path.ismount(lake.path)


def test_a_signal_stores_everything_before_the_end(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", *OPTIONS, "--writeback-delay", "10m").mount()
    write_all(lake.path, some_files())
    os.kill(lake.pid, signal.SIGTERM)
    eventually(lambda: not lake.serving(), "the daemon ends", 60)
    lake.pid = 0
    for name, data in some_files().items():
        assert lake.outside.read(name) == data
    assert lake.staged_files() == []
