"""Whether the cache disk answers so quickly that handing a read to a thread, and taking the answer back, takes longer.

That takes about a millisecond of CPU, because each of the two threads has to be woken and to get hold of the
interpreter. So small reads are made on the trio thread while they take no more than twice that on the average, which is
what RocksDB has of the same disk as well; one that was slow is left to the threads for a while. Trio thread only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROMPT_S = 0.002
"""On the average of the last reads, about `WEIGHT` of them."""
WEIGHT = 16
SLOW_S = 0.1
"""One read of so long is enough to go by."""
PAUSE_S = 5.0
"""For so long a slow disk is not tried again."""


@contextmanager
def at_once(lock: threading.Lock) -> Iterator[None]:
    """With the lock. Raises BlockingIOError where somebody else has it."""
    if not lock.acquire(blocking=False):
        raise BlockingIOError
    try:
        yield
    finally:
        lock.release()


class Promptness:
    """See the module's head. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._average_s = 0.0
        self._slow_until_s = 0.0

    @property
    def is_prompt(self) -> bool:
        """A read is worth trying without a thread."""
        return self._clock() >= self._slow_until_s

    @contextmanager
    def timed(self) -> Iterator[None]:
        """One such read."""
        began_s = self._clock()
        try:
            yield
        finally:
            ended_s = self._clock()
            took_s = ended_s - began_s
            self._average_s += (took_s - self._average_s) / WEIGHT
            if took_s > SLOW_S or self._average_s > PROMPT_S:
                self._average_s, self._slow_until_s = 0.0, ended_s + PAUSE_S
