"""What all tests of the read side share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.blockcache.reading import CACHES_MADE


@pytest.fixture(autouse=True)
def closed_caches() -> Iterator[None]:
    yield
    while CACHES_MADE:
        CACHES_MADE.pop().close()
