"""Random operations on a mount under write-back, deaths and outages among them, and on a plain directory.

``LAKEFS_MODEL_EXAMPLES`` sets how many sequences are tried, for longer runs; with ``LAKEFS_MODEL_NO_SHRINK`` what fails
is told as it was found, for failures that depend on timing.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lakefs_fuse.data import publishing
from tests.fs.model import Operation
from tests.fs.test_model import SCRATCH, files, operation, operations, preludes
from tests.fs.writeback_model import WriteBackModel

EXAMPLES = int(os.environ.get("LAKEFS_MODEL_EXAMPLES", "60"))
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
if "LAKEFS_MODEL_NO_SHRINK" not in os.environ:
    PHASES.append(Phase.shrink)

happenings = st.one_of(
    operation("crash", st.booleans()),
    operation("outage", st.sampled_from((True, True, False))),
    operation("breathe"),
    operation("breathe"),
    operation("state", files),
)
sequences = st.lists(st.one_of(operations, operations, operations, happenings), min_size=15, max_size=60)


@pytest.fixture(scope="module", autouse=True)
def small_parts_may_be_copied() -> object:
    """So that parts of 64 KiB take the way of those of 5 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "PART_BYTES_MIN", 4096)
        yield


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="LAKEFS_MODEL_EXAMPLES" not in os.environ,  # the same every day; others where they are asked for
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
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
