"""A lock with shared and exclusive holders: many writers of one file, or its publisher, never both.

Whoever asks for it exclusively keeps newcomers out, so a stream of writers cannot keep a `close()` waiting. Not
reentrant. Used from trio tasks only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class Gate:
    """See the module's head."""

    def __init__(self) -> None:
        self._condition = trio.Condition()
        self._shared = 0
        self._exclusive = False
        self._exclusive_waiting = 0

    def _is_closed(self) -> bool:
        return self._exclusive or self._exclusive_waiting > 0

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        if self._is_closed():
            async with self._condition:
                while self._is_closed():
                    await self._condition.wait()
        self._shared += 1
        try:
            yield
        finally:
            self._shared -= 1
            if not self._shared and self._exclusive_waiting:
                await self._wake()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        self._exclusive_waiting += 1
        try:
            async with self._condition:
                while self._exclusive or self._shared:
                    await self._condition.wait()
                self._exclusive = True
        except BaseException:
            self._exclusive_waiting -= 1
            await self._wake()  # those whom this one kept out
            raise
        self._exclusive_waiting -= 1
        try:
            yield
        finally:
            self._exclusive = False
            await self._wake()

    async def _wake(self) -> None:
        with trio.CancelScope(shield=True):
            async with self._condition:
                self._condition.notify_all()
