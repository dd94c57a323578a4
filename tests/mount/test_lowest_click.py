"""The command line with the oldest click that pyproject.toml allows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakefs_fuse.cli import MODULES
from tests.mount.lakes import Lake, file_lake

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lowest_version() -> str:
    requirements = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    (found,) = (match[1] for line in requirements if (match := re.fullmatch(r"click>=([\d.]+)", line)))
    return found


@pytest.fixture(scope="module")
def lowest_click(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PYTHONPATH that holds the oldest click."""
    directory = tmp_path_factory.mktemp("click")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(directory), f"click=={lowest_version()}"], check=True)
    return directory


@pytest.fixture
def lake(dev_fuse: Path, tmp_path: Path, lowest_click: Path) -> Iterator[Lake]:
    with file_lake(tmp_path / "lake") as lake:
        lake.env["PYTHONPATH"] = str(lowest_click)
        yield lake


def test_cli_lowest_click_shows_help_of_every_command(lake: Lake, lowest_click: Path) -> None:
    program = (
        "import importlib, sys, click\n"
        "from lakefs_fuse.cli import MODULES, run\n"
        "assert click.__file__.startswith(sys.argv[1]), click.__file__\n"
        "for name in MODULES:\n"
        "    assert run([name, '--help']) == 0, name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(lowest_click)], env=lake.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(MODULES)


def test_cli_lowest_click_mounts_and_unmounts(lake: Lake) -> None:
    lake.mount("--cache-size", "100M", "--metadata-ttl", "5m", "-o", "ro")
    assert lake.stats()["daemon"]
    lake.umount()


def test_cli_lowest_click_refuses_wrong_arguments(lake: Lake) -> None:
    refused = lake.try_mount("--cache-size", "much")
    assert refused.returncode == 2
    assert "much" in refused.stderr
    assert lake.cli("no-such-command").returncode == 2
