"""Every request of a store client goes through the proxy that the environment names, or none does."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.errors import ConfigError, Unavailable
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.store.s3.access import connect
from lakefs_fuse.store.s3.store import S3Store
from tests.forward_proxy import HOST, PASSWORD, ForwardProxy, encrypted, forward_proxy
from tests.servers import Server, free_port
from tests.store.lakes import s3_config

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
BIG = 2 << 20
"""Bytes that boto3 sends, not obstore."""


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def config(seaweed: Server, new_bucket: Callable[[Server], str]) -> StoreConfig:
    return s3_config(seaweed, new_bucket(seaweed))


@pytest.fixture
def proxy(seaweed: Server) -> Iterator[ForwardProxy]:
    with forward_proxy(seaweed) as proxy:
        yield proxy


def at(config: StoreConfig, url: str, ca_bundle: Path | None = None) -> StoreConfig:
    """The same bucket at another URL."""
    bundle = None if ca_bundle is None else str(ca_bundle)
    return msgspec.structs.replace(config, endpoint_url=url, addressing_style="path", ca_bundle=bundle)


def ask_everything(config: StoreConfig) -> int:
    """Requests of each client that a store has; answers how many there were."""
    store = S3Store(connect(config, SystemClock()), SystemClock())
    store.adapt(Capabilities(name="s3", md5_etags=True))
    try:
        small = store.put("small", b"small")  # obstore
        assert bytes(store.get("small", 0, 5, etag=small.etag).data) == b"small"
        assert store.head("small").size == 5
        store.put("large", bytes(BIG))  # boto3
        upload_id = store.create_multipart("parts")
        part = store.upload_part("parts", upload_id, 1, b"part")
        store.complete_multipart("parts", upload_id, [part])
        assert store.list_multipart("") == []
        assert {meta.key for meta in store.list_page("").objects} == {"small", "large", "parts"}
        assert store.time_ns() > 0
        store.delete("small")
        assert store.delete_many(["large", "parts"]) == {}
        return 12
    finally:
        store.close()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
@pytest.mark.parametrize("excluded", [None, "127.0.0.1,other.invalid"])
def test_http_proxy_named_every_request_goes_through(
    config: StoreConfig, proxy: ForwardProxy, monkeypatch: pytest.MonkeyPatch, name: str, excluded: str | None
) -> None:
    monkeypatch.setenv(name, proxy.url)
    if excluded is not None:
        monkeypatch.setenv("no_proxy", excluded)
    asked = ask_everything(at(config, f"http://{HOST}:8333"))
    assert len(proxy.urls) == proxy.asked(f" http://{HOST}:8333/") == asked
    assert proxy.asked("GET ", "list-type=2") == 1


@pytest.mark.parametrize("name", ["no_proxy", pytest.param("NO_PROXY", marks=pytest.mark.long)])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("excluded", ["HOST", "*", "PORT"])
def test_no_proxy_names_the_host_no_request_goes_through(
    config: StoreConfig,
    proxy: ForwardProxy,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    host: str,
    excluded: str,
) -> None:
    port = str(config.endpoint_url).rpartition(":")[2]
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv(name, {"HOST": host, "PORT": f"{host}:{port}"}.get(excluded, excluded))
    ask_everything(at(config, f"http://{host}:{port}"))
    assert proxy.urls == []


@pytest.mark.parametrize("name", ["https_proxy", "ALL_PROXY"])
def test_proxy_of_another_scheme_is_not_used(
    config: StoreConfig, proxy: ForwardProxy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """botocore knows no proxy for all schemes; neither does what else sends requests."""
    monkeypatch.setenv(name, proxy.url)
    ask_everything(config)
    assert proxy.urls == []


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY"])
def test_https_goes_through_tunnels_and_proves_the_password(
    config: StoreConfig, seaweed: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    with (
        encrypted(seaweed, tmp_path) as (port, certificate),
        forward_proxy(seaweed, tunnel_to=port, password=True) as proxy,
    ):
        monkeypatch.setenv(name, proxy.url_with_password)
        ask_everything(at(config, f"https://{HOST}", certificate))
        assert len(proxy.urls) == proxy.asked(f"CONNECT {HOST}:443") >= 3
        assert proxy.refused == 0


def test_http_proves_the_password_which_is_not_shown(
    config: StoreConfig, seaweed: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with forward_proxy(seaweed, password=True) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url_with_password)
        config = at(config, f"http://{HOST}")
        assert ask_everything(config) == len(proxy.urls)
        assert proxy.refused == 0
    shown = repr(connect(config, SystemClock())) + caplog.text
    assert PASSWORD not in shown
    assert "proxy%3Ap%40ss" not in shown


@pytest.mark.parametrize("url", [f"http://user:{PASSWORD}@[nowhere", f"socks5://user:{PASSWORD}@127.0.0.1:1"])
def test_proxy_that_cannot_be_used_is_a_configuration_error(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("http_proxy", url)
    with pytest.raises(ConfigError, match="http_proxy") as caught:
        S3Store(connect(config, SystemClock()), SystemClock()).close()
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))


def test_proxy_that_does_not_answer_is_unavailable_and_its_password_not_shown(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://user:secret-word@127.0.0.1:{free_port()}")
    store = S3Store(connect(config, SystemClock()), SystemClock())
    store.adapt(Capabilities(name="s3", md5_etags=True))
    for ask in (lambda: store.list_page(""), lambda: store.head("a"), store.time_ns, lambda: store.get("a", 0, 1)):
        with pytest.raises(Unavailable) as caught:
            ask()
        assert "secret-word" not in "".join(traceback.format_exception(caught.value))
    store.close()
