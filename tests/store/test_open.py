"""What a user is told when a store cannot be opened; and that no credential is told to anyone."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import AccessDenied, ConfigError, LakeError, NoSuchBucket, Unavailable
from lakefs_fuse.store.open import open_store
from lakefs_fuse.store.probe import probe
from tests import servers
from tests.faults import Faults
from tests.servers import Server
from tests.store.lakes import s3_config


@pytest.mark.parametrize("name", ["seaweed", "moto", "rclone"])
def test_no_such_bucket(name: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(name)
    with pytest.raises(NoSuchBucket, match=r"no-such-bucket.*create it"):
        open_store(s3_config(server, "no-such-bucket"), Node.of_this_machine())


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(NoSuchBucket, match="create it"):
        open_store(StoreConfig(source=Source.parse(f"file://{tmp_path}/nowhere")), Node.of_this_machine())
    (tmp_path / "file").write_text("")
    with pytest.raises(NoSuchBucket, match="file is not a directory"):
        open_store(StoreConfig(source=Source.parse(f"file://{tmp_path}/file")), Node.of_this_machine())


def test_path_given_as_a_source_is_answered_with_its_url() -> None:
    with pytest.raises(ConfigError, match="write a local directory as file:///srv/lake"):
        Source.parse("/srv/lake")


def test_a_file_system_without_extended_attributes() -> None:
    with pytest.raises(ConfigError, match="extended attributes"):
        open_store(StoreConfig(source=Source.parse("file:///proc")), Node.of_this_machine())


def test_unreachable_endpoint() -> None:
    nobody = Server("nobody", f"http://127.0.0.1:{servers.free_port()}")
    with pytest.raises(Unavailable, match=r"cannot be reached: .*check host and port of --endpoint-url"):
        open_store(s3_config(nobody, "bucket"), Node.of_this_machine())


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"endpoint_url": "not a url"}, "endpoint"),
        ({"addressing_style": "sideways"}, "addressing style"),
        ({"ca_bundle": "/no/such/bundle.pem"}, "bundle"),
        ({"ca_bundle": "/"}, "not a directory"),
        ({"ca_bundle": __file__}, "holds no certificate in PEM format"),
        ({"profile": "nobody"}, "profile 'nobody'"),
        ({"region": "not a region!"}, "region"),
    ],
)
def test_options_that_cannot_be_used(seaweed: Server, change: dict[str, str], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        open_store(msgspec.structs.replace(s3_config(seaweed, "bucket"), **change), Node.of_this_machine())


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_endpoint_of_the_environment_with_a_password_is_refused_and_not_told(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv(variable, f"http://user:pa55word@127.0.0.1:{servers.free_port()}")
    with pytest.raises(ConfigError, match="must not hold credentials") as raised:
        open_store(StoreConfig(source=Source.parse("s3://bucket/lake")), Node.of_this_machine())
    assert "pa55word" not in str(raised.value)


def test_wrong_secret_key(
    seaweed: Server, new_bucket: Callable[[Server], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket(seaweed)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDenied, match="AWS_SECRET_ACCESS_KEY"):
        open_store(s3_config(seaweed, bucket), Node.of_this_machine())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(AccessDenied, match="AWS_ACCESS_KEY_ID"):
        open_store(s3_config(seaweed, bucket), Node.of_this_machine())


def test_no_credentials(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDenied, match="set AWS_ACCESS_KEY_ID"):
        open_store(s3_config(seaweed, "bucket"), Node.of_this_machine())


def test_a_profile_gives_credentials(
    seaweed: Server, new_bucket: Callable[[Server], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        f"[training]\naws_access_key_id = {servers.ACCESS_KEY}\naws_secret_access_key = {servers.SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_store(
        msgspec.structs.replace(s3_config(seaweed, new_bucket(seaweed)), profile="training"), Node.of_this_machine()
    )
    try:
        assert probe(store, random.Random(1), SystemClock()).partial_status
        store.put("a", b"1")
        assert bytes(store.get("a", 0, 1).data) == b"1"
    finally:
        store.close()


def test_credentials_are_in_no_error(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call, failing in every way, with the whole chain of exceptions as a log would print it."""
    server, controls = faults
    config = s3_config(server, new_bucket(controls.server), read_timeout_s=0.5)
    token = "session-token-never-to-be-seen"
    store = open_store(config, Node.of_this_machine())
    probe(store, random.Random(1), SystemClock())
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-never-to-be-seen")
    texts: list[str] = []

    def note(call: Callable[[], object]) -> None:
        with pytest.raises(LakeError) as caught:
            call()
        texts.append("".join(traceback.format_exception(caught.value)))

    note(lambda: open_store(config, Node.of_this_machine()))
    calls: list[Callable[[], object]] = [
        lambda: store.get("a", 0, 1),
        lambda: store.get("a\t", 0, 1),
        lambda: store.head("a"),
        lambda: store.put("a", b""),
        lambda: store.put("a", bytes(2 << 20)),
        lambda: store.list_page(""),
        lambda: store.delete("a"),
        lambda: store.delete_many(["a"]),
        lambda: store.copy("a", "b"),
        lambda: store.create_multipart("a"),
        lambda: store.list_multipart(""),
    ]
    for fault in ("slow_down", "error_500", "reset"):
        for call in calls:
            controls.clear()
            getattr(controls, fault)(1)
            note(call)
    controls.clear()
    controls.stall(1)
    note(lambda: store.list_page(""))
    store.close()
    for text in texts:
        for secret in (servers.SECRET_KEY, "wrong-secret", token, "Signature=", "Credential=", servers.ACCESS_KEY):
            assert secret not in text, text
    assert len(texts) == 2 + 3 * len(calls)
    assert os.environ["AWS_SESSION_TOKEN"] == token
