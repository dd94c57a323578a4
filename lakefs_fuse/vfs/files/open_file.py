"""One file in use: the state that `FileTable` keeps while a handle is open or the newest bytes are not in the store.

What always holds (*states*): only the methods here change ``draft`` and ``state``, by the table `TRANSITIONS`. A file
that is unlinked stays so, whatever is written to it, unless its removal fails. Trio thread only; only the journal and
the rows survive a crash.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import trio

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.metrics import ReadMetrics
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.staging.refused_ranges import RefusedRanges
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.namespace import attributes


class FileState(StrEnum):
    """The value of ``user.lakefs.state``; `ExtendedAttributes` computes it when it is read."""

    DIRTY = "dirty"
    """The file is being written, or is acknowledged and waits."""
    UPLOADING = "uploading"
    """Parts of it, or the pack that contains it, are being sent or are in the store already."""
    DURABLE = "durable"
    FAILED = "failed"
    """The store refused it, or did not answer a caller that waited; the bytes are on the local disk."""


class OpenState(StrEnum):
    """The state of the newest version of a file in use; `TRANSITIONS` says which may follow which."""

    CLEAN = "clean"
    """No draft: the newest bytes are those of ``extent``, or of the last of ``behind``, which may not be stored yet."""
    WRITING = "writing"
    """A draft is being written or stored."""
    ACKNOWLEDGED = "acknowledged"
    """Write-back has acknowledged the draft: a write begins the next version."""
    UNLINKED = "unlinked"
    """Its name was removed, or is being removed: it is not published, whether it has a draft or not."""


DIRTY = OpenState.WRITING, OpenState.ACKNOWLEDGED
TRANSITIONS = {
    OpenState.CLEAN: {OpenState.WRITING, OpenState.ACKNOWLEDGED, OpenState.UNLINKED},
    OpenState.WRITING: {OpenState.CLEAN, OpenState.ACKNOWLEDGED, OpenState.UNLINKED},
    OpenState.ACKNOWLEDGED: {OpenState.CLEAN, OpenState.UNLINKED},
    OpenState.UNLINKED: {OpenState.CLEAN, OpenState.WRITING, OpenState.ACKNOWLEDGED},
}


@dataclass(slots=True, eq=False)
class OpenFile:
    """One inode in use. ``entry`` has the present attributes; while there is a draft, the size is that of the draft.
    ``key`` is the path, and the key of a plain object at its own key; ``extent`` is where the stored bytes are."""

    entry: Entry
    key: str
    extent: Extent | None
    draft: Draft | None = field(default=None, init=False)
    handles: int = 0
    writers: int = 0
    state: OpenState = field(default=OpenState.CLEAN, init=False)
    if_absent: bool = False
    behind: list[OpenFile] = field(default_factory=list)
    """Versions that were acknowledged before ``draft`` began, oldest first, as they were then; they share its lock."""
    refused: RefusedRanges = field(default_factory=RefusedRanges)
    """Writes that were refused before their version could begin."""
    bypasses_page_cache: bool = False
    """True if a handle writes past the kernel's page cache: one opened with O_DIRECT, or of a file that is published
    while it is open. After a refused write of such a handle beyond the end, the kernel truncates the file to its
    present size. Any other truncation is by a program."""
    late_xattrs: dict[str, bytes] | None = None
    """Extended attributes that were set while a version was being stored, which may lack them; None if none were. Those
    of a file without a name, which has no row that could hold them."""
    lost_name: bool = False
    """True if another client has the name at which it was created with O_EXCL, so that it is stored under no name."""
    is_redated: bool = False
    """True if another node changed the mtime: the kernel ignores that, so the file gets a new inode when it is
    closed."""
    described: tuple[Entry, dict[str, str], dict[str, str]] | None = None
    """The entry of the last call of `describe`, and its results."""
    prefix_bytes: int | None = None
    """Length of the prefix without holes, if the file is published while it is open; otherwise None."""
    publishing: trio.Lock = field(default_factory=trio.Lock)
    beginning: trio.Lock | None = None
    """Held by the task that makes the copy with which the next version begins."""

    def transition(self, to: OpenState) -> None:
        assert to in TRANSITIONS[self.state], f"{self.key}: {self.state} cannot become {to}"
        self.state = to

    def begin(self, draft: Draft) -> None:
        """Make the draft the newest version."""
        self.draft = draft
        self.follow_draft()

    def end_draft(self) -> None:
        """Remove the draft, which is stored or discarded."""
        self.draft = None
        self.follow_draft()

    def follow_draft(self) -> None:
        """Update the state after the draft, or its state, has changed."""
        if self.state is not OpenState.UNLINKED and (to := self._state_of_draft()) is not self.state:
            self.transition(to)

    def _state_of_draft(self) -> OpenState:
        if self.draft is None:
            return OpenState.CLEAN
        return OpenState.ACKNOWLEDGED if self.draft.sequence else OpenState.WRITING

    @property
    def unlinked(self) -> bool:
        return self.state is OpenState.UNLINKED

    @property
    def is_being_unlinked(self) -> bool:
        """Return whether a task that holds ``publishing`` is removing its name, which may still fail."""
        return self.unlinked and self.publishing.locked()

    @property
    def is_dirty(self) -> bool:
        """Return whether its newest bytes are not in the store, and its name is not being removed."""
        return self.state in DIRTY

    @property
    def keeps_name(self) -> bool:
        """Return whether its row stays when a LIST, or a commit of another node, lacks it: it is dirty, or is until its
        name is removed here."""
        return (self._state_of_draft() if self.is_being_unlinked else self.state) in DIRTY

    def count_written(self, offset: int, length: int) -> None:
        """Extend the prefix by written bytes if they follow it."""
        if self.prefix_bytes is not None and offset <= self.prefix_bytes:
            self.prefix_bytes = max(self.prefix_bytes, offset + length)

    def count_truncated(self, size: int) -> None:
        """Cut the prefix to a new size of the file: a part that was added is a hole."""
        if self.prefix_bytes is not None:
            self.prefix_bytes = min(self.prefix_bytes, size)

    def unlink(self) -> None:
        """Mark the file as unlinked: its name was removed, or is about to be."""
        if self.state is not OpenState.UNLINKED:
            self.transition(OpenState.UNLINKED)

    def relink(self) -> None:
        """Undo `unlink`, because the name could not be removed."""
        if self.state is OpenState.UNLINKED:
            self.transition(self._state_of_draft())

    @property
    def current(self) -> Entry:
        return msgspec.structs.replace(self.entry, size=self.draft.size) if self.draft else self.entry

    @property
    def is_untouched(self) -> bool:
        """Return whether the file was created or emptied, and not written to since."""
        return self.draft is not None and self.draft.size == 0 and self.draft.base is None

    def describe(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the metadata of the object for a PUT, and for a multipart upload. That is fixed when the upload
        begins, so it has no mtime unless a program set one, and readers use its LastModified."""
        if self.described is None or self.described[0] is not self.entry:
            with_mtime = attributes.describe(self.entry)
            fixed = {name: value for name, value in with_mtime.items() if name != attributes.MTIME}
            self.described = self.entry, with_mtime, with_mtime if self.entry.flags & Flag.MTIME_KEPT else fixed
        return self.described[1:]

    def install(
        self, draft: Draft, entry: Entry, extent: Extent, described: Mapping[str, str]
    ) -> tuple[Entry, dict[str, bytes] | None] | None:
        """Make the bytes of a draft the file's stored version, with ``entry`` as its row; later drafts stay.

        The caller journals the drafts of later versions, which are to replace this one. Returns the attributes that
        were set since the store got those ``described``, with the extended ones if those were set; None if none
        were."""
        owner = self.owner_of(draft) or self
        now, xattrs, self.late_xattrs = owner.entry, self.late_xattrs, None
        _, expected = owner.describe()  # an mtime that no user chose is the object's LastModified
        self.extent, self.if_absent = extent, False
        owner.entry = entry
        self.end_version(draft)
        for later in self.versions if owner is not self else ():
            later.replace_stored(entry, extent)
        if self.state is OpenState.UNLINKED or (xattrs is None and expected.items() <= described.items()):
            return None
        return now, xattrs

    def end_version(self, draft: Draft) -> None:
        """Remove the draft of a stored version, or the version behind that has it."""
        owner = self.owner_of(draft)
        if owner is self:
            self.end_draft()
        elif owner is not None:
            self.behind.remove(owner)

    def replace_stored(self, entry: Entry, extent: Extent) -> None:
        """Let this version replace one that was stored since it began. The caller journals its draft."""
        flags = int(self.entry.flags & ~Flag.LOCAL)
        self.entry = msgspec.structs.replace(
            self.entry, flags=flags, etag=entry.etag, stamp=entry.stamp, place=entry.place, offset=entry.offset
        )
        self.extent, self.if_absent = extent, False
        if self.draft is not None:
            self.draft.target.replace(extent.version.etag)

    @property
    def is_new(self) -> bool:
        """Return whether the file was created here and no version of it is in the store."""
        return self.extent is None and self.draft is not None and not self.draft.target.replaces

    @property
    def replaces(self) -> str:
        """Return the ETag of the object that the file's next version replaces; empty if there is none.

        A version that was renamed over a name passes it on."""
        last = self.draft if self.draft is not None else self.behind[-1].draft if self.behind else None
        if last is not None:
            return last.target.replaces
        return self.extent.version.etag if self.extent is not None else ""

    def written(self, now_ns: int | None) -> None:
        """Set the times after the bytes have changed; with None, the times stay, but no program chose them."""
        flags = int(self.entry.flags & ~Flag.MTIME_KEPT)
        times = {} if now_ns is None else {"mtime_ns": now_ns, "ctime_ns": now_ns}
        self.entry = msgspec.structs.replace(self.entry, flags=flags, **times)
        self.is_redated = False  # the kernel's mtime is the newest again

    def set_attributes(self, ctime_ns: int, mtime_ns: int | None) -> None:
        """A program set attributes, and chose an mtime where that is given."""
        self.entry = msgspec.structs.replace(self.entry, ctime_ns=max(ctime_ns, self.entry.ctime_ns))
        if mtime_ns is not None:
            self.entry = msgspec.structs.replace(
                self.entry, mtime_ns=mtime_ns, flags=self.entry.flags | Flag.MTIME_KEPT
            )

    @property
    def versions(self) -> list[OpenFile]:
        """The versions that wait behind, oldest first, and this one."""
        return [*self.behind, self] if self.behind else [self]

    @contextmanager
    def restoring_names(self) -> Iterator[None]:
        """Restore the name of every version, and what it is to replace, if the block raises: the change of the name
        was not written. The caller holds ``publishing`` if there is a draft; nothing is awaited in the block."""
        before = [(each, each.key, each.entry, each.if_absent) for each in self.versions]
        targets = [(each.draft, copy(each.draft.target)) for each in self.versions if each.draft is not None]
        try:
            yield
        except BaseException:
            for each, key, entry, if_absent in before:
                each.key, each.entry, each.if_absent = key, entry, if_absent
            for draft, target in targets:
                draft.retarget(target)
            raise

    @property
    def is_incomplete(self) -> bool:
        """Return whether writes to it were refused, so that it must not be published."""
        return bool(self.refused.ranges or (self.draft is not None and self.draft.refused.ranges))

    @property
    def has_lost_name(self) -> bool:
        """Return whether `lose_name` was called, and the name is not removed."""
        draft = self.draft
        is_written = draft is not None and not draft.sequence and draft.target.if_absent
        return is_written and self.lost_name and not self.unlinked

    def lose_name(self) -> None:
        """Record that another client created the name before this version could be stored."""
        self.lost_name = True

    @property
    def is_orphaned(self) -> bool:
        """Return whether no program has it open, and nothing of it may be stored under its name."""
        return not self.handles and not self.unlinked and (self.is_incomplete or self.has_lost_name)

    def check_publishable(self) -> None:
        """Check that the file may be published. Raises FileError while writes are missing, and FileError(EEXIST) if
        another client has had the name."""
        for refused in (self.refused, self.draft.refused) if self.draft is not None else (self.refused,):
            if refused.ranges:
                refused.check(self.key)
        if self.has_lost_name:
            raise FileError(errno.EEXIST, f"{self.key} was stored by another client in the meantime")

    @property
    def is_acknowledged(self) -> bool:
        """Return whether a version that is not in the store survives a crash of the machine under the present name."""
        return any(each.draft is not None and each.draft.sequence for each in self.versions)

    def owner_of(self, draft: Draft) -> OpenFile | None:
        """Return the version, this one or one behind it, that has the draft; None if it has ended."""
        if self.draft is draft:
            return self
        return next((each for each in self.behind if each.draft is draft), None)

    def stored_after(self, draft: Draft) -> Draft | None:
        """Return the draft of a later version that the store has, but that could not be recorded; None if there is
        none. Either the caller holds ``publishing``, or no task does."""
        later = (each.draft for each in self.behind if each.draft is not None)
        every = [*later, *([] if self.draft is None else [self.draft])]
        stored = [each for each in every if each.state is DraftState.PUBLISHED and each.sequence > draft.sequence]
        return stored[-1] if stored else None

    def leave_behind(self) -> OpenFile:
        """Make the acknowledged draft a separate version, with its present attributes; another draft may begin."""
        assert self.draft is not None
        earlier = OpenFile(self.entry, self.key, self.extent, if_absent=self.if_absent, publishing=self.publishing)
        earlier.begin(self.draft)
        self.draft.target.describe_by(earlier.describe)
        self.behind.append(earlier)
        self.end_draft()
        return earlier

    def take_up(self) -> None:
        """Remove the newest draft: the acknowledged version before it, if any, is the newest again."""
        self.end_draft()
        if not self.behind:
            return
        earlier = self.behind.pop()
        self.entry, self.extent, self.if_absent = earlier.entry, earlier.extent, earlier.if_absent
        if earlier.draft is not None:
            self.begin(earlier.draft)
            earlier.draft.target.describe_by(self.describe)


@dataclass(slots=True)
class Handle:
    """An open file description."""

    file: OpenFile
    writable: bool
    readahead: Readahead
    reads: ReadMetrics
    opener: int = 0
    """Thread that opened it; 0 where that is not known."""
    closed_by_opener: bool = False
    fsyncs: int = 0
    is_published_while_open: bool = False
    """True for a writing handle of a file that `OpenFilePublisher` publishes: the kernel is told to keep no pages of it
    (FOPEN_DIRECT_IO). A handle that a program opened with O_DIRECT is not one."""
