"""Reading the record of a commit out of the store: one request, and never anything but the record that was written."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefs_fuse.commits import archive, commit_log
from lakefs_fuse.commits.archive import build, commit_key, locate, outside
from lakefs_fuse.commits.commit_log import TAIL_BYTES, LargeRecord
from lakefs_fuse.commits.record import THIS, Put, Record, Relocate, Remove, SetAttr, decode, encode
from lakefs_fuse.errors import DamagedCommit, NotFound, PreconditionFailed
from lakefs_fuse.store.protocol import ObjectMeta
from tests.commits.archives import FILES, KEY, client_of, commit_of, fixed, log_of, member
from tests.commits.records import TIME, WRITER, put, record_of, valid_records
from tests.memory_store import MemoryStore
from tests.tiers import IS_LONG, examples

DATA = commit_of(FILES)


async def fetched(data: bytes, *, key: str = KEY, size: int | None = None, tail_bytes: int = TAIL_BYTES) -> Record:
    store = MemoryStore()
    meta = store.give(key, data)
    meta = ObjectMeta(key, meta.size if size is None else size, meta.etag, 0)
    return await log_of(client_of(store)).fetch(meta, tail_bytes)


async def refused(data: bytes, match: str = "commits", *, size: int | None = None) -> None:
    with pytest.raises(DamagedCommit, match=match) as caught:
        await fetched(data, size=size)
    assert str(caught.value).startswith(f"{KEY}: ")


def with_comment(data: bytes, comment: bytes) -> bytes:
    at = data.rindex(b"lakefs1 ")
    return data[: at - 2] + struct.pack("<H", len(comment)) + comment


async def test_one_request_brings_it() -> None:
    store = MemoryStore()
    meta = store.give(KEY, commit_of({"large": bytes(3 * TAIL_BYTES), "small": b"abc"}))
    client = client_of(store)
    record = await log_of(client).fetch(meta)
    assert [operation.path for operation in record.operations] == ["large", "small"]
    assert client.metrics.requests["get"] == 1
    assert client.metrics.bytes_read == TAIL_BYTES


@pytest.mark.parametrize("tail_bytes", range(0, len(DATA) + 2, 7))
async def test_two_where_it_does_not_fit(tail_bytes: int) -> None:
    store = MemoryStore()
    meta = store.give(KEY, DATA)
    client = client_of(store)
    record = await log_of(client).fetch(meta, tail_bytes)
    assert [operation.path for operation in record.operations] == list(FILES)
    offset = int(DATA[DATA.rindex(b"lakefs1 ") :].split()[1])
    assert client.metrics.requests["get"] == (1 if max(tail_bytes, 78) >= len(DATA) - offset else 2)


@pytest.mark.parametrize("window_bytes", [7, 64, len(DATA), pytest.param(1, marks=pytest.mark.long)])
async def test_fetch_record_in_windows(monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    monkeypatch.setattr(commit_log, "WINDOW_BYTES", window_bytes)
    for tail_bytes in range(0, len(DATA) + 2, 13):
        store = MemoryStore()
        client = client_of(store)
        record = await log_of(client).fetch(store.give(KEY, DATA), tail_bytes)
        assert [operation.path for operation in record.operations] == list(FILES)
        assert client.metrics.bytes_read <= len(DATA)


async def test_fetch_record_larger_than_wanted_is_not_read() -> None:
    store = MemoryStore()
    client, meta = client_of(store), store.give(KEY, DATA)
    with pytest.raises(LargeRecord):
        await log_of(client).fetch(meta, 0, bytes_max=10)
    assert client.metrics.requests["get"] == 1
    await log_of(client).fetch(meta, bytes_max=10)  # it came with the tail


async def test_a_record_large_enough_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "DECODE_INLINE_BYTES_MAX", 1)
    assert len((await fetched(DATA)).operations) == 3
    await refused(build([], fixed(b"\x90")), "not a change record")


async def test_the_version_that_was_listed_or_none() -> None:
    store = MemoryStore()
    meta = store.give(KEY, DATA)
    client = client_of(store)
    store.give(KEY, DATA)
    with pytest.raises(PreconditionFailed):
        await log_of(client).fetch(meta)
    store.take(KEY)
    with pytest.raises(NotFound):
        await log_of(client).fetch(meta)


async def test_cut_short_anywhere() -> None:
    for length in range(len(DATA)):
        await refused(DATA[:length])


async def test_with_something_behind_it() -> None:
    for more in (b"\0", b"PK\x05\x06", bytes(100), bytes(1000)):
        await refused(DATA + more)


async def test_any_flipped_byte_changes_nothing_or_is_found() -> None:
    record = await fetched(DATA)
    at, length = (int(number) for number in DATA[DATA.rindex(b"lakefs1 ") :].split()[1:3])
    for place in range(len(DATA)):
        for flip in (0x01, 0x80) if IS_LONG else (0x01 << 7 * (place % 2),):
            changed = bytearray(DATA)
            changed[place] ^= flip
            try:
                assert await fetched(bytes(changed)) == record
            except DamagedCommit:
                continue
            assert not at <= place < at + length, f"byte {place} of the record is not guarded"


@settings(deadline=None)
@given(st.data())
async def test_any_damage_changes_nothing_or_is_found(data: st.DataObject) -> None:
    changed = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(DATA.rindex(b"PK\x05\x06") - 300, len(DATA) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=30))
        changed[at : at + data.draw(st.integers(0, 30))] = piece
    try:
        record = await fetched(bytes(changed))
    except DamagedCommit as error:
        assert str(error).startswith(f"{KEY}: ")
    else:
        assert record == await fetched(DATA)


@settings(deadline=None, max_examples=examples(60))
@given(valid_records(), st.binary(max_size=200))
async def test_records_that_need_not_fit_their_archive(record: Record, data: bytes) -> None:
    """What is read points inside, whatever was written."""
    archived = build([member("a", data)], fixed(encode(record)))
    try:
        found = await fetched(archived, key=commit_key(record.time, record.writer))
    except DamagedCommit:
        assert list(outside(record, locate(archived[-100:], len(archived))))
    else:
        assert found == record
        for operation in found.operations:
            if isinstance(operation, Put | Relocate | SetAttr) and operation.object == THIS:
                assert operation.offset + operation.size <= len(archived)


@pytest.mark.parametrize(
    "comment",
    [
        b"", b"lakefs1", b"lakefs2 %d %d %s", b"lakefs1 -1 %d %s", b"lakefs1 0 1 00000000", b"lakefs1 043 1 00000000",
        b"lakefs1 99999999999999999999 1 00000000", b"lakefs1 1000 9999999999999999999 00000000",
        b"lakefs1 9999999999999999999 1 00000000", b"lakefs1 100 0 00000000", b"lakefs1 100 1  0000000",
        b"lakefs1 100 10 0000000A", b"lakefs1 100 10 00000000 ", b"lakefs1 100 10 00000000\n",
        b"lakefs1  100 10 00000000",
        b"lakefs1 100 10 00000000", b"lakefs1 1e2 10 00000000", b"LAKEFS1 100 10 00000000", b"lakefs1 +10 10 00000000",
    ],
)  # fmt: skip
async def test_comments_that_lie(comment: bytes) -> None:
    assert await fetched(with_comment(DATA, DATA[DATA.rindex(b"lakefs1 ") :])) == await fetched(DATA)
    await refused(with_comment(DATA, comment))


async def test_the_record_must_not_reach_into_the_end() -> None:
    at = DATA.rindex(b"PK\x05\x06")
    crc = zlib.crc32(DATA[at - 10 : at + 1])
    await refused(with_comment(DATA, b"lakefs1 %d 11 %08x" % (at - 10, crc)), "a record of 11 bytes")


async def test_a_record_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "RECORD_BYTES_MAX", 10)
    await refused(DATA, "a record of")


async def test_an_empty_object() -> None:
    await refused(b"", "empty")


async def test_another_size_than_listed() -> None:
    for size in (1, 50, len(DATA) - 1, len(DATA) + 1, 1 << 40):
        await refused(DATA, size=size)


@pytest.mark.parametrize(
    "record",
    [
        record_of(time=TIME + 1),
        record_of(time=0),
        Record(writer="0badcaff", time=TIME),
    ],
)
async def test_a_record_under_another_name(record: Record) -> None:
    await refused(build([], fixed(encode(record))), "its change record is that of")
    key = commit_key(record.time, record.writer)
    assert (await fetched(build([], fixed(encode(record))), key=key)) == record


async def test_an_object_that_is_not_named_like_a_commit() -> None:
    with pytest.raises(DamagedCommit, match="not the name of a commit"):
        await fetched(DATA, key=".lakefs/commits/x.zip")


def make_outside(offset: int, size: int) -> list[Record]:
    return [
        record_of(put("hurt", offset=offset, size=size)),
        record_of(SetAttr("hurt", 0, offset, size, "", 0, 0, 0, 0)),
        record_of(Relocate("hurt", -1, 0, "etag", 0, offset, size, 0, 0, 0, 0)),
    ]


async def test_files_outside_of_the_archive() -> None:
    files = [member("a", b"twelve bytes")]
    probe = build(files, fixed(encode(record_of(put("hurt", size=1, offset=1 << 40)))))
    for offset, size in ((1 << 40, 1), (0, 1 << 40), (len(probe), 1), (0, len(probe)), (1 << 46, 1 << 46)):
        for record in make_outside(offset, size):
            await refused(build(files, fixed(encode(record))), "'hurt' is outside")


async def test_files_that_end_where_the_record_begins() -> None:
    files = [member("a", b"twelve bytes")]
    raw = encode(record_of(put("hurt", offset=0, size=100)))
    at = build(files, fixed(raw)).index(raw)
    assert 100 <= at < 128, "the size below takes one byte, as 100 does"
    assert (await fetched(build(files, fixed(encode(record_of(put("hurt", offset=0, size=at))))))).operations
    one_more = encode(record_of(put("hurt", offset=1, size=at)))
    await refused(build(files, fixed(one_more)), "'hurt' is outside")


async def test_hostile_records_are_named_by_their_key() -> None:
    good = encode(record_of(Remove("abc")))
    for raw in (b"\x00", good[:-1], good.replace(b"abc", b"../"), good.replace(b"abc", b"\xff\xff\xff"), good + b"\0"):
        with pytest.raises(DamagedCommit):
            decode(raw)
        await refused(build([], fixed(raw)))


async def test_members_named_like_nothing_a_reader_wants() -> None:
    """Names in the archive are for unzip; the record alone says what a file is called."""
    data = build([member("../../etc/passwd", b"x")], lambda offsets: encode(record_of(put("safe", offset=offsets[0]))))
    assert [operation.path for operation in (await fetched(data)).operations] == ["safe"]
    assert WRITER in KEY
