"""The output of ``--version``: the versions of the program and its platform, and the fast paths that work here. A child
process loads libfuse and the C library, so that a library that cannot be loaded becomes a line of text.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field

import click

from lakefs_fuse import __version__
from lakefs_fuse.product import PROGRAM

INSTALLATION: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.kernel.installation")
"""The child process; tests replace it."""
TIMEOUT_S = 30
"""It takes 0.3 s."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What a mount would use of this machine."""

    libfuse: str = ""
    """Version; empty where it is not known."""
    file: str = ""
    """Name of the shared object: ``libfuse3.so.3.14.0``."""
    pyfuse3: str = ""
    fast_paths: dict[str, str] = field(default_factory=dict)
    """Why each does not work; empty where it does."""
    error: str = ""
    """Why nothing of this is known; mounting fails for the same reason."""

    def lines(self) -> list[tuple[str, str]]:
        """Names and values, for people."""
        if self.error:
            return [("libfuse", f"cannot be used: {self.error}")]
        working = [name for name, why in self.fast_paths.items() if not why]
        reasons: dict[str, list[str]] = {}
        for name, why in self.fast_paths.items():
            if why:
                reasons.setdefault(why, []).append(name)
        return [
            ("libfuse", f"{self.libfuse or '?'} ({self.file}), pyfuse3 {self.pyfuse3}"),
            ("fast paths", ", ".join(working) or "none"),
            *(("missing", f"{', '.join(names)}: {why}") for why, names in reasons.items()),
        ]


def inspect_installation() -> Installation:
    """Ask the child process; a failure is in ``error``."""
    try:
        done = subprocess.run(INSTALLATION, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Installation(error=str(error))
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Installation(error=f"{said[-1]} (is the package fuse3 installed?)")
    return Installation(**json.loads(done.stdout))


def print_version(context: click.Context, _option: click.Parameter, given: bool) -> None:
    """Print and exit: the callback of ``--version``."""
    if not given or context.resilient_parsing:
        return
    lines = [
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        *inspect_installation().lines(),
        ("kernel", f"{os.uname().sysname} {os.uname().release}"),
    ]
    click.echo(f"{PROGRAM} {__version__}")
    for name, value in lines:
        click.echo(f"{name:<12}{value}")
    context.exit()
