"""All events of one filesystem, made by `wiring` and given to constructors. Listeners append themselves to a list.

What always holds (*events flow upwards*): a part reports what it changed and knows none of its listeners, so that the
kernel's adapter and the write-back queue can react to changes of modules below them. For the rules see `TreeEvents`;
`kernel_told`, `pages_wanted` and `objects_listed` alone are awaited.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.commits.record import Record
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.tree_events import TreeEvents
from lakefs_fuse.store.protocol import ObjectMeta

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ChangeEvents(TreeEvents):
    """One list of listeners for each event of a filesystem."""

    name_changed: list[Callable[[int, bytes], object]] = field(default_factory=list)
    """The kernel may have cached an outdated entry for a name; by its directory and name."""
    kernel_told: list[Callable[[], Awaitable[object]]] = field(default_factory=list)
    """A promise depends on what the kernel remembers: all names invalidated before have reached it when these
    return."""
    pages_wanted: list[Callable[[int], Awaitable[object]]] = field(default_factory=list)
    """The bytes of a file that is open for writing are needed; by its inode. What programs have written, and the kernel
    holds, has been written here when these return."""
    object_overridden: list[Callable[[Entry], object]] = field(default_factory=list)
    """A listing shows a plain object in place of bytes elsewhere; its entry."""
    leases_revoked: list[Callable[[int], int]] = field(default_factory=list)
    """The leases on an inode end; returns how many handles were opened under them, which are released here."""
    objects_listed: list[Callable[[Sequence[ObjectMeta]], Awaitable[bool]]] = field(default_factory=list)
    """A page of a LIST is about to be merged; its objects. What was committed before these were stored is in effect
    when these return; they answer whether there may have been something."""
    metadata_read: list[Callable[[ObjectMeta], object]] = field(default_factory=list)
    """A GET answered the metadata of an object."""
    keys_unlisted: list[Callable[[], Iterable[str]]] = field(default_factory=list)
    """A listing is merged; returns keys of objects that it must not show."""
    key_reservations: list[Callable[[str], bool]] = field(default_factory=list)
    """A key is chosen for an object; returns whether another name's object may still need it."""
    commit_applied: list[Callable[[Record], object]] = field(default_factory=list)
    """Another node's commit is in effect here."""
    names_restored: list[Callable[[Sequence[Entry]], object]] = field(default_factory=list)
    """Changes made here were withdrawn: names are what other nodes' commits say again; their rows."""
    redated_file_closed: list[Callable[[Entry], object]] = field(default_factory=list)
    """The last handle closed on a file whose mtime another node changed; its row."""
    version_stored: list[Callable[[str, Extent], object]] = field(default_factory=list)
    """The newest version of a file is in the store; its path, and where its bytes are."""
    path_renamed: list[Callable[[Sequence[tuple[str, str]]], object]] = field(default_factory=list)
    """A file or directory was renamed, or two were exchanged; the paths of each before and after."""
    file_emptied: list[Callable[[str], object]] = field(default_factory=list)
    """The file of a path is created or truncated: nothing of an earlier version counts."""
    files_counted: list[Callable[[], int]] = field(default_factory=list)
    """The new files that are being written are counted; returns how many a listener receives that are not in the table
    of files yet."""
    statistics_requested: list[Callable[[], dict[str, object]]] = field(default_factory=list)
    """Counters are about to be read; returns what a listener adds to them."""

    def unlisted_keys(self) -> list[str]:
        """What the listeners of `keys_unlisted` answer."""
        return [key for keys in self.keys_unlisted for key in keys()]

    def notify_commit_applied(self, record: Record) -> None:
        """Call the listeners of `commit_applied`. The commit is in effect, and is reported once: all of them hear
        of it, whatever one raises."""
        for listener in self.commit_applied:
            try:
                listener(record)
            except LakeError as error:
                log.error("a commit is in effect, but not all that follows from it: %s", error)

    def notify_metadata_read(self, meta: ObjectMeta) -> None:
        """Call the listeners of `metadata_read`."""
        for listener in self.metadata_read:
            listener(meta)

    def invalidate_name(self, directory: int, name: bytes) -> None:
        """Call the listeners of `name_changed`."""
        for listener in self.name_changed:
            listener(directory, name)
