"""A reverse proxy in front of a store that keeps the headers of each request. Threads of this process."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.servers import Server


@dataclass(frozen=True)
class Request:
    """A request as it arrived; names of headers in lower case."""

    method: str
    path: str
    """With its query."""
    headers: Mapping[str, str]

    @property
    def client(self) -> str:
        """Which HTTP client sent it, by its User-Agent: ``boto3``, ``obstore``, or ``list`` for a page of a listing."""
        agent = self.headers.get("user-agent", "").lower()
        return "boto3" if "boto3" in agent else "obstore" if "object_store" in agent else "list"


Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


class Recorder:
    """The requests so far, and what is answered in place of the store."""

    def __init__(self, server: Server) -> None:
        self.server = server
        """The store by way of this proxy."""
        self.requests: list[Request] = []
        self.refuses: Callable[[Request], Answer | None] = lambda request: None


@contextlib.contextmanager
def recording(upstream: Server) -> Iterator[Recorder]:
    """A proxy in front of ``upstream``."""
    address = urlsplit(upstream.url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers)
            recorder.requests.append(request)
            self._send(*(recorder.refuses(request) or self._ask_store(body, headers)))

        def _ask_store(self, body: bytes, headers: dict[str, str]) -> Answer:
            connection = http.client.HTTPConnection(address, timeout=20)
            try:
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()
            finally:
                connection.close()

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            size = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", size)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815  # names that http.server looks for

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        recorder = Recorder(upstream.at(f"http://127.0.0.1:{proxy.server_address[1]}"))
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, name="recording")
        thread.start()
        try:
            yield recorder
        finally:
            proxy.shutdown()
            thread.join()
