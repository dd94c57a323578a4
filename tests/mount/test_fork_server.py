"""The fork server answers what the program answers that is started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.mount.fork_server import ForkServer
from tests.mount.lakes import CLI, environment


@pytest.mark.parametrize(
    "args",
    [
        ["--version"], ["umount", "/nowhere"], ["mount", "file:///nowhere", "/nowhere"], ["fsck", "file:///nowhere"],
        ["no-such-command"],
    ],
    ids=lambda args: str(args[0]),
)  # fmt: skip
def test_fork_server_run_answers_as_the_program(tmp_path: Path, args: list[str]) -> None:
    variables = environment(tmp_path)
    started = subprocess.run(
        [*CLI, *args], env=variables, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    forked = ForkServer.of_this_process().run(args, variables, 60)
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


@pytest.mark.parametrize("name", ["LAKEFS_FAILPOINT", "LD_PRELOAD", "PYTHONHASHSEED"])
def test_fork_server_does_not_suit_what_changes_imports(tmp_path: Path, name: str) -> None:
    server = ForkServer.of_this_process()
    variables = environment(tmp_path)
    assert server.suits(variables)
    assert not server.suits({**variables, name: os.environ.get(name, "") + "1"})
