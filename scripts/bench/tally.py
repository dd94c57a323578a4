"""What the store was asked, counted at HAProxy, so that it is counted in the same way for everybody; and its price.

HAProxy writes one line for each request when it is answered (`tests.servers.LOG_FORMAT`). A `Tally` reads the lines
that came since it was last asked. Requests of S3 are told apart by method and query; those of SeaweedFS's own protocol
are ``rpc`` (gRPC) or ``chunk-get`` and ``chunk-put`` (bytes), and have no price.
"""

from __future__ import annotations

import time
import tomllib
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qs

from scripts.bench.results import Store

PRICES = Path(__file__).with_name("prices.toml")
SETTLE_S = 0.05
"""HAProxy writes a line a moment after the client has its answer."""
UNPRICED = ("rpc", "chunk-get", "chunk-put")


def kind_of(method: str, copy: bool, address: str) -> str:
    """Of one request."""
    path, _, query = address.partition("?")
    asked = parse_qs(query, keep_blank_values=True)
    if path.startswith(("/filer_pb.", "/master_pb.", "/volume_server_pb.", "/messaging_pb.")):
        return "rpc"
    if "proxyChunkId" in asked:
        return "chunk-get" if method == "GET" else "chunk-put"
    if method == "GET":
        lists = {"list-type", "prefix", "delimiter", "uploads", "location", "versioning"} & set(asked)
        return "list" if lists or path.strip("/").count("/") == 0 else "get"
    if method == "PUT":
        return "copy" if copy else "part" if "partNumber" in asked else "put"
    if method == "POST":
        return "upload" if {"uploads", "uploadId"} & set(asked) else "delete" if "delete" in asked else "other"
    if method == "DELETE":
        return "abort" if "uploadId" in asked else "delete"
    return "head" if method == "HEAD" else "other"


def price_list(path: Path = PRICES) -> tuple[str, dict[str, float]]:
    """Its name, and US dollars for 1,000 requests of each kind."""
    told = tomllib.loads(path.read_text())
    return str(told["name"]), {str(kind): float(usd) for kind, usd in told["usd_per_1000"].items()}


def cost(requests: dict[str, int], prices: dict[str, float]) -> float | None:
    """US dollars; None where there is one that has no price."""
    if any(requests.get(kind) for kind in UNPRICED):
        return None
    return sum(count * prices.get(kind, 0.0) for kind, count in requests.items()) / 1000


class Tally:
    """Reads HAProxy's log as it grows. One user at a time."""

    def __init__(self, log: Path, prices: dict[str, float]) -> None:
        self._log, self._prices, self._at = log, prices, 0

    def begin(self) -> None:
        """What was asked until now does not count."""
        time.sleep(SETTLE_S)
        self._at = self._log.stat().st_size

    def take(self) -> Store:
        """What was answered since `begin`."""
        time.sleep(SETTLE_S)
        with self._log.open("rb") as file:
            file.seek(self._at)
            lines = file.read().decode("utf-8", "replace").splitlines()
        counts: Counter[str] = Counter()
        read = written = 0
        for line in lines:
            fields = line.split(" ", 5)
            if len(fields) != 6 or not fields[2].isdigit() or not fields[3].isdigit():
                continue
            method, _, sent, answered, copy, address = fields
            counts[kind_of(method, copy != "-", address)] += 1
            written += int(sent)
            read += int(answered)
        requests = dict(sorted(counts.items()))
        return Store(requests, read, written, cost(requests, self._prices))
