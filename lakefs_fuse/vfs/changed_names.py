"""Changed names of which the kernel must be notified, without a limit on their number.

A large commit, listing or refresh changes millions of names in one step. Beyond CHANGED_NAMES_BYTES_MAX they are in an
unlinked file, which a crash removes. The trio thread adds all of them before one worker thread at a time reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from struct import Struct
from typing import BinaryIO

from lakefs_fuse.environment.local_disk import is_out_of_room
from lakefs_fuse.errors import CacheError, CacheFull

CHANGED_NAMES_BYTES_MAX = 1 << 20
"""Maximum size of changed names in memory; beyond that they are in a file."""
_NAME_HEAD = Struct("<QH")
"""Inode of the parent directory, and bytes of the name, which follows."""


class ChangedNames:
    """See the module's head."""

    def __init__(self, open_file: Callable[[], BinaryIO]) -> None:
        """``open_file`` opens a temporary file without a name. Raises OSError."""
        self._open_file = open_file
        self._file: BinaryIO = BytesIO()
        self._is_in_memory = True
        self.count = 0

    def add(self, parent: int, name: bytes) -> None:
        """Raises CacheError if the local disk fails, or is full."""
        try:
            self._file.write(_NAME_HEAD.pack(parent, len(name)) + name)
            self.count += 1
            if self._is_in_memory and self._file.tell() > CHANGED_NAMES_BYTES_MAX:
                self._spill()
        except OSError as error:
            raise _failed(error) from error

    def _spill(self) -> None:
        file = self._open_file()
        try:
            self._file.seek(0)
            file.write(self._file.read())
        except OSError:
            file.close()
            raise
        self._file, self._is_in_memory = file, False

    def names(self) -> Iterator[tuple[int, bytes]]:
        """Parents and names, in the order in which they were added. Raises CacheError if the local disk fails."""
        try:
            self._file.seek(0)
            while head := self._file.read(_NAME_HEAD.size):
                parent, length = _NAME_HEAD.unpack(head)
                yield parent, self._file.read(length)
        except OSError as error:
            raise _failed(error) from error

    def close(self) -> None:
        self._file.close()


def _failed(error: OSError) -> CacheError:
    kind = CacheFull if is_out_of_room(error) else CacheError
    return kind(f"the list of changed names in the cache directory could not be written or read: {error.strerror}")
