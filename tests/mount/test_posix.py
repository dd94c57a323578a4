"""What POSIX calls do through the kernel, on both kinds of store."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import stat
import subprocess

import pytest

from tests.mount.conftest import Place
from tests.mount.lakes import MIB, Directory, eventually, noise
from tests.mount.posix_errors import error_of, opened


def test_create_read_back_overwrite(here: Place) -> None:
    file = here.path / "a.bin"
    for seed, size in enumerate((0, 1, 4096, 100_001, 3 * MIB + 7)):
        data = noise(size, seed)
        file.write_bytes(data)
        assert file.read_bytes() == data
        assert here.stored("a.bin") == data
        assert file.stat().st_size == size


def test_append(here: Place) -> None:
    file = here.path / "log"
    for number in range(3):
        with file.open("ab") as stream:
            stream.write(b"line %d\n" % number)
        assert here.stored("log") == file.read_bytes()
    assert file.read_bytes() == b"line 0\nline 1\nline 2\n"


def test_o_append_ignores_the_position(here: Place) -> None:
    file = here.path / "log"
    file.write_bytes(b"first\n")
    first = os.open(file, os.O_WRONLY | os.O_APPEND)
    second = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        os.lseek(first, 0, os.SEEK_SET)
        os.write(first, b"second\n")
        os.write(second, b"third\n")
    finally:
        os.close(first)
        os.close(second)
    assert here.stored("log") == b"first\nsecond\nthird\n"


def test_random_writes_into_an_existing_file(here: Place) -> None:
    expected = bytearray(noise(1_000_003, 1))
    file = here.path / "table"
    file.write_bytes(expected)
    fd = os.open(file, os.O_RDWR)
    try:
        for number in range(40):
            at, piece = (number * 7919 * 31) % 1_000_000, noise(1 + number * 53, number)
            os.pwrite(fd, piece, at)
            expected[at : at + len(piece)] = piece
        assert os.pread(fd, len(expected) + 10, 0) == expected
    finally:
        os.close(fd)
    assert here.stored("table") == expected


def test_sparse_file(here: Place) -> None:
    file = here.path / "sparse"
    with file.open("wb") as stream:
        stream.seek(2 * MIB)
        stream.write(b"end")
        stream.seek(MIB // 2)
        stream.write(b"middle")
    expected = bytearray(2 * MIB + 3)
    expected[2 * MIB :] = b"end"
    expected[MIB // 2 : MIB // 2 + 6] = b"middle"
    assert file.read_bytes() == expected
    assert here.stored("sparse") == expected


def test_truncate_by_path_is_durable_when_it_returns(here: Place) -> None:
    data = noise(300_000)
    file = here.path / "cut"
    file.write_bytes(data)
    os.truncate(file, 100_000)
    assert here.stored("cut") == data[:100_000]
    os.truncate(file, 200_000)
    assert here.stored("cut") == data[:100_000] + bytes(100_000)
    assert file.read_bytes() == data[:100_000] + bytes(100_000)
    os.truncate(file, 0)
    assert here.stored("cut") == b""


def test_ftruncate(here: Place) -> None:
    data = noise(50_000)
    file = here.path / "cut"
    with file.open("w+b", buffering=0) as stream:
        stream.write(data)
        stream.truncate(10_000)
        assert os.fstat(stream.fileno()).st_size == 10_000
        stream.truncate(20_000)
        stream.seek(30_000)
        stream.write(b"tail")
    expected = data[:10_000] + bytes(20_000) + b"tail"
    assert here.stored("cut") == expected
    assert file.read_bytes() == expected


def test_o_excl(here: Place) -> None:
    file = here.path / "once"
    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    assert here.stored("once") == b""
    assert error_of(opened(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)) == "EEXIST"


def test_o_excl_sees_what_others_made_since(here: Place) -> None:
    """The name was looked up, and found missing, a moment before."""
    file = here.path / "lock"
    assert not file.exists()
    here.outside.replace(here.prefix + "lock", b"theirs")
    assert error_of(opened(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)) == "EEXIST"
    assert here.stored("lock") == b"theirs"


def test_o_excl_of_two_clients_at_once_has_one_winner(here: Place) -> None:
    """Another client's object that appears while the file is open makes close() fail, and stays."""
    file = here.path / "lock"
    fd = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(fd, b"ours")
    here.outside.replace(here.prefix + "lock", b"theirs")
    assert error_of(lambda: os.close(fd)) == "EEXIST"
    eventually(lambda: file.read_bytes() == b"theirs", "the name is the other client's on this node, too")
    assert here.stored("lock") == b"theirs"


def test_o_trunc(here: Place) -> None:
    file = here.path / "again"
    file.write_bytes(noise(70_000))
    fd = os.open(file, os.O_WRONLY | os.O_TRUNC)
    assert os.fstat(fd).st_size == 0
    assert here.stored("again") == noise(70_000), "nothing is visible before close"
    os.write(fd, b"short")
    os.close(fd)
    assert here.stored("again") == b"short"
    assert file.read_bytes() == b"short"


def test_shared_mapping(here: Place) -> None:
    file = here.path / "mapped"
    file.write_bytes(bytes(300_000))
    fd = os.open(file, os.O_RDWR)
    with mmap.mmap(fd, 0) as view:
        view[1000:1010] = b"0123456789"
        view[299_990:] = b"abcdefghij"
        view.flush()
        os.fsync(fd)
        stored = here.stored("mapped")
        assert stored[1000:1010] == b"0123456789"
        assert stored[299_990:] == b"abcdefghij"
        view[0:4] = b"late"
    os.close(fd)
    assert here.stored("mapped")[:4] == b"late"
    assert here.stored("mapped") == file.read_bytes()


def test_private_mapping_reads(here: Place) -> None:
    data = noise(3 * MIB)
    file = here.path / "mapped"
    file.write_bytes(data)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[:] == data


def test_errors(here: Place) -> None:
    file, directory = here.path / "file", here.path / "directory"
    file.write_bytes(b"x")
    directory.mkdir()
    assert error_of(opened(here.path / "missing", os.O_RDONLY)) == "ENOENT"
    assert error_of((here.path / "missing").unlink) == "ENOENT"
    assert error_of((here.path / "missing").rmdir) == "ENOENT"
    assert error_of(opened(here.path / "missing" / "below", os.O_CREAT | os.O_WRONLY)) == "ENOENT"
    assert error_of(opened(directory, os.O_WRONLY)) == "EISDIR"
    assert error_of(directory.unlink) == "EISDIR"
    assert error_of(file.rmdir) == "ENOTDIR"
    assert error_of(lambda: os.listdir(file)) == "ENOTDIR"
    assert error_of(opened(file / "below", os.O_CREAT | os.O_WRONLY)) == "ENOTDIR"
    assert error_of(file.mkdir) == "EEXIST"
    assert error_of(opened(here.path / ("n" * 256), os.O_CREAT | os.O_WRONLY)) == "ENAMETOOLONG"
    assert error_of(lambda: os.open(os.fsencode(here.path) + b"/\xff", os.O_CREAT | os.O_WRONLY)) == "EILSEQ"
    assert error_of(lambda: os.mkdir(os.fsencode(here.path) + b"/\xff")) == "EILSEQ"


def test_a_key_of_more_than_1024_bytes_is_refused(here: Place) -> None:
    at = here.path
    for _ in range(3):
        at = at / ("d" * 250)
        at.mkdir()
    room = 1024 - len(here.outside.source_prefix) - len(str(at.relative_to(here.lake.path))) - 1
    fits = at / ("n" * room)
    fits.write_bytes(b"deep")
    assert fits.read_bytes() == here.stored(str(fits.relative_to(here.path))) == b"deep"
    assert error_of(opened(at / ("n" * (room + 1)), os.O_CREAT | os.O_WRONLY)) == "ENAMETOOLONG"


def test_names_in_utf8_and_with_strange_characters(here: Place) -> None:
    names = {"größe", "日本語", "a b", "plus+and&", "100%25", "quote'\"", "-dash", "emoji🙂", "a\nb", "#x?y", "~*|"}
    for name in names:
        (here.path / name).write_text(name)
    assert {child.name for child in here.path.iterdir()} == names
    assert here.names() == names
    for name in names:
        assert here.stored(name) == (here.path / name).read_bytes() == name.encode()


def test_a_character_that_the_store_would_change_is_refused(here: Place) -> None:
    """SeaweedFS turns backslashes into slashes; a plain directory takes them as they are."""
    file = here.path / "back\\slash"
    if here.lake.source.startswith("s3:"):
        assert error_of(opened(file, os.O_CREAT | os.O_WRONLY)) == "EINVAL"
        assert here.names() == set()
    else:
        file.write_bytes(b"x")
        assert here.names() == {"back\\slash"}


def test_reserved_names(here: Place) -> None:
    root = here.lake.path
    assert error_of((root / ".lakefs").mkdir) == "EPERM"
    assert ".lakefs" not in os.listdir(root)
    assert error_of(opened(root / ".lakefs" / "x", os.O_RDONLY)) == "ENOENT"


def test_statfs_counts_names_and_bytes(here: Place) -> None:
    (here.path / "directory").mkdir()
    (here.path / "file").write_bytes(noise(100_000))
    names, size = 0, 0
    for above, directories, files in os.walk(here.lake.path):
        names += len(directories) + len(files)
        size += sum(os.lstat(os.path.join(above, name)).st_size for name in files)
    assert size >= 100_000

    def is_counted() -> bool:
        told = os.statvfs(here.path)
        used = told.f_blocks - told.f_bfree
        return (told.f_files - told.f_ffree, used) == (names, -(-size // told.f_frsize))

    eventually(is_counted, "every name of the lake is counted")
    assert os.statvfs(here.path).f_namemax == 255


def test_statfs_has_room_where_a_write_would_have_it(here: Place) -> None:
    """The disk of a local directory; a bucket has no bound, and no check of the free space may refuse."""
    told = os.statvfs(here.path)
    free_bytes = told.f_bavail * told.f_frsize
    if isinstance(here.outside, Directory):
        assert free_bytes == pytest.approx(shutil.disk_usage(here.outside.root).free, rel=0.2)
    else:
        assert free_bytes == 1 << 50


def test_stat(here: Place) -> None:
    file = here.path / "file"
    file.write_bytes(noise(1000))
    told = file.stat()
    assert stat.S_ISREG(told.st_mode)
    assert told.st_nlink == 1
    assert told.st_blocks == 2
    assert told.st_uid == os.getuid()
    assert stat.S_ISDIR(here.path.stat().st_mode)


def test_readers_and_a_writer_of_one_file(here: Place) -> None:
    """Readers on this node see what was written before it is durable, as on any filesystem."""
    file = here.path / "shared"
    with file.open("wb", buffering=0) as writer, file.open("rb", buffering=0) as reader:
        writer.write(b"one")
        assert os.pread(reader.fileno(), 100, 0) == b"one"
        writer.write(b"two")
        assert os.pread(reader.fileno(), 100, 0) == b"onetwo"
        assert file.stat().st_size == 6
        assert here.names() == set()
    assert here.stored("shared") == b"onetwo"


def test_seek_end_and_reads_beyond_it(here: Place) -> None:
    file = here.path / "file"
    file.write_bytes(b"0123456789")
    with file.open("rb", buffering=0) as stream:
        assert stream.seek(0, os.SEEK_END) == 10
        assert stream.read(5) == b""
        assert os.pread(stream.fileno(), 5, 8) == b"89"
        assert os.pread(stream.fileno(), 5, 1 << 40) == b""


def test_fallocate(here: Place) -> None:
    """glibc's posix_fallocate writes where the filesystem cannot."""
    file = here.path / "allocated"
    with file.open("wb", buffering=0) as stream:
        os.posix_fallocate(stream.fileno(), 0, 100_000)
        os.pwrite(stream.fileno(), b"x", 50_000)
    assert file.stat().st_size == 100_000
    assert here.stored("allocated") == bytes(50_000) + b"x" + bytes(49_999)


def test_copy_within_the_mount(here: Place) -> None:
    data = noise(5 * MIB)
    (here.path / "from").write_bytes(data)
    subprocess.run(["cp", "from", "to"], cwd=here.path, check=True)
    assert here.stored("to") == data


def test_locks_of_this_node(here: Place) -> None:
    file = here.path / "locked"
    with file.open("w") as first, file.open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert error_of(lambda: fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)) == "EAGAIN"
        fcntl.flock(first, fcntl.LOCK_UN)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
