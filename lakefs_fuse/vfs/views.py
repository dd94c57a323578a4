"""What the filesystem tells the outside of its state."""

from __future__ import annotations

import msgspec


class Unfinished(msgspec.Struct, frozen=True):
    """A file whose newest bytes are not in the store. ``state`` is a `DraftState` or ``orphan`` (left by a daemon that
    died); sizes in bytes; ``bytes_done`` of them are uploaded; ``error`` is why the last attempt failed."""

    id: str
    path: str
    bytes: int
    state: str
    age_s: float
    error: str
    parts_done: int
    bytes_done: int
    missing: int = 0
    """Bytes whose writes were refused: it is not published as long as there are any."""
