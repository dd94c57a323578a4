"""The scheduler of publications: small versions together in packs, others alone, in the order of the queue.

What always holds:

* *barriers*: a version becomes visible after every version that its barrier covers (`AcknowledgedVersion.barrier`);
* *shared packs*: small files that may be published together share a pack. It is sent once it has the bytes that
  `PackBudget` allows, or ``delay_s`` after its first file was acknowledged; during a burst it gathers longer;
* *retries*: while the store is away all versions wait, and are tried again after `PAUSE_S_MAX` at most. If the store
  refuses one version, or its bytes cannot be read, others overtake it, and it is tried again when a caller waits for
  it;
* *drains first*: a version for which a caller waits (`WriteBackQueue.drain`) is published before others, except those
  that were acknowledged before it in its directory and below.

One task runs `run`; it starts a task for each attempt. Trio thread only. A crash leaves the journal.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Iterable, Iterator
from itertools import islice

import trio

from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.errors import FileError, LakeError
from lakefs_fuse.staging.staging_area import Staging
from lakefs_fuse.vfs.writeback.packer import PACK_FILES_MAX, UnreadableDrafts
from lakefs_fuse.vfs.writeback.publisher import Publisher
from lakefs_fuse.vfs.writeback.queue import BURST_WINDOW_S, WAITABLE, AcknowledgedVersion, VersionState, WriteBackQueue
from lakefs_fuse.vfs.writeback.replay import Replay

ALONE_MAX = 16
"""Files published alone at the same time; their parts share the mount's upload slots."""
CHECK_S = 1.0
"""A version whose parts are being uploaded is checked this often: a caller may wait for it by now, or it has ended."""
LOCKED_S = 0.05
"""Pause if the first file of a pack is being renamed or removed."""
BURST_DELAYS_MAX = 15
"""During a burst packs gather for this many times ``delay_s`` at most."""
log = logging.getLogger(__name__)


class PublishScheduler:
    """See the module's head."""

    def __init__(
        self,
        queue: WriteBackQueue,
        publisher: Publisher,
        replay: Replay,
        committer: Committer,
        staging: Staging,
        nursery: trio.Nursery,
        *,
        delay_s: float,
    ) -> None:
        self._queue, self._publisher, self._replay = queue, publisher, replay
        self._committer, self._staging, self._nursery = committer, staging, nursery
        self._delay_s = delay_s
        self._alone = 0
        self._gathering = False

    async def run(self) -> None:
        """Publish acknowledged versions until the mount ends."""
        while True:
            wait_s = self._start_ready()
            with trio.move_on_after(wait_s) as waiting:
                await self._queue.changed.wait()
            while waiting.cancelled_caught and self._is_deferring():
                with trio.move_on_after(BURST_WINDOW_S) as waiting:
                    await self._queue.changed.wait()

    def _is_deferring(self) -> bool:
        """Return whether packs wait, because a burst lasts and they have not waited `BURST_DELAYS_MAX` delays."""
        now, queue = trio.current_time(), self._queue
        if queue.is_half_full or not queue.bursts.is_lasting(now) or queue.is_drained or self._is_pressed():
            return False
        oldest = next(iter(queue.items), None)
        return oldest is not None and oldest.since_s + BURST_DELAYS_MAX * self._delay_s > now

    def _is_pressed(self) -> bool:
        """Return whether staging needs room, or changes of names wait for the queue."""
        return self._staging.is_half_full or bool(self._committer.held_until)

    def _start_ready(self) -> float:
        """Start every attempt that may begin now. Returns after how many seconds the next one may."""
        now = trio.current_time()
        if now < self._queue.resume_s:
            return self._queue.resume_s - now
        wait_s = math.inf
        if self._queue.is_drained:
            wait_s = self._start(self._candidates(item for item in self._queue.items if item.is_urgent))
        return min(wait_s, self._start(self._candidates(self._queue.items)))

    @staticmethod
    def _candidates(items: Iterable[AcknowledgedVersion]) -> Iterator[AcknowledgedVersion]:
        """Yield the first versions to publish, enough for a pack that is being sent and the next one. Refused and
        superseded ones, of which there may be any number, are left out."""
        passed = VersionState.REFUSED, VersionState.SUPERSEDED
        return islice((item for item in items if item.state not in passed), 2 * PACK_FILES_MAX)

    def _start(self, items: Iterable[AcknowledgedVersion]) -> float:
        pack: list[AcknowledgedVersion] = []
        pack_bytes_max, packed_bytes, full = self._committer.pack_bytes_max, 0, False
        blocked_by = first_packed = math.inf
        for item in items:
            blocked = blocked_by <= item.barrier
            if item.is_attempted or blocked:
                blocked_by = min(blocked_by, item.place)
            elif self._queue.is_packable(item):
                is_over = bool(pack) and packed_bytes + item.draft.size > pack_bytes_max
                full = full or is_over or len(pack) >= PACK_FILES_MAX
                if full:
                    blocked_by = min(blocked_by, item.place)
                    continue
                pack.append(item)
                packed_bytes += item.draft.size
                first_packed = min(first_packed, item.place)
            else:
                blocked_by = min(blocked_by, item.place)
                if first_packed > item.barrier and self._alone < ALONE_MAX:
                    self._start_alone(item)
        self._queue.count_packable(len(pack), packed_bytes)
        return self._start_pack(pack, full) if pack and not self._gathering else math.inf

    def _start_pack(self, pack: list[AcknowledgedVersion], full: bool) -> float:
        if self._is_deferring():
            return BURST_WINDOW_S
        due_s = pack[0].since_s + self._delay_s - trio.current_time()
        if not (full or due_s <= 0 or pack[0].is_urgent or self._staging.is_half_full):
            return due_s
        if len(pack) == 1 and self._queue.may_stay_plain(pack[0]):
            self._start_alone(pack[0])
            return math.inf
        self._gathering = True
        self._queue.begin_attempt(pack)
        self._nursery.start_soon(self._publish_pack, pack)
        return math.inf

    def _start_alone(self, item: AcknowledgedVersion) -> None:
        self._queue.begin_attempt([item])
        self._alone += 1
        self._nursery.start_soon(self._publish_alone, item)

    async def _publish_alone(self, item: AcknowledgedVersion) -> None:
        try:
            if item.is_unreconciled:
                if await self._replay.reconcile(item):
                    return
                item.draft.start_uploads()
            while item.draft.uploading and not item.is_urgent and item.state is not VersionState.ENDED:
                with trio.move_on_after(CHECK_S):
                    await item.draft.wait_idle()
            if item.state is not VersionState.ENDED:
                await self._publish(item)
                self._queue.record_success()
        except LakeError as error:
            self._queue.record_failure(item, error)
        except Exception as error:
            log.exception("publishing %s", item.file.key)
            self._queue.record_failure(item, LakeError(f"publishing failed: {error!r}"))
        finally:
            self._alone -= 1
            self._queue.end_attempt([item])

    async def _publish(self, item: AcknowledgedVersion) -> None:
        is_last = False
        while True:
            key = item.file.key
            try:
                await self._publisher.publish_version(item)
                return
            except FileError as error:
                if error.errno != errno.EEXIST or is_last:
                    raise
            # A rename may have moved the other client's file in the meantime: then that file has the next name, too.
            is_last = await self._replay.rename_conflict(item, key) or item.file.key == key

    async def _publish_pack(self, pack: list[AcknowledgedVersion]) -> None:
        try:
            if await self._publisher.publish_pack(await self._without_stored(pack)):
                self._queue.record_success()
            else:  # the first file is being renamed or removed
                await trio.sleep(LOCKED_S)
        except UnreadableDrafts as error:  # the next pack is without them
            for item in pack:
                if item.draft.id in error.errors:
                    self._queue.record_failure(item, error.errors[item.draft.id])
        except LakeError as error:
            self._queue.record_failure(pack[0], error, is_of_all=True)
        except Exception as error:
            log.exception("publishing %d files", len(pack))
            self._queue.record_failure(pack[0], LakeError(f"publishing failed: {error!r}"), is_of_all=True)
        finally:
            self._gathering = False
            self._queue.end_attempt(pack)

    async def _without_stored(self, pack: list[AcknowledgedVersion]) -> list[AcknowledgedVersion]:
        """Return the versions whose bytes the store does not have. Raises LakeError if all have to wait."""
        unstored = []
        for item in pack:
            try:
                if not (item.is_unreconciled and await self._replay.reconcile(item)):
                    unstored.append(item)
            except WAITABLE:
                raise
            except LakeError as error:
                self._queue.record_failure(item, error)
        return unstored
