"""Objects of zeros in the store, from which parts that are all zeros are copied.

What always holds: `.lakefs/zeros/<bytes>` is that many zeros, whichever node stored it, so that storing it again
changes nothing. An object is looked for once by a daemon, and stored where it is missing; one that was deleted is
stored again when a copy of it fails. Trio thread only. A crash leaves such an object, or an unfinished upload of one.
"""

from __future__ import annotations

import trio

from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient

ZEROS = f"{RESERVED_PREFIX}zeros/"


class ZeroObjects:
    """See the module's head."""

    def __init__(self, client: StoreClient, piece_bytes: int) -> None:
        """The object of ``piece_bytes`` is sent; larger ones, multiples of that, are put together by the store."""
        self._client = client
        self._piece_bytes = piece_bytes
        self._stored: set[int] = set()
        self._storing = trio.Lock()

    async def ensure(self, size: int) -> str:
        """The key of an object of ``size`` zeros that is in the store. Raises StoreError."""
        async with self._storing:
            return await self._ensure(size)

    def forget(self) -> None:
        """Look for the objects again."""
        self._stored.clear()

    async def _ensure(self, size: int) -> str:
        key = f"{ZEROS}{size}"
        if size not in self._stored:
            await self._find_or_store(key, size)
            self._stored.add(size)
        return key

    async def _find_or_store(self, key: str, size: int) -> None:
        found = await self._client.find(key)
        if found is not None and found.size == size:
            return
        if size == self._piece_bytes:
            await self._client.put(key, bytes(size))
            return
        piece = await self._ensure(self._piece_bytes)
        upload_id = await self._client.create_multipart(key)
        try:
            refs = [
                await self._client.upload_part_copy(key, upload_id, number, piece, 0, self._piece_bytes)
                for number in range(1, size // self._piece_bytes + 1)
            ]
            await self._client.complete_multipart(key, upload_id, refs)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._client.abort_multipart(key, upload_id)
            raise
