"""Tombstones: what they hide, in which order they may be told of it, and their rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.meta.entry import PENDING
from lakefs_fuse.meta.tombstones import (
    GONE_MAX,
    NS,
    TOLD_MAX,
    Tombstone,
    bury,
    pack_tombstone,
    unpack_tombstone,
    without,
)

STAMPS = st.integers(1, 5).map(lambda at: at * 10 * NS) | st.integers(PENDING, PENDING + 3)
ETAGS = st.sampled_from(["", "e1", "e2", "e3"])
DATES = st.sampled_from([0, 7, 8])
PARTS = st.lists(st.tuples(STAMPS, st.booleans(), ETAGS, DATES), min_size=1, max_size=4)
Part = tuple[int, bool, str, int]


def told(parts: list[Part] | tuple[Part, ...]) -> Tombstone:
    tombstone = None
    for stamp, is_floor, etag, dated_s in parts:
        tombstone = bury(tombstone, stamp, floor=stamp * is_floor, etag=etag, at=stamp, dated_s=dated_s)
    assert tombstone is not None
    return tombstone


@given(PARTS)
def test_is_the_same_in_any_order_and_after_a_restart(parts: list[Part]) -> None:
    tombstone = told(parts)
    assert {told(some) for some in itertools.permutations(parts)} == {tombstone}
    assert told(parts + parts) == tombstone
    assert unpack_tombstone(pack_tombstone(tombstone)) == tombstone


@pytest.mark.parametrize(
    ("row", "tombstone"),
    [
        (b"", Tombstone(7, 7)),
        (b"e", Tombstone(7, 0, (("e", 7),))),
        (b"\1e", Tombstone(7, 7, (("e", 7),))),
        (b"\x000000000000000000", Tombstone(7)),
        (b"e\x000000000000000003\x000000000000000002f", Tombstone(7, 3, (("e", 7), ("f", 2)))),
        (b"e\x000000000000000009\2e", Tombstone(7, 0, (("e", 7),), (("e", 9),))),
        (b"\x000000000000000009\2e", Tombstone(7, dated=(("e", 9),))),
        (b"\x000000000000000009\3e", Tombstone(7, unlisted=("e", 9))),
        (b"\1f\x000000000000000009\3e", Tombstone(7, 7, (("f", 7),), unlisted=("e", 9))),
        (b"e\x000000000000000009\5f", Tombstone(7, 0, (("e", 7),), ended=(("f", 9),))),
        (b"\x000000000000000009\6e", Tombstone(7, put=(("e", 9),))),
        (b"\x000000000000000009\7e", Tombstone(7, told=(("e", 9),))),
    ],
)
def test_rows_are_as_the_format_says(row: bytes, tombstone: Tombstone) -> None:
    assert unpack_tombstone((7).to_bytes(8, "big") + row) == tombstone
    assert pack_tombstone(tombstone) == (7).to_bytes(8, "big") + row


@pytest.mark.parametrize("row", [b"", b"1234567", bytes(8) + b"\xff", bytes(8) + b"e\0no number"])
def test_row_that_is_none_is_refused(row: bytes) -> None:
    with pytest.raises(ValueError):
        unpack_tombstone(row)


def test_hides_what_a_commit_named_and_by_date_what_was_elsewhere() -> None:
    at = 100 * NS
    tombstone = bury(bury(None, at, etag="e1", at=at), floor=50 * NS)
    assert tombstone.hides("e1", 101 * NS), "dated to the second"
    assert not tombstone.hides("e1", 102 * NS), "put there again"
    assert tombstone.hides("other", 49 * NS)
    assert not tombstone.hides("other", 50 * NS)
    assert not without(tombstone, "e1").hides("e1", 60 * NS)
    later = bury(tombstone, floor=104 * NS)
    assert later.hides("e1", 103 * NS), "put there again, and before what was elsewhere since"
    assert not later.hides("e1", 103 * NS, by_date=False)
    assert not later.hides("e1", 104 * NS)


def test_row_of_an_earlier_version_is_read_without_what_only_that_used() -> None:
    assert unpack_tombstone((7).to_bytes(8, "big") + b"e\x000000000000000007\4") == Tombstone(7, 0, (("e", 7),))


def test_object_that_counts_no_more_is_known_at_the_time_of_the_commit() -> None:
    assert bury(None, told=("e", 30)).restamped(30, 35).when_told("e") == 35


def test_objects_that_count_no_more_are_few_and_the_newest() -> None:
    tombstone = None
    for at in range(1, 20):
        tombstone = bury(tombstone, told=(f"e{at}", at))
    assert tombstone is not None
    assert tombstone.told == tuple((f"e{at}", at) for at in range(19, 19 - TOLD_MAX, -1))
    assert tombstone.newest == 0, "nothing went: each was replaced in place"


def test_version_that_was_ended_unnamed_is_hidden_as_one_that_was_named() -> None:
    tombstone = bury(bury(None, etag="named", at=30), ended="unnamed", at=40)
    assert (tombstone.when_gone("named"), tombstone.when_gone("unnamed"), tombstone.newest) == (30, 40, 40)
    assert (tombstone.when_named("named"), tombstone.when_named("unnamed"), tombstone.etag) == (30, 0, "unnamed")
    assert tombstone.hides("unnamed", 1)
    assert not tombstone.hides("unnamed", 3 * NS)
    assert tombstone.restamped(40, 50).ended == (("unnamed", 50),)


def test_knows_the_newest_of_many_etags() -> None:
    tombstone = told([(at, False, f"e{at}", 0) for at in range(1, GONE_MAX + 3)])
    assert not tombstone.when_gone("e2")
    assert tombstone.when_gone("e3") == 3
    assert tombstone.etag == f"e{GONE_MAX + 2}"


def test_pending_stamps_become_those_of_the_commit() -> None:
    later = PENDING + 5
    parts = [(PENDING + 1, True, "e1", 0), (PENDING + 2, False, "e2", 3), (later, False, "e3", 0), (9, False, "e4", 0)]
    gone = (("e3", later), ("e1", 30), ("e2", 30), ("e4", 9))
    assert told(parts).restamped(PENDING + 2, 30) == Tombstone(later, 30, gone, (("e2", 3),))
