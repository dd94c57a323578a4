"""Commits that come late are applied as if they had come in the order of their times (`commits.name_history`)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace

from lakefs_fuse.commits.change import Change, merged
from lakefs_fuse.commits.name_history import FACTS_MAX, Histories
from lakefs_fuse.commits.record import OWN, THIS, Mkdir, ObjectRef, Operation, Put, Relocate, Remove, SetAttr, Symlink
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import PENDING, Flag
from tests.commits.nodes import NS, Node, archive, at, node, plain, put
from tests.memory_store import MemoryStore
from tests.vfs.lakes import two_lakes


def told(etag: str, path: str = "f") -> Put:
    return Put(path, OWN, 0, 1, 0o644, 0, 0, 0, hides=etag)


def attributes(etag: str, mode: int, path: str = "f") -> SetAttr:
    return SetAttr(path, OWN, 0, 1, etag, mode, 0, 0, 0, {"user.x": b"%o" % mode})


def relocated(etag: str) -> Relocate:
    return Relocate("f", OWN, 0, etag, THIS, 700, 1, 0o600, 0, 0, 0, hides=etag)


def histories(n: Node) -> Histories:
    return Histories(n.tree)


def shown_after(
    directory: Path, commits: list[list[Operation]], order: tuple[int, ...]
) -> dict[str, tuple[object, ...]]:
    with node(directory) as n:
        for number in order:
            n.commit(10 + number, *commits[number], writer=f"{number:08x}")
        return n.shown()


@pytest.mark.parametrize(
    "commits",
    [
        [[told("e1")], [attributes("e1", 0o600)], [attributes("e1", 0o640)]],
        [[told("e1")], [attributes("e1", 0o600)], [relocated("e1")]],
        [[put("f", 7)], [told("e1")], [relocated("e1")], [Remove("f", hides="e1", by_date=True)]],
        [
            [put("f", 7)],
            [Remove("f", by_date=True)],
            [Symlink("f", "there", 0, 0, 0, xattrs={"user.x": b"1"})],
            [put("f", 8)],
        ],
        [[told("e1")], [attributes("e1", 0o600)], [put("f", 7, hides="e2")], [told("e1")]],
        [[put("f", 7)], [Remove("f", by_date=True), put("f", 8)], [Remove("f", by_date=True), put("f", 8)]],
    ],
)
def test_each_order_leaves_what_the_order_of_times_leaves(tmp_path: Path, commits: list[list[Operation]]) -> None:
    orders = list(itertools.permutations(range(len(commits))))
    shown = {order: shown_after(tmp_path / str(number), commits, order) for number, order in enumerate(orders)}
    assert set(map(repr, shown.values())) == {repr(shown[orders[0]])}


def test_order_is_known_after_a_restart(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        n.commit(30, relocated("e1"), writer="0000000c")
    with node(tmp_path) as n:
        n.commit(20, told("e2"), writer="0000000b")
        late = n.shown()
    with node(tmp_path / "in order") as n:
        n.commit(10, told("e1"))
        n.commit(20, told("e2"), writer="0000000b")
        n.commit(30, relocated("e1"), writer="0000000c")
        assert n.shown() == late


def test_change_made_here_is_behind_what_others_committed_until_it_has_a_time(tmp_path: Path) -> None:
    """Its own commit is earlier than the last of them, which then is applied again."""
    mine = Change(operations=[Remove("f", by_date=True)])
    with node(tmp_path) as n:
        n.commit(10, put("f", 7), writer="0000000b")
        n.apply_pending(1, mine)
        later = n.commit(30, put("f", 8), writer="0000000c")
        assert n.find("f") is None
        n.applier.restamp([(mine, PENDING | 1)], at(20))
        n.apply(later)
        assert n.found("f").size == 8


def test_attributes_set_here_keep_the_commits_before_them_in_order_when_they_get_a_time(tmp_path: Path) -> None:
    """A version that was written here since is in no commit yet; others told of theirs, and removed this one, before
    that."""
    mine, since = Change(operations=[attributes("e1", 0o640)]), Change(operations=[told("e2")])
    with node(tmp_path) as n:
        n.commit(10, told("e1"), writer="0000000b")
        n.apply_pending(1, mine)
        n.apply_pending(2, since)
        n.applier.restamp([(mine, PENDING | 1)], at(40))
        n.applier.apply_pending(mine, at(40))
        n.commit(30, Remove("f", hides="e2"), writer="0000000c")
        n.commit(20, Remove("f"), told("e1"), writer="0000000d")
        n.applier.restamp([(since, PENDING | 2)], at(40))
        n.commit(40, *mine.operations, *since.operations)
        late = n.shown()
    with node(tmp_path / "in order") as n:
        n.commit(10, told("e1"), writer="0000000b")
        n.commit(20, Remove("f"), told("e1"), writer="0000000d")
        n.commit(30, Remove("f", hides="e2"), writer="0000000c")
        n.commit(40, *mine.operations, *since.operations)
        assert n.shown() == late


@pytest.mark.parametrize("is_own", [False, True])
def test_file_that_is_renamed_to_the_name_of_an_object_that_is_not_listed_any_more_is_there(
    tmp_path: Path, is_own: bool
) -> None:
    """By its date that object would count in place of the file."""
    with node(tmp_path) as n:
        n.commit(10, put("f", 7))
        n.list(plain("g", "e1", 50))
        n.commit(20, Remove("g", hides="e2"), writer="0000000b")
        n.list_one("g")
        change = n.rename("f", "g")
        if is_own:
            n.apply_pending(1, change)
            n.applier.restamp([(change, PENDING | 1)], at(30))
        n.commit(30, change=change)
        assert n.found("g").size == 7


def test_commit_that_is_applied_again_changes_nothing(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        records = [
            n.commit(10 + number, *said) for number, said in enumerate(([put("f", 7)], [told("e1")], [put("f", 8)]))
        ]
        before = n.shown(), n.inode("f")
        for record in [*records, *reversed(records)]:
            n.apply(record)
            assert (n.shown(), n.inode("f")) == before
        (history,) = histories(n).get_many(["f"])
        assert history is not None
        assert len(history.facts) == len(records)


def test_row_that_something_else_has_changed_counts_as_it_is(tmp_path: Path) -> None:
    """As where a file was stored, and no commit tells of it yet."""
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        n.commit(20, told("e2"))
        stored = replace(n.found("f"), etag="e3", stamp=at(20))
        n.tree.update(batch := Batch(), stored)
        n.database.commit(batch)
        n.commit(15, told("e4"), writer="0000000b")
        assert n.found("f").etag == "e3"


def test_file_that_a_listed_object_hides_is_there_when_a_commit_removes_the_object(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(10, put("f", 6))
        n.commit(11, put("f", 7))
        n.list(plain("f", "e1", 12))
        assert n.found("f").etag == "e1"
        n.commit(14, Remove("f", hides="e1"))
        assert n.found("f").size == 7


def test_histories_are_few(tmp_path: Path) -> None:
    """A name that began with one commit has none, and one that is written again and again has few facts."""
    with node(tmp_path) as n:
        n.commit(10, put("new", 7), put("f", 7))
        for number in range(3 * FACTS_MAX):
            n.commit(11 + number, put("f", number))
        new, again = histories(n).get_many(["new", "f"])
        assert new is None
        assert again is not None
        assert len(again.facts) <= FACTS_MAX


async def test_histories_of_names_that_are_renamed_again_and_again_are_few(tmp_path: Path) -> None:
    """As that of a file which a program replaces every second: each rename evaluates the histories of both names."""
    async with two_lakes(MemoryStore(), tmp_path, pack="never") as (one, two):
        await one.mkdir("d")
        for number in range(2 * FACTS_MAX):
            await one.write("d/new", b"%d" % number)
            await one.rename("d/new", "d/f")
            assert await two.poll()
            assert await two.read("d/f") == b"%d" % number
        for m in one, two:
            found = Histories(m.fs.namespace.tree).get_many(["d/new", "d/f"])
            assert [len(each.facts) <= FACTS_MAX for each in found if each is not None] == [True, True]
            assert await m.names("d") == ["f"]


@pytest.mark.parametrize("is_told_first", [True, False])
def test_relocated_object_that_counted_by_its_date_is_older_than_the_file_that_it_covered(
    tmp_path: Path, is_told_first: bool
) -> None:
    """Nodes that have not listed the object show that file at once, the others when the object is deleted."""
    with node(tmp_path) as n:
        if is_told_first:
            n.commit(10, put("f", 7))
        n.list(plain("f", "e1", 10))
        n.commit(10, put("f", 7))
        assert n.found("f").etag == "e1"
        n.commit(12, relocated("e1"))
        n.list()
        n.commit(10, put("f", 7))  # as the poller reads it again
        assert n.found("f").size == 7
    with node(tmp_path / "unlisted") as n:
        n.commit(10, put("f", 7))
        n.commit(12, relocated("e1"))
        assert n.found("f").size == 7


@pytest.mark.parametrize("facts", range(FACTS_MAX - 3, FACTS_MAX + 1))
@pytest.mark.parametrize("last", [Remove("f", hides="e1"), put("f", 9), attributes("e1", 0o640)])
def test_commit_that_comes_late_is_in_its_place_however_many_came_before(
    tmp_path: Path, facts: int, last: Operation
) -> None:
    """The older facts go into the base, with what they have removed."""
    again: list[Operation] = [put("f", 7), Remove("f", by_date=True), told("e0"), attributes("e0", 0o600)]
    commits = [[again[number % len(again)]] for number in range(facts)]
    commits += [[put("f", 8, hides="e0")], [told("e1")], [last]]
    in_order = tuple(range(facts + 3))
    late = (*range(facts), facts + 1, facts + 2, facts)
    assert shown_after(tmp_path / "late", commits, late) == shown_after(tmp_path / "in order", commits, in_order)


def test_history_goes_once_no_commit_can_come_late(tmp_path: Path) -> None:
    paths = [f"{number}" for number in range(600)]
    with node(tmp_path) as n:
        for seconds in (10, 20):
            n.commit(seconds, *(put(path, seconds) for path in paths))
        n.commit(40, Remove("7", by_date=True))
        assert None not in histories(n).get_many(paths)
        for _ in n.applier.forget_histories(at(30)):
            pass
        left = [path for path, history in zip(paths, histories(n).get_many(paths), strict=True) if history is not None]
        assert left == ["7"]


def test_relocation_that_came_before_the_version_was_known_here_counts_once_that_is(tmp_path: Path) -> None:
    """The same bytes were stored in place of an object while it was moved into an archive, which has the one ETag."""
    with node(tmp_path) as n:
        local = n.dirty("f")
        n.commit(20, relocated("e1"), writer="0000000b")
        assert n.found("f").is_local
        n.watcher.kept.clear()
        stored = replace(local, flags=Flag.ATTRIBUTES_KNOWN, mode=0o644, etag="e1", size=1, ctime_ns=at(21))
        n.tree.update(batch := Batch(), stored)
        n.database.commit(batch)
        n.commit(30, attributes("e1", 0o600))
        assert n.found("f").place


@pytest.mark.parametrize("is_own", [False, True])
def test_copy_of_a_file_that_was_moved_away_is_not_shown_where_its_relocation_comes_later(
    tmp_path: Path, is_own: bool
) -> None:
    with node(tmp_path) as n:
        first = n.commit(10, put("f", 7))
        renaming = n.change()
        renaming.put("g", n.found("f"), key="f")
        renaming.remove("f", n.found("f"))
        renaming.moves.append(("f", "g"))
        if is_own:
            n.apply_pending(1, renaming.change())
            n.applier.restamp([(renaming.change(), PENDING | 1)], at(30.5))
        else:
            n.commit(30.5, change=renaming.change())
        packed = archive(first.time, first.writer)
        copied = Relocate("f", 1, 100, "", OWN, 0, 7, 0o644, 0, 0, 0, hides="e1")
        n.commit(30.2, change=Change(operations=[copied], objects=[ObjectRef(), packed]), writer="0000000b")
        n.list(plain("f", "e1", 30, size=7))  # in the second of the rename
        assert n.find("f") is None
        assert n.found("g").size == 7


def test_object_that_a_listing_does_not_show_any_more_was_told_of_before_what_comes_later(tmp_path: Path) -> None:
    """The commit that told of it alone has made the name, so there is no history."""
    with node(tmp_path) as n:
        n.commit(20, told("e1"))
        n.list(plain("f", "e2", 10))
        n.commit(30, told("e2"))
        n.commit(15, put("f", 7, hides="e2"), writer="0000000b")
        assert n.find("f") is None


def test_object_that_is_listed_again_has_its_size_where_only_a_listing_knows_that(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(20, told("e1"))
        n.list(plain("f", "e2", 10))
        n.commit(15, put("f", 7, hides="e3"), writer="0000000b")
        n.list(plain("f", "e1", 21, size=5))
        n.commit(16, put("f", 8, hides="e3"), writer="0000000b")
        assert (n.found("f").etag, n.found("f").size, n.found("f").mtime_ns) == ("e1", 5, at(21))


def test_history_that_is_damaged_is_left_out(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(10, put("f", 7))
        n.commit(20, put("f", 8))
        n.database.commit(Batch({schema.HISTORY + b"f": b"damaged"}))
        for _ in n.applier.forget_histories(at(5)):
            pass
        n.commit(15, put("f", 9), writer="0000000b")
        assert n.found("f").size == 8


def test_object_that_was_replaced_at_its_key_since_it_was_listed_does_not_come_back(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(5, told("e0"))
        n.list(plain("f", "e1", 10))
        n.commit(30, told("e2"))
        n.commit(40, Remove("f", hides="e2"))
        n.commit(35, put("g"), Remove("f", hides="e9"), writer="0000000b")
        assert n.find("f") is None


def test_listed_object_of_which_a_commit_tells_counts_by_that_and_not_by_its_date(tmp_path: Path) -> None:
    """The store dates it in the second of the file that came over it."""
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 15))
        n.commit(15.3, told("e1"))
        n.commit(15.5, put("f", 7))
        n.commit(15.1, Remove("f", hides="e9"), writer="0000000b")
        assert n.found("f").place


@pytest.mark.parametrize("is_own", [False, True])
def test_renamed_directory_is_not_made_again_for_attributes_of_an_object_that_was_replaced(
    tmp_path: Path, is_own: bool
) -> None:
    """A listing has shown since what lies at the key, and no commit tells of it."""
    with node(tmp_path) as n:
        n.commit(5, Mkdir("d", 0o755, 0, 0, 0))
        n.list(plain("d/f", "e1", 10), directory="d")
        n.commit(10, attributes("e1", 0o600, "d/f"))
        n.list(plain("d/f", "e2", 10), directory="d")
        if is_own:
            n.apply_pending(1, n.rename("d", "g"))
        else:
            n.commit(30, change=n.rename("d", "g"), writer="0000000b")
        assert n.found("g/f").size == 1
        assert n.find("d") is None


def test_attributes_of_an_object_that_was_replaced_do_not_show_it_where_the_next_goes(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.list(plain("f", "e1", 10))
        n.commit(10, attributes("e1", 0o600))
        n.list(plain("f", "e2", 10))
        n.commit(20, Remove("f", hides="e2"))
        n.commit(15, put("g"), Remove("f", hides="e9"), writer="0000000b")
        assert n.find("f") is None


def test_attributes_do_not_show_an_object_that_a_listing_does_not_show_any_more(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        n.commit(5, told("e0"))
        n.commit(6, Remove("f", hides="e9"))
        record = merged([Change(operations=[attributes("e1", 0o600)])], "0000000b", at(10), range(1))
        n.applier.apply(record, ObjectRef(), outdated={"f": "e0"}, whole=True)
        assert n.found("f").etag == "e1"
        n.list()
        n.commit(7, Remove("f", hides="e9"), writer="0000000c")
        assert n.find("f") is None


@pytest.mark.parametrize("is_history_known", [True, False])
def test_bytes_put_again_by_the_writer_of_a_removed_file_are_the_file(tmp_path: Path, is_history_known: bool) -> None:
    """The row of the removed file stays, because the file is being written here."""
    again: list[Operation] = [Remove("f"), replace(told("e1"), dated_s=at(11) // NS)]
    with node(tmp_path) as n:
        n.commit(10, put("f", 7, hides="e1"), writer="0000000b")
        n.watcher.kept.add(n.found("f").inode)
        n.apply_pending(1, Change(operations=again[:1]))
        if not is_history_known:
            n.database.commit(Batch(rows={schema.HISTORY + b"f": None}))
        n.apply_pending(2, Change(operations=again))
        assert n.found("f").is_plain
        n.applier.restamp([(Change(operations=again), PENDING | 2)], at(12))
        n.commit(11, attributes("e0", 0o600), writer="0000000c")
        assert (n.found("f").etag, n.found("f").size, n.found("f").place) == ("e1", 1, 0)


@pytest.mark.parametrize("is_late_first", [False, True])
def test_commits_of_two_nodes_at_one_time_are_two(tmp_path: Path, is_late_first: bool) -> None:
    """Both add to one commit of a third (`Committer.commit_as_of`), one ns after it."""
    late: tuple[float, str, Operation] = (15, "0000000d", attributes("e1", 0o640))
    same: list[tuple[float, str, Operation]] = [
        (20, "0000000b", attributes("e1", 0o600)),
        (20, "0000000c", Remove("f", hides="e0")),
    ]
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        for seconds, writer, operation in [late, *same] if is_late_first else [*same, late]:
            n.commit(seconds, operation, writer=writer)
        assert n.found("f").mode == 0o600


def ended_and_told_again(n: Node) -> None:
    """An object is ended without being named, a later commit tells of another, and a listing shows the first."""
    n.commit(10, told("e1"))
    n.commit(20, Remove("f", by_date=True), writer="0000000b")
    n.commit(30, told("e2"), writer="0000000c")
    n.list(plain("f", "e1", 9))
    assert n.found("f").etag == "e1"


def test_object_at_the_key_of_one_that_a_commit_names_stays_with_attributes_of_its_own(tmp_path: Path) -> None:
    """No commit that named it ended it."""
    with node(tmp_path) as n:
        ended_and_told_again(n)
        n.commit(40, attributes("e1", 0o600))
        n.list(plain("f", "e1", 9))
        assert n.found("f").etag == "e1"


def test_object_at_the_key_of_one_that_a_commit_names_is_shown_when_it_is_listed_again(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        ended_and_told_again(n)
        n.list()
        n.list(plain("f", "e1", 9))
        assert n.found("f").etag == "e1"


def test_object_at_the_key_of_one_that_a_commit_names_stays_when_a_commit_comes_late(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        ended_and_told_again(n)
        n.commit(25, Remove("f", hides="e9"), writer="0000000d")
        assert n.found("f").etag == "e1"


@pytest.mark.parametrize("is_listed", [False, True])
def test_attributes_of_an_object_at_the_key_of_one_that_a_commit_names_are_its_own(
    tmp_path: Path, is_listed: bool
) -> None:
    """Where no listing has shown the object, the store was asked which is there."""
    with node(tmp_path) as n:
        n.commit(10, told("e1"))
        n.commit(20, Remove("f", by_date=True), writer="0000000b")
        n.commit(30, told("e2"), writer="0000000c")
        if is_listed:
            n.list(plain("f", "e1", 9))
        record = merged([Change(operations=[attributes("e1", 0o600)])], "0000000d", at(40), range(1))
        n.applier.apply(record, ObjectRef(), outdated={"f": "e2"}, whole=True)
        n.list(plain("f", "e1", 9))
        assert (n.found("f").etag, n.found("f").mode) == ("e1", 0o600)
