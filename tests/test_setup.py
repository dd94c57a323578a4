"""`scripts/setup` for an ordinary user: only missing packages take root, and what root has to run is said."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "scripts" / "setup"
BY_HAND = "as root, run: apt-get update && apt-get install --no-install-recommends fio jq\n"
PYTHON = """
case "$*" in
    *realpath*) echo /usr/bin/python3 ;;
    *python%d*) echo python3.11 ;;
    "-m venv"*) mkdir -p "$5/bin"; cp "$0" "$5/bin/python" ;;
esac
"""
"""What setup asks of a Python: which one it is, and an environment, whose Python then is the same."""


class Machine:
    """A machine with these few programs, each of which notes how it was called; its user is not root."""

    def __init__(self, directory: Path, *missing: str) -> None:
        self.root, self.bin, self.calls = directory / "project", directory / "bin", directory / "calls"
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(SETUP, self.root / "scripts" / "setup")
        self.bin.mkdir()
        for tool in ("bash", "cp", "dirname", "env", "mkdir"):
            found = shutil.which(tool)
            assert found
            (self.bin / tool).symlink_to(found)
        self.add("id", "echo 1000")
        self.add("dpkg-query", f'case " {" ".join(missing)} " in *" $3 "*) exit 1 ;; *) printf installed ;; esac')
        self.add("apt-get", "")
        self.add("python3", PYTHON)

    def add(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f'#!{self.bin}/bash\necho "{name} $*" >> {self.calls}\n{script}\n')
        (self.bin / name).chmod(0o755)

    def setup(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / "bash"), str(self.root / "scripts" / "setup"), "test"],
            env={"PATH": str(self.bin)}, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    def called(self, *names: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.partition(" ")[0] in names]


def test_where_every_package_is_there_nothing_takes_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("sudo", "exit 1")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.called("sudo", "apt-get") == []
    install = "python3 -m pip install --quiet --no-compile --config-settings editable_mode=compat --editable .[test]"
    assert install in machine.called("python3")


@pytest.mark.parametrize("fetched", [True, False])
def test_the_bundled_pip_stands_in_for_one_that_cannot_be_fetched(tmp_path: Path, fetched: bool) -> None:
    machine = Machine(tmp_path)
    if not fetched:
        machine.add("python3", f'case "$*" in "-m pip --python"*) exit 1 ;; esac\n{PYTHON}')
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert ("python3 -m ensurepip" in machine.called("python3")) != fetched


@pytest.mark.parametrize("sudo", ["none", "refuses"])
def test_what_root_has_to_run_is_said(tmp_path: Path, sudo: str) -> None:
    machine = Machine(tmp_path, "fio", "jq")
    if sudo == "refuses":
        machine.add("sudo", "echo not in the sudoers file >&2; exit 1")
    done = machine.setup()
    assert done.returncode == 1
    assert done.stderr.endswith(BY_HAND)
    assert machine.called("apt-get") == []
    assert not (machine.root / ".venv").exists()


def test_who_may_use_sudo_gets_what_is_missing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "fio", "jq")
    machine.add("sudo", 'exec "$@"')
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.called("apt-get") == [
        "apt-get update -q",
        "apt-get install -q -y --no-install-recommends fio jq",
    ]
