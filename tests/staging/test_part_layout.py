"""The cut of a file into parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES
from lakefs_fuse.config import GIB, MIB, TIB
from lakefs_fuse.staging.part_layout import SPANS, STAGING_PARTS_MIN, PartLayout
from lakefs_fuse.store.protocol import PART_BYTES_MIN, PARTS_MAX

PAGE = 4096
spans = st.lists(st.integers(1, 500), min_size=1, max_size=4, unique=True).flatmap(
    lambda sizes: st.tuples(*(st.tuples(st.just(size * PAGE), st.integers(1, 2000)) for size in sorted(sizes)))
)


@given(spans, st.data())
def test_index_and_range_are_inverse(cut: tuple[tuple[int, int], ...], data: st.DataObject) -> None:
    layout = PartLayout(cut)
    offset = data.draw(st.integers(0, layout.file_bytes_max - 1))
    part = layout.index(offset)
    start, end = layout.range(part)
    assert 0 <= part < PARTS_MAX
    assert start <= offset < end
    assert layout.index(start) == part == layout.index(end - 1)
    assert start % PAGE == 0 == end % PAGE
    if end < layout.file_bytes_max:
        assert layout.range(part + 1)[0] == end
    assert layout.count(offset + 1) == part + 1


def test_the_largest_file_is_the_largest_object_and_fits_in_10_000_parts() -> None:
    layout = PartLayout()
    assert layout.range(PARTS_MAX - 1)[1] > 5 * TIB == layout.file_bytes_max
    assert layout.count(5 * TIB) <= PARTS_MAX
    assert layout.count(0) == 0


def test_parts_grow_and_suit_store_and_cache() -> None:
    layout = PartLayout()
    sizes = [end - start for start, end in map(layout.range, range(PARTS_MAX))]
    assert sizes == sorted(sizes)
    assert sizes[0] == layout.single_bytes_max == 16 * MIB
    assert min(sizes) >= PART_BYTES_MIN
    assert max(sizes) <= 5 * GIB
    assert all(size % BLOCK_BYTES == 0 for size in sizes)


@given(st.integers(1, 64 * GIB))
def test_small_staging_keeps_parts_small(staging_bytes_max: int) -> None:
    layout = PartLayout(staging_bytes_max=staging_bytes_max)
    start, end = layout.range(PARTS_MAX - 1)
    assert end - start <= max(SPANS[0][0], staging_bytes_max // STAGING_PARTS_MIN)
    assert layout.file_bytes_max == min(layout.range(PARTS_MAX - 1)[1], 5 * TIB)
    assert layout.file_bytes_max >= PARTS_MAX * SPANS[0][0]
