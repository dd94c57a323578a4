"""Parts that nobody wrote to are copied from an object of zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lakefs_fuse.errors import AccessDenied
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.upload import missing_parts
from tests.memory_store import Failures, Request
from tests.upload.drafting import PART, Bench, bench, noise

SPANS = ((PART, 4), (4 * PART, 9996))
ZEROS, LARGE_ZEROS = f".lakefs/zeros/{PART}", f".lakefs/zeros/{4 * PART}"
CAPABILITIES = Capabilities(name="memory")


@pytest.fixture(autouse=True)
def small_parts_are_copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(missing_parts, "PART_BYTES_MIN", 4096)
    yield


def about(what: str, key: str) -> Callable[[Request], bool]:
    return lambda request: request.what == what and request.key == key


async def publish_sparse(b: Bench, size: int, pieces: dict[int, bytes], key: str = "file") -> None:
    draft = b.draft(key)
    for at, piece in pieces.items():
        await draft.write(at, piece)
    await draft.truncate(size)
    expected = bytearray(size)
    for at, piece in pieces.items():
        expected[at : at + len(piece)] = piece
    await b.publish(draft)
    assert b.store.data(key) == expected
    assert b.store.uploads == {}
    draft.close(unlink=True)


async def test_zeros_many_parts_are_copied(tmp_path: Path) -> None:
    """One object for each size of parts; the larger is put together from the smaller by the store."""
    async with bench(tmp_path, spans=SPANS) as b:
        await publish_sparse(b, 14 * PART + 100, {PART + 5: noise(1, 10)})
        assert b.store.parts_sent() == [2]
        assert b.store.count("put") == b.store.count("put", ZEROS) == 1
        assert b.store.data(LARGE_ZEROS) == bytes(4 * PART)
        await publish_sparse(b, 20 * PART, {}, "other")
        assert b.store.parts_sent() == [2]
        assert b.store.count("put") == 1
        assert b.store.count("head", ZEROS) == 1


async def test_zeros_one_part_is_sent(tmp_path: Path) -> None:
    async with bench(tmp_path, spans=SPANS) as b:
        await publish_sparse(b, 3 * PART, {0: noise(1, 10), PART: noise(2, PART)})
        assert sorted(b.store.parts_sent()) == [1, 2, 3]
        assert list(b.store.objects) == ["file"]
        assert b.store.count("head") == 0


@pytest.mark.parametrize(
    ("capabilities", "parts"),
    [(replace(CAPABILITIES, part_copy=False), [1, 2, 3, 4]), (replace(CAPABILITIES, name="local"), [])],
)
async def test_zeros_store_without_copies_or_with_holes_are_sent(
    tmp_path: Path, capabilities: Capabilities, parts: list[int]
) -> None:
    async with bench(tmp_path, spans=SPANS, capabilities=capabilities) as b:
        await publish_sparse(b, 4 * PART, {})
        assert sorted(b.store.parts_sent()) == parts
        assert list(b.store.objects) == ["file"]


async def test_zeros_refused_by_the_store_are_sent(tmp_path: Path) -> None:
    async with bench(tmp_path, spans=SPANS) as b:
        b.store.hook = Failures(about("put", ZEROS), AccessDenied("no"), count=10)
        await publish_sparse(b, 3 * PART, {})
        assert sorted(b.store.parts_sent()) == [1, 2, 3]


async def test_zeros_deleted_meanwhile_are_stored_again(tmp_path: Path) -> None:
    async with bench(tmp_path, spans=SPANS) as b:
        await publish_sparse(b, 3 * PART, {})
        b.store.take(ZEROS)
        await publish_sparse(b, 4 * PART, {5: b"x"}, "other")
        assert b.store.data(ZEROS) == bytes(PART)


async def test_zeros_beyond_a_base_are_copied(tmp_path: Path) -> None:
    async with bench(tmp_path, spans=SPANS) as b:
        data = noise(1, PART + 100)
        draft = b.draft(base=b.give("file", data))
        await draft.truncate(4 * PART)
        await b.publish(draft)
        assert b.store.data("file") == data + bytes(4 * PART - len(data))
        assert b.store.parts_sent() == [2]
        draft.close(unlink=True)


async def test_zeros_cut_and_grown_again_are_zeros(tmp_path: Path) -> None:
    """Bytes that were written, and sent, before the file was cut do not come back."""
    async with bench(tmp_path, spans=SPANS) as b:
        draft = b.draft()
        await draft.write(0, noise(1, 4 * PART))
        await b.idle(draft)
        await draft.truncate(PART // 2)
        await draft.truncate(4 * PART)
        await b.publish(draft)
        assert b.store.data("file") == noise(1, 4 * PART)[: PART // 2] + bytes(4 * PART - PART // 2)
        assert b.metrics.parts_copied == 3
        draft.close(unlink=True)


async def test_zeros_spilled_parts_are_not_taken_for_zeros(tmp_path: Path) -> None:
    large = 4 << 20
    async with bench(tmp_path, spans=((large, 9000),)) as b:
        draft, data = b.draft(), noise(1, 2 << 20)
        await draft.write(large + 100, data)
        await draft.truncate(5 * large)
        assert await draft.spill() > 0
        assert not draft.pages.count(large, 2 * large)
        await b.publish(draft)
        expected = bytearray(5 * large)
        expected[large + 100 : large + 100 + len(data)] = data
        assert b.store.data("file") == expected
        assert b.metrics.parts_copied == 4
        draft.close(unlink=True)
