"""The change record: what is written comes back, and nothing hostile comes through."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
import time as clock
from collections.abc import Callable, Iterator
from types import FrameType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.commits import record as rec
from lakefs_fuse.commits.record import (
    DECODED_AT_ONCE,
    OWN,
    UNSET,
    Mkdir,
    ObjectRef,
    Operation,
    Operations,
    Put,
    Record,
    Relocate,
    Remove,
    SetAttr,
    Symlink,
    check,
    decode,
    encode,
    newest_read,
)
from lakefs_fuse.errors import DamagedCommit
from lakefs_fuse.meta.entry import MTIME_NS_MAX
from tests.commits.records import TIME, WRITER, put, record_of, valid_records

WITH_A_PATH: tuple[Callable[[str], Operation], ...] = (
    put,
    lambda path: Mkdir(path, 0, 0, 0, 0),
    lambda path: Symlink(path, "target", 0, 0, 0),
    Remove,
    lambda path: SetAttr(path, 0, 0, 0, "", 0, 0, 0, 0),
    lambda path: Relocate(path, OWN, 0, "etag", 0, 0, 0, 0, 0, 0, 0),
)


LONG = "/".join(["d" * 230] * 4)
"""A directory with room for a name of 101 bytes."""


@pytest.fixture(autouse=True, scope="module", params=["objects", "bytes"])
def kept_as(request: pytest.FixtureRequest) -> Iterator[str]:
    """As what the operations of a decoded record are kept."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "bytes":
            patch.setattr(rec, "LAZY_BYTES_MIN", 0)
        yield request.param


def refused(record: Record) -> None:
    with pytest.raises(DamagedCommit):
        decode(encode(record))


@given(valid_records())
def test_what_is_written_comes_back(record: Record) -> None:
    raw = encode(record)
    again = decode(raw)
    assert again == record
    assert encode(again) == raw


@given(valid_records(), st.data())
def test_operations_are_a_sequence(kept_as: str, record: Record, data: st.DataObject) -> None:
    found, wanted = decode(encode(record)).operations, record.operations
    assert isinstance(found, Operations) == (kept_as == "bytes")
    assert len(found) == len(wanted)
    indices = st.none() | st.integers(-len(wanted) - 2, len(wanted) + 2)
    part = slice(data.draw(indices), data.draw(indices), data.draw(indices.filter(lambda step: step != 0)))
    assert found[part] == wanted[part]
    if wanted:
        at = data.draw(st.integers(-len(wanted), len(wanted) - 1))
        assert found[at] == wanted[at]
    with pytest.raises(IndexError):
        found[len(wanted)]


def test_operations_that_are_decoded_together() -> None:
    wanted = [Remove(f"d/{number}") for number in range(2 * DECODED_AT_ONCE + 3)]
    found = decode(encode(record_of(*wanted))).operations
    assert list(found) == wanted
    for part in (slice(5), slice(3, DECODED_AT_ONCE + 3), slice(3, DECODED_AT_ONCE + 4), slice(9, 9), slice(-2, None)):
        assert found[part] == wanted[part]


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(DamagedCommit):
        decode(raw)


@given(valid_records(), st.data())
def test_cut_short_anywhere_it_is_refused(record: Record, data: st.DataObject) -> None:
    raw = encode(record)
    with pytest.raises(DamagedCommit):
        decode(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(valid_records(), st.data())
def test_changed_bytes_are_refused_or_still_keep_every_rule(record: Record, data: st.DataObject) -> None:
    raw = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(raw))
    except DamagedCommit:
        return
    check(found)
    written = decode(encode(found))
    if all(abs(getattr(operation, "mtime_ns", 0)) <= MTIME_NS_MAX for operation in found.operations):
        assert written == found
    assert decode(encode(written)) == written


@pytest.mark.parametrize("make", WITH_A_PATH)
@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", "a/.", "a\0b", "n" * 256, "é" * 128, "d/" * 600 + "f",
        ".lakefs", ".lakefs/commits/x", ".lakefs/",
    ],
)  # fmt: skip
def test_paths_no_file_system_can_have(make: Callable[[str], Operation], path: str) -> None:
    refused(record_of(make(path)))
    refused(msgspec.structs.replace(record_of(), moves=[("a", path)]))
    refused(msgspec.structs.replace(record_of(), moves=[(path, "a")]))


@pytest.mark.parametrize(
    "path", ["a/", "a/.", "a/..", "a/c\0", "a/" + "n" * 256, "a/" + "é" * 128, f"{LONG}/{'n' * 102}"]
)
def test_paths_beside_one_that_is_right_are_refused(path: str) -> None:
    """The directory is checked once."""
    right = f"{path.rpartition('/')[0]}/b"
    decode(encode(record_of(Remove(right))))
    refused(record_of(Remove(right), Remove(path)))


@pytest.mark.parametrize("make", WITH_A_PATH)
def test_paths_that_only_look_odd_are_taken(make: Callable[[str], Operation]) -> None:
    for path in ("...", "a/.lakefs", ".lakefs2", "a\nb", "😀", "n" * 255, "é" * 127, "a\\b", "-"):
        record = record_of(make(path))
        assert decode(encode(record)) == record


@pytest.mark.parametrize("raw_path", [b"\xff\xfe\xfd", b"\xed\xa0\x80", b"a\xc0\x80"])
def test_text_that_is_not_utf8(raw_path: bytes) -> None:
    raw = encode(record_of(Remove("abc")))
    assert raw.count(b"abc") == 1
    with pytest.raises(DamagedCommit):
        decode(raw.replace(b"abc", raw_path))


def test_surrogates_are_not_written_either() -> None:
    with pytest.raises(DamagedCommit):
        check(record_of(Remove("a\ud800")))


REF = ObjectRef("pack", "etag", 100)
BAD_PLACES = [(-2, 0, 0), (2, 0, 0), (1 << 62, 0, 0), (OWN, 1, 0), (1, 0, 101), (1, 101, 0), (1, 50, 51), (1, -1, 1),
              (0, -1, 0), (0, 0, -1), (0, (1 << 47) + 1, 0), (0, 0, (1 << 47) + 1), (1, 0, 1 << 63)]  # fmt: skip


@pytest.mark.parametrize(("index", "offset", "size"), BAD_PLACES)
def test_bytes_that_are_nowhere(index: int, offset: int, size: int) -> None:
    for operation in (
        put(object=index, offset=offset, size=size),
        SetAttr("a", index, offset, size, "", 0, 0, 0, 0),
        Relocate("a", index, offset, "", 0, 0, size, 0, 0, 0, 0),
        Relocate("a", 0, 0, "", index, offset, size, 0, 0, 0, 0),
    ):
        refused(record_of(operation, objects=(REF,)))
    decode(encode(record_of(put(object=1, offset=50, size=50), objects=(REF,))))


@pytest.mark.parametrize(
    "ref",
    [
        ObjectRef("", "etag", 1), ObjectRef("a", "etag", -1), ObjectRef("a", "etag", (1 << 47) + 1),
        ObjectRef("../../etc/passwd", "etag", 1), ObjectRef("a/../../b", "etag", 1), ObjectRef("/etc/x", "etag", 1),
        ObjectRef(".lakefs/uploads/x", "etag", 1), ObjectRef(".lakefs/commits/../../../x", "etag", 1),
        ObjectRef(".lakefs/commits/", "etag", 1), ObjectRef("k\0", "etag", 1), ObjectRef("d/" * 520 + "k", "etag", 1),
        ObjectRef(".lakefs/commits/" + "d/" * 510 + "long", "etag", 1), ObjectRef("a", 'x"\r\nHost: elsewhere', 1),
        ObjectRef("a", "e" * 256, 1), ObjectRef("a", "é", 1),
    ],
)  # fmt: skip
def test_objects_that_cannot_be(ref: ObjectRef) -> None:
    refused(record_of(objects=(ref,)))


@pytest.mark.parametrize("etag", ["\0", "a\nb", "e" * 256, "\x7f", "é"])
def test_etags_that_cannot_be_in_a_header(etag: str) -> None:
    refused(record_of(put(hides=etag)))
    refused(record_of(Remove("a", hides=etag)))
    refused(record_of(Symlink("a", "b", 0, 0, 0, etag)))
    refused(record_of(SetAttr("a", 0, 0, 0, etag, 0, 0, 0, 0)))
    refused(record_of(Relocate("a", 0, 0, etag, 0, 0, 0, 0, 0, 0, 0)))
    refused(record_of(Relocate("a", 0, 0, "", 0, 0, 0, 0, 0, 0, 0, etag)))


def test_the_table_of_objects_begins_with_the_archive() -> None:
    refused(Record(writer=WRITER, time=TIME, objects=[]))
    refused(Record(writer=WRITER, time=TIME, objects=[REF]))


@pytest.mark.parametrize("mode", [-1, 0o10000, UNSET - 1, UNSET + 1, 1 << 63])
def test_modes(mode: int) -> None:
    refused(record_of(Put("a", 0, 0, 0, mode, 0, 0, 0)))
    refused(record_of(Mkdir("a", mode, 0, 0, 0)))
    refused(record_of(SetAttr("a", 0, 0, 0, "", mode, 0, 0, 0)))
    refused(record_of(Relocate("a", 0, 0, "", 0, 0, 0, mode, 0, 0, 0)))


@pytest.mark.parametrize("owner", [-1, UNSET + 1])
def test_owners(owner: int) -> None:
    refused(record_of(Mkdir("a", 0, owner, 0, 0)))
    refused(record_of(Mkdir("a", 0, 0, owner, 0)))
    refused(record_of(Symlink("a", "b", owner, 0, 0)))


@pytest.mark.parametrize(
    ("ns", "kept"), [((1 << 62) + 1, 1 << 62), ((1 << 64) - 1, 1 << 62), (-(1 << 63), -(1 << 62)), (-1, -1)]
)
@pytest.mark.parametrize("count", [1, rec.ENCODED_AT_ONCE + 1])
def test_a_time_that_no_lake_keeps_is_written_as_the_nearest(ns: int, kept: int, count: int) -> None:
    """A commit that was refused for it would be lost with every other file in it."""
    made: list[Operation] = [
        Put("a", OWN, 0, 0, 0, 0, 0, ns), Mkdir("a", 0, 0, 0, ns), Symlink("a", "b", 0, 0, ns)
    ]  # fmt: skip
    times = {getattr(each, "mtime_ns", None) for each in decode(encode(record_of(*made * count))).operations}
    assert times == {kept}


def test_a_time_that_no_lake_keeps_is_no_reason_to_refuse_a_commit() -> None:
    check(record_of(Mkdir("a", 0, 0, 0, 1 << 63)))


@pytest.mark.parametrize(("seconds", "kept"), [(-5, 0), (1 << 40, 1 << 33), (7, 7)])
def test_a_date_that_no_store_can_mean_is_written_within_limits(seconds: int, kept: int) -> None:
    made: list[Operation] = [
        Remove("a", hides="etag", dated_s=seconds), Put("a", OWN, 0, 0, 0, 0, 0, 0, hides="e", dated_s=seconds)
    ]  # fmt: skip
    dates = {getattr(each, "dated_s", None) for each in decode(encode(record_of(*made))).operations}
    assert dates == {kept}


@pytest.mark.parametrize("target", ["", "a\0", "t" * 4096])
def test_targets(target: str) -> None:
    refused(record_of(Symlink("a", target, 0, 0, 0)))


@pytest.mark.parametrize(
    "xattrs",
    [
        {"": b""}, {"user.\0": b""}, {"user." + "u" * 251: b""}, {"user." + "é" * 126: b""}, {"user.a": bytes(65_536)},
        {"user." + "é" * 100: bytes(65_536 - 204)}, {f"user.{number:04d}": b"" for number in range(65_536 // 9 + 1)},
        {"security.capability": b"x"}, {"trusted.x": b""}, {"system.posix_acl_access": b""}, {"user": b""},
        {"user.lakefs.state": b"durable"}, {"User.a": b""},
    ],
)  # fmt: skip
def test_extended_attributes(xattrs: dict[str, bytes]) -> None:
    refused(record_of(Mkdir("a", 0, 0, 0, 0, xattrs)))
    refused(record_of(Put("a", 0, 0, 0, 0, 0, 0, 0, "", xattrs)))


@pytest.mark.parametrize("xattrs", [{"user.": b""}, {"user." + "u" * 250: b"x"}, {"user.a": bytes(65_536 - 6)}])
def test_record_xattrs_that_setxattr_takes_are_readable(xattrs: dict[str, bytes]) -> None:
    record = record_of(Mkdir("a", 0, 0, 0, 0, xattrs))
    assert decode(encode(record)) == record


@pytest.mark.parametrize("time", [-1, (1 << 62) + 1, 1 << 63])
def test_times_of_the_record(time: int) -> None:
    refused(record_of(time=time))


@pytest.mark.parametrize("writer", ["", "0badcaf", "0badcafe0", "0BADCAFE", "0badcafg", "0badcafe\n", "../../.."])
def test_writers(writer: str) -> None:
    refused(Record(writer=writer, time=TIME))


def test_another_format_is_named_whatever_else_it_holds() -> None:
    for raw in (
        msgspec.msgpack.encode({"format": 3}),
        msgspec.msgpack.encode({"format": 3, "writer": 7, "operations": {"all": "new"}}),
        encode(msgspec.structs.replace(record_of(Remove("a")), format=3)),
    ):
        with pytest.raises(DamagedCommit, match="format 3"):
            decode(raw)


def test_encode_record_of_format_2_says_so_and_is_read() -> None:
    record = record_of(Remove("a"))
    assert decode(encode(record, 2)) == msgspec.structs.replace(record, format=2)
    assert decode(encode(record)) == record


def test_newest_read_of_a_record_tells_older_programs() -> None:
    record = record_of(Remove("a"))
    assert newest_read(encode(record)) == newest_read(encode(record, 2)) == 2
    assert newest_read(msgspec.msgpack.encode(record)) == 1, "as it was written before there were lake records"
    with pytest.raises(DamagedCommit):
        newest_read(b"no record")


def test_a_new_kind_of_operation_is_refused_and_new_fields_are_ignored() -> None:
    envelope = {"format": 1, "writer": WRITER, "time": TIME, "objects": [["", "", 0]], "moves": []}
    later = {**envelope, "operations": [["remove", "a", False, "", False, 0, "new"]], "a new key": [1, {"2": 3}]}
    assert decode(msgspec.msgpack.encode(later)) == record_of(Remove("a"))
    short = {**envelope, "operations": [["remove", "a"], ["put", "b", 0, 0, 0, 0, 0, 0, 0]]}
    assert decode(msgspec.msgpack.encode(short)).operations == [Remove("a"), Put("b", 0, 0, 0, 0, 0, 0, 0)]
    with pytest.raises(DamagedCommit):
        decode(msgspec.msgpack.encode({**envelope, "operations": [["teleport", "a"]]}))


@pytest.mark.parametrize("count", [1000, 1 << 20, 1 << 30, (1 << 32) - 1])
def test_absurd_counts_cost_nothing(count: int) -> None:
    head = encode(record_of())
    at = head.index(b"\xaaoperations")
    began, before_kib = clock.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in (b"\xaaoperations", b"\xa7objects", b"\xa5moves", b"\xa5other"):
        for inner in (b"", b"\x91", b"\x91\x94\xa6remove", b"\x91\x9a\xa3put\xa1a\0\0\0\0\0\0\0\xa0"):
            for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6"):
                with pytest.raises(DamagedCommit):
                    decode(head[:at] + key + inner + kind + struct.pack(">I", count))
    assert clock.perf_counter() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 << 10


def test_nesting_without_end() -> None:
    head = encode(record_of())
    at = head.index(b"\xaaoperations")
    for nest in (b"\x91", b"\x81\xa1a", b"\x81\x91"):
        for key in (b"\xa5other", b"\xaaoperations"):
            with pytest.raises(DamagedCommit):
                decode(head[:at] + key + nest * 1_000_000)


def test_more_operations_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rec, "OPERATIONS_MAX", 3)
    decode(encode(record_of(*[Remove("a")] * 3)))
    refused(record_of(*[Remove("a")] * 4))


def test_stored_objects_are_checked_as_other_paths_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rec, "STORED_MAX", 2)
    kept = msgspec.structs.replace(record_of(), stored=["a", "b/c"])
    assert decode(encode(kept)).stored == ["a", "b/c"]
    for stored in (["a", "b", "c"], [""], ["a/../b"], ["/a"], [".lakefs/commits/x"], ["a\0"], ["a" * 256]):
        refused(msgspec.structs.replace(record_of(), stored=stored))


def test_stored_objects_are_ignored_by_a_program_that_does_not_know_them() -> None:
    class Before(msgspec.Struct):
        """The fields of a record as they were."""

        writer: str
        time: int
        operations: list[msgspec.Raw]

    raw = encode(msgspec.structs.replace(record_of(Remove("a")), stored=["a"]))
    assert len(msgspec.msgpack.decode(raw, type=Before).operations) == 1


def python_calls_in(called: str, work: Callable[[], object]) -> list[int]:
    """Return for each call of a function written in C during ``work`` how many functions in Python it called.

    The function keeps the GIL between two of these."""
    counts: list[int] = []
    is_inside = False

    def profile(_: FrameType, event: str, function: object) -> None:
        nonlocal is_inside
        if event == "call" and is_inside:
            counts[-1] += 1
        elif event.startswith("c_") and getattr(function, "__name__", "") == called:
            is_inside = event == "c_call"
            counts.extend([0] * is_inside)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counts


@pytest.mark.parametrize("kept_as", ["bytes"], indirect=True)
def test_decode_large_record_lets_other_threads_run_between_two_items() -> None:
    record = record_of(*[Remove("a")] * 100)
    record = msgspec.structs.replace(record, objects=[ObjectRef(), *[ObjectRef("b", "etag", 1)] * 99])
    raw = encode(record)
    assert python_calls_in("decode", lambda: decode(raw))[0] == len(record.operations) + len(record.objects)


@pytest.mark.parametrize("count", [3, 7, 16])
def test_encode_large_record_encodes_a_few_items_at_a_time(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(rec, "ENCODED_AT_ONCE", 3)
    record = record_of(*[Remove("a")] * count)
    record = msgspec.structs.replace(record, objects=[ObjectRef(), *[ObjectRef("b", "etag", 1)] * (count - 1)])
    assert decode(encode(record)) == record
    pieces = -(-count // 3)
    assert len(python_calls_in("join", lambda: encode(record))) == (2 * (pieces + 1) if pieces > 1 else 0)


@pytest.mark.parametrize("kept_as", ["bytes"], indirect=True)
def test_large_record_takes_little_more_memory_than_its_bytes() -> None:
    """In a process of its own, whose peak is nothing else's."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120)
    length, grown = map(int, done.stdout.split())
    assert length > 10 << 20
    assert grown < length


PEAK = r"""
import resource
import msgspec
from lakefs_fuse.commits.record import Mkdir, Record, decode, encode

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

count = 100_000
one = msgspec.msgpack.encode(Mkdir("d" * 100 + "/name", 0o755, 0, 0, 1))
field = b"\xaaoperations"
raw = encode(Record(writer="0badcafe", time=1))
raw = raw.replace(field + b"\x90", field + b"\xdd" + count.to_bytes(4, "big") + one * count)
before = peak()
record = decode(raw)
assert sum(operation.mode == 0o755 for operation in record.operations) == count
print(len(raw), peak() - before)
"""
