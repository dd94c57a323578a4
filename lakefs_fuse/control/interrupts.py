"""Ctrl-C while the command line starts a child process.

What always holds (*no lost interrupt*): a child that is started in `held_interrupts` begins with SIGINT blocked, and
unblocks it with `release_interrupts` when it has something that handles it. One that was sent before is delivered then,
so it ends neither the half-loaded child with a traceback nor the starter without its child. SIGTERM and SIGKILL are
not held. The mask belongs to the calling thread; nothing survives a process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread, and in children that it starts, until the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_interrupts() -> None:
    """Unblock SIGINT in this thread, in a child whose handler is installed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
