"""Real object stores for tests, and HAProxy for latency: started on free loopback ports, stopped by process id.

Each is a context manager that yields a `Server` once it answers. Nothing is shared between two of them but the machine.
Used by fixtures (`conftest.py`) and by scripts; no store of these may be reached from another machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import botocore.exceptions
from botocore.config import Config

ACCESS_KEY = "testkey"
READ_ONLY_ACCESS_KEY = "readkey"
"""May read and list, on SeaweedFS."""
SECRET_KEY = "testsecret-never-to-be-seen"
REGION = "us-east-1"
START_TIMEOUT_S = 40.0
STOP_TIMEOUT_S = 3.0
STOPPED_S_MAX = 30.0
GRPC_OFFSET = 10_000
"""SeaweedFS's gRPC port of any port."""


@dataclass(frozen=True, slots=True)
class Server:
    """A store that answers. Credentials are `ACCESS_KEY` and `SECRET_KEY`."""

    name: str
    url: str
    filer: str = ""
    """Address of SeaweedFS's own protocol, which `weed mount` speaks."""

    def at(self, url: str) -> Server:
        """The same store behind a proxy."""
        return Server(self.name, url)


def free_port(*, with_grpc: bool = False) -> int:
    """A port nobody listens on; with ``with_grpc`` the one 10,000 above it is free too."""
    while True:
        port = _bindable(0)
        if not with_grpc:
            return port
        if port + GRPC_OFFSET < 65_536 and _bindable(port + GRPC_OFFSET):
            return port
        if port - GRPC_OFFSET > 1024 and _bindable(port - GRPC_OFFSET):
            return port - GRPC_OFFSET


def _bindable(port: int) -> int:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
        return int(probe.getsockname()[1])


def program(name: str) -> str:
    """Path of a program of this interpreter's environment, else of the system."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: run `make setup`")
    return found


@functools.cache
def s3_client(server: Server):  # type: ignore[no-untyped-def]  # boto3 makes its clients at run time
    """A plain boto3 client: the outside view of a store. One for all tests of a process, because to make one takes
    longer than some requests; `close` ends its connections, and the next request makes another."""
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 3},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def make_bucket(server: Server, bucket: str) -> None:
    """Create it and see it listed; a server that has just started may refuse for a moment."""
    client = s3_client(server)

    def created() -> bool:
        try:
            client.create_bucket(Bucket=bucket)
        except client.exceptions.BucketAlreadyOwnedByYou:
            pass
        client.list_objects_v2(Bucket=bucket, MaxKeys=1)
        return True

    try:
        _wait(created, f"bucket {bucket} on {server.name}", lambda: None)
    finally:
        client.close()


@contextlib.contextmanager
def seaweedfs(directory: Path) -> Iterator[Server]:
    """SeaweedFS: master, volume server, filer and S3 gateway in one process."""
    with _seaweedfs(directory, _seaweedfs_ports()) as (server, _):
        yield server


VOLUMES_MAX = 100_000
"""The default is what the disk has room for if all volumes were full. Each bucket of a long run reserves two volumes of
64 MiB, so that after some hundred buckets no volume was left to grow, and every PUT was answered with 500."""


class StoppableStore:
    """A SeaweedFS that goes away and comes back, on the same port with the same data. Ended by `close`."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._ports = directory, _seaweedfs_ports()
        self._running = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self.server = self.start()

    def start(self) -> Server:
        """Answers when the store does."""
        server, self._process = self._running.enter_context(_seaweedfs(self._directory, self._ports))
        return server

    def stop(self) -> None:
        """Connections are refused from now on."""
        self._running.close()
        self._process = None

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Connections are taken and nothing is answered, while the body runs."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            _wait_stopped(self._process.pid)
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._running.close()


def _wait_stopped(pid: int) -> None:
    """On a busy machine the threads of a process go on for a while after SIGSTOP was sent, and answer."""
    deadline_s = time.monotonic() + STOPPED_S_MAX
    while not all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())):
        assert time.monotonic() < deadline_s, f"process {pid} does not stop"
        time.sleep(0.005)


def _is_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return True


def _seaweedfs_ports() -> list[int]:
    """Of the S3 gateway, master, volume server and filer."""
    ports: list[int] = []
    while len(ports) < 4:
        port = free_port(with_grpc=True)
        if all(abs(port - other) not in (0, GRPC_OFFSET) for other in ports) and not _sockets_of([port]):
            ports.append(port)
    return ports


def _sockets_of(ports: list[int]) -> list[Path]:
    """By which the parts of a SeaweedFS talk. It leaves some of them behind, and another user's cannot be replaced."""
    return [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port + GRPC_OFFSET}.sock")]


@contextlib.contextmanager
def _seaweedfs(directory: Path, ports: list[int]) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    directory.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    reader = {
        "name": "reader",
        "credentials": [{"accessKey": READ_ONLY_ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Read", "List"],
    }
    # A bucket has volumes of its own; by default it reserves more of them than many buckets would leave room for.
    (directory / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 2\n")
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity, reader]}))
    data = directory / "data"
    data.mkdir(exist_ok=True)
    port, master_port, volume_port, filer_port = ports
    command = [
        program("weed"),
        "-logtostderr=true",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master_port}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        f"-volume.port={volume_port}",
        f"-volume.max={VOLUMES_MAX}",
        "-filer",
        f"-filer.port={filer_port}",
        f"-filer.localSocket={directory}/filer.sock",
        "-s3",
        f"-s3.port={port}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.localSocket={directory}/s3.sock",
        f"-s3.config={config}",
        # A master that is the only one need not wait for others, nor a volume server that stops.
        "-master.electionTimeout=1s",
        "-volume.preStopSeconds=0",
    ]
    server = Server("seaweedfs", f"http://127.0.0.1:{port}", filer=f"127.0.0.1:{filer_port}")
    try:
        # SIGTERM would end it after 15 s, and what was answered is in its files.
        log, ended_by = directory / "weed.log", signal.SIGKILL
        with running(command, log, lambda: s3_answers(server), ended_by=ended_by) as process:
            yield server, process
    finally:
        for path in _sockets_of(ports):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def moto(directory: Path) -> Iterator[Server]:
    """moto's S3, which checks no credentials."""
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [program("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    server = Server("moto", f"http://127.0.0.1:{port}")
    with running(command, directory / "moto.log", lambda: s3_answers(server)):
        yield server


@contextlib.contextmanager
def rclone(directory: Path) -> Iterator[Server]:
    """rclone's S3 gateway on a local directory: answers ranges with 200, ignores preconditions, has no markers."""
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        program("rclone"),
        "serve",
        "s3",
        "--config",
        str(directory / "rclone.conf"),
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{ACCESS_KEY},{SECRET_KEY}",
        str(data),
    ]
    server = Server("rclone", f"http://127.0.0.1:{port}")
    with running(command, directory / "rclone.log", lambda: s3_answers(server)):
        yield server


_LUA = """
core.register_action("delay", {"http-req"}, function(txn) core.msleep(DELAY_MS) end)
"""

_HAPROXY = """
global
  lua-load {lua}
  nbthread 1
  tune.bufsize 65536
  log {log}
defaults
  mode http
  log global
  log-format {log_format}
  timeout connect 10s
  timeout client 1h
  timeout server 1h
  option http-no-delay
"""

_HAPROXY_WAY = """
frontend front-{port}
  bind 127.0.0.1:{port} {protocol}
  declare capture request len 1
  http-request capture req.hdr(x-amz-copy-source) id 0
  http-request lua.delay
  default_backend back-{port}
backend back-{port}
  server upstream {upstream} {protocol}
"""

QUIET = "stderr local0 emerg"
EACH_REQUEST = "stdout len 8192 format raw local0 info"
"""One line in ``haproxy.log`` for each request, in the form of `LOG_FORMAT`."""
LOG_FORMAT = "%HM\\ %ST\\ %U\\ %B\\ %[capture.req.hdr(0)]\\ %HU"
"""Method, status, bytes from the client and to it (heads included), ``-`` unless it is a copy, path with query."""


@dataclass(frozen=True, slots=True)
class Way:
    """A port of loopback that leads to ``upstream``, as ``host:port``; ``grpc`` says that HTTP/2 is spoken."""

    port: int
    upstream: str
    grpc: bool = False


@contextlib.contextmanager
def haproxy(
    ways: list[Way], directory: Path, delay_ms: int, answers: Callable[[], bool], *, log: str = QUIET
) -> Iterator[None]:
    """HAProxy: every request waits ``delay_ms`` before it is passed on. Its log is ``haproxy.log`` in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    lua = directory / "delay.lua"
    lua.write_text(_LUA.replace("DELAY_MS", str(delay_ms)))
    config = directory / "haproxy.cfg"
    text = _HAPROXY.format(lua=lua, log=log, log_format=LOG_FORMAT)
    for way in ways:
        protocol = "proto h2" if way.grpc else ""
        text += _HAPROXY_WAY.format(port=way.port, upstream=way.upstream, protocol=protocol)
    config.write_text(text)
    command = [shutil.which("haproxy") or "/usr/sbin/haproxy", "-db", "-f", str(config)]
    if log == QUIET:
        command.insert(1, "-q")  # Closes standard output, where each request would be logged.
    with running(command, directory / "haproxy.log", answers):
        yield


@contextlib.contextmanager
def latency(server: Server, directory: Path, delay_ms: int = 15) -> Iterator[Server]:
    """HAProxy in front of a store."""
    port = free_port()
    proxied = server.at(f"http://127.0.0.1:{port}")
    way = Way(port, urlsplit(server.url).netloc)
    with haproxy([way], directory, delay_ms, lambda: s3_answers(proxied)):
        yield proxied


@contextlib.contextmanager
def redis_server(directory: Path, port: int, password: str = "") -> Iterator[None]:
    """Redis on a port of loopback, which keeps nothing."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "redis.conf"
    config.write_text(f'bind 127.0.0.1\nport {port}\nsave ""\nappendonly no\nrequirepass "{password}"\n')

    def answers() -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16)[:1] in (b"+", b"-")

    command = [shutil.which("redis-server") or "/usr/bin/redis-server", str(config)]
    with running(command, directory / "redis.log", answers):
        yield


# -- processes ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(
    command: list[str],
    log: Path,
    answers: Callable[[], bool],
    *,
    in_group: bool = False,
    ended_by: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers, ended when the body is; ``in_group`` gives it and its children a group of their own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,
            start_new_session=in_group,
        )
    try:

        def still_runs() -> None:
            if process.poll() is not None:
                tail = log.read_text("utf-8", "replace")[-2000:]
                raise RuntimeError(f"{command[0]} ended with {process.returncode}:\n{tail}")

        _wait(answers, command[0], still_runs)
        yield process
    finally:
        process.send_signal(ended_by)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def _wait(condition: Callable[[], bool], what: str, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    last: Exception | None = None
    while time.monotonic() < deadline:
        check()
        try:
            if condition():
                return
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, OSError) as error:
            last = error
        time.sleep(0.05)
    raise RuntimeError(f"{what} was not ready within {START_TIMEOUT_S:.0f} s: {last}")


def s3_answers(server: Server) -> bool:
    """It lists its buckets. Raises what boto3 or a socket raises."""
    parts = urlsplit(server.url)
    with socket.create_connection((str(parts.hostname), int(parts.port or 80)), timeout=1):
        pass
    client = s3_client(server)
    try:
        client.list_buckets()
    finally:
        client.close()
    return True
