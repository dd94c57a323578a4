"""What the journal has of accepted versions when their name changes hands: told with the change itself, in one batch,
so that a crash leaves both or neither. Memory follows when the change is made. Trio thread only.
"""

from __future__ import annotations

import msgspec

from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.journal import Journal
from lakefs_fuse.staging.draft_record import encode
from lakefs_fuse.vfs.files.open_file import OpenFile


def note_moved(journal: Journal, batch: Batch, file: OpenFile | None, path: str) -> None:
    """All versions of a file that are not in the store are at ``path``."""
    for draft in [each.draft for each in file.versions] if file is not None else []:
        if draft is not None:
            journal.put(batch, draft.id, encode(msgspec.structs.replace(draft.record(), path=path)))


def note_dropped(journal: Journal, batch: Batch, file: OpenFile | None) -> None:
    """Nobody wants what was accepted of a file: its name goes, or another has it."""
    for draft in [each.draft for each in file.versions] if file is not None else []:
        if draft is not None and draft.accepted:
            journal.put(batch, draft.id, encode(msgspec.structs.replace(draft.record(), unlinked=True)))
