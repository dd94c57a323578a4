"""A forward proxy, as ``http_proxy`` and ``https_proxy`` name one, that records what goes through it.

Whatever host a request is for, it goes to one server. Clients that are given a host that does not exist therefore reach
the server through the proxy alone. Threads of this process; tests only.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults import Faults, _Proxy, _Relay
from tests.servers import Server

HOST = "lake.invalid"
USER, PASSWORD = "proxy-user", "proxy:p@ss"
"""The password holds what a URL has to quote."""


class ForwardProxy:
    """``urls`` are what was asked for in the form in which it was, as ``PUT http://host/key`` or ``CONNECT host:443``;
    ``refused`` counts requests without the password; ``faults`` control what is passed on."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.url = self.url_with_password = ""
        self.urls: list[str] = []
        self.refused = 0

    def asked(self, *parts: str) -> int:
        """How many requests there were that contain all of these."""
        return sum(all(part in url for part in parts) for url in list(self.urls))


@contextlib.contextmanager
def forward_proxy(server: Server, *, tunnel_to: int = 0, password: bool = False) -> Iterator[ForwardProxy]:
    """Absolute URLs go to ``server``, tunnels to this port of the loopback."""
    seen = ForwardProxy(Faults(server))
    due = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(_Relay):
        controls = seen.faults

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            if password and self.headers.get("Proxy-Authorization") != due:
                seen.refused += 1
                self.close_connection = True
                self.send_error(407)
                return False
            seen.urls.append(f"{self.command} {self.path}")
            if self.command != "CONNECT":
                self.path = "/" + self.path.partition("://")[2].partition("/")[2]
            return True

        def do_CONNECT(self) -> None:  # noqa: N802  # a name that http.server looks for
            self.close_connection = True
            with socket.create_connection(("127.0.0.1", tunnel_to)) as upstream:
                self.send_response_only(200)
                self.end_headers()
                self.wfile.flush()
                back = threading.Thread(target=_pump, args=(upstream, self.connection), daemon=True)
                back.start()
                _pump(self.connection, upstream)
                back.join()

    with _serving(Handler) as port:
        seen.url = f"http://127.0.0.1:{port}"
        seen.url_with_password = f"http://{USER}:proxy%3Ap%40ss@127.0.0.1:{port}"
        yield seen


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate of this ``subjectAltName`` and its key, in a new directory."""
    directory.mkdir()
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName={name}"),
            *("-addext", "basicConstraints=critical,CA:FALSE", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@contextlib.contextmanager
def encrypted(server: Server, directory: Path) -> Iterator[tuple[int, Path]]:
    """The server behind TLS: a port, and the certificate of `HOST` to trust."""
    certificate, key = make_certificate(directory / "store", f"DNS:{HOST}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Handler(_Relay):
        controls = Faults(server)

    def wrap(proxy: _Proxy) -> None:
        proxy.socket = context.wrap_socket(proxy.socket, server_side=True, do_handshake_on_connect=False)

    with _serving(Handler, wrap) as port:
        yield port, certificate


@contextlib.contextmanager
def _serving(handler: type[Any], prepare: Callable[[_Proxy], None] = lambda _proxy: None) -> Iterator[int]:
    with _Proxy(("127.0.0.1", 0), handler) as proxy:
        prepare(proxy)
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, name="forward-proxy")
        thread.start()
        try:
            yield proxy.server_address[1]
        finally:
            proxy.shutdown()
            thread.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Until either side ends."""
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
