"""The filesystem as callers see it: inodes and names in, entries and bytes out, errors as `LakeError` with an errno.

`ops` implements the operations; methods of its parts that need nothing more are attributes of `Filesystem`.

The kernel serialises changes of one directory, and `kernel.waiting_requests` those that the kernel no longer waits for.
Listings, publications and other readers may run between any two awaits, so an operation looks up again after an await
what it learnt before. Trio thread only. All state is in the parts.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Generator, Iterator, Mapping

from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.tree import pack_entry
from lakefs_fuse.metrics import Unfinished
from lakefs_fuse.sync.steps import finish, finish_paced
from lakefs_fuse.vfs.durability import Durability
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.lake_size import LakeSize
from lakefs_fuse.vfs.namespace.metadata_fetch import ask_all
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.tree_walk import list_again
from lakefs_fuse.vfs.ops.attributes import Attributes
from lakefs_fuse.vfs.ops.directory import Directories
from lakefs_fuse.vfs.ops.handles import Handles
from lakefs_fuse.vfs.ops.xattr import ExtendedAttributes
from lakefs_fuse.vfs.path_waits import PathWaits
from lakefs_fuse.vfs.residency.residency import Residency
from lakefs_fuse.vfs.status import Status


class Filesystem:
    """The operations of one mount; see the module's head. Made by `vfs.open.assembled`."""

    def __init__(
        self,
        status: Status,
        namespace: Namespace,
        attributes: Attributes,
        xattrs: ExtendedAttributes,
        directories: Directories,
        handles: Handles,
        durability: Durability,
        residency: Residency,
    ) -> None:
        self.config, self.metrics, self.residency = attributes.config, status.metrics, residency
        self.namespace, self.events, self.database = namespace, namespace.events, namespace.database
        self._ns, self._status, self._files = namespace, status, handles.files
        self._attributes, self._xattrs, self._directories = attributes, xattrs, directories
        self._durability = durability
        self.entry, self.is_unlinked, self.getattr = attributes.entry, attributes.is_unlinked, attributes.getattr
        self.stat, self.setattr = attributes.stat, attributes.setattr
        self.attribute_fresh_s = attributes.attribute_fresh_s
        self.open, self.create, self.hold = handles.open, handles.create, handles.hold
        self.hold_refused = handles.hold_refused
        self.handle, self.is_handle = handles.handle, handles.is_handle
        self.read, self.write = handles.read, handles.write
        self.copy_range = handles.copy_range
        self.flush, self.fsync, self.release = handles.flush, handles.fsync, handles.release
        self.new_files, self.open_leases = handles.new_files, handles.open_leases
        self.make_durable, self.sync_names = durability.make_durable, durability.sync_names
        self.finish_orphan, self.abort_orphan = durability.finish_orphan, durability.abort_orphan
        self.look_again = durability.poll
        self.wait_path = PathWaits(namespace, handles.files, xattrs.version, self.config.refresh_s).wait
        self.listing_fresh_s, self.more_names = namespace.listing_fresh_s, namespace.wait_for_more
        self.knows_holes_in = handles.files.holes.any_in
        links = directories.links.counts
        self.link_count, self.shown_number, self.knows_links_in = links.of, links.number, links.any_in
        self.changed_link_counts = links.changed
        self.files_in_use: Mapping[int, OpenFile] = handles.files.by_inode
        """By inode; callers must not change it. READDIR shows for these files the rows that `row_of` returns."""

    # -- names and attributes

    async def lookup(self, parent: int, name: bytes) -> tuple[Entry | None, float]:
        """Return the entry of a name, or None, and for how many seconds the kernel may cache that. Raises
        FileError(ENAMETOOLONG) for a name that cannot exist."""
        self._attributes.directory(parent)
        entry, fresh_s = await self._ns.lookup(parent, name)
        if entry is None:
            self._ns.keys.check_length(parent, name)
        if entry is not None and self.config.attributes == "objects":
            return await self.getattr(entry.inode), fresh_s
        return (self.entry(entry.inode) if entry else None), fresh_s

    async def opendir(self, inode: int) -> None:
        """Return when the directory can be read; its first listing may still be in progress (see `more_names`)."""
        self._attributes.directory(inode)
        if self.config.attributes == "objects":
            if self._ns.directory_fresh_s(inode) <= 0:
                await self._ns.ensure_listed(inode, strictly=False)
            await ask_all(self._ns.tree.children_in_steps(inode), self.getattr)
        else:
            await self._ns.begin_reading(inode)

    def readdir(self, inode: int, after: int) -> Iterator[Entry]:
        """Yield the entries with cookies beyond ``after``, in cookie order; files in use have their present size."""
        for entry in self._ns.tree.children(inode, after):
            if entry.flags & Flag.SHADOWED:
                continue
            file = self._files.get(entry.inode)
            yield entry if file is None else file.current

    def data_bytes(self, entry: Entry) -> int:
        """Return how many bytes of a file are not known to be holes."""
        file = self._files.get(entry.inode)
        return self._files.holes.data_bytes(entry, file.draft if file is not None else None)

    def row_of(self, inode: int) -> bytes:
        """Return the row of a file in use, with its present size."""
        return pack_entry(self._files.by_inode[inode].current)

    # -- changes of names

    async def mkdir(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> Entry:
        above = self._attributes.writable_directory(parent)
        mode |= stat.S_ISGID if self._attributes.is_setgid(above) else 0
        return await self._directories.mkdir(parent, name, mode, uid, self._attributes.gid_in(above, gid))

    async def rmdir(self, parent: int, name: bytes) -> None:
        self._attributes.writable_directory(parent)
        await self._directories.rmdir(parent, name)

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name. It is removed here when this returns, and from the store soon after. Programs that have the
        file open can still use it."""
        self._attributes.writable_directory(parent)
        await self._directories.unlink(parent, name)

    async def rename(self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int = 0) -> None:
        """Rename in one step for every observer. It is in the store when this returns, unless it is journaled under
        write-back, or the source was never stored. ``flags`` as renameat2(2)."""
        for parent in {parent_old, parent_new}:
            self._attributes.writable_directory(parent)
        await self._directories.renames.rename(parent_old, name_old, parent_new, name_new, flags)

    async def link(self, inode: int, parent: int, name: bytes) -> Entry:
        """Give a file another name, which only one node gets; its object is in the store when this returns."""
        self._attributes.writable_directory(parent)
        if self.is_unlinked(inode):
            raise FileError(errno.ENOENT)
        self._durability.request_names()
        return await self._directories.links.link(await self.getattr(inode), parent, name)

    async def clone(self, source: str, target: str, *, force: bool = False) -> None:
        """As `Clones.clone`, but first store the source as it is now."""
        self._attributes.refuse_read_only()
        await self._durability.make_durable(source)
        await self._directories.clones.clone(source, target, force=force)

    async def symlink(self, parent: int, name: bytes, target: bytes, uid: int, gid: int) -> Entry:
        gid = self._attributes.gid_in(self._attributes.writable_directory(parent), gid)
        return await self._directories.symlink(parent, name, target, uid, gid)

    def readlink(self, inode: int) -> bytes:
        return self._directories.readlink(self.entry(inode))

    def xattr(self, inode: int, name: str) -> bytes:
        return self._xattrs.xattr(self.entry(inode), name)

    def xattr_names(self, inode: int) -> list[str]:
        return self._xattrs.xattr_names(self.entry(inode))

    async def set_xattr(
        self, inode: int, name: str, value: bytes | None, *, confirm: Callable[[], None] = lambda: None
    ) -> None:
        """Set an extended attribute; ``value`` None removes it. Raises FileError as `ExtendedAttributes.set_xattr`.
        ``confirm`` is as for `setattr`."""
        self._attributes.refuse_read_only()
        entry = await self.getattr(inode)
        confirm()
        self._xattrs.set_xattr(entry, name, value)

    async def sync_directory(self, inode: int) -> None:
        """Store every change of a name made before, and the files at or below the directory. Of a file that a program
        has open for writing, store what write-back acknowledged. Raises LakeError."""
        is_unlinked = self.is_unlinked(inode)
        await self._durability.sync_directory(None if is_unlinked else self._ns.prefix(inode).removesuffix("/"))

    async def size(self) -> LakeSize:
        """Return the sizes that df(1) shows."""
        self._durability.request_names()
        return await self._status.lake_size()

    # -- requests of the control socket

    def statistics(self) -> dict[str, object]:
        """As `read_statistics`, in one step."""
        return finish(self._statistics())

    async def read_statistics(self) -> dict[str, object]:
        """The counters and gauges of the mount, as `stats --json` prints them."""
        return await finish_paced(self._statistics())

    def _statistics(self) -> Generator[None, None, dict[str, object]]:
        self._durability.request_names()
        added = [listener() for listener in self.events.statistics_requested]  # may update counters, so before the rest
        values = yield from self._status.statistics()
        return {key: value for each in (values, *added) for key, value in each.items()}

    def unfinished(self) -> list[Unfinished]:
        """As `list_unfinished`, in one step."""
        self._durability.request_names()
        return finish(self._status.list_unfinished(None))

    async def list_unfinished(self, rows_max: int | None = None) -> list[Unfinished]:
        """Files being written and orphans, oldest first, and no more than ``rows_max``."""
        self._durability.request_names()
        return await finish_paced(self._status.list_unfinished(rows_max))

    async def refresh(self, path: str = "", *, recursive: bool = False) -> dict[str, object]:
        """Show the state of the store at the call, for the path and the directory there. With ``recursive``, also for
        everything below it. Raises LakeError."""
        await self.look_again()
        await list_again(self._ns, path, recursive=recursive)
        for listener in self.events.kernel_told:
            await listener()
        return {}
