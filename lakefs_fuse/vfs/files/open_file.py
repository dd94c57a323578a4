"""One file in use: what `FileTable` keeps of it while a handle is open or its newest bytes are not in the store.

Trio thread only; nothing of it survives a crash but what the journal and the rows say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import trio

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.staging.refused_ranges import RefusedRanges
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.namespace import attributes

READING = 1 << 62
"""In the numbers of handles that were opened for reading: whoever closes one need not be asked what that means."""


class FileState(StrEnum):
    """What ``user.lakefs.state`` says. From ``dirty`` and ``uploading`` to ``durable`` or ``failed``, which the next
    attempt takes back to ``uploading``; a write takes any of them to ``dirty``."""

    DIRTY = "dirty"
    """Being written, or accepted and waiting."""
    UPLOADING = "uploading"
    """Parts of it, or the pack that it is in, are on their way or in the store already."""
    DURABLE = "durable"
    FAILED = "failed"
    """The store refused it, or did not answer a caller that waited; the bytes are on the local disk."""


@dataclass(slots=True)
class OpenFile:
    """One inode in use. ``entry`` is what is known of the file now; its size is the draft's while there is one. ``key``
    is its path, and the key that a plain object of it would have; ``extent`` where its bytes are."""

    entry: Entry
    key: str
    extent: Extent | None
    draft: Draft | None = None
    handles: int = 0
    writers: int = 0
    unlinked: bool = False
    if_absent: bool = False
    behind: list[OpenFile] = field(default_factory=list)
    """Versions that write-back accepted before ``draft`` began, oldest first, as they were then, with the same lock."""
    refused: RefusedRanges = field(default_factory=RefusedRanges)
    """Writes that were refused before the version that they were for could begin."""
    late_xattrs: dict[str, bytes] | None = None
    """Set while a version was being stored, which may not tell them."""
    is_redated: bool = False
    """Another node changed the mtime, which the kernel ignores for this inode: the file gets a new one when closed."""
    described: tuple[Entry, Mapping[str, str], Mapping[str, str]] | None = None
    """The entry that `describe` was asked for last, and its answers: with the mtime, and as it is fixed before that."""
    publishing: trio.Lock = field(default_factory=trio.Lock)
    beginning: trio.Lock | None = None
    """Made, and held, by the one who makes the copy that the next version begins with."""

    @property
    def current(self) -> Entry:
        return msgspec.structs.replace(self.entry, size=self.draft.size) if self.draft else self.entry

    @property
    def is_untouched(self) -> bool:
        """Created or emptied, and not written to since."""
        return self.draft is not None and self.draft.size == 0 and self.draft.base is None

    def describe(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Metadata of the object, for a single request and for a multipart upload. The latter is fixed when the upload
        begins, before the last write has a time."""
        if self.described is None or self.described[0] is not self.entry:
            with_mtime = attributes.describe(self.entry, with_mtime=True)
            fixed = {name: value for name, value in with_mtime.items() if name != attributes.MTIME}
            self.described = self.entry, with_mtime, with_mtime if self.entry.flags & Flag.MTIME_KEPT else fixed
        return self.described[1:]

    def is_told_by(self, metadata: Mapping[str, str]) -> bool:
        """An object's metadata says what the attributes are; an mtime that no user chose is its LastModified."""
        return self.describe()[1].items() <= metadata.items()

    @property
    def replaces(self) -> str:
        """ETag of what the store has under the name before this file's next version; empty where there is nothing.
        One that was renamed over a name has it from the version that was renamed."""
        last = self.draft if self.draft is not None else self.behind[-1].draft if self.behind else None
        if last is not None:
            return last.target.replaces
        return self.extent.version.etag if self.extent is not None else ""

    def written(self, now_ns: int) -> None:
        """The bytes changed just now."""
        flags = int(self.entry.flags & ~Flag.MTIME_KEPT)
        self.entry = msgspec.structs.replace(self.entry, flags=flags, mtime_ns=now_ns, ctime_ns=now_ns)
        self.is_redated = False  # the kernel's mtime is the newest again

    @property
    def versions(self) -> list[OpenFile]:
        """Those that wait behind, and this."""
        return [*self.behind, self] if self.behind else [self]

    @property
    def is_incomplete(self) -> bool:
        """Writes to it were refused, and it may not be published."""
        return bool(self.refused.ranges or (self.draft is not None and self.draft.refused.ranges))

    def check_complete(self) -> None:
        """Raises FileError while writes are missing."""
        for refused in (self.refused, self.draft.refused) if self.draft is not None else (self.refused,):
            if refused.ranges:
                refused.check(self.key)

    @property
    def is_promised(self) -> bool:
        """Write-back accepted a version that is not in the store: it survives a crash of the machine, under the name
        that the file has."""
        return any(each.draft is not None and each.draft.accepted for each in self.versions)

    def owner_of(self, draft: Draft) -> OpenFile | None:
        """This, or the version behind it, whose draft it is; None where it has ended."""
        return next((each for each in self.versions if each.draft is draft), None)

    def leave_behind(self) -> OpenFile:
        """The accepted draft becomes a version of its own, with the attributes it has now; another may begin."""
        assert self.draft is not None
        earlier = OpenFile(
            self.entry, self.key, self.extent, self.draft, if_absent=self.if_absent, publishing=self.publishing
        )
        self.draft.target.describe = earlier.describe
        self.behind.append(earlier)
        self.draft = None
        return earlier

    def take_up(self) -> None:
        """The newest draft is gone: the version that it left behind last, if any, is the newest again."""
        self.draft = None
        if not self.behind:
            return
        earlier = self.behind.pop()
        self.entry, self.draft = earlier.entry, earlier.draft
        self.extent, self.if_absent = earlier.extent, earlier.if_absent
        if self.draft is not None:
            self.draft.target.describe = self.describe


@dataclass(slots=True)
class Handle:
    """An open file description."""

    file: OpenFile
    writable: bool
    readahead: Readahead
    opener: int = 0
    """Thread that opened it; 0 where that is not known."""
    closed_by_opener: bool = False
