"""Creates files: empty ones for CREATE, and whole ones that the C library received.

What always holds: the row and the journal record of a new file are written in one batch. A received file (`Received`)
is added as if it were created and written at that moment; before that it is not acknowledged. The kernel knows it by an
inode number that was reserved for it, and that its row gets. Trio thread only. A crash leaves the records of files that
were added; nothing is left of a received file that was not.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lakefs_fuse.config import MountConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import CacheError, FileError, LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import UNSET, Entry, Flag
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.staging.draft_record import encode
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace.attributes import PERMISSIONS
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.ops.io import FileIO
from lakefs_fuse.vfs.writeback.group_commit import Closing, GroupCommit

NAMES_MAX = 8192
"""A directory with more is not leased: passing all names to the C library takes too long."""
log = logging.getLogger(__name__)

OnClosed = Callable[[LakeError | None], None]
"""Answers a `close()`, with its error if there is one; then the file's handle must have another owner when it returns
(`NewFiles.again`)."""


@dataclass(frozen=True, slots=True)
class Received:
    """A new file that the C library received, with all its bytes. Times in ns since 1970; ``opener`` is a thread.
    ``changed_ns`` is when a program set attributes, 0 if none did; ``mtime_ns`` is an mtime that it chose."""

    inode: int
    parent: int
    name: bytes
    mode: int
    uid: int
    gid: int
    opener: int
    created_ns: int
    written_ns: int
    data: bytes
    changed_ns: int = 0
    mtime_ns: int | None = None
    is_exclusive: bool = False


class NewFiles:
    """Creates files; see the module's head."""

    def __init__(
        self,
        config: MountConfig,
        database: Database,
        namespace: Namespace,
        drafts: Drafts,
        io: FileIO,
        group_commit: GroupCommit,
        clock: Clock,
    ) -> None:
        self._config, self._db, self._ns, self._files = config, database, namespace, drafts.files
        self._drafts, self._io, self._services = drafts, io, drafts.services
        self._group_commit, self._writeback = group_commit, group_commit.queue
        self._clock_ns = clock.wall_ns
        self._journal = Journal(database)

    async def wait_room(self, key: str) -> None:
        """Wait until write-back may acknowledge one more file, if the key is under write-back. Raises StagingFull."""
        if self._writeback.is_for(key):
            await self._writeback.wait_room(self._config.staging_timeout_s)

    def asks_store(self, key: str) -> bool:
        """Return whether O_EXCL asks the store if the path is free."""
        return self._writeback.asks_store_for_exclusive_create(key)

    @property
    def asks_store_anywhere(self) -> bool:
        """True if O_EXCL may ask the store at some path of the mount."""
        return self._writeback.asks_store_anywhere

    @property
    def _takes_if_absent(self) -> bool:
        """True if the store can refuse to store a file created with O_EXCL over another object."""
        return self._services.client.capabilities.put_if_absent

    def make(
        self, parent: int, name: bytes, key: str, mode: int, uid: int, gid: int, *, exclusive: bool = False
    ) -> OpenFile:
        """Create a file, and return it with its first handle. Raises LakeError; then nothing was created."""
        if self._writeback.is_for(key) and self._ns.tree.listing(parent) is None:
            self._ns.list_soon(parent)  # so that names can be made while the store is away
        now = self._clock_ns()
        batch = Batch()
        entry = self._insert(batch, parent, name, mode, uid, gid, now)
        self._ns.touch(parent, batch, now)
        file = self._drafts.add_new(entry, key, if_absent=exclusive and self._takes_if_absent)
        try:
            self._note(batch, file)
            self._db.commit(batch)
        except CacheError:
            self._drop(file)
            raise
        self._drafts.notify_emptied(file)
        return file

    def _insert(
        self, batch: Batch, parent: int, name: bytes, mode: int, uid: int, gid: int, now: int, inode: int = 0
    ) -> Entry:
        self._ns.changing(parent, name)
        return self._ns.tree.insert(
            batch, parent, name, Flag.LOCAL | Flag.ATTRIBUTES_KNOWN, inode=inode,
            mode=mode & PERMISSIONS, uid=uid, gid=gid, mtime_ns=now, ctime_ns=now,
        )  # fmt: skip

    def _note(self, batch: Batch, file: OpenFile) -> None:
        """Add the journal record of the file's draft to the batch. Raises CacheError."""
        if file.draft is not None:
            self._journal.put(batch, file.draft.id, encode(file.draft.prepare_record()))

    def _drop(self, file: OpenFile) -> None:
        """Discard a file with one handle."""
        file.unlink()
        self._services.nursery.start_soon(self._release, file)

    async def _release(self, file: OpenFile) -> None:
        await self._io.release(file, writer=True)

    # -- files that the C library received

    def add_received(self, received: Sequence[Received], closed: Mapping[int, OnClosed]) -> list[OpenFile | LakeError]:
        """Add the received files. Returns for each the file, with one handle for its creator, or the error: ESTALE if
        its directory is gone, ENAMETOOLONG if the directory now has a path that is too long, EEXIST or ESTALE if
        the name is something else by now, CacheError if the rows cannot be written.

        ``closed`` has the answer to the `close()` of each file that its creator has closed, by inode; such a file keeps
        no handle when that is answered. It is called with the result of the close, but not if the file cannot be added.
        """
        batch, closings, waiting = Batch(), list[Closing](), list[tuple[OpenFile, OnClosed]]()
        taken = [self._try_to_take(batch, each) for each in received]
        touched: dict[int, int] = {}
        for each, file in zip(received, taken, strict=True):
            if isinstance(file, LakeError):
                continue
            touched[each.parent] = max(each.created_ns, touched.get(each.parent, 0))
            answer = closed.get(each.inode)
            if answer is not None and (closing := self._closing(file, answer)) is not None:
                closings.append(closing)
                continue
            self._note(batch, file)
            if answer is not None:
                waiting.append((file, answer))
        try:
            for directory, at_ns in touched.items():
                self._ns.touch(directory, batch, at_ns)
            self._group_commit.submit(closings, batch)
        except CacheError as failed:
            for closing in closings:
                closing.draft.gate.release_exclusive()
            for file in taken:
                if isinstance(file, OpenFile):
                    self._drop(file)
            return [failed for _ in taken]
        for closing in closings:
            self._files.drop_handle(closing.file, writer=True)
        for file in taken:
            if isinstance(file, OpenFile):
                self._drafts.notify_emptied(file)
        for file, answer in waiting:
            self._services.nursery.start_soon(self._close_patiently, file, answer)
        return taken

    def _closing(self, file: OpenFile, answer: OnClosed) -> Closing | None:
        """Return a `Closing` that acknowledges the file without waiting; None if that is not possible."""
        draft = file.draft
        if draft is None or not self._writeback.may_acknowledge(file) or not draft.gate.acquire_exclusive_nowait():
            return None

        def done(error: LakeError | None) -> None:
            draft.gate.release_exclusive()
            answer(error)

        return Closing(file, draft, done)

    def _try_to_take(self, batch: Batch, received: Received) -> OpenFile | LakeError:
        try:
            return self._take(batch, received)
        except LakeError as error:
            return error

    def _take(self, batch: Batch, received: Received) -> OpenFile:
        key = self._ns.keys.checked_key(self._ns.prefix(received.parent), received.name.decode())
        known = self._ns.tree.child(received.parent, received.name)
        file = self._take_new(batch, key, received) if known is None else self._take_over(known, key, received)
        file.written(received.written_ns)
        if received.changed_ns:
            file.set_attributes(received.changed_ns, received.mtime_ns)
        return file

    def _take_new(self, batch: Batch, key: str, received: Received) -> OpenFile:
        entry = self._insert(
            batch, received.parent, received.name, received.mode, received.uid, received.gid, received.created_ns,
            received.inode,
        )  # fmt: skip
        file: OpenFile | None = None
        try:
            file = self._drafts.add_new(entry, key, if_absent=received.is_exclusive and self._takes_if_absent)
            self._drafts.draft(file).begin_with(received.data)
        except BaseException:
            self._ns.tree.detach(batch, entry)
            if file is not None:
                self._drop(file)
            raise
        return file

    def _take_over(self, known: Entry, key: str, received: Received) -> OpenFile:
        """Make a received file the next version of a name that another client created meanwhile. A file created with
        O_EXCL has lost the name: its close fails with EEXIST, and its bytes become an orphan. Raises FileError if the
        name is a directory or a symbolic link, or dirty here: EEXIST with O_EXCL, else ESTALE."""
        if known.is_dir or known.is_symlink or self._files.is_dirty(known):
            code = errno.EEXIST if received.is_exclusive else errno.ESTALE
            raise FileError(code, f"{key} is something else by now")
        batch = Batch()
        entry = self._ns.tree.renew_inode(batch, known, received.inode)
        self._db.commit(batch)
        file = self._files.acquire(entry, writer=True)
        if received.is_exclusive:
            self._files.detach(file)
            file.if_absent = True
            file.lose_name()
        try:
            draft = self._drafts.draft(file, is_emptied=True)
            draft.begin_with(received.data)
        except LakeError:
            self._drop(file)
            raise
        if received.is_exclusive:
            lost = FileError(errno.EEXIST, f"{key} was stored by another client in the meantime")
            draft.fail_publish(lost, "publishing")
        return file

    def again(self, inode: int) -> OpenFile:
        """Return a file that was added before, with one more writing handle. Raises FileError(ESTALE) if it is gone."""
        file = self._files.get(inode)
        entry = file.entry if file is not None else self._ns.tree.entry(inode)
        if entry is None:
            raise FileError(errno.ESTALE)
        return self._files.acquire(entry, writer=True)

    async def _close_patiently(self, file: OpenFile, on_closed: OnClosed) -> None:
        """Close a file that cannot be acknowledged at once, answer its `close()`, and release its handle: until then
        others that close see that it is written, and share a pack with it."""
        error: LakeError | None = LakeError("the mount is ending")
        try:
            await self.wait_room(file.key)
            await self._services.staging.reserve(0)
            await self._io.close(file)
            error = None
        except LakeError as failed:
            error = failed
        except Exception as failed:
            log.exception("closing %s", file.key)
            error = LakeError(f"closing failed: {failed!r}")
        finally:
            on_closed(error)
        await self._io.release(file, writer=True)

    # -- names that are leased to the C library

    def names_lease_s(self, directory: int) -> float:
        """Return for how many seconds the names of a directory may be leased. Under the lease the C library answers for
        absent names, and creates files, without asking. 0 if that is not possible, as in a setgid directory, or while
        names that are absent may have been stored since the listing."""
        # Where open files are published, the answer to CREATE has to say whether I/O is direct.
        if not self._ns.keys.takes_plain_names or self._writeback.publishes_open_files:
            return 0.0
        above = self._ns.tree.entry(directory)  # none for the root
        mode = self._config.dir_mode if above is None or above.mode == UNSET else above.mode
        return 0.0 if mode & stat.S_ISGID else self._ns.lease_fresh_s(directory)

    def names(self, directory: int) -> list[bytes] | None:
        """Return all names in a directory, also those not shown; None if there are more than NAMES_MAX."""
        names = []
        for entry in self._ns.tree.children(directory):
            names.append(entry.name)
            if len(names) > NAMES_MAX:
                return None
        return names

    def name_bytes_max(self, directory: int) -> int:
        """As `KeyLimits.name_bytes_max`."""
        return self._ns.keys.name_bytes_max(directory)
