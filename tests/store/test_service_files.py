"""The files of botocore: the same content as by its own loader, and no look at services that nobody asked for."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from botocore.exceptions import DataNotFoundError, UnknownServiceError
from botocore.loaders import Loader

from lakefs_fuse.errors import ConfigError
from lakefs_fuse.store.s3.access import service_files

MODEL = {"metadata": {"apiVersion": "2030-01-01"}, "operations": {}}


def fresh_files() -> Loader:
    """Not those that other tests of this process use: botocore writes into what it has loaded."""
    return service_files.__wrapped__(None)


@pytest.mark.parametrize("kind", ["service-2", "endpoint-rule-set-1", "paginators-1", "waiters-2"])
@pytest.mark.parametrize("service", ["s3", "sts", "sso"])
def test_service_files_model_is_that_of_botocore(service: str, kind: str) -> None:
    theirs, ours = Loader(), fresh_files()
    try:
        expected = theirs.load_service_model(service, kind)
    except (DataNotFoundError, UnknownServiceError):
        with pytest.raises((DataNotFoundError, UnknownServiceError)):
            ours.load_service_model(service, kind)
    else:
        assert json.dumps(ours.load_service_model(service, kind)) == json.dumps(expected), "in the same order"


def test_service_files_endpoints_are_those_of_botocore() -> None:
    assert json.dumps(fresh_files().load_data("endpoints")) == json.dumps(Loader().load_data("endpoints"))


def test_service_files_unknown_service_is_an_error() -> None:
    with pytest.raises(UnknownServiceError, match="no-such-service"):
        fresh_files().load_service_model("no-such-service", "service-2")


@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_service_files_data_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    directory = tmp_path / "models" / "s3" / "2030-01-01"
    directory.mkdir(parents=True)
    text = json.dumps(MODEL).encode()
    (directory / f"service-2.{ending}").write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    files = service_files(os.pathsep.join(["$MODELS", str(tmp_path / "nowhere")]))
    assert files.load_service_model("s3", "service-2") == MODEL
    assert files.load_service_model("sts", "service-2")["metadata"]["serviceId"] == "STS"


def test_service_files_that_cannot_be_parsed_are_named(tmp_path: Path) -> None:
    (tmp_path / "endpoints.json").write_text("{")
    with pytest.raises(ConfigError, match=r"endpoints\.json: .*AWS_DATA_PATH"):
        service_files(str(tmp_path)).load_data("endpoints")


def test_service_files_model_looks_at_no_other_service(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    list_directory = os.listdir

    def recorded(path: str) -> list[str]:
        listed.append(path)
        return list_directory(path)

    monkeypatch.setattr(os, "listdir", recorded)
    fresh_files().load_service_model("s3", "service-2")
    services = {os.path.basename(path) for path in listed if os.path.dirname(path) == Loader.BUILTIN_DATA_PATH}
    assert services == {"s3"}
