"""Which blocks are pushed to the kernel, and when it is given up; the kernel is a list here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import trio
from trio.testing import MockClock

from lakefs_fuse.errors import FileError
from lakefs_fuse.kernel.page_cache_push import PROBE_EACH, PUSHES_MAX, ROUND_S, PageCachePush
from lakefs_fuse.store.protocol import Buffer
from lakefs_fuse.vfs.immutable.filesystem import ImmutableFilesystem

FILES_EACH = 20


class Packs:
    """Files 0 to 19 are in the first block, and so on; ``kernel`` has the files that it was given."""

    def __init__(self) -> None:
        self.kernel: list[int] = []
        self.known = True
        self.gone = False

    def block_of(self, inode: int) -> tuple[int, int] | None:
        return (1, inode // FILES_EACH) if inode < 10**6 else None

    async def beside(self, inode: int) -> list[tuple[int, Buffer]]:
        if self.gone:
            raise FileError(5)
        first = inode // FILES_EACH * FILES_EACH
        return [(each, b"data") for each in range(first, first + FILES_EACH) if each != inode]

    def store(self, files: Sequence[tuple[int, Buffer]]) -> list[int]:
        self.kernel += [inode for inode, _ in files]
        return [len(data) for _, data in files] if self.known else []


@asynccontextmanager
async def pushing(packs: Packs) -> AsyncIterator[PageCachePush]:
    made = PageCachePush(cast(ImmutableFilesystem, packs), store=packs.store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        yield made
        nursery.cancel_scope.cancel()


async def blocks_tried(made: PageCachePush, packs: Packs, inodes: Sequence[int]) -> int:
    before = len(packs.kernel)
    for inode in inodes:
        made.count_read(inode, 0)
        while made.under_way:
            await trio.sleep(0.001)
    return (len(packs.kernel) - before) // (FILES_EACH - 1)


async def test_the_other_files_of_the_block_are_pushed() -> None:
    packs = Packs()
    async with pushing(packs) as made:
        assert await blocks_tried(made, packs, [43]) == 1
        assert packs.kernel == [40, 41, 42, *range(44, 60)]
        assert made.describe() == {"under_way": 0, "files": 19, "bytes": 76, "unknown": 0}
        made.count_read(70, 4096)  # the middle of a file
        made.count_read(10**6, 0)  # not in a pack
        assert await blocks_tried(made, packs, []) == 0


async def test_files_that_the_kernel_does_not_know_are_given_up_but_for_a_probe() -> None:
    packs = Packs()
    packs.known = False
    async with pushing(packs) as made:
        readings = 10 * PROBE_EACH
        assert await blocks_tried(made, packs, [FILES_EACH * i for i in range(readings)]) == 1 + 10
        assert made.files == 0
        packs.known = True
        await blocks_tried(made, packs, [FILES_EACH * i for i in range(readings, 3 * readings)])
        assert made.pays


async def test_a_block_whose_files_are_asked_for_all_the_same_is_given_up_for_a_while(
    autojump_clock: MockClock,
) -> None:
    """The kernel lets pages go before they are read: every file comes as a READ."""
    packs = Packs()
    async with pushing(packs) as made:
        epoch = range(10 * FILES_EACH)
        assert await blocks_tried(made, packs, epoch) == PUSHES_MAX * 10
        assert await blocks_tried(made, packs, epoch) == 0
        await trio.sleep(2 * ROUND_S)
        assert await blocks_tried(made, packs, epoch) == PUSHES_MAX * 10


async def test_what_is_due_is_what_will_be_pushed(autojump_clock: MockClock) -> None:
    packs = Packs()
    async with pushing(packs) as made:
        assert not made.is_due(10**6)
        for epoch in range(PUSHES_MAX + 2):
            assert made.is_due(0) == (epoch < PUSHES_MAX)
            assert await blocks_tried(made, packs, [0]) == (epoch < PUSHES_MAX)
        await trio.sleep(2 * ROUND_S)
        assert made.is_due(0)
        packs.known = False
        await blocks_tried(made, packs, [FILES_EACH * i for i in range(1, 100)])
        assert not made.is_due(0), "it does not pay, and those that are tried all the same come by surprise"


async def test_what_cannot_be_read_ends_nothing() -> None:
    packs = Packs()
    async with pushing(packs) as made:
        packs.gone = True
        assert await blocks_tried(made, packs, [0]) == 0
        packs.gone = False
        assert await blocks_tried(made, packs, [100]) == 1
