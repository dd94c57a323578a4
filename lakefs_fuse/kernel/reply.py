"""Replies that both kinds of mount share: attributes of entries, the first names of a listing, a lake's size."""

from __future__ import annotations

import stat
from typing import Protocol

from lakefs_fuse.kernel.native import hooks  # isort: skip  # noqa: F401  (loaded before pyfuse3, which it wraps)
import pyfuse3

from lakefs_fuse.config import MountConfig
from lakefs_fuse.meta.entry import UNSET, Entry
from lakefs_fuse.vfs.lake_size import LakeSize
from lakefs_fuse.vfs.ops.attributes import file_type_and_mode

DIRECTORY_BLKSIZE = 1 << 20
"""glibc reads directories in buffers of st_blksize, and newer kernels ask for as much at once."""
FILE_BLKSIZE = 128 << 10
SECTOR_BYTES = 512
"""Unit of ``st_blocks``, as stat(2) says."""
STATFS_BLOCK_BYTES = 4096
"""Unit of statfs, in both of its sizes, because programs use one or the other."""
DOT_COOKIE, DOTDOT_COOKIE = 1, (1 << 63) - 1
"""d_off of the names ``.`` and ``..`` in a listing. Those of entries begin with 2, and never get so large."""


class Owned(Protocol):
    """The filesystem that attributes of entries are computed from."""

    config: MountConfig

    def is_unlinked(self, inode: int) -> bool: ...


def attributes_of(entry: Entry, fs: Owned, timeout_s: float) -> pyfuse3.EntryAttributes:
    """Return the attributes that stat(2) shows for an entry, valid for this many seconds."""
    attributes = pyfuse3.EntryAttributes()
    attributes.st_ino = pyfuse3.InodeT(entry.inode)
    attributes.entry_timeout = attributes.attr_timeout = timeout_s
    attributes.st_mode = pyfuse3.ModeT(file_type_and_mode(entry, fs.config))
    attributes.st_nlink = 0 if fs.is_unlinked(entry.inode) else 1
    attributes.st_uid = fs.config.default_uid if entry.uid == UNSET else entry.uid
    attributes.st_gid = fs.config.default_gid if entry.gid == UNSET else entry.gid
    attributes.st_size = entry.size
    attributes.st_blocks = -(-entry.size // SECTOR_BYTES)
    attributes.st_blksize = DIRECTORY_BLKSIZE if stat.S_ISDIR(attributes.st_mode) else FILE_BLKSIZE
    attributes.st_mtime_ns = attributes.st_atime_ns = entry.mtime_ns
    attributes.st_ctime_ns = entry.ctime_ns
    return attributes


def absent_for(timeout_s: float) -> pyfuse3.EntryAttributes:
    """Return the reply that there is no such name, valid for this many seconds."""
    absent = pyfuse3.EntryAttributes()
    absent.st_ino = pyfuse3.InodeT(0)
    absent.entry_timeout = timeout_s
    return absent


def reply_dots(token: pyfuse3.ReaddirToken, start: int, inode: int, parent: int) -> int:
    """Reply the names ``.`` and ``..`` of a listing if they are beyond ``start``. Returns the cookie after which to
    continue with entries.

    Without them the listing of an empty directory has no bytes, and the kernel could never drop it: it holds listings
    as pages, and drops them page by page.
    """
    dots = (b".", inode, DOT_COOKIE), (b"..", parent, DOTDOT_COOKIE)
    before = (0, DOT_COOKIE, DOTDOT_COOKIE)
    if start not in before:
        return start
    for name, number, cookie in dots[before.index(start) :]:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = pyfuse3.InodeT(number)
        attributes.st_mode = pyfuse3.ModeT(0o040755)
        pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), attributes, cookie)
    return 0


def size_reply(size: LakeSize) -> pyfuse3.StatvfsData:
    """Return the reply to statfs. Its total is never 0, because df(1) omits such file systems."""
    used, free = -(-size.bytes // STATFS_BLOCK_BYTES), size.free_bytes // STATFS_BLOCK_BYTES
    answer = pyfuse3.StatvfsData()
    answer.f_bsize = answer.f_frsize = STATFS_BLOCK_BYTES
    answer.f_blocks = max(1, used + free)
    answer.f_bfree = answer.f_bavail = free
    answer.f_files = size.names + size.free_names
    answer.f_ffree = answer.f_favail = size.free_names
    answer.f_namemax = 255
    return answer
