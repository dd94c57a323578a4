"""Requests of programs that are being killed: the program gets EINTR, and the handler goes on."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from lakefs_fuse.kernel.operations import Sleeper, upcall  # isort: skip  (before pyfuse3)
import pyfuse3
import trio
import trio.testing
from trio.testing import MockClock

from lakefs_fuse.kernel.native import hooks
from lakefs_fuse.kernel.waiting_requests import INTERRUPTED_MAX, Ends, WaitingRequests, end_of_thread
from lakefs_fuse.meta.barrier import Barrier

DIRECTORIES = {(1, b"sub"): 5}
SOON_S = 2.5
"""A signal is noticed within this time: a request must be old, and comes at any time between two examinations."""


class Awake:
    is_idle = False

    async def wake(self) -> None:
        pass


class Mount:
    """Handlers that wait until the test lets them go on, and threads that the test kills."""

    def __init__(self) -> None:
        self._origin = hooks.RequestOrigin()
        self.upcalls: dict[str, int] = Counter()
        self.waiting: list[Callable[[], None]] = []
        self.idleness: Sleeper = Awake()
        self.barrier = Barrier(lambda _: None, lambda _: None)
        self.ends: dict[int, Ends] = {}
        self.examined = Counter[int]()
        self.interrupted: list[int] = []
        self.invalidated: list[tuple[int, bytes]] = []
        self.done: list[str] = []
        self.go_on = trio.Event()
        self.requests = WaitingRequests(
            lambda parent, name: self.invalidated.append((parent, name)),
            lambda parent, name: DIRECTORIES.get((parent, name), 0),
            origin=self._origin,
            interrupt=self._interrupt,
            end_of=self._end_of,
        )
        self.results: dict[int, int] = {}

    def _interrupt(self, unique: int) -> bool:
        self.interrupted.append(unique)
        return True

    def _end_of(self, thread: int) -> Ends:
        self.examined[thread] += 1
        return self.ends.get(thread, Ends.REPLY)

    async def send(self, number: int, handler: Callable[..., object], *arguments: object, thread: int = 0) -> None:
        """Send a request as a thread of this number; its errno is in ``results`` when its handler has ended."""
        self._origin.unique, self._origin.thread = number, thread or number
        try:
            await handler(*arguments)  # type: ignore[misc]
        except pyfuse3.FUSEError as error:
            self.results[number] = error.errno
        else:
            self.results[number] = 0

    async def _work(self, name: str) -> None:
        await self.go_on.wait()
        self.done.append(name)

    @upcall("lookup")
    async def lookup(self, parent: int, name: bytes) -> None:
        await self._work("lookup")

    @upcall("read", ends=Ends.KILL, by_handle=True)
    async def read(self, handle: int) -> None:
        await self._work("read")

    @upcall("flush", by_handle=True)
    async def flush(self, handle: int) -> None:
        await self._work("flush")

    @upcall("write", ends=Ends.REPLY)
    async def write(self, handle: int) -> None:
        await self._work("write")

    @upcall("release", ends=Ends.REPLY)
    async def release(self, handle: int) -> None:
        await self.requests.wait_handle_unused(handle)
        self.done.append(f"release {handle}")

    @upcall("mkdir", parents=(0,))
    async def mkdir(self, parent: int, name: bytes) -> None:
        await self._work(f"mkdir {name.decode()}")

    @upcall("rename", parents=(0, 2))
    async def rename(self, parent: int, name: bytes, parent_new: int, name_new: bytes) -> None:
        await self._work(f"rename {name.decode()}")

    @upcall("setattr")
    async def setattr(self, waits: bool) -> None:
        if waits:
            await self._work("asked")
        self.requests.confirm()
        await self._work("set")


@pytest.fixture
def mount() -> Mount:
    return Mount()


async def test_interrupted_request_is_answered_and_its_handler_ends(autojump_clock: MockClock, mount: Mount) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.requests.run)
        for number in (1, 2, 3):
            nursery.start_soon(mount.send, number, mount.lookup, 1, b"a")
            await trio.testing.wait_all_tasks_blocked()
        mount.ends |= {1: Ends.KILL, 2: Ends.KEYBOARD}
        await trio.sleep(0.9)
        assert not mount.examined, "calls that end within a second are not examined"
        await trio.sleep(SOON_S)
        assert sorted(mount.interrupted) == [1, 2]
        assert mount.done == []
        mount.go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert mount.done == ["lookup"] * 3
        assert mount.results == {1: errno.EINTR, 2: errno.EINTR, 3: 0}
        assert not mount.requests.is_any_interrupted
        examined = dict(mount.examined)
        await trio.sleep(10)
        assert mount.examined == examined, "no request waits"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("handler", "end"), [("read", Ends.KEYBOARD), ("write", Ends.KILL)])
async def test_request_that_its_signal_may_not_interrupt_waits(
    autojump_clock: MockClock, mount: Mount, handler: str, end: Ends
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.requests.run)
        mount.ends[1] = end
        nursery.start_soon(mount.send, 1, getattr(mount, handler), 7)
        await trio.sleep(2 * SOON_S)
        assert mount.interrupted == []
        mount.go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert mount.results == {1: 0}
        nursery.cancel_scope.cancel()


async def test_changes_in_the_directories_of_an_interrupted_one_wait_for_it(
    autojump_clock: MockClock, mount: Mount
) -> None:
    """As they did while the kernel had them locked."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.requests.run)
        mount.ends[1] = Ends.KILL
        nursery.start_soon(mount.send, 1, mount.rename, 1, b"sub", 2, b"new")
        await trio.sleep(SOON_S)
        assert mount.interrupted == [1]
        held = mount.go_on
        mount.go_on = trio.Event()
        mount.go_on.set()
        waiting = [(1, b"a"), (2, b"a"), (5, b"below what is renamed")]
        for number, (parent, name) in enumerate(waiting, 2):
            nursery.start_soon(mount.send, number, mount.mkdir, parent, name)
        nursery.start_soon(mount.send, 5, mount.rename, 3, b"x", 4, b"x")
        nursery.start_soon(mount.send, 6, mount.rename, 3, b"y", 3, b"z")
        nursery.start_soon(mount.send, 7, mount.mkdir, 3, b"free")
        nursery.start_soon(mount.send, 8, mount.lookup, 1, b"a")
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(mount.results) == [6, 7, 8]
        assert mount.invalidated == []
        held.set()
        await trio.testing.wait_all_tasks_blocked()
        assert mount.results == {1: errno.EINTR} | dict.fromkeys(range(2, 9), 0)
        assert mount.invalidated == [(1, b"sub"), (2, b"new")]
        nursery.cancel_scope.cancel()


async def test_interrupted_changes_that_wait_for_another_end_without_effect(
    autojump_clock: MockClock, mount: Mount
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.requests.run)
        mount.ends |= dict.fromkeys((1, 2, 3), Ends.KILL)
        for number in (1, 2, 3):
            nursery.start_soon(mount.send, number, mount.mkdir, 1, b"%d" % number)
            await trio.sleep(SOON_S)
        assert mount.interrupted == [1, 2, 3]
        assert mount.results == {2: errno.EINTR, 3: errno.EINTR}
        mount.go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert mount.done == ["mkdir 1"]
        nursery.cancel_scope.cancel()


async def test_handle_of_an_interrupted_request_is_released_when_its_handler_has_ended(
    autojump_clock: MockClock, mount: Mount
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.requests.run)
        mount.ends[1] = Ends.KILL
        nursery.start_soon(mount.send, 1, mount.flush, 7)
        await trio.sleep(SOON_S)
        for number, handle in ((2, 7), (3, 8)):
            nursery.start_soon(mount.send, number, mount.release, handle)
        await trio.testing.wait_all_tasks_blocked()
        assert mount.done == ["release 8"]
        mount.go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert mount.done == ["release 8", "flush", "release 7"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("waits", [True, False])
async def test_confirmed_request_is_not_interrupted(autojump_clock: MockClock, mount: Mount, waits: bool) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.requests.run)
        nursery.start_soon(mount.send, 1, mount.setattr, waits)
        await trio.testing.wait_all_tasks_blocked()
        asked, mount.go_on = mount.go_on, trio.Event()
        if waits:
            asked.set()
            await trio.testing.wait_all_tasks_blocked()
        mount.ends[1] = Ends.KILL
        await trio.sleep(SOON_S)
        assert mount.interrupted == []
        (mount.go_on if waits else asked).set()
        await trio.testing.wait_all_tasks_blocked()
        assert mount.results == {1: 0}
        nursery.cancel_scope.cancel()


async def test_request_interrupted_before_it_is_confirmed_changes_nothing(
    autojump_clock: MockClock, mount: Mount
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.requests.run)
        mount.ends[1] = Ends.KILL
        nursery.start_soon(mount.send, 1, mount.setattr, True)
        await trio.sleep(SOON_S)
        mount.go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert mount.results == {1: errno.EINTR}
        assert mount.done == ["asked"]
        nursery.cancel_scope.cancel()


async def test_further_requests_of_a_killed_thread_are_interrupted_immediately(
    autojump_clock: MockClock, mount: Mount
) -> None:
    """It closes all files of its process."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.requests.run)
        mount.ends[1] = Ends.KILL
        for number in range(1, 100):
            nursery.start_soon(partial(mount.send, number, mount.flush, number, thread=1))
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(SOON_S if number == 1 else 0.001)
        assert mount.interrupted == list(range(1, 100))
        nursery.cancel_scope.cancel()


async def test_interrupted_requests_are_bounded(autojump_clock: MockClock, mount: Mount) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.requests.run)
        mount.ends |= dict.fromkeys(range(1, INTERRUPTED_MAX + 10), Ends.KILL)
        for number in mount.ends:
            nursery.start_soon(mount.send, number, mount.lookup, 1, b"a")
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(SOON_S)
        assert len(mount.interrupted) == INTERRUPTED_MAX
        mount.go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert Counter(mount.results.values()) == {errno.EINTR: INTERRUPTED_MAX, 0: 9}
        nursery.cancel_scope.cancel()


CHILD = """
import signal, time
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGURG):
    signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGQUIT])
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def stopped_child() -> Iterator[subprocess.Popen[str]]:
    """A process that handles no signal until it ends."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGSTOP)
            status = Path(f"/proc/{child.pid}/status")
            while "State:\tT" not in status.read_text():
                pass
            yield child
        finally:
            child.kill()


def test_end_of_thread_only_the_keyboard_interrupts_a_program_that_handles_signals() -> None:
    with stopped_child() as child:
        for number in (signal.SIGALRM, signal.SIGURG, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(number)
            assert end_of_thread(child.pid) is Ends.REPLY, number
        child.send_signal(signal.SIGQUIT)
        assert end_of_thread(child.pid) is Ends.REPLY, "the signal is blocked"
        child.send_signal(signal.SIGINT)
        assert end_of_thread(child.pid) is Ends.KEYBOARD
    assert end_of_thread(child.pid) is Ends.REPLY, "the thread has ended"
