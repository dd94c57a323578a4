"""Looks for objects at the names of files that a pack is about to store.

A pack replaces whatever has the names of its files, and no condition of a request prevents that. So the store is asked
before. One page of a LIST answers for most packs, because their names are near each other. A name that the page does
not reach is asked for by a HEAD of its own. What always holds: of each key the store was asked after the call began.
Nothing here survives a crash, or has to.
"""

from __future__ import annotations

from collections.abc import Collection

from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import for_each

AFTER_RESERVED = RESERVED_PREFIX.removesuffix("/") + chr(ord("/") + 1)
"""In a LIST that begins here there is no key of this program's own."""
HEADS_AT_ONCE = 16


async def find_objects(client: StoreClient, keys: Collection[str]) -> list[ObjectMeta]:
    """The objects at these keys, of which there is at least one. Raises LakeError."""
    first = min(keys)
    begin = AFTER_RESERVED if first[:-1] < AFTER_RESERVED < first else first[:-1]
    page = await client.list_page("", start_after=begin)
    found = [meta for meta in page.objects if meta.key in keys]
    reached = page.objects[-1].key if page.objects and client.capabilities.sorted_listing else ""
    beyond = [key for key in keys if key > reached] if page.next_token is not None else []

    async def ask(key: str) -> None:
        if (meta := await client.find(key)) is not None:
            found.append(meta)

    if beyond:
        await for_each(beyond, ask, min(HEADS_AT_ONCE, len(beyond)))
    return found
