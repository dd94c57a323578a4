"""Access of other users to a mount: modes in the object's metadata hold from the first open."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake

pytestmark = pytest.mark.needs_root("another user's system calls are made by changing to that user")
OTHER = 65_534
OPTIONS = ("--metadata-ttl", "1h", "--refresh", "1h")
OBJECTS = {
    "secret": ({"mode": str(stat.S_IFREG | 0o600)}, 0o600),
    "secret-of-rclone": ({"mode": "0100600"}, 0o600),
    "group": ({"mode": str(stat.S_IFREG | 0o640), "gid": str(OTHER)}, 0o640),
    "public": ({"mode": str(stat.S_IFREG | 0o644)}, 0o644),
    "plain": ({}, 0o644),
}
"""Metadata of objects that another program stored, and the modes that they mean."""
READABLE = {"group", "public", "plain"}


def give(lake: Lake, directory: str) -> None:
    for name, (metadata, _) in OBJECTS.items():
        lake.outside.replace(f"{directory}/{name}", name.encode(), metadata)


def run(directory: Path, *command: str, user: int = OTHER) -> subprocess.CompletedProcess[str]:
    """Run a command in a directory; its own path need not be open to the user."""
    return subprocess.run(
        command, cwd=directory, user=user, group=user, extra_groups=[], capture_output=True, text=True, check=False
    )


def readable(directory: Path) -> set[str]:
    """Names of files that the other user can read, by trying."""
    script = 'for each; do [ "$(cat "$each")" = "$each" ] && echo "$each"; done; true'
    done = run(directory, "sh", "-c", script, "sh", *OBJECTS)
    found = set(done.stdout.split())
    assert done.stderr.count("Permission denied") == len(OBJECTS) - len(found), done.stderr
    return found


def modes(directory: Path) -> dict[str, int]:
    return {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(directory)}


def heads(lake: Lake) -> int:
    return lake.number("store.requests.head")


@pytest.mark.parametrize(
    "options", [pytest.param((), id="live"), pytest.param(("--immutable",), id="immutable", marks=pytest.mark.long)]
)
def test_open_by_another_user_obeys_the_metadata(make_lake: LakeMaker, options: tuple[str, ...]) -> None:
    """Whatever was asked before; one HEAD for each file, once."""
    lake = make_lake("seaweedfs", "--allow-other", *(options or OPTIONS))
    firsts: dict[str, Callable[[Path], object]] = {
        "opened": lambda _: None,
        "listed": lambda path: run(path, "ls", "-l"),
        "listed-by-owner": lambda path: run(path, "ls", "-l", user=0),
        "statted": lambda path: run(path, "stat", *OBJECTS),
    }
    for name in firsts:
        give(lake, name)
    lake.mount()
    for name, first in firsts.items():
        path = lake.path / name
        before = heads(lake)
        first(path)
        assert heads(lake) == before, "no more than without --allow-other"
        assert readable(path) == READABLE, name
        assert heads(lake) == before + len(OBJECTS), name
        assert readable(path) == READABLE, name
        assert modes(path) == {name: mode for name, (_, mode) in OBJECTS.items()}
        assert heads(lake) == before + len(OBJECTS), name


@pytest.mark.parametrize("allow", [(), ("--allow-other",)], ids=["alone", "allow-other"])
def test_mounts_own_user_sends_no_head(make_lake: LakeMaker, allow: tuple[str, ...]) -> None:
    lake = make_lake("seaweedfs", *OPTIONS, *allow)
    give(lake, "d")
    lake.mount()
    path, before = lake.path / "d", heads(lake)
    unknown = 0o600 if allow else 0o644
    assert modes(path) == dict.fromkeys(OBJECTS, unknown)
    assert {name: (path / name).read_text() for name in OBJECTS} == {name: name for name in OBJECTS}
    assert heads(lake) == before
    if allow:
        assert readable(path) == READABLE
        assert heads(lake) == before, "the GET of the first open told the mode"


def test_write_by_another_user_obeys_the_metadata(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", "--allow-other", *OPTIONS)
    for name, mode in (("shared", 0o666), ("public", 0o644)):
        lake.outside.replace(name, b"a", {"mode": str(stat.S_IFREG | mode)})
    lake.mount()
    assert run(lake.path, "sh", "-c", "printf b >> shared").returncode == 0
    assert run(lake.path, "sh", "-c", "printf b >> public").returncode != 0
    assert (lake.path / "shared").read_bytes() == b"ab"
    assert (lake.path / "public").read_bytes() == b"a"


def test_open_by_another_user_of_a_replaced_object_obeys_the_new_one(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", "--allow-other", *OPTIONS)
    give(lake, "d")
    lake.mount()
    assert set(modes(lake.path / "d")) == set(OBJECTS)
    lake.outside.replace("d/secret", b"no secret any more", {"mode": str(stat.S_IFREG | 0o644)})
    lake.outside.replace("d/public", b"a secret now", {"mode": str(stat.S_IFREG | 0o600)})
    assert run(lake.path / "d", "cat", "secret").stdout == "no secret any more"
    assert run(lake.path / "d", "cat", "public").stdout == ""
