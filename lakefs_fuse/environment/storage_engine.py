"""The ordered key-value store under the metadata database, as far as a node depends on what it promises.

What always holds (*injected engine*): `meta.database` keeps its rows in an `Engine` only, so that a modelled one knows
what was not synced (`tests/simulation`). An engine raises errors of its own, which the database translates. `get`,
`get_many` and `items` may be attributes: they are called for every lookup, and a method more costs a tenth of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

Rows = dict[bytes, bytes | None]
"""Values by key; None deletes a row."""
Step = tuple[Rows, bytes, bytes]
"""Rows to write, then the keys in [begin, end) to delete; an empty ``end`` deletes none."""


class Engine(Protocol):
    """An open store of rows, in the order of their keys."""

    def get(self, key: bytes, /) -> bytes | None:
        """The row of a key."""

    def get_many(self, keys: list[bytes], /) -> list[bytes | None]:
        """As `get`, of each of one or more keys."""

    def items(self, begin: bytes, end: bytes = b"", /) -> Iterator[tuple[bytes, bytes]]:
        """Rows with keys in [begin, end) as they are now, whatever is written while they are read; an empty ``end``
        bounds nothing."""

    def write(self, steps: Sequence[Step], *, sync: bool) -> None:
        """Make the changes visible together. After a power cut a prefix of all writes is left, which has every write up
        to the last one with ``sync``."""

    def sync(self) -> None:
        """Everything written before survives a power cut."""

    def ingest(self, paths: Sequence[Path]) -> None:
        """Take in files of sorted rows (RocksDB's SST), all or none, durably; they are moved away."""

    def checkpoint(self, directory: Path) -> None:
        """All rows as they are now, durably, as a store of their own in a directory that does not exist yet."""

    def integer_property(self, name: str) -> int:
        """A number that RocksDB has under this name, or 0."""

    def close(self) -> None:
        """Nothing of it is used any more, scans included."""


class Engines(Protocol):
    """Opens the engines of a node. All that belongs to one lies in its directory, and is moved and deleted with it."""

    def open(self, directory: Path) -> Engine:
        """A new one where there is none. Raises CacheError where it is in use; RocksDB's errors where it is damaged, or
        cannot be opened now."""

    def repair(self, directory: Path) -> None:
        """Make a damaged one open again with what can be read of it. Raises any error where that fails."""
