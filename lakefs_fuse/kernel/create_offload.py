"""New small files that the hooks receive whole: they are taken here when they are closed, or when anybody asks.

See create_offload.c, which calls `Creating._serve` while no other request is looked at. Of a directory in which files
are created one after another the hooks are lent all names, for as long as those are known anyway. Trio thread only.
"""

from __future__ import annotations

import ctypes
import errno
import logging
from enum import IntFlag
from functools import partial

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, which it wraps)

from lakefs_fuse.errors import LakeError
from lakefs_fuse.kernel.reply import attributes_of
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.ops.create import Received, Told

CREATED = 1 << 60
"""In the handles that the hooks give out; the rest of them is the inode."""
CREATED_BEFORE = 2
"""So many files are created in a directory before it is lent."""
CREATED_IN_MAX = 1024
"""Directories whose new files are counted."""
INODES = 512
"""Set aside at a time."""
log = logging.getLogger(__name__)


class Parts(IntFlag):
    """What is handed over of a file, as create_offload.c numbers it. Bytes alone: its FLUSH waits for an answer. A
    handle alone: the bytes came before."""

    BYTES = 1
    HANDLE = 2


class _HandedOver(ctypes.Structure):
    """`struct handed_over`."""

    _fields_ = (
        ("inode", ctypes.c_uint64), ("parent", ctypes.c_uint64),
        ("created_ns", ctypes.c_int64), ("written_ns", ctypes.c_int64),
        ("mode", ctypes.c_uint32), ("uid", ctypes.c_uint32), ("gid", ctypes.c_uint32), ("pid", ctypes.c_uint32),
        ("size", ctypes.c_uint32), ("parts", ctypes.c_uint32),
        ("data", ctypes.c_void_p), ("name", ctypes.c_char_p),
    )  # fmt: skip


class Creating:
    """See the module's head. Without the hooks, or on a mount that is read only, nothing is ever lent."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs, self._new_files, self._tree = fs, fs.new_files, fs.namespace.tree
        self._created: dict[int, int] = {}
        self._taken = _HandedOver()
        self._callback = ctypes.CFUNCTYPE(None)(self._serve)
        self._library: ctypes.PyDLL | None = None

    def begin(self) -> None:
        """The session's requests are about to be read."""
        library = hooks.library()
        if library is None or not hooks.active() or self._fs.config.read_only:
            return
        self._library = library
        library.lakefs_set_receiver(self._callback)
        self._set_inodes_aside()
        events = self._fs.events
        events.mirrored_name_added.append(self._named)
        events.mirror_dropped.append(library.lakefs_revoke_names)
        events.names_requested.append(self._settle)

    def end(self) -> None:
        """No request is answered any more. What nobody closed is taken as it is."""
        if self._library is not None:
            self._settle()
            self._library.lakefs_revoke_all_names()
            self._library.lakefs_set_receiver(None)
            self._tree.mirrored.clear()
            self._library = None

    def _settle(self) -> None:
        """What was received is taken now, whoever still writes to it."""
        if self._library is not None:
            self._library.lakefs_hand_over_all()
            self._serve()

    def _set_inodes_aside(self) -> None:
        assert self._library is not None
        if self._library.lakefs_inodes_left() < INODES // 4:
            self._library.lakefs_reserve_inodes(self._fs.database.new_inodes(INODES), INODES)

    # -- what was received

    def _serve(self) -> None:
        """Nothing raised here would be seen by anybody."""
        try:
            self._take_what_came()
            self._set_inodes_aside()
        except Exception:
            log.exception("taking new files")

    def _take_what_came(self) -> None:
        assert self._library is not None
        came: list[Received] = []
        closed: dict[int, Told] = {}
        again: list[tuple[int, int]] = []
        taken = self._taken
        while self._library.lakefs_next_file(ctypes.byref(taken)):
            if taken.parts == Parts.HANDLE:
                again.append((taken.inode, taken.pid))
                continue
            data = ctypes.string_at(taken.data, taken.size) if taken.size else b""
            received = Received(
                taken.inode, taken.parent, taken.name, taken.mode, taken.uid, taken.gid, taken.pid,
                taken.created_ns, taken.written_ns, data,
            )  # fmt: skip
            came.append(received)
            if taken.parts == Parts.BYTES:
                closed[received.inode] = partial(self._closed, received)
        waiting = {each.inode: each for each in came}
        try:
            for received, file in zip(came, self._new_files.take(came, closed), strict=True):
                if isinstance(file, LakeError):
                    log.warning("what was written to a new file is lost, its writer is told: %s", file)
                    self._refuse(received, file.errno)
                elif received.inode not in closed:
                    self._fs.hold(file, CREATED | received.inode, received.opener)
                del waiting[received.inode]
            for inode, opener in again:
                self._hold_again(inode, opener)
        finally:
            for received in waiting.values():
                self._refuse(received, errno.EIO)

    def _refuse(self, received: Received, code: int) -> None:
        """There is no such file, and the kernel, which was told its name and attributes, forgets them."""
        self._answer(received.inode, code)
        self._fs.events.announce_name(received.parent, received.name)

    def _closed(self, received: Received, error: LakeError | None) -> None:
        if error is not None:
            log.warning("flush: %s", error)
            self._hold_again(received.inode, received.opener)  # tried again on release, as with any file
        self._answer(received.inode, 0 if error is None else error.errno)

    def _hold_again(self, inode: int, opener: int) -> None:
        number = CREATED | inode
        if self._fs.is_handle(number):
            return
        try:
            self._fs.hold(self._new_files.again(inode), number, opener, closed_by_opener=True)
        except LakeError as error:
            log.info("somebody still has a file open that is gone: %s", error)

    def _answer(self, inode: int, code: int) -> None:
        if self._library is not None:
            self._library.lakefs_answer_close(inode, code)

    # -- directories

    def created(self, file: OpenFile) -> None:
        """Somebody created a file, and the hooks did not do it."""
        parent = file.entry.parent
        count = self._created.pop(parent, 0) + 1
        self._created[parent] = count
        if len(self._created) > CREATED_IN_MAX:
            del self._created[next(iter(self._created))]
        if self._library is None or count < CREATED_BEFORE:
            return
        for_s = self._new_files.lendable_s(file)
        if for_s > 0 and not self._lend(parent, for_s):
            self._created[parent] = 0  # not so soon again

    def _lend(self, directory: int, for_s: float) -> bool:
        assert self._library is not None
        is_new = directory not in self._tree.mirrored
        names = self._new_files.names(directory) if is_new else []
        if names is None:
            return False
        for_ns = int(min(for_s, hooks.LEASE_S_MAX) * 1e9)
        remembered_ns = int(min(self._fs.config.metadata_ttl_s, hooks.LEASE_S_MAX) * 1e9)
        told = b"".join(name + b"\0" for name in names)
        lend, names_bytes_max = self._library.lakefs_lease_names, self._new_files.name_bytes_max(directory)
        if not lend(directory, for_ns, remembered_ns, names_bytes_max):
            self._library.lakefs_revoke_all_names()
            self._tree.mirrored.clear()
            return False
        if is_new and not self._library.lakefs_add_names(directory, told, len(told)):
            self._library.lakefs_revoke_names(directory)
            return False
        self._tree.mirrored.add(directory)
        # The kernel asks for them after each name that is made.
        hooks.cache_attributes(attributes_of(self._fs.entry(directory), self._fs, 0.0), for_s)
        return True

    def _named(self, directory: int, name: bytes) -> None:
        assert self._library is not None
        if not self._library.lakefs_add_names(directory, name + b"\0", len(name) + 1):
            self._tree.drop_mirror(directory)
