"""What a node knows of versions that lost their names."""

from __future__ import annotations

from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.tombstones import Tombstone
from lakefs_fuse.vfs.writeback.removed_versions import KnownAt

PLAIN = Entry(1, 2, b"name", 3, etag="hidden", stamp=40)
ELSEWHERE = Entry(1, 2, b"name", 3, etag="hidden", stamp=40, place=7)


def test_when_gone_of_a_removed_object_is_the_time_of_its_removal() -> None:
    known = KnownAt(Tombstone(30, gone=(("removed", 30),)), None)
    assert (known.when_gone("removed"), known.when_gone("other")) == (30, 0)


def test_when_gone_of_the_object_that_a_file_elsewhere_hides_is_the_stamp_of_that_file() -> None:
    assert KnownAt(None, ELSEWHERE).when_gone("hidden") == 40
    assert KnownAt(Tombstone(50, gone=(("hidden", 50),)), ELSEWHERE).when_gone("hidden") == 50


def test_when_gone_of_the_object_at_the_name_is_never() -> None:
    assert KnownAt(None, PLAIN).when_gone("hidden") == 0
    assert KnownAt(None, None).when_gone("hidden") == 0
