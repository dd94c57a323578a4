"""How many file descriptors this process may hold (RLIMIT_NOFILE), and the share of each consumer.

What always holds: RocksDB, the block cache and the staging files hold at most a quarter of the limit each; the last
quarter is a reserve for requests to the store, sockets, segments, and files that are opened and closed at once.
Callable from any thread.
"""

from __future__ import annotations

import resource

from lakefs_fuse.errors import MountError

DESCRIPTORS_WANTED = 65_536
DESCRIPTORS_MIN = 256
"""An idle mount holds some 40; a quarter has to be enough for the requests that are served at once."""
REQUEST_DESCRIPTORS = 4
"""A request to a local store holds a directory, a source and a target at most; one to S3 a connection."""


def raise_file_limit() -> None:
    """Raise the soft limit, which is often 1,024, to the hard limit or `DESCRIPTORS_WANTED`. Raises MountError where
    the hard limit is below `DESCRIPTORS_MIN`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if wanted < DESCRIPTORS_MIN:
        raise MountError(
            f"a process may open {wanted} files here, and a mount needs {DESCRIPTORS_MIN}: "
            "raise the hard limit (`ulimit -Hn`, LimitNOFILE= of a systemd unit)"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Descriptors that this process may hold now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DESCRIPTORS_WANTED if soft == resource.RLIM_INFINITY else soft


def share() -> int:
    """A quarter of `limit`: what one consumer may hold."""
    return limit() // 4


def requests_max(wanted: int) -> int:
    """How many of ``wanted`` requests may be under way at once within the reserve."""
    return max(1, min(wanted, share() // REQUEST_DESCRIPTORS))
