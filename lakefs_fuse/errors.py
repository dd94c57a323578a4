"""Errors of this program, and the one table from each kind to an errno and an exit code.

A kind exists only where a caller acts differently on it. Foreign exceptions (botocore, obstore, OSError) are translated
where they enter, with ``raise … from``. A message is one line for the user: what failed, why, what to do. *No secrets*:
no message holds a credential or a signed URL.
"""

from __future__ import annotations

import errno
import os

import msgspec

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be: for text that is not UTF-8, and for arrays in too
many arrays, no DecodeError. What comes from a store or another process may raise each of them."""

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_BUSY = 75
"""Of a command that another one keeps from the lake: run it again later. EX_TEMPFAIL of sysexits.h."""
EXIT_CRASHED = 70
"""Of a daemon that failed while it served; its supervisor restarts it. EX_SOFTWARE of sysexits.h."""
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it."""


class LakeError(Exception):
    """Root of the tree. ``errno`` is for system calls, ``exit_code`` for commands."""

    errno = errno.EIO
    exit_code = EXIT_FAILURE


class ConfigError(LakeError):
    """An option, an environment variable or a source URL cannot be used as given."""

    errno = errno.EINVAL
    exit_code = EXIT_USAGE


class MountError(LakeError):
    """The mount cannot be made: mountpoint, /dev/fuse, cache directory, disk space."""


class CacheError(LakeError):
    """The cache directory on this node is locked, damaged or belongs to another lake."""


class CacheDamaged(CacheError):
    """A database on this node is damaged, and its caller does without repair."""


class SchemaMismatch(CacheError):
    """A database on this node has the rows of another version of this program."""


class CacheFull(CacheError):
    """The disk of the cache directory has no room for what the node has to write there."""

    errno = errno.ENOSPC


class StagingFull(LakeError):
    """Staging has no room, and none can be made."""

    errno = errno.ENOSPC


class DamagedCommit(LakeError):
    """A commit object, or an index, in the store cannot be used: cut short, changed, of another format, or hostile."""


class LeaseHeld(LakeError):
    """Another process has the lease that this one needs, or took it over."""

    errno = errno.EBUSY
    exit_code = EXIT_BUSY


class ReportedError(LakeError):
    """An error that a child process reported, with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FileError(LakeError):
    """A POSIX error of a file operation, the only kind with an errno of its own in each instance."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(message or os.strerror(code))
        self.errno = code


class StoreError(LakeError):
    """A store request failed, and a retry does not help."""


class NotFound(StoreError):
    """No object has this key (or no upload this id)."""

    errno = errno.ENOENT


class PartsRefused(StoreError):
    """The store has lost parts of an upload, or has others than are to make the object."""


class NoSuchBucket(StoreError):
    """The bucket (or the exported directory) does not exist."""

    errno = errno.ENXIO


class PreconditionFailed(StoreError):
    """The object is not at the required version: it was replaced or removed, or exists already."""

    errno = errno.ESTALE


class UnclearConflict(PreconditionFailed):
    """A 409 with a code of the server's own: the condition is not met, or the store is busy with the object."""


class Overtaken(StoreError):
    """An object is at the key of a new file of which its writer did not know. Nothing was replaced."""


class Superseded(StoreError):
    """The version that was sent counts as stored, and as replaced by another writer's since."""

    errno = errno.ESTALE


class AccessDenied(StoreError):
    """The store refuses these credentials, or there are none."""

    errno = errno.EACCES


class KeyRefused(StoreError):
    """The store cannot hold an object under this key (too long, not UTF-8)."""

    errno = errno.EINVAL


class KeyConflict(KeyRefused):
    """The store keeps objects as files, and cannot hold one beside those below its key, or below another object's."""


class Unsupported(StoreError):
    """The store does not implement the request."""

    errno = errno.EOPNOTSUPP


class StoreFull(StoreError):
    """The store has no room (a quota, a full disk)."""

    errno = errno.ENOSPC


class Unavailable(StoreError):
    """The store did not answer, or cannot now: the only kind that is retried.

    ``throttled`` is true where the store limits the rate of requests (503 SlowDown, 429).
    """

    def __init__(self, message: str, *, throttled: bool = False) -> None:
        super().__init__(message)
        self.throttled = throttled


class ProxyRefused(StoreError):
    """A proxy on the way to the store refuses its password (407)."""


class NotCarriedOut(Unavailable):
    """The store did not begin with the request: there was no connection, or too many requests. Any other Unavailable
    may be about a request that was carried out."""


def first_error(error: BaseException) -> BaseException:
    """The error inside the groups of nurseries; a LakeError before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(each) for each in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, LakeError)), leaves[0])


def sole_error(error: BaseException) -> BaseException:
    """The error inside groups of one; a group of several as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
