"""Changes of names made here that are in no commit yet, in the order in which they were made.

What always holds:

* *journal first*: a change is in the database before anything shows it, and leaves it once its commit is in the store;
* *applied once*: a row says which change may not be in effect yet, and goes once it is, so that the next daemon puts no
  change in effect over what others did after it;
* *reserved keys*: from the moment a change is journaled that dooms an object at another path than its own, until that
  change is in the store, nobody writes to the object's key: other nodes still find the bytes of a name there.

Trio thread only. After a crash `load` has every change that was journaled.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from lakefs_fuse.commits.change import Change, Sending
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import Deletion, SequenceRows, SingleRow


class ChangeJournal:
    """See the module's head. Changes are known by their sequence numbers."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._rows = SequenceRows(database, schema.CHANGE, Change)
        self._sending_row = SingleRow(database, schema.SINGLE_SENDING, Sending)
        self.sending: Sending | None = None
        """The commit that is on its way, or may be in the store."""
        self.changes: dict[int, Change] = {}
        """In ascending order; changed by the methods here only."""
        self.unapplied = 0
        """The number of the newest change, as long as that may not be in effect, else 0."""
        self.mentioned: dict[int, frozenset[str]] = {}
        """Keys that changes mention: see `Change.mentioned`."""
        self.newest = 0
        """The last sequence number that was given out."""
        self._reserving: dict[int, list[str]] = {}
        self._reserved: dict[str, int] = {}
        """Keys, with the newest change that reserves them."""

    def load(self) -> None:
        """Read what the last daemon left; called once."""
        for sequence, change in self._rows.items():
            self._add(sequence, change)
        unapplied = self.database.get(schema.SINGLE_UNAPPLIED)
        self.unapplied = 0 if unapplied is None else schema.NUMBER.unpack(unapplied)[0]
        self.sending = self._sending_row.get()
        if self.sending is not None:
            self.newest = max([self.newest, *self.sending.sequences])

    # -- the commit on its way

    def begin_sending(self, sending: Sending) -> None:
        """Raises CacheError."""
        self._sending_row.set(sending)
        self.sending = sending

    def end_sending(self) -> None:
        """What became of the commit is known here. Raises CacheError."""
        if self.sending is not None:
            self._sending_row.set(None)
            self.sending = None

    def pass_over_sending(self) -> None:
        """The store does not have the commit now. Its row stays: the next daemon asks once more."""
        self.sending = None

    # -- reading

    @property
    def operations(self) -> int:
        return sum(len(change.operations) for change in self.changes.values())

    @property
    def newest_after(self) -> int:
        """The newest number of write-back that a change names."""
        return max((change.after for change in self.changes.values()), default=0)

    def reserves(self, key: str) -> bool:
        """See *reserved keys* in the module's head."""
        return key in self._reserved

    # -- changing

    def append(self, change: Change, batch: Batch) -> int:
        """Commit ``batch`` with the change; returns its number. `end_applying` follows once it is in effect. Raises
        CacheError; then nothing happened."""
        sequence = self.newest + 1
        self._rows.put(batch, sequence, change)
        batch.rows[schema.SINGLE_UNAPPLIED] = schema.NUMBER.pack(sequence)
        self.database.commit(batch)
        self._add(sequence, change)
        self.unapplied = sequence
        return sequence

    def end_applying(self) -> None:
        """All that is journaled is in effect. Raises CacheError."""
        if self.unapplied:
            self.database.commit(Batch({schema.SINGLE_UNAPPLIED: None}))
            self.unapplied = 0

    def _add(self, sequence: int, change: Change) -> None:
        self.newest = max(self.newest, sequence)
        self.changes[sequence], self.mentioned[sequence] = change, change.mentioned()
        if keys := change.leaving():
            self._reserving[sequence] = keys
            self._reserved |= dict.fromkeys(keys, sequence)

    def replace(self, batch: Batch, sequence: int, change: Change) -> None:
        self.changes[sequence], self.mentioned[sequence] = change, change.mentioned()
        self._rows.put(batch, sequence, change)

    def delete(self, batch: Batch, sequences: Collection[int]) -> None:
        """The changes are in the store; followed by `forget` once ``batch`` is committed."""
        self._rows.delete(batch, *sequences)

    def forget(self, sequences: Collection[int]) -> None:
        for sequence in sequences:
            self.changes.pop(sequence, None)
            self.mentioned.pop(sequence, None)
            for key in self._reserving.pop(sequence, ()):
                if self._reserved.get(key) == sequence:
                    del self._reserved[key]

    def waive_deletions(self, key: str) -> list[Deletion]:
        """An object that changes were to delete gets new bytes: they will not. Raises CacheError."""
        waived: list[Deletion] = []
        for sequence, change in self.changes.items():
            kept = [doomed for doomed in change.doomed if doomed.key != key]
            if len(kept) < len(change.doomed):
                waived += [doomed for doomed in change.doomed if doomed.key == key]
                batch = Batch()
                self.replace(batch, sequence, replace(change, doomed=kept))
                self.database.commit(batch)
        return waived
