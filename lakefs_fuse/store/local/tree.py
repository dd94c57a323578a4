"""The directory behind a `file:///dir` store: keys to paths, versions, extended attributes, atomic publication.

What always holds:

* a key's path never leaves the root, never passes through a symbolic link to a directory, never enters ``.lakefs/tmp``
  or ``.lakefs/uploads``;
* a name appears by one rename or link of a finished, synced temporary file, so a crash leaves at most a file in
  ``.lakefs/tmp``, which is not a key and which the next store removes when it opens, after a day;
* a directory is removed only when empty (rmdir), so pruning can race with anything;
* *one root*: nothing is read or written where another directory, or none, is at the root's path, as while its disk is
  not mounted. The root is told by its inode number, as its device gets another number when it is mounted again.

Called by the other modules of `local` only, from any worker thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import msgspec

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import (
    AccessDenied,
    ConfigError,
    KeyConflict,
    KeyRefused,
    NoSuchBucket,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreFull,
    Unavailable,
)
from lakefs_fuse.product import RESERVED_NAME, RESERVED_PREFIX, RESERVED_XATTR
from lakefs_fuse.store.protocol import ObjectMeta

NS = 1_000_000_000

TMP_DIR = f"{RESERVED_PREFIX}tmp"
UPLOADS_DIR = f"{RESERVED_PREFIX}uploads"
HIDDEN = frozenset({"tmp", "uploads"})
"""Names in ``.lakefs`` that are this store's own and are never keys."""

METADATA_XATTR = f"{RESERVED_XATTR}metadata"
"""JSON ``{"version": "<mtime_ns>-<size>", "metadata": {…}}``: metadata of exactly that version of the file, so a file
that another tool rewrote in place does not keep the metadata of its former contents."""
MARKER_XATTR = f"{RESERVED_XATTR}marker"
"""JSON ``{"version": n, "metadata": {…}}`` on a directory: it is the object ``dir/`` and stays when emptied."""
EMPTIED_XATTR = f"{RESERVED_XATTR}emptied"
"""Mark on a directory whose last object is being removed: until it is removed, or if this process ends before that, it
is not an object, unlike empty directories that others made."""
METADATA_BYTES_MAX = 2048
"""S3's own limit; ext4 keeps about 4000 bytes of attributes with a file."""
NAME_BYTES_MAX = 255
TMP_AGE_S_MAX = 86_400
PUBLISH_TRIES_MAX = 16

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NO_OBJECT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM})
"""It was removed, or is a link that leads nowhere, or to what this user may not see."""
_KINDS: Mapping[int, type[StoreError]] = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV), NotFound),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), StoreFull),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), AccessDenied),
    **dict.fromkeys((errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE), Unavailable),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM), Unavailable),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.EISDIR, errno.EILSEQ, errno.EINVAL, errno.ELOOP), KeyRefused),
}


class _Attribute(msgspec.Struct):
    """Value of `METADATA_XATTR` or `MARKER_XATTR`."""

    version: int | str = 0
    metadata: dict[str, str] = {}


def file_etag(status: os.stat_result) -> str:
    """ETag of a file: differs whenever the file was replaced or rewritten."""
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


def file_object(key: str, status: os.stat_result, metadata: Mapping[str, str] | None = None) -> ObjectMeta:
    """The object of a file, dated as `ObjectMeta` says."""
    return ObjectMeta(key, status.st_size, file_etag(status), _second(status.st_mtime_ns), metadata)


def _second(time_ns: int) -> int:
    return time_ns // NS * NS


@contextlib.contextmanager
def translated(what: str, key: str) -> Iterator[None]:
    """Translate OSError to StoreError."""
    try:
        yield
    except OSError as error:
        kind = _KINDS.get(error.errno or errno.EIO, StoreError)
        advice = " (check the directory's owner and mode)" if kind is AccessDenied else ""
        raise kind(f"{what} {key!r}: {error.strerror or error}{advice}") from error


def require_version(key: str, etag: str, expected: str | None) -> None:
    """Raises PreconditionFailed where ``expected`` is given and is another version's ETag."""
    if expected is not None and expected != etag:
        raise PreconditionFailed(f"{key!r} is another version now")


class LocalTree:
    """A root directory; its only state is its identity and the newest time stamp it made."""

    def __init__(self, root: str, rng: random.Random, clock: Clock) -> None:
        """Raises NoSuchBucket, AccessDenied, or ConfigError where the file system has no user extended attributes."""
        self.root = os.path.realpath(root)
        self._rng = rng
        self._clock = clock
        self._last_ns = 0
        self._lock = threading.Lock()
        self._made: set[str] = set()
        """Directories of this store's own that were missing before."""
        if not os.path.isdir(self.root):
            why = "is not a directory" if os.path.lexists(self.root) else "does not exist"
            raise NoSuchBucket(f"{root} {why}: create it first, or name another directory")
        self._inode = os.stat(self.root).st_ino
        if not os.access(self.root, os.R_OK | os.X_OK):
            raise AccessDenied(f"directory {root} cannot be read: check its owner and mode")
        try:
            os.getxattr(self.root, METADATA_XATTR)
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                raise ConfigError(
                    f"directory {root}: its file system has no user extended attributes, which object metadata needs"
                ) from error
        self._remove_old_temporaries()

    def require_root(self) -> None:
        """Raises Unavailable where the root is not the directory that was opened."""
        try:
            inode = os.stat(self.root).st_ino
        except OSError as error:
            why = error.strerror
        else:
            if inode == self._inode:
                return
            why = "another directory is there"
        raise Unavailable(f"directory {self.root}: {why}: mount its disk again; or mount the lake again if it moved")

    def unique_ns(self) -> int:
        """Time of day in ns, never the same twice: kernel time stamps move only every few milliseconds."""
        with self._lock:
            self._last_ns = max(self._last_ns + 1, self._clock.wall_ns())
            return self._last_ns

    def unique_name(self) -> str:
        """128 random bits in hex."""
        with self._lock:
            return f"{self._rng.getrandbits(128):032x}"

    # -- keys and paths ------------------------------------------------------------------------------------------

    def refusal(self, key: str) -> str | None:
        """The reason why ``key`` cannot be stored here; None if it can."""
        if not is_utf8(key):
            return "it is not UTF-8"
        components = key.removesuffix("/").split("/")
        if any(part in ("", ".", "..") for part in components):
            return "it has an empty, '.' or '..' component"
        if "\0" in key:
            return "it has a NUL"
        if any(len(part.encode()) > NAME_BYTES_MAX for part in components):
            return f"a component is longer than {NAME_BYTES_MAX} bytes"
        if len(components) > 1 and components[0] == RESERVED_NAME and components[1] in HIDDEN:
            return "the name is reserved"
        return None

    def path(self, key: str, refused: type[StoreError] = NotFound) -> str:
        """Path without a trailing slash. Raises ``refused`` for what is no key here, Unavailable without the root."""
        self.require_root()
        if refusal := self.refusal(key):
            raise refused(f"{key!r}: not a key of this store: {refusal}")
        return f"{self.root}/{key.removesuffix('/')}"

    def inside(self, path: str) -> bool:
        """Whether a resolved path may be that of an object."""
        if not path.startswith(self.root + "/"):
            return False
        return not path.startswith((f"{self.root}/{TMP_DIR}/", f"{self.root}/{UPLOADS_DIR}/"))

    @contextlib.contextmanager
    def opened(self, key: str, etag: str | None = None) -> Iterator[tuple[int, os.stat_result]]:
        """Descriptor and status of a regular file. Raises NotFound for anything else, PreconditionFailed where ``etag``
        is given and another version is there."""
        path = self.path(key)
        with translated("open", key):
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                target = os.path.realpath(path)
                if not self.inside(target) or os.path.realpath(os.path.dirname(path)) != os.path.dirname(path):
                    raise NotFound(f"{key!r}: a symbolic link that leads out of the store")
                path = target
                status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                raise NotFound(f"{key!r}: not a regular file")
            fd = os.open(path, _OPEN | os.O_NOFOLLOW)
        try:
            # One call shows, without a race, whether any directory on the way is a link: the kernel names the file.
            opened = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
            if opened != path.removesuffix(" (deleted)"):
                raise NotFound(f"{key!r}: is behind a symbolic link to a directory")
            status = os.fstat(fd)
            require_version(key, file_etag(status), etag)
            yield fd, status
        finally:
            os.close(fd)

    def stat_for_listing(self, path: str) -> os.stat_result | None:
        """Status of what is listed at ``path`` (its directory is known to be genuine), None if it is no object. Raises
        OSError if that cannot be found out: a listing without it would say that it was removed."""
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                target = os.path.realpath(path)
                status = os.lstat(target) if self.inside(target) else status
        except OSError as error:
            if error.errno not in _NO_OBJECT:
                raise
            return None
        return status if stat.S_ISREG(status.st_mode) else None

    # -- metadata and markers ------------------------------------------------------------------------------------

    @staticmethod
    def read_metadata(fd: int, status: os.stat_result) -> dict[str, str]:
        """User metadata of this version of an open file."""
        document = _read_xattr(fd, METADATA_XATTR)
        if document is None or document.version != f"{status.st_mtime_ns}-{status.st_size}":
            return {}
        return document.metadata

    @staticmethod
    def marker(path: str, key: str) -> ObjectMeta | None:
        """The object ``key`` (ends in a slash) of a directory that was made one, or None."""
        document = _read_xattr(path, MARKER_XATTR)
        if document is None:
            return None
        version = document.version if isinstance(document.version, int) else 0
        return ObjectMeta(key, 0, f"{version:x}", _second(version), document.metadata)

    def directory_object(self, key: str) -> ObjectMeta | None:
        """The object ``dir/``: a directory with a marker, or an empty one."""
        path = self.path(key)
        try:
            if os.path.realpath(path) != path or not stat.S_ISDIR(os.lstat(path).st_mode):
                return None
            if found := self.marker(path, key):
                return found
            with os.scandir(path) as entries:
                empty = next(entries, None) is None
        except OSError:
            return None
        return empty_directory(path, key) if empty else None

    # -- writing -------------------------------------------------------------------------------------------------

    def write(
        self,
        what: str,
        key: str,
        fill: Callable[[int], None],
        metadata: Mapping[str, str] | None,
        *,
        if_absent: bool = False,
    ) -> ObjectMeta:
        """Create the object from the bytes that ``fill`` writes to its descriptor."""
        self.path(key, KeyRefused)
        with translated(what, key):
            fd, temporary = self.new_temporary()
            with removed_on_failure(fd, temporary):
                fill(fd)
                status = self.seal(fd, metadata)
                self.publish(temporary, key, if_absent=if_absent)
        return ObjectMeta(key, status.st_size, file_etag(status), status.st_mtime_ns, dict(metadata or {}))

    def write_own(self, path: str, mode: int, fill: Callable[[int], None]) -> os.stat_result:
        """Create a file that is not an object from the bytes that ``fill`` writes. It appears when it is complete and
        synced."""
        directory = os.path.dirname(path)
        temporary = f"{directory}/{self.unique_name()}"
        fd = os.open(temporary, _CREATE, mode)
        with removed_on_failure(fd, temporary):
            fill(fd)
            status = self.seal(fd, None)
            os.rename(temporary, path)
        sync_directory(directory)
        return status

    def new_temporary(self) -> tuple[int, str]:
        """An empty file in ``.lakefs/tmp``, open for reading and writing."""
        name = f"{self.root}/{TMP_DIR}/{self.unique_name()}"
        try:
            return os.open(name, _CREATE, 0o666), name
        except FileNotFoundError:
            self.make_own(os.path.dirname(name))
            return os.open(name, _CREATE, 0o666), name

    def make_own(self, directory: str) -> None:
        """mkdir -p of a directory in ``.lakefs`` that is no key. Raises OSError."""
        at, missing = directory, []
        while at != self.root and not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        os.makedirs(directory, mode=0o777, exist_ok=True)
        self._made.update(missing)

    def remove_own(self) -> None:
        """Remove empty directories that `make_own` made."""
        for directory in sorted(self._made, reverse=True):  # those below a directory before it
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        self._made.clear()

    def seal(self, fd: int, metadata: Mapping[str, str] | None) -> os.stat_result:
        """Give the file its version and metadata and make it durable; the answer's ETag is final."""
        stamp = self.unique_ns()
        os.utime(fd, ns=(stamp, stamp))
        status = os.fstat(fd)
        if metadata:
            value = encode_metadata(f"{status.st_mtime_ns}-{status.st_size}", metadata)
            os.setxattr(fd, METADATA_XATTR, value)
        os.fsync(fd)
        return status

    def publish(self, temporary: str, key: str, *, if_absent: bool) -> None:
        """Publish the temporary file as ``key``, durably. Raises KeyConflict, KeyRefused, PreconditionFailed."""
        path = self.path(key, KeyRefused)

        def place() -> None:
            if if_absent:
                os.link(temporary, path)
                os.unlink(temporary)
            else:
                os.rename(temporary, path)

        try:
            self._change_directory(os.path.dirname(path), key, place)
        except FileExistsError as error:
            if os.path.isdir(path):
                raise KeyConflict(f"{key!r} cannot be stored: {key + '/'!r} has objects") from error
            raise PreconditionFailed(f"{key!r} exists") from error
        except (IsADirectoryError, NotADirectoryError) as error:
            raise KeyConflict(f"{key!r} cannot be stored: it conflicts with another key") from error

    def _change_directory(self, path: str, key: str, change: Callable[[], None]) -> None:
        """Make the directory and change it, durably; repeat that if another process prunes it in between."""
        for _ in range(PUBLISH_TRIES_MAX):
            with contextlib.suppress(FileNotFoundError):
                self.make_directory(path, key)
                change()
                sync_directory(path)
                return
        raise Unavailable(f"{key!r}: its directory keeps disappearing")

    def make_directory(self, path: str, key: str) -> None:
        """mkdir -p, durably. Raises KeyConflict where a component is a file or a symbolic link."""
        missing = []
        at = path
        while not os.path.lexists(at):
            missing.append(at)
            at = os.path.dirname(at)
        # FileNotFoundError here: another process pruned it just now, and the caller begins again.
        if not stat.S_ISDIR(os.lstat(at).st_mode) or os.path.realpath(at) != at:
            raise KeyConflict(f"{key!r} cannot be stored: a component of it is a file or a symbolic link")
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            sync_directory(os.path.dirname(directory))

    def put_marker(self, key: str, metadata: Mapping[str, str] | None, *, if_absent: bool) -> ObjectMeta:
        """Create the object ``dir/``, or replace its metadata."""
        path = self.path(key, KeyRefused)
        version = self.unique_ns()
        value = encode_metadata(version, metadata or {})
        flags = os.XATTR_CREATE if if_absent else 0
        try:
            self._change_directory(path, key, lambda: os.setxattr(path, MARKER_XATTR, value, flags))
        except FileExistsError as error:
            raise PreconditionFailed(f"{key!r} exists") from error
        return ObjectMeta(key, 0, f"{version:x}", version, dict(metadata or {}))

    def remove(self, key: str) -> str | None:
        """Remove an object if it is there; the answer is the directory to sync and prune, None if nothing changed."""
        if self.refusal(key):
            return None
        path = self.path(key)
        parent = os.path.dirname(path)
        if os.path.realpath(parent) != parent:
            return None
        try:
            mode = os.lstat(path).st_mode
            if key.endswith("/"):
                if not stat.S_ISDIR(mode):
                    return None
                self._mark_emptied(path)
                with contextlib.suppress(OSError):
                    os.removexattr(path, MARKER_XATTR)
                return path
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                return None
            self._mark_emptied(parent)
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return parent

    def prune(self, path: str) -> None:
        """Remove ``path`` and its parents as long as they are empty and carry no marker; the survivor is synced."""
        while path != self.root and _read_xattr(path, MARKER_XATTR) is None:
            above = os.path.dirname(path)
            try:
                self._mark_emptied(above)
                os.rmdir(path)
            except FileNotFoundError:
                pass
            except OSError:
                self._unmark_emptied(above)
                break
            path = above
        self._unmark_emptied(path)
        with contextlib.suppress(OSError):
            sync_directory(path)

    def _mark_emptied(self, directory: str) -> None:
        """Mark a directory whose only entry is about to be removed."""
        if directory == self.root:
            return
        with contextlib.suppress(OSError):
            with os.scandir(directory) as entries:
                if len(list(islice(entries, 2))) > 1:
                    return
            os.setxattr(directory, EMPTIED_XATTR, b"")

    @staticmethod
    def _unmark_emptied(directory: str) -> None:
        """Remove the mark of a directory that stays: emptied by others, it is an object."""
        with contextlib.suppress(OSError):
            os.removexattr(directory, EMPTIED_XATTR)

    def _remove_old_temporaries(self) -> None:
        limit_s = self._clock.wall_ns() / 1e9 - TMP_AGE_S_MAX
        with contextlib.suppress(OSError), os.scandir(f"{self.root}/{TMP_DIR}") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < limit_s:
                        Path(entry.path).unlink()


@contextlib.contextmanager
def removed_on_failure(fd: int, path: str) -> Iterator[None]:
    """Close a file at the end of the block, and remove it if the block raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def empty_directory(path: str, key: str) -> ObjectMeta | None:
    """The object of an empty directory without a marker; None where this store is about to remove the directory."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    try:
        os.getxattr(path, EMPTIED_XATTR)
    except OSError:
        return ObjectMeta(key, 0, f"{status.st_mtime_ns:x}-{status.st_ino:x}", _second(status.st_mtime_ns), {})
    return None


def is_utf8(text: str) -> bool:
    """False if a name on the disk is not valid text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_metadata(version: int | str, metadata: Mapping[str, str]) -> bytes:
    """Encode the value of either attribute. Raises StoreError where it is larger than an object store would take."""
    value = json.dumps({"version": version, "metadata": dict(metadata)}, separators=(",", ":")).encode()
    if len(value) > METADATA_BYTES_MAX + 64:
        raise StoreError(f"object metadata is larger than {METADATA_BYTES_MAX} bytes")
    return value


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_xattr(where: int | str, name: str) -> _Attribute | None:
    try:
        return msgspec.convert(json.loads(os.getxattr(where, name)), _Attribute)
    except (OSError, ValueError):
        return None
