"""`fsck` while others write: before each of its requests the lake changes, and what it reports is true all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count, islice

import pytest

from lakefs_fuse.admin.fsck import Checked, Checker, Kind
from lakefs_fuse.commits.archive import build, commit_key
from lakefs_fuse.commits.record import COMMITS, OWN, THIS, ObjectRef, Put, Relocate, Remove, encode
from tests.admin.lakes import WRITER, commits, dataset, fold_all, give_commit, give_pack, headless, record, silent
from tests.memory_store import MemoryStore, Request, When
from tests.vfs.lakes import Clock

Change = Callable[[], object]
FILES = dataset(6, size=300)


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    """Two packs, and a plain object."""
    made = MemoryStore()
    made.clock = clock
    give_pack(made, clock, {path: FILES[path] for path in list(FILES)[:3]})
    clock.advance(1)
    give_pack(made, clock, {path: FILES[path] for path in list(FILES)[3:]})
    made.give("plain-0", b"plain")
    clock.advance(5)
    return made


class BeforeRequests:
    """A hook: from the request ``first`` on of those that ``matches``, the next of ``changes`` is made before each."""

    def __init__(
        self,
        changes: Iterator[None],
        *,
        first: int = 1,
        matches: Callable[[Request], bool] = lambda _: True,
    ) -> None:
        self._changes, self._first, self._matches, self._lock = changes, first, matches, threading.Lock()
        self._requests = self.made = 0

    def __call__(self, request: Request, when: When) -> None:
        with self._lock:
            if when == "before" and self._matches(request):
                self._requests += 1
                if self._requests >= self._first and next(self._changes, True) is None:
                    self.made += 1


async def check(store: MemoryStore, clock: Clock, *, quick: bool = False) -> Checked:
    async with headless(store, clock) as view:
        return await Checker(view, quick=quick, report=silent).run()


def packs(store: MemoryStore, clock: Clock) -> Iterator[None]:
    """New files, and new versions of one."""
    for number in count():
        give_pack(store, clock, {"data/0001": b"%d" % number, f"new/{number}": b"new"})
        clock.advance(1)
        yield


def replaced_packs(store: MemoryStore, clock: Clock) -> Iterator[None]:
    """The only file of a pack is written again, and the pack that it was in collected."""
    old = ""
    for number in count():
        new = give_pack(store, clock, {"hot": b"%d" % number}, writer="0badcaf1")
        clock.advance(1)
        yield
        store.take(old)
        old = new
        yield


def replaced_files(store: MemoryStore, clock: Clock) -> Iterator[None]:
    """A plain file gets other bytes, is announced, and removed."""
    for number in count():
        meta = store.give("plain-0", b"%d" % number)
        yield
        give_commit(store, clock, Put("plain-0", OWN, 0, meta.size, 0o600, 0, 0, 0, hides=meta.etag))
        clock.advance(1)
        yield
        give_commit(store, clock, Remove("plain-0", hides=meta.etag))
        clock.advance(1)
        yield
        store.take("plain-0")
        yield


def renames(store: MemoryStore, clock: Clock) -> Iterator[None]:
    """A plain file is renamed, its object copied to the new key, that said, and the old one deleted."""
    for number in count():
        old, new = f"plain-{number}", f"plain-{number + 1}"
        meta = store.objects[old][1]
        ref = ObjectRef(old, meta.etag, meta.size)
        put = Put(new, 1, 0, meta.size, 0o600, 0, 0, 0)
        give_commit(store, clock, put, Remove(old, hides=meta.etag), objects=(ref,))
        clock.advance(1)
        yield
        copy = store.give(new, b"plain")
        yield
        moved = Relocate(new, 1, 0, "", OWN, 0, meta.size, 0o600, 0, 0, 0, hides=copy.etag)
        give_commit(store, clock, moved, objects=(ref,))
        clock.advance(1)
        yield
        store.take(old)
        yield


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("changes", [packs, replaced_packs, replaced_files, renames])
async def test_fsck_write_before_each_request_reports_nothing(
    store: MemoryStore, clock: Clock, changes: Callable[[MemoryStore, Clock], Iterator[None]], quick: bool
) -> None:
    store.hook = hook = BeforeRequests(changes(store, clock))
    done = await check(store, clock, quick=quick)
    assert hook.made > 5
    assert done.problems == []


@pytest.mark.parametrize("changes", [packs, replaced_packs, replaced_files, renames])
async def test_fsck_writes_during_any_request_reports_nothing(
    store: MemoryStore, clock: Clock, changes: Callable[[MemoryStore, Clock], Iterator[None]]
) -> None:
    """A few writes from the n-th request on; then the lake is at rest, and everything is settled."""
    steps = changes(store, clock)
    for first in (1, 3, 5, 6, 7, 8, 9, 11, 13, 15):
        store.hook = BeforeRequests(islice(steps, 3), first=first)
        done = await check(store, clock)
        assert (done.problems, done.unsettled, done.gone) == ([], 0, 0), first


# -- one finding of each kind, and what ends it


def unreadable(store: MemoryStore, clock: Clock) -> Change:
    """Somebody else moves the commit aside."""
    second = commits(store)[1]
    store.give(second, store.data(second)[:-30])
    return lambda: store.take(second)


def damaged(store: MemoryStore, clock: Clock) -> Change:
    """Its files are written again."""
    data = bytearray(store.data(commits(store)[0]))
    data[data.index(FILES["data/0001"])] ^= 1
    store.give(commits(store)[0], bytes(data))
    return lambda: give_pack(store, clock, {"data/0001": b"again"})


def missing(store: MemoryStore, clock: Clock) -> Change:
    """The names that had bytes in it are removed."""
    first = commits(store)[0]
    ref = ObjectRef(first, store.objects[first][1].etag, store.objects[first][1].size)
    give_commit(store, clock, Put("link", 1, 100, 10, 0o600, 0, 0, 0), objects=(ref,))
    clock.advance(1)
    store.take(first)
    return lambda: give_commit(store, clock, Remove("link"))


def missing_plain(store: MemoryStore, clock: Clock) -> Change:
    """The name is written again."""
    meta = store.objects["plain-0"][1]
    give_commit(store, clock, Put("link", 1, 0, 5, 0, 0, 0, 0), objects=(ObjectRef("plain-0", meta.etag, meta.size),))
    clock.advance(1)
    store.take("plain-0")
    return lambda: give_pack(store, clock, {"link": b"again"})


def changed(store: MemoryStore, clock: Clock) -> Change:
    """The object is the version that names refer to again."""
    first = commits(store)[0]
    ref = ObjectRef(first, "another", store.objects[first][1].size)
    give_commit(store, clock, Put("link", 1, 100, 10, 0o600, 0, 0, 0), objects=(ref,))
    clock.advance(1)
    return lambda: give_commit(store, clock, Remove("link"))


def outside(store: MemoryStore, clock: Clock) -> Change:
    """The commit that points beyond its end goes."""
    raw = build((), lambda _: encode(record(clock, [Put("beyond", THIS, 10, 1 << 20, 0o600, 0, 0, 0)])))
    key = store.give(commit_key(clock(), WRITER), raw).key
    clock.advance(1)
    return lambda: store.take(key)


def headers(store: MemoryStore, clock: Clock) -> Change:
    """What was read was wrong, the object is not."""
    first = commits(store)[0]
    good, meta = store.objects[first]
    store.objects[first] = (b"XX" + good[2:], meta)
    return lambda: store.objects.update({first: (good, meta)})


def late(store: MemoryStore, clock: Clock) -> Change:
    """It was collected."""
    key = commit_key(clock() - 900 * 10**9, "0badcaf0")
    past = Clock(clock() - 900 * 10**9)
    raw = build((), lambda _: encode(record(past, [Put("late", THIS, 0, 1, 0o600, 0, 0, 0)], writer="0badcaf0")))
    store.give(key, raw)
    return lambda: store.take(key)


def future(store: MemoryStore, clock: Clock) -> Change:
    """Somebody removed it."""
    key = give_pack(store, Clock(clock() + 7200 * 10**9), {"later": b"later"})
    return lambda: store.take(key)


def index(store: MemoryStore, clock: Clock) -> Change:
    """A newer one was written, and this one removed."""
    found = [key for key in store.objects if key.endswith(".sst")]
    data = bytearray(store.data(found[0]))
    data[100] ^= 1
    store.give(found[0], bytes(data))
    manifest = next(key for key in store.objects if key.endswith("/manifest"))

    def remove() -> None:
        for key in (manifest, *found):
            store.take(key)

    return remove


FINDINGS = {
    Kind.UNREADABLE: unreadable, Kind.DAMAGED: damaged, Kind.MISSING: missing, Kind.CHANGED: changed,
    Kind.OUTSIDE: outside, Kind.HEADERS: headers, Kind.LATE: late, Kind.INDEX: index, Kind.FUTURE: future,
    "missing plain": missing_plain,
}  # fmt: skip


def _only(change: Change) -> Iterator[None]:
    change()
    yield


def _is_poll(request: Request) -> bool:
    return (request.what, request.key) == ("list", COMMITS)


async def make_finding(store: MemoryStore, clock: Clock, kind: str) -> Change:
    if kind in (Kind.INDEX, Kind.LATE):
        clock.advance(1000 if kind is Kind.LATE else 1)
        give_pack(store, clock, {"newest": b"newest"})
        clock.advance(1)
        async with headless(store, clock) as view:
            await fold_all(view, 0)
    return FINDINGS[kind](store, clock)


@pytest.mark.parametrize("kind", FINDINGS)
async def test_fsck_finding_that_ends_before_second_look_is_dropped(
    store: MemoryStore, clock: Clock, kind: str
) -> None:
    end = await make_finding(store, clock, kind)
    before = await check(store, clock)
    assert kind.split()[0] in {problem.kind for problem in before.problems}
    store.hook = hook = BeforeRequests(_only(end), first=4, matches=_is_poll)  # the opening, the list, the first look
    done = await check(store, clock)
    assert hook.made == 1
    assert (done.problems, done.unsettled) == ([], 0)


@pytest.mark.parametrize("kind", FINDINGS)
async def test_fsck_finding_stays_while_others_write_is_reported(store: MemoryStore, clock: Clock, kind: str) -> None:
    await make_finding(store, clock, kind)
    expected = {(problem.key, problem.kind, *problem.paths) for problem in (await check(store, clock)).problems}
    store.hook = hook = BeforeRequests(replaced_packs(store, clock))
    done = await check(store, clock)
    assert hook.made > 5
    assert expected
    assert {(problem.key, problem.kind, *problem.paths) for problem in done.problems} == expected
