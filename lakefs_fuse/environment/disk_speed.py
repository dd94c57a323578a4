"""How fast a directory's disk takes bytes and makes them durable, measured with a temporary file without a name.

Blocking; nothing is left behind, not even by a crash.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass

WRITE_BYTES = 64 << 20
"""Enough to leave the disk's own cache, and written within a second by any disk that is fit for use."""
PIECE_BYTES = 1 << 20
WRITE_S_MAX = 2.0
"""A slow disk has written less by then."""
SYNCS = 20
SYNC_BYTES = 4096
SYNCS_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """What a disk does: bytes written and synced per second, and the median time of a small write that is synced."""

    bytes_s: float
    sync_s: float


def measure(directory: str) -> DiskSpeed:
    """Measure the disk of a directory in which this user may write. Raises OSError."""
    piece = os.urandom(PIECE_BYTES)
    with tempfile.TemporaryFile(dir=directory) as file:
        descriptor = file.fileno()
        began_s, written = time.monotonic(), 0
        while written < WRITE_BYTES and time.monotonic() - began_s < WRITE_S_MAX:
            written += os.pwrite(descriptor, piece, written)
        os.fdatasync(descriptor)
        bytes_s = written / max(1e-9, time.monotonic() - began_s)
        taken: list[float] = []
        began_s = time.monotonic()
        while len(taken) < SYNCS and time.monotonic() - began_s < SYNCS_S_MAX:
            before_s = time.monotonic()
            os.pwrite(descriptor, piece[:SYNC_BYTES], written + len(taken) * SYNC_BYTES)
            os.fdatasync(descriptor)
            taken.append(time.monotonic() - before_s)
    return DiskSpeed(bytes_s, statistics.median(taken))
