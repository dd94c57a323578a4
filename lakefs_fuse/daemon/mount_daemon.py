"""The daemon of one mount: `python -m lakefs_fuse.daemon.mount_daemon`, started by `lakefs-fuse mount`.

It reads a `MountConfig` as JSON from standard input, wires the layers together (the only place that knows them all),
serves until the mount is gone, then drains what is dirty within a bound. It says once, over the descriptor that
``--ready-fd`` names, that the mount answers or why it does not. SIGTERM and SIGINT unmount and drain; a second one
gives up draining. Bytes that could not be stored stay in staging, are named in the log, and make the exit code 1.

``--restarts`` says how many daemons its supervisor had started before it, and ``--replace`` which dead mount
(major:minor) it takes the place of: that is detached when the lake is open, right before the new one is made. If it is
gone by then, someone has unmounted it, and this daemon only stores what is left.

A crash leaves the mount dead until someone unmounts it or the next daemon replaces it, the control socket (the next
daemon removes it), and whatever was dirty in staging for the next mount.
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
from typing import BinaryIO, Generic, Protocol, TypeVar

import msgspec
import trio

from lakefs_fuse import __version__
from lakefs_fuse.config import MountConfig
from lakefs_fuse.control.mounts import detach, is_dead, mount_at
from lakefs_fuse.control.runtime import server_socket_path
from lakefs_fuse.control.server import ControlServer, FilesystemView, not_durable, serve_control
from lakefs_fuse.daemon import sd_notify as notify
from lakefs_fuse.daemon.logs import open_logs
from lakefs_fuse.environment.descriptor_limit import raise_file_limit
from lakefs_fuse.errors import EXIT_CRASHED, EXIT_FAILURE, ConfigError, LakeError, MountError

DRAIN_S_MAX = 3600.0
"""How long unmounting may go on uploading in all …"""
DRAIN_STALL_S_MAX = 180.0
"""… and how long without one more byte stored."""
DRAIN_CHECK_S = 1.0
STOP_AGAIN_S_MIN = 1.0
"""Of a supervised daemon: a service manager signals it and its supervisor, which passes that on; both mean one stop."""
DEAD_S_MAX = 10.0
"""A mount that does not answer statvfs(3) for so long is not a dead one."""
CONFIG_BYTES_MAX = 1 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3), as glibc's malloc.h numbers them."""
MMAP_BYTES_MIN = 12 << 20
"""Larger than a WRITE request, and than what a GET of a large file brings, so that those reuse the heap: to touch fresh
memory is a quarter of what receiving them costs. Smaller than a part of an upload, whose memory goes back at once."""
TRIM_BYTES_MIN = 32 << 20
"""Free memory at the end of the heap that is kept for the next requests."""
ARENAS_MAX = 2

log = logging.getLogger("lakefs_fuse.daemon.mount_daemon")


Fs = TypeVar("Fs", bound=FilesystemView)
Fs_contra = TypeVar("Fs_contra", bound=FilesystemView, contravariant=True)


class Serve(Protocol[Fs_contra]):
    """Mounts, calls ``ready`` when the mount answers, returns when it is gone. Raises MountError."""

    def __call__(self, fs: Fs_contra, config: MountConfig, *, ready: Callable[[], None]) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Parts(Generic[Fs]):
    """What a daemon is made of, so that tests can put others in. A lake opens as (filesystem, capabilities)."""

    open_lake: Callable[[MountConfig], AbstractAsyncContextManager[tuple[Fs, dict[str, object]]]]
    serve: Serve[Fs]
    request_unmount: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Succession:
    """What a supervisor says of the daemons before this one; without one, that there were none."""

    restarts: int = 0
    replace: str = ""
    """Device (major:minor) of the dead mount to take the place of."""


class Readiness:
    """The one line that whoever started the daemon waits for. ``descriptor`` is None where nobody does."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self.serving = False
        """The mount answers and is not to go: the end of the daemon now is a crash."""
        self.detached = False
        """The dead mount that was to be replaced is gone, and the new one is not there yet."""

    def ready(self) -> None:
        self.serving = True
        self._say({})
        notify.notify(notify.READY)

    def failed(self, error: LakeError) -> None:
        """After readiness this does nothing."""
        self._say({"error": str(error), "exit_code": error.exit_code, "detached": self.detached})

    def _say(self, answer: dict[str, object]) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, msgspec.json.encode(answer) + b"\n")
        except BrokenPipeError:
            pass  # Whoever waited has given up.
        os.close(self._descriptor)
        self._descriptor = None


class Stage(Enum):
    """What a signal means depends on it."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Daemon(Generic[Fs]):
    """One mount from open to drained. Lives on the trio thread."""

    def __init__(
        self, config: MountConfig, parts: Parts[Fs], readiness: Readiness, succession: Succession | None = None
    ) -> None:
        self._config = config
        self._parts = parts
        self._readiness = readiness
        self._succession = succession or Succession()
        self._stage = Stage.STARTING
        self._stop_asked = False
        self._startup = trio.CancelScope()
        self._draining = trio.CancelScope()

    async def run(self) -> int:
        """The exit code. Raises LakeError where the mount could not be made."""
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
                elif self._stop_asked:
                    self._draining.cancel()
                elif self._stage is Stage.SERVING:
                    self._parts.request_unmount()
                self._stop_asked = True
                self._readiness.serving = False

    async def _serve_lake(self) -> int:
        path = server_socket_path(self._config.mountpoint)
        async with self._parts.open_lake(self._config) as (fs, capabilities):
            server = ControlServer(
                fs,
                self._config,
                capabilities=capabilities,
                request_unmount=self._parts.request_unmount,
                clock=time.monotonic,
                restarts=self._succession.restarts,
            )
            server.starting = bool(self._succession.replace)

            def on_ready() -> None:
                server.starting = False
                self._on_ready()

            async with serve_control(server, path):
                if await self._may_mount():
                    await self._parts.serve(fs, self._config, ready=on_ready)
                self._stage = Stage.DRAINING
                server.starting, server.draining = False, True
                self._readiness.serving = False
                log.info("unmounted")
                error = await self._drain(fs)
                await server.end(error)
        log.info("closed")
        return EXIT_FAILURE if error else 0

    async def _may_mount(self) -> bool:
        """Make way where a dead mount is to be replaced; False if someone has unmounted that. Raises MountError."""
        device, point = self._succession.replace, self._config.mountpoint
        if not device:
            return True
        mounted = mount_at(point)
        dead = False
        if mounted is not None and mounted.is_fuse and mounted.device == device:
            with trio.move_on_after(DEAD_S_MAX):
                dead = await trio.to_thread.run_sync(is_dead, point, abandon_on_cancel=True)
        if not dead:
            log.warning("%s was unmounted while the daemon was being started again", point)
            self._readiness.ready()
            return False
        await trio.to_thread.run_sync(lambda: detach(point, lazy=True))
        self._readiness.detached = True
        return True

    def _on_ready(self) -> None:
        self._stage = Stage.SERVING
        log.info("%s is mounted at %s", self._config.store.source, self._config.mountpoint)
        self._readiness.ready()

    async def _drain(self, fs: FilesystemView) -> str:
        """What is not durable after a bounded effort, named in the log; empty if nothing."""
        error = "the time for it is over"
        with self._draining:
            try:
                with trio.fail_after(DRAIN_S_MAX):
                    async with stall_guard(fs):
                        await fs.make_durable()
                return ""
            except* LakeError as errors:
                error = str(first_error(errors))
            except* trio.TooSlowError:
                pass
        if self._draining.cancelled_caught:
            error = "told to end at once"
        left = not_durable(fs)
        log.error(
            "%d files are not in the store (%s); their bytes stay in %s", len(left), error, self._config.cache_dir
        )
        for file in left[:1000]:
            log.error("not in the store: %s (%d bytes, %s) %s", file.path, file.bytes, file.state, file.error)
        return f"{len(left)} files are not in the store: {error}"


@asynccontextmanager
async def stall_guard(fs: FilesystemView) -> AsyncIterator[None]:
    """Raises trio.TooSlowError (in a group) in the body when nothing was stored for DRAIN_STALL_S_MAX."""

    async def watch() -> None:
        last, since = -1, trio.current_time()
        while True:
            left = sum(file.bytes - file.bytes_done + 1 for file in not_durable(fs))
            if left != last:
                last, since = left, trio.current_time()
            elif trio.current_time() - since > DRAIN_STALL_S_MAX:
                raise trio.TooSlowError
            await trio.sleep(DRAIN_CHECK_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield
        nursery.cancel_scope.cancel()


def first_error(error: BaseException) -> BaseException:
    """What went wrong, out of the groups that nurseries wrap it in; an error of ours before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(each) for each in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, LakeError)), leaves[0])


def serve_real_lake(config: MountConfig, readiness: Readiness, succession: Succession) -> int:
    """The exit code. The layers are imported here so that a missing library is an answer, not a traceback."""
    gc.disable()  # see `keeping_what_is_there`
    try:
        from lakefs_fuse.daemon.lake_opener import open_lake
        from lakefs_fuse.kernel.session import Session
    except (ImportError, OSError) as error:
        raise LakeError(f"a library is missing ({error}): install libfuse3 and lakefs-fuse again") from error
    # Modules are loaded: a relative entry of sys.path, or a directory someone wants to unmount, is not needed any more.
    os.chdir("/")
    session = Session()
    parts = Parts(open_lake, keeping_what_is_there(session.serve), session.request_unmount)
    return trio.run(Daemon(config, parts, readiness, succession).run)


def keeping_what_is_there(serve: Serve[Fs]) -> Serve[Fs]:
    """What is made until the lake is open stays as long as the daemon, and is not searched for garbage: not until then,
    which takes a tenth of the time to start, and not later, when it would hold up requests."""

    async def serving(fs: Fs, config: MountConfig, *, ready: Callable[[], None]) -> None:
        gc.freeze()
        gc.enable()
        await serve(fs, config, ready=ready)

    return serving


def read_config(source: BinaryIO) -> MountConfig:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(source.read(CONFIG_BYTES_MAX), type=MountConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the daemon was given no usable configuration: {error}; use `lakefs-fuse mount`") from error


def bound_malloc() -> None:
    """Keep glibc from holding on to memory: left alone, it raises its mmap threshold with every large buffer that is
    freed, and gives each thread an arena of its own, and resident memory creeps up by 100 MiB and more."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library than glibc
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES_MIN)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES_MIN)
        mallopt(M_ARENA_MAX, ARENAS_MAX)


def run(argv: Sequence[str], serve: Callable[[MountConfig, Readiness, Succession], int] = serve_real_lake) -> int:
    """The exit code; every failure is told to whoever waits for readiness, and logged."""
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
        open_logs(config)
        raise_file_limit()
        bound_malloc()
        log.info("lakefs-fuse %s, pid %d: %s at %s", __version__, os.getpid(), config.store.source, config.mountpoint)
        code = serve(config, readiness, Succession(options.restarts, options.replace))
        readiness.failed(MountError("stopped by a signal before the mount was ready"))
        return code
    except BaseException as raised:
        error = first_error(raised)
        if isinstance(error, LakeError):
            log.error("%s", error)
            readiness.failed(error)
            return EXIT_CRASHED if readiness.serving else error.exit_code
        log.exception("the daemon failed")
        readiness.failed(MountError(f"internal error ({type(error).__name__}): see the log"))
        return EXIT_CRASHED if readiness.serving else EXIT_FAILURE


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(run(sys.argv[1:]))
