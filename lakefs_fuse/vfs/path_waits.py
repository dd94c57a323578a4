"""Waits for names that another node writes: what `lakefs-fuse wait` asks of a mount.

What always holds:

* *waits share questions*: the store is asked by the lookups of `Namespace`, for a name of which what is known is older
  than the TTL, and in each directory by one wait at a time: any number of waits costs the requests of one. Between them
  a wait looks at the tree when an event says that something has changed, and every ``--refresh``;
* *an answer holds for `open`*: a wait ends when each name of the path is known as in a lookup of the kernel, and after
  the kernel was notified.

A wait that is cancelled leaves nothing, and there are no listeners while none waits. Trio thread only.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import trio

from lakefs_fuse.errors import FileError, sole_error
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.namespace.namespace import AWAY, Namespace

LOOK_S_MIN = 0.25
ASKING_LOOK_S_MIN = 0.05
"""Time between two looks of one wait at the tree, however much changes in it, and while the store is asked. 100 waits
in a mount in which something changes all the time take 5 % of a core."""
ANSWER_S_MIN = 1.0
"""Validity of an answer of the store, or ``--refresh`` if that is less, if the TTL is shorter, or a listing is still
used because the store is away."""
ANSWERS_MAX = 4096
NO_VERSION = "it is a directory, which has no version"

Name = tuple[int, bytes]
"""The inode of a directory, and a name in it."""


class Doubt(msgspec.Struct, frozen=True):
    """Why a wait goes on: ``name`` is not what it waits for, or was not asked for within the TTL. What is known of it
    counts for ``fresh_s``."""

    name: Name
    fresh_s: float
    why: str
    is_absent: bool = False


class PathWaits:
    """See the module's head."""

    def __init__(
        self, namespace: Namespace, files: FileTable, version: Callable[[Entry], str | None], refresh_s: float
    ) -> None:
        """``version`` returns what users see as the version of a file, None where its bytes are not in the store."""
        self._ns, self._files, self._version, self._refresh_s = namespace, files, version, refresh_s
        self._changed = trio.Event()
        self._waiting = 0
        self._asking: set[int] = set()
        """Directories in which a wait asks the store, or has found it away."""
        self._answered: dict[Name, float] = {}
        """When the names that are waited for were last asked for."""
        self._trouble = ""

    async def wait(self, path: str, version: str, timeout_s: float | None) -> None:
        """Return when a path, relative to the root, exists or is a file of this version. A symbolic link on the way, or
        at the end, is for the caller to follow: there the wait ends, too.

        Raises FileError: ETIMEDOUT, EISDIR where a version is awaited, and what says that no such name can be. Raises
        LakeError where the store refuses the question for good."""
        names = [name.encode() for name in path.split("/")] if path else []
        if version and not names:
            raise FileError(errno.EISDIR, NO_VERSION)
        doubts: dict[tuple[Name, bool], Doubt] = {}
        with self._listening(), trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            if self._find_doubt(names, version) is not None:
                try:
                    async with trio.open_nursery() as nursery:
                        await self._resolve(names, version, doubts, nursery)
                        nursery.cancel_scope.cancel()
                except BaseExceptionGroup as group:
                    raise sole_error(group) from None
            await self._tell_kernel([name for name, is_absent in doubts if is_absent])
            return
        why = next((doubt.why for doubt in reversed(doubts.values())), "the kernel is not notified yet")
        trouble = f", and the store does not answer: {self._trouble}" if self._trouble else ""
        raise FileError(errno.ETIMEDOUT, f"after {timeout_s:g} s {why}{trouble}")

    async def _resolve(
        self, names: Sequence[bytes], version: str, doubts: dict[tuple[Name, bool], Doubt], nursery: trio.Nursery
    ) -> None:
        """Return when there is no doubt; ``doubts`` are those that there were, the newest last."""
        while True:
            self._ns.idleness.note_question()
            changed, doubt = self._changed, self._find_doubt(names, version)
            if doubt is None:
                return
            doubts.pop((doubt.name, doubt.is_absent), None)
            doubts[doubt.name, doubt.is_absent] = doubt
            if not doubt.fresh_s and doubt.name[0] not in self._asking:
                self._asking.add(doubt.name[0])
                nursery.start_soon(self._ask, doubt.name)
            await trio.sleep(LOOK_S_MIN if doubt.fresh_s else ASKING_LOOK_S_MIN)
            with trio.move_on_after(min(doubt.fresh_s or self._refresh_s, self._refresh_s)):
                await changed.wait()

    def _find_doubt(self, names: Sequence[bytes], version: str) -> Doubt | None:
        """The first name of a path that is not there, or not known to be; None where all is as it is waited for."""
        for listener in self._ns.events.names_requested:
            listener()
        inode = ROOT_INODE
        for number, name in enumerate(names, 1):
            entry = self._ns.tree.child(inode, name)
            fresh_s = self._fresh_s(inode, name)
            if entry is None:
                self._ns.keys.checked_path(inode, name)
                return Doubt((inode, name), fresh_s, "it does not exist", is_absent=True)
            if not fresh_s and not self._files.is_dirty(entry):
                return Doubt((inode, name), 0.0, "the store has not told yet whether it exists")
            if entry.is_symlink:
                return None
            if number < len(names) and not entry.is_dir:
                return Doubt((inode, name), fresh_s, "it does not exist")
            if number == len(names) and version:
                if entry.is_dir:
                    raise FileError(errno.EISDIR, NO_VERSION)
                found = self._version(entry)
                if found != version:
                    why = "its bytes are not in the store" if found is None else f"its version is {found}"
                    return Doubt((inode, name), fresh_s, why)
            inode = entry.inode
        return None

    def _fresh_s(self, directory: int, name: bytes) -> float:
        """For how many seconds what is known of a name counts."""
        ends_s = self._answered.get((directory, name), -math.inf) + min(ANSWER_S_MIN, self._refresh_s)
        fresh_s = self._ns.name_fresh_s(directory, name, within_ttl=True)
        return max(fresh_s, ends_s - trio.current_time(), 0.0)

    async def _ask(self, name: Name) -> None:
        """Look a name up, for all waits. Raises LakeError, unless the store is away."""
        try:
            await self._ns.lookup(*name, within_ttl=True)
            if len(self._answered) >= ANSWERS_MAX:
                self._answered.clear()
            self._answered[name], self._trouble = trio.current_time(), ""
        except AWAY as error:
            self._trouble = str(error)
            await trio.sleep(self._refresh_s)
        finally:
            self._asking.discard(name[0])
            self._wake()

    async def _tell_kernel(self, absent: Sequence[Name]) -> None:
        """The kernel does not remember that these names were absent when this returns. They are invalidated once
        more, because a lookup that finds a name in a directory that was never listed invalidates nothing."""
        for listener in self._ns.events.kernel_told:
            await listener()
        for name in absent:
            self._ns.invalidate_name(*name)
        for listener in self._ns.events.kernel_told:
            await listener()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Listen to changes while at least one wait is in progress."""
        events = self._ns.events
        listened = (
            events.name_changed, events.commit_applied, events.directory_updated, events.version_stored,
            events.path_renamed,
        )  # fmt: skip
        if not self._waiting:
            for listeners in listened:
                listeners.append(self._wake)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                for listeners in listened:
                    listeners.remove(self._wake)
                self._answered.clear()

    def _wake(self, *_: object) -> None:
        self._changed.set()
        self._changed = trio.Event()
