"""The server of the control socket, and the statistics that it sends.

What always holds: only the owner of the daemon and root are answered (*private control*); a slow or broken client takes
one of CLIENTS_MAX places for a bounded time (*bounded clients*); an error while answering ends that connection alone.
Tasks of the trio thread. The socket file is removed when the server ends; a crash leaves it, and the next server
removes it after it finds that no process answers.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import trio
from msgspec import structs

from lakefs_fuse import __version__
from lakefs_fuse.config import MountConfig
from lakefs_fuse.control import protocol
from lakefs_fuse.errors import LakeError, MountError
from lakefs_fuse.metrics import Unfinished, Warming

CLIENTS_MAX = 16
"""Connections, except those that wait for a name."""
PLACE_S_MAX = 1.0
"""Time a client waits for a free connection; many waits that end at the same time use all of them for a moment."""
WAITS_MAX = 256
"""Waits for names: each is a connection, and a lookup in the tree at each change of it."""
IDLE_S_MAX = 60.0
"""Maximum time between two requests of a connection."""
SEND_S_MAX = 10.0
"""Maximum time for a client to read one line."""
PROGRESS_INTERVAL_S = 0.25
WAIT_INTERVAL_S = 1.0
"""As PROGRESS_INTERVAL_S, of a wait for a name: within this time the daemon notices that its client has ended."""
PAUSE_SHARE = 20
"""Measuring the progress of many files takes time; the pause before the next one is this many times longer."""

log = logging.getLogger(__name__)


Paths = Sequence[tuple[str, str]]


async def _check_nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class ServedLake:
    """The lake of a mount: the ``id`` of its record, empty without one, and the capabilities of its store.
    ``sent_bytes`` is a number that grows while uploads send; ``check_identity`` raises LakeError where the store has
    another lake by now. ``unknown`` are features of the lake without which this program cannot write it: the mount is
    read-only."""

    id: str
    capabilities: dict[str, object]
    sent_bytes: Callable[[], int] = lambda: 0
    check_identity: Callable[[], Awaitable[None]] = _check_nothing
    unknown: tuple[str, ...] = ()


class CacheView(Protocol):
    """The interface of a filesystem's cache to the control socket; paths are those of `protocol.SelectPaths`."""

    async def warm_paths(
        self, paths: Paths, progress: Warming, *, bytes_s_max: int, partial: bool, background: bool
    ) -> dict[str, object]: ...
    async def pin_paths(
        self, paths: Paths, progress: Warming, *, bytes_s_max: int, background: bool
    ) -> dict[str, object]: ...
    async def unpin_paths(self, paths: Paths) -> dict[str, object]: ...
    async def evict_paths(self, paths: Paths) -> dict[str, object]: ...
    async def list_paths(self, paths: Paths, *, pinned: bool) -> dict[str, object]: ...
    def stop(self) -> int: ...
    def read_ahead(self, paths: Sequence[str]) -> None: ...


class FilesystemView(Protocol):
    """What the control socket reads and requests from a filesystem."""

    @property
    def residency(self) -> CacheView: ...
    async def read_statistics(self) -> dict[str, object]: ...
    async def list_unfinished(self, rows_max: int | None = None) -> Sequence[Unfinished]: ...
    async def make_durable(self, path: str = "", *, only_closed: bool = False) -> None: ...
    async def finish_orphan(self, id: str, *, incomplete: bool = False) -> None: ...
    async def abort_orphan(self, id: str) -> None: ...
    async def refresh(self, path: str = "", *, recursive: bool = False) -> dict[str, object]: ...
    async def clone(self, source: str, target: str, *, force: bool = False) -> None: ...
    async def wait_path(self, path: str, version: str, timeout_s: float | None) -> None: ...


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wire_files(files: Sequence[Unfinished]) -> tuple[Unfinished, ...]:
    """The first protocol.FILES_MAX, with names as JSON can carry them."""
    return tuple(
        structs.replace(file, path=protocol.printable(file.path), error=protocol.printable(file.error))
        for file in files[: protocol.FILES_MAX]
    )


def below(path: str, root: str) -> bool:
    """Whether ``path`` is ``root`` or under it, both relative to the mount; an empty root holds everything."""
    return not root or path == root or path.startswith(root + "/")


async def not_durable(fs: FilesystemView, path: str = "") -> list[Unfinished]:
    """Files to be uploaded, and orphans with failed writes; other orphans wait for a decision of the user."""
    files = await fs.list_unfinished()
    return [file for file in files if (file.state != "orphan" or file.missing) and below(file.path, path)]


async def _measure_nothing() -> protocol.Progress:
    return protocol.NOTHING


class ControlServer:
    """Answers control requests about one filesystem until cancelled."""

    def __init__(
        self,
        fs: FilesystemView,
        config: MountConfig,
        *,
        lake: ServedLake,
        request_unmount: Callable[[], None],
        clock: Callable[[], float],
        restarts: int = 0,
        starting: bool = False,
        allowed_uids: frozenset[int] | None = None,
    ) -> None:
        self._fs = fs
        self._config = config
        self._lake = lake
        self._request_unmount = request_unmount
        self._clock = clock
        self._restarts = restarts
        self._is_starting, self._is_draining = starting, False
        self._started_s = clock()
        self._clients, self._place_left = 0, trio.Event()
        self._allowed_uids = frozenset((0, os.geteuid())) if allowed_uids is None else allowed_uids
        self._over = trio.Event()
        self._ending: protocol.Done | protocol.Failed = protocol.Done()
        self.waiting = 0
        """Clients that wait for the end."""
        self._nobody_waits = trio.Event()
        self._waits: list[trio.CancelScope] = []
        """Of the clients that wait for a name."""

    def begin_serving(self) -> None:
        """The mount exists: from now on it is this daemon's own."""
        self._is_starting = False

    def begin_draining(self) -> None:
        """The mount has ended, and no name will be seen in it."""
        self._is_starting, self._is_draining = False, True
        for scope in self._waits:
            scope.cancel()

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection. Raises nothing that a client causes."""
        with trio.move_on_after(PLACE_S_MAX):
            while self._clients >= CLIENTS_MAX:
                await self._place_left.wait()
        if self._clients >= CLIENTS_MAX:
            await self._refuse(stream, f"{CLIENTS_MAX} control connections are open already: try again later")
            return
        self._clients += 1
        try:
            async with stream:
                await self._converse(stream)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass
        except* Exception:
            log.exception("a control connection failed")
        finally:
            self._leave_place()

    def _leave_place(self) -> None:
        self._clients -= 1
        self._place_left.set()
        self._place_left = trio.Event()

    async def _refuse(self, stream: trio.SocketStream, why: str) -> None:
        try:
            async with stream:
                await self._send(stream, protocol.Failed(message=why))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass

    async def _converse(self, stream: trio.SocketStream) -> None:
        uid = peer_uid(stream.socket)
        if uid not in self._allowed_uids:
            log.warning("control connection of uid %d refused", uid)
            await self._refuse(stream, "this mount belongs to another user")
            return
        lines, selection = LineReader(stream), list[tuple[str, str]]()
        while (line := await lines.next_line()) is not None:
            try:
                request = protocol.decode_request(line)
            except LakeError as error:
                await self._refuse(stream, str(error))
                return
            if isinstance(request, protocol.SelectPaths):
                selection += request.paths
                if len(selection) > protocol.SELECTED_MAX:
                    await self._refuse(stream, f"more than {protocol.SELECTED_MAX} paths: name their directories")
                    return
                await self._send(stream, protocol.Done())
            else:
                await self._answer(stream, request, selection)
                selection.clear()

    async def _answer(self, stream: trio.SocketStream, request: protocol.Request, selection: Paths) -> None:
        match request:
            case protocol.WarmCache() | protocol.ListCache() | protocol.EvictCache() | protocol.UnpinCache():
                await self._ask_cache(stream, request, selection)
            case protocol.MakeDurable(path):
                await self._make_durable(stream, path.strip("/"))
            case protocol.WaitEnd():
                await self._wait_end(stream)
            case protocol.Refresh() | protocol.Clone() | protocol.FinishOrphan() | protocol.AbortOrphan():
                change = partial(self._change, request)
                await self._send(stream, await self._work(stream, request, change, _measure_nothing))
            case protocol.WaitPath():
                await self._wait_path(stream, request)
            case _:
                await self._send(stream, await self._attempt(request, partial(self._reply, request)))

    async def _attempt(
        self, request: protocol.Request, work: Callable[[], Awaitable[protocol.Reply]]
    ) -> protocol.Reply:
        """The reply of ``work``, `Failed` for every error of the filesystem."""
        try:
            return await work()
        except LakeError as error:
            return protocol.Failed(message=str(error), exit_code=error.exit_code)
        except Exception as error:
            log.exception("control request %s failed", type(request).__name__)
            return protocol.Failed(message=f"internal error ({type(error).__name__}): see the daemon's log")

    async def _reply(self, request: protocol.Request) -> protocol.Reply:
        match request:
            case protocol.Stats():
                return protocol.Statistics(await self.statistics())
            case protocol.GetStore():
                config = self._config
                return protocol.StoreOf(config.store, config.immutable, config.dataset, self._lake.id)
            case protocol.ListUnfinished(orphans, skip):
                files = [file for file in await self._fs.list_unfinished() if file.state == "orphan" or not orphans]
                return protocol.UnfinishedFiles(wire_files(files[max(0, skip) :]), len(files))
            case protocol.StopWarming():
                return protocol.Statistics({"stopped": self._fs.residency.stop()})
            case protocol.ReadAhead(paths):
                self._fs.residency.read_ahead(paths)
            case protocol.Unmount():
                self._request_unmount()
            case protocol.Ping():
                return protocol.Hello(
                    pid=os.getpid(),
                    version=__version__,
                    source=str(self._config.store.source),
                    mountpoint=self._config.mountpoint,
                    log_file=self._config.log_file or "",
                    starting=self._is_starting,
                    draining=self._is_draining,
                )
        return protocol.Done()

    async def statistics(self) -> dict[str, object]:
        """The values of ``stats --json``: those of the filesystem with memory, mount, daemon and files added."""
        unfinished = wire_files(await self._fs.list_unfinished(protocol.FILES_MAX))
        values, config = await self._fs.read_statistics(), self._config
        memory = values.get("memory")
        return {
            **values,
            "memory": {**(memory if isinstance(memory, dict) else {}), "rss": resident_bytes()},
            "daemon": {
                "pid": os.getpid(),
                "version": __version__,
                "uptime_s": round(self._clock() - self._started_s, 3),
                "restarts": self._restarts,
                "supervised": config.supervise,
            },
            "mount": {
                "source": str(config.store.source),
                "mountpoint": config.mountpoint,
                "cache_dir": config.cache_dir,
                "log_file": config.log_file or "",
                "read_only": config.read_only,
                "needs_newer_program": list(self._lake.unknown),
            },
            "capabilities": self._lake.capabilities,
            "unfinished": [msgspec.to_builtins(file) for file in unfinished],
        }

    async def _change(
        self, request: protocol.Refresh | protocol.Clone | protocol.FinishOrphan | protocol.AbortOrphan
    ) -> protocol.Reply:
        """A client that disconnects cancels it: an immutable mount keeps its state, nothing is copied, unless the
        commit is being sent, and an orphan stays."""
        match request:
            case protocol.Refresh(path, recursive):
                await self._lake.check_identity()
                return protocol.Statistics(await self._fs.refresh(path.strip("/"), recursive=recursive))
            case protocol.Clone(source, target, force):
                await self._fs.clone(source.strip("/"), target.strip("/"), force=force)
            case protocol.FinishOrphan(id, incomplete):
                await self._fs.finish_orphan(id, incomplete=incomplete)
            case protocol.AbortOrphan(id):
                await self._fs.abort_orphan(id)
        return protocol.Done()

    async def _ask_cache(self, stream: trio.SocketStream, request: protocol.CacheRequest, paths: Paths) -> None:
        """A client that disconnects cancels it."""
        progress = Warming()

        async def work() -> protocol.Reply:
            return protocol.Statistics(await self._answer_about_cache(request, paths, progress))

        async def measure() -> protocol.Progress:
            return protocol.Progress(
                bytes_done=progress.fetch_bytes_done,
                bytes_total=progress.fetch_bytes_total,
                files_left=progress.files_total - progress.files_done,
                files_total=progress.files_total,
                stage=progress.stage,
                unfit_bytes=progress.unfit_bytes,
            )

        await self._send(stream, await self._work(stream, request, work, measure))

    async def _answer_about_cache(
        self, request: protocol.CacheRequest, paths: Paths, progress: Warming
    ) -> dict[str, object]:
        cache = self._fs.residency
        match request:
            case protocol.ListCache(pinned):
                return await cache.list_paths(paths, pinned=pinned)
            case protocol.EvictCache():
                return await cache.evict_paths(paths)
            case protocol.UnpinCache():
                return await cache.unpin_paths(paths)
            case protocol.WarmCache(bytes_s_max=rate, background=background, pin=True):
                return await cache.pin_paths(paths, progress, bytes_s_max=rate, background=background)
            case protocol.WarmCache(bytes_s_max=rate, background=background, partial=partial):
                return await cache.warm_paths(paths, progress, bytes_s_max=rate, partial=partial, background=background)

    async def _wait_path(self, stream: trio.SocketStream, request: protocol.WaitPath) -> None:
        """Wait for a name; a client that disconnects, and the end of the mount, cancel it."""
        if len(self._waits) >= WAITS_MAX:
            await self._send(stream, protocol.Failed(message=f"{WAITS_MAX} waits are under way: try again later"))
            return
        scope = trio.CancelScope()
        if self._is_draining:
            scope.cancel()

        async def work() -> protocol.Reply:
            with scope:
                await self._fs.wait_path(request.path.strip("/"), request.version, request.timeout_s)
                return protocol.Done()
            return protocol.Failed(message="the mount has ended")

        self._leave_place()
        self._waits.append(scope)
        try:
            reply = await self._work(stream, request, work, _measure_nothing, WAIT_INTERVAL_S)
        finally:
            self._waits.remove(scope)
            self._clients += 1
        await self._send(stream, reply)

    async def _make_durable(self, stream: trio.SocketStream, path: str) -> None:
        """Wait until files are durable; a client that disconnects cancels the wait, not the uploads."""

        async def work() -> protocol.Reply:
            await self._fs.make_durable(path)
            return protocol.Done()

        reply = await self._work(stream, protocol.MakeDurable(path), work, self._meter(path))
        if isinstance(reply, protocol.Failed):
            reply = structs.replace(reply, files=wire_files(await not_durable(self._fs, path)))
        await self._send(stream, reply)

    async def _work(
        self,
        stream: trio.SocketStream,
        request: protocol.Request,
        work: Callable[[], Awaitable[protocol.Reply]],
        measure: Callable[[], Awaitable[protocol.Progress]],
        interval_s: float | None = None,
    ) -> protocol.Reply:
        """Send `Progress` until ``work`` has ended; its reply."""
        finished, replies = trio.Event(), list[protocol.Reply]()

        async def run() -> None:
            replies.append(await self._attempt(request, work))
            finished.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await self._send_progress(stream, measure, finished, interval_s)
        return replies[0]

    def _meter(self, path: str) -> Callable[[], Awaitable[protocol.Progress]]:
        """Measures the bytes below ``path`` that are stored and to be stored, over a changing list of files.

        A file that left the list counts as stored."""
        sizes: dict[str, int] = {}
        """Of the files in the list."""
        stored = 0

        async def measure() -> protocol.Progress:
            nonlocal sizes, stored
            files = await not_durable(self._fs, path)
            before, sizes = sizes, {file.id: file.bytes for file in files}
            stored += sum(size for id, size in before.items() if id not in sizes)
            left = sum(max(0, file.bytes - file.bytes_done) for file in files)
            total = stored + sum(sizes.values())
            return protocol.Progress(bytes_done=total - left, bytes_total=total, files_left=len(files))

        return measure

    async def _send_progress(
        self,
        stream: trio.SocketStream,
        measure: Callable[[], Awaitable[protocol.Progress]],
        finished: trio.Event,
        interval_s: float | None = None,
    ) -> None:
        while not finished.is_set():
            began_s = self._clock()
            progress = await measure()
            pause_s = max(interval_s or PROGRESS_INTERVAL_S, PAUSE_SHARE * (self._clock() - began_s))
            await self._send(stream, progress)
            with trio.move_on_after(pause_s):
                await finished.wait()

    async def _wait_end(self, stream: trio.SocketStream) -> None:
        self.waiting += 1
        try:
            await self._send_progress(stream, self._meter(""), self._over)
            await self._send(stream, self._ending)
        finally:
            self.waiting -= 1
            if not self.waiting:
                self._nobody_waits.set()

    async def end(self, error: str = "") -> None:
        """Send the result of draining to the clients that wait for it, for at most SEND_S_MAX. Called once."""
        if error:
            self._ending = protocol.Failed(message=error, files=wire_files(await not_durable(self._fs)))
        self._nobody_waits = trio.Event()
        self._over.set()
        if self.waiting:
            with trio.move_on_after(SEND_S_MAX):
                await self._nobody_waits.wait()

    async def _send(self, stream: trio.SocketStream, message: protocol.Reply) -> None:
        with trio.fail_after(SEND_S_MAX):
            await stream.send_all(protocol.encode(message))


class LineReader:
    """Lines of a stream, each bounded in length and in the time it may take to come."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def next_line(self) -> bytes | None:
        """The next line without its newline, or None at the end, after IDLE_S_MAX of silence, or if it is too long."""
        with trio.move_on_after(IDLE_S_MAX):
            while (end := self._buffer.find(b"\n")) < 0:
                if len(self._buffer) > protocol.REQUEST_BYTES_MAX:
                    return None
                received = await self._stream.receive_some(protocol.REQUEST_BYTES_MAX)
                if not received:
                    return None
                self._buffer += received
            if end > protocol.REQUEST_BYTES_MAX:
                return None
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            return line
        return None


def peer_uid(connection: trio.socket.SocketType) -> int:
    """The user on the other end of a Unix socket, as the kernel recorded it at connect."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def listen(path: Path) -> socket.socket:
    """A listening socket at ``path`` with mode 0600. Raises MountError where another daemon answers there."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise MountError(
                f"control socket {path}: {error.strerror or error}: remove it if no process uses it"
            ) from error
        else:
            raise MountError(f"another daemon answers on {path} for this mountpoint: unmount it first")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        # Between bind and here the directory's mode 0700 keeps others out.
        path.chmod(0o600)
        listener.listen(WAITS_MAX + CLIENTS_MAX)
    except OSError as error:
        listener.close()
        raise MountError(f"control socket {path}: {error.strerror or error}") from error
    return listener


@asynccontextmanager
async def serve_control(server: ControlServer, path: Path) -> AsyncIterator[None]:
    """Serve on ``path`` while the body runs; connections that are open at its end are closed."""
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listen(path)))
    inode = path.stat().st_ino
    try:
        async with listener, trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, server.handle, [listener])
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()
    finally:
        try:
            # Not a socket that another process has created there since.
            if path.stat().st_ino == inode:
                path.unlink()
        except OSError:
            pass
