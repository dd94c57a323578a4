"""The open descriptors of staging files: a bounded number, whatever the number of files being written.

What always holds: at most ``open_max`` are open. Opening one more closes the one used least recently that no one is
using; where all are in use, it is refused with EMFILE. Trio thread only.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import Protocol

from lakefs_fuse.errors import FileError


class Holder(Protocol):
    """A file with an open descriptor, which it can open again."""

    @property
    def in_use(self) -> bool:
        """A thread or a task is using the descriptor."""

    def park(self) -> None:
        """Close the descriptor for now, and call `DescriptorPool.remove`."""


class DescriptorPool:
    """See the module's head."""

    def __init__(self, open_max: int) -> None:
        self.open_max = open_max
        self._open: OrderedDict[Holder, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def make_room(self) -> None:
        """Of one more descriptor. Raises FileError(EMFILE)."""
        if len(self._open) < self.open_max:
            return
        idle = next((holder for holder in self._open if not holder.in_use), None)
        if idle is None:
            raise FileError(
                errno.EMFILE,
                f"{self.open_max} staging files are being read or written at this moment: "
                "raise the daemon's limit of open files (`ulimit -Hn`, LimitNOFILE=)",
            )
        idle.park()

    def add(self, holder: Holder) -> None:
        """Its descriptor was opened or used just now."""
        self._open[holder] = None
        self._open.move_to_end(holder)

    def remove(self, holder: Holder) -> None:
        """Its descriptor was closed."""
        self._open.pop(holder, None)
