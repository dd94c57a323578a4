"""Open file descriptions: OPEN and CREATE return their numbers, which READ to RELEASE name.

What always holds: a handle is pinned to the version that its name had when it was opened. Trio thread only; no handle
survives a crash.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence

from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.checkpoints.names import is_checkpoint_file
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import FileError, LakeError
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.metrics import ReadMetrics
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.staging.refused_ranges import KILLED
from lakefs_fuse.store.protocol import Buffer
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.handle_bits import LEASED, READING, inode_of
from lakefs_fuse.vfs.files.open_file import Handle, OpenFile, OpenState
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.ops.attributes import Attributes
from lakefs_fuse.vfs.ops.create import NewFiles
from lakefs_fuse.vfs.ops.io import FileIO
from lakefs_fuse.vfs.ops.open_publisher import OpenFilePublisher

FSYNCS_OF_A_DATABASE = 100
"""Calls of fsync on one handle until a warning is logged. A log that is synced each minute gets one in two hours."""
READAHEADS_MAX = 1024
"""Files whose readahead is kept between two reads."""
log = logging.getLogger(__name__)


class Handles:
    """The table of handles; see the module's head."""

    def __init__(
        self,
        namespace: Namespace,
        files: FileTable,
        attributes: Attributes,
        io: FileIO,
        new_files: NewFiles,
        open_publisher: OpenFilePublisher,
        clock: Clock,
        reads_of: Callable[[str], ReadMetrics],
    ) -> None:
        """``reads_of`` returns the counters of READ requests for a path."""
        self._reads_of = reads_of
        self._ns, self.files, self._attributes, self._io, self._clock = namespace, files, attributes, io, clock
        self.new_files, self.open_leases = new_files, OpenLeases(files, namespace, io, attributes.entry, reads_of)
        self._open_publisher = open_publisher
        self._handles: dict[int, Handle] = {}
        self._refused: dict[int, LakeError] = {}
        self._handle_next = 1

    def _new_handle(self, file: OpenFile, writable: bool, opener: int, flags: int) -> int:
        number, self._handle_next = self._handle_next, self._handle_next + 1
        number |= 0 if writable else READING
        handle = self._handles[number] = Handle(file, writable, Readahead(), self._reads_of(file.key), opener)
        handle.is_published_while_open = writable and self._open_publisher.watch(file)
        file.bypasses_page_cache |= writable and (handle.is_published_while_open or bool(flags & os.O_DIRECT))
        return number

    def handle(self, number: int) -> Handle:
        """Return a handle. Raises FileError: the one of `hold_refused`, or EBADF."""
        try:
            return self._handles[number]
        except KeyError:
            refused = self._refused.get(number)
            raise FileError(refused.errno, str(refused)) if refused else FileError(errno.EBADF) from None

    async def open(self, inode: int, flags: int, opener: int = 0) -> int:
        """Open a file; return a handle, pinned to the version that the name has now. Raises FileError(ESTALE) if the
        name no longer leads to this inode; the kernel then looks the name up again."""
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if writable or flags & os.O_TRUNC:
            self._attributes.refuse_read_only()
        entry = self._attributes.entry(inode)
        if entry.is_dir:
            raise FileError(errno.EISDIR)
        if self.files.get(inode) is None:
            now, _ = await self._ns.lookup(entry.parent, entry.name)
            if now is None or now.inode != inode:
                raise FileError(errno.ESTALE)
            entry = now
        if writable or flags & os.O_TRUNC:
            entry = await self._attributes.getattr(inode)  # the next version keeps what this one's metadata says
            if self.files.get(inode) is None and self._attributes.is_unlinked(inode):
                raise FileError(errno.ESTALE)  # a version of it would bring the name back
        file = self.files.acquire(entry, writer=writable)
        try:
            if writable or flags & os.O_TRUNC:
                self._ns.keys.check_paths([file.key])
            if flags & os.O_TRUNC and file.current.size:
                await self._io.truncate(file, 0)
                file.written(self._clock.wall_ns())
            elif not writable and file.draft is None:
                await self._io.check_version(file, self._reads_of(file.key))
        except BaseException:
            await self._io.release(file, writer=writable)
            raise
        return self._new_handle(file, writable, opener, flags)

    async def create(
        self,
        parent: int,
        name: bytes,
        mode: int,
        flags: int,
        uid: int,
        gid: int,
        opener: int = 0,
        *,
        confirm: Callable[[], None] = lambda: None,
    ) -> tuple[int, Entry]:
        """Create a file; return a writing handle and the entry. This node sees the file at once; its close stores it.
        ``confirm`` is called before anything is changed, and raises an error if the caller no longer waits.
        Raises FileError if the name exists: EEXIST with O_EXCL, else ESTALE, because another node created the file
        since the kernel's LOOKUP. The kernel then looks it up again, and checks whether the caller may open it."""
        above = self._attributes.writable_directory(parent)
        gid = self._attributes.gid_in(above, gid)
        key = self._ns.keys.checked_path(parent, name)
        exclusive = bool(flags & os.O_EXCL)
        await self.new_files.wait_room(key)
        if exclusive and self.new_files.asks_store(key):
            known = await self._ns.lookup_in_store(parent, name)
        else:
            known, _ = await self._ns.lookup(parent, name)
        if known is not None:
            raise FileError(errno.EEXIST if exclusive else errno.ESTALE)
        key = self._ns.keys.checked_path(parent, name)  # another node may have renamed the directory meanwhile
        confirm()
        file = self.new_files.make(parent, name, key, mode, uid, gid, exclusive=exclusive)
        return self._new_handle(file, True, opener, flags), file.entry

    def hold(self, file: OpenFile, number: int, opener: int, *, closed_by_opener: bool = False) -> None:
        """Register a writer's handle that the C library issued. The file counts it already."""
        self._handles[number] = Handle(file, True, Readahead(), self._reads_of(file.key), opener, closed_by_opener)

    def hold_refused(self, number: int, error: LakeError) -> None:
        """Register a handle that the C library issued for a file that was refused. Its requests raise the error until
        its RELEASE, which the kernel sends for every handle, as a program looks for the reason in the result of each.
        """
        self._refused[number] = error

    def is_handle(self, number: int) -> bool:
        return number in self._handles

    async def read(self, number: int, offset: int, length: int) -> Buffer:
        if number & LEASED:
            return await self.open_leases.read(number, offset, length)
        handle = self.handle(number)
        return await self._io.read(handle.file, offset, length, handle.readahead, handle.reads)

    async def write(
        self, number: int, offset: int, data: Buffer, *, kills_privileges: bool = False, sets_times: bool = True
    ) -> int:
        """Write bytes; return how many. Raises LakeError. Without ``sets_times``, their mtime and ctime come by
        `Attributes.setattr`, unless that had the same ones last."""
        file = self.handle(number).file
        if kills_privileges:
            await self._attributes.kill_privileges(file.current)
        await self._io.write(file, offset, data)
        file.count_written(offset, len(data))
        file.written(self._clock.wall_ns() if sets_times else None)
        return len(data)

    async def copy_range(self, source: int, offset: int, target: int, target_offset: int, length: int) -> int:
        """Copy bytes of a file to another, both by inode, without reading them; return how many. The target is open for
        writing. Raises FileError(EOPNOTSUPP) if that is not possible: see `FileIO.copy_range`."""
        file = self.files.get(target)
        if file is None or not file.writers or source == target:
            raise FileError(errno.EOPNOTSUPP)
        read = self.files.acquire(self._attributes.entry(source), writer=False)
        try:
            copied = await self._io.copy_range(read, offset, file, target_offset, length)
        finally:
            await self._io.release(read, writer=False)
        if not copied:
            raise FileError(errno.EOPNOTSUPP)
        file.count_written(target_offset, copied)
        file.written(self._clock.wall_ns())
        return copied

    async def flush(
        self,
        number: int,
        is_written_on: Callable[[Handle], bool] | None = None,
        killed_by: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        """Do what `close()` waits for: store the bytes or, under write-back, sync them to the local disk. Raises
        LakeError. ``is_written_on`` is called for a handle whose opener is known. It returns whether the writer
        continues after this close; then nothing is published. ``killed_by`` gets the other threads that opened the
        file for writing. It returns the signal that is killing the closing process; 0 if there is none, or if another
        process has one of these threads."""
        handle = self.handle(number)
        if not handle.writable or (handle.opener and is_written_on is not None and is_written_on(handle)):
            return
        if killed_by is not None and self._is_checkpoint_being_written(handle):
            others = self._other_writers(handle)
            if all(others) and (signal := killed_by(others)):
                self._leave_incomplete(handle.file, signal)
        await self._io.close(handle.file)

    @staticmethod
    def _is_checkpoint_being_written(handle: Handle) -> bool:
        """Return whether the file is a checkpoint that is being written, and not published meanwhile. Of other files,
        such as logs, the bytes that were written before a kill are worth keeping."""
        file = handle.file
        is_written = file.draft is not None and file.draft.state is DraftState.WRITING
        return is_written and not handle.is_published_while_open and is_checkpoint_file(os.fsdecode(file.entry.name))

    def _other_writers(self, handle: Handle) -> list[int]:
        """Return the threads that opened the file's other writing handles; 0 for a thread that is not known."""
        file = handle.file
        if file.writers == 1:
            return []
        return [
            each.opener for each in self._handles.values() if each.file is file and each.writable and each is not handle
        ]

    @staticmethod
    def _leave_incomplete(file: OpenFile, signal: int) -> None:
        """Refuse to store the version of a checkpoint whose writer was killed; the version before it stays."""
        assert file.draft is not None
        size = file.draft.size
        killed = FileError(KILLED, f"its writer was killed by signal {signal} before it closed the file")
        file.draft.refuse(size, size + 1, killed)

    async def fsync(self, number: int) -> None:
        if number & LEASED:
            await self._publish_leased(number)
            return
        handle = self.handle(number)
        handle.fsyncs += 1
        if handle.fsyncs == FSYNCS_OF_A_DATABASE:
            log.warning(
                "%s was synced %d times while it was open, and each fsync stores a version of it: keep a live database "
                "on a local disk, and copy it into the lake",
                handle.file.key, handle.fsyncs,
            )  # fmt: skip
        await self._io.publish(handle.file)

    async def _publish_leased(self, number: int) -> None:
        file = self.files.acquire(self._attributes.entry(inode_of(number)), writer=False)
        try:
            await self._io.publish(file)
        finally:
            await self._io.release(file, writer=False)

    async def release(self, number: int) -> None:
        if number & LEASED:
            await self.open_leases.release(number)
        self._refused.pop(number, None)
        handle = self._handles.pop(number, None)
        if handle is not None:
            file = handle.file
            await self._io.release(file, writer=handle.writable)
            if file.bypasses_page_cache and not file.handles:  # the kernel keeps the mtime of an inode that it knows
                self._ns.invalidate_name(file.entry.parent, file.entry.name)


class OpenLeases:
    """Serves handles that the C library opened under a lease, and says for how long a file may be leased.

    Such a handle is the inode with two bits set, and has no `Handle` here. That is enough while the inode has a row:
    each read looks the inode up, which is one version for as long as it exists. Before a row is removed or replaced, or
    a decision depends on open handles, `FileTable.hold` revokes the leases, and counts their handles."""

    def __init__(
        self,
        files: FileTable,
        namespace: Namespace,
        io: FileIO,
        entry: Callable[[int], Entry],
        reads_of: Callable[[str], ReadMetrics],
    ) -> None:
        """``entry`` returns the entry of an inode, or raises FileError(ESTALE). ``reads_of``: see `Handles`."""
        self._files, self._ns, self._io, self._entry, self._reads_of = files, namespace, io, entry, reads_of
        self._read: OrderedDict[int, tuple[Readahead, ReadMetrics]] = OrderedDict()

    def allowed_s(self, file: OpenFile) -> float:
        """Return for how many seconds opens of a file for reading may be leased; 0 if they may not."""
        is_clean = file.state is OpenState.CLEAN and not file.entry.is_local
        if not (is_clean or file.state is OpenState.ACKNOWLEDGED) or file.is_redated:
            return 0.0
        return self._ns.name_fresh_s(file.entry.parent, file.entry.name)

    def allowed_for_closed_s(self, entry: Entry) -> float:
        """As `allowed_s` for a file that is not in use."""
        return 0.0 if entry.is_local else self._ns.name_fresh_s(entry.parent, entry.name)

    async def read(self, handle: int, offset: int, length: int) -> Buffer:
        """Read through a handle opened under a lease. Raises FileError(ESTALE) if the inode is no longer known."""
        inode = inode_of(handle)
        file = self._files.acquire(self._entry(inode), writer=False)
        try:
            return await self._io.read(file, offset, length, *self._reading(file))
        finally:
            await self._io.release(file, writer=False)

    def _reading(self, file: OpenFile) -> tuple[Readahead, ReadMetrics]:
        inode = file.entry.inode
        if inode not in self._read:
            self._read[inode] = Readahead(), self._reads_of(file.key)
        self._read.move_to_end(inode)
        if len(self._read) > READAHEADS_MAX:
            self._read.popitem(last=False)
        return self._read[inode]

    async def release(self, handle: int) -> None:
        """Release a handle whose lease was revoked."""
        file = self._files.get(inode_of(handle))
        if file is not None:
            await self._io.release(file, writer=False)
