"""Who is told when a commit changes names: listings under way, files in use, the kernel. Trio thread only."""

from __future__ import annotations

import logging

from lakefs_fuse.commits.applier import Watcher
from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.change_events import ChangeEvents
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.namespace.namespace import Namespace

log = logging.getLogger(__name__)


class FilesWatcher(Watcher):
    """Made before those it tells; `watch` completes it, before anything changes."""

    _namespace: Namespace
    _files: FileTable

    def __init__(self, events: ChangeEvents) -> None:
        self._events = events

    def watch(self, namespace: Namespace, files: FileTable) -> None:
        self._namespace, self._files = namespace, files

    def keeps(self, entry: Entry) -> bool:
        return self._files.is_dirty(entry)

    def redated(self, entry: Entry) -> bool:
        file = self._files.lending.held(entry.inode)
        if file is None:
            return False
        file.is_redated = True
        return True

    def ctime_ns(self, entry: Entry) -> int:
        file = self._files.get(entry.inode)
        return entry.ctime_ns if file is None else file.entry.ctime_ns

    def changing(self, parent: int, name: bytes) -> None:
        self._namespace.changing(parent, name)

    def changed(self, parent: int, name: bytes) -> None:
        self._events.announce_name(parent, name)

    def updated(self, entry: Entry) -> None:
        self._files.updated(entry)

    def relocated(self, entry: Entry) -> None:
        self._files.relocated(entry)

    def moved(self) -> None:
        self._files.moved()

    def learned(self, meta: ObjectMeta) -> None:
        """A GET told an object's metadata."""
        try:
            self._files.learned(meta)
        except CacheError as error:
            log.info("the attributes of %s will be asked for: %s", meta.key, error)
