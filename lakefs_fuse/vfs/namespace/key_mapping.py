"""Maps keys to names and back, with one rule for keys that cannot be paths.

A key is shown if each of its components is a file name: not empty, not ``.`` or ``..``, without NUL, at most 255
bytes. A key that breaks the rule stays in the store, is not shown, and is counted by reason; if both ``a`` and
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
    """Return why a component cannot be a file name; None if it can."""
    if component in ("", ".", ".."):
        return Hidden.COMPONENT
    if "\0" in component:
        return Hidden.NUL
    if len(component.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        return Hidden.LONG
    return None


def is_reserved(parent: int, component: str) -> bool:
    """Return whether this program keeps a name for itself; such names are hidden and not counted."""
    return component == PLACEHOLDER or (parent == ROOT_INODE and component == RESERVED_NAME)


def path_of_key(key: str) -> str:
    """Return the path of the file at a key; for the marker of a directory its path with a slash at the end."""
    return key[: -len(PLACEHOLDER)] if key == PLACEHOLDER or key.endswith(_PLACEHOLDER_INSIDE) else key


_PLACEHOLDER_INSIDE = f"/{PLACEHOLDER}"


def paths_of_keys(keys: Iterable[str]) -> list[bytes]:
    """Return `path_of_key` of each key, as bytes as in the rows of the tree."""
    return [path_of_key(key).encode("utf-8", "surrogatepass") for key in keys]


def checked_name(parent: int, name: bytes) -> str:
    """Return the component of a key that a new name becomes. Raises FileError: ENAMETOOLONG; EILSEQ if it is not UTF-8;
    EINVAL if it cannot be a file name; EPERM if it is reserved."""
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
    """Return the key of a name below a prefix. Raises FileError(ENAMETOOLONG) if it is too long for any store."""
    key = prefix + component
    if source_prefix_bytes + len(key.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX:
        raise FileError(errno.ENAMETOOLONG, f"keys hold at most {KEY_BYTES_MAX} bytes")
    return key


def extent_of(tree: Tree, entry: Entry, key: str = "") -> Extent | None:
    """Return where a file's bytes are; None if it is not stored yet, or is a symbolic link. ``key`` is the file's, if
    the caller knows it. Raises FileError(EIO)."""
    if entry.flags & (Flag.LOCAL | Flag.SYMLINK):
        return None
    if not entry.place:
        return Extent.whole(Version(key or tree.key(entry), entry.etag, entry.size))
    row = tree.objects.get(entry.place)
    if row is None:
        raise FileError(errno.EIO, f"the object of {tree.key(entry)} is not known here: delete the cache directory")
    return Extent(Version(row.key, row.etag, row.size), entry.offset, entry.size)


def version_of(extent: Extent) -> str:
    """Return the version of a file as users see it, which is the same on every node.

    It is the ETag of a plain object, wherever that is; for a file in a pack, time and writer of the commit, and the
    offset."""
    named = parse_commit_key(extent.version.key)
    return extent.version.etag if named is None else f"{named[0]:016x}-{named[1]}:{extent.offset}"


def location_of(source: Source, extent: Extent) -> str:
    """Return where bytes are in the store, as text for users."""
    part = "" if extent.is_whole else f" bytes {extent.offset}-{extent.offset + extent.size - 1}"
    return f"{str(source).rstrip('/')}/{extent.version.key}{part if extent.size else ''}"
