"""Grants leases to the C library: rights to reply to requests without entering Python (leases.c, attribute_cache.c).

Under a lease the library opens a file for reading again, returns the attributes of a directory again, or replies that
names are absent and creates files with those names, each for as long as the kernel may cache the reply. The filesystem
revokes a lease before a change that such replies would contradict. Trio thread only; nothing survives a crash.
"""

from __future__ import annotations

import ctypes

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, whose calls it receives)
import pyfuse3

from lakefs_fuse.kernel.reply import SECTOR_BYTES, attributes_of
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.vfs.files.handle_bits import READING
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.namespace.metadata_fetch import is_unasked
from lakefs_fuse.vfs.ops.create import NAMES_MAX

CREATED_BEFORE = 2
"""Files that are created in a directory before its names are leased. For a single file a lease costs more than it
saves."""
NAMES_FOR_EACH = 64
"""Names that are read to lease those of a directory again, for each file that was created since: a tenth of its cost.
So leases that end soon, because directories are too large or too many, cost no more than that."""
COUNTED_DIRECTORIES_MAX = 1024
"""Directories whose new files are counted, those of the latest ones."""


class Leases:
    """Grants and revokes leases. Without the library there are none, and before `lease_names_from` none on names."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs, self._tree = fs, fs.namespace.tree
        self._created: dict[int, int] = {}
        """Number of files that Python created recently, by directory; less than 0 after its names were read."""
        self._library: ctypes.PyDLL | None = None
        """Set once names may be leased."""
        fs.events.leases_revoked.append(hooks.revoke_open)
        fs.events.directory_updated.append(self._update_attributes)
        fs.events.name_changed.append(hooks.forget_all_attributes)
        fs.events.name_changed.append(hooks.forget_directories)
        fs.events.listing_dropped.append(hooks.forget_directories)

    # -- opens and attributes

    def lease_open(self, inode: int, handle: int) -> None:
        """Lease further opens for reading of a file that was opened for reading, and its attributes, which the kernel
        requests after each open but the first."""
        if handle & READING:
            file = self._fs.handle(handle).file
            for_s = self._fs.open_leases.allowed_s(file)
            hooks.lease_open(inode, for_s)
            if for_s > 0 and not file.writers:
                self._know_file(file.current, for_s)

    def lease_closed(self, inode: int) -> None:
        """Lease opens and attributes of a file that its writer has just closed: many programs use next what they
        wrote."""
        file = self._fs.files_in_use.get(inode)
        entry = self._tree.entry(inode) if file is None else file.current
        if entry is None:
            return
        leases = self._fs.open_leases
        for_s = leases.allowed_for_closed_s(entry) if file is None else leases.allowed_s(file)
        if for_s > 0:
            hooks.lease_open(inode, for_s)
            self._know_file(entry, for_s)

    def _know_file(self, entry: Entry, for_s: float) -> None:
        attributes = attributes_of(entry, self._fs, for_s)
        attributes.st_blocks = -(-self._fs.data_bytes(entry) // SECTOR_BYTES)
        attributes.st_nlink *= self._fs.link_count(entry.inode)
        self._know(entry, attributes)

    def lease_attributes(self, entry: Entry, attributes: pyfuse3.EntryAttributes) -> None:
        """Lease the attributes that GETATTR or SETATTR returned: of a directory for as long as they are valid, of a
        file for as long as opens of it are leased."""
        if entry.is_dir:
            hooks.cache_attributes(attributes, attributes.attr_timeout)
            return
        file = self._fs.files_in_use.get(entry.inode)
        if attributes.attr_timeout > 0 and (file is None or not file.writers):
            self._know(entry, attributes)

    @staticmethod
    def lease_directory(parent: int, name: bytes, attributes: pyfuse3.EntryAttributes) -> None:
        """Lease the name of a directory that LOOKUP or MKDIR returned, if its attributes are leased."""
        hooks.know_directory(parent, name, attributes.st_ino, attributes.entry_timeout)

    def _know(self, entry: Entry, attributes: pyfuse3.EntryAttributes) -> None:
        """Let the library reply with the attributes of a file, unless it would show them otherwise."""
        is_whole = attributes.st_blocks == -(-entry.size // SECTOR_BYTES)
        if is_whole and attributes.st_nlink == 1 and not is_unasked(entry):
            hooks.know_attributes(attributes)

    def _update_attributes(self, directory: Entry) -> None:
        if hooks.has_attributes(directory.inode):
            hooks.cache_attributes(attributes_of(directory, self._fs, 0.0))

    # -- names

    def lease_names_from(self, library: ctypes.PyDLL) -> None:
        """Begin to lease names of directories to the library, which creates files in them."""
        self._library = library
        self._fs.events.mirrored_name_added.append(self._add_name)
        self._fs.events.mirrored_name_removed.append(library.lakefs_remove_name)
        self._fs.events.mirror_dropped.append(library.lakefs_revoke_names)

    def revoke_all_names(self) -> None:
        """Revoke the leases of all names."""
        if self._library is not None:
            self._library.lakefs_revoke_all_names()
            self._tree.mirrored.clear()

    def count_created(self, file: OpenFile) -> None:
        """Count a file that Python created, and lease the names of its directory from the CREATED_BEFORE-th file on."""
        parent = file.entry.parent
        count = self._created.pop(parent, 0) + 1
        self._created[parent] = count
        if len(self._created) > COUNTED_DIRECTORIES_MAX:
            del self._created[next(iter(self._created))]
        is_new = parent not in self._tree.mirrored
        if self._library is None or (is_new and count < CREATED_BEFORE):
            return
        for_s = self._fs.new_files.names_lease_s(parent)
        if for_s <= 0:
            return
        names = self._fs.new_files.names(parent) if is_new else []
        read = NAMES_MAX if names is None else len(names)
        self._created[parent] = CREATED_BEFORE - 1 - read // NAMES_FOR_EACH
        if names is not None and not self._lease_names(self._library, parent, names, for_s, is_new=is_new):
            self._created[parent] = min(0, self._created[parent])  # not again before CREATED_BEFORE more files

    def lease_new_directory(self, directory: Entry) -> None:
        """Lease the names of a directory that this node has just made: programs make one to create files in it."""
        for_s = 0.0 if self._library is None else self._fs.new_files.names_lease_s(directory.inode)
        names = self._fs.new_files.names(directory.inode) if for_s > 0 else None
        if self._library is not None and names is not None:
            self._lease_names(self._library, directory.inode, names, for_s, is_new=True)

    def _lease_names(
        self, library: ctypes.PyDLL, directory: int, names: list[bytes], for_s: float, *, is_new: bool
    ) -> bool:
        new_files = self._fs.new_files
        for_ns = int(min(for_s, hooks.LEASE_S_MAX) * 1e9)
        timeout_ns = int(min(self._fs.config.metadata_ttl_s, hooks.LEASE_S_MAX) * 1e9)
        bytes_max, takes_exclusive = new_files.name_bytes_max(directory), not new_files.asks_store_anywhere
        if not library.lakefs_lease_names(directory, for_ns, timeout_ns, bytes_max, takes_exclusive):
            self.revoke_all_names()
            return False
        packed = b"".join(name + b"\0" for name in names)
        if is_new and not library.lakefs_add_names(directory, packed, len(packed)):
            library.lakefs_revoke_names(directory)
            return False
        self._tree.mirrored.add(directory)
        # The kernel requests these attributes after each created name.
        hooks.cache_attributes(attributes_of(self._fs.entry(directory), self._fs, 0.0), for_s)
        return True

    def _add_name(self, directory: int, name: bytes) -> None:
        assert self._library is not None
        if not self._library.lakefs_add_names(directory, name + b"\0", len(name) + 1):
            self._tree.drop_mirror(directory)
