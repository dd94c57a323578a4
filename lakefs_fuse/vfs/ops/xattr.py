"""Extended attributes: those that programs set, and three virtual attributes.

``user.lakefs.state``, ``user.lakefs.location`` and ``user.lakefs.version`` are not listed, so that no program copies
them. Immutable mounts have their own implementation, `vfs.immutable.filesystem`, which must follow a change here. What
always holds: an attribute set while a version is being stored is not lost (`OpenFile.late_xattrs`), and a file
without a name keeps its attributes there. A crash leaves what the committer journaled; attributes of a file that is in
no commit yet are committed with it. Trio thread only.
"""

from __future__ import annotations

import errno

import msgspec

from lakefs_fuse.commits.record import XATTR_PREFIX, XATTRS_BYTES_MAX
from lakefs_fuse.config import Source
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.product import RESERVED_XATTR, XATTR_LOCATION, XATTR_STATE, XATTR_VERSION
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import FileState, OpenFile
from lakefs_fuse.vfs.namespace.key_mapping import location_of, version_of
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.ops.name_changes import NameChanges
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue


class ExtendedAttributes:
    """Reads and sets extended attributes; see the module's head."""

    def __init__(
        self, source: Source, namespace: Namespace, files: FileTable, names: NameChanges, writeback: WriteBackQueue
    ) -> None:
        self._source, self._ns, self._files = source, namespace, files
        self._names, self._writeback = names, writeback

    def xattr(self, entry: Entry, name: str) -> bytes:
        """Return the value of an attribute. Raises FileError(ENODATA)."""
        if name.startswith(RESERVED_XATTR):
            return self._reserved(entry, name)
        value = self._xattrs(entry).get(name) if name.startswith(XATTR_PREFIX) else None
        if value is None:
            raise FileError(errno.ENODATA)
        return value

    def _reserved(self, entry: Entry, name: str) -> bytes:
        """Return the value of a virtual attribute. Raises FileError(ENODATA)."""
        answer = None
        if entry.is_dir and name == XATTR_STATE:
            answer = str(FileState.DIRTY if self._files.is_dirty(entry) else FileState.DURABLE)
        elif not entry.is_dir and not entry.is_symlink:
            if name == XATTR_STATE:
                answer = str(self._state(entry))
            elif name == XATTR_LOCATION:
                answer = self._location(entry)
            elif name == XATTR_VERSION:
                answer = self.version(entry)
        if answer is None:
            raise FileError(errno.ENODATA)
        return answer.encode()

    def _state(self, entry: Entry) -> FileState:
        """Return the state of a file's newest bytes."""
        file = self._files.get(entry.inode)
        draft = file.draft if file is not None else None
        if file is None or draft is None:
            return FileState.DURABLE
        item = self._writeback.item_of(draft)
        if file.is_incomplete or (draft.state is DraftState.FAILED and (item is None or item.is_refused)):
            return FileState.FAILED
        begun = draft.sequence and (draft.upload.intent_ns or (item is not None and item.is_attempted))
        on_its_way = begun or draft.uploading or draft.state is DraftState.PUBLISHING
        return FileState.UPLOADING if on_its_way else FileState.DIRTY

    def version(self, entry: Entry) -> str | None:
        """Return the version of a file's newest bytes, as `version_of`. None if they are not in the store,
        and for a symbolic link."""
        file = self._files.get(entry.inode)
        if file is not None and file.draft is not None:
            return None
        extent = file.extent if file is not None else self._ns.extent(entry)
        return None if extent is None else version_of(extent)

    def _location(self, entry: Entry) -> str:
        """Return where the newest bytes of a file are. Raises FileError(ENODATA)."""
        file = self._files.get(entry.inode)
        if file is not None and file.draft is not None:
            return self._staged_location(file.draft)
        extent = file.extent if file is not None else self._ns.extent(entry)
        if extent is None:
            raise FileError(errno.ENODATA)
        return location_of(self._source, extent)

    @staticmethod
    def _staged_location(draft: Draft) -> str:
        staging, spot = draft.uploader.staging, draft.file.spot
        if draft.file.is_in_memory:
            return "memory"
        if spot is None:
            return f"file://{staging.path(draft.id)}"
        part = f" bytes {spot.offset}-{spot.offset + spot.length - 1}" if spot.length else ""
        return f"file://{staging.directory / spot.segment}{part}"

    def xattr_names(self, entry: Entry) -> list[str]:
        return [name for name in self._xattrs(entry) if name.startswith(XATTR_PREFIX)]

    def _xattrs(self, entry: Entry) -> dict[str, bytes]:
        file = self._files.get(entry.inode)
        if file is not None:
            return self._files.xattrs(file)
        return self._ns.tree.xattrs(entry.inode) if entry.flags & Flag.XATTRS else {}

    def set_xattr(self, entry: Entry, name: str, value: bytes | None) -> None:
        """Set an attribute; ``value`` None removes it. Raises FileError: EOPNOTSUPP unless it is below ``user.``,
        EINVAL if its name is not UTF-8, EPERM if it is reserved or on the root, ENODATA, ENOSPC, ESTALE."""
        if not name.startswith(XATTR_PREFIX):
            raise FileError(errno.EOPNOTSUPP)
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise FileError(errno.EINVAL, "names of extended attributes are UTF-8")
        if name.startswith(RESERVED_XATTR):
            raise FileError(errno.EPERM, f"{RESERVED_XATTR}* is reserved")
        if entry.inode == ROOT_INODE:
            raise FileError(errno.EPERM, "the root's attributes are options of the mount")
        xattrs = self._xattrs(entry)
        if name not in xattrs and value is None:
            raise FileError(errno.ENODATA)
        xattrs.pop(name, None)
        if value is not None:
            xattrs[name] = value
        if sum(len(key.encode()) + len(held) for key, held in xattrs.items()) > XATTRS_BYTES_MAX:
            raise FileError(errno.ENOSPC, f"extended attributes of a file hold {XATTRS_BYTES_MAX} bytes")
        file, row = self._files.get(entry.inode), self._ns.tree.entry(entry.inode)
        if row is None and (file is None or not file.unlinked):
            raise FileError(errno.ESTALE)
        if row is not None and file is not None and (file.unlinked or file.entry.is_local):
            self._set_local_xattrs(file, row, xattrs)
        elif row is not None:
            self._names.set_attributes(row, xattrs)
        if file is not None and (row is None or file.publishing.locked() or file.late_xattrs is not None):
            file.late_xattrs = xattrs

    def _set_local_xattrs(self, file: OpenFile, row: Entry, xattrs: dict[str, bytes]) -> None:
        """Set the attributes of a file that is being unlinked or is in no commit yet. A commit of the file will have
        them. Its row may be that of an earlier version."""
        held = Flag.XATTRS if xattrs else 0
        batch = Batch()
        self._ns.tree.set_xattrs(batch, row.inode, xattrs)
        self._ns.tree.update(batch, msgspec.structs.replace(row, flags=(row.flags & ~Flag.XATTRS) | held))
        self._ns.database.commit(batch)
        for each in file.versions:  # one that is stored first writes the row
            flags = (each.entry.flags & ~Flag.XATTRS) | held
            each.entry = msgspec.structs.replace(each.entry, flags=flags)
