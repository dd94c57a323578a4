"""What the probe finds of each store, and that it leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import (
    ConfigError,
    KeyRefused,
    LakeError,
    PreconditionFailed,
    StoreError,
    Unavailable,
    Unsupported,
)
from lakefs_fuse.store.local.store import LocalStore
from lakefs_fuse.store.open import open_store
from lakefs_fuse.store.probe import probe
from lakefs_fuse.store.protocol import Capabilities, ObjectStore
from lakefs_fuse.store.s3.store import S3Store
from tests import servers
from tests.fakes import FakeClock
from tests.faults import Faults, faulty
from tests.memory_store import MemoryStore, Request, When
from tests.servers import Server, s3_client
from tests.store.lakes import NAMES, config_of, s3_config

CANNOT = {
    "local": {"md5_etags", "checks_crc32"},
    "seaweedfs": {"sorted_listing"},
    "moto": {"copy_if_match", "checks_crc32"},
    "rclone": {
        "partial_status",
        "get_if_match",
        "put_if_absent",
        "complete_if_absent",
        "part_copy",
        "parts_replaceable",
        "complete_etag",
        "lists_markers",
        "copy_if_match",
        "checks_crc32",
    },
}
REFUSED = {"seaweedfs": "\\", "moto": "\n"}
REQUESTS_MAX = 50
FLAGS = {
    name
    for name in Capabilities.__slots__
    if name not in ("name", "notes", "characters_refused") and not name.endswith("if_match")
} | {"get_if_match", "copy_if_match"}
CHANGES = {
    "local": set[str](),
    "seaweedfs": {"put_if_match", "complete_if_match", "delete_if_match"},
    "moto": {"put_if_match", "delete_if_match"},
    "rclone": set[str](),
}
"""Which changes honour If-Match."""


def keys_left(server: Server, bucket: str) -> list[str]:
    client = s3_client(server)
    try:
        page = client.list_objects_v2(Bucket=bucket)
        prefixes = client.list_objects_v2(Bucket=bucket, Delimiter="/").get("CommonPrefixes", [])
    finally:
        client.close()
    return [about["Key"] for about in page.get("Contents", [])] + [about["Prefix"] for about in prefixes]


@pytest.mark.parametrize("name", NAMES)
def test_each_store_is_seen_for_what_it_is(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[Server], str]
) -> None:
    store = open_store(config_of(name, request, tmp_path, new_bucket), Node.of_this_machine())
    try:
        found = probe(store, random.Random(1), SystemClock())
        assert {flag for flag in FLAGS if not getattr(found, flag)} == CANNOT[name]
        honoured = {flag for flag in Capabilities.__slots__ if flag.endswith("if_match") and getattr(found, flag)}
        assert honoured - {"get_if_match", "copy_if_match"} == CHANGES[name]
        assert found.characters_refused == REFUSED.get(name, "")
        shown = CANNOT[name] - ({"md5_etags", "checks_crc32"} if name == "local" else set())
        assert len(found.notes) == len(shown) + (name in REFUSED)
        assert found.name == ("local" if name == "local" else "s3")
        assert list(store.list_page("").objects) == []
        assert list(store.list_page("", delimiter="/").prefixes) == []
        assert list(store.list_multipart("")) == []
    finally:
        store.close()


@pytest.mark.parametrize(
    ("containing", "method"),
    [("uploads", "POST"), ("partNumber=1", "PUT"), ("uploadId=", "POST"), ("/object", "HEAD"), ("marker", "PUT")],
)
def test_nothing_is_left_when_a_probe_fails(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str], containing: str, method: str
) -> None:
    server, controls = faults
    bucket = new_bucket(controls.server)
    store = open_store(s3_config(server, bucket), Node.of_this_machine())
    try:
        controls.error_500(1000, containing=containing, method=method)
        with pytest.raises(Unavailable):
            probe(store, random.Random(1), FakeClock())
        controls.clear()
        assert keys_left(controls.server, bucket) == []
        assert list(store.list_multipart("")) == []
    finally:
        store.close()


@pytest.mark.parametrize("refused", ["", "%", "\\\n", "#?\x7f"])
def test_characters_that_are_refused_are_found(refused: str) -> None:
    store = MemoryStore()

    def refuse(request: Request, when: When) -> None:
        if request.what == "put" and set(request.key) & set(refused):
            raise KeyRefused(request.key)

    store.hook = refuse
    assert set(probe(store, random.Random(1), SystemClock()).characters_refused) == set(refused)
    assert store.objects == {}


class DeletingTogether(MemoryStore):
    """Keys that are deleted together take one request, which may be refused."""

    refuses = False
    together = 0

    def delete_many(self, keys: Sequence[str]) -> Mapping[str, str]:
        self.together += 1
        if self.refuses:
            raise Unsupported("one by one, please")
        for key in keys:
            self.objects.pop(key, None)
        return {}


def test_it_does_not_take_many_requests() -> None:
    """Each is a round trip that the first mount waits for."""
    store = DeletingTogether()
    probe(store, random.Random(1), SystemClock())
    assert store.objects == {}
    assert (store.together, store.count("delete")) == (2, 0)
    assert len(store.requests) <= REQUESTS_MAX


def test_what_is_not_deleted_together_is_deleted_one_by_one() -> None:
    store = DeletingTogether()
    store.refuses = True
    probe(store, random.Random(1), SystemClock())
    assert store.together
    assert store.objects == {}


def test_cleaning_up_is_tried_again(faults: tuple[Server, Faults], new_bucket: Callable[[Server], str]) -> None:
    server, controls = faults
    bucket = new_bucket(controls.server)
    store = open_store(s3_config(server, bucket), Node.of_this_machine())
    try:
        controls.error_500(6, method="DELETE", containing="uploadId=")
        probe(store, random.Random(1), FakeClock())
        assert controls.injected["error_500"] == 6
        assert keys_left(controls.server, bucket) == []
        assert list(store.list_multipart("")) == []
    finally:
        store.close()


def test_a_store_that_fails_now_and_then_is_seen_for_what_it_is(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str]
) -> None:
    server, controls = faults
    bucket = new_bucket(controls.server)
    controls.slow_down(1)
    store = open_store(s3_config(server, bucket), Node.of_this_machine())
    try:
        for fault in ("uploads", "object", "partNumber=1", "order", "marker", "list-type"):
            controls.slow_down(1, containing=fault)
        found = probe(store, random.Random(1), FakeClock())
        assert controls.injected["slow_down"] == 7
        assert {flag for flag in FLAGS if not getattr(found, flag)} == CANNOT["seaweedfs"]
    finally:
        store.close()


def test_a_store_without_multipart_uploads_is_refused_by_name(tmp_path: Path) -> None:
    class Plain(LocalStore):
        def create_multipart(self, key: str, *, metadata: object = None) -> str:
            raise Unsupported("CreateMultipartUpload: NotImplemented (501)")

    store = Plain(str(tmp_path), random.Random(1), SystemClock())
    with pytest.raises(ConfigError, match="multipart uploads"):
        probe(store, random.Random(1), SystemClock())
    assert list(store.list_page("").objects) == []


def test_read_only_credentials_are_enough_to_read(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, controls = faults
    bucket = new_bucket(controls.server)
    s3_client(controls.server).put_object(Bucket=bucket, Key="a", Body=b"0123456789")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.READ_ONLY_ACCESS_KEY)
    store = open_store(s3_config(server, bucket), Node.of_this_machine())
    try:
        with pytest.raises(LakeError):
            store.put("b", b"")
        controls.clear()
        found = probe(store, random.Random(1), SystemClock(), read_only=True)
        assert set(controls.counts) <= {"GET", "HEAD"}
        assert (found.partial_status, found.get_if_match, found.ranges) == (True, True, True)
        assert not (found.put_if_absent or found.part_copy or found.sorted_listing or found.copy_if_match)
        assert found.notes == ()
        assert bytes(store.get("a", 2, 4).data) == b"23"
        assert keys_left(controls.server, bucket) == ["a"]
    finally:
        store.close()


def test_reading_a_bucket_whose_first_object_is_archived_tries_the_next(
    seaweed: Server, new_bucket: Callable[[Server], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket(seaweed)
    for key in ("archived", "other"):
        s3_client(seaweed).put_object(Bucket=bucket, Key=key, Body=b"0123456789")
    observe = S3Store.observe_get

    def refuse(store: S3Store, key: str, start: int, end: int, *, etag: str | None = None) -> tuple[int, int]:
        if key == "archived":
            raise StoreError("get 'archived': InvalidObjectState: restore it")
        return observe(store, key, start, end, etag=etag)

    monkeypatch.setattr(S3Store, "observe_get", refuse)
    store = open_store(s3_config(seaweed, bucket), Node.of_this_machine())
    try:
        assert probe(store, random.Random(1), SystemClock(), read_only=True).partial_status
    finally:
        store.close()


def test_reading_an_empty_bucket_assumes_the_least(seaweed: Server, new_bucket: Callable[[Server], str]) -> None:
    store = open_store(s3_config(seaweed, new_bucket(seaweed)), Node.of_this_machine())
    try:
        found = probe(store, random.Random(1), SystemClock(), read_only=True)
        assert (found.partial_status, found.get_if_match) == (False, False)
    finally:
        store.close()


def test_probe_server_ignoring_conditions_on_completion_finds_it_out(
    moto: Server, new_bucket: Callable[[Server], str]
) -> None:
    """moto does not check signatures, in which the headers are that the proxy takes away."""
    bucket = new_bucket(moto)
    with faulty(moto) as (server, controls):
        store = open_store(s3_config(server, bucket), Node.of_this_machine())
        try:
            controls.completes_blindly = True
            found = probe(store, random.Random(1), SystemClock())
            assert found.put_if_absent and not found.complete_if_absent
            assert any("completing an upload" in note for note in found.notes)
            assert keys_left(moto, bucket) == []
        finally:
            store.close()


def upload_exclusively(store: ObjectStore, key: str, body: bytes) -> None:
    upload_id = store.create_multipart(key)
    part = store.upload_part(key, upload_id, 1, body)
    store.complete_multipart(key, upload_id, [part], if_absent=True)


def test_completion_without_conditions_looks_before_and_after(
    moto: Server, new_bucket: Callable[[Server], str]
) -> None:
    bucket = new_bucket(moto)
    with faulty(moto) as (server, controls):
        store, other = (
            open_store(s3_config(server, bucket), Node.of_this_machine()),
            open_store(s3_config(moto, bucket), Node.of_this_machine()),
        )
        try:
            controls.completes_blindly = True
            probe(store, random.Random(1), SystemClock())
            controls.clear()
            upload_exclusively(store, "a", b"first")
            assert controls.counts["HEAD"] == 2
            with pytest.raises(PreconditionFailed):
                upload_exclusively(store, "a", b"second")
            assert bytes(other.get("a", 0, 9).data) == b"first"
            controls.after_completion = lambda: other.put("b", b"theirs")
            with pytest.raises(PreconditionFailed):
                upload_exclusively(store, "b", b"ours")
        finally:
            other.close()
            store.close()
