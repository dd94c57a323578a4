"""The errors of system calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def error_of(call: Callable[[], object]) -> str:
    """The name of the errno that a call fails with."""
    with pytest.raises(OSError) as raised:
        call()
    return errno.errorcode[raised.value.errno or 0]


def opened(path: Path, flags: int) -> Callable[[], int]:
    return lambda: os.open(path, flags, 0o644)
