"""Names that changed while the next state of a lake was made: noted one by one, told to the kernel afterwards.

Of a large step there are millions, so they lie in a file without a name: memory holds MEMORY_BYTES_MAX of them, and a
crash leaves nothing. Noted on the trio thread, read by one worker thread when everything was noted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from struct import Struct

MEMORY_BYTES_MAX = 1 << 20
_HEAD = Struct("<QH")


class ChangedNames:
    """See the module's head."""

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES_MAX, dir=str(directory))  # noqa: SIM115 (see close)
        self.count = 0

    def note(self, parent: int, name: bytes) -> None:
        """Raises OSError where the disk is full."""
        self._file.write(_HEAD.pack(parent, len(name)) + name)
        self.count += 1

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Parents and names, in the order in which they were noted."""
        self._file.seek(0)
        while head := self._file.read(_HEAD.size):
            parent, length = _HEAD.unpack(head)
            yield parent, self._file.read(length)

    def close(self) -> None:
        self._file.close()
