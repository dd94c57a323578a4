"""What the oracle excuses, and what it does not."""

from __future__ import annotations

import pytest

from lakefs_fuse.store.protocol import Capabilities
from tests.simulation.object_store import LOOK_NS, NextRequest, SimulatedStore
from tests.simulation.oracle import CONFLICT, DIRECTORY, PROGRAM, Oracle, Version
from tests.simulation.views import Views

START_NS = 1_700_000_000 * 1_000_000_000


@pytest.mark.parametrize("removers", [("n0", "n1"), ("n0", "n0")])
@pytest.mark.parametrize("is_made", [True, False])
def test_directory_that_no_commit_makes_goes_with_removals_of_two_nodes(
    removers: tuple[str, str], is_made: bool
) -> None:
    oracle = Oracle(deletes_conditionally=True, is_made=lambda _: is_made)
    oracle.begin({"d": DIRECTORY, "d/a": b"a", "d/b": b"b"}, ["n0", "n1"])
    for path, node in zip(["d/a", "d/b"], removers, strict=True):
        oracle.remove(path, node, oracle.matching(path, path[2:].encode())).is_certain = True
    is_excused = not is_made and len(set(removers)) > 1
    assert bool(oracle.check({})) != is_excused


@pytest.mark.parametrize("removers", [("n0", "n1"), ("n0", "n0"), ("n0", "")])
@pytest.mark.parametrize("is_moved", [True, False])
@pytest.mark.parametrize("is_made", [True, False])
def test_directory_that_was_emptied_before_the_commit_of_a_rename_is_not_under_its_new_name(
    removers: tuple[str, str], is_moved: bool, is_made: bool
) -> None:
    oracle = Oracle(deletes_conditionally=True, is_made=lambda _: is_made, is_moved=lambda *_: is_moved)
    tree = {"d": DIRECTORY, "d/e": DIRECTORY, "d/e/a": b"a", "d/e/b": b"b"}
    oracle.begin(tree, ["n0", "n1", "n2"])
    for path, node in zip(["d/e/a", "d/e/b"], removers, strict=True):
        if node:
            oracle.remove(path, node, oracle.matching(path, tree[path])).is_certain = True
    for path in ("d", "d/e"):
        (before,) = oracle.matching(path, DIRECTORY)
        oracle.remove(path, "n2", frozenset({before}), is_rename=True, operation=1).is_certain = True
        oracle.put(f"g{path[1:]}", DIRECTORY, "n2", frozenset(), origin=before, operation=1).is_certain = True
    if not removers[1]:
        (before,) = oracle.matching("d/e/b", b"b")
        oracle.remove("d/e/b", "n2", frozenset({before}), is_rename=True, operation=1).is_certain = True
        oracle.put("g/e/b", b"b", "n2", frozenset(), origin=before, operation=1).is_certain = True
        (moved,) = oracle.matching("g/e/b", b"b")
        oracle.remove("g/e/b", "n2", frozenset({moved})).is_certain = True
    is_excused = not is_moved and not is_made and removers == ("n0", "n1")
    assert bool(oracle.check({"g": DIRECTORY})) != is_excused


@pytest.mark.parametrize("is_away", [True, False])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_rename_by_a_node_that_was_cut_off_for_long_is_left_out_where_its_object_was_replaced(
    is_away: bool, is_replaced: bool
) -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"bytes"}, ["n0", "n1"], plain={"f"})
    (first,) = oracle.matching("f", b"bytes")
    if is_replaced:
        oracle.put("f", b"later", "n1", frozenset({first})).is_certain = True
    oracle.remove("f", "n0", frozenset({first}), is_rename=True, operation=1).is_certain = True
    oracle.put("g", b"bytes", "n0", frozenset(), origin=first, operation=1).is_certain = True
    if is_away:
        oracle.long_away.add("n0")
    assert bool(oracle.check({"f": b"later"} if is_replaced else {})) != (is_away and is_replaced)


@pytest.mark.parametrize("is_away", [True, False])
def test_what_a_rename_that_is_left_out_would_have_replaced_is_there(is_away: bool) -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"bytes", "g": b"before"}, ["n0", "n1"], plain={"f"})
    (first,), (before,) = oracle.matching("f", b"bytes"), oracle.matching("g", b"before")
    oracle.put("f", b"later", "n1", frozenset({first})).is_certain = True
    oracle.remove("f", "n0", frozenset({first}), is_rename=True, operation=1).is_certain = True
    oracle.put("g", b"bytes", "n0", frozenset({before}), origin=first, operation=1).is_certain = True
    if is_away:
        oracle.long_away.add("n0")
    assert bool(oracle.check({"f": b"later", "g": b"before"})) != is_away


@pytest.mark.parametrize("told", ["before", "after", "never"])
def test_write_in_place_of_a_renamed_file_may_be_stored_after_another_has_put_its_new_name(told: str) -> None:
    oracle = Oracle(deletes_conditionally=True)
    first = oracle.put("f", b"bytes", "n0", frozenset())
    first.is_plain = first.is_certain = True
    oracle.observe("n0", "f", frozenset({first}))
    unaware = oracle.put("f", b"bytes", "n1", frozenset())
    unaware.is_plain = True
    if told == "before":
        oracle.acknowledge(unaware)
    oracle.remove("f", "n0", frozenset({first}), is_rename=True, operation=1).is_certain = True
    moved = oracle.put("g", b"bytes", "n0", frozenset(), origin=first, operation=1)
    moved.is_certain = True
    oracle.put("g", b"later", "n2", frozenset({moved})).is_certain = True
    if told == "after":
        oracle.acknowledge(unaware)
    assert bool(oracle.check({"g": b"bytes"})) == (told == "before")


@pytest.mark.parametrize("remover", ["n2", "n0", ""])
@pytest.mark.parametrize("is_known", [True, False])
def test_write_in_place_of_a_renamed_file_goes_with_a_later_removal_of_its_new_name(
    remover: str, is_known: bool
) -> None:
    oracle = Oracle(deletes_conditionally=True, last_remover=lambda path: remover if path == "g" else "")
    oracle.begin({"f": b"bytes", "g": b"before"}, ["n0", "n1", "n2"])
    (first,), (before,) = oracle.matching("f", b"bytes"), oracle.matching("g", b"before")
    written = oracle.put("f", b"later", "n1", frozenset({first}))
    written.is_plain = written.is_certain = True
    renamed = oracle.remove("f", "n0", frozenset({first}), is_rename=True, operation=1)
    renamed.is_plain = renamed.is_certain = True
    moved = oracle.put("g", b"bytes", "n0", frozenset({before}), origin=first, operation=1)
    moved.is_certain = True
    if is_known:
        oracle.observe("n2", "g", frozenset({moved}))
    oracle.remove("g", "n2", frozenset({before})).is_certain = True
    assert bool(oracle.check({})) == (remover != "n2" or is_known)


@pytest.mark.parametrize(
    ("tree", "is_removed", "is_excused"),
    [({"g": b"newest"}, False, True), ({"g": b"bytes"}, True, False), ({}, True, True), ({}, False, False)],
)
def test_write_in_place_of_a_renamed_file_goes_with_a_put_at_its_new_name_that_is_not_acknowledged(
    tree: dict[str, bytes], is_removed: bool, is_excused: bool
) -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"bytes"}, ["n0", "n1"])
    (first,) = oracle.matching("f", b"bytes")
    written = oracle.put("f", b"later", "n1", frozenset({first}))
    renamed = oracle.remove("f", "n0", frozenset({first}), is_rename=True, operation=1)
    moved = oracle.put("g", b"bytes", "n0", frozenset(), origin=first, operation=1)
    written.is_plain = written.is_certain = renamed.is_plain = renamed.is_certain = moved.is_certain = True
    newest = oracle.put("g", b"newest", "n1", frozenset({moved}))
    if is_removed:
        oracle.remove("g", "n1", frozenset({newest}))
    assert bool(oracle.check(tree)) != is_excused


@pytest.mark.parametrize(("is_known", "is_plain"), [(False, True), (True, True), (True, False)])
def test_rename_of_a_directory_leaves_behind_only_what_replaced_a_file_elsewhere(
    is_known: bool, is_plain: bool
) -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"d": DIRECTORY, "d/f": b"before"}, ["n0", "n1"])
    before = oracle.matching("d/f", b"before")
    closed = oracle.put("d/f", b"closed", "n1", before)
    closed.is_plain = closed.is_certain = True
    views = Views(oracle)
    of_rename = views.closed_below("d")
    assert of_rename == [("d/f", closed)]
    if is_known:
        oracle.remove("d/f", "n0", before, is_rename=True, operation=1).is_plain = is_plain
    views.renamed("n0", 1, "d", "e", of_rename)
    assert bool(views.check({"d/f": b"closed"})) == (is_plain or not is_known)


@pytest.mark.parametrize("is_renamed_back", [True, False])
def test_node_shows_an_earlier_version_again_only_where_a_rename_brings_it_back(is_renamed_back: bool) -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"before"}, ["n0", "n1"])
    before = oracle.matching("f", b"before")
    (first,) = before
    written = oracle.put("f", b"in place", "n1", before)
    written.is_plain = written.is_certain = True
    oracle.remove("f", "n0", before, is_rename=True, operation=1).is_certain = True
    moved = oracle.put("g", b"before", "n0", frozenset(), origin=first, operation=1)  # which gets what was written
    oracle.put("f", b"new", "n1", frozenset()).is_certain = moved.is_certain = True
    if is_renamed_back:
        oracle.put("f", b"before", "n0", frozenset(), origin=moved, operation=2).is_certain = True
    views = Views(oracle)
    for data in (b"in place", b"new"):
        views.show("n1", "f", data)
    assert bool(views.check({"f": b"in place"})) != is_renamed_back


@pytest.mark.parametrize("tree", [{}, {"f": b"bytes"}, {"g": b"bytes"}])
@pytest.mark.parametrize("is_removed", [True, False])
def test_uncertain_rename_leaves_the_file_under_either_name(tree: dict[str, bytes], is_removed: bool) -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"bytes"}, ["n0"])
    (first,) = oracle.matching("f", b"bytes")
    oracle.remove("f", "n0", frozenset({first}), is_rename=True, operation=1)
    moved = oracle.put("g", b"bytes", "n0", frozenset(), origin=first, operation=1)
    if is_removed:
        oracle.remove("g", "n0", frozenset({moved}), operation=2)
    assert bool(oracle.check(tree)) == (not tree and not is_removed)


def test_uncertain_rename_excuses_what_came_after_it_under_the_new_name() -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"bytes"}, ["n0", "n1"])
    (first,) = oracle.matching("f", b"bytes")
    oracle.remove("f", "n0", frozenset({first}), is_rename=True, operation=1)
    oracle.put("g", b"bytes", "n0", frozenset(), origin=first, operation=1)
    oracle.put("g", b"other", "n1", frozenset(), operation=2).is_certain = True
    assert not oracle.check({"g": b"other"})


def two_writers(*, is_known: bool = False) -> tuple[Oracle, Version, Version]:
    """Two nodes put the file f; the second has seen what the first put there, or not."""
    oracle = Oracle(deletes_conditionally=True)
    other = oracle.put("f", b"other", "n1", frozenset())
    version = oracle.put("f", b"bytes", "n0", frozenset({other}) if is_known else frozenset())
    other.is_certain = version.is_certain = True
    return oracle, version, other


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("applied", [b"other", b"before", b""])
def test_file_is_kept_beside_what_its_writer_had_not_applied(is_known: bool, applied: bytes) -> None:
    oracle, version, _ = two_writers(is_known=is_known)
    oracle.applied["n0", version.data] = {applied} if applied else set()
    assert oracle.may_be_beside("f", version.data) == (not is_known and applied != b"other")


def test_file_that_is_kept_beside_another_is_beside_it() -> None:
    oracle, version, _ = two_writers()
    assert not oracle.check({"f": b"other", f"f{CONFLICT}1": version.data})
    assert oracle.check({f"f{CONFLICT}1": version.data})


def test_packed_file_is_kept_beside_another_only_after_its_writer_was_disturbed() -> None:
    oracle, version, _ = two_writers()
    assert not oracle.may_be_beside("f", version.data)
    oracle.disturbed.add("n0")
    assert oracle.may_be_beside("f", version.data)


@pytest.mark.parametrize("is_renamed", [True, False])
def test_file_is_kept_beside_another_of_its_name_where_a_rename_took_both_along(is_renamed: bool) -> None:
    oracle, version, other = two_writers()
    oracle.disturbed.add("n0")
    oracle.remove("f", "n2", frozenset({other}), is_rename=True, operation=1).is_certain = True
    origin = other if is_renamed else None
    oracle.put("g", b"other", "n2", frozenset(), origin=origin, operation=1).is_certain = True
    assert bool(Views(oracle).check({"g": b"other", f"g{CONFLICT}1": version.data})) != is_renamed


@pytest.mark.parametrize("is_replaced", [True, False])
def test_file_created_with_o_excl_is_kept_beside_what_did_not_replace_it(is_replaced: bool) -> None:
    oracle, version, other = two_writers()
    version.is_exclusive = True
    other.known = frozenset({version}) if is_replaced else frozenset()
    oracle.applied["n0", version.data] = {b"other"}
    assert oracle.may_be_beside("f", version.data) != is_replaced


def test_later_version_of_a_file_created_with_o_excl_is_kept_beside_another() -> None:
    oracle, version, other = two_writers()
    version.is_exclusive = True
    later = oracle.put("f", b"later", "n0", frozenset({version}))
    assert other not in later.known
    assert oracle.may_be_beside("f", later.data)


@pytest.mark.parametrize("is_plain", [True, False])
def test_object_stored_over_a_file_goes_along_with_a_rename_of_that_which_had_not_seen_it(is_plain: bool) -> None:
    """Who stored it had seen the file, which was there since the round began."""
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"first", "d/f": b"other"}, ["n0", "n1"], plain={"f"} if is_plain else ())
    first, (other,) = oracle.matching("f", b"first"), oracle.matching("d/f", b"other")
    stored = oracle.put("f", b"stored", "n0", frozenset(), origin=other)
    oracle.remove("d/f", "n0", frozenset({other}), is_rename=True).is_certain = True
    oracle.remove("f", "n1", first, is_rename=True, operation=1).is_certain = True
    moved = oracle.put("g", b"first", "n1", frozenset(), origin=next(iter(first)), operation=1)
    stored.is_plain = stored.is_certain = moved.is_certain = True
    assert bool(oracle.check({"g": b"stored"})) != is_plain


def test_object_put_after_a_removal_goes_along_with_a_rename_that_had_seen_neither() -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"first"}, ["n0", "n1", PROGRAM])
    first = oracle.matching("f", b"first")
    removed = oracle.remove("f", "n0", first, operation=1)
    foreign = oracle.put("f", b"foreign", PROGRAM, frozenset(), operation=2)
    foreign.is_plain = foreign.is_certain = True
    renamed = oracle.remove("f", "n1", first, is_rename=True, operation=3)
    for removal in (removed, renamed):
        removal.is_certain = removal.is_plain = True
    oracle.put("g", b"first", "n1", frozenset(), origin=next(iter(first)), operation=3).is_certain = True
    assert oracle.check({"g": b"foreign"}) == []
    assert oracle.check({"g": b"first"}) != []


def test_file_created_after_a_write_in_place_was_removed_goes_along_with_a_rename_that_had_seen_neither() -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"first"}, ["n0", "n1"])
    first = oracle.matching("f", b"first")
    written = oracle.put("f", b"written", "n0", first)
    oracle.observe("n0", "f", frozenset({written}))
    removed = oracle.remove("f", "n0", frozenset({written}))
    created = oracle.put("f", b"created", "n0", frozenset())
    renamed = oracle.remove("f", "n1", first, is_rename=True, operation=1)
    moved = oracle.put("g", b"first", "n1", frozenset(), origin=next(iter(first)), operation=1)
    written.is_plain = created.is_plain = removed.is_certain = renamed.is_certain = True
    written.is_certain = created.is_certain = moved.is_certain = True
    assert oracle.check({"f": b"created", "g": b"created"}) == []
    assert oracle.check({"f": b"created", "g": b"other"}) != []


def test_file_that_an_exchange_brings_goes_with_a_removal_of_what_its_node_had_replaced() -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"first", "g": b"other"}, ["n0", "n1"])
    first = oracle.matching("f", b"first")
    renamed = oracle.remove("f", "n0", first, is_rename=True, operation=1)
    replacing = oracle.put("f", b"second", "n1", first, operation=2)
    oracle.observe("n1", "f", frozenset({replacing}))
    exchanged = oracle.remove("f", "n1", frozenset({replacing}), is_rename=True, operation=3)
    brought = oracle.put(
        "f", b"other", "n1", frozenset(), origin=next(iter(oracle.matching("g", b"other"))), operation=3
    )
    oracle.remove("g", "n1", oracle.matching("g", b"other"), is_rename=True, operation=3).is_certain = True
    moved = oracle.put("g", b"second", "n1", frozenset(), origin=replacing, operation=3)
    oracle.put("h", b"first", "n0", frozenset(), origin=next(iter(first)), operation=1).is_certain = True
    for each in (renamed, replacing, exchanged, brought, moved):
        each.is_certain = True
    assert not oracle.check({"g": b"second", "h": b"first"})


@pytest.mark.parametrize("is_back", [True, False])
def test_write_in_place_of_equal_bytes_goes_along_with_the_renames_of_either(is_back: bool) -> None:
    """A file was renamed, and back, and away again: the last rename may have moved what either was."""
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"bytes"}, ["n0", "n1"])
    (first,) = oracle.matching("f", b"bytes")
    away = oracle.put("g", b"bytes", "n0", frozenset(), origin=first, operation=1)
    written = oracle.put("g", b"written", "n1", frozenset({away}), operation=2)
    removals = [oracle.remove("f", "n0", frozenset({first}), is_rename=True, operation=1)]
    changes = [away]
    if is_back:
        changes.append(oracle.put("f", b"bytes", "n0", frozenset(), origin=away, operation=3))
        removals.append(oracle.remove("g", "n0", frozenset({away}), is_rename=True, operation=3))
    named = oracle.matching("f", b"bytes")
    changes.append(oracle.put("h", b"bytes", "n0", frozenset(), origin=first, operation=4))
    removals.append(oracle.remove("f", "n0", named, is_rename=True, operation=4))
    for put in changes:
        put.is_certain = True
    for removal in removals:
        removal.is_certain = True
    assert not written.is_certain
    assert bool(oracle.check({"h": b"written"})) != is_back


@pytest.mark.parametrize("is_seen", [True, False])
def test_equal_bytes_that_are_stored_between_a_look_and_the_deletion_are_lost(is_seen: bool) -> None:
    oracle = Oracle(deletes_conditionally=True)
    now_ns = START_NS
    store = SimulatedStore(Capabilities(name="simulated", delete_if_match=True), lambda: now_ns)
    store.deleted_unseen = lambda key, data: oracle.deleted_unseen.add((key, data))
    store.sender = "n1"
    meta = store.put("f", b"bytes")
    store.head("f")
    store.sender = "n0"
    store.put("f", b"bytes")
    put = oracle.put("f", b"bytes", "n0", frozenset())
    put.is_plain = put.is_certain = True
    store.sender = "n1"
    if is_seen:
        now_ns += LOOK_NS
        store.head("f")
    store.delete("f", etag=meta.etag)
    assert bool(oracle.check({})) == is_seen


@pytest.mark.parametrize("is_late", [True, False])
def test_object_that_is_stored_before_an_unconditional_delete_arrives_is_lost(is_late: bool) -> None:
    oracle = Oracle(deletes_conditionally=False)
    now_ns = START_NS
    store = SimulatedStore(Capabilities(name="simulated", delete_if_match=False), lambda: now_ns)
    store.deleted_unseen = lambda key, data: oracle.deleted_unseen.add((key, data))
    store.sender = "n0"
    meta = store.put("f", b"removed")
    with pytest.raises(NextRequest) as sent:
        store.delete("f", etag=meta.etag)
    if not is_late:
        sent.value.call()
    now_ns += 2 * LOOK_NS
    store.put("f", b"bytes")
    put = oracle.put("f", b"bytes", "n0", frozenset())
    put.is_plain = put.is_certain = True
    if is_late:
        sent.value.call()
    assert bool(oracle.check({})) != is_late


def test_directory_whose_last_name_another_node_removed_goes_along_with_renames_of_the_one_above() -> None:
    """Only another program's object had made it; who removed that has it made by a commit."""
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"d": DIRECTORY}, ["n0", "n1"])
    stored = oracle.put("d/e/f", b"bytes", PROGRAM, frozenset())
    removals = [oracle.remove("d/e/f", "n1", frozenset({stored}))]
    (moved,) = oracle.matching("d", DIRECTORY)
    for new in ("g", "h"):
        removals.append(oracle.remove(moved.path, "n0", frozenset({moved}), is_rename=True))
        moved = oracle.put(new, DIRECTORY, "n0", frozenset(), origin=moved)
        moved.is_certain = True
    for removal in removals:
        removal.is_certain = True
    stored.is_certain = True
    assert not oracle.check({"h": DIRECTORY, "h/e": DIRECTORY})
    assert oracle.check({"h": DIRECTORY, "h/e": DIRECTORY, "h/other": DIRECTORY})


@pytest.mark.parametrize("is_renamed_before", [True, False])
def test_file_that_is_being_written_goes_along_with_a_later_rename_by_its_node_of_where_another_took_it(
    is_renamed_before: bool,
) -> None:
    """Its node hears of the other rename while its own is under way, so its user renamed what it did not show there."""
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"d": DIRECTORY, "e": DIRECTORY}, ["n0", "n1"])

    def rename(old: str, new: str, node: str) -> None:
        (directory,) = oracle.matching(old, DIRECTORY)
        oracle.remove(old, node, frozenset({directory}), is_rename=True).is_certain = True
        oracle.put(new, DIRECTORY, node, frozenset(), origin=directory).is_certain = True

    if is_renamed_before:
        rename("e", "g", "n1")
    oracle.put("d/f", b"bytes", "n1", frozenset())
    rename("d", "e/d", "n0")
    if not is_renamed_before:
        rename("e", "g", "n1")
    tree = {"g": DIRECTORY, "g/d": DIRECTORY, "g/d/f": b"bytes"}
    assert any("g/d/f" in wrong for wrong in oracle.check(tree)) == is_renamed_before


@pytest.mark.parametrize("is_refused", [True, False])
def test_directory_of_a_file_stays_when_the_file_goes_unless_it_was_removed(is_refused: bool) -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({}, ["n0"])
    stored = oracle.put("d/f", b"bytes", "n0", frozenset())
    stored.is_certain = True
    removed = oracle.remove("d", "n0", frozenset())
    removed.is_withdrawn, removed.is_certain = is_refused, not is_refused
    oracle.remove("d/f", "n0", frozenset({stored})).is_certain = True
    assert bool(oracle.check({"d": DIRECTORY})) != is_refused


@pytest.mark.parametrize("is_shown", [True, False])
def test_what_a_rename_took_along_is_replaced_by_what_its_new_name_shows(is_shown: bool) -> None:
    """Another directory was renamed over it; which of the versions there was moved nobody knows."""
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"d/f": b"before", "e/f": b"other"}, ["n0", "n1", "n2"], plain={"d/f"})
    (before,), (other,) = oracle.matching("d/f", b"before"), oracle.matching("e/f", b"other")
    written = oracle.put("d/f", b"written", "n0", frozenset({before}))
    renamed = oracle.remove("d/f", "n1", frozenset({before}), is_rename=True, operation=1)
    renamed.is_plain = renamed.is_certain = True
    oracle.put("g/f", b"before", "n1", frozenset(), origin=before, operation=1).is_certain = True
    oracle.remove("e/f", "n2", frozenset({other}), is_rename=True, operation=2).is_certain = True
    oracle.put("g/f", b"other", "n2", frozenset(), origin=other, operation=2)
    written.is_certain = written.is_plain = True
    wrong = oracle.check({"g/f": b"other" if is_shown else b"before"})
    assert bool(wrong) != is_shown


@pytest.mark.parametrize("is_refused", [True, False])
def test_what_a_rename_took_along_may_be_removed_by_a_machine_that_lost_its_power(is_refused: bool) -> None:
    """It named the file before its writer gave the new name the version that it had written in place."""
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"before"}, ["n0", "n1", "n2"], plain={"f"})
    (before,) = oracle.matching("f", b"before")
    renamed = oracle.remove("f", "n0", frozenset({before}), is_rename=True, operation=1)
    renamed.is_plain = renamed.is_certain = True
    moved = oracle.put("g", b"before", "n0", frozenset(), origin=before, operation=1)
    written = oracle.put("f", b"written", "n1", frozenset({before}))
    moved.is_certain = written.is_certain = written.is_plain = True
    removed = oracle.remove("g", "n2", frozenset({moved}), operation=2)
    removed.is_withdrawn = is_refused
    assert bool(oracle.check({})) == is_refused
    assert not oracle.check({"g": b"written"})


@pytest.mark.parametrize("is_shown", [True, False])
def test_what_a_rename_took_along_is_replaced_by_what_a_doubtful_rename_took_along_to_its_new_name(
    is_shown: bool,
) -> None:
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"before", "h": b"other"}, ["n0", "n1", "n2"], plain={"f", "h"})
    (before,), (other,) = oracle.matching("f", b"before"), oracle.matching("h", b"other")
    for path, version, node in (("f", before, "n0"), ("h", other, "n2")):  # both are written in place meanwhile
        written = oracle.put(path, b"written to " + path.encode(), node, frozenset({version}))
        written.is_certain = written.is_plain = True
    renamed = oracle.remove("f", "n1", frozenset({before}), is_rename=True, operation=1)
    renamed.is_plain = renamed.is_certain = True
    moved = oracle.put("g", b"before", "n1", frozenset(), origin=before, operation=1)
    moved.is_certain = True
    renamed = oracle.remove("h", "n1", frozenset({other}), is_rename=True, operation=2)
    renamed.is_plain = renamed.is_certain = True
    oracle.put("g", b"other", "n1", frozenset({moved}), origin=other, operation=2)
    assert bool(oracle.check({"g": b"written to h" if is_shown else b"before"})) != is_shown


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("is_removed", [True, False])
def test_write_in_place_that_outlives_the_removal_of_its_renamed_file_goes_along_with_a_rename_of_the_directory(
    is_seen: bool, is_removed: bool
) -> None:
    """Unless the node that removed the file had seen these bytes, or they were removed from the old name, too."""
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"d": DIRECTORY, "e": DIRECTORY, "d/f": b"bytes"}, ["n0", "n1", "n2"], plain={"d/f"})
    (first,), (directory,) = oracle.matching("d/f", b"bytes"), oracle.matching("d", DIRECTORY)
    oracle.put("d/f", b"in place", "n0", frozenset({first})).is_certain = True
    oracle.remove("d/f", "n1", frozenset({first}), is_rename=True, operation=1).is_certain = True
    moved = oracle.put("e/f", b"bytes", "n1", frozenset(), origin=first, operation=1)
    moved.is_certain = True
    if is_seen:
        moved = oracle.put("e/f", b"in place", "n0", frozenset({moved}))
        moved.is_certain = True
    oracle.remove("e/f", "n2", frozenset({moved})).is_certain = True
    if is_removed:
        oracle.remove("d/f", "n2", oracle.matching("d/f", b"in place")).is_certain = True
    oracle.remove("d", "n2", frozenset({directory}), is_rename=True, operation=2).is_certain = True
    oracle.put("e", DIRECTORY, "n2", oracle.matching("e", DIRECTORY), origin=directory, operation=2).is_certain = True
    assert bool(oracle.check({"e": DIRECTORY, "e/f": b"in place"})) == (is_seen or is_removed)


@pytest.mark.parametrize("is_told", [True, False])
def test_write_of_the_bytes_that_a_renamed_file_has_may_be_stored_after_another_has_put_its_new_name(
    is_told: bool,
) -> None:
    """Of equal bytes the rename may have seen any."""
    oracle = Oracle(deletes_conditionally=True)
    oracle.begin({"f": b"bytes"}, ["n0", "n1", "n2"])
    (first,) = oracle.matching("f", b"bytes")
    unaware = oracle.put("f", b"bytes", "n1", frozenset({first}))
    if is_told:
        oracle.acknowledge(unaware)
    both = oracle.matching("f", b"bytes")
    oracle.remove("f", "n0", both, is_rename=True, operation=1).is_certain = True
    moved = oracle.put("g", b"bytes", "n0", frozenset(), origin=first, operation=1)
    moved.is_certain = True
    oracle.put("g", b"later", "n2", frozenset({moved})).is_certain = True
    assert bool(oracle.check({"g": b"bytes"})) == is_told


@pytest.mark.parametrize("remover", ["n0", "n1", ""])
@pytest.mark.parametrize("is_renamed_away", [True, False])
def test_put_where_another_node_had_removed_the_file_goes_with_a_later_removal_by_a_third(
    remover: str, is_renamed_away: bool
) -> None:
    """The node of the put saw nothing there, which either removal explains: it may have heard of one alone."""
    oracle = Oracle(deletes_conditionally=True, last_remover=lambda _: remover)
    oracle.begin({"f": b"before"}, ["n0", "n1", "n2"])
    first = oracle.matching("f", b"before")
    oracle.remove("f", "n0", first).is_certain = True
    if is_renamed_away:
        oracle.remove("f", "n1", first, is_rename=True, operation=1).is_certain = True
    oracle.put("f", b"moved", "n2", frozenset(), operation=2).is_certain = True
    assert bool(oracle.check({})) != (is_renamed_away and remover != "")
