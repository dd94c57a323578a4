"""What the hooks answer without entering Python: files that may be opened, attributes of directories.

They answer what was answered here before, for as long as the kernel might remember it. Trio thread only.
"""

from __future__ import annotations

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, whose calls they receive)
import pyfuse3

from lakefs_fuse.kernel.reply import attributes_of
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.vfs.files.open_file import READING
from lakefs_fuse.vfs.filesystem import Filesystem


class Lent:
    """Leases of this process's session."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        fs.events.leases_revoked.append(hooks.revoke_open)
        fs.events.directory_updated.append(self._update)

    def opened(self, inode: int, handle: int) -> None:
        """A file was opened: whoever opens it for reading next need not ask."""
        if handle & READING:
            hooks.lease_open(inode, self._fs.lending.allowed_s(self._fs.handle(handle).file))

    def answered(self, entry: Entry, attributes: pyfuse3.EntryAttributes) -> None:
        """These attributes were told, to be remembered for the time that they say."""
        if entry.is_dir:
            hooks.cache_attributes(attributes, attributes.attr_timeout)

    def _update(self, directory: Entry) -> None:
        hooks.cache_attributes(attributes_of(directory, self._fs, 0.0))
