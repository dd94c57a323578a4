"""What the tests of write-back share: a mount under it, a store that goes away and comes back, and deaths."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import trio

from lakefs_fuse.errors import Unavailable
from tests.memory_store import MemoryStore, Request, When
from tests.vfs.lakes import Lake, lake

KIB = 1024
PART = 64 * KIB
LARGE = 5 * PART + 100
REACH_S_MAX = 20.0
NEVER_S = 1000.0
UPLOADS = frozenset({"create_multipart", "upload_part", "upload_part_copy", "complete_multipart", "abort_multipart"})
CHANGES = UPLOADS | {"put", "copy", "delete", "delete_many"}


class Outage:
    """A store's hook: nothing can be changed there while it is ``away``. ``then`` sees what gets through."""

    def __init__(self, store: MemoryStore, *, away: bool = True) -> None:
        self.away = away
        self.refused = 0
        self.then: Callable[[Request, When], None] = lambda _request, _when: None
        store.hook = self

    def __call__(self, request: Request, when: When) -> None:
        if self.away and when == "before" and request.what in CHANGES:
            self.refused += 1
            raise Unavailable("the store is away")
        self.then(request, when)


def writing_back(
    store: MemoryStore, cache: Path, *, delay_s: float = 0.0, **config: object
) -> AbstractAsyncContextManager[Lake]:
    """A mount under write-back whose store answers or fails at once."""
    settings = {"durability": "writeback", "writeback_delay_s": delay_s, "retry_timeout_s": 0.0, "pack": "never"}
    return lake(store, cache, **(settings | config))  # type: ignore[arg-type]


async def rewrite(m: Lake, path: str, data: bytes) -> None:
    """Emptied, written, closed."""
    handle = await m.open(path, os.O_RDWR | os.O_TRUNC)
    await m.fs.write(handle, 0, data)
    await m.close(handle)


def told(m: Lake) -> dict[str, int]:
    """What the statistics say of write-back."""
    of_writeback = m.fs.statistics()["writeback"]
    assert isinstance(of_writeback, dict)
    return of_writeback


async def until(holds: Callable[[], object]) -> None:
    with trio.fail_after(REACH_S_MAX):
        while not holds():
            await trio.sleep(0.002)


async def stored(m: Lake) -> None:
    """Everything accepted is in the store, by itself."""
    await until(lambda: not told(m)["files"] and not m.fs.unfinished())


async def state(m: Lake, path: str) -> str:
    return m.fs.xattr((await m.found(path)).inode, "user.lakefs.state").decode()


async def location(m: Lake, path: str) -> str:
    return m.fs.xattr((await m.found(path)).inode, "user.lakefs.location").decode()


def made_visible(store: MemoryStore) -> list[str]:
    """Keys in the order in which they got new bytes."""
    return [request.key for request in list(store.requests) if request.what in ("put", "complete_multipart")]


def die(cache: Path, target: Path) -> Path:
    """The cache directory as a daemon killed now would leave it; nothing of the daemon's own loop runs meanwhile. It
    has its name only when it is whole, for tests that wait for it while a worker thread makes it."""
    copied = target.with_name(f"{target.name}.copied")
    for is_last in (False, False, True):
        if not subprocess.run(["cp", "-a", "--sparse=always", str(cache), str(copied)], check=is_last).returncode:
            break
        shutil.rmtree(copied, ignore_errors=True)  # a worker thread removed what was about to be copied
    return copied.rename(target)
