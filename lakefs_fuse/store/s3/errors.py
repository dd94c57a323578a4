"""The table that translates errors of S3 servers, boto3 and obstore to the kinds of `StoreError`.

What always holds: a message built here names the operation, the key and the store's own code. It never holds a URL, a
header or an answer's body, so no credential and no signature can get into it. Advice replaces what a server says about
credentials.

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
    KeyRefused,
    NoSuchBucket,
    NotCarriedOut,
    NotFound,
    PreconditionFailed,
    ProxyRefused,
    StoreError,
    StoreFull,
    Unavailable,
    Unsupported,
)

REASON_CHARS_MAX = 200


class WrongRegion(StoreError):
    """The bucket lives in another region than the one asked; `open_s3` turns it into advice."""


class RangeNotSatisfiable(StoreError):
    """The object ends before the range starts; `S3Store.get` finds out why."""


class SumRefused(NotCarriedOut):
    """A body did not match its checksum when it arrived; sending it again is the cure."""


_KINDS: Mapping[str, type[StoreError]] = {
    "NoSuchKey": NotFound,
    "NotFound": NotFound,
    "NoSuchUpload": NotFound,
    "NoSuchVersion": NotFound,
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
    "QuotaExceeded": StoreFull,
    "StorageFull": StoreFull,
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
    409: PreconditionFailed,
    412: PreconditionFailed,
    416: RangeNotSatisfiable,
    429: NotCarriedOut,
    501: Unsupported,
    507: StoreFull,
}

_THROTTLED = re.compile(r"SlowDown|Throttl|TooManyRequests|LimitExceeded|ServiceUnavailable")

_ADVICE: Mapping[str, str] = {
    "InvalidAccessKeyId": "the store does not know the access key: check AWS_ACCESS_KEY_ID or AWS_PROFILE",
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "ExpiredToken": "the session token has expired: renew AWS_SESSION_TOKEN or log in again",
    "InvalidToken": "the session token is not valid: check AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
}
_DENIED = "these credentials may not do that: check AWS_ACCESS_KEY_ID or AWS_PROFILE and the bucket's policy"
NO_CREDENTIALS = (
    "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or give this machine a role (boto3's credential chain)"
)
_REGION = "the bucket is in another region: give the right one with --region or AWS_REGION"

_PROXY = "the proxy refuses its password (407): check http_proxy, https_proxy or LAKEFS_CLUSTER_CACHE_TOKEN"
_UNTRUSTED = "the store's certificate is not trusted: give its authority with --ca-bundle"
_CUT_SHORT = "the store did not answer whole and in time"

_Kinds = Sequence[tuple[tuple[type[BaseException], ...], type[StoreError], str]]
"""Exceptions, the kind that the first match becomes, and what a message says of it."""
_BOTO_KINDS: _Kinds = (
    ((boto.NoCredentialsError, boto.PartialCredentialsError), AccessDenied, NO_CREDENTIALS),
    (
        (boto.CredentialRetrievalError, boto.TokenRetrievalError, boto.SSOError, boto.UnauthorizedSSOTokenError),
        AccessDenied,
        "credentials could not be had ({exception}): log in again or check AWS_PROFILE",
    ),
    ((boto.ParamValidationError,), KeyRefused, "the request cannot be expressed"),
    (
        (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError),
        NotCarriedOut,
        "no connection ({exception})",
    ),
    (
        (
            boto.HTTPClientError,
            boto.ConnectionError,
            boto.IncompleteReadError,
            boto.ResponseStreamingError,
            ResponseParserError,
            ElementTree.ParseError,
            urllib3.exceptions.HTTPError,
            OSError,
        ),
        Unavailable,
        _CUT_SHORT + " ({exception})",
    ),
    ((Exception,), StoreError, "{exception}"),
)
_OBSTORE_KINDS: _Kinds = (
    ((FileNotFoundError,), NotFound, "no such object"),
    (
        (obs.PreconditionError, obs.AlreadyExistsError, obs.NotModifiedError),
        PreconditionFailed,
        "not the version asked for",
    ),
    ((obs.PermissionDeniedError, obs.UnauthenticatedError), AccessDenied, _DENIED),
    ((obs.InvalidPathError, ValueError), KeyRefused, "the key cannot be expressed"),
    ((obs.NotSupportedError,), Unsupported, "not supported"),
    ((Exception,), Unavailable, _CUT_SHORT + " ({exception})"),
)

# What obstore says is text only; these are what object_store and S3 put into it.
_OBSTORE_CONNECT = re.compile(r"\bkind: Connect\b")
_OBSTORE_STATUS = re.compile(r"status code: (\d{3})")
_XML_CODE = re.compile(r"<Code>([A-Za-z0-9._-]{1,64})</Code>")
_XML_MESSAGE = re.compile(r"<Message>([^<]{1,400})</Message>")


def from_answer(what: str, code: str, status: int, reason: str = "") -> StoreError:
    """The error of an answer with an S3 error code (or none) and an HTTP status."""
    if code.isdigit():
        code = ""  # what botocore makes of an answer without a body
    if status == 407:
        return ProxyRefused(f"{what}: {_PROXY}")
    kind = _KINDS.get(code) or _STATUSES.get(status)
    if kind is None:
        kind = Unavailable if status >= 500 else StoreError
    named = f"{code} ({status})" if code else str(status)
    if issubclass(kind, Unavailable):
        throttled = status == 429 or _THROTTLED.search(code) is not None or (status == 503 and not code)
        return kind(f"{what}: the store answered {named}", throttled=throttled)
    if kind is AccessDenied:
        return AccessDenied(f"{what}: {named}: {_ADVICE.get(code, _DENIED)}")
    if kind is WrongRegion:
        return WrongRegion(f"{what}: {named}: {_REGION}")
    reason = " ".join(reason.split())[:REASON_CHARS_MAX]
    return kind(f"{what}: {named}{': ' + reason if reason and reason != code else ''}")


def from_xml(what: str, status: int, body: bytes) -> StoreError:
    """The error of a raw answer that is not 2xx."""
    text = body[:65_536].decode("utf-8", "replace")
    code, message = _XML_CODE.search(text), _XML_MESSAGE.search(text)
    return from_answer(what, code[1] if code else "", status, message[1] if message else "")


def from_boto(what: str, error: Exception) -> StoreError:
    """The error of a boto3 call. ``error`` is anything but a `StoreError`."""
    if isinstance(error, boto.ClientError):
        about = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return from_answer(what, str(about.get("Code", "")), int(status), str(about.get("Message", "")))
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return StoreError(f"{what}: {_UNTRUSTED}")
    return _from_table(_BOTO_KINDS, what, error)


def from_obstore(what: str, error: Exception) -> StoreError:
    """The error of an obstore call."""
    text = str(error)
    status = _OBSTORE_STATUS.search(text)
    if status is not None:
        return from_xml(what, int(status[1]), text.encode("utf-8", "replace"))
    if "UnknownIssuer" in text or "invalid peer certificate" in text:
        return StoreError(f"{what}: {_UNTRUSTED}")
    if _OBSTORE_CONNECT.search(text):
        return NotCarriedOut(f"{what}: no connection ({type(error).__name__})")
    return _from_table(_OBSTORE_KINDS, what, error)


def _from_table(table: _Kinds, what: str, error: Exception) -> StoreError:
    kind, text = next((kind, text) for exceptions, kind, text in table if isinstance(error, exceptions))
    return kind(f"{what}: {text.format(exception=type(error).__name__)}")
