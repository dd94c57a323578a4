"""System calls on a mount and on a local file system: the cases of `syscall_cases`, compared.

They differ only where docs/SEMANTICS.md says so (`DIFFERENCES`); a case listed here that no longer differs fails
the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.mount import syscall_cases
from tests.mount.conftest import LakeMaker
from tests.tiers import sized

NOBODY = 65_534
USERS = [pytest.param(0, marks=pytest.mark.long), NOBODY] if os.geteuid() == 0 else [os.geteuid()]
EVERY = sized(3, 1)
"""No divisor of the number of targets, or some of them would be in no case."""
OPTIONS = ("--durability", "writeback", "--metadata-ttl", "1h", "--refresh", "1h")

SAME_SIZE = "`truncate` to the size that a file has leaves its times"
DIFFERENCES = {
    "truncate 10 file": SAME_SIZE,
    "truncate 10 file_of_root": SAME_SIZE,
    "truncate 10 setid_file": SAME_SIZE,
    "truncate 10 setid_file_of_root": SAME_SIZE,
    "truncate 10 locking_file": SAME_SIZE,
    "truncate 10 in_directory_of_root": SAME_SIZE,
    "truncate 10 in_sticky_directory": SAME_SIZE,
    "truncate 10 link_to_file": SAME_SIZE,
}
"""Cases, and the words of SEMANTICS that speak of them."""
ROOT_ONLY = {"truncate 10 file_of_root"}
"""An ordinary user is refused on both."""
SEMANTICS = Path(__file__).parents[2] / "docs" / "SEMANTICS.md"


def run_cases(directory: Path, uid: int) -> dict[str, object]:
    gid = os.getegid() if uid == os.geteuid() else uid
    command = [sys.executable, syscall_cases.__file__, str(directory), *map(str, (uid, gid, EVERY))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("uid", USERS)
def test_system_calls_answer_as_on_a_local_file_system(make_lake: LakeMaker, uid: int) -> None:
    allow = ["--allow-other"] if os.geteuid() == 0 else []
    lake = make_lake("file", *OPTIONS, *allow).mount()
    there = lake.path / "top"
    there.mkdir()
    with tempfile.TemporaryDirectory(prefix="lakefs-test-") as local:
        os.chmod(local, 0o755)
        here = run_cases(Path(local), uid)
    found = run_cases(there, uid)
    assert here.keys() == found.keys()
    different = {case for case in here if here[case] != found[case]}
    expected = (set(DIFFERENCES) - (ROOT_ONLY if uid == NOBODY else set())) & here.keys()
    assert expected
    assert {case: (here[case], found[case]) for case in different - expected} == {}
    assert expected - different == set(), "listed, and no difference"
    assert all(words in SEMANTICS.read_text() for words in DIFFERENCES.values())
