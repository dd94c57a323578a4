"""The table that translates errors of S3 servers, boto3 and obstore to the kinds of `StoreError`.

What always holds: a message built here names the operation, the key and the store's own code, and says what to do
(`advice`). It never holds a URL, a header or an answer's body, so no credential and no signature can get into it.
Advice replaces what a server says about credentials.

Pure functions, called from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

import urllib3.exceptions
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from obstore import exceptions as obs

from lakefs_fuse.errors import (
    AccessDenied,
    KeyConflict,
    KeyRefused,
    NoSuchBucket,
    NotCarriedOut,
    NotFound,
    PartsRefused,
    PreconditionFailed,
    ProxyRefused,
    StoreError,
    StoreFull,
    Unavailable,
    UnclearConflict,
    Unsupported,
)
from lakefs_fuse.store.s3 import advice

REASON_CHARS_MAX = 200


class WrongRegion(StoreError):
    """The bucket lives in another region than the one asked; `open_s3` follows it there. ``region`` is empty where the
    answer does not name it."""

    def __init__(self, message: str, region: str = "") -> None:
        super().__init__(message)
        self.region = region


class RangeNotSatisfiable(StoreError):
    """The object ends before the range starts; `S3Store.get` finds out why."""


class RangeIgnored(Unavailable):
    """The whole object came where a range was asked for; `S3Store.get` asks in a way that takes that."""


class SumRefused(NotCarriedOut):
    """A body did not match its checksum when it arrived; sending it again is the cure."""


_KINDS: Mapping[str, type[StoreError]] = {
    "NoSuchKey": NotFound,
    "NotFound": NotFound,
    "NoSuchUpload": NotFound,
    "NoSuchVersion": NotFound,
    "InvalidPart": PartsRefused,
    "NoSuchBucket": NoSuchBucket,
    "InvalidBucketName": NoSuchBucket,
    "AccessDenied": AccessDenied,
    "Forbidden": AccessDenied,
    "AllAccessDisabled": AccessDenied,
    "AccountProblem": AccessDenied,
    "InvalidAccessKeyId": AccessDenied,
    "SignatureDoesNotMatch": AccessDenied,
    "ExpiredToken": AccessDenied,
    "InvalidToken": AccessDenied,
    "TokenRefreshRequired": AccessDenied,
    "RequestTimeTooSkewed": AccessDenied,
    "InvalidSecurity": AccessDenied,
    "InvalidObjectState": StoreError,
    "PreconditionFailed": PreconditionFailed,
    "ConditionalRequestConflict": Unavailable,
    "InvalidRange": RangeNotSatisfiable,
    "NotImplemented": Unsupported,
    "MethodNotAllowed": Unsupported,
    "KeyTooLong": KeyRefused,
    "KeyTooLongError": KeyRefused,
    "InvalidArgument": KeyRefused,
    "InvalidURI": KeyRefused,
    "InvalidObjectName": KeyRefused,
    "XMinioInvalidObjectName": KeyRefused,
    "XMinioParentIsObject": KeyConflict,
    "XMinioObjectExistsAsDirectory": KeyConflict,
    "ObjectParentIsFile": KeyConflict,
    "ExistingObjectIsDirectory": KeyConflict,
    "QuotaExceeded": StoreFull,
    "StorageFull": StoreFull,
    "XMinioAdminBucketQuotaExceeded": StoreFull,
    "XMinioStorageFull": StoreFull,
    "InsufficientStorage": StoreFull,
    "PermanentRedirect": WrongRegion,
    "AuthorizationHeaderMalformed": WrongRegion,
    "AuthorizationQueryParametersError": WrongRegion,
    "IllegalLocationConstraintException": WrongRegion,
    "IncorrectEndpoint": WrongRegion,
    "TemporaryRedirect": Unavailable,
    "SlowDown": NotCarriedOut,
    "SlowDownRead": NotCarriedOut,
    "SlowDownWrite": NotCarriedOut,
    "ServiceUnavailable": Unavailable,
    "Throttling": NotCarriedOut,
    "ThrottlingException": NotCarriedOut,
    "TooManyRequests": NotCarriedOut,
    "RequestLimitExceeded": NotCarriedOut,
    "BandwidthLimitExceeded": NotCarriedOut,
    "RequestTimeout": Unavailable,
    "InternalError": Unavailable,
    "OperationAborted": Unavailable,
    "BadDigest": SumRefused,
    "XAmzContentChecksumMismatch": SumRefused,
    "IncompleteBody": Unavailable,
    "XAmzContentSHA256Mismatch": Unavailable,
}

_STATUSES: Mapping[int, type[StoreError]] = {
    301: WrongRegion,
    401: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    405: Unsupported,
    408: Unavailable,
    409: UnclearConflict,
    412: PreconditionFailed,
    416: RangeNotSatisfiable,
    429: NotCarriedOut,
    501: Unsupported,
    507: StoreFull,
}

_REDIRECTIONS = frozenset({302, 303, 307, 308})
"""Of S3 only 307 is one, with a code; others are of what stands between."""
REGION_HEADER = "x-amz-bucket-region"

_THROTTLED = re.compile(r"SlowDown|Throttl|TooManyRequests|LimitExceeded|ServiceUnavailable")


class WebPage(ValueError):
    """A web page came with 200. What it was asked for was not done."""


_Kinds = Sequence[tuple[tuple[type[BaseException], ...], type[StoreError], str]]
"""Exceptions, the kind that the first match becomes, and what a message says of it."""
_BOTO_KINDS: _Kinds = (
    ((boto.NoCredentialsError, boto.PartialCredentialsError), AccessDenied, advice.NO_CREDENTIALS),
    (
        (boto.CredentialRetrievalError, boto.TokenRetrievalError, boto.SSOError, boto.UnauthorizedSSOTokenError),
        AccessDenied,
        "credentials could not be had ({exception}): log in again or check AWS_PROFILE",
    ),
    ((WebPage,), Unavailable, advice.WEB_PAGE),
    ((boto.ParamValidationError,), KeyRefused, "the request cannot be expressed: choose a shorter or simpler name"),
    (
        (boto.IncompleteReadError, boto.ResponseStreamingError, ResponseParserError, ElementTree.ParseError),
        Unavailable,
        f"{advice.CUT_SHORT} ({{exception}}): {advice.CHECK_NETWORK}",
    ),
    ((Exception,), StoreError, "the request failed ({exception}): see the daemon's log"),
)
_BOTO_CONNECTIONS = (boto.HTTPClientError, boto.ConnectionError, urllib3.exceptions.HTTPError, OSError)
_BOTO_NOT_BEGUN = (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)
_OBSTORE_KINDS: _Kinds = (
    ((FileNotFoundError,), NotFound, "no such object"),
    (
        (obs.PreconditionError, obs.AlreadyExistsError, obs.NotModifiedError),
        PreconditionFailed,
        "not the version asked for",
    ),
    ((obs.InvalidPathError, ValueError), KeyRefused, "the key cannot be expressed: choose a simpler name"),
    ((obs.NotSupportedError,), Unsupported, "not supported by the store: use another, or a newer version of it"),
    ((Exception,), Unavailable, f"{advice.CUT_SHORT} ({{exception}}): {advice.CHECK_NETWORK}"),
)

# What obstore says is text only; these are what object_store and S3 put into it.
_OBSTORE_DETAILS = "\n\nDebug source:"
"""Between what it says and the same as a data structure, in which no line break is part of a name."""
_OBSTORE_NOT_PARTIAL = "Received non-partial response when range requested"
_OBSTORE_PROVIDER = "External AWS credential provider"
_OBSTORE_NO_ANSWER = re.compile(r"\bkind: \w+")
_OBSTORE_STATUS = re.compile(r"status code: (\d{3})")
_XML_CODE = re.compile(r"<Code>([A-Za-z0-9._-]{1,64})</Code>")
_XML_MESSAGE = re.compile(r"<Message>([^<]{1,400})</Message>")


RAISED_BY_BOTO = (
    boto.BotoCoreError, boto.ClientError, ResponseParserError, urllib3.exceptions.HTTPError, OSError, ValueError,
)  # fmt: skip
"""What a call may raise. botocore 1.42 and before passes on what urllib3 raises of an error that is cut short."""


def from_answer(
    what: str, code: str, status: int, reason: str = "", region: str = "", *, signed: bool = True
) -> StoreError:
    """The error of an answer with an S3 error code (or none) and an HTTP status. ``what`` begins with the operation,
    as `advice` knows it; ``region`` is the bucket's, where the answer names it; ``signed``: the request was."""
    if code.isdigit():
        code = ""  # what botocore makes of an answer without a body
    if status == 407:
        return ProxyRefused(f"{what}: {advice.PROXY}")
    kind = _KINDS.get(code) or _STATUSES.get(status)
    if kind is None:
        kind = Unavailable if status >= 500 else StoreError
    named = f"{code} ({status})" if code else str(status)
    known = advice.OF_CODES.get(code) or ("" if code else advice.OF_STATUSES.get(status, ""))
    if "object lock parameters" in reason.lower():  # it wants a checksum, with one code or another
        known = advice.RETENTION
    if code == "AuthorizationHeaderMalformed" and "region" not in reason and "Credential" in reason:
        return AccessDenied(f"{what}: {named}: the access key is malformed: check AWS_ACCESS_KEY_ID or AWS_PROFILE")
    if issubclass(kind, Unavailable):
        throttled = status == 429 or _THROTTLED.search(code) is not None or (status == 503 and not code)
        return kind(
            f"{what}: the store answered {named}: {known or 'try again later, or see its own log'}", throttled=throttled
        )
    if kind is AccessDenied:
        return AccessDenied(f"{what}: {named}: {known or advice.denied(what, reason, signed=signed)}")
    if kind is WrongRegion:
        name = advice.region_named(reason, region)
        return WrongRegion(f"{what}: {named}: {advice.region(name)}", name)
    if known or kind is StoreError:
        return kind(f"{what}: {named}: {known or 'look this answer up in the documentation of the store'}")
    reason = " ".join(reason.split())[:REASON_CHARS_MAX]
    return kind(f"{what}: {named}{': ' + reason if reason and reason != code else ''}")


def unconditional(error: StoreError) -> StoreError:
    """The error of a request without a condition: none can have been missed, so a 409 with a code of the server's own,
    or without one, says that the server is busy with the key."""
    return Unavailable(str(error)) if isinstance(error, PreconditionFailed) else error


def from_xml(what: str, status: int, body: bytes, region: str = "", *, signed: bool = True) -> StoreError:
    """The error of a raw answer that is not 2xx. ``region`` and ``signed`` as `from_answer` has them."""
    text = body[:65_536].decode("utf-8", "replace")
    code, message = _XML_CODE.search(text), _XML_MESSAGE.search(text)
    if code is None and (page := _from_page(what, status, text)):
        return page
    return from_answer(what, code[1] if code else "", status, message[1] if message else text, region, signed=signed)


def refuse_page(body: bytes) -> None:
    """Raise WebPage for the body of an answer with 200 that is a web page."""
    if advice.of_page(body[:65_536].decode("utf-8", "replace")):
        raise WebPage


def from_page(what: str, body: bytes) -> StoreError | None:
    """The error of an answer with 200 that is a web page; None for any other."""
    return _from_page(what, 200, body[:65_536].decode("utf-8", "replace"))


def _from_page(what: str, status: int, text: str) -> StoreError | None:
    """The error of an answer that does not come from a store; None for one that may. A server that is overloaded, or
    behind a proxy, answers 5xx, 403 and 404 with web pages, too: these count as what the status says."""
    sentence = advice.of_page(text)
    if sentence == advice.WANTS_TLS:
        return StoreError(f"{what}: {sentence}")
    if status in _REDIRECTIONS or (status == 301 and sentence):
        return Unavailable(f"{what}: {advice.WEB_PAGE}")
    if sentence and status in (200, 400):
        return Unavailable(f"{what}: {sentence}")
    return None


def wrapped(error: Exception) -> Exception | None:
    """The exception that ended a request of botocore, if it says so."""
    cause: Exception | None = getattr(error, "kwargs", {}).get("error")
    return cause


def from_boto(what: str, error: Exception, *, signed: bool = True) -> StoreError:
    """The error of a boto3 call. ``error`` is anything but a `StoreError`."""
    if isinstance(error, boto.ClientError):
        about, metadata = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        status, region = int(metadata.get("HTTPStatusCode", 0)), metadata.get("HTTPHeaders", {}).get(REGION_HEADER, "")
        code, reason = str(about.get("Code", "")), str(about.get("Message", ""))
        if status in _REDIRECTIONS and code.isdigit():
            return Unavailable(f"{what}: {advice.WEB_PAGE}")
        return from_answer(what, code, status, reason, str(region), signed=signed)
    if isinstance(error, _BOTO_CONNECTIONS):
        # The text of botocore's own exception has the URL, which may be anything.
        is_begun, sentence = advice.of_connection(f"{type(error).__name__}: {wrapped(error) or error}")
        if is_begun and isinstance(error, _BOTO_NOT_BEGUN):
            is_begun, sentence = False, advice.NO_CONNECTION
        return _unanswered(what, error, sentence, is_begun=is_begun)
    return _from_table(_BOTO_KINDS, what, error)


def from_obstore(
    what: str, error: Exception, path: str, *, signed: bool = True, credentials_error: Exception | None = None
) -> StoreError:
    """The error of an obstore call about the object at ``path``, prefix included. ``credentials_error`` is the last
    exception that its credential provider raised, of which obstore passes on the text alone."""
    text = str(error)
    said = _without_path(text.rpartition(_OBSTORE_DETAILS)[0] or text, path)
    if credentials_error is not None and _OBSTORE_PROVIDER in said:
        return from_boto(what, credentials_error, signed=signed)
    status = _OBSTORE_STATUS.search(said)
    if status is not None:
        return from_xml(what, int(status[1]), said.encode("utf-8", "replace"), signed=signed)
    if _OBSTORE_NOT_PARTIAL in said:
        return RangeIgnored(f"{what}: the whole object came where a range was asked for")
    if isinstance(error, obs.PermissionDeniedError | obs.UnauthenticatedError):
        return AccessDenied(f"{what}: {advice.denied(what, '', signed=signed)}")
    if _OBSTORE_NO_ANSWER.search(text):
        is_begun, sentence = advice.of_connection(text)
        return _unanswered(what, error, sentence, is_begun=is_begun)
    return _from_table(_OBSTORE_KINDS, what, error)


def _without_path(said: str, path: str) -> str:
    """What obstore says, less the path, which may look like any answer. It is percent-encoded in the URL."""
    return said.replace(f" location {path} ", " ").replace(f" path {path}: ", ": ")


def _unanswered(what: str, error: Exception, sentence: str, *, is_begun: bool) -> StoreError:
    kind = Unavailable if is_begun else NotCarriedOut
    return kind(f"{what}: {sentence} ({type(error).__name__})")


def _from_table(table: _Kinds, what: str, error: Exception) -> StoreError:
    kind, text = next((kind, text) for exceptions, kind, text in table if isinstance(error, exceptions))
    return kind(f"{what}: {text.format(exception=type(error).__name__)}")
