"""READDIR answered from packed rows, without an object for each entry; the same bytes as entry by entry.

Needs the C library of direntries.c; where it is missing, or pyfuse3 does not reach it, `possible` is false. Trio thread
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lakefs_fuse.kernel.native import direntries  # isort: skip  (loaded before pyfuse3, whose calls it receives)
import pyfuse3

from lakefs_fuse.kernel.readdir_ahead import RowsAhead
from lakefs_fuse.kernel.reply import DIRECTORY_BLKSIZE, FILE_BLKSIZE, Owned
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.vfs.filesystem import unasked_mode


def _no_row(inode: int) -> bytes:
    raise KeyError(inode)


class RowReplies:
    """See the module's head. ``ahead`` reads what the next request will want."""

    def __init__(self, fs: Owned) -> None:
        config = fs.config
        self.ahead = RowsAhead()
        self._nothing = pyfuse3.EntryAttributes()
        self._shown = direntries.Shown(
            fs.default_uid, fs.default_gid, config.dir_mode, config.file_mode, unasked_mode(config),
            DIRECTORY_BLKSIZE, FILE_BLKSIZE,
        )  # fmt: skip
        # An answer that is nobody's: whether what pyfuse3 adds to one goes through the library.
        pyfuse3.readdir_reply(pyfuse3.ReaddirToken(), pyfuse3.FileNameT(b"x"), self._nothing, 1)
        self.possible = direntries.is_reached()

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
        """As many entries of a directory beyond the cookie ``after`` as fit. The row of an inode in ``files``, a dict,
        is ``row_of(inode)``."""
        prefix, rows = self.ahead.take(tree, inode, after)
        direntries.give(rows, {} if files is None else files, row_of, prefix, timeout_s, self._shown)
        try:
            pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b""), self._nothing, 0)
        finally:
            count, last, damaged = direntries.taken()
        if damaged is not None:
            tree.entry_of_row(damaged)  # counted by whoever decodes it
        if after and count:
            self.ahead.begin(tree, inode, last, count)
