"""The daemon of one mount: `python -m lakefs_fuse.daemon.mount_daemon`, started by `lakefs-fuse mount`.

It reads a `MountConfig` as JSON from standard input, opens the lake, serves until the mount ends, and then drains
within a bound. *One answer*: the descriptor of ``--ready-fd`` gets one line, that the mount answers or why it does not.
SIGTERM and SIGINT unmount and drain; a second one that comes then ends draining. Bytes that cannot be stored stay in
staging, are named in the log, and make the exit code 1.

``--restarts`` is the number of daemons that the supervisor started before, and ``--replace`` the device (major:minor)
of the dead mount to replace: it is detached when the lake is open, right before the new mount is made. If it no longer
exists then, a user has unmounted it, and this daemon only stores the remaining files.

A crash leaves a dead mount until it is unmounted or replaced, the control socket, which the next daemon removes, and
dirty bytes in staging, for the next mount.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

import trio
from msgspec import structs

from lakefs_fuse import __version__
from lakefs_fuse.config import MountConfig
from lakefs_fuse.control.mounts import detach, device_at, is_dead, mount_at, unmount
from lakefs_fuse.control.runtime import server_socket_path
from lakefs_fuse.control.server import (
    PAUSE_SHARE,
    ControlServer,
    FilesystemView,
    ServedLake,
    not_durable,
    serve_control,
)
from lakefs_fuse.control.supervision import Answer, read_config
from lakefs_fuse.daemon import sd_notify as notify
from lakefs_fuse.daemon.logs import open_logs
from lakefs_fuse.environment.descriptor_limit import raise_file_limit
from lakefs_fuse.errors import EXIT_CRASHED, EXIT_FAILURE, LakeError, MountError, first_error
from lakefs_fuse.quantity import counted

DRAIN_S_MAX = 3600.0
"""Maximum total time for uploads after unmounting."""
DRAIN_STALL_S_MAX = 180.0
"""Maximum time for them without progress."""
DRAIN_CHECK_S = 1.0
GIL_HELD_S_MAX = 0.001
"""Time after which a thread that runs Python gives the GIL to the loop; Python's own value is 5 ms. A request releases
the GIL several times. Twelve releases beside a thread that reads a commit of 200,000 operations took 39 to 75 ms
(medians of five rounds) with 5 ms, and 5 to 20 ms with this value."""
STOP_AGAIN_S_MIN = 1.0
"""A service manager signals a daemon and its supervisor, which forwards the signal: within this time that is one."""
DEAD_S_MAX = 10.0
"""A mount that does not answer statvfs(3) within this time is not dead."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3), as glibc's malloc.h numbers them."""
MMAP_BYTES_MIN = 12 << 20
"""Larger than a WRITE request and than a GET of a large file, so that those reuse the heap: touching fresh memory is a
quarter of the cost of receiving them. Smaller than a part of an upload, whose memory is returned immediately."""
TRIM_BYTES_MIN = 32 << 20
"""Free memory at the end of the heap that is kept for later requests."""
ARENAS_MAX = 2

log = logging.getLogger("lakefs_fuse.daemon.mount_daemon")


Task: TypeAlias = Callable[[], Awaitable[None]]
Fs = TypeVar("Fs", bound=FilesystemView)
Fs_contra = TypeVar("Fs_contra", bound=FilesystemView, contravariant=True)


class Serve(Protocol[Fs_contra]):
    """Mounts, calls ``ready`` when the mount answers, returns when it has ended. Raises MountError."""

    def __call__(self, fs: Fs_contra, config: MountConfig, *, ready: Callable[[], None]) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Parts(Generic[Fs]):
    """The parts of a daemon, for tests to replace. A lake opens as (filesystem, lake, maintenance); the last is
    a task, which is cancelled when the mount ends."""

    open_lake: Callable[[MountConfig], AbstractAsyncContextManager[tuple[Fs, ServedLake, Task]]]
    serve: Serve[Fs]
    request_unmount: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Succession:
    """What a supervisor knows of the daemons before this one."""

    restarts: int = 0
    replace: str = ""
    """Device (major:minor) of the dead mount to replace; empty for none."""


class Readiness:
    """The one answer to the process that started the daemon; ``descriptor`` is None if none waits."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._is_serving = self._is_detached = False

    @property
    def is_serving(self) -> bool:
        """The mount answers, and no end was requested: an end of the daemon now is a crash."""
        return self._is_serving

    def report_ready(self) -> None:
        self._is_serving = True
        self._send(Answer())
        notify.notify(notify.READY)

    def report_failure(self, error: LakeError) -> None:
        """Answer with an error; after readiness this does nothing."""
        self._send(Answer(str(error), error.exit_code, self._is_detached))

    def record_detached(self) -> None:
        """The dead mount to be replaced is detached, and the new one is not mounted yet."""
        self._is_detached = True

    def end_serving(self) -> None:
        """The end of the mount was requested, or it has ended: from now on an end of the daemon is no crash."""
        self._is_serving = False

    def _send(self, answer: Answer) -> None:
        if self._descriptor is not None:
            answer.send(self._descriptor)
            self._descriptor = None


class Stage(Enum):
    """The stage of a daemon, which decides what a signal means."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Daemon(Generic[Fs]):
    """One mount, from opening the lake to the end of draining. Tasks of the trio thread."""

    def __init__(
        self, config: MountConfig, parts: Parts[Fs], readiness: Readiness, succession: Succession | None = None
    ) -> None:
        self._config = config
        self._parts = parts
        self._readiness = readiness
        self._succession = succession or Succession()
        self._stage = Stage.STARTING
        self._stop_asked = False
        self._end_requested = trio.Event()
        """Set when the mount was asked to end while it served."""
        self._startup = trio.CancelScope()
        self._draining = trio.CancelScope()

    async def run(self) -> int:
        """Serve the mount, and return the exit code. Raises LakeError where the mount could not be made."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch_signals)
            code = EXIT_FAILURE
            with self._startup:
                code = await self._serve_lake()
            nursery.cancel_scope.cancel()
        return code

    async def _watch_signals(self, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            last_s = float("-inf")
            async for number in signals:
                log.info("signal %s", signal.Signals(number).name)
                since_s, last_s = trio.current_time() - last_s, trio.current_time()
                if self._config.supervise and since_s < STOP_AGAIN_S_MIN:
                    continue
                if self._stage is Stage.STARTING:
                    self._startup.cancel()
                elif self._stage is Stage.SERVING:  # until the last file is closed
                    self._request_unmount()
                elif self._stop_asked:
                    self._draining.cancel()
                self._stop_asked = True
                self._readiness.end_serving()

    def _request_unmount(self) -> None:
        self._end_requested.set()
        self._parts.request_unmount()

    async def _serve_lake(self) -> int:
        path = server_socket_path(self._config.mountpoint)
        async with self._parts.open_lake(self._config) as (fs, lake, maintain):
            config = structs.replace(self._config, read_only=self._config.read_only or bool(lake.unknown))
            server = ControlServer(
                fs,
                config,
                lake=lake,
                request_unmount=self._request_unmount,
                clock=time.monotonic,
                restarts=self._succession.restarts,
                starting=bool(self._succession.replace),
            )

            def on_ready() -> None:
                server.begin_serving()
                self._on_ready()

            async with serve_control(server, path), trio.open_nursery() as nursery:
                was_cut_off = False
                if await self._may_mount():
                    store_closed = partial(self._store_closed_files, fs)
                    nursery.start_soon(_run_in, mounted := trio.CancelScope(), maintain, store_closed)
                    was_cut_off = await self._serve(fs, config, on_ready)
                    mounted.cancel()
                self._stage = Stage.DRAINING
                server.begin_draining()
                self._readiness.end_serving()
                log.info("unmounted")
                error = await self._drain(fs, lake, was_cut_off=was_cut_off)
                await server.end(error)
        log.info("closed")
        return EXIT_FAILURE if error else 0

    async def _serve(self, fs: Fs, config: MountConfig, on_ready: Callable[[], None]) -> bool:
        """Serve until the mount ends; True where it could not be unmounted as requested, and programs may still have
        files open, which they can no longer write."""
        was_cut_off = False
        try:
            await self._parts.serve(fs, config, ready=on_ready)
        except* LakeError as errors:
            if not self._end_requested.is_set():
                raise
            log.error("%s; the mount ends without that", first_error(errors))
            was_cut_off = True
        return was_cut_off

    async def _store_closed_files(self, fs: FilesystemView) -> None:
        """Begin to store when the end is requested, because a mount in use ends when its last file is closed."""
        await self._end_requested.wait()
        try:
            await fs.make_durable(only_closed=True)
        except* LakeError as errors:
            log.warning("%s; trying again when the mount has ended", first_error(errors))

    async def _may_mount(self) -> bool:
        """Detach a dead mount that is to be replaced; False if a user has unmounted it. Raises MountError."""
        device, point = self._succession.replace, self._config.mountpoint
        if not device:
            return True
        mounted = mount_at(point)
        dead = False
        if mounted is not None and mounted.is_fuse and mounted.device == device:
            with trio.move_on_after(DEAD_S_MAX):
                dead = await trio.to_thread.run_sync(is_dead, point, abandon_on_cancel=True)
        if not dead:
            log.warning(
                "%s was unmounted during the restart of the daemon: storing the remaining files, and ending", point
            )
            self._readiness.report_ready()
            return False
        await trio.to_thread.run_sync(lambda: detach(point, lazy=True))
        self._readiness.record_detached()
        return True

    def _on_ready(self) -> None:
        self._stage = Stage.SERVING
        log.info("%s is mounted at %s", self._config.store.source, self._config.mountpoint)
        self._readiness.report_ready()

    async def _drain(self, fs: FilesystemView, lake: ServedLake, *, was_cut_off: bool) -> str:
        """Store everything within bounds; the error, or an empty text. The log names files that are not stored.
        ``was_cut_off``: files that are open for writing are incomplete, and stay for the next mount."""
        error = f"draining took longer than {DRAIN_S_MAX:g} s, or sent nothing for {DRAIN_STALL_S_MAX:g} s"
        with self._draining:
            try:
                with trio.fail_after(DRAIN_S_MAX):
                    async with stall_guard(fs, lake.sent_bytes):
                        await fs.make_durable(only_closed=was_cut_off)
                if not (was_cut_off and await not_durable(fs)):
                    return ""
                error = "programs had them open for writing"
            except* LakeError as errors:
                error = str(first_error(errors))
            except* trio.TooSlowError:
                pass
        if self._draining.cancelled_caught:
            error = "a second signal ended draining"
        left = await not_durable(fs)
        log.error(
            "%s not in the store (%s); the bytes stay in %s: mount again to store them",
            counted(len(left), "file is", "files are"),
            error,
            self._config.cache_dir,
        )
        for file in left[:1000]:
            log.error("not in the store: %s (%d bytes, %s) %s", file.path, file.bytes, file.state, file.error)
        return f"{counted(len(left), 'file is', 'files are')} not in the store: {error}"


async def _run_in(scope: trio.CancelScope, *tasks: Task) -> None:
    with scope:
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)


@asynccontextmanager
async def stall_guard(fs: FilesystemView, sent_bytes: Callable[[], int]) -> AsyncIterator[None]:
    """Raises trio.TooSlowError (in a group) in the body when nothing was sent or stored for DRAIN_STALL_S_MAX."""

    async def watch() -> None:
        last, since = (-1, -1), trio.current_time()
        while True:
            began = trio.current_time()
            progress = sum(file.bytes - file.bytes_done + 1 for file in await not_durable(fs)), sent_bytes()
            pause_s = max(DRAIN_CHECK_S, PAUSE_SHARE * (trio.current_time() - began))
            if progress != last:
                last, since = progress, trio.current_time()
            elif trio.current_time() - since > DRAIN_STALL_S_MAX:
                raise trio.TooSlowError
            await trio.sleep(pause_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield
        nursery.cancel_scope.cancel()


def serve_real_lake(config: MountConfig, readiness: Readiness, succession: Succession) -> int:
    """Serve a lake, and return the exit code. Imports the layers, so that a missing library is an answer."""
    gc.disable()  # see `freeze_at_start`
    sys.setswitchinterval(GIL_HELD_S_MAX)
    try:
        from lakefs_fuse.daemon.lake_opener import open_lake
        from lakefs_fuse.kernel.session import Session
    except (ImportError, OSError) as error:
        raise LakeError(f"a library is missing ({error}): install libfuse3 and lakefs-fuse again") from error
    # Modules are loaded: relative entries of sys.path and the working directory are no longer needed.
    os.chdir("/")
    session = Session(device_at, unmount)
    parts = Parts(open_lake, freeze_at_start(session.serve), session.request_unmount)
    return trio.run(Daemon(config, parts, readiness, succession).run)


def freeze_at_start(serve: Serve[Fs]) -> Serve[Fs]:
    """Exempt objects that exist when the lake is open from garbage collection, because they live as long as the daemon.
    Collecting during the start takes a tenth of its time, and later it would delay requests."""

    async def serving(fs: Fs, config: MountConfig, *, ready: Callable[[], None]) -> None:
        gc.freeze()
        gc.enable()
        await serve(fs, config, ready=ready)

    return serving


def bound_malloc() -> None:
    """Set bounds of glibc's allocator, so that it returns memory.

    By default it raises its mmap threshold with every large buffer that is freed, and gives each thread an arena, and
    resident memory grows by 100 MiB and more."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library than glibc
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES_MIN)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES_MIN)
        mallopt(M_ARENA_MAX, ARENAS_MAX)


def run(argv: Sequence[str], serve: Callable[[MountConfig, Readiness, Succession], int] = serve_real_lake) -> int:
    """Run the daemon, and return the exit code; failures are logged and answered over ``--ready-fd``."""
    parser = argparse.ArgumentParser(prog="lakefs_fuse.daemon.mount_daemon")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--replace", default="")
    options = parser.parse_args(argv)
    readiness = Readiness(options.ready_fd)
    try:
        config = read_config(sys.stdin.buffer)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        open_logs(config, is_restart=options.restarts > 0)
        raise_file_limit()
        bound_malloc()
        log.info("lakefs-fuse %s, pid %d: %s at %s", __version__, os.getpid(), config.store.source, config.mountpoint)
        code = serve(config, readiness, Succession(options.restarts, options.replace))
        readiness.report_failure(MountError("a signal stopped the daemon before the mount was ready: mount again"))
        return code
    except BaseException as raised:
        error = first_error(raised)
        if isinstance(error, LakeError):
            log.error("%s", error)
            readiness.report_failure(error)
            return EXIT_CRASHED if readiness.is_serving else error.exit_code
        log.exception("the daemon failed")
        readiness.report_failure(MountError(f"internal error ({type(error).__name__}): see the log"))
        return EXIT_CRASHED if readiness.is_serving else EXIT_FAILURE


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(run(sys.argv[1:]))
