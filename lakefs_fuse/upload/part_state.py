"""What is known of one part of a draft's upload. Trio thread only; a crash leaves what the journal record tells."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PartState(Enum):
    """DIRTY → UPLOADING → CLEAN → DROPPED; a write takes UPLOADING and CLEAN back to DIRTY, and fails on DROPPED."""

    DIRTY = "dirty"
    UPLOADING = "uploading"
    CLEAN = "clean"
    DROPPED = "dropped"


@dataclass(slots=True)
class Part:
    state: PartState = PartState.DIRTY
    generation: int = 0
    """Grows with every write, so that an upload knows whether what it sent is still right."""
    etag: str = ""
    length: int = 0
    announced: bool = False
    written_out: bool = False
    """Its way to the disk was begun."""
