"""Write-back: files that were accepted, on their way into the store behind their writers.

What always holds:

* accepted files are published in an order that any reader can rely on: one that was opened after another was accepted
  appears after it. Parts are uploaded side by side; only becoming visible is put in order;
* a version that a newer one supersedes before it was published does not become visible, unless something waits for it
  that the newer one itself has to wait for; what would have waited for it waits for the newer one;
* small files that may be published together share a pack, up to `PACK_BYTES_MAX` or what came within ``delay_s``;
* nothing accepted is dropped: while the store is away all wait, tried again at most `PAUSE_S_MAX` apart; a file that
  the store refuses for a reason of its own is `failed`, lets others pass, and is tried again when somebody asks;
* whoever asks for a file to be durable (`drain`) has it published ahead of others, but not ahead of what was accepted
  before it in its own directory and below, and hears why if that fails.

`Accepted` items live from acceptance until the version is visible and noted, superseded, or unlinked. Trio thread only;
all code between two awaits is atomic. A crash leaves the journal, from which `replay` makes the same items again.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

import trio

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import (
    AccessDenied,
    CacheError,
    FileError,
    LakeError,
    NoSuchBucket,
    StagingFull,
    StoreFull,
    Unavailable,
)
from lakefs_fuse.meta.database import Database
from lakefs_fuse.metrics import WriteBackMetrics
from lakefs_fuse.path_rules import Rules
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.part_upload import start_uploads
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.writeback.acknowledged import Accepted, Drain, Publisher
from lakefs_fuse.vfs.writeback.bursts import PATIENCE, WINDOW_S, Bursts
from lakefs_fuse.vfs.writeback.group_commit import Acceptor
from lakefs_fuse.vfs.writeback.packer import PACK_BYTES_MAX, PACK_FILES_MAX

PAUSE_S_FIRST, PAUSE_S_MAX = 1.0, 30.0
"""Between attempts while the store is away."""
AT_ONCE = 16
"""Files published by themselves at a time; their parts share the mount's upload slots."""
FILES_MAX = 65_536
"""Accepted and not durable; who would make more of them waits."""
CHECK_S = 1.0
LOCKED_S = 0.05
WAITABLE = (Unavailable, AccessDenied, NoSuchBucket, StoreFull, StagingFull, CacheError)
"""Errors that are not about one file: everything waits, and is tried again."""
log = logging.getLogger(__name__)


class WriteBack:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        nursery: trio.Nursery,
        threads: Threads,
        rules: Rules,
        metrics: WriteBackMetrics,
        *,
        delay_s: float,
        is_pressed: Callable[[], bool],
        progress: Callable[[], None],
        is_held: Callable[[], bool],
        clock: Clock,
    ) -> None:
        """``is_pressed``: staging needs room. ``progress`` is told when something is durable. ``is_held``: changes of
        names wait for what was accepted before them."""
        self._nursery, self._rules, self._metrics = nursery, rules, metrics
        self._delay_s, self._is_pressed, self._progress, self._is_held = delay_s, is_pressed, progress, is_held
        self.acceptor = Acceptor(
            database, nursery, threads, clock, number=self._next, replaced=self._replaced, accepted=self._was_accepted
        )
        self.publisher: Publisher
        self.sequence = 0
        self._items: dict[int, Accepted] = {}
        self._standing_in: dict[int, Accepted] = {}
        """Those that superseded others."""
        self._drains: list[Drain] = []
        self._kick = trio.Event()
        self._room = trio.Event()
        self._alone = self._attempts = 0
        self._gathering = False
        self._resume_s = 0.0
        self._backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        self._small_bytes = self._small_files = 0
        self._bursts = Bursts()
        self.error: LakeError | None = None
        """Why everything waits."""

    # -- what is on its way

    def is_for(self, path: str) -> bool:
        return self._rules.is_writeback(path)

    @property
    def items(self) -> Iterable[Accepted]:
        """In the order of acceptance."""
        return self._items.values()

    def __len__(self) -> int:
        return len(self._items)

    def reached(self, sequence: int) -> bool:
        """Everything accepted up to this number is durable, or failed for good."""
        for item in self._items.values():
            if item.sequence > sequence:
                break
            if not item.failed:
                return False
        return not any(item.place <= sequence and not item.failed for item in self._standing_in.values())

    def item_of(self, draft: Draft) -> Accepted | None:
        return self._items.get(draft.accepted) if draft.accepted else None

    async def wait_room(self, timeout_s: float) -> None:
        """Until there may be one more file. Raises StagingFull."""
        with trio.move_on_after(timeout_s):
            while len(self._items) >= FILES_MAX:
                self._kick.set()
                await self._room.wait()
            return
        raise StagingFull(f"{len(self._items)} files wait for the store: see `lakefs-fuse stats`")

    # -- accepting

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    async def accept(self, file: OpenFile, draft: Draft) -> None:
        """The draft's bytes are safe here when this returns. The caller holds it alone. Raises LakeError."""
        try:
            await self.acceptor.accept(file, draft)
        except LakeError:
            if draft.accepted:
                raise
            draft.stands_for = 0
            for earlier in file.behind:
                item = self.item_of(earlier.draft) if earlier.draft is not None else None
                if item is not None:
                    item.superseded = item.draft.unlinked = False
                    self._note(item.draft)
                    if not self.is_packable(item):
                        start_uploads(item.draft)
            self._kick.set()
            raise

    def may_accept(self, file: OpenFile) -> bool:
        """A file that was just made and is in memory, without waiting for anything."""
        draft = file.draft
        if draft is None or not draft.file.is_in_memory or file.behind or not self.is_for(file.key):
            return False
        if file.is_incomplete:
            return False
        return len(self._items) < FILES_MAX and draft.services.staging.fits

    @staticmethod
    def _note(draft: Draft) -> None:
        """Again: the journal may have taken it for superseded."""
        try:
            draft.save(sync=True)
        except CacheError as error:
            log.error("what is staged of %s could not be noted: %s", draft.target.key, error)

    def _replaced(self, file: OpenFile, before: list[Draft]) -> list[Draft]:
        """From the newest back, up to one that has to become visible."""
        gone: list[Draft] = []
        for earlier in reversed(file.behind):
            item = self.item_of(earlier.draft) if earlier.draft is not None else None
            if item is None:
                continue
            if item.busy or item.replayed or self._is_waited_for(item, before):
                break  # of one that came back at mount it is not known yet what the store has
            item.superseded = item.draft.unlinked = True  # what is saved of it from here on says so
            if file.draft is not None:
                file.draft.stands_for = item.place
            gone.append(item.draft)
        return gone

    def _is_waited_for(self, item: Accepted, before: list[Draft]) -> bool:
        """By something else accepted, so that a newer version could not come in its place without coming too early."""
        if self._is_held() or any(draft.began >= item.place for draft in before):
            return True
        return any(other.barrier >= item.place and other.file is not item.file for other in self._items.values())

    def pass_over(self, file: OpenFile) -> None:
        """Only the newest version is to become visible, whatever waits for those before."""
        for earlier in list(file.behind):
            item = self.item_of(earlier.draft) if earlier.draft is not None else None
            if item is not None and item.busy:
                continue
            file.behind = [each for each in file.behind if each is not earlier]
            if item is not None:
                if file.draft is not None:
                    file.draft.stands_for = file.draft.stands_for or item.place
                item.superseded = item.draft.unlinked = True
                self._note(item.draft)
                self.was_superseded(item.draft)

    def was_superseded(self, draft: Draft) -> None:
        """An accepted version does not become visible: a newer one did, or will."""
        self._metrics.superseded += 1
        self.forget(draft)
        self.publisher.discard_later(draft)

    def _was_accepted(self, file: OpenFile, draft: Draft) -> None:
        for earlier in list(file.behind):
            item = self.item_of(earlier.draft) if earlier.draft is not None else None
            if item is None or not item.superseded:
                continue
            file.behind.remove(earlier)
            if item.draft.is_unknown_to_store and item.draft.target.if_absent:
                draft.target.if_absent = True
            self.was_superseded(item.draft)
        self._metrics.accepted += 1
        self.add(file, draft)

    def add(self, file: OpenFile, draft: Draft, *, replayed: bool = False) -> None:
        """An accepted draft is to be published."""
        item = Accepted(draft.accepted, draft.began, file, draft, trio.current_time(), replayed=replayed)
        self._items[draft.accepted] = item
        if item.place < item.sequence:
            self._standing_in[draft.accepted] = item
        if self.is_packable(item):
            self._small_bytes += draft.size
            self._small_files += 1
            if not replayed:
                self._bursts.came(item.since_s)
            full = self._small_bytes >= PACK_BYTES_MAX or self._small_files >= PACK_FILES_MAX
            if self._small_files == 1 or self._is_pressed() or (full and not self._bursts.lasts(item.since_s)):
                self._kick.set()
        else:
            if not replayed:
                start_uploads(draft)
            self._kick.set()

    def is_packable(self, item: Accepted) -> bool:
        draft = item.draft
        policy = self._rules.pack_for(item.file.key)
        if draft.upload_intent_ns or draft.uploading:
            return False
        return policy.mode != "never" and draft.size <= policy.threshold_bytes

    def forget(self, draft: Draft) -> None:
        """The version is durable, or not wanted any more."""
        item = self._items.pop(draft.accepted, None)
        self._standing_in.pop(draft.accepted, None)
        if item is None:
            return
        for drain in self._drains:
            if item.sequence in drain.wanted:
                drain.wanted.discard(item.sequence)
                if not drain.wanted:
                    drain.changed.set()
        self._room.set()
        self._room = trio.Event()
        self._kick.set()
        self._progress()

    # -- asking for it

    def before(self, path: str) -> list[Accepted]:
        """What has to be durable before the file at ``path``, and the file itself."""
        if self._is_held():
            return list(self._items.values())
        above = path.rpartition("/")[0]
        return self.below(above)

    def below(self, directory: str) -> list[Accepted]:
        """What was accepted at or below a path."""
        if not directory:
            return list(self._items.values())
        return [
            item
            for item in self._items.values()
            if item.file.key == directory or item.file.key.startswith(directory + "/")
        ]

    def replayed(self, file: OpenFile) -> list[Accepted]:
        """Versions of a file that came back at mount, and of which it is not known what the store has."""
        items = [self.item_of(each.draft) for each in file.versions if each.draft is not None]
        return [item for item in items if item is not None and item.replayed]

    async def drain(self, items: list[Accepted]) -> None:
        """All of these are durable (or superseded) when this returns. Raises the LakeError of an attempt that began
        after the call."""
        items = self._with_older_versions(items)
        drain = Drain({item.sequence for item in items}, self._attempts)
        if not drain.wanted:
            return
        for item in items:
            item.urgent, item.failed, item.error = True, False, None
            item.draft.hurry()
        self._drains.append(drain)
        self._resume_s = 0.0
        self._kick.set()
        try:
            while drain.wanted:
                if drain.error is not None:
                    raise drain.error
                drain.changed = trio.Event()
                await drain.changed.wait()
        finally:
            self._drains.remove(drain)
            if not any(drain.wanted for drain in self._drains):
                for item in self._items.values():
                    item.urgent = False

    def _with_older_versions(self, items: list[Accepted]) -> list[Accepted]:
        """A version that is on its way already may not come after a newer one of its file that somebody waits for."""
        newest: dict[int, int] = {}
        for item in items:
            newest[id(item.file)] = max(item.sequence, newest.get(id(item.file), 0))
        return [item for item in self._items.values() if item.sequence <= newest.get(id(item.file), 0)]

    async def patiently(self, path: str, attempt: Callable[[], Awaitable[None]], patience_s: float) -> None:
        """Where ``path`` is write-back's, ``attempt`` is made again while the store is away, as long as a writer would
        wait for room. Raises what the last attempt did."""
        deadline_s = trio.current_time() + (patience_s if self.is_for(path) else 0.0)
        while True:
            try:
                await attempt()
                return
            except WAITABLE as error:
                if trio.current_time() >= deadline_s:
                    raise
                log.info("a change of %s waits for the store: %s", path, error)
            await trio.sleep(PAUSE_S_FIRST)

    # -- publishing

    async def run(self) -> None:
        """Publish what is accepted, for as long as the mount lives."""
        while True:
            self._kick = trio.Event()
            wait_s = self._start_what_can()
            with trio.move_on_after(wait_s) as waiting:
                await self._kick.wait()
            while waiting.cancelled_caught and self._is_deferring():
                with trio.move_on_after(WINDOW_S) as waiting:
                    await self._kick.wait()

    def _is_deferring(self) -> bool:
        """Packs wait until a burst is over, or they have waited long enough."""
        now, full = trio.current_time(), len(self._items) > FILES_MAX // 2
        if full or not self._bursts.lasts(now) or self._drains or self._is_held() or self._is_pressed():
            return False
        oldest = next(iter(self._items.values()), None)
        return oldest is not None and oldest.since_s + PATIENCE * self._delay_s > now

    def _start_what_can(self) -> float:
        """Start what may become visible now; answers after how many seconds more may."""
        now = trio.current_time()
        if now < self._resume_s:
            return self._resume_s - now
        wait_s = math.inf
        if self._drains:
            wait_s = self._start(item for item in self._items.values() if item.urgent)
        return min(wait_s, self._start(islice(self._items.values(), 2 * PACK_FILES_MAX)))

    def _start(self, items: Iterable[Accepted]) -> float:
        pack: list[Accepted] = []
        packed_bytes, full = 0, False
        blocked_by = first_packed = math.inf
        self._small_bytes = self._small_files = 0
        for item in items:
            if item.failed or item.superseded:
                continue
            blocked = blocked_by <= item.barrier
            if item.started or blocked:
                blocked_by = min(blocked_by, item.place)
            elif self.is_packable(item):
                full = full or packed_bytes + item.draft.size > PACK_BYTES_MAX or len(pack) >= PACK_FILES_MAX
                if full:
                    blocked_by = min(blocked_by, item.place)
                    continue
                pack.append(item)
                packed_bytes += item.draft.size
                first_packed = min(first_packed, item.place)
            else:
                blocked_by = min(blocked_by, item.place)
                if first_packed > item.barrier and self._alone < AT_ONCE:
                    self._start_alone(item)
        self._small_bytes, self._small_files = packed_bytes, len(pack)
        return self._start_pack(pack, full) if pack and not self._gathering else math.inf

    def _start_pack(self, pack: list[Accepted], full: bool) -> float:
        if self._is_deferring():
            return WINDOW_S
        due_s = pack[0].since_s + self._delay_s - trio.current_time()
        if not (full or due_s <= 0 or pack[0].urgent or self._is_pressed()):
            return due_s
        if len(pack) == 1 and self._rules.pack_for(pack[0].file.key).mode == "auto":
            self._start_alone(pack[0])
            return math.inf
        self._gathering = True
        self._begin_attempt(pack)
        self._nursery.start_soon(self._publish_pack, pack)
        return math.inf

    def _begin_attempt(self, items: list[Accepted]) -> None:
        self._attempts += 1
        for item in items:
            item.started, item.attempt = True, self._attempts

    def _start_alone(self, item: Accepted) -> None:
        self._begin_attempt([item])
        self._alone += 1
        self._nursery.start_soon(self._publish_alone, item)

    async def _publish_alone(self, item: Accepted) -> None:
        try:
            if item.replayed:
                if await self.publisher.settled(item):
                    return
                start_uploads(item.draft)
            while item.draft.uploading and not item.urgent and self._items.get(item.sequence) is item:
                with trio.move_on_after(CHECK_S):
                    await item.draft.wait_idle()
            if self._items.get(item.sequence) is item:
                await self._publish(item)
                self._went_well()
        except LakeError as error:
            self._failed(item, error)
        except Exception as error:
            log.exception("publishing %s", item.file.key)
            self._failed(item, LakeError(f"publishing failed: {error!r}"))
        finally:
            self._alone -= 1
            item.started = item.busy = False
            self._kick.set()

    async def _publish(self, item: Accepted) -> None:
        try:
            await self.publisher.publish_accepted(item)
        except FileError as error:
            if error.errno != errno.EEXIST:
                raise
            await self.publisher.set_aside(item)
            await self.publisher.publish_accepted(item)

    async def _publish_pack(self, pack: list[Accepted]) -> None:
        try:
            if await self.publisher.publish_together(pack):
                self._went_well()
            else:  # the first of them is being renamed or removed
                await trio.sleep(LOCKED_S)
        except LakeError as error:
            self._failed(pack[0], error, wait=True)
        except Exception as error:
            log.exception("publishing %d files", len(pack))
            self._failed(pack[0], LakeError(f"publishing failed: {error!r}"), wait=True)
        finally:
            self._gathering = False
            for item in pack:
                item.started = item.busy = False
            self._kick.set()

    def _went_well(self) -> None:
        self.error = None
        self._backoff.reset()

    def _failed(self, item: Accepted, error: LakeError, *, wait: bool = False) -> None:
        item.error = error
        self._metrics.failures += 1
        if wait or isinstance(error, WAITABLE):
            if self.error is None:
                log.warning("%d accepted files wait for the store: %s", len(self._items), error)
            self.error = error
            self._resume_s = trio.current_time() + self._backoff.next_s()
        else:
            log.error("%s is not in the store, its bytes are kept in staging: %s", item.file.key, error)
            item.failed = True
            self._progress()
        for drain in self._drains:
            if item.attempt <= drain.since:  # try again at once, for who asked meanwhile
                self._resume_s, item.failed = 0.0, False
            elif item.sequence in drain.wanted or wait or isinstance(error, WAITABLE):
                drain.error = error
                drain.changed.set()
