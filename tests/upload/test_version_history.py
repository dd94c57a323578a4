"""What the metadata of an object say of the versions before it."""

from __future__ import annotations

from itertools import pairwise

from lakefs_fuse.store.client import is_successor
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.upload.uploader import HISTORY_BYTES_MAX, ObjectHistories


def stored(history: ObjectHistories, etag: str, replaces: str = "") -> ObjectMeta:
    metadata = history.describe("f", replaces)
    history.add("f", etag, metadata)
    return ObjectMeta("f", 1, etag, 0, metadata)


def test_is_successor_of_a_created_file_names_its_own_versions_alone() -> None:
    history = ObjectHistories()
    first, second, third = stored(history, "a"), stored(history, "b", "a"), stored(history, "c", "b")
    assert not is_successor(first, "before")
    for etag, successors in (("a", (second, third)), ("b", (third,)), ("before", ())):
        assert [meta for meta in (second, third) if is_successor(meta, etag)] == list(successors)


def test_is_successor_where_others_stored_the_version_before_is_in_doubt() -> None:
    history = ObjectHistories()
    stored(history, "a")
    assert is_successor(stored(history, "c", "of another node"), "any")
    assert is_successor(stored(ObjectHistories(), "c", "a"), "any"), "after a restart"


def test_history_that_is_long_names_the_newest_alone() -> None:
    history, etags = ObjectHistories(), [f"{number:032x}" for number in range(HISTORY_BYTES_MAX // 32 + 2)]
    stored(history, etags[0])
    newest = [stored(history, etag, before) for before, etag in pairwise(etags)][-1]
    assert is_successor(newest, "any")
