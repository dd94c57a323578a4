"""Replies to READDIRPLUS through direntries.c: from packed rows, without an object for each entry. The bytes are the
same as in a reply built entry by entry, which `Operations.readdir` uses if the library is missing or pyfuse3 does not
reach it (`RowReplies.possible` is False). Trio thread only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, whose calls it receives)
import pyfuse3

from lakefs_fuse.kernel.reply import DIRECTORY_BLKSIZE, FILE_BLKSIZE, Owned
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.vfs.ops.attributes import unasked_mode

Rows = Iterator[tuple[bytes, bytes]]


class Defaults(ctypes.Structure):
    """`struct defaults` of direntries.c: attributes of entries that have none, and ``st_blksize``."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("uid", "gid", "dir_mode", "file_mode", "unfetched_mode", "dir_blksize", "file_blksize")
    )


def is_reached() -> bool:
    """Return whether entries that pyfuse3 adds go through the library, so that `begin_entries` has an effect."""
    library = hooks.library()
    return library is not None and bool(library.lakefs_is_direntry_reached())


def begin_entries(
    rows: Rows,
    files: Mapping[int, object],
    row_of: Callable[[int], bytes],
    prefix: bytes,
    timeout_s: float,
    defaults: Defaults,
) -> None:
    """Replace the next entry that pyfuse3 adds by as many of ``rows``, keys with ``prefix``, as fit. The row of an
    inode in ``files``, a dict, is ``row_of(inode)``."""
    library = hooks.library()
    assert library is not None
    library.lakefs_begin_entries(rows, files, row_of, prefix, timeout_s, ctypes.byref(defaults))


def end_entries() -> tuple[int, int, bytes | None]:
    """Return the number of entries written since `begin_entries`, the last one's cookie, and a key. The key is that of
    the last damaged row that was skipped, or None. Raises the error of reading the rows, and ValueError if one is not
    a pair."""
    library = hooks.library()
    assert library is not None
    count, cookie, damaged = library.lakefs_end_entries()
    return int(count), int(cookie), damaged


def _no_row(inode: int) -> bytes:
    raise KeyError(inode)


class RowReplies:
    """Replies to READDIRPLUS."""

    def __init__(self, fs: Owned) -> None:
        config = fs.config
        self._nothing = pyfuse3.EntryAttributes()
        self._defaults = Defaults(
            config.default_uid, config.default_gid, config.dir_mode, config.file_mode, unasked_mode(config),
            DIRECTORY_BLKSIZE, FILE_BLKSIZE,
        )  # fmt: skip
        # Adding an entry to a reply without a request shows whether pyfuse3's calls go through the library.
        pyfuse3.readdir_reply(pyfuse3.ReaddirToken(), pyfuse3.FileNameT(b"x"), self._nothing, 1)
        self.possible = is_reached()

    def reply(
        self,
        token: pyfuse3.ReaddirToken,
        tree: Tree,
        inode: int,
        after: int,
        timeout_s: float,
        files: Mapping[int, object] | None = None,
        row_of: Callable[[int], bytes] = _no_row,
    ) -> None:
        """Reply as many entries of a directory beyond the cookie ``after`` as fit. The row of an inode in ``files``, a
        dict, is ``row_of(inode)``."""
        prefix, rows = tree.rows(inode, after)
        begin_entries(rows, {} if files is None else files, row_of, prefix, timeout_s, self._defaults)
        try:
            pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b""), self._nothing, 0)
        finally:
            _, _, damaged = end_entries()
        if damaged is not None:
            tree.entry_of_row(damaged)  # decoding counts the damage
