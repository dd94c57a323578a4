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
from lakefs_fuse.errors import CacheFull
from lakefs_fuse.meta import database as module
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.changed_rows import Folded
from lakefs_fuse.meta.database import Batch, Database, RocksEngine, RocksEngines
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.meta.object_table import PACKS
from lakefs_fuse.meta.tree import Listing, Tree
from tests.fakes import open_database


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

    def number() -> None:
        tree.objects.number(f"{key}2", "etag", 5)

    def list_root() -> None:
        batch = Batch()
        tree.set_listing(batch, ROOT_INODE, Listing(1, 1, hidden_nul=3))
        tree.set_listing(batch, ROOT_INODE, Listing(2, 1, hidden_nul=2))
        database.commit(batch)

    def forget_root() -> None:
        batch = Batch()
        tree.forget_listing(batch, ROOT_INODE)
        database.commit(batch)

    for change in (number, list_root, forget_root, list_root, lambda: remove(tree, kept)):
        refusals.refuse(is_made=is_made)
        with pytest.raises(CacheFull):
            change()
        database.commit(Batch({b"Xopened": b"again"}))
        assert sums(tree) == sums_of_rows(tree)
        if not is_made:
            change()
            assert sums(tree) == sums_of_rows(tree)


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
