"""The create offload: small files that the C library receives differ by their cost only."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lakefs_fuse.meta.entry import MTIME_NS_MAX, MTIME_NS_MIN
from tests.mount.conftest import LakeMaker
from tests.mount.counting import upcalls
from tests.mount.lakes import Lake, eventually, noise
from tests.mount.test_commits import another
from tests.mount.test_kernel_caches import answered
from tests.mount.writeback_lakes import flush, state
from tests.tiers import sized

pytestmark = pytest.mark.usefixtures("with_hooks")
OPTIONS = ("--durability", "writeback", "--writeback-delay", "0.2", "--metadata-ttl", "1h", "--refresh", "1h")
KINDS = ("lookup", "getattr", "create", "write", "setattr", "flush", "release")
FILES = sized(60, 200)
FILE_BYTES_MAX = 256 << 10
SOON_S = 10.0
WITH_EITHER_DURABILITY = pytest.mark.parametrize("lake", ["writeback", "close"], indirect=True)


@pytest.fixture
def lake(make_lake: LakeMaker, request: pytest.FixtureRequest) -> Lake:
    """A mounted lake with a directory `d` whose names the hooks know; its parameter is the durability."""
    durability = getattr(request, "param", "writeback")
    lake = make_lake("file", "--durability", durability, *OPTIONS[2:]).mount()
    lend(lake, "d")
    return lake


def lend(lake: Lake, directory: str) -> None:
    """Files are created in it until that needs no Python."""
    (lake.path / directory).mkdir()

    def is_lent() -> bool:
        before = answered(lake)["create"]
        (lake.path / directory / f"first-{before}-{time.monotonic_ns()}").write_bytes(b"")
        return answered(lake)["create"] > before

    eventually(is_lent, "creating files in a directory needs no Python", SOON_S)


def begin(path: Path, data: bytes, flags: int = 0) -> int:
    """A new file, written to and not closed; its bytes are with the daemon, and Python has not heard of it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags, 0o640)
    os.write(fd, data)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    assert libc.sync_file_range(fd, 0, 0, 7) == 0, "the kernel sends what was written, and asks for no more"
    return fd


@WITH_EITHER_DURABILITY
def test_what_it_spares(lake: Lake) -> None:
    """Every request of every file."""
    before, asked = answered(lake), upcalls(lake)
    for number in range(FILES):
        (lake.path / "d" / f"f{number}").write_bytes(noise(20_000, number))
    after = answered(lake)
    assert {kind: after[kind] - before[kind] for kind in KINDS} == dict.fromkeys(KINDS, FILES)
    asked_now = {kind: count - asked[kind] for kind, count in upcalls(lake).items() if kind in KINDS}
    assert asked_now == dict.fromkeys(KINDS, FILES), "and none besides"
    for number in range(FILES):
        assert (lake.path / "d" / f"f{number}").read_bytes() == noise(20_000, number)
    flush(lake)
    lake.remount()
    assert len([name for name in os.listdir(lake.path / "d") if name.startswith("f")]) >= FILES
    for number in range(FILES):
        assert (lake.path / "d" / f"f{number}").read_bytes() == noise(20_000, number)


def unpack(path: Path, data: bytes, number: int) -> None:
    """As tar does: a name that must be new, then bytes, times, owner and mode."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, data)
    os.utime(fd, ns=(10**18, 10**18 + number))
    os.fchown(fd, os.geteuid(), os.getegid())
    os.fchmod(fd, 0o640)
    os.close(fd)


def test_files_of_tar_need_no_python(lake: Lake) -> None:
    """New names by O_EXCL, and attributes that a program sets before it closes the file."""
    directory, count = lake.path / "d", FILES // 4
    before = answered(lake)
    for number in range(count):
        unpack(directory / f"f{number}", noise(300, number), number)
    after = answered(lake)
    spent = {kind: after[kind] - before[kind] for kind in KINDS}
    assert spent["setattr"] >= 3 * count
    assert {kind: spent[kind] for kind in ("create", "write", "flush", "release")} == dict.fromkeys(
        ("create", "write", "flush", "release"), count
    )
    for remounted in (False, True):
        if remounted:
            flush(lake)
            lake.remount()
        for number in range(count):
            path = directory / f"f{number}"
            found = path.stat()
            assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode)) == (10**18 + number, 0o640)
            assert path.read_bytes() == noise(300, number)


def in_python(lake: Lake) -> dict[str, int]:
    """Requests that Python has handled, by kind."""
    by_library = answered(lake)
    return {kind: count - by_library.get(kind, 0) for kind, count in upcalls(lake).items()}


def compile_module(source: Path, number: int) -> None:
    """As `compileall` does: the attributes of the source, its bytes, and a temporary name beside the cache."""
    target = source.parent / "__pycache__" / f"{source.stem}.pyc"
    assert source.stat().st_size == 300
    assert source.read_bytes() == noise(300, number)
    assert source.stat().st_nlink == 1
    fd = os.open(f"{target}.1234", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(fd, noise(200, number))
    os.close(fd)
    Path(f"{target}.1234").replace(target)
    assert target.exists()


def test_files_that_were_just_written_are_used_without_python(make_lake: LakeMaker) -> None:
    lake = make_lake("file", *OPTIONS).mount()
    package, count = lake.path / "package", 8
    (package / "__pycache__").mkdir(parents=True)
    before = in_python(lake)
    for number in range(count):
        (package / f"m{number}.py").write_bytes(noise(300, number))
    for number in range(count):
        compile_module(package / f"m{number}.py", number)
    after = in_python(lake)
    spent = {kind: count - before[kind] for kind, count in after.items() if count != before[kind]}
    assert spent.pop("rename") == count
    assert sum(spent.values()) <= 3, spent


@WITH_EITHER_DURABILITY
@pytest.mark.parametrize("frees", ["unlink", "replace"])
def test_name_that_is_free_again_is_made_without_python(lake: Lake, frees: str) -> None:
    """As programs make it that save by a temporary name, and rsync, whose names are hidden."""
    temporary, saved, count = lake.path / "d" / ".saved.Ab12Cd", lake.path / "d" / "saved", FILES // 4
    before = in_python(lake)
    for number in range(count):
        temporary.write_bytes(noise(300, number))
        if frees == "replace":
            temporary.replace(saved)
            assert saved.read_bytes() == noise(300, number)
        else:
            assert temporary.read_bytes() == noise(300, number)
            temporary.unlink()
        assert not temporary.exists()
    after = in_python(lake)
    spent = {kind: after[kind] - before[kind] for kind in ("create", "write", "flush", "release", "getattr")}
    assert spent == dict.fromkeys(spent, 0)
    assert after["lookup"] - before["lookup"] <= count, "the name that is replaced"
    flush(lake)
    lake.remount()
    assert os.listdir(lake.path / "d").count(".saved.Ab12Cd") == 0
    assert saved.exists() is (frees == "replace")


def test_files_that_rsync_receives_need_python_for_attributes_and_renames_alone(lake: Lake) -> None:
    directory, count = lake.path / "d", FILES // 4
    before = in_python(lake)
    for number in range(count):
        temporary = directory / f".f{number}.Ab12Cd"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, noise(300, number))
        os.close(fd)
        os.utime(temporary, ns=(10**18, 10**18 + number))
        temporary.chmod(0o644)
        temporary.replace(directory / f"f{number}")
    after = in_python(lake)
    spent = {kind: count - before[kind] for kind, count in after.items() if count != before[kind]}
    assert spent == {"setattr": 2 * count, "rename": count}
    for number in range(count):
        found = (directory / f"f{number}").stat()
        assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode)) == (10**18 + number, 0o644)


def test_files_of_shell_redirections_need_no_python(lake: Lake) -> None:
    """A shell duplicates the descriptor and closes the first one before anything is written."""
    directory, count = lake.path / "d", 10
    before = in_python(lake)
    script = f"for i in $(seq {count}); do echo line $i > f$i; expr $i + 1 > g$i; : > e$i; touch t$i; done"
    subprocess.run(["bash", "-c", script], cwd=directory, check=True)
    after = in_python(lake)
    spent = {kind: after[kind] - before[kind] for kind in KINDS if after[kind] != before[kind]}
    assert spent == {}
    for number in range(1, count + 1):
        assert (directory / f"f{number}").read_text() == f"line {number}\n"
        assert (directory / f"g{number}").read_text() == f"{number + 1}\n"
        assert (directory / f"e{number}").read_bytes() == (directory / f"t{number}").read_bytes() == b""
    lake.kill()
    lake.mount()
    assert {f"{kind}{number}" for kind in "efgt" for number in range(1, count + 1)} <= set(os.listdir(directory))


@pytest.mark.parametrize("how", ["held elsewhere", "another of its name", "alone"])
def test_empty_file_is_acknowledged_by_the_last_close_of_its_process(lake: Lake, how: str) -> None:
    directory, held = lake.path / "d", [-1]
    (directory / "below").mkdir()
    fd = os.open(directory / "empty", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if how == "held elsewhere":
        held = [os.dup(fd)]
    elif how == "another of its name":
        held = [os.open(directory / "below" / "empty", os.O_WRONLY | os.O_CREAT)]
    before = accepted(lake)
    os.close(fd)
    if how == "held elsewhere":
        assert accepted(lake) == before
        os.close(held.pop())
    assert accepted(lake) == before + 1
    for other in held:
        if other >= 0:
            os.close(other)


def test_empty_file_that_execve_closes_is_acknowledged(lake: Lake) -> None:
    before = accepted(lake)
    script = "import os; os.open('empty', os.O_WRONLY | os.O_CREAT); os.execv('/bin/true', ['true'])"
    subprocess.run([sys.executable, "-c", script], cwd=lake.path / "d", check=True, timeout=SOON_S)
    eventually(lambda: accepted(lake) == before + 1, "the last close publishes it", SOON_S)
    assert (lake.path / "d" / "empty").read_bytes() == b""


def accepted(lake: Lake) -> int:
    """How many closes were acknowledged."""
    of_writeback = lake.stats()["writeback"]
    assert isinstance(of_writeback, dict)
    return int(of_writeback["accepted"])


def test_second_epoch_over_files_needs_no_python(lake: Lake) -> None:
    """Of a fresh mount: the kernel requests the attributes of a file after each open of it but the first."""
    paths = [lake.path / "d" / f"f{number}" for number in range(FILES // 4)]
    for number, path in enumerate(paths):
        path.write_bytes(noise(300, number))
    flush(lake)
    lake.remount(*OPTIONS)
    for repeated in (False, True):
        before, by_library = in_python(lake), answered(lake)["getattr"]
        for number, path in enumerate(paths):
            assert path.read_bytes() == noise(300, number)
        spent = {kind: count - before[kind] for kind, count in in_python(lake).items() if count != before[kind]}
        assert not repeated or (spent == {} and answered(lake)["getattr"] - by_library >= len(paths))


@WITH_EITHER_DURABILITY
def test_new_file_that_is_truncated_when_it_is_open_needs_no_python(lake: Lake) -> None:
    """As split makes its files."""
    directory, count = lake.path / "d", FILES // 4
    before = in_python(lake)
    for number in range(count):
        fd = os.open(directory / f"x{number}", os.O_WRONLY | os.O_CREAT, 0o640)
        os.ftruncate(fd, 0)
        os.write(fd, noise(300, number))
        os.close(fd)
    after = in_python(lake)
    assert {kind: after[kind] - before[kind] for kind in KINDS} == dict.fromkeys(KINDS, 0)
    fd = os.open(directory / "longer", os.O_RDWR | os.O_CREAT, 0o640)
    os.write(fd, b"12345")
    os.ftruncate(fd, 3)
    os.ftruncate(fd, 6)
    os.close(fd)
    assert (directory / "longer").read_bytes() == b"123\0\0\0"
    for number in range(count):
        assert (directory / f"x{number}").read_bytes() == noise(300, number)


def test_directory_that_exists_is_made_again_without_python(lake: Lake) -> None:
    """As `makedirs` does before each file: the kernel looks the name up each time."""
    directory = lake.path / "d" / "below"
    directory.mkdir()
    before = in_python(lake)["lookup"]
    for _ in range(5):
        with pytest.raises(FileExistsError):
            directory.mkdir()
    assert in_python(lake)["lookup"] == before
    directory.rename(lake.path / "renamed")
    directory.mkdir()
    with pytest.raises(FileExistsError):
        (lake.path / "renamed").mkdir()
    directory.rmdir()
    directory.mkdir()
    (lake.path / "renamed").rmdir()
    assert not (lake.path / "renamed").exists()
    with pytest.raises(FileNotFoundError):
        (lake.path / "renamed" / "below").mkdir()
    assert directory.is_dir()


def test_directory_that_another_node_removes_can_be_made_again(make_lake: LakeMaker, tmp_path: Path) -> None:
    options = ("--durability", "writeback", "--writeback-delay", "0.1", "--metadata-ttl", "1h", "--refresh", "0.2")
    lake = make_lake("file", *options).mount()
    directory = lake.path / "d"
    directory.mkdir()
    flush(lake)

    def is_made() -> bool:
        try:
            directory.mkdir()
        except FileExistsError:
            return False
        return True

    assert not is_made()
    with another(lake, tmp_path) as other:
        (other.path / "d").rmdir()
        eventually(is_made, "the removal is seen", SOON_S)
        assert directory.is_dir()


def test_attributes_of_a_file_that_was_just_written_follow_what_changes_them(lake: Lake) -> None:
    """The kernel asks for them after each close."""
    path, beside = lake.path / "d" / "f", lake.path / "d" / "beside"

    def attributes() -> tuple[int, int, int, int]:
        path.read_bytes()
        found = path.stat()
        assert os.stat(path).st_blocks == -(-found.st_size // 512)
        return stat.S_IMODE(found.st_mode), found.st_size, found.st_nlink, found.st_mtime_ns

    path.write_bytes(b"first")
    first = attributes()
    assert first[1:3] == (5, 1)
    path.chmod(0o600)
    assert attributes() == (0o600, *first[1:])
    with path.open("ab") as file:
        file.write(b" and more")
    assert attributes()[:3] == (0o600, 14, 1)
    os.truncate(path, 3)
    os.utime(path, ns=(10**18, 10**18))
    assert attributes() == (0o600, 3, 1, 10**18)
    flush(lake)
    assert attributes() == (0o600, 3, 1, 10**18)
    beside.hardlink_to(path)
    assert attributes() == (0o600, 3, 2, 10**18)
    beside.unlink()
    assert attributes() == (0o600, 3, 1, 10**18)
    with path.open("rb") as opened:
        path.unlink()
        assert os.fstat(opened.fileno()).st_nlink == 0
        assert opened.read() == b"fir"


def test_attributes_of_a_file_that_was_just_written_follow_another_node(make_lake: LakeMaker, tmp_path: Path) -> None:
    options = ("--durability", "writeback", "--writeback-delay", "0.1", "--metadata-ttl", "1h", "--refresh", "0.2")
    lake = make_lake("file", *options).mount()
    (lake.path / "d").mkdir()
    path = lake.path / "d" / "f"
    path.write_bytes(b"first")
    assert stat.S_IMODE(path.stat().st_mode) != 0o600
    flush(lake)
    with another(lake, tmp_path) as other:
        (other.path / "d" / "f").chmod(0o600)

        def is_seen() -> bool:
            path.read_bytes()
            return stat.S_IMODE(path.stat().st_mode) == 0o600

        eventually(is_seen, "the mode that another node set is seen", SOON_S)
        assert path.read_bytes() == b"first"


def test_name_that_must_be_new_and_is_not(lake: Lake) -> None:
    """While the library has the file, while it waits for the disk, and later; in other processes, too."""
    path = lake.path / "d" / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
    script = f"import os; os.open({str(path)!r}, os.O_RDWR | os.O_CREAT | os.O_EXCL)"
    for closes in (False, True):
        if closes:
            os.write(fd, b"mine")
            os.close(fd)
        with pytest.raises(FileExistsError):
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert "FileExistsError" in other.stderr
    assert path.read_bytes() == b"mine"


def test_written_to_after_a_time_was_chosen(lake: Lake) -> None:
    path = lake.path / "d" / "again"
    fd = begin(path, b"first")
    os.utime(fd, ns=(10**18, 10**18))
    os.write(fd, b" and second")
    os.close(fd)
    assert path.read_bytes() == b"first and second"
    assert path.stat().st_mtime_ns > 10**18
    flush(lake)
    lake.remount()
    assert path.read_bytes() == b"first and second"
    assert path.stat().st_mtime_ns > 10**18


@pytest.mark.parametrize("year", [1600, 2300, pytest.param(2120, marks=pytest.mark.long)])
def test_time_that_no_lake_keeps_is_the_nearest(lake: Lake, year: int) -> None:
    path, seconds = lake.path / "d" / f"of-{year}", int((year - 1970) * 365.25 * 86400)
    fd = begin(path, b"bytes")
    os.utime(fd, (seconds, seconds))
    os.close(fd)
    flush(lake)
    lake.remount()  # until then the kernel shows what was set
    kept_ns = MTIME_NS_MIN if year < 1970 else MTIME_NS_MAX
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (b"bytes", kept_ns)


def test_rule_that_has_o_excl_ask_the_store_keeps_it_from_the_library(make_lake: LakeMaker, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npath = "locks/*"\nexclusive-create = "store"\n')
    lake = make_lake("file", *OPTIONS, "--rules", str(rules)).mount()
    lend(lake, "d")
    before = answered(lake)["create"]
    for number in range(3):
        os.close(os.open(lake.path / "d" / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    assert answered(lake)["create"] == before


@WITH_EITHER_DURABILITY
def test_many_writers_and_readers_at_once(lake: Lake) -> None:
    def write(writer: int) -> None:
        for number in range(FILES // 4):
            path = lake.path / "d" / f"w{writer}-{number}"
            path.write_bytes(noise(3000 + number, writer))
            assert path.read_bytes() == noise(3000 + number, writer)
            assert path.stat().st_size == 3000 + number
            if number % 7 == 0:
                path.rename(path.with_suffix(".renamed"))
            elif number % 11 == 1:
                path.unlink()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    expected = {}
    for writer in range(8):
        for number in range(FILES // 4):
            if number % 7 == 0:
                expected[f"w{writer}-{number}.renamed"] = noise(3000 + number, writer)
            elif number % 11 != 1:
                expected[f"w{writer}-{number}"] = noise(3000 + number, writer)
    found = {path.name: path.read_bytes() for path in (lake.path / "d").glob("w*")}
    assert found == expected


@WITH_EITHER_DURABILITY
def test_attributes_are_those_of_who_created_it(lake: Lake) -> None:
    path = lake.path / "d" / "mine"
    began_ns = time.time_ns() - 10_000_000  # as exact as the kernel's clock
    created = answered(lake)["create"]
    os.close(begin(path, b"mine"))
    assert answered(lake)["create"] == created + 1
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o640
    assert (found.st_size, found.st_nlink) == (4, 1)
    assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())
    assert began_ns <= found.st_mtime_ns <= time.time_ns()
    flush(lake)
    lake.remount()
    again = path.stat()
    assert (again.st_mode, again.st_uid, again.st_gid, again.st_size) == (
        found.st_mode, found.st_uid, found.st_gid, found.st_size,
    )  # fmt: skip
    assert abs(again.st_mtime_ns - found.st_mtime_ns) < 1_000_000


@WITH_EITHER_DURABILITY
def test_it_is_seen_while_it_is_written(lake: Lake) -> None:
    path = lake.path / "d" / "growing"
    fd = begin(path, b"some bytes")
    try:
        assert os.fstat(fd).st_size == 10
        names = subprocess.run(["ls", "-l", lake.path / "d"], capture_output=True, text=True, check=True).stdout
        assert "growing" in names
        assert path.read_bytes() == b"some bytes"
        os.write(fd, b", and more")
        assert path.stat().st_size == 20
        assert os.pread(fd, 100, 5) == b"bytes, and more"
    finally:
        os.close(fd)
    assert path.read_bytes() == b"some bytes, and more"


def test_who_asks_what_is_not_durable_is_told_of_it(lake: Lake) -> None:
    fd = begin(lake.path / "d" / "open", b"some bytes")
    told = {str(file["path"]): file["bytes"] for file in lake.unfinished()}
    assert told["d/open"] == 10
    other = begin(lake.path / "d" / "other", b"other bytes")
    flush(lake)
    for name in ("open", "other"):
        assert state(lake.path / "d" / name) == "durable"
    for each in (fd, other):
        os.write(each, b", and more")
        os.close(each)
    assert (lake.path / "d" / "open").read_bytes() == b"some bytes, and more"
    assert (lake.path / "d" / "other").read_bytes() == b"other bytes, and more"


@WITH_EITHER_DURABILITY
@pytest.mark.parametrize("what", ["truncated", "in the middle", "far beyond", "large", "in the end"])
def test_written_to_in_other_ways(lake: Lake, what: str) -> None:
    """What is not simply more of a small file is nothing new, either."""
    path = lake.path / "d" / "odd"
    data = bytearray(noise(50_000, 1))
    fd = begin(path, bytes(data))
    try:
        if what == "truncated":
            os.ftruncate(fd, 1234)
            del data[1234:]
        elif what == "in the middle":
            os.pwrite(fd, b"here", 100)
            data[100:104] = b"here"
        elif what == "far beyond":
            os.pwrite(fd, b"there", 1 << 20)
            data += bytes((1 << 20) - len(data)) + b"there"
        elif what == "large":
            more = noise(FILE_BYTES_MAX, 2)
            os.pwrite(fd, more, len(data))
            data += more
        else:
            os.pwrite(fd, b"the end", len(data))
            data += b"the end"
    finally:
        os.close(fd)
    assert path.read_bytes() == data
    flush(lake)
    lake.remount()
    assert path.read_bytes() == data


@WITH_EITHER_DURABILITY
def test_who_goes_on_writing_after_a_close(lake: Lake) -> None:
    """Descriptors that were duplicated; what each close says is true."""
    path = lake.path / "d" / "twice"
    first = begin(path, b"one")
    second = os.dup(first)
    os.close(first)
    assert state(path) != "failed"
    os.write(second, b" two")
    third = os.dup(second)
    os.close(second)
    assert path.read_bytes() == b"one two"
    os.write(third, b" three")
    os.fsync(third)
    assert state(path) == "durable"
    os.close(third)
    assert path.read_bytes() == b"one two three"


@WITH_EITHER_DURABILITY
def test_a_child_that_inherited_it_closes_it(lake: Lake) -> None:
    """Its close is not the one that the writer means: nothing is published of it."""
    path = lake.path / "d" / "inherited"
    fd = begin(path, b"half")
    os.set_inheritable(fd, True)
    subprocess.run([sys.executable, "-c", f"import os; os.close({fd})"], check=True, close_fds=False)
    time.sleep(0.5)
    assert state(path) == "dirty"
    os.write(fd, b" and half")
    os.close(fd)
    flush(lake)
    assert path.read_bytes() == b"half and half"


@WITH_EITHER_DURABILITY
def test_removed_and_renamed_while_it_is_open(lake: Lake) -> None:
    directory = lake.path / "d"
    gone, moved, over = (begin(directory / name, name.encode()) for name in ("gone", "moved", "over"))
    (directory / "gone").unlink()
    (directory / "moved").rename(lake.path / "elsewhere")
    (directory / "over").rename(lake.path / "elsewhere")
    for fd in (gone, moved, over):
        os.write(fd, b" still")
    assert os.pread(gone, 100, 0) == b"gone still"
    for fd in (gone, moved, over):
        os.close(fd)
    assert not {"gone", "moved", "over"} & set(os.listdir(directory))
    assert (lake.path / "elsewhere").read_bytes() == b"over still"
    flush(lake)
    lake.remount()
    assert (lake.path / "elsewhere").read_bytes() == b"over still"
    assert not {"gone", "moved", "over"} & set(os.listdir(directory))


@WITH_EITHER_DURABILITY
def test_its_directory_is_not_empty(lake: Lake) -> None:
    lend(lake, "e")
    for path in (lake.path / "e").iterdir():
        path.unlink()
    fd = begin(lake.path / "e" / "open", b"here")
    with pytest.raises(OSError, match="not empty"):
        (lake.path / "e").rmdir()
    (lake.path / "e").rename(lake.path / "other")
    os.close(fd)
    assert (lake.path / "other" / "open").read_bytes() == b"here"
    assert not (lake.path / "e").exists()
    (lake.path / "other" / "next").write_bytes(b"next")
    flush(lake)
    lake.remount()
    assert (lake.path / "other" / "open").read_bytes() == b"here"
    assert (lake.path / "other" / "next").read_bytes() == b"next"


@WITH_EITHER_DURABILITY
def test_a_name_that_is_taken(lake: Lake) -> None:
    """By a file that was created without Python, by one that was not, by a directory."""
    directory = lake.path / "d"
    (directory / "plain").write_bytes(b"1")
    os.close(os.open(directory / "exclusive", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    (directory / "directory").mkdir()
    (directory / ".hidden").write_bytes(b"1")
    for name in ("plain", "exclusive", ".hidden"):
        with pytest.raises(FileExistsError):
            os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        (directory / name).write_bytes(b"2")
        assert (directory / name).read_bytes() == b"2"
    with pytest.raises(IsADirectoryError):
        (directory / "directory").write_bytes(b"2")
    (directory / "plain").unlink()
    assert not (directory / "plain").exists()
    (directory / "plain").write_bytes(b"3")
    assert (directory / "plain").read_bytes() == b"3"


def test_names_that_need_a_second_look(lake: Lake) -> None:
    directory = lake.path / "d"
    names = ["ünï", ".dot", "a" * 255, "back\\slash", "with space", "line\nbreak", "x" * 201]
    for name in names:
        (directory / name).write_bytes(name.encode())
    for path, code in ((directory / ("x" * 256), errno.ENAMETOOLONG), (directory / ".lakefs-directory", errno.EPERM)):
        with pytest.raises(OSError, match=os.strerror(code)):
            path.write_bytes(b"")
    flush(lake)
    lake.remount()
    for name in names:
        assert (directory / name).read_bytes() == name.encode()


def test_times_that_somebody_chose(lake: Lake) -> None:
    path = lake.path / "d" / "dated"
    fd = begin(path, b"old")
    os.utime(fd, ns=(10**18, 10**18))
    os.fchmod(fd, 0o600)
    os.close(fd)
    assert path.stat().st_mtime_ns == 10**18
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    flush(lake)
    lake.remount()
    assert path.stat().st_mtime_ns == 10**18
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_its_directory_has_the_time_of_the_newest_name(lake: Lake) -> None:
    before_ns = (lake.path / "d").stat().st_mtime_ns
    fd = begin(lake.path / "d" / "new", b"new")
    during_ns = (lake.path / "d").stat().st_mtime_ns
    os.close(fd)
    assert before_ns < during_ns
    assert os.listdir(lake.path / "d")
    assert (lake.path / "d").stat().st_mtime_ns == during_ns


@WITH_EITHER_DURABILITY
def test_what_was_closed_survives_the_daemon(lake: Lake) -> None:
    for number in range(20):
        (lake.path / "d" / f"kept{number}").write_bytes(noise(10_000, number))
    open_one = begin(lake.path / "d" / "open", b"never closed")
    lake.kill()
    with pytest.raises(OSError, match=r"endpoint|connect"):
        os.write(open_one, b"x")
        os.fsync(open_one)
    try:
        os.close(open_one)
    except OSError:
        pass
    lake.mount()
    for number in range(20):
        assert (lake.path / "d" / f"kept{number}").read_bytes() == noise(10_000, number)
    assert not (lake.path / "d" / "open").exists() or (lake.path / "d" / "open").read_bytes() in (b"", b"never closed")


def test_another_node_made_the_same_name_meanwhile(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Who closes last has the name."""
    lake = make_lake("seaweedfs", *OPTIONS[:-1], "0.3").mount()
    lend(lake, "d")
    flush(lake)
    fd = begin(lake.path / "d" / "both", b"from here")
    with another(lake, tmp_path) as other:
        eventually((other.path / "d").is_dir, "the other node has the directory", SOON_S)
        (other.path / "d" / "both").write_bytes(b"from there")
        flush(other)
        time.sleep(1.5)
        os.close(fd)
        assert (lake.path / "d" / "both").read_bytes() == b"from here"
        flush(lake)
        eventually(
            lambda: (other.path / "d" / "both").read_bytes() == b"from here",
            "the last close is seen there",
            SOON_S,
        )


def test_another_node_removes_its_directory_meanwhile(make_lake: LakeMaker, tmp_path: Path) -> None:
    """It is not empty here."""
    lake = make_lake("seaweedfs", *OPTIONS[:-1], "0.3").mount()
    lend(lake, "e")
    for path in (lake.path / "e").iterdir():
        path.unlink()
    flush(lake)
    with another(lake, tmp_path) as other:
        eventually(
            lambda: (other.path / "e").is_dir() and not os.listdir(other.path / "e"), "it is empty there", SOON_S
        )
        fd = begin(lake.path / "e" / "open", b"from here")
        (other.path / "e").rmdir()
        flush(other)
        time.sleep(1.5)
        os.write(fd, b", all of it")
        os.close(fd)
        assert (lake.path / "e" / "open").read_bytes() == b"from here, all of it"
        flush(lake)
        eventually((other.path / "e" / "open").exists, "it is seen there", SOON_S)
        assert (other.path / "e" / "open").read_bytes() == b"from here, all of it"


def test_one_that_cannot_be_taken_is_not_there(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Its writer has the error, and the kernel forgets the name that it was given before."""
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npath = "d/*.close"\ndurability = "close"\n')
    lake = make_lake("file", *OPTIONS, "--rules", str(rules)).mount()
    lend(lake, "d")
    staging, gone = lake.cache_dir / "staging", lake.cache_dir / "gone"
    staging.rename(gone)
    fd = begin(lake.path / "d" / "f.close", b"bytes")
    with pytest.raises(OSError) as raised:
        os.close(fd)
    assert raised.value.errno == errno.EIO
    eventually(lambda: not (lake.path / "d" / "f.close").exists(), "there is no such file", SOON_S)
    assert "f.close" not in os.listdir(lake.path / "d")
    gone.rename(staging)
    (lake.path / "d" / "f.close").write_bytes(b"again")
    assert (lake.path / "d" / "f.close").read_bytes() == b"again"


@WITH_EITHER_DURABILITY
def test_unmounting_waits_for_it(lake: Lake) -> None:
    """A lazy unmount leaves who has it open alone, and stores what comes."""
    path = lake.path / "d" / "late"
    fd = begin(path, b"early")
    subprocess.run(["fusermount3", "-u", "-z", lake.path], check=True)
    os.write(fd, b" and late")
    os.close(fd)
    eventually(lambda: not lake.serving(), "the daemon has ended", SOON_S)
    lake.mount()
    assert path.read_bytes() == b"early and late"


@WITH_EITHER_DURABILITY
def test_a_daemon_that_is_told_to_end_while_one_is_open(lake: Lake) -> None:
    fd = begin(lake.path / "d" / "open", b"early")
    os.kill(lake.pid, signal.SIGTERM)
    time.sleep(1.0)
    os.write(fd, b" and late")
    os.close(fd)
    eventually(lambda: not lake.serving(), "the daemon has ended", SOON_S)
    lake.mount()
    assert (lake.path / "d" / "open").read_bytes() == b"early and late"


@WITH_EITHER_DURABILITY
def test_more_open_files_than_are_received_at_once(lake: Lake) -> None:
    paths = [lake.path / "d" / f"many{number}" for number in range(300)]
    descriptors = [begin(path, path.name.encode()) for path in paths]
    for fd in descriptors:
        os.write(fd, b"!")
    threads = [threading.Thread(target=os.close, args=(fd,)) for fd in descriptors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for path in paths:
        assert path.read_bytes() == path.name.encode() + b"!"
