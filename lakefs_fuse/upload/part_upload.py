"""One part of a draft on its way into the store while the file is being written, or after it was accepted.

What fails for good is remembered by the draft, and answered by `publish`, which tries again. While the store is away a
part is tried again for ever, at most `RETRY_S_MAX` apart, with what is staged at that time; `publish` does not wait for
that, it sends what is left itself.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lakefs_fuse.errors import LakeError, Unavailable
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.upload.part_state import Part

if TYPE_CHECKING:
    from lakefs_fuse.upload.draft import Draft

RETRY_S_FIRST, RETRY_S_MAX = 1.0, 30.0
log = logging.getLogger(__name__)


async def upload_in_background(draft: Draft, index: int) -> None:
    """The part was announced, and counted in ``draft.uploading``. Raises nothing but Cancelled."""
    try:
        await _upload_patiently(draft, index)
    except LakeError as error:
        draft.error = error
        draft.services.metrics.failures += 1
    except OSError as error:
        draft.error = draft.services.staging.translate(error)
        draft.services.metrics.failures += 1
    except Exception as error:
        log.exception("uploading part %d of %s", index, draft.target.key)
        draft.error = LakeError(f"uploading failed: {error!r}")
    finally:
        draft.part_ended(index)
    if draft.state in (DraftState.WRITING, DraftState.ACCEPTED):
        draft.start_if_complete(index)


async def _upload_patiently(draft: Draft, index: int) -> None:
    backoff = Backoff(RETRY_S_FIRST, RETRY_S_MAX)
    while True:
        try:
            await draft.upload_part(index)
            draft.delayed = None
            return
        except Unavailable as error:
            draft.delayed = error
        await draft.wait_hurry(backoff.next_s())
        if draft.state not in (DraftState.WRITING, DraftState.ACCEPTED):
            return
        draft.services.slots.ready()


def start_uploads(draft: Draft) -> None:
    """Send what is staged of an accepted file that is larger than a part."""
    draft.deferred = False
    layout = draft.services.layout
    if draft.size > layout.single_bytes_max:
        for index in range(layout.count(draft.size)):
            draft.parts.setdefault(index, Part())
            draft.start_if_complete(index)


def write_out_complete(draft: Draft, first: int, last: int) -> None:
    """Parts that are not sent yet go to the disk meanwhile, so that accepting the file does not wait for it."""
    for index in range(first, last + 1):
        part, (start, end) = draft.parts[index], draft.services.layout.range(index)
        if not part.written_out and end <= draft.size and draft.pages.covers(start, end):
            part.written_out = True
            draft.services.nursery.start_soon(draft.file.write_out, start, end)
