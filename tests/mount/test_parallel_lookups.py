"""Requests of one directory that wait for the store do not wait for each other."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.faults import faulty
from tests.mount.lakes import eventually, s3_lake
from tests.mount.writeback_lakes import FOR_EVER
from tests.servers import Server, make_bucket

ANSWERED_S_MAX = 10.0
"""For a name whose request the store answers, on a busy machine. The other one is not answered at all."""


def test_lookup_beside_one_that_the_store_does_not_answer_is_answered(
    dev_fuse: Path, seaweed: Server, tmp_path: Path
) -> None:
    make_bucket(seaweed, "parallel")
    with faulty(seaweed) as (proxied, faults):
        with s3_lake(seaweed, "parallel", tmp_path / "lake", "--retry-timeout", "60s", through=proxied) as lake:
            for name in ("d/slow", "d/other"):
                lake.outside.replace(name, b"data")
            lake.mount()
            if not lake.stats()["kernel"]["parallel_dirops"]:  # type: ignore[index]
                pytest.skip("this kernel, or libfuse, does not offer it")
            faults.hang(FOR_EVER, containing="slow")
            waiting = threading.Thread(target=os.path.exists, args=(lake.path / "d" / "slow",))
            waiting.start()
            try:
                eventually(lambda: faults.injected["hang"] > 0, "the store is asked for one name")
                other = threading.Thread(target=os.stat, args=(lake.path / "d" / "other",))
                other.start()
                other.join(ANSWERED_S_MAX)
                assert not other.is_alive()
                assert waiting.is_alive()
            finally:
                faults.clear()
                waiting.join()
