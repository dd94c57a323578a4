"""Requests that wait for the store, and the end of the wait for a program that is being killed.

The kernel announces a signal of a waiting program at most once (FUSE_INTERRUPT), and not which one; a program with
timers or child processes would get EINTR for nothing. So this module asks /proc: once a second, which of the threads
whose requests have waited for OLD_S are being killed, by SIGKILL or by any signal that they do not handle, or have to
handle SIGINT or SIGQUIT. The reply to such a request is EINTR. What always holds:

* *Operations are whole*: nothing is cancelled. The handler of an interrupted request goes on to its end, as if the
  program still waited, and its result is dropped. The changes of `confirm` are not made.
* *What a kernel lock excluded stays excluded*: the kernel locks directories while a request changes names in them, and
  unlocks them with the reply. Until the handler has ended, requests that change names in the same directories wait
  (`wait_unlocked`), and so does the release of a handle that it uses (`wait_handle_unused`).
* *No name is outdated*: the names that an interrupted request has changed are invalidated when its handler ends.

A request whose handler never waits is not registered; one that waits in the C library is (`watch`). `run` sleeps while
none waits. Needs request_loop.c; without the library, and for programs in another pid namespace, every request waits
for its reply. Trio thread only; a crash leaves nothing.
"""

from __future__ import annotations

import errno
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
import pyfuse3
import trio

OLD_S = 1.0
"""A request that has waited for so long is examined. Most calls end earlier, and then nothing reads /proc."""
EXAMINE_S = 1.0
INTERRUPTED_MAX = 256
"""Maximum of interrupted requests whose handlers go on, so that programs that are started and killed repeatedly leave
tasks (`session.TASKS_MAX`) for others. Beyond it requests wait for their reply."""
THREADS_MAX = 1024
"""Maximum of threads in `WaitingRequests._ending`."""
_KILL = 1 << signal.SIGKILL - 1
_KEYBOARD = 1 << signal.SIGINT - 1 | 1 << signal.SIGQUIT - 1
RENAMES = 0
"""Stands for the lock that the kernel takes for a rename between directories; no inode has this number."""
log = logging.getLogger(__name__)


class Ends(Enum):
    """What ends the wait of a program for the reply to its request."""

    REPLY = auto()
    """The reply alone: the kernel would not know what the request has changed, such as the size of a file."""
    KILL = auto()
    """Also a signal that kills the program. A page fault sends READ, and for its error a program gets SIGBUS instead of
    a signal that it handles."""
    KEYBOARD = auto()
    """Also SIGINT and SIGQUIT, if it handles them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request. ``parents`` are the positions of the directories in which it changes a name, which is the
    argument after each. ``by_handle``: its first argument is the handle of a file."""

    name: str
    ends: Ends = Ends.KEYBOARD
    parents: tuple[int, ...] = ()
    by_handle: bool = False


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request whose handler waits."""

    kind: Kind
    arguments: tuple[object, ...]
    waiter: trio.lowlevel.Task | None
    """None: no task has it (`WaitingRequests.watch`)."""
    unique: int
    thread: int
    since_s: float
    is_interrupted: bool = False
    locked: tuple[int, ...] = ()
    """Directories that the kernel has unlocked, and the handler still changes."""


class WaitingRequests:
    """All of a session; see the module's head."""

    def __init__(
        self,
        invalidate_name: Callable[[int, bytes], object],
        inode_of: Callable[[int, bytes], int],
        *,
        origin: hooks.RequestOrigin | None = None,
        interrupt: Callable[[int], bool] = hooks.interrupt_request,
        end_of: Callable[[int], Ends] | None = None,
    ) -> None:
        """``inode_of`` returns the inode of the directory of a name, or 0. The others are for tests: the origin of the
        request being handled, what replies to one, and `end_of_thread`."""
        self._origin = origin or hooks.request_origin()
        self._invalidate_name, self._inode_of = invalidate_name, inode_of
        self._interrupt, self._end_of = interrupt, end_of or end_of_thread
        self._waiting: dict[trio.lowlevel.Task | WaitingRequest, WaitingRequest] = {}
        """By their tasks; what no task has by itself."""
        self._interrupted: dict[WaitingRequest, None] = {}
        self._begun, self._urgent = trio.Event(), trio.Event()
        self._changed = trio.Event()
        """A request was interrupted, or the handler of an interrupted one has ended."""
        self._ending: dict[int, None] = {}
        """Threads that a signal was ending when last examined, the oldest first. Their further requests are examined as
        soon as they wait: a program may have hundreds of files to close."""
        self.interrupted = 0
        """Number of requests interrupted so far."""

    # -- called by handlers

    def add(self, kind: Kind, arguments: tuple[object, ...]) -> WaitingRequest | None:
        """Register the request of this task, whose handler is about to wait. Ended by `remove`."""
        if kind.ends is Ends.REPLY:
            return None
        return self._register(kind, arguments, trio.lowlevel.current_task(), self._origin.unique, self._origin.thread)

    def watch(self, kind: Kind, arguments: tuple[object, ...], unique: int, thread: int) -> WaitingRequest | None:
        """Register a request that waits outside any handler. Ended by `remove`."""
        return self._register(kind, arguments, None, unique, thread)

    def _register(
        self, kind: Kind, arguments: tuple[object, ...], waiter: trio.lowlevel.Task | None, unique: int, thread: int
    ) -> WaitingRequest | None:
        if not unique or not thread:
            return None
        request = WaitingRequest(kind, arguments, waiter, unique, thread, trio.current_time())
        self._waiting[waiter or request] = request
        self._begun.set()
        if thread in self._ending:
            self._urgent.set()
        return request

    def remove(self, request: WaitingRequest) -> bool:
        """What the request waited for has ended; return whether it was interrupted."""
        self._waiting.pop(request.waiter or request, None)
        request.unique = 0
        if request.is_interrupted:
            del self._interrupted[request]
            for parent, name in _names(request):
                self._invalidate_name(parent, name)
            self._announce_change()
        return request.is_interrupted

    @property
    def is_any_interrupted(self) -> bool:
        """Return whether handlers of interrupted requests go on."""
        return bool(self._interrupted)

    def is_interrupted(self) -> bool:
        """Return whether the request of this task was interrupted, so that its result is not used."""
        if not self._interrupted:
            return False
        request = self._waiting.get(trio.lowlevel.current_task())
        return request is not None and request.is_interrupted

    def refuse_interrupted(self) -> None:
        """Raise FUSEError(EINTR) if the request of this task was interrupted."""
        if self.is_interrupted():
            raise pyfuse3.FUSEError(errno.EINTR)

    def confirm(self) -> None:
        """As `refuse_interrupted`. From now on the request is not interrupted: the handler is about to make a change
        that the kernel must know of."""
        self.refuse_interrupted()
        request = self._waiting.get(trio.lowlevel.current_task())
        if request is not None:
            request.unique = 0
        else:  # it has not waited yet
            self._origin.unique = 0

    async def wait_unlocked(self, kind: Kind, arguments: tuple[object, ...]) -> None:
        """Wait until no handler of an interrupted request changes the directories of this one. Raises FUSEError(EINTR)
        if this one is interrupted meanwhile: interrupted requests do not wait for each other."""
        wanted = _directories(kind, arguments)
        while True:
            self.refuse_interrupted()
            if all(wanted.isdisjoint(request.locked) for request in self._interrupted):
                return
            await self._changed.wait()

    def _announce_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_handle_unused(self, handle: int) -> None:
        """Wait until no handler of an interrupted request uses the handle of a file."""
        while any(request.kind.by_handle and request.arguments[0] == handle for request in self._interrupted):
            await self._changed.wait()

    # -- the examination

    async def run(self) -> None:
        """Interrupt the requests of programs that are being killed, until cancelled."""
        while True:
            if not self._waiting:
                self._begun = trio.Event()
                await self._begun.wait()
            with trio.move_on_after(EXAMINE_S):
                await self._urgent.wait()
            self._urgent = trio.Event()
            await self._examine()

    async def _examine(self) -> None:
        ends: dict[int, Ends] = {}
        for request in list(self._waiting.values()):
            if not self._is_due(request):
                continue
            if request.thread not in ends:
                ends[request.thread] = self._end_of(request.thread)
                self._remember(request.thread, is_ending=ends[request.thread] is not Ends.REPLY)
                await trio.lowlevel.checkpoint()
            if self._is_due(request) and _ends(request.kind.ends, ends[request.thread]):
                self._interrupt_request(request)

    def _is_due(self, request: WaitingRequest) -> bool:
        """Return whether a request is to be examined; False for one that `remove` or `confirm` was called for."""
        is_old = trio.current_time() - request.since_s >= OLD_S or request.thread in self._ending
        return is_old and request.unique != 0 and not request.is_interrupted

    def _remember(self, thread: int, *, is_ending: bool) -> None:
        self._ending.pop(thread, None)
        if is_ending:
            self._ending[thread] = None
            if len(self._ending) > THREADS_MAX:
                del self._ending[next(iter(self._ending))]

    def _interrupt_request(self, request: WaitingRequest) -> None:
        if len(self._interrupted) >= INTERRUPTED_MAX or not self._interrupt(request.unique):
            return
        request.is_interrupted = True
        self._interrupted[request] = None
        named = (self._inode_of(parent, name) for parent, name in _names(request))
        request.locked = (*_directories(request.kind, request.arguments), *(inode for inode in named if inode))
        self.interrupted += 1
        self._announce_change()
        log.info("%s of thread %d, which is being killed, goes on without it", request.kind.name, request.thread)


def _names(request: WaitingRequest) -> list[tuple[int, bytes]]:
    """Return the names that a request changes, with their directories."""
    arguments = request.arguments
    return [(arguments[at], arguments[at + 1]) for at in request.kind.parents]  # type: ignore[misc]


def _directories(kind: Kind, arguments: tuple[object, ...]) -> set[int]:
    """Return the directories that the kernel locks for a request."""
    found: set[int] = {arguments[at] for at in kind.parents}  # type: ignore[misc]
    return found | {RENAMES} if len(found) > 1 else found


def _ends(sufficient: Ends, found: Ends) -> bool:
    return found is not Ends.REPLY and (found is Ends.KILL or sufficient is Ends.KEYBOARD)


def end_of_thread(thread: int) -> Ends:
    """Return what is ending a thread that waits for a reply. A signal that a process does not handle reaches each of
    its threads as SIGKILL, except those with a core dump. A thread that was killed closes the files of its process
    after it has received the signal."""
    status = hooks.status_of(thread)
    try:
        private, shared, blocked = (int(hooks.field_of(status, name), 16) for name in (b"SigPnd", b"ShdPnd", b"SigBlk"))
    except ValueError:  # it has ended
        return Ends.REPLY
    pending = private | shared
    if pending & _KILL:
        return Ends.KILL
    if pending & ~blocked & _KEYBOARD:
        return Ends.KEYBOARD
    is_exiting = not hooks.field_of(status, b"VmSize")  # its memory is given up before its files are closed
    return Ends.KILL if is_exiting and hooks.killed_by(thread) else Ends.REPLY
