"""GETs through a caching proxy: what is sent to it, what is taken from it, and how long it may take."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.errors import (
    AccessDenied,
    KeyRefused,
    NotFound,
    PreconditionFailed,
    ProxyRefused,
    StoreError,
    Unavailable,
)
from lakefs_fuse.store.protocol import Capabilities, Fetched
from lakefs_fuse.store.s3 import fast_path
from lakefs_fuse.store.s3.access import CACHE_TOKEN, connect
from lakefs_fuse.store.s3.fast_path import CachedGets
from lakefs_fuse.store.s3.store import S3Store
from tests.forward_proxy import HOST, encrypted, make_certificate
from tests.nginx import TOKEN, nginx
from tests.servers import Server, s3_client
from tests.store.lakes import s3_config

MIB = 1 << 20
SIZE = 3 * MIB
BODY = bytes(range(256)) * (MIB // 256)
ETAG = "0123456789abcdef" * 2
RIGHT = {
    "Content-Range": f"bytes {MIB}-{2 * MIB - 1}/{SIZE}",
    "ETag": f'"{ETAG}"',
    "Last-Modified": "Thu, 26 Nov 2026 10:00:00 GMT",
}
SPARE_S = 20.0
"""For a machine that does other things, too. A GET that does not end in time takes at least a minute in these tests."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does other things may take longer to answer than a mount waits."""
    monkeypatch.setattr(fast_path, "CACHE_TIMEOUT", timedelta(seconds=60))


class Proxy:
    """A proxy that answers every request with ``status``, ``headers`` and ``body``; ``pause_s`` passes before each
    KiB of that."""

    def __init__(self) -> None:
        self.status, self.headers, self.body, self.pause_s = 206, dict(RIGHT), BODY, 0.0
        self.requests: list[str] = []
        self.url = ""
        self.over = threading.Event()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # a name that http.server looks for
            made.requests.append(f"{self.requestline}\n{self.headers}")
            self.send_response_only(made.status)
            for name, value in made.headers.items():
                self.send_header(name, value)
            if "Content-Length" not in made.headers:
                self.send_header("Content-Length", str(len(made.body)))
            if not made.pause_s:
                self.end_headers()
                self.wfile.write(made.body)
                return
            for at in range(0, len(made.body), 1024):
                if made.over.wait(made.pause_s):
                    return
                self.end_headers() if not at else None
                self.wfile.write(made.body[at : at + 1024])
                self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that went away is what some tests are about."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield made
        finally:
            made.over.set()
            server.shutdown()
            thread.join()


def gets(url: str, *, endpoint: str = "https://store.example", style: str = "path") -> CachedGets:
    config = StoreConfig(source=Source("s3", "bucket", "some/lake/"), endpoint_url=endpoint, addressing_style=style)
    return CachedGets(connect(config, SystemClock()), url, SystemClock())


def get(url: str) -> tuple[Fetched, bool]:
    return gets(url).get("dir/a key", MIB, 2 * MIB, ETAG)


@pytest.mark.parametrize(
    ("endpoint", "style", "url", "host"),
    [
        ("https://store.example", "path", "http://store.example/bucket/some/lake/dir/a%20key", "store.example"),
        ("https://store.example:443", "path", "http://store.example/bucket/some/lake/dir/a%20key", "store.example"),
        ("https://store.example:9", "virtual", "http://bucket.store.example:9/some/lake/dir/a%20key",
         "bucket.store.example:9"),
        ("http://store.example:9", "path", "http://store.example:9/bucket/some/lake/dir/a%20key", "store.example:9"),
    ],
)  # fmt: skip
def test_cached_get_is_signed_for_the_store_and_sent_to_the_proxy(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, endpoint: str, style: str, url: str, host: str
) -> None:
    monkeypatch.setenv(CACHE_TOKEN, "a b:c/ü@")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "*")
    fetched, is_hit = gets(proxy.url, endpoint=endpoint, style=style).get("dir/a key", MIB, 2 * MIB, ETAG)
    assert bytes(fetched.data) == BODY
    assert (fetched.meta.size, fetched.meta.etag, is_hit) == (SIZE, ETAG, False)
    (request,) = proxy.requests
    first, *lines = request.splitlines()
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert first == f"GET {url} HTTP/1.1"
    assert headers["host"] == host
    assert headers["range"] == f"bytes={MIB}-{2 * MIB - 1}"
    assert headers["if-match"] == f'"{ETAG}"'
    assert "SignedHeaders=host;if-match;range;x-amz-content-sha256;x-amz-date," in headers["authorization"]
    password = base64.b64encode("lakefs-fuse:a b:c/ü@".encode()).decode()
    assert headers["proxy-authorization"] == f"Basic {password}"


def test_cached_get_without_a_token_sends_no_password(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_TOKEN, raising=False)
    get(proxy.url)
    assert "roxy-" not in proxy.requests[0]


def test_cached_get_tells_what_the_proxy_says_of_its_cache(proxy: Proxy) -> None:
    proxy.headers |= {"X-Amz-Meta-Mode": "33188", "X-Amz-Meta-Lakefs-Cache": "HIT"}
    fetched, is_hit = get(proxy.url)
    assert is_hit
    assert fetched.meta.metadata == {"mode": "33188"}


def but(name: str, value: str | None) -> dict[str, str]:
    """The right headers but for one."""
    changed = RIGHT | ({} if value is None else {name: value})
    return {each: text for each, text in changed.items() if each != name or value is not None}


WRONG: dict[str, tuple[int, dict[str, str], bytes]] = {
    "another ETag": (206, but("ETag", '"another"'), BODY),
    "no ETag": (206, but("ETag", None), BODY),
    "another range": (206, but("Content-Range", f"bytes 0-{MIB - 1}/{SIZE}"), BODY),
    "no range": (206, but("Content-Range", None), BODY),
    "a shorter body": (206, RIGHT, BODY[:-1]),
    "a longer body": (206, RIGHT, BODY + b"x"),
    "a body cut short": (206, {**RIGHT, "Content-Length": str(MIB), "Connection": "close"}, BODY[:99]),
    "200": (200, RIGHT, BODY * 3),
    "HTML": (200, {"Content-Type": "text/html"}, b"<html>Log in</html>"),
    "304": (304, RIGHT, b""),
    "502": (502, {}, b"<html>Bad Gateway</html>"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_cached_get_of_a_wrong_answer_raises(proxy: Proxy, wrong: str) -> None:
    proxy.status, proxy.headers, proxy.body = WRONG[wrong]
    with pytest.raises(StoreError):
        get(proxy.url)


def test_cached_get_that_is_redirected_asks_nobody_else(proxy: Proxy) -> None:
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        elsewhere.listen()
        elsewhere.settimeout(0.1)
        proxy.status, proxy.body = 302, b""
        for scheme in ("http", "https"):
            proxy.headers = {"Location": f"{scheme}://127.0.0.1:{elsewhere.getsockname()[1]}/"}
            with pytest.raises(StoreError):
                get(proxy.url)
            with pytest.raises(TimeoutError):
                elsewhere.accept()


@pytest.mark.parametrize(("status", "kind"), [(403, AccessDenied), (404, NotFound), (412, PreconditionFailed)])
def test_cached_get_that_the_store_refuses_raises_what_it_says(
    proxy: Proxy, status: int, kind: type[StoreError]
) -> None:
    proxy.status, proxy.body = status, b"<Error><Code>AnyCode</Code></Error>"
    with pytest.raises(kind):
        get(proxy.url)


def test_cached_get_with_a_wrong_token_says_so(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_TOKEN, "never-to-be-seen")
    proxy.status, proxy.body = 407, b""
    with pytest.raises(ProxyRefused, match="LAKEFS_CLUSTER_CACHE_TOKEN") as caught:
        get(proxy.url)
    assert "never-to-be-seen" not in str(caught.value)


@pytest.mark.parametrize("pause_s", [0.2, 60.0], ids=["slow", "silent"])
def test_cached_get_of_a_proxy_that_takes_long_ends(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    monkeypatch.setattr(fast_path, "CACHE_TIMEOUT", timedelta(seconds=1))
    proxy.pause_s = pause_s
    began_s = time.monotonic()
    with pytest.raises(Unavailable):
        get(proxy.url)
    assert time.monotonic() - began_s <= 1 + SPARE_S


def test_cached_get_of_no_proxy_ends_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        began_s = time.monotonic()
        with pytest.raises(Unavailable):
            get(f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert time.monotonic() - began_s <= SPARE_S


@pytest.mark.parametrize("key", ["a//b", "../b", "a\nb", "a/"])
def test_cached_get_of_a_key_that_would_be_changed_is_refused(proxy: Proxy, key: str) -> None:
    with pytest.raises(KeyRefused):
        gets(proxy.url).get(key, 0, 1, ETAG)
    assert not proxy.requests


def test_store_that_answers_ranges_with_200_has_no_cached_gets() -> None:
    config = StoreConfig(source=Source("s3", "bucket", ""), endpoint_url="http://store.example")
    store = S3Store(connect(config, SystemClock()), SystemClock())
    try:
        store.adapt(Capabilities(name="s3", partial_status=False))
        assert store.through_cache("http://cache.example") is None
        store.adapt(Capabilities(name="s3"))
        assert store.through_cache("http://cache.example") is not None
    finally:
        store.close()


def test_nginx_with_a_certificate_passes_requests_on_to_a_store_with_one(
    seaweed: Server, new_bucket: Callable[[Server], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only nginx reaches the store, whose name means nothing here."""
    monkeypatch.setenv(CACHE_TOKEN, TOKEN)
    config = s3_config(seaweed, new_bucket(seaweed))
    client = s3_client(seaweed)
    answer = client.put_object(Bucket=config.source.bucket, Key=f"{config.source.prefix}key", Body=BODY)
    client.close()
    etag = answer["ETag"].strip('"')
    certificate, key = make_certificate(tmp_path / "proxy", "IP:127.0.0.1")
    with encrypted(seaweed, tmp_path) as (port, store_certificate):
        changes = {
            "/etc/ssl/certs/ca-certificates.crt": str(store_certificate),
            "# ssl_certificate     /etc/nginx/cache.pem": f"ssl_certificate {certificate}",
            "# ssl_certificate_key /etc/nginx/cache.key": f"ssl_certificate_key {key}",
        }
        store = Server("seaweedfs", f"https://127.0.0.1:{port}")
        with nginx(store, tmp_path / "nginx", tls=True, changes=changes) as proxy:
            at = connect(
                StoreConfig(
                    source=config.source, endpoint_url=f"https://{HOST}", addressing_style="path",
                    ca_bundle=str(certificate),
                ),
                SystemClock(),
            )  # fmt: skip
            for is_hit in (False, True):
                fetched, was_hit = CachedGets(at, proxy.url, SystemClock()).get("key", 0, 1000, etag)
                assert bytes(fetched.data) == BODY[:1000]
                assert was_hit == is_hit


def test_nginx_compares_the_password_exactly(proxy: Proxy, tmp_path: Path) -> None:
    """Here ``proxy`` is the store. Letters of Base64 that differ in case are another password."""
    proxy.status, proxy.body = 206, BODY
    password = base64.b64encode(f"lakefs-fuse:{TOKEN}".encode()).decode()
    with nginx(Server("store", proxy.url), tmp_path / "nginx") as cache:
        for sent, status in ((password, 206), (password.swapcase(), 407), (password[:-1], 407), ("", 407)):
            client = HTTPConnection(urlsplit(cache.url).netloc, timeout=10)
            with contextlib.closing(client):
                headers = {"Range": "bytes=0-9", "If-Match": '"e"', "Proxy-Authorization": f"Basic {sent}"}
                client.request("GET", "/key", headers=headers)
                assert client.getresponse().status == status, sent
    assert len(proxy.requests) == 1


def test_nginx_passes_on_what_was_signed_and_keeps_answers_alone(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here ``proxy`` is the store."""
    monkeypatch.setenv(CACHE_TOKEN, TOKEN)
    proxy.headers |= {"Cache-Control": "no-store", "Set-Cookie": "a=b", "Vary": "*"}
    with nginx(Server("store", proxy.url), tmp_path / "nginx") as cache:
        for status, kind in ((403, AccessDenied), (404, NotFound), (412, PreconditionFailed), (500, Unavailable)):
            proxy.status, proxy.body = status, b"<Error/>"
            with pytest.raises(kind):
                get(cache.url)
        proxy.status, proxy.body = 206, BODY
        assert [get(cache.url)[1] for _ in range(3)] == [False, True, True]
    assert len(proxy.requests) == 5
    for request in proxy.requests:
        assert request.startswith("GET /bucket/some/lake/dir/a%20key HTTP/1.1\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in request.splitlines())}
        assert headers["host"] == "store.example"
        assert (headers["range"], headers["if-match"]) == (f"bytes={MIB}-{2 * MIB - 1}", f'"{ETAG}"')
        assert headers["authorization"].startswith("AWS4-HMAC-SHA256 ")
        assert "proxy-authorization" not in headers
