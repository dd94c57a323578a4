"""Stores new small files that the C library received whole, when they are closed or needed earlier.

create_offload.c calls `CreateOffload._receive` while no other request is handled, with the GIL held. What always holds
(*no promise*): a file is acknowledged only after it is in the tree and the journal, so a crash before that leaves
nothing and loses nothing that was acknowledged. Trio thread only.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, IntFlag, auto

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, which it wraps)

from lakefs_fuse.errors import FileError, LakeError
from lakefs_fuse.kernel.leases import Leases
from lakefs_fuse.kernel.waiting_requests import Kind, WaitingRequest, WaitingRequests
from lakefs_fuse.vfs.files.handle_bits import CREATED
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.ops.create import Received

INODES = 512
"""Inodes reserved for the library at a time."""
FLUSH = Kind("flush", by_handle=True)
log = logging.getLogger(__name__)


class Parts(IntFlag):
    """The data of a file that the library hands over, numbered as in create_offload.c. If it hands over a handle alone,
    it handed over the bytes before."""

    BYTES = 1
    HANDLE = 2


class ReceivedState(Enum):
    """State of a file after its hand-over; until then only create_offload.c has it (RECEIVING of its `enum state`)."""

    OPEN = auto()
    """The library no longer knows the file, and its handle must become a handle of Python."""
    CLOSING = auto()
    """As in create_offload.c: its FLUSH waits for a reply."""
    CLOSED = auto()
    """As in create_offload.c: FLUSH was replied to, and the library releases the handle."""
    HELD = auto()
    """Python owns the handle; a FLUSH that waited got an error."""
    REFUSED = auto()
    """Python refused the file; a FLUSH that waited got an error, and later requests of the handle get it."""


SUCCESSORS = {
    ReceivedState.OPEN: {ReceivedState.HELD, ReceivedState.REFUSED},
    ReceivedState.CLOSING: {ReceivedState.CLOSED, ReceivedState.HELD, ReceivedState.REFUSED},
}


class _HandedOver(ctypes.Structure):
    """`struct handed_over` of create_offload.c."""

    _fields_ = (
        ("inode", ctypes.c_uint64), ("parent", ctypes.c_uint64), ("flush_unique", ctypes.c_uint64),
        ("created_ns", ctypes.c_int64), ("written_ns", ctypes.c_int64),
        ("changed_ns", ctypes.c_int64), ("mtime_ns", ctypes.c_int64),
        ("mode", ctypes.c_uint32), ("uid", ctypes.c_uint32), ("gid", ctypes.c_uint32), ("pid", ctypes.c_uint32),
        ("size", ctypes.c_uint32), ("parts", ctypes.c_uint32),
        ("is_mtime_chosen", ctypes.c_uint32), ("is_exclusive", ctypes.c_uint32),
        ("data", ctypes.c_void_p), ("name", ctypes.c_char_p),
    )  # fmt: skip


@dataclass(slots=True)
class ReceivedFile:
    """A file whose bytes were handed over."""

    content: Received
    state: ReceivedState
    flush_unique: int = 0
    """The kernel's number of the FLUSH; 0: not known."""
    waiting: WaitingRequest | None = field(default=None, init=False)
    """The FLUSH, while it waits."""

    def transition(self, to: ReceivedState) -> None:
        assert to in SUCCESSORS.get(self.state, ()), f"{self.state.name} to {to.name}"
        self.state = to


class CreateOffload:
    """Stores files that the library received; there are none without the library, or on a read-only mount."""

    def __init__(self, fs: Filesystem, leases: Leases, requests: WaitingRequests) -> None:
        self._fs, self._leases, self._requests = fs, leases, requests
        self._callback = ctypes.CFUNCTYPE(None)(self._receive)
        asks = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint32)
        self._keeps_open_callback = asks(self._keeps_open)
        self._library: ctypes.PyDLL | None = None

    def begin(self) -> None:
        """Let the library receive new files; call it before the session reads requests. Does nothing without the
        library, or on a read-only mount."""
        library = hooks.library()
        if library is None or not hooks.active() or self._fs.config.read_only:
            return
        self._library = library
        library.lakefs_set_receiver(self._callback, self._keeps_open_callback)
        self._reserve_inodes(library)
        self._leases.lease_names_from(library)
        self._fs.events.names_requested.append(self._receive_all)
        self._fs.events.files_counted.append(self._count)

    def end(self) -> None:
        """Store all files of the library, also those not closed yet, and stop receiving files. Call it when the session
        no longer replies."""
        if self._library is not None:
            self._receive_all()
            self._leases.revoke_all_names()
            self._library.lakefs_set_receiver(None, None)
            self._library = None

    def _keeps_open(self, parent: int, name: bytes, closer: int) -> int:
        """Return whether a thread closes one of several descriptors of an empty file that it created."""
        try:
            key = self._fs.namespace.prefix(parent) + name.decode()
            return hooks.keeps_open(closer, os.path.join(self._fs.config.mountpoint, key))
        except LakeError:
            return 0  # its directory is gone

    def _count(self) -> int:
        return 0 if self._library is None else int(self._library.lakefs_files_receiving())

    def _receive_all(self) -> None:
        """Store all files of the library, also those not closed yet."""
        if self._library is not None:
            self._library.lakefs_hand_over_all()
            self._receive()

    def _reserve_inodes(self, library: ctypes.PyDLL) -> None:
        if library.lakefs_inodes_left() < INODES // 4:
            library.lakefs_reserve_inodes(self._fs.database.new_inodes(INODES), INODES)

    def _receive(self) -> None:
        """Store the files that are due. An error is logged, because C cannot pass it on."""
        assert self._library is not None
        try:
            self._store(list(self._handed_over(self._library)))
            self._reserve_inodes(self._library)
        except Exception:
            log.exception("storing new files")

    @staticmethod
    def _handed_over(library: ctypes.PyDLL) -> Iterator[ReceivedFile | tuple[int, int]]:
        """Yield the files that are due; for a handle alone, its inode and opener."""
        each = _HandedOver()
        while library.lakefs_next_file(ctypes.byref(each)):
            if each.parts == Parts.HANDLE:
                yield each.inode, each.pid
                continue
            data = ctypes.string_at(each.data, each.size) if each.size else b""
            content = Received(
                each.inode, each.parent, each.name, each.mode, each.uid, each.gid, each.pid,
                each.created_ns, each.written_ns, data, each.changed_ns,
                each.mtime_ns if each.is_mtime_chosen else None, bool(each.is_exclusive),
            )  # fmt: skip
            state = ReceivedState.OPEN if each.parts & Parts.HANDLE else ReceivedState.CLOSING
            yield ReceivedFile(content, state, each.flush_unique)

    def _store(self, handed_over: list[ReceivedFile | tuple[int, int]]) -> None:
        received = [each for each in handed_over if isinstance(each, ReceivedFile)]
        closed = {each.content.inode: self._closer_of(each) for each in received if each.state is ReceivedState.CLOSING}
        pending = list(received)
        try:
            files = self._fs.new_files.add_received([each.content for each in received], closed)
            for each, file in zip(received, files, strict=True):
                if isinstance(file, LakeError):
                    log.warning("the bytes of a new file are lost, and its writer gets the error: %s", file)
                    self._refuse(each, file)
                elif each.state is ReceivedState.OPEN:
                    each.transition(ReceivedState.HELD)
                    self._fs.hold(file, CREATED | each.content.inode, each.content.opener)
                elif each.state is ReceivedState.CLOSING:
                    flushed = (CREATED | each.content.inode,)
                    each.waiting = self._requests.watch(FLUSH, flushed, each.flush_unique, each.content.opener)
                del pending[0]
            for handle in handed_over:
                if isinstance(handle, tuple):
                    self._hold(*handle)
        finally:
            for each in pending:
                if each.state in SUCCESSORS:
                    self._refuse(each, FileError(errno.EIO))

    def _closer_of(self, file: ReceivedFile) -> Callable[[LakeError | None], None]:
        """Return the function that replies to the FLUSH of a file with the result of closing it."""

        def answer(error: LakeError | None) -> None:
            if file.waiting is not None:
                self._requests.remove(file.waiting)
            if file.state is ReceivedState.REFUSED:
                return  # FLUSH already got an error that did not concern the file
            file.transition(ReceivedState.CLOSED if error is None else ReceivedState.HELD)
            if error is not None:
                log.warning("flush: %s", error)
                self._hold(file.content.inode, file.content.opener)  # its release tries again, as for any file
            else:
                self._leases.lease_closed(file.content.inode)
            self._answer_close(file.content.inode, 0 if error is None else error.errno)

        return answer

    def _refuse(self, file: ReceivedFile, error: LakeError) -> None:
        """Refuse a file: a FLUSH that waits and later requests of its handle get the error, and the kernel drops the
        name and attributes."""
        file.transition(ReceivedState.REFUSED)
        self._fs.hold_refused(CREATED | file.content.inode, error)
        self._answer_close(file.content.inode, error.errno)
        self._fs.events.invalidate_name(file.content.parent, file.content.name)

    def _hold(self, inode: int, opener: int) -> None:
        """Take over the handle of a file whose bytes were handed over before."""
        number = CREATED | inode
        if self._fs.is_handle(number):
            return
        try:
            self._fs.hold(self._fs.new_files.again(inode), number, opener, closed_by_opener=True)
        except LakeError as error:
            log.info("a removed file is still open: %s", error)

    def _answer_close(self, inode: int, code: int) -> None:
        if self._library is not None:
            self._library.lakefs_answer_close(inode, code)
