"""What a user is told of a store that fails: one sentence that says what to do, from answers that servers really gave.

Each answer names its source. Identifiers in it are shortened, since none may come through.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from botocore import exceptions as boto
from botocore.credentials import Credentials

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import (
    AccessDenied,
    ConfigError,
    LakeError,
    NoSuchBucket,
    NotCarriedOut,
    NotFound,
    PartsRefused,
    PreconditionFailed,
    StoreError,
    StoreFull,
    Unavailable,
)
from lakefs_fuse.store.client import token_of
from lakefs_fuse.store.open import open_store
from lakefs_fuse.store.protocol import Capabilities, PartRef
from lakefs_fuse.store.s3.access import connect
from lakefs_fuse.store.s3.store import S3Store
from lakefs_fuse.upload.draft_target import DraftTarget
from tests import servers
from tests.fakes import store_client
from tests.forward_proxy import make_certificate
from tests.recorded import Answer, answering

SECRETS = (
    servers.SECRET_KEY, "AKIAIHETI7WQILDYCM2Q", "TOKENFOOBAR", "3A4D763EE819CFE4", "vXnYgv6Ji5j", "638117407428",
    "Signature=",
)  # fmt: skip
"""In the answers below, or in requests."""
IDS = "<RequestId>3A4D763EE819CFE4</RequestId><HostId>nOWlHTwtcDea</HostId>"


def s3(status: int, code: str, message: str, more: str = "", **headers: str) -> Answer:
    """An answer in the form of S3."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message>{more}{IDS}</Error>"
    return Answer(status, f'<?xml version="1.0" encoding="UTF-8"?>\n{body}', headers)


class Instant(SystemClock):
    """A clock for which no pause takes time."""

    def sleep(self, seconds: float) -> None: ...


def node() -> Node:
    return replace(Node.of_this_machine(), clock=Instant())


def config_of(port: int, scheme: str = "http", host: str = "127.0.0.1", **changes: object) -> StoreConfig:
    config = StoreConfig(
        source=Source.parse("s3://bucket/lake"), endpoint_url=f"{scheme}://{host}:{port}", region="us-east-1",
        connect_timeout_s=5.0, read_timeout_s=5.0,
    )  # fmt: skip
    return msgspec.structs.replace(config, **changes)


OPERATIONS: dict[str, Callable[[S3Store], object]] = {
    "list": lambda store: store.list_page(""),
    "get": lambda store: store.get("dir/a", 0, 1),
    "put": lambda store: store.put("dir/a", b"x"),
    "large put": lambda store: store.put("dir/a", b"x" * (2 << 20)),
    "delete": lambda store: store.delete("dir/a"),
    "create": lambda store: store.create_multipart("dir/a"),
    "part": lambda store: store.upload_part("dir/a", "id", 1, b"x"),
    "complete": lambda store: store.complete_multipart("dir/a", "id", [PartRef(1, "e", 1)]),
    "abort": lambda store: store.abort_multipart("dir/a", "id"),
    "copy": lambda store: store.copy("dir/a", "dir/b"),
    "uploads": lambda store: store.list_multipart(""),
}


@contextlib.contextmanager
def opened(config: StoreConfig) -> Iterator[S3Store]:
    """A store that was not asked for anything yet."""
    store = S3Store(connect(config, Instant()), Instant())
    store.adapt(Capabilities(name="s3"))
    with contextlib.closing(store):
        yield store


def failure_at_mount(config: StoreConfig) -> LakeError:
    """The error of opening a store as a mount does."""
    with pytest.raises(LakeError) as caught:
        open_store(config, node())
    return caught.value


def failure_of(operation: str, store: S3Store) -> LakeError:
    with pytest.raises(LakeError) as caught:
        OPERATIONS[operation](store)
    return caught.value


def check(error: LakeError, kind: type[LakeError], code: int, advice: str) -> None:
    text = str(error)
    assert type(error) is kind, text
    assert error.errno == code, text
    assert advice in text
    assert "\n" not in text and len(text) < 500
    for secret in SECRETS:
        assert secret not in text


@dataclass(frozen=True)
class Case:
    """An answer, where it was recorded, and what is made of it by each of these operations."""

    answer: Answer
    source: str
    advice: str
    kind: type[LakeError]
    errno: int
    operations: str = "mount get put delete"


DENIED = s3(403, "AccessDenied", "Access Denied")
AWS_CLI_813 = "https://github.com/aws/aws-cli/issues/813"


def denied(operations: str, advice: str) -> Case:
    return Case(DENIED, AWS_CLI_813, advice, AccessDenied, errno.EACCES, operations)


CASES = {
    "wrong access key": Case(
        s3(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.",
           "<AWSAccessKeyId>AKIAIHETI7WQILDYCM2Q</AWSAccessKeyId>"),
        "https://github.com/versity/versitygw/issues/2042",
        "check AWS_ACCESS_KEY_ID", AccessDenied, errno.EACCES,
    ),
    "wrong secret": Case(
        s3(403, "SignatureDoesNotMatch", "The request signature we calculated does not match the signature you "
           "provided. Check your key and signing method.", "<AWSAccessKeyId>AKIAIHETI7WQILDYCM2Q</AWSAccessKeyId>"
           "<StringToSign>PUT\n\n/bucket/</StringToSign><SignatureProvided>vXnYgv6Ji5j</SignatureProvided>"),
        "https://github.com/aws-samples/aws-python-sample/issues/2",
        "check AWS_SECRET_ACCESS_KEY", AccessDenied, errno.EACCES,
    ),
    "malformed access key": Case(
        s3(400, "AuthorizationHeaderMalformed", "The authorization header is malformed; the Credential is mal-formed; "
           'expecting "&lt;YOUR-AKID&gt;/YYYYMMDD/REGION/SERVICE/aws4_request".'),
        "https://github.com/deliciousbrains/wp-amazon-s3-and-cloudfront/issues/460",
        "check AWS_ACCESS_KEY_ID", AccessDenied, errno.EACCES,
    ),
    "clock": Case(
        s3(403, "RequestTimeTooSkewed", "The difference between the request time and the current time is too large.",
           "<RequestTime>20250901T162148Z</RequestTime><ServerTime>2025-09-03T16:21:50Z</ServerTime>"
           "<MaxAllowedSkewMilliseconds>900000</MaxAllowedSkewMilliseconds>"),
        "https://github.com/versity/versitygw/issues/1514",
        "clock is wrong: set it", AccessDenied, errno.EACCES,
    ),
    "no bucket": Case(
        s3(404, "NoSuchBucket", "The specified bucket does not exist", "<BucketName>bucket</BucketName>"),
        "https://github.com/basho/riak_cs/pull/400",
        "create it, or check --endpoint-url", NoSuchBucket, errno.ENXIO, "mount",
    ),
    "expired token": Case(
        s3(400, "ExpiredToken", "The provided token has expired.", "<Token-0>TOKENFOOBAR</Token-0>"),
        "https://github.com/romange/helio/issues/15",
        "renew AWS_SESSION_TOKEN", AccessDenied, errno.EACCES,
    ),
    "no LIST": denied("mount list", "allow s3:ListBucket in"),
    "no GET": denied("get", "allow s3:GetObject in"),
    "no PUT": denied("put", "allow s3:PutObject in"),
    "no DELETE": denied("delete", "allow s3:DeleteObject in"),
    "no multipart": denied("create part complete", "allow s3:PutObject in"),
    "no abort": denied("abort", "allow s3:AbortMultipartUpload in"),
    "no copy": denied("copy", "allow s3:GetObject and s3:PutObject in"),
    "no list of uploads": denied("uploads", "allow s3:ListBucketMultipartUploads in"),
    "explicit deny": Case(
        s3(403, "AccessDenied", "User: arn:aws:iam::638117407428:user/s3 is not authorized to perform: s3:PutObject on "
           'resource: "arn:aws:s3:::b/a" with an explicit deny in an identity-based policy'),
        "https://github.com/Privado-Inc/privado/issues/573",
        "allow s3:PutObject in", AccessDenied, errno.EACCES, "put",
    ),
    "requester pays": Case(
        DENIED, "https://github.com/aws/aws-cli/issues/2557",
        "mount it with --requester-pays", AccessDenied, errno.EACCES, "mount get",
    ),
    "object lock": Case(
        s3(403, "AccessDenied", "Access Denied because object protected by object lock."),
        "https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-lock.html",
        "is locked (object lock)", AccessDenied, errno.EACCES, "delete",
    ),
    "default retention": Case(
        s3(400, "InvalidRequest", "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with "
           "Object Lock parameters"),
        "https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-lock-managing.html",
        "use a bucket without a default retention", StoreError, errno.EIO, "put",
    ),
    "KMS denied": Case(
        s3(403, "AccessDenied", "User: arn:aws:sts::638117407428:assumed-role/r is not authorized to perform: "
           "kms:GenerateDataKey on this resource because the resource does not exist in this Region, no resource-based "
           "policies allow access, or a resource-based policy explicitly denies access"),
        "https://github.com/buildkite/docs/pull/2344",
        "allow kms:GenerateDataKey and kms:Decrypt", AccessDenied, errno.EACCES, "put create part",
    ),
    "KMS key gone": Case(
        s3(400, "KMS.NotFoundException", "Invalid keyId aws/s3"),
        "https://github.com/aws/aws-cli/issues/4507",
        "check its state and its region in KMS", StoreError, errno.EIO, "get put create",
    ),
    "wrong region, as Ceph says it": Case(
        s3(400, "AuthorizationHeaderMalformed", "The authorization header is malformed; the region 'us-east-1' is "
           "wrong; expecting 'eu-nl-1'", "<Region>eu-nl-1</Region>"),
        "https://github.com/s3fs-fuse/s3fs-fuse/issues/1186",
        "give --region eu-nl-1", ConfigError, errno.EINVAL, "mount",
    ),
    "wrong region, as S3 says it": Case(
        s3(301, "PermanentRedirect", "The bucket you are attempting to access must be addressed using the specified "
           "endpoint. Please send all future requests to this endpoint.",
           "<Bucket>b</Bucket><Endpoint>b.s3-ap-southeast-2.amazonaws.com</Endpoint>",
           **{"x-amz-bucket-region": "ap-southeast-2"}),
        "https://github.com/JuliaCloud/AWSS3.jl/issues/25",
        "give --region ap-southeast-2", ConfigError, errno.EINVAL, "mount",
    ),
    "captive portal": Case(
        Answer(200, "<!DOCTYPE html>\n<html><head><title>Log in</title></head><body><form>", kind="text/html"),
        "https://datatracker.ietf.org/doc/html/rfc7710 (the answer itself is made up: portals differ)",
        "log in to the network", Unavailable, errno.EIO, "mount list",
    ),
    "captive portal in XHTML": Case(
        Answer(200, '<?xml version="1.0"?>\n<html xmlns="http://www.w3.org/1999/xhtml"><head>'
               "<title>Log in</title></head><body/></html>", kind="text/html"),
        "https://datatracker.ietf.org/doc/html/rfc7710 (the answer itself is made up: portals differ)",
        "log in to the network", Unavailable, errno.EIO, "mount list create part complete delete abort copy uploads",
    ),
    "captive portal that redirects": Case(
        Answer(302, "", {"Location": "http://127.0.0.1:9/login"}, kind="text/html"),
        "https://datatracker.ietf.org/doc/html/rfc6585#appendix-B (the address is made up)",
        "log in to the network", Unavailable, errno.EIO, "mount list put",
    ),
    "captive portal that says so": Case(
        Answer(511, "<html><head><title>Network Authentication Required</title></head></html>", kind="text/html"),
        "https://datatracker.ietf.org/doc/html/rfc6585#section-6",
        "log in to the network", Unavailable, errno.EIO,
    ),
    "http on a port of https, nginx": Case(
        Answer(400, "<html>\n<head><title>400 The plain HTTP request was sent to HTTPS port</title></head>\n<body>\n"
               "<center><h1>400 Bad Request</h1></center>\n<center>The plain HTTP request was sent to HTTPS port"
               "</center>\n<hr><center>nginx/1.27.4</center>\n</body>\n</html>\n", kind="text/html"),
        "https://github.com/Hubs-Foundation/hubs-cloud/issues/376",
        "begin --endpoint-url with https://", StoreError, errno.EIO, "mount get put",
    ),
    "http on a port of https, Go": Case(
        Answer(400, "Client sent an HTTP request to an HTTPS server.\n", kind="text/plain"),
        "https://github.com/golang/go/blob/go1.22.0/src/net/http/server.go (tlsRecordHeaderLooksLikeHTTP)",
        "begin --endpoint-url with https://", StoreError, errno.EIO, "mount get put",
    ),
    "slow down": Case(
        s3(503, "SlowDown", "Please reduce your request rate."),
        "https://github.com/awslabs/aws-sdk-rust/issues/873",
        "lower --requests", NotCarriedOut, errno.EIO, "get put delete",
    ),
    "slow down at mount": Case(
        s3(503, "SlowDown", "Please reduce your request rate."),
        "https://github.com/thephpleague/flysystem-aws-s3-v3/issues/278",
        "cannot be used now", Unavailable, errno.EIO, "mount",
    ),
    "archived object": Case(
        s3(403, "InvalidObjectState", "The operation is not valid for the object's storage class"),
        "https://github.com/splunk/splunk-shuttl/issues/140",
        "restore it with `aws s3api restore-object`", StoreError, errno.EIO, "get copy",
    ),
    "full disk of the store": Case(
        s3(507, "XMinioStorageFull", "Storage backend has reached its minimum free disk threshold. Please delete a few "
           "objects to proceed."),
        "https://github.com/minio/minio/issues/6795",
        "raise the quota, or remove files", StoreFull, errno.ENOSPC, "put part complete",
    ),
    "quota": Case(
        s3(403, "QuotaExceeded", "Your request was denied due to quota exceeded."),
        "https://github.com/versity/versitygw/pull/503",
        "raise the quota, or remove files", StoreFull, errno.ENOSPC, "put part complete",
    ),
    "lost part": Case(
        s3(400, "InvalidPart", "One or more of the specified parts could not be found. The part may not have been "
           "uploaded, or the specified entity tag may not match the part's entity tag."),
        "https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html",
        "which sends them again", PartsRefused, errno.EIO, "complete",
    ),
    "overloaded gateway": Case(
        Answer(504, "<html><body><h1>504 Gateway Time-out</h1></body></html>", kind="text/html"),
        "https://github.com/s3tools/s3cmd/pull/331",
        "try again later", Unavailable, errno.EIO,
    ),
    "unknown answer": Case(
        s3(400, "InvalidRequest", "Checksum type mismatch occurred."),
        "https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html",
        "documentation of the store", StoreError, errno.EIO, "delete",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_recorded_answer_becomes_one_sentence_that_says_what_to_do(name: str) -> None:
    case = CASES[name]
    assert case.source.startswith("https://")
    with answering(case.answer) as port, opened(config_of(port)) as store:
        for operation in case.operations.split():
            error = failure_at_mount(config_of(port)) if operation == "mount" else failure_of(operation, store)
            check(error, case.kind, case.errno, case.advice)


@pytest.mark.parametrize("answer", [Answer(200), Answer(202, "ok")])
def test_write_with_an_answer_that_is_not_the_stores_is_not_done(answer: Answer) -> None:
    """The object of another size that is there is not what was sent."""
    with answering(answer) as port, opened(config_of(port)) as store:
        for operation in ("put", "large put", "create", "part", "complete"):
            assert isinstance(failure_of(operation, store), Unavailable)


async def test_completion_after_whose_answer_another_version_is_there_is_looked_up_again() -> None:
    """An answer without an ETag says nothing of what is at the key: first the version before, of the same size."""
    seen: list[str] = []

    def answer(method: str) -> Answer:
        seen.append(method)
        token = "mine" if seen.count("HEAD") > 1 else "theirs"
        return Answer(200, "x", {"x-amz-meta-lakefs-draft": token, "ETag": '"e"'}) if method == "HEAD" else Answer(200)

    with answering(answer) as port, opened(config_of(port)) as store:
        client, target = store_client(store, store.capabilities), DraftTarget("f", dict)  # type: ignore[arg-type]
        stored = await client.complete_multipart("f", "id", [PartRef(1, "e", 1)], version=target, token="mine")
        assert token_of(stored) == "mine"
    assert seen == ["POST", "HEAD", "HEAD"]


@pytest.mark.parametrize("key", ["dir/a", "dir//a"])
def test_head_that_is_refused_without_a_code_says_what_get_says(key: str) -> None:
    expired = CASES["expired token"]
    with (
        answering(lambda method: Answer(400) if method == "HEAD" else expired.answer) as port,
        opened(config_of(port)) as store,
        pytest.raises(LakeError) as caught,
    ):
        store.head(key)
    check(caught.value, expired.kind, expired.errno, expired.advice)


def test_upload_waits_for_a_server_that_takes_its_body_slowly_as_for_an_answer() -> None:
    """Longer than for a connection: a part is sent once."""
    size, connections = 8 << 20, 0

    def take(listener: socket.socket) -> None:
        nonlocal connections
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections += 1
                with connection:
                    time.sleep(0.5)
                    left, head = size, b""
                    while b"\r\n\r\n" not in head:
                        head += connection.recv(1 << 16)
                    left -= len(head.partition(b"\r\n\r\n")[2])
                    while left and (piece := connection.recv(1 << 20)):
                        left -= len(piece)
                    connection.sendall(
                        b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
                    )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        thread = threading.Thread(target=take, args=(listener,))
        thread.start()
        try:
            with opened(config_of(listener.getsockname()[1], connect_timeout_s=0.2)) as store:
                store.adapt(Capabilities(name="s3", md5_etags=False))
                assert store.upload_part("dir/a", "id", 1, bytes(size)).etag == "e"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert connections == 1


@pytest.mark.parametrize(
    ("retry_timeout_s", "expected_s"), [(1, 5), (10, 10), (20, 20), (21, 10.5), (30, 15), (60, 20), (3600, 20)]
)
def test_quick_read_timeout_divides_the_retry_timeout(retry_timeout_s: float, expected_s: float) -> None:
    """A store that is silent then holds a request as long as the user chose: its last attempt ends with that time."""
    source = Source.parse("s3://bucket/lake")
    assert StoreConfig(source=source, retry_timeout_s=retry_timeout_s).quick_read_timeout_s == expected_s


def test_silent_store_holds_only_uploads_and_copies_longer_than_the_retry_timeout(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakefs_fuse.config.QUICK_READ_TIMEOUT_S_MIN", 0.1)
    with opened(config_of(silent, read_timeout_s=2.0, retry_timeout_s=0.2)) as store:
        for operation, is_quick in (("get", True), ("list", True), ("put", True), ("part", False), ("complete", False)):
            began_s = time.monotonic()
            assert isinstance(failure_of(operation, store), Unavailable)
            assert (time.monotonic() - began_s < 1.5) is is_quick, operation


def test_upload_to_a_store_that_drops_packets_ends_with_the_connect_timeout() -> None:
    """The queue of the listener is full, so the kernel drops each SYN."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(listener.getsockname())
        config = config_of(listener.getsockname()[1], connect_timeout_s=1.0, read_timeout_s=20.0)
        store = stack.enter_context(opened(config))
        store.adapt(Capabilities(name="s3", md5_etags=False))
        began_s = time.monotonic()
        with pytest.raises(Unavailable, match="no connection"):
            store.upload_part("dir/a", "id", 1, b"x")
        assert time.monotonic() - began_s < 10


ODD_NAMES = (
    "status code: 503.log",
    "status code: 412 <Code>AccessDenied</Code>",
    "kind: Connect",
    "4",
    "404",
    "s",
    "a b",
)


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(404), NotFound),
        (s3(404, "NoSuchKey", "The specified key does not exist."), NotFound),
        (s3(412, "PreconditionFailed", "At least one of the pre-conditions did not hold"), PreconditionFailed),
        (s3(403, "InvalidObjectState", "The operation is not valid for the object's storage class"), StoreError),
        (Answer(503), Unavailable),
    ],
)
def test_key_that_looks_like_an_answer_changes_no_error(name: str, answer: Answer, kind: type[LakeError]) -> None:
    requests: dict[str, Callable[[S3Store], object]] = {
        "head": lambda store: store.head(name),
        "get": lambda store: store.get(name, 0, 1),
        "put": lambda store: store.put(name, b"x", if_absent=True),
    }
    bucket = Source.parse("s3://bucket")
    with answering(answer) as port, opened(config_of(port, source=bucket)) as store:
        for operation, request in requests.items():
            with pytest.raises(StoreError) as caught:
                request(store)
            if answer.body and operation == "head":
                continue  # without its body an answer may be less
            assert type(caught.value) is kind, (operation, str(caught.value))


@pytest.mark.parametrize("tokens", [["t"] * 3, ["t1", "t2", "t3"]], ids=["same token", "other tokens"])
def test_listing_whose_next_page_is_the_same_ends_with_an_error_that_says_what_to_do(tokens: list[str]) -> None:
    """As a store answers behind a proxy that drops the token."""
    left = iter(tokens)

    def page(_method: str) -> Answer:
        keys = "".join(f"<Contents><Key>lake/{key}</Key></Contents>" for key in ("a", "b"))
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{next(left)}</NextContinuationToken>"
        return Answer(200, f"<ListBucketResult>{keys}{more}</ListBucketResult>")

    with answering(page) as port, opened(config_of(port)) as store:
        first = store.list_page("")
        with pytest.raises(StoreError, match="continuation-token") as caught:
            store.list_page("", token=first.next_token)
        assert not isinstance(caught.value, Unavailable), "it is not worth a retry"


# -- failures without an answer --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls") / "other", "DNS:other.example")


@pytest.fixture
def encrypted(certificate: tuple[Path, Path]) -> Iterator[int]:
    """The port of a store with a certificate of another name."""
    with answering(DENIED, certificate) as port:
        yield port


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


@dataclass(frozen=True)
class Broken:
    """A connection that fails: how the store is reached, and what is said."""

    config: Callable[[pytest.FixtureRequest], StoreConfig]
    advice: str
    is_begun: bool = False


BROKEN = {
    "own authority": Broken(
        lambda request: config_of(request.getfixturevalue("encrypted"), "https"), "give its authority with --ca-bundle"
    ),
    "name mismatch": Broken(
        lambda request: config_of(
            request.getfixturevalue("encrypted"), "https", ca_bundle=str(request.getfixturevalue("certificate")[0])
        ),
        "is for another host name",
    ),
    "https on a port of http": Broken(
        lambda request: config_of(request.getfixturevalue("plain"), "https"),
        "begin --endpoint-url with http://",
        is_begun=True,
    ),
    "connection refused": Broken(lambda request: config_of(servers.free_port()), "nothing listens there"),
    "unknown host": Broken(lambda request: config_of(9000, host="store.invalid"), "check --endpoint-url and DNS"),
    "timeout": Broken(
        lambda request: config_of(request.getfixturevalue("silent"), read_timeout_s=0.1), "overloaded", is_begun=True
    ),
}


@pytest.fixture
def plain() -> Iterator[int]:
    with answering(DENIED) as port:
        yield port


@pytest.mark.parametrize("name", BROKEN)
def test_broken_connection_becomes_one_sentence_that_says_what_to_do(name: str, request: pytest.FixtureRequest) -> None:
    """The same through each of the three HTTP clients."""
    case = BROKEN[name]
    config = case.config(request)
    kind = Unavailable if case.is_begun else NotCarriedOut
    with opened(config) as store:
        for operation in ("get", "put", "delete", "list"):
            check(failure_of(operation, store), kind, errno.EIO, case.advice)
    check(failure_at_mount(config), Unavailable, errno.EIO, case.advice)


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (boto.UnauthorizedSSOTokenError(), AccessDenied, "log in again or check AWS_PROFILE"),
        (boto.TokenRetrievalError(provider="sso", error_msg="403"), AccessDenied, "log in again or check AWS_PROFILE"),
        (boto.CredentialRetrievalError(provider="x", error_msg="status code: 404"), AccessDenied, "log in again"),
        (boto.EndpointConnectionError(endpoint_url="http://sts"), NotCarriedOut, "no connection"),
    ],
)
def test_credentials_that_cannot_be_renewed_become_the_same_sentence_through_each_client(
    error: Exception, kind: type[LakeError], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_: Credentials) -> None:
        raise error

    with opened(config_of(9)) as store:
        monkeypatch.setattr(Credentials, "get_frozen_credentials", ended)
        for operation in ("get", "put", "delete", "list"):
            check(failure_of(operation, store), kind, kind.errno, sentence)


def test_missing_credentials_become_one_sentence_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    check(failure_at_mount(config_of(9)), AccessDenied, errno.EACCES, "set AWS_ACCESS_KEY_ID")
