"""Answers that do not have their sums are asked for again, and neither served nor kept; what that costs otherwise."""

from __future__ import annotations

import errno
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.blockcache.verified_get import ANSWERS_MAX, Spans, VerifiedGet
from lakefs_fuse.errors import FileError
from lakefs_fuse.metrics import CacheMetrics
from lakefs_fuse.store.protocol import Buffer, Fetched
from tests.blockcache.reading import MIB, MemoryStore, cache_files, content, for_tasks, make_cache

DATA = content("sums", 2 * MIB + 11)
ODD = "0123456789abcdef" * 2
"""An ETag that looks like a sum."""


class Store(MemoryStore):
    """Damages answers: ``flips`` has for each of the next ones the byte to flip in it, None for none."""

    def __init__(self) -> None:
        super().__init__()
        self.flips: deque[int | None] = deque()
        self.flip_always: int | None = None
        self.keyed = False
        self.heads = 0

    async def get(
        self, key: str, start: int, end: int, *, etag: str | None = None,
        examine: Callable[[Fetched], None] | None = None,
    ) -> Fetched:  # fmt: skip
        fetched = await super().get(key, start, end, etag=etag)
        at = self.flips.popleft() if self.flips else self.flip_always
        if at is not None:
            data = bytearray(fetched.data)
            data[at] ^= 1
            fetched = Fetched(bytes(data), fetched.meta)
        if examine is not None:
            examine(fetched)
        return fetched

    async def has_md5_etag(self, key: str) -> bool:
        self.heads += 1
        return not self.keyed


class OddStore(Store):
    """Whose ETags are no sums."""

    def version(self, key: str) -> Version:
        return Version(key, ODD, len(self.objects[key]))


class Lake:
    def __init__(self, directory: Path, nursery: trio.Nursery, store: Store, md5_etags: bool | None) -> None:
        self.store, self.metrics, self.directory = store, CacheMetrics(), directory
        self.version = store.put("file", DATA)
        self.pack = store.put(".lakefs/commits/pack", DATA)
        verified = VerifiedGet(
            store, self.metrics, is_pack=lambda key: key == self.pack.key, wrong_members=self.wrong_members,
            md5_etags=md5_etags,
        )  # fmt: skip
        self.cache = make_cache(directory, self.metrics)
        self.reader = BlockReader(store, for_tasks(self.cache, nursery), self.metrics, nursery, verified=verified)

    @staticmethod
    def wrong_members(data: Buffer) -> Spans:
        """The pack's only file with a sum are bytes 100 to 200 of its second block."""
        at = 100 if len(data) == MIB else MIB + 100 if len(data) > MIB else None
        if at is None or bytes(data[at : at + 100]) == DATA[MIB + 100 : MIB + 200]:
            return ()
        return [(at, at + 100)]

    async def read(self, version: Version, offset: int, length: int) -> bytes:
        return bytes(await self.reader.read(version, offset, length))

    async def idle(self) -> None:
        with trio.fail_after(60):
            while self.reader.statistics().blocks_pending:
                await trio.sleep(0.002)


@asynccontextmanager
async def lake_at(directory: Path, store: Store | None = None, md5_etags: bool | None = True) -> AsyncIterator[Lake]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            yield Lake(directory, nursery, store or Store(), md5_etags)
            nursery.cancel_scope.cancel()


async def read_whole(lake: Lake) -> bytes:
    return await lake.read(lake.version, 0, len(DATA))


async def test_verified_get_of_an_undamaged_object_makes_no_request_more(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        assert await read_whole(lake) == DATA
        assert await lake.read(lake.pack, MIB + 150, 10) == DATA[MIB + 150 : MIB + 160]
        assert (len(lake.store.gets), lake.store.heads, lake.metrics.wrong_sums) == (2, 0, 0)


@pytest.mark.parametrize("damaged", range(1, ANSWERS_MAX))
async def test_verified_get_with_damaged_answers_asks_again(tmp_path: Path, damaged: int) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.flips.extend(range(MIB, MIB + damaged))
        assert await read_whole(lake) == DATA
        assert (len(lake.store.gets), lake.metrics.wrong_sums) == (1 + damaged, damaged)
        await lake.idle()
        assert await read_whole(lake) == DATA
        assert len(lake.store.gets) == 1 + damaged, "it is in the cache"


@pytest.mark.parametrize("flips", [(5, 6, 7), (5, 5, 5)], ids=["anywhere", "one-place"])
async def test_verified_get_with_damaged_answers_only_is_eio_and_keeps_nothing(
    tmp_path: Path, flips: Sequence[int]
) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.flips.extend(flips)
        with pytest.raises(FileError) as caught:
            await read_whole(lake)
        assert caught.value.errno == errno.EIO
        assert (len(lake.store.gets), lake.metrics.wrong_sums) == (ANSWERS_MAX, ANSWERS_MAX)
        await lake.idle()
        assert (lake.reader.statistics().memory_blocks, cache_files(tmp_path)) == (0, [])
        assert await read_whole(lake) == DATA


async def test_verified_get_of_a_pack_fails_the_damaged_file_only(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.flip_always = 150
        for _ in range(2):
            with pytest.raises(FileError) as caught:
                await lake.read(lake.pack, MIB + 199, 10)
            assert caught.value.errno == errno.EIO
        assert await lake.read(lake.pack, MIB + 200, 10) == DATA[MIB + 200 : MIB + 210]
        assert await lake.read(lake.pack, MIB + 10, 90) == DATA[MIB + 10 : MIB + 100]
        await lake.idle()
        assert cache_files(tmp_path) == []
        lake.store.flip_always = None
        assert await lake.read(lake.pack, MIB + 100, 100) == DATA[MIB + 100 : MIB + 200]


async def test_verified_get_of_a_part_of_an_object_compares_nothing(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.flips.append(0)
        assert await lake.read(lake.version, MIB, 10) != DATA[MIB : MIB + 10]
        assert (len(lake.store.gets), lake.metrics.wrong_sums) == (1, 0)


async def test_verified_get_of_an_unknown_store_learns_that_etags_are_no_sums(tmp_path: Path) -> None:
    async with lake_at(tmp_path, OddStore(), None) as lake:
        other = lake.store.put("other", DATA[::-1])
        assert await read_whole(lake) == DATA
        assert len(lake.store.gets) == 2
        assert await lake.read(other, 0, len(DATA)) == DATA[::-1]
        assert (len(lake.store.gets), lake.store.heads) == (3, 0)


async def test_verified_get_of_an_unknown_store_learns_that_etags_are_sums(tmp_path: Path) -> None:
    async with lake_at(tmp_path, md5_etags=None) as lake:
        small = lake.store.put("small", b"small")
        assert await lake.read(small, 0, 5) == b"small"
        lake.store.flip_always = 9
        with pytest.raises(FileError):
            await read_whole(lake)


async def test_verified_get_of_a_store_without_md5_etags_compares_packs_only(tmp_path: Path) -> None:
    async with lake_at(tmp_path, OddStore(), False) as lake:
        lake.store.flips.extend([3, 150])
        assert await read_whole(lake) != DATA
        assert await lake.read(lake.pack, MIB + 100, 100) == DATA[MIB + 100 : MIB + 200]
        assert (len(lake.store.gets), lake.metrics.wrong_sums) == (3, 1)


async def test_verified_get_of_an_object_encrypted_with_a_key_serves_it(tmp_path: Path) -> None:
    store = OddStore()
    store.keyed = True
    async with lake_at(tmp_path, store) as lake:
        assert await read_whole(lake) == DATA
        assert (len(store.gets), store.heads) == (2, 1)


async def test_verified_get_of_an_object_of_parts_compares_nothing(tmp_path: Path) -> None:
    class Parts(Store):
        def version(self, key: str) -> Version:
            return Version(key, hashlib.md5(b"").hexdigest() + "-2", len(self.objects[key]))

    async with lake_at(tmp_path, Parts()) as lake:
        assert await read_whole(lake) == DATA
        assert (len(lake.store.gets), lake.metrics.wrong_sums) == (1, 0)
