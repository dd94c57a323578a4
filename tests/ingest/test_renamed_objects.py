"""Ingest beside renamed files, whose objects stay at the keys of their earlier names."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from lakefs_fuse.commits.record import OBJECTS, ObjectRef, Put, Remove
from lakefs_fuse.control.worker_protocol import IngestArgs
from lakefs_fuse.daemon.ingest_command import run_ingest
from lakefs_fuse.ingest import pack_filler
from tests.admin.lakes import give_commit, plain, work_of
from tests.memory_store import MemoryStore, Request, When
from tests.upload.drafting import noise
from tests.vfs.lakes import Clock, lake

OLD, NEW = noise(1, 3000), noise(2, 4000)
"""Both too large for a pack, as `small_packs` has it."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    made = MemoryStore()
    made.clock = clock
    return made


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_filler, "PACK_BYTES", 1000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with one large file."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_bytes(NEW)
    return tmp_path / "source"


async def ingest(store: MemoryStore, clock: Clock, source: Path) -> list[str]:
    """The notes of a run. Its exit code is 1 if there are any."""
    clock.advance(60)
    notes: list[str] = []
    work = replace(work_of(store, clock, source.parent), note=notes.append)
    done = await run_ingest(work, IngestArgs(source=str(source)))
    clock.advance(60)
    assert done.exit_code == bool(notes)
    return notes


async def rename(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """A mount writes the plain object `a`, and renames it to `b`."""
    async with lake(store, tmp_path / "writer", clock=clock) as mounted:
        await mounted.write("a", OLD)
        await mounted.rename("a", "b")
        await mounted.sync()
    assert plain(store) == ["a"]


async def tree(store: MemoryStore, clock: Clock, cache_dir: Path) -> dict[str, object]:
    """What a fresh mount shows."""
    async with lake(store, cache_dir, clock=clock) as mounted:
        return await mounted.tree()


def elsewhere(store: MemoryStore) -> list[bytes]:
    return [store.data(key) for key in list(store.objects) if key.startswith(OBJECTS)]


async def test_large_file_leaves_the_object_of_a_renamed_file(
    store: MemoryStore, clock: Clock, source: Path, tmp_path: Path
) -> None:
    await rename(store, clock, tmp_path)
    assert await ingest(store, clock, source) == []
    assert store.data("a") == OLD
    assert await tree(store, clock, tmp_path / "reader") == {"a": NEW, "b": OLD}
    assert elsewhere(store) == [NEW]


async def test_large_file_replaces_an_object_that_no_other_name_has(
    store: MemoryStore, clock: Clock, source: Path, tmp_path: Path
) -> None:
    store.give("a", OLD)
    assert await ingest(store, clock, source) == []
    assert store.data("a") == NEW
    assert await tree(store, clock, tmp_path / "reader") == {"a": NEW}
    assert elsewhere(store) == []


async def test_names_are_read_only_where_an_object_is_at_the_key(
    store: MemoryStore, clock: Clock, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing is at the key")

    monkeypatch.setattr("lakefs_fuse.admin.commands.open_view", refuse)
    assert await ingest(store, clock, source) == []
    assert store.data("a") == NEW


async def test_hard_links_share_an_object_that_is_not_at_its_own_key(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await rename(store, clock, tmp_path)
    with tarfile.open(tmp_path / "source.tar", "w") as out:
        info = tarfile.TarInfo("a")
        info.size = len(NEW)
        out.addfile(info, io.BytesIO(NEW))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.LNKTYPE, "a"
        out.addfile(link)
    assert await ingest(store, clock, tmp_path / "source.tar") == []
    assert await tree(store, clock, tmp_path / "reader") == {"a": NEW, "b": OLD, "link": NEW}
    assert elsewhere(store) == [NEW]


async def test_hard_link_leaves_the_object_of_a_renamed_file(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    await rename(store, clock, tmp_path)
    with tarfile.open(tmp_path / "source.tar", "w") as out:
        info = tarfile.TarInfo("first")
        info.size = len(NEW)
        out.addfile(info, io.BytesIO(NEW))
        link = tarfile.TarInfo("a")
        link.type, link.linkname = tarfile.LNKTYPE, "first"
        out.addfile(link)
    assert await ingest(store, clock, tmp_path / "source.tar") == []
    assert await tree(store, clock, tmp_path / "reader") == {"a": NEW, "b": OLD, "first": NEW}
    assert store.data("a") == OLD


async def test_file_is_left_out_whose_object_is_renamed_during_the_upload(
    store: MemoryStore, clock: Clock, source: Path, tmp_path: Path
) -> None:
    there = store.give("a", OLD)

    def rename_once(request: Request, when: When) -> None:
        if (request.what, when) == ("upload_part", "after"):
            store.hook = lambda _request, _when: None
            give_commit(
                store,
                clock,
                Put("b", 1, 0, len(OLD), 0o644, 1, 2, 3),
                Remove("a", hides=there.etag),
                objects=(ObjectRef("a", there.etag, len(OLD)),),
            )

    store.hook = rename_once
    assert await ingest(store, clock, source) == [
        "left out: a: the object at its key was given to another name meanwhile: run this again"
    ]
    assert (store.data("a"), store.uploads) == (OLD, {})
    assert await tree(store, clock, tmp_path / "first") == {"b": OLD}
    assert await ingest(store, clock, source) == []
    assert await tree(store, clock, tmp_path / "second") == {"a": NEW, "b": OLD}
