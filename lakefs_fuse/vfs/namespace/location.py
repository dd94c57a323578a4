"""Where the bytes of an entry are, as the rows say: read-only questions to a tree."""

from __future__ import annotations

import errno

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.config import Source
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.tree import Tree


def prefix_of(tree: Tree, directory: int) -> str:
    """Keys of a directory's children begin with this; empty for the root. Raises FileError(ESTALE)."""
    path = tree.path(directory)
    if path is None:
        raise FileError(errno.ESTALE)
    return "".join(name.decode("utf-8", "surrogatepass") + "/" for name in path)


def key_of(tree: Tree, entry: Entry) -> str:
    """The key of a file, or of a directory's marker. Raises FileError(ESTALE)."""
    return prefix_of(tree, entry.parent) + entry.sort_name.decode("utf-8", "surrogatepass")


def extent_of(tree: Tree, entry: Entry) -> Extent | None:
    """Where a file's bytes are; None for one that is not in the store yet, or has none. Raises FileError(EIO)."""
    if entry.flags & (Flag.LOCAL | Flag.SYMLINK):
        return None
    if not entry.place:
        return Extent.whole(Version(key_of(tree, entry), entry.etag, entry.size))
    row = tree.objects.get(entry.place)
    if row is None:
        raise FileError(errno.EIO, f"the object of {key_of(tree, entry)} is not known here: delete the cache directory")
    return Extent(Version(row.key, row.etag, row.size), entry.offset, entry.size)


def location_of(source: Source, extent: Extent) -> str:
    """Where bytes are in the store, for people."""
    part = "" if extent.is_whole else f" bytes {extent.offset}-{extent.offset + extent.size - 1}"
    return f"{str(source).rstrip('/')}/{extent.version.key}{part if extent.size else ''}"
