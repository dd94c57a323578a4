"""A filesystem that the control socket can be pointed at: files that become durable when the test says so."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.control.server import ControlServer, ServedLake, serve_control
from lakefs_fuse.errors import FileError, LakeError, NotFound
from lakefs_fuse.metrics import Unfinished, Warming


@dataclass
class FakeFile:
    """A file that is not in the store."""

    id: str
    path: str
    bytes: int = 1000
    state: str = "writing"
    age_s: float = 1.0
    error: str = ""
    parts_done: int = 0
    bytes_done: int = 0
    missing: int = 0


@dataclass
class FakeCache:
    """Answers from its fields; a warm goes on until the test sets ``finish``."""

    warmed: list[tuple[str, str]] = field(default_factory=list)
    upcoming: list[str] = field(default_factory=list)
    finish: trio.Event = field(default_factory=trio.Event)
    was_cancelled: bool = False
    error: LakeError | None = None

    async def warm_paths(
        self, paths: Sequence[tuple[str, str]], progress: Warming, *, bytes_s_max: int, partial: bool, background: bool
    ) -> dict[str, object]:
        self.warmed += paths
        progress.stage, progress.files_total, progress.fetch_bytes_total = "fetching", len(paths), bytes_s_max
        try:
            await self.finish.wait()
        except trio.Cancelled:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return {"files": len(paths), "partial": partial, "background": background}

    async def pin_paths(
        self, paths: Sequence[tuple[str, str]], progress: Warming, *, bytes_s_max: int, background: bool
    ) -> dict[str, object]:
        return {"pinned": len(paths)}

    async def unpin_paths(self, paths: Sequence[tuple[str, str]]) -> dict[str, object]:
        return {"unpinned": len(paths)}

    async def evict_paths(self, paths: Sequence[tuple[str, str]]) -> dict[str, object]:
        return {"evicted": len(paths)}

    async def list_paths(self, paths: Sequence[tuple[str, str]], *, pinned: bool) -> dict[str, object]:
        return {"paths": [{"path": path} for path, _ in paths], "pinned": pinned}

    def stop(self) -> int:
        return 3

    def read_ahead(self, paths: Sequence[str]) -> None:
        self.upcoming += paths


@dataclass
class FakeFilesystem:
    """Answers from its fields; ``make_durable`` stores ``step`` bytes of every file each time somebody has looked."""

    files: list[FakeFile] = field(default_factory=list)
    refuse: str = ""
    explode: bool = False
    step: int = 500
    tick_s: float = 0.01
    durable_asked: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    looks: int = 0
    refreshed: int = 0
    cloned: list[tuple[str, str, bool]] = field(default_factory=list)
    refresh_error: LakeError | None = None
    there: set[str] = field(default_factory=set)
    waited: list[str] = field(default_factory=list)
    """Paths that are waited for."""
    residency: FakeCache = field(default_factory=FakeCache)
    store_is_away: trio.Event | None = None
    """Orphans are finished and aborted after it was set."""

    async def read_statistics(self) -> dict[str, object]:
        if self.explode:
            raise RuntimeError("a bug")
        dirty = [file for file in self.files if file.state != "orphan"]
        return {
            "upcalls": {"lookup": 3, "open": 0},
            "store": {
                "requests": {"get": 4, "put": 0},
                "latency_s_sum": {"get": 0.02},
                "latency_s_max": {"get": 0.01},
                "bytes": {"read": 4096, "written": 0},
                "retries": 1,
            },
            "cache": {"hits": 3, "misses": 1, "bytes": 2048},
            "dirty": {"files": len(dirty), "bytes": sum(file.bytes for file in dirty)},
            "memory": {"buffers": 7},
        }

    def unfinished(self) -> list[Unfinished]:
        self.looks += 1
        return [Unfinished(**vars(file)) for file in self.files]

    async def list_unfinished(self, rows_max: int | None = None) -> list[Unfinished]:
        return self.unfinished()[:rows_max]

    async def make_durable(self, path: str = "", *, only_closed: bool = False) -> None:
        """``only_closed`` leaves files of the state ``open``."""
        self.durable_asked.append(path)
        left = {"orphan", "open"} if only_closed else {"orphan"}
        while dirty := [file for file in self.files if file.state not in left]:
            if self.refuse:
                for file in dirty:
                    file.state, file.error = "failed", self.refuse
                raise LakeError(self.refuse)
            looks = self.looks
            while self.looks == looks:
                await trio.sleep(self.tick_s)
            for file in dirty:
                file.bytes_done = min(file.bytes, file.bytes_done + self.step)
                if file.bytes_done == file.bytes:
                    self.files.remove(file)

    async def finish_orphan(self, id: str, *, incomplete: bool = False) -> None:
        await self._take_orphan(id)
        self.finished.append(id)

    async def abort_orphan(self, id: str) -> None:
        await self._take_orphan(id)
        self.aborted.append(id)

    async def refresh(self, path: str = "", *, recursive: bool = False) -> dict[str, object]:
        if self.refresh_error is not None:
            raise self.refresh_error
        self.refreshed += 1
        return {"changed": self.refreshed}

    async def clone(self, source: str, target: str, *, force: bool = False) -> None:
        if source == "missing":
            raise FileError(errno.ENOENT, "missing does not exist")
        self.cloned.append((source, target, force))

    async def wait_path(self, path: str, version: str, timeout_s: float | None) -> None:
        """Waits until the test adds the path, or ``path@version``, to ``there``."""
        self.waited.append(path)
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            try:
                while (f"{path}@{version}" if version else path) not in self.there:
                    await trio.sleep(self.tick_s)
                return
            finally:
                self.waited.remove(path)
        raise FileError(errno.ETIMEDOUT, f"after {timeout_s:g} s it does not exist")

    async def _take_orphan(self, id: str) -> None:
        if self.store_is_away is not None:
            await self.store_is_away.wait()
        for file in self.files:
            if file.id == id and file.state == "orphan":
                self.files.remove(file)
                return
        raise NotFound(f"no orphan {id}")


def mount_config(mountpoint: Path | str, cache_dir: Path | str = "/nonexistent/cache") -> MountConfig:
    """A configuration that names nothing real."""
    return MountConfig(
        store=StoreConfig(source=Source.parse("s3://bucket/prefix")),
        mountpoint=str(mountpoint),
        cache_dir=str(cache_dir),
    )


def make_server(
    fs: FakeFilesystem,
    mountpoint: Path | str = "/mnt/lake",
    *,
    request_unmount: Callable[[], None] = lambda: None,
    allowed_uids: frozenset[int] | None = None,
    lake: ServedLake | None = None,
) -> ControlServer:
    """A real server over a fake filesystem."""
    return ControlServer(
        fs,
        mount_config(mountpoint),
        lake=lake or ServedLake("0123abcd", {"name": "fake", "notes": ["ranges answered with 200"]}),
        request_unmount=request_unmount,
        clock=trio.current_time,
        allowed_uids=allowed_uids,
    )


@contextmanager
def serving_in_thread(
    fs: FakeFilesystem, socket_path: Path, mountpoint: Path | str = "/mnt/lake", *, end_error: str | None = None
) -> Iterator[None]:
    """A control server on another thread, for tests of the blocking side.

    With ``end_error`` given, a first `WaitEnd` is told so: empty for a clean end.
    """
    started, stop = threading.Event(), trio.Event()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        server = make_server(fs, mountpoint)
        async with serve_control(server, socket_path):
            started.set()
            if end_error is not None:
                while not server.waiting and not stop.is_set():
                    await trio.sleep(0.01)
                await server.end(end_error)
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert started.wait(10), "the control server did not start"
        yield
    finally:
        tokens[0].run_sync_soon(stop.set)
        thread.join(10)
        assert not thread.is_alive()
