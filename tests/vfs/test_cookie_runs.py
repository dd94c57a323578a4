"""Cookies that a LIST confirms: whatever their order, each once, and few Python objects at a time."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.vfs.namespace import listing_merge
from lakefs_fuse.vfs.namespace.listing_merge import CookieRuns

COOKIES = 100_000


@given(st.lists(st.integers(0, 40)), st.integers(1, 9))
def test_ascending_returns_each_cookie_once(cookies: list[int], run_cookies: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing_merge, "RUN_COOKIES", run_cookies)
        runs = CookieRuns()
        for cookie in cookies:
            runs.add(cookie)
        assert list(runs.ascending()) == sorted(set(cookies))


@pytest.mark.parametrize("is_in_order", [True, False])
def test_cookies_take_eight_bytes_each(is_in_order: bool) -> None:
    cookies = range(1 << 40, (1 << 40) + COOKIES)
    order = list(cookies) if is_in_order else random.Random(1).sample(cookies, COOKIES)
    tracemalloc.start()
    try:
        runs = CookieRuns()
        for cookie in order:
            runs.add(cookie)
        assert sum(1 for _ in runs.ascending()) == COOKIES
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 * COOKIES
