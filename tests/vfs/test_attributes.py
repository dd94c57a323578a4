"""Attributes in object metadata: our own, s3fs's, rclone's, and anybody's."""

from __future__ import annotations

import stat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.meta.entry import UNSET, Entry, Flag
from lakefs_fuse.meta.tree import pack_entry
from lakefs_fuse.vfs.namespace.attributes import describe, learn, without_privileges

FILE = Entry(1, 2, b"name", 3, size=5, mtime_ns=77, etag="e")
DIRECTORY = msgspec.structs.replace(FILE, flags=Flag.DIRECTORY)
numbers = st.one_of(st.just(UNSET), st.integers(0, UNSET - 1))
modes = st.one_of(st.just(UNSET), st.integers(0, 0o7777))
times = st.integers(-(1 << 61), 1 << 61)


@given(st.booleans(), modes, numbers, numbers, times)
def test_what_is_written_is_read(directory: bool, mode: int, uid: int, gid: int, mtime_ns: int) -> None:
    blank = DIRECTORY if directory else FILE
    entry = msgspec.structs.replace(blank, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns)
    learnt = learn(blank, describe(entry))
    assert learnt == msgspec.structs.replace(entry, flags=blank.flags | Flag.ATTRIBUTES_KNOWN | Flag.MTIME_KEPT)


@given(st.dictionaries(st.sampled_from(("mode", "uid", "gid", "mtime", "other")), st.text(max_size=30)))
def test_garbage_is_left_out(metadata: dict[str, str]) -> None:
    learnt = learn(FILE, metadata)
    assert learnt.mode == UNSET or 0 <= learnt.mode <= 0o7777
    assert 0 <= learnt.uid <= UNSET
    assert 0 <= learnt.gid <= UNSET
    assert -(1 << 62) <= learnt.mtime_ns <= 1 << 62
    assert pack_entry(learnt)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (str(stat.S_IFREG | 0o644), 0o644),  # s3fs, decimal: 33188
        (str(stat.S_IFREG | 0o600), 0o600),
        (str(stat.S_IFREG | 0o755), 0o755),
        (str(stat.S_IFDIR | 0o755), 0o755),
        (str(stat.S_IFREG | 0o4755), 0o4755),
        ("0100644", 0o644),  # rclone, octal
        ("100644", 0o644),
        ("0644", 0o644),
        ("040755", 0o755),
        ("420", 0o644),
    ],
)
def test_modes_of_other_tools(text: str, mode: int) -> None:
    assert learn(FILE, {"mode": text}).mode == mode


@given(st.integers(0, 0o7777), st.sampled_from((stat.S_IFREG, stat.S_IFDIR)))
def test_every_mode_in_both_forms(mode: int, kind: int) -> None:
    assert learn(FILE, {"mode": str(kind | mode)}).mode == mode
    assert learn(FILE, {"mode": f"0{kind | mode:o}"}).mode == mode


@pytest.mark.parametrize("text", ["", "rw-r--r--", "-1", "0x1ff", "٣٣", "8" * 40, "1e3", " 420"])
def test_modes_that_are_none(text: str) -> None:
    assert learn(FILE, {"mode": text}).mode == UNSET


@pytest.mark.parametrize(
    ("text", "mtime_ns"),
    [
        ("1700000000", 1_700_000_000_000_000_000),
        ("1700000000.5", 1_700_000_000_500_000_000),
        ("1700000000.123456789", 1_700_000_000_123_456_789),
        ("1700000000.1234567899", 1_700_000_000_123_456_789),
        ("0", 0),
        ("-1", -1_000_000_000),
        ("-1.5", -1_500_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000_000_000),
        ("2023-11-14T22:13:20.123456789Z", 1_700_000_000_123_456_000),
        ("2023-11-14T23:13:20.25+01:00", 1_700_000_000_250_000_000),
        ("1969-12-31T23:59:58.500000Z", -1_500_000_000),
    ],
)
def test_times_of_other_tools(text: str, mtime_ns: int) -> None:
    assert abs(learn(FILE, {"mtime": text}).mtime_ns - mtime_ns) < 1000


@pytest.mark.parametrize(
    "text",
    ["", ".", "-", "yesterday", "1.2.3", "1,5", "٣", "9" * 5000, "nan", "1e9", "1.-5", "2300-01-01T00:00:00Z"],
)
def test_times_that_are_none(text: str) -> None:
    assert learn(FILE, {"mtime": text}).mtime_ns == FILE.mtime_ns


@pytest.mark.parametrize("text", ["", "-1", "x", "4294967295", "99999999999", "²", "1.0", "1" * 5000])
def test_owners_that_are_none(text: str) -> None:
    learnt = learn(FILE, {"uid": text, "gid": text})
    assert (learnt.uid, learnt.gid) == (UNSET, UNSET)


@pytest.mark.parametrize(
    ("mode", "after"),
    [(0o644, 0o644), (0o4755, 0o755), (0o4644, 0o644), (0o2775, 0o775), (0o2666, 0o2666), (0o7777, 0o1777)],
)
def test_setgid_goes_where_the_group_may_execute(mode: int, after: int) -> None:
    assert without_privileges(mode) == after
