"""The parts that an upload lacks when its file is closed, each stored in the cheapest way.

The store copies what has not changed from the version that the file had before, what is zeros from an object of zeros,
and what was spilled from the spilled part; the rest is sent from staging. After an append it copies even the unchanged
bytes of the last part (`Append`). What always holds: a stored part is in the draft's table, with its ETag and length,
and is not stored twice, whichever attempt needs it; only the pieces of an append are not, because no other attempt can
use them.
"""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from itertools import islice

import msgspec

from lakefs_fuse.blockcache.cache_file import hash_zeros
from lakefs_fuse.errors import (
    AccessDenied,
    FileError,
    KeyRefused,
    NotFound,
    PreconditionFailed,
    StoreError,
    Unsupported,
)
from lakefs_fuse.staging.part_layout import SPANS
from lakefs_fuse.store.protocol import PART_BYTES_MIN, PartRef
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.parts import STORED, PartState

APPEND_BYTES_MAX = SPANS[0][0] * SPANS[0][1]
"""Up to this size all nodes use the same layout, and an object with one more part was made by `Append`
(`admin.checkpoint_sums`)."""
log = logging.getLogger(__name__)


class Append(msgspec.Struct, frozen=True):
    """An append: new bytes after unchanged ones. The part of the layout in which they begin, and the one after it, are
    replaced by pieces that are sent as parts of the upload; the journal has none of these."""

    index: int
    """Index of the first of these parts, from 0."""
    copied: tuple[int, int]
    """Bytes [start, end) that the store copies from the base: its first part."""
    sent: tuple[tuple[int, int], ...]
    """Bytes [start, end) of the parts after that."""


def find_append(draft: Draft) -> Append | None:
    """The plan for a file with a base that changed only after its first 5 MiB; None if parts of the layout are as good,
    or are already being sent because the new bytes fill one."""
    if draft.spills.used or draft.upload.intent_ns:
        return None
    capabilities, layout = draft.uploader.client.capabilities, draft.layout
    if not (capabilities.part_copy and capabilities.parts_replaceable) or capabilities.keeps_holes:
        return None
    written = draft.pages.first()
    changed = draft.base_limit if written is None else min(written, draft.base_limit)
    if not changed < draft.size <= APPEND_BYTES_MAX:
        return None
    index, last = layout.index(changed), layout.count(draft.size) - 1
    start, end = layout.range(index)
    copied = changed if index == last else min(changed, end - PART_BYTES_MIN)  # only the last part may be smaller
    if last > index + 1 or copied - start < PART_BYTES_MIN:
        return None
    sent = (copied, min(end, draft.size)), (end, draft.size)
    return Append(index, (start, copied), tuple(piece for piece in sent if piece[0] < piece[1]))


async def store_missing_parts(draft: Draft, append: Append | None) -> list[PartRef]:
    """Store the parts that the begun upload of the draft lacks. Returns all its parts, in order. ``append``: what
    `find_append` returned. Raises LakeError: NotFound if the upload no longer exists."""
    layout = draft.layout
    count = layout.count(draft.size) if append is None else append.index
    unsent: list[tuple[int, int, int]] = []
    for index in range(count):
        part = draft.parts[index]
        start, end = layout.range(index)
        length = min(end, draft.size) - start
        if part.state is PartState.DROPPED and not part.etag:
            key = draft.target.key
            raise StoreError(f"{key}: the store ended its upload, and bytes {start} to {end} are not staged any more")
        if part.state not in STORED or part.length != length:
            unsent.append((index, start, start + length))
    copies_zeros = _copies_zeros(draft)

    async def store(part: tuple[int, int, int]) -> None:
        copy = _copy_zeros if copies_zeros and _is_zeros(draft, part[1], part[2]) else _copy_or_send
        await copy(draft, *part)

    # A bound, because parts that must be fetched first use disk space.
    await for_each(unsent, store, 2 * draft.uploader.slots.slots)
    refs = [PartRef(i + 1, draft.parts[i].etag, draft.parts[i].length) for i in range(count)]
    return refs if append is None else refs + await _store_append(draft, append)


async def _store_append(draft: Draft, append: Append) -> list[PartRef]:
    uploader, base = draft.uploader, draft.base
    assert base is not None
    refs: dict[int, PartRef] = {}

    async def store(part: tuple[int, tuple[int, int]]) -> None:
        number, (start, end) = part
        async with uploader.slots.slot():
            if (start, end) == append.copied:
                source = base.version.key, base.offset + start, base.version.etag
                ref = None
                with suppress(PreconditionFailed):  # it was replaced: the cache may have it
                    ref = await _copy_part(draft, number - 1, source, end - start)
                if ref is not None:
                    refs[number] = ref
                    uploader.metrics.parts_copied += 1
                    return
                await _fill(draft, start, end)
            refs[number] = await draft.upload.send(number - 1, start, end - start)
            uploader.metrics.parts += 1

    await _fill(draft, append.copied[1], draft.size)
    parts = list(enumerate((append.copied, *append.sent), append.index + 1))
    await for_each(parts, store, len(parts))
    return [refs[number] for number, _ in parts]


def _is_zeros(draft: Draft, start: int, end: int) -> bool:
    """Whether [start, end) was never written: it is beyond the base, and was not dropped or spilled."""
    dropped = draft.parts.is_dropped(draft.layout.index(start))
    written = draft.pages.count(start, end) or draft.spills.pages.count(start, end)
    return start >= draft.base_limit and not dropped and not written


def _copies_zeros(draft: Draft) -> bool:
    """Whether the store copies parts, and more than one is zeros, so that an object of zeros saves requests."""
    layout, capabilities = draft.layout, draft.uploader.client.capabilities
    if not capabilities.part_copy or capabilities.keeps_holes or layout.single_bytes_max < PART_BYTES_MIN:
        return False
    ranges = map(layout.range, range(layout.count(draft.size)))
    zeros = (start for start, end in ranges if _is_zeros(draft, start, min(end, draft.size)))
    return len(list(islice(zeros, 2))) == 2


async def _copy_zeros(draft: Draft, index: int, start: int, end: int) -> None:
    """Copy a part of zeros from the object of zeros, or send it if the store refuses to hold one."""
    uploader = draft.uploader
    async with uploader.slots.slot():
        try:
            ref = await _zeros_copied(draft, index, end - start)
        except (AccessDenied, KeyRefused, Unsupported) as error:
            log.warning("zeros of %s are sent, not copied: %s", draft.target.key, error)
            ref = None
        except NotFound:  # the object of zeros was deleted, or the upload is gone
            uploader.zeros.forget()
            ref = await _zeros_copied(draft, index, end - start)
    if ref is None:
        await _copy_or_send(draft, index, start, end)
        return
    draft.hashes.update(hash_zeros(start, end, draft.size))
    draft.copied_part(index, ref, end - start)


async def _zeros_copied(draft: Draft, index: int, length: int) -> PartRef:
    start, end = draft.layout.range(index)
    source = await draft.uploader.zeros.ensure(end - start)
    return await draft.upload.copy(index, (source, 0, None), length)


async def _copy_or_send(draft: Draft, index: int, start: int, end: int) -> None:
    source = None if draft.pages.count(start, end) else _copy_source(draft, start, end)
    if source is not None and (end - start >= PART_BYTES_MIN or end >= draft.size):
        async with draft.uploader.slots.slot():
            ref = await _copy_part(draft, index, source, end - start)
        if ref is not None:
            draft.copied_part(index, ref, end - start)
            return
    await _fill(draft, start, end)
    draft.uploader.slots.ready()
    await draft.upload_part(index)


async def _copy_part(draft: Draft, index: int, source: tuple[str, int, str], length: int) -> PartRef | None:
    """Have the store copy a part of the upload from an object (key, offset, ETag). None if that was removed: the cache
    may have it. Raises LakeError: NotFound if the upload no longer exists, PreconditionFailed if the object was
    replaced."""
    try:
        return await draft.upload.copy(index, source, length)
    except NotFound:
        key, _, etag = source
        there = await draft.uploader.client.find(key)
        if there is not None and there.etag == etag:
            raise
        return None


async def _fill(draft: Draft, start: int, end: int) -> None:
    """As `Draft.fill`. Raises FileError(ESTALE) if the bytes no longer exist, because NotFound would mean the
    upload."""
    try:
        await draft.fill(start, end)
    except (NotFound, PreconditionFailed) as error:
        raise FileError(errno.ESTALE, f"{draft.target.key} was replaced or removed while it was changed") from error


def _copy_source(draft: Draft, start: int, end: int) -> tuple[str, int, str] | None:
    """Key, offset and ETag of an object with bytes [start, end), of which none is staged: the base, or a spilled
    part."""
    base = draft.base
    has_spilled = draft.spills.pages.count(start, end) > 0  # they count before the base
    if (
        base is not None
        and not has_spilled
        and end <= draft.base_limit
        and draft.uploader.client.capabilities.part_copy
    ):
        return base.version.key, base.offset + start, base.version.etag
    whole = draft.spills.has_whole(start, end)
    return None if whole is None else (whole.key, 0, whole.etag)
