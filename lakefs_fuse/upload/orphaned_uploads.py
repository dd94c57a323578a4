"""Uploads that were asked for and whose ids were never learnt: the answer was lost, or the daemon died before it."""

from __future__ import annotations

from lakefs_fuse.store.client import StoreClient

INTENT_SLACK_NS = 2_000_000_000
"""Stores date uploads to the second, by their own clock."""


async def abort_strays(client: StoreClient, key: str, since_ns: int) -> None:
    """Abort uploads of ``key`` that began at ``since_ns`` (wall clock) or later. Raises LakeError."""
    for upload in await client.list_multipart(key):
        if upload.key == key and upload.started_ns >= since_ns - INTENT_SLACK_NS:
            await client.abort_multipart(key, upload.upload_id)
