"""A server that gives recorded answers, mostly one to every request, as a store that fails does. Threads of this
process."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """What an HTTP server sends back; HEAD gets it without the body."""

    status: int
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    kind: str = "application/xml"


@contextlib.contextmanager
def answering(answers: Answer | Callable[[str], Answer], certificate: tuple[Path, Path] | None = None) -> Iterator[int]:
    """The port of a server of one answer, or of one for each method; with a certificate and its key it speaks TLS
    only."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = answers if isinstance(answers, Answer) else answers(self.command)
            body = answer.body.encode()
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Type": answer.kind}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815  # names that http.server looks for

        def log_message(self, format: str, *args: object) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that refuses the certificate is what is tested."""

    with Server(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="recorded")
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
