"""Sums of files as they pass by: right ones are right, every damaged byte that a sum covers is found."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import zipfile
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefs_fuse.admin.checkpoint_sums import (
    Check,
    Finding,
    TailTooShort,
    Verdict,
    etag_check,
    parse_sha256sums,
    part_layouts,
    read_directory,
    safetensors_check,
    sha256_check,
    zip_check,
)
from lakefs_fuse.config import MIB
from lakefs_fuse.staging.part_layout import PartLayout
from tests.tiers import examples


def run(check: Check, data: bytes, pieces: Sequence[int] = ()) -> Finding:
    """Fed in pieces that end at these places."""
    view, at = memoryview(data), 0
    for end in (*sorted(pieces), len(data)):
        check.feed(view[at:end])
        at = max(at, end)
    return check.finish()


def archive(*, compression: int = zipfile.ZIP_STORED, members: int = 4, comment: bytes = b"") -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as made:
        for number in range(members):
            made.writestr(f"archive/data/{number}", random.Random(number).randbytes(1000 * number))
        made.comment = comment
    return target.getvalue()


def check_of_zip(data: bytes, tail: int = 1 << 20) -> Check:
    return zip_check(read_directory(data[-tail:], len(data)))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(0, 6500), max_size=12),
    st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
    st.binary(max_size=30).filter(lambda comment: b"PK" not in comment),  # zipfile takes that for the end of the ZIP
)
def test_a_whole_zip_is_right_however_it_comes(pieces: list[int], compression: int, comment: bytes) -> None:
    data = archive(compression=compression, comment=comment)
    assert run(check_of_zip(data), data, [min(piece, len(data)) for piece in pieces]).verdict is Verdict.RIGHT


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_every_byte_of_a_member_counts(compression: int) -> None:
    data = archive(compression=compression)
    infos = zipfile.ZipFile(io.BytesIO(data)).infolist()
    for info in infos[1:]:
        at = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        found = run(check_of_zip(damaged), damaged)
        assert found.verdict is Verdict.WRONG
        assert info.filename in found.problem


def test_zip_without_members_proves_nothing() -> None:
    data = archive(members=0)
    assert run(check_of_zip(data), data).verdict is Verdict.UNKNOWN


def test_members_that_are_not_where_they_should_be() -> None:
    data = archive()
    shifted = b"x" + data[:-1]
    with pytest.raises(zipfile.BadZipFile):
        check_of_zip(shifted)
    info = zipfile.ZipFile(io.BytesIO(data)).infolist()[2]
    lost = data[: info.header_offset] + b"XXXX" + data[info.header_offset + 4 :]
    assert run(check_of_zip(lost), lost).verdict is Verdict.WRONG
    cut = data[: info.header_offset + 100]
    assert "midst" in run(check_of_zip(data), cut).problem


def test_a_zip_without_sums_proves_nothing() -> None:
    """torch.serialization.set_crc32_options(False): no member has its sum, all are where they should be."""
    data = bytearray(archive())
    for info in zipfile.ZipFile(io.BytesIO(bytes(data))).infolist()[1:]:  # the first one is empty
        wrong = struct.pack("<I", info.CRC ^ 0xFFFF)
        at = data.rfind(struct.pack("<I", info.CRC), info.header_offset + 40 + info.compress_size)
        data[at : at + 4] = wrong
    assert run(check_of_zip(bytes(data)), bytes(data)).verdict is Verdict.UNKNOWN


def test_a_directory_that_is_longer_than_the_tail() -> None:
    data = archive(members=60)
    tail = 100
    while True:
        try:
            infos = read_directory(data[-tail:], len(data))
            break
        except TailTooShort as error:
            assert len(data) - error.start > tail
            tail = len(data) - error.start
    assert len(infos) == 60
    with pytest.raises(zipfile.BadZipFile):
        read_directory(data[:-30], len(data) - 30)


def safetensors(header: object, data: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


GOOD = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [6, 10]},
    "a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6]},
}


def test_the_header_of_safetensors_against_the_size() -> None:
    whole = safetensors(GOOD, bytes(10))
    for pieces in ((), (3,), (8,), (9, 20), tuple(range(0, len(whole), 2))):
        assert run(safetensors_check(len(whole)), whole, pieces).verdict is Verdict.RIGHT
    for damaged, text in (
        (whole[:-1], "tells of"),
        (whole + b"x", "tells of"),
        (b"\xff" * 8 + whole[8:], "length"),
        (whole[:5], "length"),
        (whole[:8] + b"}" + whole[9:], "read"),
        (safetensors({"a": {"data_offsets": [0, 6]}, "b": {"data_offsets": [5, 10]}}, bytes(10)), "gap"),
        (safetensors([1], b""), "read"),
        (safetensors({"a": {"data_offsets": [float("inf"), 2]}}, b""), "read"),
    ):
        found = run(safetensors_check(len(damaged)), damaged)
        assert found.verdict is Verdict.WRONG
        assert text in found.problem


def multipart_etag(data: bytes, sizes: Sequence[int]) -> str:
    digests, at = [], 0
    for size in sizes:
        digests.append(hashlib.md5(data[at : at + size]).digest())
        at += size
    assert at == len(data)
    return f"{hashlib.md5(b''.join(digests)).hexdigest()}-{len(sizes)}"


@pytest.mark.parametrize("part", [5 * MIB, 8 * MIB, 16 * MIB])
def test_etags_of_parts_are_recognised(part: int) -> None:
    data = random.Random(1).randbytes(20 * MIB + 77)
    sizes = [min(part, len(data) - at) for at in range(0, len(data), part)]
    etag = multipart_etag(data, sizes)
    check = etag_check(etag, len(data), ours=False)
    assert check is not None
    assert run(check, data, [7 * MIB, 15 * MIB]).verdict is Verdict.RIGHT
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    again = etag_check(etag, len(data), ours=False)
    assert again is not None
    assert run(again, damaged).verdict is Verdict.WRONG


def test_own_parts_grow_along_the_file() -> None:
    size = 17 * 1024 * MIB
    layout = PartLayout()
    (sizes,) = part_layouts(f"{'0' * 32}-{layout.count(size)}", size, ours=True)
    assert [*sizes[:2], *sizes[1000:1002]] == [16 * MIB, 16 * MIB, 64 * MIB, 64 * MIB]
    assert sum(sizes) == size


def test_etags_that_tell_nothing() -> None:
    for etag in ("1234-5678", "0x8D", "W/abc", "f" * 31, f"{'a' * 32}-9999"):
        assert etag_check(etag, 100, ours=False) is None
    check = etag_check(hashlib.md5(b"").hexdigest(), 0, ours=False)
    assert check is not None
    assert run(check, b"").verdict is Verdict.RIGHT


def test_sha256sums() -> None:
    sums = parse_sha256sums(
        f"{'A' * 64}  model.pt\n{'b' * 64} *sub/x y\n{'c' * 64}  ./z\nnonsense\n{'d' * 63}  short\n".encode()
    )
    assert sums == {"model.pt": "a" * 64, "sub/x y": "b" * 64, "z": "c" * 64}
    right = hashlib.sha256(b"data").hexdigest()
    assert run(sha256_check(right), b"data", [2]).verdict is Verdict.RIGHT
    assert run(sha256_check(right), b"dat4").verdict is Verdict.WRONG
