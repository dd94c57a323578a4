"""The adapter without a kernel: what a request makes of the filesystem below."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakefs_fuse.kernel.operations import Operations  # isort: skip  (before pyfuse3)
import pyfuse3

from lakefs_fuse.kernel.features import KernelFeatures
from lakefs_fuse.kernel.native.hooks import Feature
from lakefs_fuse.meta.entry import ROOT_INODE
from tests.memory_store import MemoryStore
from tests.vfs.lakes import TTL_S, Clock, lake


@pytest.mark.parametrize("opened", [True, False])
async def test_a_directory_is_as_new_as_the_ttl_wants_whether_it_is_opened_or_not(tmp_path: Path, opened: bool) -> None:
    """A kernel that was told not to open directories begins with READDIR: that looks at the TTL then, once."""
    store, clock = MemoryStore(), Clock()
    store.give("a")
    async with lake(store, tmp_path, clock=clock) as m:
        operations = Operations(m.fs, KernelFeatures(Feature(0), writeback_cache=True, background_max=0))

        async def read() -> int:
            before = store.count("list")
            if opened:
                await operations.opendir(ROOT_INODE, None)
            for start in (0, 1, 1 << 40):  # to the end, where a listing is complete
                await operations.readdir(ROOT_INODE, start, pyfuse3.ReaddirToken())
            return store.count("list") - before

        assert [await read(), await read()] == [1, 0]
        clock.advance(TTL_S + 1)
        assert [await read(), await read()] == [1, 0]
