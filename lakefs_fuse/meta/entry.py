"""One name in a directory, and its fixed-layout row.

A row is packed little-endian as ``HEAD``, then the ETag, then the name; readdir scans thousands of them, so reading
one is a single ``unpack_from``. The layout is part of the schema version in `database`.
"""

from __future__ import annotations

import stat
from enum import IntFlag
from struct import Struct

import msgspec

ROOT_INODE = 1

HEAD = Struct("<QBBIIIQqqBB")
UNSET = 0xFFFF_FFFF
"""A mode, uid or gid nobody has said: the mount's default is shown."""


class Flag(IntFlag):
    """What is known of an entry."""

    DIRECTORY = 1
    LOCAL = 2
    """Created on this node and not yet in the store; a crash takes it away."""
    ATTRIBUTES_KNOWN = 4
    """Mode, owner and mtime were read from (or written to) the object's own metadata."""
    MARKER = 8
    """A directory that has a marker object."""
    MTIME_KEPT = 16
    """The mtime was chosen, or the bytes did not change since: it goes with the object, whatever its LastModified."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A name and the inode it leads to. Replace with `msgspec.structs.replace`.

    ``cookie`` orders the directory for readdir and stays with the name for as long as the name exists; ``inode`` is
    new for every version that somebody else put under the name. Times in ns since 1970, ``size`` in bytes.
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
    def file_type(self) -> int:
        return stat.S_IFDIR if self.flags & Flag.DIRECTORY else stat.S_IFREG

    def pack(self) -> bytes:
        etag = self.etag.encode()
        return (
            HEAD.pack(
                self.inode, self.flags, 0, self.mode, self.uid, self.gid, self.size, self.mtime_ns, self.ctime_ns,
                len(etag), 0,
            )
            + etag
            + self.name
        )  # fmt: skip


def unpack(parent: int, cookie: int, row: bytes) -> Entry:
    """The entry of a row; `parent` and `cookie` are its key. Raises struct.error for a row that was cut."""
    inode, flags, _, mode, uid, gid, size, mtime_ns, ctime_ns, etag_length, _ = HEAD.unpack_from(row)
    at = HEAD.size + etag_length
    return Entry(
        parent, cookie, row[at:], inode, flags, mode, uid, gid, size, mtime_ns, ctime_ns, row[HEAD.size : at].decode()
    )
