"""The sources of `ingest`: a directory tree or a tar stream, as one sequence of items in the order of application.

What always holds: the path of an item can be one of a lake (`refusal`), and any other item is a `Refused`; a file that
changes while it is read is refused, not spliced. A source is read once, in order, by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from lakefs_fuse.commits.record import (
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    TARGET_BYTES_MAX,
    UNSET,
)
from lakefs_fuse.errors import LakeError
from lakefs_fuse.product import PLACEHOLDER, RESERVED_NAME, RESERVED_PREFIX
from lakefs_fuse.store.protocol import Body


class SourceError(LakeError):
    """The source ends early, is damaged, or cannot be read at all."""


class Changed(Exception):
    """A file was written to while it was read. The message says so."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """``mode`` is permission bits."""

    mode: int
    mtime_ns: int
    uid: int
    gid: int


class Content(Protocol):
    """The bytes of one file. It is closed before the next item is asked for, perhaps read in part."""

    size: int

    def read(self, offset: int, length: int) -> Body:
        """Bytes in order, without gaps. Raises OSError, Changed, SourceError."""
        ...

    def check(self) -> None:
        """Called after the last read. Raises Changed."""
        return

    def close(self) -> None:
        """Free what the content holds."""
        return


@dataclass(frozen=True, slots=True)
class NamedItem:
    """An item that becomes a name in the lake; ``path`` is empty for the root of the source."""

    path: str
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class File(NamedItem):
    content: Content


@dataclass(frozen=True, slots=True)
class Directory(NamedItem):
    pass


@dataclass(frozen=True, slots=True)
class Link(NamedItem):
    """A symbolic link."""

    target: str


@dataclass(frozen=True, slots=True)
class HardLink(NamedItem):
    """Another name of the file ``target``, an earlier path of this source."""

    target: str


@dataclass(frozen=True, slots=True)
class Refused:
    """``name`` is as the source has it, perhaps not UTF-8. ``special``: a device, fifo or socket."""

    name: str
    why: str
    special: bool = False


Item = File | Directory | Link | HardLink | Refused


class Source(Protocol):
    """Iterated once."""

    links: bool
    """There may be `HardLink`s, so the reader has to remember where files went."""

    def items(self) -> Iterator[Item]:
        """Raises SourceError."""

    def count(self) -> tuple[int, int] | None:
        """The number of files and bytes, None where that cannot be known beforehand. In any thread, beside `items`."""
        return None

    def interrupt(self) -> None:
        """Make a reader that waits for bytes raise SourceError soon. In any thread, before `close`."""

    def close(self) -> None: ...


class Bytes(Content):
    """Content in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, length: int) -> bytes:
        """Callers ask for all of it, which costs no copy."""
        whole = offset == 0 and length == self.size
        return self._data if whole else self._data[offset : offset + length]


def refusal(path: str, *, before_bytes: int = 0) -> str:
    """Why a path cannot be one of a lake; empty if it can. ``before_bytes`` is what its key has in front of it."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "names in a lake are UTF-8"
    if before_bytes + len(encoded) > KEY_BYTES_MAX:
        return f"keys hold at most {KEY_BYTES_MAX} bytes"
    for component in path.split("/"):
        if component == "..":
            return "'..' leads out of the archive"
        if component in ("", ".") or "\0" in component:
            return "not a path"
        if len(component) > NAME_BYTES_MAX or len(component.encode()) > NAME_BYTES_MAX:
            return f"names hold at most {NAME_BYTES_MAX} bytes"
        if component == PLACEHOLDER:
            return f"{PLACEHOLDER} is reserved"
    return ""


def is_reserved(path: str) -> bool:
    """Whether a path, relative to the lake, is this program's own."""
    return path == RESERVED_NAME or path.startswith(RESERVED_PREFIX)


def link_refusal(target: str) -> str:
    """Why a text cannot be the target of a symbolic link."""
    try:
        length = len(target.encode())
    except UnicodeEncodeError:
        return "its target is not UTF-8"
    return "" if 0 < length <= TARGET_BYTES_MAX and "\0" not in target else "its target is empty or too long"


def attributes(mode: int, mtime_ns: int, uid: int, gid: int) -> Attributes:
    """Mode and owners within the bounds of a record."""
    return Attributes(
        mode & 0o7777,
        mtime_ns,
        uid if 0 <= uid < UNSET else UNSET,
        gid if 0 <= gid < UNSET else UNSET,
    )
