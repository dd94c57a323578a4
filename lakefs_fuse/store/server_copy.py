"""Copies of whole objects that the store makes itself: in one request, or in parts where the object is large.

What always holds: the copy becomes visible as a whole, with the metadata of its source, or not at all; a failed upload
in parts is aborted. A crash leaves an unfinished upload, which `gc` ends. Tasks of one trio loop.
"""

from __future__ import annotations

from contextlib import suppress

import trio

from lakefs_fuse.errors import LakeError, NotFound, PreconditionFailed, Unavailable, Unsupported
from lakefs_fuse.store.client import StoreClient, copied_metadata, copy_metadata
from lakefs_fuse.store.protocol import ObjectMeta, PartRef

COPY_BYTES_MAX = 5 << 30
"""What S3 copies in one request."""
COPY_PART_BYTES = 1 << 30
"""More is copied in parts, where the store can."""
ABORT_S_MAX = 5.0
"""Maximum wait for the store when a copy in parts is aborted. If it does not answer by then, or refuses, the unfinished
upload stays for `gc`."""


async def copy_object(
    client: StoreClient, source: str, etag: str, size: int, target: str, *, if_absent: bool = False
) -> ObjectMeta:
    """Copy the version ``etag``, of ``size`` bytes, of the object ``source``. ``if_absent``: in parts, because the
    store then refuses where something is at ``target``, and with metadata by which it `is_copy_of` the source; a store
    that has no such condition copies over it, and so does every store where the object is empty, as no range of it can
    be a part.

    Raises NotFound (of ``source``), PreconditionFailed (another version is at ``source``, or something at ``target``,
    which after a lost answer may be the copy), Unsupported where the store cannot copy so much, and other StoreErrors.
    """
    can_copy_parts = client.capabilities.part_copy
    is_conditional = if_absent and size > 0 and can_copy_parts and client.capabilities.complete_if_absent
    if not is_conditional and (size <= COPY_PART_BYTES or not can_copy_parts):
        if size > COPY_BYTES_MAX:
            raise Unsupported(f"{source} has {size} bytes, and parts cannot be copied")
        return await client.copy(source, target, etag=etag)
    metadata = dict((await client.head(source)).metadata or {})
    if if_absent:
        metadata |= copy_metadata(target) | copied_metadata(source, etag)
    upload_id = await client.create_multipart(target, metadata=metadata)
    try:
        refs: list[PartRef] = []
        for number, start in enumerate(range(0, size, COPY_PART_BYTES), 1):
            end = min(start + COPY_PART_BYTES, size)
            refs.append(await client.upload_part_copy(target, upload_id, number, source, start, end, etag=etag))
        return await _complete(client, target, upload_id, refs, if_absent=is_conditional)
    except BaseException:
        with trio.move_on_after(ABORT_S_MAX, shield=True), suppress(LakeError):
            await client.abort_multipart(target, upload_id)
        raise


async def _complete(
    client: StoreClient, target: str, upload_id: str, refs: list[PartRef], *, if_absent: bool
) -> ObjectMeta:
    """Complete an upload. After a lost answer the repeated request finds no upload, but the copy at ``target``; callers
    that give no precondition have chosen a key to which no other client writes."""
    try:
        return await client.complete_multipart(target, upload_id, refs, if_absent=if_absent)
    except NotFound as error:
        there = await client.find(target)
        if there is None or there.size != sum(ref.size for ref in refs):
            raise Unavailable(f"the upload of a copy to {target!r} is gone: try again") from error
        if if_absent:
            raise PreconditionFailed(f"{target!r} exists") from error
        return there
