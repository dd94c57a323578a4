"""What is timed. Each job is a small dataclass that travels to a process of its own and answers an `Outcome`.

Jobs that do many things look at the clock after each and stop at their limit; the rate is then that of what was done.
Latencies are of single operations. Nothing is verified here beyond sizes: that bytes are right is for the tests.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import Any

from scripts.bench import figures
from scripts.bench.access import Access
from scripts.bench.worker import Outcome

MIB = 1 << 20
BATCH = 32
BARRIER_BROKEN = BrokenBarrierError.__name__


class Clock:
    """Since it was made; ``done`` when the limit is reached."""

    def __init__(self, limit_s: float, began: float | None = None) -> None:
        self.began = time.monotonic() if began is None else began
        self._ends = self.began + limit_s

    def done(self) -> bool:
        return time.monotonic() >= self._ends

    def passed(self) -> float:
        return time.monotonic() - self.began


@dataclass(frozen=True)
class Share:
    """What one of several processes did since all began, on the clock that they share."""

    began: float
    ended: float
    found: Any = None
    wrong: str = ""


def span(shares: list[Share]) -> float:
    """From the first beginning to the last end."""
    return max(share.ended for share in shares) - min(share.began for share in shares)


def side_by_side(count: int, preparing_s: float, work: Callable[[int, Callable[[], None]], Any]) -> list[Share]:
    """So many processes: ``work`` is given its number and ``begin``, which it calls when it is prepared, and which
    returns when all are. Raises ValueError with what one of them failed with, not with what that did to the others."""
    context = get_context("fork")
    barrier = context.Barrier(count)
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(target=_take_part, args=(number, preparing_s, work, barrier, theirs))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    shares: list[Share] = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    wrong = sorted((each.wrong for each in shares if each.wrong), key=lambda each: each.startswith(BARRIER_BROKEN))
    if wrong:
        raise ValueError(wrong[0])
    return shares


def _take_part(number: int, preparing_s: float, work: Callable[..., Any], barrier: Any, pipe: Any) -> None:
    """In a process of its own."""
    began, together = time.monotonic(), False

    def begin() -> None:
        nonlocal began, together
        barrier.wait(preparing_s)
        began, together = time.monotonic(), True

    try:
        found = work(number, begin)
        share = Share(began, time.monotonic(), found)
    except Exception as error:
        if not together:
            barrier.abort()
        share = Share(began, time.monotonic(), wrong=f"{type(error).__name__}: {error}")
    pipe.send(share)


def timed(clock: Clock, steps: Iterable[Callable[[], int]]) -> tuple[int, list[float], bool]:
    """Bytes, how long each took, and whether the limit came before the end."""
    took: list[float] = []
    size, last = 0, time.monotonic()
    for step in steps:
        size += step()
        now = time.monotonic()
        took.append(now - last)
        last = now
        if clock.done():
            return size, took, True
    return size, took, False


@dataclass(frozen=True)
class Listing:
    """All names of a directory, then shuffled, as a data loader begins."""

    access: Access
    directory: str
    count: int
    limit_s: float

    def run(self) -> Outcome:
        self.access.ready()
        clock = Clock(self.limit_s)
        names = self.access.names(self.directory)
        random.Random(1).shuffle(names)
        took = clock.passed()
        if len(names) != self.count:
            raise ValueError(f"{len(names)} names instead of {self.count}")
        return Outcome(took, len(names))


@dataclass(frozen=True)
class Looking:
    """Names, sizes and mtimes of a directory."""

    access: Access
    directory: str
    count: int
    limit_s: float

    def run(self) -> Outcome:
        self.access.ready()
        clock = Clock(self.limit_s)
        found = self.access.look(self.directory, clock.done)
        return Outcome(clock.passed(), found, stopped=found < self.count)


@dataclass(frozen=True)
class Epoch:
    """Small files in a given order, by so many reader processes, each with every n-th of them."""

    access: Access
    names: list[str]
    readers: int
    limit_s: float

    preparing_s = 20.0

    def run(self) -> Outcome:
        shares = side_by_side(self.readers, self.preparing_s, self._read)
        read = [share.found for share in shares]
        each = [len(took) for _, took, _ in read]
        waits = [wait for _, took, _ in read for wait in took]
        size = sum(size for size, _, _ in read)
        stopped = any(stopped for _, _, stopped in read)
        return Outcome(span(shares), sum(each), size, figures.latency(waits), stopped, each)

    def _read(self, number: int, begin: Callable[[], None]) -> tuple[int, list[float], bool]:
        self.access.ready()
        begin()
        mine = self.names[number :: self.readers]
        return timed(Clock(self.limit_s), (partial(self.access.read, name) for name in mine))


class FileSet:
    """What torch's DataLoader is given: names, read when they are asked for."""

    def __init__(self, access: Access, names: list[str]) -> None:
        self._access, self._names = access, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> int:
        return self._access.read(self._names[index])


@dataclass(frozen=True)
class Loader:
    """The same with torch's DataLoader; latencies are those of batches."""

    access: Access
    names: list[str]
    workers: int
    limit_s: float

    preparing_s = 20.0

    def run(self) -> Outcome:
        from torch.utils.data import DataLoader

        found: Any = FileSet(self.access, self.names)
        loader = DataLoader(
            found, batch_size=BATCH, num_workers=self.workers, collate_fn=list, multiprocessing_context="fork"
        )
        clock = Clock(self.limit_s)
        batches = iter(loader)
        sizes: list[int] = []

        def take(batch: list[int]) -> int:
            sizes.extend(batch)
            return sum(batch)

        size, took, stopped = timed(clock, (partial(take, batch) for batch in batches))
        passed = clock.passed()
        return Outcome(passed, len(sizes), size, figures.latency(took), stopped, [len(sizes)])


@dataclass(frozen=True)
class Sequential:
    """One large file from its beginning to its end."""

    access: Access
    name: str
    size: int
    limit_s: float

    def run(self) -> Outcome:
        self.access.ready()
        clock = Clock(self.limit_s)
        size = self.access.read_through(self.name, clock.done)
        return Outcome(clock.passed(), 1, size, stopped=size < self.size)


@dataclass(frozen=True)
class Scattered:
    """Pieces of one large file at random offsets, one after the other."""

    access: Access
    name: str
    size: int
    piece: int
    count: int
    limit_s: float

    def run(self) -> Outcome:
        self.access.ready()
        choose = random.Random(7)
        offsets = [choose.randrange(self.size // self.piece) * self.piece for _ in range(self.count)]
        clock = Clock(self.limit_s)
        read = self.access.read_range
        size, took, stopped = timed(
            clock, (partial(read, self.name, at, self.piece) for at in offsets)
        )  # fmt: skip
        return Outcome(clock.passed(), len(took), size, figures.latency(took), stopped)


def state_of(size: int, seed: int) -> dict[str, Any]:
    """So many bytes of a model, which do not compress."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    layer = min(64 * MIB, size)
    block = torch.empty(layer // 4).uniform_(generator=generator)
    return {f"layer{number}": block + number for number in range(max(1, size // layer))}


@dataclass(frozen=True)
class Save:
    """``torch.save`` by so many processes at once, each its own file of ``size`` bytes."""

    access: Access
    names: list[str]
    size: int
    limit_s: float

    preparing_s = 30.0

    def run(self) -> Outcome:
        import torch

        torch.set_num_threads(1)
        shares = side_by_side(len(self.names), self.preparing_s, self._save)
        waits = figures.latency([share.ended - share.began for share in shares])
        return Outcome(span(shares), len(self.names), self.size * len(self.names), waits)

    def _save(self, number: int, begin: Callable[[], None]) -> None:
        import torch

        self.access.ready()
        state = state_of(self.size, number)
        save = self.access.saver(lambda file: torch.save(state, file))
        begin()
        save(self.names[number])


@dataclass(frozen=True)
class Load:
    """``torch.load``."""

    access: Access
    name: str
    size: int
    limit_s: float

    def run(self) -> Outcome:
        import torch

        self.access.ready()
        clock = Clock(self.limit_s)
        self.access.load(self.name, torch.load)
        return Outcome(clock.passed(), 1, self.size)


@dataclass(frozen=True)
class WriteSmall:
    """New small files from so many threads; each is closed before its thread writes the next."""

    access: Access
    directory: str
    sizes: list[int]
    threads: int
    limit_s: float

    preparing_s = 10.0

    def run(self) -> Outcome:
        self.access.ready()
        self.access.make_directory(self.directory)
        noise = os.urandom(max(self.sizes) + 4096)
        clock = Clock(self.limit_s)

        def write(index: int) -> int:
            size, start = self.sizes[index], index % 4096
            self.access.write(f"{self.directory}/f{index:06d}", noise[start : start + size])
            return size

        def share(first: int) -> tuple[int, list[float], bool]:
            mine = range(first, len(self.sizes), self.threads)
            return timed(clock, (partial(write, index) for index in mine))

        with ThreadPoolExecutor(self.threads) as pool:
            answers = list(pool.map(share, range(self.threads)))
        passed = clock.passed()
        waits = [wait for answer in answers for wait in answer[1]]
        size = sum(answer[0] for answer in answers)
        return Outcome(passed, len(waits), size, figures.latency(waits), any(answer[2] for answer in answers))


@dataclass(frozen=True)
class Command:
    """A program that loads so many files."""

    words: tuple[str, ...]
    environment: dict[str, str]
    files: int
    size: int
    limit_s: float

    def run(self) -> Outcome:
        clock = Clock(self.limit_s)
        environment = {**os.environ, **self.environment}
        done = subprocess.run(self.words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr.strip()[-200:])
        return Outcome(clock.passed(), self.files, self.size)


@dataclass(frozen=True)
class Rename:
    """A directory with files gets another name."""

    access: Access
    old: str
    new: str
    count: int
    limit_s: float

    def run(self) -> Outcome:
        self.access.ready()
        clock = Clock(self.limit_s)
        self.access.rename(self.old, self.new)
        return Outcome(clock.passed(), self.count)


@dataclass(frozen=True)
class Remove:
    """``rm -r`` of a directory with files."""

    access: Access
    directory: str
    count: int
    limit_s: float

    def run(self) -> Outcome:
        self.access.ready()
        clock = Clock(self.limit_s)
        removed = self.access.remove(self.directory, clock.done)
        return Outcome(clock.passed(), removed, stopped=removed < self.count)
