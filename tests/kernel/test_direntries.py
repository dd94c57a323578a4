"""The C library that writes directory entries: byte for byte what the kernel expects of them."""

from __future__ import annotations

import ctypes
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefs_fuse.kernel import readdir
from lakefs_fuse.kernel.native import hooks
from lakefs_fuse.meta.entry import HEAD, UNSET, Entry, Flag
from lakefs_fuse.meta.tree import pack_entry, unpack_entry
from lakefs_fuse.vfs.namespace.metadata_fetch import is_unasked
from tests.tiers import examples

NATIVE = Path(__file__).parents[2] / "lakefs_fuse" / "kernel" / "native"
DIRENTPLUS = struct.Struct("<QQQQIIQQQQQQIIIIIIIIIIQQII")
"""struct fuse_entry_out with its struct fuse_attr, then struct fuse_dirent, as linux/fuse.h has them."""
SHOWN = readdir.Defaults(11, 12, 0o40755, 0o644, 0o600, 1 << 20, 1 << 17)
NS = 1_000_000_000
PARENT = 77


def prefix_of(parent: int) -> bytes:
    return b"D" + parent.to_bytes(8, "big")


def item(entry: Entry) -> tuple[bytes, bytes]:
    return prefix_of(entry.parent) + entry.cookie.to_bytes(8, "big"), pack_entry(entry)


def expected(entry: Entry, timeout_s: float) -> bytes:
    mode = entry.mode
    if mode == UNSET:
        mode = 0o755 if entry.is_dir else 0o600 if is_unasked(entry) else 0o644
    blksize = SHOWN.dir_blksize if entry.is_dir else SHOWN.file_blksize
    uid, gid = (given if given != UNSET else default for given, default in ((entry.uid, 11), (entry.gid, 12)))
    mtime, ctime = (divmod(ns, NS) for ns in (entry.mtime_ns, entry.ctime_ns))
    seconds = [value % (1 << 64) for value in (mtime[0], mtime[0], ctime[0])]
    head = DIRENTPLUS.pack(
        entry.inode, 0, *[int(timeout_s)] * 2, *[int((timeout_s - int(timeout_s)) * 1e9)] * 2,
        entry.inode, entry.size, -(-entry.size // 512), *seconds, mtime[1], mtime[1], ctime[1],
        entry.file_type | mode, 1, uid, gid, 0, blksize, 0,
        entry.inode, entry.cookie, len(entry.name), stat.S_IFMT(entry.file_type) >> 12,
    )  # fmt: skip
    return (head + entry.name).ljust(-(-(len(head) + len(entry.name)) // 8) * 8, b"\0")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    """Where the environment leaves the library out as well: this is about what was built."""
    with pytest.MonkeyPatch.context() as patch:
        if hooks.library() is None:
            patch.delenv("LAKEFS_FUSE_HOOKS", raising=False)
            loaded = hooks.load()
            patch.setattr(hooks, "library", lambda: loaded)
        yield


def library() -> ctypes.PyDLL:
    found = hooks.library()
    assert found is not None, "not compiled: `pip install -e .` does that where there is a compiler"
    found.fuse_add_direntry_plus.restype = ctypes.c_size_t
    return found


def written(
    pairs: Iterator[tuple[bytes, bytes]],
    room: int,
    *,
    timeout_s: float = 60.0,
    files: dict[int, Entry] | None = None,
) -> tuple[int, bytes]:
    """How many entries, and their bytes."""
    used = files or {}
    buffer = ctypes.create_string_buffer(b"\xee" * (room + 8), room + 8)
    readdir.begin_entries(pairs, used, lambda inode: pack_entry(used[inode]), prefix_of(PARENT), timeout_s, SHOWN)
    length = library().fuse_add_direntry_plus(None, buffer, ctypes.c_size_t(room), b"", None, ctypes.c_int64(0))
    count, _, _ = readdir.end_entries()
    assert length <= room
    assert buffer.raw[length:] == b"\xee" * (room + 8 - length), "nothing is written beyond the last entry"
    return count, buffer.raw[:length]


TIMES = st.integers(-(1 << 62), (1 << 62) - 1)
OWNERS = st.one_of(st.just(UNSET), st.integers(0, UNSET))
ENTRIES = st.builds(
    Entry,
    st.just(PARENT),
    st.just(0),
    st.binary(min_size=1, max_size=255).filter(lambda name: not set(b"/\0") & set(name) and name not in (b".", b"..")),
    st.integers(1, (1 << 64) - 1),
    st.sampled_from(
        [0, Flag.DIRECTORY, Flag.SYMLINK, Flag.LOCAL, Flag.ATTRIBUTES_KNOWN, Flag.DIRECTORY | Flag.MARKER, Flag.XATTRS]
    ).map(int),
    st.one_of(st.just(UNSET), st.integers(0, 0o7777)),
    OWNERS,
    OWNERS,
    st.integers(0, (1 << 62)),
    TIMES,
    TIMES,
    st.text("abcdef0123456789-", max_size=200),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 62)),
)


def in_order(entries: list[Entry]) -> list[Entry]:
    return [msgspec.structs.replace(entry, cookie=3 * at + 5) for at, entry in enumerate(entries)]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(ENTRIES, max_size=12), st.integers(0, 2000), st.sampled_from([0.0, 0.25, 59.75, 3600.0]))
def test_the_bytes_are_those_of_the_kernels_structures(entries: list[Entry], room: int, timeout_s: float) -> None:
    """As many as fit, whole ones, in order."""
    entries = in_order(entries)
    whole = [expected(entry, timeout_s) for entry in entries]
    fit = 0
    while fit < len(whole) and sum(map(len, whole[: fit + 1])) <= room:
        fit += 1
    assert written(map(item, entries), room, timeout_s=timeout_s) == (fit, b"".join(whole[:fit]))


def entry_of(number: int, flags: int = 0, **more: int) -> Entry:
    entry = Entry(PARENT, number, b"name-%d" % number, 1000 + number, flags)
    return msgspec.structs.replace(entry, **more)


def test_a_directory_ends_where_its_keys_do() -> None:
    others = [entry_of(1), msgspec.structs.replace(entry_of(2), parent=PARENT + 1), entry_of(3)]
    assert written(map(item, others), 4096) == (1, expected(others[0], 60.0))
    assert written(iter([(b"I12345678", b"x"), item(entry_of(1))]), 4096) == (0, b"")
    assert written(iter([]), 4096) == (0, b"")


def test_what_a_directory_hides_is_passed_over() -> None:
    entries = [entry_of(1, Flag.SHADOWED), entry_of(2), entry_of(3, Flag.SHADOWED), entry_of(4)]
    shown = expected(entries[1], 60.0) + expected(entries[3], 60.0)
    assert written(map(item, entries), 4096) == (2, shown)


def test_a_file_in_use_is_shown_as_it_is() -> None:
    entries = [entry_of(1), entry_of(2), entry_of(3)]
    now = msgspec.structs.replace(entries[1], size=12345, mode=0o600)
    shown = b"".join(expected(entry, 60.0) for entry in (entries[0], now, entries[2]))
    assert written(map(item, entries), 4096, files={now.inode: now, 5: now}) == (3, shown)


@pytest.mark.parametrize(
    "pair",
    [
        (prefix_of(PARENT) + bytes(8), "text"),
        (prefix_of(PARENT),),
        None,
    ],
)
def test_rows_that_are_none_are_told(pair: object) -> None:
    with pytest.raises(ValueError, match="not a pair"):
        written(iter([item(entry_of(1)), pair]), 4096)  # type: ignore[list-item]
    assert written(map(item, [entry_of(1)]), 4096)[0] == 1


@pytest.mark.parametrize(
    "row",
    [
        b"", bytes(HEAD.size), bytes(HEAD.size - 1) + b"\xff" + b"short", bytes(HEAD.size) + b"a/b",
        bytes(HEAD.size) + b"a\0b", bytes(HEAD.size) + b".", bytes(HEAD.size) + b"..", bytes(HEAD.size) + 256 * b"a",
        bytes(HEAD.size - 1) + b"\x02\xff\xffname",
    ],
)  # fmt: skip
def test_direntries_damaged_row_is_passed_over_and_told(row: bytes) -> None:
    with pytest.raises((struct.error, ValueError)):
        unpack_entry(PARENT, 7, row)
    key = prefix_of(PARENT) + (7).to_bytes(8, "big")
    rows = [item(entry_of(1)), (key, row), item(entry_of(9))]
    assert written(iter(rows), 4096) == (2, expected(entry_of(1), 60.0) + expected(entry_of(9), 60.0))
    readdir.begin_entries(iter(rows), {}, lambda _: b"", prefix_of(PARENT), 1.0, SHOWN)
    buffer = ctypes.create_string_buffer(4096)
    library().fuse_add_direntry_plus(None, buffer, ctypes.c_size_t(4096), b"", None, ctypes.c_int64(0))
    assert readdir.end_entries()[1:] == (9, key)


def test_what_reading_rows_raises_is_raised() -> None:
    def rows() -> Iterator[tuple[bytes, bytes]]:
        yield item(entry_of(1))
        raise OSError("the disk fails")

    with pytest.raises(OSError, match="the disk fails"):
        written(rows(), 4096)
    with pytest.raises(KeyError):
        written(map(item, [entry_of(1)]), 4096, files=Gone({1001: entry_of(1)}))
    assert written(map(item, [entry_of(1)]), 4096)[0] == 1


class Gone(dict[int, Entry]):
    def __getitem__(self, key: int) -> Entry:
        raise KeyError(key)


def test_a_row_begins_as_the_library_reads_it() -> None:
    assert HEAD.size == 67
    assert HEAD.format == "<QHIIIQqqQIQB"
    assert sorted(NATIVE.glob("_native*.so"))
