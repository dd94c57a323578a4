"""The index: what is written is what is taken in, and what does not fit is refused as a whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from rocksdict import Rdict, SstFileWriter

from lakefs_fuse.commits.hybrid_clock import WINDOW_NS
from lakefs_fuse.commits.index import index
from lakefs_fuse.commits.index.index import (
    INDEX,
    IndexFile,
    Manifest,
    decode,
    list_objects,
    load_newest_index,
    manifests,
    remove_old,
    write_index,
)
from lakefs_fuse.commits.record import OWN, Put
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.errors import DamagedCommit, StoreError, Unavailable
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.changed_rows import KINDS
from lakefs_fuse.meta.database import Batch, Database, options
from lakefs_fuse.meta.entry import ROOT_INODE, Flag
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.sorted_tables import Dump
from lakefs_fuse.meta.tree import Listing, Tree
from tests.commits.archives import client_of
from tests.commits.nodes import at, node, put
from tests.fakes import open_database
from tests.memory_store import START_NS, Failures, MemoryStore, Request
from tests.vfs.lakes import Clock

NS = 1_000_000_000
PACK = ".lakefs/commits/0000000000000001-0badcafe.zip"
NAMES = 3000
Opener = Callable[[str], Database]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Databases of one lake, by name; closed at the end."""
    opened: list[Database] = []

    def make(name: str) -> Database:
        database = open_database(tmp_path / name / "meta", "the lake")
        opened.append(database)
        return database

    yield make
    for database in opened:
        database.close()


def note_newest(database: Database, time: int) -> None:
    batch = Batch()
    batch.rows[b"Mnewest"] = time.to_bytes(8, "big")
    database.commit(batch)


def fill(database: Database, names: int = NAMES, newest: int = START_NS) -> Tree:
    """A directory of files in a pack, a link, a tombstone, and keys that cannot be shown."""
    tree = Tree(database)
    number = tree.objects.number(PACK, "etag", 1 << 30)
    batch = Batch()
    directory = tree.insert(batch, ROOT_INODE, b"data", Flag.DIRECTORY)
    link = tree.insert(batch, ROOT_INODE, b"link", Flag.SYMLINK | Flag.XATTRS, stamp=5)
    tree.set_target(batch, link.inode, b"data/000001")
    tree.set_xattrs(batch, link.inode, {"user.note": b"x"})
    tree.set_listing(batch, ROOT_INODE, Listing(START_NS, 2, hidden_nul=3))
    for each in range(names):
        tree.insert(batch, directory.inode, b"%06d" % each, 0, size=10, place=number, offset=10 * each, stamp=7)
    database.commit(batch)
    batch = Batch()
    batch.rows[b"T" + b"gone"] = (9).to_bytes(8, "big")
    batch.rows[b"A" + (START_NS - 1000).to_bytes(8, "big") + b"0badcafe"] = b""
    batch.rows[b"A" + START_NS.to_bytes(8, "big") + b"0badcafe"] = b""
    batch.rows[b"Gplain"] = b"of this node alone"
    batch.rows[b"R" + START_NS.to_bytes(8, "big") + b"0badcafe"] = b""
    database.commit(batch)
    note_newest(database, newest)
    return tree


async def write(
    store: MemoryStore,
    database: Database,
    time: int,
    directory: Path,
    *,
    horizon: int = 0,
    file_bytes_max: int = 32 << 10,
) -> Manifest:
    dump = Dump(
        database, tables.empty_directory(directory), applied_since=START_NS - 500, file_bytes_max=file_bytes_max
    )
    try:
        return await write_index(
            client_of(store), WorkerThreads(), dump, time=time, horizon=horizon, wrote=lambda _: None
        )
    finally:
        dump.close()


def rows_of(database: Database) -> dict[bytes, bytes]:
    """What a dump must bring over."""
    kinds = (database.scan(bytes([kind]), bytes([kind + 1])) for kind in KINDS)
    rows = {key: value for scan in kinds for key, value in scan}
    return {
        key: value for key, value in rows.items() if key[:1] != b"A" or key[1:9] >= (START_NS - 500).to_bytes(8, "big")
    }


def corrupt(store: MemoryStore, key: str, data: bytes) -> None:
    """Bytes change in the store."""
    store.give(key, data)


async def test_a_fresh_database_gets_all_rows_and_marks(opener: Opener, tmp_path: Path) -> None:
    store = MemoryStore()
    source, target = opener("source"), opener("target")
    tree = fill(source)
    manifest = await write(store, source, START_NS + 5, tmp_path / "out")
    assert len(manifest.files) == 3
    assert (manifest.names, manifest.directories) == (NAMES + 2, 1)
    before = len(store.requests)
    assert await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in") == manifest
    assert len(store.requests) - before == 3 + len(manifest.files)
    assert rows_of(target) == rows_of(source)
    assert target.get(b"Gplain") is None
    assert tables.marks_of(target).newest == START_NS
    taken = Tree(target)
    assert taken.hidden == tree.hidden == [0, 3, 0, 0]
    assert (taken.objects.packs, taken.objects.bytes_live) == (1, 10 * NAMES)
    assert taken.objects.bytes_live == tree.objects.bytes_live
    assert not (tmp_path / "in").exists()
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("with_histories", [False, True])
async def test_commit_that_an_index_lacks_is_put_in_its_place_behind_it(tmp_path: Path, with_histories: bool) -> None:
    """As where no index was. By an index without histories, as earlier versions wrote them, it is the older one."""
    store = MemoryStore()
    told, packed = Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides="e1"), put("f", 7, hides="e1")
    with node(tmp_path / "first") as first:
        first.commit(10, told)
        first.commit(30, told)
        dump = Dump(
            first.database, tables.empty_directory(tmp_path / "out"), applied_since=0, with_histories=with_histories
        )
        try:
            manifest = await write_index(
                client_of(store), WorkerThreads(), dump, time=at(30), horizon=0, wrote=lambda _: None
            )
        finally:
            dump.close()
    assert (manifest.histories is not None) is with_histories
    database = open_database(tmp_path / "fresh", "file:///lake")
    assert await load_newest_index(database, client_of(store), WorkerThreads(), tmp_path / "in") == manifest
    database.close()
    with node(tmp_path / "fresh") as fresh:
        fresh.commit(20, packed, writer="0000000b")
        fresh.list()
        assert (fresh.find("f") is not None) is with_histories


async def test_rows_that_came_with_an_index_can_be_changed(opener: Opener, tmp_path: Path) -> None:
    """Single rows, whole directories, and after another opening; numbers are not given out again."""
    store = MemoryStore()
    source, target = opener("source"), opener("target")
    fill(source)
    used = {entry.inode for entry in Tree(source).children(ROOT_INODE)}
    await write(store, source, START_NS, tmp_path / "out")
    await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in")
    tree = Tree(target)
    data, link = tree.named(ROOT_INODE, b"data/"), tree.named(ROOT_INODE, b"link")
    assert data is not None and link is not None
    inodes = {entry.inode for entry in tree.children(data.inode)} | used
    batch = Batch()
    tree.remove(batch, data)
    tree.update(batch, msgspec.structs.replace(link, size=77))
    made = tree.insert(batch, ROOT_INODE, b"new", 0)
    target.commit(batch)
    assert made.inode > max(inodes)
    assert tree.objects.number("another", "etag", 1) == 2
    assert tree.objects.bytes_live == 0
    target.close()
    again = Tree(opener("target"))
    assert [(entry.name, entry.size) for entry in again.children(ROOT_INODE)] == [(b"link", 77), (b"new", 0)]
    assert list(again.children(data.inode)) == []
    assert again.objects.bytes_live == 0


async def test_a_database_that_knows_enough_stays_as_it_is(opener: Opener, tmp_path: Path) -> None:
    """Two requests, and nothing changes; names that the horizon has passed are replaced, and numbers go on."""
    store = MemoryStore()
    source, node = opener("source"), opener("node")
    fill(source)
    fill(node, names=3, newest=START_NS - 10 * NS)
    CommitRows(node).record_complete(START_NS - 10 * NS)
    kept = rows_of(node)
    first = await write(store, source, START_NS + 1, tmp_path / "out", horizon=START_NS - 10 * NS + 1)
    before = len(store.requests)
    assert await load_newest_index(node, client_of(store), WorkerThreads(), tmp_path / "in") is None
    assert len(store.requests) - before == 3
    assert rows_of(node) == kept
    second = await write(store, source, START_NS + 2, tmp_path / "out", horizon=START_NS - 10 * NS + 2)
    marks = tables.marks_of(node)
    assert await load_newest_index(node, client_of(store), WorkerThreads(), tmp_path / "in") == second
    assert (first.horizon, second.horizon) == (START_NS - 10 * NS + 1, START_NS - 10 * NS + 2)
    assert rows_of(node) == rows_of(source)
    assert tables.marks_of(node).inode == max(marks.inode, tables.marks_of(source).inode)
    assert node.get(b"Gplain") == b"of this node alone"
    assert node.get(b"R" + START_NS.to_bytes(8, "big") + b"0badcafe") is None
    assert tables.reapply_wanted(node)
    assert tables.missing_before(node) == 0


@pytest.mark.parametrize("lacks", [False, True])
async def test_names_are_replaced_where_a_late_commit_before_their_newest_was_collected(
    opener: Opener, tmp_path: Path, lacks: bool
) -> None:
    """It became visible after the last poll."""
    store = MemoryStore()
    source, node = opener("source"), opener("node")
    fill(source)
    fill(node, names=3, newest=START_NS - 10 * NS)
    horizon = START_NS - 10 * NS - WINDOW_NS + 1 + lacks
    index = await write(store, source, START_NS + 1, tmp_path / "out", horizon=horizon)
    taken = await load_newest_index(node, client_of(store), WorkerThreads(), tmp_path / "in")
    assert taken == (index if lacks else None)
    assert CommitRows(node).complete() == (horizon - 1 if lacks else 0)
    assert await load_newest_index(node, client_of(store), WorkerThreads(), tmp_path / "in") is None


async def test_what_this_node_committed_itself_does_not_tell_how_much_it_knows(opener: Opener, tmp_path: Path) -> None:
    """It was cut off, and committed before it polled: what others committed before that was collected meanwhile."""
    store = MemoryStore()
    source, node = opener("source"), opener("node")
    fill(source)
    fill(node, names=3, newest=START_NS)
    CommitRows(node).record_polled(START_NS - 10 * NS)
    index = await write(store, source, START_NS + 1, tmp_path / "out", horizon=START_NS - 5 * NS)
    assert await load_newest_index(node, client_of(store), WorkerThreads(), tmp_path / "in") == index
    assert CommitRows(node).polled() == START_NS


async def test_names_of_listings_alone_are_not_replaced(opener: Opener, tmp_path: Path) -> None:
    """A database with names and without a commit is brought up to date by polling, until a horizon passes it."""
    store = MemoryStore()
    source, node = opener("source"), opener("node")
    fill(source)
    fill(node, names=3, newest=0)
    await write(store, source, START_NS + 1, tmp_path / "out")
    assert await load_newest_index(node, client_of(store), WorkerThreads(), tmp_path / "in") is None
    await write(store, source, START_NS + 2, tmp_path / "out", horizon=2)
    assert await load_newest_index(node, client_of(store), WorkerThreads(), tmp_path / "in") is not None


def flip(data: bytes) -> bytes:
    return data[:50] + bytes([data[50] ^ 1]) + data[51:]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": flip,
    "cut short": lambda data: data[:-100],
    "longer": lambda data: data + b"more",
    "empty": lambda _: b"",
    "missing": lambda _: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["manifest", "0001.sst"])
async def test_a_damaged_index_is_not_used(
    opener: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, which: str
) -> None:
    """The one before it is; where there is none the database stays as it was, and can be used."""
    store = MemoryStore()
    source, target, alone = opener("source"), opener("target"), opener("alone")
    fill(source)
    old = await write(store, source, START_NS + 1, tmp_path / "out")
    new = await write(store, source, START_NS + 2, tmp_path / "out")
    key = new.prefix + which
    damaged = DAMAGES[damage](store.data(key))
    store.take(key) if damaged is None else corrupt(store, key, damaged)
    assert await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in") == old
    if (which, damage) != ("manifest", "missing"):
        assert f"the index {new.time:016x} is not used" in caplog.text
    assert rows_of(target) == rows_of(source)
    for meta in [key for key in store.objects if key.startswith(old.prefix)]:
        store.take(meta)
    assert await load_newest_index(alone, client_of(store), WorkerThreads(), tmp_path / "in") is None
    assert rows_of(alone) == {}
    fill(alone, names=5)
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize("kind", [b"C", b"G", b"J", b"M", b"\xff", b"\0"])
async def test_a_file_with_rows_that_are_not_of_names_is_refused(
    opener: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: bytes
) -> None:
    """Whoever can write to the bucket cannot make this node believe that it has something to send or to delete."""
    store = MemoryStore()
    source, target = opener("source"), opener("target")
    fill(source)
    manifest = await write(store, source, START_NS, tmp_path / "out", file_bytes_max=1 << 30)
    rows = rows_of(source) | {kind + b"evil": b"x"}
    path = tmp_path / "evil.sst"
    writer = SstFileWriter(options())
    writer.open(str(path))
    for key in sorted(rows):
        writer[key] = rows[key]
    writer.finish()
    file = manifest.files[0]
    for first, last in ((file.first, file.last), (min(rows), max(rows))):
        bad = IndexFile(file.name, path.stat().st_size, tables.digest_of(path), len(rows), first, last)
        corrupt(store, manifest.prefix + file.name, path.read_bytes())
        corrupt(
            store, manifest.prefix + "manifest",
            msgspec.msgpack.encode(msgspec.structs.replace(manifest, files=[bad])),
        )  # fmt: skip
        assert await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in") is None
    assert caplog.text.count("is not used") == 2
    assert rows_of(target) == {}


async def test_a_file_that_is_no_table_is_refused(
    opener: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    source, target = opener("source"), opener("target")
    fill(source)
    manifest = await write(store, source, START_NS, tmp_path / "out", file_bytes_max=1 << 30)
    path = tmp_path / "noise"
    path.write_bytes(os.urandom(5000))
    bad = msgspec.structs.replace(
        manifest,
        files=[msgspec.structs.replace(manifest.files[0], size=5000, digest=tables.digest_of(path))],
    )
    corrupt(store, manifest.prefix + bad.files[0].name, path.read_bytes())
    corrupt(store, manifest.prefix + "manifest", msgspec.msgpack.encode(bad))
    assert await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in") is None
    assert "does not open" in caplog.text
    assert rows_of(target) == {}


def a_file(**changes: object) -> IndexFile:
    file = IndexFile("0000.sst", 10, "0" * 32, 1, b"D1", b"D2")
    return msgspec.structs.replace(file, **changes)


HOSTILE: dict[str, dict[str, object]] = {
    "another time": {"time": 6},
    "a time before time": {"newest": -1},
    "a time after time": {"horizon": 1 << 63},
    "no inode": {"inode": 1},
    "absurd numbers": {"names": 1 << 61},
    "an object of no number": {"object": 1 << 32},
    "another format": {"format": 3},
    "other rows": {"rows": tables.ROWS + 1},
    "a path": {"files": [a_file(name="../../0000.sst")]},
    "another name": {"files": [a_file(name="manifest")]},
    "no digest": {"files": [a_file(digest="")]},
    "no bytes": {"files": [a_file(size=0)]},
    "too many bytes": {"files": [a_file(size=index.FILE_BYTES_MAX + 1)]},
    "no entries": {"files": [a_file(entries=0)]},
    "no key": {"files": [a_file(first=b"")]},
    "keys the wrong way round": {"files": [a_file(first=b"D3")]},
    "keys that overlap": {"files": [a_file(), a_file(name="0001.sst")]},
    "twice the same": {"files": [a_file(), a_file(first=b"D3", last=b"D4")]},
    "changes of this node": {"files": [a_file(first=b"C1", last=b"C2")]},
    "deletions of this node": {"files": [a_file(last=b"G")]},
    "histories of another name": {"histories": a_file(name="0001.sst", first=b"Vd", last=b"Vf")},
    "names in place of histories": {"histories": a_file(name=tables.HISTORIES)},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(what: str) -> None:
    good = Manifest(time=5, newest=1, horizon=0, inode=2, object=0, names=1, directories=0, files=[a_file()])
    assert decode(msgspec.msgpack.encode(good), 5) == good
    with pytest.raises(DamagedCommit):
        decode(msgspec.msgpack.encode(msgspec.structs.replace(good, **HOSTILE[what])), 5)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"format": 1, "rows": tables.ROWS})])
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(DamagedCommit):
        decode(raw, 5)


async def test_loss_is_noted_until_an_index_makes_it_good(
    opener: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Commits were collected, and the index that has them is damaged."""
    store = MemoryStore()
    source, node, late = opener("source"), opener("node"), opener("late")
    fill(source)
    fill(late, names=3, newest=START_NS - NS)
    old = await write(store, source, START_NS + 1, tmp_path / "out")
    note_newest(source, START_NS + 5)
    new = await write(store, source, START_NS + 6, tmp_path / "out", horizon=START_NS + 5)
    whole = store.data(new.prefix + "0000.sst")
    corrupt(store, new.prefix + "0000.sst", flip(whole))
    kept = rows_of(late)
    assert await load_newest_index(late, client_of(store), WorkerThreads(), tmp_path / "in") is None
    assert rows_of(late) == kept, "names that lack something are better than older names that lack more"
    assert await load_newest_index(node, client_of(store), WorkerThreads(), tmp_path / "in") == old
    for database in (late, node):
        assert tables.missing_before(database) == START_NS + 5
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 2
    corrupt(store, new.prefix + "0000.sst", whole)
    for database in (late, node):
        assert await load_newest_index(database, client_of(store), WorkerThreads(), tmp_path / "in") == new
        assert tables.missing_before(database) == 0
        assert rows_of(database) == rows_of(source)


async def test_an_index_that_is_removed_while_it_is_read(opener: Opener, tmp_path: Path) -> None:
    """Then there are newer ones."""
    store = MemoryStore()
    source, target = opener("source"), opener("target")
    fill(source)
    old = await write(store, source, START_NS + 1, tmp_path / "out")
    data = {key: store.data(key) for key in store.objects}

    def replace(request: Request, when: str) -> None:
        if when == "before" and request.what == "get" and request.key == old.prefix + "0000.sst":
            for key, content in data.items():
                store.give(key.replace(f"{old.time:016x}", f"{old.time + 1:016x}"), content)
            manifest = msgspec.structs.replace(old, time=old.time + 1)
            store.give(manifest.prefix + "manifest", msgspec.msgpack.encode(manifest))
            for key in data:  # last: the other files are read at the same time
                store.take(key)

    store.hook = replace
    taken = await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in")
    assert taken is not None
    assert taken.time == old.time + 1
    assert rows_of(target) == rows_of(source)


async def test_a_store_that_does_not_answer_is_no_damage(opener: Opener, tmp_path: Path) -> None:
    store = MemoryStore()
    source, target = opener("source"), opener("target")
    fill(source)
    manifest = await write(store, source, START_NS, tmp_path / "out")
    store.hook = Failures(lambda request: request.key.endswith("0001.sst"), Unavailable("down"))
    with pytest.raises(Unavailable):
        await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in")
    assert rows_of(target) == {}
    assert await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in") == manifest


async def remove_unnamed(store: MemoryStore, now_ns: int) -> int:
    client = client_of(store)
    return await remove_old(client, now_ns, await list_objects(client), [])


async def test_an_index_that_was_not_finished_does_not_exist(opener: Opener, tmp_path: Path) -> None:
    """Whatever request fails; and it is removed when nobody can be writing it any more."""
    store = MemoryStore()
    source, target = opener("source"), opener("target")
    fill(source)
    for which in ("0000.sst", "0002.sst", "manifest"):
        store.hook = Failures(
            lambda request, which=which: request.what == "put" and request.key.endswith(which),  # type: ignore[misc]
            StoreError("no"),
        )
        with pytest.raises(StoreError):
            await write(store, source, START_NS, tmp_path / "out")
        assert await manifests(client_of(store)) == []
    assert await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in") is None
    await remove_unnamed(store, START_NS + index.UNFINISHED_NS - 1)
    assert [key for key in store.objects if key.startswith(INDEX)] != []
    await remove_unnamed(store, START_NS + index.UNFINISHED_NS)
    assert [key for key in store.objects if key.startswith(INDEX)] == []


async def test_the_two_newest_stay(opener: Opener, tmp_path: Path) -> None:
    """Manifests go first, so that no index is ever seen in part; what is nobody's index is left alone."""
    store = MemoryStore()
    source = opener("source")
    fill(source)
    written = [await write(store, source, START_NS + each, tmp_path / "out") for each in range(4)]
    store.give(INDEX + "note.txt", b"mine")
    before = len(store.requests)
    removed = await remove_unnamed(store, START_NS)
    assert removed == sum(len(manifest.files) + 1 for manifest in written[:2])
    assert [manifest.time for manifest in await manifests(client_of(store))] == [START_NS + 3, START_NS + 2]
    assert INDEX + "note.txt" in store.objects
    deletions = [request.key for request in store.requests[before:] if request.what == "delete"]
    assert [key.endswith("/manifest") for key in deletions] == [True, False, False, False] * 2


AHEAD_NS = START_NS + 3600 * NS


@pytest.mark.parametrize("what", ["index", "newest commit"])
@pytest.mark.parametrize("needed", [False, True])
async def test_index_dated_too_far_ahead_is_used_only_where_names_would_be_missing(
    opener: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, needed: bool
) -> None:
    """Its names would hide what is committed from now on. Names that the database has stay as they are."""
    store, clock = MemoryStore(), Clock()
    source, target, known = opener("source"), opener("target"), opener("known")
    fill(source)
    old = await write(store, source, START_NS + 1, tmp_path / "out")
    note_newest(source, AHEAD_NS)
    time = AHEAD_NS if what == "index" else START_NS + 2
    wrong = await write(store, source, time, tmp_path / "out", horizon=START_NS + 2 if needed else 0)
    taken = await load_newest_index(target, client_of(store), WorkerThreads(), tmp_path / "in", clock=clock)
    assert taken == (wrong if needed else old)
    assert tables.missing_before(target) == 0
    assert f"the index {wrong.time:016x} is not used" in caplog.text
    fill(known, names=3, newest=START_NS + 2)
    CommitRows(known).record_complete(START_NS + 2)
    assert await load_newest_index(known, client_of(store), WorkerThreads(), tmp_path / "in", clock=clock) is None
    clock.now_ns = AHEAD_NS
    late = opener("late")
    assert await load_newest_index(late, client_of(store), WorkerThreads(), tmp_path / "in", clock=clock) == wrong


async def test_index_dated_too_far_ahead_is_removed_once_two_others_are_there(opener: Opener, tmp_path: Path) -> None:
    store, source = MemoryStore(), opener("source")
    fill(source)
    wrong = await write(store, source, AHEAD_NS, tmp_path / "out")
    kept = [wrong.time]
    for time in (START_NS + 1, START_NS + 2, START_NS + 3):
        await write(store, source, time, tmp_path / "out")
        await remove_unnamed(store, time)
        kept = [time, *kept][:2]
        assert sorted(manifest.time for manifest in await manifests(client_of(store))) == sorted(kept)


async def test_a_dump_is_of_one_moment(opener: Opener, tmp_path: Path) -> None:
    source = opener("source")
    tree = fill(source)
    rows = rows_of(source)
    directory = tables.empty_directory(tmp_path / "out")
    dump = Dump(source, directory, applied_since=START_NS - 500, file_bytes_max=32 << 10)
    files = [dump.next_file()]
    data = tree.named(ROOT_INODE, b"data/")
    assert data is not None
    batch = Batch()
    tree.remove(batch, data)
    tree.insert(batch, ROOT_INODE, b"late", 0)
    source.commit(batch)
    while (made := dump.next_file()) is not None:
        files.append(made)
    dump.close()
    trial = Rdict(str(tmp_path / "trial"), options())
    trial.ingest_external_file([str(made.path) for made in files if made is not None])
    assert dict(trial.items()) == rows
    trial.close()
