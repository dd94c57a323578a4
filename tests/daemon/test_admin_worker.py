"""The process that works on a lake without a mount: where it finds the lake, what it says, how it ends."""

from __future__ import annotations

import inspect
import os
import pkgutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.admin.fold_database import FoldDatabase
from lakefs_fuse.commits.index.index import FORMAT, FORMAT_LEVELS, INDEX, MANIFEST, Manifest, decode
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.daemon import admin_worker as offline
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import ConfigError, LakeError, MountError, first_error
from lakefs_fuse.store import open as places
from lakefs_fuse.store.lake_record import KEY, LakeRecord
from lakefs_fuse.store.open import open_store
from tests.servers import Server
from tests.store.lakes import s3_config

ROOT = Path(__file__).parents[2]


def request_for(store: StoreConfig, source: Path | str, **more: object) -> protocol.Request:
    args = msgspec.Raw(msgspec.json.encode(protocol.IngestArgs(source=str(source))))
    return msgspec.structs.replace(protocol.Request(command="ingest", store=store, args=args), **more)


def file_config(directory: Path) -> StoreConfig:
    return StoreConfig(source=Source.parse(f"file://{directory}"))


def start(request: protocol.Request) -> subprocess.Popen[bytes]:
    reading, writing = os.pipe()
    try:
        os.write(writing, protocol.encode(request))
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "lakefs_fuse.daemon.admin_worker", "--request-fd", str(reading)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[reading],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    finally:
        os.close(writing)
        os.close(reading)


def answers_of(output: bytes) -> list[protocol.Answer]:
    return [protocol.decode_answer(line) for line in output.splitlines()]


# -- where the lake is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["commits", "index"])
def test_a_directory_lies_in_the_nearest_lake_above_it(tmp_path: Path, kind: str) -> None:
    (tmp_path / "lake" / ".lakefs" / kind).mkdir(parents=True)
    (tmp_path / "lake" / "inner" / ".lakefs" / "tmp").mkdir(parents=True)
    found, path = places.find_lake(file_config(tmp_path / "lake" / "inner" / "a"), Node.of_this_machine())
    assert (str(found.source), path) == (f"file://{tmp_path}/lake", "inner/a")
    found, path = places.find_lake(file_config(tmp_path / "lake"), Node.of_this_machine())
    assert (str(found.source), path) == (f"file://{tmp_path}/lake", "")


def test_without_a_lake_the_place_itself_becomes_one(tmp_path: Path) -> None:
    place = file_config(tmp_path / "a" / "b")
    assert places.find_lake(place, Node.of_this_machine()) == (place, "")


def test_directory_of_a_lake_cannot_be_mounted_as_one(
    tmp_path: Path, moto: Server, new_bucket: Callable[[Server], str]
) -> None:
    node, bucket = Node.of_this_machine(), new_bucket(moto)
    (tmp_path / "lake" / ".lakefs" / "commits").mkdir(parents=True)
    (tmp_path / "lake" / "a" / "b").mkdir(parents=True)
    with closing(open_store(s3_config(moto, f"{bucket}/lake"), node)) as store:
        store.put(".lakefs/index/x", b"x")
    for root, below in (
        (file_config(tmp_path / "lake"), file_config(tmp_path / "lake" / "a" / "b")),
        (s3_config(moto, f"{bucket}/lake"), s3_config(moto, f"{bucket}/lake/a/b")),
    ):
        with closing(open_store(root, node)) as store:
            places.require_root(store, root, node)
        with closing(open_store(below, node)) as store:
            with pytest.raises(MountError, match=r"is the directory a/b of the lake .*/lake/?: mount that, or"):
                places.require_root(store, below, node)
            store.put(".lakefs/commits/x", b"x")
            places.require_root(store, below, node)  # a lake of its own that is there already
    beside = s3_config(moto, f"{bucket}/other")
    with closing(open_store(beside, node)) as store:
        places.require_root(store, beside, node)


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_require_root_below_a_lake_without_commits_refuses_and_names_its_record(
    tmp_path: Path, moto: Server, new_bucket: Callable[[Server], str], kind: str
) -> None:
    """Its first mount may pack files at any time, which a second lake would not show."""
    node, bucket = Node.of_this_machine(), new_bucket(moto)
    (tmp_path / "lake" / "a").mkdir(parents=True)
    root, below = (
        (file_config(tmp_path / "lake"), file_config(tmp_path / "lake" / "a"))
        if kind == "file"
        else (s3_config(moto, f"{bucket}/lake"), s3_config(moto, f"{bucket}/lake/a"))
    )
    with closing(open_store(root, node)) as store:
        store.put(KEY, b"x")
        places.require_root(store, root, node)
    with closing(open_store(below, node)) as store:
        with pytest.raises(
            MountError, match=r"directory a of the lake .*; if no mount uses .*, delete its .lakefs/lake"
        ):
            places.require_root(store, below, node)
        store.put(KEY, b"x")
        places.require_root(store, below, node)  # a lake of its own that is there already


def test_lake_in_which_nothing_is_committed_is_found_by_its_record(
    moto: Server, new_bucket: Callable[[Server], str]
) -> None:
    """Commands would make a second lake below it, of which its mounts show nothing."""
    place = s3_config(moto, f"{new_bucket(moto)}/one")
    assert not places.search_lake(place, Node.of_this_machine()).is_recorded
    store = open_store(place, Node.of_this_machine())
    store.put(KEY, b"x")
    store.close()
    found = places.search_lake(place, Node.of_this_machine())
    assert (found.exists, found.is_recorded, found.path) == (False, True, "")
    below = s3_config(moto, f"{place.source.bucket}/one/data/in")
    found = places.search_lake(below, Node.of_this_machine())
    assert (found.store, found.exists, found.is_recorded, found.path) == (place, False, True, "data/in")


def test_a_prefix_lies_in_the_nearest_lake_above_it(moto: Server, new_bucket: Callable[[Server], str]) -> None:
    bucket = new_bucket(moto)
    place = s3_config(moto, f"{bucket}/one/two/three")
    assert places.find_lake(place, Node.of_this_machine()) == (place, "")
    for prefix, key, rest in (
        ("", ".lakefs/commits/x", "one/two/three"),
        ("one", "nothing.lakefs/commits/x", "one/two/three"),
        ("one", ".lakefs/probe-1/x", "one/two/three"),
        ("one", ".lakefs/index/x", "two/three"),
        ("one/two/three", ".lakefs/commits/x", ""),
    ):
        store = open_store(s3_config(moto, f"{bucket}/{prefix}"), Node.of_this_machine())
        store.put(key, b"x")
        store.close()
        found, path = places.find_lake(place, Node.of_this_machine())
        assert path == rest
        assert str(found.source).rstrip("/") == f"s3://{bucket}/one/two/three".removesuffix(rest).rstrip("/")
        assert found.endpoint_url == place.endpoint_url


# -- what it says ------------------------------------------------------------------------------------------------------


def test_progress_is_limited_in_rate_and_the_last_is_never_lost() -> None:
    reading, writing = os.pipe()
    now = [0.0]
    answers = offline.Answers(writing, clock=lambda: now[0])
    for number in range(100):
        answers.report(protocol.Progress(files_done=number))
        now[0] += 0.05
    answers.send(protocol.Note("end"))
    os.close(writing)
    with open(reading, "rb") as output:
        said = answers_of(output.read())
    assert said[-1] == protocol.Note("end")
    files = [answer.files_done for answer in said if isinstance(answer, protocol.Progress)]
    assert files[0] == 0
    assert files[-1] == 99
    assert 20 <= len(files) <= 27


async def test_a_command_runs_in_the_lake_that_was_found(tmp_path: Path) -> None:
    (tmp_path / "lake" / ".lakefs" / "commits").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_text("a")
    reading, writing = os.pipe()
    request = request_for(file_config(tmp_path / "lake" / "in"), tmp_path / "src", find_root=True)
    finished = await offline.run_command(request, offline.Answers(writing), Node.of_this_machine())
    os.close(writing)
    said = answers_of(os.read(reading, 1 << 16))
    os.close(reading)
    assert said[0] == protocol.Note(f"in is in the lake file://{tmp_path}/lake")
    assert finished.exit_code == 0
    assert finished.summary["files"] == 1
    assert len(list((tmp_path / "lake" / ".lakefs" / "commits").iterdir())) == 1


NEEDING_LAKES: dict[str, msgspec.Struct] = {
    "fsck": protocol.FsckArgs(),
    "gc": protocol.GcArgs(),
    "log": protocol.LogArgs(),
    "pack": protocol.PackArgs(grace_s=0.0),
    "relocate": protocol.RelocateArgs(),
    "snapshot": protocol.SnapshotArgs(),
    "upgrade": protocol.UpgradeArgs(),
}


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("name", NEEDING_LAKES)
async def test_command_where_no_lake_is_found_is_refused_and_writes_nothing(
    tmp_path: Path, name: str, is_named: bool
) -> None:
    """As where a prefix, or --lake, is misspelled. A lake that was mounted, and has no commit yet, is one."""
    place = tmp_path / "lake"
    (place / "data").mkdir(parents=True)
    args = msgspec.Raw(msgspec.json.encode(NEEDING_LAKES[name]))
    request = protocol.Request(command=name, store=file_config(place), args=args, find_root=not is_named)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    answers = offline.Answers(nowhere)
    with pytest.raises(ConfigError, match=r"no lake is here.*check bucket and prefix"):
        await offline.run_command(request, answers, Node.of_this_machine())
    assert [each.name for each in place.iterdir()] == ["data"]
    (place / ".lakefs").mkdir()
    (place / KEY).write_bytes(msgspec.json.encode(LakeRecord(id="0123456789abcdef")))
    finished = await offline.run_command(request, answers, Node.of_this_machine())
    os.close(nowhere)
    assert finished.exit_code == 0


@pytest.mark.parametrize("name", [*NEEDING_LAKES, "ingest"])
async def test_command_on_a_mount_whose_lake_is_another_one_is_refused_and_writes_nothing(
    tmp_path: Path, name: str
) -> None:
    """As where the environment of the shell names another endpoint than that of the mount."""
    place = tmp_path / "lake"
    (place / ".lakefs").mkdir(parents=True)
    (place / KEY).write_bytes(msgspec.json.encode(LakeRecord(id="2" * 32)))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_text("a")
    args = msgspec.Raw(msgspec.json.encode(NEEDING_LAKES.get(name, protocol.IngestArgs(source=f"{tmp_path}/src"))))
    request = protocol.Request(command=name, store=file_config(place), args=args, mountpoint="/mnt/lake")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    answers, node = offline.Answers(nowhere), Node.of_this_machine()
    before = (place / KEY).read_bytes()
    for lake_id in ("1" * 32, ""):  # the latter of a mount without lake record
        with pytest.raises(ConfigError, match="is not the lake of the mount: set AWS_ENDPOINT_URL"):
            await offline.run_command(msgspec.structs.replace(request, lake_id=lake_id), answers, node)
        assert [each.name for each in place.iterdir()] == [".lakefs"]
        assert [each.name for each in (place / ".lakefs").iterdir()] == ["lake"]
        assert (place / KEY).read_bytes() == before
    (place / KEY).unlink()
    with pytest.raises(ConfigError, match="is not the lake of the mount"):
        await offline.run_command(msgspec.structs.replace(request, lake_id="1" * 32), answers, node)
    assert not list((place / ".lakefs").iterdir())
    (place / KEY).write_bytes(before)
    finished = await offline.run_command(msgspec.structs.replace(request, lake_id="2" * 32), answers, node)
    os.close(nowhere)
    assert finished.exit_code == 0


@pytest.mark.parametrize("is_dry", [True, False])
async def test_gc_probes_a_store_of_which_nothing_is_known_and_a_dry_run_writes_nothing(
    tmp_path: Path, is_dry: bool
) -> None:
    """The lease rests on what the probe finds."""
    (tmp_path / "lake").mkdir()
    args = msgspec.Raw(msgspec.json.encode(protocol.GcArgs(dry_run=is_dry)))
    request = protocol.Request(command="gc", store=file_config(tmp_path / "lake"), args=args, background=True)
    reading, writing = os.pipe()
    await offline.run_command(request, offline.Answers(writing), Node.of_this_machine())
    os.close(reading)
    os.close(writing)
    assert (tmp_path / "lake" / ".lakefs" / "lake").exists() == (not is_dry)
    assert not (tmp_path / "lake" / ".lakefs" / "maintenance-lease").exists()


async def test_maintenance_of_an_upgraded_lake_writes_levels_and_keeps_its_database(tmp_path: Path) -> None:
    """As the worker of a mount runs it. Before the upgrade it writes an index of format 1, and keeps nothing."""
    place, node = tmp_path / "lake", Node.of_this_machine()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    answers = offline.Answers(nowhere)
    (place / ".lakefs").mkdir(parents=True)
    (place / KEY).write_bytes(msgspec.json.encode(LakeRecord(id="1" * 32)))
    (tmp_path / "cache").mkdir()
    database = FoldDatabase(tmp_path / "cache" / "folded")
    (tmp_path / "src").mkdir()

    async def run(command: str, args: msgspec.Struct) -> dict[str, object]:
        raw = msgspec.Raw(msgspec.json.encode(args))
        request = protocol.Request(command=command, store=file_config(place), args=raw, scratch=str(tmp_path))
        return (await offline.run_command(request, answers, node)).summary

    async def fold(name: str) -> Manifest:
        (tmp_path / "src" / name).write_text(name)
        await run("ingest", protocol.IngestArgs(source=str(tmp_path / "src")))
        due = protocol.MaintenanceArgs(interval_s=3600, commits_max=0, may_delete=False, fold_database=database.path)
        assert (await run("maintenance", due))["folded"]
        newest = max((place / INDEX).iterdir())
        return decode((newest / MANIFEST).read_bytes(), int(newest.name, 16))

    assert (await fold("one")).format == FORMAT
    assert not database.exists()
    await run("upgrade", protocol.UpgradeArgs())
    manifest = await fold("two")
    assert (manifest.format, database.newest) == (FORMAT_LEVELS, manifest.time)
    assert manifest.names == 2
    os.close(nowhere)


@pytest.mark.parametrize("name", sorted(offline.COMMANDS))
def test_command_in_registry_has_a_function(name: str) -> None:
    assert inspect.iscoroutinefunction(pkgutil.resolve_name(f"lakefs_fuse.{offline.COMMANDS[name].run}"))


def test_an_error_of_ours_comes_before_others_in_a_group() -> None:
    ours = ConfigError("ours")
    group = BaseExceptionGroup("", [ValueError("theirs"), BaseExceptionGroup("", [ours])])
    assert first_error(group) is ours
    assert isinstance(first_error(ExceptionGroup("", [LakeError("a"), ours])), LakeError)


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_the_process_says_how_it_went(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_text("a")
    child = start(request_for(file_config(tmp_path / "lake"), tmp_path / "src"))
    output, errors = child.communicate(timeout=60)
    last = answers_of(output)[-1]
    assert isinstance(last, protocol.Finished)
    assert "1 file of 1 byte" in last.text
    assert (child.returncode, errors) == (0, b"")


def test_the_process_says_what_failed(tmp_path: Path) -> None:
    child = start(request_for(file_config(tmp_path / "missing"), tmp_path))
    output, errors = child.communicate(timeout=60)
    (last,) = answers_of(output)
    assert isinstance(last, protocol.Failed)
    assert "missing does not exist" in last.message
    assert (child.returncode, errors) == (last.exit_code, b"")


def test_it_ends_when_nobody_can_read_its_answers_any_more(tmp_path: Path) -> None:
    """As where the command line was killed, by the end of its terminal: though it has nothing to say for long."""
    (tmp_path / "lake" / ".lakefs" / "commits").mkdir(parents=True)
    args = msgspec.Raw(msgspec.json.encode(protocol.LogArgs(follow=True, refresh_s=600)))
    child = start(protocol.Request(command="log", store=file_config(tmp_path / "lake"), args=args))
    assert child.stdout is not None
    assert isinstance(protocol.decode_answer(child.stdout.readline()), protocol.LogStart)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1)
    child.stdout.close()
    assert child.wait(20) == protocol.EXIT_INTERRUPTED
    assert child.stderr is not None
    assert child.stdin is not None
    assert child.stderr.read() == b""
    for pipe in (child.stdin, child.stderr):
        pipe.close()


def test_interrupted_it_ends_at_once_and_what_was_stored_stays(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    child = start(request_for(file_config(tmp_path / "lake"), "-"))
    assert child.stdin is not None
    assert child.stdout is not None
    for name in ("a", "b"):
        info = tarfile.TarInfo(name)
        info.size = 40 << 20
        child.stdin.write(info.tobuf() + bytes(info.size))
    child.stdin.flush()
    # The first pack is stored, the second waits for more; the stream stays open.
    assert isinstance(protocol.decode_answer(child.stdout.readline()), protocol.Progress)
    child.send_signal(signal.SIGINT)
    output = child.stdout.read()
    assert child.wait(30) == protocol.EXIT_INTERRUPTED
    assert answers_of(output)[-1] == protocol.Failed(message="interrupted", exit_code=protocol.EXIT_INTERRUPTED)
    assert len(list((tmp_path / "lake" / ".lakefs" / "commits").iterdir())) == 1
    assert child.stderr is not None
    assert child.stderr.read() == b""
    for pipe in (child.stdin, child.stdout, child.stderr):
        pipe.close()
