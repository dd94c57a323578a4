"""What is particular to the local directory store: plain files, directories, links, durability of names."""

from __future__ import annotations

import errno
import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.errors import (
    AccessDenied,
    KeyRefused,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreFull,
    Unavailable,
)
from lakefs_fuse.store.local import list_pages
from lakefs_fuse.store.local.store import LocalStore
from lakefs_fuse.store.local.tree import TMP_AGE_S_MAX, LocalTree
from tests.fakes import local_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "lake"
    directory.mkdir()
    return directory


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(str(root), random.Random(1), SystemClock())


def keys(store: LocalStore, prefix: str = "", keys_max: int = 1000) -> list[str]:
    found: list[str] = []
    token = None
    while True:
        page = store.list_page(prefix, token=token, keys_max=keys_max)
        found += [meta.key for meta in page.objects]
        token = page.next_token
        if token is None:
            return found


def test_objects_are_files_and_files_are_objects(store: LocalStore, root: Path) -> None:
    store.put("dir/a", b"put", metadata={"mode": "33188"})
    assert (root / "dir/a").read_bytes() == b"put"
    (root / "dir/b").write_bytes(b"written")
    assert bytes(store.get("dir/b", 0, 100).data) == b"written"
    assert store.head("dir/b").metadata == {}
    assert keys(store) == ["dir/a", "dir/b"]
    assert not any((root / ".lakefs/tmp").iterdir())


@pytest.mark.parametrize("is_there", [False, True])
def test_root_whose_disk_is_not_mounted_is_away_until_it_is_back(store: LocalStore, root: Path, is_there: bool) -> None:
    """Below its mountpoint is nothing, or another directory, which gets no file and whose names are not the lake's."""
    store.put("a", b"put")
    upload_id = store.create_multipart("b")
    root.rename(root.with_name("elsewhere"))
    if is_there:
        root.mkdir()
    operations: tuple[Callable[[], object], ...] = (
        lambda: store.get("a", 0, 3),
        lambda: store.head("a"),
        lambda: store.put("new", b"put"),
        lambda: store.put("marker/", b""),
        lambda: store.delete("a"),
        lambda: store.delete_many(["a"]),
        lambda: store.copy("a", "new"),
        lambda: store.list_page(""),
        lambda: store.list_page("", delimiter="/"),
        lambda: store.create_multipart("new"),
        lambda: store.upload_part("b", upload_id, 1, b"x"),
        lambda: store.complete_multipart("b", upload_id, []),
        lambda: store.abort_multipart("b", upload_id),
        lambda: store.list_multipart(""),
    )
    for operation in operations:
        with pytest.raises(Unavailable, match="mount its disk again"):
            operation()
    if is_there:
        root.rmdir()  # it is empty
    assert not root.exists()
    root.with_name("elsewhere").rename(root)
    assert (keys(store), [upload.key for upload in store.list_multipart("")]) == (["a"], ["b"])


def test_listing_between_whose_pages_the_root_goes_is_not_believed(store: LocalStore, root: Path) -> None:
    """What is left of it would say that the other names were removed."""
    for name in ("a/1", "b/1", "c/1"):
        store.put(name, b"x")
    token = store.list_page("", keys_max=1).next_token
    root.rename(root.with_name("elsewhere"))
    with pytest.raises(Unavailable):
        store.list_page("", token=token)
    root.with_name("elsewhere").rename(root)
    assert [meta.key for meta in store.list_page("", token=token).objects] == ["b/1", "c/1"]


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, StoreError), (errno.ESTALE, Unavailable)])
def test_listing_of_a_file_that_the_disk_tells_nothing_of_fails(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StoreError]
) -> None:
    """Without it, it would seem to have been removed."""
    store.put("a", b"x")
    store.put("b", b"x")
    lstat = os.lstat

    def failing(path: str) -> os.stat_result:
        if path == f"{root}/a":
            raise OSError(code, os.strerror(code))
        return lstat(path)

    monkeypatch.setattr(os, "lstat", failing)
    with pytest.raises(kind):
        store.list_page("")


def test_a_file_written_in_place_is_another_version_without_metadata(store: LocalStore, root: Path) -> None:
    old = store.put("a", b"old", metadata={"mode": "33188"})
    (root / "a").write_bytes(b"new")
    head = store.head("a")
    assert head.etag != old.etag
    assert head.metadata == {}
    with pytest.raises(PreconditionFailed):
        store.get("a", 0, 3, etag=old.etag)


def test_versions_put_in_a_hurry_differ(store: LocalStore) -> None:
    etags = {store.put("a", b"same size").etag for _ in range(50)}
    assert len(etags) == 50


def test_an_object_cannot_be_a_directory_too(store: LocalStore, root: Path) -> None:
    store.put("a", b"file")
    store.put("d/file", b"file")
    refused: list[Callable[[], object]] = [
        lambda: store.put("a/b", b""),
        lambda: store.put("a/", b""),
        lambda: store.put("d", b""),
        lambda: store.put("d", b"", if_absent=True),
        lambda: store.copy("a", "d"),
        lambda: store.copy("d/file", "a/b/c"),
    ]
    for call in refused:
        with pytest.raises(KeyRefused):
            call()
    upload_id = store.create_multipart("d")
    part = store.upload_part("d", upload_id, 1, b"x")
    with pytest.raises(KeyRefused):
        store.complete_multipart("d", upload_id, [part])
    assert keys(store) == ["a", "d/file"]
    assert not any((root / ".lakefs/tmp").iterdir())


@pytest.mark.parametrize(
    "key",
    [
        "a//b",
        "/a",
        "./a",
        "a/../b",
        "..",
        ".",
        "a/./b",
        "nul\0",
        "x" * 256,
        "\udcff",
        ".lakefs/tmp/x",
        ".lakefs/uploads/x",
    ],
)
def test_keys_that_cannot_be_paths(store: LocalStore, key: str) -> None:
    with pytest.raises(KeyRefused):
        store.put(key, b"")
    with pytest.raises(KeyRefused):
        store.create_multipart(key)
    with pytest.raises(NotFound):
        store.get(key, 0, 1)
    with pytest.raises(NotFound):
        store.head(key)
    store.delete(key)
    assert list(store.list_page(key).objects) == []


@pytest.mark.parametrize("removed", [["above/dir/a"], ["above/marked/"]])
def test_a_directory_that_is_about_to_go_is_no_object(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch, removed: list[str]
) -> None:
    """Neither for who looks right then, nor where the process ends right then."""
    seen: list[list[str]] = []
    store.put(removed[0], b"")
    rmdir = os.rmdir

    def seeing(path: str) -> None:
        seen.append(keys(store))
        with pytest.raises(NotFound):
            store.head(f"{Path(path).relative_to(root)}/")
        rmdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", seeing)
        store.delete(removed[0])
    assert seen == [[], []]
    assert not (root / "above").exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda _: None)
        store.put(removed[0], b"")
        store.delete_many(removed)
    assert keys(store) == []
    store.put("above/dir/b", b"")
    assert keys(store) == ["above/dir/b"]


def test_a_directory_that_stayed_is_an_object_when_others_empty_it(store: LocalStore, root: Path) -> None:
    for key in ("above/dir/a", "above/dir/b", "marked/", "marked/c"):
        store.put(key, b"")
    store.delete("above/dir/a")
    store.delete("marked/")
    (root / "above/dir/b").unlink()
    (root / "marked/c").unlink()
    assert keys(store) == ["above/dir/", "marked/"]
    (root / "above/dir").rmdir()
    assert keys(store) == ["above/", "marked/"]


def test_empty_directories_are_objects(store: LocalStore, root: Path) -> None:
    (root / "made/by/hand").mkdir(parents=True)
    assert keys(store) == ["made/by/hand/"]
    assert store.head("made/by/hand/").size == 0
    assert list(store.list_page("", delimiter="/").prefixes) == ["made/"]
    store.put("dir/", b"", metadata={"mode": "16877"})
    with pytest.raises(KeyRefused):
        store.put("dir/", b"bytes")
    with pytest.raises(PreconditionFailed):
        store.put("dir/", b"", if_absent=True)
    store.put("dir/x", b"")
    assert keys(store) == ["dir/", "dir/x", "made/by/hand/"]
    store.copy("dir/", "copied/")
    assert store.head("copied/").metadata == {"mode": "16877"}
    store.delete("dir/")
    assert keys(store) == ["copied/", "dir/x", "made/by/hand/"]
    assert (root / "dir/x").exists(), "a directory that holds something is never removed"


def test_directories_deeper_than_the_stack_are_listed(store: LocalStore, root: Path) -> None:
    depth = sys.getrecursionlimit() + 200
    directory = root
    for _ in range(depth):
        directory = directory / "d"
        directory.mkdir()
    (directory / "f").touch()
    (root / "d/a").touch()
    (root / "e").touch()
    deep = "d/" * depth + "f"
    assert keys(store) == ["d/a", deep, "e"]
    assert keys(store, keys_max=1) == ["d/a", deep, "e"]
    assert [meta.key for meta in store.list_page("", start_after="d/b").objects] == [deep, "e"]
    (root / deep).unlink()
    (root / "d/a").unlink()
    os.removedirs(directory)  # rmtree would be as deep


def test_directories_go_with_their_last_file_unless_made(store: LocalStore, root: Path) -> None:
    store.put("kept/", b"")
    store.put("kept/a/b/c", b"")
    store.delete("kept/a/b/c")
    assert not (root / "kept/a").exists()
    assert (root / "kept").is_dir()
    store.put("x/y/z", b"")
    store.put("x/w", b"")
    store.delete_many(["x/y/z"])
    assert (root / "x").is_dir() and not (root / "x/y").exists()
    store.delete_many(["x/w", "kept/"])
    assert sorted(entry.name for entry in root.iterdir()) == [".lakefs"]


def test_what_is_no_regular_file_is_no_object(store: LocalStore, root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    (root / "dir").mkdir()
    (root / "dir/file").write_text("inside")
    (root / "escape").symlink_to(tmp_path / "secret")
    (root / "inside").symlink_to("dir/file")
    (root / "dangling").symlink_to("nowhere")
    (root / "linked-dir").symlink_to("dir")
    (root / "linked-out").symlink_to(tmp_path)
    os.mkfifo(root / "fifo")
    (root / ".lakefs/tmp").mkdir(parents=True)
    (root / ".lakefs/tmp/half").write_text("unfinished")
    (root / "internal").symlink_to(".lakefs/tmp/half")
    (root / "device").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "sock"))
        Path(os.fsdecode(os.fsencode(root) + b"/bad\xff")).write_text("")
        assert keys(store) == ["dir/file", "inside"]
        assert list(store.list_page("", delimiter="/").prefixes) == ["dir/"]
        assert bytes(store.get("inside", 0, 9).data) == b"inside"
        for key in ("escape", "dangling", "linked-dir/file", "linked-out/secret", "fifo", "sock", "internal", "device"):
            with pytest.raises(NotFound):
                store.get(key, 0, 1)
            with pytest.raises(NotFound):
                store.head(key)
        for prefix in ("linked-dir/", "linked-out/", "../"):
            assert list(store.list_page(prefix).objects) == []
        for key in ("linked-dir/new", "linked-out/new"):
            with pytest.raises(KeyRefused):
                store.put(key, b"")
        store.delete("linked-out/secret")
        store.delete("linked-dir/file")
    assert (tmp_path / "secret").read_text() == "outside"
    assert (root / "dir/file").exists()
    store.put("escape", b"replaced")
    assert (tmp_path / "secret").read_text() == "outside"
    assert bytes(store.get("escape", 0, 99).data) == b"replaced"


ORDER = ["a", "a!", "a-b", "a-b/c", "a.d/", "a/b", "a/b/c", "a0", "b/c/d", "b/c0", "zz", "é/ü", "日/本", "\U0001f600"]


@pytest.mark.parametrize("keys_max", [1, 2, 3, 5, 1000])
def test_order_is_that_of_the_bytes(store: LocalStore, keys_max: int) -> None:
    put = [key for key in ORDER if key not in ("a", "a/b", "a-b")]
    for key in put:
        store.put(key, b"")
    store.put("a/x/", b"")
    expected = sorted([*put, "a/x/"], key=str.encode)
    assert keys(store, keys_max=keys_max) == expected
    for after in [*expected, "a", "a/", "b/c", "zzz"]:
        page = store.list_page("", start_after=after, keys_max=keys_max)
        assert [meta.key for meta in page.objects] == [key for key in expected if key.encode() > after.encode()][
            :keys_max
        ]


@pytest.mark.parametrize("delimiter", ["", "/"])
def test_listing_goes_on_in_another_process_and_in_bounded_memory(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch, delimiter: str
) -> None:
    for number in range(120):
        (root / f"d{number % 40:02d}").mkdir(exist_ok=True)
        (root / f"d{number % 40:02d}" / f"{number}").write_text("")
        (root / f"f{number:03d}").write_text("")
    expected = keys(store)
    assert len(expected) == 240
    monkeypatch.setattr(list_pages, "NAMES_MAX", 7)
    for forget in (False, True):
        seen: list[str] = []
        token = None
        while True:
            page = store.list_page("", delimiter=delimiter, token=token, keys_max=11)
            seen += sorted([*(meta.key for meta in page.objects), *page.prefixes])
            token = page.next_token
            if token is None:
                break
            if forget:
                store = local_store(str(root))
        top = sorted({key if "/" not in key else key.split("/")[0] + "/" for key in expected})
        assert seen == (top if delimiter else expected)


def test_metadata_too_large_for_any_store_is_refused(store: LocalStore) -> None:
    with pytest.raises(StoreError, match="2048"):
        store.put("a", b"", metadata={"x": "y" * 3000})
    assert keys(store) == []


def test_leftovers_of_a_crash_go_after_a_day(root: Path) -> None:
    tmp = root / ".lakefs/tmp"
    tmp.mkdir(parents=True)
    for name, age_s in (("old", TMP_AGE_S_MAX + 60), ("young", 60)):
        (tmp / name).write_text("")
        stamp = (tmp / name).stat().st_mtime - age_s
        os.utime(tmp / name, (stamp, stamp))
    local_store(str(root))
    assert [entry.name for entry in tmp.iterdir()] == ["young"]


def test_an_upload_survives_the_process(store: LocalStore, root: Path) -> None:
    upload_id = store.create_multipart("dir/a", metadata={"mode": "1"})
    parts = [store.upload_part("dir/a", upload_id, number, b"x" * number) for number in (1, 2)]
    again = local_store(str(root))
    assert [upload.upload_id for upload in again.list_multipart("dir/")] == [upload_id]
    assert again.complete_multipart("dir/a", upload_id, parts).size == 3
    assert again.head("dir/a").metadata == {"mode": "1"}
    assert list((root / ".lakefs/uploads").iterdir()) == []
    for wrong in ("../../dir", "", "0" * 32):
        with pytest.raises(NotFound):
            again.upload_part("dir/a", wrong, 1, b"")
        again.abort_multipart("dir/a", wrong)
    assert (root / "dir/a").exists()


def test_writers_and_deleters_of_one_directory(store: LocalStore) -> None:
    """A directory is pruned and made again all the time; no put may fail or be lost."""
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(60):
                store.put(f"dir/sub/{name}", b"x")
                store.delete(f"dir/sub/{name}")
            store.put(f"dir/sub/{name}", b"last")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert keys(store) == [f"dir/sub/{number}" for number in range(4)]


def test_a_full_disk_is_told_apart(store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full answers every write as a full disk does."""
    full = os.open("/dev/full", os.O_WRONLY)
    temporary = str(root / ".lakefs/never")
    monkeypatch.setattr(LocalTree, "new_temporary", lambda _: (full, temporary))
    with pytest.raises(StoreFull):
        store.put("a", b"x")
    assert keys(store) == []


def test_what_may_not_be_read_is_denied(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", b"x")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lakefs_fuse.store.local.tree.os.open", refuse)
    with pytest.raises(AccessDenied, match="owner and mode"):
        store.get("a", 0, 1)
