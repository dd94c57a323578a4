"""The metadata database: batches, scans, inode numbers, and what it does when it is damaged."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rocksdict import Rdict

from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.storage_engine import Step
from lakefs_fuse.errors import CacheDamaged, CacheError, CacheFull, SchemaMismatch
from lakefs_fuse.meta import database as module
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database, RocksEngine, RocksEngines
from lakefs_fuse.meta.sorted_tables import are_names_outdated, drop_names
from tests.fakes import open_database
from tests.tiers import examples


def put(database: Database, *keys: bytes) -> None:
    batch = Batch()
    for key in keys:
        batch.rows[key] = b"=" + key
    database.commit(batch)


def test_what_is_committed_stays(tmp_path: Path) -> None:
    database = open_database(tmp_path / "meta", "lake")
    put(database, b"Da", b"Db", b"Dc")
    batch = Batch()
    batch.rows[b"Da"] = None
    batch.delete_range(b"Db", b"Dc")
    batch.rows[b"Dd"] = b"d"
    database.commit(batch, sync=True)
    database.commit(Batch())
    database.new_inode()
    database.close()
    database = open_database(tmp_path / "meta", "lake")
    assert list(database.scan(b"D", b"E")) == [(b"Dc", b"=Dc"), (b"Dd", b"d")]
    assert database.get(b"Da") is None
    database.close()


@settings(max_examples=examples(30), deadline=None)
@given(st.sets(st.binary(min_size=1, max_size=5), max_size=40), st.binary(max_size=3), st.binary(max_size=3))
def test_scans_are_ordered_and_bounded(
    tmp_path_factory: pytest.TempPathFactory, keys: set[bytes], begin: bytes, end: bytes
) -> None:
    database = open_database(tmp_path_factory.mktemp("db") / "meta", "lake")
    keys = {b"X" + key for key in keys}
    put(database, *keys)
    expected = sorted(key for key in keys if b"X" + begin <= key < b"X" + end)
    assert [key for key, _ in database.scan(b"X" + begin, b"X" + end)] == expected
    database.close()


few_keys = st.sampled_from([b"X%d" % number for number in range(9)])
changes = st.lists(
    st.one_of(
        st.tuples(st.just("put"), few_keys, st.sampled_from([b"", b"short", b"longer"])),
        st.tuples(st.just("delete"), few_keys, st.just(b"")),
        st.tuples(st.just("range"), few_keys, few_keys),
    ),
    max_size=6,
)


@pytest.mark.parametrize("alone", [0, 2, 1000])
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(changes, st.lists(few_keys, max_size=5)), max_size=12))
def test_a_row_is_what_the_last_batch_made_it(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    alone: int,
    steps: list[tuple[list[tuple[str, bytes, bytes]], list[bytes]]],
) -> None:
    """Read one by one and together, with ranges that are deleted as such, row by row, or either."""
    monkeypatch.setattr(module, "DELETED_ALONE_MAX", alone)
    database = open_database(tmp_path_factory.mktemp("db") / "meta", "lake")
    rows: dict[bytes, bytes] = {}
    for changed, read in steps:
        batch = Batch()
        for what, key, value in changed:
            if what == "put":
                batch.rows[key] = value
                rows[key] = value
            elif what == "delete":
                batch.rows[key] = None
                rows.pop(key, None)
            elif key < value:
                batch.delete_range(key, value)
                rows = {other: row for other, row in rows.items() if not key <= other < value}
        database.commit(batch)
        at_once = database.get_many(read)
        assert at_once == [database.get(key) for key in read] == [rows.get(key) for key in read]
    database.close()


def test_a_scan_does_not_see_what_comes_later(tmp_path: Path) -> None:
    database = open_database(tmp_path / "meta", "lake")
    put(database, b"Xa", b"Xc")
    scan = database.scan(b"X", b"Y")
    assert next(scan)[0] == b"Xa"
    put(database, b"Xb", b"Xd")
    assert [key for key, _ in scan] == [b"Xc"]
    database.close()


def test_reading_a_row_does_not_look_through_small_ranges_that_were_deleted(tmp_path: Path) -> None:
    """As the removal of one directory after the other, and each poll that forgets commits."""
    database = open_database(tmp_path / "meta", "lake")

    def seconds(first: int) -> float:
        took = 0.0
        for number in range(first, first + 100):
            batch = Batch()
            batch.delete_range(b"Xd%06d" % number, b"Xd%06d" % (number + 1))
            database.commit(batch)
            began = time.thread_time()
            assert database.get(b"Xa") is None
            took += time.thread_time() - began
        return took

    took = [seconds(100 * number) for number in range(30)]
    assert min(took[-5:]) < 10 * min(took[:5])  # 100 times where it does
    database.close()


def test_a_scan_does_not_read_what_was_deleted_behind_its_end(tmp_path: Path) -> None:
    """As a lookup of one name beside a directory of many that was removed."""
    database = open_database(tmp_path / "meta", "lake")

    def seconds() -> float:
        began = time.thread_time()
        for _ in range(50):
            assert not list(database.scan(b"Xa", b"Xb"))
        return time.thread_time() - began

    alone = min(seconds() for _ in range(5))
    keys = [b"Xd%06d" % number for number in range(50_000)]
    put(database, *keys)
    database.commit(Batch(dict.fromkeys(keys)))
    assert min(seconds() for _ in range(5)) < 10 * alone  # 300 times and more where it does
    database.close()


def test_inode_numbers_are_never_given_out_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    for _ in range(4):
        database = open_database(tmp_path / "meta", "lake")
        numbers = [database.new_inode() for _ in range(100)]
        assert numbers[0] >= 2
        assert numbers == sorted(numbers)
        assert seen.isdisjoint(numbers)
        seen.update(numbers)
        database.close()
    monkeypatch.setattr(module, "INODES_RESERVED", 5)
    database = open_database(tmp_path / "meta", "lake")
    last = [database.new_inode() for _ in range(12)]
    assert last == list(range(last[0], last[0] + 12))
    database.close()
    database = open_database(tmp_path / "meta", "lake")
    assert database.new_inode() > last[-1]
    database.close()


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (OSError(errno.EROFS, "read-only"), CacheError),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), CacheFull),
        (Exception("IO error: No space left on device: While appending to file: /meta/000008.log"), CacheFull),
    ],
    ids=["read-only", "full", "full, as RocksDB says"],
)
def test_a_disk_that_takes_nothing_any_more_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception, kind: type[CacheError]
) -> None:
    """A database that was closed could not be opened again there; with the disk well, writes go on. A full disk is
    told apart by every write, also by those that are refused without an attempt."""
    opened: list[Fragile] = []

    class Fragile(RocksEngine):
        """Whose writes fail from the first failure until it is opened again."""

        is_broken = False

        def write(self, steps: Sequence[Step], *, sync: bool) -> None:
            if self.is_broken:
                raise refusal
            super().write(steps, sync=sync)

    class FragileEngines(RocksEngines):
        def open(self, directory: Path) -> Fragile:
            opened.append(Fragile(directory, module.MEMORY_BYTES))
            return opened[-1]

    node = replace(Node.of_this_machine(), engines=FragileEngines())
    database = open_database(tmp_path / "meta", "lake", node)
    put(database, b"Xa")
    opened[-1].is_broken = True

    def refuse(**_: object) -> None:
        raise refusal

    with monkeypatch.context() as broken:
        broken.setattr("tempfile.TemporaryFile", refuse)
        for pause_s in (0.0, 0.0, 60.0):
            monkeypatch.setattr(module, "REOPEN_PAUSE_S", pause_s)
            with pytest.raises(CacheError) as raised:
                put(database, b"Xb")
            assert (type(raised.value), database.is_full) == (kind, kind is CacheFull)
            assert raised.value.errno == (errno.ENOSPC if kind is CacheFull else errno.EIO)
            assert database.is_failing
            assert database.get(b"Xa") == b"=Xa"
            assert [key for key, _ in database.scan(b"X", b"Y")] == [b"Xa"]
    monkeypatch.setattr(module, "REOPEN_PAUSE_S", 0.0)
    put(database, b"Xb")
    assert not database.is_failing
    assert not database.is_full
    assert [key for key, _ in database.scan(b"X", b"Y")] == [b"Xa", b"Xb"]
    database.close()


def test_another_lake_is_refused_and_left_alone(tmp_path: Path) -> None:
    database = open_database(tmp_path / "meta", "lake")
    put(database, b"Da")
    database.new_inode()
    database.close()
    with pytest.raises(CacheError, match=r"belongs to lake: give --cache-dir another directory$"):
        open_database(tmp_path / "meta", "other")
    database = open_database(tmp_path / "meta", "lake")
    assert database.get(b"Da") == b"=Da"
    database.close()


@pytest.mark.parametrize("local", [b"", b"C00000001", b"Jabc"])
def test_database_of_another_schema_is_refused_and_left_alone(tmp_path: Path, local: bytes) -> None:
    node = Node.of_this_machine()
    database = open_database(tmp_path / "meta", "lake", node)
    database.commit(Batch({b"Mschema": b"1", **({local: b"unsent"} if local else {})}), sync=True)
    database.close()
    todo = "it has files or changes .* mount with that version" if local else "give --cache-dir another"
    for repairs in (False, True):
        with pytest.raises(SchemaMismatch, match=rf"schema 1, this one has 2\): {todo}") as raised:
            Database(tmp_path / "meta", "lake", node.clock, node.disk, repairs=repairs)
        assert "delete" not in str(raised.value)
    engine = RocksEngines().open(tmp_path / "meta")
    assert [engine.get(key) for key in (b"Mschema", local)] == [b"1", b"unsent" if local else None]
    engine.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    database = open_database(tmp_path / "meta", "lake")
    with pytest.raises(CacheError, match="in use"):
        open_database(tmp_path / "meta", "lake")
    database.close()


HOLDER = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(); sys.stdin.read()"


def test_database_that_another_process_holds_is_not_damaged(tmp_path: Path) -> None:
    """Also where the lock file of the cache directory was removed, so that RocksDB's own lock alone is left."""
    open_database(tmp_path / "meta", "lake").close()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "meta" / "LOCK")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(CacheError, match="in use by another process: unmount"):
            open_database(tmp_path / "meta", "lake")
    assert [path.name for path in tmp_path.iterdir()] == ["meta"]
    open_database(tmp_path / "meta", "lake").close()


@pytest.mark.parametrize("lost", [b"Midentity", b"Minode"])
def test_names_without_what_guards_their_numbers_are_put_aside(tmp_path: Path, lost: bytes) -> None:
    """Never an inode number that a name in the database has already."""
    database = open_database(tmp_path / "meta", "lake")
    database.new_inode()
    put(database, b"Da")
    batch = Batch()
    batch.rows[lost] = None
    database.commit(batch, sync=True)
    database.close()
    database = open_database(tmp_path / "meta", "lake")
    assert list(database.scan(b"D", b"E")) == []
    assert database.new_inode() == 2
    database.close()
    assert len(list(tmp_path.glob("meta.damaged-*"))) == 1


@pytest.mark.parametrize("lost", ["CURRENT", "MANIFEST-*", b"Minode"])
def test_damaged_database_without_repairs_is_an_error_and_stays(tmp_path: Path, lost: str | bytes) -> None:
    node = Node.of_this_machine()
    database = open_database(tmp_path / "meta", "lake", node)
    database.new_inode()
    put(database, b"Da")
    if isinstance(lost, bytes):
        database.commit(Batch({lost: None}), sync=True)
    database.close()
    for path in (tmp_path / "meta").glob(lost) if isinstance(lost, str) else ():
        path.write_bytes(b"nonsense")
    for _ in range(2):
        with pytest.raises(CacheDamaged, match=r"does not open|is damaged"):
            Database(tmp_path / "meta", "lake", node.clock, node.disk, repairs=False)
    assert list(tmp_path.glob("meta.damaged-*")) == []


class OpenedAfterRepair(RocksEngines):
    """A database that does not open before it is repaired."""

    def __init__(self) -> None:
        super().__init__()
        self._is_repaired = False

    def open(self, directory: Path) -> RocksEngine:
        if not self._is_repaired:
            raise RuntimeError("Corruption: a file is missing")
        return super().open(directory)

    def repair(self, directory: Path) -> None:
        super().repair(directory)
        self._is_repaired = True


def test_names_of_a_repaired_database_are_outdated_until_they_are_dropped(tmp_path: Path) -> None:
    """Also after a restart; rows may be lost, and old ones back."""
    node = Node.of_this_machine()
    database = open_database(tmp_path / "meta", "lake", node)
    database.new_inode()
    put(database, b"Da", b"Ja")
    assert not are_names_outdated(database)
    database.close()
    Database(tmp_path / "meta", "lake", node.clock, node.disk, OpenedAfterRepair()).close()
    database = open_database(tmp_path / "meta", "lake", node)
    assert are_names_outdated(database)
    drop_names(database)
    database.close()
    database = open_database(tmp_path / "meta", "lake", node)
    assert not are_names_outdated(database)
    assert [database.get(key) for key in (b"Da", b"Ja")] == [None, b"=Ja"]
    database.close()


def test_an_empty_database_is_whole(tmp_path: Path) -> None:
    for _ in range(3):
        open_database(tmp_path / "meta", "lake").close()
    assert list(tmp_path.glob("meta.damaged-*")) == []


NOW_OVER = [
    (OSError("Disk quota exceeded (os error 122)"), CacheFull),
    (Exception("IO error: No space left on device: While appending to file: /meta/000032.sst"), CacheFull),
    (Exception("Invalid argument: Found options incompatible with filesystem: IO error: While open a file for random "
               "read: /meta/CURRENT: Too many open files"), CacheError),
    (Exception("IO error: While open directory: /meta: Too many open files in system"), CacheError),
    (Exception("Corruption: Can't access /000025.sst: IO error: while stat a file for size: /meta/000025.sst: "
               "Cannot allocate memory"), CacheError),
    (Exception("IO error: While pread offset 3111 len 53: /meta/000032.sst: Input/output error"), CacheError),
]  # fmt: skip
"""What RocksDB and its binding raise while a database opens (seen with injected errors), and what it becomes."""


class Refusing(RocksEngines):
    """Which do not open a database, or not read it once it was opened."""

    def __init__(self, refusal: Exception, *, opens: bool = False) -> None:
        super().__init__()
        self._refusal, self._opens = refusal, opens

    def open(self, directory: Path) -> RocksEngine:
        if not self._opens:
            raise self._refusal
        engine = super().open(directory)

        def get(_key: bytes, /) -> bytes | None:
            raise self._refusal

        engine.get = get
        return engine

    def repair(self, directory: Path) -> None:
        raise AssertionError("it is not damaged")


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize(("refusal", "kind"), NOW_OVER)
def test_database_open_without_resources_leaves_it_as_it_is(
    tmp_path: Path, refusal: Exception, kind: type[CacheError], opens: bool
) -> None:
    node = Node.of_this_machine()
    database = open_database(tmp_path / "meta", "lake", node)
    database.new_inode()
    database.commit(Batch({b"C1": b"a journaled rename", b"Da": b""}), sync=True)
    database.end_loss()
    database.close()
    for repairs in (False, True):
        with pytest.raises(CacheError) as raised:
            Database(tmp_path / "meta", "lake", node.clock, node.disk, Refusing(refusal, opens=opens), repairs=repairs)
        assert type(raised.value) is (CacheError if opens else kind)
    assert [path.name for path in tmp_path.iterdir()] == ["meta"]
    database = open_database(tmp_path / "meta", "lake", node)
    assert database.get(b"C1") == b"a journaled rename"
    assert not database.lost_rows
    database.close()


def test_database_open_without_descriptors_leaves_it_as_it_is(tmp_path: Path) -> None:
    database = open_database(tmp_path / "meta", "lake")
    database.commit(Batch({b"Jabc": b"an acknowledged file"}), sync=True)
    database.end_loss()
    database.close()
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = 0
    for more in range(40):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
        try:
            database = open_database(tmp_path / "meta", "lake")
        except CacheError:
            refused += 1
        else:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refused > 5
    assert [path.name for path in tmp_path.iterdir()] == ["meta"]
    assert database.get(b"Jabc") == b"an acknowledged file"
    assert not database.lost_rows
    database.close()


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ("CURRENT", None), ("CURRENT", b""), ("CURRENT", b"MANIFEST-999999\n"), ("MANIFEST-*", None),
        ("MANIFEST-*", b""), ("*.sst", None), ("*.sst", b""), ("*.sst", bytes(2000)),
    ],
)  # fmt: skip
def test_database_with_a_damaged_file_is_repaired(tmp_path: Path, lost: str, left: bytes | None) -> None:
    for _ in range(2):
        database = open_database(tmp_path / "meta", "lake")
        database.new_inode()
        database.end_loss()
        database.close()
    damaged = sorted((tmp_path / "meta").glob(lost))[0]
    damaged.unlink() if left is None else damaged.write_bytes(left)
    database = open_database(tmp_path / "meta", "lake")
    assert database.lost_rows
    database.close()
    assert [path.name for path in tmp_path.iterdir()] == ["meta"]


def damage_a_block(directory: Path, kind: bytes) -> None:
    """Rows of a kind in a file of many blocks, one of which, not the first, is not what was written."""
    database = open_database(directory, "lake")
    database.new_inode()
    database.end_loss()
    for first in range(0, 20_000, 2000):
        numbers = range(first, first + 2000)
        database.commit(Batch({kind + b"%08d" % number: os.urandom(80) for number in numbers}))
    database.close()
    raw = Rdict(str(directory), module.options())
    raw.flush()
    raw.close()
    largest = max(directory.glob("*.sst"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(bytes(100))


def test_scan_raises_where_a_row_cannot_be_read(tmp_path: Path) -> None:
    """And does not end as if there were no more."""
    damage_a_block(tmp_path / "meta", schema.ENTRY)
    database = open_database(tmp_path / "meta", "lake")
    found = 0
    with pytest.raises(CacheError, match="is damaged: unmount"):
        for _ in database.scan(schema.ENTRY, schema.end_of(schema.ENTRY)):
            found += 1
    assert 0 < found < 20_000
    database.close()


def test_database_whose_journal_cannot_be_read_to_its_end_has_lost_rows(tmp_path: Path) -> None:
    damage_a_block(tmp_path / "meta", schema.CHANGE)
    database = open_database(tmp_path / "meta", "lake")
    assert database.lost_rows
    assert len(list(tmp_path.glob("meta.damaged-*"))) == 1
    database.close()


def test_database_that_cannot_be_begun_anew_stays_where_it_is(tmp_path: Path) -> None:
    """The disk gets full between the attempts."""

    class BeyondRepair(RocksEngines):
        def open(self, directory: Path) -> RocksEngine:
            if (directory / "CURRENT").exists():
                raise RuntimeError("Corruption: a file is missing")
            directory.mkdir()
            raise RuntimeError("IO error: No space left on device")

        def repair(self, directory: Path) -> None:
            raise RuntimeError("Corruption: beyond repair")

    node = Node.of_this_machine()
    open_database(tmp_path / "meta", "lake", node).close()
    with pytest.raises(CacheFull):
        Database(tmp_path / "meta", "lake", node.clock, node.disk, BeyondRepair())
    assert [path.name for path in tmp_path.iterdir()] == ["meta"]
    database = open_database(tmp_path / "meta", "lake", node)
    assert database.get(b"Midentity") == b"lake"
    database.close()


def test_a_database_beyond_repair_is_put_aside(tmp_path: Path) -> None:
    database = open_database(tmp_path / "meta", "lake")
    database.new_inode()
    put(database, b"Da")
    database.close()
    for path in (tmp_path / "meta").iterdir():
        path.write_bytes(b"nonsense")
    database = open_database(tmp_path / "meta", "lake")
    put(database, b"Db")
    assert database.get(b"Db") == b"=Db"
    assert database.statistics()["estimate_num_keys"] >= 1
    database.close()


def test_log_of_rocksdb_fills_up_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocksDB writes its own log for as long as the database is open: 6 KB every ten minutes where nothing happens."""
    monkeypatch.setattr(module, "LOG_BYTES_MAX", 32 << 10)
    engine = RocksEngine(tmp_path / "meta", 1 << 20)
    for number in range(16):
        engine.write([({b"D%d" % number: b"row"}, b"", b"")], sync=False)
        engine.checkpoint(tmp_path / f"copy-{number}")
    engine.close()
    logs = [path.stat().st_size for path in (tmp_path / "meta").glob("LOG*")]
    assert len(logs) == module.LOG_FILES
    assert max(logs) < 2 * module.LOG_BYTES_MAX


def test_manifest_of_rocksdb_that_is_full_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocksDB adds to it whenever it flushes, for as long as the database is open."""
    monkeypatch.setattr(module, "MANIFEST_BYTES_MAX", 1)
    engine = RocksEngine(tmp_path / "meta", 1 << 20)
    (first,) = (tmp_path / "meta").glob("MANIFEST-*")
    for number in range(3):
        engine.write([({b"D%d" % number: b"row"}, b"", b"")], sync=False)
        engine.checkpoint(tmp_path / f"copy-{number}")
    engine.close()
    assert not first.exists()
