"""The journal of changes of names that this node made and that are in no commit yet, in order.

What always holds:

* *journal first*: a change is in the database before anything shows it, and leaves it once its commit is in the store.
  A volatile one is in memory while the disk is full;
* *applied once*: a row names the newest change as long as it may not be in effect, and is deleted once it is. So the
  next daemon applies no change over what other nodes did after it;
* *reserved keys*: a change that dooms an object at a key other than its own paths reserves that key until the change is
  in the store. This node does not write to the key meanwhile: other nodes still find the bytes of a name there.

Trio thread only. After a crash `load` reads every change that was journaled, without volatile ones in memory.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from msgspec.structs import replace

from lakefs_fuse.commits.change import Change, Sending
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import SequenceRows, SingleRow

SENT_MAX = 4096
"""Times in `ChangeJournal.sent`: 32 KB. A daemon sends one commit a second, and older changes are rarely held for so
long while others are sent."""


class ChangeJournal:
    """The changes in the database and in memory, by sequence number: see the module's head."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._rows = SequenceRows(database, schema.CHANGE, Change)
        self._sending_row = SingleRow(database, schema.SINGLE_SENDING, Sending)
        self.sending: Sending | None = None
        """The commit that is on its way, or may be in the store."""
        self.changes: dict[int, Change] = {}
        """By number, in ascending order. Only the methods here change it."""
        self.unapplied = 0
        """The number of the newest change while that may not be in effect, else 0."""
        self.mentioned: dict[int, frozenset[str]] = {}
        """Keys that changes mention, by number: see `Change.mentioned`."""
        self.newest = 0
        """The newest sequence number that a change got."""
        self.sent: list[int] = []
        """Times of the commits that contained journaled changes on which others build that are still in the journal."""
        self.newest_after = 0
        """The newest number of an acknowledged version that a change waits for; 0 if none does."""
        self._reserving: dict[int, list[str]] = {}
        self.reserved: dict[str, int] = {}
        """Reserved keys, for readers, each with the number of the newest change that reserves it."""

    def load(self) -> None:
        """Read what the last daemon left. Call it once."""
        for sequence, change in self._rows.items():
            self._add(sequence, change)
        sent = self.database.get(schema.SINGLE_SENT) or b""
        self.sent = [time for (time,) in schema.NUMBER.iter_unpack(sent)]
        unapplied = self.database.get(schema.SINGLE_UNAPPLIED)
        self.unapplied = 0 if unapplied is None else schema.NUMBER.unpack(unapplied)[0]
        self.sending = self._sending_row.get()
        if self.sending is not None:
            self.newest = max([self.newest, *self.sending.sequences])

    # -- the commit on its way

    def begin_sending(self, sending: Sending) -> None:
        """Record that a commit is about to be sent. Raises CacheError."""
        self._sending_row.set(sending)
        self.sending = sending

    def end_sending(self) -> None:
        """Record that the outcome of the commit on its way is known here, in memory while the disk is full. Raises
        CacheError."""
        if self.sending is not None:
            self.database.commit_volatile(Batch({schema.SINGLE_SENDING: None}))
            self.sending = None

    def pass_over_sending(self) -> None:
        """Treat the commit as one that the store does not have. Its row stays, so that the next daemon asks again."""
        self.sending = None

    # -- reading

    @property
    def operations(self) -> int:
        return sum(len(change.operations) for change in self.changes.values())

    # -- changing

    def append(self, change: Change, batch: Batch, *, volatile: bool = False) -> int:
        """Write ``batch`` with the change, and return its number. ``volatile`` as in `Committer.enqueue`. Call
        `end_applying` once the change is in effect. Raises CacheError; then nothing happened."""
        sequence = self.newest + 1
        self._rows.put(batch, sequence, change)
        batch.rows[schema.SINGLE_UNAPPLIED] = schema.NUMBER.pack(sequence)
        (self.database.commit_volatile if volatile else self.database.commit)(batch)
        self._add(sequence, change)
        self.unapplied = sequence
        return sequence

    def end_applying(self) -> None:
        """Record that all journaled changes are in effect: in memory, as their rows, while the disk is full. Raises
        CacheError."""
        if self.unapplied:
            self.database.commit_volatile(Batch({schema.SINGLE_UNAPPLIED: None}))
            self.unapplied = 0

    def _add(self, sequence: int, change: Change) -> None:
        self.newest = max(self.newest, sequence)
        self._set(sequence, change)
        if keys := change.leaving():
            self._reserving[sequence] = keys
            self.reserved |= dict.fromkeys(keys, sequence)

    def replace(self, batch: Batch, sequence: int, change: Change) -> None:
        """Put a change in the place of the one with that number, once ``batch`` is committed."""
        self._rows.put(batch, sequence, change)
        batch.committed.append(partial(self._set, sequence, change))

    def _set(self, sequence: int, change: Change) -> None:
        self.newest_after = max(self.newest_after, change.after)  # a replacement never waits for less
        self.changes[sequence], self.mentioned[sequence] = change, change.mentioned()

    def delete(self, batch: Batch, sequences: Collection[int]) -> None:
        """Delete the rows of changes that are in the store. Call `forget` once ``batch`` is committed."""
        self._rows.delete(batch, *sequences)

    def record_sent(self, batch: Batch, sequences: Collection[int], time: int) -> None:
        """Record that a commit of this time contains these changes, which are about to be forgotten.

        What is sent ahead does not count: it has replaced what other changes said of its names."""
        are_ahead = all(self.changes[each].ahead for each in sequences if each in self.changes)
        sent = self.sent if are_ahead else [*self.sent, time][-SENT_MAX:]
        sent = sent if len(self.changes) > len(sequences) else []
        if sent != self.sent:
            batch.rows[schema.SINGLE_SENT] = b"".join(map(schema.NUMBER.pack, sent)) or None
            batch.committed.append(partial(setattr, self, "sent", sent))

    def forget(self, sequences: Collection[int]) -> None:
        for sequence in sequences:
            self.changes.pop(sequence, None)
            self.mentioned.pop(sequence, None)
            for key in self._reserving.pop(sequence, ()):
                if self.reserved.get(key) == sequence:
                    del self.reserved[key]
        self.newest_after = max((change.after for change in self.changes.values()), default=0)

    def waive_deletions(self, batch: Batch, key: str, etags: Collection[str]) -> None:
        """Keep changes from deleting these versions of the object at ``key``, which new bytes have replaced. Changes
        that are being sent count as well."""
        for sequence, change in self.changes.items():
            kept = [doomed for doomed in change.doomed if doomed.key != key or doomed.etag not in etags]
            if len(kept) < len(change.doomed):
                self.replace(batch, sequence, replace(change, doomed=kept))
