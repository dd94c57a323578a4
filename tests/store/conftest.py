"""Fixtures of the store tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lakefs_fuse.config import StoreConfig
from tests.recording import Recorder, recording
from tests.servers import Server
from tests.store.lakes import NAMES, Lake, open_lake, s3_config

# moto takes as much CPU time as the others together. `test_s3.py` and `test_probe.py` run on it in `make test` too, and
# `test_probe.py` and `mount/test_stores.py` on rclone.
LONG = frozenset({"moto", "rclone"})


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in NAMES])
def lake(request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[Server], str]) -> Iterator[Lake]:
    """Each of the supported stores."""
    opened = open_lake(request.param, request, tmp_path, new_bucket)
    yield opened
    opened.store.close()


@pytest.fixture
def recorder(moto: Server) -> Iterator[Recorder]:
    """moto, and what it is asked."""
    with recording(moto) as found:
        yield found


@pytest.fixture
def recorded_config(recorder: Recorder, moto: Server, new_bucket: Callable[[Server], str]) -> StoreConfig:
    """A lake on moto, by way of ``recorder``."""
    return s3_config(recorder.server, f"{new_bucket(moto)}/lake")
