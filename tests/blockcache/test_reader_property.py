"""Whatever is read in whatever order, with whatever happening to the cache files: the object's bytes, always."""

import contextlib
import os
import random
import shutil
import tempfile
from pathlib import Path

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.metrics import CacheMetrics
from tests.blockcache.reading import MIB, MemoryStore, cache_files, content, for_tasks, make_cache
from tests.tiers import examples

OBJECTS = {"tiny": 1, "block": MIB, "tail": 2 * MIB + 4095, "large": 7 * MIB + 1}
DATA = {key: content(key, size) for key, size in OBJECTS.items()}

reads = st.tuples(
    st.just("read"),
    st.sampled_from(sorted(OBJECTS)),
    st.one_of(st.integers(0, 8 * MIB), st.sampled_from([0, MIB - 1, MIB, MIB + 1, 7 * MIB])),
    st.one_of(st.integers(0, 3 * MIB), st.just(4096), st.just(9 * MIB)),
)
events = st.tuples(
    st.sampled_from(["flip", "truncate", "garbage", "unlink", "restart", "crash", "evict", "vanish"]),
    st.sampled_from(sorted(OBJECTS)),
    st.integers(0, 8 * MIB),
    st.integers(0, 1 << 30),
)


def damage(directory: Path, what: str, where: int, seed: int) -> None:
    paths = cache_files(directory)
    if not paths:
        return
    path = paths[seed % len(paths)]
    size = path.stat().st_size
    if what == "unlink":
        path.unlink()
    elif what == "truncate":
        os.truncate(path, where % (size + 4096))
    elif size:
        with path.open("r+b") as file:
            at = where % size if what == "flip" else max(0, size - 1 - where % 200)
            noise = random.Random(seed).randbytes(1 if what == "flip" else 64)
            os.pwrite(file.fileno(), noise, at)


async def run(directory: Path, steps: list[tuple[str, str, int, int]], bytes_max: int, memory_blocks: int) -> None:
    store = MemoryStore()
    versions = {key: store.put(key, data) for key, data in DATA.items()}
    async with trio.open_nursery() as nursery:

        def start() -> tuple[BlockCache, BlockReader]:
            metrics = CacheMetrics()
            cache = make_cache(directory, metrics, bytes_max)
            return cache, BlockReader(
                store,
                for_tasks(cache, nursery),
                metrics,
                nursery,
                memory_blocks=memory_blocks,
                inflight_bytes_max=16 * BLOCK_BYTES,
            )

        cache, reader = start()
        handles = {key: Readahead() for key in OBJECTS}

        async def read(version: Version, offset: int, length: int) -> None:
            readahead = handles[version.key] if offset % 2 else None
            got = await reader.read(version, offset, length, readahead, jumps=offset % 4 < 2)
            assert got == DATA[version.key][offset : offset + length]

        for what, key, first, second in steps:
            if what == "read":
                async with trio.open_nursery() as readers:
                    readers.start_soon(read, versions[key], first, second)
                    readers.start_soon(read, versions[key], first + second // 2, second)
            elif what in ("restart", "crash"):
                while reader.statistics().blocks_pending:
                    await trio.sleep(0.001)
                if what == "restart":
                    cache.close()
                cache, reader = start()
            elif what == "evict":
                cache.evict(second % (4 * MIB))
            elif what == "vanish":
                for path in directory.glob("???"):
                    shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):  # evicted while it was chosen
                    damage(directory, what, first, second)
        while reader.statistics().blocks_pending:
            await trio.sleep(0.001)
        assert reader.statistics().bytes_inflight == 0
        cache.close()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.one_of(reads, reads, events), min_size=1, max_size=25),
    st.sampled_from([2 * MIB, 6 * MIB, 64 * MIB]),
    st.sampled_from([1, 2, 48]),
)
def test_reads_equal_the_object(steps: list[tuple[str, str, int, int]], bytes_max: int, memory_blocks: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        trio.run(run, Path(directory), steps, bytes_max, memory_blocks)
