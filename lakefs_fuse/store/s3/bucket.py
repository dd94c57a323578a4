"""Where the credentials for a bucket come from, and what its configuration means for a lake in it.

Read with the bucket's own requests (versioning, object lock, lifecycle, encryption, who pays), which a mount never
sends: each needs a separate permission, and the result reports a missing one. *No secrets*: of credentials only their
source and their end are told. Blocking; sends nothing that changes a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from botocore import exceptions as boto

from lakefs_fuse.checks import CheckResult, failed, ok, skipped, warning
from lakefs_fuse.config import ARCHIVE_CLASSES
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.store.s3.access import S3Access
from lakefs_fuse.store.s3.errors import from_boto
from lakefs_fuse.store.s3.key_files import FILE_METHODS

RULES_NAMED_MAX = 5

_SOURCES = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the file ~/.aws/credentials (or AWS_SHARED_CREDENTIALS_FILE)",
    "config-file": "the file ~/.aws/config (or AWS_CONFIG_FILE)",
    "custom-process": "the program of credential_process",
    "assume-role": "a role that the profile assumes",
    "assume-role-with-web-identity": "a role of this pod or workload (web identity)",
    "sso": "a login by IAM Identity Center (`aws sso login`)",
    "login": "a login (`aws login`)",
    "iam-role": "the role of this machine",
    "container-role": "the role of this container",
}
"""By botocore's names of the providers in its chain."""
_ABSENT = frozenset(
    {
        "NoSuchLifecycleConfiguration",
        "ObjectLockConfigurationNotFoundError",
        "NoSuchObjectLockConfiguration",
        "ServerSideEncryptionConfigurationNotFoundError",
    }
)
"""Answers that say that there is no such configuration."""


def credentials(access: S3Access, clock: Clock) -> CheckResult:
    """Where the credentials come from, and until when they hold."""
    check, found = "store.credentials", access.session_credentials
    if found is None:
        return ok(check, "none: requests are not signed (--unsigned)", source="none")
    try:
        token = found.get_frozen_credentials().token
    except boto.BotoCoreError as error:
        return failed(check, str(from_boto("credentials", error)))
    method = str(found.method)
    text = f"from {_SOURCES.get(method, method)}"
    if access.config.profile:
        text += f", profile {access.config.profile}"
    expiry: datetime | None = getattr(found, "_expiry_time", None)
    if expiry is not None:
        left = expiry - datetime.fromtimestamp(clock.wall_ns() / 1e9, UTC)
        at = expiry.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return ok(
            check, f"{text}, renewed by itself before {at}", source=method, expires_in_s=int(left.total_seconds())
        )
    if token and method in FILE_METHODS:
        return warning(
            check,
            f"{text}, with a session token: write a new one there before it expires, which mounts read by themselves, "
            "or use a role",
            source=method,
        )
    if token:
        return warning(
            check,
            f"{text}, with a session token that nothing renews: use a profile or a role, or mount again before it "
            "expires",
            source=method,
        )
    return ok(check, f"{text}, without an end", source=method)


def region(asked: S3Access, found: S3Access) -> CheckResult:
    """Whether the bucket is in the region that was asked; ``found`` is where it is."""
    check = "store.region"
    if asked.region == found.region:
        return ok(check, f"{found.region}, at {found.base_url}", region=found.region)
    return warning(
        check,
        f"the bucket is in {found.region}, not in {asked.region}: mounts follow it there, with a request more; give "
        f"--region {found.region}, or set AWS_DEFAULT_REGION",
        region=found.region,
    )


def configuration(access: S3Access) -> Iterator[CheckResult]:
    """What the bucket's configuration means for this lake."""
    reader = _Reader(access)
    rules = reader.read("get_bucket_lifecycle_configuration")
    yield _versioning(reader, rules)
    yield _object_lock(reader)
    if rules is None:
        yield reader.unreadable("store.lifecycle", "s3:GetLifecycleConfiguration", "its lifecycle rules")
    else:
        yield from lifecycle(rules.get("Rules", ()), access.config.source.prefix)
    yield _encryption(reader, access.config.sse)
    yield _payer(reader, is_payer=access.config.requester_pays)


class _Reader:
    """Reads the configuration of one bucket."""

    def __init__(self, access: S3Access) -> None:
        self._access = access
        self._reason = ""

    def read(self, operation: str, **parameters: object) -> Mapping[str, Any] | None:
        """An answer, empty where the bucket has no such configuration, None where it cannot be read."""
        try:
            answer: Mapping[str, Any] = getattr(self._access.client, operation)(
                Bucket=self._access.config.source.bucket, **parameters
            )
        except boto.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            self._reason = code
            return {} if code in _ABSENT else None
        except (boto.BotoCoreError, OSError, ValueError) as error:
            self._reason = type(error).__name__
            return None
        return answer

    def unreadable(self, check: str, permission: str, what: str) -> CheckResult:
        """The result about what could not be read just now."""
        if self._reason in ("AccessDenied", "Forbidden", "403"):
            return skipped(check, f"these credentials may not read {what}: allow {permission} to have it checked")
        return skipped(check, f"the store does not tell {what} ({self._reason}): look at it with its own tools")

    @property
    def prefix(self) -> str:
        return self._access.config.source.prefix


def _versioning(reader: _Reader, rules: Mapping[str, Any] | None) -> CheckResult:
    check = "store.versioning"
    answer = reader.read("get_bucket_versioning")
    if answer is None:
        return reader.unreadable(check, "s3:GetBucketVersioning", "whether it keeps versions")
    if answer.get("Status") != "Enabled":
        return ok(check, "no versions are kept of what is replaced or removed", keeps_versions=False)
    counted = _noncurrent(reader)
    expires = any(
        rule.get("Status") == "Enabled"
        and "NoncurrentVersionExpiration" in rule
        and reader.prefix.startswith(_prefix_of(rule))
        for rule in (rules or {}).get("Rules", ())
    )
    if expires:
        return ok(check, f"versions are kept{counted}, and a lifecycle rule ends them", keeps_versions=True)
    return warning(
        check,
        f"every replaced or removed object is kept as a noncurrent version, and paid for{counted}: add a lifecycle "
        "rule with NoncurrentVersionExpiration",
        keeps_versions=True,
    )


def _noncurrent(reader: _Reader) -> str:
    """How many of the first versions are not current."""
    page = reader.read("list_object_versions", Prefix=reader.prefix)
    if not page:
        return ""
    versions = page.get("Versions", ())
    old = [each for each in versions if not each.get("IsLatest")]
    size = sum(int(each.get("Size") or 0) for each in old)
    return (
        f" ({len(old):,} of the first {len(versions):,} versions, {size:,} bytes, are noncurrent)" if versions else ""
    )


def _object_lock(reader: _Reader) -> CheckResult:
    check = "store.object-lock"
    answer = reader.read("get_object_lock_configuration")
    if answer is None:
        return reader.unreadable(check, "s3:GetBucketObjectLockConfiguration", "whether it locks objects")
    found = answer.get("ObjectLockConfiguration", {})
    kept = found.get("Rule", {}).get("DefaultRetention", {})
    if kept:
        time = f"{kept['Days']} days" if "Days" in kept else f"{kept.get('Years')} years"
        return warning(
            check,
            f"each new object is locked for {time}: it refuses what mounts store, and would free nothing that gc "
            "deletes before; use a bucket without a default retention",
        )
    return ok(check, "objects are not locked by default")


def _encryption(reader: _Reader, sse: str) -> CheckResult:
    check = "store.encryption"
    if sse:
        return ok(check, f"what is stored from here is encrypted with --sse {sse}, whatever the bucket does by default")
    answer = reader.read("get_bucket_encryption")
    if answer is None:
        return reader.unreadable(check, "s3:GetEncryptionConfiguration", "how it encrypts objects")
    rules = answer.get("ServerSideEncryptionConfiguration", {}).get("Rules", ())
    names = [str(rule.get("ApplyServerSideEncryptionByDefault", {}).get("SSEAlgorithm", "")) for rule in rules]
    if any(name.startswith("aws:kms") for name in names):
        return ok(check, "by default with a key of KMS, which every reader and writer needs the permission to use")
    return ok(check, f"by default with {names[0]}" if names and names[0] else "not by default")


def _payer(reader: _Reader, *, is_payer: bool) -> CheckResult:
    check = "store.payer"
    answer = reader.read("get_bucket_request_payment")
    if answer is None:
        return reader.unreadable(check, "s3:GetBucketRequestPayment", "who pays for requests")
    if answer.get("Payer") == "Requester":
        if is_payer:
            return ok(check, "requesters pay for requests and bytes, and these requests say that they do")
        return failed(check, "requesters pay for requests and bytes: give --requester-pays if you are to")
    return ok(check, "its owner pays for requests")


def lifecycle(rules: Sequence[Mapping[str, Any]], prefix: str) -> Iterator[CheckResult]:
    """What lifecycle rules do to a lake with this prefix. Rules for objects with tags do nothing to it: its own have
    none."""
    active = [rule for rule in rules if rule.get("Status") == "Enabled" and not _has_tags(rule)]
    meeting = [rule for rule in active if _prefix_of(rule).startswith(prefix) or prefix.startswith(_prefix_of(rule))]
    harmful = [(rule, harm) for rule in meeting if (harm := _harm(rule))]
    for rule, harm in harmful[:RULES_NAMED_MAX]:
        where = f"below {_prefix_of(rule)!r}" if _prefix_of(rule) else "in the whole bucket"
        yield failed(
            "store.lifecycle",
            f"lifecycle rule {rule.get('ID') or 'without a name'!r} {harm} {where}, packs and commits of this lake "
            "included, whose files are lost then: end it, or restrict it to another prefix",
            rule=str(rule.get("ID") or ""),
        )
    if not harmful:
        yield ok("store.lifecycle", "no rule deletes or archives objects of this lake")
    aborting = [
        int(rule["AbortIncompleteMultipartUpload"].get("DaysAfterInitiation") or 0)
        for rule in active
        if "AbortIncompleteMultipartUpload" in rule and prefix.startswith(_prefix_of(rule))
    ]
    if aborting:
        yield ok("store.unfinished-uploads", f"a lifecycle rule aborts unfinished uploads after {min(aborting)} days")
    else:
        yield warning(
            "store.unfinished-uploads",
            "no lifecycle rule aborts unfinished uploads, which a node that never comes back leaves and which are paid "
            "for: add one with AbortIncompleteMultipartUpload, 7 days",
        )


def _harm(rule: Mapping[str, Any]) -> str:
    """What a rule does to current objects that a lake cannot bear; empty for nothing."""
    expiration = rule.get("Expiration", {})
    if expiration.get("Days"):
        return f"deletes objects after {expiration['Days']} days"
    if expiration.get("Date"):
        return f"deletes objects on {expiration['Date']:%Y-%m-%d}"
    for each in rule.get("Transitions", ()):
        if each.get("StorageClass") in ARCHIVE_CLASSES:
            return f"archives objects ({each['StorageClass']}) after {each.get('Days', 0)} days"
    return ""


def _filter_of(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = rule.get("Filter") or {}
    inner: Mapping[str, Any] = found.get("And") or found
    return inner


def _prefix_of(rule: Mapping[str, Any]) -> str:
    return str(_filter_of(rule).get("Prefix") or rule.get("Prefix") or "")


def _has_tags(rule: Mapping[str, Any]) -> bool:
    found = _filter_of(rule)
    return bool(found.get("Tag") or found.get("Tags"))
