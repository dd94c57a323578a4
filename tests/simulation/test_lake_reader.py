"""The independent reader: it shows what a mount shows, refuses what the page refuses, and merges as the page says."""

from __future__ import annotations

import io
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack

from lakefs_fuse.admin.commands import run_gc
from lakefs_fuse.admin.gc import Collector
from lakefs_fuse.admin.repack import unpack
from lakefs_fuse.commits.index import levels
from lakefs_fuse.control.worker_protocol import GcArgs
from lakefs_fuse.store.protocol import Capabilities
from tests.admin.lakes import fold_all, headless, silent, work_of
from tests.memory_store import MemoryStore
from tests.simulation.lake_reader import Lake, Reader, StoredObject, read_lake
from tests.vfs import lakes
from tests.vfs.lakes import RENAME_EXCHANGE, Clock, two_lakes

NS = 1_000_000_000
START_S = 1_700_000_000
WRITER = "0badcafe"
Operation = list[Any]


def stored(store: MemoryStore) -> dict[str, StoredObject]:
    return {
        key: StoredObject(data, meta.etag, meta.mtime_ns, meta.metadata or {})
        for key, (data, meta) in store.objects.items()
    }


# -- beside the product


async def assert_shown_as_mounted(store: MemoryStore, directory: Path, clock: Clock) -> Lake:
    """A mount with an empty cache shows what the reader does: names, bytes, and the attributes that are set."""
    found = read_lake(stored(store), now_ns=clock())
    async with lakes.lake(store, directory, clock=clock) as node:
        tree = await node.tree()
        assert {path: name.data for path, name in found.names.items()} == {
            path: data.encode() if isinstance(data, str) else data for path, data in tree.items()
        }
        assert [path for path, name in found.names.items() if name.problem] == []
        for path, name in found.names.items():
            entry = await node.getattr(path)
            kind = "directory" if entry.is_dir else "symlink" if entry.is_symlink else "file"
            shown = {"mode": stat.S_IMODE(entry.mode), "uid": entry.uid, "gid": entry.gid, "mtime_ns": entry.mtime_ns}
            if entry.is_dir:  # names that come or go move it, and the reader shows what was set
                del shown["mtime_ns"]
            expected = {field: value for field in shown if (value := getattr(name, field)) is not None}
            assert (path, kind, shown | expected) == (path, name.kind, shown)
            assert (path, await node.xattrs(path)) == (path, dict(name.xattrs))
    assert found.refused == found.refused_indexes == {}
    return found


async def change_names(store: MemoryStore, clock: Clock, root: Path) -> None:
    """Every kind of change, by two nodes and by other clients."""
    for name in ("removed", "replaced", "deleted", "kept", "moved"):
        store.give(f"other/{name}", name.encode())
    for name in ("made", "shut"):
        store.give(f"{name}/" if store.capabilities.lists_markers else f"{name}/.lakefs-directory")
    clock.advance(10)
    async with two_lakes(store, root, clock=clock, pack="never") as (one, two):
        await one.write("plain", b"plain")
        await one.write("overwritten", b"first")
        await one.write("exchanged", b"one way")
        await one.mkdir("empty")
        await one.mkdir("gone")
        await one.symlink("link", "plain")
        await one.rename("other/moved", "moved")
        await one.unlink("other/removed")
        await one.rmdir("gone")
        await one.rmdir("shut")
        await one.sync()
        clock.advance(5)
        await two.poll()
        await two.write("overwritten", b"second")
        await two.mkdir("deep")
        await two.mkdir("deep/er")
        await two.write("deep/er/file", b"deep")
        await two.rename("deep", "elsewhere")
        await two.set_xattr("plain", "user.colour", b"blue")
        await two.setattr("plain", mode=0o600, mtime_ns=1_600_000_000 * NS + 7)
        await two.setattr("empty", mode=0o700)
        await two.sync()
    store.give("other/replaced", b"replaced")
    store.take("other/deleted")
    clock.advance(5)


async def pack_files(store: MemoryStore, clock: Clock, root: Path) -> None:
    """What `change_names` does, to packed files, and what others do to them."""
    store.give("other/packed-over", b"plain")
    clock.advance(10)
    async with two_lakes(store, root, clock=clock, pack="always") as (one, two):
        await one.mkdir("packed")
        await one.mkdir("packed/below")
        for name in ("a", "b", "c", "exchange", "hidden", "below/a", "below/b", "empty-file"):
            await one.write(f"packed/{name}", name.encode() * 50 if name != "empty-file" else b"")
        await one.write("other/packed-over", b"packed over a plain object")
        await one.rename("packed/b", "packed/renamed")
        await one.rename("packed/below", "packed/moved-below")
        await one.rename("packed/exchange", "packed/c", RENAME_EXCHANGE)
        await one.sync()
        clock.advance(5)
        await two.poll()
        await two.setattr("packed/a", mode=0o640)
        await two.unlink("packed/hidden")
        await two.write("packed/renamed", b"written again")
        await two.set_xattr("packed/c", "user.x", b"y")
        await two.rename("packed/moved-below/a", "packed/a-of-below")
        await two.sync()
    clock.advance(5)
    store.give("packed/moved-below/b", b"by another client")
    clock.advance(5)


Script = Callable[[MemoryStore, Clock, Path], Awaitable[None]]


@pytest.mark.parametrize("script", [change_names, pack_files])
@pytest.mark.parametrize("lists_markers", [True, False])
async def test_reader_beside_a_fresh_mount_shows_the_same(script: Script, lists_markers: bool, tmp_path: Path) -> None:
    store, clock = MemoryStore(Capabilities(name="memory", lists_markers=lists_markers)), Clock()
    await script(store, clock, tmp_path / "nodes")
    found = await assert_shown_as_mounted(store, tmp_path / "fresh", clock)
    assert found.unreferenced == []


async def test_reader_of_relocated_files_shows_them_at_their_new_place(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lakes.lake(store, tmp_path / "node", clock=clock, pack="never") as node:
        await node.write("old", b"bytes")
        await node.setattr("old", mode=0o600)
        await node.rename("old", "new")
        await node.sync()
        assert read_lake(stored(store)).names["new"].key == "old"
    async with headless(store, clock) as view:
        done = await unpack(view, "", packed=False, report=silent, note=lambda _: None)
        assert (done.files, done.left) == (1, 0)
    store.take("old")
    found = await assert_shown_as_mounted(store, tmp_path / "fresh", clock)
    assert (found.names["new"].key, found.names["new"].mode, found.leftovers) == ("new", 0o600, [])


async def test_reader_after_gc_shows_what_the_index_keeps(tmp_path: Path) -> None:
    """Packs are rewritten, commits deleted, and what they said of names is in the index alone."""
    store, clock = MemoryStore(), Clock()
    await change_names(store, clock, tmp_path / "one")
    await pack_files(store, clock, tmp_path / "two")
    clock.advance(86400)
    before = read_lake(stored(store))

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    async with headless(store, clock) as view:
        collector = Collector(view, GcArgs(grace_s=0), fold=partial(fold_all, view), report=silent, sleep=sleep)
        done = await collector.run()
    assert done.commits_deleted > 0
    found = await assert_shown_as_mounted(store, tmp_path / "collected", clock)
    assert {path: name.data for path, name in found.names.items()} == {
        path: name.data for path, name in before.names.items()
    }
    async with lakes.lake(store, tmp_path / "later", clock=clock, pack="always") as node:
        await node.write("packed/a", b"after the index")
        await node.unlink("plain")
        await node.sync()
    await assert_shown_as_mounted(store, tmp_path / "fresh", clock)


async def test_reader_after_gc_shows_what_levels_of_the_index_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base, and an increment with rows that changed and keys of rows that are deleted."""
    monkeypatch.setattr(levels, "BASE_SHARE", 4.0)
    store, clock = MemoryStore(), Clock()
    await change_names(store, clock, tmp_path / "one")
    for run in range(2):
        clock.advance(86400)
        await run_gc(work_of(store, clock, tmp_path, levels=True), GcArgs(grace_s=0))
        await assert_shown_as_mounted(store, tmp_path / f"fresh-{run}", clock)
        async with lakes.lake(store, tmp_path / f"later-{run}", clock=clock, pack="always") as node:
            await node.write("packed", b"%d" % run)
            await node.rename("packed", f"packed-{run}")
            if run:
                await node.unlink("packed-0")
            await node.sync()
    await run_gc(work_of(store, clock, tmp_path, levels=True), GcArgs(grace_s=0))
    manifest = msgpack.decode(
        max((key, data) for key, (data, _) in store.objects.items() if key.endswith("/manifest"))[1]
    )
    assert manifest["horizon"] > 0
    assert any(removed for _, _, removed in manifest["increments"])
    found = await assert_shown_as_mounted(store, tmp_path / "collected", clock)
    assert found.names["packed-1"].data == b"1"
    assert "packed-0" not in found.names


# -- archives by hand


def key_of(at_s: float, writer: str = WRITER) -> str:
    return f".lakefs/commits/{int((START_S + at_s) * NS):016x}-{writer}.zip"


def archive(
    at_s: float,
    *operations: Operation,
    members: Mapping[str, bytes] | None = None,
    objects: list[list[Any]] | None = None,
    record: Mapping[str, Any] | None = None,
    comment: bytes = b"lakefs1 %d %d %08x",
) -> bytes:
    """A commit made with `zipfile`. In an operation the name of a member stands for object, offset and size."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as pack:
        places: dict[str, list[int]] = {}
        for name, data in (members or {}).items():
            pack.writestr(name, data)
            places[name] = [0, target.tell() - len(data), len(data)]
        raw = msgpack.encode(
            {
                "format": 1,
                "writer": WRITER,
                "time": int((START_S + at_s) * NS),
                "objects": [["", "", 0], *(objects or [])],
                "moves": [],
                "operations": [
                    [part for field in operation for part in (places[field.name] if isinstance(field, M) else [field])]
                    for operation in operations
                ],
            }
            | dict(record or {})
        )
        pack.writestr(".lakefs/record", raw)
        pack.comment = comment % (target.tell() - len(raw), len(raw), zlib.crc32(raw))
    return target.getvalue()


class M:
    """The place of a member in the archive."""

    def __init__(self, name: str) -> None:
        self.name = name


def put(path: str, *place: Any, hides: str = "", mode: int = 0o644, mtime: int = 5) -> Operation:
    return ["put", path, *place, mode, 1, 2, mtime, hides]


def commit(at_s: float, *operations: Operation, writer: str = WRITER, **how: Any) -> dict[str, StoredObject]:
    record = {"writer": writer} | how.pop("record", {})
    key = key_of(at_s, writer)
    return {key: StoredObject(archive(at_s, *operations, record=record, **how), f"etag-{key}", 0)}


def plain(key: str, data: bytes, *, etag: str, at_s: float) -> dict[str, StoredObject]:
    return {key: StoredObject(data, etag, int((START_S + at_s) * NS))}


def shown(*objects: Mapping[str, StoredObject]) -> dict[str, bytes | None]:
    """The tree, the same in whatever order the objects come."""
    merged = {key: item for some in objects for key, item in some.items()}
    found = read_lake(merged)
    assert found.refused == {}
    return {path: name.data for path, name in found.names.items()}


# -- damage

GOOD: Operation = put("good", M("m"))
LONG = "x" * 256


@pytest.mark.parametrize(
    ("operation", "how", "reason"),
    [
        (GOOD, {"comment": b"lakefs2 %d %d %08x"}, "no comment"),
        (GOOD, {"comment": b"lakefs1 0%d %d %08x"}, "no comment"),
        (GOOD, {"comment": b"lakefs1 %d 9%d %08x"}, "not inside"),
        (GOOD, {"comment": b"lakefs1 9999%d %d %08x"}, "not inside"),
        (GOOD, {"record": {"format": 3}}, "format"),
        (GOOD, {"record": {"format": True}}, "format"),
        (GOOD, {"record": {"time": 7}}, "name"),
        (GOOD, {"record": {"writer": "00000000"}}, "name"),
        (GOOD, {"record": {"operations": None}}, "operations"),
        (GOOD, {"record": {"moves": [["a", "../b"]]}}, "not a path"),
        (GOOD, {"objects": [["a/../b", "e", 1]]}, "not a path"),
        (GOOD, {"objects": [[".lakefs/index/x", "e", 1]]}, "reserved"),
        (GOOD, {"objects": [["a", "\n", 1]]}, "ASCII"),
        (GOOD, {"objects": [["a", "e" * 1025, 1]]}, "ETag"),
        (GOOD, {"objects": [["a", "e", -1]]}, "limits"),
        (GOOD, {"record": {"objects": [["a", "", 0]]}}, "first object"),
        (["rename", "a", "b"], {}, "kind"),
        ([], {}, "kind"),
        (put("a//b", M("m")), {}, "not a path"),
        (put("a/./b", M("m")), {}, "not a path"),
        (put("a/..", M("m")), {}, "not a path"),
        (put("a\0b", M("m")), {}, "not a path"),
        (put("", M("m")), {}, "not a path"),
        (put("/a", M("m")), {}, "not a path"),
        (put(LONG, M("m")), {}, "not a path"),
        (put("/".join([LONG[:200]] * 6), M("m")), {}, "too long"),
        (put(".lakefs", M("m")), {}, "reserved"),
        (put(".lakefs/x", M("m")), {}, "reserved"),
        (put("a", M("m"), mode=0o10000), {}, "limits"),
        (put("a", 1, 0, 1), {}, "no object"),
        (put("a", -2, 0, 1), {}, "limits"),
        (put("a", -1, 1, 1, hides="e"), {}, "begins at 0"),
        (put("a", 0, 0, 1 << 20), {}, "beyond"),
        (put("a", 1, 5, 6), {"objects": [["b", "e", 10]]}, "beyond"),
        (put("a", M("m"))[:-2], {}, "missing"),
        ([*put("a", M("m")), {"user.lakefs.x": b""}], {}, "not allowed"),
        ([*put("a", M("m")), {"trusted.x": b""}], {}, "not allowed"),
        ([*put("a", M("m")), {"user." + LONG: b""}], {}, "too long"),
        ([*put("a", M("m")), {"user.x": b"x" * 65536}], {}, "too large"),
        ([*put("a", M("m")), {"user.x": "text"}], {}, "bytes"),
        (["symlink", "a", "x" * 4096, 1, 2, 3], {}, "target"),
        (["symlink", "a", "", 1, 2, 3], {}, "target"),
        (["remove", "a", 1], {}, "bool"),
    ],
)
def test_damaged_commit_is_refused_as_a_whole(operation: Operation, how: dict[str, Any], reason: str) -> None:
    damaged = commit(2, ["mkdir", "before", 0, 0, 0, 0], operation, members={"m": b"bytes"}, **how)
    found = read_lake(damaged | commit(1, GOOD, members={"m": b"old"}))
    assert list(found.refused) == [key_of(2)]
    assert reason in found.refused[key_of(2)]
    assert {path: name.data for path, name in found.names.items()} == {"good": b"old"}


@pytest.mark.parametrize("changed", ["record", "truncated", "empty", "under another name"])
def test_damaged_archive_is_refused(changed: str) -> None:
    ((key, item),) = commit(1, GOOD, members={"m": b"bytes"}).items()
    data = bytearray(item.data)
    if changed == "record":
        data[data.index(b"operations")] ^= 1
    elif changed == "truncated":
        data = data[:-1]
    elif changed == "empty":
        data.clear()
    else:
        key = key_of(3)
    assert list(read_lake({key: StoredObject(bytes(data), "e", 0)}).refused) == [key]


def test_other_keys_among_commits_are_ignored() -> None:
    keys = (".lakefs/commits/x", ".lakefs/commits/4000000000000001-00000000.zip", ".lakefs/commits/a/b.zip")
    assert read_lake({key: StoredObject(b"", "e", 0) for key in keys}) == Lake()


def test_commit_ahead_of_the_clock_is_postponed() -> None:
    objects = commit(100, GOOD, members={"m": b"bytes"})
    assert read_lake(objects, now_ns=(START_S + 39) * NS).postponed == [key_of(100)]
    assert "good" in read_lake(objects, now_ns=(START_S + 40) * NS).names


def test_file_with_damaged_bytes_has_a_problem() -> None:
    ((key, item),) = commit(1, GOOD, put("other", M("n")), members={"m": b"bytes", "n": b"whole"}).items()
    names = read_lake({key: StoredObject(item.data.replace(b"bytes", b"bites"), "e", 0)}).names
    assert (names["good"].data, names["other"].data) == (None, b"whole")
    assert "CRC-32" in names["good"].problem


def test_lake_with_unknown_features_is_refused() -> None:
    with pytest.raises(Exception, match="features"):
        read_lake({".lakefs/lake": StoredObject(b'{"format": 1, "features_to_read": ["x"]}', "e", 0)})


# -- merging


def test_newest_commit_of_a_path_wins() -> None:
    old, new = (commit(at, put("a", M("m")), members={"m": b"%d" % at}) for at in (1, 2))
    assert shown(old, new) == shown(new, old) == {"a": b"2"}


def test_commit_with_the_same_time_wins_by_its_name() -> None:
    some = [commit(1, put("a", M("m")), members={"m": by.encode()}, writer=by * 8) for by in "ab"]
    assert shown(*some) == shown(*reversed(some)) == {"a": b"b"}


def test_later_operation_of_a_commit_wins() -> None:
    members = {"m": b"1", "n": b"2"}
    assert shown(commit(1, put("a", M("m")), ["remove", "a"], put("a", M("n")), members=members)) == {"a": b"2"}
    assert shown(commit(1, put("a", M("m")), put("a", M("n")), ["remove", "a"], members=members)) == {}


@pytest.mark.parametrize(
    ("etag", "at_s", "expected"),
    [
        ("known", 0, b"packed"),
        ("known", 100, b"packed"),
        ("other", 9.5, b"packed"),
        ("other", 9.6, b"plain"),
        ("other", 10.2, b"plain"),
    ],
)
def test_plain_object_beside_a_put_wins_if_unknown_and_not_older(etag: str, at_s: float, expected: bytes) -> None:
    packed = commit(10.5, put("a", M("m"), hides="known"), members={"m": b"packed"})
    assert shown(packed, plain("a", b"plain", etag=etag, at_s=at_s)) == {"a": expected}


@pytest.mark.parametrize(
    ("etag", "at_s", "is_shown"),
    [("known", 0, False), ("known", 12.4, False), ("known", 12.5, True), ("other", 9, True), ("other", 10, True)],
)
def test_plain_object_after_its_removal_is_shown_two_seconds_later(etag: str, at_s: float, is_shown: bool) -> None:
    found = read_lake(commit(10.5, ["remove", "a", False, "known"]) | plain("a", b"plain", etag=etag, at_s=at_s))
    assert ("a" in found.names, found.leftovers) == (is_shown, [] if is_shown else ["a"])


def test_plain_object_that_a_commit_names_is_the_file() -> None:
    own = commit(1, put("a", -1, 0, 5, hides="e", mode=0o600))
    found = read_lake(own | plain("a", b"plain", etag="e", at_s=0))
    assert (found.names["a"].data, found.names["a"].mode) == (b"plain", 0o600)
    assert found.named_objects == {("a", "e")}
    assert shown(own) == {}
    assert shown(own, plain("a", b"another", etag="f", at_s=-100)) == {"a": b"another"}


def test_renamed_plain_object_is_named_at_its_old_key() -> None:
    operations = put("new", 1, 0, 5), ["remove", "old", False, "e"]
    found = read_lake(commit(1, *operations, objects=[["old", "e", 5]]) | plain("old", b"plain", etag="e", at_s=0))
    assert {path: name.data for path, name in found.names.items()} == {"new": b"plain"}
    assert (found.leftovers, found.named_objects) == ([], {("old", "e")})


@pytest.mark.parametrize(("etag", "problem"), [(None, "gone"), ("other", "another version")])
def test_renamed_plain_object_that_is_lost_is_a_problem(etag: str | None, problem: str) -> None:
    renamed = commit(10, put("new", 1, 0, 5), objects=[["old", "e", 5]])
    name = read_lake(renamed | (plain("old", b"x", etag=etag, at_s=0) if etag else {})).names["new"]
    assert name.data is None
    assert problem in name.problem


@pytest.mark.parametrize(("replaces", "is_later"), [("e,", True), ("d", True), ("", False), ("d,", False)])
def test_later_version_of_a_renamed_object_is_not_what_took_its_name(replaces: str, is_later: bool) -> None:
    operations = put("new", 1, 0, 5), put("old", M("m"), hides="e")
    renamed = commit(10, *operations, objects=[["old", "e", 5]], members={"m": b"packed"})
    metadata = {"lakefs-replaces": replaces} if replaces else {}
    there = {"old": StoredObject(b"plain", "f", (START_S + 12) * NS, metadata)}
    assert read_lake(renamed | there).names["old"].data == (b"packed" if is_later else b"plain")


@pytest.mark.parametrize("removed_at_s", [None, 15, 25])
def test_other_bytes_of_a_renamed_object_count_for_that_version_alone(removed_at_s: int | None) -> None:
    renamed = commit(10, put("new", 1, 0, 5), objects=[["old", "e", 5]])
    replaced = [*put("new", 2, 0, 3, mode=0o600), {}, 1]
    later = commit(20, replaced, ["remove", "old", False, "f"], objects=[["old", "e", 5], ["old", "f", 3]])
    removed = (
        {} if removed_at_s is None else commit(removed_at_s, ["remove", "new", False, "", True], writer="0badcafe")
    )
    name = read_lake(renamed | later | removed | plain("old", b"abc", etag="f", at_s=12)).names.get("new")
    assert (name and (name.data, name.mode)) == (None if removed else (b"abc", 0o600))


def test_setattr_changes_the_version_that_it_names() -> None:
    changed = ["setattr", "a", -1, 0, 5, "e", 0o600, 7, 8, 9, {"user.x": b"y"}]
    first, second = (read_lake(commit(1, changed) | plain("a", b"x", etag=etag, at_s=5)).names["a"] for etag in "ef")
    assert (first.mode, first.uid, first.gid, first.mtime_ns, first.xattrs) == (0o600, 7, 8, 9, {"user.x": b"y"})
    assert (second.mode, second.data) == (None, b"x")


def test_setattr_does_not_change_the_time_of_a_name() -> None:
    packed = commit(1, put("a", M("m")), members={"m": b"packed"})
    where = read_lake(packed).names["a"]
    later = commit(9, ["setattr", "a", 1, where.offset, 6, "", 0o600, 1, 2, 3], objects=[[where.key, where.etag, 1000]])
    assert read_lake(packed | later).names["a"].mode == 0o600
    assert shown(packed, later, plain("a", b"plain", etag="e", at_s=5)) == {"a": b"plain"}


def test_relocate_moves_the_bytes_that_it_names_and_keeps_attributes() -> None:
    packed = commit(1, put("a", M("m"), mode=0o600), members={"m": b"bytes"})
    offset = read_lake(packed).names["a"].offset

    def moved(at_s: float, offset: int) -> dict[str, StoredObject]:
        operation = ["relocate", "a", 1, offset, "", M("m"), 0o777, 1, 2, 3]
        return commit(at_s, operation, members={"m": b"bytes"}, objects=[[key_of(1), "", 1000]])

    name = read_lake(packed | moved(2, offset)).names["a"]
    assert (name.key, name.data, name.mode) == (key_of(2), b"bytes", 0o600)
    assert read_lake(packed | moved(2, offset + 1)).names["a"].key == key_of(1)
    assert shown(packed, moved(2, offset), plain("a", b"plain", etag="e", at_s=1)) == {"a": b"plain"}


def test_relocated_plain_object_is_older_than_every_commit() -> None:
    moved = commit(5, ["relocate", "a", -1, 0, "e", M("m"), 0o600, 1, 2, 3, "e"], members={"m": b"moved"})
    assert shown(moved) == shown(moved, plain("a", b"moved", etag="e", at_s=0)) == {"a": b"moved"}
    assert shown(moved, plain("a", b"other", etag="f", at_s=0)) == {"a": b"other"}
    assert shown(moved, commit(6, ["remove", "a", False, "e"])) == {}
    removed = commit(1, ["remove", "a", False, "d"])
    assert shown(removed, moved, plain("a", b"removed", etag="d", at_s=0)) == {"a": b"moved"}


def test_plain_object_that_was_relocated_before_a_commit_named_it_stays_relocated() -> None:
    moved = commit(5, ["relocate", "a", -1, 0, "e", M("m"), 0o600, 1, 2, 3, "e"], members={"m": b"moved"})
    named = commit(6, put("a", -1, 0, 5, hides="e"))
    there = plain("a", b"moved", etag="e", at_s=0)
    assert shown(moved, named) == shown(moved, named, there) == {"a": b"moved"}
    removed = commit(1, ["remove", "a", False, "", True])
    assert shown(removed, moved, named) == {"a": b"moved"}


def test_relocated_plain_object_that_was_put_in_place_of_another() -> None:
    moved = commit(5, ["relocate", "a", -1, 0, "e", M("m"), 0o600, 1, 2, 3, "e"], members={"m": b"moved"})
    assert shown(commit(1, put("a", -1, 0, 5, hides="d")), moved) == {"a": b"moved"}
    assert shown(commit(1, put("a", -1, 0, 5, hides="d")), moved, commit(6, put("a", -1, 0, 5, hides="e"))) == {
        "a": b"moved"
    }
    later = commit(6, put("a", -1, 0, 5, hides="d"))
    assert shown(moved, later, plain("a", b"later", etag="d", at_s=0)) == {"a": b"later"}


def test_directory_exists_by_commit_marker_or_content() -> None:
    objects = commit(
        1, ["mkdir", "made", 0o700, 1, 2, 3], ["mkdir", "removed", 0, 0, 0, 0], ["remove", "removed", True]
    )
    objects |= commit(
        2, ["mkdir", "kept", 0, 0, 0, 0], put("kept/a", M("m")), ["remove", "kept", True], members={"m": b""}
    )
    for key in ("marker/", "placeholder/.lakefs-directory", "deep/er/file"):
        objects |= plain(key, b"", etag="e", at_s=0)
    found = read_lake(objects)
    directories = {path for path, name in found.names.items() if name.kind == "directory"}
    assert directories == {"made", "kept", "marker", "placeholder", "deep", "deep/er"}
    assert (found.names["made"].mode, found.names["kept"].mode) == (0o700, None)
    assert {path for path, name in found.names.items() if name.kind == "file"} == {"kept/a", "deep/er/file"}


def test_directory_hides_a_file_of_the_same_path() -> None:
    found = read_lake(
        commit(1, put("a", M("m")), ["mkdir", "a", 0, 0, 0, 0], members={"m": b"bytes"})
        | plain("b", b"file", etag="e", at_s=0)
        | plain("b/c", b"below", etag="f", at_s=0)
    )
    assert {path: name.kind for path, name in found.names.items()} == {
        "a": "directory",
        "b": "directory",
        "b/c": "file",
    }
    assert {path: name.data for path, name in found.hidden_files.items()} == {"a": b"bytes", "b": b"file"}
    assert found.unshown == {"b": "conflict"}
    assert ("b", "e") in found.named_objects


@pytest.mark.parametrize(
    ("key", "reason", "directories"),
    [
        ("a//b", "component", ["a"]),
        ("a//", "component", ["a"]),
        ("/a", "component", []),
        ("/", "component", []),
        ("b/a/../c", "component", ["b", "b/a"]),
        ("a/\0", "nul", ["a"]),
        (LONG, "long", []),
        (f"a/{LONG}/b", "long", ["a"]),
        (".lakefs", "reserved", []),
        ("a/.lakefs-directory/b", "reserved", ["a"]),
    ],
)
async def test_key_that_cannot_be_a_path_is_not_shown(
    key: str, reason: str, directories: list[str], tmp_path: Path
) -> None:
    """The directory above what is wrong with it is."""
    store, clock = MemoryStore(), Clock()
    store.give(key, b"bytes")
    found = await assert_shown_as_mounted(store, tmp_path, clock)
    assert (sorted(found.names), found.unshown) == (directories, {key: reason})


def test_objects_that_nothing_names_are_reported() -> None:
    objects = plain(".lakefs/objects/used", b"large", etag="e", at_s=0) | plain(
        ".lakefs/objects/x", b"", etag="f", at_s=0
    )
    found = read_lake(objects | commit(1, put("a", 1, 0, 5), objects=[[".lakefs/objects/used", "e", 5]]))
    assert (found.names["a"].data, found.unreferenced) == (b"large", [".lakefs/objects/x"])


def test_member_beyond_four_gib_of_header_is_read_by_its_zip64_size() -> None:
    """A size of 0xFFFFFFFF in the local header stands for the one of the extra field."""
    ((key, item),) = commit(1, GOOD, members={"m" * 40: b"bytes", "m": b"bytes"}).items()
    data = bytearray(item.data)
    extra = struct.pack("<HHQQ", 1, 16, 5, 5)
    struct.pack_into("<II", data, 18, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<HH", data, 26, 20, len(extra))
    data[50:70] = extra
    assert read_lake({key: StoredObject(bytes(data), "e", 0)}).names["good"].data == b"bytes"


def test_reader_with_300_known_commits_answers_in_milliseconds() -> None:
    objects: dict[str, StoredObject] = {}
    for number in range(300):
        objects |= commit(
            number, put(f"d/{number % 90}", M("m"), hides="x"), ["remove", f"r/{number}"], members={"m": b"x" * 2000}
        )
    for number in range(100):
        objects |= plain(f"p/{number}", b"plain", etag="e", at_s=number)
    reader = Reader()
    reader.read_lake(objects)
    took = []
    for _ in range(3):
        began = time.process_time()
        reader.read_lake(objects)
        took.append(time.process_time() - began)
    assert min(took) < 0.05, took
