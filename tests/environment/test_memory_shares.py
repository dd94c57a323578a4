"""The shares of `--memory`."""

from __future__ import annotations

import pytest

from lakefs_fuse.config import GIB, MEMORY_BYTES_MIN, MIB
from lakefs_fuse.environment.memory_shares import PROGRAM_BYTES, shares_of


@pytest.mark.parametrize("memory", [MEMORY_BYTES_MIN, 384 * MIB, 8 * GIB])
def test_shares_are_within_the_bound_and_enough_to_read_with(memory: int) -> None:
    shares = shares_of(memory)
    assert sum(shares) + PROGRAM_BYTES <= memory
    assert min(shares) >= 9 * MIB, "a GET of 8 MiB fits"
