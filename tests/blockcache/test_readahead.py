"""Readahead is pure: what is planned for which reads."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES
from lakefs_fuse.blockcache.readahead import (
    LOCAL_WINDOW_BYTES_MAX,
    PIECE_BYTES,
    SLACK_BYTES,
    WINDOW_BYTES_MAX,
    Readahead,
)
from tests.blockcache.reading import MIB

KIB = 1024
SIZE = 1 << 30


def plans(readahead: Readahead, reads: list[tuple[int, int]], size: int = SIZE) -> list[tuple[int, int]]:
    return [plan for offset, length in reads if (plan := readahead.plan(offset, length, size)) is not None]


def sequence(size: int, step: int = 128 * KIB, start: int = 0) -> list[tuple[int, int]]:
    return [(offset, step) for offset in range(start, start + size, step)]


def test_one_read_plans_nothing() -> None:
    assert plans(Readahead(), [(0, 4096)]) == []
    assert plans(Readahead(), [(500 * MIB, 128 * KIB)]) == []


def test_a_sequential_reader_gets_a_window_that_doubles_to_its_bound() -> None:
    readahead = Readahead()
    found = plans(readahead, sequence(256 * MIB))
    assert found[0] == (MIB, 2 * MIB)
    assert all(one[1] == two[0] for one, two in pairwise(found)), "without gaps or repeats"
    lengths = [stop - start for start, stop in found]
    assert lengths[:3] == sorted(lengths[:3])
    assert set(lengths[8:]) == {WINDOW_BYTES_MAX // 2}
    assert readahead.window_bytes == WINDOW_BYTES_MAX
    assert found[-1][1] <= 256 * MIB + WINDOW_BYTES_MAX
    assert len(found) < 24


def test_large_plans_are_whole_pieces_of_the_object() -> None:
    """However much is read at a time: no piece is a remainder, for which the store would be asked all the same."""
    for step in (128 * KIB, 256 * KIB, MIB):
        found = plans(Readahead(), sequence(256 * MIB, step))
        pieces = {(start % PIECE_BYTES, (stop - start) % PIECE_BYTES) for start, stop in found if start >= 16 * MIB}
        assert pieces == {(0, 0)}
        assert len(found) < 24


def test_the_plan_ends_with_the_object() -> None:
    size = 10 * MIB + 5
    found = plans(Readahead(), sequence(size), size)
    assert found[-1][1] == size


def test_a_jump_ends_it_and_reading_on_from_there_begins_again() -> None:
    readahead = Readahead()
    plans(readahead, sequence(64 * MIB))
    assert plans(readahead, [(500 * MIB, 4096)]) == []
    assert readahead.window_bytes == BLOCK_BYTES
    assert plans(readahead, [(500 * MIB + 4096, 4096)]) == [(501 * MIB, 502 * MIB)]


def runs_of(length: int, begins: list[int], step: int = MIB) -> list[list[tuple[int, int]]]:
    return [sequence(length, step, begin) for begin in begins]


def test_runs_of_one_length_are_planned_to_their_end_and_no_further() -> None:
    """Row groups, or some tensors of a checkpoint."""
    readahead = Readahead()
    length, begins = 8 * MIB, [160 * MIB, 240 * MIB, 32 * MIB, 96 * MIB, 600 * MIB]
    found = [plans(readahead, reads) for reads in runs_of(length, begins)]
    for begin, made in zip(begins, found, strict=True):
        assert made[0][0] == begin + 2 * MIB
        fetched = made[-1][1] - begin
        assert length <= fetched <= (length if begin != begins[0] else 2 * length)
    assert [len(made) for made in found[2:]] == [1, 1, 1], "all of it at once"


def test_run_that_goes_on_is_planned_on() -> None:
    readahead = Readahead()
    for reads in runs_of(4 * MIB, [100 * MIB, 200 * MIB, 300 * MIB]):
        plans(readahead, reads)
    found = plans(readahead, sequence(200 * MIB, MIB, 500 * MIB))
    gaps = [two[0] - one[1] for one, two in pairwise(found)]
    assert gaps[0] <= 2 * MIB, "to see that it goes on"
    assert not any(gaps[1:])
    assert found[-1][1] >= 700 * MIB
    assert readahead.window_bytes == WINDOW_BYTES_MAX


def test_run_of_unknown_length_is_fetched_ahead_by_a_quarter_of_what_it_has_come() -> None:
    readahead = Readahead()
    for offset, length in sequence(64 * MIB, MIB, 300 * MIB):
        planned = readahead.plan(offset, length, SIZE)
        come = offset + length - 300 * MIB
        assert planned is None or planned[1] - (offset + length) <= max(2 * MIB, come // 4)


def test_reader_whose_first_read_was_elsewhere_reads_an_object_whole() -> None:
    """As torch.load does: a magic number, the directory at the end, then all of it."""
    readahead = Readahead()
    found = plans(readahead, [(0, 256 * KIB), (SIZE - 8 * KIB, 8 * KIB), *sequence(64 * MIB, MIB, 256 * KIB)])
    assert found[-1][1] >= 64 * MIB + WINDOW_BYTES_MAX // 2
    assert len(found) < 16


@pytest.mark.parametrize("run_bytes", [3 * MIB, 4 * MIB, 8 * MIB, 20 * MIB])
def test_reader_of_some_row_groups_is_fetched_a_tenth_more_than_it_reads_at_most(run_bytes: int) -> None:
    """The footer, then eight groups, behind each of which the kernel reads on by up to 2 MiB."""
    rng, fetched, read = random.Random(run_bytes), 0, 0
    for _ in range(50):
        begins = [group * run_bytes + 700 for group in rng.sample(range(SIZE // run_bytes), 8)]
        readahead = Readahead()
        readahead.plan(SIZE - 64 * KIB, 64 * KIB, SIZE)
        touched, planned = set[int](), set[int]()
        for begin in begins:
            for offset, length in sequence(run_bytes + rng.randrange(2 * MIB), 128 * KIB, begin):
                touched.update(range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)))
                for start, stop in plans(readahead, [(offset, length)]):
                    planned.update(range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)))
        read += len(touched)
        fetched += len(touched | planned)
    assert fetched <= 1.1 * read


def test_what_counts_as_a_sign_that_all_is_read_in_random_order() -> None:
    rng, readahead, weights = random.Random(5), Readahead(), list[int]()
    assert readahead.missed_weight == 1
    for _ in range(1000):
        readahead.plan(rng.randrange(SIZE), 64 * KIB, SIZE)
        weights.append(readahead.missed_weight)
    assert 900 < sum(weights) < 1100, "as many as there are reads"
    headers = Readahead()
    for offset in range(0, SIZE, 4 * MIB):
        headers.plan(offset, 64 * KIB, SIZE)
    assert headers.missed_weight == 0
    tensors = Readahead()
    for reads in runs_of(4 * MIB, [400 * MIB, 300 * MIB, 200 * MIB, 100 * MIB]):
        plans(tensors, reads)
    assert tensors.missed_weight == 0


def test_random_reads_plan_nothing() -> None:
    rng = random.Random(7)
    reads = [(rng.randrange(SIZE // 4096) * 4096, 4096) for _ in range(500)]
    assert len(plans(Readahead(), reads)) <= 5  # two in a row within the slack do occur


def test_pieces_out_of_order_are_sequential() -> None:
    rng = random.Random(3)
    reads = sequence(128 * MIB)
    for at in range(0, len(reads), 8):
        window = reads[at : at + 8]
        rng.shuffle(window)
        reads[at : at + 8] = window
    found = plans(Readahead(), reads)
    assert all(one[1] == two[0] for one, two in pairwise(found))
    assert found[-1][1] >= 128 * MIB
    assert len(found) < 24


def test_rereading_behind_the_front_changes_nothing() -> None:
    readahead = Readahead()
    plans(readahead, sequence(16 * MIB))
    window = readahead.window_bytes
    assert plans(readahead, [(16 * MIB - SLACK_BYTES, 4096), (16 * MIB - 4096, 4096)]) == []
    assert readahead.window_bytes == window


def test_what_was_dropped_is_planned_again_and_marks_the_reader_starved() -> None:
    readahead = Readahead()
    first = plans(readahead, sequence(16 * MIB))[-1]
    readahead.dropped(first[0])
    assert (readahead.starved, readahead.window_bytes >= 8 * MIB) == (True, True)
    again = plans(readahead, sequence(16 * MIB, start=16 * MIB))
    assert again[0][0] == max(first[0], 17 * MIB)
    assert (readahead.starved, len(again)) == (False, 1)
    readahead.dropped(again[-1][0])
    readahead.fetched(100 * MIB)
    assert plans(readahead, sequence(50 * MIB, start=32 * MIB)) == []


def test_the_window_is_small_where_the_cache_disk_has_it() -> None:
    readahead = Readahead()
    plans(readahead, sequence(64 * MIB))
    readahead.local = True
    plans(readahead, sequence(32 * MIB, start=64 * MIB))
    found = plans(readahead, sequence(32 * MIB, start=96 * MIB))
    assert {stop - start for start, stop in found} == {LOCAL_WINDOW_BYTES_MAX // 2}


@given(
    st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(1, 2 * MIB)), max_size=60),
    st.integers(1, 40 * MIB),
    st.booleans(),
)
def test_any_plan_is_aligned_ahead_bounded_and_inside(reads: list[tuple[int, int]], size: int, local: bool) -> None:
    readahead = Readahead()
    readahead.local = local
    for offset, length in reads:
        if offset >= size:
            continue
        plan = readahead.plan(offset, length, size)
        if plan is not None:
            start, stop = plan
            end = min(offset + length, size)
            assert end <= start < stop <= size
            assert start % BLOCK_BYTES == 0
            assert stop % BLOCK_BYTES == 0 or stop == size
            assert stop - end <= WINDOW_BYTES_MAX + BLOCK_BYTES
