"""A storage engine in memory whose write-ahead log is modelled, so that power can be cut.

What always holds (*log prefix*): after a power cut the rows are those after some number of writes, in their order, that
is at least the number at the last sync. As in RocksDB an ingest is durable at once, also before unsynced writes of
other keys; opening and `checkpoint` make everything durable, closing does not.

Rows live in a `Platter`, whose number is in a file in the engine's directory: to rename or remove the directory is to
rename or remove the engine, and a copy is opened after `MemoryEngines.copy` only. One thread.
"""

from __future__ import annotations

import itertools
import random
import shutil
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Never
from weakref import ref

from rocksdict import IngestExternalFileOptions, Rdict

from lakefs_fuse.environment.storage_engine import Rows, Step
from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta.database import options

PLATTER_FILE = "platter"
"""In an engine's directory: the number of its platter."""
LOG_WRITES_MAX = 256
"""Writes in the log before those that are synced are applied to the durable rows."""
SORTED_INSERTS_MAX = 32
"""Keys of one write that are inserted one by one; more are sorted with all others."""


class Platter:
    """What an engine wrote: durable rows, and the log since then."""

    def __init__(self, durable: dict[bytes, bytes]) -> None:
        self._durable = durable
        self._log: list[tuple[Step, ...]] = []
        self._synced = 0
        """Writes of the log that survive a power cut."""
        self.is_open = False

    def append(self, steps: tuple[Step, ...], *, sync: bool) -> None:
        self._log.append(steps)
        if sync:
            self.sync()

    def sync(self) -> None:
        self._synced = len(self._log)
        if self._synced > LOG_WRITES_MAX:
            self._fold()

    def _fold(self) -> None:
        _apply(self._durable, self._log[: self._synced])
        del self._log[: self._synced]
        self._synced = 0

    def recover(self) -> dict[bytes, bytes]:
        """Make all writes durable; answers the rows."""
        self._synced = len(self._log)
        self._fold()
        return self._durable.copy()

    def ingest(self, rows: Rows) -> None:
        """RocksDB flushes what is in memory first where it has keys in the range of the rows, else it leaves it."""
        first, last = min(rows), max(rows)
        if any(_overlaps(step, first, last) for steps in self._log[self._synced :] for step in steps):
            self._synced = len(self._log)
        self._fold()
        _apply(self._durable, [((rows, b"", b""),)])

    def kill(self) -> Platter:
        """The platter as the death of the process leaves it: with every write."""
        return self._after(len(self._log))

    def power_cut(self, rng: random.Random) -> Platter:
        """The platter as a power cut leaves it: any point between the last sync and the end of the log."""
        return self._after(rng.randint(self._synced, len(self._log)))

    def _after(self, writes: int) -> Platter:
        rows = self._durable.copy()
        _apply(rows, self._log[:writes])
        return Platter(rows)


def _apply(rows: dict[bytes, bytes], writes: Sequence[tuple[Step, ...]]) -> None:
    """All ranges that are deleted are looked for in one pass through the rows."""
    later: dict[bytes, bytes | None] = {}
    ranges: list[tuple[bytes, bytes]] = []
    for written, begin, end in itertools.chain.from_iterable(writes):
        later.update(written)
        if end:
            later.update({key: None for key in later if begin <= key < end})
            ranges.append((begin, end))
    if ranges:
        ranges.sort()
        begins = [begin for begin, _ in ranges]
        ends = [*itertools.accumulate((end for _, end in ranges), max)]
        there = [key for key in rows if (at := bisect_right(begins, key)) and key < ends[at - 1]]
        later = {**dict.fromkeys(there), **later}
    for key, value in later.items():
        if value is None:
            rows.pop(key, None)
        else:
            rows[key] = value


def _overlaps(step: Step, first: bytes, last: bytes) -> bool:
    written, begin, end = step
    return (begin <= last and first < end) or any(first <= key <= last for key in written)


class _Scan:
    """Rows from a key on, to another, read from the engine's own until something is written."""

    def __init__(self, keys: list[bytes], rows: dict[bytes, bytes], at: int, until: int) -> None:
        self._keys, self._rows, self._at, self._until = keys, rows, at, until

    def __iter__(self) -> _Scan:
        return self

    def __next__(self) -> tuple[bytes, bytes]:
        if self._at >= self._until:
            raise StopIteration
        key = self._keys[self._at]
        self._at += 1
        return key, self._rows[key]

    def detach(self) -> None:
        """Copy what is left to read, before the engine's rows change."""
        self._keys = self._keys[self._at : self._until]
        self._at, self._until = 0, len(self._keys)
        self._rows = {key: self._rows[key] for key in self._keys}


class MemoryEngine:
    """An open engine."""

    def __init__(self, platter: Platter, directory: Path, engines: MemoryEngines) -> None:
        self._platter, self._directory, self._engines = platter, directory, engines
        self._rows = platter.recover()
        self._keys = sorted(self._rows)
        self._scans: list[ref[_Scan]] = []
        """Made since the last write."""
        self.get: Callable[[bytes], bytes | None] = self._rows.get
        self._is_closed = False
        platter.is_open = True

    def get_many(self, keys: list[bytes], /) -> list[bytes | None]:
        return [*map(self.get, keys)]

    def items(self, begin: bytes, end: bytes = b"", /) -> Iterator[tuple[bytes, bytes]]:
        self._check_open()
        until = bisect_left(self._keys, end) if end else len(self._keys)
        scan = _Scan(self._keys, self._rows, bisect_left(self._keys, begin), until)
        self._scans.append(ref(scan))
        return scan

    def write(self, steps: Sequence[Step], *, sync: bool) -> None:
        self._check_open()
        self._platter.append(tuple((rows.copy(), begin, end) for rows, begin, end in steps), sync=sync)
        self._detach_scans()
        for rows, begin, end in steps:
            self._write_rows(rows)
            if end:
                at, until = bisect_left(self._keys, begin), bisect_left(self._keys, end)
                for key in self._keys[at:until]:
                    del self._rows[key]
                del self._keys[at:until]

    def _write_rows(self, rows: Rows) -> None:
        new = [key for key, value in rows.items() if value is not None and key not in self._rows]
        removed = [key for key, value in rows.items() if value is None and key in self._rows]
        self._rows |= {key: value for key, value in rows.items() if value is not None}
        for key in removed:
            del self._rows[key]
        if len(new) + len(removed) > SORTED_INSERTS_MAX:
            self._keys = [key for key in self._keys if key in self._rows] + new
            self._keys.sort()
            return
        for key in removed:
            del self._keys[bisect_left(self._keys, key)]
        for key in new:
            insort(self._keys, key)

    def _detach_scans(self) -> None:
        for made in self._scans:
            if (scan := made()) is not None:
                scan.detach()
        self._scans.clear()

    def sync(self) -> None:
        self._check_open()
        self._platter.sync()

    def ingest(self, paths: Sequence[Path]) -> None:
        self._check_open()
        rows = _read_tables(paths, self._rows, self._directory / "reading")
        for path in paths:
            path.unlink()
        self._detach_scans()
        if rows:
            self._platter.ingest(rows)
        self._write_rows(rows)

    def checkpoint(self, directory: Path) -> None:
        self._check_open()
        directory.mkdir()
        self._engines.place(Platter(self._platter.recover()), directory)

    def integer_property(self, name: str) -> int:
        self._check_open()
        return len(self._rows) if name == "estimate-num-keys" else 0

    def close(self) -> None:
        if not self._is_closed:
            self._platter.is_open = False
        self._is_closed, self.get = True, self._refuse

    def _check_open(self) -> None:
        if self._is_closed:
            self._refuse(b"")

    def _refuse(self, _key: bytes) -> Never:
        raise RuntimeError(f"the engine of {self._directory} is closed")


def _read_tables(paths: Sequence[Path], there: Mapping[bytes, bytes], scratch: Path) -> Rows:
    """All rows of some SST files, which RocksDB takes together, and those that are ``there`` and that these delete.
    Raises its errors."""
    rows, deletions = _ingested(paths, {}, scratch)
    left = _ingested(paths, there, scratch)[0] if deletions else there
    return {**rows} | dict.fromkeys(there.keys() - left.keys())


def _ingested(paths: Sequence[Path], there: Mapping[bytes, bytes], scratch: Path) -> tuple[dict[bytes, bytes], int]:
    """What is in a database with these rows after it took the files, and the number of deletions."""
    shutil.rmtree(scratch, ignore_errors=True)
    as_ingested = options()
    as_ingested.set_disable_auto_compactions(True)  # which would take deletions away before they are counted
    trial = Rdict(str(scratch), as_ingested)
    try:
        for key, value in there.items():
            trial[key] = value
        copying = IngestExternalFileOptions()
        copying.set_move_files(False)
        trial.ingest_external_file([str(path) for path in paths], copying)
        rows = {bytes(key): bytes(value) for key, value in trial.items()}  # type: ignore[arg-type]
        return rows, sum(file["num_deletions"] for file in trial.live_files())
    finally:
        trial.close()
        shutil.rmtree(scratch)


class MemoryEngines:
    """Opens engines in memory, and keeps their platters: one object for all nodes, and all lives of them."""

    def __init__(self) -> None:
        self._platters: dict[int, Platter] = {}
        self._numbers = itertools.count(1)

    def open(self, directory: Path) -> MemoryEngine:
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / PLATTER_FILE).exists():
            self.place(Platter({}), directory)
        platter = self.platter(directory)
        if platter.is_open:
            raise CacheError(f"{directory} is in use by another process")
        return MemoryEngine(platter, directory, self)

    def repair(self, directory: Path) -> None:
        raise CacheError(f"{directory}: an engine in memory is never damaged")

    def platter(self, directory: Path) -> Platter:
        """The platter of an engine's directory. Raises CacheError where it is unknown."""
        platter = self._platters.get(int((directory / PLATTER_FILE).read_text()))
        if platter is None:
            raise CacheError(f"{directory} is not of these engines")
        return platter

    def place(self, platter: Platter, directory: Path) -> None:
        """Let a directory have this platter from now on."""
        number = next(self._numbers)
        self._platters[number] = platter
        (directory / PLATTER_FILE).write_text(f"{number}")

    def copy(self, source: Path, target: Path, rng: random.Random | None) -> None:
        """Copy all engines below a directory, as a power cut leaves them, or, without ``rng``, the death of the
        process; engines that are open there stay so. ``target`` may have been copied already, or in part."""
        for directory in self._directories(source):
            platter = self.platter(directory)
            copied = target / directory.relative_to(source)
            copied.mkdir(parents=True, exist_ok=True)
            self.place(platter.kill() if rng is None else platter.power_cut(rng), copied)

    def forget(self, directory: Path) -> None:
        """Give up the rows of all engines below a directory, before it is removed."""
        for each in self._directories(directory):
            del self._platters[int((each / PLATTER_FILE).read_text())]

    def _directories(self, directory: Path) -> list[Path]:
        return sorted(path.parent for path in directory.rglob(PLATTER_FILE))
