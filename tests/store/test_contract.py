"""The contract of `ObjectStore`, run against each supported store as a mount uses it: opened, probed, adapted.

Where a store cannot do something, the test asserts what is done instead.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lakefs_fuse.errors import (
    FileError,
    KeyRefused,
    NotFound,
    PreconditionFailed,
    StoreError,
    Unavailable,
    Unsupported,
)
from lakefs_fuse.store.protocol import PART_BYTES_MIN, FileSlice, ListPage, ObjectMeta, ObjectStore
from tests.store.lakes import Lake
from tests.tiers import sized

ODD_KEYS = (
    "a b",
    " leading and trailing ",
    "100%",
    "a%20b",
    "a%2Fb",
    "a+b",
    "a#b?c=d&e",
    'it\'s "quoted"',
    "semi;colon:comma,at@dollar$bang!",
    "brackets[1](2){3}<4>",
    "star*tilde~caret^back`tick|pipe",
    "back\\slash",
    "tab\there",
    "new\nline",
    "del\x7f",
    "ünïcödé/日本語/😀",
    "e\u0301 decomposed",
    "dots/...",
    "dots/a.",
    "-dash",
    "=",
    "/".join(["k" * 224] * 4),
)


def all_pages(store: ObjectStore, prefix: str, *, delimiter: str = "", keys_max: int = 1000) -> list[ListPage]:
    pages, token = [], None
    while True:
        page = store.list_page(prefix, delimiter=delimiter, token=token, keys_max=keys_max)
        pages.append(page)
        token = page.next_token
        if token is None:
            return pages


def listed(store: ObjectStore, prefix: str = "") -> dict[str, ObjectMeta]:
    return {meta.key: meta for page in all_pages(store, prefix) for meta in page.objects}


def read(store: ObjectStore, key: str) -> bytes:
    return bytes(store.get(key, 0, 1 << 30).data)


# -- put, head, get ----------------------------------------------------------------------------------------------


def test_put_head_and_list_agree(lake: Lake) -> None:
    before_ns = time.time_ns() - 3_000_000_000
    # rclone takes a metadatum called mtime for the time of the object itself, so here it is about now.
    metadata = {"mode": "33188", "mtime": str(time.time())}
    put = lake.store.put("dir/a", b"some bytes", metadata=metadata)
    head = lake.store.head("dir/a")
    (found,) = listed(lake.store).values()
    assert put.etag == head.etag == found.etag != ""
    assert '"' not in put.etag
    assert put.size == head.size == found.size == 10
    assert (put.key, head.key, found.key) == ("dir/a",) * 3
    assert head.metadata == metadata
    assert found.metadata is None
    for meta in (put, head, found):
        assert before_ns < meta.mtime_ns < time.time_ns() + 3_000_000_000
    assert head.mtime_ns == found.mtime_ns == head.mtime_ns // 1_000_000_000 * 1_000_000_000


def test_the_store_says_what_time_it_is(lake: Lake) -> None:
    before_ns = time.time_ns()
    said_ns = lake.store.time_ns()
    assert before_ns - 1_500_000_000 < said_ns < time.time_ns() + 1_500_000_000
    if lake.name != "local":
        assert said_ns % 1_000_000_000 == 500_000_000


def test_an_object_put_again_is_another_version_without_the_old_metadata(lake: Lake) -> None:
    first = lake.store.put("a", b"first", metadata={"mode": "1"})
    second = lake.store.put("a", b"other")
    assert first.etag != second.etag
    head = lake.store.head("a")
    assert head.etag == second.etag
    assert head.metadata == {}
    assert read(lake.store, "a") == b"other"


@pytest.mark.parametrize("size", [1, 100, (1 << 20) + 1, 6_000_001])
def test_bodies_of_any_size_from_memory_and_from_files(lake: Lake, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    from_memory = lake.store.put("memory", data)
    path = tmp_path / "body"
    path.write_bytes(b"before" + data + b"after")
    with path.open("rb") as file:
        from_file = lake.store.put("file", FileSlice(file.fileno(), 6, size))
    assert from_memory.size == from_file.size == size
    assert read(lake.store, "memory") == read(lake.store, "file") == data
    for key, meta in (("memory", from_memory), ("file", from_file)):
        assert lake.store.head(key).etag == meta.etag == listed(lake.store)[key].etag


def test_a_slice_beyond_the_end_of_its_file_reads_as_zeros(lake: Lake, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"abc")
    with path.open("rb") as file:
        lake.store.put("small", FileSlice(file.fileno(), 1, 5))
        lake.store.put("large", FileSlice(file.fileno(), 0, (2 << 20) + 1))
    assert read(lake.store, "small") == b"bc\0\0\0"
    assert read(lake.store, "large") == b"abc" + bytes((2 << 20) - 2)


def test_body_whose_file_cannot_be_read_is_no_error_of_the_store(lake: Lake, tmp_path: Path) -> None:
    """It was retried as an outage, or ended the caller's task."""
    upload_id = lake.store.create_multipart("part")
    with (tmp_path / "body").open("wb") as file:  # reading it fails with EBADF
        file.write(os.urandom(2 << 20))
        for size in (100, 2 << 20):
            body = FileSlice(file.fileno(), 0, size)
            for send in (lambda: lake.store.put("a", body), lambda: lake.store.upload_part("part", upload_id, 1, body)):  # noqa: B023
                with pytest.raises(FileError, match="this node's disk") as raised:
                    send()
                assert raised.value.errno == errno.EIO
    lake.store.abort_multipart("part", upload_id)
    assert not listed(lake.store)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 100), (3, 7), (99, 100), (90, 200), (0, 1 << 40)])
def test_ranges_are_cut_at_the_end(lake: Lake, start: int, end: int) -> None:
    data = bytes(range(100))
    put = lake.store.put("a", data)
    for etag in (None, put.etag):
        fetched = lake.store.get("a", start, end, etag=etag)
        assert bytes(fetched.data) == data[start:end]
        assert (fetched.meta.key, fetched.meta.size, fetched.meta.etag) == ("a", 100, put.etag)


def test_an_empty_object_reads_as_nothing(lake: Lake) -> None:
    put = lake.store.put("empty", b"")
    for etag in (None, put.etag):
        fetched = lake.store.get("empty", 0, 10, etag=etag)
        assert (bytes(fetched.data), fetched.meta.size, fetched.meta.etag) == (b"", 0, put.etag)
    lake.store.put("empty", b"no more")
    with pytest.raises(PreconditionFailed):
        lake.store.get("empty", 0, 10, etag=put.etag)


def test_a_version_that_is_gone_is_never_answered_with_another(lake: Lake) -> None:
    old = lake.store.put("a", b"old" * 100)
    new = lake.store.put("a", b"new" * 10)
    for start, end in ((0, 3), (0, 1000), (200, 210)):  # the last one is beyond the end of the new version
        with pytest.raises(PreconditionFailed):
            lake.store.get("a", start, end, etag=old.etag)
    assert bytes(lake.store.get("a", 3, 6, etag=new.etag).data) == b"new"


def test_readers_of_an_object_that_is_replaced_see_one_version(lake: Lake) -> None:
    versions = [bytes([number]) * 50_000 for number in range(8)]
    lake.store.put("a", versions[0])
    seen: list[bytes] = []
    done = threading.Event()

    def reader() -> None:
        while not done.is_set():
            meta = lake.store.head("a")
            try:
                seen.append(bytes(lake.store.get("a", 0, 50_000, etag=meta.etag).data))
            except (PreconditionFailed, Unavailable):
                continue

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in versions[1:]:
        lake.store.put("a", version)
    time.sleep(0.1)
    done.set()
    for thread in threads:
        thread.join()
    assert seen
    assert all(data in versions for data in seen)


def test_what_is_absent_is_not_found(lake: Lake) -> None:
    for call in (
        lambda: lake.store.get("no/such", 0, 1),
        lambda: lake.store.get("no/such", 0, 1, etag="abc"),
        lambda: lake.store.head("no/such"),
        lambda: lake.store.copy("no/such", "target"),
    ):
        with pytest.raises(NotFound):
            call()
    lake.store.put("dir/a", b"")
    with pytest.raises(NotFound):
        lake.store.head("dir")
    with pytest.raises(NotFound):
        lake.store.get("dir", 0, 1)


def test_put_if_absent_refuses_what_exists(lake: Lake) -> None:
    first = lake.store.put("small", b"1", if_absent=True)
    with pytest.raises(PreconditionFailed):
        lake.store.put("small", b"2", if_absent=True)
    lake.store.put("large", bytes(2 << 20), if_absent=True)
    with pytest.raises(PreconditionFailed):
        lake.store.put("large", b"2" * (2 << 20), if_absent=True)
    assert lake.store.head("small").etag == first.etag
    assert read(lake.store, "large") == bytes(2 << 20)


def test_put_of_another_version_than_the_one_there_is_refused(lake: Lake) -> None:
    """Where the store has the condition; elsewhere nobody asks for it."""
    able = lake.capabilities
    old = lake.store.put("file", b"old").etag
    new = lake.store.put("file", b"new").etag
    checks = able.put_if_match or lake.name == "local"
    for size in (10, 2 << 20) if checks else ():
        with pytest.raises(PreconditionFailed):
            lake.store.put("file", bytes(size), etag=old)
        with pytest.raises((PreconditionFailed, NotFound)):
            lake.store.put("absent", bytes(size), etag=old)
        assert read(lake.store, "file") == b"new"
    newest = lake.store.put("file", b"newest", metadata={"mode": "1"}, etag=new if checks else None)
    head = lake.store.head("file")
    assert (head.etag, head.metadata) == (newest.etag, {"mode": "1"})
    checks = able.complete_if_match or lake.name == "local"
    upload_id = lake.store.create_multipart("file")
    part = lake.store.upload_part("file", upload_id, 1, b"part")
    if checks:
        with pytest.raises(PreconditionFailed):
            lake.store.complete_multipart("file", upload_id, [part], etag=old)
        assert read(lake.store, "file") == b"newest"
    lake.store.complete_multipart("file", upload_id, [part], etag=newest.etag if checks else None)
    assert read(lake.store, "file") == b"part"


# -- keys --------------------------------------------------------------------------------------------------------


def test_odd_keys_come_back_as_they_were_put(lake: Lake) -> None:
    for key in ODD_KEYS:
        if any(character in key for character in lake.capabilities.characters_refused):
            with pytest.raises(KeyRefused):
                lake.store.put(key, b"x")
            with pytest.raises(KeyRefused):
                lake.store.create_multipart(key)
            assert listed(lake.store) == {}
            continue
        put = lake.store.put(key, b"0123456789", metadata={"mode": "1"})
        head = lake.store.head(key)
        assert head.etag == put.etag
        assert dict(head.metadata or {})["mode"] == "1"
        assert bytes(lake.store.get(key, 2, 5, etag=put.etag).data) == b"234"
        assert list(listed(lake.store)) == [key]
        assert list(listed(lake.store, key[:2])) == [key]
        copy = "copy of " + key[-100:]
        lake.store.copy(key, copy)
        assert sorted(listed(lake.store)) == sorted([key, copy])
        assert lake.store.delete_many([key, copy]) == {}
        assert listed(lake.store) == {}


def test_odd_keys_listed_together(lake: Lake) -> None:
    keys = {key for key in ODD_KEYS if not set(key) & set(lake.capabilities.characters_refused)}
    for key in keys:
        lake.store.put(key, b"x")
    seen = [meta.key for page in all_pages(lake.store, "", keys_max=3) for meta in page.objects]
    assert sorted(seen) == sorted(keys)
    if lake.capabilities.sorted_listing:
        assert seen == sorted(keys, key=str.encode)


# -- delete, copy ------------------------------------------------------------------------------------------------


def test_delete_removes_and_minds_no_absence(lake: Lake) -> None:
    lake.store.put("dir/a", b"1")
    lake.store.put("dir/b", b"1")
    lake.store.delete("dir/a")
    lake.store.delete("dir/a")
    lake.store.delete("never/was")
    with pytest.raises(NotFound):
        lake.store.head("dir/a")
    assert list(listed(lake.store)) == ["dir/b"]


def test_delete_another_version_is_refused(lake: Lake) -> None:
    old = lake.store.put("dir/a", b"old").etag
    new = lake.store.put("dir/a", b"new").etag
    with pytest.raises(PreconditionFailed):
        lake.store.delete("dir/a", etag=old)
    assert bytes(lake.store.get("dir/a", 0, 3).data) == b"new"
    lake.store.delete("dir/a", etag=new)
    with pytest.raises(NotFound):
        lake.store.head("dir/a")
    lake.store.delete("dir/a", etag=new)


def test_delete_many(lake: Lake) -> None:
    keys = [f"dir{number % 3}/{number}" for number in range(30)]
    for key in [*keys, "stays"]:
        lake.store.put(key, b"1")
    assert lake.store.delete_many([*keys, "never was", "never/was"]) == {}
    assert list(listed(lake.store)) == ["stays"]
    assert lake.store.delete_many([]) == {}


def test_copy_takes_bytes_and_metadata(lake: Lake) -> None:
    metadata = {"mode": "33188", "mtime": "1700000000.5"}
    source = lake.store.put("source", b"bytes", metadata=metadata)
    target = lake.store.copy("source", "dir/target", etag=source.etag)
    head = lake.store.head("dir/target")
    assert (target.etag, target.size) == (head.etag, 5)
    assert head.metadata == metadata
    assert read(lake.store, "dir/target") == b"bytes"


def test_copy_of_a_version_that_is_gone_is_refused(lake: Lake) -> None:
    old = lake.store.put("source", b"old")
    lake.store.put("source", b"new")
    with pytest.raises(PreconditionFailed):
        lake.store.copy("source", "target", etag=old.etag)
    with pytest.raises(NotFound):
        lake.store.head("target")


# -- listing -----------------------------------------------------------------------------------------------------

TREE = ("a-b", "a/b", "a/c/d", "a0", "b", "c/d/e/f", "z/1", "z/2", "z/3")


def test_pages_join_up(lake: Lake) -> None:
    for key in TREE:
        lake.store.put(key, b"x")
    for keys_max in (1, 2, 4, 1000):
        pages = all_pages(lake.store, "", keys_max=keys_max)
        keys = [meta.key for page in pages for meta in page.objects]
        assert sorted(keys) == sorted(TREE)
        assert all(len(page.objects) <= keys_max and not page.prefixes for page in pages)
        if lake.capabilities.sorted_listing:
            assert keys == sorted(TREE)


def test_keys_collapse_at_the_delimiter(lake: Lake) -> None:
    for key in TREE:
        lake.store.put(key, b"x")
    for keys_max in (1, 2, 1000):
        pages = all_pages(lake.store, "", delimiter="/", keys_max=keys_max)
        assert sorted(meta.key for page in pages for meta in page.objects) == ["a-b", "a0", "b"]
        assert sorted(prefix for page in pages for prefix in page.prefixes) == ["a/", "c/", "z/"]
        assert all(len(page.objects) + len(page.prefixes) <= keys_max for page in pages)
    below = lake.store.list_page("a/", delimiter="/")
    assert [meta.key for meta in below.objects] == ["a/b"]
    assert list(below.prefixes) == ["a/c/"]
    partial = lake.store.list_page("c/d", delimiter="/")
    assert (list(partial.objects), list(partial.prefixes)) == ([], ["c/d/"])
    nothing = lake.store.list_page("no/such/", delimiter="/")
    assert (list(nothing.objects), list(nothing.prefixes), nothing.next_token) == ([], [], None)


def test_start_after(lake: Lake) -> None:
    for key in TREE:
        lake.store.put(key, b"x")
    for after in ("z/1", "z/15"):
        page = lake.store.list_page("z/", start_after=after)
        assert [meta.key for meta in page.objects] == ["z/2", "z/3"]
    assert list(lake.store.list_page("z/", start_after="z/3").objects) == []


def test_a_listing_of_more_than_one_page(lake: Lake) -> None:
    last = sized(3, 203)
    keys = [f"many/{number:04d}" for number in range(1000 + last)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: lake.store.put(key, b""), keys))
    pages = all_pages(lake.store, "many/", delimiter="/")
    assert [meta.key for page in pages for meta in page.objects] == keys
    assert [len(page.objects) for page in pages] == [1000, last]


# -- directory markers -------------------------------------------------------------------------------------------


def test_markers_are_empty_directories(lake: Lake) -> None:
    if not lake.capabilities.lists_markers:
        # The store takes `dir/` for the file `dir`, so it is never given one.
        lake.store.put("dir", b"a file")
        with pytest.raises(KeyRefused):
            lake.store.put("dir/", b"")
        with pytest.raises(NotFound):
            lake.store.head("dir/")
        lake.store.delete("dir/")
        assert lake.store.delete_many(["dir/"]) == {}
        assert read(lake.store, "dir") == b"a file"
        return
    put = lake.store.put("top/dir/", b"", metadata={"mode": "16877"})
    top = lake.store.list_page("top/", delimiter="/")
    assert (list(top.objects), list(top.prefixes)) == ([], ["top/dir/"])
    inside = lake.store.list_page("top/dir/", delimiter="/")
    assert ([meta.key for meta in inside.objects], list(inside.prefixes)) == (["top/dir/"], [])
    head = lake.store.head("top/dir/")
    assert (head.size, head.etag) == (0, put.etag)
    # SeaweedFS keeps no metadata with a directory.
    assert head.metadata == ({} if lake.name == "seaweedfs" else {"mode": "16877"})
    assert bytes(lake.store.get("top/dir/", 0, 1).data) == b""
    lake.store.put("top/dir/file", b"x")
    lake.store.delete("top/dir/file")
    assert lake.store.head("top/dir/").etag == put.etag, "the marker outlives the last file"
    lake.store.delete("top/dir/")
    with pytest.raises(NotFound):
        lake.store.head("top/dir/")


# -- multipart ---------------------------------------------------------------------------------------------------


def part_bytes(number: int, size: int = PART_BYTES_MIN) -> bytes:
    return bytes([number]) * size


def upload(lake: Lake, key: str, bodies: Sequence[bytes], *, if_absent: bool = False) -> ObjectMeta:
    upload_id = lake.store.create_multipart(key, metadata={"mode": "33188"})
    parts = [lake.store.upload_part(key, upload_id, number, body) for number, body in enumerate(bodies, 1)]
    return lake.store.complete_multipart(key, upload_id, parts, if_absent=if_absent)


def test_multipart_from_a_file(lake: Lake, tmp_path: Path) -> None:
    data = os.urandom(2 * PART_BYTES_MIN + 12_345)
    path = tmp_path / "staged"
    path.write_bytes(data)
    key = "ckpt/model with spaces.pt"
    upload_id = lake.store.create_multipart(key, metadata={"mode": "33188", "mtime": "1.5"})
    assert listed(lake.store) == {}, "nothing is visible before it is complete"
    with path.open("rb") as file:
        parts = []
        for number in (3, 1, 2):
            start = (number - 1) * PART_BYTES_MIN
            body = FileSlice(file.fileno(), start, min(PART_BYTES_MIN, len(data) - start))
            parts.append(lake.store.upload_part(key, upload_id, number, body))
    assert listed(lake.store) == {}
    parts.sort(key=lambda part: part.number)
    done = lake.store.complete_multipart(key, upload_id, parts)
    head = lake.store.head(key)
    assert done.etag == head.etag == listed(lake.store)[key].etag != ""
    assert done.size == head.size == len(data)
    assert head.metadata == {"mode": "33188", "mtime": "1.5"}
    assert read(lake.store, key) == data
    assert list(lake.store.list_multipart("")) == []


def test_a_part_uploaded_again_replaces_the_first(lake: Lake) -> None:
    upload_id = lake.store.create_multipart("a")
    lake.store.upload_part("a", upload_id, 1, part_bytes(1))
    second = lake.store.upload_part("a", upload_id, 2, b"tail")
    if not lake.capabilities.parts_replaceable:
        with pytest.raises(Unsupported):
            lake.store.upload_part("a", upload_id, 1, part_bytes(9))
        lake.store.abort_multipart("a", upload_id)
        return
    first = lake.store.upload_part("a", upload_id, 1, part_bytes(9))
    lake.store.complete_multipart("a", upload_id, [first, second])
    assert read(lake.store, "a") == part_bytes(9) + b"tail"


@pytest.mark.parametrize("completed", [(1, 2), (2, 5)])
def test_parts_may_be_left_out_and_numbers_have_gaps(lake: Lake, completed: tuple[int, ...]) -> None:
    upload_id = lake.store.create_multipart("a")
    parts = {number: lake.store.upload_part("a", upload_id, number, part_bytes(number)) for number in (1, 2, 5)}
    chosen = [parts[number] for number in completed]
    if not lake.capabilities.parts_replaceable:
        with pytest.raises(StoreError):
            lake.store.complete_multipart("a", upload_id, chosen)
        lake.store.abort_multipart("a", upload_id)
        assert listed(lake.store) == {}
        return
    lake.store.complete_multipart("a", upload_id, chosen)
    assert read(lake.store, "a") == b"".join(part_bytes(number) for number in completed)


def test_complete_if_absent(lake: Lake) -> None:
    upload(lake, "new", [b"first"], if_absent=True)
    with pytest.raises(PreconditionFailed):
        upload(lake, "new", [b"second"], if_absent=True)
    assert read(lake.store, "new") == b"first"


def test_parts_copied_from_an_object(lake: Lake) -> None:
    source = lake.store.put("source", bytes(range(256)) * 30_000, metadata={"mode": "1"})
    upload_id = lake.store.create_multipart("target")
    if not lake.capabilities.part_copy:
        with pytest.raises(Unsupported):
            lake.store.upload_part_copy("target", upload_id, 1, "source", 0, PART_BYTES_MIN)
        lake.store.abort_multipart("target", upload_id)
        return
    first = lake.store.upload_part_copy("target", upload_id, 1, "source", 256, 256 + PART_BYTES_MIN, etag=source.etag)
    second = lake.store.upload_part("target", upload_id, 2, b"tail")
    assert (first.number, first.size) == (1, PART_BYTES_MIN)
    with pytest.raises(PreconditionFailed):
        lake.store.upload_part_copy("target", upload_id, 3, "source", 0, 10, etag="0" * 32)
    with pytest.raises(NotFound):
        lake.store.upload_part_copy("target", upload_id, 3, "no such", 0, 10)
    lake.store.complete_multipart("target", upload_id, [first, second])
    assert read(lake.store, "target") == (bytes(range(256)) * 30_000)[256 : 256 + PART_BYTES_MIN] + b"tail"


def test_unfinished_uploads_are_listed_until_aborted(lake: Lake) -> None:
    assert list(lake.store.list_multipart("")) == []
    began_ns = time.time_ns()
    uploads = {key: lake.store.create_multipart(key) for key in ("dir/a", "dir/b b+c", "other")}
    lake.store.upload_part("dir/a", uploads["dir/a"], 1, b"x")
    found = {upload.key: upload for upload in lake.store.list_multipart("dir/")}
    assert {key: upload.upload_id for key, upload in found.items()} == {
        key: uploads[key] for key in ("dir/a", "dir/b b+c")
    }
    if lake.name != "moto":  # whose uploads all began in 2010
        assert all(abs(upload.started_ns - began_ns) < 5_000_000_000 for upload in found.values())
    for key, upload_id in uploads.items():
        lake.store.abort_multipart(key, upload_id)
        lake.store.abort_multipart(key, upload_id)
    assert list(lake.store.list_multipart("")) == []
    assert listed(lake.store) == {}


def test_an_upload_that_is_gone_is_not_found(lake: Lake) -> None:
    upload_id = lake.store.create_multipart("a")
    part = lake.store.upload_part("a", upload_id, 1, b"x")
    lake.store.abort_multipart("a", upload_id)
    # moto fails with 500 where S3 says NoSuchUpload, which is worth a retry and then an error all the same.
    expected: tuple[type[StoreError], ...] = (NotFound, Unavailable) if lake.name == "moto" else (NotFound,)
    with pytest.raises(expected):
        lake.store.upload_part("a", upload_id, 1, b"x")
    with pytest.raises(expected):
        lake.store.complete_multipart("a", upload_id, [part])
    with pytest.raises(NotFound):
        lake.store.head("a")


def test_completing_with_a_part_never_uploaded_publishes_nothing(lake: Lake) -> None:
    upload_id = lake.store.create_multipart("a")
    part = lake.store.upload_part("a", upload_id, 1, part_bytes(1))
    never = type(part)(2, part.etag, 5)
    with pytest.raises(StoreError):
        lake.store.complete_multipart("a", upload_id, [part, never])
    with pytest.raises(NotFound):
        lake.store.head("a")
    lake.store.abort_multipart("a", upload_id)
