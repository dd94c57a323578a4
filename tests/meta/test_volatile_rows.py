"""Rows in memory while the disk is full: what is read, what is written later, and what never comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.storage_engine import Rows, Step
from lakefs_fuse.errors import CacheFull
from lakefs_fuse.meta import database as module
from lakefs_fuse.meta import volatile_rows
from lakefs_fuse.meta.database import Batch, Database, RocksEngine
from lakefs_fuse.meta.volatile_rows import VolatileRows
from tests.fakes import open_database
from tests.meta.full_disk import FullDisk

LETTERS = "abcd"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    monkeypatch.setattr(module, "REOPEN_PAUSE_S", 0.0)
    return FullDisk()


def opened(directory: Path, disk: FullDisk) -> Database:
    return open_database(directory / "meta", "lake", replace(Node.of_this_machine(), engines=disk))


@pytest.fixture
def database(tmp_path: Path, disk: FullDisk) -> Iterator[Database]:
    database = opened(tmp_path, disk)
    yield database
    database.close()


def rows_of(database: Database) -> dict[bytes, bytes]:
    return dict(database.scan(b"n", b"o"))


def changed(rows: dict[bytes, bytes], steps: Sequence[Step]) -> dict[bytes, bytes]:
    """The rows after some steps."""
    for written, begin, end in steps:
        every: Rows = {**rows, **written}
        rows = {
            key: value for key, value in every.items() if value is not None and not (end and begin <= key < end)
        }  # fmt: skip
    return rows


def test_rows_in_memory_are_read_as_if_they_were_written(tmp_path: Path) -> None:
    random_ = random.Random(7)
    keys = [(first + second).encode() for first in LETTERS for second in LETTERS]
    engine = RocksEngine(tmp_path / "rows", module.MEMORY_BYTES)
    below = {key: b"below" + key for key in random_.sample(keys, 8)}
    engine.write([({**below}, b"", b"")], sync=False)
    volatile, expected = VolatileRows(engine), below
    for number in range(200):
        steps: list[Step] = []
        for _ in range(random_.randint(1, 3)):
            begin, end = sorted(random_.sample(keys, 2))
            deletes = random_.random() < 0.3
            written: Rows = {key: None if random_.random() < 0.3 else b"%d" % number for key in random_.sample(keys, 3)}
            steps.append((written, begin if deletes else b"", end if deletes else b""))
        volatile.add(steps)
        expected = changed(expected, steps)
        begin, end = sorted(random_.sample(keys, 2))
        assert list(volatile.items(begin, end)) == sorted(
            (key, value) for key, value in expected.items() if begin <= key < end
        )
        assert list(volatile.items(begin)) == sorted((key, value) for key, value in expected.items() if begin <= key)
        assert volatile.get_many(keys) == [expected.get(key) for key in keys] == [*map(volatile.get, keys)]
    volatile.move_to(engine)
    assert dict(engine.items(b"")) == expected
    engine.close()


def test_rows_are_read_as_they_were_when_the_first_was_asked_for(tmp_path: Path) -> None:
    engine = RocksEngine(tmp_path / "rows", module.MEMORY_BYTES)
    engine.write([({b"b": b"below"}, b"", b"")], sync=False)
    volatile = VolatileRows(engine)
    volatile.add([({b"a": b"1", b"c": b"1"}, b"", b"")])
    rows = volatile.items(b"a")
    assert next(rows) == (b"a", b"1")
    volatile.add([({b"a": b"2", b"b": b"2", b"bb": b"2", b"c": None}, b"", b"")])
    assert list(rows) == [(b"b", b"below"), (b"c", b"1")]
    assert list(volatile.items(b"a")) == [(b"a", b"2"), (b"b", b"2"), (b"bb", b"2")]
    engine.close()


def test_full_disk_keeps_volatile_rows_in_memory_and_refuses_others(database: Database, disk: FullDisk) -> None:
    database.commit(Batch({b"n1": b"before"}))
    disk.is_full = True
    database.commit_volatile(Batch({b"n1": None, b"n2": b"listed"}))
    with pytest.raises(CacheFull):
        database.commit(Batch({b"n3": b"own"}))
    with pytest.raises(CacheFull):
        database.sync()
    database.commit_volatile(Batch({b"n4": b"listed"}))
    assert rows_of(database) == {b"n2": b"listed", b"n4": b"listed"}
    assert database.is_full


def test_volatile_rows_are_written_once_the_disk_has_room(database: Database, disk: FullDisk, tmp_path: Path) -> None:
    disk.is_full = True
    database.commit_volatile(Batch({b"n1": b"listed"}))
    disk.is_full = False
    database.commit(Batch({b"n2": b"own"}))
    assert not database.is_full
    database.sync()
    database.close()
    again = opened(tmp_path, disk)
    assert rows_of(again) == {b"n1": b"listed", b"n2": b"own"}
    again.close()


def test_batch_that_was_refused_does_not_come_back_below_volatile_rows(
    database: Database, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.commit(Batch({b"n1": b"first", b"n2": b"second", b"n3": b"third"}))
    refused = Batch({b"n1": b"refused", b"n4": b"refused"})
    refused.delete_range(b"n2", b"n3")
    refused.rows[b"n5"] = b"refused"
    disk.is_full = disk.logs_next = True
    with pytest.raises(CacheFull):
        database.commit(refused)
    monkeypatch.setattr(module, "REOPEN_PAUSE_S", 60.0)
    database.commit_volatile(Batch({b"n6": b"listed"}))
    monkeypatch.setattr(module, "REOPEN_PAUSE_S", 0.0)
    disk.is_full = False
    database.commit_volatile(Batch({b"n7": b"listed"}))
    assert rows_of(database) == {
        b"n1": b"first", b"n2": b"second", b"n3": b"third", b"n6": b"listed", b"n7": b"listed",
    }  # fmt: skip


def refuse_and_log(database: Database, disk: FullDisk) -> None:
    """A batch is refused that is in the log all the same. Then the disk has room."""
    database.commit(Batch({b"n1": b"first", b"n2": b"second", b"n3": b"third"}))
    refused = Batch({b"n1": b"refused", b"n4": b"refused"})
    refused.delete_range(b"n2", b"n3")
    disk.is_full = disk.logs_next = True
    with pytest.raises(CacheFull):
        database.commit(refused)
    disk.is_full = False


def test_batch_that_was_refused_does_not_take_effect_later(database: Database, disk: FullDisk, tmp_path: Path) -> None:
    refuse_and_log(database, disk)
    kept = {b"n1": b"first", b"n2": b"second", b"n3": b"third"}
    assert rows_of(database) == kept
    database.commit(Batch({b"n5": b"next"}))
    assert rows_of(database) == {**kept, b"n5": b"next"}
    database.close()
    again = opened(tmp_path, disk)
    assert rows_of(again) == {**kept, b"n5": b"next"}
    again.close()


def test_batch_that_was_refused_and_is_too_large_to_be_undone_does_not_stop_the_next(
    database: Database, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volatile_rows, "VOLATILE_BYTES_MAX", 10)
    told: list[bytes | None] = []
    database.reopened.append(lambda: told.append(database.get(b"n1")))
    refuse_and_log(database, disk)
    database.commit(Batch({b"n5": b"next"}))
    assert told == [b"refused"]
    assert rows_of(database) == {b"n1": b"refused", b"n3": b"third", b"n4": b"refused", b"n5": b"next"}


def test_rows_that_are_too_many_for_memory_are_refused_whole(
    database: Database, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volatile_rows, "VOLATILE_BYTES_MAX", 1000)
    disk.is_full = True
    database.commit_volatile(Batch({b"n1": bytes(500)}))
    with pytest.raises(CacheFull):
        database.commit_volatile(Batch({b"n2": b"", b"n3": bytes(500)}))
    assert rows_of(database) == {b"n1": bytes(500)}
    database.commit_volatile(Batch({b"n1": None, b"n3": bytes(500)}))
    assert rows_of(database) == {b"n3": bytes(500)}


def test_inodes_reserved_while_the_disk_is_full_are_never_those_of_another_name_that_is_kept(
    database: Database, disk: FullDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INODES_RESERVED", 2)
    disk.is_full = True
    lost = database.new_inodes(5)
    database.commit_volatile(Batch({b"n1": b"%d" % lost}))
    database.close()  # as when the daemon dies
    again = opened(tmp_path, disk)
    assert rows_of(again) == {}
    first = again.new_inodes(5)
    disk.is_full = False
    again.commit(Batch({b"n2": b"%d" % first}))
    again.close()
    last = opened(tmp_path, disk)
    assert last.new_inode() >= first + 5
    last.close()
