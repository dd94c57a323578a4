"""What a user can do about each failure of an S3 request: the sentences of its errors, and how a failure is recognized.

What always holds: a sentence is built from the operation and from constants here. It quotes only a region's name from a
response, so that no credential or signature can get into it.

Pure functions, called from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

NO_CREDENTIALS = (
    "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or give this machine a role (boto3's credential chain); a public bucket needs none with --unsigned"
)
PROXY = "the proxy refuses its password (407): check http_proxy, https_proxy or LAKEFS_CLUSTER_CACHE_TOKEN"
NO_CONNECTION = "no connection: check the network, firewalls, http_proxy and https_proxy, and --endpoint-url"
CUT_SHORT = "the store did not answer whole and in time"
CHECK_NETWORK = "check the network, and scheme and port of --endpoint-url"
WEB_PAGE = (
    "a web page came instead of the store's response: log in to the network (captive portal), or check --endpoint-url, "
    "http_proxy and https_proxy"
)
LIST_REPEATED = (
    "the store answers the request for the next page with the same page: see whether a proxy in front of it drops the "
    "parameter continuation-token, and report it to the maker of the store"
)
WANTS_TLS = "the server at this port speaks https: begin --endpoint-url with https://"
RETENTION = (
    "the bucket locks each new object (Object Lock with a default retention), and cannot hold a lake that is written: "
    "use a bucket without a default retention"
)

_CHECK_KEYS = "check AWS_ACCESS_KEY_ID or AWS_PROFILE"
_EXPIRED = (
    "the session token has expired: write a new one into ~/.aws/credentials if it came from there; otherwise log in "
    "again or renew AWS_SESSION_TOKEN, and mount again"
)
_FULL = "the store has no room: raise the quota, or remove files (where a mount cannot, another S3 client can)"
_KMS = "the key that encrypts the object cannot be used: check its state and its region in KMS"
_SLOW = "it limits the rate of requests: lower --requests and --uploads, or ask for a higher limit"
_UNIMPLEMENTED = "the store does not implement this request: use another store, or a newer version of it"
_KEY = "the store takes no object of this name: choose a shorter or a simpler one"

OF_CREDENTIALS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "RequestTimeTooSkewed")
"""Codes in answer to whatever is asked with these credentials, or at this time."""

OF_CODES: Mapping[str, str] = {
    "InvalidAccessKeyId": f"the store does not know the access key: {_CHECK_KEYS}",
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": "the session token is not valid: check AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it, best with NTP",
    "AllAccessDisabled": "the bucket or its account is disabled: ask its provider",
    "AccountProblem": "the bucket or its account is disabled: ask its provider",
    "InvalidObjectState": (
        "the object is archived (Glacier): restore it with `aws s3api restore-object`, then read again"
    ),
    "InvalidPart": "the store has lost parts of the upload: sync or flush the file, which sends them again",
    "KMS.DisabledException": _KMS,
    "KMS.KMSInvalidStateException": _KMS,
    "KMS.NotFoundException": _KMS,
    "InvalidStorageClass": "the store has no such storage class: choose another with --storage-class",
    "InvalidEncryptionAlgorithmError": "the store does not support this encryption: choose another --sse, or omit it",
    "QuotaExceeded": _FULL,
    "StorageFull": _FULL,
    "XMinioAdminBucketQuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "InsufficientStorage": _FULL,
    "NotImplemented": _UNIMPLEMENTED,
    "MethodNotAllowed": _UNIMPLEMENTED,
    "KeyTooLong": _KEY,
    "KeyTooLongError": _KEY,
    "InvalidURI": _KEY,
    "InvalidObjectName": _KEY,
    "XMinioInvalidObjectName": _KEY,
    "SlowDown": _SLOW,
    "SlowDownRead": _SLOW,
    "SlowDownWrite": _SLOW,
    "Throttling": _SLOW,
    "ThrottlingException": _SLOW,
    "TooManyRequests": _SLOW,
    "RequestLimitExceeded": _SLOW,
    "BandwidthLimitExceeded": _SLOW,
}
OF_STATUSES: Mapping[int, str] = {405: _UNIMPLEMENTED, 429: _SLOW, 501: _UNIMPLEMENTED, 507: _FULL, 511: WEB_PAGE}

_SIGN = "leave out --unsigned and give credentials (boto3's chain), or have its owner make it public"
_READS = ("list", "get", "head")
_LIST_UPLOADS = "s3:ListBucketMultipartUploads"
_READING = "if the bucket makes requesters pay, mount it with --requester-pays"
_PERMISSIONS: Sequence[tuple[str, str, str]] = (
    ("list uploads", "list unfinished uploads", _LIST_UPLOADS),
    ("list", "list the bucket", "s3:ListBucket"),
    ("get", "read this object", "s3:GetObject"),
    ("head", "read this object", "s3:GetObject"),
    ("put", "store this object", "s3:PutObject"),
    ("try sums", "store this object", "s3:PutObject"),
    ("create upload", "begin a multipart upload", "s3:PutObject"),
    ("upload part", "upload a part", "s3:PutObject"),
    ("complete", "complete a multipart upload", "s3:PutObject"),
    ("abort", "abort a multipart upload", "s3:AbortMultipartUpload"),
    ("delete", "delete objects", "s3:DeleteObject"),
    ("copy", "copy this object", "s3:GetObject and s3:PutObject"),
)
"""The beginning of each operation, what it does, and the permission that it needs, by its name in AWS IAM."""

_REGION_NAME = re.compile(r"expecting '([a-z0-9-]{1,40})'|<Region>([a-z0-9-]{1,40})</Region>")
_WEB_PAGE = re.compile(r"\s*(<\?xml[^>]*>\s*)?<(!doctype html|html)\b", re.IGNORECASE)
_OBSTORE_BODY = re.compile(r"Server returned non-2xx status code: [^:]*: (.*)", re.DOTALL)
_HTTPS_PORT = re.compile(r"plain HTTP request was sent to HTTPS port|HTTP request to an HTTPS server", re.IGNORECASE)
"""nginx and Go's net/http."""


_CONNECTIONS: Sequence[tuple[re.Pattern[str], bool, str]] = tuple(
    (re.compile(pattern), is_begun, sentence)
    for pattern, is_begun, sentence in (
        (
            r"doesn't match|[Mm]ismatch, certificate is not valid|NotValidForName|not valid for (any )?name",
            False,
            "the store's certificate is for another host name: use a name in it with --endpoint-url",
        ),
        (
            r"certificate has expired|certificate expired|InvalidCertificate\(\s*Expired",
            False,
            "the store's certificate has expired: renew it, or set this machine's clock",
        ),
        (
            r"CERTIFICATE_VERIFY_FAILED|UnknownIssuer|invalid peer certificate|InvalidCertificate",
            False,
            "the store's certificate is not trusted: give its authority with --ca-bundle",
        ),
        (
            # A record that was damaged on the way, after the request was sent, looks the same.
            r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|HTTP_REQUEST|InvalidContentType|received corrupt message",
            True,
            "the server at this port does not speak https: begin --endpoint-url with http://, or check its port",
        ),
        (
            r"Failed to resolve|Name or service not known|failed to lookup address|name resolution",
            False,
            "no connection, because the host's name is not known: check --endpoint-url and DNS",
        ),
        (
            r"Connection refused",
            False,
            "no connection, because nothing listens there: check host and port of --endpoint-url, and that the store "
            "runs",
        ),
        (
            r"[Cc]onnect timeout|ConnectTimeoutError|\bkind: Connect\b|Failed to establish|ProxyError",
            False,
            NO_CONNECTION,
        ),
        (
            r"[Rr]ead timed out|[Rr]ead timeout|kind: Timeout|TimedOut|operation timed out",
            True,
            f"{CUT_SHORT}: see whether it is overloaded, and check the network and --endpoint-url",
        ),
    )
)
"""In this order: what an exception's text has, whether the store may have begun with the request, and the sentence."""


def of_connection(text: str) -> tuple[bool, str]:
    """Whether a store may have begun with a request that it did not answer, and the sentence; ``text`` is of the
    exception and its cause."""
    for pattern, is_begun, sentence in _CONNECTIONS:
        if pattern.search(text):
            return is_begun, sentence
    return True, f"{CUT_SHORT}: {CHECK_NETWORK}"


def of_page(text: str) -> str:
    """The sentence about an answer that no S3 server gives, such as a web page; empty for any other. ``text`` is its
    body, or an exception's text that has it."""
    if _HTTPS_PORT.search(text):
        return WANTS_TLS
    inside = _OBSTORE_BODY.search(text)
    return WEB_PAGE if _WEB_PAGE.match(inside[1] if inside else text) else ""


def denied(what: str, reason: str, *, signed: bool = True) -> str:
    """The sentence about a request that was denied. ``reason`` is the store's own, of which nothing is quoted;
    ``signed``: the request came with credentials."""
    if not signed:
        return f"the bucket does not let everybody {_attempt_of(what)[0]}: {_SIGN}"
    if "object lock" in reason.lower():
        return "the object is locked (object lock): wait for the end of its retention, or ask the bucket's owner"
    if "kms:" in reason or "KMS key" in reason or "customer master key" in reason:
        return (
            "these credentials may not use the key that encrypts the bucket: allow kms:GenerateDataKey and "
            "kms:Decrypt in the policies of the user and of the key"
        )
    where = "in the policies of the user and of the bucket"
    does, permission = _attempt_of(what)
    pays = f"; {_READING}" if what.startswith(_READS) and permission != _LIST_UPLOADS else ""
    return f"these credentials may not {does}: allow {permission} {where}, or {_CHECK_KEYS}{pays}"


def _attempt_of(what: str) -> tuple[str, str]:
    """What an operation does, and the permission that it needs."""
    found = ((does, permission) for begin, does, permission in _PERMISSIONS if what.startswith(begin))
    return next(found, ("do that", "it"))


def region_named(reason: str, named: str) -> str:
    """The region that is ``named``, or that ``reason`` names; empty where neither is."""
    found = _REGION_NAME.search(reason)
    return named if re.fullmatch(r"[a-z0-9-]{1,40}", named) else (found[1] or found[2]) if found else ""


def region(name: str) -> str:
    """The sentence about a bucket in another region; ``name`` is empty where it is not known."""
    if name:
        return f"the bucket is in another region: give --region {name}, or set AWS_DEFAULT_REGION"
    return "the bucket is in another region: give the right one with --region or AWS_DEFAULT_REGION"
