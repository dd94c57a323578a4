"""From keys to names and back: the one rule for keys that cannot be paths.

A key is shown where each of its components is a file name: not empty, not ``.`` or ``..``, without NUL, at most 255
bytes. A key that breaks the rule is left alone in the store, not shown, and counted by reason; where both ``a`` and
``a/…`` exist the directory is shown and the object ``a`` is counted. A trailing slash makes a key the marker of a
directory, as does `PLACEHOLDER` inside it (for stores that do not list markers). `extent_of` goes one step further:
from an entry to the bytes that its row names. Nothing here has state.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from enum import StrEnum

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.commits.archive import parse_commit_key
from lakefs_fuse.config import Source
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import PLACEHOLDER, RESERVED_NAME

NAME_BYTES_MAX = 255
KEY_BYTES_MAX = 1024


class Hidden(StrEnum):
    """Why a key is not shown."""

    COMPONENT = "component"
    NUL = "nul"
    LONG = "long"
    CONFLICT = "conflict"


def why_hidden(component: str) -> Hidden | None:
    """None for a component that can be a file name."""
    if component in ("", ".", ".."):
        return Hidden.COMPONENT
    if "\0" in component:
        return Hidden.NUL
    if len(component.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        return Hidden.LONG
    return None


def is_reserved(parent: int, component: str) -> bool:
    """Names this program keeps for itself, hidden and not counted."""
    return component == PLACEHOLDER or (parent == ROOT_INODE and component == RESERVED_NAME)


def path_of_key(key: str) -> str:
    """The path of the file at a key; with a slash at its end, that of the directory whose marker the key is."""
    return key[: -len(PLACEHOLDER)] if key == PLACEHOLDER or key.endswith(_PLACEHOLDER_INSIDE) else key


_PLACEHOLDER_INSIDE = f"/{PLACEHOLDER}"


def paths_of_keys(keys: Iterable[str]) -> list[bytes]:
    """As `path_of_key`, of each, in the bytes of the tree's rows."""
    return [path_of_key(key).encode("utf-8", "surrogatepass") for key in keys]


def checked_name(parent: int, name: bytes) -> str:
    """The component a new name becomes. Raises FileError: ENAMETOOLONG, EILSEQ (not UTF-8), EPERM (reserved)."""
    if len(name) > NAME_BYTES_MAX:
        raise FileError(errno.ENAMETOOLONG)
    try:
        component = name.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(errno.EILSEQ, "names in an object store are UTF-8") from error
    if why_hidden(component) or "/" in component:
        raise FileError(errno.EINVAL)
    if is_reserved(parent, component):
        raise FileError(errno.EPERM, f"{component} is reserved")
    return component


def checked_key(prefix: str, component: str, source_prefix_bytes: int = 0) -> str:
    """The key of a name below a prefix. Raises FileError(ENAMETOOLONG) where no store would take it."""
    key = prefix + component
    if source_prefix_bytes + len(key.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX:
        raise FileError(errno.ENAMETOOLONG, f"keys hold at most {KEY_BYTES_MAX} bytes")
    return key


def extent_of(tree: Tree, entry: Entry) -> Extent | None:
    """Where a file's bytes are; None for one that is not in the store yet, or has none. Raises FileError(EIO)."""
    if entry.flags & (Flag.LOCAL | Flag.SYMLINK):
        return None
    if not entry.place:
        return Extent.whole(Version(tree.key(entry), entry.etag, entry.size))
    row = tree.objects.get(entry.place)
    if row is None:
        raise FileError(errno.EIO, f"the object of {tree.key(entry)} is not known here: delete the cache directory")
    return Extent(Version(row.key, row.etag, row.size), entry.offset, entry.size)


def version_of(extent: Extent) -> str:
    """The version of a file, as users see it and on every node the same: the ETag of a plain object wherever it is; of
    a file in a pack the time and the writer of the commit, and the offset."""
    named = parse_commit_key(extent.version.key)
    return extent.version.etag if named is None else f"{named[0]:016x}-{named[1]}:{extent.offset}"


def location_of(source: Source, extent: Extent) -> str:
    """Where bytes are in the store, for people."""
    part = "" if extent.is_whole else f" bytes {extent.offset}-{extent.offset + extent.size - 1}"
    return f"{str(source).rstrip('/')}/{extent.version.key}{part if extent.size else ''}"
