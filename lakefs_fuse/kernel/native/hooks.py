"""Loads the C hooks; must be imported before pyfuse3. See hooks.c for what they do and when they may be asked.

``LAKEFS_FUSE_HOOKS=off`` leaves them out.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntFlag
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyfuse3


class Feature(IntFlag):
    """What a session may have by means of the hooks, as hooks.c numbers them."""

    EXPLICIT_INVAL_DATA = 1
    """Attributes that changed drop no pages, and listing a directory again asks for none."""
    STATELESS_OPENDIR = 2
    """OPENDIR may be answered ENOSYS, once; READDIR then comes with the inode as its handle."""
    STATELESS_OPEN = 4
    """The same for OPEN and READ."""
    NOFLUSH = 8
    """Closing what was opened for reading sends no FLUSH. The kernel's write-back cache sends it all the same, and it
    is answered without entering Python."""
    CACHE_SYMLINKS = 16
    HANDLE_KILLPRIV = 32
    """Dropping suid and sgid is left to us, and the kernel does not ask before each write(2) what there is to drop."""


CREATING_OPCODES = {
    "lookup": 1, "getattr": 3, "setattr": 4, "write": 16, "release": 18, "flush": 25, "create": 35,
}  # fmt: skip
"""Requests that creating.c answers, by the kernel's numbers."""
LENT_S_MAX = 1e6
"""Longer than anything is lent; in ns it fits 64 bits."""


def _is_turned_off() -> bool:
    return os.environ.get("LAKEFS_FUSE_HOOKS", "on").lower() in ("off", "0", "no")


def _declare(library: ctypes.CDLL) -> None:
    library.lakefs_hooks_flush_pid.restype = ctypes.c_int64
    library.lakefs_hooks_xattrs_answered.restype = ctypes.c_int64
    library.lakefs_hooks_flushes_answered.restype = ctypes.c_int64
    library.lakefs_hooks_granted.restype = ctypes.c_uint32
    library.lakefs_hooks_libfuse.restype = ctypes.c_char_p
    library.lakefs_hooks_lend.argtypes = [ctypes.c_uint64, ctypes.c_int64]
    library.lakefs_hooks_take.argtypes = [ctypes.c_uint64]
    library.lakefs_hooks_take.restype = ctypes.c_uint64
    for name in ("hooks_opens_answered", "hooks_releases_answered", "hooks_forgets_taken", "remembered_answered"):
        getattr(library, f"lakefs_{name}").restype = ctypes.c_int64
    id_, time_ns = ctypes.c_uint32, ctypes.c_int64
    library.lakefs_remember.argtypes = [ctypes.c_uint64, id_, id_, id_, time_ns, time_ns, ctypes.c_uint32, time_ns]
    library.lakefs_remember.restype = None
    library.lakefs_creating_answered.argtypes = [ctypes.c_uint32]
    library.lakefs_creating_answered.restype = time_ns
    library.lakefs_hooks_want.argtypes = [ctypes.c_uint32, ctypes.c_uint32]


def _load() -> ctypes.CDLL | None:
    if _is_turned_off():
        return None
    for path in sorted(Path(__file__).parent.glob("_hooks*.so")):
        try:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            _declare(library)
        except (OSError, AttributeError):  # not for this machine, or built from another version
            continue
        return library
    return None


_library = _load()


def active() -> bool:
    """The hooks are in use by the session of this process."""
    return _library is not None and bool(_library.lakefs_hooks_active())


def why_inactive() -> str:
    """Why there are no hooks, and what that costs."""
    why = (
        "turned off by LAKEFS_FUSE_HOOKS"
        if _is_turned_off()
        else "not there: install lakefs-fuse again with a compiler"
    )
    return (
        f"the hooks library is {why}; every open, close and listing asks the daemon, and a program that is started "
        "while a file is being written publishes what is there of it"
    )


def libfuse_version() -> str:
    """As libfuse says it; empty where that is not known."""
    return _library.lakefs_hooks_libfuse().decode() if _library is not None else ""


def want(features: Feature, background_max: int) -> None:
    """What the session that is made next shall have, and how many of its requests the kernel may send in the background
    (0: as many as it likes). Without the hooks it has none of it."""
    if _library is not None:
        _library.lakefs_hooks_want(int(features), background_max)


def granted() -> Feature:
    """Which of the features the kernel has too; none before it sent its first request."""
    return Feature(_library.lakefs_hooks_granted()) if _library is not None else Feature(0)


def flush_pid() -> int:
    """Thread that sent the FLUSH being handled, to be asked before the handler's first await; 0 if not known."""
    return int(_library.lakefs_hooks_flush_pid()) if _library is not None else 0


def kills_privileges() -> bool:
    """The request being handled is to drop suid and sgid; to be asked before the handler's first await. Without
    `Feature.HANDLE_KILLPRIV` none is."""
    return _library is not None and bool(_library.lakefs_privileges_kills())


def lend(inode: int, for_s: float) -> None:
    """The file may be opened for reading without asking for so long. Handles that are lent so have the bits of
    `fs.lending` and the inode. Without the hooks nothing happens."""
    if _library is not None:
        _library.lakefs_hooks_lend(inode, int(min(for_s, LENT_S_MAX) * 1e9))


def take(inode: int) -> int:
    """Nothing is answered of this inode any more; answers how many handles of it are lent, which are to be released in
    Python now."""
    return int(_library.lakefs_hooks_take(inode)) if _library is not None else 0


def remember(attributes: pyfuse3.EntryAttributes, for_s: float = 0.0) -> None:
    """GETATTR of a directory may be answered so for so long; without a time, from now on so where it may be answered.
    Without the hooks nothing happens."""
    if _library is not None:
        _library.lakefs_remember(
            attributes.st_ino, attributes.st_mode, attributes.st_uid, attributes.st_gid, attributes.st_mtime_ns,
            attributes.st_ctime_ns, attributes.st_blksize, int(min(for_s, LENT_S_MAX) * 1e9),
        )  # fmt: skip


def answered() -> dict[str, int]:
    """Requests that were answered without entering Python, by name."""
    if _library is None:
        return {}
    found = {
        "getattr": int(_library.lakefs_remembered_answered()),
        "getxattr": int(_library.lakefs_hooks_xattrs_answered()),
        "flush": int(_library.lakefs_hooks_flushes_answered()),
        "open": int(_library.lakefs_hooks_opens_answered()),
        "release": int(_library.lakefs_hooks_releases_answered()),
        "forget": int(_library.lakefs_hooks_forgets_taken()),
    }
    for name, opcode in CREATING_OPCODES.items():
        found[name] = found.get(name, 0) + int(_library.lakefs_creating_answered(opcode))
    return found


def library() -> ctypes.CDLL | None:
    """For other modules of this package."""
    return _library


def process_of(thread: int) -> int:
    """The process a thread belongs to; 0 where it is gone."""
    try:
        with open(f"/proc/{thread}/status", "rb") as status:
            for line in status:
                if line.startswith(b"Tgid:"):
                    return int(line[5:])
    except (OSError, ValueError):
        pass
    return 0


def holds(process: int, path: str) -> bool:
    """The process has a descriptor of the file at ``path``, as /proc shows it to us; false where it does not."""
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
