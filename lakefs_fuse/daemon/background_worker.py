"""Runs a command of `admin_worker` for the daemon of a mount: at the lowest priority, beside the mount.

What always holds:

* *ends with its daemon*: the daemon alone can read the answers of the worker. When it dies, the kernel closes that
  pipe, and the worker cancels its command;
* *bounded disk*: temporary files are in one directory, which exists only while the worker runs. A worker is ended if
  the free space of the disk falls below the amount that the mount keeps free;
* *no secrets*: the request comes by a descriptor, and credentials are in the environment only.

Tasks of the trio thread; files are removed in a worker thread. A crash of both processes leaves the directory, which
the next run removes, and so does `clear`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.control.supervision import memory_file
from lakefs_fuse.environment import failpoints
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import EXIT_FAILURE, MALFORMED, CacheError, LakeError, first_error

WORKER: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.daemon.admin_worker")
END_S_MAX = 5.0
"""Time to end after SIGTERM; then it is killed, which leaves the same as a crash."""
RUN_S_MAX = 86400.0
ROOM_CHECK_S = 2.0
ERRORS_BYTES_MAX = 4096
"""Of its standard error, the end of which is logged."""

log = logging.getLogger(__name__)


class BackgroundWorker:
    """See the module's head. ``make_room``, called in one of ``threads``, frees a number of bytes in ``directory`` in
    addition to those that stay free, and returns whether it succeeded. Uploads send at most ``upload_bytes_s_max``, if
    that is not 0."""

    def __init__(
        self,
        store: StoreConfig,
        directory: Path,
        make_room: Callable[[int], bool],
        threads: Threads,
        *,
        upload_bytes_s_max: int = 0,
        program: Sequence[str] = WORKER,
    ) -> None:
        self._store, self._directory, self._make_room, self._program = store, directory, make_room, program
        self._threads = threads
        self._upload_bytes_s_max = upload_bytes_s_max
        self.step = ""
        """What the worker is doing now; empty while none runs."""

    async def run(self, command: str, args: msgspec.Struct, *, room_bytes: int) -> protocol.Finished | protocol.Failed:
        """The answer of the command; ``room_bytes`` is the space that its temporary files need. Cancelling ends the
        worker. Raises LakeError if it cannot be run, or ends without an answer."""
        await self._require_room(room_bytes)
        request = protocol.Request(
            store=self._store,
            command=command,
            args=msgspec.Raw(msgspec.json.encode(args)),
            scratch=str(self._directory),
            upload_bytes_s_max=self._upload_bytes_s_max,
            background=True,
        )
        self.step = "starting"
        try:
            async with self._scratch(), self._process(protocol.encode(request)) as process:
                return await self._follow(process)
        except BaseExceptionGroup as group:
            if isinstance(error := first_error(group), LakeError):
                raise error from None
            raise
        finally:
            self.step = ""

    async def clear(self) -> None:
        """Remove the files of a worker that was killed together with its daemon."""
        await self._threads.run(lambda: shutil.rmtree(self._directory, ignore_errors=True))

    async def _require_room(self, room_bytes: int) -> None:
        if not await self._threads.run(self._make_room, room_bytes):
            raise CacheError(
                f"not enough disk in {self._directory.parent} for the temporary files of maintenance "
                f"({room_bytes:,} bytes, and what --free-space leaves alone)"
            )

    @asynccontextmanager
    async def _scratch(self) -> AsyncIterator[None]:
        await self.clear()
        try:
            self._directory.mkdir(mode=0o700)
        except OSError as error:
            raise CacheError(f"{self._directory} cannot be made: {error.strerror}") from error
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                await self.clear()

    @asynccontextmanager
    async def _process(self, request: bytes) -> AsyncIterator[trio.Process]:
        descriptor = memory_file(request)
        try:
            process = await trio.lowlevel.open_process(
                [*self._program, "--request-fd", str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[descriptor],
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != failpoints.VARIABLE},
            )
        except OSError as error:
            raise LakeError(f"the worker of maintenance cannot be started: {error.strerror}") from error
        finally:
            os.close(descriptor)
        log.info("the worker of maintenance begins (pid %d)", process.pid)
        try:
            yield process
        finally:
            with trio.CancelScope(shield=True):
                await _end(process)

    async def _follow(self, process: trio.Process) -> protocol.Finished | protocol.Failed:
        assert process.stdout is not None and process.stderr is not None
        answers: list[protocol.Finished | protocol.Failed] = []
        errors = bytearray()

        async def read_errors(stream: trio.abc.ReceiveStream) -> None:
            async for piece in stream:
                errors.extend(piece)
                del errors[:-ERRORS_BYTES_MAX]

        with trio.move_on_after(RUN_S_MAX) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_room)
                async with trio.open_nursery() as reading:
                    reading.start_soon(read_errors, process.stderr)
                    await self._read_answers(process.stdout, answers)
                await process.wait()
                nursery.cancel_scope.cancel()
        if errors:
            log.info("the worker of maintenance says: %s", errors.decode(errors="replace").strip())
        if scope.cancelled_caught:
            raise LakeError(f"the worker of maintenance took longer than {RUN_S_MAX:g} s and was ended")
        if not answers:
            return protocol.Failed(
                message=f"the worker of maintenance ended without an answer (status {process.returncode})",
                exit_code=EXIT_FAILURE,
            )
        return answers[-1]

    async def _read_answers(
        self, stream: trio.abc.ReceiveStream, answers: list[protocol.Finished | protocol.Failed]
    ) -> None:
        buffer = bytearray()
        async for piece in stream:
            *lines, buffer = (buffer + piece).split(b"\n")
            if len(buffer) > protocol.LINE_BYTES_MAX:
                raise LakeError("the worker of maintenance sent an answer that is too long")
            for line in lines:
                try:
                    answer = protocol.decode_answer(bytes(line))
                except MALFORMED as error:
                    raise LakeError(f"the worker of maintenance sent an invalid answer: {error}") from error
                if isinstance(answer, protocol.Finished | protocol.Failed):
                    answers.append(answer)
                elif isinstance(answer, protocol.Progress):
                    self.step = answer.what
                elif isinstance(answer, protocol.Note):
                    log.info("%s", answer.text)

    async def _watch_room(self) -> None:
        while True:
            await trio.sleep(ROOM_CHECK_S)
            await self._require_room(0)


async def _end(process: trio.Process) -> None:
    """SIGTERM, and SIGKILL after END_S_MAX; both do nothing to a process that has ended."""
    process.terminate()
    with trio.move_on_after(END_S_MAX):
        await process.wait()
    process.kill()
    await process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.aclose()
