"""A clock that stands still, and lakes mounted by the real program, as the tests of mounts have them."""

from __future__ import annotations

import pytest

from tests.mount.conftest import dev_fuse, make_lake
from tests.vfs.lakes import Clock

__all__ = ["clock", "dev_fuse", "make_lake"]


@pytest.fixture
def clock() -> Clock:
    return Clock()
