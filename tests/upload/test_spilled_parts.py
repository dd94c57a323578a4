"""Incomplete parts that leave staging: hidden objects, read back, joined when published, gone afterwards."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from lakefs_fuse.errors import AccessDenied, FileError, StagingFull
from lakefs_fuse.staging.draft_record import DraftRecord, decode, encode
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.upload.restore import restore_draft
from lakefs_fuse.upload.spilled_parts import SPILLED
from tests.memory_store import Failures, Pause, Request, When
from tests.tiers import sized
from tests.upload.drafting import KIB, PART, REACH_S_MAX, Bench, bench, noise, reached

LARGE_PART = 4 << 20
SPANS = ((LARGE_PART, 9000),)
PIECE = LARGE_PART // 8
STAGED = 3 * LARGE_PART
PARTS = 10


def hidden(b: Bench) -> list[str]:
    return sorted(key for key in b.store.objects if key.startswith(SPILLED))


async def test_shuffled_pieces_beyond_staging_are_stored_whole(tmp_path: Path) -> None:
    rng = random.Random(1)
    data = bytearray(noise(1, PARTS * LARGE_PART - 1000))
    order = list(range(0, len(data), PIECE))
    rng.shuffle(order)
    async with bench(tmp_path, staging_bytes_max=STAGED, spans=SPANS) as b:
        draft = b.draft()
        for at in order:
            await draft.write(at, bytes(data[at : at + PIECE]))
            assert b.staging.bytes_used <= STAGED
        assert b.metrics.parts_spilled
        assert hidden(b)
        spilled = next(iter(draft.spills.objects))
        at = spilled * LARGE_PART
        if draft.spills.pages.covers(at, at + 5000):
            assert bytes(await draft.read(at + 5, 4990)) == data[at + 5 : at + 4995]
        await b.publish(draft)
        assert b.store.data("file") == data
        assert hidden(b) == []
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_random_writes_and_truncation_match_a_model_with_and_without_a_base(tmp_path: Path) -> None:
    """Read back now and then; the next daemon reads the same from the record and the staging file."""
    for seed in range(4):
        rng = random.Random(seed)
        directory = tmp_path / f"{seed}"
        directory.mkdir()
        async with bench(directory, staging_bytes_max=STAGED, spans=SPANS) as b:
            base = b.give("file", noise("base", 6 * LARGE_PART)) if seed % 2 else None
            model = bytearray(noise("base", 6 * LARGE_PART) if seed % 2 else b"")
            draft = b.draft(base=base)
            for step in range(60):
                at = rng.randrange(PARTS * LARGE_PART)
                piece = noise((seed, step), rng.randrange(1, PIECE))
                if rng.random() < 0.05 and len(model):
                    size = rng.randrange(len(model))
                    try:
                        await draft.truncate(size)
                    except StagingFull:  # through a part that is up already
                        continue
                    del model[size:]
                    continue
                await draft.write(at, piece)
                model += bytes(max(0, at + len(piece) - len(model)))
                model[at : at + len(piece)] = piece
                look = rng.randrange(len(model))
                assert bytes(await draft.read(look, 100_000)) == model[look : look + 100_000]
            if draft.spills.used:
                await b.idle(draft)
                draft.save(sync=True)
                record = b.synced[draft.id]
                again = restore_draft(b.uploader, record, b.describe)
                for at in range(0, len(model), LARGE_PART):
                    assert bytes(await again.read(at, LARGE_PART)) == model[at : at + LARGE_PART]
                again.close(unlink=False, leave=True)
            await b.publish(draft)
            assert b.store.data("file") == model
            assert hidden(b) == []
            draft.close(unlink=True)


async def test_a_part_that_is_spilled_whole_is_copied_in_the_store(tmp_path: Path) -> None:
    big = 6 << 20
    data = noise(1, 4 * big)
    async with bench(tmp_path, staging_bytes_max=4 * big, spans=((big, 9000),)) as b:
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        part = draft.parts[1]
        await draft.write(big, data[big : big + 10])
        await b.idle(draft)
        part.state = type(part.state).DIRTY  # as where its upload failed
        assert await draft.spill() == big
        assert hidden(b) == [f"{SPILLED}{draft.id}/1-0"]
        copied = b.metrics.parts_copied
        await b.publish(draft)
        assert b.metrics.parts_copied == copied + 1
        assert b.store.data("file") == data
        draft.close(unlink=True)


async def test_a_front_to_back_writer_spills_nothing(tmp_path: Path) -> None:
    data = noise(12, 30 * PART)
    async with bench(tmp_path, staging_bytes_max=8 * PART) as b:
        draft = b.draft()
        for start in range(0, len(data), 10_000):
            await draft.write(start, data[start : start + 10_000])
        await b.publish(draft)
        counts = {what: b.store.count(what) for what in {request.what for request in b.store.requests}}
        assert counts == {"create_multipart": 1, "upload_part": 30, "complete_multipart": 1}
        draft.close(unlink=True)


async def test_discarding_deletes_what_was_spilled(tmp_path: Path) -> None:
    async with bench(tmp_path, staging_bytes_max=STAGED, spans=SPANS) as b:
        draft = b.draft()
        for index in range(PARTS):
            await draft.write(index * LARGE_PART, noise(index, LARGE_PART // 2))
        assert hidden(b)
        await draft.discard()
        assert hidden(b) == []
        assert b.store.uploads == {}


def no_delete(request: Request) -> bool:
    return request.what == "delete"


@pytest.mark.parametrize("how", ["publish", "discard"])
async def test_spilled_parts_whose_deletion_is_refused_are_reported(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy without s3:DeleteObject fails no close, and what is left is not forgotten."""
    data = bytearray(PARTS * LARGE_PART)
    async with bench(tmp_path, staging_bytes_max=STAGED, spans=SPANS) as b:
        draft = b.draft()
        for index in range(PARTS):
            piece = noise(index, LARGE_PART // 2)
            await draft.write(index * LARGE_PART, piece)
            data[index * LARGE_PART : index * LARGE_PART + len(piece)] = piece
        left = hidden(b)
        b.store.hook = Failures(no_delete, AccessDenied("may not delete"), count=1000)
        if how == "discard":
            await draft.discard()
            assert "may not delete" in str(draft.error)
        else:
            await b.publish(draft)
            assert b.store.data("file") == data[: draft.size]
            assert "hidden objects of file are left to `gc`" in caplog.text
            draft.close(unlink=True)
        assert set(left) <= set(hidden(b))
        assert len(left) > 1


@pytest.mark.parametrize("capability", [{"part_copy": False}, {"name": "local"}])
async def test_where_parts_cannot_be_joined_the_writer_gets_enospc(
    tmp_path: Path, capability: dict[str, object]
) -> None:
    capabilities = Capabilities(**({"name": "memory"} | capability))  # type: ignore[arg-type]
    async with bench(tmp_path, staging_bytes_max=STAGED, spans=SPANS, capabilities=capabilities) as b:
        draft = b.draft()
        with pytest.raises(StagingFull):
            for index in range(PARTS):
                await draft.write(index * LARGE_PART, noise(index, LARGE_PART // 2))
        assert hidden(b) == []
        await draft.discard()


def test_records_without_spills_are_read(tmp_path: Path) -> None:
    record = DraftRecord(id="a", key="b", state="writing", created_ns=0, size=0)  # type: ignore[arg-type]
    assert decode(encode(record)).spills == []


async def test_a_spill_under_way_keeps_its_descriptor(tmp_path: Path) -> None:
    """Other files that are opened meanwhile get no descriptor that the request reads from."""
    async with bench(tmp_path, spans=SPANS) as b:
        b.staging.descriptors.open_max = 1
        draft, data = b.draft(), noise(1, LARGE_PART // 2)
        await draft.write(LARGE_PART, data)
        pause = Pause(lambda request: request.key.startswith(SPILLED))
        b.store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(draft.spill)
            await reached(pause.reached)
            with pytest.raises(FileError, match="raise the daemon's limit of open files"):
                b.draft("other")
            pause.resume()
        assert b.store.data(hidden(b)[0])[: len(data)] == data
        draft.close(unlink=True)


@pytest.mark.parametrize("what", ["create_multipart", "put"])
async def test_discard_during_a_spill_leaves_nothing(tmp_path: Path, what: str) -> None:
    async with bench(tmp_path, spans=SPANS) as b:
        draft = b.draft()
        await draft.write(LARGE_PART, noise(1, LARGE_PART // 2))
        pause = b.store.hook = Pause(lambda request: request.what == what)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(draft.spill)
            await reached(pause.reached)
            nursery.start_soon(draft.discard)
            await wait_all_tasks_blocked()
            pause.resume()
        assert hidden(b) == []
        assert b.store.uploads == {}
        assert b.staging.bytes_used == 0


async def test_publish_spilled_changes_of_a_base_are_not_lost(tmp_path: Path) -> None:
    """A part of which some pages were spilled, and the rest are the base's, is not copied from the base."""
    before, change = noise("base", 2 * LARGE_PART), noise("change", 3 * PIECE)
    async with bench(tmp_path, spans=((LARGE_PART, 2),)) as b:
        draft = b.draft(base=b.give("file", before))
        at = LARGE_PART + PIECE
        await draft.write(at, change)
        assert await draft.spill() == len(change)
        await b.publish(draft)
        assert b.store.data("file") == before[:at] + change + before[at + len(change) :]


async def test_write_into_a_page_while_it_is_spilled_keeps_the_rest_of_the_page(tmp_path: Path) -> None:
    """The writer found the page staged and waits for the spill, which moves it to the store."""
    data = bytearray(noise(1, 2 << 20))
    at = LARGE_PART + (1 << 20)
    async with bench(tmp_path, spans=SPANS) as b:
        draft = b.draft()
        await draft.write(at, bytes(data))
        await draft.write(3 * LARGE_PART, b"end")
        pause = Pause(lambda request: request.key.startswith(SPILLED))
        b.store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(draft.spill)
            await reached(pause.reached)
            nursery.start_soon(draft.write, at + 8292, b"new")
            await wait_all_tasks_blocked()
            pause.resume()
        assert draft.spills.objects
        data[8292:8295] = b"new"
        assert bytes(await draft.read(at, len(data))) == data
        await b.publish(draft)
        assert b.store.data("file")[at : at + len(data)] == data
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_read_that_began_before_a_spill_ended_returns_the_staged_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads them runs late: meanwhile the spill ends but for the hole; later readers do not wait."""
    data, at, length = noise(1, 2 << 20), LARGE_PART + (1 << 20), 128 * KIB
    is_reading, may_read, pread = threading.Event(), threading.Event(), os.pread

    def late_pread(fd: int, count: int, offset: int) -> bytes:
        if (count, offset) == (length, at):
            is_reading.set()
            assert may_read.wait(REACH_S_MAX)
        return pread(fd, count, offset)

    async with bench(tmp_path, spans=SPANS) as b:
        draft = b.draft()
        await draft.write(at, data)
        await draft.write(3 * LARGE_PART, b"end")
        pause = Pause(lambda request: request.key.startswith(SPILLED))
        b.store.hook = pause
        monkeypatch.setattr(os, "pread", late_pread)
        freed: list[int] = []
        found: list[bytes] = []

        async def spill() -> None:
            freed.append(await draft.spill())

        async def read() -> None:
            found.append(bytes(await draft.read(at, length)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(spill)
            await reached(pause.reached)
            nursery.start_soon(read)
            await reached(is_reading)
            pause.resume()
            with trio.fail_after(REACH_S_MAX):
                while not draft.spills.pages.covers(at, at + length):
                    await trio.sleep(0.002)
            await wait_all_tasks_blocked()
            assert bytes(await draft.read(at + length, 10)) == data[length : length + 10]
            may_read.set()
        assert found == [data[:length]]
        assert freed == [len(data)]
        assert bytes(await draft.read(at, len(data))) == data
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_read_from_a_spilled_object_that_is_superseded_meanwhile_succeeds(tmp_path: Path) -> None:
    data, at = noise(1, 2 << 20), LARGE_PART
    async with bench(tmp_path, spans=SPANS) as b:
        draft = b.draft()
        await draft.write(at, data)
        await draft.write(3 * LARGE_PART, b"end")
        assert await draft.spill()
        await draft.write(at + len(data), noise(2, 1 << 20))
        before = hidden(b)
        fill = Pause(lambda request: request.what == "get" and request.size == len(data))
        get = Pause(lambda request: request.what == "get" and request.size == 100)

        def hook(request: Request, when: When) -> None:
            fill(request, when)
            get(request, when)

        b.store.hook = hook

        async def read() -> None:
            assert bytes(await draft.read(at, 100)) == data[:100]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(draft.spill)
            await reached(fill.reached)
            nursery.start_soon(read)
            await reached(get.reached)
            fill.resume()
            with trio.fail_after(REACH_S_MAX):
                while draft.spills.objects[1].key in before:
                    await trio.sleep(0.002)
            await wait_all_tasks_blocked(0.02)
            assert b.store.count("delete") == 0
            get.resume()
        assert hidden(b) == [draft.spills.objects[1].key]
        draft.close(unlink=True)


@pytest.mark.parametrize("seed", range(sized(1, 3)))
async def test_writers_and_readers_beside_spills_match_a_model(tmp_path: Path, seed: int) -> None:
    """Each writer has bytes of its own, which share their pages with those of the others."""
    writers, stride, steps = 4, 1500, 40
    async with bench(tmp_path, staging_bytes_max=STAGED, spans=SPANS) as b:
        draft = b.draft()
        model = bytearray()
        for start in range(0, 6 * LARGE_PART, PIECE):
            if start % LARGE_PART:  # no part is complete
                await draft.write(start, noise(start, PIECE))
            model += noise(start, PIECE) if start % LARGE_PART else bytes(PIECE)

        async def change(own: int) -> None:
            rng = random.Random(f"{seed} {own}")
            for step in range(steps):
                start = (rng.randrange(len(model) // (writers * stride) - 1) * writers + own) * stride
                if start % LARGE_PART < PIECE:
                    continue
                assert bytes(await draft.read(start, stride)) == model[start : start + stride]
                model[start : start + stride] = piece = noise((own, step), stride)
                await draft.write(start, piece)

        async def spill() -> None:
            for _ in range(steps):
                await draft.spill()
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            for own in range(writers):
                nursery.start_soon(change, own)
            nursery.start_soon(spill)
        await b.publish(draft)
        assert b.store.data("file") == model
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0
