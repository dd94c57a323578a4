"""Where requests go, and with which credentials: what botocore finds in its own configuration holds for all clients."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs

from lakefs_fuse.checks import Severity
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import ConfigError
from lakefs_fuse.store.open import find_lake, open_store
from lakefs_fuse.store.s3 import bucket as s3_bucket
from lakefs_fuse.store.s3.access import connect
from lakefs_fuse.store.s3.key_files import REREAD_S
from lakefs_fuse.store.s3.renewal import RENEW_S
from lakefs_fuse.store.s3.store import S3Store, follow_region, open_s3
from tests.recording import Answer, Recorder, Request
from tests.servers import Server

AWS = StoreConfig(source=Source("s3", "bucket", ""), region="eu-west-1")
XML = {"Content-Type": "application/xml"}


@pytest.fixture
def aws_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write ~/.aws/config."""

    def write(text: str) -> None:
        path = tmp_path / "config"
        path.write_text(text)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(path))

    return write


@pytest.mark.parametrize(
    ("variables", "settings", "expected"),
    [
        ({}, "", ("https://bucket.s3.eu-west-1.amazonaws.com", True)),
        ({"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "", ("https://bucket.s3.dualstack.eu-west-1.amazonaws.com", True)),
        ({"AWS_USE_FIPS_ENDPOINT": "true"}, "", ("https://bucket.s3-fips.eu-west-1.amazonaws.com", True)),
        ({}, "use_fips_endpoint = true", ("https://bucket.s3-fips.eu-west-1.amazonaws.com", True)),
        ({}, "s3 =\n  use_accelerate_endpoint = true", ("https://bucket.s3-accelerate.amazonaws.com", True)),
        ({}, "s3 =\n  addressing_style = path", ("https://s3.eu-west-1.amazonaws.com", False)),
    ],
)
def test_endpoint_is_that_of_botocore(
    variables: dict[str, str], settings: str, expected: tuple[str, bool],
    aws_config: Callable[[str], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is the one that obstore and listings are given."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    aws_config(f"[default]\n{settings}\n")
    access = connect(AWS, SystemClock())
    assert (access.base_url, access.virtual_host) == expected


def test_settings_without_an_endpoint_are_named(aws_config: Callable[[str], None]) -> None:
    aws_config("[default]\ns3 =\n  use_accelerate_endpoint = true\n")
    with pytest.raises(ConfigError, match="check --region, and use_accelerate_endpoint"):
        connect(structs.replace(AWS, source=Source("s3", "buc.ket", "")), SystemClock())


def test_bucket_of_another_kind_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="directory buckets"):
        connect(structs.replace(AWS, source=Source("s3", "name--usw2-az1--x-s3", "")), SystemClock())
    with pytest.raises(ConfigError, match="alias of the access point"):
        Source.parse("s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/name/prefix")
    alias = Source.parse("s3://name-abcdefghijk-s3alias/prefix")
    access = connect(structs.replace(AWS, source=alias), SystemClock())
    assert access.base_url == "https://name-abcdefghijk-s3alias.s3.eu-west-1.amazonaws.com"


# -- regions -----------------------------------------------------------------------------------------------------


def scope_of(request: Request) -> list[str]:
    """Access key, date, region, service and end of a signature."""
    return request.headers["authorization"].partition("Credential=")[2].partition(",")[0].split("/")


MOVED: dict[str, Answer] = {
    "AWS": (
        301, {**XML, "x-amz-bucket-region": "eu-west-7"},
        b"<Error><Code>PermanentRedirect</Code><Message>use another endpoint</Message></Error>",
    ),
    "AWS, by signature": (
        400, XML,
        b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is malformed; the region "
        b"'us-east-1' is wrong; expecting 'eu-west-7'</Message><Region>eu-west-7</Region></Error>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("answer", MOVED.values(), ids=MOVED)
def test_bucket_in_another_region_is_followed_and_told(
    recorded_config: StoreConfig, recorder: Recorder, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.refuses = lambda request: None if scope_of(request)[2] == "eu-west-7" else answer
    store = open_s3(recorded_config, SystemClock(), None)
    store.put("data", b"data")
    store.put("other", b"data", metadata={"content-type": "none"})
    assert bytes(store.get("data", 0, 4).data) == b"data"
    store.close()
    assert [scope_of(request)[2] for request in recorder.requests].count("us-east-1") == 1
    assert "is in region eu-west-7, not in us-east-1" in caplog.text
    asked = connect(recorded_config, SystemClock())
    found = follow_region(asked, SystemClock())
    assert found.region == "eu-west-7"
    told = s3_bucket.region(asked, found)
    assert told.severity is Severity.WARNING
    assert "give --region eu-west-7" in told.text
    assert s3_bucket.region(found, follow_region(found, SystemClock())).severity is Severity.OK


def test_lake_in_another_region_is_followed_once(
    recorded_config: StoreConfig, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """At whatever depth the place is below the root of the lake, and when the lake is opened afterwards."""
    root = structs.replace(recorded_config, region="eu-west-7")
    store = open_s3(root, SystemClock(), None)
    store.put(".lakefs/commits/x", b"x")
    store.close()
    recorder.requests.clear()
    recorder.refuses = lambda request: None if scope_of(request)[2] == "eu-west-7" else MOVED["AWS"]
    source = recorded_config.source
    below = structs.replace(recorded_config, source=structs.replace(source, prefix=f"{source.prefix}a/b/c/"))
    lake, path = find_lake(below, Node.of_this_machine())
    assert (lake, path) == (root, "a/b/c")
    open_store(lake, Node.of_this_machine()).close()
    assert [scope_of(request)[2] for request in recorder.requests].count("us-east-1") == 1
    assert caplog.text.count("is in region eu-west-7") == 1


def test_bucket_that_is_in_no_region_asked_is_an_error(recorded_config: StoreConfig, recorder: Recorder) -> None:
    recorder.refuses = lambda request: MOVED["AWS"]
    with pytest.raises(ConfigError, match="--region eu-west-7"):
        open_s3(recorded_config, SystemClock(), None)
    assert len(recorder.requests) == 2, "it is followed once"


# -- credentials -------------------------------------------------------------------------------------------------

PROCESS = """
import datetime, json, sys
end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60)
key = open(sys.argv[1]).read()
print(json.dumps({"Version": 1, "AccessKeyId": key, "SecretAccessKey": "secret", "SessionToken": "token of " + key,
                  "Expiration": end.isoformat()}))
"""


def test_credentials_that_hold_for_long_are_kept_for_ten_seconds(recorded_config: StoreConfig) -> None:
    """obstore asks again five minutes before the end that it is told."""
    given = connect(recorded_config, SystemClock()).credentials()
    ends = given["expires_at"]
    assert isinstance(ends, datetime)
    left_s = (ends - datetime.now(UTC)).total_seconds()
    assert 300 + 5 < left_s <= 300 + REREAD_S


def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)


def use_each_client(store: S3Store) -> None:
    store.put("data", b"data")
    store.put("other", b"data", metadata={"content-type": "none"})
    store.list_page("")


def use_until_each_client_has(key: str, store: S3Store, recorder: Recorder) -> None:
    """obstore keeps credentials that have ended for a tenth of a second."""
    renewed = set[str]()
    deadline_s = SystemClock().mono_s() + 20
    while renewed != {"boto3", "obstore", "list"}:
        assert SystemClock().mono_s() < deadline_s, renewed
        recorder.requests.clear()
        use_each_client(store)
        renewed |= {each.client for each in recorder.requests if scope_of(each)[0] == key}
    for request in recorder.requests:
        assert request.headers["x-amz-security-token"] == f"token of {scope_of(request)[0]}"


def test_credentials_that_expire_are_renewed_for_each_client(
    recorded_config: StoreConfig, recorder: Recorder, aws_config: Callable[[str], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What ends within a minute is renewed at each request."""
    without_keys(monkeypatch)
    program, key = tmp_path / "process.py", tmp_path / "key"
    program.write_text(PROCESS)
    key.write_text("FIRST")
    aws_config(f"[default]\ncredential_process = {sys.executable} {program} {key}\n")
    store = open_s3(recorded_config, SystemClock(), None)
    use_each_client(store)
    assert {scope_of(request)[0] for request in recorder.requests} == {"FIRST"}
    key.write_text("SECOND")
    use_until_each_client_has("SECOND", store, recorder)
    store.close()


class Ahead(SystemClock):
    """A clock that a test sets forward. By its time of day, credentials have ended when obstore is given them."""

    ahead_s = 0.0

    def mono_s(self) -> float:
        return super().mono_s() + self.ahead_s

    def wall_ns(self) -> int:
        return super().wall_ns() - 3_600_000_000_000


SESSION = """
import datetime, json, sys
runs = open(sys.argv[1], "a+")
runs.write("run ")
runs.seek(0)
if "fail" in sys.argv and len(runs.read().split()) > 1:
    sys.exit("no answer")
end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=int(sys.argv[2]))
print(json.dumps({"Version": 1, "AccessKeyId": "KEY", "SecretAccessKey": "secret", "SessionToken": "token",
                  "Expiration": end.isoformat()}))
"""


@pytest.mark.parametrize(("arguments", "runs_max"), [("15", 1), ("4", 2), ("4 fail", 2)])
def test_credentials_that_end_in_minutes_are_not_renewed_at_each_request(
    arguments: str, runs_max: int, recorded_config: StoreConfig, aws_config: Callable[[str], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those of a session of STS, and those that a program keeps until shortly before their end."""
    without_keys(monkeypatch)
    program, runs = tmp_path / "process.py", tmp_path / "runs"
    program.write_text(SESSION)
    aws_config(f"[default]\ncredential_process = {sys.executable} {program} {runs} {arguments}\n")
    clock = Ahead()
    store = open_s3(recorded_config, clock, None)
    for _ in range(5):
        use_each_client(store)
    assert len(runs.read_text().split()) <= runs_max
    clock.ahead_s += RENEW_S
    use_each_client(store)
    assert len(runs.read_text().split()) == (1 if arguments == "15" else runs_max + 1)
    store.close()


@pytest.mark.parametrize("variable", ["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"])
def test_keys_rotated_in_a_file_are_those_of_each_client(
    variable: str, recorded_config: StoreConfig, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_keys(monkeypatch)
    file, clock = tmp_path / "keys", Ahead()
    monkeypatch.setenv(variable, str(file))
    pair = "[default]\naws_access_key_id = {}\naws_secret_access_key = secret\naws_session_token = token of {}\n"
    file.write_text(pair.format("FIRST", "FIRST"))
    store = open_s3(recorded_config, clock, None)
    use_each_client(store)
    assert {scope_of(request)[0] for request in recorder.requests} == {"FIRST"}
    used = store.access.session_credentials
    for broken in ("", "no section", "[default]\naws_access_key_id = SECOND\n"):
        file.write_text(broken)
        clock.ahead_s += REREAD_S
        assert used.get_frozen_credentials().access_key == "FIRST", "an editor may leave a file unfinished"
    file.write_text(pair.format("SECOND", "SECOND"))
    clock.ahead_s += REREAD_S
    use_until_each_client_has("SECOND", store, recorder)
    store.close()


@pytest.mark.parametrize("kind", ["chain of roles", "web identity"])
def test_role_is_that_of_each_client(
    kind: str, recorded_config: StoreConfig, recorder: Recorder, moto: Server, aws_config: Callable[[str], None],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    without_keys(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto.url)
    role = "role_arn = arn:aws:iam::123456789012:role/reader\n"
    keys = "[profile keys]\naws_access_key_id = KEY\naws_secret_access_key = secret\n"
    first = "[profile first]\nrole_arn = arn:aws:iam::123456789012:role/first\nsource_profile = keys\n"
    if kind == "chain of roles":
        aws_config(f"{keys}{first}[default]\n{role}source_profile = first\n")
    else:
        token = tmp_path / "token"
        token.write_text(json.dumps({"token": "of a pod"}))
        aws_config(f"[default]\n{role}web_identity_token_file = {token}\n")
    store = open_s3(recorded_config, SystemClock(), None)
    use_each_client(store)
    store.close()
    assert {request.client for request in recorder.requests} == {"boto3", "obstore", "list"}
    assert len({scope_of(request)[0] for request in recorder.requests}) == 1
    assert len({request.headers["x-amz-security-token"] for request in recorder.requests}) == 1
    assert scope_of(recorder.requests[0])[0] != "KEY"
