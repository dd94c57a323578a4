"""Stores that keep objects as files cannot hold one beside those below its key, or below another's: names can."""

from __future__ import annotations

import os

import pytest

from tests.mount.conftest import Place
from tests.mount.lakes import PART_BYTES

SMALL, LARGE = 100, PART_BYTES + (4 << 20)


def write(place: Place, name: str, size: int, flags: int = 0) -> bytes:
    """Store a file durably; returns its bytes."""
    data = os.urandom(size)
    fd = os.open(place.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o644)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return data


@pytest.mark.parametrize(
    ("size", "flags"),
    [(SMALL, 0), (SMALL, os.O_EXCL), (LARGE, 0), pytest.param(LARGE, os.O_EXCL, marks=pytest.mark.long)],
)
def test_file_gets_the_name_of_a_directory_that_was_renamed(here: Place, size: int, flags: int) -> None:
    (here.path / "d").mkdir()
    before = write(here, "d/x", LARGE)
    (here.path / "d").rename(here.path / "e")
    data = write(here, "d", size, flags)
    assert ((here.path / "d").read_bytes(), (here.path / "e/x").read_bytes()) == (data, before)
    again = write(here, "d", size)
    assert ((here.path / "d").read_bytes(), (here.path / "e/x").read_bytes()) == (again, before)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_directory_gets_the_name_of_a_file_that_was_renamed(here: Place, size: int) -> None:
    before = write(here, "f", LARGE)
    (here.path / "f").rename(here.path / "g")
    (here.path / "f").mkdir()
    data = write(here, "f/x", size)
    assert ((here.path / "f/x").read_bytes(), (here.path / "g").read_bytes()) == (data, before)


def test_file_gets_the_name_of_a_directory_that_was_removed(here: Place) -> None:
    (here.path / "d").mkdir()
    write(here, "d/x", LARGE)
    (here.path / "d/x").unlink()
    (here.path / "d").rmdir()
    data = write(here, "d", SMALL)
    assert (here.path / "d").read_bytes() == data
