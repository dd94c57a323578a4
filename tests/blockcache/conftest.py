"""What all tests of the read side share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.blockcache.reading import CACHES_MADE
from tests.temporary_files import directory_on_disk


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On a disk."""
    with directory_on_disk() as directory:
        yield directory


@pytest.fixture(autouse=True)
def closed_caches() -> Iterator[None]:
    yield
    while CACHES_MADE:
        CACHES_MADE.pop().close()
