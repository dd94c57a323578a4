"""Listings that run side by side bring what one page after another brings, and cost little more."""

from __future__ import annotations

import bisect
import math
import random
import uuid
from collections import Counter
from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefs_fuse.errors import StoreError, Unavailable
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.parallel_list import CHAINS_MAX, PAGES_FOR_A_GUESS, ParallelList
from lakefs_fuse.store.protocol import Capabilities, ListPage, ObjectMeta
from tests.fakes import store_client
from tests.memory_store import Failures, MemoryStore
from tests.store.lakes import Lake
from tests.store.test_contract import ODD_KEYS, all_pages
from tests.tiers import examples

SORTED, UNSORTED = Capabilities(name="sorted"), Capabilities(name="unsorted", sorted_listing=False)


class TreeWalk(MemoryStore):
    """Lists as SeaweedFS does: by names, directories where a file of their name would be."""

    def __init__(self, *, page_keys_max: int) -> None:
        super().__init__(UNSORTED, page_keys_max=page_keys_max)

    def _place(self, name: str) -> str:
        return name.removesuffix("/").encode("utf-8", "surrogatepass").hex() + ("/" if name.endswith("/") else "")


class Sparing(MemoryStore):
    """Ignores where a listing shall begin, as some servers do."""

    def list_page(self, prefix: str, *, start_after: str = "", **more: object) -> ListPage:
        return super().list_page(prefix, **more)  # type: ignore[arg-type]


STORES: dict[str, Callable[[int], MemoryStore]] = {
    "bytes": lambda size: MemoryStore(SORTED, page_keys_max=size),
    "said to have no order": lambda size: MemoryStore(
        Capabilities(name="bytes", sorted_listing=True), page_keys_max=size
    ),
    "walk": lambda size: TreeWalk(page_keys_max=size),
    "none": lambda size: MemoryStore(UNSORTED, page_keys_max=size),
    "sparing": lambda size: Sparing(SORTED, page_keys_max=size),
}


def client_of(store: MemoryStore, capabilities: Capabilities | None = None) -> StoreClient:
    return store_client(store, capabilities or store.capabilities, retry_timeout_s=0.0)


def listed(client: StoreClient, prefix: str, **more: int) -> Counter[tuple[str, str]]:
    """Every item, and how often it came."""
    found: Counter[tuple[str, str]] = Counter()

    def take(page: ListPage) -> None:
        found.update((meta.key, meta.etag) for meta in page.objects)
        found.update((common, "") for common in page.prefixes)

    async def run() -> None:
        await ParallelList(client, prefix, take, **more).run()

    trio.run(run)
    return found


def expected(store: MemoryStore, prefix: str) -> set[tuple[str, str]]:
    names = store.names(prefix, "/")
    return {(name, "" if common else store.objects[name][1].etag) for name, common in names}


COMPONENTS = st.one_of(
    st.text("ab01/-", min_size=1, max_size=6),
    st.integers(0, 5000).map(str),
    st.integers(0, 300).map("part-{:05d}".format),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=4),
    st.sampled_from(("a//b", "/", "a/", "日本語/x", "a\U0010ffff", "\uffff", "a b", "\x01")),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    keys=st.sets(COMPONENTS, max_size=80),
    prefix=st.sampled_from(("", "d/", "a", "é/")),
    kind=st.sampled_from(sorted(STORES)),
    page=st.integers(1, 9),
    said_sorted=st.booleans(),
)
def test_any_keys_in_any_order(keys: set[str], prefix: str, kind: str, page: int, said_sorted: bool) -> None:
    """Whatever the store says of its order, and whatever that is."""
    store = STORES[kind](page)
    for key in keys:
        store.give(prefix + key)
        store.give("elsewhere/" + key)
    client = client_of(store, Capabilities(name="x", sorted_listing=said_sorted))
    found = listed(client, prefix)
    assert set(found) == expected(store, prefix)
    pages = max(1, -(-len(found) // page))
    assert store.count("list") <= (CHAINS_MAX + 1) * pages + 1


@pytest.mark.parametrize("kind", ["bytes", "walk"])
@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 20, 29])
def test_a_small_directory_costs_one_request_more_at_most(kind: str, count: int) -> None:
    store = STORES[kind](10)
    for number in range(count):
        store.give(f"d/f{number:03}" + ("/x" if number % 7 == 3 else ""))
    assert len(listed(client_of(store), "d/")) == count
    pages = max(1, -(-count // 10))
    assert pages <= store.count("list") <= pages + (pages > 1)


def test_a_local_directory_is_not_read_from_its_middle() -> None:
    """A page that begins there costs as much as all before it."""
    store = MemoryStore(Capabilities(name="local"), page_keys_max=10)
    for number in range(500):
        store.give(f"f{number:03}")
    found = listed(client_of(store), "")
    assert (len(found), store.count("list")) == (500, 50)


class Slow:
    """A listing of names in S3's order; each request takes a second of the test's own clock."""

    capabilities = SORTED

    def __init__(self, names: list[str], page: int) -> None:
        self._names, self._page = sorted(set(names)), page
        self.pages = -(-len(self._names) // page)
        self.requests = self.at_once_max = self._at_once = 0

    async def list_page(
        self, prefix: str, *, delimiter: str, token: str | None, start_after: str, keys_max: int
    ) -> ListPage:
        self.requests += 1
        self._at_once += 1
        self.at_once_max = max(self.at_once_max, self._at_once)
        try:
            await trio.sleep(1)
        finally:
            self._at_once -= 1
        at = int(token) if token else bisect.bisect_right(self._names, start_after)
        part, end = self._names[at : at + self._page], at + self._page
        metas = [ObjectMeta(name, 1, "e", 0) for name in part]
        return ListPage(metas, [], str(end) if end < len(self._names) else None)


COUNT = 20_000
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPREADS: dict[str, Callable[[int, random.Random], str]] = {
    "numbered": lambda n, _: f"img-{n:08d}.jpg",
    "not padded": lambda n, _: str(n),
    "uuid": lambda _, rng: str(uuid.UUID(int=rng.getrandbits(128))),
    "words": lambda _, rng: "".join(rng.choices(LETTERS, k=rng.randrange(3, 12))),
    "times": lambda n, _: f"2024-{1 + n * 12 // COUNT:02}-{1 + n % 28:02}T{n % 24:02}:{n % 60:02}-{n}",
    "skewed": lambda n, rng: f"part-{int(math.exp(rng.random() * 16)):08d}-{n}",
    "two": lambda n, _: f"{('train', 'val')[n // (COUNT // 2)]}_{n % (COUNT // 2):06d}",
}


@pytest.mark.parametrize("spread", SPREADS)
def test_many_pages_take_a_quarter_of_the_time(spread: str) -> None:
    """Counted in the time of a request, with a page of 100 names; and what is spent on guesses stays bounded."""
    rng = random.Random(5)
    names = [SPREADS[spread](number, rng) for number in range(COUNT)]
    slow = Slow(names, 100)
    found: set[str] = set()

    def take(page: ListPage) -> None:
        found.update(meta.key for meta in page.objects)

    async def run() -> tuple[float, ParallelList]:
        began = trio.current_time()
        listing = ParallelList(slow, "", take)  # type: ignore[arg-type]
        await listing.run()
        return trio.current_time() - began, listing

    took, listing = trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    assert found == set(names)
    assert took * 4 <= slow.pages
    assert slow.at_once_max <= CHAINS_MAX
    assert slow.requests == listing.progress.pages
    assert listing.progress.idle <= 1 + slow.requests // PAGES_FOR_A_GUESS
    assert slow.requests <= 1.5 * slow.pages


@pytest.mark.parametrize("after", range(6))
def test_a_request_that_fails_ends_it(after: int) -> None:
    store = MemoryStore(SORTED, page_keys_max=10)
    for number in range(200):
        store.give(f"f{number:03}")
    fails = Failures(lambda request: store.count("list") > after, Unavailable("busy"))
    store.hook = fails
    with pytest.raises(Unavailable, match="busy"):
        listed(client_of(store), "")
    assert store.count("list") <= 1 + after + CHAINS_MAX


def test_who_takes_pages_may_end_it() -> None:
    store = MemoryStore(SORTED, page_keys_max=10)
    for number in range(200):
        store.give(f"f{number:03}")
    taken = 0

    def take(page: ListPage) -> None:
        nonlocal taken
        taken += 1
        if taken >= 3:
            raise StoreError("enough")

    async def run() -> None:
        await ParallelList(client_of(store), "", take).run()

    with pytest.raises(StoreError, match="enough"):
        trio.run(run)
    assert 3 <= taken <= 3 + CHAINS_MAX, "answers that were there already"


def test_each_store_lists_the_same_side_by_side(lake: Lake) -> None:
    """Pages of 3, so that many listings begin somewhere within."""
    names = {key.replace("/", "-") for key in ODD_KEYS if len(key) < 99} | {f"n{number:03}" for number in range(40)}
    names |= {f"dir-{number}/below" for number in range(12)} | {"dir-3", "dir-3!", "ümlaut/x", "日本/x"}
    refused = set(lake.capabilities.characters_refused)
    written = 0
    for name in sorted(names):
        if set(name) & refused:
            continue
        try:
            lake.store.put("d/" + name, b"x")
            written += 1
        except StoreError:  # a file and a directory of one name cannot be there on every store
            assert name.startswith("dir-3")
    pages = all_pages(lake.store, "d/", delimiter="/")
    plain = {meta.key for page in pages for meta in page.objects} | {each for page in pages for each in page.prefixes}
    client = store_client(lake.store, lake.capabilities)
    found = listed(client, "d/", keys_max=3)
    assert {key for key, _ in found} == plain
    assert len(plain) > 50 <= written
    below = listed(client, "d/dir-7/", keys_max=3)
    assert {key for key, _ in below} == {"d/dir-7/below"}
