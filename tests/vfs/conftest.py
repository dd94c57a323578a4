"""Fixtures of the filesystem's tests. None is automatic: a module asks for what it needs with ``usefixtures``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lakefs_fuse.upload import missing_parts
from lakefs_fuse.vfs.ops import rename_preparation
from lakefs_fuse.vfs.writeback import packer as packing
from lakefs_fuse.vfs.writeback import publisher
from lakefs_fuse.vfs.writeback import queue as writeback


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write-back tries again at once."""
    monkeypatch.setattr(writeback, "PAUSE_S_FIRST", 0.01)
    monkeypatch.setattr(rename_preparation, "PAUSE_S_FIRST", 0.01)


@pytest.fixture(scope="module")
def noted_one_by_one() -> Iterator[None]:
    """Others have their turn between any two files of a pack, not only between many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "RECORDED_AT_ONCE", 1)
        patch.setattr(packing, "FILES_BETWEEN_PAUSES", 1)
        yield


@pytest.fixture(scope="module")
def small_parts_may_be_copied() -> Iterator[None]:
    """So that parts of 64 KiB take the way of those of 5 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(missing_parts, "PART_BYTES_MIN", 4096)
        yield
