"""Rows of an index that cannot be decoded: they are left out, counted and reported, and nothing else is lost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lakefs_fuse.admin.fsck import Checker, Kind
from lakefs_fuse.commits.record import Mkdir, Put, Remove, Symlink
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.tree import damaged_rows
from tests.admin.lakes import dataset, fold_all, give_commit, give_pack, headless, silent
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock, lake

FILES = dataset(6, size=100)


def damage(database: Database, key: bytes, row: bytes) -> None:
    batch = Batch()
    batch.rows[key] = row
    database.commit(batch)


async def lake_with_damage(kind: bytes, row: bytes) -> tuple[MemoryStore, Clock]:
    """A lake whose index has one row of a kind damaged: that of `data/0003`, `links/link` or `gone`."""
    store, clock = MemoryStore(), Clock()
    give_pack(store, clock, FILES)
    clock.advance(1)
    give_pack(store, clock, {"other/file": b"other"})
    clock.advance(1)
    link = Symlink("links/link", "data", 0, 0, 0, xattrs={"user.a": b"b"})
    give_commit(store, clock, Mkdir("links", 0o755, 0, 0, 0), link, Remove("gone"), writer="0badcaff")
    clock.advance(1)
    async with headless(store, clock) as view:
        entry, named = view.find("data/0003"), view.find("links/link")
        assert entry is not None
        assert named is not None
        numbers = {b"D": entry.parent, b"N": entry.parent, b"I": entry.inode, b"X": named.inode, b"L": entry.parent}
        number = numbers.get(kind, entry.place)
        key = kind + number.to_bytes(8, "big")
        key += {b"D": entry.cookie.to_bytes(8, "big"), b"N": b"0003"}.get(kind, b"")
        if kind == b"T":
            key = b"Tgone"
        elif kind == b"Q":
            key = next(key for key, _ in view.fs.database.scan(b"Q", b"R"))
        damage(view.fs.database, key, row)
        await fold_all(view, 0)
    clock.advance(1000)
    return store, clock


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (b"D", b""), (b"D", b"\xff" * 40), (b"D", bytes(66) + b"\x01\xff" + b"name"), (b"D", bytes(67) + b"a/b"),
        (b"N", b"x"), (b"I", b"too short"), (b"L", b"?"), (b"P", b"\xff"), (b"Q", b"123456789"),
        (b"T", b"12345678\xff"),
        (b"X", b"\xc1"),
    ],
)  # fmt: skip
async def test_damaged_row_of_an_index_is_left_out_counted_and_reported(
    kind: bytes, row: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, clock = await lake_with_damage(kind, row)
    caplog.clear()
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        with caplog.at_level(logging.ERROR):
            names = await mounted.names("data")
            expected = [f"{number:04d}" for number in range(6)]
            assert names in (expected, [name for name in expected if name != "0003"])
            assert ("0003" in names) == (kind != b"D")
            assert await mounted.names("") == ["data", "links", "other"]
            assert await mounted.read("other/file") == b"other"
            if kind == b"P":
                with pytest.raises(FileError, match="not known here"):
                    await mounted.read("data/0002")
            else:
                assert await mounted.read("data/0002") == FILES["data/0002"]
            fs = mounted.fs
            for name in names:
                entry, _ = await fs.namespace.lookup(fs.namespace.directory("data") or 0, name.encode())
                if entry is not None:
                    fs.namespace.tree.entry(entry.inode)
            fs.namespace.tree.named(fs.namespace.directory("data") or 0, b"0003")
            fs.namespace.tree.tombstones.get(b"gone")
            linked = await mounted.found("links/link")
            assert fs.xattr_names(linked.inode) == ([] if kind == b"X" else ["user.a"])
            list(fs.namespace.tree.listings())
            list(fs.namespace.tree.objects.rows())
            for key, _ in fs.database.scan(b"Q", b"R"):
                fs.namespace.tree.objects.find(*[part.decode() for part in key[1:].split(b"\0")])
        namespace = fs.statistics()["namespace"]
        assert isinstance(namespace, dict)
        assert namespace["rocksdb"]["damaged_rows"] == 1
        assert sum("damaged and skipped" in record.message for record in caplog.records) == 1
    async with headless(store, clock) as view:
        done = await Checker(view, quick=True, report=silent).run()
        assert (Kind.ROWS in {problem.kind for problem in done.problems}) == (kind != b"L")  # listings are asked anew
        if kind in (b"D", b"N", b"I"):
            (found,) = (problem for problem in done.problems if problem.kind is Kind.ROWS)
            assert list(found.paths) == (["data/0003"] if kind != b"I" else [])


async def test_fold_of_an_index_with_a_damaged_row_keeps_all_others(tmp_path: Path) -> None:
    store, clock = await lake_with_damage(b"D", b"short")
    async with headless(store, clock) as view:
        await fold_all(view, 0)
    clock.advance(1000)
    async with headless(store, clock) as view:
        assert len(list(damaged_rows(view.fs.database))) == 1
        assert len([path for path, _ in view.files() if path.startswith("data/")]) == 5


async def test_name_of_a_damaged_row_can_be_written_again(tmp_path: Path) -> None:
    store, clock = await lake_with_damage(b"D", b"short")
    give_pack(store, clock, {"data/0003": b"again"}, writer="0badcaf7")
    clock.advance(1)
    give_commit(store, clock, Put("data/0009", 0, 0, 0, 0, 0, 0, 0), writer="0badcaf8")
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert await mounted.read("data/0003") == b"again"
        assert len(await mounted.names("data")) == 7
