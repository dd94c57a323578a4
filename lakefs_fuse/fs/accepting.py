"""Closed files are made safe on the local disk: the bytes first, then the journal says so, many with one sync of each.

What always holds: a file is accepted (its `close()` answers 0) only after its staged bytes and then its journal record
survive a crash of the machine. Syncing a new file makes its name in the staging directory durable too on ext4, XFS and
Btrfs. While one group is being synced the next gathers. A crash before the record is there leaves an orphan, after it
an accepted file, whoever was told of it. Trio thread only, but for the syncing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import trio

from lakefs_fuse.data.draft import Draft
from lakefs_fuse.data.draft_record import accepted_record
from lakefs_fuse.data.record import encode
from lakefs_fuse.data.segments import Group, Spot
from lakefs_fuse.errors import CacheError, LakeError
from lakefs_fuse.failpoints import reached
from lakefs_fuse.fs.open_file import OpenFile
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.journal import Journal

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Closing:
    """A file whose `close()` waits. ``told`` is called when it waits no more."""

    file: OpenFile
    draft: Draft
    told: Callable[[], None]
    number: int = 0
    spot: Spot | None = None
    raw: bytes = b""
    saves: int = 0
    error: LakeError | None = None
    done: bool = False

    def end(self) -> None:
        if not self.done:
            self.done = True
            try:
                self.told()
            except Exception:
                log.exception("%s was closed", self.file.key)


class Acceptor:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        nursery: trio.Nursery,
        *,
        number: Callable[[], int],
        replaced: Callable[[OpenFile, list[Draft]], list[Draft]],
        accepted: Callable[[OpenFile, Draft], None],
    ) -> None:
        """``number()`` is the next in the order of what is accepted. ``replaced(file, others)`` are the
        earlier versions that nobody needs once this one is accepted, before ``others``; ``accepted`` is told when it
        is."""
        self._db, self._nursery = database, nursery
        self._journal = Journal(database)
        self._number, self._replaced, self._accepted = number, replaced, accepted
        self._closing: list[Closing] = []
        self._working = False

    async def accept(self, file: OpenFile, draft: Draft) -> None:
        """The caller holds the draft alone. Raises LakeError; then the draft is as it was."""
        if not draft.file.is_in_memory:
            await draft.file.sync()
        done = trio.Event()
        closing = Closing(file, draft, done.set)
        self._add(closing)
        await done.wait()
        if closing.error is not None:
            raise closing.error

    def accept_new(self, file: OpenFile, draft: Draft, told: Callable[[LakeError | None], None]) -> None:
        """As `accept`, of a draft in memory; ``told`` is called with the error, if there is one."""
        closing = Closing(file, draft, lambda: told(closing.error))
        self._add(closing)

    def _add(self, closing: Closing) -> None:
        self._closing.append(closing)
        if not self._working:
            self._working = True
            self._nursery.start_soon(self._work)

    async def _work(self) -> None:
        group: list[Closing] = []
        try:
            while self._closing:
                group, self._closing = self._closing, []
                await self._accept_group([closing for closing in group if not closing.file.unlinked])
                for closing in group:
                    closing.end()
        finally:
            self._working = False
            for closing in (*group, *self._closing):
                if not closing.done:
                    closing.error = closing.error or LakeError("the mount is ending")
                    closing.end()
            self._closing.clear()

    async def _accept_group(self, group: list[Closing]) -> None:
        if not group:
            return
        staging = group[0].draft.services.staging
        try:
            segment = staging.segments.group()
            for closing in group:
                self._describe(closing, segment)
            await trio.to_thread.run_sync(segment.write)
            reached("accept.synced")
            batch = Batch()
            for index, closing in enumerate(group):
                self._note(closing, [other.draft for other in group[:index]], batch)
            self._db.commit(batch)
            await trio.to_thread.run_sync(self._db.sync)
        except (OSError, CacheError) as error:
            failure = staging.translate(error) if isinstance(error, OSError) else error
            for closing in group:
                closing.error = failure
            return
        segment.keep()
        reached("accept.recorded")
        for closing in group:
            self._end(closing)

    @staticmethod
    def _encode(closing: Closing) -> None:
        draft = closing.draft
        closing.raw, closing.saves = encode(accepted_record(draft, closing.number, closing.spot)), draft.saves

    def _describe(self, closing: Closing, segment: Group) -> None:
        """Where the bytes will be; the record beside them is for the day when all others are lost."""
        draft, closing.number = closing.draft, self._number()
        data = draft.file.memory()
        if data is not None:
            closing.spot = segment.spot(len(data))
        self._encode(closing)
        if data is not None:
            segment.add(data, closing.raw)

    def _note(self, closing: Closing, before: list[Draft], batch: Batch) -> None:
        """The record as things are now: while the bytes were written, a version before may have been stored, or the
        file renamed. ``before`` are of the same group, with lower numbers."""
        gone_now = self._replaced(closing.file, before)
        if gone_now or closing.draft.saves != closing.saves:
            self._encode(closing)
        self._journal.put(batch, closing.draft.id, closing.raw)
        for replaced in gone_now:
            if replaced.is_unknown_to_store:
                replaced.file.ending()
                self._journal.delete(batch, replaced.id)
            else:  # what is there of it has to go, or is recognised as ours, even if this daemon dies
                gone = msgspec.structs.replace(replaced.record(), unlinked=True)
                self._journal.put(batch, replaced.id, encode(gone))

    def _end(self, closing: Closing) -> None:
        draft = closing.draft
        if closing.spot is not None:
            draft.file.keep_in(closing.spot)
        draft.accept(closing.number)
        if draft.saves != closing.saves:  # it was renamed meanwhile, or its attributes changed
            draft.save(sync=True)
        if not closing.file.unlinked:
            self._accepted(closing.file, draft)
