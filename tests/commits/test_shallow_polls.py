"""What polls list where many writers commit, and that late commits are found all the same."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import mean

import msgspec
import pytest
import trio
from trio.testing import MockClock

from lakefs_fuse.commits import poller as poller_module
from lakefs_fuse.commits.applier import Applier
from lakefs_fuse.commits.archive import commit_key, parse_commit_key
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.listing_digest import (
    BUCKET_BITS,
    SUFFIX,
    BucketSums,
    Digest,
    DigestName,
    DigestStore,
    bucket_start,
    digest_key,
    parse_digest,
)
from lakefs_fuse.commits.poller import DEEP_S_MAX, OVERLAP_S_MAX, Poller
from lakefs_fuse.commits.record import COMMITS, Record
from lakefs_fuse.errors import AccessDenied
from lakefs_fuse.store.client import Pages
from lakefs_fuse.store.protocol import ListPage, ObjectMeta
from tests.commits.committing import Daemon, Site
from tests.commits.nodes import at
from tests.memory_store import Failures, Request, When
from tests.tiers import sized

REFRESH_S = 5.0
WINDOW_S = 120
SHARE = sized(5, 1)
"""There are so many times fewer writers, keys in a page, and keys that are listed again: polls take the same pages."""
PAGE_KEYS = 1000


class Writers:
    """Commits that appear in a store; polls see their names, and each page counts."""

    def __init__(self, site: Site, count: int, page_keys: int) -> None:
        self.site, self.keys, self.pages, self.count = site, list[str](), 0, count
        self._page_keys, self._chance, self._made_s = page_keys, random.Random(0), 0

    def commit_until(self, seconds: float) -> None:
        """Each writer commits once a second, at its own moment."""
        while self._made_s + 1 <= seconds:
            for writer in range(self.count):
                self.commit(self._made_s + self._chance.random(), writer)
            self._made_s += 1

    def commit(self, seconds: float, writer: int = 0xABC) -> str:
        """A commit of this time becomes visible."""
        key = commit_key(at(seconds), f"{writer:08x}")
        bisect.insort(self.keys, key)
        return key

    def list_since(self, time_ns: int) -> Pages:
        """As `CommitLog.list_since`."""
        start = CommitLog.start(time_ns)
        digests = [meta for key, (_, meta) in self.site.store.objects.items() if key.endswith(SUFFIX) and key > start]
        commits = [ObjectMeta(key, 300, "etag", 0) for key in self.keys[bisect.bisect_right(self.keys, start) :]]
        shown = sorted([*commits, *digests], key=lambda meta: meta.key)

        async def fetch(token: str | None) -> ListPage:
            self.pages += 1
            first = int(token or 0)
            end = first + self._page_keys
            return ListPage(shown[first:end], [], str(end) if end < len(shown) else None)

        return Pages(fetch)


class Follower:
    """A mount that polls in the background."""

    def __init__(self, writers: Writers, daemon: Daemon, number: int) -> None:
        self.daemon, self.pages, self.applied_s = daemon, list[int](), dict[str, float]()
        self._writers = writers
        self.poller = Poller(
            daemon.log, daemon.applier, daemon.metrics,
            refresh_s=REFRESH_S, rng=random.Random(number), applied=self._note,
        )  # fmt: skip

    def _note(self, record: Record) -> None:
        self.applied_s[commit_key(record.time, record.writer)] = self._writers.site.clock.seconds

    async def poll(self) -> None:
        before = self._writers.pages
        await self.poller.poll_in_background()
        self.pages.append(self._writers.pages - before)


@pytest.fixture(autouse=True)
def _names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits say nothing, so that nothing is fetched for them."""

    async def fetch(_log: CommitLog, meta: ObjectMeta, *, bytes_max: int) -> Record:
        name = parse_commit_key(meta.key)
        assert name is not None
        return Record(time=name[0], writer=name[1])

    def apply(applier: Applier, record: Record, *_: object, **__: object) -> None:
        applier.commits.record_applied(record.time, record.writer)

    monkeypatch.setattr(CommitLog, "fetch", fetch)
    monkeypatch.setattr(Applier, "apply", apply)
    monkeypatch.setattr(poller_module, "GETS_MAX", 10**9)


class Run:
    """Followers of some writers, in turns; the clock of the test is the only one. ``share`` is as `SHARE`."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, writers: int, followers: int, *, share: int = SHARE
    ) -> None:
        self.site, self.clock, self.stack = Site(root), MockClock(), ExitStack()
        self.writers = Writers(self.site, writers // share, PAGE_KEYS // share)
        for name in ("OVERLAP_KEYS_MIN", "SHALLOW_KEYS"):
            monkeypatch.setattr(poller_module, name, getattr(poller_module, name) // share)
        monkeypatch.setattr(CommitLog, "list_since", lambda _, time_ns: self.writers.list_since(time_ns))
        self.site.clock.seconds = WINDOW_S
        self.writers.commit_until(WINDOW_S)
        self.followers = [self._follower(number) for number in range(followers)]

    def _follower(self, number: int) -> Follower:
        return Follower(self.writers, self.stack.enter_context(self.site.daemon(f"follower{number}")), number)

    async def go_on(self, seconds: float) -> None:
        """So long, each follower polls every REFRESH_S."""
        step_s = REFRESH_S / len(self.followers)
        for number in range(round(seconds / step_s)):
            self.clock.jump(step_s)
            self.site.clock.seconds += step_s
            self.writers.commit_until(self.site.clock.seconds)
            await self.followers[number % len(self.followers)].poll()

    def pages(self, polls: int) -> list[float]:
        """Of each follower, the mean of its last polls."""
        return [mean(follower.pages[-polls:]) for follower in self.followers]

    def digests(self) -> list[str]:
        return [key for key in self.site.store.objects if key.endswith(SUFFIX)]

    def go(self, main: Callable[[], object]) -> None:
        with self.stack:
            trio.run(main, clock=self.clock)  # type: ignore[arg-type]


def test_pages_of_a_poll_do_not_grow_with_the_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of 50 writers has 7 pages."""
    run = Run(tmp_path, monkeypatch, writers=50, followers=8)

    async def main() -> None:
        await run.go_on(15)
        await run.go_on(60)
        assert mean(run.pages(12)) <= 1.3, run.pages(12)
        assert 1 <= len(run.digests()) <= 8
        for follower in run.followers:
            assert len(follower.applied_s) >= len(run.writers.keys) - run.writers.count * (REFRESH_S + 1)

    run.go(main)


def test_pages_of_500_writers_are_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 s have 2.5 pages, the window has 63. One mount in all lists that every 20 to 40 s."""
    run = Run(tmp_path, monkeypatch, writers=500, followers=1, share=sized(20, 1))

    async def main() -> None:
        (follower,) = run.followers
        await run.go_on(REFRESH_S)
        follower.poller._deep_due_s = 1e9  # noqa: SLF001 - it is another one's turn
        await run.go_on(60)
        assert mean(follower.pages[-12:]) <= 3, follower.pages[-12:]
        assert len(follower.applied_s) >= len(run.writers.keys) - run.writers.count * (REFRESH_S + 1)

    run.go(main)


@pytest.mark.parametrize("followers", [1, 4])
def test_late_commits_are_found_by_mounts_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followers: int
) -> None:
    """As long as they are in the window, by a LIST of this mount's own, or because another's has a digest."""
    run = Run(tmp_path, monkeypatch, writers=20, followers=followers)
    late: dict[str, float] = {}

    async def main() -> None:
        await run.go_on(15)
        for late_s in (11, 20, 40, 80, 119):
            for _ in range(4):
                now_s = run.site.clock.seconds
                late[run.writers.commit(now_s - late_s)] = now_s
                await run.go_on(REFRESH_S)
        await run.go_on(DEEP_S_MAX + 2 * REFRESH_S)

    run.go(main)
    for follower in run.followers:
        assert follower.poller._is_long  # noqa: SLF001
        for key, visible_s in late.items():
            assert follower.applied_s[key] - visible_s <= DEEP_S_MAX + 2 * REFRESH_S
    if followers > 1:
        others = [follower for follower in run.followers if not follower.daemon.log.digests.written]
        assert others, "these have compared digests"


def test_commit_that_comes_while_a_digest_is_compared_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that are listed for a difference go on to what is newest, behind the time up to which they count."""
    run, meanwhile, read = Run(tmp_path, monkeypatch, writers=20, followers=4), list[str](), DigestStore.read

    async def commit_and_read(digests: DigestStore, name: DigestName) -> Digest | None:
        meanwhile.append(run.writers.commit(run.site.clock.seconds))
        return await read(digests, name)

    async def main() -> None:
        monkeypatch.setattr(DigestStore, "read", commit_and_read)
        await run.go_on(15)
        for _ in range(5):
            run.writers.commit(run.site.clock.seconds - 20)
            await run.go_on(REFRESH_S)
        await run.go_on(DEEP_S_MAX + 2 * REFRESH_S)

    run.go(main)
    assert meanwhile
    for follower in run.followers:
        assert set(meanwhile) <= follower.applied_s.keys()


def test_heard_ns_after_an_equal_digest_is_before_every_commit_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, writers=20, followers=4)
    late, missing = dict[str, float](), 0

    async def main() -> None:
        nonlocal missing
        await run.go_on(15)
        for _ in range(24):
            late[run.writers.commit(run.site.clock.seconds - 70)] = run.site.clock.seconds
            await run.go_on(REFRESH_S)
            for follower in run.followers:
                unknown = [visible_s for key, visible_s in late.items() if key not in follower.applied_s]
                missing += len(unknown)
                assert all(follower.poller.heard_ns <= at(visible_s) for visible_s in unknown)

    run.go(main)
    assert missing


def test_commits_within_the_overlap_are_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, writers=20, followers=1)

    async def main() -> None:
        await run.go_on(15)
        (follower,) = run.followers
        for number in range(12):
            now_s = run.site.clock.seconds
            key = run.writers.commit(now_s - OVERLAP_S_MAX + 0.5 + number / 100)
            await run.go_on(REFRESH_S)
            assert follower.applied_s[key] == now_s + REFRESH_S
        assert max(follower.pages[-12:]) > min(follower.pages[-12:]) == 1

    run.go(main)


def test_poll_that_somebody_waits_for_is_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, writers=20, followers=1)

    async def main() -> None:
        await run.go_on(15)
        (follower,) = run.followers
        for ask in (follower.poller.poll, lambda: follower.poller.catch_up(0.0)):
            key = run.writers.commit(run.site.clock.seconds - 100)
            await ask()
            assert key in follower.applied_s

    run.go(main)


def test_poll_after_one_that_failed_is_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, writers=20, followers=1)

    async def main() -> None:
        await run.go_on(15)
        (follower,) = run.followers
        key = run.writers.commit(run.site.clock.seconds - 100)
        keys, run.writers.keys = run.writers.keys, None  # type: ignore[assignment]
        with pytest.raises(TypeError):
            await follower.poller.poll_in_background()
        run.writers.keys = keys
        await follower.poll()
        assert key in follower.applied_s

    run.go(main)


def test_shallow_poll_applies_again_what_was_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, writers=20, followers=1)

    async def main() -> None:
        await run.go_on(15)
        (follower,) = run.followers
        follower.applied_s.clear()
        now_s = run.site.clock.seconds
        follower.daemon.applier.commits.forget_after(at(now_s - 60))
        await run.go_on(REFRESH_S)
        assert len(follower.applied_s) >= 60 * run.writers.count
        assert follower.pages[-1] == 2

    run.go(main)


def test_digest_is_put_when_what_was_listed_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, writers=20, followers=1)
    late, waiting = list[str](), list[int]()

    def count_waiting(request: Request, when: When) -> None:
        if when == "before" and request.what == "put" and request.key.endswith(SUFFIX):
            waiting.append(sum(key not in run.followers[0].applied_s for key in late))

    async def main() -> None:
        run.site.store.hook = count_waiting
        for _ in range(24):
            late.append(run.writers.commit(run.site.clock.seconds - 70))
            await run.go_on(REFRESH_S)

    run.go(main)
    assert waiting
    assert not any(waiting)


@pytest.mark.parametrize("how", ["gone", "no digest", "other sums", "other numbers", "too many buckets"])
def test_digest_that_is_wrong_costs_requests_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    run = Run(tmp_path, monkeypatch, writers=20, followers=2)
    late, spoiled = dict[str, float](), set[str]()

    def spoil() -> None:
        for key in set(run.digests()) - spoiled:
            spoiled.add(key)
            digest = msgspec.msgpack.decode(run.site.store.data(key), type=Digest)
            wrong = {
                "no digest": b"no digest",
                "other sums": msgspec.msgpack.encode(msgspec.structs.replace(digest, sums=[1] * len(digest.sums))),
                "other numbers": msgspec.msgpack.encode(msgspec.structs.replace(digest, sums=digest.sums[:-1])),
                "too many buckets": msgspec.msgpack.encode(Digest(0, [0] * 5000, [0] * 5000)),
            }
            run.site.store.objects[key] = wrong[how], run.site.store.objects[key][1]

    async def main() -> None:
        if how == "gone":
            run.site.store.hook = Failures(
                lambda request: request.what == "get" and request.key.endswith(SUFFIX), AccessDenied("no"), count=999
            )
        for number in range(24):
            if number % 4 == 3:
                late[run.writers.commit(run.site.clock.seconds - 70)] = run.site.clock.seconds
            await run.go_on(REFRESH_S)
            if how != "gone":
                spoil()

    run.go(main)
    assert run.digests()
    done = [key for key, since_s in late.items() if since_s < run.site.clock.seconds - DEEP_S_MAX - 2 * REFRESH_S]
    assert len(done) >= 3
    for follower in run.followers:
        assert all(key in follower.applied_s for key in done)


def test_digest_that_agrees_after_a_deep_poll_costs_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of that poll began within a bucket, and that of the comparison is still the same."""
    run = Run(tmp_path, monkeypatch, writers=100, followers=2)

    async def main() -> None:
        await run.go_on(15)
        asked, other = run.followers
        for _ in range(2):  # there is nothing new for the second
            await asked.poller.poll()
        run.site.clock.seconds += 1
        run.writers.commit_until(run.site.clock.seconds)
        for follower in run.followers:
            await follower.poll()
        other.poller._deep_due_s = 0.0  # noqa: SLF001
        await other.poll()
        heard_ns = asked.poller.heard_ns
        await asked.poll()
        assert asked.poller.heard_ns != heard_ns, "the digest was compared"
        assert asked.pages[-1] == 1

    run.go(main)
    assert len(run.digests()) == 1


def test_mount_that_may_not_write_digests_lists_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, writers=20, followers=2)
    run.site.store.hook = Failures(
        lambda request: request.what == "put" and request.key.endswith(SUFFIX), AccessDenied("denied"), count=999
    )

    async def main() -> None:
        await run.go_on(3 * DEEP_S_MAX)
        assert run.site.store.count("put") == 2, "once each"
        assert all(max(follower.pages[-9:]) > 1 for follower in run.followers)

    run.go(main)
    assert not run.digests()


def test_differences_of_sums_are_ranges_of_time() -> None:
    keys = [(at(second), f"{COMMITS}{at(second):016x}-00000001.zip") for second in range(60)]
    first, end = bucket_start(at(0)), bucket_start(at(60))
    one, two = BucketSums(), BucketSums()
    one.replace(first, None, keys)
    two.replace(first, None, [*keys[:20], *keys[21:]])
    digest = one.digest(first, end)
    assert sum(digest.counts) == 60
    assert one.differences(digest, first, first) == []
    start = bucket_start(at(20))
    assert two.differences(digest, first, first) == [(start, start + (1 << BUCKET_BITS))]
    assert two.differences(digest, first, at(30)) == []
    two.replace(start, start + (1 << BUCKET_BITS), [keys[20]])
    assert two.differences(digest, first, first) == []
    assert at(49) < one.start_of_last(10, at(59), 600 * 10**9) <= at(50)
    assert one.start_of_last(10, at(59), 3 * 10**9) == bucket_start(at(56))


def test_name_of_a_digest_tells_what_it_covers() -> None:
    key = digest_key(300, "0000000a", 200, 100)
    name = parse_digest(ObjectMeta(key, 20, "etag", 0))
    assert name is not None
    assert (name.time, name.writer, name.newest, name.first) == (300, "0000000a", 200, 100)
    assert parse_digest(ObjectMeta(key + "x", 20, "etag", 0)) is None
    assert parse_digest(ObjectMeta(key, 1 << 30, "etag", 0)) is None


def test_digest_that_covers_too_little_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, writers=20, followers=1)

    async def main() -> None:
        (follower,) = run.followers
        await run.go_on(15)
        late = run.writers.commit(run.site.clock.seconds - 70)
        for _ in range(round(DEEP_S_MAX / REFRESH_S) + 2):
            now = at(run.site.clock.seconds)
            empty = digest_key(now, "ffffffff", now, bucket_start(at(0)))
            run.site.store.give(empty, msgspec.msgpack.encode(Digest(0, [], [])))
            await run.go_on(REFRESH_S)
        assert late in follower.applied_s

    run.go(main)
