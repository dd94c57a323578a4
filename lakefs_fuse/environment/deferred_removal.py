"""Files that have no name any more give their room back in a thread.

The kernel takes a good part of a second for each GiB of a file that nobody needs any more, in the `close` of its last
descriptor, and everything else would wait for that. Callable from any thread; nobody has to wait for the end, but who
finds no room on the disk knows that some is about to come.
"""

from __future__ import annotations

import os
import threading

from lakefs_fuse.environment.local_disk import allocated_bytes

THREAD_BYTES_MIN = 2 << 20
"""What holds less is closed at once, which takes less than a millisecond."""
THREADS_MAX = 32
"""At once: each holds a descriptor. Beyond, files are closed by their owner."""

_under_way: set[threading.Thread] = set()


def close_removed(fd: int) -> None:
    """Close a file that was removed: now where it is small, soon where it is large. Raises OSError where ``fd`` is no
    descriptor."""
    if allocated_bytes(fd) < THREAD_BYTES_MIN or len(_under_way) >= THREADS_MAX:
        os.close(fd)
        return
    thread = threading.Thread(target=_close, args=(fd,), name="freeing")
    _under_way.add(thread)
    try:
        thread.start()
    except RuntimeError:  # no more threads
        _under_way.discard(thread)
        os.close(fd)


def _close(fd: int) -> None:
    try:
        os.close(fd)
    finally:
        _under_way.discard(threading.current_thread())


def is_under_way() -> bool:
    """Room is being given back."""
    return bool(_under_way)
