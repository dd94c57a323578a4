"""Writes that fail: what memory holds about rows stays as the rows are, whether or not the write is there later."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.storage_engine import Step
from lakefs_fuse.errors import CacheError, CacheFull
from lakefs_fuse.meta import database as module
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta import tree as tree_module
from lakefs_fuse.meta.changed_rows import Folded
from lakefs_fuse.meta.database import Batch, Database, RocksEngine, RocksEngines
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.meta.object_table import PACKS
from lakefs_fuse.meta.tree import Listing, Tree
from tests.fakes import open_database
from tests.meta.full_disk import FullDisk


class Refusals(RocksEngines):
    """Opens databases of which the next write fails once ``refuse`` says so; ``is_made``: it was made all the same."""

    def __init__(self) -> None:
        super().__init__()
        self._is_next, self._is_made = False, False

    def refuse(self, *, is_made: bool) -> None:
        self._is_next, self._is_made = True, is_made

    def check(self, engine: RocksEngine, steps: Sequence[Step], *, sync: bool) -> None:
        refuses, self._is_next = self._is_next, False
        if not refuses or self._is_made:
            RocksEngine.write(engine, steps, sync=sync)
        if refuses:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, directory: Path) -> RocksEngine:
        refusals = self

        class Refusing(RocksEngine):
            def write(self, steps: Sequence[Step], *, sync: bool) -> None:
                refusals.check(self, steps, sync=sync)

        return Refusing(directory, module.MEMORY_BYTES)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    monkeypatch.setattr(module, "REOPEN_PAUSE_S", 0.0)
    return Refusals()


@pytest.fixture
def database(tmp_path: Path, refusals: Refusals) -> Iterator[Database]:
    opened = open_database(tmp_path / "meta", "lake", replace(Node.of_this_machine(), engines=refusals))
    yield opened
    opened.close()


def file_elsewhere(tree: Tree, name: bytes, key: str) -> Entry:
    batch = Batch()
    entry = tree.insert(batch, ROOT_INODE, name, 0, place=tree.objects.number(key, "etag", 10), size=10)
    tree.database.commit(batch)
    return entry


def remove(tree: Tree, entry: Entry) -> None:
    batch = Batch()
    tree.remove(batch, entry)
    tree.database.commit(batch)


def sums(tree: Tree) -> tuple[int, ...]:
    objects = tree.objects
    return objects.packs, objects.bytes_packed, objects.bytes_live, objects.plain, *tree.hidden


def sums_of_rows(tree: Tree) -> tuple[int, ...]:
    rows, listings = list(tree.objects.rows()), list(tree.listings())
    packs = [row for row in rows if row.is_pack]
    return (
        len(packs),
        sum(row.size for row in packs),
        sum(row.bytes_live for row in packs),
        len(rows) - len(packs),
        sum(each.hidden_component for each in listings),
        sum(each.hidden_nul for each in listings),
        sum(each.hidden_long for each in listings),
        sum(each.hidden_conflict for each in listings),
    )


def test_removal_that_fails_leaves_the_object_in_use(database: Database, refusals: Refusals) -> None:
    tree = Tree(database)
    model = file_elsewhere(tree, b"model", "tmp")
    refusals.refuse(is_made=False)
    with pytest.raises(CacheFull):
        remove(tree, model)
    assert tree.child(ROOT_INODE, b"model") == model
    assert tree.objects.used("tmp") is not None
    remove(tree, model)
    assert tree.objects.used("tmp") is None
    file_elsewhere(tree, b"another", "other")
    assert tree.objects.used("other") is not None


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("key", ["tmp", f"{PACKS}pack.zip"])
def test_sums_are_those_of_the_rows_after_any_write_that_fails(
    database: Database, refusals: Refusals, key: str, is_made: bool
) -> None:
    tree = Tree(database)
    kept = file_elsewhere(tree, b"kept", key)

    def list_root() -> None:
        batch = Batch()
        tree.set_listing(batch, ROOT_INODE, Listing(1, 1, hidden_nul=3))
        tree.set_listing(batch, ROOT_INODE, Listing(2, 1, hidden_nul=2))
        database.commit(batch)

    def forget_root() -> None:
        batch = Batch()
        tree.forget_listing(batch, ROOT_INODE)
        database.commit(batch)

    for change in (list_root, forget_root, list_root, lambda: remove(tree, kept)):
        refusals.refuse(is_made=is_made)
        with pytest.raises(CacheFull):
            change()
        database.commit(Batch({b"Xopened": b"again"}))
        assert sums(tree) == sums_of_rows(tree)
        if not is_made:
            change()
            assert sums(tree) == sums_of_rows(tree)


@pytest.mark.parametrize("is_made", [False, True])
def test_number_of_an_object_stays_when_its_write_fails(database: Database, refusals: Refusals, is_made: bool) -> None:
    tree = Tree(database)
    refusals.refuse(is_made=is_made)
    number = tree.objects.number(f"{PACKS}pack.zip", "etag", 5)
    assert sums(tree) == sums_of_rows(tree)
    database.commit(Batch({b"Xopened": b"again"}))
    assert tree.objects.number(f"{PACKS}pack.zip", "etag", 5) == number
    assert sums(tree) == sums_of_rows(tree) == (1, 5, 0, 0, 0, 0, 0, 0)


def test_index_that_could_not_be_dropped_stays_the_one_that_changes_are_counted_from(
    database: Database, refusals: Refusals
) -> None:
    tables.mark_folded(database, 7, since=7)
    refusals.refuse(is_made=False)
    with pytest.raises(CacheFull):
        tables.drop_names(database)
    assert tables.folded_of(database) == Folded(7, 7)
    file_elsewhere(Tree(database), b"new", "key")
    assert database.changed.has_any(7)
    tables.drop_names(database)
    assert tables.folded_of(database) == Folded()


class OpenFailures(FullDisk):
    """Databases that cannot be opened while ``fails_open``."""

    fails_open: Exception | None = None

    def open(self, directory: Path) -> RocksEngine:
        if self.fails_open is not None:
            raise self.fails_open
        return super().open(directory)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> OpenFailures:
    monkeypatch.setattr(module, "REOPEN_PAUSE_S", 0.0)
    return OpenFailures()


def meet_full_disk(database: Database, disk: FullDisk) -> None:
    disk.is_full = True
    with pytest.raises(CacheFull):
        database.commit(Batch({b"Xrefused": b""}))
    disk.is_full = False


@pytest.fixture
def full(tmp_path: Path, disk: OpenFailures) -> Iterator[Database]:
    """A database with names whose last write met a full disk, which has room again."""
    opened = open_database(tmp_path / "meta", "lake", replace(Node.of_this_machine(), engines=disk))
    opened.commit(Batch({b"Xa": b"", b"Xb": b"", b"Xc": b""}))
    meet_full_disk(opened, disk)
    yield opened
    opened.close()


def test_scan_goes_on_when_the_database_is_opened_again(full: Database) -> None:
    rows = full.scan(b"X", b"Y")
    assert next(rows) == (b"Xa", b"")
    full.commit(Batch({b"Xb": None}))
    assert [key for key, _ in rows] == [b"Xc"]


def test_scan_of_volatile_rows_goes_on_when_the_database_is_opened_again(full: Database, disk: OpenFailures) -> None:
    disk.is_full = True
    full.commit_volatile(Batch({b"Xaa": b"", b"Xd": b""}))
    disk.is_full = False
    rows = full.scan(b"X", b"Y")
    assert [next(rows)[0], next(rows)[0]] == [b"Xa", b"Xaa"]
    full.commit(Batch({b"Xe": b""}))
    assert [key for key, _ in rows] == [b"Xb", b"Xc", b"Xd", b"Xe"]


def test_search_for_missing_names_goes_on_when_the_database_is_opened_again(
    full: Database, disk: OpenFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_module, "ROWS_AT_ONCE", 1)
    tree, batch = Tree(full), Batch()
    cookies = [tree.insert(batch, ROOT_INODE, name, 0).cookie for name in (b"a", b"b", b"c")]
    full.commit(batch)
    found = []
    for some in tree.needing_object(ROOT_INODE, full.inode_next):
        found += some
        meet_full_disk(full, disk)
        full.commit(Batch({b"Xd": b""}))
    assert found == cookies


@pytest.mark.parametrize(
    "failure",
    [
        Exception("IO error: While open a file for random read: /meta/000012.sst: Too many open files"),
        Exception("IO error: No space left on device: While appending to file: /meta/MANIFEST-000012"),
    ],
    ids=["no descriptor", "no space"],
)
def test_database_that_could_not_be_opened_again_is_opened_by_the_next_read(
    full: Database, disk: OpenFailures, failure: Exception
) -> None:
    disk.fails_open = failure
    scan = full.scan(b"X", b"Y")
    assert next(scan)[0] == b"Xa"
    attempts = [
        lambda: full.commit(Batch({b"Xd": b""})),
        lambda: full.get(b"Xa"),
        lambda: full.get_many([b"Xa"]),
        lambda: full.linked([(b"Xa", b"")], 0),
        lambda: next(scan),
        lambda: next(full.frozen(b"X")),
        full.sync,
    ]
    for attempt in attempts:
        with pytest.raises(CacheError):
            attempt()
    if not full.is_full:
        with pytest.raises(CacheError):
            full.commit_volatile(Batch({b"Xd": b""}))
    disk.fails_open = None
    assert full.get(b"Xa") == b""
    assert not full.is_failing
    full.commit(Batch({b"Xe": b""}))
    full.sync()
    assert [key for key, _ in full.scan(b"X", b"Y")] == [b"Xa", b"Xb", b"Xc", b"Xe"]


def test_volatile_rows_are_kept_while_the_database_cannot_be_opened_again(full: Database, disk: OpenFailures) -> None:
    disk.is_full = True
    full.commit_volatile(Batch({b"Xd": b"listed"}))
    disk.is_full, disk.fails_open = False, Exception("IO error: Too many open files")
    with pytest.raises(CacheError):
        full.commit(Batch({b"Xe": b""}))
    assert full.get(b"Xd") == b"listed"
    with pytest.raises(CacheError):
        full.get(b"Xa")
    disk.fails_open = None
    assert full.linked([(b"Xa", b"Xd"), (b"Xb", b"Xb")], 0) == (b"Xd", b"listed")
    assert [key for key, _ in full.scan(b"X", b"Y")] == [b"Xa", b"Xb", b"Xc", b"Xd"]
