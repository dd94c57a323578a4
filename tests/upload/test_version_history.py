"""What the metadata of an object say of the versions before it."""

from __future__ import annotations

from itertools import pairwise

from lakefs_fuse.store.client import is_successor
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.upload.publish import note_stored
from lakefs_fuse.upload.uploader import HISTORY_BYTES_MAX, Uploader, describe_history


def uploader() -> Uploader:
    made = Uploader.__new__(Uploader)
    made.stored = {}
    return made


def stored(history: Uploader, etag: str, replaces: str = "") -> ObjectMeta:
    metadata = describe_history(history, "f", replaces)
    note_stored(history, "f", etag, metadata)
    return ObjectMeta("f", 1, etag, 0, metadata)


def test_is_successor_of_a_created_file_names_its_own_versions_alone() -> None:
    history = uploader()
    first, second, third = stored(history, "a"), stored(history, "b", "a"), stored(history, "c", "b")
    assert not is_successor(first, "before")
    for etag, successors in (("a", (second, third)), ("b", (third,)), ("before", ())):
        assert [meta for meta in (second, third) if is_successor(meta, etag)] == list(successors)


def test_is_successor_where_others_stored_the_version_before_is_in_doubt() -> None:
    history = uploader()
    stored(history, "a")
    assert is_successor(stored(history, "c", "of another node"), "any")
    assert is_successor(stored(uploader(), "c", "a"), "any"), "after a restart"


def test_describe_history_that_is_long_names_the_newest_alone() -> None:
    history, etags = uploader(), [f"{number:032x}" for number in range(HISTORY_BYTES_MAX // 32 + 2)]
    stored(history, etags[0])
    newest = [stored(history, etag, before) for before, etag in pairwise(etags)][-1]
    assert is_successor(newest, "any")
