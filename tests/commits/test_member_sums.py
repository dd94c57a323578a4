"""Which files of a range of a pack are found to be damaged: every range of a pack, every byte of a file."""

from __future__ import annotations

import random
import zipfile
from io import BytesIO

from lakefs_fuse.commits.archive import WRONG_MAX, Member, build, wrong_members
from tests.commits.archives import fixed, member

RNG = random.Random(7)
FILES = {f"d/{number}": RNG.randbytes(size) for number, size in enumerate((700, 0, 1, 90, 300))}


def pack_of(files: dict[str, bytes]) -> tuple[bytes, dict[str, int]]:
    """A pack, and where each file's bytes begin."""
    offsets: list[int] = []

    def make_record(found: list[int]) -> bytes:
        offsets.extend(found)
        return b"a record"

    times = [0, 1 << 62]  # the second does not fit the extra field of 32 bits
    members = [Member(path, data, len(data), mtime_ns=times[n % 2]) for n, (path, data) in enumerate(files.items())]
    raw = build(members, make_record)
    return raw, dict(zip(files, offsets, strict=True))


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def test_wrong_members_of_an_undamaged_pack_are_none_in_any_range() -> None:
    raw, _ = pack_of(FILES)
    for start in range(0, len(raw), 13):
        for end in range(start, len(raw) + 1, 29):
            assert wrong_members(raw[start:end]) == []


def test_wrong_members_with_a_flipped_byte_are_the_file_that_it_is_in() -> None:
    raw, offsets = pack_of(FILES)
    for path, data in FILES.items():
        begin = offsets[path]
        for at in {begin, begin + len(data) // 2, begin + len(data) - 1} if data else ():
            assert wrong_members(flipped(raw, at)) == [(begin, begin + len(data))]


def test_wrong_members_of_a_range_without_the_header_are_none() -> None:
    raw, offsets = pack_of(FILES)
    begin = offsets["d/4"]
    damaged = flipped(raw, begin + 5)
    assert wrong_members(damaged[begin:]) == [], "nothing tells what the sum is"
    assert wrong_members(damaged[: begin + 299]) == [], "the last byte is missing"
    assert wrong_members(damaged[: begin + 300]) == [(begin, begin + 300)]


def test_wrong_members_of_a_damaged_pack_inside_a_pack_do_not_hide_other_files() -> None:
    inner = flipped(*((raw := pack_of(FILES))[0], raw[1]["d/0"]))
    raw_outer, offsets = pack_of({"inner.zip": inner, "after": FILES["d/4"]})
    inside = offsets["inner.zip"] + raw[1]["d/0"]
    assert wrong_members(raw_outer) == [], "the whole file has its sum: what is in it does not matter"
    partly = raw_outer[offsets["inner.zip"] :]
    begin = offsets["after"] - offsets["inner.zip"]
    found = wrong_members(flipped(partly, begin + 1))
    assert (begin, begin + 300) in found
    assert (inside - offsets["inner.zip"], inside - offsets["inner.zip"] + 700) in found


def test_wrong_members_of_an_ordinary_zip_are_none() -> None:
    written = BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("a", FILES["d/0"])
    raw = written.getvalue()
    assert wrong_members(flipped(raw, 40)) == []


def test_wrong_members_stop_at_a_bound() -> None:
    header = build([member("a", b"xy")], fixed(b"r"))[: 30 + 1 + 24]
    assert len(wrong_members((header + b"no") * (2 * WRONG_MAX))) == WRONG_MAX
