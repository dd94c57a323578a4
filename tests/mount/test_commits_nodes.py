"""Two nodes that change one lake at random, and daemons that are killed during a rename.

LAKEFS_TEST_NODE_OPERATIONS (250; 60 in `make test`) is the number of random operations of each node,
LAKEFS_TEST_KILLS (6; 2 in `make test`) the number of kills around a rename.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Bucket, Lake, eventually, noise, scale
from tests.mount.test_commits import COMMITS, another, renameat2, sync

OPERATIONS = scale("NODE_OPERATIONS", 250, short=60)
KILLS = scale("KILLS", 6, short=2)
DIRECTORIES = ("", "a", "b", "a/c", "b/d")
EXPECTED = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.ESTALE, errno.EINVAL, errno.EBUSY,
}  # fmt: skip
FORMAT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def change_something(root: Path, rng: random.Random, text: str) -> str:
    """One operation; answers the text it wrote, if it did."""
    directory = root / rng.choice(DIRECTORIES)
    path, other = directory / f"f{rng.randrange(6)}", root / rng.choice(DIRECTORIES) / f"f{rng.randrange(6)}"
    kind = rng.randrange(10)
    if kind < 4:
        path.write_text(text)
        return text
    if kind == 4:
        path.unlink()
    elif kind == 5:
        path.rename(other)
    elif kind == 6:
        (directory / rng.choice("cd")).mkdir()
    elif kind == 7:
        (directory / rng.choice("cd")).rmdir()
    elif kind == 8:
        (directory / rng.choice("cd")).rename(root / rng.choice(("", "a", "b")) / rng.choice("cde"))
    else:
        path.chmod(rng.choice((0o600, 0o640, 0o644)))
    return ""


def tree(root: Path) -> dict[str, str | None]:
    """Files with their text, directories with None; whatever is listed can be read."""
    found: dict[str, str | None] = {}
    for directory, _, files in os.walk(root):
        below = Path(directory).relative_to(root)
        if below.parts:
            found[str(below)] = None
        for name in files:
            found[str(below / name)] = (Path(directory) / name).read_text()
    return found


def reader_of_the_format() -> dict[str, Any]:
    """The reader that the documents give, which knows nothing of this program."""
    source = next(code for code in re.findall(r"```python\n(.*?)```", FORMAT, re.DOTALL) if "def files(" in code)
    names: dict[str, Any] = {}
    exec(source, names)
    return names


def as_the_format_says(lake: Lake) -> dict[str, str]:
    """Every file of the lake, read from the bucket by the documents' own reader: the last writer of a name wins."""
    objects = {key: lake.outside.read(key) for key in lake.outside.objects()}
    commits = {key: data for key, data in objects.items() if key.startswith(COMMITS) and key.endswith(".zip")}
    plain = {
        key: (etag, modified) for key, (etag, modified) in lake.outside.versions().items()
        if not key.startswith(".lakefs/") and not key.endswith("/")
    }  # fmt: skip
    found = {}
    for path, (key, _, offset, size) in reader_of_the_format()["files"](commits, plain).items():
        data = objects.get(key, b"gone")
        found[path] = data[offset : len(data) if size is None else offset + size].decode()
    return found


@pytest.mark.parametrize("pack", [pytest.param("always", marks=pytest.mark.long), "auto"])
def test_two_nodes_settle_on_one_tree(make_lake: LakeMaker, tmp_path: Path, pack: str) -> None:
    """After thousands of conflicts both, and a third node, show the same tree, and it is what the format says."""
    lake = make_lake("seaweedfs", "--refresh", "0.5", "--metadata-ttl", "1", "--pack", pack)
    lake.mount()
    for name in DIRECTORIES[1:]:
        (lake.path / name).mkdir()
    sync(lake.path)
    written: set[str] = set()
    unexpected: list[BaseException] = []
    with another(lake, tmp_path) as other:

        def work(root: Path, seed: int) -> None:
            rng = random.Random(seed)
            for turn in range(OPERATIONS):
                try:
                    text = f"{seed}-{turn}"
                    written.add(text)
                    change_something(root, rng, text)
                except OSError as error:
                    if error.errno not in EXPECTED:
                        unexpected.append(error)

        threads = [threading.Thread(target=work, args=(node.path, seed)) for seed, node in enumerate((lake, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert unexpected == []
        for node in (lake, other):
            assert node.cli("flush", str(node.path)).returncode == 0
        time.sleep(1.5)  # a second and a half of refreshing and of the metadata's life
        eventually(lambda: settled(lake) == settled(other), "both show the same tree", 20.0)
        with another(lake, tmp_path) as third:
            here, there, fresh = tree(lake.path), tree(other.path), tree(third.path)
    assert here == there == fresh
    assert {text for text in here.values() if text is not None} <= written
    assert {path: text for path, text in here.items() if text is not None} == as_the_format_says(lake)


@pytest.mark.parametrize("size", [40_000, pytest.param(40 << 20, marks=pytest.mark.long)])
def test_temporary_name_that_two_nodes_use_at_once_costs_no_bytes(
    make_lake: LakeMaker, tmp_path: Path, size: int
) -> None:
    """Both write under one name, and rename that to names of their own before either has heard of the other."""
    lake = make_lake("seaweedfs", "--refresh", "3600", "--metadata-ttl", "3600", "--pack", "never")
    lake.mount()
    with another(lake, tmp_path) as other:
        nodes = (lake.path, other.path)
        for root in nodes:
            assert os.listdir(root) == []
        for seed, root in enumerate(nodes):
            (root / "new.tmp").write_bytes(noise(size, seed))
            (root / "new.tmp").rename(root / f"kept{seed}")
        with another(lake, tmp_path) as third:
            for seed in range(2):
                assert (third.path / f"kept{seed}").read_bytes() == noise(size, seed)


def settled(node: Lake) -> dict[str, str | None] | str:
    try:
        return tree(node.path)
    except OSError as error:
        return repr(error)


@pytest.mark.long
def test_a_daemon_killed_around_a_rename(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Before, in the midst of, or after: others see all of the old names or all of the new ones. The last daemon is
    killed when the rename has returned: it is there."""
    lake = make_lake("seaweedfs", "--refresh", "0.2", "--pack", "always").mount()
    rng = random.Random(11)
    (lake.path / "current").mkdir()
    for index in range(20):
        (lake.path / "current" / f"f{index}").write_text("0")
    sync(lake.path)
    with another(lake, tmp_path) as other:
        for generation in range(1, KILLS + 1):
            fresh = lake.path / "fresh"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            for index in range(20):
                (fresh / f"f{index}").write_text(str(generation))
            sync(lake.path)
            before, returned = texts(lake.path / "current"), threading.Event()

            def exchange(returned: threading.Event = returned) -> None:
                with suppress(OSError):  # the daemon died under it
                    renameat2(lake.path / "fresh", lake.path / "current", 2)
                    returned.set()

            thread = threading.Thread(target=exchange)
            thread.start()
            if generation == KILLS:
                thread.join()
                assert returned.is_set(), "nothing was wrong, and the exchange failed"
            time.sleep(rng.uniform(0, 0.03))
            lake.kill()
            thread.join()
            lake.mount()
            after = texts(lake.path / "current")
            assert after == {str(generation)} or (after == before and not returned.is_set())
            assert texts(lake.path / "fresh") == ({str(generation)} if after == before else before)
            eventually(lambda: texts(other.path / "current") == after, "the other node sees the same")  # noqa: B023


def texts(directory: Path) -> set[str]:
    names = os.listdir(directory)
    assert len(names) == 20
    return {(directory / name).read_text() for name in names}


def test_a_change_by_a_node_with_another_clock(make_lake: LakeMaker, tmp_path: Path) -> None:
    """What one node sees of another is older than what it does next, whatever the clocks say."""
    lake = make_lake("file", "--refresh", "0.2", "--pack", "always").mount()
    with another(lake, tmp_path) as other:
        for turn in range(10):
            writer, reader = (lake, other) if turn % 2 else (other, lake)
            (writer.path / "x").write_text(str(turn))
            eventually(lambda: settled(reader) == {"x": str(turn)}, "the last writer wins")  # noqa: B023


@pytest.mark.long  # vfs/test_large_directories.py shows it
def test_large_directories_are_renamed_whole(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Plain objects of another client, a hundred of them or more, in one PUT."""
    lake = make_lake("seaweedfs", "--refresh", "0.5")
    assert isinstance(lake.outside, Bucket)
    count = scale("RENAMED", 300, short=100)
    lake.outside.replace_all({f"old/deep{index % 3}/object{index:05d}": noise(10, index) for index in range(count)})
    lake.mount()
    before = lake.puts()
    (lake.path / "old").rename(lake.path / "new")
    assert lake.puts() == before + 1
    with another(lake, tmp_path) as other:
        for node in (lake.path, other.path):
            assert os.listdir(node) == ["new"]
            found = sorted(path for path in (node / "new").rglob("object*"))
            assert len(found) == count
            assert all(path.read_bytes() == noise(10, int(path.name[6:])) for path in found)
