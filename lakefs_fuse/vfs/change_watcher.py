"""Who is told when a commit changes names: listings under way, files in use, the kernel. Trio thread only."""

from __future__ import annotations

import logging

from lakefs_fuse.commits.path_tree import Watcher
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.namespace.namespace import Namespace

log = logging.getLogger(__name__)


class FilesWatcher(Watcher):
    """See the module's head."""

    def __init__(self, namespace: Namespace, files: FileTable) -> None:
        self._namespace, self._files = namespace, files

    def keeps(self, entry: Entry) -> bool:
        return self._files.is_dirty(entry)

    def redated(self, entry: Entry) -> bool:
        file = self._files.hold(entry.inode)
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
        self._namespace.announce_name(parent, name)

    def updated(self, entry: Entry) -> None:
        self._files.updated(entry)

    def relocated(self, entry: Entry) -> None:
        self._files.relocated(entry)

    def moved(self) -> None:
        self._files.moved()
