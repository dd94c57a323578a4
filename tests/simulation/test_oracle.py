"""What the oracle excuses, and what it does not."""

from __future__ import annotations

import pytest

from tests.simulation.oracle import DIRECTORY, Oracle
from tests.simulation.views import Views


@pytest.mark.parametrize("removers", [("n0", "n1"), ("n0", "n0")])
@pytest.mark.parametrize("is_named", [True, False])
def test_directory_that_no_commit_names_goes_with_removals_of_two_nodes(
    removers: tuple[str, str], is_named: bool
) -> None:
    oracle = Oracle(deletes_conditionally=True, is_named=lambda _: is_named)
    oracle.begin({"d": DIRECTORY, "d/a": b"a", "d/b": b"b"}, ["n0", "n1"])
    for path, node in zip(["d/a", "d/b"], removers, strict=True):
        oracle.remove(path, node, oracle.matching(path, path[2:].encode())).is_certain = True
    is_excused = not is_named and len(set(removers)) > 1
    assert bool(oracle.check({})) != is_excused


@pytest.mark.parametrize("is_certain", [True, False])
def test_write_in_place_of_a_renamed_file_may_be_stored_after_another_has_put_its_new_name(is_certain: bool) -> None:
    oracle = Oracle(deletes_conditionally=True)
    first = oracle.put("f", b"bytes", "n0", frozenset())
    first.is_plain = first.is_certain = True
    oracle.observe("n0", "f", frozenset({first}))
    unaware = oracle.put("f", b"bytes", "n1", frozenset())
    unaware.is_certain = is_certain
    oracle.remove("f", "n0", frozenset({first}), is_rename=True, operation=1).is_certain = True
    moved = oracle.put("g", b"bytes", "n0", frozenset(), origin=first, operation=1)
    moved.is_certain = True
    oracle.put("g", b"later", "n2", frozenset({moved})).is_certain = True
    assert bool(oracle.check({"g": b"bytes"})) == is_certain


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
