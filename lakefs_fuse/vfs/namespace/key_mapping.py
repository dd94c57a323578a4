"""Maps keys to names and back, with one rule for keys that cannot be paths.

A key is shown if each of its components is a file name: not empty, not ``.`` or ``..``, without NUL, at most 255
bytes. A key that breaks the rule stays in the store, is not shown, and is counted by reason; if both ``a`` and
``a/…`` exist the directory is shown and the object ``a`` is counted. A trailing slash makes a key the marker of a
directory, as does `PLACEHOLDER` inside it (for stores that do not list markers). `extent_of` goes one step further:
from an entry to the bytes that its row names.

`KeyLimits` checks names, paths and keys before anything is written under them: what this store, and every node, can
hold. Nothing else here has state.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from enum import StrEnum

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.commits.archive import parse_commit_key
from lakefs_fuse.config import Source
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import PLACEHOLDER, RESERVED_NAME
from lakefs_fuse.store.protocol import Capabilities

NAME_BYTES_MAX = 255
KEY_BYTES_MAX = 1024
log = logging.getLogger(__name__)


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


class KeyLimits:
    """The names and paths that can be stored, in a store and below the prefix of a mount."""

    def __init__(self, prefix_of: Callable[[int], str], capabilities: Capabilities, source: Source) -> None:
        """``prefix_of`` returns the prefix of the keys in a directory: see `Tree.prefix`."""
        self._prefix_of, self._capabilities = prefix_of, capabilities
        self.path_bytes_max = KEY_BYTES_MAX - len(source.prefix.encode())
        """Maximum length of a path, so that its key is not too long. No node could read a commit with a longer one."""
        self._has_reported = False

    def checked_key(self, prefix: str, component: str) -> str:
        """Return the key of a name below a prefix. Raises FileError(ENAMETOOLONG) if it is too long for any store."""
        key = prefix + component
        if len(key.encode("utf-8", "surrogatepass")) > self.path_bytes_max:
            self.report_long(key)
            raise FileError(errno.ENAMETOOLONG, f"keys hold at most {KEY_BYTES_MAX} bytes")
        return key

    def checked_path(self, directory: int, name: bytes) -> str:
        """Return the path, which is also the key, of a new name. Raises FileError: ENAMETOOLONG if the key with its
        prefix is too long; EILSEQ; EPERM for a reserved name; EINVAL if this store would change a character of it, so
        that no file is written that cannot be stored."""
        component = checked_name(directory, name)
        refused = self._capabilities.characters_refused
        if any(character in component for character in refused):
            raise FileError(errno.EINVAL, f"this store cannot hold names with any of {refused!r}")
        return self.checked_key(self._prefix_of(directory), component)

    def check_paths(self, paths: Iterable[str]) -> None:
        """Check that other nodes can read these paths. Raises FileError(ENAMETOOLONG) if one is too long."""
        for path in paths:
            self.checked_key("", path)

    def check_length(self, directory: int, name: bytes) -> None:
        """Check the length of a name, and of its key in this directory. Raises FileError(ENAMETOOLONG)."""
        if len(name) > NAME_BYTES_MAX:
            raise FileError(errno.ENAMETOOLONG)
        try:
            component = name.decode()
        except UnicodeDecodeError:
            return
        self.checked_key(self._prefix_of(directory), component)

    def name_bytes_max(self, directory: int) -> int:
        """Return the maximum length of a name in the directory, in bytes, so that its key is not too long."""
        return max(0, self.path_bytes_max - len(self._prefix_of(directory).encode("utf-8", "surrogatepass")))

    @property
    def takes_plain_names(self) -> bool:
        """Return whether this store can hold every name of printable ASCII without backslashes."""
        refused = self._capabilities.characters_refused
        return not any(" " <= each <= "~" and each not in "\\/" for each in refused)

    def marker_keys(self, path: str) -> list[str]:
        """Return the keys of objects that may mark the directory at a path; the last is the one that this store
        lists."""
        lists_markers = self._capabilities.lists_markers
        return [path + "/"] if lists_markers else [path + "/", f"{path}/{PLACEHOLDER}"]

    def report_long(self, key: str) -> None:
        """Log once for a mount that a key is too long; programs get the errno each time."""
        if not self._has_reported:
            self._has_reported = True
            log.warning(
                "keys hold at most %d bytes, the lake's prefix included; longer names cannot be made, changed or "
                "removed here, which is said once: %.60s…", KEY_BYTES_MAX, key,
            )  # fmt: skip


def is_long(key: str) -> bool:
    """Return whether a key is too long for any store."""
    return len(key.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX


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
