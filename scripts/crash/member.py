"""Writer processes, and what the campaign says to them over a pipe: begin, go, stop, check.

A member answers every command once. It is forked before anything else starts, holds no connection but its pipe, and
ends when that is closed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from scripts.crash import operations, writing
from scripts.crash.content import Ids
from scripts.crash.contest import Change
from scripts.crash.tree import Node
from scripts.crash.watcher import Sighting
from scripts.crash.writer import Died, Unexpected, Writer

SILENCE_S_MAX = 90.0
"""A system call that takes longer hangs."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A new lake."""

    seed: str
    root: Path
    durability: str
    mounts: int = 1
    contends: bool = False
    power_cuts: bool = False


@dataclass(frozen=True, slots=True)
class Go:
    """Work until the daemon dies or `Stop` comes."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Close what is open, and answer."""


@dataclass(frozen=True, slots=True)
class Check:
    """Compare with the mount at ``root`` (None: the writer's own)."""

    strict: bool = False
    root: Path | None = None


@dataclass(frozen=True, slots=True)
class CheckStore:
    """Compare with what lies in the store."""

    seen: Mapping[str, Node]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class CheckSightings:
    """Compare with what another node saw since the last time."""

    sightings: list[Sighting]


@dataclass(frozen=True, slots=True)
class WriteLog:
    """Write what was done into a directory, for whoever looks for the fault."""

    directory: Path


Command = Begin | Go | Stop | Check | CheckStore | CheckSightings | WriteLog


@dataclass(frozen=True, slots=True)
class Hot:
    """A version of a contested name that is there or may be; times in ns."""

    name: str
    content: Ids
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Answer:
    problems: list[str] = field(default_factory=list)
    died: bool = False
    steps: int = 0
    bytes_written: int = 0
    hot: list[Hot] = field(default_factory=list)
    hot_tried: list[tuple[str, Ids]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    """Of contested names."""
    early: int = 0
    unclosed: list[str] = field(default_factory=list)
    """Paths of files that were open, or being closed, when the daemon died."""


class _Loop:
    def __init__(self, number: int, pipe: Connection) -> None:
        self._number, self._pipe = number, pipe
        self._writer: Writer | None = None

    def run(self) -> None:
        while True:
            try:
                command: Command = self._pipe.recv()
            except EOFError:
                return
            try:
                self._pipe.send(self._obey(command))
            except Exception:
                self._pipe.send(Answer([f"w{self._number}: {traceback.format_exc()}"]))

    def _obey(self, command: Command) -> Answer | None:
        if isinstance(command, Begin):
            self._writer = Writer(
                self._number, command.seed, command.root, durability=command.durability,
                mounts=command.mounts, contends=command.contends, power_cuts=command.power_cuts,
            )  # fmt: skip
            return Answer()
        writer = self._writer
        assert writer is not None
        if isinstance(command, Go):
            return self._go(writer)
        if isinstance(command, Stop):
            return Answer()
        if isinstance(command, Check):
            problems = writer.check(strict=command.strict, root=command.root)
            there = [write for write in writer.hot if write.happened]
            hot = [Hot(write.name, write.content, write.began_ns, write.ended_ns) for write in there]
            return Answer(problems, hot=hot, changes=writer.changes)
        if isinstance(command, CheckStore):
            problems = writer.check_store(command.seen, strict=command.strict)
            tried = [(write.name, write.content) for write in writer.hot]
            return Answer(problems, hot_tried=tried, changes=writer.changes)
        if isinstance(command, CheckSightings):
            early = writer.early
            return Answer(writer.check_sightings(command.sightings), early=writer.early - early)
        (command.directory / f"writer-{self._number}.log").write_text("\n".join(writer.log))
        return Answer()

    def _go(self, writer: Writer) -> Answer:
        steps, written = writer.steps, writer.bytes_written
        died, problems = False, []
        try:
            operations.prepare(writer)
            while not self._pipe.poll():
                operations.act(writer)
            for file in list(writer.open):
                writing.close_long(writer, file)
        except Died:
            died = True
        except Unexpected as error:
            problems.append("\n".join([str(error), *(f"      {line}" for line in writer.log[-40:])]))
        unclosed = writer.unclosed()
        writer.drop_handles()
        writer.being_written = []
        return Answer(
            problems,
            died,
            writer.steps - steps,
            writer.bytes_written - written,
            unclosed=unclosed,
        )


def _main(number: int, pipe: Connection, others: Iterable[Connection]) -> None:
    for other in others:
        other.close()
    os.umask(0)
    _Loop(number, pipe).run()


class Crew:
    """All the writers. A context manager: leaving it ends them."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            here, there = context.Pipe()
            self._pipes.append(here)
            process = context.Process(target=_main, args=(number, there, list(self._pipes)), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    @property
    def numbers(self) -> range:
        return range(len(self._pipes))

    def send(self, command: Command, numbers: Iterable[int] | None = None) -> None:
        """To all, or to some."""
        for number in self.numbers if numbers is None else numbers:
            self._pipes[number].send(command)

    def begin(self, commands: Sequence[Begin]) -> None:
        """One for each."""
        for number, command in enumerate(commands):
            self.send(command, [number])
        self.answers()

    def answers(self, numbers: Iterable[int] | None = None) -> list[Answer]:
        """One of each, or of some. Raises TimeoutError."""
        found: list[Answer] = []
        pending: list[object] = [self._pipes[number] for number in (self.numbers if numbers is None else numbers)]
        deadline = time.monotonic() + SILENCE_S_MAX
        while pending:
            ready = wait(pending, max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]
            if not ready:
                raise TimeoutError(f"{len(pending)} writers have not answered for {SILENCE_S_MAX:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                found.append(pipe.recv())
                pending.remove(pipe)
        return found

    def ask(self, command: Command) -> list[Answer]:
        self.send(command)
        return self.answers()
