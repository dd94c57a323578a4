"""Commits again, with right dates, what was dated too far ahead, and what came too late for polls.

A daemon whose clock was wrong, and whose store told no better time, dates commits farther ahead than any mount follows.
Their operations are committed again as links into the same objects, in the same order. Such a commit counts as made at
its LastModified, or (if that is wrong as well) at that of the writer's next one. `fsck --repair` does the same with
commits that became visible when polls were past their time: those count as made at that time.

What always holds (*repeatable*): an operation is left out if its path got another version since, from a commit with a
right date or from a plain object. So a second run, after a crash or on another node, changes nothing: what was
committed again is newer. The objects stay, because names have bytes in them (see `fsck --repair`).

Memory: the paths of the commits made since the first of them. For tasks of one trio loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from lakefs_fuse.commits.archive import parse_commit_key
from lakefs_fuse.commits.change import OPERATIONS_AT_ONCE, Change, is_of_directory, merged
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.hybrid_clock import LATE_NS, NS
from lakefs_fuse.commits.record import (
    COMMITS,
    THIS,
    ObjectRef,
    Operation,
    Put,
    Record,
    Relocate,
    Remove,
    SetAttr,
    Symlink,
    is_of_version,
)
from lakefs_fuse.errors import DamagedCommit, NotFound, PreconditionFailed
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import for_each

REQUESTS_AT_ONCE = 16
logger = logging.getLogger(__name__)

Said: TypeAlias = tuple[str, bool, bool]
"""The subject of an operation: a path, whether it is the directory there, and whether the operation changes only
attributes or the place of bytes."""


@dataclass(frozen=True, slots=True)
class Original:
    """A commit that is dated too far ahead, and when it was made."""

    meta: ObjectMeta
    record: Record
    made_ns: int


@dataclass(slots=True)
class Redated:
    """The outcome of a run. ``originals`` are the keys of the commits; ``operations`` were committed again, and
    ``superseded`` were left out. ``oldest_ns`` is when the first of these commits was made."""

    originals: list[str] = field(default_factory=list)
    operations: int = 0
    superseded: int = 0
    oldest_ns: int = 0


Repeated: TypeAlias = Callable[[Original, Sequence[Operation], int], None]
"""Called with a commit, those of its operations that were committed again, and their new time."""


def ignore(_original: Original, _operations: Sequence[Operation], _time: int) -> None:
    """Do nothing, for callers that keep no names."""


IsKnown: TypeAlias = Callable[[Operation, int], bool]
"""Whether an operation of a commit of this time need not be committed again."""


def is_unknown(_operation: Operation, _time: int) -> bool:
    """Return False, for callers that know no names."""
    return False


class Redater:
    """Commits again what was dated too far ahead, or came too late: see the module's head."""

    def __init__(self, log: CommitLog) -> None:
        self._log, self._clock = log, log.clock
        self._newer: dict[Said, int] = {}
        self._waiting: list[tuple[Original, list[Operation]]] = []

    async def run(self, writers: Collection[str] | None = None, *, repeated: Repeated = ignore) -> Redated:
        """Commit again what these writers (None: all) have dated too far ahead. Raises LakeError; what was done by then
        stays."""
        found = await self._find(writers)
        return await self.repeat(found, self._times_made(found), repeated=repeated)

    async def repeat(
        self,
        found: Sequence[ObjectMeta],
        made: Mapping[str, int],
        *,
        is_known: IsKnown = is_unknown,
        repeated: Repeated = ignore,
    ) -> Redated:
        """Commit again what these commits say, and no later one does: see the module's head. ``made`` is when each was
        made, by key. What ``is_known`` to be in effect, or superseded, is left out. Raises LakeError; what was done by
        then stays."""
        done = Redated()
        if not found:
            return done
        done.oldest_ns = min(made.values())
        await self.read_newer(done.oldest_ns)
        for meta in found:
            try:
                record = await self._log.fetch(meta)
                record = replace(record, operations=list(record.operations))  # decoded once: `id` tells them apart
            except (NotFound, PreconditionFailed, DamagedCommit) as error:
                logger.error("commit %s cannot be committed again: %s", meta.key, error)
                continue
            original = Original(meta, record, made[meta.key])
            kept = [each for each in await self._still_newest(original) if not is_known(each, record.time)]
            done.originals.append(meta.key)
            done.operations += len(kept)
            done.superseded += len(record.operations) - len(kept)
            self._waiting.append((original, kept))
            if sum(len(operations) for _, operations in self._waiting) >= OPERATIONS_AT_ONCE:
                await self._commit(repeated)
        await self._commit(repeated)
        return done

    async def _find(self, writers: Collection[str] | None) -> list[ObjectMeta]:
        """Return the commits of these writers that are dated too far ahead, in the order of their times."""
        found: list[ObjectMeta] = []
        async for page in self._log.list_since(self._clock.ahead_ns() + 1):
            for meta in page.objects:
                named = parse_commit_key(meta.key)
                if named is not None and (writers is None or named[1] in writers):
                    found.append(meta)
        return sorted(found, key=lambda meta: meta.key)

    def _times_made(self, found: Sequence[ObjectMeta]) -> dict[str, int]:
        latest_ns: dict[str, int] = {}
        made: dict[str, int] = {}
        now_ns = self._clock.wall_ns()
        for meta in reversed(found):
            named = parse_commit_key(meta.key)
            writer = named[1] if named is not None else ""
            known_ns = latest_ns.get(writer, now_ns)
            made[meta.key] = latest_ns[writer] = min(meta.mtime_ns, known_ns)
        return made

    async def read_newer(self, since_ns: int) -> None:
        """Read what commits with right dates change, from a time on. Raises LakeError."""
        metas: list[ObjectMeta] = []
        last = f"{COMMITS}{self._clock.ahead_ns() + 1:016x}"
        async for page in self._log.list_since(since_ns):
            metas += [meta for meta in page.objects if meta.key < last and parse_commit_key(meta.key) is not None]

        async def read(meta: ObjectMeta) -> None:
            try:
                record = await self._log.fetch(meta)
            except (NotFound, PreconditionFailed, DamagedCommit):
                return
            for operation in record.operations:
                said = _said(operation)
                self._newer[said] = max(record.time, self._newer.get(said, 0))

        await for_each(metas, read, REQUESTS_AT_ONCE)

    async def _still_newest(self, original: Original) -> list[Operation]:
        """Return the operations on paths that got no other version since. Raises LakeError."""
        since_ns = original.made_ns + NS - 1  # LastModified is in whole seconds
        left = [each for each in original.record.operations if not self.is_superseded(each, since_ns)]
        replaced: set[tuple[str, str]] = set()

        async def ask(operation: Put | Symlink | Remove) -> None:
            there = await self._log.find(operation.path)
            if there is not None and there.etag != operation.hides and there.mtime_ns > since_ns:
                replaced.add((operation.path, operation.hides))

        of_names = [each for each in left if isinstance(each, Put | Symlink | Remove) and not is_of_directory(each)]
        await for_each(of_names, ask, REQUESTS_AT_ONCE)
        gone = {id(each) for each in of_names if (each.path, each.hides) in replaced}
        return [each for each in left if id(each) not in gone]

    def is_superseded(self, operation: Operation, since_ns: int) -> bool:
        """Return whether a commit that was read is later than ``since_ns`` and changes what the operation changes."""
        if isinstance(operation, Put | Relocate) and is_of_version(operation):
            return False
        path, is_directory, is_attributes = _said(operation)
        newer = self._newer.get((path, is_directory, False), 0)
        if is_attributes:
            newer = max(newer, self._newer.get((path, is_directory, True), 0))
        return newer > since_ns

    async def _commit(self, repeated: Repeated) -> None:
        """Commit the operations that wait, as one commit, and call ``repeated`` for each original. A commit that took
        so long that polls may be past its time is followed by another one, of what no other commit changed since."""
        waiting, self._waiting = self._waiting, []
        changes = [
            linked(ObjectRef(original.meta.key, original.meta.etag, original.meta.size), original.record, operations)
            for original, operations in waiting
            if operations
        ]
        again = merged(changes, self._log.writer, self._clock.now())
        while again.operations:
            this = await self._log.put_record(again)
            if self._clock.wall_ns() - again.time <= LATE_NS:
                break
            change = linked(this, again, await still_newest(self._log, again))
            again = replace(again, time=self._clock.now(), objects=change.objects, operations=change.operations)
        for original, operations in waiting:
            repeated(original, operations, again.time)


async def still_newest(log: CommitLog, record: Record) -> list[Operation]:
    """Return the operations of a commit on paths that no later commit changes. Raises LakeError."""
    redater = Redater(log)
    await redater.read_newer(record.time)
    return [each for each in record.operations if not redater.is_superseded(each, record.time)]


def _said(operation: Operation) -> Said:
    return operation.path, is_of_directory(operation), isinstance(operation, SetAttr | Relocate)


def linked(this: ObjectRef, record: Record, operations: Iterable[Operation]) -> Change:
    """Return operations of a commit's record as a change. What is in the commit itself, ``this``, becomes links into
    it."""
    last = len(record.objects)
    said: list[Operation] = []
    for operation in operations:
        if isinstance(operation, Put | SetAttr | Relocate) and operation.object == THIS:
            operation = replace(operation, object=last)
        if isinstance(operation, Relocate) and operation.from_object == THIS:
            operation = replace(operation, from_object=last)
        said.append(operation)
    return Change(operations=said, objects=[*record.objects, this])
