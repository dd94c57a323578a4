"""What a store can do is asked for once a day, and not believed of another store, program or kind of mount."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.errors import AccessDenied
from lakefs_fuse.store import remembering
from lakefs_fuse.store.opening import open_store
from lakefs_fuse.store.probeable import Summing
from lakefs_fuse.store.remembering import FILE, KEPT_NS, Findings, find_out, remember
from tests.memory_store import MemoryStore, Request, When
from tests.servers import Server
from tests.store.lakes import s3_config

NOW_NS = 1_700_000_000 * 1_000_000_000


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

    def mount(self, config: MountConfig, *, at_ns: int = NOW_NS) -> Findings:
        """As a mount does it."""
        self.requests.clear()
        findings = find_out(self.store, config, random.Random(1), clock_ns=lambda: at_ns)
        remember(config, findings)
        return findings


def config_for(tmp_path: Path, **options: object) -> MountConfig:
    store = StoreConfig(source=Source.parse("s3://bucket/some lake"), endpoint_url="http://127.0.0.1:1")
    config = MountConfig(store=store, mountpoint="/nowhere", cache_dir=str(tmp_path))
    return msgspec.structs.replace(config, **options)


def test_fifty_questions_once_a_day_and_one_otherwise(tmp_path: Path) -> None:
    asked, config = Asked(MemoryStore()), config_for(tmp_path)
    first = asked.mount(config)
    assert len(asked.requests) > 40
    again = asked.mount(config, at_ns=NOW_NS + KEPT_NS - 1)
    assert asked.requests == ["list"]
    assert again == first, "the day begins when it was found out"
    later = asked.mount(config, at_ns=NOW_NS + KEPT_NS)
    assert len(asked.requests) > 40
    assert later.capabilities == first.capabilities
    asked.mount(config, at_ns=NOW_NS)
    assert len(asked.requests) > 40, "a time to come is none to go by"


@pytest.mark.parametrize(
    "what", ["version", "place", "endpoint", "environment", "rights", "damaged", "foreign", "gone"]
)
def test_it_is_not_believed_of_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    asked, config = Asked(MemoryStore()), config_for(tmp_path)
    if what == "environment":
        config = config_for(tmp_path, store=StoreConfig(source=Source.parse("s3://bucket/some lake")))
    asked.mount(config)
    if what == "version":
        monkeypatch.setattr(remembering, "__version__", "another")
    elif what == "place":
        store = msgspec.structs.replace(config.store, source=Source.parse("s3://bucket/other lake"))
        config = config_for(tmp_path, store=store)
    elif what == "endpoint":
        store = msgspec.structs.replace(config.store, endpoint_url="http://127.0.0.1:2")
        config = config_for(tmp_path, store=store)
    elif what == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
    elif what == "rights":
        config = config_for(tmp_path, read_only=True)
    elif what == "damaged":
        (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-10])
    elif what == "foreign":
        (tmp_path / FILE).write_text('{"about": 1}')
    else:
        (tmp_path / FILE).unlink()
    findings = asked.mount(config)
    assert findings.about == remembering._about(config)
    assert len(asked.requests) > 40 or (what == "rights" and findings.capabilities.notes == ())
    asked.mount(config)
    assert asked.requests == ["list"]


def test_keys_that_are_wrong_now_are_told(tmp_path: Path) -> None:
    asked, config = Asked(MemoryStore()), config_for(tmp_path)
    asked.mount(config)
    asked.refused = lambda request: request.what == "list"
    with pytest.raises(AccessDenied):
        asked.mount(config)


def test_a_disk_that_takes_nothing_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).mkdir()
    asked, config = Asked(MemoryStore()), config_for(tmp_path)
    asked.mount(config)
    assert "found out again" in caplog.text
    asked.mount(config)
    assert len(asked.requests) > 40


def test_a_store_is_adapted_to_what_is_known_of_it(
    seaweed: Server, new_bucket: Callable[[Server], str], tmp_path: Path
) -> None:
    config = config_for(tmp_path, store=s3_config(seaweed, new_bucket(seaweed)))
    adapted = []
    for _ in range(2):
        store = open_store(config.store)
        try:
            findings = find_out(store, config, random.Random(1))
            remember(config, findings)
            assert isinstance(store, Summing)
            adapted.append((findings, store.sender.sends_sums, getattr(store, "capabilities")))  # noqa: B009
        finally:
            store.close()
    assert adapted[0] == adapted[1]
    assert adapted[0][1], "SeaweedFS checks sums"
