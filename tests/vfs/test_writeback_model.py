"""Random operations on a mount under write-back, deaths and outages among them, and on a plain directory.

See `model.searched` for longer runs.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.vfs.model import Operation, searched
from tests.vfs.test_model import SCRATCH, files, operation, operations, preludes
from tests.vfs.writeback_model import WriteBackModel

happenings = st.one_of(
    operation("crash", st.booleans()),
    operation("outage", st.sampled_from((True, True, False))),
    operation("breathe"),
    operation("breathe"),
    operation("state", files),
)
sequences = st.lists(st.one_of(operations, operations, operations, happenings), min_size=15, max_size=60)


@pytest.mark.usefixtures("small_parts_may_be_copied", "noted_one_by_one")
@searched(60)
@given(
    preludes,
    sequences,
    st.booleans(),
    st.sampled_from(("auto", "always", "never")),
    st.sampled_from((False, False, True)),
    st.sampled_from((0.0, 0.01, 1000.0)),
)
def test_accepted_is_kept(
    prelude: list[Operation], sequence: list[Operation], in_memory: bool, pack: str, mixed: bool, delay_s: float
) -> None:
    os.umask(0o022)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as root:
        model = WriteBackModel(Path(root), in_memory=in_memory, pack=pack, mixed=mixed, delay_s=delay_s)

        async def bounded() -> None:
            with trio.fail_after(120):
                await model.run([*prelude, *sequence])

        trio.run(bounded)
