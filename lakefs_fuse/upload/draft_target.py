"""The target of a draft or of a link: a key, the metadata of the object that will be there, and its preconditions.

A target changes until a request is sent for it: its file is renamed, and each attempt to publish sets what it expects
at the key. What always holds (*changed here alone*): other modules call the methods of `DraftTarget`, whose names say
why it changes; only the store client sets ``unsure``. Trio thread only. The journal record of a draft carries its
target over a crash, except what each attempt sets again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lakefs_fuse.store.client import TOKEN_METADATA

DRAFT_METADATA = TOKEN_METADATA
"""A token is the id of an object's draft, and after a dot the number of its change, if any."""
Describe = Callable[[], tuple[dict[str, str], dict[str, str]]]


@dataclass(slots=True)
class DraftTarget:
    """The target of a draft. ``describe`` returns the object's present metadata: for a PUT, and for the beginning of a
    multipart upload.

    ``if_absent`` is set from a creation with O_EXCL until that is decided: the version is stored (`replace`), or what
    is at the key counts as removed or belongs to an earlier version (`allow_replacing`)."""

    key: str
    describe: Describe
    replaces: str = ""
    copied_from: str = ""
    """Key of the object elsewhere with the bytes of the replaced version, if any. A relocation copies it to ``key``."""
    expected: str | None = None
    """See `store.client.VersionTarget`; each attempt to publish sets it again."""
    removed: str = ""
    """See `store.client.VersionTarget`; set with ``expected``."""
    hidden_ns: int = 0
    """See `store.client.VersionTarget`; set with ``expected``."""
    if_absent: bool = False
    path: str = ""
    """The path of the file in the lake, if that is not ``key``."""
    unsure: tuple[str, str, float] | None = None
    """About this daemon's attempts: see `store.client.VersionTarget`."""

    def aim(self, key: str, path: str) -> None:
        """Send the object to another key; no upload to the one before goes on. ``path`` as the field."""
        self.key, self.path = key, path

    def rename(self, path: str) -> None:
        """The file was renamed to ``path``, and its object stays at the key: an upload to it has begun."""
        self.path = path

    def describe_by(self, describe: Describe) -> None:
        """Another object has the file's attributes from now on."""
        self.describe = describe

    def replace(self, etag: str, copied_from: str = "") -> None:
        """The version replaces the object with this ETag (empty: none), which this node knows: an earlier version that
        it stored, or what its name has after a rename. So O_EXCL is decided."""
        self.replaces, self.copied_from, self.if_absent = etag, copied_from, False

    def update_replaced(self, etag: str) -> None:
        """The replaced object has this ETag now: its bytes moved, or an attempt to store an earlier version has left
        one at the key. O_EXCL is not decided by that."""
        self.replaces = etag

    def expect(self, etag: str | None) -> None:
        """Set the precondition of the next request: as the field ``expected``."""
        self.expected = etag

    def expect_absent(self) -> None:
        """The next request is refused if there is any object."""
        self.if_absent, self.expected = True, None

    def require_absent(self) -> None:
        """O_EXCL is not decided: an attempt failed, or the version takes the place of one that nobody has seen."""
        self.if_absent = True

    def allow_replacing(self) -> None:
        """What is at the key counts as removed, so that the next request may replace it."""
        self.if_absent = False

    def follow(
        self, key: str, path: str, *, if_absent: bool, expected: str | None, removed: str, hidden_ns: int
    ) -> None:  # fmt: skip
        """Set what a plan says of the next attempt."""
        self.key, self.path, self.if_absent, self.expected = key, path, if_absent, expected
        self.removed, self.hidden_ns = removed, hidden_ns
