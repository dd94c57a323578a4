"""Rows that a full disk does not take, in memory over the engine that has all others.

With them a node shows names that it has never listed while the disk of its cache directory is full: what a LIST or a
HEAD says is kept here, and written before anything else once the disk has room.

What always holds:

* *lost tail*: volatile rows were committed last, and no batch is written before them. A daemon that dies loses them, as
  a power cut loses the tail of the log: the store is asked again;
* *no late batch*: a batch whose write failed may be there when the engine is opened again. The rows that it changes are
  kept as they were before, whether the disk is full or not, and written over it then: its caller was told that it
  failed, and everything committed since was decided without it;
* *bounded memory*: keys and values take at most VOLATILE_BYTES_MAX.

`meta.database` calls it, under the rules that it has for an engine.
"""

from __future__ import annotations

import errno
import heapq
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from lakefs_fuse.environment.storage_engine import Engine, Rows, Step

VOLATILE_BYTES_MAX = 16 << 20
"""About 80,000 names. Python takes four times as much for them."""
ROW_BYTES = 16
"""Counted for each row besides, so that empty ones have a bound, too."""

_Item = tuple[bytes, bytes | None]


class VolatileRows:
    """An engine that reads volatile rows first, then the engine below. See the module's head."""

    def __init__(self, below: Engine, failed: Sequence[Step] = ()) -> None:
        """``failed`` is the batch whose write failed last: ``below`` may have it when it is opened again. Raises
        OSError(ENOSPC) where it changes too much."""
        self._below = below
        self._rows: Rows = {}
        self._keys: list[bytes] = []
        self._is_sorted, self._is_read = True, False
        """``_is_read``: an iterator may still read the rows and keys, so that they are copied before they change."""
        self._bytes = 0
        self._add({key: below.get(key) for key in self._keys_of(failed)})

    def add(self, steps: Sequence[Step]) -> None:
        """Make changes visible, all or none. Raises OSError(ENOSPC) where they are too large."""
        added: Rows = {}
        for rows, begin, end in steps:
            added.update(rows)
            if end:
                added.update(dict.fromkeys(key for key in added if begin <= key < end))
                added.update(dict.fromkeys(self._keys_of([({}, begin, end)])))
        self._add(added)

    def replace_below(self, below: Engine) -> None:
        """``below`` stands for the engine below from now on."""
        self._below = below

    def move_to(self, below: Engine) -> None:
        """``below`` is the engine below, opened again; it gets all volatile rows, in one batch. That survives a power
        cut, as a late batch might. Raises as `Engine.write`; then they stay here."""
        self.replace_below(below)
        below.write([(self._rows, b"", b"")], sync=True)

    def _keys_of(self, steps: Sequence[Step]) -> Iterator[bytes]:
        """Keys of all rows that some steps write or delete. Raises OSError(ENOSPC) for too many."""
        size = 0
        for rows, begin, end in steps:
            deleted = (key for key, _ in self.items(begin, end)) if end else iter(())
            for keys in (iter(rows), deleted):
                for key in keys:
                    size += len(key) + ROW_BYTES
                    _check_size(size)
                    yield key

    def _add(self, rows: Rows) -> None:
        new = [key for key in rows if key not in self._rows]
        size = self._bytes + sum(len(key) + ROW_BYTES for key in new)
        size += sum(len(value or b"") - len(self._rows.get(key) or b"") for key, value in rows.items())
        _check_size(size)
        if self._is_read:
            self._rows, self._keys, self._is_read = self._rows.copy(), self._keys.copy(), False
        self._bytes = size
        self._keys += new
        self._is_sorted = self._is_sorted and not new
        self._rows.update(rows)

    # -- reading

    def get(self, key: bytes, /) -> bytes | None:
        return self._rows[key] if key in self._rows else self._below.get(key)

    def get_many(self, keys: list[bytes], /) -> list[bytes | None]:
        return [self._rows.get(key, value) for key, value in zip(keys, self._below.get_many(keys), strict=True)]

    def items(self, begin: bytes, end: bytes = b"", /) -> Iterator[tuple[bytes, bytes]]:
        if not self._is_sorted:
            self._keys.sort()
            self._is_sorted = True
        keys, rows, below = self._keys, self._rows, self._below.items(begin, end)
        found = range(bisect_left(keys, begin), bisect_left(keys, end) if end else len(keys))
        if not found:
            return below
        self._is_read = True
        return _merged(((keys[at], rows[keys[at]]) for at in found), below)

    # -- the rest of an engine

    def write(self, steps: Sequence[Step], *, sync: bool) -> None:
        """Raises OSError: the volatile rows come first."""
        raise _no_room()

    def sync(self) -> None:
        raise _no_room()

    def ingest(self, paths: Sequence[Path]) -> None:
        raise _no_room()

    def checkpoint(self, directory: Path) -> None:
        raise _no_room()

    def integer_property(self, name: str) -> int:
        return self._below.integer_property(name)

    def close(self) -> None:
        self._below.close()


def _merged(kept: Iterable[_Item], below: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """In the order of keys; volatile rows win."""
    every: Iterator[_Item] = heapq.merge(kept, below, key=lambda item: item[0])  # of equal keys the volatile one first
    for _, items in groupby(every, key=lambda item: item[0]):
        key, value = next(items)
        if value is not None:
            yield key, value


def _check_size(size: int) -> None:
    if size > VOLATILE_BYTES_MAX:
        raise _no_room()


def _no_room() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
