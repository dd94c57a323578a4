"""What is particular to S3: keys no file could have, damaged uploads, errors, listings as servers write them."""

from __future__ import annotations

import contextlib
import io
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote, quote_plus
from xml.etree.ElementTree import ParseError
from xml.sax.saxutils import escape

import pytest
import urllib3
from botocore.awsrequest import AWSResponse
from botocore.loaders import JSONFileLoader
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.errors import (
    AccessDenied,
    KeyConflict,
    KeyRefused,
    NoSuchBucket,
    NotCarriedOut,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreFull,
    Unavailable,
    UnclearConflict,
    Unsupported,
)
from lakefs_fuse.meta.entry import ETAG_BYTES_MAX
from lakefs_fuse.store.protocol import ETAG_CHARS_MAX, Capabilities, FileSlice, ObjectMeta, read_etag
from lakefs_fuse.store.s3 import list_pages
from lakefs_fuse.store.s3.access import connect
from lakefs_fuse.store.s3.errors import SumRefused, WrongRegion, from_answer, from_xml
from lakefs_fuse.store.s3.fast_path import is_expressible
from lakefs_fuse.store.s3.list_pages import parse_page
from lakefs_fuse.store.s3.store import S3Store
from lakefs_fuse.store.s3.upload import BodyReader, etag_of
from tests import recorded
from tests.faults import Faults
from tests.servers import Server, s3_client
from tests.store.lakes import s3_config
from tests.tiers import examples

MIB = 1 << 20


@pytest.fixture
def bucket(moto: Server, new_bucket: Callable[[Server], str]) -> str:
    return new_bucket(moto)


def opened(config: StoreConfig) -> S3Store:
    return S3Store(connect(config, SystemClock()), SystemClock())


@pytest.fixture
def on_moto(moto: Server, bucket: str) -> Iterator[S3Store]:
    """The store that takes keys exactly as they are."""
    store = opened(s3_config(moto, bucket))
    store.adapt(Capabilities(name="s3", copy_if_match=False))
    yield store
    store.close()


def test_keys_that_are_no_paths_are_read_as_they_are(on_moto: S3Store, moto: Server, bucket: str) -> None:
    """Others may put them; each is its own object, none is taken for another."""
    keys = ["a//b", "a/b", "./x", "x", "y/../x", "tab\tx", "dir/", "dir", "//", "d\\e"]
    client = s3_client(moto)
    for number, key in enumerate(keys):
        client.put_object(Bucket=bucket, Key=key, Body=bytes([number]) * 10)
    client.close()
    assert {meta.key for meta in on_moto.list_page("").objects} == set(keys)
    for number, key in enumerate(keys):
        meta = on_moto.head(key)
        fetched = on_moto.get(key, 2, 5, etag=meta.etag)
        assert bytes(fetched.data) == bytes([number]) * 3
    on_moto.delete("a//b")
    assert on_moto.delete_many(["./x", "dir/"]) == {}
    assert {meta.key for meta in on_moto.list_page("").objects} == set(keys) - {"a//b", "./x", "dir/"}


def test_delete_many_refused_together_deletes_alone(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str]
) -> None:
    """A policy may allow DeleteObject and refuse DeleteObjects."""
    server, controls = faults
    store = opened(s3_config(server, new_bucket(controls.server)))
    try:
        keys = [f"k{number}" for number in range(5)]
        for key in keys:
            store.put(key, b"x")
        controls.forbid(1000, method="POST")
        assert store.delete_many(keys[:3]) == {}
        assert {meta.key for meta in store.list_page("").objects} == set(keys[3:])
        assert store.delete_many(keys) == {}
        assert controls.injected["forbid"] == 1, "it is not asked for again"
        controls.forbid(1000, method="DELETE")
        store.put("k9", b"x")
        assert list(store.delete_many(["k9"])) == ["k9"]
    finally:
        store.close()


def test_delete_many_refused_for_a_while_deletes_together_after_that(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str]
) -> None:
    """A token that has expired refuses everything, and is renewed."""
    server, controls = faults
    store = opened(s3_config(server, new_bucket(controls.server)))
    try:
        keys = ["a", "b"]
        for key in keys:
            store.put(key, b"x")
        controls.forbid(1000)
        assert list(store.delete_many(keys)) == keys
        controls.clear()
        assert store.delete_many(keys) == {}
        assert controls.counts == {"POST": 1}
    finally:
        store.close()


@pytest.mark.parametrize(
    ("status", "date", "expected"),
    [
        (403, "Tue, 14 Nov 2023 22:13:20 GMT", 1_700_000_000_500_000_000),
        (200, "Tue, 14 Nov 2023 22:13:20 GMT", 1_700_000_000_500_000_000),
        (200, None, Unsupported),
        (200, "some day", Unsupported),
        (403, None, Unsupported),
        (404, "Tue, 14 Nov 2023 22:13:20 GMT", NotFound),
        (503, "Tue, 14 Nov 2023 22:13:20 GMT", Unavailable),
    ],
)
def test_the_time_is_the_date_of_an_answer_even_of_a_refusal(
    moto: Server, bucket: str, status: int, date: str | None, expected: int | type[StoreError]
) -> None:
    access = connect(s3_config(moto, bucket), SystemClock())
    headers = {} if date is None else {"date": date}

    def answer(**_: object) -> AWSResponse:
        return AWSResponse("", status, headers, urllib3.HTTPResponse(io.BytesIO(), preload_content=False))

    access.client.meta.events.register_first("before-send.s3.HeadBucket", answer)
    store = S3Store(access, SystemClock())
    with contextlib.closing(store):
        if isinstance(expected, int):
            assert store.time_ns() == expected
        else:
            with pytest.raises(expected):
                store.time_ns()


def test_a_prefix_hides_what_lies_outside(moto: Server, bucket: str) -> None:
    client = s3_client(moto)
    for key in ("a", "lake", "lake/a", "lake/b/c", "lake2/a", "lake/"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    client.close()
    store = opened(s3_config(moto, f"{bucket}/lake"))
    page = store.list_page("", delimiter="/")
    assert ([meta.key for meta in page.objects], list(page.prefixes)) == (["a"], ["b/"])
    assert [meta.key for meta in store.list_page("", start_after="a").objects] == ["b/c"]
    store.close()


@pytest.mark.parametrize(
    ("key", "fits"),
    [
        ("a/b c", True),
        ("a%20b", True),
        ("é", True),
        ("...", True),
        ("a//b", False),
        ("/a", False),
        ("a/", False),
        ("./a", False),
        ("a/../b", False),
        ("tab\t", False),
        ("del\x7f", False),
        ("", False),
    ],
)
def test_what_obstore_can_express(key: str, fits: bool) -> None:
    assert is_expressible(key) is fits


def test_virtual_hosts_and_paths(seaweed: Server) -> None:
    for style, endpoint, expected in (
        ("auto", seaweed.url, (seaweed.url, False)),
        ("path", "http://host:9000/base", ("http://host:9000/base", False)),
        ("virtual", "http://host:9000", ("http://bucket.host:9000", True)),
        ("auto", None, ("https://bucket.s3.eu-west-1.amazonaws.com", True)),
        ("path", None, ("https://s3.eu-west-1.amazonaws.com", False)),
    ):
        config = s3_config(seaweed, "bucket")
        access = connect(
            type(config)(source=config.source, endpoint_url=endpoint, addressing_style=style, region="eu-west-1"),
            SystemClock(),
        )
        assert (access.base_url, access.virtual_host) == expected
        assert access.encrypted == (endpoint is None)


# -- uploads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("md5_etags", "checks_crc32"), [(True, True), (True, False), (False, True), (False, False)])
def test_an_upload_damaged_on_the_way_is_noticed(
    faults: tuple[Server, Faults],
    new_bucket: Callable[[Server], str],
    tmp_path: Path,
    md5_etags: bool,
    checks_crc32: bool,
) -> None:
    """By the store, which is told the CRC-32, where it looks; else by comparing the ETag; and where ETags say nothing,
    by the store, which is told the MD5 sum."""
    server, controls = faults
    store = opened(s3_config(server, new_bucket(controls.server)))
    store.adapt(Capabilities(name="s3", md5_etags=md5_etags, checks_crc32=checks_crc32))
    path = tmp_path / "body"
    path.write_bytes(os.urandom(2 * MIB))
    upload_id = store.create_multipart("a")
    with path.open("rb") as file:
        body = FileSlice(file.fileno(), 0, 2 * MIB)
        calls: list[Callable[[], object]] = [
            lambda: store.upload_part("a", upload_id, 1, body),
            lambda: store.upload_part("a", upload_id, 1, b"x" * 1000),
            lambda: store.put("b", body),
        ]
        if md5_etags or checks_crc32:
            calls.append(lambda: store.put("small", b"small"))
        for number, call in enumerate(calls):
            controls.corrupt(1, method="PUT")
            with pytest.raises(Unavailable):
                call()
            if key := {2: "b", 3: "small"}.get(number):
                # Refused by the store before it was visible; small ones are put again by the client's retry.
                refused = key == "b" or not md5_etags
                with pytest.raises(NotFound) if refused else contextlib.nullcontext():
                    store.head(key)
            call()
    assert controls.injected["corrupt"] == len(calls)
    store.abort_multipart("a", upload_id)
    store.close()


def test_connect_again_parses_no_service_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find a lake takes a client for each level of its path."""
    config = StoreConfig(source=Source("s3", "bucket", ""), endpoint_url="http://127.0.0.1:1", region="us-east-1")
    connect(config, SystemClock())

    def load_file(_loader: JSONFileLoader, path: str) -> object:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(JSONFileLoader, "load_file", load_file)
    connect(config, SystemClock())


def test_a_large_part_is_streamed(seaweed: Server, new_bucket: Callable[[Server], str], tmp_path: Path) -> None:
    store = opened(s3_config(seaweed, new_bucket(seaweed)))
    store.adapt(Capabilities(name="s3"))
    path = tmp_path / "sparse"
    with path.open("wb+") as file:
        file.truncate(100 * MIB)
        upload_id = store.create_multipart("a")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        store.upload_part("a", upload_id, 1, FileSlice(file.fileno(), 0, 100 * MIB))
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 30 * 1024
    store.abort_multipart("a", upload_id)
    store.close()


@pytest.mark.parametrize("begun_with_sums", [True, False])
def test_an_upload_begun_by_a_mount_that_knew_the_store_otherwise_goes_on(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str], begun_with_sums: bool
) -> None:
    """Some stores insist that parts say sums if, and only if, their upload was begun so."""
    server, controls = faults
    store = opened(s3_config(server, new_bucket(controls.server)))
    store.adapt(Capabilities(name="s3", checks_crc32=begun_with_sums))
    upload_id = store.create_multipart("a")
    store.adapt(Capabilities(name="s3", checks_crc32=not begun_with_sums))
    controls.refuse(1, method="PUT")
    part = store.upload_part("a", upload_id, 1, b"x" * 1000)
    assert (controls.injected["refuse"], controls.counts["PUT"]) == (1, 2)
    store.complete_multipart("a", upload_id, [part])
    assert bytes(store.get("a", 0, 1000).data) == b"x" * 1000
    store.close()


def test_body_reader_rewinds(tmp_path: Path) -> None:
    path = tmp_path / "a"
    data = os.urandom(3 * MIB)
    path.write_bytes(data)
    with path.open("rb") as file:
        reader = BodyReader(FileSlice(file.fileno(), 100, 2 * MIB), digest=True, limiter=None)
        assert (reader.seek(0, 2), reader.tell(), reader.seek(0)) == (2 * MIB, 2 * MIB, 0)
        first = reader.read() + reader.read(-1)
        digest = reader.hexdigest()
        assert first == data[100 : 100 + 2 * MIB]
        assert reader.read() == b""
        reader.seek(0)
        assert reader.read(10) + reader.read(10) == first
        assert reader.hexdigest() == digest


def test_a_small_put_needs_no_head_and_a_copy_one(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str]
) -> None:
    server, controls = faults
    store = opened(s3_config(server, new_bucket(controls.server)))
    store.adapt(Capabilities(name="s3"))
    controls.clear()
    store.put("a", b"x", if_absent=True)
    assert controls.counts == {"PUT": 1}
    controls.clear()
    store.copy("a", "b", etag=store.head("a").etag)
    assert controls.counts == {"PUT": 1, "HEAD": 2}
    store.close()


@pytest.mark.parametrize("size", [1000, 2 * MIB], ids=["obstore", "boto3"])
def test_unknown_409_is_a_refused_condition_only_where_there_was_one(
    size: int, faults: tuple[Server, Faults], new_bucket: Callable[[Server], str]
) -> None:
    server, controls = faults
    store = opened(s3_config(server, new_bucket(controls.server)))
    with contextlib.closing(store):
        store.adapt(Capabilities(name="s3"))
        store.put("there", b"x")
        requests: list[tuple[Callable[[], object], type[StoreError]]] = [
            (lambda: store.put("a", b"x" * size), Unavailable),
            (lambda: store.put("a", b"x" * size, if_absent=True), UnclearConflict),
            (lambda: store.copy("there", "a"), Unavailable),
            (lambda: store.create_multipart("a"), Unavailable),
            (lambda: store.delete("a"), Unavailable),
        ]
        for number, (request, kind) in enumerate(requests, 1):
            controls.odd_409(1, containing="/a")
            with pytest.raises(kind) as caught:
                request()
            assert (type(caught.value), controls.injected["odd_409"]) == (kind, number)


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("NoSuchKey", 404, NotFound),
        ("", 404, NotFound),
        ("404", 404, NotFound),
        ("NoSuchUpload", 404, NotFound),
        ("NoSuchBucket", 404, NoSuchBucket),
        ("AccessDenied", 403, AccessDenied),
        ("InvalidAccessKeyId", 403, AccessDenied),
        ("SignatureDoesNotMatch", 403, AccessDenied),
        ("403", 403, AccessDenied),
        ("PreconditionFailed", 412, PreconditionFailed),
        ("NotImplemented", 501, Unsupported),
        ("", 501, Unsupported),
        ("MethodNotAllowed", 405, Unsupported),
        ("KeyTooLongError", 400, KeyRefused),
        ("XMinioParentIsObject", 400, KeyConflict),
        ("XMinioObjectExistsAsDirectory", 409, KeyConflict),
        ("ObjectParentIsFile", 409, KeyConflict),
        ("ExistingObjectIsDirectory", 409, KeyConflict),
        ("QuotaExceeded", 403, StoreFull),
        ("XMinioAdminBucketQuotaExceeded", 400, StoreFull),
        ("", 507, StoreFull),
        ("PermanentRedirect", 301, WrongRegion),
        ("AuthorizationHeaderMalformed", 400, WrongRegion),
        ("InternalError", 500, Unavailable),
        ("SlowDown", 503, NotCarriedOut),
        ("RequestTimeout", 400, Unavailable),
        ("ConditionalRequestConflict", 409, Unavailable),
        ("OperationAborted", 409, Unavailable),
        ("BadDigest", 400, SumRefused),
        ("", 502, Unavailable),
        ("", 429, NotCarriedOut),
        ("EntityTooSmall", 400, StoreError),
    ],
)
def test_the_table_of_errors(code: str, status: int, kind: type[StoreError]) -> None:
    error = from_answer("get 'a'", code, status, "a reason")
    assert type(error) is kind
    assert str(error).startswith("get 'a': ")
    if isinstance(error, Unavailable):
        assert error.throttled == (code == "SlowDown" or status == 429)


def test_what_a_store_says_of_credentials_is_not_passed_on() -> None:
    body = b"""<Error><Code>SignatureDoesNotMatch</Code><Message>m AKIAEXAMPLE</Message>
        <AWSAccessKeyId>AKIAEXAMPLE</AWSAccessKeyId><StringToSign>AWS4 secret</StringToSign></Error>"""
    text = str(from_xml("list the lake", 403, body))
    assert "AKIAEXAMPLE" not in text
    assert "secret key is wrong" in text


def test_answer_that_is_cut_short_as_urllib3_says_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore 1.42 and before passes on what urllib3 raises while the body of an error is read."""

    def cut_short(*_: object) -> AWSResponse:
        raise urllib3.exceptions.ProtocolError("Connection broken: 120 bytes read, 49880 more expected")

    store = opened(s3_config(Server("nobody", "http://127.0.0.1:9"), "bucket"))
    monkeypatch.setattr("botocore.httpsession.URLLib3Session.send", cut_short)
    with contextlib.closing(store):
        for call in (lambda: store.get("not//expressible", 0, 5), lambda: store.list_page(""), store.time_ns):
            with pytest.raises(Unavailable, match=r"\(ProtocolError\)"):
                call()


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Mapping[str, object]) -> S3Store:
    """A store whose requests by boto3 are answered so, in order, the last for ever."""
    left = list(answers)

    def answer(*_: object) -> Mapping[str, object]:
        return left.pop(0) if len(left) > 1 else left[0]

    store = opened(s3_config(Server("nobody", "http://127.0.0.1:9"), "bucket"))
    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", answer)
    return store


@pytest.mark.parametrize(("answered", "body"), [("bytes 5-9/100", b"01234"), ("bytes 0-4/100", b"0123")])
def test_range_that_is_not_the_one_asked_for_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, answered: str, body: bytes
) -> None:
    answer = {"Body": io.BytesIO(body), "ContentRange": answered, "ContentLength": 5, "ETag": '"e"'}
    with contextlib.closing(answering(monkeypatch, answer)) as store:
        with pytest.raises(Unavailable, match="were due"):
            store.get("not//expressible", 0, 5)


@pytest.mark.parametrize("key", ["key", "not//expressible"])
def test_range_that_is_answered_with_the_whole_object_is_cut_out_of_it(key: str) -> None:
    """By a server that answered the probe with 206."""
    answer = recorded.Answer(200, "0123456789", {"ETag": '"e"', "Last-Modified": "Mon, 01 Sep 2025 00:00:00 GMT"})
    with recorded.answering(answer) as port:
        config = s3_config(Server("nobody", f"http://127.0.0.1:{port}"), "bucket")
        with contextlib.closing(opened(config)) as store:
            store.adapt(Capabilities(name="s3"))
            for start, end, data in ((0, 10, b"0123456789"), (0, 100, b"0123456789"), (2, 5, b"234"), (20, 30, b"")):
                fetched = store.get(key, start, end, etag="e")
                assert (bytes(fetched.data), fetched.meta.size) == (data, 10)
            with pytest.raises(PreconditionFailed):
                store.get(key, 0, 10, etag="other")


def test_keys_that_may_be_deleted_later_are_unavailable_and_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"Key": "a", "Code": "OddCode", "Message": "why"}
    busy = [{"Key": "b", "Code": code, "Message": ""} for code in ("SlowDown", "InternalError")]
    gone = {"Key": "c", "Code": "NoSuchKey", "Message": ""}
    answers = [{"Errors": [odd, busy[0], gone]}, {"Errors": [busy[1]]}, {"Errors": [odd, gone]}]
    with contextlib.closing(answering(monkeypatch, *answers)) as store:
        for is_throttled in (True, False):
            with pytest.raises(Unavailable) as raised:
                store.delete_many(["a", "b", "c"])
            assert raised.value.throttled is is_throttled
        assert store.delete_many(["a", "b", "c"]) == {"a": "OddCode why"}


@pytest.mark.parametrize("markers", [{"NextKeyMarker": "k"}, {"NextKeyMarker": "k", "NextUploadIdMarker": "u"}, {}])
def test_listing_of_uploads_that_does_not_go_on_ends(
    monkeypatch: pytest.MonkeyPatch, markers: dict[str, object]
) -> None:
    upload = {"Key": "k", "UploadId": "u", "Initiated": datetime(2026, 1, 1, tzinfo=UTC)}
    answer = {"IsTruncated": True, **markers, "Uploads": [upload]}
    with contextlib.closing(answering(monkeypatch, answer)) as store:
        assert {(found.key, found.upload_id) for found in store.list_multipart("")} == {("k", "u")}


def test_odd_conflict_of_a_request_without_a_condition_is_unavailable(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str], tmp_path: Path
) -> None:
    server, controls = faults
    with contextlib.closing(opened(s3_config(server, new_bucket(controls.server)))) as store:
        etag = store.put("a", b"x").etag
        store.adapt(Capabilities(name="s3", delete_if_match=True, put_if_match=True))
        with open(tmp_path / "large", "w+b") as file:
            file.truncate(2 * MIB)
            large = FileSlice(file.fileno(), 0, 2 * MIB)
            unconditional: list[Callable[[], object]] = [
                lambda: store.put("a", b"y"), lambda: store.put("a", large), lambda: store.delete("a"),
                lambda: store.copy("a", "b"),
            ]  # fmt: skip
            conditional: list[Callable[[], object]] = [
                lambda: store.put("a", b"y", etag=etag), lambda: store.put("c", b"y", if_absent=True),
                lambda: store.delete("a", etag=etag), lambda: store.copy("a", "b", etag=etag),
            ]  # fmt: skip
            for kind, requests in ((Unavailable, unconditional), (PreconditionFailed, conditional)):
                for request in requests:
                    controls.odd_409(containing="/")
                    with pytest.raises(kind):
                        request()
                    assert controls.injected["odd_409"] == 1
                    controls.clear()


def test_a_bucket_elsewhere_names_the_option() -> None:
    assert "--region" in str(from_answer("list the lake", "PermanentRedirect", 301))


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired"])
def test_expired_token_says_that_a_file_of_keys_needs_no_new_mount(code: str) -> None:
    text = str(from_answer("list the lake", code, 400))
    assert text.index("write a new one into ~/.aws/credentials") < text.index("mount again")


# -- listings ----------------------------------------------------------------------------------------------------

PAGE = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
<Name>b</Name><Prefix>lake/</Prefix><IsTruncated>true</IsTruncated><EncodingType>url</EncodingType>
<NextContinuationToken>more&amp;more</NextContinuationToken>
<Contents><Key>lake/</Key><Size>0</Size><ETag>"e0"</ETag><LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>
<Contents><Key>lake/a+b%2Bc%0A</Key><Size>7</Size><ETag>&#34;e1-2&#34;</ETag>
<LastModified>2026-01-02T03:04:05.678Z</LastModified></Contents>
<CommonPrefixes><Prefix>lake/d+e/</Prefix></CommonPrefixes></ListBucketResult>"""


def test_a_page_as_s3_writes_it() -> None:
    """Its dates are those of a HEAD, which has no fractions of a second."""
    page = parse_page(PAGE, len("lake/"))
    assert list(page.objects) == [ObjectMeta("a b+c\n", 7, "e1-2", 1767323045000000000)]
    assert list(page.prefixes) == ["d e/"]
    assert page.next_token == "more&more"


ORDERS = (
    ("Key", "LastModified", "ETag", "Size", "StorageClass"),
    ("Key", "ETag", "Size", "StorageClass", "LastModified"),
    ("Size", "Owner", "Key", "ChecksumAlgorithm", "LastModified", "ETag"),
)
FILLERS = {"StorageClass": "STANDARD", "Owner": "<ID>1</ID><DisplayName/>", "ChecksumAlgorithm": "CRC32"}
KEY_PARTS = st.text(st.characters(codec="utf-8", min_codepoint=32), min_size=1, max_size=8)
LISTED = st.tuples(KEY_PARTS, st.integers(0, 1 << 46), st.sampled_from(["e0", "e1-2", ""]), st.integers(0, 3))


@settings(max_examples=examples(200), deadline=None)
@given(
    directory=st.one_of(st.just(""), st.sampled_from(["d/", "a b/c+d/", "ü/%2F/", "d//"])),
    found=st.lists(LISTED, max_size=6),
    prefixes=st.lists(KEY_PARTS, max_size=3),
    order=st.sampled_from(ORDERS),
    quoting=st.sampled_from([quote, quote_plus, partial(quote, safe=""), partial(quote_plus, safe="/&+")]),
    mark=st.sampled_from(['"', "&quot;", "&#34;", ""]),
    token=st.sampled_from([None, "more&more", "x"]),
)
def test_a_page_in_any_form_is_read_alike(
    directory: str,
    found: list[tuple[str, int, str, int]],
    prefixes: list[str],
    order: tuple[str, ...],
    quoting: Callable[[str], str],
    mark: str,
    token: str | None,
) -> None:
    """The quick way and the careful one say the same, which is what was listed."""
    if quoting("+&") == "+&":  # a plus would be a space
        found = [(name.replace("+", "-").replace("&", "-"), *rest) for name, *rest in found]  # type: ignore[misc]
        prefixes = [name.replace("+", "-").replace("&", "-") for name in prefixes]
        directory = directory.replace("+", "-")
    rows = []
    for name, size, etag, second in found:
        values = {
            "Key": quoting("lake/" + directory + name),
            "Size": str(size),
            "ETag": mark + etag + mark,
            "LastModified": f"2026-01-02T03:04:0{second}.000Z",
        }
        rows.append("".join(f"<{field}>{(values | FILLERS)[field]}</{field}>" for field in order))
    text = "".join(f"<Contents>{row}</Contents>" for row in rows)
    text += "".join(
        f"<CommonPrefixes><Prefix>{quoting('lake/' + directory + name + '/')}</Prefix></CommonPrefixes>"
        for name in prefixes
    )
    more = "" if token is None else f"<NextContinuationToken>{escape(token)}</NextContinuationToken>"
    head = f"<Name>b</Name><IsTruncated>{'false' if token is None else 'true'}</IsTruncated>{more}"
    body = f"<ListBucketResult><EncodingType>url</EncodingType>{head}{text}</ListBucketResult>".encode()
    page = parse_page(body, len("lake/"))
    assert page == list_pages.parse_any(body, len("lake/"))
    if all("/" not in name for name, *_ in found):
        assert page == list_pages.parse_usual(body, len("lake/")), "one directory is read the quick way"
    assert [(meta.key, meta.size, meta.etag) for meta in page.objects] == [
        (directory + name, size, etag) for name, size, etag, _ in found
    ]
    assert list(page.prefixes) == [directory + name + "/" for name in prefixes]
    assert page.next_token == token


@pytest.mark.parametrize("etag", ["e" * 256, "\u00e9", "a\nb"])
def test_an_etag_that_a_lake_cannot_keep_is_an_error_wherever_it_comes_from(etag: str) -> None:
    body = PAGE.replace(b"e1-2", etag.encode())
    for read in (lambda: parse_page(body, 5), lambda: read_etag(f'"{etag}"'), lambda: etag_of({"ETag": etag})):
        with pytest.raises(StoreError, match="of printable ASCII"):
            read()


def test_the_longest_etag_that_a_lake_keeps_is_read() -> None:
    etag = "e" * ETAG_CHARS_MAX
    page = parse_page(PAGE.replace(b"e1-2", etag.encode()), 5)
    assert [meta.etag for meta in page.objects] == [etag]
    assert ETAG_CHARS_MAX == ETAG_BYTES_MAX


@pytest.mark.parametrize(
    "body",
    [
        PAGE[:-40],
        b"",
        b"<html></html>",
        PAGE.replace(b"<NextContinuationToken>more&amp;more</NextContinuationToken>", b""),
        PAGE.replace(b"<Size>7</Size>", b"<Size>seven</Size>"),
        PAGE.replace(b"<Size>7</Size>", b"<Size>-7</Size>"),
        PAGE.replace(b"<Size>7</Size>", b"<Size>100000000000000</Size>"),
    ],
)
def test_a_page_that_is_none_is_an_error(body: bytes) -> None:
    with pytest.raises((ParseError, ValueError)):
        parse_page(body, 5)
