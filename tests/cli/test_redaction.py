"""Secrets in texts that leave the machine: known ones, and those whose form gives them away."""

from __future__ import annotations

import resource
import zipfile
from pathlib import Path
from urllib.parse import quote

import pytest

from lakefs_fuse.checks import ok
from lakefs_fuse.cli.bundle import Contents, write_bundle
from lakefs_fuse.cli.redaction import Redactor, environment_of, secrets_of
from lakefs_fuse.errors import LakeError

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLE",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEBY//example+token==",
    "LAKEFS_CLUSTER_CACHE_TOKEN": "proxy-token-1",
    "LAKEFS_HINTS_PASSWORD": "hints pass word",
    "MY_API_KEY": "an-api-key-of-another-program",
}
PLANTED = [
    *SECRETS.values(),
    "p%40ss-of-proxy",
    "file-secret",
    "file-token",
    "password-from-file",
    "AKIAIOSFODNN7EXAMPLE",
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment full of secrets, and of names of files that have them."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = file-secret\n"
        "[other]\naws_session_token=file-token\nregion = eu-west-1\n"
    )
    (tmp_path / "password").write_text("password-from-file\n")
    return {
        **SECRETS,
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "https_proxy": "http://user:p%40ss-of-proxy@proxy.example:3128",
        "LAKEFS_HINTS_PASSWORD_FILE": str(tmp_path / "password"),
        "HOME": str(tmp_path),
        "AWS_REGION": "eu-west-1",
    }


def test_known_secrets_are_replaced_in_each_form(environment: dict[str, str]) -> None:
    redactor = Redactor(secrets_of(environment))
    for secret in PLANTED:
        for form in (secret, quote(secret, safe=""), quote(secret)):
            assert secret not in redactor.redact(f"before {form} after")
            assert form not in redactor.redact(f"before {form} after")
    assert "p@ss-of-proxy" not in redactor.redact("the proxy refuses p@ss-of-proxy")
    plain = "region eu-west-1 of s3://bucket/prefix, as user of proxy.example"
    assert redactor.redact(plain) == plain, "no names"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("GET https://user:hunter22@host/a", "hunter22"),
        ("redis://:hunter22@redis:6379/0", "hunter22"),
        ("https://b.s3.amazonaws.com/k?X-Amz-Signature=abcdef0123&X-Amz-Date=1", "abcdef0123"),
        ("X-Amz-Security-Token=abcdef0123", "abcdef0123"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=k/20260101, Signature=abcdef0123", "abcdef0123"),
        ("'proxy-authorization': Basic abcdef0123", "abcdef0123"),
        ("key ASIAIOSFODNN7EXAMPLE is unknown", "ASIAIOSFODNN7EXAMPLE"),
    ],
)
def test_unknown_secrets_are_replaced_by_their_form(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in Redactor([]).redact(text)


def test_environment_of_a_process_that_is_gone_is_empty() -> None:
    assert environment_of(2**22 + 1) == {}


def test_bundle_has_everything_but_secrets(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    planted = "\n".join(f"leaked {secret} and {quote(secret, safe='')}" for secret in PLANTED)
    log = tmp_path / "lake.log"
    log.write_text(f"2026-01-01 INFO started\n{planted}\n")
    (tmp_path / "lake.log.1").write_text(planted)
    contents = Contents(
        [ok("store.put", planted)],
        {"daemon": {"log_file": str(log)}, "store": {"errors": 1}, "odd": planted},
        {"target": f"https://k:{SECRETS['LAKEFS_CLUSTER_CACHE_TOKEN']}@host/", "options": planted},
        str(log),
    )
    path = tmp_path / "bundle.zip"
    write_bundle(path, contents)
    assert path.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name).decode() for name in archive.namelist()}
    assert set(members) == {
        "checks.json", "configuration.json", "stats.json", "machine.json", "mountinfo.txt", "logs/lake.log",
        "logs/lake.log.1",
    }  # fmt: skip
    assert "INFO started" in members["logs/lake.log"]
    assert '"AWS_REGION": "eu-west-1"' in members["machine.json"]
    assert '"AWS_SESSION_TOKEN": "(set)"' in members["machine.json"]
    for name, text in members.items():
        for secret in PLANTED:
            assert secret not in text, (name, secret)
            assert quote(secret, safe="") not in text, (name, secret)
    with pytest.raises(LakeError, match="name another file"):
        write_bundle(path, contents)
    with pytest.raises(LakeError, match="cannot be written"):
        write_bundle(tmp_path / "no" / "bundle.zip", contents)


def test_bundle_that_cannot_be_written_whole_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "bundle.zip"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # Python ignores SIGXFSZ, so writes fail
    try:
        with pytest.raises(LakeError, match="cannot be written"):
            write_bundle(path, Contents([ok("machine.kernel", "x")], {}, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not path.exists()
