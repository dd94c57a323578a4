"""Changes of names: make, remove and rename, attributes of what is not being written. Each becomes operations of a
commit.

A change is in effect on this node when the call returns and in the store a second later, but for a rename: that is in
the store, atomically, when the call returns, or did not happen. What is not in the store yet (a file just created)
changes its name here only. The kernel serialises changes of one directory; everything learnt before an await is looked
up again after it. Trio thread only.
"""

from __future__ import annotations

import errno
from functools import partial

import msgspec

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.record import (
    XATTR_PREFIX,
    XATTRS_BYTES_MAX,
    Mkdir,
    Remove,
    SetAttr,
    Symlink,
)
from lakefs_fuse.config import MountConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.product import PLACEHOLDER, RESERVED_XATTR, XATTR_LOCATION, XATTR_STATE
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import FileState
from lakefs_fuse.vfs.namespace.attributes import PERMISSIONS
from lakefs_fuse.vfs.namespace.key_mapping import checked_name, location_of
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder
from lakefs_fuse.vfs.namespace.subtree import LookingBelow
from lakefs_fuse.vfs.ops.rename import RENAME_EXCHANGE, RENAME_NOREPLACE, Renaming
from lakefs_fuse.vfs.ops.unlink import Unlinker
from lakefs_fuse.vfs.relocation.relocator import Relocator
from lakefs_fuse.vfs.writeback.queue import WriteBack

TARGET_BYTES_MAX = 4095


class Changes:
    """See the module's head."""

    def __init__(
        self,
        config: MountConfig,
        database: Database,
        namespace: Namespace,
        files: FileTable,
        committer: Committer,
        capabilities: Capabilities,
        unlinker: Unlinker,
        subtree: LookingBelow,
        relocator: Relocator,
        writeback: WriteBack,
        clock: Clock,
    ) -> None:
        self._config, self._db, self._ns, self._files = config, database, namespace, files
        self._relocator, self._writeback = relocator, writeback
        self._committer, self._capabilities = committer, capabilities
        self._clock, self._clock_ns = clock, clock.wall_ns
        self.unlinked = unlinker.inodes
        self._unlinker, self._subtree = unlinker, subtree

    # -- names

    def checked_path(self, parent: int, name: bytes) -> str:
        """The path, and key, of a new name. Raises FileError: ENAMETOOLONG for a store, prefix included; EILSEQ, EPERM
        (reserved); EINVAL where this store would change a character of it, so that nobody writes what cannot be
        kept."""
        component = checked_name(parent, name)
        refused = self._capabilities.characters_refused
        if any(character in component for character in refused):
            raise FileError(errno.EINVAL, f"this store cannot hold names with any of {refused!r}")
        return self._ns.checked_key(self._ns.prefix(parent), component)

    def path(self, entry: Entry) -> str:
        """Without a slash at the end."""
        return self._ns.key(entry).removesuffix("/")

    def _enqueue(
        self, builder: ChangeBuilder, doomed: list[Deletion] | None = None, batch: Batch | None = None
    ) -> None:
        self.enqueue(msgspec.structs.replace(builder.change(), doomed=doomed or []), batch)

    def enqueue(self, change: Change, batch: Batch | None = None) -> None:
        """Journal a change, with ``batch``; under write-back what it takes away or shows waits for what was accepted
        before. Raises FileError(ENAMETOOLONG) for a path that no other node would read."""
        for each in change.operations:
            self._ns.checked_key("", each.path)
        shown = (each for each in change.operations if not isinstance(each, Mkdir | SetAttr))
        if len(self._writeback) and any(self._writeback.is_for(each.path) for each in shown):
            change = msgspec.structs.replace(change, after=self._writeback.sequence)
        self._committer.enqueue(change, batch)

    @property
    def takes_plain_names(self) -> bool:
        """Printable ASCII but the backslash: every such name can be kept in this store."""
        return not any(" " <= each <= "~" and each not in "\\/" for each in self._capabilities.characters_refused)

    def keep_parent(self, builder: ChangeBuilder, leaving: Entry) -> None:
        """A directory that only its last name made visible is made to stay before that name goes."""
        parent = leaving.parent
        above = None if parent == ROOT_INODE else self._ns.tree.entry(parent)
        if above is None or above.stamp or above.flags & Flag.MARKER:
            return
        others = (child for child in self._ns.tree.children(parent) if child.cookie != leaving.cookie)
        if all(child.is_local for child in others):
            builder.mkdir(self.path(above), above)

    # -- directories

    async def mkdir(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> Entry:
        path = self.checked_path(parent, name)
        self._ns.checked_key(path + "/", PLACEHOLDER)
        if (await self._ns.lookup(parent, name))[0] is not None:
            raise FileError(errno.EEXIST)
        builder = ChangeBuilder(self._ns.tree)
        builder.operations.append(Mkdir(path, mode & PERMISSIONS, uid, gid, self._clock_ns()))
        self._enqueue(builder)
        entry = self._made(parent, name + b"/")
        batch = Batch()
        self._ns.made(batch, entry)
        self._db.commit(batch)
        self._ns.touch(parent)
        return entry

    def _made(self, parent: int, sort_name: bytes) -> Entry:
        entry = self._ns.tree.named(parent, sort_name)
        if entry is None:
            raise FileError(errno.EIO, f"{sort_name!r} was made, and is not there")
        return entry

    async def rmdir(self, parent: int, name: bytes) -> None:
        entry, _ = await self._ns.lookup(parent, name)
        if entry is None:
            raise FileError(errno.ENOENT)
        if not entry.is_dir:
            raise FileError(errno.ENOTDIR)
        await self.check_empty(entry)
        path = self.path(entry)
        builder = ChangeBuilder(self._ns.tree)
        self.keep_parent(builder, entry)
        builder.operations.append(Remove(path, directory=True))
        # The marker even if it was not listed: some stores keep showing the prefix of what is gone.
        markers = [path + "/"] if self._capabilities.lists_markers else [path + "/", f"{path}/{PLACEHOLDER}"]
        self._enqueue(builder, [Deletion(key, "") for key in markers])
        self._lost_name(entry)
        self._ns.touch(parent)

    async def check_empty(self, entry: Entry) -> None:
        """Raises FileError(ENOTEMPTY); keys that cannot be shown count too, as they would bring the directory back."""
        await self._ns.ensure_listed(entry.inode, strictly=False)
        listing = self._ns.tree.listing(entry.inode)
        if self._ns.tree.has_children(entry.inode) or (listing is not None and listing.hides_keys):
            raise FileError(errno.ENOTEMPTY)

    # -- files and symbolic links

    async def unlink(self, parent: int, name: bytes) -> None:
        """Who has the file open keeps it."""
        entry, _ = await self._ns.lookup(parent, name)
        if entry is None:
            raise FileError(errno.ENOENT)
        if entry.is_dir:
            raise FileError(errno.EISDIR)
        file = self._files.hold(entry.inode)
        if file is None:
            await self._unlink(entry)
        else:
            await self._unlinker.unlink(file, self._unlink)
        opened = self._files.get(entry.inode)
        if opened is not None:  # meanwhile
            opened.unlinked = True
        self._lost_name(entry)
        self._ns.touch(parent)

    def _lost_name(self, entry: Entry) -> None:
        """Losing the last name is a change of the inode."""
        file, now = self._files.get(entry.inode), self._clock_ns()
        if file is not None:
            file.entry = msgspec.structs.replace(file.entry, ctime_ns=now)
        last = entry if file is None else file.current
        self.unlinked.put(msgspec.structs.replace(last, ctime_ns=now))

    async def _unlink(self, entry: Entry) -> None:
        if self._relocator.copies.are_begun:
            async with self._relocator.hold_copies(self.path(entry)):
                self._unlink_now(entry)
        else:
            self._unlink_now(entry)

    def _unlink_now(self, entry: Entry) -> None:
        row = self._ns.tree.named(entry.parent, entry.name)
        if row is None:
            return
        batch = Batch()
        self._unlinker.journal_dropped(batch, self._files.get(entry.inode))
        if row.is_local and entry.etag:  # of an attempt whose answer was lost
            row = msgspec.structs.replace(row, etag=entry.etag)
        if row.is_local and not row.etag and not row.stamp and not self._committer.may_have(self.path(row)):
            self._ns.changing(row.parent, row.name)
            self._ns.tree.remove(batch, row)
            self._db.commit(batch)
            return
        path = self.path(row)
        builder = ChangeBuilder(self._ns.tree)
        self.keep_parent(builder, row)
        builder.remove(path, row, self._ns.own_etag(path))
        self._enqueue(builder, self.orphaned(path, row), batch)

    def orphaned(self, path: str, entry: Entry) -> list[Deletion]:
        """Plain objects that nobody wants once the name is gone."""
        if entry.is_plain:
            return [Deletion(path, entry.etag)]
        doomed = [Deletion(path, entry.etag)] if entry.etag else []
        row = self._ns.tree.objects.get(entry.place) if entry.place else None
        if row is not None and not row.is_pack:
            doomed.append(Deletion(row.key, row.etag))
        return doomed

    async def symlink(self, parent: int, name: bytes, target: bytes, uid: int, gid: int) -> Entry:
        path = self.checked_path(parent, name)
        if not 0 < len(target) <= TARGET_BYTES_MAX:
            raise FileError(errno.ENAMETOOLONG if target else errno.ENOENT)
        try:
            text = target.decode()
        except UnicodeDecodeError as error:
            raise FileError(errno.EILSEQ, "targets of symbolic links are UTF-8") from error
        if (await self._ns.lookup(parent, name))[0] is not None:
            raise FileError(errno.EEXIST)
        builder = ChangeBuilder(self._ns.tree)
        hides = self._ns.own_etag(path)
        builder.operations.append(Symlink(path, text, uid, gid, self._clock_ns(), hides=hides))
        self._enqueue(builder)
        self._ns.touch(parent)
        return self._made(parent, name)

    def readlink(self, entry: Entry) -> bytes:
        """Raises FileError: EINVAL for what is no symbolic link, ESTALE for one that was removed."""
        if not entry.is_symlink:
            raise FileError(errno.EINVAL)
        target = self._ns.tree.target(entry.inode)
        if not target:
            raise FileError(errno.ESTALE)
        return target

    # -- renaming

    async def rename(self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int) -> None:
        """Atomic for every observer of the lake, whatever the size: one PUT. Raises FileError as rename(2) says."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
            raise FileError(errno.EINVAL)
        self.checked_path(parent_new, name_new)
        source, _ = await self._ns.lookup(parent_old, name_old)
        target, _ = await self._ns.lookup(parent_new, name_new)
        exchange = flags == RENAME_EXCHANGE
        if source is None or (exchange and target is None):
            raise FileError(errno.ENOENT)
        if target is not None:
            if target.inode == source.inode:
                return
            if flags == RENAME_NOREPLACE:
                raise FileError(errno.EEXIST)
            if not exchange:
                await self._check_replaceable(source, target)
        for entry in (source, *([target] if exchange and target is not None else [])):
            if entry.is_dir:
                patience_s = self._config.staging_timeout_s
                await self._writeback.retry_while_away(self.path(entry), partial(self._subtree.run, entry), patience_s)
        renaming = Renaming(
            self._db, self._ns, self._files, self._committer, self, self._relocator, self._writeback,
            self._unlinker, patience_s=self._config.staging_timeout_s,
            relocate_after_s=self._config.relocate_after_s, clock=self._clock,
        )  # fmt: skip
        await renaming.run(source, parent_new, name_new, target, exchange=exchange)
        if target is not None and not exchange:
            self._lost_name(target)
        self.note_changed(source.inode)
        if target is not None and exchange:
            self.note_changed(target.inode)
        self._ns.touch(parent_old)
        self._ns.touch(parent_new)

    async def _check_replaceable(self, source: Entry, target: Entry) -> None:
        if target.is_dir:
            if not source.is_dir:
                raise FileError(errno.EISDIR)
            await self.check_empty(target)
        elif source.is_dir:
            raise FileError(errno.ENOTDIR)

    # -- attributes

    def set_attributes(self, entry: Entry) -> Entry:
        """The entry's mode, owner and mtime as given, of what nobody writes."""
        builder = ChangeBuilder(self._ns.tree)
        builder.set_attributes(self.path(entry), entry)
        self._enqueue(builder)
        self.note_changed(entry.inode)
        return self._ns.tree.entry(entry.inode) or entry

    def note_changed(self, inode: int) -> None:
        """The ctime of a directory or symbolic link is now; of a file the kernel keeps it."""
        entry = self._ns.tree.entry(inode)
        if entry is not None and (entry.is_dir or entry.is_symlink):
            batch = Batch()
            self._ns.tree.update(batch, msgspec.structs.replace(entry, ctime_ns=self._clock_ns()))
            self._db.commit(batch)

    def xattr(self, entry: Entry, name: str) -> bytes:
        """Raises FileError(ENODATA)."""
        if name.startswith(RESERVED_XATTR):
            return self._told(entry, name)
        value = self._xattrs(entry).get(name) if name.startswith(XATTR_PREFIX) else None
        if value is None:
            raise FileError(errno.ENODATA)
        return value

    def _told(self, entry: Entry, name: str) -> bytes:
        """Names that are answered and never listed, so that nobody copies them."""
        answer = None
        if not entry.is_dir and not entry.is_symlink:
            if name == XATTR_STATE:
                answer = str(self._state(entry))
            elif name == XATTR_LOCATION:
                answer = self._location(entry)
        if answer is None:
            raise FileError(errno.ENODATA)
        return answer.encode()

    def _state(self, entry: Entry) -> FileState:
        """Of the newest bytes of a file."""
        file = self._files.get(entry.inode)
        draft = file.draft if file is not None else None
        if file is None or draft is None:
            return FileState.DURABLE
        item = self._writeback.item_of(draft)
        if file.is_incomplete or (draft.state is DraftState.FAILED and (item is None or item.is_refused)):
            return FileState.FAILED
        begun = draft.accepted and (draft.upload_intent_ns or (item is not None and item.is_attempted))
        on_its_way = begun or draft.uploading or draft.state is DraftState.PUBLISHING
        return FileState.UPLOADING if on_its_way else FileState.DIRTY

    def _location(self, entry: Entry) -> str:
        """Where the newest bytes of a file are."""
        file = self._files.get(entry.inode)
        if file is not None and file.draft is not None:
            return self._staged_location(file.draft)
        extent = file.extent if file is not None else self._ns.extent(entry)
        if extent is None:
            raise FileError(errno.ENODATA)
        return location_of(self._config.store.source, extent)

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
        if file is not None and file.late_xattrs is not None:
            return dict(file.late_xattrs)
        return self._ns.tree.xattrs(entry.inode) if entry.flags & Flag.XATTRS else {}

    def set_xattr(self, entry: Entry, name: str, value: bytes | None) -> None:
        """``value`` None removes it. Raises FileError: EOPNOTSUPP but for ``user.``, ENODATA, ENOSPC."""
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
        file = self._files.get(entry.inode)
        if file is not None and (file.publishing.locked() or file.late_xattrs is not None):
            file.late_xattrs = xattrs
        if file is not None and (file.unlinked or file.entry.is_local):
            self._set_local_xattrs(entry.inode, xattrs)
            return
        row = self._ns.tree.entry(entry.inode)
        if row is None:
            raise FileError(errno.ESTALE)
        builder = ChangeBuilder(self._ns.tree)
        builder.set_attributes(self.path(row), row, xattrs)
        self._enqueue(builder)
        self.note_changed(entry.inode)

    def _set_local_xattrs(self, inode: int, xattrs: dict[str, bytes]) -> None:
        """Of a file that is in no commit yet: they go with it when it is. The row may be that of an earlier version."""
        held = Flag.XATTRS if xattrs else 0
        batch = Batch()
        self._ns.tree.set_xattrs(batch, inode, xattrs)
        row, file = self._ns.tree.entry(inode), self._files.get(inode)
        if row is not None:
            self._ns.tree.update(batch, msgspec.structs.replace(row, flags=(row.flags & ~Flag.XATTRS) | held))
        self._db.commit(batch)
        if file is not None:
            entry = file.entry
            file.entry = msgspec.structs.replace(entry, flags=(entry.flags & ~Flag.XATTRS) | held)
