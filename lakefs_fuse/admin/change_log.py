"""The change log of a lake: which names were changed, by which writer and when, as the commits in the store tell.

What always holds:

* *bounded memory*: of a listing the keys of COMMITS_MAX commits are kept, of records FETCHED_MAX at a time, or one that
  is larger than FETCHED_BYTES_MAX, and of entries as many as were asked for; of each commit the tail is read;
* *each commit once*: `follow` shows every commit that becomes visible after `show` listed the last WINDOW_NS, and none
  that was there then.

It shows what changed for users: moves of bytes (`Relocate`) are left out, and the operations of a rename are one entry.
Reads only, so an end at any moment leaves nothing. Tasks of one trio loop.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence

import trio

from lakefs_fuse.admin.work import Work
from lakefs_fuse.commits.archive import RECORD_BYTES_MAX, commit_key, commit_time, parse_commit_key
from lakefs_fuse.commits.commit_log import CommitLog, LargeRecord
from lakefs_fuse.commits.hybrid_clock import WINDOW_NS, HybridClock
from lakefs_fuse.commits.index.index import collected_before
from lakefs_fuse.commits.record import (
    COMMITS,
    OBJECTS,
    THIS,
    Mkdir,
    Operation,
    Put,
    Record,
    Relocate,
    Remove,
    SetAttr,
    Symlink,
)
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.control.worker_protocol import LogEntry
from lakefs_fuse.errors import DamagedCommit, LakeError, NotFound
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import for_each

FETCHED_MAX = 16
"""Records in memory at a time, fetched concurrently."""
FETCHED_BYTES_MAX = 4 << 20
"""Of each of them; a larger one is fetched when its turn has come, and is the only one."""
COMMITS_MAX = 10_000
"""Keys of commits in memory, some 4 MB, and a page more."""
SPAN_NS_FIRST = 3600 * 1_000_000_000
"""The last entries are looked for backwards, first in so much time; in SPAN_FACTOR times as much with each step, and
in as much less where there are more than COMMITS_MAX commits in it."""
SPAN_NS_MIN = 1_000_000_000
SPAN_FACTOR = 4
FIRST_KEYS = 10
ENTRIES_BETWEEN_PAUSES = 1000
READER = "00000000"
"""The writer of a log that writes nothing."""


async def run_log(work: Work, args: protocol.LogArgs) -> protocol.Finished:
    log = CommitLog(work.client, HybridClock(work.node.clock), work.node.threads, writer=READER)
    await log.read_time()
    change_log = ChangeLog(work.client, log, work.path, show=work.show, note=work.note)
    await change_log.show(args.count)
    if args.follow:
        await change_log.follow(args.refresh_s)
    return work.finished({}, "", failed=change_log.unreadable > 0)


class ChangeLog:
    """See the module's head. Entries that have to do with ``path`` go to ``show``, the oldest first."""

    def __init__(
        self,
        client: StoreClient,
        log: CommitLog,
        path: str,
        *,
        show: Callable[[protocol.LogStart | LogEntry], None],
        note: Callable[[str], None],
    ) -> None:
        self._client, self._log, self._path, self._show, self._note = client, log, path, show, note
        self._known: set[str] = set()
        """Keys of the commits in the window of the last poll: 12,000 where 100 are made in a second."""
        self._polled_ns = 0
        """The time before which the last poll that came to its end has seen all commits but late ones."""
        self.unreadable = 0
        """Commits that cannot be used, of which `note` was told."""

    async def show(self, count: int | None) -> None:
        """Show since when the log reaches, then its last ``count`` entries, or all. Raises LakeError."""
        first_ns = await self._show_start()
        self._polled_ns = self._log.clock.wall_ns()
        window_ns = max(0, self._polled_ns - WINDOW_NS)
        recent: list[ObjectMeta] = []
        async for page in self._log.list_since(window_ns):
            recent = _newest([*recent, *page.objects])
            self._known.update(meta.key for meta in page.objects)
        if count is None:
            await self._show_all(_first_key(window_ns))
        elif count:
            async with contextlib.aclosing(self._backwards(recent, window_ns, first_ns)) as pieces:
                await self._show_last(pieces, count)

    async def follow(self, refresh_s: float) -> None:
        """Show what is committed from now on, until cancelled; a store that is away is noted once, and asked again."""
        failing = False
        while True:
            await trio.sleep(refresh_s)
            try:
                await self._poll()
                failing = False
            except LakeError as error:
                if not failing:
                    self._note(f"looking for new commits failed, and is tried again: {error}")
                failing = True

    async def _show_start(self) -> int:
        """Show since when the log tells everything; the time of the first commit that is there."""
        horizon_ns = await collected_before(self._client)
        page = await self._client.list_page(COMMITS, keys_max=FIRST_KEYS)
        times = [time_ns for meta in page.objects if (time_ns := commit_time(meta.key))]
        first_ns = min(times, default=0)
        self._show(protocol.LogStart(since_ns=horizon_ns or first_ns, is_whole=not horizon_ns))
        return first_ns

    async def _show_all(self, window_key: str) -> None:
        """Show all entries but those of commits that become visible meanwhile."""
        async for page in self._log.list_since(0):
            listed = _newest(page.objects)
            there = [meta for meta in listed if meta.key < window_key or meta.key in self._known]
            for at in range(0, len(there), FETCHED_MAX):
                await self._show_commits(there[at : at + FETCHED_MAX])

    async def _show_last(self, pieces: AsyncGenerator[Sequence[ObjectMeta], None], count: int) -> None:
        """Show the last ``count`` entries of commits that come in pieces, the newest piece first."""
        last: deque[LogEntry] = deque()
        async for commits in pieces:
            for end in range(len(commits), 0, -FETCHED_MAX):
                found = deque[LogEntry](maxlen=count - len(last))
                async for record in self._records(commits[max(0, end - FETCHED_MAX) : end]):
                    async for entry in self._entries(record):
                        found.append(entry)
                last.extendleft(reversed(found))
                if len(last) == count:
                    break
            if len(last) == count:
                break
        for entry in last:
            self._show(entry)

    async def _backwards(
        self, commits: Sequence[ObjectMeta], begin_ns: int, first_ns: int
    ) -> AsyncGenerator[Sequence[ObjectMeta], None]:
        """Commits in pieces, the newest piece first, and in it the newest commit last. ``commits`` are those from
        ``begin_ns`` on, or the last of them; ``first_ns`` is the time of the first commit."""
        span_ns = SPAN_NS_FIRST
        while True:
            yield commits
            is_cut = len(commits) == COMMITS_MAX
            end_key = commits[0].key if is_cut else _first_key(begin_ns)
            end_ns = commit_time(commits[0].key) if is_cut else begin_ns
            if not first_ns or end_ns < first_ns:
                return
            begin_ns = max(0, end_ns - span_ns)
            commits = await self._list(begin_ns, end_key)
            span_ns = max(SPAN_NS_MIN, span_ns // SPAN_FACTOR) if len(commits) == COMMITS_MAX else SPAN_FACTOR * span_ns

    async def _list(self, begin_ns: int, end_key: str) -> list[ObjectMeta]:
        """The last COMMITS_MAX commits from a time on, before a key."""
        found: list[ObjectMeta] = []
        async for page in self._log.list_since(begin_ns):
            found = _newest([*found, *(meta for meta in page.objects if meta.key < end_key)])
            if page.objects and page.objects[-1].key >= end_key:
                break  # every store lists names of this form in the order of time
        return found

    async def _poll(self) -> None:
        """Show the commits that are new since the last poll. Raises LakeError."""
        polled_ns, listed = self._log.clock.wall_ns(), set[str]()
        async for page in self._log.list_since(max(0, self._polled_ns - WINDOW_NS)):
            listed.update(meta.key for meta in page.objects)
            new = [meta for meta in _newest(page.objects) if meta.key not in self._known]
            for at in range(0, len(new), FETCHED_MAX):
                await self._show_commits(new[at : at + FETCHED_MAX], self._known)
                self._known.update(meta.key for meta in new[at : at + FETCHED_MAX])
        self._known, self._polled_ns = listed, polled_ns

    async def _show_commits(self, commits: Sequence[ObjectMeta], shown: set[str] | None = None) -> None:
        """Show a few commits, and add the key of each to ``shown``. Raises LakeError, perhaps after some of them."""
        async for record in self._records(commits):
            async for entry in self._entries(record):
                self._show(entry)
            if shown is not None:
                shown.add(commit_key(record.time, record.writer))

    async def _records(self, commits: Sequence[ObjectMeta]) -> AsyncIterator[Record]:
        """The records of a few commits in their order, but for those that are gone or cannot be used."""
        records: dict[str, Record | None] = {}

        async def fetch(meta: ObjectMeta) -> None:
            with contextlib.suppress(LargeRecord):
                records[meta.key] = await self._fetch(meta, FETCHED_BYTES_MAX)

        if commits:
            await for_each(commits, fetch, len(commits))
        for meta in commits:
            record = records.pop(meta.key) if meta.key in records else await self._fetch(meta, RECORD_BYTES_MAX)
            if record is not None:
                yield record

    async def _fetch(self, meta: ObjectMeta, bytes_max: int) -> Record | None:
        try:
            return await self._log.fetch(meta, bytes_max=bytes_max)
        except NotFound:
            return None  # collected meanwhile
        except DamagedCommit as error:
            self.unreadable += 1
            self._note(f"a commit is left out: {error}")
            return None

    async def _entries(self, record: Record) -> AsyncIterator[LogEntry]:
        """The entries of a record that have to do with the path."""
        for number, entry in enumerate(entries_of(record), 1):
            if _is_about(entry, self._path):
                yield entry
            if not number % ENTRIES_BETWEEN_PAUSES:
                await trio.lowlevel.checkpoint()


def _first_key(time_ns: int) -> str:
    """Commits from this time on have greater keys."""
    return f"{COMMITS}{time_ns:016x}"


def _newest(metas: Iterable[ObjectMeta]) -> list[ObjectMeta]:
    """The last COMMITS_MAX commits among these objects, in their order."""
    return sorted((meta for meta in metas if parse_commit_key(meta.key)), key=lambda meta: meta.key)[-COMMITS_MAX:]


def _is_about(entry: LogEntry, path: str) -> bool:
    """An entry is of a name at or below a path, or of a rename to or from there, that of a directory above included."""
    if _is_below(entry.path, path) or (entry.source and _is_below(entry.source, path)):
        return True
    return entry.operation == "rename" and (_is_below(path, entry.path) or _is_below(path, entry.source))


def _is_below(path: str, directory: str) -> bool:
    return not directory or path == directory or path.startswith(directory + "/")


# -- entries of one record


def entries_of(record: Record) -> Iterator[LogEntry]:
    """What a record changed, in its order; the operations of a rename are one entry, where the first of them stands.

    Of a name that is put and removed in one go the last says what it is: so an object is announced again whose bytes
    were there before, and so a file ends that another program's object had replaced."""
    moves, shown = _Moves(record), set[int]()
    held: LogEntry | None = None
    for operation in record.operations:
        number = moves.find(operation)
        if number is None:
            entry = _entry_of(record, operation)
        elif number not in shown:
            shown.add(number)
            source, target = record.moves[number]
            entry = _entry(record, "rename", target, source=source)
        else:
            continue
        if entry is None:
            continue
        if held is not None and (held.path, {held.operation, entry.operation}) != (entry.path, {"put", "remove"}):
            yield held
        held = entry
    if held is not None:
        yield held


class _Moves:
    """Which operations of a record are those of its renames."""

    def __init__(self, record: Record) -> None:
        self._moves = record.moves
        self._by_source = {source: number for number, (source, _) in enumerate(record.moves)}
        self._by_target = {target: number for number, (_, target) in enumerate(record.moves)}
        self._made, self._removed = set[str](), set[str]()
        for operation in record.operations if record.moves else ():
            if isinstance(operation, Remove):
                self._removed.add(operation.path)
            elif isinstance(operation, Put | Mkdir | Symlink):
                self._made.add(operation.path)

    def find(self, operation: Operation) -> int | None:
        """The number of the rename: a name below its target has come from below its source, where it is removed, or,
        in an exchange, is another's target."""
        above = operation.path if self._moves else ""
        while above:
            below = operation.path[len(above) :]
            if isinstance(operation, Remove):
                number = self._by_source.get(above)
                if number is not None and self._moves[number][1] + below in self._made:
                    return number
            elif not isinstance(operation, Put) or operation.object != THIS:
                number = self._by_target.get(above)
                if number is not None:
                    source = self._moves[number][0]
                    if source in self._by_target or source + below in self._removed:
                        return number
            above = above.rpartition("/")[0]
        return None


def _entry_of(record: Record, operation: Operation) -> LogEntry | None:
    """None for what moves bytes only."""
    match operation:
        case Put():
            source = record.objects[operation.object].key if operation.object > THIS else ""
            if source.startswith(OBJECTS) or source in ("", operation.path):
                return _entry(record, "put", operation.path, size=operation.size)
            source = "" if source.startswith(RESERVED_PREFIX) else source
            return _entry(record, "link", operation.path, size=operation.size, source=source)
        case Mkdir():
            return _entry(record, "mkdir", operation.path)
        case Symlink():
            return _entry(record, "symlink", operation.path, target=operation.target)
        case Remove():
            return _entry(record, "rmdir" if operation.directory else "remove", operation.path)
        case SetAttr():
            return _entry(record, "setattr", operation.path)
        case Relocate():
            return None


def _entry(
    record: Record, operation: str, path: str, *, size: int | None = None, source: str = "", target: str = ""
) -> LogEntry:
    return LogEntry(
        time_ns=record.time,
        writer=record.writer,
        operation=operation,
        path=path,
        size=size,
        source=source,
        target=target,
    )
