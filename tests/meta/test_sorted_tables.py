"""Rows as files: what a lookup among a million of them costs, and what is not to be dumped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rocksdict import SstFileWriter

from lakefs_fuse.errors import CacheError, DamagedCommit
from lakefs_fuse.meta import schema
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Batch, options
from lakefs_fuse.meta.entry import ROOT_INODE, Flag
from lakefs_fuse.meta.sorted_tables import Dump, Marks
from lakefs_fuse.meta.tree import Tree
from tests.fakes import open_database

ROWS = 1_000_000
LOOKUPS = 300


def bytes_read() -> int:
    """By this process, from files, the page cache included."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_lookup_among_a_million_rows_reads_a_block(tmp_path: Path) -> None:
    """Not the filter of all of them, which is larger than what the cache holds in one piece."""
    path = tmp_path / "rows.sst"
    writer = SstFileWriter(options())
    writer.open(str(path))
    for number in range(ROWS):
        writer[b"N" + number.to_bytes(8, "big") + b"name"] = b"v" * 8
    writer.finish()
    database = open_database(tmp_path / "meta", "lake")
    assert database.get(b"N" + bytes(8) + b"name") is None
    tables.ingest(database, [path], Marks(inode=5, object=0, newest=1), tmp_path)
    assert database.get(b"N" + bytes(8) + b"name") == b"v" * 8, "although it was not there a moment ago"
    rng = random.Random(1)
    before = bytes_read()
    for _ in range(LOOKUPS):
        key = b"N" + rng.randrange(ROWS).to_bytes(8, "big") + b"name"
        assert database.get(key) == b"v" * 8
        assert database.get(key + b"/") is None
    assert (bytes_read() - before) / LOOKUPS < 32 << 10
    assert database.new_inode() == 5
    database.close()


def test_a_file_that_is_not_in_the_store_is_not_dumped(tmp_path: Path) -> None:
    database = open_database(tmp_path / "meta", "lake")
    batch = Batch()
    Tree(database).insert(batch, ROOT_INODE, b"local", Flag.LOCAL)
    database.commit(batch)
    with pytest.raises(CacheError, match="not in the store yet"):
        Dump(database, tmp_path, applied_since=0)
    database.close()


@pytest.mark.parametrize("kind", schema.LOCAL_KINDS)
def test_changes_that_are_not_in_the_store_are_known(tmp_path: Path, kind: bytes) -> None:
    database = open_database(tmp_path / "meta", "lake")
    assert not database.has_local_changes()
    batch = Batch()
    batch.rows[kind + b"1"] = b"x"
    database.commit(batch)
    assert database.has_local_changes()
    database.close()


def test_a_checked_file_is_as_it_was(tmp_path: Path) -> None:
    """And nothing is left beside it, whether or not it was in order."""
    path = tmp_path / "rows.sst"
    writer = SstFileWriter(options())
    writer.open(str(path))
    writer[b"D1"], writer[b"D2"] = b"x", b"y"
    writer.finish()
    digest = tables.digest_of(path)
    tables.check_file(path, b"D1", b"D2")
    for first, last in ((b"D0", b"D2"), (b"D1", b"D3")):
        with pytest.raises(DamagedCommit):
            tables.check_file(path, first, last)
    assert tables.digest_of(path) == digest
    assert list(tmp_path.iterdir()) == [path]
