"""What a database notes of its changes: whatever differs from the index is noted, also after a crash."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lakefs_fuse.meta import schema
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.changed_rows import Folded
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import HEAD, Flag
from tests.fakes import FakeDisk, open_database
from tests.simulation.memory_engine import MemoryEngines
from tests.tiers import sized
from tests.vfs.lakes import Clock

KEYS = [kind + b"%02d" % number for kind in (b"A", b"D", b"N", b"T", b"X", b"C", b"M") for number in range(12)]
NAMES = [key for key in KEYS if key[:1] not in (b"C", b"M")]


def entry_row(rng: random.Random) -> bytes:
    flags = Flag.DIRECTORY if rng.random() < 0.3 else 0
    return HEAD.pack(2, flags, 0, 0, 0, rng.randrange(9), 0, 0, 0, 0, 0, 0) + b"name"


def random_batch(rng: random.Random) -> Batch:
    """Rows written and deleted, and ranges of one kind deleted, in any order."""
    batch = Batch()
    for _ in range(rng.randrange(1, 4)):
        for key in rng.sample(KEYS, rng.randrange(6)):
            row = entry_row(rng) if key[:1] == b"D" else b"%d" % rng.randrange(3)
            batch.rows[key] = None if rng.random() < 0.4 else row
        if rng.random() < 0.3:
            kind = rng.choice(NAMES)[:1]
            begin, end = sorted(rng.sample([*(key for key in KEYS if key[:1] == kind), schema.end_of(kind)], 2))
            batch.delete_range(begin, end)
    return batch


def rows_of(database: Database) -> dict[bytes, bytes]:
    return {key: value for key, value in database.scan(b"", b"\xff") if key in NAMES}


def count_of(rows: dict[bytes, bytes]) -> tuple[int, int]:
    entries = [row for key, row in rows.items() if key[:1] == b"D"]
    return len(entries), sum(bool(HEAD.unpack_from(row)[1] & Flag.DIRECTORY) for row in entries)


def check(database: Database, indexes: dict[int, dict[bytes, bytes]]) -> None:
    """Against what the rows were when each index was written."""
    rows, folded = rows_of(database), database.changed.folded
    for mark, index in indexes.items():
        if mark >= folded.since:
            keys = list(database.changed.keys_since(mark))
            assert keys == sorted(set(keys))
            assert {key for key in NAMES if index.get(key) != rows.get(key)} <= set(keys) <= set(NAMES)
    before, now = count_of(indexes[folded.index]), count_of(rows)
    assert database.changed.count_names() == (now[0] - before[0], now[1] - before[1])


@pytest.mark.parametrize("seed", range(sized(10, 60)))
def test_what_differs_from_an_index_is_noted(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    database = open_database(tmp_path / "meta", "lake")
    database.new_inode()
    database.commit(random_batch(rng))
    assert not database.changed.count(0), "there is no index"
    indexes: dict[int, dict[bytes, bytes]] = {}
    for time in range(1, 12):
        is_base = time == 1 or rng.random() < 0.2
        tables.mark_folded(database, time, since=time if is_base else database.changed.folded.since)
        indexes[time] = rows_of(database)
        check(database, indexes)
        assert not database.changed.count(time)
        assert not database.changed.has_any(time)
        for _ in range(rng.randrange(6)):
            database.commit(random_batch(rng))
        check(database, indexes)
        if rng.random() < 0.3:
            database.close()
            database = open_database(tmp_path / "meta", "lake")
            check(database, indexes)
    database.close()


@pytest.mark.parametrize("seed", range(sized(10, 60)))
def test_what_differs_from_an_index_is_noted_after_a_power_cut(tmp_path: Path, seed: int) -> None:
    """Rows and notes come from one log; the mark is synced."""
    rng, engines = random.Random(seed), MemoryEngines()

    def opened(directory: Path) -> Database:
        return Database(directory, "lake", Clock(), FakeDisk(), engines)

    at = tmp_path / "0"
    database = opened(at)
    database.new_inode()
    database.commit(random_batch(rng), sync=True)
    indexes: dict[int, dict[bytes, bytes]] = {}
    for time in range(1, 12):
        for _ in range(rng.randrange(6)):
            database.commit(random_batch(rng), sync=rng.random() < 0.2)
        if rng.random() < 0.5:
            after = tmp_path / f"{time}"
            engines.copy(at, after, rng)
            database.close()
            at, database = after, opened(after)
            if indexes:
                check(database, indexes)
        tables.mark_folded(database, time, since=database.changed.folded.since or time)
        indexes[time] = rows_of(database)
    database.close()


def test_dropped_names_have_no_index(tmp_path: Path) -> None:
    """And nothing is noted until there is one."""
    database = open_database(tmp_path / "meta", "lake")
    tables.mark_folded(database, 7, since=7)
    database.commit(Batch({b"N1": b"x"}))
    assert (tables.folded_of(database), database.changed.count(0)) == (Folded(7, 7), 1)
    assert [database.changed.has_any(mark) for mark in (0, 7, 8)] == [True, True, False]
    tables.drop_names(database)
    database.commit(Batch({b"N1": b"x"}))
    assert (tables.folded_of(database), database.changed.count(0)) == (Folded(), 0)
    assert not database.changed.has_any(0)
    database.close()
    database = open_database(tmp_path / "meta", "lake")
    assert tables.folded_of(database) == Folded()
    database.close()
