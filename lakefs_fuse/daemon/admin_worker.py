"""The process of a command beside the mounts: `python -m lakefs_fuse.daemon.admin_worker`, run by `cli.worker`.

It is a process of its own so that `lakefs-fuse --help` does not load what only this needs. It reads one
`worker_protocol.Request` from the descriptor that ``--request-fd`` names, opens the store, runs one command of
`COMMANDS`, and says on standard output, in JSON lines, how far it is and how it ended. Standard input is the command's
own (a tar stream, say); standard error is the terminal's.

A command is an async function ``(Context, its arguments) -> Finished``; whatever goes wrong for good it raises as a
LakeError, which becomes the last line. It calls ``context.report`` as often as it likes (lines are limited in rate) and
``context.note`` for what the user should see at once. To add one: a struct for its arguments in `worker_protocol`, an
entry in `COMMANDS` whose function imports the engine (in `admin`) when it is called, and a command in
`cli.lake_commands`, which calls `run_offline`: that shows progress, prints the result and returns the exit code.

SIGINT and SIGTERM cancel the command, which cleans up; a second one ends it at once. Each engine documents what a crash
leaves.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec
import trio

from lakefs_fuse import __version__
from lakefs_fuse.config import StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import ConfigError, LakeError
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import StoreClient, ThreadTransport
from lakefs_fuse.store.lake_record import LakeRecord, change_record, open_record
from lakefs_fuse.store.open import find_lake, open_store
from lakefs_fuse.store.protocol import ObjectStore

if TYPE_CHECKING:
    from lakefs_fuse.admin.commands import Work

REPORT_INTERVAL_S = 0.2

Args = TypeVar("Args", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Context:
    """What a command works with, on the trio thread."""

    client: StoreClient
    store: StoreConfig
    """Of the root of the lake."""
    path: str
    """The path in the lake that the command works on; empty for all of it."""
    report: Callable[[protocol.Progress], None]
    note: Callable[[str], None]
    node: Node
    change_record: Callable[[Callable[[LakeRecord | None], LakeRecord]], LakeRecord]
    """Blocking; see `lake_record.change_record`."""
    uploads_max: int = 4


class Runnable(Protocol):
    """A command in the registry, whatever its arguments."""

    @property
    def probes(self) -> bool: ...
    def changes(self, raw: msgspec.Raw) -> bool: ...
    def start(self, context: Context, raw: msgspec.Raw) -> Awaitable[protocol.Finished]: ...


@dataclass(frozen=True, slots=True)
class Command(Generic[Args]):
    """``probes``: what the store can do is found out and noted in the lake record, where that does not say it; without
    it the least is assumed then, which is enough for packs and for objects uploaded in order. ``writes`` answers
    whether the lake is changed, for which its features have to be known."""

    args: type[Args]
    run: Callable[[Context, Args], Awaitable[protocol.Finished]]
    probes: bool = False
    writes: Callable[[Args], bool] = lambda args: True

    def changes(self, raw: msgspec.Raw) -> bool:
        """Whether the command, with these arguments, changes the lake."""
        return self.writes(msgspec.json.decode(raw, type=self.args))

    def start(self, context: Context, raw: msgspec.Raw) -> Awaitable[protocol.Finished]:
        """Decodes the arguments and calls the function."""
        return self.run(context, msgspec.json.decode(raw, type=self.args))


async def _ingest(context: Context, args: protocol.IngestArgs) -> protocol.Finished:
    from lakefs_fuse.ingest.ingest import Ingest, open_source
    from lakefs_fuse.ingest.pack_filler import Packer, Totals

    def report(done: Totals, total: Totals | None) -> None:
        context.report(
            protocol.Progress(
                what="ingesting",
                files_done=done.files,
                bytes_done=done.bytes,
                files_total=None if total is None else total.files or None,
                bytes_total=None if total is None else total.bytes,
            )
        )

    packer = Packer(
        open_source(args.source, context.node.clock, context.node.threads),
        context.node.disk,
        path=context.path,
        prefix_bytes=len(context.store.source.prefix.encode()),
        directory=tempfile.gettempdir(),
    )
    ingest = Ingest(
        context.client, packer, context.node, uploads_max=context.uploads_max, report=report, note=context.note
    )
    began = trio.current_time()
    done = await ingest.run(count=args.count)
    return protocol.Finished(
        summary={**done.summary(), "seconds": round(trio.current_time() - began, 3)},
        text=done.describe(),
        exit_code=1 if done.refused else 0,
    )


def _work(context: Context) -> Work:
    from lakefs_fuse.admin.commands import Work

    return Work(
        client=context.client,
        store=context.store,
        path=context.path,
        progress=context.report,
        note=context.note,
        node=context.node,
        scratch=tempfile.gettempdir(),
    )


async def _pack(context: Context, args: protocol.PackArgs) -> protocol.Finished:
    from lakefs_fuse.admin.commands import run_pack

    return await run_pack(_work(context), args)


async def _gc(context: Context, args: protocol.GcArgs) -> protocol.Finished:
    from lakefs_fuse.admin.commands import run_gc

    return await run_gc(_work(context), args)


async def _snapshot(context: Context, args: protocol.SnapshotArgs) -> protocol.Finished:
    from lakefs_fuse.admin.commands import run_snapshot

    return await run_snapshot(_work(context), args)


async def _fsck(context: Context, args: protocol.FsckArgs) -> protocol.Finished:
    from lakefs_fuse.admin.commands import run_fsck

    return await run_fsck(_work(context), args)


async def _upgrade(context: Context, args: protocol.UpgradeArgs) -> protocol.Finished:
    from lakefs_fuse.admin.upgrade import run_upgrade

    return await run_upgrade(_work(context), args, context.change_record)


async def _checkpoint(context: Context, args: protocol.CheckpointArgs) -> protocol.Finished:
    from lakefs_fuse.admin.checkpoints import run_checkpoint

    return await run_checkpoint(_work(context), args)


async def _checkpoint_verify(context: Context, args: protocol.VerifyArgs) -> protocol.Finished:
    from lakefs_fuse.admin.checkpoints import run_verify

    return await run_verify(_work(context), args)


COMMANDS: dict[str, Runnable] = {
    "checkpoint": Command(protocol.CheckpointArgs, _checkpoint, writes=lambda args: False),
    "checkpoint-verify": Command(protocol.VerifyArgs, _checkpoint_verify, writes=lambda args: False),
    "pack": Command(protocol.PackArgs, _pack, probes=True),
    "gc": Command(protocol.GcArgs, _gc),
    "fsck": Command(protocol.FsckArgs, _fsck, writes=lambda args: args.repair),
    "snapshot": Command(protocol.SnapshotArgs, _snapshot),
    "ingest": Command(protocol.IngestArgs, _ingest),
    "upgrade": Command(protocol.UpgradeArgs, _upgrade, probes=True),
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
        """Write an answer, after any held progress. Raises BrokenPipeError where the reader has ended."""
        if self._held is not None:
            self._write(self._held)
            self._held = None
        self._write(answer)

    def _write(self, answer: protocol.Answer) -> None:
        line = memoryview(protocol.encode(answer))
        while line:
            line = line[os.write(self._descriptor, line) :]


async def run_command(request: protocol.Request, answers: Answers, node: Node) -> protocol.Finished:
    """Open the store, run a command, close the store. Raises LakeError, or a group of them."""
    command = COMMANDS[request.command]
    config, path = request.store, request.path
    if request.find_root:
        config, path = await trio.to_thread.run_sync(find_lake, config, node)
        if path:
            answers.send(protocol.Note(f"{path} is in the lake {config.source}"))
    store = await trio.to_thread.run_sync(open_store, config, node)
    try:
        client = await _connect(store, request, config, node, command)
        context = Context(
            client=client,
            store=config,
            path=path,
            report=answers.report,
            note=lambda text: answers.send(protocol.Note(text)),
            node=node,
            change_record=partial(change_record, store, node.clock),
            uploads_max=request.uploads_max,
        )
        return await command.start(context, request.args)
    finally:
        store.close()


async def _connect(
    store: ObjectStore, request: protocol.Request, config: StoreConfig, node: Node, command: Runnable
) -> StoreClient:
    open_it = partial(open_record, store, config, node.random.stream("probe"), node.clock, may_write=command.probes)
    opened = await trio.to_thread.run_sync(open_it)
    if opened.unknown and command.changes(request.args):
        named = ", ".join(opened.unknown)
        raise ConfigError(
            f"this lake has {named}, which lakefs-fuse {__version__} cannot write: install a newer version"
        )
    return StoreClient(
        store,
        opened.capabilities,
        Metrics().store,
        transport=ThreadTransport(node.threads, requests_max=config.requests_max, uploads_max=request.uploads_max),
        clock=node.clock,
        rng=node.random.stream("backoff"),
        retry_timeout_s=config.retry_timeout_s,
        commit_format=opened.commit_format,
    )


async def serve(request: protocol.Request, answers: Answers, node: Node) -> protocol.Finished | protocol.Failed:
    """Run a command until it ends or a signal cancels it; the last answer."""
    finished: protocol.Finished | None = None

    async def watch_signals(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
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
        with working:
            finished = await run_command(request, answers, node)
        nursery.cancel_scope.cancel()
    if finished is None:
        return protocol.Failed(message="interrupted", exit_code=protocol.EXIT_INTERRUPTED)
    return finished


def first_error(error: BaseException) -> BaseException:
    """The error inside the groups of nurseries; a LakeError before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(each) for each in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, LakeError)), leaves[0])


def run(argv: Sequence[str], descriptor: int) -> int:
    """Run one request, and return the exit code, which is also in the last answer on ``descriptor``."""
    parser = argparse.ArgumentParser(prog="lakefs_fuse.daemon.admin_worker")
    parser.add_argument("--request-fd", type=int, required=True)
    with open(parser.parse_args(argv).request_fd, "rb") as source:
        request = msgspec.json.decode(source.read(protocol.REQUEST_BYTES_MAX), type=protocol.Request)
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
    try:
        answers.send(last)
    except BrokenPipeError:
        pass  # The command line has ended.
    return last.exit_code


def main() -> None:
    """Send answers to standard output alone: what libraries print goes to standard error."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.exit(run(sys.argv[1:], descriptor))


if __name__ == "__main__":
    main()
