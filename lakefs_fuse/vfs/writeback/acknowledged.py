"""What write-back keeps of a version that was accepted, of whoever waits for one, and what it asks of the publisher.

Values of the trio thread; a crash leaves of them what the journal says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import trio

from lakefs_fuse.errors import LakeError
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.files.open_file import OpenFile


@dataclass(slots=True, eq=False)
class Accepted:
    """A version on its way. ``barrier``: everything accepted up to this number comes before it."""

    sequence: int
    barrier: int
    file: OpenFile
    draft: Draft
    since_s: float
    started: bool = False
    attempt: int = 0
    """The newest attempt's number."""
    busy: bool = False
    """Becoming visible right now: too late to be superseded."""
    superseded: bool = False
    """A newer version is being accepted: this does not become visible, unless that fails."""
    urgent: bool = False
    failed: bool = False
    replayed: bool = False
    error: LakeError | None = None

    @property
    def place(self) -> int:
        """Its number, or that of the oldest version that it superseded: who waits for that waits for this."""
        return self.draft.stands_for or self.sequence


@dataclass(slots=True, eq=False)
class Drain:
    """Somebody waits for these numbers."""

    wanted: set[int]
    since: int
    """Attempts up to this number began before: they tell nothing."""
    error: LakeError | None = None
    changed: trio.Event = field(default_factory=trio.Event)


class Publisher(Protocol):
    """Makes accepted files visible; `newest.Newest`."""

    async def settled(self, item: Accepted) -> bool:
        """Of one that came back at mount: nothing is left to do. Raises LakeError."""

    async def set_aside(self, item: Accepted) -> None:
        """Somebody else has the name: this gets another. Raises LakeError."""

    async def publish_accepted(self, item: Accepted) -> None:
        """By itself. Raises LakeError."""

    async def publish_together(self, items: list[Accepted]) -> list[Accepted]:
        """In one pack; answers those that are visible now. Raises LakeError, and then none is."""

    def discard_later(self, draft: Draft) -> None:
        """Nobody wants this version any more."""
