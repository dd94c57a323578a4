"""What a run of gc tells the next one: since when which commit objects were seen to be dead.

Kept in the lake as ``.lakefs/gc/<time>``, because a grace period that outlives a process needs a memory. The newest
note counts; a note that is lost or cannot be read only makes grace periods begin again. An object is in the new note
with its old time only if it is dead in this run as well.
"""

from __future__ import annotations

import msgspec

from lakefs_fuse.errors import NotFound, PreconditionFailed
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta

NOTES = f"{RESERVED_PREFIX}gc/"
FORMAT = 1
NOTE_BYTES_MAX = 256 << 20


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """``dead``: key → time (ns since 1970) of the first run that saw it dead. ``horizon``: commits older than this had
    been folded into an index when the note was written."""

    format: int = FORMAT
    horizon: int = 0
    dead: dict[str, int] = {}


async def read_note(client: StoreClient) -> Note:
    """An empty one where there is none. Raises LakeError."""
    for meta in reversed(await _notes(client)):
        if not 0 < meta.size <= NOTE_BYTES_MAX:
            continue
        try:
            raw = bytes((await client.get(meta.key, 0, meta.size, etag=meta.etag)).data)
            note = msgspec.msgpack.decode(raw, type=Note)
        except (NotFound, PreconditionFailed, msgspec.DecodeError):
            continue
        if note.format == FORMAT:
            return note
    return Note()


async def write_note(client: StoreClient, note: Note, time_ns: int) -> None:
    """In place of all older ones. Raises LakeError."""
    old = [meta.key for meta in await _notes(client)]
    key = f"{NOTES}{time_ns:016x}"
    if note.dead or note.horizon:
        await client.put(key, msgspec.msgpack.encode(note))
    await client.delete_many([each for each in old if each < key])


async def _notes(client: StoreClient) -> list[ObjectMeta]:
    found: list[ObjectMeta] = []
    async for page in client.list_all(NOTES):
        found += page.objects
    return sorted(found, key=lambda meta: meta.key)
