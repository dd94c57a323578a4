"""Copies that the store makes, over a store in memory."""

from __future__ import annotations

import pytest

from lakefs_fuse.errors import PreconditionFailed, Unavailable
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
