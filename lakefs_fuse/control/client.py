"""The client of the control socket: blocking calls, with a bound on the time in which the daemon is silent.

Called from one thread. A connection holds no state; closing it during a request harms nothing. A connection on which
the daemon was silent for too long is closed, because its late reply would be mistaken for that of the next request.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from lakefs_fuse.control import protocol
from lakefs_fuse.control.runtime import client_socket_paths
from lakefs_fuse.errors import LakeError
from lakefs_fuse.metrics import Unfinished

CONNECT_S_MAX = 5.0
CONNECT_CHECK_S = 0.02
"""Time between two tries while the queue of connections is full."""
SILENCE_S_MAX = 30.0
"""A working daemon sends a line a second or more; one that is silent for this time hangs."""


Expected = TypeVar("Expected")


class ControlClient:
    """One connection to the daemon of ``mountpoint``."""

    def __init__(self, connection: socket.socket, mountpoint: str, *, silence_s_max: float = SILENCE_S_MAX) -> None:
        self._socket = connection
        self._socket.settimeout(silence_s_max)
        self._silence_s_max = silence_s_max
        self._mountpoint = mountpoint
        self._buffer = bytearray()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, self.uid, _ = struct.unpack("3i", credentials)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def call(self, request: protocol.Request) -> protocol.Reply:
        """Send ``request``, and return the reply. Raises LakeError with the message of the daemon if it failed, and if
        its version does not know the request."""
        self._send(request)
        reply = self._receive()
        if isinstance(reply, protocol.Failed) and reply.message.startswith(protocol.UNKNOWN_REQUEST):
            raise LakeError(
                f"the daemon of {self._mountpoint} is of an earlier version, which does not know this request: unmount "
                "it and mount it again"
            )
        if isinstance(reply, protocol.Failed):
            raise LakeError(reply.message)
        return reply

    def statistics(self) -> dict[str, object]:
        """The values of ``stats --json``."""
        return _expect(protocol.Statistics, self.call(protocol.Stats())).values

    def unfinished(self) -> protocol.UnfinishedFiles:
        """Files whose bytes are not all in the store."""
        return _expect(protocol.UnfinishedFiles, self.call(protocol.ListUnfinished()))

    def orphans(self) -> list[Unfinished]:
        """Files that are kept until they are finished or aborted, oldest first; all of them."""
        found, count = list[Unfinished](), 1
        while len(found) < count:
            listed = _expect(protocol.UnfinishedFiles, self.call(protocol.ListUnfinished(True, len(found))))
            found, count = found + list(listed.files), listed.count if listed.files else 0
        return found

    def hello(self) -> protocol.Hello:
        """The identity and stage of the daemon."""
        return _expect(protocol.Hello, self.call(protocol.Ping()))

    def store(self) -> protocol.StoreOf:
        """The mounted lake and the settings of its store."""
        return _expect(protocol.StoreOf, self.call(protocol.GetStore()))

    def select(self, paths: Iterable[tuple[str, str]]) -> None:
        """Name the paths that the next request about the cache is for, with their globs. Raises LakeError."""
        some, size = list[tuple[str, str]](), 0
        for each in paths:
            length = len(protocol.encode(protocol.SelectPaths((each,))))
            if size + length > protocol.REQUEST_BYTES_MAX:
                self.call(protocol.SelectPaths(tuple(some)))
                some, size = [], 0
            some.append(each)
            size += length
        if some:
            self.call(protocol.SelectPaths(tuple(some)))

    def follow(
        self,
        request: protocol.MakeDurable
        | protocol.WaitEnd
        | protocol.Refresh
        | protocol.Clone
        | protocol.FinishOrphan
        | protocol.AbortOrphan
        | protocol.WaitPath
        | protocol.CacheRequest,
    ) -> Iterator[protocol.Reply]:
        """Send a request before returning; `Progress` replies, then one other, which ends the iteration."""
        self._send(request)
        return self._replies()

    def _replies(self) -> Iterator[protocol.Reply]:
        while True:
            reply = self._receive()
            yield reply
            if not isinstance(reply, protocol.Progress):
                return

    def _send(self, request: protocol.Request) -> None:
        line = protocol.encode(request)
        if len(line) > protocol.REQUEST_BYTES_MAX:
            raise LakeError("the path is too long for a control request: use a shorter one")
        try:
            self._socket.sendall(line)
        except TimeoutError as error:
            raise self._hangs() from error
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> protocol.Reply:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > protocol.REPLY_BYTES_MAX:
                raise LakeError(
                    f"the daemon of {self._mountpoint} sends an endless line: is it of another version? Mount again"
                )
            try:
                received = self._socket.recv(1 << 16)
            except TimeoutError as error:
                raise self._hangs() from error
            except OSError as error:
                raise self._gone() from error
            if not received:
                raise self._gone()
            self._buffer += received
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return protocol.decode_reply(line)

    def _hangs(self) -> LakeError:
        self._socket.close()
        return LakeError(
            f"the daemon of {self._mountpoint} (pid {self.pid}) has not answered for {self._silence_s_max:g} s: "
            f"see its log; `lakefs-fuse umount --lazy {self._mountpoint}` detaches the mount"
        )

    def _gone(self) -> LakeError:
        return LakeError(f"the daemon of {self._mountpoint} (pid {self.pid}) ended in mid-answer: see its log")


def _expect(kind: type[Expected], reply: protocol.Reply) -> Expected:
    if not isinstance(reply, kind):
        raise LakeError(f"the daemon answered {type(reply).__name__} where {kind.__name__} was asked")
    return reply


def connect(mountpoint: str, *, owner: int | None = None, silence_s_max: float = SILENCE_S_MAX) -> ControlClient | None:
    """A connection to the daemon of a real mountpoint; None if none answers.

    ``owner`` is the user of the daemon (by default this one). Raises LakeError where a daemon accepts no connection.
    """
    uid = os.geteuid() if owner is None else owner
    for path in client_socket_paths(mountpoint, uid):
        connection = _connect_one(path, mountpoint)
        if connection is None:
            continue
        client = ControlClient(connection, mountpoint, silence_s_max=silence_s_max)
        if client.uid == uid:
            return client
        connection.close()
    return None


def _connect_one(path: Path, mountpoint: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_S_MAX)
    try:
        _wait_connected(connection, path)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except TimeoutError as error:
        connection.close()
        raise LakeError(
            f"the daemon of {mountpoint} accepts no control connection: "
            f"`lakefs-fuse umount --lazy {mountpoint}` detaches the mount"
        ) from error
    except OSError as error:
        connection.close()
        raise LakeError(f"control socket {path}: {error.strerror or error}") from error
    return connection


def _wait_connected(connection: socket.socket, path: Path) -> None:
    """Connect. Raises TimeoutError, also where the queue of connections stays full, which connect(2) does not wait for,
    and OSError."""
    deadline_s = time.monotonic() + CONNECT_S_MAX
    while True:
        try:
            connection.connect(os.fspath(path))
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError from None
        else:
            return
        time.sleep(CONNECT_CHECK_S)
