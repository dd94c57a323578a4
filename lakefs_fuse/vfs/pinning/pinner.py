"""The newest checkpoints of path rules (``keep-newest``) stay in the block cache, across remounts as well.

What always holds:

* what is kept follows from three things alone: the rules, the names and places in the tree, and one row in the database
  for each checkpoint that says in which order they became durable. `update_pins` computes it again and moves the pins;
* a checkpoint is unpinned only when `update_pins` has seen a newer complete one;
* kept versions take up at most ``bytes_max``: complete ones first, newest first; what does not fit is counted in
  ``refused_bytes``, said in the log, and evicted like anything else. So are files beyond ``FILES_MAX``.

Which ones count: a file, when it is durable; a directory, when no file in it waits to be stored and it was published by
one rename, or has a success marker, or (where nobody uses markers in this group) a newer one was begun. The newest that
does not count yet is kept besides, as room allows. Names that look temporary never count.

Trio thread only; `update_pins` takes as long as a walk over the kept files, with pauses. Rows are not synced: a crash
may lose the newest of them, and then an older checkpoint stays in place of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass

import msgspec
import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.checkpoints.names import MARKERS, looks_temporary
from lakefs_fuse.config import Rule
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, FileError, LakeError
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.rows import PathRows
from lakefs_fuse.path_rules import translate
from lakefs_fuse.sync.steps import finish_paced
from lakefs_fuse.vfs.namespace.namespace import Namespace

FILES_MAX = 1 << 16
"""Files of kept checkpoints, about 500 bytes of memory each."""
ROWS_MAX = 4096
"""Checkpoints that are remembered. From half of that on, those that are not there are forgotten."""
ROWS_PER_STEP = 100
"""A row takes some 50 µs."""
RECHECK_S = 60.0
"""Removals, and what other nodes did, are seen so late at most."""
DEBOUNCE_S = 0.05
PAUSE_SHARE = 10
"""After a walk nothing is walked for this many times as long: many files that become durable one by one cost little."""
log = logging.getLogger(__name__)


class Row(msgspec.Struct, frozen=True):
    """``sequence`` grows with every checkpoint that became newest; ``whole``: it came by one rename."""

    sequence: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A checkpoint: all at and below ``path``. Of those with one ``group`` the ``keep`` newest stay."""

    group: str
    path: str
    keep: int


class Units:
    """Rules that say ``keep-newest``, compiled. Raises ConfigError for a glob that is none.

    A glob that ends in ``**`` keeps directories: with ``ckpt/**`` every name in ``ckpt`` is one checkpoint, a file or a
    directory with all below it; with ``runs/*/ckpt/**`` those of each run are a group of their own, of which the newest
    are kept. Any other glob keeps single files: with ``ckpt/*.pt`` each file, of those in one directory the newest. As
    for every setting, the last rule that matches a path and says something about it wins; 0 keeps nothing.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = [
            (rule.path, _compile(rule.path), rule.keep_newest) for rule in rules if rule.keep_newest is not None
        ]
        self.any = any(keep for _, _, keep in self._rules)

    def of(self, path: str) -> Unit | None:
        """The checkpoint that the file or directory at ``path`` is, or is in; None where nothing is to be kept."""
        if not self.any:
            return None
        for glob, pattern, keep in reversed(self._rules):
            match = pattern.fullmatch(path)
            if match is not None:
                unit = match["unit"] if "unit" in pattern.groupindex else path
                return Unit(f"{glob}\n{unit.rpartition('/')[0]}", unit, keep) if keep else None
        return None


def _compile(glob: str) -> re.Pattern[str]:
    if glob == "**":
        return re.compile(r"(?P<unit>[^/]+)(?:/.+)?", re.DOTALL)
    if glob.endswith("/**"):
        return re.compile(rf"(?P<unit>{translate(glob[:-3])}/[^/]+)(?:/.+)?", re.DOTALL)
    return re.compile(translate(glob), re.DOTALL)


@dataclass(slots=True)
class KeptStatistics:
    """Of what is kept now. ``missing_bytes`` of its bytes are not in the cache (let go while the file was written, or
    of other nodes); ``refused_bytes`` had no room within the bound."""

    checkpoints: int = 0
    files: int = 0
    bytes: int = 0
    missing_bytes: int = 0
    refused_bytes: int = 0


class Pinner:
    """See the module's head. ``is_dirty`` says whether an entry is, or holds, a file that is not in the store."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        cache: BlockCache,
        units: Units,
        threads: Threads,
        *,
        is_dirty: Callable[[Entry], bool],
        bytes_max: int,
    ) -> None:
        self._db, self._ns, self._cache, self._units = database, namespace, cache, units
        self._threads, self._is_dirty, self._bytes_max = threads, is_dirty, bytes_max
        self._saved = PathRows(database, schema.PIN, Row)
        self._rows: dict[str, Row] = {}
        self._newest: dict[str, str] = {}
        """Of each group, where that is known; so that the next file of a checkpoint costs nothing."""
        self._sequence = 0
        self._pinned: set[Version] = set()
        self._fresh: set[Version] = set()
        """Pinned since the walk of `update_pins` began, which may have passed them by."""
        self._whole: dict[Extent, None] = {}
        """Kept extents that were seen to be in the cache from end to end."""
        self._refused = 0
        self._stale = trio.Event()
        self._one_at_a_time = trio.Lock()
        self.kept = KeptStatistics()
        self.reserved_bytes_max = bytes_max if units.any else 0
        """What `keep-newest` may come to keep."""

    # -- what happens to files

    def published(self, path: str, extent: Extent) -> None:
        """The file at ``path`` became durable just now, and its bytes are in the cache as far as they ever will be."""
        unit = self._units.of(path)
        if unit is None:
            return
        if extent.size and len(self._pinned) < FILES_MAX:
            self._pin(extent.version)
        self._note(unit)

    def renamed(self, moves: Sequence[tuple[str, str]]) -> None:
        """A file or directory has another name, on this node at least, or two have each other's. A listener of the
        tree's event."""
        moved = {
            path: (new + path[len(old) :], row)
            for path, row in self._rows.items()
            for old, new in moves
            if path == old or path.startswith(old + "/")
        }
        batch = Batch()
        for path in moved:
            self._forget(batch, path)
        for after, row in moved.values():
            if self._units.of(after) is not None and after not in self._rows:
                self._put(batch, after, row)
        self._commit(batch)
        for new in sorted((new for _, new in moves), key=self._sequence_of):
            unit = self._units.of(new)
            if unit is not None:
                self._note(unit, whole=unit.path == new)
        if moved:
            self.stale()

    def _sequence_of(self, path: str) -> int:
        """Return the place of a checkpoint in their order; of one that is new here the last."""
        row = self._rows.get(path)
        return self._sequence + 1 if row is None else row.sequence

    async def moved(self, old: Version, new: Version) -> None:
        """The same bytes are another object now: what the cache has of them it has of that. Also without any rule, so
        that what was saved under another name and renamed is read from the cache later on."""
        if old in self._pinned:
            self._pin(new)
        await self._threads.run(self._cache.transfer, old, new)
        self.stale()

    def stale(self) -> None:
        """Look again soon."""
        self._stale.set()

    def _note(self, unit: Unit, *, whole: bool = False) -> None:
        """Something of a checkpoint is new, so it is the newest of its group."""
        row = self._rows.get(unit.path)
        if row is None or self._newest.get(unit.group) != unit.path or (whole and not row.whole):
            self._sequence += 1
            batch = Batch()
            self._put(batch, unit.path, Row(self._sequence, whole or (row is not None and row.whole)))
            self._newest[unit.group] = unit.path
            self._trim(batch, unit)
            self._commit(batch)
        self.stale()

    def _trim(self, batch: Batch, unit: Unit) -> None:
        """A few more are remembered than are kept, for the newest may be removed again."""
        group = [path for path in self._rows if (other := self._units.of(path)) and other.group == unit.group]
        group.sort(key=lambda path: self._rows[path].sequence)
        for path in group[: max(0, len(group) - 2 * unit.keep - 8)]:
            self._forget(batch, path)
        if len(self._rows) > ROWS_MAX:
            self._forget(batch, min(self._rows, key=lambda path: self._rows[path].sequence))

    def _put(self, batch: Batch, path: str, row: Row) -> None:
        self._rows[path] = row
        self._saved.put(batch, path, row)

    def _forget(self, batch: Batch, path: str) -> None:
        self._rows.pop(path, None)
        unit = self._units.of(path)
        if unit is not None and self._newest.get(unit.group) == path:
            del self._newest[unit.group]
        self._saved.delete(batch, path)

    def _commit(self, batch: Batch) -> None:
        try:
            self._db.commit(batch)
        except CacheError as error:  # it is kept until the daemon ends
            log.warning("which checkpoints are the newest could not be noted: %s", error)

    # -- what is kept

    async def load(self) -> None:
        """Keep what the last daemon kept. Before anything is read or written. Raises CacheError."""
        batch = Batch()
        for path, row in self._saved.items():
            self._sequence = max(self._sequence, row.sequence)
            if self._units.of(path) is None:
                self._saved.delete(batch, path)
            else:
                self._rows[path] = row
        self._commit(batch)
        if self._units.any:
            await self.update_pins(measure=False)
            self.stale()

    async def run(self) -> None:
        """Until cancelled."""
        took_s = 0.0
        while self._units.any:
            with trio.move_on_after(RECHECK_S):
                await self._stale.wait()
            await trio.sleep(max(DEBOUNCE_S, PAUSE_SHARE * took_s))
            began = trio.current_time()
            try:
                await self.update_pins()
                took_s = trio.current_time() - began
            except LakeError as error:
                log.warning("which checkpoints to keep could not be found out: %s", error)
            except Exception:
                log.exception("keeping the newest checkpoints")

    async def update_pins(self, *, measure: bool = True) -> None:
        """Pin the checkpoints to keep now, and unpin all others. ``measure`` also looks at what of it is in the cache.
        Waits for another that is under way, which would let go what this one keeps. Raises LakeError."""
        async with self._one_at_a_time:
            await self._update_pins(measure=measure)

    async def _update_pins(self, *, measure: bool) -> None:
        self._stale = trio.Event()
        self._fresh = set()
        found = KeptStatistics()
        wanted: set[Version] = set()
        extents: list[Extent] = []
        room = self._bytes_max
        for path in await finish_paced(self._in_order()):
            kept = False
            async for extent in self._extents(path):
                cost = 0 if extent.version in wanted else extent.version.size
                if cost > room or len(extents) >= FILES_MAX:
                    found.refused_bytes += extent.size
                    continue
                room -= cost
                self._pin(extent.version)
                wanted.add(extent.version)
                extents.append(extent)
                found.files += 1
                found.bytes += extent.size
                kept = True
            found.checkpoints += kept
        for version in self._pinned - wanted - self._fresh:
            self._pinned.remove(version)
            self._cache.unpin(version)
        if measure:
            found.missing_bytes = await self._measure(extents)
        if found.refused_bytes > self._refused:
            log.warning(
                "%d bytes of the newest checkpoints are not kept: at most half of the cache, %d bytes, is for them",
                found.refused_bytes, self._bytes_max,
            )  # fmt: skip
        self._refused = found.refused_bytes
        self.kept = found

    def _pin(self, version: Version) -> None:
        if version not in self._pinned:
            self._cache.pin(version)
            self._pinned.add(version)
            self._fresh.add(version)

    def _in_order(self) -> Generator[None, None, list[str]]:
        """Return checkpoints to keep: those that count, newest first, then those that do not count yet. In steps."""
        groups: dict[str, tuple[int, list[tuple[int, str, Row]]]] = {}
        for number, (path, row) in enumerate(list(self._rows.items()), 1):
            unit = self._units.of(path)
            if unit is not None:
                groups.setdefault(unit.group, (unit.keep, []))[1].append((row.sequence, path, row))
            if not number % ROWS_PER_STEP:
                yield
        counted: list[tuple[int, str]] = []
        begun: list[tuple[int, str]] = []
        absent: list[tuple[int, str]] = []
        for keep, rows in groups.values():
            yield from self._choose(keep, sorted(rows, reverse=True), counted, begun, absent)
        self._forget_absent(absent)
        return [path for _, path in (*sorted(counted, reverse=True), *sorted(begun, reverse=True))]

    def _forget_absent(self, absent: list[tuple[int, str]]) -> None:
        """Forget the oldest checkpoints that are not there, some in each walk, while they would soon take the place of
        others: those of a run that was removed as a whole are followed by none that push them out."""
        count = min(ROWS_PER_STEP, max(0, len(self._rows) - ROWS_MAX // 2))
        batch = Batch()
        for _, path in sorted(absent)[:count]:
            if self._ns.at(path) is None:  # still
                self._forget(batch, path)
        self._commit(batch)

    def _choose(
        self, keep: int, rows: list[tuple[int, str, Row]], counted: list[tuple[int, str]],
        begun: list[tuple[int, str]], absent: list[tuple[int, str]],
    ) -> Generator[None, None, None]:  # fmt: skip
        """Sort the checkpoints of one group, newest first, into the three lists."""
        there: list[tuple[int, str, Row, Entry]] = []
        marked = set[str]()
        for number, (sequence, path, row) in enumerate(rows, 1):
            entry = self._ns.at(path)
            if entry is None:
                absent.append((sequence, path))
            else:
                there.append((sequence, path, row, entry))
                if entry.is_dir and self._has_marker(entry):
                    marked.add(path)
            if not number % ROWS_PER_STEP:
                yield
        left = keep
        for place, (sequence, path, row, entry) in enumerate(there):
            whole = not entry.is_dir or path in marked or row.whole
            open_ended = not whole and (bool(marked) or place == 0)
            if looks_temporary(path.rpartition("/")[2]) or self._is_dirty(entry) or open_ended:
                if left == keep:  # older ones that were never finished are of no use
                    begun.append((sequence, path))
            elif left:
                left -= 1
                counted.append((sequence, path))
            if place % ROWS_PER_STEP == ROWS_PER_STEP - 1:
                yield

    def _has_marker(self, directory: Entry) -> bool:
        return any(self._ns.tree.named(directory.inode, name.encode()) is not None for name in MARKERS)

    async def _extents(self, path: str) -> AsyncIterator[Extent]:
        """Of all files at and below a path that have bytes in the store."""
        top = self._ns.at(path)
        waiting = [top] if top is not None else []
        while waiting:
            entry = waiting.pop()
            for some in self._ns.tree.children_in_steps(entry.inode) if entry.is_dir else ([entry],):
                for child in some:
                    if child.is_dir:
                        waiting.append(child)
                    elif (extent := self._extent(child)) is not None and extent.size:
                        yield extent
                await trio.lowlevel.checkpoint()

    def _extent(self, entry: Entry) -> Extent | None:
        try:
            return self._ns.extent(entry)
        except FileError:  # removed in the meantime, or of an object that is not known here
            return None

    async def _measure(self, extents: list[Extent]) -> int:
        """Bytes of these that are not in the cache. One that was seen to be whole stays so while it is pinned."""
        doubtful = [extent for extent in extents if extent not in self._whole]

        def measure() -> list[int]:
            found = self._cache.inspect([extent.version for extent in doubtful], is_use=False)
            return [extent.size - extent.bytes_in(blocks) for extent, (blocks, _) in zip(doubtful, found, strict=True)]

        missing = await self._threads.run(measure) if doubtful else []
        held = set(extents)
        self._whole = {extent: None for extent in self._whole if extent in held}
        self._whole |= {extent: None for extent, bytes_ in zip(doubtful, missing, strict=True) if not bytes_}
        return sum(missing)

    def statistics(self) -> dict[str, int]:
        """For `stats`; the names are final."""
        values: dict[str, int] = msgspec.to_builtins(self.kept)
        return values
