"""The request that makes a version visible: what happens when it fails, is answered by nobody, or comes too late."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from lakefs_fuse.blockcache.cache_file import block_hash
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.errors import (
    AccessDenied,
    FileError,
    NotCarriedOut,
    NotFound,
    PartsRefused,
    StoreError,
    Superseded,
    Unavailable,
)
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.upload.draft_target import DRAFT_METADATA, DraftTarget
from lakefs_fuse.upload.parts import PartState
from lakefs_fuse.upload.restore import restore_draft
from tests.memory_store import START_NS, Failures, Pause, Request, When
from tests.upload.drafting import KIB, PART, REACH_S_MAX, Bench, bench, noise, reached

MIB = 1 << 20


def what(name: str) -> Callable[[Request], bool]:
    return lambda request: request.what == name


async def test_a_failed_close_keeps_the_bytes_and_is_tried_again(tmp_path: Path) -> None:
    data = noise(1, 5 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        b.store.hook = Failures(what("complete_multipart"), AccessDenied("no"))
        with pytest.raises(AccessDenied):
            await b.publish(draft)
        assert draft.state is DraftState.FAILED
        assert b.synced[draft.id].state is DraftState.FAILED
        assert b.synced[draft.id].error == "no"
        assert bytes(await draft.read(0, len(data))) == data
        await b.publish(draft)
        assert b.store.data("file") == data
        assert sorted(b.store.parts_sent()) == [1, 2, 3, 4, 5]
        assert b.metrics.publishes == 1
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [60 << 10, 6 * PART])
async def test_publish_after_a_short_read_of_staging_stores_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The first read ends before what the disk cannot read at once; only the end of the file is zeros."""
    data, pread, shortened = noise(1, size), os.pread, set[int]()

    def short(fd: int, length: int, offset: int) -> bytes:
        if length <= KIB or offset in shortened:
            return pread(fd, length, offset)
        shortened.add(offset)
        return pread(fd, KIB, offset)

    async with bench(tmp_path) as b:
        monkeypatch.setattr(os, "pread", short)
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        published = await b.publish(draft)
        assert b.store.data("file") == data
        assert list(published.hashes) == [block_hash(data[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)]
        draft.close(unlink=True)
    assert shortened


@pytest.mark.parametrize("refused", ["create_multipart", "upload_part"])
async def test_publish_while_the_store_is_away_waits_for_one_attempt_of_the_parts_in_the_background(
    tmp_path: Path, refused: str
) -> None:
    """Else each part that waits for a slot, or for the upload to begin, has an attempt of its own, as long as
    `--retry-timeout`, before `close()` fails."""
    data = noise(1, 30 * PART)
    async with bench(tmp_path, slots=2, retry_timeout_s=0) as b:
        draft = b.draft()
        pause, attempts = Pause(what(refused)), list[Request]()

        def away(request: Request, when: When) -> None:
            if request.what == refused:
                attempts.append(request)
                pause(request, when)
                raise Unavailable("no answer")

        b.store.hook = away
        await draft.write(0, data)
        await reached(pause.reached)
        async with trio.open_nursery() as nursery:

            async def close() -> None:
                with pytest.raises(Unavailable):
                    await b.publish(draft)

            nursery.start_soon(close)
            while draft.state is not DraftState.PUBLISHING:
                await trio.sleep(0.001)
            pause.resume()
        assert len(attempts) <= 6  # two slots before the close, and its own attempt
        b.store.hook = lambda *_: None
        await b.publish(draft)
        assert b.store.data("file") == data
        draft.close(unlink=True)


@pytest.mark.parametrize("refused", ["create_multipart", "upload_part"])
async def test_parts_of_an_outage_occupy_one_slot_and_another_file_is_stored(tmp_path: Path, refused: str) -> None:
    """Else `close()` of a small file waits for an attempt of each part of a large one that a program writes."""
    async with bench(tmp_path, slots=2, retry_timeout_s=0) as b:
        large, small = b.draft("large"), b.draft("small")
        attempts, pause = list[Request](), Pause(what(refused))

        def away(request: Request, when: When) -> None:
            if request.what == refused and request.key == "large":
                attempts.append(request)
                if len(attempts) > 4:  # by now the first attempts, which begin before any has failed, have ended
                    pause(request, when)
                raise Unavailable("no answer")

        b.store.hook = away
        await large.write(0, noise(1, 30 * PART))
        await reached(pause.reached)
        with trio.fail_after(REACH_S_MAX):
            await small.write(0, b"small")
            await b.publish(small)
        assert len(attempts) == 5
        pause.resume()
        b.store.hook = lambda *_: None
        await b.publish(large)
        assert b.store.data("large") == noise(1, 30 * PART)
        large.close(unlink=True)
        small.close(unlink=True)


def lost_completion(request: Request, when: When) -> None:
    """The store completes the upload, and then does not answer."""
    if (request.what, when) == ("complete_multipart", "after") or request.what == "head":
        raise Unavailable("no answer")


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("dies", [False, True])
async def test_publish_after_a_lost_answer_and_a_change_takes_dropped_parts_from_the_object(
    tmp_path: Path, is_cut: bool, dies: bool
) -> None:
    """The upload is gone, and only the object that it became has these bytes."""
    data = bytearray(noise(1, 6 * PART))
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, bytes(data))
        await b.idle(draft)
        assert draft.drop_uploaded(keep_recent=False)
        b.store.hook = lost_completion
        with pytest.raises(Unavailable):
            await b.publish(draft)
        b.store.hook = lambda *_: None
        assert b.store.data("file") == data
        if is_cut:  # what was cut off does not come back
            await draft.truncate(4 * PART)
            await draft.truncate(7 * PART)
            data[4 * PART :] = bytes(3 * PART)
        await draft.write(len(data), b"more")
        data += b"more"
        if dies:
            draft.save(sync=True)
            draft.close(unlink=False, leave=True)
            draft = restore_draft(b.uploader, b.synced[draft.id], b.describe)
            draft.count_staged()
        await b.publish(draft)
        assert b.store.data("file") == data
        assert b.store.uploads == {}
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_publish_after_a_lost_put_keeps_the_upload_that_has_dropped_parts(tmp_path: Path) -> None:
    """The object is of an attempt before the upload began."""
    data = noise(1, 6 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data[:100])

        def lost_put(request: Request, when: When) -> None:
            if (request.what, when) == ("put", "after") or request.what == "head":
                raise Unavailable("no answer")

        b.store.hook = lost_put
        with pytest.raises(Unavailable):
            await b.publish(draft)
        b.store.hook = lambda *_: None
        assert b.store.data("file") == data[:100]
        await draft.write(100, data[100:])
        b.store.hook = Failures(what("complete_multipart"), AccessDenied("no"))
        with pytest.raises(AccessDenied):
            await b.publish(draft)
        assert draft.drop_uploaded(keep_recent=False)
        sent = len(b.store.parts_sent())
        await draft.write(len(data), b"more")
        await b.publish(draft)
        assert b.store.data("file") == data + b"more"
        assert len(b.store.parts_sent()) == sent + 1
        draft.close(unlink=True)


async def test_an_upload_that_is_gone_begins_anew(tmp_path: Path) -> None:
    data = noise(2, 4 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        b.store.uploads.clear()
        await b.publish(draft)
        assert b.store.data("file") == data
        assert b.store.uploads == {}
        draft.close(unlink=True)


async def test_an_upload_that_is_gone_with_bytes_that_were_let_go_is_an_error(tmp_path: Path) -> None:
    """Never an object with a hole in it."""
    async with bench(tmp_path, staging_bytes_max=8 * PART) as b:
        draft = b.draft()
        for start in range(0, 20 * PART, PART):
            await draft.write(start, noise(start, PART))
        b.store.uploads.clear()
        for _ in range(2):
            with pytest.raises(StoreError):
                await b.publish(draft)
        assert "file" not in b.store.objects
        draft.close(unlink=True)


@pytest.mark.parametrize("request_of", ["upload_part", "complete_multipart"])
async def test_no_condition_guards_a_completion_of_parts_that_were_dropped_meanwhile(
    tmp_path: Path, request_of: str
) -> None:
    """A store may end an upload whose condition is not met, and with it the only copy of these bytes."""
    data = noise(19, 8 * PART + 100)
    async with bench(tmp_path, capabilities=Capabilities(name="memory", complete_if_match=True)) as b:
        draft = b.draft(base=b.give("file", b"before"))
        await draft.write(0, data)
        await b.idle(draft)
        theirs = b.give("file", b"theirs").version.etag
        draft.target.expected = draft.target.replaces
        pause = b.store.hook = Pause(what(request_of))
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                if request_of == "upload_part":
                    await b.publish(draft)
                    return
                with pytest.raises(StoreError, match="another version"):
                    await b.publish(draft)

            nursery.start_soon(send)
            await reached(pause.reached)
            freed = draft.drop_uploaded(keep_recent=False)
            pause.resume()
        assert (freed > 0) == (request_of == "upload_part")
        if not freed:
            draft.target.expected = theirs
            await b.publish(draft)
        assert b.store.data("file") == data
        draft.close(unlink=True)


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("conflicts", [1, 3])
async def test_completion_conflict_completes_the_same_upload(tmp_path: Path, conflicts: int, if_absent: bool) -> None:
    data = noise(2, 5 * PART)
    async with bench(tmp_path, retry_timeout_s=10) as b:
        draft = b.draft(if_absent=if_absent)
        await draft.write(0, data)
        b.store.hook = Failures(what("complete_multipart"), Unavailable("409"), count=conflicts)
        await b.publish(draft)
        assert b.store.data("file") == data
        assert b.store.count("complete_multipart") == conflicts + 1
        assert b.store.count("create_multipart") == 1
        assert sorted(b.store.parts_sent()) == [1, 2, 3, 4, 5]
        draft.close(unlink=True)


async def test_completion_conflict_with_our_own_attempt_is_found_by_polling(tmp_path: Path) -> None:
    """The upload is complete; the store goes on answering that it is busy."""
    data = noise(2, 5 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft(if_absent=True)
        await draft.write(0, data)
        b.store.hook = Failures(what("complete_multipart"), Unavailable("409"), count=1_000_000, when="after")
        published = await b.publish(draft)
        assert published.meta.etag == b.store.head("file").etag
        assert b.store.count("complete_multipart") == 1
        draft.close(unlink=True)


async def test_completion_conflict_with_another_creator_yields_to_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft(if_absent=True)
        await draft.write(0, noise(2, 5 * PART))
        await b.idle(draft)
        b.store.hook = Failures(what("complete_multipart"), Unavailable("409"))
        b.store.give("file", b"theirs")
        with pytest.raises(FileError) as caught:
            await b.publish(draft)
        assert caught.value.errno == errno.EEXIST
        assert b.store.data("file") == b"theirs"
        draft.close(unlink=True)


@pytest.mark.parametrize("lost", [NotFound("NoSuchUpload"), PartsRefused("InvalidPart")])
async def test_completion_conflict_then_a_lost_upload_begins_anew(tmp_path: Path, lost: StoreError) -> None:
    data = noise(2, 5 * PART)
    answers = [Unavailable("409"), lost]

    def hook(request: Request, when: When) -> None:
        if request.what == "complete_multipart" and when == "before" and answers:
            raise answers.pop(0)

    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        b.store.hook = hook
        await b.publish(draft)
        assert b.store.data("file") == data
        assert b.store.count("create_multipart") == 2
        assert sorted(b.store.parts_sent()) == sorted([1, 2, 3, 4, 5] * 2)
        assert not b.store.list_multipart("") or isinstance(lost, NotFound)
        draft.close(unlink=True)


async def test_completion_conflict_without_end_keeps_upload_and_bytes(tmp_path: Path) -> None:
    data = noise(2, 5 * PART)
    async with bench(tmp_path, retry_timeout_s=0) as b:
        draft = b.draft()
        await draft.write(0, data)
        b.store.hook = Failures(what("complete_multipart"), Unavailable("409"), count=2)
        for _ in range(2):
            with pytest.raises(Unavailable):
                await b.publish(draft)
            assert draft.state is DraftState.FAILED
            assert bytes(await draft.read(0, len(data))) == data
        await b.publish(draft)
        assert b.store.data("file") == data
        assert sorted(b.store.parts_sent()) == [1, 2, 3, 4, 5]
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [100, 5 * PART])
@pytest.mark.parametrize("if_absent", [False, True])
async def test_an_answer_that_was_lost_is_asked_for(tmp_path: Path, size: int, if_absent: bool) -> None:
    """One HEAD in place of the bytes."""
    async with bench(tmp_path) as b:
        draft = b.draft(if_absent=if_absent)
        await draft.write(0, noise(3, size))
        publishing = "put" if size < PART else "complete_multipart"
        b.store.hook = Failures(what(publishing), Unavailable("lost"), when="after")
        published = await b.publish(draft)
        assert (b.store.count(publishing), b.store.count("head")) == (1, 1)
        assert published.meta.etag == b.store.head("file").etag
        assert b.store.data("file") == noise(3, size)
        draft.close(unlink=True)


class Overtaken:
    """The answer to the first request that publishes is lost; then another client replaces the object."""

    def __init__(self, b: Bench, publishing: str, *, arrives: bool = True) -> None:
        self._bench, self._publishing, self._when = b, publishing, "after" if arrives else "before"
        self._is_lost = False

    def __call__(self, request: Request, when: When) -> None:
        if request.what == self._publishing and when == self._when and not self._is_lost:
            self._is_lost = True
            self._bench.store.give("file", b"theirs")
            raise Unavailable("lost")


@pytest.mark.parametrize("size", [100, 5 * PART])
@pytest.mark.parametrize("can_match", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
async def test_publish_replaced_after_a_lost_answer_is_superseded(
    tmp_path: Path, size: int, can_match: bool, calls: int
) -> None:
    """In one call, or in the next one."""
    able = Capabilities(name="memory", put_if_match=can_match, complete_if_match=can_match)
    async with bench(tmp_path, capabilities=able, retry_timeout_s=10 if calls == 1 else 0) as b:
        draft = b.draft(base=b.give("file", b"before"))
        await draft.truncate(0)
        await draft.write(0, noise(20, size))
        publishing = "put" if size < PART else "complete_multipart"
        b.store.hook = Overtaken(b, publishing)
        if calls == 2:
            with pytest.raises(Unavailable):
                await b.publish(draft)
        published = await b.publish(draft)
        assert published.is_superseded
        assert b.store.data("file") == b"theirs"
        assert (b.store.count(publishing), b.store.uploads) == (1, {})
        assert draft.state is DraftState.PUBLISHED
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [100, 5 * PART])
async def test_publish_over_an_older_version_after_a_lost_request_is_sent_again(tmp_path: Path, size: int) -> None:
    """Another client's version was there before the first attempt, unknown to the writer: that attempt did not
    arrive."""
    async with bench(tmp_path) as b:
        b.store.give("file", b"theirs")
        b.store.clock = lambda: START_NS + 10 * 1_000_000_000
        draft = b.draft()
        await draft.write(0, noise(21, size))
        publishing = "put" if size < PART else "complete_multipart"
        b.store.hook = Failures(what(publishing), Unavailable("lost"))
        assert not (await b.publish(draft)).is_superseded
        assert b.store.data("file") == noise(21, size)
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [100, 5 * PART])
async def test_publish_overtaken_between_head_and_retry_is_superseded(tmp_path: Path, size: int) -> None:
    """The condition of the retry is what the HEAD saw."""
    able = Capabilities(name="memory", put_if_match=True, complete_if_match=True)
    async with bench(tmp_path, capabilities=able) as b:
        draft = b.draft(base=b.give("file", b"before"))
        await draft.truncate(0)
        await draft.write(0, noise(22, size))
        publishing = "put" if size < PART else "complete_multipart"
        lost = [Unavailable("lost")]

        def hook(request: Request, when: When) -> None:
            if request.what == publishing and when == "before" and lost:
                raise lost.pop()
            if request.what == "head" and when == "after" and b.store.data("file") == b"before":
                b.store.give("file", b"theirs")

        b.store.hook = hook
        assert (await b.publish(draft)).is_superseded
        assert b.store.data("file") == b"theirs"
        draft.close(unlink=True)


async def test_publish_refused_before_it_began_is_sent_again_without_a_question(tmp_path: Path) -> None:
    async with bench(tmp_path, retry_timeout_s=5) as b:
        draft = b.draft()
        await draft.write(0, b"mine")
        b.store.hook = Failures(what("put"), NotCarriedOut("503", throttled=True), count=2)
        await b.publish(draft)
        assert (b.store.count("put"), b.store.count("head")) == (3, 0)
        draft.close(unlink=True)


async def test_publish_whose_upload_was_renamed_and_replaced_begins_anew_elsewhere(tmp_path: Path) -> None:
    """The file has another name by now, which needs the bytes."""
    data = noise(23, 5 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        draft.target.path = "renamed"
        b.store.hook = Overtaken(b, "complete_multipart")
        with pytest.raises(Superseded):
            await b.publish(draft)
        assert b.store.data("file") == b"theirs"
        assert not draft.upload.intent_ns
        draft.retarget(DraftTarget("renamed", b.describe))
        await b.publish(draft)
        assert b.store.data("renamed") == data
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [100, 5 * PART])
@pytest.mark.parametrize("if_absent", [False, True])
async def test_bytes_written_after_a_lost_answer_are_not_lost(tmp_path: Path, size: int, if_absent: bool) -> None:
    """The attempt did work, nobody knew, and the file was changed: the newer bytes have to follow."""
    data = bytearray(noise(4, size))
    async with bench(tmp_path, retry_timeout_s=0) as b:
        draft = b.draft(if_absent=if_absent)
        await draft.write(0, bytes(data))
        publishing = "put" if size < PART else "complete_multipart"
        b.store.hook = Failures(what(publishing), Unavailable("lost"), when="after")
        with pytest.raises(Unavailable):
            await b.publish(draft)
        assert b.store.data("file") == data
        await draft.write(10, b"newer")
        data[10:15] = b"newer"
        assert b.synced[draft.id].state is DraftState.WRITING
        await b.publish(draft)
        assert b.store.data("file") == data
        assert b.store.uploads == {}
        draft.close(unlink=True)


async def test_a_cut_after_a_lost_answer_is_not_lost(tmp_path: Path) -> None:
    """At a part's edge, where nothing has to be sent again."""
    async with bench(tmp_path, retry_timeout_s=0) as b:
        draft = b.draft()
        await draft.write(0, noise(5, 5 * PART))
        b.store.hook = Failures(what("complete_multipart"), Unavailable("lost"), when="after")
        with pytest.raises(Unavailable):
            await b.publish(draft)
        await draft.truncate(3 * PART)
        await b.publish(draft)
        assert b.store.data("file") == noise(5, 5 * PART)[: 3 * PART]
        draft.close(unlink=True)


async def test_a_changed_base_that_we_replaced_ourselves_is_no_conflict(tmp_path: Path) -> None:
    old = bytearray(noise(6, 20_000))
    async with bench(tmp_path, retry_timeout_s=0) as b:
        draft = b.draft("base", base=b.give("base", bytes(old)))
        await draft.write(0, b"one")
        b.store.hook = Failures(what("put"), Unavailable("lost"), when="after")
        with pytest.raises(Unavailable):
            await b.publish(draft)
        draft.pages.forget(0)  # as if it had been let go: it has to be read from a base that is there
        draft.base_limit = len(old)
        await draft.truncate(10_000)
        await b.publish(draft)
        assert b.store.data("base") == b"one" + old[3:10_000]
        draft.close(unlink=True)


async def test_an_upload_that_goes_on_after_a_change_is_recognised(tmp_path: Path) -> None:
    """Completing failed truly; after a change the same upload is completed, and that answer is lost."""
    data = bytearray(noise(7, 5 * PART))
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, bytes(data))
        b.store.hook = Failures(what("complete_multipart"), AccessDenied("no"))
        with pytest.raises(AccessDenied):
            await b.publish(draft)
        await draft.write(3, b"changed")
        data[3:10] = b"changed"
        b.store.hook = Failures(what("complete_multipart"), Unavailable("lost"), when="after")
        await b.publish(draft)
        assert b.store.data("file") == data
        assert b.store.count("create_multipart") == 1
        assert b.saved[draft.id].token == b.store.metadata("file")[DRAFT_METADATA]
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [100, 5 * PART])
async def test_exclusive_creation_yields_to_others(tmp_path: Path, size: int) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft(if_absent=True)
        await draft.write(0, noise(8, size))
        b.store.give("file", b"theirs")
        with pytest.raises(FileError) as caught:
            await b.publish(draft)
        assert caught.value.errno == errno.EEXIST
        assert b.store.data("file") == b"theirs"
        assert bytes(await draft.read(0, size)) == noise(8, size)
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [100, 5 * PART])
async def test_what_the_object_tells_of_attributes_is_answered(tmp_path: Path, size: int) -> None:
    """A single request tells them as they are when it begins, an upload as they were when that began. The caller hears
    which it was, so that it can say elsewhere what changed since; no byte is sent or copied for it."""
    data = noise(9, size)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        began = {"mode": "33188"}
        b.attributes = {"mode": "33152", "uid": "7"}
        published = await b.publish(draft)
        told = began if size > PART else b.attributes
        assert published.described == told
        assert b.store.metadata("file") == {**told, DRAFT_METADATA: draft.id}
        assert b.store.data("file") == data
        assert len(b.store.parts_sent()) == (5 if size > PART else 0)
        assert b.metrics.parts_copied == 0
        assert b.store.uploads == {}
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [100, 5 * PART])
async def test_a_second_attempt_answers_what_the_object_tells(tmp_path: Path, size: int) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, noise(10, size))
        await b.idle(draft)
        b.store.hook = Failures(what("put" if size < PART else "complete_multipart"), AccessDenied("no"))
        with pytest.raises(AccessDenied):
            await b.publish(draft)
        b.attributes = {"mode": "33152"}
        published = await b.publish(draft)
        metadata = dict(b.store.metadata("file"))
        del metadata[DRAFT_METADATA]
        assert published.described == metadata
        assert b.store.data("file") == noise(10, size)
        assert b.store.uploads == {}
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [100, 5 * PART])
async def test_replaced_by_others_just_after_it_was_visible(tmp_path: Path, size: int) -> None:
    """It was published, and then theirs was: nobody is told of an error."""
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, noise(12, size))

        def replace(request: Request, when: When) -> None:
            if request.what in ("put", "complete_multipart") and when == "after":
                b.store.give("file", b"theirs")

        b.store.hook = replace
        await b.publish(draft)
        assert b.store.data("file") == b"theirs"
        assert b.store.uploads == {}
        draft.close(unlink=True)


@pytest.mark.parametrize("removed", [False, True])
async def test_a_base_that_changed_is_stale(tmp_path: Path, removed: bool) -> None:
    async with bench(tmp_path, spans=((6 * MIB, 10_000),)) as b:
        draft = b.draft("base", base=b.give("base", noise(13, 18 * MIB)))
        await draft.write(0, b"x" * 4096)
        if removed:
            b.store.take("base")
        else:
            b.store.give("base", b"theirs")
        with pytest.raises((FileError, StoreError)) as caught:
            await b.publish(draft)
        assert caught.value.errno == errno.ESTALE
        assert draft.state is DraftState.FAILED
        draft.close(unlink=True)


async def test_fetching_a_base_does_not_fill_the_disk(tmp_path: Path) -> None:
    """One byte is changed in each of many parts that are too small to be copied."""
    size = 200 * PART
    old = bytearray(noise(14, size))
    async with bench(tmp_path, slots=2, staging_bytes_max=32 * PART) as b:
        draft = b.draft("base", base=b.give("base", bytes(old)))
        peak = 0

        def watch(request: Request, when: When) -> None:
            nonlocal peak
            peak = max(peak, b.staging.bytes_used)

        for at in range(0, size, 4 * PART):
            await draft.write(at, b"!")
            old[at] = ord("!")
        b.store.hook = watch
        await b.publish(draft)
        assert b.store.data("base") == old
        assert peak <= (32 + 2 * 2 * 4) * PART
        draft.close(unlink=True)
    assert b.staging.bytes_used == 0


async def test_hashes_are_those_of_the_blocks(tmp_path: Path) -> None:
    data = bytearray(noise(15, 40 * PART + 17))
    async with bench(tmp_path, spans=((2 * MIB, 10_000),)) as b:
        draft = b.draft()
        await draft.write(0, bytes(data))
        await b.idle(draft)
        await draft.write(MIB + 5, b"later")
        data[MIB + 5 : MIB + 10] = b"later"
        published = await b.publish(draft)
        blocks = [bytes(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
        assert published.hashes == [block_hash(block) for block in blocks]
        draft.close(unlink=True)


async def test_parts_smaller_than_a_block_have_right_hashes(tmp_path: Path) -> None:
    data = noise(16, 40 * PART + 17)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        published = await b.publish(draft)
        blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
        assert published.hashes == [block_hash(block) for block in blocks]
        draft.close(unlink=True)


async def test_blocks_that_were_let_go_have_no_hash(tmp_path: Path) -> None:
    async with bench(tmp_path, spans=((MIB, 10_000),), staging_bytes_max=8 * MIB) as b:
        draft = b.draft()
        for start in range(0, 16 * MIB, MIB // 2):
            await draft.write(start, noise(start, MIB // 2))
        published = await b.publish(draft)
        gone = [index for index, part in draft.parts.items() if part.state is PartState.DROPPED]
        assert gone
        assert [index for index, found in enumerate(published.hashes) if found == 0] == gone
        draft.close(unlink=True)


@pytest.mark.parametrize("size", [5 * PART, 100])
async def test_uploads_of_others_stay_where_ids_of_own_ones_were_lost(tmp_path: Path, size: int) -> None:
    """Nobody can tell whose they are. Own ones have no parts, and `gc` aborts them."""
    async with bench(tmp_path, retry_timeout_s=0) as b:
        theirs = b.store.create_multipart("file")
        draft = b.draft()
        b.store.hook = Failures(what("create_multipart"), Unavailable("lost"), when="after", count=3)
        await draft.write(0, noise(17, 5 * PART))
        await b.idle(draft)
        assert len(b.store.uploads) > 1
        await draft.truncate(size)
        b.store.hook = lambda request, when: None
        await b.publish(draft)
        assert b.store.data("file") == noise(17, 5 * PART)[:size]
        assert theirs in b.store.uploads
        assert not any(upload.parts for upload in b.store.uploads.values())
        draft.close(unlink=True)


async def test_publish_whose_unneeded_upload_cannot_be_aborted_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file became small: one PUT stored it, and a policy without s3:AbortMultipartUpload fails no close."""
    async with bench(tmp_path, retry_timeout_s=0) as b:
        draft = b.draft()
        await draft.write(0, noise(19, 5 * PART))
        await b.idle(draft)
        await draft.truncate(100)
        refused = b.store.hook = Failures(what("abort_multipart"), AccessDenied("may not abort"), count=100)
        await b.publish(draft)
        assert refused.left < 100
        assert draft.state is DraftState.PUBLISHED
        assert b.store.data("file") == noise(19, 5 * PART)[:100]
        assert b.store.uploads
        assert "the multipart upload of file is left to `gc`: may not abort" in caplog.text
        draft.close(unlink=True)


WIDE = ((16 * MIB, 100),)
"""Parts as in real lakes: a store takes no part below 5 MiB but the last one."""
APPENDS = {
    # size before, size after: bytes sent, parts copied
    "behind 5 MiB": (6 * MIB, 6 * MIB + 5000, 5000, 1),
    "in the last part": (40 * MIB, 40 * MIB + 10, 10, 3),
    "over the end of a part": (31 * MIB, 33 * MIB, 6 * MIB, 2),
    "to the end of a part": (31 * MIB, 32 * MIB, 1 * MIB, 2),
    "from the end of a part": (32 * MIB, 33 * MIB, 1 * MIB, 2),
    "a part that has not 5 MiB": (35 * MIB, 36 * MIB, 4 * MIB, 2),
    "less than 5 MiB": (4 * MIB, 5 * MIB, 5 * MIB, 0),
    "more than a part": (15 * MIB, 35 * MIB, 35 * MIB, 0),
}


@pytest.mark.parametrize("case", APPENDS)
async def test_append_sends_what_is_new_and_five_mebibytes_at_most(tmp_path: Path, case: str) -> None:
    before, after, sent, copied = APPENDS[case]
    data = noise(case, after)
    async with bench(tmp_path, spans=WIDE, staging_bytes_max=256 * MIB) as b:
        base = b.give("file", data[:before])
        draft = b.draft(base=base)
        await draft.write(before, data[before:])
        b.uploader.client.metrics.bytes_written = 0
        published = await b.publish(draft)
        assert b.store.data("file") == data
        assert published.meta.size == after
        assert sent <= b.uploader.client.metrics.bytes_written < sent + 4096, "the page in which the new bytes begin"
        assert b.metrics.parts_copied == copied
        assert b.store.uploads == {}
        draft.close(unlink=True)


async def test_append_after_a_change_further_ahead_sends_whole_parts(tmp_path: Path) -> None:
    data = bytearray(noise("ahead", 12 * MIB))
    async with bench(tmp_path, spans=WIDE, staging_bytes_max=256 * MIB) as b:
        draft = b.draft(base=b.give("file", bytes(data)))
        for offset, line in (MIB, b"header"), (len(data), b"line"):
            await draft.write(offset, line)
            data[offset : offset + len(line)] = line
        await b.publish(draft)
        assert b.store.data("file") == bytes(data)
        assert b.store.count("create_multipart") == 0
        draft.close(unlink=True)


@pytest.mark.parametrize("what_fails", ["upload_part", "upload_part_copy", "complete_multipart"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_append_that_failed_is_sent_again(tmp_path: Path, what_fails: str, when: When) -> None:
    data = noise("again", 7 * MIB)
    async with bench(tmp_path, spans=WIDE, staging_bytes_max=256 * MIB) as b:
        draft = b.draft(base=b.give("file", data[: 6 * MIB]))
        await draft.write(6 * MIB, data[6 * MIB :])
        b.store.hook = Failures(what(what_fails), AccessDenied("no"), when=when)
        with pytest.raises(AccessDenied):
            await b.publish(draft)
        await draft.write(6 * MIB, data[6 * MIB : 6 * MIB + 4])
        await b.publish(draft)
        assert b.store.data("file") == data
        assert b.store.uploads == {}
        draft.close(unlink=True)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_append_whose_base_is_gone_sends_what_the_cache_has_of_it(tmp_path: Path, how: str) -> None:
    data = noise("gone", 7 * MIB)
    async with bench(tmp_path, spans=WIDE, staging_bytes_max=256 * MIB) as b:
        draft = b.draft(base=b.give("other", data[: 6 * MIB]))
        draft.uploader.reader = CachedBase(data[: 6 * MIB])
        await draft.write(6 * MIB, data[6 * MIB :])
        b.store.delete("other") if how == "deleted" else b.give("other", b"another version")
        await b.publish(draft)
        assert b.store.data("file") == data
        draft.close(unlink=True)


class CachedBase:
    """Reads of a base that the cache has."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, _: Version, offset: int, length: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._data[offset : offset + length]


async def test_append_where_parts_cannot_be_copied_sends_the_file(tmp_path: Path) -> None:
    data = noise("sent", 7 * MIB)
    async with bench(tmp_path, spans=WIDE, capabilities=Capabilities(name="memory", part_copy=False)) as b:
        draft = b.draft(base=b.give("file", data[: 6 * MIB]))
        await draft.write(6 * MIB, data[6 * MIB :])
        await b.publish(draft)
        assert b.store.data("file") == data
        assert b.store.count("create_multipart") == 0
        draft.close(unlink=True)


async def test_publish_whose_base_is_gone_keeps_the_upload_and_succeeds_once_it_is_back(tmp_path: Path) -> None:
    """Parts that were dropped are in the upload only: what is gone is the source of a copy."""
    part = 5 * MIB
    old, new = noise("old", 6 * part), noise("new", 4 * part)
    async with bench(tmp_path, spans=((part, 10_000),)) as b:
        draft = b.draft(base=b.give("file", old))
        await draft.write(0, new)
        await b.idle(draft)
        assert draft.drop_uploaded(keep_recent=False) == 3 * part
        kept = b.store.objects["file"]
        uploads = list(b.store.uploads)
        b.store.take("file")
        with pytest.raises(FileError) as caught:
            await b.publish(draft)
        assert caught.value.errno == errno.ESTALE
        assert list(b.store.uploads) == uploads
        b.store.objects["file"] = kept  # from an older version of the object
        await b.publish(draft)
        assert b.store.data("file") == new + old[4 * part :]
        assert b.store.uploads == {}
        draft.close(unlink=True)


async def test_publish_whose_base_is_gone_sends_unchanged_parts_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 5 * MIB
    old = noise("old", 4 * part)
    async with bench(tmp_path, spans=((part, 10_000),)) as b:
        draft = b.draft(base=b.give("file", old))
        await draft.write(0, b"new")

        async def read_cached(version: Version, offset: int, length: int) -> bytes:
            return old[offset : offset + length]

        monkeypatch.setattr(b.uploader.reader, "read", read_cached)
        b.store.take("file")
        await b.publish(draft)
        assert b.store.data("file") == b"new" + old[3:]
        assert b.store.uploads == {}
        draft.close(unlink=True)
