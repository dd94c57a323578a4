"""From a draft to an object: the one request that makes the new version visible, and how an attempt ends without it.

Small files are one PUT. Others complete the upload that began while they were written, once it has all parts
(`missing_parts`). The attributes in the object's metadata are fixed when its request begins; the caller stores later
changes elsewhere. `publish` may be called again after it failed; parts in the store are not sent twice, and no attempt
after one whose response was lost touches another writer's version (`store.client`). A crash before the completing
request leaves the old version visible, after it the new one; the draft's id in the object's metadata tells which.

A multipart upload belongs to one key. It is *restarted* at the same key if the store has lost it (NoSuchUpload),
*abandoned* if the draft has to go to another key, and *aborted* if the version was stored without it.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
import trio

from lakefs_fuse.blockcache.cache_file import block_hash, hash_blocks
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES
from lakefs_fuse.errors import (
    FileError,
    LakeError,
    NotFound,
    PartsRefused,
    PreconditionFailed,
    Superseded,
)
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.staging.part_layout import PAGE_BYTES
from lakefs_fuse.staging.staging_area import THREAD_BYTES_MIN
from lakefs_fuse.store.client import REPLACES_METADATA, token_of
from lakefs_fuse.store.protocol import FileSlice, ObjectMeta
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_target import DRAFT_METADATA
from lakefs_fuse.upload.missing_parts import Append, find_append, store_missing_parts
from lakefs_fuse.upload.parts import STORED

BODY_BYTES_MAX = BLOCK_BYTES
"""Up to this size an object is sent from memory, by the client's fast path, and is one cache block."""
ORIGIN = DRAFT_METADATA, REPLACES_METADATA
UPLOAD_CHECK_S = 0.05
SPILLS_S_MAX = 15.0
"""Maximum time that a close waits for the deletion of spilled parts: a few requests, even for 10,000 parts."""
LOST = errno.EEXIST, errno.ESTALE
"""Errors after which an attempt cannot succeed: another client has the name, or the version to change no longer
exists."""
log = logging.getLogger(__name__)


class Published(msgspec.Struct, frozen=True):
    """The version that is visible now, the hash of each of its cache blocks (0: no longer staged), and the attributes
    in the object's metadata."""

    meta: ObjectMeta
    hashes: Sequence[int]
    described: Mapping[str, str]
    is_superseded: bool = False
    """Whether another writer's version replaced it before it was known to be stored. Its ETag is the draft's token,
    which no object has."""
    is_back: bool = False
    """Whether an earlier version of the file had these bytes, and other bytes replaced it, as far as this node
    knows."""


Confirm = Callable[[], Awaitable[None]]


async def publish(
    draft: Draft, confirm: Confirm | None = None, describe: Callable[[], Mapping[str, str]] = dict
) -> Published:
    """Make the draft's bytes, as they are now, the object's newest version. The caller holds ``draft.gate``.
    ``confirm`` is called just before the request that makes them visible, and may raise LakeError. After
    that, ``describe`` returns further metadata for an object that is stored by one PUT.

    Raises LakeError; then the draft is FAILED, every byte is staged or in its upload, and it can be tried again, which
    `Overtaken` requests. If writes were refused it raises, and the draft is unchanged.
    """
    if draft.refused.ranges:
        draft.refused.check(draft.target.path or draft.target.key)
    hashes: list[int] | None = None
    is_superseded = False
    try:
        if draft.recheck:
            await draft.adopt_attempt(await find_own_object(draft))
        await draft.stop_uploads()
        try:
            append = None if draft.base is None else find_append(draft)
            is_small = (
                draft.size <= draft.layout.single_bytes_max or _is_sparse(draft)
            ) and not draft.parts.bytes_dropped
            if is_small and append is None and not (draft.copies and draft.is_copy):
                meta, described, hashes = await _put(draft, confirm, describe)
            else:
                meta, described = await _complete(draft, append, confirm)
        except Superseded as error:
            meta, described = await _accept_superseded(draft, error)
            is_superseded = True
    except BaseException as error:
        if draft.fail_publish(error, "publishing").errno in LOST:
            await _try_abandon_upload(draft)
        try:
            draft.save(sync=True)
        except LakeError as unsaved:  # waiting tasks get the error of the attempt
            log.error("that %s is not stored could not be journaled: %s", draft.target.key, unsaved)
        raise
    draft.end_publish()
    draft.uploader.metrics.publishes += 1
    if draft.spills.used:
        await _delete_spills(draft)
    is_back = draft.uploader.histories.is_back(meta)
    return Published(meta, await _all_hashes(draft) if hashes is None else hashes, described, is_superseded, is_back)


async def _delete_spills(draft: Draft) -> None:
    """Delete the spilled parts of a published draft, or leave them to `gc` if that fails or takes SPILLS_S_MAX. A
    caller that is cancelled waits, or it would not learn what the store has."""
    why: LakeError | str = f"deleting them took more than {SPILLS_S_MAX:.0f} s"
    with trio.move_on_after(SPILLS_S_MAX, shield=True):
        try:
            await draft.delete_spills()
            return
        except LakeError as error:
            why = error
    log.warning("hidden objects of %s are left to `gc`: %s", draft.target.key, why)


async def _accept_superseded(draft: Draft, error: Superseded) -> tuple[ObjectMeta, Mapping[str, str]]:
    """Count this version as the one before the newer one that another writer stored at the key. Raises ``error`` if the
    file was renamed, because its name needs the bytes: they are sent again to another key. Raises FileError(EEXIST) for
    an acknowledged version, which may never have arrived and is kept beside the other."""
    if draft.target.path:
        await _try_abandon_upload(draft)
        raise error
    if draft.sequence:
        raise await _key_taken(draft) from error
    log.warning("%s; the version of this node counts as the one before", error)
    await _abort_unneeded_upload(draft)
    draft.upload.end(in_one_piece=False)
    now_ns = draft.uploader.clock.wall_ns()
    return ObjectMeta(draft.target.key, draft.size, draft.token, now_ns), draft.target.describe()[0]


async def find_own_object(draft: Draft) -> ObjectMeta | None:
    """The object at the draft's key, if the draft made it in an attempt whose response was lost; else None. Raises
    LakeError."""
    meta = await draft.uploader.client.find(draft.target.key)
    return meta if meta is not None and is_own_object(draft, meta) else None


async def wait_upload_begun(draft: Draft) -> None:
    """Wait until an upload of the draft has begun, after which it is in no pack, or none is about to begin."""
    while draft.uploading and not draft.upload.intent_ns:
        with trio.move_on_after(UPLOAD_CHECK_S):
            await draft.wait_idle()


def may_be_stored(draft: Draft) -> bool:
    """Whether the object may exist: an attempt to store the draft had no response, or could not be recorded."""
    return draft.recheck or draft.state in (DraftState.FAILED, DraftState.PUBLISHED)


async def find_late_object(draft: Draft) -> ObjectMeta | None:
    """As `find_own_object`; None without a request if every attempt was answered."""
    return await find_own_object(draft) if may_be_stored(draft) else None


def is_own_object(draft: Draft, meta: ObjectMeta) -> bool:
    """Whether the draft made the object, in any attempt."""
    return token_of(meta).partition(".")[0] == draft.id


async def _put(
    draft: Draft, confirm: Confirm | None, describe: Callable[[], Mapping[str, str]]
) -> tuple[ObjectMeta, Mapping[str, str], list[int] | None]:
    """Send the draft in one request; also returns the hashes of its blocks if it was sent from memory."""
    client, target = draft.uploader.client, draft.target
    if draft.base is not None or draft.spills.objects:
        await draft.fill(0, draft.size)
    async with draft.uploader.slots.slot():
        described = draft.save(sync=bool(draft.sequence)).metadata  # it may have been renamed since it was acknowledged
        history = draft.uploader.histories.describe(target.key, target.replaces) if target.replaces else {}
        hashes = None
        if confirm is not None:
            await confirm()
        metadata = {**described, DRAFT_METADATA: draft.token, **history, **describe()}
        put = partial(client.put, metadata=metadata, version=target)
        try:
            if draft.size <= BODY_BYTES_MAX:
                body = await draft.file.read(0, draft.size, in_file=True)
                hashes = [block_hash(body)] if body else []
                meta = await put(target.key, body)
            else:
                with draft.file.held():
                    meta = await put(target.key, FileSlice(draft.file.fd, 0, draft.size))
        except PreconditionFailed as error:
            raise await _key_taken(draft) from error
    draft.uploader.histories.add(target.key, meta.etag, metadata)
    if draft.upload.id or draft.upload.intent_ns:
        await _abort_unneeded_upload(draft)
        draft.upload.end(in_one_piece=True)
    return meta, described, hashes


async def _abort_unneeded_upload(draft: Draft) -> None:
    """Abort the upload. The version is stored without it, so an error of the store is ignored."""
    try:
        await draft.upload.abort()
    except LakeError as error:
        log.warning("the multipart upload of %s is left to `gc`: %s", draft.target.key, error)


async def fail_name_taken(draft: Draft) -> FileError:
    """Fail the draft because another client has the name for which it was created with O_EXCL, whether or not its key
    has an object. Returns the error. Raises CacheError."""
    error = await _key_taken(draft)
    draft.fail_publish(error, "publishing")
    draft.save(sync=True)
    return error


async def _key_taken(draft: Draft) -> FileError:
    """Abandon the upload, because the key is another writer's. Returns the error."""
    await _try_abandon_upload(draft)
    return FileError(errno.EEXIST, f"{draft.target.key} was stored by another client in the meantime")


async def abandon_upload(draft: Draft, path: str) -> None:
    """Abandon the upload of the file at ``path``, so that it can be stored at another key than that of the upload,
    which it cannot have. Raises FileError(EEXIST) if some of its bytes are only in the upload; LakeError."""
    if draft.parts.bytes_dropped:
        raise FileError(
            errno.EEXIST,
            f"{draft.target.key} was changed by another client, or objects below it prevent the store from storing it, "
            f"and this version of {path} cannot be stored at another key, because some of its parts are only in its "
            "upload; move those objects away, then try again: `lakefs-fuse flush`, or `lakefs-fuse orphans --finish`",
        )
    await draft.upload.abort()
    draft.forget_upload()


async def _try_abandon_upload(draft: Draft) -> None:
    """Abandon the upload, because its key belongs to another file, or has another version. A renamed file is then sent
    again under its next name. If some bytes are only in the upload, or the store does not answer, nothing changes."""
    if not draft.upload.intent_ns or draft.parts.bytes_dropped:
        return
    try:
        await draft.upload.abort()
    except LakeError as error:
        log.warning("the multipart upload of %s could not be aborted, and is not used: %s", draft.target.key, error)
        return
    draft.forget_upload()


async def _complete(
    draft: Draft, append: Append | None, confirm: Confirm | None
) -> tuple[ObjectMeta, Mapping[str, str]]:
    draft.save()
    if draft.upload.id and not draft.uploader.client.capabilities.parts_replaceable and _has_stale_parts(draft):
        await draft.upload.abort()
        draft.forget_upload()
    try:
        meta = await _send_and_complete(draft, append, confirm)
    except (NotFound, PartsRefused) as error:
        await _restart_upload(draft, error)
        try:
            meta = await _send_and_complete(draft, append, confirm)
        except NotFound as error:
            raise FileError(errno.ESTALE, f"{draft.target.key} was removed while it was changed") from error
    draft.uploader.histories.add(meta.key, meta.etag, draft.upload.metadata)
    began = {name: value for name, value in draft.upload.metadata.items() if name not in ORIGIN}
    draft.upload.end(in_one_piece=False)
    return meta, began


async def _restart_upload(draft: Draft, error: NotFound | PartsRefused) -> None:
    """Have the next attempt begin another upload, because the store has lost parts of this one. Raises ``error`` if
    it may have the only copy of some bytes."""
    if isinstance(error, PartsRefused):
        if draft.parts.bytes_dropped:
            raise error
        await _abort_unneeded_upload(draft)
    log.warning("the store has lost the multipart upload of %s, or parts of it: it starts again", draft.target.key)
    draft.forget_upload()


async def _send_and_complete(draft: Draft, append: Append | None, confirm: Confirm | None) -> ObjectMeta:
    client, key = draft.uploader.client, draft.target.key
    upload_id = await draft.begin_upload()
    refs = await store_missing_parts(draft, append)
    if confirm is not None:
        await confirm()
    with draft.uses.using(0, draft.size):  # no part is dropped any more: see the next lines
        if draft.parts.bytes_dropped:
            draft.target.expect(None)  # a failed precondition may end the upload, which alone has these bytes
        try:
            return await client.complete_multipart(key, upload_id, refs, version=draft.target, token=draft.token)
        except PreconditionFailed as error:
            raise await _key_taken(draft) from error


def _has_stale_parts(draft: Draft) -> bool:
    """Whether the upload has a part that no longer belongs to the file, or may have one whose response was lost."""
    count = draft.layout.count(draft.size)
    stale = (part.etag and (part.state not in STORED or index >= count) for index, part in draft.parts.items())
    return draft.upload.has_failed_part or any(stale)


def _is_sparse(draft: Draft) -> bool:
    """Whether the store keeps holes, and the draft is hardly more: one PUT is as fast as that of a small file, where
    each of 10,000 parts would be synced, and journaled with those before it."""
    staged = draft.pages.pages * PAGE_BYTES + draft.base_limit
    is_begun = draft.upload.intent_ns or draft.spills.used
    keeps_holes = draft.uploader.client.capabilities.keeps_holes
    return keeps_holes and not is_begun and staged <= draft.layout.single_bytes_max


async def _all_hashes(draft: Draft) -> list[int]:
    """Hash the blocks that the uploads of parts have not hashed yet; pages that are not staged have none. A caller that
    is cancelled waits, or it would not learn what the store has."""
    blocks = -(-draft.size // BLOCK_BYTES)
    hashes = [0] * blocks

    def complete(fd: int) -> list[int]:
        for begin, upto, is_staged in list(draft.pages.runs(0, draft.size)):
            for block in range(-(-begin // BLOCK_BYTES), -(-upto // BLOCK_BYTES)) if is_staged else ():
                start, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, draft.size)
                if end <= upto and block not in draft.hashes:
                    draft.hashes.update(hash_blocks(fd, start, end, draft.size))
        for block, known in draft.hashes.items():
            if block < blocks:
                hashes[block] = known
        return hashes

    try:
        with draft.file.held(), trio.CancelScope(shield=True):
            if draft.size <= THREAD_BYTES_MIN:
                return complete(draft.file.fd)
            hashes = await draft.uploader.staging.threads.run(complete, draft.file.fd)
    except (OSError, LakeError) as error:
        log.warning("%s is stored, but cannot be read back from staging: %s", draft.target.key, error)
    return hashes
