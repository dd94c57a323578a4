"""`mount --explain`: every option with its origin, and what is not secure. The child is a fake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from msgspec import structs

from lakefs_fuse.cli import explain, run
from lakefs_fuse.cli.explain import exposures
from lakefs_fuse.cli.mount import mount
from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.control.worker_protocol import Diagnosis, Finished

STORE = {
    "source": "s3://bucket/lake/", "region": "eu-1", "endpoint": "https://s3.example.com", "proxied": False,
    "credentials": "from the environment", "probed": True, "lake": "1", "needs_newer_program": [],
    "capabilities": {"name": "s3", "ranges": True, "put_if_match": False, "notes": ["one note"]},
}  # fmt: skip
KERNEL = {
    "hooks": True, "libfuse": "3.14.0", "requested": ["noflush"], "writeback_cache": True, "max_background": 64,
    "missing": [],
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Diagnosis]:
    """What the child was asked; it answers `STORE` and `KERNEL`."""
    requests: list[Diagnosis] = []

    def run_child(program: object, request: Diagnosis, *, command: str) -> Finished:
        requests.append(request)
        return Finished(summary={"store": STORE, "kernel": KERNEL}, text="")

    monkeypatch.setattr(explain, "run_child", run_child)
    return requests


def explained(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> dict[str, Any]:
    (tmp_path / "mnt").mkdir(exist_ok=True)
    assert run(["mount", "s3://bucket/lake", str(tmp_path / "mnt"), "--explain", "--json", *arguments]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def rows(answer: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["option"]: (row["text"], row["origin"]) for row in answer["options"]}


def test_every_option_has_its_value_and_origin(
    asked: list[Diagnosis], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://user:pass-word@s3.example.com")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    answer = explained(capsys, tmp_path, "-o", "cache_size=5G,ro", "--metadata-ttl", "90", "--file-mode", "600")
    found = rows(answer)
    options = {param.opts[0] for param in mount.params if isinstance(param, click.Option)}
    assert set(found) == options - {"-o", "--print-systemd-unit", "--explain", "--json"}
    assert found["--cache-size"] == ("5GiB", "command line")
    assert found["--read-only"] == ("on", "command line")
    assert found["--metadata-ttl"] == ("90s", "command line")
    assert found["--file-mode"] == ("600", "command line")
    assert found["--dir-mode"] == ("755", "default")
    assert found["--supervise"] == ("on", "default")
    assert found["--endpoint-url"] == ("https://***@s3.example.com", "environment (AWS_ENDPOINT_URL)")
    assert found["--region"] == ("eu-1", "~/.aws/config, or the default of boto3")
    assert next(row["value"] for row in answer["options"] if row["option"] == "--cache-size") == 5 << 30
    assert "pass-word" not in json.dumps(answer)
    assert "AWS_SECRET_ACCESS_KEY" in answer["environment"]
    assert answer["store"] == STORE
    (request,) = asked
    assert request.explains is not None
    assert request.explains.read_only


def test_set_of_options_is_the_origin_of_what_it_sets(
    asked: list[Diagnosis], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = rows(explained(capsys, tmp_path, "--profile-for", "ci", "--cache-size", "3GiB"))
    assert found["--supervise"] == ("off", "--profile-for ci")
    assert found["--staging-timeout"] == ("2m", "--profile-for ci")
    assert found["--cache-size"] == ("3GiB", "command line")
    assert found["--profile-for"] == ("ci", "command line")
    assert found["--unsigned"] == ("off", "default")
    found = rows(explained(capsys, tmp_path, "--unsigned"))
    assert (found["--unsigned"], found["--read-only"]) == (("on", "command line"), ("on", "--unsigned"))
    assert found["--refresh"] == ("5s", "default")


def test_text_has_all_parts_and_nothing_is_mounted(
    asked: list[Diagnosis], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    arguments = ["mount", "s3://bucket/lake", str(tmp_path / "missing"), "--explain", "--cache-dir", str(cache)]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    for part in ("options\n", "can: ranges\n", "cannot: put_if_match\n", "one note\n", "libfuse 3.14.0", "noflush",
                 "would be refused\n", "mkdir -p", "nothing is known to be insecure"):  # fmt: skip
        assert part in shown
    assert not cache.exists()


def test_disk_without_room_would_refuse_the_mount(
    asked: list[Diagnosis], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--explain", "--cache-dir", str(tmp_path / "cache"), "--free-space", "900TiB"]
    assert run(["mount", "s3://bucket/lake", str(tmp_path), *arguments]) == 0
    assert "not enough disk: " in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("cache", "said"),
    [("file", "cannot be written to (Not a directory)"), (".", "has files that do not belong to a cache")],
)
def test_cache_directory_that_cannot_be_one_would_refuse_the_mount(
    asked: list[Diagnosis], capsys: pytest.CaptureFixture[str], tmp_path: Path, cache: str, said: str
) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "file").touch()
    arguments = ["--explain", "--cache-dir", str(tmp_path / cache)]
    assert run(["mount", "s3://bucket/lake", str(tmp_path / "mnt"), *arguments]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ({**STORE, "error": "no connection"}, "cannot be asked: no connection"),
        ({**STORE, "probed": False}, "the first writable mount probes it"),
        ({**STORE, "needs_newer_program": ["x"]}, "the mount is read-only, as the lake has x"),
    ],
)
def test_store_that_says_little_is_a_part_of_the_answer(
    asked: list[Diagnosis], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    store: dict[str, Any], said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        explain, "run_child", lambda *_, **__: Finished(summary={"store": store, "kernel": KERNEL}, text="")
    )
    assert run(["mount", "s3://bucket/lake", str(tmp_path), "--explain"]) == 0
    shown = capsys.readouterr().out
    assert said in shown
    assert "https://s3.example.com, region eu-1" in shown
    assert "--cache-size" in shown


def test_json_without_explain_is_a_usage_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["mount", "s3://bucket/lake", str(tmp_path), "--json"]) == 2
    assert "--json needs --explain" in capsys.readouterr().err


# -- what is not secure ------------------------------------------------------------------------------------------------


def exposed(tmp_path: Path, endpoint: str = "", **changes: Any) -> list[str]:
    config = MountConfig(
        store=StoreConfig(source=Source.parse("s3://b")), mountpoint="/m", cache_dir=str(tmp_path / "c")
    )
    return list(exposures(structs.replace(config, **changes), endpoint, {"HOME": str(tmp_path)}))


@pytest.mark.parametrize(
    ("endpoint", "is_secure"),
    [
        ("https://s3.example.com", True),
        ("http://s3.example.com:9000", False),
        ("http://10.0.0.7:9000", False),
        ("http://127.0.0.1:9000", True),
        ("http://[::1]:9000", True),
        ("http://localhost:9000", True),
        ("", True),
    ],
)
def test_http_to_another_machine_is_not_secure(tmp_path: Path, endpoint: str, is_secure: bool) -> None:
    assert (exposed(tmp_path, endpoint) == []) == is_secure


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"allow_other": True}, "--allow-other"),
        ({"allow_other": True, "file_mode": 0o666}, "clear the bits 002"),
        ({"trust_cluster_cache": True}, "--trust-cluster-cache"),
        ({"cluster_cache": ("http://cache-1:8080",)}, "http://cache-1:8080 is reached over http"),
        ({"hints": "redis://redis.example:6379"}, "rediss://"),
    ],
)
def test_option_that_exposes_something_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert any(said in sentence for sentence in exposed(tmp_path, **changes))


def test_files_open_to_others_are_named(tmp_path: Path) -> None:
    assert exposed(tmp_path, log_file=str(tmp_path / "log")) == []
    for name in ("c", ".aws"):
        (tmp_path / name).mkdir()
    (tmp_path / "c").chmod(0o755)
    for name in ("log", ".aws/credentials"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)
    found = exposed(tmp_path, log_file=str(tmp_path / "log"))
    assert len(found) == 3
    for part in ("mode 0755", f"chmod 600 {tmp_path}/log", f"chmod 600 {tmp_path}/.aws/credentials"):
        assert any(part in sentence for sentence in found)
