"""Requests are classed as stores bill them, and counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.tally import Tally, cost, kind_of, price_list

PRICES = {"get": 1.0, "put": 10.0}


@pytest.mark.parametrize(
    ("method", "copy", "address", "kind"),
    [
        ("GET", False, "/bench/set/d00/f1.jpg", "get"),
        ("GET", False, "/bench/a?versionId=7", "get"),
        ("GET", False, "/bench?list-type=2&prefix=set%2F", "list"),
        ("GET", False, "/bench/?prefix=", "list"),
        ("GET", False, "/bench/?uploads", "list"),
        ("GET", False, "/", "list"),
        ("HEAD", False, "/bench/a", "head"),
        ("PUT", False, "/bench/a", "put"),
        ("PUT", True, "/bench/a", "copy"),
        ("PUT", False, "/bench/a?partNumber=1&uploadId=u", "part"),
        ("POST", False, "/bench/a?uploads", "upload"),
        ("POST", False, "/bench/a?uploadId=u", "upload"),
        ("POST", False, "/bench?delete", "delete"),
        ("DELETE", False, "/bench/a", "delete"),
        ("DELETE", False, "/bench/a?uploadId=u", "abort"),
        ("OPTIONS", False, "/bench/a", "other"),
        ("POST", False, "/filer_pb.SeaweedFiler/LookupDirectoryEntry", "rpc"),
        ("GET", False, "/?proxyChunkId=3,0f", "chunk-get"),
        ("POST", False, "/?proxyChunkId=3,0f", "chunk-put"),
    ],
)
def test_kinds(method: str, copy: bool, address: str, kind: str) -> None:
    assert kind_of(method, copy, address) == kind


def test_what_came_since_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("GET 200 100 1000 - /bench/before\n")
    tally = Tally(log, PRICES)
    tally.begin()
    with log.open("a") as file:
        file.write("GET 200 100 5000 - /bench/a b\nPUT 200 700 20 b /bench/copied\n<BADREQ> 400 0 0 - <BADREQ>\n")
        file.write("[NOTICE] something else that HAProxy says\nGET 206 50 300 - /bench/a\n")
    store = tally.take()
    assert store.requests == {"copy": 1, "get": 2, "other": 1}
    assert (store.written_bytes, store.read_bytes) == (850, 5320)
    assert store.usd == pytest.approx(0.002)


def test_what_has_no_price_has_none() -> None:
    assert cost({"get": 1000, "put": 100, "delete": 5}, PRICES) == pytest.approx(2.0)
    assert cost({"get": 1000, "rpc": 1}, PRICES) is None


def test_the_price_list_is_whole() -> None:
    name, prices = price_list()
    assert name
    assert set(prices) == {"put", "part", "copy", "upload", "list", "get", "head", "other"}
    assert all(usd > 0 for usd in prices.values())
