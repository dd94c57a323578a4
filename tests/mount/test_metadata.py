"""The cost of names: counted in FUSE requests and store requests, never in seconds."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.counting import costs, costs_nothing
from tests.mount.lakes import MIB, START_HEADS, START_LISTS, Bucket, Directory, Lake, number, scale
from tests.servers import Server

DIRECTORIES = scale("DIRECTORIES", 30)
OBJECTS = scale("OBJECTS", 3000, short=1500)
RSS_BYTES_MAX = 250 * MIB
OLD_S = 1_700_000_000
"""LastModified of what lay there long before the mount, which lists commits as well after it has listed new objects."""


def fill(lake: Lake) -> set[str]:
    """The objects of a data set, put there by somebody else; fewer where each is a request."""
    objects = OBJECTS if isinstance(lake.outside, Directory) else OBJECTS // 10
    names = {f"class-{index % DIRECTORIES:04d}/image-{index:07d}.jpg" for index in range(objects)}
    if isinstance(lake.outside, Directory):
        for index in range(DIRECTORIES):
            (lake.outside.root / f"class-{index:04d}").mkdir()
        for name in names:
            (lake.outside.root / name).write_bytes(b"x")
            os.utime(lake.outside.root / name, (OLD_S, OLD_S))
    else:
        assert isinstance(lake.outside, Bucket)
        lake.outside.replace_all(dict.fromkeys(names, b"x"))
    return names


def find(lake: Lake) -> set[str]:
    done = subprocess.run(
        ["find", ".", "-type", "f", "-printf", "%P\n"], cwd=lake.path, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines())


@pytest.mark.usefixtures("with_hooks")
@pytest.mark.parametrize("store", [pytest.param("file", marks=pytest.mark.long), "seaweedfs"])
def test_a_lake_is_listed_once(make_lake: LakeMaker, store: str) -> None:
    lake = make_lake(store, "--metadata-ttl", "1h", "--refresh", "1h")
    names = fill(lake)
    lake.mount()
    assert find(lake) == names
    first = lake.stats()
    pages = DIRECTORIES * (1 + OBJECTS // DIRECTORIES // 1000) + 1
    assert number(first, "store.requests.list") <= pages + DIRECTORIES + START_LISTS
    assert number(first, "store.requests.head") <= 1 + START_HEADS
    assert number(first, "memory.rss") < RSS_BYTES_MAX
    assert find(lake) == names
    second = lake.stats()
    assert second["store"] == first["store"], "no request at all"
    assert find(lake) == names
    third = lake.stats()
    grown = number(third, "memory.rss") - number(second, "memory.rss")
    assert grown < 2 * MIB, "the second time fills the database's own cache, which is bounded; after that nothing grows"
    assert number(second, "memory.rss") < RSS_BYTES_MAX
    assert number(second, "upcalls.lookup") == number(first, "upcalls.lookup")
    asked = number(second, "upcalls.getattr") - number(first, "upcalls.getattr")
    assert asked <= DIRECTORIES + 1, "a directory whose names were read has a new atime, as the kernel sees it"
    for request in ("opendir", "readdir", "releasedir"):
        more = number(second, f"upcalls.{request}") - number(first, f"upcalls.{request}")
        assert more <= 2, "the kernel kept listings, of all directories but one at most"
    costs_nothing(lake, lambda: find(lake))  # from then on
    lake.remount()
    assert find(lake) == names
    again = lake.stats()
    assert number(again, "store.requests.list") == START_LISTS
    assert number(again, "store.requests.head") <= 1 + START_HEADS
    assert number(again, "memory.rss") < RSS_BYTES_MAX


def test_after_the_ttl_one_list_for_each_directory_that_is_used(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "2", "--refresh", "1h")
    names = fill(lake)
    lake.mount()
    assert find(lake) == names
    time.sleep(2.2)
    before = lake.number("store.requests.list")
    used = sorted(names)[: OBJECTS // DIRECTORIES]
    assert len({Path(name).parent for name in used}) == 1
    for name in used:
        os.stat(lake.path / name)
    asked = lake.number("store.requests.list") - before
    assert 1 <= asked <= 4, "the directory and the root, once each (twice if the TTL passed while we looked)"


def test_stat_within_the_ttl_costs_nothing(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h")
    names = fill(lake)
    lake.mount()
    assert find(lake) == names
    before = lake.stats()
    for name in names:
        assert os.stat(lake.path / name).st_size == 1
    for _ in range(200):
        assert not os.path.exists(lake.path / "class-0000" / "missing")
    after = lake.stats()
    assert after["store"] == before["store"]
    assert number(after, "upcalls.getattr") == number(before, "upcalls.getattr")
    lookups = number(after, "upcalls.lookup") - number(before, "upcalls.lookup")
    assert lookups <= 1, "a name that is missing is asked for once"


def test_one_name_of_a_directory_never_listed_is_asked_for_by_itself(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h")
    fill(lake)
    lake.mount()
    name = f"class-{1 % DIRECTORIES:04d}/image-{1:07d}.jpg"
    assert (lake.path / name).read_bytes() == b"x"
    assert lake.number("store.requests.list") <= 3 + START_LISTS
    assert lake.number("namespace.listings") == 0


def test_what_others_change_is_seen_after_the_ttl(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", "--metadata-ttl", "1")
    for name in ("d/kept", "d/replaced", "d/removed", "gone/x"):
        lake.outside.replace(name, b"before")
    lake.mount()
    assert find(lake) == {"d/kept", "d/replaced", "d/removed", "gone/x"}
    lake.outside.replace("d/replaced", b"after that")
    lake.outside.replace("d/new", b"new")
    lake.outside.replace("more/new", b"new")
    lake.outside.delete("d/removed")
    lake.outside.delete("gone/x")
    time.sleep(1.2)
    assert find(lake) == {"d/kept", "d/replaced", "d/new", "more/new"}
    assert (lake.path / "d" / "replaced").read_bytes() == b"after that"
    assert (lake.path / "d" / "kept").read_bytes() == b"before"
    assert not (lake.path / "d" / "removed").exists()


def test_changes_of_this_node_are_seen_at_once_and_cost_no_listing(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h").mount()
    (lake.path / "d").mkdir()
    assert find(lake) == set()
    lists = lake.number("store.requests.list")
    for index in range(20):
        (lake.path / "d" / f"{index}").write_bytes(b"x")
        assert len(os.listdir(lake.path / "d")) == index + 1
    (lake.path / "d" / "7").unlink()
    assert sorted(os.listdir(lake.path / "d"), key=int) == [str(index) for index in range(20) if index != 7]
    assert lake.number("store.requests.list") == lists


@pytest.mark.usefixtures("with_hooks")
def test_what_a_small_file_in_a_new_directory_costs(make_lake: LakeMaker) -> None:
    """The directory's attributes are asked for once between one and the next, because its mtime changed."""
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h", "--durability", "writeback").mount()
    (lake.path / "d").mkdir()
    os.stat(lake.path)  # whose mtime changed, too
    requests = ("lookup", "create", "getxattr", "write", "setattr", "flush", "release")
    with costs(lake, **dict.fromkeys(requests, 20), getattr=19):
        for index in range(20):
            (lake.path / "d" / f"{index}").write_bytes(b"x")


def test_keys_that_cannot_be_paths_are_counted_and_break_nothing(make_lake: LakeMaker) -> None:
    lake = make_lake("moto")
    for name in ("good", "n" * 300, "/empty", "../up", "./here", "both", "both/below"):
        lake.outside.replace(f"d/{name}", name.encode())
    lake.mount()
    assert sorted(os.listdir(lake.path / "d")) == ["both", "good"]
    assert (lake.path / "d" / "good").read_bytes() == b"good"
    assert (lake.path / "d" / "both" / "below").read_bytes() == b"both/below"
    hidden = {reason: lake.number(f"namespace.hidden_keys.{reason}") for reason in ("component", "long", "conflict")}
    assert hidden == {"component": 3, "long": 1, "conflict": 1}
    assert len(lake.outside.objects()) == 7, "they are left alone"


def test_opening_and_reading_what_is_in_the_page_cache(lake: Lake) -> None:
    """OPEN, no READ, no request. After a close the kernel asks once for st_blocks when fstat is called, which
    Python's open() does."""
    (lake.path / "f").write_bytes(b"x" * 50_000)
    assert (lake.path / "f").read_bytes() == b"x" * 50_000
    before = lake.stats()
    assert (lake.path / "f").read_bytes() == b"x" * 50_000
    after = lake.stats()
    cost = {
        name: number(after, f"upcalls.{name}") - number(before, f"upcalls.{name}")
        for name in ("lookup", "open", "read", "getattr")
    }
    assert cost.pop("getattr") <= 1
    assert cost == {"lookup": 0, "open": 1, "read": 0}
    assert after["store"] == before["store"]


@pytest.mark.long  # vfs/test_namespace.py shows it
def test_a_directory_appears_as_its_first_page_arrives(
    make_lake: LakeMaker, faults: tuple[Server, Faults], tmp_path: Path
) -> None:
    """Behind a store that holds back every page but the first; then the rest comes, and nothing twice."""
    server, controls = faults
    lake = make_lake("seaweedfs", "--metadata-ttl", "1h", "--refresh", "1h", through=server)
    names = {f"image-{index:07d}.jpg" for index in range(1020)}
    assert isinstance(lake.outside, Bucket)
    lake.outside.replace_all({f"d/{name}": b"x" for name in names})
    lake.mount()
    controls.hang(1000, method="GET", containing="continuation-token")
    controls.hang(1000, method="GET", containing="start-after=some%2Flake%2Fd%2F")
    with os.scandir(lake.path / "d") as entries:
        first = next(entries)
        assert first.stat().st_size == 1
        (listing,) = listings_of(lake)
        assert (listing["path"], listing["names"], listing["pages"]) == ("d", 1000, 1)
        asked = lake.number("store.requests.list")
        assert os.stat(first.path).st_size == 1
        assert lake.number("store.requests.list") == asked
        controls.clear()
        rest = [entry.name for entry in entries]
    assert sorted([first.name, *rest]) == sorted(names)
    assert listings_of(lake) == []
    before = lake.stats()
    assert sorted(os.listdir(lake.path / "d")) == sorted(names)
    assert lake.stats()["store"] == before["store"]


def listings_of(lake: Lake) -> list[dict[str, object]]:
    namespace = lake.stats()["namespace"]
    assert isinstance(namespace, dict)
    found: list[dict[str, object]] = namespace["listing"]
    return found
