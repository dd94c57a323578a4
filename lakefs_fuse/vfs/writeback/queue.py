"""Versions that write-back acknowledged and that are not in the store yet, in the order in which they get there.

What always holds:

* *order*: a file that was opened after another was acknowledged appears after it. Parts are uploaded side by side; only
  becoming visible is put in order (`AcknowledgedVersion.barrier`);
* *supersession*: a version that a newer one superseded before it was published does not become visible, unless another
  file waits for it that the newer one itself waits for; what would have waited for it waits for the newer one;
* *nothing acknowledged is dropped*: a version leaves the queue when it is durable, superseded or unlinked.

The queue knows what waits; `group_commit` adds to it, `scheduler` publishes from it. Trio thread only; all code between
two awaits is atomic. A crash leaves the journal, from which `replay` makes the same queue again.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

import trio

from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.pack_budget import PACK_BYTES_MAX
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.errors import (
    AccessDenied,
    CacheError,
    LakeError,
    NoSuchBucket,
    StagingFull,
    StoreFull,
    Unavailable,
)
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import Deletion, Journal
from lakefs_fuse.metrics import WriteBackMetrics
from lakefs_fuse.path_rules import Rules
from lakefs_fuse.quantity import counted
from lakefs_fuse.staging.draft_record import encode
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.sync.wakeup import Wakeup
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.publish import find_late_object
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.writeback.packer import PACK_FILES_MAX
from lakefs_fuse.vfs.writeback.publish_plan import is_packable

PAUSE_S_FIRST, PAUSE_S_MAX = 1.0, 30.0
"""Between attempts while the store is away."""
FILES_MAX = 65_536
"""Acknowledged and not durable; a writer who would make more waits."""
BURST_WINDOW_S = 1.0
BURST_FILES_MIN = 20
"""This many in a window are a burst: packs of half a minute then have the 500 files that one commit is to serve."""
DISCARD_S_FIRST, DISCARD_S_MAX = 1.0, 60.0
"""Between attempts to end the upload of a superseded version."""
AWAY_S_MAX = 5.0
"""Time for the store to say whether a version arrived, before the name of its file changes: it may be away."""
WAITABLE = (Unavailable, AccessDenied, NoSuchBucket, StoreFull, StagingFull, CacheError)
"""Errors that are not about one file: everything waits, and is tried again."""
log = logging.getLogger(__name__)


class VersionState(StrEnum):
    """What becomes of an acknowledged version; `TRANSITIONS` is the table."""

    WAITING = "waiting"
    """For its turn, or for the store."""
    PUBLISHING = "publishing"
    """It becomes visible right now: too late to be superseded."""
    REFUSED = "refused"
    """Refused by the store, alone: other files overtake it, and it is tried again when a caller waits for it."""
    SUPERSEDED = "superseded"
    """A newer version is being acknowledged: this does not become visible, unless that fails."""
    ENDED = "ended"
    """Durable, superseded for good, or unlinked."""


TRANSITIONS = {
    VersionState.WAITING: {
        VersionState.PUBLISHING, VersionState.REFUSED, VersionState.SUPERSEDED, VersionState.ENDED
    },
    VersionState.PUBLISHING: {VersionState.WAITING, VersionState.REFUSED, VersionState.ENDED},
    VersionState.REFUSED: {VersionState.WAITING, VersionState.SUPERSEDED, VersionState.ENDED},
    VersionState.SUPERSEDED: {VersionState.WAITING, VersionState.ENDED},
    VersionState.ENDED: set[VersionState](),
}  # fmt: skip


@dataclass(slots=True, eq=False)
class AcknowledgedVersion:
    """A version on its way. ``barrier``: everything acknowledged up to this number comes before it."""

    sequence: int
    barrier: int
    file: OpenFile
    draft: Draft
    since_s: float
    state: VersionState = VersionState.WAITING
    is_attempted: bool = False
    """The scheduler has it: parts are uploaded, it is reconciled, or it is published."""
    attempt: int = 0
    """The newest attempt's number."""
    is_urgent: bool = False
    """A caller waits for it."""
    is_unreconciled: bool = False
    """It came back at mount, and the store was not asked yet whether it has the bytes."""
    is_contested: bool = False
    """It is published alone: it was created with O_EXCL, and another client has the name, so that the store refuses it,
    or the store has a later version already, which is recorded in its place."""
    error: LakeError | None = None

    @property
    def place(self) -> int:
        """Its number, or that of the oldest version that it superseded: what waits for that waits for this."""
        return self.draft.stands_for or self.sequence

    @property
    def is_refused(self) -> bool:
        return self.state is VersionState.REFUSED

    def begin_publishing(self) -> None:
        """Once more, perhaps, in the same attempt."""
        if self.state is not VersionState.PUBLISHING:
            self.transition(VersionState.PUBLISHING)

    def transition(self, to: VersionState) -> None:
        assert to in TRANSITIONS[self.state], f"{self.file.key}: {self.state} cannot become {to}"
        self.state = to


@dataclass(slots=True, eq=False)
class Drain:
    """A caller that waits until versions are durable. ``sequences`` are those that it still waits for."""

    sequences: set[int]
    since: int
    """Attempts up to this number began before: their errors say nothing about this caller."""
    error: LakeError | None = None
    """Why everything waits, or why the first that was refused is not durable."""
    ended: trio.Event = field(default_factory=trio.Event)
    """Set when there is nothing more to wait for."""

    def discard(self, sequence: int) -> None:
        self.sequences.discard(sequence)
        if not self.sequences:
            self.ended.set()


class Bursts:
    """Whether small files are acknowledged in such quick succession that storing them at the same time slows them down.

    Packing, sending and recording a file costs this node about as much as acknowledging it. Times: trio's clock.
    """

    def __init__(self) -> None:
        self._began_s = self._busy_until_s = 0.0
        self._count = 0

    def count(self, now_s: float) -> None:
        """One more was acknowledged."""
        if now_s - self._began_s > BURST_WINDOW_S:
            self._began_s, self._count = now_s, 0
        self._count += 1
        if self._count >= BURST_FILES_MIN:
            self._busy_until_s = now_s + BURST_WINDOW_S

    def is_lasting(self, now_s: float) -> bool:
        """More are likely to come at once."""
        return now_s < self._busy_until_s


class WriteBack:
    """The queue; see the module's head."""

    def __init__(
        self,
        database: Database,
        nursery: trio.Nursery,
        rules: Rules,
        metrics: WriteBackMetrics,
        deletions: DeletionQueue,
    ) -> None:
        self._journal, self._nursery, self._rules = Journal(database), nursery, rules
        self.is_for = rules.is_writeback
        """Files at a path are under write-back."""
        self.publishes_open_files = rules.publishes_open_files
        self.asks_store_for_exclusive_create = rules.asks_store_for_exclusive_create
        self.asks_store_anywhere = rules.asks_store_anywhere
        self._metrics, self._deletions = metrics, deletions
        self.progressed = Wakeup()
        """Rings when a version has left the queue, or was refused: changes of names may follow."""
        self.changed = Wakeup()
        """Rings when there may be more to publish."""
        self.sequence = 0
        """The newest number given to an acknowledged version."""
        self.error: LakeError | None = None
        """Why everything waits."""
        self.resume_s = 0.0
        """Nothing is tried before this time of the trio clock."""
        self.bursts = Bursts()
        self._backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        self._attempts = 0
        self.versions: dict[int, AcknowledgedVersion] = {}
        """What is on its way, by number, in the order of acknowledgement; changed by the methods here only."""
        self.items = self.versions.values()
        self._standing_in: dict[int, AcknowledgedVersion] = {}
        """Those that superseded others."""
        self._drains: list[Drain] = []
        self._room = Wakeup()
        self._small_bytes = self._small_files = 0

    # -- what is on its way

    def __len__(self) -> int:
        return len(self.versions)

    def is_durable_up_to(self, sequence: int) -> bool:
        """Every version acknowledged up to this number is in the store, superseded, or refused by it."""
        for item in self.versions.values():
            if item.sequence > sequence:
                break
            if item.state is not VersionState.REFUSED:
                return False
        return not any(
            item.place <= sequence and item.state is not VersionState.REFUSED for item in self._standing_in.values()
        )

    def item_of(self, draft: Draft) -> AcknowledgedVersion | None:
        return self.versions.get(draft.sequence)

    def _behind(self, file: OpenFile) -> list[tuple[OpenFile, AcknowledgedVersion]]:
        """Older versions of a file that are in the queue, oldest first."""
        items = ((each, self.item_of(each.draft) if each.draft is not None else None) for each in file.behind)
        return [(each, item) for each, item in items if item is not None]

    async def wait_room(self, timeout_s: float) -> None:
        """Until one more file may be acknowledged. Raises StagingFull."""
        with trio.move_on_after(timeout_s):
            while len(self.versions) >= FILES_MAX:
                self.changed.wake_all()
                await self._room.wait()
            return
        raise StagingFull(f"{len(self.versions)} files wait for the store: see `lakefs-fuse stats`")

    # -- acknowledging

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def may_acknowledge(self, file: OpenFile) -> bool:
        """A file that was just made and is in memory can be acknowledged without waiting for anything."""
        draft = file.draft
        if draft is None or not draft.file.is_in_memory or file.behind or not self.is_for(file.key):
            return False
        if file.is_incomplete:
            return False
        return len(self.versions) < FILES_MAX and draft.uploader.staging.fits

    def add(self, file: OpenFile, draft: Draft, *, is_unreconciled: bool = False) -> None:
        """Queue an acknowledged draft for publication; the drafts that it superseded end."""
        if not is_unreconciled:
            self._end_superseded(file)
            self._metrics.accepted += 1
        item = AcknowledgedVersion(
            draft.sequence, draft.began, file, draft, trio.current_time(), is_unreconciled=is_unreconciled
        )
        self.versions[draft.sequence] = item
        if item.place < item.sequence:
            self._standing_in[draft.sequence] = item
        if not self.is_packable(item):
            if not is_unreconciled:
                draft.start_uploads()
            self.changed.wake_all()
            return
        self._small_bytes += draft.size
        self._small_files += 1
        if not is_unreconciled:
            self.bursts.count(item.since_s)
        full = self._small_bytes >= PACK_BYTES_MAX or self._small_files >= PACK_FILES_MAX
        pressed = draft.uploader.staging.is_half_full
        if self._small_files == 1 or pressed or (full and not self.bursts.is_lasting(item.since_s)):
            self.changed.wake_all()

    @property
    def has_files_for_pack(self) -> bool:
        """Small files wait for others, and nothing is known that keeps them from the store."""
        return self._small_files > 0 and self.error is None

    def count_packable(self, files: int, size_bytes: int) -> None:
        """This many files wait for a pack, and the next are added to them."""
        self._small_files, self._small_bytes = files, size_bytes

    def end(self, draft: Draft) -> None:
        """The version is durable, or unlinked: it leaves the queue."""
        item = self.versions.pop(draft.sequence, None)
        self._standing_in.pop(draft.sequence, None)
        if item is None:
            return
        item.transition(VersionState.ENDED)
        for drain in self._drains:
            drain.discard(item.sequence)
        self._room.wake_all()
        self.changed.wake_all()
        self.progressed.wake_all()

    # -- superseding

    def supersede_older(self, file: OpenFile, before: list[Draft], *, are_names_held: bool) -> list[Draft]:
        """The file is acknowledged again, after ``before``: older versions do not become visible, from the newest back
        to one that has to. ``are_names_held``: changes of names wait for the queue. Returns their drafts."""
        superseded: list[Draft] = []
        for _, item in reversed(self._behind(file)):
            is_late = item.state is VersionState.PUBLISHING or item.is_unreconciled
            if is_late or are_names_held or self._is_waited_for(item, before):
                break
            if item.state is not VersionState.SUPERSEDED:
                item.transition(VersionState.SUPERSEDED)
            item.draft.unlink()  # records saved from here on include it
            if file.draft is not None:
                file.draft.supersede(item.place)
                if item.draft.is_unknown_to_store and item.draft.target.if_absent:
                    file.draft.target.if_absent = True
            superseded.append(item.draft)
        return superseded

    def _is_waited_for(self, item: AcknowledgedVersion, before: list[Draft]) -> bool:
        """Another file comes after this version, so that a newer one in its place would come too early."""
        if any(draft.began >= item.place for draft in before):
            return True
        return any(other.barrier >= item.place and other.file is not item.file for other in self.versions.values())

    def restore_superseded(self, file: OpenFile) -> None:
        """The newer version could not be acknowledged: those before it are to become visible after all."""
        for _, item in self._behind(file):
            if item.state is VersionState.SUPERSEDED:
                item.transition(VersionState.WAITING)
            item.draft.unlink(unlinked=False)
            self._save(item.draft)
            if not self.is_packable(item):
                item.draft.start_uploads()
        self.changed.wake_all()

    def _end_superseded(self, file: OpenFile) -> None:
        for earlier, item in self._behind(file):
            if item.state is not VersionState.SUPERSEDED:
                continue
            file.behind.remove(earlier)
            self.discard_superseded(item.draft)

    def supersede_all(self, file: OpenFile) -> None:
        """Only the newest version is to become visible, whatever waits for those before."""
        behind = self._behind(file)
        file.behind = [each for each, item in behind if item.state is VersionState.PUBLISHING]
        for _, item in behind:
            if item.state is VersionState.PUBLISHING:
                continue
            if file.draft is not None:
                file.draft.supersede(file.draft.stands_for or item.place)
            item.draft.unlink()
            self._save(item.draft)
            self.discard_superseded(item.draft)

    @staticmethod
    def _save(draft: Draft) -> None:
        """The journal record says again whether the version is superseded."""
        try:
            draft.save(sync=True)
        except CacheError as error:
            log.error("what is staged of %s could not be journaled: %s", draft.target.key, error)

    def journal_superseded(self, batch: Batch, draft: Draft) -> None:
        """The batch deletes the draft's record, or marks it as superseded: its object or upload must be deleted, or is
        recognised as ours, even if this daemon dies."""
        draft.unlink()
        if draft.is_unknown_to_store:
            draft.file.mark_ended()
            self._journal.delete(batch, draft.id)
        else:
            self._journal.put(batch, draft.id, encode(draft.record()))

    def discard_superseded(self, draft: Draft) -> None:
        """A newer version is visible, or will be: this one ends."""
        self._metrics.superseded += 1
        self.end(draft)
        self.discard(draft)

    def discard(self, draft: Draft) -> None:
        """Delete a version that no name will mean, from the store as well, behind the caller's back."""
        draft.unlink()
        self._nursery.start_soon(self._discard, draft)

    async def _discard(self, draft: Draft) -> None:
        """Until the store has nothing left of it; where the mount ends before, the next one goes on."""
        reached("discard.begun")
        backoff = Backoff(DISCARD_S_FIRST, DISCARD_S_MAX)
        while True:
            try:
                meta = await find_late_object(draft)
                if meta is not None:
                    self.delete_object(meta)
                await draft.discard()
                if draft.error is None:
                    self._journal.remove(draft.id)
                    return
                error: LakeError = draft.error
            except LakeError as failed:
                error = failed
                draft.close(unlink=True)
            log.warning("the object or upload of a superseded version of %s stays: %s", draft.target.key, error)
            try:
                draft.save(sync=True)
            except CacheError as unsaved:
                log.error("what is left of %s could not be journaled: %s", draft.target.key, unsaved)
            if not isinstance(error, Unavailable):
                return
            await trio.sleep(backoff.next_s())

    async def find_late_object(self, draft: Draft) -> ObjectMeta | None:
        """As `publish.find_late_object`; None also while the store is away: it is looked for again when the draft is
        stored, or discarded. Raises LakeError."""
        if draft.sequence and self.error is not None:
            return None
        with suppress(Unavailable), trio.move_on_after(AWAY_S_MAX):
            return await find_late_object(draft)
        return None

    def delete_object(self, meta: ObjectMeta) -> None:
        """An object that was stored for a version that no name means goes. Raises CacheError."""
        self._deletions.schedule(Deletion(meta.key, meta.etag))

    def is_packable(self, item: AcknowledgedVersion) -> bool:
        """Small enough for a pack, by the rules of its path, and no part was sent."""
        draft = item.draft
        if item.is_contested:
            return False
        policy = self._rules.pack_for(item.file.key)
        return is_packable(policy, draft.size, has_upload=bool(draft.upload_intent_ns or draft.uploading))

    def may_stay_plain(self, item: AcknowledgedVersion) -> bool:
        """Alone, it is stored as a plain object."""
        return self._rules.pack_for(item.file.key).mode == "auto"

    # -- attempts

    @property
    def is_drained(self) -> bool:
        """A caller waits for something to be durable."""
        return bool(self._drains)

    @property
    def is_half_full(self) -> bool:
        return len(self.versions) > FILES_MAX // 2

    def begin_attempt(self, items: list[AcknowledgedVersion]) -> None:
        self._attempts += 1
        for item in items:
            item.is_attempted, item.attempt = True, self._attempts

    def end_attempt(self, items: list[AcknowledgedVersion]) -> None:
        """Whatever came of it: those that are not durable wait for the next."""
        for item in items:
            item.is_attempted = False
            if item.state is VersionState.PUBLISHING:
                item.transition(VersionState.WAITING)
        self.changed.wake_all()

    def record_success(self) -> None:
        """The store answers: nothing has to wait."""
        self.error = None
        self._backoff.reset()

    def record_failure(self, item: AcknowledgedVersion, error: LakeError, *, is_of_all: bool = False) -> None:
        """An attempt failed: everything waits, or this version is refused and others pass."""
        item.error = error
        self._metrics.failures += 1
        waits = is_of_all or isinstance(error, WAITABLE)
        if waits:
            if self.error is None:
                waiting = counted(len(self.versions), "acknowledged file waits", "acknowledged files wait")
                log.warning("%s for the store: %s", waiting, error)
            self.error = error
            self.resume_s = trio.current_time() + self._backoff.next_s()
        else:
            log.error("%s is not in the store, its bytes are kept in staging: %s", item.file.key, error)
            if item.state in (VersionState.WAITING, VersionState.PUBLISHING):
                item.transition(VersionState.REFUSED)
            self.progressed.wake_all()
        for drain in self._drains:
            if item.attempt <= drain.since:  # try again immediately, for the caller that arrived in the meantime
                self.resume_s = 0.0
                if item.state is VersionState.REFUSED:
                    item.transition(VersionState.WAITING)
            elif waits:
                drain.error = error
                drain.sequences.clear()
                drain.ended.set()
            elif item.sequence in drain.sequences:
                drain.error = drain.error or error
                drain.discard(item.sequence)

    # -- asking for durability

    def before(self, path: str, *, are_names_held: bool) -> list[AcknowledgedVersion]:
        """The versions that must be durable before the file at ``path``, and the file itself."""
        return list(self.versions.values()) if are_names_held else self.below(path.rpartition("/")[0])

    def below(self, directory: str) -> list[AcknowledgedVersion]:
        """What was acknowledged at or below a path."""
        if not directory:
            return list(self.versions.values())
        return [
            item
            for item in self.versions.values()
            if item.file.key == directory or item.file.key.startswith(directory + "/")
        ]

    def unreconciled(self, file: OpenFile) -> list[AcknowledgedVersion]:
        """Versions of a file that came back at mount, and of which it is not known what the store has."""
        items = [self.item_of(each.draft) for each in file.versions if each.draft is not None]
        return [item for item in items if item is not None and item.is_unreconciled]

    async def drain(self, items: list[AcknowledgedVersion]) -> None:
        """All of these are durable (or superseded) when this returns. Raises the LakeError of an attempt that began
        after the call: immediately if the whole queue waits, and for a refused version when all have been tried."""
        items = self._with_older_versions(items)
        drain = Drain({item.sequence for item in items}, self._attempts)
        if not drain.sequences:
            return
        for item in items:
            if item.state is VersionState.REFUSED:
                item.transition(VersionState.WAITING)
            item.is_urgent, item.error = True, None
            item.draft.hurry()
        self._drains.append(drain)
        self.resume_s = 0.0
        self.changed.wake_all()
        try:
            await drain.ended.wait()
            if drain.error is not None:
                raise drain.error
        finally:
            self._drains.remove(drain)
            if not any(drain.sequences for drain in self._drains):
                for item in self.versions.values():
                    item.is_urgent = False

    def _with_older_versions(self, items: list[AcknowledgedVersion]) -> list[AcknowledgedVersion]:
        """A version that is on its way already may not come after a newer one of its file that a caller waits for."""
        newest: dict[int, int] = {}
        for item in items:
            newest[id(item.file)] = max(item.sequence, newest.get(id(item.file), 0))
        return [item for item in self.versions.values() if item.sequence <= newest.get(id(item.file), 0)]
