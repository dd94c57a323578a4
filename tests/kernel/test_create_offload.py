"""States of files that the C library hands over: those of Python, and how they go with those of C."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from lakefs_fuse.kernel.create_offload import HANDLE_CREATED, SUCCESSORS, FileState, Parts, ReceivedFile
from lakefs_fuse.vfs.ops.create import Received

NATIVE = Path(__file__).parents[2] / "lakefs_fuse" / "kernel" / "native"
CONTENT = Received(7, 1, b"name", 0o644, 0, 0, 1, 0, 0, b"data")


@pytest.mark.parametrize("before, after", list(product(FileState, FileState)))
def test_received_file_transition_outside_the_table_is_refused(before: FileState, after: FileState) -> None:
    file = ReceivedFile(CONTENT, before)
    if after in SUCCESSORS.get(before, ()):
        file.transition(after)
        assert file.state is after
    else:
        with pytest.raises(AssertionError, match=f"{before.name} to {after.name}"):
            file.transition(after)
        assert file.state is before


def test_numbers_shared_with_c_are_the_same() -> None:
    source = (NATIVE / "create_offload.c").read_text() + (NATIVE / "native.h").read_text()
    parts = re.search(r"enum parts \{(.*?)\}", source, re.DOTALL)
    assert parts
    found = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", parts[1])}
    assert found == {str(part.name): part.value for part in Parts}
    assert f"#define HANDLE_CREATED (1ULL << {HANDLE_CREATED.bit_length() - 1})" in source
