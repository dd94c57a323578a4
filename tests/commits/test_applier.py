"""Commits merged into a tree: whatever the order in which they arrive, every node shows the same."""

from __future__ import annotations

import itertools
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakefs_fuse.commits import apply_record as application
from lakefs_fuse.commits.change import Change, merged
from lakefs_fuse.commits.record import (
    OWN,
    THIS,
    Mkdir,
    ObjectRef,
    Operation,
    Put,
    Record,
    Relocate,
    Remove,
    SetAttr,
    Symlink,
    decode,
    encode,
    key_of_copy,
)
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import ETAG_BYTES_MAX, PENDING, ROOT_INODE, Flag
from lakefs_fuse.metrics import NamespaceMetrics
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.namespace.listing_merge import DirectoryMerge
from tests.commits.nodes import NS, START_S, Node, archive, at, node, plain, put
from tests.commits.records import valid_records
from tests.tiers import examples

WRITERS = ("0000000a", "0000000b", "0000000c")
NAMES = ("a", "b", "d/x", "d/y", "d/e/z", "q")
DIRECTORIES = ("d", "d/e", "q")


def mkdir(path: str, mode: int = 0o755) -> Mkdir:
    return Mkdir(path, mode, 0, 0, 0)


# -- the same for everybody


class Writer:
    """A node that commits what it likes and has seen some of what others committed."""

    def __init__(self, made: Node, skew_ns: int) -> None:
        self.node, self.seen, self._skew_ns, self._last = made, set[int](), skew_ns, 0

    def see(self, number: int, commits: list[tuple[Record, frozenset[int]]]) -> None:
        """With everything that its writer had seen."""
        for before in sorted({number, *commits[number][1]} - self.seen, key=lambda index: commits[index][0].time):
            record = commits[before][0]
            self.node.apply(record)
            self._last = max(self._last, record.time)
            self.seen.add(before)

    def act(self, rng: random.Random, tick: int) -> Record:
        self._last = max(self._last + rng.randint(1, 1 << 20), at(tick) + self._skew_ns + rng.randrange(NS))
        made = self.node
        path, directory = rng.choice(NAMES), rng.choice(DIRECTORIES)
        there = [path for path in NAMES if (entry := made.find(path)) is not None and not entry.is_dir]
        what = rng.randrange(9)
        if what == 0:
            return self._commit(mkdir(directory, rng.choice((0o700, 0o755))))
        known = made.find(directory)
        if what == 1 and known is not None and known.is_dir and not made.tree.has_children(known.inode):
            return self._commit(Remove(directory, directory=True))
        if what == 2 and there:
            path = rng.choice(there)
            return self._commit(Remove(path, hides=made.found(path).etag))
        if what in (3, 4) and there:
            return self._change(made.chmod(rng.choice(there), rng.choice((0o600, 0o640, 0o444))))
        if what == 5:
            return self._commit(Symlink(path, rng.choice(("x", "y")), 0, 0, 0))
        if what == 6 and there:
            target = f"moved{rng.randrange(3)}"
            return self._change(made.rename(rng.choice(there), target))
        if what == 7 and made.find(directory) is not None and made.found(directory).is_dir:
            return self._change(made.rename(directory, f"moved-directory{rng.randrange(2)}"))
        return self._commit(put(path, rng.randrange(100), mode=rng.choice((0o600, 0o644))))

    def _commit(self, operation: Operation) -> Record:
        if isinstance(operation, Put):
            return self._change(Change(operations=[msgspec.structs.replace(operation, offset=0)]))
        return self._change(Change(operations=[operation]))

    def _change(self, change: Change) -> Record:
        record = merged([change], self.node.writer, self._last, (0,))
        self.node.apply(record)
        return record


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 32), st.integers(5, 25))
def test_any_order_of_arrival_gives_the_same_tree(seed: int, count: int) -> None:
    """Several writers, who see each other's commits late or in no particular order; clocks that differ by seconds."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        writers = [
            Writer(stack.enter_context(node(Path(root, name), writer=name)), rng.randrange(-3, 4) * NS)
            for name in WRITERS
        ]
        commits: list[tuple[Record, frozenset[int]]] = []
        for tick in range(count):
            writer = rng.choice(writers)
            unseen = [number for number in range(len(commits)) if number not in writer.seen]
            for number in rng.sample(unseen, rng.randint(0, len(unseen))):
                writer.see(number, commits)
            before = frozenset(writer.seen)
            commits.append((writer.act(rng, 10 + tick), before))
            writer.seen.add(len(commits) - 1)
        for writer in writers:
            for number in range(len(commits)):
                writer.see(number, commits)
        nodes = [writer.node for writer in writers]
        for number in range(3):
            nodes.append(stack.enter_context(node(Path(root, f"reader{number}"))))
            for index in orders(rng, commits, by_time=number == 0):
                nodes[-1].apply(commits[index][0])
        expected = nodes[-3].shown()
        for each in nodes:
            assert each.shown() == expected
            assert each.counts() == each.counted_anew()
        again = nodes[-1]
        for record, _ in commits:
            again.apply(record)
        assert again.shown() == expected


def orders(rng: random.Random, commits: list[tuple[Record, frozenset[int]]], *, by_time: bool) -> list[int]:
    """All commits, each after those that its writer had seen."""
    left, order = set(range(len(commits))), list[int]()
    while left:
        ready = [index for index in left if not commits[index][1] & left]
        chosen = min(ready, key=lambda index: commits[index][0].time) if by_time else rng.choice(sorted(ready))
        order.append(chosen)
        left.remove(chosen)
    return order


# -- one name


@pytest.mark.parametrize("late", [False, True])
def test_the_newest_commit_has_the_name(tmp_path: Path, late: bool) -> None:
    with node(tmp_path) as n:
        for seconds in (2, 1) if late else (1, 2):
            n.commit(seconds, put("f", seconds), writer=f"0000000{seconds}")
        assert n.found("f").size == 2
        assert n.found("f").stamp == at(2)


@pytest.mark.parametrize("late", [False, True])
def test_a_removed_name_stays_away(tmp_path: Path, late: bool) -> None:
    with node(tmp_path) as n:
        operations: list[tuple[float, Operation]] = [(2, Remove("f")), (1, put("f"))]
        for seconds, operation in operations if late else operations[::-1]:
            n.commit(seconds, operation)
        assert n.find("f") is None
        n.commit(3, put("f"))
        assert n.found("f").stamp == at(3)
        n.commit(2.5, Remove("f"), writer="0000000f")
        assert n.found("f").stamp == at(3)


def test_applied_twice_is_applied_once(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        records = [
            n.commit(1, mkdir("d"), put("d/f", xattrs={"user.a": b"1"})),
            n.commit(2, Symlink("l", "d", 0, 0, 0)),
        ]
        records.append(n.commit(3, change=n.chmod("d/f", 0o600)))
        records.append(n.commit(4, change=n.rename("d", "e")))
        records.append(n.commit(5, Remove("l")))
        shown, inode = n.shown(), n.found("e/f").inode
        n.watcher.told.clear()
        for record in records:
            n.apply(record)
        assert n.shown() == shown
        assert n.found("e/f").inode == inode
        assert n.counts() == n.counted_anew()


def test_whatever_a_reader_accepts_can_be_applied(tmp_path: Path) -> None:
    with node(tmp_path) as n:

        @given(record=valid_records())
        @settings(max_examples=examples(50), deadline=None)
        def check(record: Record) -> None:
            n.apply(decode(encode(record)))
            assert n.applier.commits.is_applied(record.time, record.writer)

        check()


def test_longest_etags_are_kept_as_they_are(tmp_path: Path) -> None:
    etag = "e" * ETAG_BYTES_MAX
    objects = [ObjectRef(), ObjectRef("elsewhere", etag, 7)]
    with node(tmp_path) as n:
        file = Put("f", 1, 0, 7, 0o644, 0, 0, 0, hides=etag)
        n.apply(Record(writer=n.writer, time=at(1), objects=objects, operations=[file, Remove("g", hides=etag)]))
        row = n.tree.objects.used("elsewhere")
        assert row is not None
        assert (row.etag, n.found("f").etag) == (etag, etag)


FILES = ("a", "d", "d/a", "d/e/a")
OBJECTS = (ObjectRef(), ObjectRef("old", "e1", 1), ObjectRef("older", "e2", 1))


@given(st.lists(st.tuples(st.sampled_from(FILES), st.integers(1, len(OBJECTS) - 1)), max_size=12), st.integers(1, 4))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_of_one_record_are_as_if_each_had_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch, files: list[tuple[str, int]], together: int
) -> None:
    """Also where one takes the last use of an object away that the next one has its bytes in."""
    monkeypatch.setattr(application, "TOGETHER_MAX", together)
    puts = [Put(path, number, 0, 1, 0o644, 0, 0, 0) for path, number in files]
    with tempfile.TemporaryDirectory() as made, node(Path(made) / "one") as one, node(Path(made) / "many") as many:
        one.commit(1, change=Change(operations=list(puts), objects=list(OBJECTS)))
        for number, each in enumerate(puts):
            many.commit(1 + number, change=Change(operations=[each], objects=list(OBJECTS)))
        assert one.shown() == many.shown()
        assert one.counts() == one.counted_anew()
        assert {row.key for row in one.tree.objects.rows()} >= set(one.counts())


def test_which_were_applied_is_remembered(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        for seconds in (1, 3, 2):
            assert not n.applier.commits.is_applied(at(seconds), n.writer)
            n.commit(seconds, put("f"))
            assert n.applier.commits.is_applied(at(seconds), n.writer)
        assert n.applier.commits.newest() == at(3)
        n.applier.commits.forget_before(at(2.5))
        assert [n.applier.commits.is_applied(at(seconds), n.writer) for seconds in (1, 2, 3)] == [False, False, True]
        assert n.applier.commits.newest() == at(3)


def test_the_same_bytes_keep_their_inode_and_others_get_another(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, put("f", offset=10))
        first = n.found("f")
        n.commit(2, put("f", offset=10), writer="0000000b")
        second = n.found("f")
        assert second.inode != first.inode
        assert second.cookie == first.cookie
        there = n.tree.objects.get(second.place)
        assert there is not None
        same = msgspec.structs.replace(put("f", offset=10, mode=0o600), object=1)
        n.apply(
            Record(
                writer="0000000c",
                time=at(3),
                objects=[ObjectRef(), ObjectRef(there.key, there.etag, there.size)],
                operations=[same],
            )
        )
        assert (n.found("f").inode, n.found("f").mode) == (second.inode, 0o600)


def test_a_file_that_is_written_here_keeps_its_inode(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, put("f"))
        inode = n.found("f").inode
        n.watcher.kept.add(inode)
        n.commit(2, put("f", 5), writer="0000000b")
        assert n.found("f").inode == inode
        n.commit(3, Remove("f"), writer="0000000b")
        assert n.found("f").inode == inode


def test_row_of_a_file_that_is_written_here_is_older_than_the_removal_in_the_record_that_put_it(tmp_path: Path) -> None:
    """Another node renamed a file over this one, and its directory; the bytes that are stored here are not the name's
    any more."""
    with node(tmp_path) as n:
        n.commit(1, put("f", hides="e1"))
        n.watcher.kept.add(n.found("f").inode)
        for _ in range(2):
            n.commit(2, put("f", 5, hides="e1"), Remove("f", hides="e1", by_date=True), writer="0000000b")
            tombstone = n.tree.tombstones.get(b"f")
            assert tombstone is not None
            assert 0 < n.found("f").stamp < tombstone.stamp


def test_the_kernel_is_told_of_others_changes_and_not_of_its_own(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        record = n.commit(1, put("f"))
        assert n.watcher.told == [b"f"]
        n.watcher.told.clear()
        n.applier.apply(msgspec.structs.replace(record, time=at(2)), archive(at(2), n.writer), own=True, whole=True)
        assert n.watcher.told == []


# -- plain objects


def test_a_plain_object_that_the_commit_did_not_know_wins_unless_it_is_older(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("f", "old", 10), plain("g", "new", 12), plain("h", "same", 11))
        n.commit(11.5, *(put(name, 7) for name in "fgh"))
        assert [n.found(name).size for name in "fgh"] == [7, 1, 1]
        n.list(plain("f", "old", 10), plain("g", "new", 12), plain("h", "same", 11))
        assert [n.found(name).size for name in "fgh"] == [7, 1, 1]


def test_a_plain_object_that_the_commit_replaced_does_not_come_back(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("f", "hidden", 11))
        n.commit(11.5, put("f", 7, hides="hidden"))
        assert n.found("f").size == 7
        n.list(plain("f", "hidden", 11))
        assert n.found("f").size == 7
        n.list(plain("f", "outside", 11))  # in the same second
        assert (n.found("f").size, n.found("f").etag, n.found("f").stamp) == (1, "outside", 0)


@pytest.mark.parametrize("listed", [False, True])
def test_a_removed_plain_object_does_not_come_back(tmp_path: Path, listed: bool) -> None:
    with node(tmp_path) as n:
        if listed:
            n.list(plain("f", "gone", 11))
        n.commit(11.5, Remove("f", hides="gone"))
        assert n.find("f") is None
        n.list(plain("f", "gone", 11))
        assert n.find("f") is None
        n.list(plain("f", "older", 10))  # of which the writer did not know
        assert n.found("f").etag == "older"
        n.list(plain("f", "again", 11))
        assert n.found("f").etag == "again"


def test_the_same_bytes_put_again_after_their_removal_are_there(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(11.5, Remove("f", hides="gone"))
        n.list(plain("f", "gone", 14))
        assert n.found("f").etag == "gone"


def test_what_commits_say_does_not_go_with_a_listing(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, put("f"), mkdir("d"), Symlink("l", "f", 0, 0, 0), put("e/below"))
        n.list(plain("p", "p", 1), prefixes=("listed/",))
        n.list()
        assert sorted(n.shown()) == ["d/", "e/", "e/below", "f", "l"]


def test_a_directory_of_which_nothing_but_removed_names_is_left_is_a_ghost(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(prefixes=("d/",))
        n.list(plain("d/f", "e", 1), directory="d")
        n.commit(5, Remove("d/f", hides="e"), Remove("d", directory=True))
        assert n.shown() == {}
        assert n.list(prefixes=("d/",)) == [b"d"]  # the object is not deleted yet
        assert n.shown() == {}
        assert n.list(prefixes=("new/",)) == []
        assert sorted(n.shown()) == ["new/"]


@pytest.mark.parametrize("path", ["d/f", "d/e/f"])
def test_directory_with_objects_of_which_only_commits_tell_is_a_ghost_until_it_is_listed(
    tmp_path: Path, path: str
) -> None:
    """Another program has deleted the object since, perhaps, and what is below the directory belongs to other names."""
    with node(tmp_path) as n:
        n.commit(5, Remove("d/renamed", hides="e"), msgspec.structs.replace(told("e1"), path=path))
        assert n.list(prefixes=("d/",)) == [b"d"]
        assert path in n.shown()
        merge = DirectoryMerge(n.tree, NamespaceMetrics(), n.inode(""), prefix="", now_ns=at(6))
        for _ in merge.drop_directory(b"d"):
            pass
        assert n.shown() == {}


def test_directory_with_packed_files_and_objects_of_which_only_commits_tell_stays(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(5, Remove("d/renamed", hides="e"), msgspec.structs.replace(told("e1"), path="d/f"), put("d/g"))
        assert n.list(prefixes=("d/",)) == [b"d"]
        merge = DirectoryMerge(n.tree, NamespaceMetrics(), n.inode(""), prefix="", now_ns=at(6))
        for _ in merge.drop_directory(b"d"):
            pass
        assert "d/g" in n.shown()


def test_a_removed_directory_stays_for_as_long_as_something_is_in_it(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"))
        n.commit(1.5, put("d/late"), writer="0000000b")
        n.commit(2, Remove("d", directory=True))
        assert sorted(n.shown()) == ["d/", "d/late"]
        n.commit(3, Remove("d/late"))
        assert n.shown() == {}
        n.commit(4, mkdir("d"), put("d/f"), Remove("d/f"))
        assert sorted(n.shown()) == ["d/"]


def test_directory_that_a_commit_removes_along_with_a_move_out_of_it_leaves_no_row(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"), put("d/f"))
        renamed = n.rename("d/f", "g")
        removed_first = [Remove("d", directory=True), *renamed.operations]
        n.commit(2, change=msgspec.structs.replace(renamed, operations=removed_first))
        assert [entry.name for entry in n.tree.children(ROOT_INODE)] == [b"g"]


def test_a_file_under_the_name_of_a_directory_comes_into_sight_with_its_end(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, put("x", 9))
        n.commit(2, put("x/below"), writer="0000000b")
        assert n.found("x").is_dir
        n.commit(3, Remove("x/below"))
        assert (n.found("x").is_dir, n.found("x").size) == (False, 9)
        assert not n.found("x").flags & Flag.SHADOWED


# -- what applies to one version


def test_attributes_are_those_of_their_version(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, put("f", 3))
        change = n.chmod("f", 0o600)
        n.commit(2, put("f", 4), writer="0000000b")
        n.commit(3, change=change)
        assert (n.found("f").size, n.found("f").mode) == (4, 0o644)
        n.commit(4, change=n.chmod("f", 0o640))
        assert (n.found("f").mode, n.found("f").stamp) == (0o640, at(2))


def test_who_replaces_a_file_wins_over_who_set_its_attributes_meanwhile(tmp_path: Path) -> None:
    """In either order: the chmod is later, and of the version before."""
    for order in ((0, 1), (1, 0)):
        with node(tmp_path / str(order[0])) as n:
            first = n.commit(1, put("f", 3))
            there = archive(first.time, first.writer)
            attributes = SetAttr("f", 1, 100, 3, "", 0o600, 0, 0, 0)
            records = (
                Record(writer="0000000b", time=at(2), operations=[put("f", 4)]),
                Record(writer="0000000c", time=at(3), objects=[ObjectRef(), there], operations=[attributes]),
            )
            for index in order:
                n.apply(records[index])
            assert (n.found("f").size, n.found("f").mode) == (4, 0o644)


@pytest.mark.parametrize("late", [False, True])
def test_the_last_of_two_changes_of_attributes_counts(tmp_path: Path, late: bool) -> None:
    with node(tmp_path) as n:
        n.commit(1, put("f", 3))
        changes = [(2.0, n.chmod("f", 0o600)), (3.0, n.chmod("f", 0o640))]
        for seconds, change in changes[::-1] if late else changes:
            n.commit(seconds, change=change)
        assert n.found("f").mode == 0o640


@pytest.mark.parametrize("known", ["nothing", "before", "itself"])
def test_attributes_of_a_plain_object_that_is_not_listed_yet(tmp_path: Path, known: str) -> None:
    attributes = SetAttr("f", OWN, 0, 1, "e2", 0o600, 0, 0, 0, xattrs={"user.a": b"1"})
    with node(tmp_path) as n:
        if known != "nothing":
            n.list(plain("f", "e1" if known == "before" else "e2", 10))
        n.commit(20, attributes)
        n.list(plain("f", "e2", 19 if known != "itself" else 10))
        entry = n.found("f")
        assert (entry.etag, entry.mode, n.tree.xattrs(entry.inode)) == ("e2", 0o600, {"user.a": b"1"})
        n.list(plain("f", "e3", 21))
        assert (n.found("f").etag, n.found("f").flags) == ("e3", 0)


@pytest.mark.parametrize("there", ["e1", "e2", ""])
def test_attributes_of_an_object_that_another_program_put_in_place_of_one_of_which_a_commit_tells(
    tmp_path: Path, there: str
) -> None:
    """The store tells whether it did, or whether the commit tells of the newer one."""
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        change = Change(operations=[SetAttr("f", OWN, 0, 1, "e2", 0o600, 0, 0, 0)])
        record = merged([change], "0000000b", at(20), range(1))
        ((doubt,),) = n.applier.doubts(record)
        outdated = {} if doubt.is_there(there, at(5)) else {doubt.path: doubt.etag}
        n.applier.apply(record, archive(record.time, record.writer), outdated=outdated, whole=True)
        if there:
            n.list(plain("f", there, 5))
            assert (n.found("f").etag, n.found("f").mode) == (there, 0o600 if there == "e2" else 0o644)
        else:
            n.list()
            assert n.find("f") is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_object_of_which_a_commit_tells_is_gone_after_a_file_though_another_program_had_replaced_it(
    tmp_path: Path, is_listed: bool
) -> None:
    """Who puts its bytes there again has to say so, whether a listing showed what replaced it, or a commit."""
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        if is_listed:
            n.list(plain("f", "e2", 15))
        change = Change(operations=[SetAttr("f", OWN, 0, 1, "e2", 0o600, 0, 0, 0)])
        record = merged([change], "0000000b", at(20), range(1))
        outdated = {} if is_listed else {"f": "e1"}
        n.applier.apply(record, archive(record.time, record.writer), outdated=outdated, whole=True)
        assert (n.found("f").etag, n.found("f").mode) == ("e2", 0o600)
        n.list()
        n.commit(30, put("f"))
        tombstone = n.tree.tombstones.get(b"f")
        assert tombstone is not None
        assert tombstone.when_gone("e1") == at(30)


def test_attributes_of_a_plain_object_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("f", "newer", 30))
        n.commit(20, SetAttr("f", OWN, 0, 1, "e2", 0o600, 0, 0, 0))
        assert (n.found("f").etag, n.found("f").mode) == ("newer", n.found("f").mode)
        assert not n.found("f").flags & Flag.ATTRIBUTES_KNOWN


def test_attributes_of_a_version_that_is_not_there_bring_nothing_back(tmp_path: Path) -> None:
    """Somebody changes the mode of a plain object that another replaced; what replaced it was removed."""
    with node(tmp_path) as n:
        n.list(plain("f", "e2", 10))
        n.commit(11, Remove("f", hides="e2"))
        n.commit(12, SetAttr("f", OWN, 0, 1, "e1", 0o600, 0, 0, 0))
        for _ in range(2):
            n.list(plain("f", "e2", 10))
            assert n.shown() == {}
        n.list(plain("f", "e3", 13))
        assert n.found("f").etag == "e3"
        n.commit(15, Remove("f", hides="e3"))
        n.commit(16, SetAttr("f", OWN, 0, 1, "e4", 0o600, 0, 0, 0))
        n.list(plain("f", "e4", 13))  # put before the removal, which is of another version
        assert (n.found("f").etag, n.found("f").mode) == ("e4", 0o600)


def test_attributes_of_a_version_that_was_replaced_and_removed_make_the_directory_be_listed(tmp_path: Path) -> None:
    """The listing from before shows neither object, and may count for long."""
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        n.list(plain("f", "e1", 9))
        n.commit(20, told("e2"), Remove("f", hides="e2"))
        assert n.tree.listing(ROOT_INODE) is not None
        n.commit(21, SetAttr("f", OWN, 0, 1, "e1", 0o600, 0, 0, 0))
        assert n.tree.listing(ROOT_INODE) is None
        n.list(plain("f", "e2", 19))
        assert n.shown() == {}


@pytest.mark.parametrize("change", [put("f", 5), Remove("f", by_date=True)])
@pytest.mark.parametrize(("seconds", "is_late"), [(15, False), (20.5, False), (20.5, True)])
def test_copy_of_bytes_that_a_file_does_not_have_any_more_is_not_shown(
    tmp_path: Path, change: Operation, seconds: float, is_late: bool
) -> None:
    """A command copied packed bytes to the file's own key, while another node replaced or removed the file."""
    with node(tmp_path) as n:
        first = n.commit(10, put("f", 3))
        objects = [ObjectRef(), archive(first.time, first.writer)]
        copied = Change(
            operations=[Relocate("f", 1, 100, "", OWN, 0, 3, 0o644, 0, 0, 0, hides="copy")], objects=objects
        )
        commits = [(20, copied), (seconds, Change(operations=[change]))]
        for when, each in sorted(commits, key=lambda each: each[0], reverse=is_late):
            n.commit(when, change=each, writer="0000000b")
        n.list(plain("f", "copy", 20, 3))
        found = n.find("f")
        assert (found is None) if isinstance(change, Remove) else (found is not None and found.size == 5)


def test_a_relocated_file_keeps_its_inode_and_time(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 10))
        n.commit(1, put("g", 4))
        before = n.found("f"), n.found("g")
        pack = n.tree.objects.get(before[1].place)
        assert pack is not None
        n.apply(
            Record(
                writer="0000000b",
                time=at(20),
                objects=[ObjectRef(), ObjectRef(pack.key, pack.etag, pack.size)],
                operations=[
                    Relocate("f", OWN, 0, "e1", THIS, 500, 1, 0o644, 0, 0, at(10), hides="e1"),
                    Relocate("g", 1, 100, "", THIS, 600, 4, 0o644, 0, 0, 0),
                    Relocate("g", 1, 999, "", THIS, 700, 4, 0o644, 0, 0, 0),
                    Relocate("absent", 1, 0, "", THIS, 800, 4, 0o644, 0, 0, 0),
                ],
            )
        )
        for old, new, offset in ((before[0], n.found("f"), 500), (before[1], n.found("g"), 600)):
            assert new.inode == old.inode
            assert new.offset == offset
            assert new.place not in (0, old.place)
        assert n.found("g").stamp == at(1)
        assert n.find("absent") is None
        assert [entry.inode for entry in n.watcher.places] == [before[0].inode, before[1].inode]
        assert n.counts() == n.counted_anew()
        n.list(plain("f", "e1", 10))  # the object is not deleted yet
        assert n.found("f").place
        n.commit(15, put("f", 8), writer="0000000c")  # by somebody who did not know of it
        assert n.found("f").size == 8


def test_an_object_put_before_its_name_was_relocated_by_somebody_who_did_not_see_it(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(20, Relocate("f", OWN, 0, "e1", THIS, 500, 1, 0o644, 0, 0, 0, hides="e1"))
        assert n.found("f").place
        n.list(plain("f", "outside", 15))
        assert n.found("f").etag == "outside"


def test_a_relocated_object_that_was_put_in_place_of_one_that_a_commit_names(tmp_path: Path) -> None:
    """Of which a commit tells later, or none."""
    relocated = Relocate("f", OWN, 0, "e2", THIS, 500, 7, 0o644, 0, 0, at(15), hides="e2")
    with node(tmp_path) as n:
        n.commit(10, Put("f", OWN, 0, 1, 0o600, 0, 0, at(10), hides="e1"))
        n.commit(20, relocated, writer="0000000b")
        packed = n.found("f")
        assert (packed.offset, packed.size, packed.etag, packed.stamp) == (500, 7, "e2", at(10))
        assert packed.place
        n.commit(21, Put("f", OWN, 0, 7, 0o600, 0, 0, at(15), hides="e2"))
        assert n.found("f").place == packed.place, "the object of which this tells is hidden"
        n.list(plain("f", "e3", 19))
        assert n.found("f").etag == "e3", "put there after it was relocated"
        n.commit(30, Put("f", OWN, 0, 1, 0o600, 0, 0, at(10), hides="e4"))
        n.commit(25, relocated, writer="0000000b")
        assert n.found("f").etag == "e4", "a later commit told of another"


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)])
def test_an_object_that_only_its_relocation_tells_of_is_gone_when_its_name_is_replaced(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """By a node that had not heard of the relocation, in the second in which the object was put."""
    commits: list[tuple[float, Put | Relocate]] = [
        (10, Put("f", OWN, 0, 1, 0o600, 0, 0, at(10), hides="e1")),
        (20.3, Relocate("f", OWN, 0, "e2", THIS, 500, 7, 0o644, 0, 0, at(15), hides="e2")),
        (20.6, put("f", 8, hides="e1")),
    ]
    with node(tmp_path) as n:
        for number in order:
            n.commit(commits[number][0], commits[number][1], writer=f"{number:08x}")
        n.list(plain("f", "e2", 20))
        assert n.found("f").size == 8


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 1, 3)])
@pytest.mark.parametrize("is_removed", [False, True])
def test_an_object_that_was_relocated_and_replaced_at_its_key_is_gone(
    tmp_path: Path, order: tuple[int, ...], is_removed: bool
) -> None:
    """By a node that heard of the relocation later. The same bytes are told of again without a date."""
    commits: list[tuple[float, Operation]] = [
        (10, own(10)),
        (20, Relocate("f", OWN, 0, "e1", THIS, 500, 1, 0o644, 0, 0, at(10), hides="e1")),
        (21, own(20, "e2")),
        (25, Remove("f", hides="e2") if is_removed else own(20, "e2")),
        (30, own(29)),
    ]
    with node(tmp_path) as n:
        for number in (*order, 4):
            n.commit(commits[number][0], commits[number][1], writer=f"{number:08x}")
        found = n.find("f")
        assert found is None if is_removed else found is not None and found.etag == "e2"


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 0), (0, 1, 0)])
def test_an_object_that_is_removed_ends_the_file_that_it_replaced_in_one_commit(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """A rename and a write in its place were committed together, and who removed the object had heard of neither."""
    commits: list[tuple[float, list[Operation]]] = [
        (10, [put("f", 8), Put("f", OWN, 0, 1, 0o600, 0, 0, at(10), hides="e1")]),
        (20, [Remove("f", hides="e1")]),
    ]
    with node(tmp_path) as n:
        for number in order:
            n.commit(commits[number][0], *commits[number][1], writer=f"{number:08x}")
        assert n.find("f") is None


def own(time: float, etag: str = "e1") -> Put:
    return Put("f", OWN, 0, 1, 0o600, 0, 0, at(time), hides=etag)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_object_that_was_put_again_is_another_version_for_earlier_commits(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    commits: list[tuple[int, Operation]] = [(12, put("f", 8, hides="e1")), (13, Remove("f", hides="e1"))]
    with node(tmp_path) as n:
        n.commit(10, own(10), writer="0000000a")
        for which in order:
            if which == 2:
                n.commit(14, Remove("f"), own(14), writer="0000000c")
            else:
                time, operation = commits[which]
                n.commit(time, operation, writer=f"0000000{which}")
        assert (n.found("f").etag, n.found("f").place, n.found("f").stamp) == ("e1", 0, at(14))


@pytest.mark.parametrize("is_again", [False, True])
def test_an_object_that_waits_to_be_told_of_is_hidden_by_who_has_seen_it(tmp_path: Path, is_again: bool) -> None:
    """Other nodes leave out what is told of it later, unless it was put there again."""
    with node(tmp_path) as n:
        operations: list[Operation] = [Remove("f"), own(11)] if is_again else [own(11)]
        n.apply_pending(1, Change(operations=operations))
        n.commit(12, put("f", 8, hides="e1"), writer="0000000b")
        assert bool(n.found("f").place) is not is_again


def touched(seconds: float, mode: int = 0o644) -> SetAttr:
    return SetAttr("f", OWN, 0, 1, "e1", mode, 0, 0, at(seconds), xattrs={"user.a": b"1"})


def test_another_mtime_of_another_node_is_another_inode(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 10))
        listed = n.found("f")
        n.commit(11, Put("f", OWN, 0, 1, 0o600, 0, 0, at(10.5), hides="e1"), writer="0000000b")
        put_there = n.found("f")
        assert (put_there.mtime_ns, put_there.mode, put_there.inode != listed.inode) == (at(10.5), 0o600, True)
        n.commit(12, touched(10.5, 0o640), writer="0000000b")
        assert (n.found("f").mode, n.found("f").inode) == (0o640, put_there.inode), "the kernel takes over a mode"
        n.commit(13, touched(5), writer="0000000b")
        entry = n.found("f")
        assert (entry.mtime_ns, entry.inode != put_there.inode) == (at(5), True)
        assert n.tree.xattrs(entry.inode) == {"user.a": b"1"}
        n.commit(14, Relocate("f", OWN, 0, "e1", THIS, 500, 1, 0o644, 0, 0, 0, hides="e1"), writer="0000000b")
        assert (n.found("f").mtime_ns, n.found("f").inode) == (at(5), entry.inode), "its attributes are known"


def test_a_relocated_file_of_which_the_mtime_was_not_known_gets_another_inode(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 10))
        listed = n.found("f")
        n.commit(20, Relocate("f", OWN, 0, "e1", THIS, 500, 1, 0o644, 0, 0, at(5), hides="e1"), writer="0000000b")
        assert (n.found("f").mtime_ns, n.found("f").inode != listed.inode) == (at(5), True)


def test_an_mtime_that_was_read_before_its_commit_is_another_inode(tmp_path: Path) -> None:
    """The kernel has LastModified: it looked the name up before the metadata were read."""
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 10))
        listed = n.found("f")
        batch = Batch()
        n.tree.update(batch, msgspec.structs.replace(listed, mtime_ns=at(5), flags=Flag.ATTRIBUTES_KNOWN))
        n.database.commit(batch)
        n.commit(11, Put("f", OWN, 0, 1, 0o600, 0, 0, at(5), hides="e1"), writer="0000000b")
        spoken_of = n.found("f")
        assert (spoken_of.mtime_ns, spoken_of.inode != listed.inode) == (at(5), True)
        n.commit(12, touched(5), writer="0000000b")
        assert n.found("f").inode == spoken_of.inode


def test_a_file_that_is_open_here_keeps_its_inode_whatever_its_mtime(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 10))
        listed = n.found("f")
        n.watcher.used.add(listed.inode)
        n.commit(13, touched(5), writer="0000000b")
        assert (n.found("f").mtime_ns, n.found("f").inode) == (at(5), listed.inode)


def test_an_mtime_that_was_set_here_keeps_the_inode(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 10))
        listed = n.found("f")
        record = Record(writer=n.writer, time=at(13), operations=[touched(5)])
        n.applier.apply(record, archive(record.time, record.writer), own=True, whole=True)
        assert (n.found("f").mtime_ns, n.found("f").inode) == (at(5), listed.inode)


# -- moves


def test_moves_keep_inodes(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"), mkdir("d/e"), put("d/e/packed"), Symlink("d/link", "e", 0, 0, 0))
        n.list(plain("d/plain", "e1", 0), directory="d")
        inodes = {path: n.found(path).inode for path in ("d", "d/e", "d/e/packed", "d/link", "d/plain")}
        n.commit(2, change=n.rename("d", "moved"))
        assert {path: n.found("moved" + path[1:]).inode for path in inodes} == inodes
        assert n.find("d") is None
        row = n.tree.objects.get(n.found("moved/plain").place)
        assert row is not None
        assert (row.key, row.etag) == ("d/plain", "e1")
        assert n.list(prefixes=("d/",)) == [b"d"]
        assert n.find("d") is None


@pytest.mark.parametrize("is_pending", [True, False])
def test_rename_made_here_moves_the_ctime_of_the_directory_or_link_itself(tmp_path: Path, is_pending: bool) -> None:
    with node(tmp_path, clock_ns=lambda: at(5)) as n:
        n.commit(1, mkdir("d"), mkdir("d/e"), put("d/f"), Symlink("link", "d", 0, 0, 0))
        renames = [n.rename("d", "moved"), n.rename("link", "other")]
        for number, change in enumerate(renames, 1):
            if is_pending:
                n.apply_pending(number, change)
            else:
                record = merged([change], n.writer, at(5) + number)
                n.applier.apply(record, archive(record.time, n.writer), own=True, whole=True)
        moved = {path: n.found(path).ctime_ns for path in ("moved", "other", "moved/e", "moved/f")}
        later = 0 if is_pending else 1
        assert moved == {
            "moved": at(5) + later, "other": at(5) + 2 * later, "moved/e": at(1), "moved/f": at(1),
        }  # fmt: skip


@pytest.mark.parametrize("seconds", [5, 2e9])
def test_time_of_a_directory_that_was_set_counts_until_a_name_changes(tmp_path: Path, seconds: float) -> None:
    """Also one in the future."""
    with node(tmp_path) as n:
        n.commit(10, msgspec.structs.replace(mkdir("d"), mtime_ns=at(seconds)))
        assert n.found("d").mtime_ns == at(seconds)
        n.commit(20, put("d/f"))
        assert n.found("d").mtime_ns == at(20)


def test_directory_that_a_pending_move_makes_has_the_time_of_the_change(tmp_path: Path) -> None:
    """What made it visible went with names that were dropped: the journal is applied again over those of an index."""
    with node(tmp_path, clock_ns=lambda: at(5)) as n:
        n.commit(1, put("f"))
        inode = n.inode("f")
        n.apply_pending(1, n.rename("f", "d/f"))
        assert n.inode("d/f") == inode
        assert (n.found("d").mtime_ns, n.found("d").ctime_ns) == (at(5), at(5))


def test_what_is_being_written_moves_along(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"), put("d/f"))
        local = n.dirty("d/new")
        change = n.rename("d", "moved")
        change = msgspec.structs.replace(
            change, operations=[op for op in change.operations if not op.path.endswith("/new")]
        )
        n.commit(2, change=change)
        assert n.found("moved/new").inode == local.inode
        assert n.find("d") is None


@pytest.mark.parametrize(
    ("operations", "stays"),
    [
        ([put("f", 3)], True),
        ([put("f", 3), Remove("f")], True),
        ([Symlink("f", "there", 0, 0, 0), Remove("f")], True),
        ([put("f", 3), put("f", 4, offset=200)], False),
    ],
)
def test_what_came_over_a_record_stays_when_that_is_applied_again(
    tmp_path: Path, operations: list[Operation], stays: bool
) -> None:
    """A file that is not stored yet has the stamp of what it replaced. Where the record says more than that of the
    name, the file itself is in it."""
    with node(tmp_path) as n:
        record = n.commit(1, *operations)
        before = n.find("f")
        if before is not None:
            n.tree.remove(batch := Batch(), before)
            n.database.commit(batch)
        local = msgspec.structs.replace(n.dirty("f"), stamp=before.stamp if before is not None else 0)
        n.tree.update(batch := Batch(), local)
        n.database.commit(batch)
        n.apply(record)
        assert (n.found("f") == local) is stays
        n.commit(2, put("f", 5))
        assert not n.found("f").is_local


def test_a_move_that_does_not_cover_what_is_here_leaves_it(tmp_path: Path) -> None:
    """A file that the renaming node did not know stays under the old name."""
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"), put("d/f", 3))
        change = n.rename("d", "moved")
        n.commit(1.5, put("d/unknown", 5), writer="0000000b")
        n.commit(2, change=change)
        assert sorted(n.shown()) == ["d/", "d/unknown", "moved/", "moved/f"]


def test_a_move_over_something_newer_gives_way(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, put("a", 3))
        change = n.rename("a", "b")
        n.commit(5, put("b", 9), writer="0000000b")
        n.commit(2, change=change)
        assert {path: shown[5] for path, shown in n.shown().items()} == {"b": 9}


def test_move_over_a_newer_object_that_a_listing_does_not_show_any_more_gives_way(tmp_path: Path) -> None:
    """Another program deleted the object of which a commit told; for who reads all commits, that replaced the file."""
    with node(tmp_path) as n:
        n.commit(1, put("a", 3))
        change = n.rename("a", "b")
        n.commit(5, Put("b", OWN, 0, 1, 0o644, 0, 0, 0, hides="e1"), writer="0000000b")
        n.list()
        n.commit(2, change=change)
        assert not n.shown()


@pytest.mark.parametrize("is_below", [False, True])
def test_object_that_a_file_hid_stays_gone_where_a_rename_that_does_not_name_it_moves_the_file(
    tmp_path: Path, is_below: bool
) -> None:
    """Its writer had not heard of the newest version of the file."""
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"), put("d/f", 3))
        change = n.rename("d", "moved") if is_below else n.rename("d/f", "moved")
        n.commit(1.5, put("d/f", 5, hides="e1"), writer="0000000b")
        n.commit(1.8, change=change)
        assert n.found("moved/f" if is_below else "moved").size == 3
        n.commit(3, mkdir("d"))
        n.list(plain("d/f", "e1", 1), directory="d")
        assert n.find("d/f") is None


def test_directory_with_a_listed_name_that_is_no_text_is_moved_by_another_node(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"))
        n.list(plain("d/\ud800", "e1", 0), directory="d")
        n.commit(2, change=Change(operations=[mkdir("e"), Remove("d", directory=True)], moves=[("d", "e")]))
        assert n.found("e").is_dir


def test_a_name_that_is_renamed_twice_in_one_commit_is_two_things(tmp_path: Path) -> None:
    """What came to have the name after the first rename goes into what had it before."""
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"))
        twice = Change(
            operations=[mkdir("e"), Remove("d", directory=True), mkdir("d"), mkdir("e/d"), Remove("d", directory=True)],
            moves=[("d", "e"), ("d", "e/d")],
        )
        n.commit(2, change=twice)
        assert sorted(n.shown()) == ["e/", "e/d/"]


def test_the_second_of_two_files_that_one_commit_renames_to_a_name_replaces_the_first(tmp_path: Path) -> None:
    """A name has one row in its directory's listing: the other would be listed for good, and never be found."""
    with node(tmp_path) as n:
        n.commit(1, put("a", 1), put("b", 2), put("c", 3))
        builder = n.change()
        for old in "ab":
            builder.put("c", n.found(old), key=old)
            builder.operations.append(Remove(old))
            builder.moves.append((old, "c"))
        n.commit(2, change=builder.change())
        assert [(entry.name, entry.size) for entry in n.tree.children(ROOT_INODE)] == [(b"c", 2)]
        assert n.found("c").size == 2
        n.commit(3, Remove("c"))
        assert not n.shown()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_attributes_set_after_a_rename_in_the_same_commit_leave_the_file(tmp_path: Path, count: int) -> None:
    """The history of the new name begins with what the commit has put there, not with what was there before."""
    with node(tmp_path) as n:
        n.commit(1, put("a", 5))
        renamed = n.rename("a", "b")
        (place,) = (each for each in renamed.operations if isinstance(each, Put))
        modes = [
            SetAttr("b", place.object, place.offset, place.size, "", 0o600 + number, 0, 0, 0) for number in range(count)
        ]
        n.commit(2, change=msgspec.structs.replace(renamed, operations=[*renamed.operations, *modes]))
        assert n.found("b").mode == 0o600 + count - 1
        n.commit(4, Remove("c"), writer="0000000b")
        late = SetAttr("b", THIS, place.offset, place.size, "", 0o755, 0, 0, 0)
        n.commit(1.5, late, writer="0000000b")  # of another version, and late: the history of the name decides
        assert n.found("b").mode == 0o600 + count - 1


def test_two_things_that_are_renamed_to_one_name_in_one_commit_leave_one_row(tmp_path: Path) -> None:
    """The second replaced the first there: nothing comes into sight when it goes."""

    def made(path: str) -> list[Operation]:
        return [mkdir(path), Symlink(path + "l", "same", 0, 0, 0)]

    def removed(path: str) -> list[Operation]:
        return [Remove(path, directory=True), Remove(path + "l", by_date=True)]

    with node(tmp_path) as n:
        n.commit(1, *made("a"), *made("b"))
        moves = [("a", "c"), ("b", "c"), ("al", "cl"), ("bl", "cl")]
        twice = Change(operations=[*made("c"), *removed("a"), *made("c"), *removed("b")], moves=moves)
        n.commit(2, change=twice)
        assert sorted(n.shown()) == ["c/", "cl"]
        n.commit(3, *removed("c"))
        assert not n.shown()


# -- changes made here


def test_a_pending_change_is_newer_than_any_commit_until_it_has_a_time(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        mine = Change(operations=[mkdir("d", 0o700), Remove("f"), Symlink("l", "mine", 0, 0, 0)])
        n.commit(1, put("f"))
        n.apply_pending(1, mine)
        assert sorted(n.shown()) == ["d/", "l"]
        n.commit(100, put("f"), mkdir("d", 0o711), Symlink("l", "theirs", 0, 0, 0), writer="0000000b")
        assert sorted(n.shown()) == ["d/", "l"]
        n.applier.restamp([(mine, PENDING | 1)], at(200))
        assert [n.found(path).stamp for path in ("d", "l")] == [at(200)] * 2
        n.commit(201, put("f"), writer="0000000b")
        assert n.found("f").stamp == at(201)


@pytest.mark.parametrize("change", [Remove("f", by_date=True), Symlink("f", "mine", 0, 0, 0)])
@pytest.mark.parametrize("is_later", [True, False])
def test_object_told_of_beside_a_pending_change_counts_by_the_time_of_its_commit(
    tmp_path: Path, change: Operation, is_later: bool
) -> None:
    """Another node's commit is polled while the commit of this node's change is under way, and again afterwards."""
    with node(tmp_path) as n:
        mine = Change(operations=[change])
        n.apply_pending(1, mine)
        seconds = 30 if is_later else 10
        n.commit(seconds, told("e1"), writer="0000000b")
        n.applier.restamp([(mine, PENDING | 1)], at(20))
        n.commit(seconds, told("e1"), writer="0000000b")
        found, tombstone = n.find("f"), n.tree.tombstones.get(b"f")
        assert (found is not None and found.is_plain) == is_later
        assert not (is_later and tombstone is not None and tombstone.when_gone("e1"))


@pytest.mark.parametrize("dated_s", [0, START_S + 5])
def test_object_that_is_there_again_beside_a_pending_removal_of_another_is_the_file(
    tmp_path: Path, dated_s: int
) -> None:
    """Its commit removes the name first, which ends no other version, and hides nothing where it has no effect."""
    with node(tmp_path) as n:
        n.commit(1, told("e1"), writer="0000000b")
        mine = Change(operations=[Remove("f", hides="e1")])
        n.apply_pending(1, mine)
        n.commit(10, Remove("f"), msgspec.structs.replace(told("e2"), dated_s=dated_s), writer="0000000b")
        n.applier.restamp([(mine, PENDING | 1)], at(20))
        n.list(plain("f", "e2", 5))
        assert n.found("f").etag == "e2"
        n.list(plain("f", "e1", 5))
        assert n.find("f") is None


@pytest.mark.parametrize("is_in_order", [True, False])
def test_object_told_of_beside_a_pending_removal_of_another_replaces_what_is_elsewhere(
    tmp_path: Path, is_in_order: bool
) -> None:
    """The file elsewhere came over the version that is removed here, and the object over the file."""
    with node(tmp_path) as n:
        n.commit(1, told("e1"), writer="0000000b")
        mine = Change(operations=[Remove("f", hides="e1")])
        n.apply_pending(1, mine)
        theirs = (10, put("f", hides="e1"), "0000000b"), (11, told("e2"), "0000000c")
        for seconds, operation, writer in theirs if is_in_order else reversed(theirs):
            n.commit(seconds, operation, writer=writer)
        assert n.found("f").etag == "e2"
        n.applier.restamp([(mine, PENDING | 1)], at(20))
        n.list(plain("f", "e2", 5))
        assert n.found("f").etag == "e2"


def test_object_that_is_removed_here_stays_so_when_what_told_of_it_is_committed_again(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.apply_pending(1, Change(operations=[told("e1")]))
        n.apply_pending(2, Change(operations=[Remove("f", hides="e1")]))
        n.applier.restamp([(Change(operations=[told("e1")]), PENDING | 1)], at(1))
        record = Record(writer=n.writer, time=at(9), operations=[told("e1")])
        n.applier.apply(record, archive(record.time, record.writer), own=True, whole=True)
        assert n.find("f") is None


def test_attributes_set_here_count_from_their_commit_on(tmp_path: Path) -> None:
    """Another node's came between the call and the commit: ours is the later commit, for every node."""
    with node(tmp_path) as n:
        n.commit(1, put("f"))
        mine = n.chmod("f", 0o600)
        theirs = n.chmod("f", 0o640)
        n.apply_pending(1, mine)
        assert n.found("f").mode == 0o600
        n.commit(50, change=theirs, writer="0000000b")
        n.applier.restamp([(mine, PENDING | 1)], at(60))
        assert n.found("f").mode == 0o600


def test_changes_that_get_their_time_together_have_it_as_if_one_after_the_other(tmp_path: Path) -> None:
    """The second sets attributes of what the first made; the third removes one of two names of the first."""
    with node(tmp_path) as n:
        made = Change(operations=[mkdir("d", 0o700), Symlink("l", "mine", 0, 0, 0)])
        n.apply_pending(1, made)
        changed = Change(operations=[mkdir("d", 0o711)])
        n.apply_pending(2, changed)
        removed = Change(operations=[Remove("l")])
        n.apply_pending(3, removed)
        changes = enumerate((made, changed, removed), 1)
        n.applier.restamp([(change, PENDING | number) for number, change in changes], at(30))
        assert (n.found("d").stamp, n.found("d").mode) == (at(30), 0o711)
        tombstone = n.tree.tombstones.get(b"l")
        assert tombstone is not None
        assert (tombstone.newest, tombstone.floor < PENDING) == (at(30), True)


def test_attributes_that_get_their_time_with_the_file_that_they_are_of_stay(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        file = Put("f", 0, 0, 1, 0o644, 0, 0, 0)
        made = Change(objects=[ObjectRef("k", "e1", 1)], operations=[file])
        n.apply_pending(1, made)
        changed = n.chmod("f", 0o600)
        n.apply_pending(2, changed)
        n.applier.restamp([(change, PENDING | number) for number, change in enumerate((made, changed), 1)], at(30))
        found = n.found("f")
        assert (found.stamp, found.ctime_ns, found.mode) == (at(30), at(30), 0o600)


def test_what_is_being_written_stays_where_another_node_renames_a_file_over_it(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(10, put("a", 7), writer="0000000b")
        n.list(plain("f", "e1", 5))
        inode = n.inode("f")
        n.watcher.kept.add(inode)
        n.commit(20, change=n.rename("a", "f"), writer="0000000b")
        assert (n.inode("f"), n.find("a")) == (inode, None)


# -- a commit that names a version speaks of that version alone


def told(etag: str) -> Put:
    """The plain object of this ETag is the file."""
    return Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides=etag)


@pytest.mark.parametrize("is_removal_first", [True, False])
@pytest.mark.parametrize("removal_s", [20, 40])
def test_removed_version_does_not_come_back_when_its_writer_tells_of_it_late(
    tmp_path: Path, is_removal_first: bool, removal_s: int
) -> None:
    """Whichever of the two times is the later one, and whichever arrives first."""
    with node(tmp_path) as n:
        commits: list[tuple[int, Operation]] = [(removal_s, Remove("f", hides="e1")), (30, told("e1"))]
        for seconds, operation in commits if is_removal_first else reversed(commits):
            n.commit(seconds, operation, writer="0000000b")
        assert n.find("f") is None


def test_object_that_a_file_elsewhere_has_replaced_does_not_come_back(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(20, put("f", 7, hides="e1"))
        n.commit(30, told("e1"), writer="0000000b")
        assert n.found("f").size == 7
        n.commit(40, Remove("f"), told("e1"), writer="0000000b")
        assert (n.found("f").place, n.found("f").etag) == (0, "e1"), "who knew of that put the same bytes again"


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0), (1, 0, 1, 0)])
def test_bytes_that_are_there_again_stay_though_the_removal_before_is_applied_again(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """The removal has a date, what is there again has none: the two are not compared."""
    commits: list[tuple[int, list[Operation]]] = [
        (20, [Remove("f", hides="e1", dated_s=START_S + 8)]),
        (21, [Remove("f"), told("e1")]),
    ]
    with node(tmp_path) as n:
        for number in order:
            seconds, operations = commits[number]
            n.commit(seconds, *operations, writer=f"0000000{number}")
        assert n.found("f").etag == "e1"


def test_own_commit_about_an_object_leaves_a_file_elsewhere_that_replaced_it_meanwhile(tmp_path: Path) -> None:
    """The node heard of that while its commit, which renames the object, was on its way."""
    with node(tmp_path) as n:
        n.commit(20, put("f", 7, hides="e1"), writer="0000000b")
        record = merged([Change(operations=[told("e1"), Remove("f", hides="e1")])], n.writer, at(30))
        n.applier.apply(record, archive(record.time, record.writer), own=True, whole=True)
        assert n.found("f").size == 7


@pytest.mark.parametrize("removed_at", [20, 31])
def test_own_commit_about_an_object_does_not_bring_it_back_after_another_removed_it(
    tmp_path: Path, removed_at: int
) -> None:
    """The node had listed another program's object, and heard of its removal while its commit about it was on its way,
    whichever of the two is dated later."""
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 10))
        n.commit(removed_at, told("e1"), Remove("f", hides="e1", dated_s=START_S + 10), writer="0000000b")
        record = merged([Change(operations=[told("e1")])], n.writer, at(30))
        n.applier.apply(record, archive(record.time, record.writer), own=True, whole=True)
        assert n.find("f") is None


@pytest.mark.parametrize("dated_s", [0, START_S + 5])
@pytest.mark.parametrize("is_removed", [True, False])
def test_file_that_is_renamed_back_is_gone_if_it_is_removed_later(
    tmp_path: Path, is_removed: bool, dated_s: int
) -> None:
    """In any order, and whichever node removed the object before that, whatever its date."""
    kinds = 5 if is_removed else 4
    with node(tmp_path) as n:
        for order in itertools.permutations(range(kinds)):
            path = "".join(map(str, order))
            removal = Remove(path, hides="e1", dated_s=dated_s)
            own = Put(path, OWN, 0, 1, 0o644, 0, 0, 0, hides="e1")
            back = Put(path, 1, 0, 1, 0o644, 0, 0, 0)
            operations: list[Operation] = [own, removal, removal, back, removal]
            for number in order:
                change = Change(operations=[operations[number]], objects=[ObjectRef(), ObjectRef(path, "e1", 1)])
                n.commit(20 + number, change=change, writer=f"0000000{number}")
            assert (n.find(path) is None) is is_removed, path


@pytest.mark.parametrize("is_moved", [True, False])
def test_file_that_is_renamed_back_over_what_was_written_in_its_place_is_what_lies_there(
    tmp_path: Path, is_moved: bool
) -> None:
    """By who had not heard of the rename; also where the rows of the renamed file move."""
    objects = [ObjectRef(), ObjectRef("f", "e1", 1)]
    away, back = [Put(path, 1, 0, 1, 0o644, 0, 0, 0, hides=hides) for path, hides in (("g", ""), ("f", "e2"))]
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        for seconds, put_, removal, move in (
            (20, away, Remove("f", hides="e1"), ("f", "g")),
            (30, back, Remove("g", by_date=True), ("g", "f")),
        ):
            change = Change(operations=[put_, removal], objects=objects, moves=[move] if is_moved else [])
            n.commit(seconds, change=change)
            if seconds == 20:
                n.commit(21, told("e2"), writer="0000000b")
        n.list(plain("f", "e2", 20))
        assert n.found("f").etag == "e2"


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (Remove("f", by_date=True), "nothing"),
        (put("f", 8), 8),
        (None, 9),
        (Relocate("f", 1, 0, "", 3, 0, 7, 0o644, 0, 0, 0), 9),
    ],
)
@pytest.mark.parametrize("seconds", [15, 20.5])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2)])
def test_other_bytes_for_a_version_that_was_removed_replaced_or_copied_meanwhile(
    tmp_path: Path, other: Operation | None, shown: object, seconds: int, order: tuple[int, ...]
) -> None:
    """Its writer had heard of the rename, and so has whoever hears of it."""
    objects = [ObjectRef(), ObjectRef("a", "e1", 7), ObjectRef("a", "e2", 9)]
    objects.append(ObjectRef(key_of_copy("c", objects[1]), "e3", 7))
    renamed = Put("f", 1, 0, 7, 0o644, 0, 0, 0)
    replaced = Put("f", 2, 0, 9, 0o600, 1, 1, 5, xattrs={"user.x": b"1"}, replaces=1)
    commits = [(10, renamed), (20, other), (seconds, replaced)]
    with node(tmp_path) as n:
        for number in order:
            when, operation = commits[number]
            if operation is not None:
                n.commit(when, change=Change(operations=[operation], objects=objects), writer=f"0000000{number}")
        found = n.find("f")
        assert (found.size if found is not None else "nothing") == shown
        if shown == 9:
            assert found is not None
            assert (found.stamp, found.mode, found.mtime_ns, n.tree.xattrs(found.inode)) == (
                at(10),
                0o600,
                5,
                {"user.x": b"1"},
            )


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("is_removal_first", [True, False])
def test_removal_leaves_a_version_that_it_does_not_name(tmp_path: Path, is_there: bool, is_removal_first: bool) -> None:
    """Where the store has it: else the removal's writer had seen one that came after it."""
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        commits: list[tuple[int, Operation]] = [(40, Remove("f", hides="e1")), (30, told("e2"))]
        for seconds, operation in commits if is_removal_first else reversed(commits):
            record = merged([Change(operations=[operation])], "0000000b", at(seconds))
            asked = [doubt for some in n.applier.doubts(record) for doubt in some if doubt.removed_ns]
            outdated = {} if is_there else {doubt.path: doubt.etag for doubt in asked}
            n.applier.apply(record, archive(record.time, record.writer), outdated=outdated, whole=True)
        found = n.find("f")
        assert (found.etag if found is not None else "") == ("e2" if is_there else "")


def apply_late(n: Node, seconds: float, operation: Operation, there: str) -> int:
    """Apply another node's commit, with what the store answers if it has this version; return how much was asked."""
    record = merged([Change(operations=[operation])], "0000000b", at(seconds))
    asked = [doubt for some in n.applier.doubts(record) for doubt in some]
    outdated = {doubt.path: doubt.etag for doubt in asked if not doubt.is_there(there, at(5))}
    n.applier.apply(record, archive(record.time, record.writer), outdated=outdated, whole=True)
    return len(asked)


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("there", ["e1", "e2"])
def test_late_removal_does_not_show_what_the_removed_version_replaced(
    tmp_path: Path, there: str, is_gone: bool
) -> None:
    """The version that it names is known here, or has been removed again: the store tells of the one before."""
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        n.commit(30, told("e2"))
        if is_gone:
            n.commit(40, Remove("f", hides="e2"))
        assert apply_late(n, 20, Remove("f", hides="e2"), there) == 1
        found = n.find("f")
        assert (found.etag if found is not None else "") == ("e1" if there == "e1" else "")


def test_store_is_not_asked_about_versions_that_other_commits_removed_or_replaced(tmp_path: Path) -> None:
    for name, before in (("removed", Remove("f", hides="e1")), ("packed", put("f", 3))):
        with node(tmp_path / name) as n:
            n.commit(10, told("e1"))
            n.commit(15, before)
            n.commit(30, told("e2"))
            assert apply_late(n, 20, Remove("f", hides="e2"), "e2") == 0


def test_object_that_is_older_as_the_store_says_does_not_come_back_by_the_time_of_a_clock_ahead(
    tmp_path: Path,
) -> None:
    """This node stored it while its clock was an hour ahead."""
    with node(tmp_path) as n:
        n.list(ObjectMeta("f", 1, "e1", at(3600) + 1))
        assert apply_late(n, 20, put("f", 7), "e1") == 1
        assert n.found("f").size == 7
        n.commit(40, Remove("f", by_date=True))
        n.commit(30, Remove("f", hides="e9"), writer="0000000c")
        assert n.find("f") is None


def test_version_that_is_put_again_counts_although_it_was_gone(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        n.commit(30, told("e2"))
        assert apply_late(n, 20, Remove("f", hides="e2"), "e2") == 1
        n.commit(40, msgspec.structs.replace(told("e1"), dated_s=at(40) // NS))
        n.commit(60, Remove("f", hides="e3"), writer="0000000c")
        n.commit(50, SetAttr("f", OWN, 0, 1, "e1", 0o600, 0, 0, 0), writer="0000000d")
        assert (n.found("f").etag, n.found("f").mode) == ("e1", 0o600)


@pytest.mark.parametrize("is_late", [False, True])
def test_object_of_an_unpacked_file_goes_with_a_removal_in_the_same_second(tmp_path: Path, is_late: bool) -> None:
    unpacked = Change(
        operations=[Relocate("f", 1, 100, "", OWN, 0, 7, 0o644, 0, 0, 0, hides="e1")],
        objects=[ObjectRef(), archive(at(10), "00000001")],
    )
    with node(tmp_path) as n:
        n.commit(10, put("f", 7))
        if not is_late:
            n.commit(29.2, change=unpacked, writer="0000000b")
        n.commit(29.5, Remove("f", by_date=True))
        if is_late:
            n.commit(29.2, change=unpacked, writer="0000000b")
        n.list(plain("f", "e1", 29))
        assert n.find("f") is None


@pytest.mark.parametrize("is_late", [False, True])
def test_removal_of_a_plain_object_leaves_the_file_that_was_put_over_it(tmp_path: Path, is_late: bool) -> None:
    """Its writer had not heard of that file. A relocated one has the bytes that the removal names."""
    with node(tmp_path) as n:
        commits: list[tuple[int, Operation]] = [(20, put("f", 7, hides="e1")), (30, Remove("f", hides="e1"))]
        for seconds, operation in reversed(commits) if is_late else commits:
            n.commit(seconds, operation, writer=f"{seconds:08x}")
        assert n.found("f").size == 7
        n.commit(40, Remove("f", by_date=True))
        assert n.find("f") is None
        n.list(plain("g", "e2", 10))
        n.commit(50, Relocate("g", OWN, 0, "e2", THIS, 100, 1, 0o644, 0, 0, 0, hides="e2"))
        assert n.found("g").place
        n.commit(60, Remove("g", hides="e2"), writer="0000000b")
        assert n.find("g") is None


@pytest.mark.parametrize(
    ("seconds", "operation"),
    [
        (10.2, put("f", 8, hides="e1")),
        (10.2, Remove("f", hides="e1")),
        (10.2, told("e1")),
        (11, Remove("f", hides="e1")),
        (11, Remove("f", hides="e1", dated_s=START_S + 10)),
    ],
)
@pytest.mark.parametrize("is_listed_first", [True, False])
def test_file_elsewhere_that_a_listed_object_hid_is_back_when_that_goes_alone(
    tmp_path: Path, seconds: float, operation: Remove | Put, is_listed_first: bool
) -> None:
    """Its commit is applied again, where the node has forgotten it."""
    with node(tmp_path) as n:
        if is_listed_first:
            n.list(plain("f", "e1", 10))
        record = n.commit(10.5, put("f", 7), writer="0000000b")
        if not is_listed_first:
            n.list(plain("f", "e1", 10))
        assert n.found("f").etag == "e1"
        n.commit(seconds, operation, writer="0000000c")
        if not n.applier.commits.is_applied(record.time, record.writer):
            n.apply(record)  # as the next poll does
        if seconds > 10.5 and operation.dated_s:  # the object had replaced it
            assert n.find("f") is None
        else:
            assert n.found("f").size == 7


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_file_elsewhere_that_came_over_an_object_told_of_with_its_date_stays_when_that_is_removed(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """In the second of that date, by who had heard of the object alone."""
    own = Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides="e1", dated_s=at(10) // NS)
    commits: list[Operation] = [own, put("f", 7), Remove("f", hides="e1")]
    with node(tmp_path) as n:
        for number in order:
            n.commit(10.2 + number / 10, commits[number], writer=WRITERS[number])
        assert n.found("f").size == 7


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_file_elsewhere_that_an_object_told_of_with_its_date_had_replaced_ends_when_that_is_removed(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """Also where the record that tells of the object names what the file hides as gone."""
    own = Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides="e2", dated_s=at(10) // NS)
    commits: list[list[Operation]] = [
        [put("f", 7, hides="e1")],
        [Remove("f", hides="e1", dated_s=at(2) // NS), own],
        [Remove("f", hides="e2")],
    ]
    with node(tmp_path) as n:
        for number in order:
            n.commit(10.2 + number / 10, *commits[number], writer=WRITERS[number])
        assert n.find("f") is None


def test_file_in_a_renamed_directory_stays_where_the_rename_names_only_another_at_its_new_name(tmp_path: Path) -> None:
    """The writer of the rename had not seen it, and put another of that name into the renamed directory."""
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"), put("d/f", 7))
        change = n.rename("d", "e")
        change.operations.append(put("e/g", 9))
        n.commit(2, put("d/g", 8), writer="0000000b")
        n.commit(3, change=change, writer="0000000c")
        assert {path: n.found(path).size for path in ("d/g", "e/f", "e/g")} == {"d/g": 8, "e/f": 7, "e/g": 9}


def test_file_elsewhere_that_a_listed_object_hid_is_back_when_that_is_renamed(tmp_path: Path) -> None:
    """By a node that had not heard of the file elsewhere."""
    with node(tmp_path) as n:
        record = n.commit(10.5, put("f", 7), writer="0000000b")
        n.list(plain("f", "e1", 10))
        n.commit(12, change=n.rename("f", "g"), writer="0000000c")
        assert n.find("f") is None
        assert not n.applier.commits.is_applied(record.time, record.writer), "the next poll applies it again"
        n.apply(record)
        assert n.found("f").size == 7
        assert n.found("g").place


def test_object_that_was_put_again_under_a_file_elsewhere_is_not_the_file_when_that_is_removed(tmp_path: Path) -> None:
    """By another program, whose object was removed long ago: it is older than the file, as any other would be."""
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 9))
        n.commit(10, Remove("f", hides="e1"))
        n.list(plain("f", "e1", 20))
        n.commit(30, put("f", 7, hides=""), writer="0000000b")
        n.list(plain("f", "e1", 20))
        assert n.found("f").size == 7
        n.commit(40, Remove("f", by_date=True))
        n.list(plain("f", "e1", 20))
        assert n.find("f") is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_file_put_over_an_object_stays_whenever_that_is_told_of_and_removed(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    own = Put("f", OWN, 0, 3, 0o600, 0, 0, at(10), hides="e1")
    operations: list[Operation] = [put("f", 7, hides="e1"), own, Remove("f", hides="e1")]
    with node(tmp_path) as n:
        for number in order:
            n.commit(10 * (number + 1), operations[number], writer=f"{number:08x}")
        assert n.found("f").size == 7


def test_object_that_a_relocation_hid_stays_gone_after_a_removal_by_date(tmp_path: Path) -> None:
    """It had only been listed when it was relocated: nothing tells since when it was hidden."""
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 9))
        n.commit(10, Relocate("f", OWN, 0, "e1", THIS, 100, 1, 0o644, 0, 0, 0, hides="e1"))
        n.commit(11, Remove("f", by_date=True), writer="0000000b")
        n.list(plain("f", "e1", 9))
        assert n.find("f") is None


@pytest.mark.parametrize("is_own", [True, False])
def test_file_that_a_directory_hides_stays_when_that_is_exchanged_with_another(tmp_path: Path, is_own: bool) -> None:
    """Nobody has removed it: it is seen once the directory is gone."""
    with node(tmp_path) as n:
        n.commit(1, mkdir("a"), mkdir("d"), mkdir("d/sub"))
        n.commit(2, put("d", 7))
        assert n.found("d").is_dir
        exchange = Change(
            operations=[mkdir("a"), mkdir("a/sub"), Remove("d/sub", directory=True), mkdir("d")],
            moves=[("a", "d"), ("d", "a")],
        )
        record = merged([exchange], "0000000b", at(3), range(1))
        n.applier.apply(record, archive(record.time, record.writer), own=is_own, whole=True)
        assert n.found("d").is_dir
        n.commit(4, Remove("d", directory=True))
        assert (n.found("d").size, n.found("d").flags & Flag.SHADOWED) == (7, 0)


@pytest.mark.parametrize("is_listed", [True, False])
def test_file_that_a_directory_hides_stays_if_a_rename_of_the_directory_above_does_not_name_it(
    tmp_path: Path, is_listed: bool
) -> None:
    with node(tmp_path) as n:
        n.commit(1, mkdir("d"), mkdir("d/name"))
        rename = n.rename("d", "e")  # by a node that has not heard of the file
        if is_listed:
            n.list(plain("d/name", "e1", 2), directory="d")
        else:
            n.commit(2, put("d/name", 7))
        assert n.found("d/name").is_dir
        n.commit(3, change=rename, writer="0000000b")
        assert not n.found("d/name").is_dir
        n.commit(4, Remove("e/name", directory=True))
        assert n.find("e/name") is None


def test_object_that_a_listing_has_shown_is_hidden_by_a_directory_until_that_is_removed(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("d", "e1", 1))
        n.commit(2, mkdir("d"))
        assert n.found("d").is_dir
        n.list(plain("d", "e1", 1))
        assert n.found("d").is_dir
        n.commit(3, Remove("d", directory=True))
        assert n.found("d").etag == "e1"


@pytest.mark.parametrize("is_listed", [True, False])
def test_copy_of_a_file_that_was_removed_before_its_relocation_is_hidden(tmp_path: Path, is_listed: bool) -> None:
    """Also where a listing has shown it before that."""
    with node(tmp_path) as n:
        n.commit(10, put("f", 7))
        n.commit(11, Remove("f", by_date=True), writer="0000000b")
        if is_listed:
            n.list(plain("f", "e1", 11, 7))
            assert n.found("f").etag == "e1"
        n.commit(12, Relocate("f", THIS, 100, "", OWN, 0, 7, 0o644, 0, 0, 0, hides="e1"), writer="0000000c")
        assert n.find("f") is None
        n.list(plain("f", "e1", 11, 7))
        assert n.find("f") is None
