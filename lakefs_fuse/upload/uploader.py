"""The shared means of upload of all drafts of a mount: store, staging, slots, journal, and the objects beside the
files. What always holds (*bounded uploads*): at most ``uploads_max`` requests of drafts are in progress, first come
first served. Trio thread only. A crash leaves spilled parts (`delete_spills`): the journal record of their draft notes
that there may be some. It may leave an object of zeros, too, or an unfinished upload of one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import trio

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import KeyConflict, LakeError, Unavailable
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.staging.part_layout import PartLayout
from lakefs_fuse.staging.staging_area import Staging
from lakefs_fuse.store.client import REPLACES_METADATA, StoreClient
from lakefs_fuse.store.protocol import Buffer, ObjectMeta
from lakefs_fuse.upload.spilled_parts import SPILLED

ZEROS = f"{RESERVED_PREFIX}zeros/"
HISTORY_BYTES_MAX = 512
"""S3 takes 2 KiB of user metadata."""
KEYS_MAX = 4096
"""Maximum of keys whose history is kept in memory."""


class BaseReader(Protocol):
    """Reads versions that are in the store."""

    async def read(self, version: Version, offset: int, length: int) -> Buffer: ...


class Uploader:
    """See the module's head."""

    def __init__(
        self,
        client: StoreClient,
        reader: BaseReader,
        staging: Staging,
        layout: PartLayout,
        nursery: trio.Nursery,
        clock: Clock,
        save: Callable[[str, bytes, bool], None],
        uploads_max: int,
    ) -> None:
        """``save`` writes the record of the draft with this id to the journal, synced if its last argument says so."""
        self.client, self.reader, self.staging, self.layout = client, reader, staging, layout
        self.nursery, self.clock, self.save = nursery, clock, save
        self.metrics = staging.metrics
        self.slots = UploadSlots(uploads_max, staging.metrics)
        self.zeros = ZeroObjects(client, layout.single_bytes_max)
        self.histories = ObjectHistories()

    def start(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run a task for as long as the mount lives."""
        self.nursery.start_soon(task, *arguments)

    async def delete_spills(self, draft_id: str) -> None:
        """Delete all spilled parts of a draft. Raises LakeError, also if the store refuses some of them."""
        pages = self.client.list_all(f"{SPILLED}{draft_id}/")
        keys = [meta.key async for page in pages for meta in page.objects]
        await self.client.delete_all(keys)


class ObjectHistories:
    """Which versions the objects replaced that this daemon stored last, as their metadata say.

    Without I/O. What is not known after a restart, or beyond KEYS_MAX keys, is only said to be unknown to readers
    (`store.client.is_successor`).
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, str]] = {}
        """By key: the ETag of the object that was stored last, and the ETags that it replaced, newest first."""

    def describe(self, key: str, replaces: str) -> dict[str, str]:
        """Metadata of an object that replaces the version with this ETag (empty: none)."""
        if not replaces:
            return {}
        etag, before = self._last.get(key, ("", ""))
        history = f"{replaces},{before}"
        is_known = etag == replaces and len(history) <= HISTORY_BYTES_MAX
        return {REPLACES_METADATA: history if is_known else replaces}

    def add(self, key: str, etag: str, metadata: Mapping[str, str]) -> None:
        """Record that an object was stored with what `describe` returned."""
        self._last.pop(key, None)
        self._last[key] = etag, metadata.get(REPLACES_METADATA, "")
        if len(self._last) > KEYS_MAX:
            del self._last[next(iter(self._last))]

    def is_back(self, meta: ObjectMeta) -> bool:
        """Whether an earlier version of the object had the bytes that were stored last, and others came between."""
        etag, history = self._last.get(meta.key, ("", ""))
        return etag == meta.etag and etag in history.split(",")[1:]


class Outage:
    """The error of a store that is away, as the parts of one file meet it.

    What always holds (*one part asks*): after a part could not be sent, one part at a time asks the store in the
    background until it responds; the others fail with the same error, and leave their slots to other files. Trio thread
    only.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        """``ended`` is called when the store responds again: the parts that wait need not wait any longer."""
        self._ended = ended
        self.error: Unavailable | KeyConflict | None = None
        """The error because of which parts wait for their next attempt."""
        self._sending = 0

    @contextmanager
    def asking(self, *, in_background: bool) -> Iterator[None]:
        """Send a part in the block. ``in_background``, raises the known error while another part asks the store."""
        if in_background and self.error is not None and self._sending:
            raise self.error.with_traceback(None)
        self._sending += 1
        try:
            yield
        except Unavailable as error:
            self.error = error
            raise
        except LakeError:
            self._end()
            raise
        else:
            self._end()
        finally:
            self._sending -= 1

    def _end(self) -> None:
        if self.error is not None:
            self.error = None
            self._ended()


class UploadSlots:
    """At most ``slots`` concurrent uploads, first come first served. Trio thread only."""

    def __init__(self, slots: int, metrics: UploadMetrics) -> None:
        self._limiter = trio.CapacityLimiter(slots)
        self.slots = slots
        self._metrics = metrics
        self._ready = 0
        self._busy = 0
        self._since = 0.0

    def _account(self) -> None:
        now = trio.current_time()
        if self._ready and self._busy < self.slots:
            self._metrics.idle_with_work_s += now - self._since
        self._since = now

    def ready(self) -> None:
        """Count a complete part or file as waiting for a slot. ``slot(is_ready=True)`` must follow."""
        self._account()
        self._ready += 1

    @asynccontextmanager
    async def slot(self, *, is_ready: bool = False) -> AsyncIterator[None]:
        """Hold a slot for the block; waits for one in the order of calls. ``is_ready``: `ready` was called."""
        if not is_ready:
            self.ready()
        token = object()
        try:
            await self._limiter.acquire_on_behalf_of(token)
        finally:
            self._account()
            self._ready -= 1
        self._busy += 1
        try:
            yield
        finally:
            self._account()
            self._busy -= 1
            self._limiter.release_on_behalf_of(token)


class ZeroObjects:
    """Objects of zeros in the store, from which parts that are all zeros are copied.

    What always holds: `.lakefs/zeros/<bytes>` is that many zeros, whichever node stored it, so that storing it again
    changes nothing. A daemon looks for an object once, and stores it if it is missing; a deleted one is stored again
    when a copy of it fails.
    """

    def __init__(self, client: StoreClient, piece_bytes: int) -> None:
        """The object of ``piece_bytes`` is sent; the store composes larger ones, multiples of that, from it."""
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
