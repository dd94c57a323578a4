"""The rows of a node's database, byte by byte: programs of other versions read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.commits.change import Change, Sending
from lakefs_fuse.commits.record import Remove
from lakefs_fuse.meta import schema
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE, Flag
from lakefs_fuse.meta.rows import (
    CommitRows,
    Deletion,
    DeletionRows,
    Journal,
    PathRows,
    SequenceRows,
    SingleRow,
)
from lakefs_fuse.meta.tombstones import Tombstone
from lakefs_fuse.meta.tree import Listing, Tree
from lakefs_fuse.vfs.pinning.pinner import Row
from tests.fakes import open_database

NUMBER = bytes.fromhex("0000000000000102")
WRITER = "0badcafe"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(tmp_path / "meta", "lake")
    yield opened
    opened.close()


def rows_of(database: Database, kind: bytes) -> dict[bytes, bytes]:
    return dict(database.scan(kind, bytes([kind[0] + 1])))


def written(database: Database, batch: Batch, kind: bytes) -> dict[bytes, bytes]:
    database.commit(batch)
    return rows_of(database, kind)


def test_identity_of_a_new_database_has_these_bytes(database: Database) -> None:
    assert rows_of(database, b"M") == {b"Midentity": b"lake", b"Mschema": b"2", b"Mlost": b""}
    database.end_loss()
    assert rows_of(database, b"M") == {b"Midentity": b"lake", b"Mschema": b"2"}


def test_tree_rows_have_these_bytes(database: Database) -> None:
    tree, batch = Tree(database), Batch()
    number = tree.objects.number("k", "e", 9)
    flags = Flag.ATTRIBUTES_KNOWN | Flag.XATTRS
    entry = tree.insert(
        batch, ROOT_INODE, b"name", flags, mode=0o644, uid=1, gid=2, size=3, mtime_ns=4, ctime_ns=5, etag="t", stamp=6,
        place=number, offset=7,
    )  # fmt: skip
    tree.set_xattrs(batch, entry.inode, {"user.a": b"v"})
    tree.set_target(batch, entry.inode, b"target")
    tree.set_listing(batch, ROOT_INODE, Listing(8, 1, 0, 0, 0, 2))
    tree.tombstones.write(batch, {b"gone/": Tombstone(9, gone=(("t", 9),))})
    database.commit(batch)
    inode, root = entry.inode.to_bytes(8, "big"), (1).to_bytes(8, "big")
    numbered = number.to_bytes(8, "big")
    assert rows_of(database, b"I") == {b"I" + inode: root + inode}
    assert rows_of(database, b"N") == {b"N" + root + b"name": inode}
    assert rows_of(database, b"D") == {
        b"D" + root + inode: entry.inode.to_bytes(8, "little")
        + bytes.fromhex("8400" "a4010000" "01000000" "02000000" "0300000000000000" "0400000000000000")
        + bytes.fromhex("0500000000000000" "0600000000000000" "01000000" "0700000000000000" "01")
        + b"tname"
    }  # fmt: skip
    assert rows_of(database, b"X") == {b"X" + inode: b"\x81\xa6user.a\xc4\x01v"}
    assert rows_of(database, b"S") == {b"S" + inode: b"target"}
    assert rows_of(database, b"L") == {
        b"L" + root: bytes.fromhex("0800000000000000" "0100000000000000" "00000000" "00000000" "00000000" "02000000")
    }  # fmt: skip
    assert rows_of(database, b"T") == {b"Tgone/": (9).to_bytes(8, "big") + b"t"}
    assert rows_of(database, b"P") == {
        b"P" + numbered: bytes.fromhex("0900000000000000" "0100000000000000" "0300000000000000" "01") + b"ek"
    }  # fmt: skip
    assert rows_of(database, b"Q") == {b"Qk\0e": numbered}
    assert database.get(b"Mobject") == numbered


def test_journal_and_change_rows_have_these_bytes(database: Database) -> None:
    batch = Batch()
    Journal(database).put(batch, "0a", b"record")
    assert written(database, batch, b"J") == {b"J0a": b"record"}
    batch, changes = Batch(), SequenceRows(database, schema.CHANGE, Change)
    change = Change(operations=[Remove("a")], after=3)
    changes.put(batch, 258, change)
    found = written(database, batch, b"C")
    assert list(found) == [b"C" + NUMBER]
    assert msgspec.msgpack.decode(found[b"C" + NUMBER]) == {
        "operations": [["remove", "a", False, "", False, 0]], "objects": [["", "", 0]], "moves": [], "doomed": [],
        "after": 3, "ahead": False, "made": 0,
    }  # fmt: skip
    assert list(changes.items()) == [(258, change)]


def test_deletion_rows_have_these_bytes(database: Database) -> None:
    rows, batch = DeletionRows(database), Batch()
    assert rows.put(batch, Deletion("ü", "e", due_ns=258, removed_ns=5))
    assert written(database, batch, b"G") == {b"G\xc3\xbc": b"\x95\xa2\xc3\xbc\xa1e\xc3\xcd\x01\x02\x05"}
    assert rows_of(database, b"H") == {b"H" + NUMBER + b"\xc3\xbc": b""}
    batch = Batch()
    assert not rows.put(batch, Deletion("ü", "f", due_ns=1))
    assert list(written(database, batch, b"H")) == [b"H" + (1).to_bytes(8, "big") + b"\xc3\xbc"]
    assert [deletion.etag for deletion in rows.due(1)] == ["f"]
    assert list(rows.due(0)) == []
    batch = Batch()
    assert rows.delete(batch, "ü")
    assert written(database, batch, b"G") == rows_of(database, b"H") == {}
    batch = Batch()
    assert [rows.put(batch, Deletion("k", etag, due_ns=258)) for etag in ("a", "b")] == [True, False]
    database.commit(batch)
    assert [deletion.etag for deletion in rows.due(258)] == ["b"]


def test_look_for_due_deletions_begins_behind_those_that_were_made(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier one that comes later is found all the same."""
    rows, begins, scan = DeletionRows(database), list[bytes](), database.scan

    def noted(begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        begins.append(begin)
        return scan(begin, end)

    monkeypatch.setattr(database, "scan", noted)
    batch, late = Batch(), Batch()
    rows.put(late, Deletion("early", "", due_ns=3))
    for number in range(10, 20):
        rows.put(batch, Deletion(f"{number}", "", due_ns=number))
    database.commit(batch)
    for number in range(10, 19):
        batch = Batch()
        rows.delete(batch, f"{number}")
        database.commit(batch)
        assert rows.first_due_ns() == number + 1
        assert begins[-1] == (b"H" if number == 10 else b"H" + number.to_bytes(8, "big") + b"%d" % number)
    database.commit(late)
    assert [deletion.key for deletion in rows.due(18)] == ["early"]
    assert rows.first_due_ns() == 3


def test_commit_rows_have_these_bytes(database: Database) -> None:
    commits = CommitRows(database)
    commits.record_refused(258, WRITER)
    assert rows_of(database, b"R") == {b"R" + NUMBER + b"0badcafe": b""}
    assert commits.refused() == [(258, WRITER)]
    commits.record_applied(258, WRITER)
    assert rows_of(database, b"A") == {b"A" + NUMBER + b"0badcafe": b""}
    assert rows_of(database, b"R") == {}
    assert database.get(b"Mnewest") == NUMBER
    commits.record_complete(258)
    assert database.get(b"Mcomplete") == NUMBER
    commits.forget_since(257)
    assert rows_of(database, b"A") == {}
    assert (database.get(b"Mnewest"), database.get(b"Moutdated")) == ((257).to_bytes(8, "big"), b"")


def test_pin_rows_have_these_bytes(database: Database) -> None:
    batch = Batch()
    PathRows(database, schema.PIN, Row).put(batch, "a/ü", Row(2, True))
    database.commit(batch)
    assert rows_of(database, b"K") == {b"Ka/\xc3\xbc": b"\x82\xa8sequence\x02\xa5whole\xc3"}


def test_single_rows_have_these_bytes(database: Database) -> None:
    sending = SingleRow(database, schema.SINGLE_SENDING, Sending)
    sending.set(Sending(1, "k"))
    raw = database.get(b"Msending")
    assert raw is not None
    assert msgspec.msgpack.decode(raw) == {
        "time": 1, "key": "k", "sequences": [], "passed": [], "paths": [], "operations": 0, "moves": 0
    }  # fmt: skip
    sending.set(None)
    tables.set_writer(database, WRITER)
    tables.set_missing_before(database, 258)
    assert (database.get(b"Msending"), database.get(b"Mwriter"), database.get(b"Mmissing")) == (
        None,
        b"0badcafe",
        NUMBER,
    )
    tables.drop_names(database)
    assert database.get(b"Mreapply") == b""


def test_kinds_of_rows_are_one_byte_each_and_distinct() -> None:
    kinds = [
        value
        for name, value in vars(schema).items()
        if name.isupper() and isinstance(value, bytes) and name != "VERSION"
    ]
    single = [kind for kind in kinds if len(kind) == 1]
    assert len(set(kinds)) == len(kinds)
    assert all(kind.startswith(schema.SINGLE) for kind in kinds if kind not in single)
    assert b"".join(schema.NAME_KINDS) == b"ADILNPQSTX"
    assert b"".join(schema.LOCAL_KINDS) == b"CJ"
