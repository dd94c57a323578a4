"""The queue of acknowledged versions that are not in the store yet, in the order in which they become visible.

What always holds:

* *order*: a file that was opened after another was acknowledged becomes visible after it. Parts of both are uploaded
  side by side; only the requests that make versions visible are ordered (`AcknowledgedVersion.barrier`);
* *supersession*: a version that a newer one supersedes before it is published never becomes visible. Versions that
  would have waited for it wait for the newer one. It is published all the same if another file waits for it and the
  newer one waits for that file;
* *nothing acknowledged is dropped*: a version leaves the queue only when it is durable, superseded or unlinked.

`group_commit` adds versions to the queue, and `scheduler` publishes them. Trio thread only; all code between two awaits
is atomic. A crash leaves the journal, from which `replay` builds the same queue again.
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
from lakefs_fuse.upload.publish import find_late_object, may_be_stored
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.writeback.packer import PACK_FILES_MAX
from lakefs_fuse.vfs.writeback.publish_plan import is_packable

PAUSE_S_FIRST, PAUSE_S_MAX = 1.0, 30.0
"""Pauses between attempts while the store is away."""
FILES_MAX = 65_536
"""Maximum number of acknowledged versions that are not durable; a writer that would add another one waits."""
BURST_WINDOW_S = 1.0
BURST_FILES_MIN = 20
"""Files acknowledged in one window that count as a burst: at that rate, packs that gather for half a minute get the 500
files that one commit should contain."""
DISCARD_S_FIRST, DISCARD_S_MAX = 1.0, 60.0
"""Pauses between attempts to abort the upload of a superseded version."""
SUPERSEDED_S_MAX = 30.0
"""A version that is being sent, and has waited this long with those that it superseded, is stored before a newer one.
Otherwise a file that is overwritten faster than it is sent would never be in the store."""
AWAY_S_MAX = 5.0
"""Longest wait for the store to say whether a version arrived before the name of its file changes."""
WAITABLE = (Unavailable, AccessDenied, NoSuchBucket, StoreFull, StagingFull, CacheError)
"""Errors that are not about one file: every version waits, and is tried again."""
log = logging.getLogger(__name__)


class VersionState(StrEnum):
    """The state of an acknowledged version; `TRANSITIONS` says which may follow which."""

    WAITING = "waiting"
    """It waits for its turn, or for the store."""
    PUBLISHING = "publishing"
    """It is being made visible, so it can no longer be superseded."""
    REFUSED = "refused"
    """The store refused it for a reason that concerns this version alone. Other files overtake it, and it is tried
    again when a caller waits for it."""
    SUPERSEDED = "superseded"
    """A newer version is being acknowledged: this one becomes visible only if that fails."""
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
    """A version in the queue. ``barrier``: every version acknowledged up to this number becomes visible before it."""

    sequence: int
    barrier: int
    file: OpenFile
    draft: Draft
    since_s: float
    """When it was acknowledged, or the first of the versions that it superseded. By trio's clock."""
    state: VersionState = VersionState.WAITING
    is_attempted: bool = False
    """The scheduler is working on it: its parts are uploaded, it is reconciled, or it is published."""
    attempt: int = 0
    """Number of its newest attempt."""
    is_urgent: bool = False
    """A caller waits for it."""
    is_unreconciled: bool = False
    """An earlier daemon acknowledged it, and the store has not been asked yet whether it has the bytes."""
    is_contested: bool = False
    """It is published alone, because it cannot be stored as planned. Either it was created with O_EXCL, and the store
    refuses it because another client has created the name; or the store has a later version already, which is recorded
    in its place."""

    @property
    def place(self) -> int:
        """Its number, or that of the oldest version that it superseded, whose waiters wait for this one."""
        return self.draft.stands_for or self.sequence

    @property
    def is_refused(self) -> bool:
        return self.state is VersionState.REFUSED

    @property
    def waited_s(self) -> float:
        return trio.current_time() - self.since_s

    def begin_publishing(self) -> None:
        """Enter PUBLISHING; an attempt that plans again calls this more than once."""
        if self.state is not VersionState.PUBLISHING:
            self.transition(VersionState.PUBLISHING)

    def transition(self, to: VersionState) -> None:
        assert to in TRANSITIONS[self.state], f"{self.file.key}: {self.state} cannot become {to}"
        self.state = to


@dataclass(slots=True, eq=False)
class Drain:
    """A caller that waits until versions are durable. ``sequences`` are the numbers that it still waits for."""

    sequences: set[int]
    since: int
    """Attempts up to this number began before the call, so their errors do not end it."""
    error: LakeError | None = None
    """Why every version waits, or why the first version that the store refused is not durable."""
    ended: trio.Event = field(default_factory=trio.Event)
    """Set when the caller has nothing more to wait for."""

    def discard(self, sequence: int) -> None:
        self.sequences.discard(sequence)
        if not self.sequences:
            self.ended.set()


class Bursts:
    """A detector of bursts of small files, during which storing files would slow down acknowledging more of them.

    Packing, sending and recording a file costs this node about as much as acknowledging it. Times: trio's clock.
    """

    def __init__(self) -> None:
        self._began_s = self._busy_until_s = 0.0
        self._count = 0

    def count(self, now_s: float) -> None:
        """Count one more acknowledged file."""
        if now_s - self._began_s > BURST_WINDOW_S:
            self._began_s, self._count = now_s, 0
        self._count += 1
        if self._count >= BURST_FILES_MIN:
            self._busy_until_s = now_s + BURST_WINDOW_S

    def is_lasting(self, now_s: float) -> bool:
        """Return whether a burst is under way, so that more files are likely to follow within a second."""
        return now_s < self._busy_until_s


class WriteBackQueue:
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
        """Return whether the file at a path is under write-back."""
        self.publishes_open_files = rules.publishes_open_files
        self.asks_store_for_exclusive_create = rules.asks_store_for_exclusive_create
        self.asks_store_anywhere = rules.asks_store_anywhere
        self._metrics, self._deletions = metrics, deletions
        self.progressed = Wakeup()
        """Rings when a version has left the queue or was refused, so that held changes of names may be sent."""
        self.changed = Wakeup()
        """Rings when another version may be ready to be published."""
        self.sequence = 0
        """The newest number given to an acknowledged version."""
        self.error: LakeError | None = None
        """Why every version waits; None if none has to."""
        self.resume_s = 0.0
        """No attempt begins before this time of the trio clock."""
        self.bursts = Bursts()
        self._backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        self._attempts = 0
        self.versions: dict[int, AcknowledgedVersion] = {}
        """The queued versions by number, in the order of acknowledgement. Only methods of this class change it."""
        self.items = self.versions.values()
        self._standing_in: dict[int, AcknowledgedVersion] = {}
        """The queued versions that superseded others."""
        self._drains: list[Drain] = []
        self._room = Wakeup()
        self._small_bytes = self._small_files = 0

    # -- what is on its way

    def __len__(self) -> int:
        return len(self.versions)

    def is_durable_up_to(self, sequence: int) -> bool:
        """Return whether each version acknowledged up to this number is in the store, superseded, or refused by it."""
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
        """Return the older versions of a file that are in the queue, oldest first."""
        items = ((each, self.item_of(each.draft) if each.draft is not None else None) for each in file.behind)
        return [(each, item) for each, item in items if item is not None]

    async def wait_room(self, timeout_s: float) -> None:
        """Wait until one more version may be acknowledged. Raises StagingFull after ``timeout_s``."""
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
        """Return whether the file is in memory, and can be acknowledged without waiting for anything."""
        draft = file.draft
        if draft is None or not draft.file.is_in_memory or file.behind or not self.is_for(file.key):
            return False
        if file.is_incomplete or file.has_lost_name:
            return False
        return len(self.versions) < FILES_MAX and draft.uploader.staging.fits

    def add(self, file: OpenFile, draft: Draft, *, is_unreconciled: bool = False) -> None:
        """Queue an acknowledged draft for publication, and end the drafts that it superseded."""
        now_s = since_s = trio.current_time()
        if not is_unreconciled:
            since_s = self._end_superseded(file, now_s)
            self._metrics.accepted += 1
        item = AcknowledgedVersion(draft.sequence, draft.began, file, draft, since_s, is_unreconciled=is_unreconciled)
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
            self.bursts.count(now_s)
        full = self._small_bytes >= PACK_BYTES_MAX or self._small_files >= PACK_FILES_MAX
        pressed = draft.uploader.staging.is_half_full
        if self._small_files == 1 or pressed or (full and not self.bursts.is_lasting(now_s)):
            self.changed.wake_all()

    @property
    def has_files_for_pack(self) -> bool:
        """True if small files gather for a pack, and no error keeps them from the store."""
        return self._small_files > 0 and self.error is None

    def count_packable(self, files: int, size_bytes: int) -> None:
        """Set how many files wait for a pack; `add` counts those that follow."""
        self._small_files, self._small_bytes = files, size_bytes

    def end(self, draft: Draft) -> None:
        """Remove a version that is durable, superseded or unlinked from the queue."""
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
        """Supersede older versions of a file that is being acknowledged, from the newest back to one that must appear.

        ``before`` are the drafts of the same group that are acknowledged before it; ``are_names_held``: changes of
        names wait for the queue. Returns the drafts that are superseded."""
        superseded: list[Draft] = []
        behind = self._behind(file)
        for _, item in reversed(behind):
            is_due = item is behind[0][1] and self._is_overdue(item)
            is_late = item.state is VersionState.PUBLISHING or item.is_unreconciled or is_due
            if is_late or are_names_held or self._is_waited_for(item, before):
                break
            if item.state is not VersionState.SUPERSEDED:
                item.transition(VersionState.SUPERSEDED)
            item.draft.unlink()  # records saved from here on say so
            if file.draft is not None:
                file.draft.supersede(item.place)
                if item.draft.is_unknown_to_store and item.draft.target.if_absent:
                    file.draft.target.require_absent()
            superseded.append(item.draft)
        return superseded

    def _is_overdue(self, item: AcknowledgedVersion) -> bool:
        """Return whether a version that is being sent alone has waited so long that a newer one must not supersede it.
        While the store is away nothing is sent, and only the newest version is kept."""
        if not item.is_attempted or self.error is not None or self.is_packable(item):
            return False
        return item.waited_s > SUPERSEDED_S_MAX

    def _is_waited_for(self, item: AcknowledgedVersion, before: list[Draft]) -> bool:
        """Return whether another file must appear after this version, so that the newer one would appear too early."""
        if any(draft.began >= item.place for draft in before):
            return True
        for other in reversed(self.versions.values()):
            if other.sequence <= item.place:
                break  # a barrier is less than the version's own number
            if other.barrier >= item.place and other.file is not item.file:
                return True
        return False

    def restore_superseded(self, file: OpenFile) -> None:
        """Put superseded versions of a file back into the queue, because the newer one could not be acknowledged."""
        for _, item in self._behind(file):
            if item.state is VersionState.SUPERSEDED:
                item.transition(VersionState.WAITING)
            item.draft.unlink(unlinked=False)
            self._save(item.draft)
            if not self.is_packable(item):
                item.draft.start_uploads()
        self.changed.wake_all()

    def _end_superseded(self, file: OpenFile, since_s: float) -> float:
        """End the superseded versions of a file; return since when they waited, or ``since_s`` if there are none. A
        file that is written again and again would otherwise never have waited long enough."""
        for earlier, item in self._behind(file):
            if item.state is not VersionState.SUPERSEDED:
                continue
            since_s = min(since_s, item.since_s)
            file.behind.remove(earlier)
            self.discard_superseded(item.draft)
        return since_s

    def supersede_all(self, file: OpenFile) -> None:
        """Supersede all versions but the newest, even those for which other files wait."""
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
        """Write the journal record again, which says whether the version is superseded."""
        try:
            draft.save(sync=True)
        except CacheError as error:
            log.error("what is staged of %s could not be journaled: %s", draft.target.key, error)

    def journal_superseded(self, batch: Batch, draft: Draft) -> None:
        """Have the batch delete the draft's record, or mark it as superseded if the store may have something of it.

        By that record the next daemon recognises the draft's object or upload as ours, and deletes it."""
        draft.unlink()
        if draft.is_unknown_to_store:
            draft.file.mark_ended()
            self._journal.delete(batch, draft.id)
        else:
            self._journal.put(batch, draft.id, encode(draft.record()))

    def discard_superseded(self, draft: Draft) -> None:
        """End a version that a newer one supersedes."""
        self._metrics.superseded += 1
        self.end(draft)
        self.discard(draft)

    def discard(self, draft: Draft) -> None:
        """Delete a version to which no name will refer, in the background, also from the store."""
        draft.unlink()
        self._nursery.start_soon(self._discard, draft)

    async def _discard(self, draft: Draft) -> None:
        """Try until the store has nothing left of the draft. If this mount ends before, the next one continues. The
        staged bytes go first, unless a part is being sent: a writer may wait for their room while the store is away."""
        reached("discard.begun")
        if not draft.uploading:
            draft.close(unlink=True)
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
        """Return what `publish.find_late_object` returns, or None while the store is away.

        The object is looked for again when the draft is stored or discarded. Raises LakeError."""
        if not may_be_stored(draft) or (draft.sequence and self.error is not None):
            return None
        with suppress(Unavailable), trio.move_on_after(AWAY_S_MAX):
            return await find_late_object(draft)
        return None

    def delete_object(self, meta: ObjectMeta) -> None:
        """Queue the deletion of an object to which no name refers. Raises CacheError."""
        self._deletions.schedule(Deletion(meta.key, meta.etag))

    def is_packable(self, item: AcknowledgedVersion) -> bool:
        """Return whether a pack may contain the version: it is small by the rules of its path, and has no upload."""
        draft = item.draft
        if item.is_contested:
            return False
        policy = self._rules.pack_for(item.file.key)
        return is_packable(policy, draft.size, has_upload=bool(draft.upload.intent_ns or draft.uploading))

    def may_stay_plain(self, item: AcknowledgedVersion) -> bool:
        """Return whether the version is stored as a plain object if no other joins it in a pack."""
        return self._rules.pack_for(item.file.key).mode == "auto"

    # -- attempts

    @property
    def is_drained(self) -> bool:
        """True if a caller waits in `drain`."""
        return bool(self._drains)

    @property
    def is_half_full(self) -> bool:
        return len(self.versions) > FILES_MAX // 2

    def begin_attempt(self, items: list[AcknowledgedVersion]) -> None:
        self._attempts += 1
        for item in items:
            item.is_attempted, item.attempt = True, self._attempts

    def end_attempt(self, items: list[AcknowledgedVersion]) -> None:
        """End an attempt, whatever its outcome: versions that are not durable wait for the next one."""
        for item in items:
            item.is_attempted = False
            if item.state is VersionState.PUBLISHING:
                item.transition(VersionState.WAITING)
        self.changed.wake_all()

    def record_success(self) -> None:
        """Record that the store answers, so that no version has to wait."""
        self.error = None
        self._backoff.reset()

    def record_failure(self, item: AcknowledgedVersion, error: LakeError, *, is_of_all: bool = False) -> None:
        """Record a failed attempt: every version waits, or this one is refused and others overtake it.

        ``is_of_all``: every version waits, whatever the error is."""
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

    def below(self, directory: str) -> list[AcknowledgedVersion]:
        """Return the versions acknowledged at or below a path."""
        if not directory:
            return list(self.versions.values())
        begin = [item for item in self.versions.values() if item.file.key.startswith(directory)]
        return [item for item in begin if item.file.key == directory or item.file.key[len(directory)] == "/"]

    def unreconciled(self, file: OpenFile) -> list[AcknowledgedVersion]:
        """Return the versions of a file of which this mount does not know yet whether the store has them."""
        items = [self.item_of(each.draft) for each in file.versions if each.draft is not None]
        return [item for item in items if item is not None and item.is_unreconciled]

    async def drain(self, items: list[AcknowledgedVersion]) -> None:
        """Wait until all of these versions are durable or superseded.

        Raises the LakeError of an attempt that began after the call: at once if it makes the whole queue wait; if the
        store refused a version, once all have been tried."""
        items = self._with_older_versions(items)
        drain = Drain({item.sequence for item in items}, self._attempts)
        if not drain.sequences:
            return
        for item in items:
            if item.state is VersionState.REFUSED:
                item.transition(VersionState.WAITING)
            item.is_urgent = True
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
        """Return these versions and the older ones of their files, which must not appear after them; without those that
        have left the queue."""
        wanted = {item.sequence: item for item in items if item.sequence in self.versions}
        for item in items:
            for _, older in self._behind(item.file) if item.file.behind else ():
                if older.sequence < item.sequence:
                    wanted[older.sequence] = older
        return [wanted[sequence] for sequence in sorted(wanted)]
