"""How far one request goes through the modules of the product, from the kernel's request to its answer.

    PYTHONPATH=. python scripts/measure_journeys.py [--calls]

Counts the modules that run, and the *switches*: calls from a function of one module to one of another, whatever lies
between them that is not ours. A coroutine counts when it begins, not when it goes on. Background tasks that run before
the answer count too; what was begun before may end first, and the fewest modules and the fewest switches of five runs
count, because a slow machine lets more of them run. The store is in memory, small files are plain objects: `close` of a
file of 50 KB, and `rename` of a directory with 8 such files. Clocks and threads of a node are modules like all others.
The numbers are for comparing two states of the source, not two machines. ``--calls`` lists the switches, those made
most often first: a function that is called once for each file stands at the top.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import trio
import trio.testing

from lakefs_fuse.kernel.features import KernelFeatures
from lakefs_fuse.kernel.native.hooks import Feature
from lakefs_fuse.kernel.operations import Operations
from lakefs_fuse.meta.entry import ROOT_INODE
from tests.memory_store import MemoryStore
from tests.vfs.lakes import lake

PRODUCT = "lakefs_fuse"
FILE_BYTES = 50_000
FILES = 8
RUNS = 5
IDLE_S = 0.05
"""Background tasks that have done nothing for so long have ended, or wait for something that may take longer."""


@dataclass(slots=True)
class Journey:
    """A context manager: counts what runs while it is entered, worker threads that begin meanwhile included."""

    modules: set[str] = field(default_factory=set)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Switches by the caller, with its line, and the function that is called."""

    @property
    def switches(self) -> int:
        return self.calls.total()

    def __enter__(self) -> Journey:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        module = _module(frame)
        if event != "call" or not module:
            return
        self.modules.add(module)
        caller = frame.f_back
        while caller is not None and not _module(caller):
            caller = caller.f_back
        if caller is not None and _module(caller) != module and not _goes_on(frame.f_code, frame.f_lasti):
            self.calls[f"{_function(caller)}:{caller.f_lineno}", _function(frame)] += 1


def _module(frame: FrameType) -> str:
    """Empty for what is not the product's."""
    name = frame.f_globals.get("__name__", "")
    return name if name.partition(".")[0] == PRODUCT else ""


def _function(frame: FrameType) -> str:
    return f"{_module(frame).removeprefix(PRODUCT + '.')}.{frame.f_code.co_qualname}"


def _goes_on(code: CodeType, at: int) -> bool:
    """A coroutine or generator is resumed, by the argument of the instruction RESUME."""
    return at >= 0 and bool(code.co_code[at + 1])


class _Caller:
    uid = gid = pid = 0


async def measure(directory: Path) -> dict[str, Journey]:
    """By the name of the request, the fewest modules and the fewest switches of `RUNS` runs."""
    runs = [await _run(directory / str(number)) for number in range(RUNS)]
    return {name: _fewest([run[name] for run in runs]) for name in runs[0]}


def _fewest(journeys: list[Journey]) -> Journey:
    return Journey(
        min((journey.modules for journey in journeys), key=len),
        min((journey.calls for journey in journeys), key=Counter.total),
    )


async def _run(directory: Path) -> dict[str, Journey]:
    async with lake(MemoryStore(), directory, pack="never") as mounted:
        operations = Operations(mounted.fs, KernelFeatures(Feature(0), writeback_cache=True, background_max=0))

        async def create(parent: int, name: bytes) -> int:
            info, _ = await operations.create(parent, name, 0o644, os.O_RDWR | os.O_CREAT, _Caller)
            await operations.write(info.fh, 0, bytes(FILE_BYTES))
            return info.fh

        async def close(handle: int) -> None:
            await operations.flush(handle)
            await operations.release(handle)

        directories = [(await operations.mkdir(ROOT_INODE, name, 0o755, _Caller)).st_ino for name in (b"d", b"e")]
        await close(await create(directories[0], b"first"))
        handle = await create(directories[0], b"second")
        await trio.testing.wait_all_tasks_blocked(IDLE_S)
        with Journey() as closing:
            await operations.flush(handle)
        await operations.release(handle)
        for number in range(FILES):
            await close(await create(directories[1], b"%d" % number))
        await trio.testing.wait_all_tasks_blocked(IDLE_S)
        with Journey() as renaming:
            await operations.rename(ROOT_INODE, b"e", ROOT_INODE, b"renamed", 0, _Caller)
    return {"close": closing, "rename": renaming}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", action="store_true", help="list the switches, by caller and function")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for name, journey in trio.run(measure, Path(directory)).items():
            print(f"{name}: {len(journey.modules)} modules, {journey.switches} switches")
            for (caller, function), count in journey.calls.most_common() if options.calls else ():
                print(f"{count:5}  {caller} -> {function}")


if __name__ == "__main__":
    main()
