"""Fixtures of the store tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import Server
from tests.store.lakes import NAMES, Lake, open_lake


# moto takes as much CPU time as the others together. `test_s3.py` and `test_probe.py` run on it in `make test` too.
@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.long) if name == "moto" else name for name in NAMES])
def lake(request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[Server], str]) -> Iterator[Lake]:
    """Each of the supported stores."""
    opened = open_lake(request.param, request, tmp_path, new_bucket)
    yield opened
    opened.store.close()
