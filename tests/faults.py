"""A proxy in front of a real store that fails on command: what a network and a busy store do to requests.

`Faults` relays HTTP requests unchanged and applies the next queued fault to each one that matches. Truncation and
stalls happen in the middle of a body, which HAProxy cannot be told to do. Threads of this process; tests only.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import socketserver
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Literal
from urllib.parse import urlsplit

from tests.servers import Server

Kind = Literal[
    "slow_down", "error_500", "reset", "truncate", "stall", "lose_answer", "corrupt", "flip", "refuse", "forbid",
    "hang", "conflict", "aborted", "odd_409", "gone", "archived",
]  # fmt: skip

PIECE_BYTES = 1 << 18
_HOP = {
    "connection", "keep-alive", "transfer-encoding", "content-length", "expect", "proxy-authorization",
    "proxy-connection",
}  # fmt: skip
_ANSWERS: dict[str, tuple[int, bytes, bytes]] = {
    "slow_down": (503, b"SlowDown", b"Please reduce your request rate."),
    "error_500": (500, b"InternalError", b"We encountered an internal error."),
    "refuse": (400, b"InvalidRequest", b"Checksum type mismatch occurred."),
    "forbid": (403, b"AccessDenied", b"Access Denied."),
    "conflict": (409, b"ConditionalRequestConflict", b"A conflicting operation occurred."),
    "aborted": (409, b"OperationAborted", b"A conflicting operation is in progress."),
    "odd_409": (409, b"ResourceBusy", b"Busy."),
    "gone": (404, b"NoSuchUpload", b"The specified upload does not exist."),
    "archived": (403, b"InvalidObjectState", b"The operation is not valid for the object's storage class"),
}
"""Faults that answer without asking the store."""
_BODY = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>%s</Code><Message>%s</Message></Error>'


@dataclass(slots=True)
class _Fault:
    kind: Kind
    left: int
    method: str | None
    containing: str


class Faults:
    """Controls of one proxy. Every method may be called at any time from any thread.

    ``n`` is how many further requests are hit; ``method`` (as "GET") and ``containing`` (part of the path and query)
    choose which.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.counts: Counter[str] = Counter()
        """Requests seen by method since the start or `clear`, faulty ones included."""
        self.injected: Counter[str] = Counter()
        """Faults that happened, by kind."""
        self.stored: list[str] = []
        """Path and query of each PUT that the store made and whose answer went back, since the start or `clear`."""
        self.bytes_s_max = 0
        """All request bodies together go on to the store no faster; 0 is no limit. Stays as it is with `clear`."""
        self.request_s_max = float("inf")
        """A request whose body takes longer to come is reset. Stays as it is with `clear`."""
        self.bytes_forwarded = 0
        """Of request bodies, since the start or `clear`."""
        self.completes_blindly = False
        """Conditions on completing an upload are left out. Stays as it is with `clear`."""
        self.after_completion: Callable[[], object] = lambda: None
        """Called when the store completed an upload, before that is answered. Stays as it is with `clear`."""
        self._free_at_s = 0.0
        self.released = threading.Event()
        self._upstream = urlsplit(server.url)
        self._lock = threading.Lock()
        self._queue: deque[_Fault] = deque()

    @property
    def upstream(self) -> tuple[str, int]:
        """Where requests go."""
        return str(self._upstream.hostname), int(self._upstream.port or 80)

    def slow_down(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Answer 503 SlowDown, without asking the store."""
        self._add("slow_down", n, method, containing)

    def error_500(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Answer 500 InternalError, without asking the store."""
        self._add("error_500", n, method, containing)

    def refuse(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Answer 400 InvalidRequest, without asking the store."""
        self._add("refuse", n, method, containing)

    def forbid(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Answer 403 AccessDenied, without asking the store."""
        self._add("forbid", n, method, containing)

    def conflict(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Answer 409 ConditionalRequestConflict, without asking the store."""
        self._add("conflict", n, method, containing)

    def aborted(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Answer 409 OperationAborted, without asking the store."""
        self._add("aborted", n, method, containing)

    def odd_409(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Answer 409 with a code that S3 does not know, without asking the store."""
        self._add("odd_409", n, method, containing)

    def gone(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Answer 404 NoSuchUpload, without asking the store."""
        self._add("gone", n, method, containing)

    def archived(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Answer 403 InvalidObjectState, without asking the store."""
        self._add("archived", n, method, containing)

    def reset(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Reset the connection (RST) instead of answering."""
        self._add("reset", n, method, containing)

    def truncate(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Close the connection after half of the answer's body."""
        self._add("truncate", n, method, containing)

    def stall(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Send half of the answer's body, then nothing, until `clear`."""
        self._add("stall", n, method, containing)

    def hang(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Take the request and say nothing, until `clear`; then reset the connection."""
        self._add("hang", n, method, containing)

    def lose_answer(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Let the store do what is asked, then reset the connection: the client cannot know."""
        self._add("lose_answer", n, method, containing)

    def corrupt(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Flip a bit of the first byte of the request's body."""
        self._add("corrupt", n, method, containing)

    def flip(self, n: int = 1, *, method: str | None = None, containing: str = "") -> None:
        """Flip a bit of the byte in the middle of the answer's body."""
        self._add("flip", n, method, containing)

    def clear(self) -> None:
        """No faults from now on, stalled answers go on, counts start again."""
        with self._lock:
            self._queue.clear()
            self.counts.clear()
            self.injected.clear()
            self.stored.clear()
            self.bytes_forwarded = 0
            self.released.set()
            self.released = threading.Event()

    def pass_on(self, count: int) -> None:
        """Wait until so many bytes may go on to the store."""
        with self._lock:
            self.bytes_forwarded += count
        if not self.bytes_s_max:
            return
        with self._lock:
            begin_s = max(self._free_at_s, time.monotonic())
            self._free_at_s = begin_s + count / self.bytes_s_max
        time.sleep(max(0.0, self._free_at_s - time.monotonic()))

    def _add(self, kind: Kind, n: int, method: str | None, containing: str) -> None:
        with self._lock:
            self._queue.append(_Fault(kind, n, method, containing))

    def take(self, method: str, path: str) -> tuple[Kind | None, threading.Event]:
        """The fault of this request, counted; and what a stall waits for."""
        with self._lock:
            self.counts[method] += 1
            for fault in self._queue:
                if fault.method in (None, method) and fault.containing in path:
                    fault.left -= 1
                    if fault.left == 0:
                        self._queue.remove(fault)
                    self.injected[fault.kind] += 1
                    return fault.kind, self.released
        return None, self.released


@contextlib.contextmanager
def faulty(server: Server) -> Iterator[tuple[Server, Faults]]:
    """A proxy in front of ``server``; use the yielded server's URL."""
    faults = Faults(server)

    class Handler(_Relay):
        controls = faults

    with _Proxy(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, name="faults")
        thread.start()
        try:
            yield server.at(f"http://127.0.0.1:{proxy.server_address[1]}"), faults
        finally:
            faults.clear()
            proxy.shutdown()
            thread.join()


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what these tests are about."""


class _Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    controls: Faults

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.settimeout(120)

    def handle_expect_100(self) -> bool:
        """As inherited, but sent at once: a client waits a second for it."""
        self.send_response_only(100)
        self.end_headers()
        self.wfile.flush()
        return True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _relay(self) -> None:
        kind, released = self.controls.take(self.command, self.path)
        length = int(self.headers.get("Content-Length") or 0)
        if kind in _ANSWERS or kind in ("reset", "hang"):
            self._drain(length)
            if kind == "hang":
                released.wait(120)
            if kind in _ANSWERS:
                self._answer(*_ANSWERS[kind])
            else:
                self._reset()
            return
        upstream = http.client.HTTPConnection(*self.controls.upstream, timeout=120)
        try:
            self._forward(upstream, length, corrupt=kind == "corrupt")
            answer = upstream.getresponse()
            if self.command == "POST" and "uploadId=" in self.path:
                self.controls.after_completion()
            if kind == "lose_answer":
                answer.read()
                self._reset()
            else:
                self._return(answer, kind, released)
                if self.command == "PUT" and answer.status == 200:
                    self.controls.stored.append(self.path)
        finally:
            upstream.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay  # noqa: N815  # names that http.server looks for

    def _forward(self, upstream: http.client.HTTPConnection, length: int, *, corrupt: bool) -> None:
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        blind = self.controls.completes_blindly and self.command == "POST" and "uploadId=" in self.path
        for name, value in self.headers.items():
            if name.lower() not in _HOP and not (blind and name.lower() in ("if-match", "if-none-match")):
                upstream.putheader(name, value)
        if length or "Content-Length" in self.headers:
            upstream.putheader("Content-Length", str(length))
        upstream.endheaders()
        end_s = time.monotonic() + self.controls.request_s_max
        while length > 0:
            piece = self.rfile.read(min(PIECE_BYTES, length))
            if not piece:
                raise ConnectionError("the client went away")
            if time.monotonic() > end_s:
                self._reset()
                raise ConnectionError("the request takes too long")
            self.controls.pass_on(len(piece))
            upstream.send(bytes([piece[0] ^ 1]) + piece[1:] if corrupt else piece)
            corrupt = False
            length -= len(piece)

    def _return(self, answer: http.client.HTTPResponse, kind: Kind | None, released: threading.Event) -> None:
        bodiless = self.command == "HEAD" or answer.status in (204, 304)
        body = None if answer.length is not None or bodiless else answer.read()
        length = answer.length if body is None else len(body)
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if self.command == "HEAD":
            length = int(answer.getheader("Content-Length") or 0)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if bodiless:
            self.wfile.flush()
            return
        left = int(length or 0)
        flip_at = left - left // 2 if kind == "flip" else 0
        stop_at = left - left // 2 if kind in ("truncate", "stall") else 0
        while left > stop_at:
            want = min(PIECE_BYTES, left - stop_at)
            piece = body[len(body) - left :][:want] if body is not None else answer.read(want)
            if not piece:
                raise ConnectionError("the store went away")
            if left - len(piece) < flip_at <= left:
                changed = bytearray(piece)
                changed[left - flip_at] ^= 1
                piece = bytes(changed)
            self.wfile.write(piece)
            left -= len(piece)
        self.wfile.flush()
        if kind == "stall":
            released.wait(120)
        if kind in ("truncate", "stall"):
            self.close_connection = True

    def _drain(self, length: int) -> None:
        while length > 0 and (piece := self.rfile.read(min(PIECE_BYTES, length))):
            length -= len(piece)

    def _answer(self, status: int, code: bytes, message: bytes) -> None:
        body = _BODY % (code, message)
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
