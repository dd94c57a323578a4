"""Fetches the attributes of all files in a directory from the store, with one HEAD for each version.

A LIST does not contain modes, owners or mtimes set by users. If a mount has to show them exactly (``--attributes
objects``), they are fetched before a listing or a lookup is answered, because the kernel keeps the first answer.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import trio

from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.sync.nursery import for_each

ASKED_AT_ONCE = 256
"""Maximum of concurrent tasks; the client bounds the concurrent requests."""


def is_unasked(entry: Entry) -> bool:
    return not entry.flags & (Flag.ATTRIBUTES_KNOWN | Flag.LOCAL | Flag.SYMLINK)


async def ask_all(steps: Iterable[Sequence[Entry]], getattr: Callable[[int], Awaitable[Entry]]) -> None:
    """Call ``getattr`` for each entry whose attributes were never asked for; other tasks run after each of the
    ``steps``. Raises its errors; an entry that was removed in the meantime is skipped."""
    for entries in steps:
        unasked = [entry.inode for entry in entries if is_unasked(entry)]
        if unasked:
            await for_each(unasked, partial(_ask, getattr), min(ASKED_AT_ONCE, len(unasked)))
        await trio.lowlevel.checkpoint()


async def _ask(getattr: Callable[[int], Awaitable[Entry]], inode: int) -> None:
    try:
        await getattr(inode)
    except FileError as error:
        if error.errno != errno.ESTALE:
            raise
