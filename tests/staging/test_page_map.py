"""`PageMap` against the simplest thing that could be right: a set of page numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lakefs_fuse.staging.part_layout import PAGE_BYTES, PageMap, PartLayout

SPANS = ((3 * PAGE_BYTES, 4), (8 * PAGE_BYTES, 100))
LIMIT = 60 * PAGE_BYTES
offsets = st.one_of(st.integers(0, LIMIT), st.integers(0, LIMIT // PAGE_BYTES).map(lambda page: page * PAGE_BYTES))
ranges = st.tuples(offsets, offsets).map(sorted).filter(lambda pair: pair[0] < pair[1])


def pages_of(start: int, end: int) -> set[int]:
    return set(range(start // PAGE_BYTES, -(-end // PAGE_BYTES)))


class PageMapMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.layout = PartLayout(SPANS)
        self.map = PageMap(self.layout)
        self.local: set[int] = set()

    @rule(between=ranges)
    def mark(self, between: list[int]) -> None:
        pages = pages_of(*between)
        assert self.map.mark(*between) == len(pages - self.local)
        self.local |= pages

    @rule(size=offsets)
    def truncate(self, size: int) -> None:
        gone = {page for page in self.local if page * PAGE_BYTES >= size}
        assert self.map.truncate(size) == len(gone)
        self.local -= gone

    @rule(part=st.integers(0, 12))
    def forget(self, part: int) -> None:
        gone = self.local & pages_of(*self.layout.range(part))
        assert (self.map.count(*self.layout.range(part)) > 0) == bool(gone)
        assert self.map.forget(part) == len(gone)
        self.local -= gone

    @rule()
    def reload(self) -> None:
        loaded = PageMap(self.layout)
        loaded.load(self.map.dump())
        assert loaded.dump() == self.map.dump()
        self.map = loaded

    @invariant()
    def first(self) -> None:
        assert self.map.first() == (min(self.local) * PAGE_BYTES if self.local else None)
        assert self.map.last() == (max(self.local) * PAGE_BYTES if self.local else None)

    @rule(between=ranges)
    def covers(self, between: list[int]) -> None:
        pages = pages_of(*between)
        assert self.map.covers(*between) == (pages <= self.local)
        assert self.map.count(*between) == len(pages & self.local)

    @rule(between=ranges)
    def runs(self, between: list[int]) -> None:
        start, end = between
        found = list(self.map.runs(start, end))
        assert found[0][0] == start
        assert found[-1][1] == end
        for (_, stop, state), (begin, _, next_state) in pairwise(found):
            assert stop == begin
            assert state != next_state
        for begin, stop, local in found:
            assert begin < stop
            assert all((page in self.local) == local for page in pages_of(begin, stop))

    @precondition(lambda self: hasattr(self, "map"))
    @invariant()
    def counts(self) -> None:
        assert self.map.pages == len(self.local)


TestPageMap = PageMapMachine.TestCase


@given(ranges)
def test_an_empty_map_has_one_run(between: list[int]) -> None:
    start, end = between
    assert list(PageMap(PartLayout(SPANS)).runs(start, end)) == [(start, end, False)]


def test_a_file_written_front_to_back_costs_nothing_to_note() -> None:
    pages = PageMap(PartLayout(SPANS))
    for at in range(0, LIMIT, PAGE_BYTES):
        pages.mark(at, at + PAGE_BYTES)
    whole = [part for part, bits in pages.dump().items() if bits == b""]
    assert len(whole) == PartLayout(SPANS).index(LIMIT)
