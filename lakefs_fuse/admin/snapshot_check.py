"""Compares the objects that a named snapshot names with those of the store.

One LIST for every 1,000 objects below `.lakefs/commits/` and `.lakefs/objects/`, and a HEAD for each that it does not
show at its version. Memory holds a bit for each object, and the first OBJECTS_MAX that are bad. Plain objects of the
lake, which only snapshots without a dataset name, are not asked for: removing one makes the snapshot lack it.
Tasks of one trio loop; nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from lakefs_fuse.admin.number_set import NumberSet
from lakefs_fuse.commits.record import COMMITS, OBJECTS
from lakefs_fuse.errors import NotFound
from lakefs_fuse.meta.object_table import ObjectRow, Objects
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.sync.nursery import for_each

OBJECTS_MAX = 1000
"""Bad objects that are described; the others are counted."""
HEADS_AT_ONCE = 16
ROWS_PER_STEP = 512


@dataclass(frozen=True, slots=True)
class BadObject:
    """An object that the store does not have at the version that the snapshot names; ``kind`` is missing or changed."""

    row: ObjectRow
    kind: str
    text: str


@dataclass(slots=True)
class BadObjects:
    """``numbers`` of all, in the object table; the first ``objects``; ``checked`` are good and bad ones."""

    checked: int = 0
    count: int = 0
    numbers: NumberSet = field(default_factory=NumberSet)
    objects: list[BadObject] = field(default_factory=list)


async def find_bad_objects(client: StoreClient, objects: Objects) -> BadObjects:
    """Raises StoreError kinds where the store does not answer."""
    there, found = NumberSet(), BadObjects()
    for prefix in (COMMITS, OBJECTS):
        async for page in client.list_all(prefix):
            for meta in page.objects:
                row = objects.find(meta.key, meta.etag)
                if row is not None and row.size == meta.size:
                    there.add(row.number)

    async def ask(row: ObjectRow) -> None:
        bad = await _find_fault(client, row)
        if bad is None:
            return
        found.count += 1
        found.numbers.add(row.number)
        if len(found.objects) < OBJECTS_MAX:
            found.objects.append(bad)

    named = (row for row in objects.rows() if row.entries > 0 and row.key.startswith((COMMITS, OBJECTS)))
    while some := list(islice(named, ROWS_PER_STEP)):
        found.checked += len(some)
        await for_each([row for row in some if row.number not in there], ask, HEADS_AT_ONCE)
    found.objects.sort(key=lambda bad: bad.row.key)
    return found


async def _find_fault(client: StoreClient, row: ObjectRow) -> BadObject | None:
    try:
        meta = await client.head(row.key)
    except NotFound:
        return BadObject(row, "missing", "the object is gone from the store")
    if meta.size != row.size:
        return BadObject(row, "changed", f"the object has {meta.size:,} bytes, and had {row.size:,}")
    if meta.etag != row.etag:
        return BadObject(row, "changed", f"the object has the ETag {meta.etag}, and had {row.etag}")
    return None  # LIST was not up to date
