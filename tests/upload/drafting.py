"""What the tests of the write path share: drafts over a store in memory, with parts small enough to make many."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import trio

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.staging.draft_record import DraftRecord, decode
from lakefs_fuse.staging.part_layout import PartLayout
from lakefs_fuse.staging.segments import Segments
from lakefs_fuse.staging.staging_area import Staging
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer, Capabilities
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_target import DraftTarget
from lakefs_fuse.upload.publish import Published, publish
from lakefs_fuse.upload.uploader import Uploader
from tests.fakes import FakeDisk, clock_of, store_client
from tests.memory_store import MemoryStore

KIB = 1024
MIB = 1024 * KIB
PART = 64 * KIB
SPANS = ((PART, 50), (4 * PART, 9950))
REACH_S_MAX = 20.0


@lru_cache(maxsize=4)
def noise(seed: object, size: int) -> bytes:
    """Bytes that differ from seed to seed. Kept, because a test compares what it reads with what it wrote."""
    return hashlib.shake_128(repr(seed).encode()).digest(size)


async def reached(event: threading.Event) -> None:
    """Wait, without keeping the loop from running, for a thread to get somewhere."""
    with trio.fail_after(REACH_S_MAX):
        while not event.is_set():
            await trio.sleep(0.002)


class StoreReader:
    """Reads base versions straight from the store."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    async def read(self, version: Version, offset: int, length: int) -> Buffer:
        end = min(offset + length, version.size)
        if end <= offset:
            return b""
        return (await self._client.get(version.key, offset, end, etag=version.etag)).data


@dataclass
class Bench:
    """A place to write drafts on."""

    store: MemoryStore
    uploader: Uploader
    metrics: UploadMetrics
    saved: dict[str, DraftRecord]
    synced: dict[str, DraftRecord]
    attributes: dict[str, str] = field(default_factory=lambda: {"mode": "33188"})
    serial: int = 0

    @property
    def staging(self) -> Staging:
        return self.uploader.staging

    def describe(self) -> tuple[dict[str, str], dict[str, str]]:
        return dict(self.attributes), dict(self.attributes)

    def draft(self, key: str = "file", *, base: Extent | None = None, if_absent: bool = False) -> Draft:
        self.serial += 1
        target = DraftTarget(key, self.describe, replaces=base.version.etag if base else "", if_absent=if_absent)
        return Draft(self.uploader, f"draft{self.serial}", target, base=base)

    def give(self, key: str, data: bytes) -> Extent:
        return Extent.whole(Version(key, self.store.give(key, data).etag, len(data)))

    async def publish(self, draft: Draft) -> Published:
        async with draft.gate:
            return await publish(draft)

    async def idle(self, draft: Draft) -> None:
        with trio.fail_after(REACH_S_MAX):
            await draft.wait_idle()


@asynccontextmanager
async def bench(
    directory: Path,
    *,
    staging_bytes_max: int = 64 * MIB,
    slots: int = 4,
    capabilities: Capabilities | None = None,
    spans: tuple[tuple[int, int], ...] = SPANS,
    retry_timeout_s: float = 0.2,
) -> AsyncIterator[Bench]:
    """The bench; its store's hook is reset when the block ends, so that no thread is left waiting."""
    store, metrics = MemoryStore(capabilities), UploadMetrics()
    client = store_client(store, store.capabilities, retry_timeout_s=retry_timeout_s, uploads_max=slots, seed=7)
    staging_dir = directory / "staging"
    staging_dir.mkdir(exist_ok=True)
    staging = Staging(
        Segments(staging_dir, FakeDisk()),
        WorkerThreads(),
        bytes_max=staging_bytes_max,
        free_bytes_min=0,
        metrics=metrics,
    )
    saved: dict[str, DraftRecord] = {}
    synced: dict[str, DraftRecord] = {}

    def save(draft_id: str, record: bytes, sync: bool) -> None:
        saved[draft_id] = decode(record)
        if sync:
            synced[draft_id] = saved[draft_id]

    async with trio.open_nursery() as nursery:
        uploader = Uploader(
            client, StoreReader(client), staging, PartLayout(spans), nursery,
            clock_of(lambda: store.now_ns), save, slots,
        )  # fmt: skip
        yield Bench(store, uploader, metrics, saved, synced)
        nursery.cancel_scope.cancel()
