"""Plain objects of one mount, seen through another whose listings count for an hour."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakefs_fuse.kernel.invalidation import NAMES_MAX
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, eventually
from tests.mount.test_commits import another
from tests.tiers import sized

REFRESH_S = 1.0
OPTIONS = ("--refresh", f"{REFRESH_S:g}", "--metadata-ttl", "1h", "--pack", "never")
SEEN_S_MAX = REFRESH_S + 2.0
SLOW_MACHINE_S = 5.0
SAMPLE = 32
FILES = sized(150, 1000)
"""They take longer than a second to close."""


@pytest.fixture
def nodes(make_lake: LakeMaker, tmp_path: Path) -> Iterator[tuple[Lake, Lake]]:
    lake = make_lake("file", *OPTIONS).mount()
    with another(lake, tmp_path) as other:
        yield lake, other


def test_plain_file_of_another_mount_is_seen_within_refresh_and_two_seconds(nodes: tuple[Lake, Lake]) -> None:
    lake, other = nodes
    (other.path / "runs").mkdir()
    eventually((lake.path / "runs").exists, "the directory is there")
    assert os.listdir(lake.path / "runs") == []
    seen_s: list[float] = []
    for number in range(3):
        path = lake.path / f"runs/{number}"
        assert not path.exists(), "the kernel remembers that"
        (other.path / f"runs/{number}").write_bytes(b"weights")
        began_s = time.monotonic()
        eventually(path.exists, "the file is seen")
        seen_s.append(time.monotonic() - began_s)
        assert path.read_bytes() == b"weights"
        assert sorted(os.listdir(lake.path / "runs")) == [str(each) for each in range(number + 1)]
    assert min(seen_s) < SEEN_S_MAX
    assert max(seen_s) < SEEN_S_MAX + SLOW_MACHINE_S
    assert (lake.path / "runs/0").read_bytes() == b"weights"
    (other.path / "runs/0").write_bytes(b"other weights")
    eventually(lambda: (lake.path / "runs/0").read_bytes() == b"other weights", "the new version is read")
    assert other.plain().keys() == {"runs/0", "runs/1", "runs/2"}


def test_hundreds_of_files_closed_one_after_the_other_are_announced_once_a_second(nodes: tuple[Lake, Lake]) -> None:
    _, other = nodes
    before, began_s = other.number("commits.written"), time.monotonic()
    for number in range(FILES):
        (other.path / f"{number}").write_bytes(b"x")
    took_s = time.monotonic() - began_s
    eventually(lambda: other.number("commits.written") > before, "they are announced")
    time.sleep(2.0)
    written = other.number("commits.written")
    assert written - before <= took_s + 2
    time.sleep(2.5)
    assert other.number("commits.written") == written, "an idle mount writes nothing"


def test_refresh_shows_objects_of_other_programs_at_once(nodes: tuple[Lake, Lake]) -> None:
    lake, _ = nodes
    assert os.listdir(lake.path) == []
    assert not (lake.path / "f").exists(), "the kernel remembers that"
    lake.outside.replace("f", b"bytes")
    lake.outside.replace("d/e/g", b"below")
    assert os.listdir(lake.path) == []
    done = lake.cli("refresh", str(lake.path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (lake.path / "f").read_bytes() == b"bytes"
    assert sorted(os.listdir(lake.path)) == ["d", "f"]
    assert os.listdir(lake.path / "d/e") == ["g"]
    lake.outside.replace("d/e/h", b"below")
    lake.outside.delete("f")
    assert lake.cli("refresh", "--recursive", str(lake.path)).returncode == 0
    assert sorted(os.listdir(lake.path / "d/e")) == ["g", "h"]
    assert not (lake.path / "f").exists()
    gone = lake.cli("refresh", "--json", str(lake.path / "f"))
    assert (gone.returncode, json.loads(gone.stdout)["exists"]) == (0, False)
    assert gone.stderr == f"lakefs-fuse: {lake.path / 'f'} does not exist\n"
    assert lake.cli("refresh", "/").returncode == 1


def test_refresh_after_thousands_of_changes_returns_when_programs_see_all_of_them(make_lake: LakeMaker) -> None:
    """The kernel holds each name, and more change than wait for it in memory."""
    lake = make_lake("file", *OPTIONS)
    changes = sized(5 * NAMES_MAX // 4, 3 * NAMES_MAX)
    before, after = ([f"{kind}{number}" for number in range(changes)] for kind in "ba")
    source, shown = Path(lake.source.removeprefix("file://")) / "d", lake.path / "d"
    source.mkdir()
    for name in before:
        (source / name).touch()
    lake.mount()
    assert len(os.listdir(shown)) == len(before)
    assert all((shown / name).exists() for name in before)
    assert not any((shown / name).exists() for name in after[::SAMPLE])
    for old, new in zip(before, after, strict=True):
        (source / old).rename(source / new)
    assert lake.cli("refresh", str(shown)).returncode == 0
    assert not any((shown / name).exists() for name in before[::SAMPLE])
    assert all((shown / name).exists() for name in after[::SAMPLE])


def test_refresh_of_a_directory_never_listed_shows_names_that_were_absent(make_lake: LakeMaker) -> None:
    """The kernel remembers that; the name is refreshed, or its directory, or all above."""
    lake = make_lake("file", *OPTIONS)
    for number in range(3):
        lake.outside.replace(f"d{number}/other", b"x")
    lake.mount()
    for number, refresh in enumerate((["d0/x"], ["d1"], ["--recursive", ""])):
        path = f"d{number}/x"
        assert not (lake.path / path).exists()
        lake.outside.replace(path, b"x")
        assert not (lake.path / path).exists()
        assert lake.cli("refresh", *refresh[:-1], str(lake.path / refresh[-1])).returncode == 0
        assert (lake.path / path).exists(), refresh
