"""The kernel's caches on a writable mount: the requests that they spare, and their invalidation."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.counting import costs, costs_at_last, costs_nothing, upcalls
from tests.mount.lakes import MIB, Lake, eventually, noise
from tests.mount.test_commits import another

pytestmark = pytest.mark.usefixtures("with_hooks")
FILES = 40
OFF = {"LAKEFS_FUSE_HOOKS": "off"}
SOON_S = 5.0


def fill(lake: Lake) -> list[str]:
    names = [f"d/f{index:03d}" for index in range(FILES)]
    for index, name in enumerate(names):
        lake.outside.replace(name, noise(1000, index))
    return names


def use(lake: Lake, names: list[str]) -> None:
    """Open, read, close."""
    for index, name in enumerate(names):
        fd = os.open(lake.path / name, os.O_RDONLY)
        try:
            assert os.read(fd, 4096) == noise(1000, index)
        finally:
            os.close(fd)


def listed(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def lists(directory: Path, names: list[str]) -> bool:
    return listed(directory) == names


def kernel(lake: Lake) -> dict[str, object]:
    values = lake.stats()["kernel"]
    assert isinstance(values, dict)
    return values


def test_what_it_spares(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h")
    names = fill(lake)
    lake.mount()
    (lake.path / "empty").mkdir()
    for _ in range(2):  # reading a directory changes its atime, as the kernel sees it: it asks for that once
        assert len(listed(lake.path / "d")) == FILES
        assert listed(lake.path) == ["d", "empty"]
        assert listed(lake.path / "empty") == []

    def list_all() -> None:
        assert len(listed(lake.path / "d")) == FILES
        assert listed(lake.path) == ["d", "empty"]
        assert listed(lake.path / "empty") == []

    costs_nothing(lake, list_all)
    with costs(lake):
        for name in names:
            assert (lake.path / name).stat().st_size == 1000
    use(lake, names)
    # FLUSH is answered by the hooks, RELEASE not waited for
    costs_at_last(lake, lambda: use(lake, names), open=FILES, flush=FILES, release=FILES)
    assert upcalls(lake)["opendir"] == 1
    assert upcalls(lake)["releasedir"] == 0


def answered(lake: Lake) -> dict[str, int]:
    """Requests that never entered Python."""
    counts = kernel(lake)["answered"]
    assert isinstance(counts, dict)
    return counts


def test_what_was_opened_once_is_opened_and_closed_without_python(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h")
    names = fill(lake)
    lake.mount()
    use(lake, names)
    before = answered(lake)
    with costs(lake, open=FILES, flush=FILES, release=FILES):
        use(lake, names)
    after = answered(lake)
    spent = {name: count for name in after if name != "forget" and (count := after[name] - before[name])}
    assert spent == {"open": FILES, "flush": FILES, "release": FILES}


def test_that_counts_for_the_ttl_only(make_lake: LakeMaker) -> None:
    """Opening looks no further back than the TTL."""
    lake = make_lake("file", "--metadata-ttl", "1", "--refresh", "1h")
    names = fill(lake)[:1]
    lake.mount()
    path = lake.path / names[0]

    def reads(text: bytes) -> Callable[[], bool]:
        return lambda: path.read_bytes() == text

    for text in (b"a", b"b", b"c"):
        for _ in range(3):
            assert path.read_bytes() == lake.outside.read(names[0])
        lake.outside.replace(names[0], text)
        eventually(reads(text), "the new version is read", SOON_S)


def test_a_file_that_nobody_looked_up_for_longer_is_asked_for(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "1", "--refresh", "1h")
    fill(lake)
    lake.mount()
    (lake.path / "d" / "f000").read_bytes()
    path = os.open(lake.path / "d" / "f000", os.O_PATH)
    try:
        for pause_s, without_python in ((0.0, 1), (1.5, 0)):
            time.sleep(pause_s)
            before = answered(lake)["open"]
            os.close(os.open(f"/proc/self/fd/{path}", os.O_RDONLY))
            assert answered(lake)["open"] - before == without_python
    finally:
        os.close(path)


def drop_pages(file: BinaryIO) -> None:
    """The next read asks the daemon."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@pytest.fixture
def lent(make_lake: LakeMaker) -> Iterator[tuple[Lake, BinaryIO]]:
    """A file of 300 KiB that is open by a handle that Python never saw, and not in the page cache."""
    lake = make_lake("file", "--pack", "always", "--metadata-ttl", "1h", "--refresh", "0.2").mount()
    (lake.path / "d").mkdir()
    (lake.path / "d" / "f").write_bytes(noise(300_000))
    lake.settle()
    (lake.path / "d" / "f").read_bytes()
    before = answered(lake)["open"]
    with open(lake.path / "d" / "f", "rb", buffering=0) as file:
        assert answered(lake)["open"] == before + 1
        drop_pages(file)
        yield lake, file
        released = upcalls(lake)["release"]
    eventually(lambda: upcalls(lake)["release"] == released + 1, "it is released")
    eventually(lambda: lake.number("files.in_use") == 0, "nothing is in use")
    with open(lake.path / "new", "wb") as other:
        other.write(b"x")
    assert (lake.path / "new").read_bytes() == b"x"


def test_who_has_it_open_reads_on_when_it_is_removed_here(lent: tuple[Lake, BinaryIO]) -> None:
    lake, file = lent
    (lake.path / "d" / "f").unlink()
    lake.settle()
    assert lake.number("files.in_use") == 1
    assert file.read() == noise(300_000)


def test_who_has_it_open_reads_on_when_something_is_renamed_over_it(lent: tuple[Lake, BinaryIO]) -> None:
    lake, file = lent
    (lake.path / "d" / "g").write_bytes(b"other")
    (lake.path / "d" / "g").rename(lake.path / "d" / "f")
    lake.settle()
    assert file.read() == noise(300_000)
    assert (lake.path / "d" / "f").read_bytes() == b"other"


@pytest.mark.parametrize(
    "change", ["replaces", pytest.param("removes", marks=pytest.mark.long), "moves", "removes all"]
)
def test_who_has_it_open_reads_on_whatever_another_mount_does(
    lent: tuple[Lake, BinaryIO], tmp_path: Path, change: str
) -> None:
    lake, file = lent
    with another(lake, tmp_path) as other:
        path = other.path / "d" / "f"
        if change == "replaces":
            path.write_bytes(b"other")
        elif change == "removes":
            path.unlink()
        elif change == "moves":
            path.rename(other.path / "d" / "g")
        else:
            path.unlink()
            path.parent.rmdir()
        other.sync()
        wanted = {"replaces": b"other", "moves": noise(300_000)}.get(change)
        where = lake.path / "d" / ("g" if change == "moves" else "f")
        eventually(lambda: content(where) == wanted, "it is seen", SOON_S)
    drop_pages(file)
    assert file.read() == noise(300_000)


def test_who_has_it_open_may_sync_it(make_lake: LakeMaker) -> None:
    """fsync of a handle that only reads takes what another one wrote to the store."""
    lake = make_lake("file", "--durability", "writeback", "--writeback-delay", "1h", "--metadata-ttl", "1h").mount()
    lake.outside.replace("f", b"first")
    (lake.path / "f").read_bytes()
    before = answered(lake)["open"]
    with open(lake.path / "f", "rb", buffering=0) as file:
        assert answered(lake)["open"] == before + 1
        os.fsync(file.fileno())
        (lake.path / "f").write_bytes(b"second")
        assert os.getxattr(lake.path / "f", "user.lakefs.state") != b"durable"
        os.fsync(file.fileno())
        assert os.getxattr(lake.path / "f", "user.lakefs.state") == b"durable"
        assert file.read() == b"second"


def test_who_has_it_open_sees_what_is_written_here(lent: tuple[Lake, BinaryIO]) -> None:
    lake, file = lent
    with open(lake.path / "d" / "f", "r+b", buffering=0) as writer:
        writer.seek(100_000)
        writer.write(b"new bytes")
        os.fsync(writer.fileno())
    drop_pages(file)
    expected = bytearray(noise(300_000))
    expected[100_000:100_009] = b"new bytes"
    assert file.read() == bytes(expected)


def test_a_read_only_mount_sends_no_flush(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h", "--read-only")
    names = fill(lake)
    lake.mount()
    use(lake, names)
    costs_at_last(lake, lambda: use(lake, names), open=FILES, release=FILES)
    with costs(lake):
        for name in names:
            (lake.path / name).stat()


def test_what_is_made_here_is_listed(lake: Lake) -> None:
    (lake.path / "d").mkdir()
    assert listed(lake.path / "d") == []
    changes: list[tuple[Callable[[Path], object], list[str]]] = [
        (lambda d: (d / "a").write_bytes(b"x"), ["a"]),
        (lambda d: (d / "b").mkdir(), ["a", "b"]),
        (lambda d: (d / "a").rename(d / "c"), ["b", "c"]),
        (lambda d: (d / "b").rmdir(), ["c"]),
        (lambda d: (d / "l").symlink_to("c"), ["c", "l"]),
        (lambda d: (d / "c").unlink(), ["l"]),
        (lambda d: (d / "l").unlink(), []),
    ]
    for change, names in changes:
        assert listed(lake.path / "d") == listed(lake.path / "d")
        change(lake.path / "d")
        assert listed(lake.path / "d") == names


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a packed file": (lambda d: (d / "new").write_bytes(b"x"), ["kept", "new", "sub"]),
    "a removal": (lambda d: (d / "kept").unlink(), ["sub"]),
    "a rename": (lambda d: (d / "kept").rename(d / "moved"), ["moved", "sub"]),
    "a directory": (lambda d: (d / "made").mkdir(), ["kept", "made", "sub"]),
    "a link": (lambda d: (d / "link").symlink_to("kept"), ["kept", "link", "sub"]),
    "a directory less": (lambda d: (d / "sub").rmdir(), ["kept"]),
}


def test_what_another_mount_does_is_listed(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Within --refresh, whatever the TTL: the kernel is told. A directory for each change."""
    lake = make_lake("file", "--pack", "always", "--metadata-ttl", "1h", "--refresh", "0.2").mount()
    for name in CHANGES:
        (lake.path / name / "sub").mkdir(parents=True)
        (lake.path / name / "kept").write_bytes(b"kept")
    lake.settle()
    with another(lake, tmp_path) as other:
        for name, (change, names) in CHANGES.items():
            here, there = lake.path / name, other.path / name
            assert listed(here) == listed(there) == ["kept", "sub"]
            change(there)
            other.sync()
            eventually(partial(lists, here, names), f"{name} is seen", SOON_S)


def test_an_empty_directory_that_another_mount_fills(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Of an empty directory the kernel holds no page that could be dropped, but for the names . and .."""
    lake = make_lake("file", "--pack", "always", "--metadata-ttl", "1h", "--refresh", "0.2").mount()
    (lake.path / "d").mkdir()
    lake.settle()
    with another(lake, tmp_path) as other:
        for _ in range(3):
            assert listed(lake.path / "d") == []
        done = subprocess.run(["ls", "-a", lake.path / "d"], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [".", ".."]
        (other.path / "d" / "new").write_bytes(b"x")
        eventually(lambda: listed(lake.path / "d") == ["new"], "the first name is seen", SOON_S)


@pytest.mark.parametrize("before", ["kept", ""])
def test_what_other_programs_put_there_is_listed_after_the_ttl(make_lake: LakeMaker, before: str) -> None:
    lake = make_lake("file", "--metadata-ttl", "1", "--refresh", "1h")
    lake.outside.replace("d/first", b"x")
    if before:
        lake.outside.replace(f"d/{before}", b"x")
    lake.outside.delete("d/first")
    lake.mount()
    names = [before] if before else []
    for _ in range(3):
        assert listed(lake.path / "d") == names
    lake.outside.replace("d/new", b"x")
    eventually(lambda: listed(lake.path / "d") == sorted([*names, "new"]), "a new object is seen", SOON_S)
    lake.outside.delete("d/new")
    eventually(lambda: listed(lake.path / "d") == names, "it is gone again", SOON_S)


def test_a_ttl_of_nothing_is_one(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "0", "--refresh", "1h").mount()
    for index in range(5):
        lake.outside.replace(f"d/{index}", b"x")
        assert len(listed(lake.path / "d")) == index + 1
    assert kernel(lake)["stateless_opendir"] is False


def test_reading_ahead_asks_for_a_block_at_a_time(make_lake: LakeMaker) -> None:
    """As root; an ordinary user's mount reads ahead as much as the kernel lets it."""
    lake = make_lake("file")
    lake.outside.replace("large", noise(32 * MIB))
    lake.mount()
    assert (lake.path / "large").read_bytes() == noise(32 * MIB)
    assert kernel(lake)["read_ahead_kib"] == (1024 if os.geteuid() == 0 else 128)
    assert upcalls(lake)["read"] <= (48 if os.geteuid() == 0 else 300)


def test_what_is_on_is_said(lake: Lake) -> None:
    values = kernel(lake)
    for name in ("hooks", "writeback_cache", "explicit_inval_data", "stateless_opendir"):
        assert values[name] is True, name
    assert values["stateless_open"] is values["noflush"] is values["passthrough"] is False
    assert values["max_background"] == 64
    missing = values["missing"]
    assert isinstance(missing, list)
    assert any(each.startswith("passthrough: not available, libfuse 3.") for each in missing)
    table = lake.cli("stats", str(lake.path)).stdout
    assert "kernel: hooks, explicit_inval_data, stateless_opendir" in table
    assert "passthrough: not available" in table
    lines = lake.log().splitlines()
    assert any("kernel: hooks, explicit_inval_data, stateless_opendir" in line for line in lines[:10])


@pytest.mark.parametrize("immutable", [False, pytest.param(True, marks=pytest.mark.long)])
def test_without_the_hooks_it_works_as_well(make_lake: LakeMaker, immutable: bool) -> None:
    lake = make_lake("file", *(["--immutable"] if immutable else []))
    lake.env |= OFF
    names = fill(lake)
    lake.mount()
    for _ in range(2):
        assert listed(lake.path / "d") == [name.removeprefix("d/") for name in names]
        use(lake, names)
    values = kernel(lake)
    assert values["hooks"] is values["stateless_opendir"] is values["stateless_open"] is False
    assert "turned off by LAKEFS_FUSE_HOOKS" in str(values["missing"])
    assert "turned off by LAKEFS_FUSE_HOOKS" in lake.cli("stats", str(lake.path)).stdout
    counts = upcalls(lake)
    assert counts["opendir"] == 2
    assert counts["open"] == 2 * FILES
    assert counts["flush"] == (1 if immutable else 2 * FILES)


def test_syncing_what_was_opened_without_asking(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Through such a handle too fsync() waits for what another one wrote."""
    lake = make_lake("file", "--durability", "writeback", "--writeback-delay", "1h", "--metadata-ttl", "1h")
    fill(lake)
    lake.mount()
    path = lake.path / "d" / "f000"
    path.read_bytes()
    with open(path, "rb") as reader:
        os.fsync(reader.fileno())
        path.write_bytes(b"changed")
        os.fsync(reader.fileno())
        with another(lake, tmp_path) as other:
            assert (other.path / "d" / "f000").read_bytes() == b"changed"
