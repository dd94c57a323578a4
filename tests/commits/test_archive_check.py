"""`verify`: whatever happened to a commit object, the files hurt are named, and no others."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.commits import archive_check as auditing
from lakefs_fuse.commits.archive import CENTRAL_MAGIC, END_MAGIC, LOCAL_MAGIC, ArchiveBuilder, build, locate
from lakefs_fuse.commits.archive_check import Audit, Fault, verify
from lakefs_fuse.commits.record import Operation, Put, Relocate, Remove, decode, encode
from lakefs_fuse.store.protocol import Buffer
from tests.commits.archives import FILES, KEY, commit_of, fixed, member
from tests.commits.records import put, record_of

DATA = commit_of(FILES)
WHERE = locate(DATA[-100:], len(DATA))
RECORD = decode(DATA[WHERE.offset : WHERE.offset + WHERE.length])
PUTS = [operation for operation in RECORD.operations if isinstance(operation, Put)]
DIRECTORY_AT = DATA.index(CENTRAL_MAGIC)


async def verified(data: bytes, key: str = KEY) -> Audit:
    read_to = 0

    async def fetch(start: int, end: int) -> Buffer:
        nonlocal read_to
        assert 0 <= start < end <= len(data)
        read_to = max(read_to, end)
        return data[start:end]

    return await verify(key, len(data), fetch)


def faults(audit: Audit) -> set[Fault]:
    return {problem.fault for problem in audit.problems}


def hurt(audit: Audit, fault: Fault) -> list[str]:
    return [path for problem in audit.problems if problem.fault is fault for path in problem.paths]


def sound(audit: Audit) -> list[str]:
    return [member.path for member in audit.members if member.sound]


async def test_nothing_is_wrong_with_a_whole_one() -> None:
    audit = await verified(DATA)
    assert audit.problems == []
    assert sound(audit) == list(FILES)
    assert [(member.offset, member.size) for member in audit.members] == [(each.offset, each.size) for each in PUTS]
    assert audit.record is not None
    assert [operation.path for operation in audit.record.operations] == list(FILES)


async def test_nor_with_one_that_only_changes_names() -> None:
    audit = await verified(build([], fixed(encode(record_of(Remove("a"))))))
    assert (audit.problems, audit.members) == ([], [])


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80])
async def test_a_flipped_byte_anywhere(flip: int) -> None:
    files_at = {each.path: range(each.offset, each.offset + each.size) for each in PUTS}
    for place in range(len(DATA)):
        changed = bytearray(DATA)
        changed[place] ^= flip
        audit = await verified(bytes(changed))
        hit = [path for path, extent in files_at.items() if place in extent]
        assert hurt(audit, Fault.FILE) == hit, f"byte {place}"
        assert len(sound(audit)) == len(FILES) - len(hit), f"byte {place}"
        assert (Fault.RECORD in faults(audit)) == (WHERE.offset <= place < WHERE.offset + WHERE.length), f"byte {place}"
        assert Fault.OUTSIDE not in faults(audit)
        if place >= len(DATA) - len(b"lakefs1 404 189 00000000"):
            assert Fault.END in faults(audit)
            assert hurt(audit, Fault.END) == list(FILES)


GUARDED = [*range(4), 8, 9, *range(14, 26), *range(30, 40)]
"""Bytes of a local header that a ZIP program needs: not dates, not version, not the flag that its name is UTF-8."""


async def test_damaged_headers_are_found_and_hurt_no_file() -> None:
    for header in (at for at in range(DIRECTORY_AT) if DATA[at : at + 4] == LOCAL_MAGIC):
        for place in GUARDED:
            changed = bytearray(DATA)
            changed[header + place] ^= 0x01
            audit = await verified(bytes(changed))
            if header < WHERE.offset - 44:
                assert faults(audit) == {Fault.DIRECTORY}, f"byte {place}"
                assert len(hurt(audit, Fault.DIRECTORY)) == 1
            assert len(sound(audit)) == len(FILES)
            assert audit.record is not None


async def test_every_number_of_the_directory_is_guarded() -> None:
    fields = [*range(4), 10, *range(16, 32), *range(42, 56)]
    for place in fields:
        changed = bytearray(DATA)
        changed[DIRECTORY_AT + place] ^= 0x01
        audit = await verified(bytes(changed))
        assert faults(audit) == {Fault.DIRECTORY}, f"byte {place}"
        assert sound(audit)[1:] == list(FILES)[1:]
        assert len(sound(audit)) == len(FILES)


async def test_cut_short_anywhere() -> None:
    for length in range(len(DATA)):
        audit = await verified(DATA[:length])
        assert Fault.END in faults(audit), f"cut to {length}"
        assert sound(audit) == [each.path for each in PUTS if each.offset + each.size <= length], f"cut to {length}"
        whole_record = length >= WHERE.offset + WHERE.length
        assert (audit.record is not None) == whole_record
        begun = [each.path for each in PUTS if each.offset <= length < each.offset + each.size]
        assert hurt(audit, Fault.FILE) == begun, f"cut to {length}"
        assert set(hurt(audit, Fault.END)) >= set(sound(audit)), "no mount can read the commit"


async def test_a_damaged_record_hurts_every_file() -> None:
    changed = DATA[: WHERE.offset] + b"\0" + DATA[WHERE.offset + 1 :]
    audit = await verified(changed)
    assert audit.record is None
    assert hurt(audit, Fault.RECORD) == list(FILES)
    assert sound(audit) == list(FILES)


async def test_a_record_that_lies_is_one_that_is_damaged() -> None:
    for raw in (encode(record_of(time=7)), encode(record_of(Remove("../a"))), b"\x80"):
        audit = await verified(build([member("a", b"x")], fixed(raw)))
        assert (faults(audit), audit.record, hurt(audit, Fault.RECORD)) == ({Fault.RECORD}, None, ["a"])
    audit = await verified(DATA, key=".lakefs/commits/other.zip")
    assert faults(audit) == {Fault.RECORD}


@pytest.mark.parametrize(("shift", "grow"), [(0, 1), (0, -1), (1, 0), (-1, 1), (1 << 40, 0), (0, 1 << 40)])
async def test_a_commit_that_points_outside(shift: int, grow: int) -> None:
    def make_record(offsets: list[int]) -> bytes:
        astray: Sequence[Operation] = (
            put("astray", offset=offsets[1] + shift, size=5 + grow),
            Relocate("moved", -1, 0, "etag", 0, offsets[1] + shift, 5 + grow, 0, 0, 0, 0),
        )
        return encode(record_of(put("right", offset=offsets[0], size=3), *astray))

    audit = await verified(build([member("one", b"123"), member("two", b"12345")], make_record))
    assert faults(audit) == {Fault.OUTSIDE}
    assert hurt(audit, Fault.OUTSIDE) == ["astray", "moved"]
    assert sound(audit) == ["one", "two"]


async def test_files_go_by_what_the_record_calls_them() -> None:
    def make_record(offsets: list[int]) -> bytes:
        return encode(record_of(put("first", offset=offsets[0], size=3), put("second", offset=offsets[0], size=3)))

    data = build([member("packed as", b"123"), member("nobody's", b"456")], make_record)
    audit = await verified(data.replace(b"123", b"xxx").replace(b"456", b"yyy"))
    assert [problem.paths for problem in audit.problems] == [("first", "second"), ()]


async def test_names_are_unchecked_text_only() -> None:
    data = build([member("nasty")], fixed(encode(record_of()))).replace(b"nasty", b"\xff\0../")
    assert [member.path for member in (await verified(data)).members] == ["\ufffd\0../"]


@pytest.mark.parametrize("window_bytes", [1, 7, 100, 4096])
async def test_files_larger_than_the_window(monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    monkeypatch.setattr(auditing, "WINDOW_BYTES", window_bytes)
    files = {"large": random.Random(1).randbytes(5000), "small": b"abc", "empty": b""}
    data = bytearray(commit_of(files))
    assert (await verified(bytes(data))).problems == []
    data[3000] ^= 1
    assert hurt(await verified(bytes(data)), Fault.FILE) == ["large"]
    data[3000] ^= 1
    small_at = data.index(LOCAL_MAGIC, 1)
    assert sound(await verified(bytes(data[:small_at]))) == ["large"]
    assert sound(await verified(bytes(data[: small_at - 1]))) == []


async def test_it_reads_every_byte_about_once() -> None:
    files = {f"{number:03}": bytes(100_000) for number in range(200)}
    data = commit_of(files)
    asked: list[tuple[int, int]] = []

    async def fetch(start: int, end: int) -> Buffer:
        asked.append((start, end))
        return memoryview(data)[start:end]

    audit = await verify(KEY, len(data), fetch)
    assert audit.problems == []
    assert len(asked) <= 3 + -(-len(data) // auditing.WINDOW_BYTES)
    assert sum(end - start for start, end in asked) < 1.1 * len(data)


@pytest.mark.long
async def test_zip64() -> None:
    pieces: list[Buffer] = []
    builder = ArchiveBuilder(pieces.append)
    offsets = [builder.add(member(str(number), b"%d" % number)) for number in range(66_000)]
    puts = [put(str(n), offset=offset, size=len(str(n))) for n, offset in enumerate(offsets)]
    builder.finish(encode(record_of(*puts)))
    data = bytearray(b"".join(pieces))
    audit = await verified(bytes(data))
    assert audit.problems == []
    assert len(sound(audit)) == 66_000
    data[offsets[65_999]] ^= 1
    assert hurt(await verified(bytes(data)), Fault.FILE) == ["65999"]
    data[data.rindex(b"PK\x06\x06")] ^= 1
    audit = await verified(bytes(data))
    assert faults(audit) == {Fault.FILE, Fault.DIRECTORY}
    assert len(sound(audit)) == 65_999


async def test_offsets_beyond_4_gib() -> None:
    """An object of which only the last bytes are more than zeros."""
    gap = 5 << 30
    pieces: list[Buffer] = []
    builder = ArchiveBuilder(pieces.append)
    builder.size = gap
    offset = builder.add(member("far", b"behind the gap"))
    builder.finish(encode(record_of(put("far", offset=offset, size=14))))
    data = b"".join(pieces)

    async def fetch(start: int, end: int) -> Buffer:
        return bytes(max(0, gap - start)) + data[max(0, start - gap) : end - gap]

    audit = await verify(KEY, gap + len(data), fetch)
    assert audit.record is not None
    assert faults(audit) == {Fault.DIRECTORY, Fault.END, Fault.OUTSIDE}, "a gap is not what the format allows"


@given(st.binary(max_size=400))
async def test_random_bytes(data: bytes) -> None:
    assert Fault.END in faults(await verified(data))


@given(st.data())
async def test_random_damage(data: st.DataObject) -> None:
    changed = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(DATA) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=8))
        changed[at : at + len(piece)] = piece
    length = data.draw(st.integers(0, len(changed)) | st.just(len(changed)))
    audit = await verified(bytes(changed[:length]))
    for each in PUTS:
        extent = slice(each.offset, each.offset + each.size)
        found = [member for member in audit.members if (member.offset, member.size) == (each.offset, each.size)]
        if found and found[0].sound and each.size > 8:
            assert changed[:length][extent] == DATA[extent], "damaged bytes were called sound"


async def test_a_directory_that_promises_too_much() -> None:
    end_at = DATA.rindex(END_MAGIC)
    for at, number in ((10, 65_534), (12, 0xFFFF_FFFE), (16, 0xFFFF_FFFE), (10, 65_535), (12, 0xFFFF_FFFF), (10, 0)):
        changed = bytearray(DATA)
        struct.pack_into("<H" if at == 10 else "<I", changed, end_at + at, number)
        audit = await verified(bytes(changed))
        assert faults(audit) == {Fault.DIRECTORY}
        assert sound(audit) == list(FILES)
