"""Loads the C hooks; must be imported before pyfuse3. See hooks.c for what they do and when they may be asked.

``LAKEFS_FUSE_HOOKS=off`` leaves them out.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def _load() -> ctypes.CDLL | None:
    if os.environ.get("LAKEFS_FUSE_HOOKS", "on").lower() in ("off", "0", "no"):
        return None
    for path in sorted(Path(__file__).parent.glob("_hooks*.so")):
        try:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            library.lakefs_hooks_flush_pid.restype = ctypes.c_int64
            library.lakefs_hooks_xattrs_answered.restype = ctypes.c_int64
            library.lakefs_hooks_forgets_taken.restype = ctypes.c_int64
        except (OSError, AttributeError):  # not for this machine, or built from another version
            continue
        return library
    return None


_library = _load()


def active() -> bool:
    """The hooks are in use by the session of this process."""
    return _library is not None and bool(_library.lakefs_hooks_active())


def flush_pid() -> int:
    """Thread that sent the FLUSH being handled, to be asked before the handler's first await; 0 if not known."""
    return int(_library.lakefs_hooks_flush_pid()) if _library is not None else 0


def xattrs_answered() -> int:
    """GETXATTR requests that were answered without entering Python."""
    return int(_library.lakefs_hooks_xattrs_answered()) if _library is not None else 0


def forgets_taken() -> int:
    """FORGET requests that were taken without entering Python."""
    return int(_library.lakefs_hooks_forgets_taken()) if _library is not None else 0


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
