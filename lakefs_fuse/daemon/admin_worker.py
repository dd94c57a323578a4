"""The process of a command beside the mounts: `python -m lakefs_fuse.daemon.admin_worker`, run by `cli.worker`.

It is a separate process so that `lakefs-fuse --help` does not load the libraries that only this needs. It reads one
`worker_protocol.Request` from the descriptor that ``--request-fd`` names, opens the store, runs one command of
`COMMANDS`, and writes progress and the result to standard output, in JSON lines. Standard input belongs to the command
(a tar stream, for example), standard error to the terminal.

A command is an async function ``(Work, its arguments) -> Finished``. It raises LakeError for a failure, which becomes
the last line; it calls ``work.progress`` as often as it likes (lines are limited in rate), and ``work.note`` for what
the user should see immediately. To add one: a struct for its arguments in `worker_protocol`, an entry in `COMMANDS`,
whose module is imported when the command runs, and a command in `cli.lake_commands`, which calls `run_offline`: that
shows progress, prints the result and returns the exit code.

SIGINT and SIGTERM cancel the command, which cleans up; a second one ends it immediately. The end of the reader of the
answers cancels it, too: the kernel closes that pipe when the command line, or the daemon that started the command,
dies. Each engine documents what a crash leaves.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import trio

from lakefs_fuse import __version__
from lakefs_fuse.admin.work import Work
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.control.interrupts import release_interrupts
from lakefs_fuse.daemon.lake_connection import connect_lake
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import ConfigError, LakeError, first_error
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import ThreadTransport
from lakefs_fuse.store.lake_record import change_record
from lakefs_fuse.store.open import open_store, search_lake
from lakefs_fuse.store.rate_limit import RateLimiter

REPORT_INTERVAL_S = 0.2
LOWEST_PRIORITY = 19
AnyRequest = TypeVar("AnyRequest", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Command:
    """A command in the registry. ``run`` names its function, ``module:function`` in this package.

    ``probes``: if the command writes and the lake record lacks the capabilities of the store, probe the store and write
    the result into the record. Without ``probes`` the minimum is assumed then, which is enough for packs and for
    objects uploaded in order."""

    args: type[msgspec.Struct]
    run: str
    probes: bool = False
    writes: Callable[[Any], bool] = lambda args: True
    """Whether the command, with these arguments, changes the lake, which requires that its features are known."""
    makes_lakes: bool = False
    """If no lake is found, the command creates one there; a mount of a directory above shows nothing of it."""
    needs_lake: bool = True
    """If no lake is found, the command is refused: the source is misspelled."""


def _is_not_dry(args: protocol.RelocateArgs | protocol.PackArgs | protocol.GcArgs) -> bool:
    return not args.dry_run


def _is_below_others(source: Source) -> bool:
    """Whether a lake could be mounted that shows the directory of this source."""
    return source.scheme == "file" or bool(source.prefix)


def _fsck_writes(args: protocol.FsckArgs) -> bool:
    return args.repair or (args.rebind and not args.dry_run)


BECOMES_LAKE = (
    "{source} becomes a lake of its own, as no lake was found at or above it: mount it by this name, or give --lake "
    "with the SOURCE that you mount"
)

NO_LAKE = (
    "{source}: no lake is here, or in a directory above: check bucket and prefix. A writable mount creates a lake, as "
    "does `lakefs-fuse ingest`"
)

COMMANDS = {
    "checkpoint": Command(
        protocol.CheckpointArgs, "admin.checkpoints:run_checkpoint", writes=lambda args: False, needs_lake=False
    ),
    "checkpoint-verify": Command(
        protocol.VerifyArgs, "admin.checkpoints:run_verify", writes=lambda args: False, needs_lake=False
    ),
    "relocate": Command(protocol.RelocateArgs, "admin.commands:run_relocate", probes=True, writes=_is_not_dry),
    "pack": Command(protocol.PackArgs, "admin.commands:run_pack", probes=True, writes=_is_not_dry),
    "maintenance": Command(protocol.MaintenanceArgs, "admin.commands:run_maintenance", probes=True),
    "gc": Command(protocol.GcArgs, "admin.commands:run_gc", probes=True, writes=_is_not_dry),
    "fsck": Command(protocol.FsckArgs, "admin.commands:run_fsck", probes=True, writes=_fsck_writes),
    "snapshot": Command(
        protocol.SnapshotArgs, "admin.commands:run_snapshot", probes=True, writes=lambda args: not args.list
    ),
    "dataset": Command(
        protocol.DatasetArgs,
        "admin.datasets:run_dataset",
        probes=True,
        writes=lambda args: args.action in ("create", "rm"),
    ),
    "log": Command(protocol.LogArgs, "admin.change_log:run_log", writes=lambda args: False),
    "ingest": Command(protocol.IngestArgs, "daemon.ingest_command:run_ingest", makes_lakes=True, needs_lake=False),
    "upgrade": Command(protocol.UpgradeArgs, "admin.upgrade:run_upgrade", probes=True),
}


# -- the process -----------------------------------------------------------------------------------------------------


class Answers:
    """Writes answers, JSON lines; `Progress` at most every REPORT_INTERVAL_S, and the last one always."""

    def __init__(self, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._descriptor = descriptor
        self._clock = clock
        self._sent_s = -REPORT_INTERVAL_S
        self._held: protocol.Progress | None = None

    def report(self, progress: protocol.Progress) -> None:
        now = self._clock()
        if now - self._sent_s < REPORT_INTERVAL_S:
            self._held = progress
            return
        self._sent_s, self._held = now, None
        self._write(progress)

    def send(self, answer: protocol.Answer) -> None:
        """Write an answer, after any held progress. Raises BrokenPipeError if the reader has ended."""
        if self._held is not None:
            self._write(self._held)
            self._held = None
        self._write(answer)

    async def wait_unread(self) -> None:
        """Return when no process can read answers. The descriptor is that of a pipe."""
        await trio.lowlevel.wait_readable(self._descriptor)  # of the end that is written to, this is its error

    def finish(self, last: protocol.Finished | protocol.Failed) -> int:
        """Write the last answer, whether or not it is read, and return its exit code."""
        try:
            self.send(last)
        except BrokenPipeError:
            pass  # The command line has ended.
        return last.exit_code

    def _write(self, answer: protocol.Answer) -> None:
        line = memoryview(protocol.encode(answer))
        while line:
            line = line[os.write(self._descriptor, line) :]


def _require_lake(config: StoreConfig, node: Node) -> None:
    """Raises ConfigError where the source is not the root of a lake, and StoreError."""
    found = search_lake(config, node)
    if not found.is_recorded:
        raise ConfigError(NO_LAKE.format(source=config.source))
    if found.path:
        raise ConfigError(f"{config.source} is the directory {found.path} of the lake {found.store.source}: name that")


async def run_command(request: protocol.Request, answers: Answers, node: Node) -> protocol.Finished:
    """Open the store, run a command, close the store. Raises LakeError, or a group of them."""
    command = COMMANDS[request.command]
    args = msgspec.json.decode(request.args, type=command.args)
    config, path, becomes_lake = request.store, request.path, False
    if request.find_root:
        found = await trio.to_thread.run_sync(search_lake, config, node)
        config, path = found.store, found.path
        if command.needs_lake and not found.is_recorded:
            (await trio.to_thread.run_sync(open_store, config, node)).close()  # first reports an error in the source
            raise ConfigError(NO_LAKE.format(source=config.source))
        if path:
            answers.send(protocol.Note(f"{path} is in the lake {config.source}"))
        becomes_lake = command.makes_lakes and not found.is_recorded and _is_below_others(config.source)
    elif command.needs_lake and not (request.lake_id or request.background):  # --lake names it, or a mount without id
        await trio.to_thread.run_sync(_require_lake, config, node)
    transport = ThreadTransport(node.threads, requests_max=config.requests_max, uploads_max=request.uploads_max)
    writes, metrics, limit = command.writes(args), Metrics(), request.upload_bytes_s_max
    async with connect_lake(
        config,
        node,
        metrics.store,
        transport=transport,
        may_write=command.probes and writes,
        limiter=RateLimiter(limit, metrics.upload, node.clock) if limit else None,
        lake_id=request.lake_id if request.mountpoint else None,
    ) as connection:
        if connection.opened.unknown and writes:
            named = ", ".join(connection.opened.unknown)
            raise ConfigError(
                f"this lake has {named}, which lakefs-fuse {__version__} cannot write: install a newer version"
            )
        if becomes_lake and writes:
            answers.send(protocol.Note(BECOMES_LAKE.format(source=config.source)))
        work = Work(
            client=connection.client,
            store=config,
            path=path,
            progress=answers.report,
            note=lambda text: answers.send(protocol.Note(text)),
            show=answers.send,
            node=node,
            scratch=request.scratch or tempfile.gettempdir(),
            change_record=partial(change_record, connection.store, node.clock),
            host=os.uname().nodename,
            process=os.getpid(),
            levels=connection.opened.has_levels,
            lake_id=record.id if (record := connection.opened.record) is not None else "",
            uploads_max=request.uploads_max,
        )
        run: Callable[[Work, msgspec.Struct], Awaitable[protocol.Finished]] = pkgutil.resolve_name(
            f"lakefs_fuse.{command.run}"
        )
        return await run(work, args)


async def serve(request: protocol.Request, answers: Answers, node: Node) -> protocol.Finished | protocol.Failed:
    """Run a command until it ends, or a signal or the end of its reader cancels it; the last answer."""
    finished: protocol.Finished | None = None

    async def watch_starter() -> None:
        await answers.wait_unread()
        working.cancel()

    async def watch_signals(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            release_interrupts()
            task_status.started()
            asked = False
            async for _ in signals:
                if asked:
                    os._exit(protocol.EXIT_INTERRUPTED)
                asked = True
                working.cancel()

    async with trio.open_nursery() as nursery:
        working = trio.CancelScope()
        await nursery.start(watch_signals)
        nursery.start_soon(watch_starter)
        with working:
            finished = await run_command(request, answers, node)
        nursery.cancel_scope.cancel()
    if finished is None:
        return protocol.Failed(message="interrupted", exit_code=protocol.EXIT_INTERRUPTED)
    return finished


def read_request(argv: Sequence[str], kind: type[AnyRequest]) -> AnyRequest:
    """The request on the descriptor that ``--request-fd`` names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--request-fd", type=int, required=True)
    with open(parser.parse_args(argv).request_fd, "rb") as source:
        return msgspec.json.decode(source.read(protocol.REQUEST_BYTES_MAX), type=kind)


def run(argv: Sequence[str], descriptor: int) -> int:
    """Run one request, and return the exit code, which is also in the last answer on ``descriptor``."""
    request = read_request(argv, protocol.Request)
    if request.background:
        os.nice(LOWEST_PRIORITY)  # also of the disk: ioprio_set(2)
    answers = Answers(descriptor)
    last: protocol.Finished | protocol.Failed
    try:
        last = trio.run(serve, request, answers, Node.of_this_machine())
    except BaseException as raised:
        error = first_error(raised)
        if isinstance(error, BrokenPipeError):
            return protocol.EXIT_INTERRUPTED
        if isinstance(error, LakeError):
            last = protocol.Failed(message=protocol.printable(str(error)), exit_code=error.exit_code)
        else:
            traceback.print_exception(error)
            last = protocol.Failed(message=f"internal error ({type(error).__name__})")
    return answers.finish(last)


def run_process(run: Callable[[Sequence[str], int], int]) -> None:
    """End this process with the exit code of ``run``. Only answers go to standard output: output of libraries goes to
    standard error."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.exit(run(sys.argv[1:], descriptor))


if __name__ == "__main__":
    run_process(run)
