"""Loads the C library that writes directory entries; must be imported before pyfuse3. See direntries.c.

``LAKEFS_FUSE_HOOKS=off`` leaves it out. What it writes is what pyfuse3 writes for the same entries
(`Operations.readdir` does that where the library is missing).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


class Shown(ctypes.Structure):
    """What is shown where nobody has said, or (``unasked_mode``) the object was not asked, and ``st_blksize``."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("uid", "gid", "dir_mode", "file_mode", "unasked_mode", "dir_blksize", "file_blksize")
    )


def load() -> ctypes.PyDLL | None:
    """The compiled library; None where it is left out or cannot be loaded."""
    if os.environ.get("LAKEFS_FUSE_HOOKS", "on").lower() in ("off", "0", "no"):
        return None
    for path in sorted(Path(__file__).parent.glob("_direntries*.so")):
        try:
            library = ctypes.PyDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        library.lakefs_direntries_give.restype = ctypes.py_object
        library.lakefs_direntries_give.argtypes = (
            ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_char_p, ctypes.c_double,
            ctypes.POINTER(Shown),
        )  # fmt: skip
        library.lakefs_direntries_taken.restype = ctypes.py_object
        return library
    return None


LIBRARY = load()
"""Loaded when this module is imported, before pyfuse3."""


def is_reached() -> bool:
    """An entry that pyfuse3 added went through the library: what is given will be written."""
    return LIBRARY is not None and bool(LIBRARY.lakefs_direntries_reached())


def give(
    rows: Iterator[tuple[bytes, bytes]],
    files: Mapping[int, object],
    row_of: Callable[[int], bytes],
    prefix: bytes,
    timeout_s: float,
    shown: Shown,
) -> None:
    """The next entry that pyfuse3 adds is as many of ``rows``, keys with ``prefix``, as fit. The row of an inode in
    ``files``, a dict, is ``row_of(inode)``."""
    assert LIBRARY is not None
    LIBRARY.lakefs_direntries_give(rows, files, row_of, prefix, timeout_s, ctypes.byref(shown))


def taken() -> tuple[int, int, bytes | None]:
    """How many entries were written since `give`, the cookie of the last, and the key of the last damaged row that was
    passed over. Raises what reading the rows raised, and
    ValueError where one is none."""
    assert LIBRARY is not None
    count, cookie, damaged = LIBRARY.lakefs_direntries_taken()
    return int(count), int(cookie), damaged
