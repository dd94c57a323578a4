"""Options that change requests reach every client of a store: boto3, obstore and the sender of listings."""

from __future__ import annotations

import base64
import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from botocore.credentials import CredentialResolver
from msgspec import structs

from lakefs_fuse.checks import Severity
from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.errors import AccessDenied, PreconditionFailed, StoreError
from lakefs_fuse.store.checkup import Checkup
from lakefs_fuse.store.lake_record import open_record
from lakefs_fuse.store.probe import probe
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.store.s3 import bucket as s3_bucket
from lakefs_fuse.store.s3.access import connect
from lakefs_fuse.store.s3.store import S3Store, open_s3
from lakefs_fuse.store.s3.stored_objects import BILLED_BYTES_MIN
from tests.recording import Recorder, Request
from tests.servers import Server, s3_client
from tests.store.lakes import config_of

CLIENTS = {"boto3", "obstore", "list"}


@contextlib.contextmanager
def opened(config: StoreConfig) -> Iterator[S3Store]:
    """A store whose capabilities let every client of it be used."""
    store = open_s3(config, SystemClock(), None)
    store.adapt(Capabilities(name="s3"))
    try:
        yield store
    finally:
        store.close()


def read_in_every_way(store: S3Store, key: str) -> None:
    """With each client."""
    assert [meta.key for meta in store.list_page("").objects] == [key]
    meta = store.head(key)
    assert bytes(store.get(key, 0, 3, etag=meta.etag).data) == b"dat"
    assert store.observe_get(key, 0, 3) == (206, 3)
    store.time_ns()


# -- unsigned ----------------------------------------------------------------------------------------------------


def test_unsigned_store_sends_no_signature_and_looks_no_credentials_up(
    recorded_config: StoreConfig, recorder: Recorder, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = s3_client(moto)
    client.put_bucket_acl(Bucket=recorded_config.source.bucket, ACL="public-read")
    client.put_object(Bucket=recorded_config.source.bucket, Key="lake/data", Body=b"data", ACL="public-read")
    client.close()

    def load_credentials(_resolver: CredentialResolver) -> Any:
        raise AssertionError("credentials are looked up")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with monkeypatch.context() as patched:
        patched.setattr(CredentialResolver, "load_credentials", load_credentials)
        unsigned = structs.replace(recorded_config, unsigned=True)
        with opened(unsigned) as store:
            read_in_every_way(store, "data")
            open_record(store, unsigned, random.Random(1), SystemClock(), may_write=False)
        assert s3_bucket.credentials(connect(unsigned, SystemClock()), SystemClock()).values == {"source": "none"}
    assert {request.client for request in recorder.requests} == CLIENTS
    assert {request.method for request in recorder.requests} <= {"GET", "HEAD"}, "nothing is written"
    for request in recorder.requests:
        assert not {"authorization", "x-amz-security-token"} & request.headers.keys(), request
        assert "X-Amz-Signature" not in request.path


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "UnsupportedAlgorithm")])
def test_unsigned_store_that_is_not_public_says_what_to_do(
    recorded_config: StoreConfig, recorder: Recorder, status: int, code: str
) -> None:
    """As S3 answers, and rclone."""
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    recorder.refuses = lambda request: (status, {"Content-Type": "application/xml"}, body)
    with pytest.raises(AccessDenied, match="leave out --unsigned"):
        open_s3(structs.replace(recorded_config, unsigned=True), SystemClock(), None)


def test_unsigned_request_that_is_refused_says_what_to_do(
    recorded_config: StoreConfig, recorder: Recorder, moto: Server
) -> None:
    """By each client: a bucket that everybody may list has objects that not everybody may read."""
    client = s3_client(moto)
    client.put_bucket_acl(Bucket=recorded_config.source.bucket, ACL="public-read")
    client.close()
    body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    with opened(structs.replace(recorded_config, unsigned=True)) as store:
        recorder.refuses = lambda request: (403, {"Content-Type": "application/xml"}, body)
        for read in (
            lambda: store.get("data", 0, 1),
            lambda: store.head("data"),
            lambda: store.observe_get("data", 0, 1),
            lambda: store.list_page(""),
        ):
            with pytest.raises(AccessDenied, match=r"does not let everybody .*: leave out --unsigned") as raised:
                read()
            assert "these credentials" not in str(raised.value)


# -- requester pays ----------------------------------------------------------------------------------------------


def use_every_request(store: S3Store) -> None:
    """Whatever a mount, a probe and an administrator's command send."""
    probe(store, random.Random(1), SystemClock())
    store.adapt(Capabilities(name="s3"))
    checkup = Checkup(store, random.Random(2), SystemClock())
    failures = [result for result in checkup.writing() if result.severity is Severity.FAILED]
    assert failures == []
    checkup.clean()


def test_owner_pays_unless_told_whatever_the_environment_says(
    recorded_config: StoreConfig, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore reads a variable for it, which boto3 does not know."""
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    with opened(recorded_config) as store:
        store.put("data", b"data")
        read_in_every_way(store, "data")
    assert {request.client for request in recorder.requests} == CLIENTS
    assert not any("x-amz-request-payer" in request.headers for request in recorder.requests)


@pytest.mark.parametrize(("is_payer", "severity"), [(True, Severity.OK), (False, Severity.FAILED)])
def test_doctor_asks_for_the_option_where_requesters_pay(
    recorded_config: StoreConfig, recorder: Recorder, is_payer: bool, severity: Severity
) -> None:
    body = b"<RequestPaymentConfiguration><Payer>Requester</Payer></RequestPaymentConfiguration>"
    recorder.refuses = lambda request: (
        (200, {"Content-Type": "application/xml"}, body) if request.path.endswith("?requestPayment") else None
    )
    access = connect(structs.replace(recorded_config, requester_pays=is_payer), SystemClock())
    (found,) = (result for result in s3_bucket.configuration(access) if result.check == "store.payer")
    assert found.severity is severity
    assert ("give --requester-pays" in found.text) is not is_payer


# -- encryption and storage class --------------------------------------------------------------------------------

SSE, CLASS = "x-amz-server-side-encryption", "x-amz-storage-class"
SSE_KEY = f"{SSE}-aws-kms-key-id"
KEY_ID = "arn:aws:kms:us-east-1:1:key/some-id"


def makes_object(request: Request) -> bool:
    """Whether it is one of the three requests that say how an object is to be stored."""
    begins_upload = request.method == "POST" and request.path.endswith("?uploads")
    return begins_upload or (request.method == "PUT" and "uploadId=" not in request.path)


def test_every_request_says_who_pays_and_each_object_how_it_is_encrypted(
    recorded_config: StoreConfig, recorder: Recorder
) -> None:
    config = structs.replace(recorded_config, requester_pays=True, sse=f"kms:{KEY_ID}")
    with opened(config) as store:
        use_every_request(store)
        list(s3_bucket.configuration(connect(config, SystemClock())))
    assert {request.client for request in recorder.requests} == CLIENTS
    assert {request.method for request in recorder.requests} == {"GET", "HEAD", "PUT", "POST", "DELETE"}
    storing = [request for request in recorder.requests if makes_object(request)]
    assert {(request.client, request.method) for request in storing} == {
        ("boto3", "PUT"), ("boto3", "POST"), ("obstore", "PUT"),
    }  # fmt: skip
    assert any("x-amz-copy-source" in request.headers for request in storing)
    for request in recorder.requests:
        assert request.headers.get("x-amz-request-payer") == "requester", request
        assert "x-amz-request-payer" in request.headers["authorization"], "it is signed"
        sent = {name: value for name, value in request.headers.items() if name in (SSE, SSE_KEY)}
        assert sent == ({SSE: "aws:kms", SSE_KEY: KEY_ID} if makes_object(request) else {}), request


@pytest.mark.parametrize(("sse", "expected"), [("", {}), ("s3", {SSE: "AES256"}), ("kms", {SSE: "aws:kms"})])
def test_encryption_without_a_key_is_asked_for_by_both_clients(
    recorded_config: StoreConfig, recorder: Recorder, sse: str, expected: dict[str, str]
) -> None:
    with opened(structs.replace(recorded_config, sse=sse)) as store:
        store.put("small", b"data")
        store.put("other", b"data", metadata={"content-type": "none"})
    storing = [request for request in recorder.requests if makes_object(request)]
    assert [request.client for request in storing] == ["obstore", "boto3"]
    for request in storing:
        assert {name: value for name, value in request.headers.items() if name.startswith(SSE)} == expected


def test_object_stored_with_key_of_kms_has_it_and_is_read_back(
    recorded_config: StoreConfig, moto: Server, recorder: Recorder
) -> None:
    with opened(structs.replace(recorded_config, sse=f"kms:{KEY_ID}", storage_class="STANDARD_IA")) as store:
        store.put("small", b"data")
        store.put("large", b"x" * (2 << 20))
        upload_id = store.create_multipart("parts")
        store.complete_multipart("parts", upload_id, [store.upload_part("parts", upload_id, 1, b"data")])
        store.copy("small", "copied")
        assert not store.has_md5_etag("small")
        for key in ("small", "parts", "copied"):
            assert bytes(store.get(key, 0, 10).data) == b"data"
    client = s3_client(moto)
    for key in ("small", "large", "parts", "copied"):
        found = client.head_object(Bucket=recorded_config.source.bucket, Key=f"lake/{key}")
        assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == ("aws:kms", KEY_ID), key
        assert found["StorageClass"] == "STANDARD_IA", key
    client.close()


def test_storage_class_is_that_of_files_and_not_of_small_records(
    recorded_config: StoreConfig, recorder: Recorder
) -> None:
    body = b"x" * BILLED_BYTES_MIN
    with opened(structs.replace(recorded_config, storage_class="GLACIER_IR")) as store:
        for key, stored in (("file", b"x"), (".lakefs/commits/pack", body), (".lakefs/lake", body[1:])):
            store.put(key, stored)
            store.put(f"{key}-too", stored, metadata={"content-type": "none"})
        store.copy("file", ".lakefs/objects/copy")
    classes = {
        unquote(request.path).partition("/lake/")[2]: (request.client, request.headers.get(CLASS))
        for request in recorder.requests
        if makes_object(request)
    }
    assert classes == {
        "file": ("obstore", "GLACIER_IR"), "file-too": ("boto3", "GLACIER_IR"),
        ".lakefs/commits/pack": ("obstore", "GLACIER_IR"), ".lakefs/commits/pack-too": ("boto3", "GLACIER_IR"),
        ".lakefs/lake": ("obstore", None), ".lakefs/lake-too": ("boto3", None),
        ".lakefs/objects/copy": ("boto3", "GLACIER_IR"),
    }  # fmt: skip


@pytest.mark.parametrize("value", ["aws:kms", "sse-c"])
def test_variables_of_obstore_alone_change_nothing(
    recorded_config: StoreConfig, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Other programs that use the same library are configured by them."""
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", value)
    monkeypatch.setenv("AWS_SSE_CUSTOMER_KEY_BASE64", base64.b64encode(b"k" * 32).decode())
    with opened(recorded_config) as store:
        store.put("data", b"data")
        read_in_every_way(store, "data")
    assert {request.client for request in recorder.requests} == CLIENTS
    for request in recorder.requests:
        assert not any(name.startswith(SSE) for name in request.headers), request


@pytest.mark.parametrize("value", ["etag", "disabled", "unknown"])
def test_small_conditional_puts_go_through_obstore_whatever_the_environment_says(
    recorded_config: StoreConfig, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Saving over a file that exists is such a request, and boto3 takes 2 ms more for it."""
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", value)
    with opened(recorded_config) as store:
        first = store.put("data", b"data", if_absent=True).etag
        second = store.put("data", b"date", etag=first).etag
        assert second != first
        for condition in ({"if_absent": True}, {"etag": first}):
            with pytest.raises(PreconditionFailed):
                store.put("data", b"lost", **condition)
        assert store.head("data").etag == second
    puts = [request for request in recorder.requests if makes_object(request)]
    assert [(put.client, put.headers.get("if-match", "")) for put in puts] == [
        ("obstore", ""), ("obstore", f'"{first}"'), ("obstore", ""), ("obstore", f'"{first}"')
    ]  # fmt: skip


def test_refused_storage_class_says_what_to_do(recorded_config: StoreConfig, recorder: Recorder) -> None:
    body = b"<Error><Code>InvalidStorageClass</Code><Message>The storage class is not valid</Message></Error>"
    recorder.refuses = lambda request: (
        (400, {"Content-Type": "application/xml"}, body) if CLASS in request.headers else None
    )
    with opened(structs.replace(recorded_config, storage_class="NEARLINE")) as store:
        for metadata in ({}, {"content-type": "none"}):
            with pytest.raises(StoreError, match="choose another with --storage-class"):
                store.put("data", b"data", metadata=metadata)


@pytest.mark.parametrize("name", ["seaweedfs", "rclone"])
def test_options_are_taken_by_other_servers(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[Server], str]
) -> None:
    """As the manual says of them."""
    plain = config_of(name, request, tmp_path, new_bucket)
    with opened(structs.replace(plain, requester_pays=True, storage_class="STANDARD_IA")) as store:
        for key, body in (("small", b"data"), ("large", b"data" + b"x" * (2 << 20))):
            store.put(key, body)
            store.adapt(Capabilities(name="s3", partial_status=False))
            assert bytes(store.get(key, 0, 4).data) == b"data"
    with pytest.raises(AccessDenied, match="leave out --unsigned"):
        open_s3(structs.replace(plain, unsigned=True), SystemClock(), None)
