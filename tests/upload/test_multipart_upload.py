"""The multipart upload of a draft: how it begins, and what its requests and their failures leave behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs_fuse.errors import AccessDenied, LakeError, Unavailable
from lakefs_fuse.upload.draft import Draft
from tests.memory_store import Failures, Pause, Request, When
from tests.upload.drafting import PART, Bench, bench, noise, reached

PARTS = 8


def is_create(request: Request) -> bool:
    return request.what == "create_multipart"


def is_part(request: Request) -> bool:
    return request.what == "upload_part"


def refuse(b: Bench, matches: Callable[[Request], bool], error: Exception) -> Pause:
    """The store answers each request that matches with ``error``, the first ones when the pause is resumed."""
    pause, failures = Pause(matches), Failures(matches, error, count=1_000_000)

    def hook(request: Request, when: When) -> None:
        pause(request, when)
        failures(request, when)

    b.store.hook = hook
    return pause


def allow_requests(b: Bench) -> None:
    b.store.hook = lambda _request, _when: None


async def fail_to_publish(b: Bench, draft: Draft, pause: Pause) -> None:
    """Publish while requests wait, which fail then."""

    async def publish() -> None:
        with pytest.raises(Unavailable):
            await b.publish(draft)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish)
        await trio.testing.wait_all_tasks_blocked(0.01)
        pause.resume()


@pytest.mark.parametrize(("error", "requests"), [(Unavailable("away"), 1), (AccessDenied("no"), PARTS)])
async def test_begin_by_waiting_tasks_sends_one_request_to_an_unavailable_store(
    tmp_path: Path, error: LakeError, requests: int
) -> None:
    async with bench(tmp_path, retry_timeout_s=0) as b:
        draft, errors = b.draft(), list[str]()
        pause = refuse(b, is_create, error)

        async def begin() -> None:
            with pytest.raises(type(error)) as caught:
                await draft.begin_upload()
            errors.append(str(caught.value))

        async with trio.open_nursery() as nursery:
            for _ in range(PARTS):
                nursery.start_soon(begin)
            await reached(pause.reached)
            pause.resume()
        assert (b.store.count("create_multipart"), len(errors)) == (requests, PARTS)
        assert len(set(errors)) == 1
        assert b.saved[draft.id].upload_intent_ns > 0

        allow_requests(b)
        upload_id = await draft.begin_upload()
        assert upload_id == await draft.begin_upload() == b.saved[draft.id].upload_id
        assert b.store.count("create_multipart") == requests + 1
        await draft.discard()
        assert not b.store.uploads


@pytest.mark.parametrize("slots", [PARTS, 2])
async def test_publish_with_waiting_parts_sends_one_more_request_to_an_unavailable_store(
    tmp_path: Path, slots: int
) -> None:
    """Each request may wait for a whole retry timeout, and the caller of close() with it."""
    data = noise(1, PARTS * PART)
    async with bench(tmp_path, retry_timeout_s=0, slots=slots) as b:
        draft = b.draft()
        pause = refuse(b, is_create, Unavailable("away"))
        await draft.write(0, data)
        await reached(pause.reached)
        assert draft.uploading == PARTS
        await fail_to_publish(b, draft, pause)
        assert b.store.count("create_multipart") == 2

        allow_requests(b)
        await b.publish(draft)
        assert b.store.data("file") == data
        draft.close(unlink=True)


async def test_publish_with_parts_that_wait_for_slots_sends_no_others_to_an_unavailable_store(tmp_path: Path) -> None:
    """The upload is open, and then the store is unavailable: the parts in both slots fail, then those of `publish`."""
    data = noise(2, PARTS * PART)
    async with bench(tmp_path, retry_timeout_s=0, slots=2) as b:
        draft, pause = b.draft(), refuse(b, is_part, Unavailable("away"))
        await draft.write(0, data)
        await reached(pause.reached)
        await fail_to_publish(b, draft, pause)
        assert b.store.count("upload_part") <= 4

        allow_requests(b)
        await b.publish(draft)
        assert b.store.data("file") == data
        assert b.store.count("create_multipart") == 1
        draft.close(unlink=True)
