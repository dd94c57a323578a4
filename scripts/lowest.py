"""Prints the oldest versions that pyproject.toml allows, one a line, as constraints for pip (`make lowest`).

Those are what the program and its tests name themselves; what these depend on in turn stays as new as it can be.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("hints", "test")
"""Installed together with the program for the tests."""


def normalize(name: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(dependencies: list[str], optional: dict[str, list[str]]) -> set[str]:
    """Distributions that the program and its tests depend on."""
    requirements = [*dependencies, *(each for extra in EXTRAS for each in optional[extra])]
    return {normalize(re.split(r"[^\w.-]", text)[0]) for text in requirements}


def main() -> None:
    """Resolve with uv, which pip cannot do, and print what is named in pyproject.toml."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = names(project["dependencies"], project["optional-dependencies"])
    extras = [f"--extra={extra}" for extra in EXTRAS]
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--resolution=lowest-direct", "--no-annotate",
         "--no-header", f"--python={sys.executable}", *extras, str(PROJECT)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if normalize(re.split(r"[=\[ ]", line)[0]) in wanted:
            print(line)


if __name__ == "__main__":
    main()
