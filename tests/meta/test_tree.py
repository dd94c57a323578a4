"""Names and inodes against the simplest thing that could be right: nested dictionaries."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta import schema
from lakefs_fuse.meta import tree as tree_module
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import MTIME_NS_MAX, MTIME_NS_MIN, ROOT_INODE, UNSET, Entry, Flag
from lakefs_fuse.meta.object_table import NUMBER_MAX
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.meta.tombstones import Tombstone
from lakefs_fuse.meta.tree import Listing, Tree, Usage, pack_entry, unpack_entry
from tests.fakes import open_database
from tests.tiers import examples

words = st.integers(0, UNSET)
times = st.integers(MTIME_NS_MIN, MTIME_NS_MAX)
entries = st.builds(
    Entry,
    parent=st.integers(1, 1 << 40),
    cookie=st.integers(1, 1 << 40),
    name=st.binary(min_size=1, max_size=255).filter(
        lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
    ),
    inode=st.integers(2, 1 << 40),
    flags=st.integers(0, 31),
    mode=words,
    uid=words,
    gid=words,
    size=st.integers(0, 1 << 62),
    mtime_ns=times,
    ctime_ns=times,
    etag=st.text(max_size=60),
)


@given(entries)
def test_rows(entry: Entry) -> None:
    assert unpack_entry(entry.parent, entry.cookie, pack_entry(entry)) == entry


class TreeMachine(RuleBasedStateMachine):
    """Directories by number; names are few, so that they collide."""

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.database = open_database(Path(self.directory.name) / "meta", "lake")
        self.tree = Tree(self.database)
        self.model: dict[int, dict[bytes, Entry]] = {ROOT_INODE: {}}
        self.listings: dict[int, Listing] = {}
        self.inodes: set[int] = {ROOT_INODE}
        self.late: list[tuple[Batch, Entry]] = []

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
            self.directory.cleanup()

    def _directory(self, which: int) -> int:
        return sorted(self.model)[which % len(self.model)]

    def _entry(self, which: int) -> Entry | None:
        everything = [entry for names in self.model.values() for entry in names.values()]
        return everything[which % len(everything)] if everything else None

    @rule(which=st.integers(0, 50), name=st.sampled_from((b"a", b"b", b"a!", b"\xff")), directory=st.booleans())
    def insert(self, which: int, name: bytes, directory: bool) -> None:
        parent = self._directory(which)
        sort_name = name + b"/" if directory else name
        if sort_name in self.model[parent]:
            return
        batch = Batch()
        entry = self.tree.insert(batch, parent, name, Flag.DIRECTORY if directory else 0, size=which)
        self.database.commit(batch)
        assert entry.inode not in self.inodes
        self.inodes.add(entry.inode)
        self.model[parent][sort_name] = entry
        if directory:
            self.model[entry.inode] = {}

    @rule(which=st.integers(0, 50))
    def insert_late(self, which: int) -> None:
        """A name that gets its number, and so its cookie, before others are added, and that is committed after them."""
        parent = self._directory(which)
        batch, inode = Batch(), self.database.new_inode()
        self.late.append((batch, self.tree.insert(batch, parent, b"late %d" % inode, 0, inode=inode)))

    @rule()
    def commit_late(self) -> None:
        if self.late:
            batch, entry = self.late.pop()
            if entry.parent in self.model:
                self.database.commit(batch)
                self.inodes.add(entry.inode)
                self.model[entry.parent][entry.name] = entry

    def _forget(self, entry: Entry) -> None:
        del self.model[entry.parent][entry.sort_name]
        if entry.is_dir:
            for child in list(self.model[entry.inode].values()):
                self._forget(child)
            del self.model[entry.inode]
            self.listings.pop(entry.inode, None)

    @rule(which=st.integers(0, 50))
    def remove(self, which: int) -> None:
        entry = self._entry(which)
        if entry is not None:
            batch = Batch()
            self.tree.remove(batch, entry)
            self.database.commit(batch)
            self._forget(entry)

    @rule(which=st.integers(0, 50))
    def renew(self, which: int) -> None:
        entry = self._entry(which)
        if entry is not None and not entry.is_dir:
            batch = Batch()
            renewed = self.tree.renew_inode(batch, entry)
            self.database.commit(batch)
            assert renewed.inode not in self.inodes
            assert self.tree.entry(entry.inode) is None
            self.inodes.add(renewed.inode)
            self.model[entry.parent][entry.sort_name] = renewed

    @rule(which=st.integers(0, 50), where=st.integers(0, 50))
    def rename_over(self, which: int, where: int) -> None:
        """A file takes the name of another, and its cookie."""
        source, target = self._entry(which), self._entry(where)
        if source is None or target is None or source == target or source.is_dir or target.is_dir:
            return
        batch = Batch()
        self.tree.remove(batch, target)
        self.tree.detach(batch, source)
        moved = self.tree.attach(batch, source, target.parent, target.name, cookie=target.cookie)
        self.database.commit(batch)
        self._forget(source)
        self.model[target.parent][target.sort_name] = moved

    @rule(which=st.integers(0, 50), counts=st.tuples(*[st.integers(0, 3)] * 4))
    def set_listing(self, which: int, counts: tuple[int, int, int, int]) -> None:
        directory, listing, batch = self._directory(which), Listing(which, 1, *counts), Batch()
        self.tree.set_listing(batch, directory, listing)
        self.database.commit(batch)
        self.listings[directory] = listing

    @rule(which=st.integers(0, 50))
    def forget_listing(self, which: int) -> None:
        directory, batch = self._directory(which), Batch()
        self.tree.forget_listing(batch, directory)
        self.database.commit(batch)
        self.listings.pop(directory, None)

    @rule()
    def reopen(self) -> None:
        self.late.clear()
        self.database.close()
        self.database = open_database(Path(self.directory.name) / "meta", "lake")
        self.tree = Tree(self.database)

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def agrees(self) -> None:
        for directory, names in self.model.items():
            found = list(self.tree.children(directory))
            assert found == sorted(names.values(), key=lambda entry: entry.cookie)
            assert (next(self.tree.children(directory), None) is None) == (not names)
            prefix, rows_found = self.tree.rows(directory)
            assert [int.from_bytes(key.removeprefix(prefix), "big") for key, _ in rows_found] == [
                entry.cookie for entry in found
            ]
            del rows_found
            assert self.tree.listing(directory) == self.listings.get(directory)
            for sort_name, entry in names.items():
                assert self.tree.named(directory, sort_name) == entry
                assert self.tree.entry(entry.inode) == entry
                shown = names.get(entry.name + b"/", entry)
                assert self.tree.child(directory, entry.name) == shown
                path = self.tree.path(entry.inode)
                assert path is not None
                assert path[-1] == entry.name
        rows = sum(len(names) for names in self.model.values())
        assert len(list(self.database.scan(b"D", b"E"))) == rows
        assert len(list(self.database.scan(b"N", b"O"))) == rows
        assert len(list(self.database.scan(b"I", b"J"))) == rows
        sums = zip(*(list(_counts(listing)) for listing in self.listings.values()), strict=True)
        assert self.tree.hidden == ([sum(column) for column in sums] or [0, 0, 0, 0])


def _counts(listing: Listing) -> tuple[int, int, int, int]:
    return listing.hidden_component, listing.hidden_nul, listing.hidden_long, listing.hidden_conflict


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return open_database(tmp_path / "meta", "lake")


def test_paths(database: Database) -> None:
    tree, batch = Tree(database), Batch()
    parent = ROOT_INODE
    for name in (b"a", b"b", b"c"):
        parent = tree.insert(batch, parent, name, Flag.DIRECTORY).inode
    database.commit(batch)
    assert tree.path(ROOT_INODE) == []
    assert tree.path(parent) == [b"a", b"b", b"c"]
    assert tree.path(999) is None
    found = tree.resolve([b"a", b"b", b"c"])
    assert found is not None
    assert found.inode == parent
    assert tree.resolve([b"a", b"x"]) is None
    assert tree.resolve([]) is None
    database.close()


def test_path_of_a_directory_is_read_once_until_a_directory_moves(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, batch = Tree(database), Batch()
    above = tree.insert(batch, ROOT_INODE, b"a", Flag.DIRECTORY)
    below = tree.insert(batch, above.inode, b"b", Flag.DIRECTORY)
    file = tree.insert(batch, below.inode, b"f", 0)
    database.commit(batch)
    assert tree.path(file.inode) == [b"a", b"b", b"f"]
    with monkeypatch.context() as patched:
        patched.delattr(Tree, "entry")
        assert tree.prefix(below.inode) == "a/b/", "without reading an entry"
    moving = Batch()
    tree.detach(moving, above)
    moved = tree.attach(moving, above, ROOT_INODE, b"c")
    assert tree.prefix(below.inode) == "a/b/", "the batch is not committed yet"
    database.commit(moving)
    assert (tree.prefix(below.inode), tree.path(file.inode)) == ("c/b/", [b"c", b"b", b"f"])
    removing = Batch()
    tree.remove(removing, moved)
    database.commit(removing)
    assert tree.path(below.inode) is None


def test_reading_on_after_a_cookie(database: Database) -> None:
    tree, batch = Tree(database), Batch()
    made = [tree.insert(batch, ROOT_INODE, b"n%d" % number, 0) for number in range(10)]
    database.commit(batch)
    first = list(itertools.islice(tree.children(ROOT_INODE), 4))
    assert first == made[:4]
    batch = Batch()
    tree.remove(batch, made[3])
    tree.remove(batch, made[5])
    database.commit(batch)
    assert list(tree.children(ROOT_INODE, first[-1].cookie)) == [made[4], *made[6:]]
    database.close()


def test_look_for_the_first_name_begins_behind_those_that_were_removed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB reads over their deleted rows one by one: removing a large directory, name by name, would take ever
    longer."""
    tree, batch = Tree(database), Batch()
    made = [tree.insert(batch, ROOT_INODE, b"n%d" % number, 0) for number in range(10)]
    database.commit(batch)
    begins = list[bytes]()
    scan = database.scan

    def noted(begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        begins.append(begin)
        return scan(begin, end)

    monkeypatch.setattr(database, "scan", noted)
    for number, entry in enumerate(made[:9]):
        batch = Batch()
        tree.remove(batch, entry)
        database.commit(batch)
        assert next(tree.children(ROOT_INODE)) == made[number + 1]
        if number:
            assert begins[-1] == schema.ENTRY + schema.NUMBER.pack(ROOT_INODE) + schema.NUMBER.pack(entry.cookie)
    database.close()


def test_look_into_an_emptied_directory_begins_behind_what_was_removed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, batch = Tree(database), Batch()
    late = database.new_inode()
    entry = tree.insert(batch, ROOT_INODE, b"removed", 0)
    database.commit(batch)
    batch = Batch()
    tree.remove(batch, entry)
    database.commit(batch)
    begins = list[bytes]()
    scan = database.scan

    def noted(begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        begins.append(begin)
        return scan(begin, end)

    monkeypatch.setattr(database, "scan", noted)
    for _ in range(2):
        assert next(tree.children(ROOT_INODE), None) is None
    assert begins[-1][9:] > entry.cookie.to_bytes(8, "big")
    batch = Batch()
    made = tree.insert(batch, ROOT_INODE, b"late", 0, inode=late)
    database.commit(batch)
    assert list(tree.children(ROOT_INODE)) == [made]
    database.close()


def test_rows_of_a_directory_are_read_without_what_was_removed_before_and_behind_them(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """READDIR reads them on the trio thread, and RocksDB reads over deleted rows, of later directories as well, one by
    one."""
    tree, batch = Tree(database), Batch()
    gone, stays = tree.insert(batch, ROOT_INODE, b"gone", 0), tree.insert(batch, ROOT_INODE, b"stays", 0)
    database.commit(batch)
    batch = Batch()
    tree.remove(batch, gone)
    database.commit(batch)
    ranges = list[tuple[bytes, bytes]]()
    frozen = database.frozen

    def noted(begin: bytes, end: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        ranges.append((begin, end))
        return frozen(begin, end)

    monkeypatch.setattr(database, "frozen", noted)
    prefix, end = (schema.ENTRY + schema.NUMBER.pack(each) for each in (ROOT_INODE, ROOT_INODE + 1))
    for _ in range(2):
        assert [key for key, _ in tree.rows(ROOT_INODE)[1]] == [prefix + schema.NUMBER.pack(stays.cookie)]
    assert not list(tree.rows(ROOT_INODE, stays.cookie)[1])
    assert ranges[1:] == [(prefix + schema.NUMBER.pack(each), end) for each in (stays.cookie, stays.cookie + 1)]
    batch = Batch()
    tree.remove(batch, stays)
    database.commit(batch)
    for _ in range(2):
        assert not list(tree.rows(ROOT_INODE)[1])
    assert ranges[-1][0] > prefix + schema.NUMBER.pack(stays.cookie)
    database.close()


def test_the_journal(database: Database) -> None:
    journal, batch = Journal(database), Batch()
    journal.put(batch, "one", b"1")
    journal.put(batch, "two", b"2")
    database.commit(batch, sync=True)
    assert dict(journal.records()) == {"one": b"1", "two": b"2"}
    batch = Batch()
    journal.delete(batch, "one")
    database.commit(batch)
    assert dict(journal.records()) == {"two": b"2"}
    database.close()


def test_numbers_of_the_same_object_twice_is_one_number(database: Database) -> None:
    objects = Tree(database).objects
    known = objects.number("a", "e", 1)
    assert objects.numbers([("b", "e", 1), ("a", "e", 1), ("b", "e", 1), ("c", "e", 2)]) == [2, known, 2, 3]
    assert [(row.key, row.size) for row in objects.rows()] == [("a", 1), ("b", 1), ("c", 2)]
    assert objects.plain == 3


def test_bytes_that_files_name_more_often_than_a_row_counts_stay_the_most_that_it_counts(database: Database) -> None:
    objects, batch = Tree(database).objects, Batch()
    number = objects.number("a", "e", 1)
    batch.shares += [(number, 1, 1 << 62)] * 4
    batch.rows[b"Xa"] = b""
    database.commit(batch)
    assert [(row.entries, row.bytes_live) for row in objects.rows()] == [(4, (1 << 63) - 1)]


def test_update_of_a_file_whose_bytes_stay_where_they_are_leaves_the_row_of_its_object(database: Database) -> None:
    tree, batch = Tree(database), Batch()
    pack = tree.objects.number("a", "e", 5)
    before = tree.insert(batch, ROOT_INODE, b"f", 0, place=pack, size=3)
    database.commit(batch)
    changed = Batch()
    tree.update_files(changed, [(before, replace(before, mode=0o600))])
    assert not changed.shares
    tree.update_files(changed, [(before, replace(before, size=2))])
    database.commit(changed)
    assert [(row.entries, row.bytes_live) for row in tree.objects.rows()] == [(1, 2)]


def test_object_beyond_the_last_number_is_refused(database: Database) -> None:
    objects = Tree(database).objects
    database.commit(Batch({schema.SINGLE_OBJECT: schema.NUMBER.pack(NUMBER_MAX - 1)}))
    assert objects.last_number == NUMBER_MAX - 1
    assert objects.number("last", "e", 1) == objects.last_number == NUMBER_MAX
    with pytest.raises(CacheError, match="copy its files"):
        objects.numbers([("last", "e", 1), ("more", "e", 1)])
    assert objects.number("last", "e", 1) == NUMBER_MAX


def test_children_at_paths_are_what_child_answers(database: Database) -> None:
    tree, batch = Tree(database), Batch()
    directory = tree.insert(batch, ROOT_INODE, b"d", Flag.DIRECTORY)
    tree.insert(batch, ROOT_INODE, b"d", 0)
    tree.insert(batch, directory.inode, b"f", 0)
    database.commit(batch)
    found = tree.children_at([b"d/f", b"d", b"d/", b"gone/f", b"d/gone", b"d/f"])
    file, above = tree.child(directory.inode, b"f"), tree.child(ROOT_INODE, b"d")
    assert found == [file, above, above, None, None, file]
    assert tree.child_many([(directory.inode, b"f"), (ROOT_INODE, b"d"), (0, b"f")]) == [file, above, None]


def test_own_etags_are_of_the_name_its_tombstone_or_its_object(database: Database) -> None:
    tree, batch = Tree(database), Batch()
    tree.insert(batch, ROOT_INODE, b"plain", 0, etag="p")
    tree.insert(batch, ROOT_INODE, b"renamed", 0, place=tree.objects.number("old", "o", 1), size=1)
    tree.tombstones.write(batch, {b"gone": Tombstone(1, gone=(("g", 1),))})
    database.commit(batch)
    assert tree.own_etags(["plain", "renamed", "gone", "old", "nothing", "no/where"]) == ["p", "", "g", "o", "", ""]
    assert tree.own_etags(["plain"], ROOT_INODE) == ["p"]


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_usage_counts_what_is_below_a_directory_in_steps(
    database: Database, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(tree_module, "ROWS_COUNTED", rows)
    tree, batch = Tree(database), Batch()
    assert list(tree.usage())[-1] == Usage()
    top = tree.insert(batch, ROOT_INODE, b"top", Flag.DIRECTORY)
    tree.insert(batch, ROOT_INODE, b"beside", 0, size=1000)
    tree.insert(batch, top.inode, b"empty", Flag.DIRECTORY)
    deep = tree.insert(batch, top.inode, b"deep", Flag.DIRECTORY)
    for number in range(5):
        tree.insert(batch, deep.inode, b"%d" % number, 0, size=10)
    tree.insert(batch, deep.inode, b"hidden", Flag.SHADOWED, size=7)
    database.commit(batch)
    *steps, last = tree.usage()
    assert last == Usage(names=9, bytes=1050)
    assert all(before.names <= after.names for before, after in itertools.pairwise([*steps, last]))
    assert list(tree.usage(top.inode))[-1] == Usage(names=7, bytes=50)
    assert (len(steps) > 3) is (rows < 1000)
