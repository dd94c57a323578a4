"""Loads the C library; must be imported before pyfuse3, whose calls it receives. See native.h for its parts.

One build of it serves every Python from 3.11 on that has a GIL, and every libfuse 3: it uses Python's stable ABI
(python_abi.h), and finds libfuse through pyfuse3 (libfuse.h).

``LAKEFS_FUSE_HOOKS=off`` disables it. Its functions never wait, and are called with the GIL from the trio thread only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntFlag
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lakefs_fuse.product import ENVIRONMENT_PREFIX

if TYPE_CHECKING:
    import pyfuse3


class Feature(IntFlag):
    """Features that the library can give a session, numbered as in dispatch.c."""

    EXPLICIT_INVAL_DATA = 1
    """Attributes that changed drop no pages, and listing a directory again asks for none."""
    STATELESS_OPENDIR = 2
    """The kernel accepts ENOSYS for OPENDIR, and sends no further one; READDIR then has the inode as its handle."""
    STATELESS_OPEN = 4
    """The same for OPEN and READ."""
    NOFLUSH = 8
    """Closing a file opened for reading sends no FLUSH. With its write-back cache the kernel sends FLUSH nevertheless,
    and the library replies to it."""
    CACHE_SYMLINKS = 16
    HANDLE_KILLPRIV = 32
    """The daemon drops suid and sgid, and the kernel does not ask before each write(2) which privileges to drop."""
    PARALLEL_DIROPS = 64
    """The kernel sends a LOOKUP or READDIR of a directory while others of it are in progress."""


OPCODES = {
    "getattr": 3, "getxattr": 22, "flush": 25, "open": 14, "release": 18, "forget": 2,
    "lookup": 1, "setattr": 4, "write": 16, "create": 35,
}  # fmt: skip
"""Opcodes (linux/fuse.h) of the requests that the library may handle."""
LEASE_S_MAX = 1e6
"""Longer leases are cut to this; in ns it fits 64 bits."""
PF_EXITING, SIGNAL_BITS = 0x4, 0x7F
"""Masks for the flags and the exit code in /proc/PID/stat."""
STAT_FLAGS, STAT_EXIT_CODE = 6, 49
"""Indexes of the flags and the exit code in /proc/PID/stat, counted from the field after the name."""
READ_BYTES = 4096
"""Size of a read of /proc/PID/status, which is shorter unless the process has many groups."""


class CopyRequest(ctypes.Structure):
    """A COPY_FILE_RANGE, laid out as in dispatch.c: inodes, offsets, and the number of bytes."""

    _fields_ = (
        ("source", ctypes.c_uint64), ("target", ctypes.c_uint64), ("offset", ctypes.c_int64),
        ("target_offset", ctypes.c_int64), ("bytes", ctypes.c_uint64),
    )  # fmt: skip


class RequestOrigin(ctypes.Structure):
    """The number of a request (0: not known), and the thread that sent it (0: in another pid namespace, or none waits
    for the reply). Laid out as in request_loop.c."""

    _fields_ = (("unique", ctypes.c_uint64), ("thread", ctypes.c_uint32))
    unique: int
    thread: int


_id, _time_ns, _inode = ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64
_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "bind_libfuse": (ctypes.c_int, (ctypes.c_char_p,)),
    "has_custom_io": (ctypes.c_int, ()),
    "is_hooked": (ctypes.c_int, ()),
    "libfuse_version": (ctypes.c_char_p, ()),
    "request_features": (None, (ctypes.c_uint32, ctypes.c_uint32)),
    "granted_features": (ctypes.c_uint32, ()),
    "answered": (ctypes.c_int64, (ctypes.c_uint32,)),
    "flush_pid": (ctypes.c_int64, ()),
    "copy_request": (ctypes.POINTER(CopyRequest), ()),
    "request_origin": (ctypes.POINTER(RequestOrigin), ()),
    "interrupt_request": (ctypes.c_int, (ctypes.c_uint64,)),
    "files_receiving": (ctypes.c_int, ()),
    "kills_privileges": (ctypes.c_int, ()),
    "is_cached_write": (ctypes.c_int, ()),
    "begin_reading": (ctypes.c_int, ()),
    "is_drained": (ctypes.c_int, ()),
    "session_exited": (ctypes.c_int, ()),
    "session_fd": (ctypes.c_int, ()),
    "lease_open": (None, (_inode, _time_ns)),
    "revoke_open": (ctypes.c_uint64, (_inode,)),
    "know_attributes": (None, (_inode, _id, _id, _id, ctypes.c_uint64, _time_ns, _time_ns)),
    "forget_attributes": (None, (_inode,)),
    "forget_all_attributes": (None, ()),
    "show_number": (ctypes.c_int, (_inode, _inode)),
    "has_attributes": (ctypes.c_int, (_inode,)),
    "cache_attributes": (None, (_inode, _id, _id, _id, _time_ns, _time_ns, ctypes.c_uint32, _time_ns)),
    "know_directory": (None, (_inode, ctypes.c_char_p, _inode, _time_ns)),
    "forget_directories": (None, ()),
    "lease_names": (ctypes.c_int, (_inode, _time_ns, _time_ns, ctypes.c_uint32, ctypes.c_int)),
    "add_names": (ctypes.c_int, (_inode, ctypes.c_char_p, ctypes.c_size_t)),
    "remove_name": (None, (_inode, ctypes.c_char_p)),
    "revoke_names": (None, (_inode,)),
    "revoke_all_names": (None, ()),
    "set_receiver": (None, (ctypes.c_void_p, ctypes.c_void_p)),
    "hand_over_all": (None, ()),
    "next_file": (ctypes.c_int, (ctypes.c_void_p,)),
    "answer_close": (ctypes.c_int, (_inode, ctypes.c_int)),
    "reserve_inodes": (None, (_inode, ctypes.c_uint64)),
    "inodes_left": (ctypes.c_uint64, ()),
    "is_direntry_reached": (ctypes.c_int, ()),
    "begin_entries": (
        ctypes.py_object,
        (*(ctypes.py_object,) * 3, ctypes.c_char_p, ctypes.c_double, ctypes.c_void_p),
    ),
    "end_entries": (ctypes.py_object, ()),
}
"""Functions of the library that Python calls, without their prefix: result and parameters."""


def _is_free_threaded() -> bool:
    return "t" in sys.abiflags


def _is_turned_off() -> bool:
    return os.environ.get(f"{ENVIRONMENT_PREFIX}FUSE_HOOKS", "on").lower() in ("off", "0", "no")


def pyfuse3_extension() -> str:
    """Return the path of pyfuse3's extension module, without importing it; empty if pyfuse3 is not installed."""
    found = importlib.util.find_spec("pyfuse3")
    return found.origin or "" if found is not None else ""


def load() -> ctypes.PyDLL | None:
    """Return the library, or None. There is none if it is turned off, if Python has no GIL, or if no build of it fits
    this machine, this version of the program and libfuse."""
    if _is_turned_off() or _is_free_threaded():
        return None
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            found = ctypes.PyDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            for name, (result, parameters) in _FUNCTIONS.items():
                function = getattr(found, f"lakefs_{name}")
                function.restype, function.argtypes = result, parameters
        except (OSError, AttributeError):
            continue
        if found.lakefs_bind_libfuse(os.fsencode(pyfuse3_extension())):
            return found
    return None


_library = load()
_origin = RequestOrigin() if _library is None else _library.lakefs_request_origin().contents


def library() -> ctypes.PyDLL | None:
    """Return the library, for other modules of this package."""
    return _library


def active() -> bool:
    """Return whether the session of this process uses the library."""
    return _library is not None and bool(_library.lakefs_is_hooked())


def why_absent() -> str:
    """Return the reason why the library is not loaded, and the remedy."""
    if _is_turned_off():
        return "turned off by LAKEFS_FUSE_HOOKS"
    if _is_free_threaded():
        return "not for a free-threaded Python: install lakefs-fuse with another one"
    return "not there: install lakefs-fuse from a wheel, or again with a compiler and libfuse3-dev"


def why_inactive() -> str:
    """Return the reason why there are no hooks, and the consequences."""
    return (
        f"the hooks library is {why_absent()}; every open, close and listing asks the daemon, and starting a program "
        "while a file is being written publishes the part written so far"
    )


def libfuse_version() -> str:
    """Return the version of libfuse; empty if it is not known."""
    return _library.lakefs_libfuse_version().decode() if _library is not None else ""


def has_custom_io() -> bool:
    """Return whether libfuse shows the library raw requests and replies, which `Feature.HANDLE_KILLPRIV` and
    `Feature.PARALLEL_DIROPS` require."""
    return _library is not None and bool(_library.lakefs_has_custom_io())


def request_features(features: Feature, background_max: int) -> None:
    """Set the features of the next session, and how many background requests its kernel may have in progress. 0 leaves
    the kernel's default. Without the library nothing happens."""
    if _library is not None:
        _library.lakefs_request_features(int(features), background_max)


def granted() -> Feature:
    """Return the features that the kernel granted; none before it has sent INIT."""
    return Feature(_library.lakefs_granted_features()) if _library is not None else Feature(0)


class RequestFacts(NamedTuple):
    """What the library reports about the last request. ``copied`` is None without the library."""

    flush_pid: int
    kills_privileges: bool
    is_cached_write: bool
    copied: CopyRequest | None


_kept: ContextVar[RequestFacts | None] = ContextVar("kept", default=None)
"""Facts about the request that the task handles, inside `keep_request_facts`; else None."""


@contextmanager
def keep_request_facts() -> Iterator[None]:
    """Keep the results of `flush_pid`, `copy_request`, `kills_privileges` and `is_cached_write` for this task until the
    block ends, whatever other requests arrive. Enter it before the first await of a request."""
    copied = copy_request() if _library is not None else None
    token = _kept.set(RequestFacts(flush_pid(), kills_privileges(), is_cached_write(), copied))
    try:
        yield
    finally:
        _kept.reset(token)


def flush_pid() -> int:
    """Return the thread that sent the FLUSH being handled; 0 if not known. Valid until the first await, or inside
    `keep_request_facts`."""
    if (kept := _kept.get()) is not None:
        return kept.flush_pid
    return int(_library.lakefs_flush_pid()) if _library is not None else 0


def copy_request() -> CopyRequest:
    """Return the COPY_FILE_RANGE being handled, which only the library passes on. Valid as `flush_pid`."""
    if (kept := _kept.get()) is not None and kept.copied is not None:
        return kept.copied
    assert _library is not None
    return CopyRequest.from_buffer_copy(_library.lakefs_copy_request().contents)


def request_origin() -> RequestOrigin:
    """Return the origin of the request being handled: always the same object, which is valid until the handler first
    waits. Without the library it stays zero."""
    return _origin


def interrupt_request(unique: int) -> bool:
    """Reply EINTR to a request whose handler goes on; return whether the kernel took it."""
    return _library is not None and bool(_library.lakefs_interrupt_request(unique))


def kills_privileges() -> bool:
    """Return whether the request being handled must drop suid and sgid; valid as `flush_pid`. Always False without
    `Feature.HANDLE_KILLPRIV`."""
    if (kept := _kept.get()) is not None:
        return kept.kills_privileges
    return _library is not None and bool(_library.lakefs_kills_privileges())


def is_cached_write() -> bool:
    """Return whether the WRITE being handled has bytes of the kernel's page cache; valid as `flush_pid`. Always False
    without the library."""
    if (kept := _kept.get()) is not None:
        return kept.is_cached_write
    return _library is not None and bool(_library.lakefs_is_cached_write())


def lease_open(inode: int, for_s: float) -> None:
    """Let the library reply to OPENs of the file for reading for this time. Without the library nothing happens.
    Handles that it issues consist of the bits of `vfs.ops.handles` and the inode.
    """
    if _library is not None:
        _library.lakefs_lease_open(inode, int(min(for_s, LEASE_S_MAX) * 1e9))


def revoke_open(inode: int) -> int:
    """End all leases on the inode; return how many of its handles the library issued, which Python must now release."""
    return int(_library.lakefs_revoke_open(inode)) if _library is not None else 0


def cache_attributes(attributes: pyfuse3.EntryAttributes, for_s: float = 0.0) -> None:
    """Let the library reply to GETATTR of a directory with these attributes for this time. Without a time, they replace
    attributes that it already has. Without the library nothing happens."""
    if _library is not None:
        _library.lakefs_cache_attributes(
            attributes.st_ino, attributes.st_mode, attributes.st_uid, attributes.st_gid, attributes.st_mtime_ns,
            attributes.st_ctime_ns, attributes.st_blksize, int(min(for_s, LEASE_S_MAX) * 1e9),
        )  # fmt: skip


def know_directory(parent: int, name: bytes, inode: int, for_s: float) -> None:
    """Let the library reply to LOOKUP of a directory for this time, as long as it replies to GETATTR of it. Without the
    library nothing happens."""
    if _library is not None:
        _library.lakefs_know_directory(parent, name, inode, int(min(for_s, LEASE_S_MAX) * 1e9))


def forget_directories(*_: object) -> None:
    """End what `know_directory` began, for all directories."""
    if _library is not None:
        _library.lakefs_forget_directories()


def has_attributes(inode: int) -> bool:
    """Return whether the library replies to GETATTR of the directory; always False if it is not loaded."""
    return _library is not None and bool(_library.lakefs_has_attributes(inode))


def know_attributes(attributes: pyfuse3.EntryAttributes) -> None:
    """Let the library reply to GETATTR of a file with these attributes, as long as opens of it are leased. Without a
    lease, or without the library, nothing happens."""
    if _library is not None:
        _library.lakefs_know_attributes(
            attributes.st_ino, attributes.st_mode, attributes.st_uid, attributes.st_gid, attributes.st_size,
            attributes.st_mtime_ns, attributes.st_ctime_ns,
        )  # fmt: skip


def forget_attributes(inode: int) -> None:
    """End what `know_attributes` began for the file."""
    if _library is not None:
        _library.lakefs_forget_attributes(inode)


def forget_all_attributes(*_: object) -> None:
    """End what `know_attributes` began for all files."""
    if _library is not None:
        _library.lakefs_forget_all_attributes()


def show_number(inode: int, number: int) -> bool:
    """Have stat(2) show this inode number for a file, or with 0 its own. Returns False without the library, or if it
    has no room."""
    return _library is not None and bool(_library.lakefs_show_number(inode, number))


def answered() -> dict[str, int]:
    """Return how many requests were handled without entering Python, by name."""
    if _library is None:
        return {}
    return {name: int(_library.lakefs_answered(opcode)) for name, opcode in OPCODES.items()}


def process_of(thread: int) -> int:
    """Return the process that a thread belongs to; 0 if the thread has ended, or /proc does not say."""
    return _process_of(status_of(thread))


def is_executing(thread: int) -> bool:
    """Return whether a thread that closes a descriptor does so inside execve(2).

    The kernel then holds the lock ``exec_update_lock`` of the process, and closes descriptors before the new address
    space has any code (VmExe is 0). Reading /proc/PID/fd, /proc/PID/stat and more waits for that lock, hence for the
    reply to the FLUSH of such a close: if the daemon reads them before it replies, the mount hangs. /proc/PID/status
    takes no lock."""
    return _is_executing(status_of(thread))


def keeps_open(thread: int, path: str) -> bool:
    """Return whether the process of a thread that closes a descriptor has, or may have, another one for the file at
    ``path``."""
    status = status_of(thread)
    return _is_executing(status) or holds(_process_of(status), path)


def status_of(thread: int) -> bytes:
    """Return /proc/PID/status of a thread; empty if it has ended. Without a file object, which takes four times as
    long: closes wait for it."""
    try:
        descriptor = os.open(f"/proc/{thread}/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return b"".join(iter(lambda: os.read(descriptor, READ_BYTES), b""))
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def field_of(status: bytes, name: bytes) -> bytes:
    """Return a field of a result of `status_of`; empty if it lacks the field."""
    return status.partition(b"\n" + name + b":")[2].partition(b"\n")[0]


def _process_of(status: bytes) -> int:
    field = field_of(status, b"Tgid").strip()
    return int(field) if field.isdigit() else 0


def _is_executing(status: bytes) -> bool:
    return field_of(status, b"VmExe").split() == [b"0", b"kB"]


def killed_by(thread: int) -> int:
    """Return the signal that is ending a thread, or 0. It is 0 if the thread continues, exits without a signal, is
    inside execve(2), or its state cannot be read."""
    if is_executing(thread):
        return 0
    try:
        with open(f"/proc/{thread}/stat", "rb") as status:
            fields = status.read().rpartition(b")")[2].split()
        is_ending, code = int(fields[STAT_FLAGS]) & PF_EXITING, int(fields[STAT_EXIT_CODE])
    except (OSError, ValueError, IndexError):
        return 0
    return code & SIGNAL_BITS if is_ending else 0


def holds(process: int, path: str) -> bool:
    """Return whether /proc shows a descriptor of the process for the file at ``path``; False if it cannot be read. The
    process may not be inside execve(2): see `is_executing`."""
    try:
        with os.scandir(f"/proc/{process}/fd") as descriptors:
            return any(_target(descriptor.path) == path for descriptor in descriptors)
    except OSError:
        return False


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
