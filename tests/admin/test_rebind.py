"""`fsck --rebind`: a lake that other tools copied, which changes ETags and dates, is what it was."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lakefs_fuse.admin.rebind import Rebinder, Rebound
from lakefs_fuse.admin.relocation import Relocator
from lakefs_fuse.admin.snapshot import fold
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.record import COMMITS, OBJECTS
from lakefs_fuse.errors import FileError, StoreError
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.entry import Flag
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.store.protocol import ObjectMeta, PartRef
from tests.admin.lakes import headless, silent
from tests.admin.test_gc import collect
from tests.fakes import node_of
from tests.memory_store import Failures, MemoryStore
from tests.upload.drafting import noise
from tests.vfs.lakes import KIB, Clock, Lake, lake

LARGE = noise(1, 300 * KIB)


class BucketStore(MemoryStore):
    """ETags as S3 makes them: the MD5 of what was stored in one piece, and the MD5 of the MD5s of parts. Of an
    ``encrypted`` bucket they say nothing of the bytes."""

    def __init__(self, *, encrypted: bool = False) -> None:
        super().__init__()
        self.equal_bytes_have_equal_etags = not encrypted

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool = False, etag: str | None = None
    ) -> ObjectMeta:
        sums = [hashlib.md5(self.uploads[upload_id].parts[part.number][1]).digest() for part in parts]
        meta = super().complete_multipart(key, upload_id, parts, if_absent=if_absent, etag=etag)
        data = self.objects[key][0]
        multipart_etag = f"{hashlib.md5(b''.join(sums)).hexdigest()}-{len(sums)}"
        made = ObjectMeta(key, meta.size, multipart_etag, meta.mtime_ns, meta.metadata)
        self.objects[key] = data, made
        return made


@pytest.fixture
async def source(clock: Clock, tmp_path: Path) -> BucketStore:
    """A lake with everything that names an ETag."""
    store = BucketStore()
    async with lake(store, tmp_path / "packing", clock=clock, pack="always") as node:
        await node.mkdir("data")
        for name in ("one", "two", "removed"):
            await node.write(f"data/{name}", noise(hash_of(name), 5000))
        await node.set_xattr("data/one", "user.color", b"blue")
        await node.symlink("link", "data/one")
        await node.sync()
        clock.advance(5)
        await node.rename("data/two", "renamed-packed")
        await node.sync()
    store.give("hides", b"an older object of another program")
    store.give("gone/below", noise(9, 900))
    clock.advance(5)
    async with lake(store, tmp_path / "plain", clock=clock, pack="never", delete_after_s=1e6) as node:
        await node.write("large", LARGE)
        await node.write("before", LARGE[::-1])
        await node.rename("before", "moved")
        await node.write("before", LARGE[:200_000])  # below .lakefs/objects/
        await node.write("plain-small", b"small")
        await node.write("plain-attributed", b"attributed")
        await node.setattr("plain-attributed", mode=0o600, mtime_ns=1_234_567_890_123_456_789)
        await node.set_xattr("plain-attributed", "user.x", b"y")
        await node.set_xattr("large", "user.z", b"zz")
        await node.write("removed-large", LARGE[5:])
        await node.fs.sync_names()
        clock.advance(5)
        await node.unlink("removed-large")
        await node.unlink("data/removed")
        await node.unlink("gone/below")
        await node.rmdir("gone")
        await node.fs.sync_names()
    clock.advance(5)
    async with lake(store, tmp_path / "packing", clock=clock, pack="always", delete_after_s=1e6) as node:
        await node.write("hides", b"packed over it")
        await node.fs.sync_names()
    store.give("again", b"a removed name")
    clock.advance(100)
    async with lake(store, tmp_path / "third", clock=clock, pack="never") as node:
        await node.unlink("again")
        await node.sync()
    clock.advance(60)
    store.give("again", b"that another program has put again")
    store.give("of-others", b"never committed", {"mode": str(0o100604), "mtime": "5.000000000"})
    clock.advance(3600)
    return store


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "big")


def copied(store: BucketStore, clock: Clock, *, encrypted: bool = False) -> BucketStore:
    """Each object got and put in one piece, as a tool does; dated now."""
    clock.advance(3600)
    target = BucketStore(encrypted=encrypted)
    target.clock = clock
    for key, (data, meta) in sorted(store.objects.items()):
        target.give(key, data, meta.metadata)
    return target


async def rebind(store: MemoryStore, clock: Clock, **options: Any) -> tuple[Rebound, list[str]]:
    notes: list[str] = []

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    given = {"quick": False, "dry_run": False, **options}
    async with headless(store, clock) as view:
        done = await Rebinder(view, report=silent, note=notes.append, sleep=sleep, **given).run()
    return done, notes


async def shown(store: MemoryStore, clock: Clock, directory: Path) -> dict[str, object]:
    """What a fresh mount shows: bytes and attributes by name."""
    async with lake(store, directory, clock=clock, read_only=True) as node:
        tree = await node.tree()
        return {path: (printed(what), await attributes(node, path)) for path, what in tree.items()}


def printed(what: object) -> object:
    return f"{len(what)} bytes, {hashlib.md5(what).hexdigest()[:8]}" if isinstance(what, bytes) else what


def differences(before: dict[str, object], after: dict[str, object]) -> dict[str, tuple[object, object]]:
    paths = before.keys() | after.keys()
    return {path: (before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)}


async def attributes(node: Lake, path: str) -> tuple[object, ...]:
    entry = await node.getattr(path)
    is_told = entry.stamp or entry.flags & Flag.ATTRIBUTED
    mtime_ns = entry.mtime_ns if is_told and not entry.is_dir else 0
    return entry.mode, entry.uid, entry.gid, mtime_ns, sorted((await node.xattrs(path)).items())


@asynccontextmanager
async def snapshot_of(store: MemoryStore, clock: Clock, name: str, directory: Path) -> AsyncIterator[Tree]:
    """The rows of a named snapshot."""
    node = node_of(clock, "snapshot")
    async with headless(store, clock) as view:
        manifest = await snapshots.fetch_manifest(view.client, name)
        database = Database(directory / "meta", name, node.clock, node.disk, node.engines)
        await snapshots.take_in(view.client, node.threads, name, manifest, database, directory / "files")
    yield Tree(database)
    database.close()


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("encrypted", [False, True])
async def test_rebind_of_a_copied_lake_shows_the_tree_of_the_source(
    source: BucketStore, clock: Clock, tmp_path: Path, encrypted: bool, with_index: bool
) -> None:
    if with_index:
        async with headless(source, clock) as view:
            await fold(view, report=silent)
        for _ in range(2):  # the second run deletes what the first found
            clock.advance(3 * 3600)
            await collect(source, clock)
        clock.advance(60)
    before = await shown(source, clock, tmp_path / "source")
    assert {"large", "moved", "before", "renamed-packed", "hides", "again", "of-others"} <= before.keys()
    assert not {"removed-large", "data/removed", "gone", "gone/below"} & before.keys()
    copy = copied(source, clock, encrypted=encrypted)
    async with lake(copy, tmp_path / "early", clock=clock, read_only=True) as node:
        with pytest.raises(FileError) as failed:
            await node.read("moved")
        assert failed.value.errno == errno.ESTALE
    done, notes = await rebind(copy, clock)
    assert done.left == 0, notes
    assert bool(done.index) == with_index
    after = await shown(copy, clock, tmp_path / "copy")
    if encrypted and not with_index:  # nothing tells what was put again from what had not been deleted yet
        assert "hidden: again: commits removed or replaced this name" in notes
        before.pop("again")
    assert differences(before, after) == {}
    again, notes = await rebind(copy, clock)
    assert (again.objects, again.hidden, again.left, notes) == (0, 0, 0, [])


async def test_rebind_dry_run_changes_nothing_and_counts_the_same(source: BucketStore, clock: Clock) -> None:
    copy = copied(source, clock)
    objects = dict(copy.objects)
    counted, _ = await rebind(copy, clock, dry_run=True)
    assert copy.objects == objects
    done, _ = await rebind(copy, clock)
    assert (done.objects, done.files, done.hidden) == (counted.objects, counted.files, counted.hidden)
    assert done.files > 0
    assert copy.objects != objects


async def test_rebind_of_a_lake_that_was_not_copied_changes_nothing(source: BucketStore, clock: Clock) -> None:
    objects = dict(source.objects)
    done, notes = await rebind(source, clock)
    assert (done.objects, done.files, done.left, notes) == (0, 0, 0, [])
    assert source.objects.keys() == objects.keys()


@pytest.mark.parametrize("puts", [1, 2, 3])
async def test_rebind_that_was_interrupted_continues(
    source: BucketStore, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, puts: int
) -> None:
    monkeypatch.setattr("lakefs_fuse.admin.rebind.OPERATIONS_MAX", 1)
    monkeypatch.setattr("lakefs_fuse.admin.rebind.OBJECTS_MAX", 1)
    before = await shown(source, clock, tmp_path / "source")
    copy = copied(source, clock)
    left = [puts]

    def is_late(request: Any) -> bool:
        if request.what == "put" and request.key.startswith(COMMITS):
            left[0] -= 1
        return left[0] < 0

    copy.hook = Failures(is_late, StoreError("the machine was switched off"), count=1000)
    with pytest.raises(StoreError):
        await rebind(copy, clock)
    copy.hook = lambda _request, _when: None
    await rebind(copy, clock)
    assert differences(before, await shown(copy, clock, tmp_path / "copy")) == {}


async def test_rebind_leaves_an_object_with_other_bytes(source: BucketStore, clock: Clock, tmp_path: Path) -> None:
    async with lake(source, tmp_path / "one", clock=clock, pack="never") as node:
        await node.write("old-name", b"0123456789")
        await node.rename("old-name", "new-name")
    copy = copied(source, clock)
    copy.give("old-name", b"9876543210")
    done, notes = await rebind(copy, clock)
    assert done.left == 1
    assert any(note.startswith("left as it is: old-name: its MD5 is not the ETag") for note in notes)
    pack = next(key for key in copy.objects if key.startswith(COMMITS) and len(copy.data(key)) > 5000)
    async with headless(copy, clock) as view:
        await fold(view, report=silent)
    damaged = copied(copy, clock, encrypted=True)
    data = bytearray(damaged.data(pack))
    data[1000] ^= 1
    damaged.give(pack, bytes(data))
    done, notes = await rebind(damaged, clock, quick=False)
    assert any(note.startswith(f"left as it is: {pack}: files in it do not have their CRC-32") for note in notes)


async def test_rebind_rewrites_named_snapshots(source: BucketStore, clock: Clock, tmp_path: Path) -> None:
    async with headless(source, clock) as view:
        await fold(view, report=silent)
        await fold(view, name="v1", report=silent)
    clock.advance(60)
    async with lake(source, tmp_path / "third", clock=clock, pack="never") as node:
        await node.unlink("before")  # what it has below .lakefs/objects/ stays for the snapshot
        await node.sync()
    copy = copied(source, clock, encrypted=True)
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    done, _ = await rebind(copy, clock, quick=True)
    assert done.snapshots == 1
    async with snapshot_of(copy, clock, "v1", tmp_path / "after") as tree:
        etags = {key: meta.etag for key, (_, meta) in copy.objects.items()}
        rows = [row for row in tree.objects.rows() if row.entries > 0]
        assert {row.key.rpartition("/")[0] + "/" for row in rows} >= {COMMITS, OBJECTS}
        assert all(row.etag == etags[row.key] for row in rows)
        for path in ("large", "plain-small", "plain-attributed"):
            entry = tree.resolve([path.encode()])
            assert entry is not None
            assert entry.etag == etags[path]
    files = sorted(key for key in copy.objects if key.startswith(".lakefs/snapshots/v1/"))
    assert len(files) == 3, "the files of before are gone"
    again, _ = await rebind(copy, clock)
    assert again.snapshots == 0


async def test_rebind_repeats_what_names_a_pack_by_its_old_etag(
    source: BucketStore, clock: Clock, tmp_path: Path
) -> None:
    for _ in range(2):  # from pack to pack, and on to another
        clock.advance(60)
        async with headless(source, clock) as view:
            relocator = Relocator(view, report=lambda _: None)
            for path in ("data/one", "renamed-packed"):
                entry = view.find(path)
                assert entry is not None
                await relocator.add(path, entry)
            await relocator.finish()
    async with lake(source, tmp_path / "third", clock=clock) as node:
        await node.setattr("data/one", mode=0o640)
        await node.set_xattr("renamed-packed", "user.late", b"1")
        await node.sync()
    before = await shown(source, clock, tmp_path / "source")
    copy = copied(source, clock, encrypted=True)
    await rebind(copy, clock)
    before.pop("again")
    assert differences(before, await shown(copy, clock, tmp_path / "copy")) == {}
    async with headless(copy, clock) as view:
        entry = view.find("data/one")
        assert entry is not None
        row = view.tree.objects.get(entry.place)
        assert row is not None
        assert row.key == max(key for key in copy.objects if key.startswith(COMMITS) and len(copy.data(key)) > 9000)
