"""Fixtures shared by all tests: real stores, one bucket a test, credentials in the environment only.

A store is started once a session, when the first test asks for it.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import ssl
from collections.abc import Callable, Iterator
from inspect import iscoroutinefunction
from pathlib import Path

import pytest

from tests import servers
from tests.faults import Faults, faulty
from tests.servers import Server
from tests.temporary_files import use_memory
from tests.tiers import INTEGRATION, IS_LONG, is_integration, load_profile
from tests.virtual_time import is_virtual, run_in_virtual_time

load_profile()
use_memory()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: programs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark integration tests, before ``-m`` chooses; they run first, because they take longest."""
    tests = config.rootpath / "tests"
    for item in items:
        callspec = getattr(item, "callspec", None)
        parameters = () if callspec is None else callspec.params.values()
        if is_integration(item.path.relative_to(tests), getattr(item, "fixturenames", ()), parameters):
            item.add_marker(INTEGRATION)
        if is_virtual(item.path.relative_to(tests)) and _is_async(item):
            item.add_marker(pytest.mark.trio(run=run_in_virtual_time))
    items.sort(key=lambda item: item.get_closest_marker(INTEGRATION) is None)


def _is_async(item: pytest.Item) -> bool:
    function = getattr(item, "obj", None)
    property_test = getattr(function, "hypothesis", None)
    return iscoroutinefunction(function if property_test is None else property_test.inner_test)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The modules and items of all tests are a million objects, none of them garbage: no collection looks at them, not
    while they are made, a tenth of the time, nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What ``needs_root`` marks is the only thing that is ever left out, and only for an ordinary user."""
    marker = item.get_closest_marker("needs_root")
    if marker is not None and os.geteuid() != 0:
        (why,) = marker.args
        pytest.skip(f"needs root: {why}")


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """boto3's chain finds the test identity and nothing of the machine's own configuration."""
    nowhere = str(tmp_path_factory.getbasetemp() / "no-aws-configuration")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", servers.REGION)
    monkeypatch.setenv("AWS_CONFIG_FILE", nowhere)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", nowhere)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The machine trusts one certificate authority: to read them all takes 10 ms of CPU for each S3 client. Servers of
    tests have no certificate, or one that the client is given; `make test-long` installs packages over the network."""
    system = ssl.get_default_verify_paths().cafile
    if IS_LONG or not system:
        yield
        return
    first, end, _ = Path(system).read_text().partition("-----END CERTIFICATE-----\n")
    directory = tmp_path_factory.mktemp("authority")
    (directory / "one.pem").write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(directory / "one.pem"))
        patch.setenv("SSL_CERT_DIR", str(directory))
        yield


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A SeaweedFS."""
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A moto server."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An ``rclone serve s3``."""
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture
def new_bucket() -> Callable[[Server], str]:
    """Make a bucket of a name of its own on a store; answers the name."""

    def make(server: Server) -> str:
        bucket = f"test-{random.SystemRandom().getrandbits(48):012x}"
        servers.make_bucket(server, bucket)
        return bucket

    return make


@pytest.fixture
def faults(seaweed: Server) -> Iterator[tuple[Server, Faults]]:
    """A SeaweedFS behind a proxy that fails on command."""
    with faulty(seaweed) as pair:
        yield pair
