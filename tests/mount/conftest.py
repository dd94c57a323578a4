"""Fixtures of lakes: mounted by the real program, and unmounted whatever a test does."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults import Faults
from tests.mount.lakes import Lake, Outside, file_lake, s3_lake
from tests.servers import Server, StoppableStore, make_bucket

if TYPE_CHECKING:
    from tests.mount.failing import Failing

FIXTURES = {"seaweedfs": "seaweed", "moto": "moto", "rclone": "rclone"}
LakeMaker = Callable[..., Lake]
SHARED_OPTIONS = ("--refresh", "1h")
"""Nobody else commits to the shared lake, and its tests count requests: none that come later by themselves."""
STORES = os.environ.get("LAKEFS_TEST_STORES", "seaweedfs").split(",")


@pytest.fixture(scope="session")
def dev_fuse() -> Path:
    """The kernel's device, which these tests cannot do without."""
    device = Path("/dev/fuse")
    assert device.exists(), "no /dev/fuse: these tests mount for real"
    assert os.access(device, os.R_OK | os.W_OK), "/dev/fuse is not open to you: as root, run `chmod 666 /dev/fuse`"
    return device


@pytest.fixture
def with_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library is used, whatever the environment of the tests says: without it other things are counted."""
    monkeypatch.delenv("LAKEFS_FUSE_HOOKS", raising=False)


@pytest.fixture
def make_lake(
    dev_fuse: Path, tmp_path: Path, request: pytest.FixtureRequest, new_bucket: Callable[[Server], str]
) -> Iterator[LakeMaker]:
    """Make a lake, not mounted yet: ``make_lake("file", "seaweedfs", "moto" or "rclone", *mount options)``."""
    with ExitStack() as stack:

        def make(store: str, *options: str, through: Server | None = None) -> Lake:
            directory = tmp_path / f"lake-{random.getrandbits(32):x}"
            if store == "file":
                return stack.enter_context(file_lake(directory, *options))
            server: Server = request.getfixturevalue({"seaweedfs": "seaweed"}.get(store, store))
            bucket = new_bucket(server)
            return stack.enter_context(s3_lake(server, bucket, directory, *options, through=through))

        yield make


@pytest.fixture
def lake(make_lake: LakeMaker) -> Lake:
    """A mounted lake on a local directory."""
    return make_lake("file").mount()


@pytest.fixture
def s3(make_lake: LakeMaker) -> Lake:
    """A mounted lake on SeaweedFS."""
    return make_lake("seaweedfs").mount()


@pytest.fixture(params=STORES)
def either(request: pytest.FixtureRequest, make_lake: LakeMaker) -> Lake:
    """A mounted lake on each of the stores that the environment names."""
    return make_lake(request.param).mount()


@dataclass(frozen=True)
class Place:
    """A directory of its own in a lake that the tests of a module share."""

    lake: Lake
    path: Path
    prefix: str

    def count(self, dotted: str) -> int:
        """A counter of the shared daemon: only differences mean something."""
        return self.lake.number(dotted)

    @property
    def outside(self) -> Outside:
        return self.lake.outside

    def stored(self, name: str) -> bytes:
        """The object of a file, from the store."""
        return self.outside.read(self.prefix + name)

    def settle(self) -> None:
        """Names in the store are as they are here."""
        self.lake.settle()

    def names(self) -> set[str]:
        """Objects of files in this directory, from the store."""
        keys = (key.removeprefix(self.prefix) for key in self.outside.objects() if key.startswith(self.prefix))
        return {key for key in keys if key and not key.endswith("/")}


@pytest.fixture(scope="module", params=[pytest.param("file", marks=pytest.mark.long), "seaweedfs"])
def shared_lake(
    request: pytest.FixtureRequest, dev_fuse: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lake]:
    """One mount for a whole module, on each store; in `make test` on that which has more rules of its own."""
    directory = tmp_path_factory.mktemp("shared")
    with ExitStack() as stack:
        if request.param == "file":
            lake = stack.enter_context(file_lake(directory, *SHARED_OPTIONS))
        else:
            server: Server = request.getfixturevalue("seaweed")
            bucket = f"shared-{random.SystemRandom().getrandbits(48):012x}"
            make_bucket(server, bucket)
            lake = stack.enter_context(s3_lake(server, bucket, directory, *SHARED_OPTIONS))
        yield lake.mount()


def new_place(lake: Lake) -> Place:
    """A new directory in a lake, in the store already: what a test counts afterwards is its own."""
    name = f"place-{random.SystemRandom().getrandbits(48):012x}"
    path = lake.path / name
    path.mkdir()
    lake.sync()
    return Place(lake, path, name + "/")


@pytest.fixture
def here(shared_lake: Lake) -> Place:
    """A new directory in the shared lake."""
    return new_place(shared_lake)


@pytest.fixture(scope="module")
def shared_lake_with_hooks(shared_lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """The shared lake, mounted with the C library: the same mount, unless the environment of the tests has none."""
    if "LAKEFS_FUSE_HOOKS" not in shared_lake.env:
        yield shared_lake
        return
    lake = Lake(
        shared_lake.outside, shared_lake.source, tmp_path_factory.mktemp("hooks") / "node", *shared_lake.options
    )
    del lake.env["LAKEFS_FUSE_HOOKS"]
    try:
        yield lake.mount()
    finally:
        lake.close()


@pytest.fixture
def here_with_hooks(shared_lake_with_hooks: Lake) -> Place:
    """As `here`, for what takes the C library: to know that who closes a file is not who writes it. Without it every
    process that is started closes, and publishes, what it inherited; the programs that a test runs included."""
    return new_place(shared_lake_with_hooks)


@pytest.fixture
def stoppable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoppableStore]:
    """A SeaweedFS of its own, which may be stopped."""
    store = StoppableStore(tmp_path_factory.mktemp("stoppable"))
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(scope="module")
def failing_store(
    dev_fuse: Path, seaweed: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Lake, Faults]]:
    """One lake for a module, on a store that fails on command."""
    from tests.mount.failing import failing_lake  # which needs this module

    with failing_lake(seaweed, tmp_path_factory.mktemp("failing")) as pair:
        yield pair


@pytest.fixture
def failing(failing_store: tuple[Lake, Faults]) -> Iterator[Failing]:
    """A new directory in it."""
    from tests.mount.failing import failing_place

    with failing_place(*failing_store) as place:
        yield place
