"""The change log on a store in memory: which entries, in which order, and at what cost."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from lakefs_fuse.admin import change_log
from lakefs_fuse.admin.change_log import ChangeLog, entries_of
from lakefs_fuse.commits.archive import build, commit_key
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.hybrid_clock import WINDOW_NS, HybridClock
from lakefs_fuse.commits.record import (
    ANY,
    OWN,
    THIS,
    Mkdir,
    ObjectRef,
    Operation,
    Put,
    Record,
    Relocate,
    Remove,
    SetAttr,
    Symlink,
    encode,
)
from lakefs_fuse.control.worker_protocol import LogEntry, LogStart
from lakefs_fuse.errors import Unavailable
from tests.admin.lakes import WRITER, dataset, fold_all, give_commit, give_pack, headless
from tests.fakes import node_of, store_client
from tests.memory_store import Failures, MemoryStore
from tests.vfs.lakes import Clock

NS = 1_000_000_000
HOUR_S = 3600.0
REFRESH_S = 0.02
OTHER = "0000beef"


class Row(ChangeLog):
    """A change log with what it showed."""

    def __init__(self, store: MemoryStore, clock: Clock, path: str = "") -> None:
        store.clock = clock
        node = node_of(clock)
        client = store_client(store, store.capabilities, retry_timeout_s=0)
        self.starts: list[LogStart] = []
        self.entries: list[LogEntry] = []
        self.notes: list[str] = []
        log = CommitLog(client, HybridClock(clock), node.threads, writer="00000000")
        super().__init__(client, log, path, show=self._take, note=self.notes.append)

    def _take(self, answer: LogStart | LogEntry) -> None:
        if isinstance(answer, LogStart):
            self.starts.append(answer)
        else:
            self.entries.append(answer)

    @property
    def paths(self) -> list[str]:
        return [entry.path for entry in self.entries]


def put(path: str, *, object: int = THIS, size: int = 3, hides: str = "", replaces: int = ANY) -> Put:
    return Put(path, object, 0, size, 0o644, 0, 0, 0, hides=hides, replaces=replaces)


def mkdir(path: str) -> Mkdir:
    return Mkdir(path, 0o755, 0, 0, 0)


def told(
    operations: Sequence[Operation], *, moves: Sequence[tuple[str, str]] = (), objects: Sequence[ObjectRef] = ()
) -> list[str]:
    """The entries of a record, in short."""
    record = Record(
        writer=WRITER, time=1, objects=[ObjectRef(), *objects], operations=list(operations), moves=list(moves)
    )
    return [
        f"{each.operation} {f'{each.source} ' if each.source else ''}{each.path}"
        + (f" {each.target}" if each.target else "")
        + (f" {each.size}" if each.size is not None else "")
        for each in entries_of(record)
    ]


def test_entries_of_changes_of_one_name_each() -> None:
    operations: list[Operation] = [
        put("a"), put("b", object=OWN, size=5), mkdir("d"), Symlink("l", "d", 0, 0, 0), Remove("e"), Remove("f", True),
        SetAttr("b", OWN, 0, 5, "etag", 0o600, 0, 0, 0),
        Relocate("g", 1, 0, "", THIS, 0, 3, 0o644, 0, 0, 0), put("h", object=2), put("i", object=3),
        put("k", object=1, replaces=1),
    ]  # fmt: skip
    objects = [
        ObjectRef("k", "etag", 3),
        ObjectRef(".lakefs/objects/x", "etag", 3),
        ObjectRef("earlier/name", "etag", 3),
    ]
    assert told(operations, objects=objects) == [
        "put a 3", "put b 5", "mkdir d", "symlink l d", "remove e", "rmdir f", "setattr b", "put h 3",
        "link earlier/name i 3", "put k 3",
    ]  # fmt: skip


RENAME: list[Operation] = [
    mkdir("e"), mkdir("e/sub"), put("e/f", object=1), Symlink("e/l", "f", 0, 0, 0),
    Remove("d/l"), Remove("d/f"), Remove("d/sub", True), Remove("d", True),
]  # fmt: skip
FILE = [ObjectRef("d/f", "etag", 3)]


def test_entries_of_renamed_directory_are_one() -> None:
    assert told(RENAME, moves=[("d", "e")], objects=FILE) == ["rename d e"]


def test_entries_of_rename_leave_what_else_the_commit_changed_there() -> None:
    before: list[Operation] = [Remove("d/old"), put("x")]
    after: list[Operation] = [put("e/new"), mkdir("d"), put("d/f"), Remove("e/f"), Symlink("e/m", "x", 0, 0, 0)]
    assert told([*before, *RENAME, *after], moves=[("d", "e")], objects=FILE) == [
        "remove d/old", "put x 3", "rename d e", "put e/new 3", "mkdir d", "put d/f 3", "remove e/f", "symlink e/m x",
    ]  # fmt: skip


def test_entries_of_exchange_are_two_renames() -> None:
    operations = [put("b", object=1), put("a", object=2)]
    objects = [ObjectRef("a", "1", 3), ObjectRef("b", "2", 3)]
    assert told(operations, moves=[("a", "b"), ("b", "a")], objects=objects) == ["rename a b", "rename b a"]


def test_entries_of_name_that_is_put_again_are_one() -> None:
    assert told([Remove("a"), put("a", object=OWN), Remove("b")]) == ["put a 3", "remove b"]
    assert told([put("a"), Remove("a"), put("b")]) == ["remove a", "put b 3"]


def fill(store: MemoryStore, clock: Clock, rng: random.Random, commits: int) -> None:
    """Commits at distances of milliseconds to months."""
    for number in range(commits):
        clock.advance(10 ** rng.uniform(-3, 7))
        names = [f"{number:03d}/{each}" for each in range(rng.choice((1, 1, 2, 7)))]
        give_commit(store, clock, *map(mkdir, names), writer=rng.choice((WRITER, OTHER)))
    clock.advance(rng.choice((0, 1, 1e7)))


@pytest.mark.parametrize("seed", range(6))
async def test_last_entries_are_the_end_of_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "COMMITS_MAX", 5)
    monkeypatch.setattr(change_log, "FETCHED_MAX", 2)
    rng, clock = random.Random(seed), Clock()
    store = MemoryStore(page_keys_max=3)
    fill(store, clock, rng, 40)
    whole = Row(store, clock)
    await whole.show(None)
    assert whole.paths == sorted(whole.paths)
    assert len(whole.paths) >= 40
    for count in (0, 1, 2, 5, 6, 20, len(whole.paths), 1000):
        last = Row(store, clock)
        await last.show(count)
        assert last.entries == whole.entries[-count:] * bool(count)
    below = Row(store, clock, "003")
    await below.show(1)
    assert below.paths == [path for path in whole.paths if path.startswith("003/")][-1:]


async def test_last_entries_cost_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = MemoryStore(), Clock()
    for number in range(3000):
        clock.advance(5)
        give_commit(store, clock, mkdir(f"{number:04d}"))
    store.requests.clear()
    log = Row(store, clock)
    await log.show(50)
    assert log.paths == [f"{number:04d}" for number in range(2950, 3000)]
    assert store.count("get") <= 64
    assert store.count("list") <= 5


async def test_looking_far_back_lists_each_commit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "COMMITS_MAX", 100)
    store, clock = MemoryStore(page_keys_max=10), Clock()
    for number in range(600):
        clock.advance(60)
        give_commit(store, clock, mkdir(f"{number:03d}"))
    store.requests.clear()
    log = Row(store, clock, "003")
    await log.show(1)
    assert log.paths == ["003"]
    assert store.count("get") == 600
    assert store.count("list") <= 2 * 60


async def test_records_larger_than_the_room_are_fetched_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = MemoryStore(), Clock()
    for number in range(5):
        clock.advance(1)
        give_commit(store, clock, *(mkdir(f"{number}/{each:05d}") for each in range(20_000 if number % 2 else 1)))
    monkeypatch.setattr(change_log, "FETCHED_BYTES_MAX", 1)
    log = Row(store, clock)
    await log.show(20_002)
    assert log.paths == ["2/00000", *(f"3/{each:05d}" for each in range(20_000)), "4/00000"]


async def test_entries_about_path_include_renames_from_to_and_above_it() -> None:
    store, clock = MemoryStore(), Clock()
    record: list[tuple[list[Operation], tuple[str, str]]] = [
        ([put("a/b/f", object=1), Remove("x")], ("x", "a/b/f")),
        ([put("y", object=1), Remove("a/b/g")], ("a/b/g", "y")),
        ([mkdir("c"), Remove("a", True)], ("a", "c")),
        ([mkdir("ab"), Remove("other", True)], ("other", "ab")),
    ]
    for operations, move in record:
        clock.advance(1)
        give_moves(store, clock, operations, move)
    clock.advance(1)
    give_commit(store, clock, mkdir("a"), put("a/b"), put("a/bc"))
    log = Row(store, clock, "a/b")
    await log.show(None)
    assert [(entry.source, entry.path) for entry in log.entries] == [
        ("x", "a/b/f"), ("a/b/g", "y"), ("a", "c"), ("", "a/b"),
    ]  # fmt: skip


def give_moves(store: MemoryStore, clock: Clock, operations: list[Operation], *moves: tuple[str, str]) -> None:
    objects = [ObjectRef(), ObjectRef("o", "etag", 3)]
    record = Record(writer=WRITER, time=clock(), objects=objects, operations=operations, moves=list(moves))
    store.give(commit_key(clock(), WRITER), build((), lambda _: encode(record)))


async def test_start_is_the_first_commit_or_the_horizon() -> None:
    store, clock = MemoryStore(), Clock()
    empty = Row(store, clock)
    await empty.show(None)
    assert empty.starts == [LogStart(since_ns=0, is_whole=True)]
    clock.advance(1)
    first_ns = clock()
    give_pack(store, clock, dataset(2))
    clock.advance(HOUR_S)
    whole = Row(store, clock)
    await whole.show(0)
    assert (whole.starts, whole.entries) == ([LogStart(since_ns=first_ns, is_whole=True)], [])
    async with headless(store, clock) as view:
        await fold_all(view, first_ns + 1)
    folded = Row(store, clock)
    await folded.show(None)
    assert folded.starts == [LogStart(since_ns=first_ns + 1, is_whole=False)]
    assert len(folded.paths) == 2, "a pack stays"


async def test_commit_that_cannot_be_read_is_noted_and_left_out() -> None:
    store, clock = MemoryStore(), Clock()
    give_commit(store, clock, mkdir("a"))
    clock.advance(1)
    store.give(commit_key(clock(), WRITER), b"not an archive")
    store.give(".lakefs/commits/README", b"no commit")
    clock.advance(1)
    give_commit(store, clock, mkdir("b"))
    log = Row(store, clock)
    await log.show(10)
    assert log.paths == ["a", "b"]
    assert log.unreadable == len(log.notes) == 1


@asynccontextmanager
async def following(log: Row, count: int | None = 1) -> AsyncIterator[None]:
    """The log is followed while the block runs."""
    await log.show(count)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.follow, REFRESH_S)
        yield
        nursery.cancel_scope.cancel()


async def shown(log: Row, *paths: str) -> None:
    """Wait until these are shown, and see that nothing is shown after them."""
    with trio.move_on_after(10):
        while len(log.paths) < len(paths):
            await trio.sleep(REFRESH_S)
    await trio.sleep(5 * REFRESH_S)
    assert log.paths == [*paths]


@pytest.mark.parametrize("count", [0, 1, None])
async def test_follow_shows_each_new_commit_once(count: int | None) -> None:
    store, clock = MemoryStore(page_keys_max=2), Clock()
    for number in range(5):
        give_commit(store, clock, mkdir(f"before{number}"))
        clock.advance(1)
    log = Row(store, clock)
    async with following(log, count):
        del log.entries[:]
        await shown(log)
        expected = [f"new{number}" for number in range(7)]
        for name in expected:
            clock.advance(20)
            give_commit(store, clock, mkdir(name))
        await shown(log, *expected)
        clock.now_ns -= WINDOW_NS // 2 + NS
        give_commit(store, clock, mkdir("late"))
        clock.now_ns += WINDOW_NS // 2 + NS
        await shown(log, *expected, "late")
        clock.advance(HOUR_S)
        await shown(log, *expected, "late")
        give_commit(store, clock, mkdir("last"))
        await shown(log, *expected, "late", "last")


async def test_follow_lists_the_last_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__name__ + ".REFRESH_S", 0.5)
    store, clock = MemoryStore(page_keys_max=2), Clock()
    log = Row(store, clock)
    async with following(log):
        for number in range(40):
            clock.advance(60)
            give_commit(store, clock, mkdir(f"{number}"))
        await shown(log, *map(str, range(40)))
        clock.advance(HOUR_S)
        await trio.sleep(REFRESH_S)
        before = store.count("list")
        await trio.sleep(3 * REFRESH_S)
        assert store.count("list") - before <= 4


async def test_follow_goes_on_after_the_store_was_away() -> None:
    store, clock = MemoryStore(), Clock()
    log = Row(store, clock)
    async with following(log):
        away = Failures(lambda request: request.what == "list", Unavailable("no route"), count=1 << 30)
        store.hook = away
        await shown(log)
        clock.advance(HOUR_S)
        give_commit(store, clock, mkdir("meanwhile"))
        clock.advance(HOUR_S)
        await shown(log)
        away.left = 0
        await shown(log, "meanwhile")
    assert len(log.notes) == 1
    assert "no route" in log.notes[0]
