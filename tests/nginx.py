"""nginx as a cluster cache, with the configuration of `deploy/nginx`; and HAProxy that counts what a store sends."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

from tests.servers import EACH_REQUEST, Server, Way, free_port, haproxy, program, running, s3_answers

TEMPLATE = Path(__file__).parents[1] / "deploy" / "nginx" / "nginx.conf.template"
TOKEN = "5ec2e7" * 11
"""As long as `openssl rand -hex 32` makes one, and more."""


class Nginx:
    """A proxy that runs. ``url`` is for ``--cluster-cache``, with `TOKEN`."""

    def __init__(self, url: str, directory: Path, process: subprocess.Popen[bytes]) -> None:
        self.url, self._directory, self._process = url, directory, process

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        os.killpg(self._process.pid, number)

    def bytes_kept(self) -> int:
        """Sizes of the answers in its cache, headers included."""
        return sum(path.stat().st_size for path in (self._directory / "blocks").rglob("*") if path.is_file())


@contextlib.contextmanager
def nginx(
    store: Server, directory: Path, *, tls: bool = False, changes: Mapping[str, str] | None = None
) -> Iterator[Nginx]:
    """One on a free port, in front of the store. ``changes`` are texts of the configuration and what they become."""
    directory.mkdir(parents=True)
    port = free_port()
    parts = urlsplit(store.url)
    values = {
        "STORE_SCHEME": parts.scheme,
        "STORE": parts.netloc,
        "LISTEN": f"127.0.0.1:{port}",
        "DIRECTORY": str(directory),
        "SIZE": "1g",
        "PASSWORD": base64.b64encode(f"lakefs-fuse:{TOKEN}".encode()).decode(),
    }
    config = directory / "nginx.conf"
    text = Template(TEMPLATE.read_text()).safe_substitute(values)
    if tls:
        changes = {f"listen 127.0.0.1:{port};": f"listen 127.0.0.1:{port} ssl;", **(changes or {})}
    for old, new in (changes or {}).items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    user = "user root; " if os.geteuid() == 0 else ""  # others may not enter the directories of the tests
    found = "/usr/sbin/nginx" if os.path.exists("/usr/sbin/nginx") else program("nginx")
    command = [found, "-p", str(directory), "-e", str(directory / "error.log"), "-c", str(config)]
    command += ["-g", f"{user}daemon off;"]

    def answers() -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True

    with running(command, directory / "nginx.log", answers, in_group=True) as process:
        server = Nginx(f"{'https' if tls else 'http'}://127.0.0.1:{port}", directory, process)
        try:
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.signal(signal.SIGKILL)


class CountedStore:
    """A store behind HAProxy, which logs what it sends."""

    def __init__(self, server: Server, log: Path) -> None:
        self.server, self._log = server, log

    def bytes_sent(self, *, containing: str = "") -> int:
        """Of all answers to GETs of objects so far, heads included."""
        return sum(int(fields[3]) for fields in self._gets() if containing in fields[5])

    def gets(self) -> int:
        """GETs of objects so far."""
        return len(self._gets())

    def _gets(self) -> list[list[str]]:
        lines = (line.split(" ") for line in self._log.read_text().splitlines())
        return [each for each in lines if each[0] == "GET" and len(each) == 6 and "list-type" not in each[5]]


@contextlib.contextmanager
def counted(store: Server, directory: Path) -> Iterator[CountedStore]:
    """The store behind HAProxy."""
    port = free_port()
    proxied = store.at(f"http://127.0.0.1:{port}")
    way = Way(port, urlsplit(store.url).netloc)
    with haproxy([way], directory, 0, lambda: s3_answers(proxied), log=EACH_REQUEST):
        yield CountedStore(proxied, directory / "haproxy.log")
