"""Copies that the store makes, over a store in memory."""

from __future__ import annotations

import threading

import pytest
import trio

from lakefs_fuse.errors import AccessDenied, PreconditionFailed, Unavailable
from lakefs_fuse.store import server_copy
from lakefs_fuse.store.client import is_copy
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.store.server_copy import copy_object
from tests.fakes import store_client
from tests.memory_store import Failures, MemoryStore, Request, When

SIZE = 3000


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """With an object of three parts, which loses the first answer to the request that completes an upload."""
    monkeypatch.setattr(server_copy, "COPY_PART_BYTES", 1000)
    store = MemoryStore()
    store.give("source", bytes(SIZE))
    store.hook = Failures(lambda request: request.what == "complete_multipart", Unavailable("lost"), when="after")
    return store


async def test_copy_in_parts_whose_answer_is_lost_is_found(store: MemoryStore) -> None:
    client = store_client(store, Capabilities(name="memory"))
    copied = await copy_object(client, "source", store.head("source").etag, SIZE, "target")
    assert (copied.key, copied.size, copied.etag) == ("target", SIZE, store.head("target").etag)
    assert store.data("target") == bytes(SIZE)


async def test_conditional_copy_whose_answer_is_lost_says_that_the_target_exists(store: MemoryStore) -> None:
    client = store_client(store, Capabilities(name="memory"))
    with pytest.raises(PreconditionFailed, match="target"):
        await copy_object(client, "source", store.head("source").etag, SIZE, "target", if_absent=True)
    assert store.data("target") == bytes(SIZE) and is_copy(store.head("target"))


async def test_copy_whose_upload_was_ended_by_others_is_to_be_tried_again(store: MemoryStore) -> None:
    def abort(request: Request, when: When) -> None:
        if (request.what, when) == ("complete_multipart", "before"):
            for upload in store.list_multipart(""):
                store.abort_multipart(upload.key, upload.upload_id)

    client = store_client(store, Capabilities(name="memory"))
    store.hook = abort
    with pytest.raises(Unavailable, match="try again"):
        await copy_object(client, "source", store.head("source").etag, SIZE, "target")


async def test_copy_whose_source_was_replaced_says_so_though_its_upload_cannot_be_aborted(store: MemoryStore) -> None:
    client, etag = store_client(store, Capabilities(name="memory")), store.head("source").etag
    store.give("source", b"another version")
    store.hook = Failures(lambda request: request.what == "abort_multipart", AccessDenied("not allowed"))
    with pytest.raises(PreconditionFailed):
        await copy_object(client, "source", etag, SIZE, "target")


async def test_copy_that_fails_waits_no_longer_for_the_end_of_its_upload_than_it_says(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_copy, "ABORT_S_MAX", 0.01)
    client, etag, answered = (
        store_client(store, Capabilities(name="memory")),
        store.head("source").etag,
        threading.Event(),
    )
    store.give("source", b"another version")

    def hang(request: Request, when: When) -> None:
        if (request.what, when) == ("abort_multipart", "before"):
            answered.wait()

    store.hook = hang
    try:
        with trio.fail_after(20), pytest.raises(PreconditionFailed):
            await copy_object(client, "source", etag, SIZE, "target")
    finally:
        answered.set()
