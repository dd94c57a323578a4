"""Worker threads: the only way in which a node leaves its trio thread.

What always holds (*injected threads*): no module below `daemon` starts a thread but through `Threads`
(`tests/test_seams.py`), so that a simulation runs everything in one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class Threads(Protocol):
    """Runs blocking calls beside the trio thread."""

    async def run(
        self,
        call: Callable[..., T],
        *arguments: object,
        limiter: trio.CapacityLimiter | None = None,
        abandon_on_cancel: bool = False,
    ) -> T:
        """What ``call`` returns or raises. ``limiter`` bounds calls that run at once (None: trio's own, 40). With
        ``abandon_on_cancel`` a cancelled caller leaves at once and the call ends by itself, else the caller waits."""

    def start(self, call: Callable[[], None], name: str) -> None:
        """Run ``call`` and do not wait for it; it must not raise. Raises RuntimeError where no thread can be had."""


class WorkerThreads:
    """Threads of the operating system."""

    run = staticmethod(trio.to_thread.run_sync)

    def start(self, call: Callable[[], None], name: str) -> None:
        threading.Thread(target=call, name=name).start()
