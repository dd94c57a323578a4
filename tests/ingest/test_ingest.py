"""Ingest: what lies in the store afterwards, read back with zipfile and the records alone."""

from __future__ import annotations

import bz2
import errno
import gc
import gzip
import io
import itertools
import lzma
import os
import random
import sqlite3
import stat
import tarfile
import tempfile
import threading
import time
import tracemalloc
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import pytest
import trio

from lakefs_fuse.commits.archive import build, commit_key
from lakefs_fuse.commits.record import OWN, THIS, Mkdir, ObjectRef, Put, Record, Symlink, decode, encode
from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.disk import LocalDisk
from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.errors import LakeError, NotFound, PreconditionFailed, StoreFull
from lakefs_fuse.ingest import ingest as ingest_module
from lakefs_fuse.ingest import pack_filler as ingest_pack
from lakefs_fuse.ingest import tree_source
from lakefs_fuse.ingest.ingest import Ingest, IsReserved, open_source
from lakefs_fuse.ingest.pack_filler import PackFiller, Places, Totals
from lakefs_fuse.ingest.source import Bytes, File, Item, Source, SourceError, attributes, refusal
from lakefs_fuse.ingest.tar_source import TarSource
from lakefs_fuse.ingest.tree_source import TreeSource
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.open import open_store
from lakefs_fuse.store.probe import probe
from lakefs_fuse.store.protocol import Body, FileSlice, ObjectMeta, ObjectStore, PartRef
from tests.fakes import FakeClock, node_of, store_client
from tests.servers import Server
from tests.store.lakes import config_of

MTIME_NS = 1_600_000_000_123_456_789
MIB = 1 << 20


def add_member(archive: tarfile.TarFile, name: str, data: bytes = b"", **header: object) -> None:
    """Append a file, or what ``header``, fields of `TarInfo`, says."""
    info = tarfile.TarInfo(name)
    for key, value in {"size": len(data), **header}.items():
        setattr(info, key, value)
    archive.addfile(info, io.BytesIO(data))


@dataclass
class Lake:
    """A store, and how a run of ingest went."""

    config: StoreConfig
    store: ObjectStore
    notes: list[str] = field(default_factory=list)
    reports: list[tuple[int, int | None]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    node: Node = field(default_factory=lambda: node_of(FakeClock()))

    async def ingest(self, source: Path | str, path: str = "", *, count: bool = False, uploads_max: int = 2) -> Totals:
        capabilities = probe(self.store, random.Random(1), FakeClock(), read_only=True)
        self.metrics = Metrics()
        client = store_client(self.store, capabilities, self.metrics.store)
        run = Ingest(
            client,
            PackFiller(
                open_source(str(source), self.node.clock, self.node.threads),
                self.node.disk,
                path=path,
                prefix_bytes=len(self.config.source.prefix),
                directory=tempfile.gettempdir(),
            ),
            self.node,
            open_names=self.open_names,
            uploads_max=uploads_max,
            report=lambda done, total: self.reports.append((done.files, None if total is None else total.files)),
            note=self.notes.append,
        )
        return await run.run(count=count)

    @asynccontextmanager
    async def open_names(self) -> AsyncIterator[IsReserved]:
        """Names that have their bytes at no other key."""

        async def is_reserved(key: str) -> bool:
            return False

        yield is_reserved

    def commits(self) -> list[tuple[str, Record]]:
        """Keys and records, in the order of LIST."""
        found = []
        token = None
        while True:
            page = self.store.list_page(".lakefs/commits/", token=token)
            for meta in page.objects:
                with self.open(meta) as archive:
                    assert archive.testzip() is None
                    assert archive.namelist()[-1] == ".lakefs/record"
                    found.append((meta.key, decode(archive.read(".lakefs/record"))))
            token = page.next_token
            if token is None:
                return sorted(found)

    def open(self, meta: ObjectMeta) -> zipfile.ZipFile:
        return zipfile.ZipFile(io.BytesIO(bytes(self.store.get(meta.key, 0, meta.size).data)))

    def tree(self) -> dict[str, tuple[object, ...]]:
        """Every path with what it is: the last commit wins, and in a commit the last operation."""
        found: dict[str, tuple[object, ...]] = {}
        for key, record in self.commits():
            for operation in record.operations:
                match operation:
                    case Put():
                        about = (operation.mode, operation.mtime_ns, operation.uid, operation.gid)
                        found[operation.path] = (self.bytes_of(key, record, operation), *about)
                    case Mkdir():
                        found[operation.path] = ("dir", operation.mode, operation.mtime_ns)
                    case Symlink():
                        found[operation.path] = ("link", operation.target)
        return found

    def bytes_of(self, key: str, record: Record, put: Put) -> bytes:
        if put.object == OWN:
            head = self.store.head(put.path)
            assert (head.etag, head.size) == (put.hides, put.size)
            assert put.offset == 0
            key = put.path
        elif put.object != THIS:
            ref = record.objects[put.object]
            key, head = ref.key, self.store.head(ref.key)
            assert (head.etag, head.size) == (ref.etag, ref.size)
        return bytes(self.store.get(key, put.offset, put.offset + put.size).data) if put.size else b""


@pytest.fixture(params=["local", "moto"])
def lake(request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[Server], str]) -> Iterator[Lake]:
    config = config_of(request.param, request, tmp_path, new_bucket)
    store = open_store(config, Node.of_this_machine())
    yield Lake(config, store)
    store.close()


@pytest.fixture
def local(tmp_path: Path, request: pytest.FixtureRequest, new_bucket: Callable[[Server], str]) -> Iterator[Lake]:
    config = config_of("local", request, tmp_path, new_bucket)
    store = open_store(config, Node.of_this_machine())
    yield Lake(config, store)
    store.close()


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A bit of everything that can be kept."""
    root = tmp_path / "src"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "sub" / "ünï cödé").write_bytes(b"some text")
    (root / "none").touch()
    (root / "run.sh").write_bytes(b"#!/bin/sh\n")
    (root / "run.sh").chmod(0o4755)
    (root / "middle").write_bytes(random.Random(3).randbytes(700_000))
    (root / "to-middle").symlink_to("middle")
    (root / "dangling").symlink_to("../nowhere")
    for path in [*root.rglob("*"), root]:
        if not path.is_symlink():
            os.utime(path, ns=(MTIME_NS, MTIME_NS))
    (root / "sub").chmod(0o2750)
    return root


def expected(root: Path, at: str) -> dict[str, tuple[object, ...]]:
    """What `Lake.tree` should say, from the local directory itself."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [root, *root.rglob("*")]:
        name = "/".join(part for part in (at, *path.relative_to(root).parts) if part)
        status = path.lstat()
        if not name:
            continue
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("dir", stat.S_IMODE(status.st_mode), status.st_mtime_ns)
        else:
            about = (stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_uid, status.st_gid)
            found[name] = (path.read_bytes(), *about)
    return found


def tar_of(root: Path, file: Path, mode: str = "w") -> Path:
    with tarfile.open(str(file), mode, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        archive.add(root, ".")
    return file


@pytest.mark.parametrize("at", ["", "a/b"])
async def test_a_tree_arrives_whole(lake: Lake, src: Path, at: str) -> None:
    done = await lake.ingest(src, at)
    assert lake.tree() == expected(src, at)
    assert done.summary() == {
        "files": 4,
        "bytes": 700_019,
        "directories": 2 + bool(at),
        "symlinks": 2,
        "packs": 1,
        "objects": 0,
        "refused": 0,
        "skipped": 0,
    }
    assert lake.metrics.store.requests["put"] == 1
    assert lake.notes == []


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
async def test_a_tar_stream_arrives_whole(local: Lake, src: Path, tmp_path: Path, mode: str) -> None:
    done = await local.ingest(tar_of(src, tmp_path / "a.tar", mode), "a/b")
    found, wanted = local.tree(), expected(src, "a/b")
    # The nanoseconds of a time are in a float on their way into a pax header.
    assert {name: [*value[:2], *value[3:]] for name, value in found.items() if value[0] != "dir"} == {
        name: [*value[:2], *value[3:]] for name, value in wanted.items() if value[0] != "dir"
    }
    assert found.keys() == wanted.keys()
    mtime_ns = found["a/b/middle"][2]
    assert isinstance(mtime_ns, int)
    assert abs(mtime_ns - MTIME_NS) < 1000
    assert (done.files, done.directories, done.links) == (4, 3, 2)


async def test_packs_keep_to_their_size_and_are_commits_in_order(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", MIB)
    root = tmp_path / "many"
    root.mkdir()
    for number in range(100):
        (root / f"{number:03}").write_bytes(random.Random(number).randbytes(50_000))
    done = await lake.ingest(root, "data", count=True)
    commits = lake.commits()
    assert 5 <= len(commits) == done.packs == lake.metrics.store.requests["put"] <= 6
    assert all(lake.store.head(key).size <= MIB for key, _ in commits)
    assert len({record.writer for _, record in commits}) == 1
    names = [put.path for _, record in commits for put in record.operations if isinstance(put, Put)]
    assert names == [f"data/{number:03}" for number in range(100)]
    assert lake.tree() == expected(root, "data")
    assert lake.reports[-1] == (100, 100)
    assert sum(lake.metrics.store.requests.values()) <= len(commits) + 2


async def test_operations_in_one_commit_are_bounded(
    local: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_pack, "OPERATIONS_MAX", 10)
    root = tmp_path / "many"
    for number in range(35):
        (root / f"{number:03}").mkdir(parents=True)
    await local.ingest(root)
    assert [len(record.operations) for _, record in local.commits()] == [10, 10, 10, 5]
    assert local.tree() == expected(root, "")


@pytest.mark.parametrize("packed", [False, True])
async def test_large_files_become_plain_objects(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", MIB)
    monkeypatch.setattr(ingest_module, "PART_BYTES", 5 * MIB)
    root = tmp_path / "src"
    root.mkdir()
    (root / "large").write_bytes(random.Random(1).randbytes(11 * MIB))
    (root / "small").write_bytes(b"small")
    (root / "large").chmod(0o640)
    os.utime(root / "large", ns=(MTIME_NS, MTIME_NS))
    done = await lake.ingest(tar_of(root, tmp_path / "a.tar") if packed else root, "big")
    plain = lake.store.head("big/large")
    assert plain.size == 11 * MIB
    metadata = plain.metadata or {}
    assert metadata["mode"] == str(stat.S_IFREG | 0o640)
    assert metadata["mtime"][:16] == "1600000000.12345"
    assert lake.tree()["big/large"][0] == (root / "large").read_bytes()
    assert lake.tree()["big/large"][1] == 0o640
    assert lake.tree()["big/small"][0] == b"small"
    assert (done.files, done.objects, done.packs, done.bytes) == (2, 1, 1, 11 * MIB + 5)
    assert lake.metrics.store.requests["part"] == 3


async def test_hard_links_of_a_tar_are_references_or_copies(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", MIB)
    root = tmp_path / "src"
    root.mkdir()
    data = {f"{number}": random.Random(number).randbytes(400_000) for number in range(6)}
    data["large"] = random.Random(9).randbytes(2 * MIB)
    for name, content in data.items():
        (root / name).write_bytes(content)
    (root / "sym").symlink_to("0")
    names = [*data, "sym"]
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as out:
        for name in names:
            out.add(root / name, name)
        for name in names:
            add_member(out, f"links/{name}", type=tarfile.LNKTYPE, linkname=f"./{name}", mode=0o600)
        add_member(out, "links/missing", type=tarfile.LNKTYPE, linkname="missing")
    done = await lake.ingest(archive, "x")
    tree = lake.tree()
    for name, content in data.items():
        assert tree[f"x/{name}"][0] == content
        assert tree[f"x/links/{name}"][0] == content
    assert tree["x/links/sym"] == ("link", "0")
    assert lake.store.head("x/links/large").size == 2 * MIB
    assert len(lake.notes) == done.refused == 1
    assert "links/missing: a hard link to missing, which did not come before it" in lake.notes[0]
    stored = sum(lake.store.head(key).size for key, _ in lake.commits())
    assert stored < 6 * 400_000 + 100_000


async def test_hard_link_whose_source_was_replaced_meanwhile_is_reported_and_the_rest_is_loaded(
    local: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", MIB)
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as out:
        add_member(out, "large", bytes(2 * MIB))
        add_member(out, "link", type=tarfile.LNKTYPE, linkname="large")
        add_member(out, "rest")

    def copy(_store: ObjectStore, source: str, _target: str, *, etag: str | None = None) -> ObjectMeta:
        raise PreconditionFailed(f"{source!r} is not {etag!r} any more")

    monkeypatch.setattr(type(local.store), "copy", copy)
    done = await local.ingest(archive)
    assert (sorted(local.tree()), done.refused) == (["large", "rest"], 1)
    assert "link: a hard link to large" in local.notes[0]


async def test_of_two_members_of_one_name_the_later_wins(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", MIB)
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as out:
        for size in (10, 2 * MIB, 20):
            add_member(out, "same", b"x" * size)
    await lake.ingest(archive)
    assert lake.tree()["same"][0] == b"x" * 20
    last = [put for _, record in lake.commits() for put in record.operations if isinstance(put, Put)][-1]
    assert last.hides == lake.store.head("same").etag


async def test_member_that_a_directory_would_hide_is_named(
    local: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an archive to which a later state of the tree was appended."""
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", MIB)
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as out:
        for path in ("file", "in/a/deep/one", "large/x", "linked/x", "hard/x"):
            add_member(out, path, b"x")
        for path, size in {"in/a": 1, "large": 2 * MIB, "file": 2}.items():
            add_member(out, path, b"y" * size)
        for path, kind in {"linked": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}.items():
            add_member(out, path, type=kind, linkname="file")
    done = await local.ingest(archive, "at")
    assert done.refused == 4
    assert local.notes == [
        f"left out: {path}: a directory of this name came before it" for path in ("in/a", "large", "linked", "hard")
    ]
    assert {path: found[0] for path, found in local.tree().items()} == {
        "at/file": b"yy", "at/in/a/deep/one": b"x", "at/large/x": b"x", "at/linked/x": b"x", "at/hard/x": b"x",
    }  # fmt: skip


async def test_what_cannot_be_in_a_lake_is_named_and_the_rest_done(local: Lake, tmp_path: Path) -> None:
    root = tmp_path / "src"
    (root / ".lakefs" / "commits").mkdir(parents=True)
    (root / ".lakefs" / "commits" / "x").touch()
    (root / "good").write_text("good")
    (root / ".lakefs-directory").touch()
    bad = os.fsencode(root) + b"/bad\xff"
    os.mkdir(bad)
    Path(os.fsdecode(bad + b"/inside")).touch()
    os.mkfifo(root / "fifo")
    os.symlink(b"to\xff", os.fsencode(root) + b"/link")
    deep = root.joinpath(*["d" * 200] * 5)
    deep.mkdir(parents=True)
    (deep / ("n" * 100)).touch()
    done = await local.ingest(root)
    assert "good" in local.tree()
    assert done.special == 1
    text = "\n".join(local.notes)
    for said in (
        ".lakefs: .lakefs is reserved",
        ".lakefs/commits/x: .lakefs is reserved",
        ".lakefs-directory: .lakefs-directory is reserved",
        "bad\N{REPLACEMENT CHARACTER}: names in a lake are UTF-8, left out with all below it",
        "link: its target is not UTF-8",
        "keys hold at most 1024 bytes",
    ):
        assert f"left out: {said}" in text or said in text
    assert done.refused == len(local.notes) == 7
    assert "inside" not in text
    assert all(not path.startswith(".lakefs") for path in local.tree())
    # Below a directory the name is an ordinary one.
    await local.ingest(root, "copy")
    assert "copy/.lakefs/commits/x" in local.tree()


async def test_records_of_many_large_files_are_bounded(
    local: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_pack, "OPERATIONS_MAX", 4)
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", 1000)
    root = tmp_path / "src"
    root.mkdir()
    for number in range(10):
        (root / f"{number}").write_bytes(bytes([number]) * 2000)
    await local.ingest(root)
    assert [len(record.operations) for _, record in local.commits()] == [4, 4, 2]
    assert {path: found[0] for path, found in local.tree().items()} == {
        f"{number}": bytes([number]) * 2000 for number in range(10)
    }


@pytest.mark.parametrize("is_completed", [True, False])
async def test_object_of_an_earlier_run_is_not_taken_for_a_large_file_whose_upload_is_gone(
    local: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_completed: bool
) -> None:
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", 1000)
    root = tmp_path / "src"
    root.mkdir()
    (root / "large").write_bytes(b"old" * 1000)
    await local.ingest(root)
    (root / "large").write_bytes(b"new" * 1000)
    os.utime(root / "large", ns=(MTIME_NS, MTIME_NS))
    complete = StoreClient.complete_multipart

    async def lose_answer(self: StoreClient, key: str, upload_id: str, parts: Sequence[PartRef]) -> ObjectMeta:
        if is_completed:
            await complete(self, key, upload_id, parts)
        raise NotFound("no such upload")

    monkeypatch.setattr(StoreClient, "complete_multipart", lose_answer)
    if is_completed:
        await local.ingest(root)
        (put,) = local.commits()[1][1].operations
        assert isinstance(put, Put)
        assert (put.hides, put.mtime_ns) == (local.store.head("large").etag, MTIME_NS)
    else:
        with pytest.RaisesGroup(pytest.RaisesExc(NotFound)):
            await local.ingest(root)
        assert len(local.commits()) == 1
    expected = b"new" if is_completed else b"old"
    assert bytes(local.store.get("large", 0, 3000).data) == expected * 1000


class UnknownEntry:
    """An entry of a file system whose listings do not tell what it is, on a disk that fails."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.path = entry.name, entry.path

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        raise OSError(errno.EIO, "the disk fails")


async def test_entry_of_a_tree_whose_kind_cannot_be_read_is_left_out(
    local: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, scandir = tmp_path / "src", os.scandir
    (root / "odd").mkdir(parents=True)
    (root / "next").write_bytes(b"x")

    @contextmanager
    def scan_failing(directory: int) -> Iterator[Iterator[object]]:
        with scandir(directory) as entries:
            yield (UnknownEntry(each) if each.name == "odd" else each for each in entries)

    monkeypatch.setattr(tree_source, "os", SimpleNamespace(**{**vars(os), "scandir": scan_failing}))
    assert (await local.ingest(root)).refused == 1
    assert local.notes == ["left out: odd: cannot be read: the disk fails"]
    assert set(local.tree()) == {"next"}


@pytest.mark.parametrize(("moment", "wanted"), [("sub", None), ("sub/a", b"inside"), ("sub/link", b"inside")])
async def test_directory_that_becomes_a_link_leads_nowhere(
    local: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, wanted: bytes | None
) -> None:
    """Replaced when it, or what is in it, was listed, and is about to be opened."""
    root = tmp_path / "src"
    for directory, text in ((root / "sub", "inside"), (tmp_path / "outside", "secret")):
        directory.mkdir(parents=True)
        (directory / "a").write_text(text)
        (directory / "link").symlink_to(text)

    def replace_before(path: str) -> str:
        if path == moment and not (root / "sub").is_symlink():
            (root / "sub").rename(tmp_path / "moved")
            (root / "sub").symlink_to(tmp_path / "outside")
        return refusal(path)

    monkeypatch.setattr("lakefs_fuse.ingest.tree_source.refusal", replace_before)
    await local.ingest(root)
    tree = local.tree()
    assert tree.get("sub/a", (None,))[0] == wanted
    assert tree.get("sub/link", ("link", "inside")) == ("link", "inside")
    assert [note[:31] for note in local.notes] == ["left out: sub: cannot be listed"] * (wanted is None)


async def test_names_of_a_tar_that_lead_out_of_it(local: Lake, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as out:
        for name in ("../up", "a/../../up", "/etc/passwd", "n" * 256, "ok//./fine", "nul\x01fine"):
            add_member(out, name)
        add_member(out, "device", type=tarfile.CHRTYPE)
    done = await local.ingest(archive)
    assert set(local.tree()) == {"ok/fine", "nul\x01fine"}
    assert (done.refused, done.special) == (4, 1)
    assert [note.split(": ")[1][:9] for note in local.notes] == ["../up", "a/../../u", "/etc/pass", "n" * 9]


@pytest.mark.parametrize("mtime", ["inf", "-inf", "nan", "1e30", "-1e30", "1e999990", "-1e99999999", "nan123"])
async def test_times_of_a_tar_that_are_none_or_out_of_range_are_no_error(
    local: Lake, tmp_path: Path, mtime: str
) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as out:
        for name in ("odd", "next"):
            add_member(out, name, b"x", pax_headers={"mtime": mtime} if name == "odd" else {})
    await local.ingest(archive)
    assert set(local.tree()) == {"odd", "next"}


async def test_many_refusals_are_summed_up(local: Lake, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as out:
        for number in range(50):
            add_member(out, f"../{number}")
    assert (await local.ingest(archive)).refused == 50
    assert len(local.notes) == 21
    assert local.notes[-1] == "left out: 30 more"


@pytest.mark.parametrize("cut", [300, 600, 10_000, 51_200 + 1024])
async def test_a_tar_that_is_cut_short_is_an_error_wherever_it_is_cut(local: Lake, tmp_path: Path, cut: int) -> None:
    root = tmp_path / "src"
    root.mkdir()
    (root / "a").write_bytes(bytes(50_000))
    (root / "b").write_bytes(bytes(50_000))
    whole = tar_of(root, tmp_path / "a.tar").read_bytes()
    short = tmp_path / "short.tar"
    short.write_bytes(whole[:cut])
    with pytest.RaisesGroup(pytest.RaisesExc(SourceError, match="short.tar")):
        await local.ingest(short)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
async def test_compressed_tar_with_a_flipped_bit_is_an_error(local: Lake, tmp_path: Path, mode: str) -> None:
    root = tmp_path / "src"
    root.mkdir()
    (root / "a").write_bytes(random.Random(1).randbytes(100_000))
    data = bytearray(tar_of(root, tmp_path / "a.tar", mode).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.RaisesGroup(pytest.RaisesExc(SourceError, match="damaged")):
        await local.ingest(tmp_path / "a.tar")


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
async def test_tar_that_is_compressed_in_several_streams_arrives_whole(
    local: Lake, tmp_path: Path, src: Path, compress: Callable[[bytes], bytes]
) -> None:
    """As pbzip2 and bgzip write it."""
    whole = tar_of(src, tmp_path / "a.tar").read_bytes()
    pieces = [whole[at : at + 200_000] for at in range(0, len(whole), 200_000)]
    assert len(pieces) > 2
    (tmp_path / "a.tar").write_bytes(b"".join(map(compress, pieces)))
    await local.ingest(tmp_path / "a.tar")
    found, wanted = local.tree(), expected(src, "")
    assert {name: value[0] for name, value in found.items()} == {name: value[0] for name, value in wanted.items()}


def test_tar_stream_is_recognized_that_comes_byte_by_byte(tmp_path: Path, src: Path) -> None:
    data = tar_of(src, tmp_path / "a.tar", "w:gz").read_bytes()
    reading, writing = os.pipe()

    def send() -> None:
        for at in range(20):
            os.write(writing, data[at : at + 1])
            time.sleep(0.002)
        with open(writing, "wb") as rest:
            rest.write(data[20:])

    sender = threading.Thread(target=send)
    sender.start()
    source = TarSource(reading, "pipe")
    found = {item.path: item.content.size for item in source.items() if isinstance(item, File)}
    sender.join()
    source.close()
    assert found == {"middle": 700_000, "none": 0, "run.sh": 10, "sub/ünï cödé": 9}


@pytest.mark.parametrize("cut", [1, 4, 8, 20])
async def test_gzip_stream_without_its_end_is_an_error(local: Lake, tmp_path: Path, src: Path, cut: int) -> None:
    data = tar_of(src, tmp_path / "a.tar", "w:gz").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[:-cut])
    with pytest.RaisesGroup(pytest.RaisesExc(SourceError, match="a.tar")):
        await local.ingest(tmp_path / "a.tar")


async def test_what_is_no_tar_or_cannot_be_read(local: Lake, tmp_path: Path) -> None:
    for name, content, said in (
        ("text", b"just text\n" * 1000, "not a tar archive"),
        ("empty", b"", "not a tar archive"),
        ("a.tar.zst", b"\x28\xb5\x2f\xfd" + bytes(100), "zstd -dc"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.RaisesGroup(pytest.RaisesExc(SourceError, match=said)):
            await local.ingest(tmp_path / name)
    with pytest.raises(SourceError, match="cannot be read"):
        await local.ingest(tmp_path / "missing")
    assert local.commits() == []


async def test_our_commits_are_later_than_all_that_are_there(local: Lake, src: Path) -> None:
    local.node = node_of(FakeClock(1_700_000_500_000_000_000))
    await local.ingest(src)
    # The second run's machine is a little behind; by more, and the store's clock would put it right.
    first = local.commits()[-1][1].time
    local.node = node_of(FakeClock(first - 1_500_000_000))
    await local.ingest(src)
    assert [record.time > first for _, record in local.commits()] == [False, True]


async def test_a_slow_upload_is_named_again_by_a_commit_of_its_own_time(
    lake: Lake, src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "SLOW_S", -1.0)
    await lake.ingest(src, "slow")
    (key, pack), (_, again) = lake.commits()
    assert again.time > pack.time
    assert again.objects[1].key == key
    assert [put.object for put in again.operations if isinstance(put, Put)] == [1] * 4
    assert [type(operation) for operation in again.operations] == [type(operation) for operation in pack.operations]
    assert lake.tree() == expected(src, "slow")


class Wrapped:
    """A store whose PUTs go through ``put``; everything else is its own."""

    def __init__(self, store: ObjectStore, put: Callable[[str, Body], ObjectMeta]) -> None:
        self._store, self._put = store, put

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False,
        etag: str | None = None,
    ) -> ObjectMeta:  # fmt: skip
        return self._put(key, body)


class Twice(Source):
    """One name in two packs, and another in the first alone. The second is full ``pause_s`` after the first."""

    links = False

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def items(self) -> Iterator[Item]:
        for path, data in (("other", b"other"), ("same", b"first" * 150_000), ("same", b"second" * 150_000)):
            yield File(path, attributes(0o644, 0, 0, 0), Bytes(data))
        time.sleep(self._pause_s)

    def interrupt(self) -> None:
        return

    def close(self) -> None:
        return


@pytest.mark.parametrize("is_last_first", [False, True])
async def test_slow_pack_does_not_bring_back_what_a_later_pack_replaced(
    local: Lake, monkeypatch: pytest.MonkeyPatch, is_last_first: bool
) -> None:
    """Whether or not the later pack is in the store when the slow one is repeated."""
    monkeypatch.setattr(ingest_module, "SLOW_S", -1.0 if is_last_first else 0.5)
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", MIB)
    second_stored, first_repeated = threading.Event(), threading.Event()

    def put(key: str, body: Body) -> ObjectMeta:
        is_pack = isinstance(body, FileSlice)
        is_second = is_pack and b"secondsecond" in b"".join(cast(FileSlice, body).pieces())
        if is_last_first and is_pack and not is_second:
            assert second_stored.wait(10)
        elif is_pack and not is_second:
            time.sleep(0.6)
        elif not is_last_first and is_second:
            assert first_repeated.wait(10)
        meta = local.store.put(key, body)
        if is_second:
            second_stored.set()
        elif not is_pack:
            first_repeated.set()
        return meta

    source = Twice(0.0 if is_last_first else 0.4)
    await run_of(local, Wrapped(local.store, put), source, uploads_max=2).run()
    tree = local.tree()
    assert (tree["x/other"][0], tree["x/same"][0]) == (b"other", b"second" * 150_000)


async def test_slow_pack_does_not_bring_back_what_another_node_replaced(
    local: Lake, src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "SLOW_S", -1.0)

    def put(key: str, body: Body) -> ObjectMeta:
        if not local.commits():
            time_ns = int(key.removeprefix(".lakefs/commits/")[:16], 16) + 1000
            link = Symlink("x/middle", "elsewhere", 0, 0, 0)
            record = Record(writer="0badcafe", time=time_ns, operations=[link])
            local.store.put(commit_key(time_ns, "0badcafe"), build((), lambda _: encode(record)))
        return local.store.put(key, body)

    source = open_source(str(src), SystemClock(), WorkerThreads())
    await run_of(local, Wrapped(local.store, put), source).run()
    tree = local.tree()
    assert tree["x/middle"] == ("link", "elsewhere")
    assert tree["x/run.sh"][0] == b"#!/bin/sh\n"
    assert len(local.commits()) == 3


class Synthetic:
    """Files that take no disk."""

    links = False

    def __init__(self, files: int, size: int) -> None:
        self._files, self._data = files, bytes(size)

    def items(self) -> Iterator[Item]:
        for number in range(self._files):
            yield File(f"{number // 1000}/{number}", attributes(0o644, number, 0, 0), Bytes(self._data))

    def count(self) -> tuple[int, int] | None:
        return None

    def interrupt(self) -> None:
        return

    def close(self) -> None:
        return


def run_of(lake: Lake, store: object, source: Source, **more: Any) -> Ingest:
    client = store_client(
        cast(ObjectStore, store), probe(lake.store, random.Random(1), FakeClock(), read_only=True), lake.metrics.store,
        retry_timeout_s=0,
    )  # fmt: skip
    node = Node.of_this_machine()
    packer = PackFiller(source, node.disk, path="x", prefix_bytes=0, directory=tempfile.gettempdir())
    return Ingest(
        client, packer, node, open_names=lake.open_names, report=lambda done, total: None, note=lake.notes.append,
        **more,
    )  # fmt: skip


async def test_twenty_thousand_small_files_are_a_handful_of_requests(local: Lake) -> None:
    sizes: list[int] = []
    busy, busiest = 0, 0
    lock = threading.Lock()

    def drop(key: str, body: Body) -> ObjectMeta:
        nonlocal busy, busiest
        assert isinstance(body, FileSlice)
        with lock:
            busy += 1
            busiest = max(busy, busiest)
        time.sleep(0.1)
        with lock:
            busy -= 1
            sizes.append(body.length)
        return ObjectMeta(key, body.length, "etag", 0)

    done = await run_of(local, Wrapped(local.store, drop), Synthetic(20_000, 50_000), uploads_max=2).run()
    assert (done.files, done.bytes) == (20_000, 1_000_000_000)
    assert sum(local.metrics.store.requests.values()) <= 18
    assert local.metrics.store.requests["put"] == len(sizes) == done.packs <= 16
    assert max(sizes) <= 64 * MIB
    assert busiest <= 2


async def test_what_was_stored_before_a_failure_stays(local: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_pack, "PACK_BYTES", MIB)
    puts = 0

    def third_fails(key: str, body: Body) -> ObjectMeta:
        nonlocal puts
        puts += 1
        if puts == 3:
            raise StoreFull("no room")
        return local.store.put(key, body)

    gc.collect()  # what other tests left behind may have descriptors, which would be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    with pytest.RaisesGroup(pytest.RaisesExc(StoreFull)):
        await run_of(local, Wrapped(local.store, third_fails), Synthetic(200, 50_000), uploads_max=1).run()
    assert len(local.commits()) == 2
    assert all(content[0] == bytes(50_000) for content in local.tree().values())
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_an_interrupted_large_file_leaves_no_upload(lake: Lake, tmp_path: Path) -> None:
    root = tmp_path / "src"
    root.mkdir()
    (root / "large").write_bytes(bytes(65 * MIB))

    class Failing(Wrapped):
        def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> object:
            raise StoreFull("no room")

    with pytest.raises(ExceptionGroup) as raised:
        await run_of(
            lake, Failing(lake.store, lake.store.put), open_source(str(root), SystemClock(), WorkerThreads())
        ).run()
    # One for each part that was under way.
    assert raised.value.split(StoreFull)[1] is None
    assert lake.store.list_multipart("") == []
    assert lake.commits() == []


async def test_a_file_that_changes_while_it_is_read_is_left_out(local: Lake, tmp_path: Path) -> None:
    root = tmp_path / "src"
    root.mkdir()
    for name, size in (("a", 10), ("middle", 600_000), ("larger", 65 * MIB)):
        (root / name).write_bytes(bytes(size))

    class Restless(TreeSource):
        def items(self) -> Iterator[Item]:
            for item in super().items():
                if isinstance(item, File) and item.path != "a":
                    with (root / item.path).open("ab") as file:
                        file.write(b"more")
                yield item

    done = await run_of(local, local.store, Restless(str(root), SystemClock(), WorkerThreads())).run()
    assert set(local.tree()) == {"x", "x/a"}
    assert done.refused == 2
    assert local.notes == [f"left out: {name}: it was changed while it was read" for name in ("x/larger", "middle")]
    assert (done.files, done.bytes) == (1, 10)
    assert local.store.list_multipart("") == []


async def test_packs_need_room_and_say_where(local: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(LocalDisk):
        def temporary_file(self, directory: str | os.PathLike[str]) -> BinaryIO:
            return open("/dev/full", "w+b", buffering=0)

    disk = FullDisk(random.Random(1), WorkerThreads())
    packer = PackFiller(Synthetic(1, 10), disk, path="", prefix_bytes=0, directory="/somewhere")
    with pytest.raises(LakeError, match=r"/somewhere.*No space left.*64 MiB.*TMPDIR"):
        packer.fill()
    packer.close()


async def test_large_files_that_were_stored_take_no_memory() -> None:
    disk, about = LocalDisk(random.Random(1), WorkerThreads()), attributes(0o644, 1, 0, 0)
    packer = PackFiller(Synthetic(0, 0), disk, path="", prefix_bytes=0, directory=tempfile.gettempdir())

    def store(numbers: range) -> None:
        for number in numbers:
            key = f"{number}".rjust(200, "n")
            at = key if number % 2 else f".lakefs/objects/{key}"
            packer.add_object(File(key, about, Bytes(b"")), ObjectRef(at, f"etag {number}", 1), f"etag {number}")
        pack = packer.take()
        assert pack is not None
        pack.file.close()

    tracemalloc.start()
    try:
        store(range(100))
        before = tracemalloc.get_traced_memory()[0]
        store(range(100, 2100))
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
        packer.close()


async def test_places_of_hard_links_need_room_and_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Places, "put", fail)
    source = Synthetic(1, 10)
    source.links = True
    disk = LocalDisk(random.Random(1), WorkerThreads())
    packer = PackFiller(source, disk, path="", prefix_bytes=0, directory=tempfile.gettempdir())
    with pytest.raises(LakeError, match=r"packs are built in .*disk is full.*TMPDIR"):
        packer.fill()
    packer.close()


async def test_a_silent_stream_keeps_nobody_from_ending(local: Lake) -> None:
    reading, writing = os.pipe()
    source = TarSource(reading, "pipe")
    with trio.move_on_after(0.3) as scope:
        await run_of(local, local.store, source).run()
    assert scope.cancelled_caught
    os.close(writing)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
async def test_slow_files_are_read_ahead_in_the_same_order(local: Lake, tmp_path: Path, seconds: float) -> None:
    root = tmp_path / "many"
    root.mkdir()
    for number in range(3000):
        (root / f"{number:04}").write_bytes(b"%d" % number)
    before = threading.active_count()

    class Slow(FakeClock):
        """Time passes whenever it is asked for."""

        def mono_s(self) -> float:
            self.advance(seconds)
            return super().mono_s()

    class Counted(WorkerThreads):
        started = 0

        def start(self, call: Callable[[], None], name: str) -> None:
            self.started += 1
            super().start(call, name)

    clock, threads = Slow(), Counted()
    source = TreeSource(str(root), clock, threads)
    paths = [item.path for item in source.items() if isinstance(item, File)]
    assert paths == [f"{number:04}" for number in range(3000)]
    assert (threads.started > 0) == (seconds > 0)
    source.close()
    with trio.fail_after(10):
        while threading.active_count() > before:  # those of other tests may have ended meanwhile
            await trio.sleep(0.01)
    abandoned = TreeSource(str(root), clock, threads)
    assert len(list(itertools.islice(abandoned.items(), 100))) == 100
    abandoned.close()
    await run_of(local, local.store, TreeSource(str(root), clock, threads)).run()
    assert {path[2:]: content[0] for path, content in local.tree().items() if path != "x"} == {
        f"{number:04}": b"%d" % number for number in range(3000)
    }
