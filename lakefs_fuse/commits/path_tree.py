"""The tree by paths, as commits name it: directories made where they are missing, and removed where they are empty.

What always holds (*implied directories*): a directory that no commit, marker or listing names exists only while
something is below it. Every change of a name is announced to the `Watcher` in the step in which it is made. Trio
thread only. Inodes of paths are remembered within one `editing` block; a crash leaves the tree's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.tree import Tree


class Watcher:
    """A listener for what commits change; the filesystem overrides what it needs."""

    def keeps(self, entry: Entry) -> bool:
        """The file is being written here: its inode stays."""
        return False

    def redated(self, entry: Entry) -> bool:
        """The mtime of a file changes, which the kernel ignores for an inode that it holds. Answers whether the file is
        open here: then it keeps its inode until the last close."""
        return False

    def ctime_ns(self, entry: Entry) -> int:
        """When an inode was changed here last: what this node's own commits say of it does not move that."""
        return entry.ctime_ns

    def changing(self, parent: int, name: bytes) -> None:
        """A listing under way must not undo this."""

    def changed(self, parent: int, name: bytes) -> None:
        """The kernel may remember the name wrongly."""

    def updated(self, entry: Entry) -> None:
        """A file's row has other attributes, another place or another name."""

    def relocated(self, entry: Entry) -> None:
        """The same bytes are in another place."""

    def moved(self) -> None:
        """Directories moved: paths of files in use may be others."""


class PathTree:
    """See the module's head."""

    def __init__(self, database: Database, tree: Tree, watcher: Watcher) -> None:
        self.database, self.tree, self.watcher = database, tree, watcher
        self._directories: dict[str, int] = {}
        self._is_quiet = False

    @contextmanager
    def editing(self, *, quiet: bool = False) -> Iterator[None]:
        """Paths are looked up anew inside, and after it. ``quiet``: the kernel of this node made the change itself."""
        self._is_quiet = quiet
        self._directories.clear()
        try:
            yield
        finally:
            self._is_quiet = False
            self._directories.clear()

    def forget_paths(self) -> None:
        """Paths lead elsewhere now, or other tasks ran."""
        self._directories.clear()

    def find(self, path: str, directory: bool) -> Entry | None:
        """The directory, or the file, of a path."""
        above, _, name = path.rpartition("/")
        parent = self.directory(above)
        if parent is None:
            return None
        return self.tree.named(parent, name.encode() + (b"/" if directory else b""))

    def directory(self, path: str) -> int | None:
        """Inode of a directory by its path ("" is the root); None where there is none."""
        if not path:
            return ROOT_INODE
        known = self._directories.get(path)
        if known is None:
            above, _, name = path.rpartition("/")
            parent = self.directory(above)
            entry = None if parent is None else self.tree.named(parent, name.encode() + b"/")
            if entry is None:
                return None
            known = self._directories[path] = entry.inode
        return known

    def ensure_directory(self, path: str, time: int) -> int:
        """As `directory`, made where it is missing: it is there because something below it is."""
        found = self.directory(path)
        if found is not None:
            return found
        above, _, name = path.rpartition("/")
        parent = self.ensure_directory(above, time)
        return self.insert_directory(parent, path, name.encode(), Flag.DIRECTORY, time).inode

    def insert_directory(self, parent: int, path: str, name: bytes, flags: int, time: int, **attributes: int) -> Entry:
        batch = Batch()
        file = self.tree.named(parent, name)
        if file is not None and (file.stamp or self.watcher.keeps(file)):
            self.tree.update(batch, msgspec.structs.replace(file, flags=file.flags | Flag.SHADOWED))
        elif file is not None:
            self.tree.remove(batch, file)
            self.tree.forget_listing(batch, parent)
        attributes = {"mtime_ns": time, "ctime_ns": time, **attributes}
        entry = self.tree.insert(batch, parent, name, flags, **attributes)
        self.database.commit(batch)
        self._directories[path] = entry.inode
        self.notify(parent, name)
        return entry

    def remove_directory(self, entry: Entry, batch: Batch | None = None) -> None:
        """An empty directory's row goes, and what ``batch`` says is noted; a file of the same name comes into sight."""
        batch = Batch() if batch is None else batch
        self.tree.remove(batch, entry)
        self.show_file(batch, entry)
        self.database.commit(batch)
        self._directories.clear()
        self.notify(entry.parent, entry.name)

    def show_file(self, batch: Batch, directory: Entry) -> None:
        """A directory goes: a file of the same name comes into sight."""
        file = self.tree.named(directory.parent, directory.name) if directory.is_dir else None
        if file is not None and file.flags & Flag.SHADOWED:
            self.tree.update(batch, msgspec.structs.replace(file, flags=file.flags & ~Flag.SHADOWED))

    def prune(self, inode: int) -> None:
        """Directories that were there only because of what was below them go when nothing is."""
        while inode != ROOT_INODE:
            entry = self.tree.entry(inode)
            if entry is None or entry.stamp or entry.flags & (Flag.MARKER | Flag.LISTED):
                return
            if self.tree.has_children(inode):
                return
            self.remove_directory(entry)
            inode = entry.parent

    def notify(self, parent: int, name: bytes) -> None:
        """A name is something else now."""
        self.watcher.changing(parent, name)
        if not self._is_quiet:
            self.watcher.changed(parent, name)
