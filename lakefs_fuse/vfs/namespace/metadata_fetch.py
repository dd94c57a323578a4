"""Asking the store for the attributes of everything in a directory: one HEAD for each version, once.

LIST does not tell modes, owners or chosen mtimes. Where a mount must show them exactly (``--attributes objects``),
they are asked for before a listing or a lookup is answered, because the kernel keeps what it is told first.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.sync.nursery import collecting

ASKED_AT_ONCE = 256
"""Entries in memory, and tasks, at a time; how many requests run at once is the client's bound."""


def is_unasked(entry: Entry) -> bool:
    return not entry.flags & (Flag.ATTRIBUTES_KNOWN | Flag.LOCAL | Flag.SYMLINK)


async def ask_all(entries: Iterable[Entry], getattr: Callable[[int], Awaitable[Entry]]) -> None:
    """Call ``getattr`` for each entry whose attributes were never asked for. Raises what it raises; an entry that
    vanished meanwhile is passed over."""
    unasked = (entry for entry in entries if is_unasked(entry))
    while batch := list(islice(unasked, ASKED_AT_ONCE)):
        async with collecting() as nursery:
            for entry in batch:
                nursery.start_soon(_ask, entry.inode, getattr)


async def _ask(inode: int, getattr: Callable[[int], Awaitable[Entry]]) -> None:
    try:
        await getattr(inode)
    except FileError as error:
        if error.errno != errno.ESTALE:
            raise
