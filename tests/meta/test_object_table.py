"""The object table: what it remembers of names stays bounded and cheap, however many there are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.meta import object_table
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.object_table import Objects
from tests.fakes import open_database

AT_ONCE = 1000
DEARER_MAX = 2.0
"""By as much a name may cost more beyond the bound; it was four times as much when the oldest was searched for."""


class _Rows:
    """As much of a database as costs next to nothing."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.reopened: list[object] = []
        self._rows: dict[bytes, bytes | None] = {}
        self.get = self._rows.get

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def scan(self, _begin: bytes, _end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter(())

    def commit_volatile(self, batch: Batch) -> None:
        self._rows.update(batch.rows)

    def write_shares_by(self, _write: object) -> None: ...


def test_objects_beyond_the_bound_cost_what_those_before_cost() -> None:
    objects = Objects(cast("Database", _Rows()))

    def seconds(first: int) -> float:
        began_s = time.thread_time()
        for at in range(first, first + object_table.RESERVED_MAX, AT_ONCE):
            objects.numbers([(f"a/{number:08d}", "etag", 1) for number in range(at, at + AT_ONCE)])
        return time.thread_time() - began_s

    before_s = seconds(0)
    after_s = seconds(2 * object_table.RESERVED_MAX)
    assert after_s < DEARER_MAX * before_s, (before_s, after_s)


def test_objects_beyond_the_bound_forget_the_name_used_longest_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_table, "RESERVED_MAX", 2)
    database = open_database(tmp_path / "meta", "lake")
    objects = Objects(database)
    for key, etag in (("a", "1"), ("b", "1"), ("a", "2"), ("c", "1")):
        objects.numbers([(key, etag, 1)])
    assert [key for key in "abc" if objects.is_reserved(key)] == ["a", "c"]
    database.close()
