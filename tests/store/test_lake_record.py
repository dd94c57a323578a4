"""What a store can do is asked for once for a lake, and its features are heeded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import AccessDenied, ConfigError, PreconditionFailed
from lakefs_fuse.store import lake_record
from lakefs_fuse.store.lake_record import (
    FEATURES,
    FORMAT_2,
    KEPT_NS,
    KEY,
    LakeRecord,
    OpenedLake,
    change_record,
    open_record,
)
from lakefs_fuse.store.open import open_store
from lakefs_fuse.store.probe import PROBES
from lakefs_fuse.store.protocol import NetworkStore
from tests.fakes import FakeClock
from tests.faults import faulty
from tests.memory_store import MemoryStore, Request, When
from tests.servers import Server
from tests.store.lakes import s3_config

NOW_NS = 1_700_000_000 * 1_000_000_000
CONFIG = StoreConfig(source=Source.parse("s3://bucket/some lake"), endpoint_url="http://127.0.0.1:1")


class Asked:
    """Requests that reach a store, which refuses those that ``refused`` says."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.requests = store, list[str]()
        self.refused: Callable[[Request], bool] = lambda request: False
        store.hook = self

    def __call__(self, request: Request, when: When) -> None:
        if when == "before":
            self.requests.append(request.what)
            if self.refused(request):
                raise AccessDenied("no")

    def open(self, config: StoreConfig = CONFIG, *, may_write: bool = True, at_ns: int = NOW_NS) -> OpenedLake:
        """As a mount does it."""
        self.requests.clear()
        return open_record(self.store, config, random.Random(1), FakeClock(at_ns), may_write=may_write)

    @property
    def writes(self) -> list[str]:
        return [what for what in self.requests if what not in ("get", "head", "list", "time_ns")]

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.store.data(KEY))
        return found

    def set(self, **fields: object) -> None:
        """Somebody else changes the record."""
        self.store.give(KEY, msgspec.json.encode(self.record() | fields))


def test_open_record_fresh_record_costs_one_get() -> None:
    asked = Asked(MemoryStore())
    first = asked.open()
    assert len(asked.requests) > 40
    again = asked.open(at_ns=NOW_NS + KEPT_NS - 1)
    assert asked.requests == ["get"]
    assert again == first
    assert list(asked.store.objects) == [KEY]


def test_open_record_new_lake_has_every_feature() -> None:
    asked = Asked(MemoryStore())
    asked.store.give("data/plain", b"of another program")
    asked.store.give(f"{PROBES}0123/a", b"another mount probes")
    opened = asked.open()
    assert set(asked.record()["features_to_read"]) == FEATURES
    assert opened.has_levels
    assert opened.commit_format == 2


@pytest.mark.parametrize("key", [".lakefs/commits/17979cfe362a0000-87315d86.zip", ".lakefs/index/0/manifest"])
def test_open_record_lake_of_an_older_program_gets_no_feature(key: str) -> None:
    asked = Asked(MemoryStore())
    asked.store.give(key, b"written before there were records")
    opened = asked.open()
    assert asked.record()["features_to_read"] == []
    assert not opened.has_levels
    assert opened.commit_format == 1


@pytest.mark.parametrize("what", ["expired", "endpoint", "encryption", "questions", "from the future"])
def test_open_record_finding_of_another_kind_is_found_anew(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    asked, config, at_ns = Asked(MemoryStore()), CONFIG, NOW_NS
    first = asked.open()
    if what == "expired":
        at_ns += KEPT_NS
    elif what == "from the future":
        at_ns -= 1
    elif what == "endpoint":
        config = msgspec.structs.replace(config, endpoint_url="http://127.0.0.1:2")
    elif what == "encryption":
        config = msgspec.structs.replace(config, sse="kms:key")
    else:
        monkeypatch.setattr(lake_record, "PROBE", lake_record.PROBE + 1)
    again = asked.open(config, at_ns=at_ns)
    assert len(asked.requests) > 40
    assert first.record is not None and again.record is not None
    assert again.record.id == first.record.id
    assert len(asked.record()["stores"]) == (1 if what in ("expired", "from the future") else 2)
    asked.open(config, at_ns=at_ns)
    assert asked.requests == ["get"]


def test_open_record_reader_writes_nothing() -> None:
    asked = Asked(MemoryStore())
    asked.store.give("plain", b"bytes")
    least = asked.open(may_write=False)
    assert (least.record, least.capabilities.put_if_absent, asked.writes) == (None, False, [])
    asked.open()
    known = asked.open(may_write=False, at_ns=NOW_NS + 2 * KEPT_NS)
    assert (known.capabilities.put_if_absent, asked.requests) == (True, ["get"])


def test_open_record_store_refusing_the_record_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked(MemoryStore())
    asked.refused = lambda request: request.what == "put" and request.key == KEY
    assert asked.open().capabilities.put_if_absent
    assert "will be probed again" in caplog.text


def test_open_record_keys_refused_now_are_told() -> None:
    asked = Asked(MemoryStore())
    asked.open()
    asked.refused = lambda request: True
    with pytest.raises(AccessDenied):
        asked.open()


def test_open_record_unknown_feature_to_read_stops() -> None:
    asked = Asked(MemoryStore())
    asked.open()
    asked.set(features_to_read=["rotated", FORMAT_2])
    with pytest.raises(ConfigError, match=r"rotated, which .* cannot read"):
        asked.open()
    assert asked.requests == ["get"]


def test_open_record_unknown_feature_to_write_is_named_and_keeps_from_writing() -> None:
    asked = Asked(MemoryStore())
    asked.open()
    asked.set(features_to_write=["mirrored"], stores=[])
    opened = asked.open()
    assert (opened.unknown, asked.writes) == (("mirrored",), [])


@pytest.mark.parametrize(
    "damaged", [b"", b"{", b'{"format": 2, "id": "x"}', b"[]", b'{"format": 1, "id": "\xff"}', b'{"x":' + b"[" * 5000]
)
def test_open_record_damaged_or_newer_record_stops(damaged: bytes) -> None:
    asked = Asked(MemoryStore())
    asked.store.give(KEY, damaged)
    with pytest.raises(ConfigError, match=r"\.lakefs/lake"):
        asked.open()


def test_change_record_meanwhile_changed_keeps_both() -> None:
    asked = Asked(MemoryStore())
    asked.open()
    changes = [["first"]]

    def change(record: LakeRecord | None) -> LakeRecord:
        assert record is not None
        if changes:
            asked.set(features_to_write=changes.pop())
        return msgspec.structs.replace(record, features_to_read=(FORMAT_2,))

    change_record(asked.store, FakeClock(), change)
    assert (asked.record()["features_to_read"], asked.record()["features_to_write"]) == ([FORMAT_2], ["first"])


def test_open_record_two_mounts_at_once_agree_on_an_id() -> None:
    asked = Asked(MemoryStore())
    other = LakeRecord(id="0" * 32)

    def refused(request: Request) -> bool:
        if request.what == "put" and request.key == KEY and KEY not in asked.store.objects:
            asked.store.give(KEY, msgspec.json.encode(other))
        return False

    asked.refused = refused
    opened = asked.open()
    assert opened.record is not None
    assert opened.record.id == asked.record()["id"] == other.id
    assert len(asked.record()["stores"]) == 1


@pytest.mark.parametrize("name", ["seaweed", "moto"])
def test_open_record_on_a_server_is_one_get_and_adapts(
    request: pytest.FixtureRequest, new_bucket: Callable[[Server], str], name: str
) -> None:
    """Also where the server calls itself something else in answers to some requests (moto)."""
    there: Server = request.getfixturevalue(name)
    bucket = new_bucket(there)
    with faulty(there) as (server, faults):
        config, adapted = s3_config(server, bucket), []
        for _ in range(2):
            faults.clear()
            store = open_store(config, Node.of_this_machine())
            try:
                faults.clear()
                opened = open_record(store, config, random.Random(1), SystemClock(), may_write=True)
                assert isinstance(store, NetworkStore)
                adapted.append((opened, store.sender.sends_sums, getattr(store, "capabilities")))  # noqa: B009
            finally:
                store.close()
        assert sum(faults.counts.values()) == faults.counts["GET"] == 1
        assert adapted[0] == adapted[1]
        assert adapted[0][1] == (name == "seaweed"), "SeaweedFS checks sums"
        assert adapted[0][0].finding.server


def test_change_record_of_another_version_is_refused(seaweed: Server, new_bucket: Callable[[Server], str]) -> None:
    config = s3_config(seaweed, new_bucket(seaweed))
    store = open_store(config, Node.of_this_machine())
    try:
        opened = open_record(store, config, random.Random(1), SystemClock(), may_write=True)
        assert opened.capabilities.put_if_match
        with pytest.raises(PreconditionFailed):
            store.put(KEY, b"{}", etag="0" * 32)
    finally:
        store.close()
