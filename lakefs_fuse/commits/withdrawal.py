"""Withdraws journaled operations on names of which other nodes have stored newer versions.

A journaled change is about the versions that its node knew when it was made, but its commit is dated when it is sent:
under write-back seconds later, and after an outage, a crash or a suspension days later. Sent as it is, it would count
over everything that others have stored at its names in between.

What always holds:

* *newer versions stay*: no operation is sent that would remove or replace a version which this node knew of only after
  the operation was journaled. A change that is older than LATE_NS is sent only after a poll, and after the store was
  asked for plain objects at its names, which commits need not mention;
* *bytes exist*: a rename that is older than that, or was journaled by an earlier daemon, or when this one had not heard
  of others for that long, is withdrawn if another node has deleted the object with the bytes. Then the file is under
  its old name what other nodes see there, perhaps nothing;
* *versions only*: what another node removed, or changed in place, withdraws nothing. A removal that names one plain
  object is withdrawn only if that was put there again, a statement where a file is (`Change.ahead`) only if it names a
  plain object that another node has replaced or removed since: it would bring that back.

Trio thread only; the caller holds the lock of the committer. A crash while something is withdrawn leaves the journaled
change, and the next daemon withdraws it again.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping

from lakefs_fuse.commits.applier import Applier
from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.change_journal import ChangeJournal
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.hybrid_clock import LATE_NS
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import PENDING
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import is_copy
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import for_each

NS = 1_000_000_000
REQUESTS_AT_ONCE = 16
PATHS_LOGGED_MAX = 3
logger = logging.getLogger(__name__)

CatchUp = Callable[[float], Awaitable[object]]
"""As `Poller.catch_up`."""


class Withdrawal:
    """Withdraws journaled operations before they are sent: see the module's head."""

    def __init__(
        self, log: CommitLog, applier: Applier, journal: ChangeJournal, catch_up: CatchUp, metrics: CommitMetrics
    ) -> None:
        self._log, self._applier, self._journal = log, applier, journal
        self._catch_up, self._metrics = catch_up, metrics

    def late(self, sequences: Iterable[int]) -> list[int]:
        """Return which of these changes are so old, or about names of which so much may have been unknown, that the
        store must be asked before they are sent."""
        now_ns, changes = self._log.clock.wall_ns(), self._journal.changes
        is_away = now_ns - self._applier.heard_ns > LATE_NS
        since = max(now_ns - LATE_NS, self._applier.away_until_ns)
        return [each for each in sequences if is_away or changes[each].made < since]

    async def ask(self, sequences: Iterable[int]) -> None:
        """Hear of what other nodes have committed, and withdraw operations at whose names another client has stored a
        plain object since, and renames of files whose bytes are gone. Raises LakeError."""
        await self._catch_up(LATE_NS / NS)
        await self._withdraw_over_objects({sequence: self._journal.changes[sequence] for sequence in sequences})
        await self._withdraw_without_bytes({sequence: self._journal.changes[sequence] for sequence in sequences})

    def withdraw_overtaken(self, sequences: Iterable[int]) -> None:
        """Withdraw operations on names of which other nodes have committed newer versions. Raises CacheError."""
        changes = {sequence: self._journal.changes[sequence] for sequence in sequences}
        if self._applier.commits.newest() > min((change.made for change in changes.values()), default=math.inf):
            for sequence, change in changes.items():
                self._withdraw(sequence, change, self._applier.replaced_since(change, self._journal.sent))

    def withdraw_unapplied(self, sequence: int) -> None:
        """As `withdraw_overtaken`, for a change that is not in effect, because all names were read again."""
        change, sending = self._journal.changes[sequence], self._journal.sending
        own = [*self._journal.sent, *([sending.time] if sending is not None else [])]
        self._drop(sequence, change, self._applier.rows_since(change, own))

    async def find_overtaken(self, change: Change) -> set[str]:
        """Return the paths at which another client has stored a plain object since the change was made, which the
        change would replace or remove. Raises LakeError."""
        return _overtaken(change, await self._newer_objects(change.replacing(), change.made))

    async def _withdraw_over_objects(self, changes: Mapping[int, Change]) -> None:
        """Withdraw operations at whose names another client has stored a plain object since they were journaled."""
        paths = {path for change in changes.values() for path in change.replacing()}
        objects = await self._newer_objects(paths, min(change.made for change in changes.values()))
        for sequence in changes:
            change = self._journal.changes[sequence]
            self._withdraw(sequence, change, _overtaken(change, objects))

    async def _newer_objects(self, paths: Iterable[str], time: int) -> dict[str, ObjectMeta]:
        """Return the plain objects at some paths that were stored after a time, and may be files."""
        below: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            below[path.rpartition("/")[0]].append(path)
        found: list[ObjectMeta] = []

        async def find(directory: str) -> None:
            found.extend(meta for meta in await self._log.find_each(below[directory]) if meta.mtime_ns > time)

        newer: dict[str, ObjectMeta] = {}

        async def ask(path: str) -> None:  # a listing does not say whether it is a copy, or belongs to another name
            there = await self._log.find(path)
            if there is None or is_copy(there) or self._applier.is_of_renamed(there):
                return
            if not self._applier.is_gone(path, there.etag):
                newer[path] = there

        await for_each(list(below), find, REQUESTS_AT_ONCE)
        await for_each([meta.key for meta in found], ask, REQUESTS_AT_ONCE)
        return newer

    async def _withdraw_without_bytes(self, changes: Mapping[int, Change]) -> None:
        """Withdraw renames of files whose objects are no longer in the store, as far as it is known what their old
        names are now."""
        missing: set[str] = set()

        async def ask(key: str) -> None:
            if await self._log.find(key) is None:
                missing.add(key)

        keys = {ref.key for change in changes.values() for ref in change.referred().values()}
        await for_each(sorted(keys), ask, REQUESTS_AT_ONCE)
        for sequence in changes if missing else ():
            change = self._journal.changes[sequence]
            lost = {path for path, ref in change.referred().items() if ref.key in missing}
            sources = change.sources_of(lost)
            if sources and self._applier.have_histories(sources):
                self._withdraw(sequence, change, lost | sources)

    def _withdraw(self, sequence: int, change: Change, paths: set[str]) -> None:
        """Withdraw operations on files at these paths. The journal is changed last: see the module's head."""
        if gone := change.about(paths):
            self._applier.withdraw(change, gone, PENDING | sequence)
            self._drop(sequence, change, paths)

    def _drop(self, sequence: int, change: Change, paths: set[str]) -> None:
        """Drop operations on files at these paths from a journaled change."""
        gone, batch = change.about(paths), Batch()
        if not gone:
            return
        self._journal.replace(batch, sequence, change.without(gone))
        self._journal.database.commit_volatile(batch)
        self._metrics.withdrawn += len(gone)
        logger.warning(
            "%s left out, because another node has stored newer versions, or deleted the bytes, since then: %s",
            counted(len(gone), "change of a name that was made here is", "changes of names that were made here are"),
            ", ".join(sorted(paths)[:PATHS_LOGGED_MAX]),
        )  # fmt: skip


def _overtaken(change: Change, objects: Mapping[str, ObjectMeta]) -> set[str]:
    """Return the paths at which the change would replace or remove one of these objects, which is newer."""
    return {
        path
        for path, hides in change.replacing().items()
        if (there := objects.get(path)) is not None and there.etag != hides and there.mtime_ns > change.made
    }
