"""A lock with shared and exclusive holders: many writers of one file, or its publisher, never both.

Whoever asks for it exclusively keeps newcomers out, so a stream of writers cannot keep a `close()` waiting. Not
reentrant. A free gate is passed without a checkpoint. Used from trio tasks only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class Gate:
    """See the module's head."""

    def __init__(self) -> None:
        self._shared = 0
        self._exclusive = False
        self._exclusive_waiting = 0
        self._changed: trio.Event | None = None

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        while self._exclusive or self._exclusive_waiting:
            await self._wait()
        self._shared += 1
        try:
            yield
        finally:
            self._shared -= 1
            self._wake()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        self._exclusive_waiting += 1
        try:
            while self._exclusive or self._shared:
                await self._wait()
            self._exclusive = True
        finally:
            self._exclusive_waiting -= 1
            if not self._exclusive:
                self._wake()  # those whom this one kept out
        try:
            yield
        finally:
            self._exclusive = False
            self._wake()

    async def _wait(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
