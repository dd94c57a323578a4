"""What a draft is given: what all drafts of a mount share, and where this one is going."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import trio

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.staging.draft_record import DraftRecord
from lakefs_fuse.staging.part_layout import PartLayout
from lakefs_fuse.staging.staging_area import Staging
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer
from lakefs_fuse.upload.upload_slots import UploadSlots
from lakefs_fuse.upload.zero_objects import ZeroObjects


class DraftEnded(Exception):
    """The draft was published or discarded while the caller waited for it: look at the file again."""


class BaseReader(Protocol):
    """Reads versions that are in the store."""

    async def read(self, version: Version, offset: int, length: int) -> Buffer: ...


@dataclass(frozen=True, slots=True)
class DraftServices:
    """What all drafts of a mount share. ``save`` writes a record to the journal, synced if so asked."""

    client: StoreClient
    reader: BaseReader
    staging: Staging
    slots: UploadSlots
    nursery: trio.Nursery
    layout: PartLayout
    metrics: UploadMetrics
    save: Callable[[DraftRecord, bool], None]
    clock_ns: Callable[[], int]
    zeros: ZeroObjects


@dataclass(slots=True)
class DraftTarget:
    """Where a draft is going. ``describe`` gives the object's metadata as of now; it is asked when an upload begins
    and again when it ends."""

    key: str
    describe: Callable[[bool], Mapping[str, str]]
    replaces: str = ""
    copied_from: str = ""
    """Key of an object elsewhere that what is replaced has its bytes in, if any. Relocating copies it to ``key``."""
    if_absent: bool = False
    path: str = ""
    """Where the file is in the lake, where that is not ``key``."""

    def will_replace(self, etag: str, copied_from: str) -> None:
        self.replaces, self.copied_from = etag, copied_from
