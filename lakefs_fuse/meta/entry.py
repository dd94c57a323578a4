"""One name in a directory, and the layout of its row.

A row is packed little-endian as ``HEAD``, then the ETag, then the name; readdir scans thousands of them, so reading
one is a single ``unpack_from`` (`tree.unpack_entry`). The layout is part of the version in `schema`.
"""

from __future__ import annotations

import stat
from struct import Struct

import msgspec

NS = 1_000_000_000
ROOT_INODE = 1

HEAD = Struct("<QHIIIQqqQIQB")
FLAGS_LOW, PLACE, NOWHERE = 8, slice(54, 58), bytes(4)
"""In a row: the low byte of ``flags``, the bytes of ``place``, and those of a file that is the object at its own key.
"""
NAME_BYTES_MAX = 255
ETAG_BYTES_MAX = 255
"""Rows, here and in the object table, have one byte for its length. Longer ones in records and stores are refused when
they are read."""
MTIME_NS_MIN, MTIME_NS_MAX = -(1 << 62), 1 << 62
"""The times that a lake keeps, from 1823 to 2116. One beyond them, which a program chose or a store told, becomes the
nearest of these, as on a local file system with such limits."""
UNSET = 0xFFFF_FFFF
"""A mode, uid or gid that was never set: the mount's default is shown."""


def kept_ns(time_ns: int) -> int:
    """The nearest time, in nanoseconds since 1970, that a lake keeps."""
    return min(max(time_ns, MTIME_NS_MIN), MTIME_NS_MAX)


class Flag:
    """Bits of an entry's ``flags``: facts about it. Plain integers, because an operation on an enum costs a microsecond
    and every request makes many."""

    DIRECTORY = 1
    LOCAL = 2
    """Created on this node and not yet in the store; a crash takes it away."""
    ATTRIBUTES_KNOWN = 4
    """Mode, owner and mtime were read from (or written to) the object's own metadata."""
    MARKER = 8
    """A directory that has a marker object."""
    MTIME_KEPT = 16
    """The mtime was chosen, or the bytes did not change since: it goes with the object, whatever its LastModified."""
    LISTED = 32
    """A directory that the last listing of its parent showed: it has plain objects below it."""
    SYMLINK = 64
    """The target is in a separate row, by inode."""
    XATTRS = 128
    """Extended attributes are in a separate row, by inode."""
    SHADOWED = 256
    """A file that a directory of the same name hides."""
    ATTRIBUTED = 512
    """A commit changed the attributes of this version, at ``ctime_ns``."""
    PUT_AGAIN = 1024
    """The commit that tells of this plain object removed the name before: earlier ones speak of another, which may have
    had the same bytes."""
    RELOCATED = 2048
    """The bytes are elsewhere, and are those of the plain object that is hidden: what removes that removes the file."""
    OVERRIDING = 4096
    """What is here is there in place of a file elsewhere, and no commit says so yet: an object of another program, or a
    file that is being written here. What removes it removes that, too."""
    # 8192 is in rows of earlier versions, and says nothing now.


NO_OBJECT = Flag.DIRECTORY | Flag.LOCAL | Flag.SYMLINK
"""Of what is no object at its own key, whatever its ``place``."""

PENDING = 1 << 63
"""Stamps from here on are sequence numbers of changes made here and not committed yet: newer than any commit."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A name and the inode it leads to. Replace with `msgspec.structs.replace`.

    ``cookie`` orders the directory for readdir and stays with the name for as long as the name exists; ``inode`` is
    new for every version that somebody else put under the name. Times in ns since 1970, ``size`` in bytes.

    ``stamp`` is the time of the commit that says what this name is, 0 where no commit does. ``place`` 0 is the plain
    object at the name's own key, with ``etag``; otherwise it numbers a row of the object table, the bytes begin at
    ``offset`` in it, and ``etag`` is that of the plain object at the own key that is hidden (empty: of none).
    """

    parent: int
    cookie: int
    name: bytes
    inode: int
    flags: int = 0
    mode: int = UNSET
    uid: int = UNSET
    gid: int = UNSET
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    etag: str = ""
    stamp: int = 0
    place: int = 0
    offset: int = 0

    @property
    def is_dir(self) -> bool:
        return bool(self.flags & Flag.DIRECTORY)

    @property
    def is_local(self) -> bool:
        return bool(self.flags & Flag.LOCAL)

    @property
    def sort_name(self) -> bytes:
        """The name as the store lists it: directories end in a slash, which is also their place in the order."""
        return self.name + b"/" if self.flags & Flag.DIRECTORY else self.name

    @property
    def is_symlink(self) -> bool:
        return bool(self.flags & Flag.SYMLINK)

    @property
    def is_plain(self) -> bool:
        """A file that is the plain object at its own key, and in the store."""
        return not self.place and not self.flags & NO_OBJECT

    @property
    def is_dated_by_store(self) -> bool:
        """``ctime_ns`` is the LastModified of a plain object, not when it was written here or got other attributes."""
        return not self.flags & Flag.ATTRIBUTED and self.ctime_ns % NS == 0

    @property
    def file_type(self) -> int:
        if self.flags & Flag.DIRECTORY:
            return stat.S_IFDIR
        return stat.S_IFLNK if self.flags & Flag.SYMLINK else stat.S_IFREG
