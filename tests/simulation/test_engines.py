"""One contract for both storage engines, RocksDB and the model of it, and what a power cut leaves of the model."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocksdict import SstFileWriter

from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.storage_engine import Engine, Engines, Rows, Step
from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Batch, RocksEngines, options
from lakefs_fuse.meta.entry import ROOT_INODE, Flag
from lakefs_fuse.meta.tree import Tree
from tests.fakes import open_database
from tests.simulation.forgetful_disk import copy_after_kill
from tests.simulation.memory_engine import LOG_WRITES_MAX, SORTED_INSERTS_MAX, MemoryEngine, MemoryEngines

KEYS = [b"%c%d" % (kind, number) for kind in b"AB" for number in range(8)]
CUTS = 30
"""Power cuts of one platter, which then find every state that is possible."""


@pytest.fixture(params=["rocksdb", "memory"])
def engines(request: pytest.FixtureRequest) -> Engines:
    return RocksEngines() if request.param == "rocksdb" else MemoryEngines()


def put(engine: Engine, *keys: bytes, value: bytes = b"v", sync: bool = False) -> None:
    engine.write([(dict.fromkeys(keys, value), b"", b"")], sync=sync)


def keys_of(engine: Engine) -> list[bytes]:
    return [key for key, _ in engine.items(b"")]


def restart(engines: Engines, source: Path, target: Path) -> Engine:
    """The engine of a copy of a directory that a living engine has open."""
    copy_after_kill(source.parent, target)
    if isinstance(engines, MemoryEngines):
        engines.copy(source.parent, target, None)
    return engines.open(target / source.name)


def write_table(path: Path, rows: dict[bytes, bytes]) -> Path:
    writer = SstFileWriter(options())
    writer.open(str(path))
    for key, value in sorted(rows.items()):
        writer[key] = value
    writer.finish()
    return path


def write_deletions(path: Path, *keys: bytes) -> Path:
    writer = SstFileWriter(options())
    writer.open(str(path))
    for key in keys:
        del writer[key]
    writer.finish()
    return path


def test_write_of_steps_applies_them_in_order(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a", b"b", b"c", b"d")
    steps: list[Step] = [({b"b2": b"2", b"a": None}, b"b", b"d"), ({b"c": b"new", b"missing": None}, b"", b"")]
    engine.write(steps, sync=False)
    assert list(engine.items(b"")) == [(b"c", b"new"), (b"d", b"v")]
    assert list(engine.items(b"c0")) == [(b"d", b"v")]
    assert engine.get_many([b"d", b"a", b"c"]) == [b"v", None, b"new"]
    assert engine.get(b"a") is None
    assert engine.get(b"d") == b"v"
    engine.close()


def test_write_of_an_empty_value_is_no_deletion(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a", value=b"")
    assert engine.get(b"a") == b""
    assert list(engine.items(b"a")) == [(b"a", b"")]
    engine.close()


def test_write_does_not_keep_the_callers_rows(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    rows: Rows = {b"a": b"1"}
    engine.write([(rows, b"", b"")], sync=True)
    rows[b"b"] = b"2"
    engine.close()
    engine = engines.open(tmp_path / "meta")
    assert keys_of(engine) == [b"a"]
    engine.close()


def test_items_are_those_of_the_moment_they_were_asked_for(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a", b"c", b"e")
    fresh, begun = engine.items(b""), engine.items(b"b")
    assert next(begun) == (b"c", b"v")
    engine.write([({b"b": b"v", b"d": b"v", b"c": b"new"}, b"e", b"f")], sync=False)
    later = engine.items(b"")
    put(engine, b"f")
    assert list(begun) == [(b"e", b"v")]
    assert list(fresh) == [(b"a", b"v"), (b"c", b"v"), (b"e", b"v")]
    assert list(later) == [(b"a", b"v"), (b"b", b"v"), (b"c", b"new"), (b"d", b"v")]
    engine.close()


def test_items_that_are_read_in_turns_keep_their_ends(engines: Engines, tmp_path: Path) -> None:
    """Also where nothing else holds the key that ends them."""
    engine = engines.open(tmp_path / "meta")
    keys = [b"X%04d" % number for number in range(2000)]
    put(engine, *keys)
    rng = random.Random(1)
    begun: dict[int, tuple[Iterator[tuple[bytes, bytes]], list[bytes]]] = {}
    for _ in range(20_000):
        at = rng.randrange(0, 1900)
        length = at % 37 + 1
        if at not in begun:
            begun[at] = engine.items(keys[at], b"X%04d" % (at + length)), []
        items, found = begun[at]
        row = next(items, None)
        if row is not None:
            found.append(row[0])
        else:
            assert found == keys[at : at + length]
            del begun[at]
    del begun, items
    engine.close()


def test_open_of_an_open_directory_is_refused(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a")
    with pytest.raises(CacheError, match="in use"):
        engines.open(tmp_path / "meta")
    engine.close()
    engine = engines.open(tmp_path / "meta")
    assert keys_of(engine) == [b"a"]
    engine.close()


def test_closed_engine_refuses_everything(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a")
    engine.close()
    for call in (lambda: engine.get(b"a"), lambda: engine.items(b""), lambda: put(engine, b"b"), engine.sync):
        with pytest.raises(Exception, match="closed"):
            call()


def test_restart_from_a_copy_has_every_write(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "one" / "meta")
    for number in range(50):
        put(engine, b"%02d" % number)
    copied = restart(engines, tmp_path / "one" / "meta", tmp_path / "two")
    put(engine, b"later")
    put(copied, b"other")
    assert keys_of(copied) == [*(b"%02d" % number for number in range(50)), b"other"]
    assert engine.get(b"other") is None
    copied.close()
    engine.close()


def test_directory_that_is_moved_takes_its_rows_along(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a")
    engine.close()
    (tmp_path / "meta").rename(tmp_path / "aside")
    begun_anew = engines.open(tmp_path / "meta")
    assert keys_of(begun_anew) == []
    begun_anew.close()
    moved = engines.open(tmp_path / "aside")
    assert keys_of(moved) == [b"a"]
    moved.close()
    shutil.rmtree(tmp_path / "aside")
    removed = engines.open(tmp_path / "aside")
    assert keys_of(removed) == []
    removed.close()


def test_ingest_moves_the_files_and_wins_over_rows(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a", b"c", b"e")
    before = engine.items(b"")
    paths = [
        write_table(tmp_path / "0.sst", {b"b": b"t", b"c": b"t"}),
        write_table(tmp_path / "1.sst", {b"d": b"t"}),
    ]
    engine.ingest(paths)
    assert not any(path.exists() for path in paths)
    put(engine, b"d", value=b"w")
    expected = [(b"a", b"v"), (b"b", b"t"), (b"c", b"t"), (b"d", b"w"), (b"e", b"v")]
    assert list(engine.items(b"")) == expected
    assert [key for key, _ in before] == [b"a", b"c", b"e"]
    del before
    engine.close()
    engine = engines.open(tmp_path / "meta")
    assert list(engine.items(b"")) == expected
    engine.close()


def test_ingest_takes_overlapping_files_in_their_order(engines: Engines, tmp_path: Path) -> None:
    """Rows and deletions of later files win, over those of the files before and over those that are there."""
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a", b"c", b"e", b"g")
    paths = [
        write_table(tmp_path / "0.sst", {b"b": b"0", b"c": b"0", b"f": b"0"}),
        write_deletions(tmp_path / "1.sst", b"a", b"b", b"c", b"d"),
        write_table(tmp_path / "2.sst", {b"b": b"2", b"f": b"2"}),
        write_deletions(tmp_path / "3.sst", b"f", b"g"),
        write_table(tmp_path / "4.sst", {b"g": b"4"}),
    ]
    engine.ingest(paths)
    expected = [(b"b", b"2"), (b"e", b"v"), (b"g", b"4")]
    assert list(engine.items(b"")) == expected
    engine.close()
    engine = engines.open(tmp_path / "meta")
    assert list(engine.items(b"")) == expected
    engine.close()


def test_ingest_of_a_damaged_file_takes_none(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    whole, damaged = write_table(tmp_path / "0.sst", {b"b": b"t"}), tmp_path / "1.sst"
    damaged.write_bytes(b"nonsense")
    with pytest.raises(Exception, match=r"1\.sst"):
        engine.ingest([whole, damaged])
    assert keys_of(engine) == []
    put(engine, b"a")
    assert keys_of(engine) == [b"a"]
    engine.close()


def test_checkpoint_is_an_engine_of_its_own(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a")
    engine.checkpoint(tmp_path / "copy")
    put(engine, b"b")
    copied = engines.open(tmp_path / "copy")
    put(copied, b"c")
    assert keys_of(engine) == [b"a", b"b"]
    assert keys_of(copied) == [b"a", b"c"]
    with pytest.raises(Exception, match="exist"):
        engine.checkpoint(tmp_path / "copy")
    copied.close()
    engine.close()


def test_integer_property_counts_keys(engines: Engines, tmp_path: Path) -> None:
    engine = engines.open(tmp_path / "meta")
    put(engine, b"a", b"b")
    assert engine.integer_property("estimate-num-keys") == 2
    assert engine.integer_property("unknown") == 0
    engine.close()


def test_database_dumps_and_ingests_its_names(engines: Engines, tmp_path: Path) -> None:
    node = replace(Node.of_this_machine(), engines=engines)
    database = open_database(tmp_path / "one" / "meta", "lake", node)
    batch = Batch()
    for name in (b"one", b"two"):
        Tree(database).insert(batch, ROOT_INODE, name, Flag.ATTRIBUTES_KNOWN)
    database.commit(batch)
    dump = tables.Dump(database, tables.empty_directory(tmp_path / "dump"), applied_since=0)
    file = dump.next_file()
    assert file is not None
    tables.check_file(file.path, file.first, file.last)
    dump.close()
    other = open_database(tmp_path / "two" / "meta", "lake", node)
    tables.ingest(other, [file.path], dump.marks, tmp_path / "dump")
    assert [entry.name for entry in Tree(other).children(ROOT_INODE)] == [b"one", b"two"]
    assert other.new_inode() >= database.inode_next
    assert other.statistics()["estimate_num_keys"] >= 2
    other.close()
    database.close()


rows_written = st.dictionaries(st.sampled_from(KEYS), st.none() | st.binary(max_size=2), max_size=6)
many_rows = st.just({b"many%d" % number: b"v" for number in range(SORTED_INSERTS_MAX + 1)})
ranges = st.tuples(st.sampled_from(KEYS), st.sampled_from(KEYS)).map(lambda pair: (min(pair), max(pair)))
steps_written = st.lists(
    st.tuples(rows_written | many_rows, st.just((b"", b"")) | ranges).map(lambda step: (step[0], *step[1])), max_size=4
)


@given(
    st.lists(st.tuples(steps_written, st.booleans(), st.booleans()), max_size=12),
    st.sampled_from(KEYS),
    st.sampled_from([b"", *KEYS]),
)
def test_engines_agree_on_random_writes(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[list[Step], bool, bool]], begin: bytes, end: bytes
) -> None:
    """Point reads, scans begun before and after each write, and the rows after a restart."""
    both: tuple[Engines, ...] = (RocksEngines(), MemoryEngines())
    places = [tmp_path_factory.mktemp("engine") / "meta" for _ in both]
    opened = [each.open(place) for each, place in zip(both, places, strict=True)]
    for steps, sync, reopens in writes:
        scans = [engine.items(begin, end) for engine in opened]
        for engine, scan in zip(opened, scans, strict=True):
            next(scan, None)
            engine.write(steps, sync=sync)
        assert list(scans[0]) == list(scans[1])
        assert list(opened[0].items(b"")) == list(opened[1].items(b""))
        assert list(opened[0].items(begin, end)) == list(opened[1].items(begin, end))
        assert opened[0].get_many(KEYS) == opened[1].get_many(KEYS) == [*map(opened[1].get, KEYS)]
        if reopens:
            del scans, scan
            for number, place in enumerate(places):
                opened[number].close()
                opened[number] = both[number].open(place)
    for engine in opened:
        engine.close()


def power_cuts(engines: MemoryEngines, directory: Path, target: Path) -> set[int]:
    """How many of the writes of `log_of` are left, after many power cuts."""
    left = set()
    for seed in range(CUTS):
        engines.copy(directory, target / f"{seed}", random.Random(seed))
        engine = engines.open(target / f"{seed}")
        rows = list(engine.items(b""))
        engine.close()
        assert rows == [(b"%03d" % number, b"v") for number in range(len(rows))]
        left.add(len(rows))
    return left


def log_of(engine: MemoryEngine, count: int, *, begin: int = 0) -> None:
    for number in range(begin, begin + count):
        put(engine, b"%03d" % number)


def test_power_cut_leaves_a_prefix_of_the_unsynced_writes(tmp_path: Path) -> None:
    engines = MemoryEngines()
    engine = engines.open(tmp_path / "meta")
    log_of(engine, 3)
    assert power_cuts(engines, tmp_path / "meta", tmp_path / "a") == {0, 1, 2, 3}
    put(engine, b"003", sync=True)
    assert power_cuts(engines, tmp_path / "meta", tmp_path / "b") == {4}
    log_of(engine, 1, begin=4)
    engine.sync()
    log_of(engine, 2, begin=5)
    assert power_cuts(engines, tmp_path / "meta", tmp_path / "c") == {5, 6, 7}
    engine.close()
    assert power_cuts(engines, tmp_path / "meta", tmp_path / "d") == {5, 6, 7}, "to close is not to sync"
    engines.open(tmp_path / "meta")
    assert power_cuts(engines, tmp_path / "meta", tmp_path / "e") == {7}, "recovery flushes the log"


def test_power_cut_after_a_long_log_keeps_what_was_synced(tmp_path: Path) -> None:
    engines = MemoryEngines()
    engine = engines.open(tmp_path / "meta")
    log_of(engine, LOG_WRITES_MAX + 1)
    engine.sync()
    log_of(engine, 1, begin=LOG_WRITES_MAX + 1)
    assert power_cuts(engines, tmp_path / "meta", tmp_path / "a") == {LOG_WRITES_MAX + 1, LOG_WRITES_MAX + 2}


@pytest.mark.parametrize(("ingested", "left"), [(b"zzz", {0, 1}), (b"000", {1})])
def test_ingest_is_durable_and_flushes_writes_of_its_range(tmp_path: Path, ingested: bytes, left: set[int]) -> None:
    engines = MemoryEngines()
    engine = engines.open(tmp_path / "meta")
    log_of(engine, 1)
    engine.ingest([write_table(tmp_path / "0.sst", {ingested: b"v", ingested + b"0": b"v"})])
    found = set()
    for seed in range(CUTS):
        engines.copy(tmp_path / "meta", tmp_path / f"{seed}", random.Random(seed))
        copied = engines.open(tmp_path / f"{seed}")
        assert copied.get_many([ingested, ingested + b"0"]) == [b"v", b"v"]
        found.add(int(copied.get(b"000") is not None))
    assert found == left


def test_checkpoint_is_durable(tmp_path: Path) -> None:
    engines = MemoryEngines()
    engine = engines.open(tmp_path / "meta")
    log_of(engine, 2)
    engine.checkpoint(tmp_path / "copy")
    assert power_cuts(engines, tmp_path / "copy", tmp_path / "a") == {2}
    assert power_cuts(engines, tmp_path / "meta", tmp_path / "b") == {2}


@given(st.lists(st.tuples(steps_written, st.sampled_from(["plain", "sync", "sync-after"])), max_size=12), st.randoms())
def test_power_cut_leaves_the_state_after_a_synced_write(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[list[Step], str]], rng: random.Random
) -> None:
    directory = tmp_path_factory.mktemp("engine")
    engines = MemoryEngines()
    engine = engines.open(directory / "meta")
    states, synced = [list[tuple[bytes, bytes]]()], 0
    for steps, sync in writes:
        engine.write(steps, sync=sync == "sync")
        states.append(list(engine.items(b"")))
        if sync == "sync-after":
            engine.sync()
        if sync != "plain":
            synced = len(states) - 1
    engines.copy(directory, directory / "cut", rng)
    engines.copy(directory, directory / "killed", None)
    assert list(engines.open(directory / "cut" / "meta").items(b"")) in states[synced:]
    assert list(engines.open(directory / "killed" / "meta").items(b"")) == states[-1]


def test_copy_of_a_cache_directory_has_every_engine_below_it(tmp_path: Path) -> None:
    engines = MemoryEngines()
    for name in ("meta", "states/00000001"):
        put(engines.open(tmp_path / "cache" / name), name.encode())
    engines.copy(tmp_path / "cache", tmp_path / "copy", None)
    for name in ("meta", "states/00000001"):
        assert keys_of(engines.open(tmp_path / "copy" / name)) == [name.encode()]


def test_copy_without_its_platter_is_not_opened(tmp_path: Path) -> None:
    """The harness forgot `MemoryEngines.copy`, or an engine was forgotten."""
    engines = MemoryEngines()
    engines.open(tmp_path / "cache" / "meta")
    copy_after_kill(tmp_path / "cache", tmp_path / "copy")
    with pytest.raises(CacheError, match="in use"):
        engines.open(tmp_path / "copy" / "meta")
    engines.forget(tmp_path / "cache")
    node = replace(Node.of_this_machine(), engines=engines)
    with pytest.raises(CacheError, match="not of these engines"):
        open_database(tmp_path / "copy" / "meta", "lake", node)
