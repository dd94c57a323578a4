"""Names that are too long, by themselves or for their key."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Directory, Lake
from tests.mount.posix_errors import error_of, opened

DEPTH, COMPONENT = 4, "x" * 200
SAID = "keys hold at most 1024 bytes"


def calls(path: Path, other: Path) -> dict[str, Callable[[], object]]:
    """Everything that may be done to a name."""
    return {
        "stat": path.stat,
        "open": opened(path, os.O_RDONLY),
        "create": opened(path, os.O_CREAT | os.O_WRONLY),
        "truncate": lambda: os.truncate(path, 0),
        "unlink": path.unlink,
        "mkdir": path.mkdir,
        "rmdir": path.rmdir,
        "symlink": lambda: path.symlink_to("x"),
        "rename": lambda: path.rename(other),
        "rename to": lambda: other.rename(path),
    }


@pytest.mark.parametrize("store", ["file", "seaweedfs"])
def test_a_name_that_is_too_long_is_enametoolong_in_every_call(make_lake: LakeMaker, store: str) -> None:
    lake = make_lake(store).mount()
    deep = lake.path.joinpath(*[COMPONENT] * DEPTH, "y" * 150)
    deep.mkdir(parents=True)
    other = lake.path / "other"
    other.write_bytes(b"bytes")
    for path in (deep / ("z" * 100), lake.path / ("z" * 256)):
        found = {name: error_of(call) for name, call in calls(path, other).items()}
        assert found == dict.fromkeys(found, "ENAMETOOLONG")
    assert other.read_bytes() == b"bytes"
    (deep / "z").write_bytes(b"short enough")
    assert lake.log().count(SAID) == 1


def test_a_key_that_is_too_long_can_be_read_but_not_changed(lake: Lake) -> None:
    """Some stores take them; commits do not."""
    assert isinstance(lake.outside, Directory)
    os.chdir(lake.outside.root)
    try:
        for _ in range(DEPTH + 2):
            os.mkdir(COMPONENT)
            os.chdir(COMPONENT)
        Path("file").write_bytes(b"theirs")
    finally:
        os.chdir("/")
    deep = lake.path.joinpath(*[COMPONENT] * (DEPTH + 2))
    for above in list(deep.parents)[DEPTH + 1 :: -1]:
        assert len(os.listdir(above)) == 1
    assert os.listdir(deep) == ["file"]
    assert (deep / "file").read_bytes() == b"theirs"
    assert error_of((deep / "file").unlink) == "ENAMETOOLONG"
    assert error_of(lambda: (deep / "file").chmod(0o600)) == "ENAMETOOLONG"
    assert error_of(lambda: (deep / "file").rename(lake.path / "file")) == "ENAMETOOLONG"
    assert (deep / "file").read_bytes() == b"theirs"
    assert lake.log().count(SAID) == 1
