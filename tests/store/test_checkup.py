"""What `doctor` says of a store: verb by verb, and of the configuration of a bucket."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from lakefs_fuse.checks import CheckResult, Severity
from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.errors import Unavailable
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.checkup import BODY, Checkup
from lakefs_fuse.store.local.store import LocalStore
from lakefs_fuse.store.s3 import bucket as s3_bucket
from lakefs_fuse.store.s3.access import S3Access, connect
from lakefs_fuse.store.s3.store import S3Store
from tests import servers
from tests.fakes import FakeClock
from tests.faults import Faults
from tests.memory_store import MemoryStore
from tests.servers import Server, s3_client
from tests.store.lakes import Lake, s3_config

VERBS = {
    "store.list", "store.head", "store.get", "store.put", "store.create-upload", "store.upload-part",
    "store.complete-upload", "store.abort-upload", "store.list-uploads", "store.copy", "store.conditions",
}  # fmt: skip


def checkup_of(store: Any, clock: SystemClock | None = None) -> Checkup:
    return Checkup(store, random.Random(1), clock or SystemClock())


def by_check(results: Iterator[CheckResult]) -> dict[str, CheckResult]:
    return {result.check: result for result in results}


def test_store_that_allows_everything_is_ok_and_left_as_it_was(lake: Lake) -> None:
    lake.store.put("data", b"of a user")
    checkup = checkup_of(lake.store)
    found = by_check(checkup.writing())
    assert set(found) == VERBS
    failures = [result for result in found.values() if result.severity is Severity.FAILED]
    assert failures == []
    assert checkup.round_trip().severity is Severity.OK
    assert checkup.clock_skew().severity is Severity.OK
    checkup.put_scratch("more", BODY)
    assert checkup.get_scratch("more", 0, 5) == 5
    cleaned = checkup.clean()
    assert cleaned is not None
    assert cleaned.severity is Severity.OK
    assert checkup.clean() is None, "once"
    assert [meta.key for meta in lake.store.list_page("").objects] == ["data"]
    assert list(lake.store.list_page("", delimiter="/").prefixes) == [], "no empty directory is left"
    assert lake.store.list_multipart("") == []


def test_reader_of_a_store_writes_nothing(faults: tuple[Server, Faults], new_bucket: Callable[[Server], str]) -> None:
    server, controls = faults
    client = s3_client(controls.server)
    bucket = new_bucket(controls.server)
    client.put_object(Bucket=bucket, Key="some/data", Body=b"x")
    client.close()
    access, store = s3_of(s3_config(server, bucket))
    checkup = checkup_of(store)
    assert {result.severity for result in checkup.reading()} == {Severity.OK}
    assert checkup.round_trip().values["median_s"] >= 0  # type: ignore[operator]
    assert checkup.clean() is None
    assert set(controls.counts) <= {"GET", "HEAD"}
    assert s3_bucket.credentials(access, SystemClock()).values["source"] == "env"
    store.close()


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_directory_is_left_as_it_was(tmp_path: Path, is_used: bool) -> None:
    """Directories for temporary files and uploads included, unless they were there before."""
    if is_used:
        (tmp_path / ".lakefs" / "tmp").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    checkup = checkup_of(LocalStore(str(tmp_path), random.Random(1), SystemClock()))
    found = by_check(checkup.writing())
    assert found["store.put"].severity is found["store.create-upload"].severity is Severity.OK
    assert (tmp_path / ".lakefs" / "uploads").is_dir()
    checkup.clean()
    assert sorted(tmp_path.rglob("*")) == before


def test_empty_store_has_nothing_to_be_read() -> None:
    found = by_check(checkup_of(MemoryStore()).reading())
    assert found["store.get"].severity is Severity.SKIPPED


def s3_of(config: StoreConfig) -> tuple[S3Access, S3Store]:
    access = connect(config, SystemClock())
    return access, S3Store(access, SystemClock())


def test_credentials_that_may_only_read_fail_at_each_verb_that_writes(
    seaweed: Server, new_bucket: Callable[[Server], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.READ_ONLY_ACCESS_KEY)
    _, store = s3_of(s3_config(seaweed, new_bucket(seaweed)))
    checkup = checkup_of(store)
    found = by_check(checkup.writing())
    assert found["store.list"].severity is Severity.OK
    for check in ("store.put", "store.create-upload"):
        assert found[check].severity is Severity.FAILED
        assert "allow s3:PutObject" in found[check].text
    for check in ("store.upload-part", "store.complete-upload", "store.abort-upload"):
        assert found[check].severity is Severity.SKIPPED
    assert "store.conditions" not in found
    cleaned = checkup.clean()
    assert cleaned is not None
    assert cleaned.severity is Severity.FAILED
    assert "allow s3:DeleteObject" in cleaned.text
    store.close()


@pytest.mark.parametrize("method", ["DELETE", "POST"])
def test_one_verb_that_is_forbidden_fails_alone(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str], method: str
) -> None:
    server, controls = faults
    _, store = s3_of(s3_config(server, new_bucket(controls.server)))
    controls.forbid(1000, method=method)
    checkup = checkup_of(store)
    found = by_check(checkup.writing())
    denied = {check for check, result in found.items() if result.severity is Severity.FAILED}
    cleaned = checkup.clean()
    assert cleaned is not None
    if method == "DELETE":
        assert denied == {"store.abort-upload"}
        assert cleaned.severity is Severity.FAILED
        assert RESERVED_PREFIX in cleaned.text
    else:
        assert denied == {"store.create-upload"}
        assert cleaned.severity is Severity.OK
    controls.clear()
    store.close()


def test_store_that_ignores_conditions_is_a_warning(rclone: Server, new_bucket: Callable[[Server], str]) -> None:
    _, store = s3_of(s3_config(rclone, new_bucket(rclone)))
    checkup = checkup_of(store)
    found = by_check(checkup.writing())
    checkup.clean()
    assert found["store.conditions"].severity is Severity.WARNING
    assert found["store.conditions"].values == {"if_absent": False, "if_match": False}
    store.close()


def test_directory_is_not_said_to_replace_files_under_a_condition(tmp_path: Path) -> None:
    checkup = checkup_of(LocalStore(str(tmp_path), random.Random(1), SystemClock()))
    assert by_check(checkup.writing())["store.conditions"].values == {"if_absent": True, "if_match": False}
    checkup.clean()


class SilentStore:
    """Every request ends with its timeout."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock, self.asked = clock, 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        def attempt(*_: object, **__: object) -> object:
            self.asked += 1
            self._clock.advance(20)
            raise Unavailable("the store did not answer in time")

        return attempt


def test_store_that_never_answers_is_asked_once() -> None:
    clock = FakeClock()
    store = SilentStore(clock)
    checkup = Checkup(store, random.Random(1), clock)  # type: ignore[arg-type]
    assert checkup.clock_skew().severity is Severity.FAILED
    assert {result.severity for result in checkup.writing()} == {Severity.SKIPPED}
    assert checkup.clean() is None
    assert store.asked == 1


class SkewedClock(SystemClock):
    def __init__(self, seconds: float) -> None:
        self._ahead_ns = int(seconds * 1e9)

    def wall_ns(self) -> int:
        return super().wall_ns() + self._ahead_ns


@pytest.mark.parametrize(
    ("ahead_s", "severity", "said"),
    [
        (0, Severity.OK, "clock"),
        (-30, Severity.WARNING, "behind the store's: run NTP"),
        (4000, Severity.FAILED, "set it"),
    ],
)
def test_clock_is_compared_with_the_date_of_answers(
    seaweed: Server, new_bucket: Callable[[Server], str], ahead_s: int, severity: Severity, said: str
) -> None:
    _, store = s3_of(s3_config(seaweed, new_bucket(seaweed)))
    found = checkup_of(store, SkewedClock(ahead_s)).clock_skew()
    assert found.severity is severity
    assert said in found.text
    assert abs(float(str(found.values["skew_s"])) - ahead_s) < 5
    store.close()


# -- the configuration of a bucket -----------------------------------------------------------------------------------


def rule(**more: Any) -> dict[str, Any]:
    return {"ID": "a rule", "Status": "Enabled", "Filter": {"Prefix": ""}, **more}


ABORT = rule(ID="abort", AbortIncompleteMultipartUpload={"DaysAfterInitiation": 7})


@pytest.mark.parametrize(
    ("rules", "severity", "said"),
    [
        ([], Severity.OK, "no rule"),
        ([rule(Expiration={"Days": 30})], Severity.FAILED, "'a rule' deletes objects after 30 days in the whole"),
        ([rule(Expiration={"Date": datetime(2027, 1, 2, tzinfo=UTC)})], Severity.FAILED, "on 2027-01-02"),
        ([rule(Filter={"Prefix": "some/"}, Expiration={"Days": 1})], Severity.FAILED, "below 'some/'"),
        ([rule(Filter={"Prefix": "some/lake/old/"}, Expiration={"Days": 1})], Severity.FAILED, "old/"),
        ([rule(Filter={"And": {"Prefix": "some/", "ObjectSizeGreaterThan": 1}}, Expiration={"Days": 1})],
         Severity.FAILED, "below 'some/'"),
        ([{"ID": "old form", "Status": "Enabled", "Prefix": "some/lake", "Expiration": {"Days": 1}}],
         Severity.FAILED, "'old form'"),
        ([rule(Filter={"Prefix": "elsewhere/"}, Expiration={"Days": 1})], Severity.OK, "no rule"),
        ([rule(Status="Disabled", Expiration={"Days": 1})], Severity.OK, "no rule"),
        ([rule(Filter={"Tag": {"Key": "a", "Value": "b"}}, Expiration={"Days": 1})], Severity.OK, "no rule"),
        ([rule(Expiration={"ExpiredObjectDeleteMarker": True})], Severity.OK, "no rule"),
        ([rule(Transitions=[{"Days": 90, "StorageClass": "DEEP_ARCHIVE"}])], Severity.FAILED, "DEEP_ARCHIVE"),
        ([rule(Transitions=[{"Days": 30, "StorageClass": "STANDARD_IA"}])], Severity.OK, "no rule"),
    ],
)  # fmt: skip
def test_lifecycle_rule_that_harms_a_lake_is_named(rules: list[dict[str, Any]], severity: Severity, said: str) -> None:
    found = by_check(s3_bucket.lifecycle(rules, "some/lake/"))
    assert found["store.lifecycle"].severity is severity
    assert said in found["store.lifecycle"].text


def test_bucket_without_a_rule_for_unfinished_uploads_is_a_warning() -> None:
    for rules in ([], [{**ABORT, "Status": "Disabled"}], [{**ABORT, "Filter": {"Prefix": "some/lake/in/"}}]):
        found = by_check(s3_bucket.lifecycle(rules, "some/lake/"))
        assert found["store.unfinished-uploads"].severity is Severity.WARNING
    found = by_check(s3_bucket.lifecycle([ABORT], "some/lake/"))
    assert found["store.unfinished-uploads"].text.endswith("after 7 days")


def test_rules_of_the_example_harm_no_lake_and_are_accepted(moto: Server, new_bucket: Callable[[Server], str]) -> None:
    example = Path(__file__).parents[2] / "deploy" / "lifecycle.json"
    configuration = json.loads(example.read_text().replace("PREFIX", "some/lake"))
    s3_client(moto).put_bucket_lifecycle_configuration(Bucket=new_bucket(moto), LifecycleConfiguration=configuration)
    found = by_check(s3_bucket.lifecycle(configuration["Rules"], "some/lake/"))
    assert {each.severity for each in found.values()} == {Severity.OK}


def test_configuration_of_a_bucket_is_read(moto: Server, new_bucket: Callable[[Server], str]) -> None:
    bucket = new_bucket(moto)
    access, store = s3_of(s3_config(moto, f"{bucket}/lake"))
    plain = by_check(s3_bucket.configuration(access))
    warned = {check for check, result in plain.items() if result.severity is not Severity.OK}
    assert warned == {"store.unfinished-uploads"}
    assert plain["store.versioning"].values == {"keeps_versions": False}
    client = s3_client(moto)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for body in (b"123", b"4567"):
        client.put_object(Bucket=bucket, Key="lake/a", Body=body)
    client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [rule(Expiration={"Days": 30}), ABORT]}
    )
    client.put_bucket_encryption(
        Bucket=bucket,
        ServerSideEncryptionConfiguration={
            "Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "k"}}]
        },
    )
    found = by_check(s3_bucket.configuration(access))
    assert found["store.versioning"].severity is Severity.WARNING
    assert "1 of the first 2 versions, 3 bytes, are noncurrent" in found["store.versioning"].text
    assert "deletes objects after 30 days" in found["store.lifecycle"].text
    assert found["store.unfinished-uploads"].severity is Severity.OK
    assert "KMS" in found["store.encryption"].text
    told = replace(access, config=structs.replace(access.config, sse="s3"))
    assert "with --sse s3" in by_check(s3_bucket.configuration(told))["store.encryption"].text
    locked = f"{bucket}-locked"
    client.create_bucket(Bucket=locked, ObjectLockEnabledForBucket=True)
    client.put_object_lock_configuration(
        Bucket=locked,
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 5}},
        },
    )  # fmt: skip
    client.close()
    other, another_store = s3_of(s3_config(moto, locked))
    lock = by_check(s3_bucket.configuration(other))["store.object-lock"]
    assert lock.severity is Severity.WARNING
    assert "for 5 days" in lock.text
    store.close()
    another_store.close()


def test_configuration_that_may_not_be_read_is_skipped_with_the_permission(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str]
) -> None:
    server, controls = faults
    access, store = s3_of(s3_config(server, new_bucket(controls.server)))
    controls.forbid(100)
    found = by_check(s3_bucket.configuration(access))
    controls.clear()
    assert {result.severity for result in found.values()} == {Severity.SKIPPED}
    assert "allow s3:GetLifecycleConfiguration" in found["store.lifecycle"].text
    store.close()


@pytest.mark.parametrize(
    ("source", "token", "expires", "severity", "said"),
    [
        ("env", "", None, Severity.OK, "without an end"),
        ("env", "token", None, Severity.WARNING, "nothing renews"),
        ("env", "token", timedelta(hours=1), Severity.OK, "renewed by itself"),
        ("shared-credentials-file", "token", None, Severity.WARNING, "write a new one there before it expires"),
    ],
)
def test_credentials_say_where_they_come_from_and_when_they_end(
    source: str, token: str, expires: timedelta | None, severity: Severity, said: str, moto: Server
) -> None:
    access = connect(s3_config(moto, "bucket"), SystemClock())

    class Found:
        method = source
        _expiry_time = None if expires is None else datetime.now(UTC) + expires

        def get_frozen_credentials(self) -> Any:
            return type("Frozen", (), {"token": token, "access_key": "AKIASECRET", "secret_key": "secret"})

    found = s3_bucket.credentials(replace(access, session_credentials=Found()), SystemClock())
    assert found.severity is severity
    assert said in found.text
    assert ("AWS_ACCESS_KEY_ID" in found.text) == (source == "env")
    assert "AKIASECRET" not in str(found)
