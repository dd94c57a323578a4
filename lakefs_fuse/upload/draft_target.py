"""The target of a draft or of a link: a key, the metadata of the object that will be there, and its preconditions.

A target changes until a request is sent for it: its file is renamed, and each attempt to publish sets what it expects
at the key. Trio thread only. The journal record of a draft carries it over a crash.
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
    multipart upload."""

    key: str
    describe: Describe
    replaces: str = ""
    copied_from: str = ""
    """Key of the object elsewhere with the bytes of the replaced version, if any. A relocation copies it to ``key``."""
    expected: str | None = None
    """See `store.client.VersionTarget`; each attempt to publish sets it again."""
    removed: str = ""
    """See `store.client.VersionTarget`; set with ``expected``."""
    if_absent: bool = False
    path: str = ""
    """The path of the file in the lake, if that is not ``key``."""
    unsure: tuple[str, str, float] | None = None
    """About this daemon's attempts: see `store.client.VersionTarget`."""
