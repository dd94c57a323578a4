"""A file being written: what is read back at any moment, and what is uploaded when."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from lakefs_fuse.blockcache.cache_file import block_hash
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES
from lakefs_fuse.environment.local_disk import pwrite_all
from lakefs_fuse.errors import AccessDenied, CacheError, CacheFull, FileError, StagingFull, Unavailable
from lakefs_fuse.staging import staging_area
from lakefs_fuse.staging.draft_record import DraftState, decode, encode
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.upload.parts import PartState
from tests.memory_store import Failures, Pause, Request
from tests.upload.drafting import KIB, PART, bench, noise, reached


def is_part(number: int = 0) -> Callable[[Request], bool]:
    return lambda request: request.what == "upload_part" and number in (0, request.number)


async def test_the_first_part_goes_up_while_the_file_is_written(tmp_path: Path) -> None:
    data = noise(1, 3 * PART + 100)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data[:PART])
        await b.idle(draft)
        assert b.store.requests == []  # it could still be a small file: one PUT
        await draft.write(PART, data[PART : PART + 1])
        await b.idle(draft)
        assert b.store.parts_sent() == [1]
        assert next(iter(b.store.uploads.values())).metadata["lakefs-draft"] == draft.id
        await draft.write(PART + 1, data[PART + 1 :])
        await b.idle(draft)
        assert sorted(b.store.parts_sent()) == [1, 2, 3]
        assert "file" not in b.store.objects
        await b.publish(draft)
        assert sorted(b.store.parts_sent()) == [1, 2, 3, 4]
        assert b.store.data("file") == data
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_a_file_that_grows_while_its_last_part_is_sent_is_hashed_as_it_is_in_the_end(tmp_path: Path) -> None:
    size = BLOCK_BYTES + PART
    data = noise(3, size + 100)
    async with bench(tmp_path) as b:
        b.store.hook = pause = Pause(is_part(BLOCK_BYTES // PART + 1), "after")
        draft = b.draft()
        await draft.write(0, data[:size])
        await reached(pause.reached)
        await draft.write(size, data[size:])
        pause.resume()
        await b.idle(draft)
        published = await b.publish(draft)
        last = data[BLOCK_BYTES:]
        assert published.hashes == [block_hash(data[:BLOCK_BYTES]), block_hash(last)]
        draft.close(unlink=True)


async def test_part_of_an_upload_that_is_left_meanwhile_is_sent_again(tmp_path: Path) -> None:
    """The file was renamed, and begins anew at its next key."""
    data = noise(4, 2 * PART + 100)
    async with bench(tmp_path) as b:
        b.store.hook = pause = Pause(is_part(1), "after")
        draft = b.draft()
        await draft.write(0, data)
        await reached(pause.reached)
        await draft.upload.abort()
        draft.forget_upload()
        pause.resume()
        await b.idle(draft)
        await b.publish(draft)
        assert b.store.data("file") == data
        draft.close(unlink=True)


async def test_a_small_file_is_one_put(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, noise(2, PART))
        await b.publish(draft)
        assert [request.what for request in b.store.requests] == ["put"]
        assert b.store.data("file") == noise(2, PART)
        assert b.store.metadata("file") == {"mode": "33188", "lakefs-draft": draft.id}
        draft.close(unlink=True)


async def test_an_empty_file_is_one_put(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        published = await b.publish(draft)
        assert (b.store.data("file"), published.meta.size, published.hashes) == (b"", 0, [])
        draft.close(unlink=True)


async def test_a_part_written_again_is_sent_again_and_never_twice_at_once(tmp_path: Path) -> None:
    data = bytearray(noise(3, 2 * PART))
    async with bench(tmp_path) as b:
        draft = b.draft()
        b.store.hook = pause = Pause(is_part(1))
        await draft.write(0, bytes(data))
        await reached(pause.reached)
        await draft.write(10, b"changed")
        data[10:17] = b"changed"
        await trio.sleep(0.05)
        assert b.store.parts_sent().count(1) == 1
        pause.resume()
        await b.idle(draft)
        assert b.store.parts_sent().count(1) == 2
        await draft.write(20, b"again")
        data[20:25] = b"again"
        await b.idle(draft)
        assert b.store.parts_sent().count(1) == 3
        assert b.metrics.parts_repeated == 2
        await b.publish(draft)
        assert not b.store.parts_collided
        assert b.store.data("file") == data
        draft.close(unlink=True)


async def test_a_write_during_an_upload_is_not_lost(tmp_path: Path) -> None:
    """The part that is under way when the file is published holds older bytes."""
    data = bytearray(noise(4, 2 * PART))
    async with bench(tmp_path) as b:
        draft = b.draft()
        b.store.hook = pause = Pause(is_part(2), "after")
        await draft.write(0, bytes(data))
        await reached(pause.reached)
        await draft.write(PART + 5, b"late")
        data[PART + 5 : PART + 9] = b"late"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.publish, draft)
            await trio.sleep(0.02)
            pause.resume()
        assert b.store.data("file") == data
        assert not b.store.parts_collided
        draft.close(unlink=True)


async def test_parts_without_replacement_begin_anew(tmp_path: Path) -> None:
    data = bytearray(noise(5, 3 * PART))
    async with bench(tmp_path, capabilities=Capabilities(name="memory", parts_replaceable=False)) as b:
        draft = b.draft()
        await draft.write(0, bytes(data))
        await b.idle(draft)
        await draft.write(5, b"changed")
        data[5:12] = b"changed"
        await b.idle(draft)
        first = next(iter(b.store.uploads))
        assert sorted(b.store.parts_sent()) == [1, 2, 3]
        await b.publish(draft)
        assert b.store.count("abort_multipart") == 1
        assert first not in b.store.uploads
        assert b.store.data("file") == data
        draft.close(unlink=True)


async def test_backwards(tmp_path: Path) -> None:
    data = noise(6, 20 * PART + 77)
    async with bench(tmp_path) as b:
        draft = b.draft()
        for start in reversed(range(0, len(data), 16 * KIB)):
            await draft.write(start, data[start : start + 16 * KIB])
        await b.idle(draft)
        assert len(b.store.parts_sent()) == 20
        await b.publish(draft)
        assert b.store.data("file") == data
        assert sorted(b.store.parts_sent()) == list(range(1, 22))
        draft.close(unlink=True)


async def test_sparse(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(10 * PART + 3, b"far")
        assert draft.size == 10 * PART + 6
        assert bytes(await draft.read(10 * PART, 100)) == b"\0\0\0far"
        assert bytes(await draft.read(5, 5)) == bytes(5)
        assert bytes(await draft.read(10 * PART + 6, 5)) == b""
        assert b.staging.bytes_used == 4 * KIB
        await b.publish(draft)
        assert b.store.data("file") == bytes(10 * PART + 3) + b"far"
        draft.close(unlink=True)


async def test_over_a_base_only_changes_are_sent(tmp_path: Path) -> None:
    """Parts of 5 MiB or more that nobody changed are copied by the store; of the others only touched pages are read."""
    mib = 1 << 20
    old = bytearray(noise(7, 18 * mib + 100))
    async with bench(tmp_path, spans=((6 * mib, 10_000),)) as b:
        draft = b.draft("base", base=b.give("base", bytes(old)))
        await draft.write(7 * mib + 1, b"patch")
        old[7 * mib + 1 : 7 * mib + 6] = b"patch"
        assert b.store.count("get") == 1
        assert bytes(await draft.read(7 * mib, 10)) == old[7 * mib : 7 * mib + 10]
        assert bytes(await draft.read(len(old) - 5, 10)) == old[-5:]
        await b.publish(draft)
        assert b.store.data("base") == old
        assert b.store.parts_sent() == [2]
        assert b.store.count("upload_part_copy") == 3
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_truncation(tmp_path: Path) -> None:
    data = noise(8, 6 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        used = b.staging.bytes_used
        await draft.truncate(2 * PART + 10)
        assert b.staging.bytes_used == 2 * PART + 4 * KIB < used
        await draft.truncate(4 * PART)
        assert bytes(await draft.read(2 * PART, 20)) == data[2 * PART : 2 * PART + 10] + bytes(10)
        await b.publish(draft)
        assert b.store.data("file") == data[: 2 * PART + 10] + bytes(2 * PART - 10)
        draft.close(unlink=True)


async def test_truncated_to_a_small_file_the_upload_is_aborted(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, noise(9, 3 * PART))
        await b.idle(draft)
        await draft.truncate(5)
        await b.publish(draft)
        assert b.store.data("file") == noise(9, 3 * PART)[:5]
        assert b.store.uploads == {}
        draft.close(unlink=True)


async def test_a_base_that_was_cut_does_not_come_back(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft("base", base=b.give("base", noise(10, 10_000)))
        await draft.truncate(5000)
        await draft.truncate(9000)
        assert bytes(await draft.read(4990, 100)) == noise(10, 10_000)[4990:5000] + bytes(90)
        await b.publish(draft)
        assert b.store.data("base") == noise(10, 10_000)[:5000] + bytes(4000)
        draft.close(unlink=True)


async def test_a_file_larger_than_staging(tmp_path: Path) -> None:
    """The writer waits for uploads; what was let go is still published."""
    data = noise(11, 40 * PART + 5)
    async with bench(tmp_path, staging_bytes_max=12 * PART, slots=2) as b:
        draft = b.draft()
        for start in range(0, len(data), 10_000):
            await draft.write(start, data[start : start + 10_000])
            assert b.staging.bytes_used <= b.staging.bytes_max
        dropped = [index for index, part in draft.parts.items() if part.state is PartState.DROPPED]
        assert dropped
        assert 0 not in dropped
        assert os.stat(b.staging.path(draft.id)).st_blocks * 512 <= 14 * PART
        assert bytes(await draft.read(5, 100)) == data[5:105]
        await b.publish(draft)
        assert b.store.data("file") == data
        assert len(b.store.parts_sent()) == 41
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_what_was_let_go_is_refused_not_mangled(tmp_path: Path) -> None:
    data = noise(12, 30 * PART)
    async with bench(tmp_path, staging_bytes_max=8 * PART) as b:
        draft = b.draft()
        for start in range(0, len(data), PART):
            await draft.write(start, data[start : start + PART])
        assert draft.parts[5].state is PartState.DROPPED
        for refused in (draft.read(5 * PART, 10), draft.truncate(5 * PART + 7)):
            with pytest.raises(StagingFull):
                await refused
        await draft.write(10, b"header")
        await b.publish(draft)
        assert b.store.data("file") == data[:10] + b"header" + data[16:]
        draft.close(unlink=True)


async def test_write_to_what_was_let_go_is_never_published(tmp_path: Path) -> None:
    data = noise(12, 30 * PART)
    async with bench(tmp_path, staging_bytes_max=8 * PART) as b:
        draft = b.draft()
        for start in range(0, len(data), PART):
            await draft.write(start, data[start : start + PART])
        with pytest.raises(StagingFull):
            await draft.write(5 * PART + 7, b"x")
        with pytest.raises(FileError):
            await b.publish(draft)
        assert b.store.objects == {}
        await draft.truncate(0)
        await b.publish(draft)
        assert b.store.data("file") == b""
        draft.close(unlink=True)


async def test_cut_at_a_part_that_was_let_go_the_rest_is_zeros(tmp_path: Path) -> None:
    data = noise(13, 30 * PART)
    async with bench(tmp_path, staging_bytes_max=8 * PART) as b:
        draft = b.draft()
        for start in range(0, len(data), PART):
            await draft.write(start, data[start : start + PART])
        assert draft.parts[6].state is PartState.DROPPED
        await draft.truncate(6 * PART)
        await draft.truncate(8 * PART)
        await b.publish(draft)
        assert b.store.data("file") == data[: 6 * PART] + bytes(2 * PART)
        draft.close(unlink=True)


async def test_the_journal_knows_what_is_let_go_before_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path, staging_bytes_max=8 * PART) as b:
        draft = b.draft()
        punched: list[int] = []

        def punch(fd: int, offset: int, length: int) -> bool:
            index = b.uploader.layout.index(offset)
            noted = {part.index: part.staged for part in b.synced[draft.id].parts}
            assert noted[index] is False
            punched.append(index)
            return True

        monkeypatch.setattr(staging_area, "punch_hole", punch)
        for start in range(0, 20 * PART, PART):
            await draft.write(start, bytes(PART))
        assert punched
        draft.close(unlink=True)


async def test_drop_uploaded_without_a_journal_record_keeps_the_bytes_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray(noise(13, 6 * PART))
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, bytes(data))
        await b.idle(draft)
        used, save = b.staging.bytes_used, b.uploader.save

        def fail(draft_id: str, record: bytes, sync: bool) -> None:
            raise CacheFull("no room for the journal")

        b.uploader.save = fail
        assert draft.drop_uploaded(keep_recent=False) == 0
        assert "stay staged: the journal cannot be written: no room for the journal" in caplog.text
        b.uploader.save = save
        assert b.staging.bytes_used == used
        assert draft.parts.bytes_dropped == 0
        await draft.write(PART + 5, b"x")
        data[PART + 5 : PART + 6] = b"x"
        await b.idle(draft)
        assert draft.drop_uploaded(keep_recent=False) == 5 * PART
        await b.publish(draft)
        assert b.store.data("file") == data
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_parts_stay_staged_while_no_descriptor_is_free_to_release_them(tmp_path: Path) -> None:
    """The caller of `drop_uploaded` writes to another file, whose write does not fail for that."""
    data = noise(13, 9 * PART)
    async with bench(tmp_path) as b:
        draft, other = b.draft(), b.draft("other")
        await draft.write(0, data)
        await b.idle(draft)
        draft.file.park()
        b.staging.descriptors.open_max = 1
        with other.file.held():
            assert other.file.fd >= 0
            assert draft.drop_uploaded() == 0
        await draft.write(PART, data[:100])
        await b.idle(draft)
        assert draft.drop_uploaded() == 6 * PART
        await b.publish(draft)
        assert b.store.data("file") == data[:PART] + data[:100] + data[PART + 100 :]
        for each in (draft, other):
            each.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_parts_in_use_are_not_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that reads or writes staged bytes must not find a hole, or write into one that stays unsent."""
    data = noise(14, 8 * 4 * PART + 50 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        spot = 60 * PART
        index = b.uploader.layout.index(spot)
        assert draft.parts[index].state is PartState.CLEAN
        pread = os.pread

        def dropping_pread(fd: int, length: int, offset: int) -> bytes:
            trio.from_thread.run_sync(lambda: draft.drop_uploaded(keep_recent=False))
            return pread(fd, length, offset)

        def dropping_pwrite(fd: int, what: bytes, offset: int) -> None:
            pwrite_all(fd, what, offset)
            trio.from_thread.run_sync(lambda: draft.drop_uploaded(keep_recent=False))

        monkeypatch.setattr(os, "pread", dropping_pread)
        assert bytes(await draft.read(spot, PART)) == data[spot : spot + PART]
        assert draft.parts[index].state is PartState.CLEAN
        assert draft.parts[index + 2].state is PartState.DROPPED
        monkeypatch.setattr(os, "pread", pread)
        monkeypatch.setattr(staging_area, "pwrite_all", dropping_pwrite)
        await draft.write(spot, b"!" * PART)
        monkeypatch.undo()
        await b.publish(draft)
        assert b.store.data("file") == data[:spot] + b"!" * PART + data[spot + PART :]
        draft.close(unlink=True)


async def test_copied_parts_are_not_let_go(tmp_path: Path) -> None:
    """They have no staged bytes; the base can still be read for them."""
    mib = 1 << 20
    old = noise(15, 24 * mib)
    async with bench(tmp_path, spans=((6 * mib, 10_000),)) as b:
        draft = b.draft("base", base=b.give("base", old))
        await draft.write(0, b"x")
        b.store.hook = Failures(lambda request: request.what == "complete_multipart", AccessDenied("no"), count=1)
        with pytest.raises(AccessDenied):
            await b.publish(draft)
        draft.drop_uploaded(keep_recent=False)
        assert bytes(await draft.read(7 * mib, 5)) == old[7 * mib : 7 * mib + 5]
        await b.publish(draft)
        assert b.store.data("base") == b"x" + old[1:]
        draft.close(unlink=True)


async def test_a_full_disk_is_an_error_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, b"before")
        used = b.staging.bytes_used
        whole = pwrite_all

        def half(fd: int, data: bytes, offset: int) -> None:
            whole(fd, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(staging_area, "pwrite_all", half)
        with pytest.raises(StagingFull):
            await draft.write(8192, b"y" * 8192)
        monkeypatch.undo()
        assert (draft.size, b.staging.bytes_used) == (6, used)
        await draft.write(16_000, b"after")
        assert bytes(await draft.read(0, 20_000)) == b"before" + bytes(16_000 - 6) + b"after"
        with pytest.raises(FileError):
            await b.publish(draft)
        await draft.truncate(8192)
        await draft.truncate(16_000)
        await draft.write(16_000, b"after")
        await b.publish(draft)
        assert b.store.data("file") == b"before" + bytes(16_000 - 6) + b"after"
        draft.close(unlink=True)


async def test_a_failing_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()

        def broken(fd: int, data: bytes, offset: int) -> None:
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(staging_area, "pwrite_all", broken)
        with pytest.raises(CacheError):
            await draft.write(0, b"x")
        monkeypatch.setattr(os, "ftruncate", lambda fd, size: broken(fd, b"", size))
        monkeypatch.setattr(staging_area, "pwrite_all", lambda fd, data, offset: None)
        await draft.write(0, b"x")
        with pytest.raises(CacheError):
            await draft.truncate(0)
        draft.close(unlink=True)


async def test_files_end_somewhere(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        limit = b.uploader.layout.file_bytes_max
        for refused in (draft.write(limit, b"x"), draft.truncate(limit + 1)):
            with pytest.raises(FileError) as caught:
                await refused
            assert caught.value.errno == errno.EFBIG
        draft.close(unlink=True)


async def test_a_failed_upload_is_answered_by_publish_and_sent_again(tmp_path: Path) -> None:
    data = noise(16, 4 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        b.store.hook = Failures(is_part(2), AccessDenied("no"))
        await draft.write(0, data)
        await b.idle(draft)
        assert isinstance(draft.error, AccessDenied)
        assert draft.state is DraftState.WRITING
        await b.publish(draft)
        assert b.store.data("file") == data
        assert sorted(b.store.parts_sent()) == [1, 2, 2, 3, 4]
        draft.close(unlink=True)


async def test_any_error_of_an_upload_is_kept_from_the_daemon(tmp_path: Path) -> None:
    data = noise(17, 3 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        b.store.hook = Failures(is_part(1), RuntimeError("a bug"))
        await draft.write(0, data)
        await b.idle(draft)
        assert draft.error is not None
        await b.publish(draft)
        assert b.store.data("file") == data
        draft.close(unlink=True)


async def test_discard_leaves_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        b.store.hook = pause = Pause(is_part(1))
        await draft.write(0, noise(18, 4 * PART))
        await reached(pause.reached)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(draft.discard)
            await trio.sleep(0.02)
            pause.resume()
        assert draft.error is None
        assert b.store.uploads == {}
        assert list((tmp_path / "staging").iterdir()) == []
        assert b.staging.bytes_used == 0


async def test_discard_tells_of_an_upload_that_is_left(tmp_path: Path) -> None:
    async with bench(tmp_path, retry_timeout_s=0) as b:
        draft = b.draft()
        await draft.write(0, noise(19, 4 * PART))
        await b.idle(draft)
        b.store.hook = Failures(lambda request: request.what == "abort_multipart", Unavailable("away"))
        await draft.discard()
        assert draft.error is not None
        assert draft.record().upload_id in b.store.uploads


async def test_a_read_outlives_the_draft(tmp_path: Path) -> None:
    """The descriptor stays open until the last read ends: its number may be another file's after."""
    async with bench(tmp_path) as b:
        base = b.give("base", noise(20, 10_000))
        draft = b.draft("base", base=base)
        await draft.write(0, b"new")
        b.store.hook = pause = Pause(lambda request: request.what == "get")
        answers: list[bytes] = []

        async def read() -> None:
            answers.append(bytes(await draft.read(0, 10_000)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await reached(pause.reached)
            draft.close(unlink=True)
            assert draft.file.fd >= 0
            pause.resume()
        assert answers == [b"new" + noise(20, 10_000)[3:]]
        assert draft.file.fd == -1


@pytest.mark.parametrize("seed", range(12))
async def test_any_writes_at_any_time(tmp_path: Path, seed: int) -> None:
    """Random writes and truncations over a base, with staging too small for all of it, against a bytearray."""
    rng = random.Random(seed)
    model = bytearray(noise(seed, rng.randrange(0, 12 * PART)))
    async with bench(tmp_path, staging_bytes_max=1 << 30 if seed % 2 else 300 * PART) as b:
        draft = b.draft("base", base=b.give("base", bytes(model)) if model else None)
        for _ in range(60):
            offset, length = rng.randrange(0, 16 * PART), rng.choice((1, 100, 4096, PART, 3 * PART))
            what = rng.random()
            if what < 0.6:
                data = noise((seed, rng.random()), length)
                model.extend(bytes(max(0, offset + length - len(model))))
                model[offset : offset + length] = data
                await draft.write(offset, data)
            elif what < 0.75:
                model[:] = (model + bytes(offset))[:offset]
                await draft.truncate(offset)
            else:
                assert bytes(await draft.read(offset, length)) == model[offset : offset + length]
            if rng.random() < 0.2:
                await trio.sleep(0.001)
        assert draft.size == len(model)
        assert decode(encode(draft.record())) == draft.record()
        await b.publish(draft)
        assert b.store.data("base") == model
        assert not b.store.parts_collided
        assert b.store.uploads == {}
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0
