"""The commit object as a ZIP archive: right for everybody's ZIP programs, wherever its bytes come from and go."""

from __future__ import annotations

import io
import mmap
import os
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.commits import archive
from lakefs_fuse.commits.archive import (
    RECORD_NAME,
    ArchiveBuilder,
    Member,
    build,
    commit_key,
    fd_sink,
    locate,
    parse_commit_key,
)
from lakefs_fuse.commits.record import UNSET, encode
from lakefs_fuse.store.protocol import Buffer, FileSlice
from tests.commits.archives import FILES, commit_of, fixed, member
from tests.commits.records import paths, record_of

RECORD = encode(record_of())
S = 1_000_000_000


def opens_everywhere(path: Path) -> None:
    """Python's zipfile, its command line and, where it is installed, unzip find nothing wrong."""
    with zipfile.ZipFile(path) as pack:
        assert pack.testzip() is None
    run = subprocess.run([sys.executable, "-m", "zipfile", "-t", path], capture_output=True, text=True, check=True)
    assert run.stdout == "Done testing\n"
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tqq", path], capture_output=True, check=True)


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "pack.zip"
    path.write_bytes(data)
    return path


# -- what is in it


def test_every_zip_program_reads_it(tmp_path: Path) -> None:
    data = commit_of(FILES)
    path = written(tmp_path, data)
    opens_everywhere(path)
    with zipfile.ZipFile(path) as pack:
        assert pack.namelist() == [*FILES, RECORD_NAME]
        assert {name: pack.read(name) for name in FILES} == FILES
        for info in pack.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            assert info.flag_bits == 0x800
            assert info.create_version == 45
            assert info.extract_version == 20
            assert not info.extra.startswith(b"\x01\x00"), "ZIP64 where nothing needs it"


def test_the_comment_finds_the_record() -> None:
    data = build([member("a", b"abc")], fixed(RECORD))
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        version, offset, length, crc = pack.comment.split(b" ")
    assert version == b"lakefs1"
    assert data[int(offset) : int(offset) + int(length)] == RECORD
    assert crc == b"%08x" % zlib.crc32(RECORD)
    where = locate(data[-100:], len(data))
    assert (where.offset, where.length, where.crc) == (int(offset), len(RECORD), zlib.crc32(RECORD))


@given(st.dictionaries(paths, st.binary(max_size=2000), max_size=12), st.binary(min_size=1, max_size=300))
@pytest.mark.integration  # takes seconds
def test_offsets_are_those_of_the_bytes(files: dict[str, bytes], record: bytes) -> None:
    given_offsets: list[int] = []

    def make_record(offsets: list[int]) -> bytes:
        given_offsets.extend(offsets)
        return record

    data = build([member(path, content) for path, content in files.items()], make_record)
    for offset, content in zip(given_offsets, files.values(), strict=True):
        assert data[offset : offset + len(content)] == content
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        assert pack.testzip() is None
        assert pack.namelist() == [*files, RECORD_NAME]
        assert pack.read(RECORD_NAME) == record


def test_the_same_files_make_the_same_bytes() -> None:
    assert commit_of(FILES) == commit_of(FILES)


def test_a_commit_of_names_only(tmp_path: Path) -> None:
    path = written(tmp_path, build([], fixed(RECORD)))
    opens_everywhere(path)
    assert path.stat().st_size < len(RECORD) + 250


# -- attributes


def unzipped(tmp_path: Path, members: list[Member]) -> Path:
    path = written(tmp_path, build(members, fixed(RECORD)))
    opens_everywhere(path)
    return path


def extra_fields(info: zipfile.ZipInfo) -> dict[int, bytes]:
    fields, at = {}, 0
    while at < len(info.extra):
        kind, length = (int.from_bytes(info.extra[at + k : at + k + 2], "little") for k in (0, 2))
        fields[kind] = info.extra[at + 4 : at + 4 + length]
        at += 4 + length
    return fields


def test_attributes_are_in_the_standard_fields(tmp_path: Path) -> None:
    time_ns = 1_700_000_001_999_999_999
    path = unzipped(tmp_path, [Member("run.sh", b"#!", 2, 0o4751, time_ns, 1000, 4_000_000_000)])
    with zipfile.ZipFile(path) as pack:
        info = pack.getinfo("run.sh")
        assert info.external_attr >> 16 == stat.S_IFREG | 0o4751
        assert info.create_system == 3
        assert info.date_time == (2023, 11, 14, 22, 13, 20)
        fields = extra_fields(info)
    assert fields[0x5455] == b"\x01" + (1_700_000_001).to_bytes(4, "little")
    assert fields[0x7875] == struct.pack("<BBIBI", 1, 4, 1000, 4, 4_000_000_000)
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-q", path, "-d", tmp_path / "out"], check=True)
        found = (tmp_path / "out/run.sh").stat()
        assert found.st_mode & 0o777 == 0o751
        assert found.st_mtime == 1_700_000_001


def test_attributes_nobody_said_are_ordinary(tmp_path: Path) -> None:
    with zipfile.ZipFile(unzipped(tmp_path, [Member("a", b"", 0, UNSET, 0, UNSET, UNSET)])) as pack:
        info = pack.getinfo("a")
    assert info.external_attr >> 16 == stat.S_IFREG | 0o644
    assert extra_fields(info)[0x7875] == bytes((1, 4, 0, 0, 0, 0, 4, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("time_s", "date"),
    [
        (-(1 << 62) // S, (1980, 1, 1, 0, 0, 0)),
        (0, (1980, 1, 1, 0, 0, 0)),
        (315_532_799, (1980, 1, 1, 0, 0, 0)),
        (315_532_802, (1980, 1, 1, 0, 0, 2)),
        ((1 << 31) + 1, (2038, 1, 19, 3, 14, 8)),
        (4_354_819_198, (2107, 12, 31, 23, 59, 58)),
        (4_354_819_200, (2107, 12, 31, 23, 59, 58)),
        ((1 << 62) // S, (2107, 12, 31, 23, 59, 58)),
    ],
)
def test_times_no_zip_can_say_are_cut(tmp_path: Path, time_s: int, date: tuple[int, ...]) -> None:
    with zipfile.ZipFile(unzipped(tmp_path, [Member("a", b"", 0, mtime_ns=time_s * S)])) as pack:
        info = pack.getinfo("a")
    assert info.date_time == date
    assert (0x5455 in extra_fields(info)) == (-(1 << 31) <= time_s < 1 << 31)


def test_symbolic_links(tmp_path: Path) -> None:
    path = unzipped(tmp_path, [Member("link", b"somewhere/else", 14, stat.S_IFLNK | 0o777)])
    with zipfile.ZipFile(path) as pack:
        assert pack.getinfo("link").external_attr >> 16 == stat.S_IFLNK | 0o777
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-q", path, "-d", tmp_path / "out"], check=True)
        assert (tmp_path / "out/link").readlink() == Path("somewhere/else")


# -- where bytes come from and go


def test_to_a_file_a_descriptor_and_memory(tmp_path: Path) -> None:
    def fill(builder: ArchiveBuilder) -> int:
        for path, data in FILES.items():
            builder.add(member(path, data))
        return builder.finish(RECORD)

    pieces: list[Buffer] = []
    size = fill(ArchiveBuilder(pieces.append))
    assert all(isinstance(piece, bytes) for piece in pieces)  # or joining them would hold up all other threads
    expected = b"".join(pieces)
    assert size == len(expected)
    with (tmp_path / "buffered").open("wb") as file:
        assert fill(ArchiveBuilder(file.write)) == size
    with (tmp_path / "descriptor").open("wb", buffering=0) as raw:
        assert fill(ArchiveBuilder(fd_sink(raw.fileno()))) == size
    assert (tmp_path / "buffered").read_bytes() == (tmp_path / "descriptor").read_bytes() == expected


def test_a_descriptor_that_takes_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[:7]))
    with (tmp_path / "out").open("wb", buffering=0) as raw:
        sink = fd_sink(raw.fileno())
        sink(b"some bytes that take more than one call")
        sink(memoryview(b"and some more"))
    assert (tmp_path / "out").read_bytes() == b"some bytes that take more than one calland some more"


@pytest.mark.parametrize("slice_bytes_max", [0, 1000, 1 << 20])
def test_slices_of_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slice_bytes_max: int) -> None:
    monkeypatch.setattr(archive, "SLICE_BYTES_MAX", slice_bytes_max)
    content = os.urandom(3000)
    (tmp_path / "staged").write_bytes(content)
    with (tmp_path / "staged").open("rb") as file:
        slices = [FileSlice(file.fileno(), offset, length) for offset, length in ((0, 3000), (100, 50), (2999, 3))]
        data = build([Member(str(n), part, part.length) for n, part in enumerate(slices)], fixed(RECORD))
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        assert pack.testzip() is None
        assert [pack.read(name) for name in "012"] == [content, content[100:150], content[2999:] + b"\0\0"]


def test_a_large_slice_is_never_in_memory_whole(tmp_path: Path) -> None:
    size = archive.SLICE_BYTES_MAX + 5
    longest = 0
    crc = 0

    def sink(data: Buffer) -> None:
        nonlocal longest, crc
        longest, crc = max(longest, len(data)), zlib.crc32(data, crc)

    with (tmp_path / "staged").open("wb+") as file:
        file.truncate(size)
        builder = ArchiveBuilder(sink)
        builder.add(Member("large", FileSlice(file.fileno(), 0, size), size))
    assert longest <= 1 << 20
    assert builder.size > size


def test_a_size_that_is_not_the_datas_is_refused() -> None:
    builder = ArchiveBuilder(io.BytesIO().write)
    for size in (2, 4):
        with pytest.raises(ValueError, match="3 bytes"):
            builder.add(Member("a", b"abc", size))
    assert builder.size == builder.members == 0


def test_nothing_follows_the_end() -> None:
    builder = ArchiveBuilder(io.BytesIO().write)
    for refused in (b"", bytes(archive.RECORD_BYTES_MAX + 1)):
        with pytest.raises(ValueError, match="record of"):
            builder.finish(refused)
    builder.finish(RECORD)
    with pytest.raises(ValueError, match="finished"):
        builder.add(member("a"))
    with pytest.raises(ValueError, match="record"):
        builder.finish(RECORD)


# -- beyond what ZIP could do at first


@pytest.mark.long
def test_more_files_than_16_bits_count(tmp_path: Path) -> None:
    path = tmp_path / "many.zip"
    with path.open("wb") as file:
        builder = ArchiveBuilder(file.write)
        for number in range(66_000):
            builder.add(member(f"{number}", b"%d" % number))
        builder.finish(RECORD)
    opens_everywhere(path)
    with zipfile.ZipFile(path) as pack:
        assert len(pack.infolist()) == 66_001
        assert pack.read("65999") == b"65999"


@pytest.mark.parametrize("members", [pytest.param(65_533, marks=pytest.mark.long), 65_534, 65_535])
def test_zip64_begins_where_it_must(members: int) -> None:
    data = build([member("a")] * members, fixed(RECORD))
    assert (b"PK\x06\x06" in data[-200:]) == (members + 1 >= 65_535)
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        assert len(pack.infolist()) == members + 1


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "far.zip"
    with path.open("wb") as file:
        builder = ArchiveBuilder(file.write)
        builder.add(member("near", b"before the gap"))
        builder.size = file.seek(5 << 30)  # as if five gigabytes had been packed
        offset = builder.add(member("far", b"behind the gap"))
        builder.finish(RECORD)
    assert offset > 5 << 30
    opens_everywhere(path)
    with zipfile.ZipFile(path) as pack:
        assert pack.read("far") == b"behind the gap"
        assert pack.read("near") == b"before the gap"
        assert pack.getinfo("far").extract_version == 45


@pytest.mark.integration  # takes seconds
def test_a_file_beyond_4_gib(tmp_path: Path) -> None:
    size = (4 << 30) + 3
    path = tmp_path / "huge.zip"
    zeros = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with zeros, memoryview(zeros) as view, path.open("wb") as file:

        def sink(data: Buffer) -> None:
            if len(data) == size:
                file.seek(size, os.SEEK_CUR)
            else:
                file.write(data)

        builder = ArchiveBuilder(sink)
        offset = builder.add(Member("huge", view, size))
        after = builder.add(member("after", b"it"))
        builder.finish(RECORD)
    assert after > offset + size
    with zipfile.ZipFile(path) as pack:
        assert pack.getinfo("huge").file_size == pack.getinfo("huge").compress_size == size
        assert pack.read("after") == b"it"
        with pack.open("huge") as huge:
            assert huge.read(10) == bytes(10)


# -- keys


@given(st.integers(0, 1 << 62), st.from_regex(r"[0-9a-f]{8}", fullmatch=True))
def test_keys_and_back(time: int, writer: str) -> None:
    assert parse_commit_key(commit_key(time, writer)) == (time, writer)


@given(st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_keys_sort_by_time(one: int, other: int) -> None:
    assert (commit_key(one, "0" * 8) < commit_key(other, "0" * 8)) == (one < other)


@pytest.mark.parametrize(
    ("time", "writer"),
    [(-1, "0badcafe"), (1 << 63, "0badcafe"), (1, "0BADCAFE"), (1, "0badcaf"), (1, "0badcafe\n"), (1, "../../..")],
)
def test_commits_that_cannot_be(time: int, writer: str) -> None:
    with pytest.raises(ValueError, match="no commit"):
        commit_key(time, writer)


GOOD = ".lakefs/commits/17979cfe362a0000-0badcafe.zip"


@pytest.mark.parametrize(
    "key",
    [
        "", "a", ".lakefs/commits/", GOOD.upper(), GOOD + "\n", "x" + GOOD, GOOD.removeprefix(".lakefs/"), GOOD[:-4],
        GOOD.replace("1797", "179"), GOOD.replace("1797", "4797"), GOOD.replace("0badcafe", "0badcafe0"),
        GOOD.replace("1797", "١٧٩٧"), GOOD.replace("0bad", "0BAD"), GOOD.replace("-", "_"),
        GOOD.replace(".lakefs", "xlakefs"),
        GOOD.replace("commits/", "commits/x/"), GOOD.replace("1797", "+797"), GOOD.replace("1797", "0x17"),
    ],
)  # fmt: skip
def test_keys_of_other_things(key: str) -> None:
    assert parse_commit_key(GOOD) == (1_700_000_000_000_000_000, "0badcafe")
    assert parse_commit_key(key) is None
