"""Options that change requests reach every client of a store: boto3, obstore and the sender of listings."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.credentials import CredentialResolver
from msgspec import structs

from lakefs_fuse.checks import Severity
from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.errors import AccessDenied
from lakefs_fuse.store.checkup import Checkup
from lakefs_fuse.store.lake_record import open_record
from lakefs_fuse.store.probe import probe
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.store.s3 import bucket as s3_bucket
from lakefs_fuse.store.s3.access import connect
from lakefs_fuse.store.s3.store import S3Store, open_s3
from tests.recording import Recorder, recording
from tests.servers import Server, s3_client
from tests.store.lakes import s3_config

CLIENTS = {"boto3", "obstore", "list"}


@pytest.fixture
def recorder(moto: Server) -> Iterator[Recorder]:
    """moto, and what it is asked."""
    with recording(moto) as found:
        yield found


@pytest.fixture
def config(recorder: Recorder, moto: Server, new_bucket: Callable[[Server], str]) -> StoreConfig:
    return s3_config(recorder.server, f"{new_bucket(moto)}/lake")


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
    config: StoreConfig, recorder: Recorder, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = s3_client(moto)
    client.put_bucket_acl(Bucket=config.source.bucket, ACL="public-read")
    client.put_object(Bucket=config.source.bucket, Key="lake/data", Body=b"data", ACL="public-read")
    client.close()

    def load_credentials(_resolver: CredentialResolver) -> Any:
        raise AssertionError("credentials are looked up")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with monkeypatch.context() as patched:
        patched.setattr(CredentialResolver, "load_credentials", load_credentials)
        unsigned = structs.replace(config, unsigned=True)
        with opened(unsigned) as store:
            read_in_every_way(store, "data")
            open_record(store, unsigned, random.Random(1), SystemClock(), may_write=False)
        assert s3_bucket.credentials(connect(unsigned, SystemClock()), SystemClock()).values == {"source": "none"}
    assert {request.client for request in recorder.requests} == CLIENTS
    assert {request.method for request in recorder.requests} <= {"GET", "HEAD"}, "nothing is written"
    for request in recorder.requests:
        assert not {"authorization", "x-amz-security-token"} & request.headers.keys(), request
        assert "X-Amz-Signature" not in request.path


def test_unsigned_store_that_is_not_public_says_what_to_do(config: StoreConfig, recorder: Recorder) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    recorder.refuses = lambda request: (403, {"Content-Type": "application/xml"}, body)
    with pytest.raises(AccessDenied, match="leave out --unsigned"):
        open_s3(structs.replace(config, unsigned=True), SystemClock(), None)


# -- requester pays ----------------------------------------------------------------------------------------------


def use_every_request(store: S3Store) -> None:
    """Whatever a mount, a probe and an administrator's command send."""
    probe(store, random.Random(1), SystemClock())
    store.adapt(Capabilities(name="s3"))
    checkup = Checkup(store, random.Random(2), SystemClock())
    failures = [result for result in checkup.writing() if result.severity is Severity.FAILED]
    assert failures == []
    checkup.clean()


def test_requester_pays_with_every_request(config: StoreConfig, recorder: Recorder) -> None:
    paying = structs.replace(config, requester_pays=True)
    with opened(paying) as store:
        use_every_request(store)
        list(s3_bucket.configuration(connect(paying, SystemClock())))
    assert {request.client for request in recorder.requests} == CLIENTS
    assert {request.method for request in recorder.requests} == {"GET", "HEAD", "PUT", "POST", "DELETE"}
    for request in recorder.requests:
        assert request.headers.get("x-amz-request-payer") == "requester", request
        assert "x-amz-request-payer" in request.headers["authorization"], "it is signed"


def test_owner_pays_unless_told_whatever_the_environment_says(
    config: StoreConfig, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore reads a variable for it, which boto3 does not know."""
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    with opened(config) as store:
        store.put("data", b"data")
        read_in_every_way(store, "data")
    assert {request.client for request in recorder.requests} == CLIENTS
    assert not any("x-amz-request-payer" in request.headers for request in recorder.requests)


@pytest.mark.parametrize(("is_payer", "severity"), [(True, Severity.OK), (False, Severity.FAILED)])
def test_doctor_asks_for_the_option_where_requesters_pay(
    config: StoreConfig, recorder: Recorder, is_payer: bool, severity: Severity
) -> None:
    body = b"<RequestPaymentConfiguration><Payer>Requester</Payer></RequestPaymentConfiguration>"
    recorder.refuses = lambda request: (
        (200, {"Content-Type": "application/xml"}, body) if request.path.endswith("?requestPayment") else None
    )
    access = connect(structs.replace(config, requester_pays=is_payer), SystemClock())
    (found,) = (result for result in s3_bucket.configuration(access) if result.check == "store.payer")
    assert found.severity is severity
    assert ("give --requester-pays" in found.text) is not is_payer
