"""Levels of the index: what a fold writes is what changed, and what is taken in is what its writer had."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import trio
from rocksdict import SstFileWriter

from lakefs_fuse.commits.index import index, levels
from lakefs_fuse.commits.index.index import (
    FORMAT,
    FORMAT_LEVELS,
    INDEX,
    KEPT,
    Increment,
    IndexFile,
    Manifest,
    decode,
    encode,
    fetch_files,
    list_objects,
    load_newest_index,
    manifests,
    remove_old,
)
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.errors import CacheError, DamagedCommit, NotFound, StoreError
from lakefs_fuse.meta import schema
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.changed_rows import KINDS
from lakefs_fuse.meta.database import Batch, Database, options
from lakefs_fuse.meta.entry import ROOT_INODE, Flag
from lakefs_fuse.meta.sorted_tables import DumpOfChanges
from lakefs_fuse.meta.tree import Tree
from tests.commits.archives import client_of
from tests.fakes import open_database
from tests.memory_store import START_NS, Failures, MemoryStore, Request, When
from tests.tiers import sized

PACK = ".lakefs/commits/0000000000000001-0badcafe.zip"


class Folder:
    """A node that folds: a database, and what happens to it between folds. Times of all folders are of one count."""

    now = START_NS

    def __init__(self, store: MemoryStore, directory: Path) -> None:
        self.store, self._directory = store, directory
        self.database: Database = open_database(directory / "meta", "the lake")

    def reopen(self) -> None:
        """As the next run of the worker."""
        self.database.close()
        gc.collect()  # iterators in the frames of an error keep RocksDB open
        self.database = open_database(self._directory / "meta", "the lake")

    async def load(self) -> Manifest | None:
        """As at the start of a run."""
        self.reopen()
        return await load_newest_index(
            self.database, client_of(self.store), WorkerThreads(), self._directory / "in", folds=True
        )

    async def fold(self, *, horizon: int = 0) -> Manifest:
        """As `admin.snapshot.fold`."""
        client, directory = client_of(self.store), tables.empty_directory(self._directory / "out")
        found = await list_objects(client)
        before = next(iter(await manifests(client, count_max=1)), None)
        writer = levels.LevelWriter(self.database, directory, before, found, 0, 32 << 10)
        Folder.now += 10
        manifest = await writer.write(
            client, WorkerThreads(), time=Folder.now, horizon=horizon, wrote=lambda _: None
        )  # fmt: skip
        await remove_old(client, Folder.now, found, [manifest] if before is None else [manifest, before])
        return manifest

    @property
    def tree(self) -> Tree:
        return Tree(self.database)

    def forget_index(self) -> None:
        """So that the next fold writes a base."""
        self.database.commit(Batch({schema.SINGLE_FOLDED: None}))

    def insert(self, names: list[bytes]) -> None:
        """Files of a pack, some of them directories, in the root."""
        tree, batch = self.tree, Batch()
        number = tree.objects.number(PACK, "etag", 1 << 40)
        for name in names:
            if name.endswith(b"/"):
                tree.insert(batch, ROOT_INODE, name[:-1], Flag.DIRECTORY)
            else:
                tree.insert(batch, ROOT_INODE, name, 0, size=10, place=number, stamp=7)
        self.database.commit(batch)

    def remove(self, names: list[bytes]) -> None:
        """The names, those in the directories among them included; each leaves a tombstone."""
        tree = self.tree
        for name in names:
            entry = tree.named(ROOT_INODE, name)
            assert entry is not None
            batch = Batch()
            tree.remove(batch, entry)
            batch.rows[b"T" + name] = START_NS.to_bytes(8, "big")
            self.database.commit(batch)

    def fill(self, name: bytes, count: int) -> None:
        """A directory with so many files."""
        tree, batch = self.tree, Batch()
        number = tree.objects.number(PACK, "etag", 1 << 40)
        made = tree.insert(batch, ROOT_INODE, name, Flag.DIRECTORY)
        for each in range(count):
            tree.insert(batch, made.inode, b"%07d" % each, 0, size=10, place=number, offset=10 * each, stamp=7)
        self.database.commit(batch)

    def touch(self, name: bytes, files: list[int]) -> None:
        """Other sizes for some files of a directory."""
        tree, batch = self.tree, Batch()
        directory = tree.named(ROOT_INODE, name + b"/")
        assert directory is not None
        for each in files:
            entry = tree.named(directory.inode, b"%07d" % each)
            assert entry is not None
            tree.update(batch, msgspec.structs.replace(entry, size=entry.size + 1))
        self.database.commit(batch)

    def rows(self) -> dict[bytes, bytes]:
        kinds = (self.database.scan(bytes([kind]), bytes([kind + 1])) for kind in KINDS)
        return {key: value for scan in kinds for key, value in scan}

    def counts(self) -> tuple[int, int]:
        found = [entry.is_dir for inode in self._directories() for entry in self.tree.children(inode)]
        return len(found), sum(found)

    def _directories(self) -> list[int]:
        return [ROOT_INODE] + [entry.inode for entry in self.tree.children(ROOT_INODE) if entry.is_dir]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


Opener = Callable[[str], Folder]


@pytest.fixture
def opener(store: MemoryStore, tmp_path: Path) -> Iterator[Opener]:
    """Folders by name; their databases are closed at the end."""
    opened: list[Folder] = []

    def make(name: str) -> Folder:
        opened.append(Folder(store, tmp_path / name))
        return opened[-1]

    yield make
    for folder in opened:
        folder.database.close()


async def check(folder: Folder, fresh: Folder, manifest: Manifest) -> None:
    """A database without names gets the same rows, marks and counts, and every kept index is there as a whole."""
    assert await fresh.load() == manifest
    assert fresh.rows() == folder.rows()
    assert fresh.counts() == folder.counts() == (manifest.names, manifest.directories)
    assert tables.marks_of(fresh.database) == tables.marks_of(folder.database)
    kept = await manifests(client_of(folder.store))
    named = {each.key_of(file) for each in kept for file in each.all_files()}
    assert named | {each.prefix + "manifest" for each in kept} == {key for key in folder.store.objects if INDEX in key}
    assert len(kept) <= KEPT


async def remove_unnamed(store: MemoryStore) -> int:
    client = client_of(store)
    return await remove_old(client, Folder.now, await list_objects(client), [])


def names_of(rng: random.Random, count: int) -> list[bytes]:
    return sorted({b"%06d%s" % (rng.randrange(10**6), b"/" if rng.random() < 0.2 else b"") for _ in range(count)})


@pytest.mark.parametrize("seed", range(sized(1, 40)))
async def test_fresh_database_gets_what_the_folder_has(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever is written, removed and made again between folds, and however the increments are merged."""
    rng = random.Random(seed)
    monkeypatch.setattr(levels, "INCREMENTS_MAX", rng.choice([2, 3, 5]))
    monkeypatch.setattr(levels, "BASE_SHARE", rng.choice([0.2, 0.6]))
    folder = opener("folder")
    there = set(names_of(rng, 400))
    folder.insert(sorted(there))
    formats: set[tuple[int, int]] = set()
    for fold in range(sized(20, 60)):
        for _ in range(rng.randrange(3)):
            gone = set(rng.sample(sorted(there), rng.randrange(min(6, len(there)))))
            folder.remove(sorted(gone))
            new = set(names_of(rng, rng.randrange(6))) - there
            folder.insert(sorted(new))
            there = (there - gone) | new
        if rng.random() < 0.1:
            folder.fill(b"dir%04d" % fold, rng.randrange(30))
            there.add(b"dir%04d/" % fold)
        if rng.random() < 0.3:
            folder.reopen()
        manifest = await folder.fold()
        formats.add((manifest.format, min(1, len(manifest.increments))))
        assert len(manifest.increments) <= levels.INCREMENTS_MAX
        if fold % 3 == 0:
            await check(folder, opener(f"fresh{fold}"), manifest)
    assert formats == {(FORMAT_LEVELS, 0), (FORMAT_LEVELS, 1)}


async def cost_of_folds(folder: Folder, names: int, folds: int) -> list[tuple[int, int]]:
    """Requests and bytes (without those of the manifest) of each fold that changes a few of so many names."""
    folder.fill(b"data", names)
    await folder.fold()
    costs: list[tuple[int, int]] = []
    for fold in range(folds):
        folder.touch(b"data", [each * 7 + fold for each in range(20)])
        folder.store.requests.clear()
        await folder.fold()
        done = [each for each in folder.store.requests if not (each.what == "delete" and each.key.endswith(".sst"))]
        costs.append(
            (len(done), sum(each.size for each in done if each.what == "put" and not each.key.endswith("manifest")))
        )
    return costs


async def test_fold_costs_what_changed(opener: Opener, store: MemoryStore) -> None:
    """The same number of requests, and of bytes, for ten times as many names."""
    small = await cost_of_folds(opener("small"), 2000, 8)
    store.objects.clear()
    large = await cost_of_folds(opener("large"), 20_000, 8)
    assert [requests for requests, _ in small] == [requests for requests, _ in large]
    assert max(requests for requests, _ in large) <= 6
    for (_, few), (_, many) in zip(small, large, strict=True):
        assert abs(few - many) < 0.2 * few


async def test_base_is_written_again_when_increments_are_a_share_of_it(opener: Opener, store: MemoryStore) -> None:
    """So all objects are little more than what a base would be, and the base is written once in many folds."""
    folder, rng, names = opener("folder"), random.Random(1), sized(8000, 20_000)
    folder.fill(b"data", names)
    bases, ratios = 0, []
    live = (await folder.fold()).bytes
    for _ in range(sized(30, 60)):
        folder.touch(b"data", rng.sample(range(names), names // 40))
        manifest = await folder.fold()
        bases += not manifest.increments
        ratios.append(sum(len(data) for key, (data, _) in store.objects.items() if INDEX in key) / live)
    assert 1 <= bases <= sized(8, 15)
    assert sum(ratios) / len(ratios) <= 1.3


async def test_index_of_another_folder_is_continued(opener: Opener, store: MemoryStore) -> None:
    """Two nodes in turn, each with the database of its last fold, fetch what the other wrote and no base."""
    one, other = opener("one"), opener("other")
    one.fill(b"data", sized(1000, 3000))
    base = await one.fold()
    assert await other.load() == base
    for turn in range(sized(4, 6)):
        folder = (one, other)[turn % 2]
        store.requests.clear()
        await folder.load()
        fetched = {each.key for each in store.requests if each.what == "get"}
        assert not fetched & {base.key_of(file) for file in base.files}
        folder.touch(b"data", [turn, turn + 10])
        folder.insert([b"new%d" % turn])
        manifest = await folder.fold()
        assert manifest.increments
        await check(folder, opener(f"fresh{turn}"), manifest)


async def test_increments_of_another_folder_are_not_merged(opener: Opener) -> None:
    """What they changed is not noted here: where they are too many, a base takes their place."""
    one, other = opener("one"), opener("other")
    one.fill(b"data", 6000)
    await one.fold()
    for each in range(levels.INCREMENTS_MAX):
        one.touch(b"data", [each])
        newest = await one.fold()
    assert len(newest.increments) == levels.INCREMENTS_MAX
    assert await other.load() == newest
    other.touch(b"data", [100])
    manifest = await other.fold()
    assert not manifest.increments
    await check(other, opener("fresh"), manifest)


async def test_folder_with_changes_takes_the_index_of_another(opener: Opener) -> None:
    """It has applied commits in its own way: with other inodes than those that are in the index now."""
    one, other = opener("one"), opener("other")
    one.fill(b"data", 300)
    await one.fold()
    await other.load()
    other.insert([b"new"])
    newest = await other.fold()
    one.insert([b"another", b"new"])
    assert await one.load() == newest
    assert one.rows() == other.rows()
    assert not one.database.changed.count(0)
    one.insert([b"more"])
    await check(one, opener("fresh"), await one.fold())


async def test_two_folders_at_once_leave_a_whole_index(opener: Opener) -> None:
    """Both fold what they have, from the same index: the second writes a base, as the newest is not that of its own."""
    one, other = opener("one"), opener("other")
    one.fill(b"data", 3000)
    await one.fold()
    await other.load()
    one.touch(b"data", [1])
    other.touch(b"data", [2])
    assert (await one.fold()).increments
    manifest = await other.fold()
    assert not manifest.increments
    await check(other, opener("fresh"), manifest)


PUTS = ("0000.sst", "0001.removed", "manifest")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", PUTS)
@pytest.mark.parametrize("merges", [pytest.param(False, marks=pytest.mark.long), True])
async def test_folder_goes_on_after_a_crash(
    opener: Opener, store: MemoryStore, what: str, when: When, merges: bool
) -> None:
    """Killed before or after any PUT of a fold, then changed further."""
    folder = opener("folder")
    folder.fill(b"data", 3000)
    folder.insert([b"gone", b"stays"])
    await folder.fold()
    for each in range(levels.INCREMENTS_MAX if merges else 1):
        folder.touch(b"data", [each])
        await folder.fold()
    folder.touch(b"data", [100])
    folder.remove([b"gone"])
    store.hook = Failures(
        lambda request: request.what == "put" and request.key.endswith(what), StoreError("killed"), when=when
    )
    with pytest.raises(BaseException, match=r"killed|sub-exception"):
        await folder.fold()
    store.hook = lambda _request, _when: None
    folder.reopen()
    is_there = (what, when) == ("manifest", "after")
    newest = await folder.load()
    assert (newest is not None) == is_there, "the index that it wrote is one that it does not know"
    folder.touch(b"data", [101])
    manifest = await folder.fold()
    assert manifest.increments
    await check(folder, opener("fresh"), manifest)


async def test_crash_while_the_index_of_another_is_taken_leaves_none_of_it(opener: Opener, store: MemoryStore) -> None:
    one, other = opener("one"), opener("other")
    one.fill(b"data", 300)
    await one.fold()
    await other.load()
    other.insert([b"new"])
    other.touch(b"data", [3])
    newest = await other.fold()
    before = one.rows()
    store.hook = Failures(lambda request: request.key.startswith(newest.prefix + "0"), StoreError("killed"))
    with pytest.raises(BaseException, match=r"killed|sub-exception"):
        await one.load()
    one.reopen()
    assert one.rows() == before
    assert await one.load() == newest
    assert one.rows() == other.rows()


async def test_index_whose_file_is_missing_or_cut_short_gets_a_new_base(opener: Opener, store: MemoryStore) -> None:
    folder = opener("folder")
    folder.fill(b"data", 3000)
    base = await folder.fold()
    folder.touch(b"data", [1])
    await folder.fold()
    for cut in (False, True):
        key = base.key_of(base.files[0])
        data = store.data(key)
        store.take(key)
        if cut:
            store.give(key, data[:-1])
        folder.touch(b"data", [2])
        base = await folder.fold()
        assert not base.increments
        fresh = opener(f"fresh{base.time}")
        assert await fresh.load() == base
        assert fresh.rows() == folder.rows()
        folder.touch(b"data", [3])
        assert (await folder.fold()).increments


async def test_names_that_are_written_meanwhile_are_not_folded(opener: Opener, tmp_path: Path) -> None:
    folder = opener("folder")
    folder.fill(b"data", 300)
    await folder.fold()
    folder.insert([b"one"])
    dump = DumpOfChanges(folder.database, tmp_path, since=Folder.now, names=0, directories=0)
    folder.insert([b"two"])
    with pytest.raises(CacheError, match="changed while"):
        dump.next_file()


async def test_index_without_the_feature_can_be_continued_with_it(opener: Opener, store: MemoryStore) -> None:
    """The lake was upgraded: an index of format 1 is the base of the first increment."""
    folder, other = opener("folder"), opener("other")
    folder.fill(b"data", 3000)
    base = await folder.fold()
    old = msgspec.structs.replace(base, format=FORMAT)
    store.give(base.prefix + "manifest", encode(old))
    assert "increments" not in msgspec.msgpack.decode(encode(old))
    assert await other.load() == old
    other.touch(b"data", [5])
    manifest = await other.fold()
    assert [file.name[17:] for file in manifest.files] == [file.name for file in base.files]
    assert len(manifest.increments) == 1
    await check(other, opener("fresh"), manifest)


# -- what others may have put there


def a_file(**changes: object) -> IndexFile:
    return msgspec.structs.replace(IndexFile("0000.sst", 10, "0" * 32, 1, b"D1", b"D2"), **changes)


OLD, NEW = f"{3:016x}/0000", f"{4:016x}/0000"
BASE = a_file(name=OLD + ".sst")
GOOD = Manifest(
    format=FORMAT_LEVELS, time=5, newest=1, horizon=0, inode=2, object=0, names=1, directories=0, files=[BASE],
    increments=[Increment(3, [a_file(name=NEW + ".sst")], []), Increment(4, [], [a_file(name="0000.removed")])],
)  # fmt: skip


def increment(*files: IndexFile, removed: tuple[IndexFile, ...] = (), since: int = 3) -> dict[str, object]:
    return {"increments": [Increment(since, [*files], [*removed])]}


HOSTILE: dict[str, dict[str, object]] = {
    "increments in format 1": {"format": FORMAT, "files": [a_file()]},
    "files elsewhere in format 1": {"format": FORMAT, "increments": []},
    "another format": {"format": 3},
    "increments in another order": {"increments": GOOD.increments[::-1]},
    "an increment of the future": increment(since=5),
    "an increment of nothing": increment(since=0),
    "a base twice": increment(a_file(name=OLD + ".sst")),
    "a path": increment(a_file(name="../../0000.sst")),
    "a path behind a time": increment(a_file(name=f"{3:016x}/../0000.sst")),
    "a time that is none": increment(a_file(name="3/0000.sst")),
    "a name that begins with a slash": increment(a_file(name="/0000.sst")),
    "a file of a newer index": increment(a_file(name=f"{5:016x}/0000.sst")),
    "keys as rows": increment(a_file(name="0000.removed")),
    "rows as keys": increment(removed=(a_file(),)),
    "keys as a base": {"files": [a_file(name=OLD + ".removed")]},
    "too many keys": increment(removed=(a_file(name="0000.removed", size=1 << 30),)),
    "rows that overlap": increment(a_file(), a_file(name="0001.sst")),
    "keys that overlap": increment(removed=(a_file(name="0000.removed"), a_file(name="0001.removed"))),
    "deletions of changes of this node": increment(removed=(a_file(name="0000.removed", first=b"C1"),)),
    "deletions of the journal": increment(removed=(a_file(name="0000.removed", last=b"J1"),)),
    "rows of a journal": increment(a_file(last=b"J1")),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifest_is_refused(what: str) -> None:
    assert decode(encode(GOOD), 5) == GOOD
    with pytest.raises(DamagedCommit):
        decode(msgspec.msgpack.encode(msgspec.structs.replace(GOOD, **HOSTILE[what])), 5)


KEYS = [b"D0000", b"D0001", b"D0002"]
HOSTILE_KEYS: dict[str, object] = {
    "of a journal": [KEYS[0], b"J1", KEYS[2]],
    "of changes": [KEYS[0], b"C1", KEYS[2]],
    "of the marks": [KEYS[0], b"Minode", KEYS[2]],
    "of the notes": [KEYS[0], b"U1", KEYS[2]],
    "empty": [KEYS[0], b"", KEYS[2]],
    "a letter alone": [b"D", *KEYS[1:]],
    "not sorted": [KEYS[0], KEYS[2], KEYS[1], KEYS[2]],
    "twice": [KEYS[0], KEYS[0], KEYS[2]],
    "too long": [KEYS[0], b"D0001" * 4000, KEYS[2]],
    "others": [KEYS[0], KEYS[1]],
    "none": [],
    "texts": [key.decode() for key in KEYS],
    "a map": dict.fromkeys(KEYS, 1),
}


@pytest.mark.parametrize("what", HOSTILE_KEYS)
def test_hostile_keys_are_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "0000.removed"
    path.write_bytes(msgspec.msgpack.encode(KEYS))
    assert tables.table_of_removed(path, KEYS[0], KEYS[2]).exists()
    keys = HOSTILE_KEYS[what]
    path.write_bytes(msgspec.msgpack.encode(keys))
    first = keys[0] if isinstance(keys, list) and what == "a letter alone" else KEYS[0]
    with pytest.raises(DamagedCommit):
        tables.table_of_removed(path, first, KEYS[2])


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x93\xc4\x01D"])
def test_what_are_no_keys_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "0000.removed"
    path.write_bytes(raw)
    with pytest.raises(DamagedCommit):
        tables.table_of_removed(path, KEYS[0], KEYS[2])


@pytest.mark.parametrize("key", [b"D2", b"J1"])
def test_rows_with_deletions_are_refused(tmp_path: Path, key: bytes) -> None:
    """A deletion does not show among the rows, and may be of an acknowledged file."""
    path = tmp_path / "0000.sst"
    writer = SstFileWriter(options())
    writer.open(str(path))
    writer[b"D1"] = b"x"
    del writer[key]
    writer[b"L1"] = b"x"
    writer.finish()
    with pytest.raises(DamagedCommit, match="deletions"):
        tables.check_file(path, b"D1", b"L1")


@pytest.mark.parametrize("which", ["0000.sst", "0001.removed", "manifest", "base"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
async def test_damaged_increment_leaves_the_whole_index_out(
    opener: Opener, store: MemoryStore, which: str, damage: str
) -> None:
    """The index before it is taken, unless it has the damaged file, too."""
    folder, fresh = opener("folder"), opener("fresh")
    folder.fill(b"data", 3000)
    folder.insert([b"gone"])
    base = await folder.fold()
    rows = folder.rows()
    folder.touch(b"data", [1])
    folder.remove([b"gone"])
    manifest = await folder.fold()
    key = base.key_of(base.files[0]) if which == "base" else manifest.prefix + which
    if damage == "missing":
        store.take(key)
    else:
        data = store.data(key)
        store.give(key, data[:40] + bytes([data[40] ^ 1]) + data[41:])
    assert await fresh.load() == (None if which == "base" else base)
    assert fresh.rows() == ({} if which == "base" else rows)


async def test_files_that_a_kept_manifest_names_stay(opener: Opener, store: MemoryStore) -> None:
    """Also where they lie under the time of an index that is removed; and all do while a manifest cannot be read."""
    folder = opener("folder")
    folder.fill(b"data", 3000)
    base = await folder.fold()
    for each in range(3):
        folder.touch(b"data", [each])
        await folder.fold()
    assert base.prefix + "manifest" not in store.objects
    kept = await manifests(client_of(store))
    assert all(each.key_of(file) in store.objects for each in kept for file in each.all_files())
    before = {*store.objects}
    whole = store.data(kept[0].prefix + "manifest")
    store.give(kept[0].prefix + "manifest", whole[:-3])
    assert await remove_unnamed(store) == 0
    assert {*store.objects} == before
    store.give(kept[0].prefix + "manifest", whole)
    store.give(f"{INDEX}{1:016x}/0000.sst", b"of a writer that died")
    assert await remove_unnamed(store) == 1
    assert {*store.objects} == before
    folder.forget_index()
    assert not (await folder.fold()).increments
    before = {*store.objects}
    store.give(kept[0].prefix + "manifest", whole[:-3])
    assert await remove_unnamed(store) == 0, "it alone names the base before"
    assert {*store.objects} == before


async def test_index_that_is_removed_while_it_is_read_is_followed_by_a_newer_one(
    opener: Opener, store: MemoryStore, tmp_path: Path
) -> None:
    folder, fresh = opener("folder"), opener("fresh")
    folder.fill(b"data", 1000)
    first = await folder.fold()
    for _ in range(2):
        folder.database.changed.load()
        folder.forget_index()
        folder.insert([b"%d" % Folder.now])
        await folder.fold()
    with pytest.raises(BaseException, match=r"no object|sub-exception") as raised:
        await fetch_files(client_of(store), WorkerThreads(), first, tables.empty_directory(tmp_path / "in"))
    assert isinstance(raised.value, NotFound) or raised.group_contains(NotFound)
    assert await fresh.load() is not None
    assert fresh.rows() == folder.rows()


async def test_index_that_is_replaced_with_every_try_to_read_it_is_taken_in_the_end(
    opener: Opener, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fold replaces the last increment. It is fetched first, so nothing of the base is fetched in vain."""
    monkeypatch.setattr(levels, "INCREMENTS_MAX", 1)
    monkeypatch.setattr(index, "FILES_AT_ONCE", 1)
    folder, fresh = opener("folder"), opener("fresh")
    folder.fill(b"data", 5000)
    first = await folder.fold()
    base = {first.key_of(file) for file in first.files}
    token, left = trio.lowlevel.current_trio_token(), 4

    async def fold_twice() -> None:
        for _ in range(2):
            folder.touch(b"data", [left])
            await folder.fold()

    def replace(request: Request, when: When) -> None:
        nonlocal left
        is_increment = request.what == "get" and request.key.endswith(".sst") and request.key not in base
        if when == "before" and is_increment and left:
            left -= 1
            trio.from_thread.run(fold_twice, trio_token=token)

    await fold_twice()
    store.requests.clear()
    store.hook = replace
    assert await fresh.load() is not None
    assert left == 0
    assert fresh.rows() == folder.rows()
    assert all(store.count("get", key) == 1 for key in base)
    assert tables.missing_before(fresh.database) == 0
