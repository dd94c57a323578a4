"""A parallel LIST: several chains of pages, each from another place of one prefix.

A page says where the next one begins, so one LIST is a chain of requests, each of which waits for the one before. Here
further chains begin after names that are guessed from those seen (`key_space`), and each ends where it meets the first
name of another. What always holds: every item is passed on at least once, in any consistent order of the store's pages:
a chain ends only with the last page, or on a page that has the first item of another chain, which continues from there;
at the end it is checked that the chains lead from the first page to the last. Guesses are never trusted. Items may come
more than once, pages in any order. A LIST of one page is one request; additional requests (a guess beyond the end, or
in a range that is already listed) are at most one, and one for every `PAGES_FOR_A_GUESS` pages, plus items that two
chains both return where they meet. Trio thread only. A crash leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import trio

from lakefs_fuse.store.key_space import LAST, KeySpace
from lakefs_fuse.store.protocol import Capabilities, ListPage
from lakefs_fuse.sync.nursery import collecting

KEYS_MAX = 1000
"""S3's largest page."""
CHAINS_MAX = 16
"""Maximum of concurrent requests of one LIST."""
PAGES_FOR_A_GUESS = 3
LAST_PAGE_MIN = 0.1
"""Share of a page that is requested beyond the expected beginning of another chain."""
PAGES_LEFT_MIN = 2.5
"""A chain that expects fewer pages is not split."""


@dataclass(eq=False, slots=True)
class Chain:
    """A chain of pages from one name on. Names are relative to the prefix; ``limit`` is beyond all names that it is
    expected to have."""

    begin: str
    at: str
    token: str | None
    limit: str
    pages: int = 1
    met: Chain | None = None
    guess: trio.CancelScope | None = None
    cutting: bool = True

    def is_over(self) -> bool:
        return self.met is not None or self.token is None


@dataclass(slots=True)
class ListProgress:
    """Answered requests, those of them without new items, and requests in progress."""

    pages: int = 0
    idle: int = 0
    under_way: int = 0


class Lister(Protocol):
    """The source of pages: a `StoreClient`, or a wrapper of one."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def list_page(
        self, prefix: str, *, delimiter: str = ..., start_after: str = ..., token: str | None = ..., keys_max: int = ...
    ) -> ListPage: ...


class ParallelList:
    """Lists one directory; `run` is called once."""

    def __init__(
        self,
        client: Lister,
        prefix: str,
        take: Callable[[ListPage], None],
        *,
        keys_max: int = KEYS_MAX,
    ) -> None:
        """Names directly below ``prefix`` (delimiter "/"). ``take`` is given every page, of ``keys_max`` items at most,
        and may raise."""
        self._client, self._prefix, self._take = client, prefix, take
        self._keys_max = keys_max
        self._space = KeySpace()
        self._order = _by_bytes if client.capabilities.sorted_listing else _by_name
        self._orderly = client.capabilities.lists_anywhere
        self._chains: list[Chain] = []
        self._firsts: dict[str, Chain] = {}
        self.progress = ListProgress()
        self._active = 0

    async def run(self, *, goes_on: Callable[[], bool] = lambda: True) -> bool:
        """List the directory; returns whether the listing is complete. If there is more than one page and ``goes_on()``
        is false after the first, ``take`` is not called. Raises StoreError kinds, and the errors of ``take``."""
        page = await self._page(token=None)
        if page.next_token is not None and not goes_on():
            return False
        first = self._begin_chain(page, LAST)
        if first.token is None:
            self._take(page)
            return True
        async with collecting() as nursery:
            nursery.start_soon(self._follow, nursery, first)
            self._guess(nursery)
            self._take(page)
        await self._join(first)
        return True

    async def _page(self, *, token: str | None = None, after: str = "", keys_max: int | None = None) -> ListPage:
        self.progress.under_way += 1
        try:
            page = await self._client.list_page(
                self._prefix,
                delimiter="/",
                token=token,
                start_after=self._prefix + after if after else "",
                keys_max=keys_max or self._keys_max,
            )
        finally:
            self.progress.under_way -= 1
        self.progress.pages += 1
        return page

    # -- chains

    def _begin_chain(self, page: ListPage, limit: str) -> Chain:
        """A chain that begins with a page."""
        ends = self._ends(page)
        chain = Chain(*(ends or ("", "")), page.next_token, limit)
        self._chains.append(chain)
        if ends is not None:
            self._firsts[chain.begin] = chain
        self._meet(chain, page)
        return chain

    async def _follow(self, nursery: trio.Nursery, chain: Chain) -> None:
        """To the last page, or until it meets another chain."""
        while not chain.is_over():
            page = await self._page(token=chain.token, keys_max=self._keys_wanted(chain))
            chain.pages += 1
            chain.token = page.next_token
            ends = self._ends(page)
            if ends is not None:
                self._orderly &= self._order(chain.at) <= self._order(ends[0])
                chain.at = ends[1]
                self._meet(chain, page)
            if chain.is_over() and chain.guess is not None:
                chain.guess.cancel()
            self._guess(nursery)
            self._take(page)

    def _keys_wanted(self, chain: Chain) -> int:
        """The items to request: a page, or fewer if another chain is near, so that few are requested twice."""
        if len(self._firsts) == 1 or not self._orderly:
            return self._keys_max
        left = self._space.pages_left(chain.begin, chain.at, chain.limit, chain.pages)
        if left >= 1:
            return self._keys_max
        return min(self._keys_max, int((max(left, 0) + LAST_PAGE_MIN) * self._keys_max) + 1)

    def _meet(self, chain: Chain, page: ListPage) -> None:
        """Record in ``chain.met`` another chain whose first item is on a page."""
        if len(self._firsts) > 1:
            firsts = (self._firsts.get(name) for names in self._names(page) for name in names)
            chain.met = next((other for other in firsts if other is not None and other is not chain), None)

    async def _join(self, first: Chain) -> None:
        """Check that the chains lead from the first page to the last. If they do not, because the store has no order or
        the first name of a chain was removed in between, the first chain continues to the end alone."""
        seen: set[int] = set()
        chain = first
        while chain.met is not None and id(chain) not in seen:
            seen.add(id(chain))
            chain = chain.met
        if chain.met is None:
            return
        while first.token is not None:
            page = await self._page(token=first.token)
            first.token = page.next_token
            self._take(page)

    # -- guesses

    def _guess(self, nursery: trio.Nursery) -> None:
        """Begin as many more chains as the limit allows."""
        while self._may_guess():
            chain = self._longest()
            if chain is None:
                return
            point = self._space.cut(chain.at, chain.limit)
            if point is None:
                chain.cutting = False
                continue
            chain.guess = trio.CancelScope()
            self._active += 1
            nursery.start_soon(self._try, nursery, chain, point)

    def _may_guess(self) -> bool:
        progress = self.progress
        following = sum(not chain.is_over() for chain in self._chains)
        useful = progress.pages - progress.idle
        return (
            self._orderly
            and self._active + following < min(CHAINS_MAX, 1 + useful)
            and self._active + progress.idle < 1 + useful // PAGES_FOR_A_GUESS
        )

    def _longest(self) -> Chain | None:
        """The chain that expects the most pages."""
        best, most = None, PAGES_LEFT_MIN
        for chain in self._chains:
            if not chain.is_over() and chain.guess is None and chain.cutting and chain.at < chain.limit:
                left = self._space.pages_left(chain.begin, chain.at, chain.limit, chain.pages)
                if left > most:
                    best, most = chain, left
        return best

    async def _try(self, nursery: trio.Nursery, chain: Chain, point: str) -> None:
        assert chain.guess is not None
        page: ListPage | None = None
        try:
            with chain.guess:
                page = await self._page(after=point)
        finally:
            chain.guess = None
            self._active -= 1
        found = None if page is None else self._found(chain, point, page)
        if found is None or page is None:
            self.progress.idle += 1
            self.progress.pages += page is None
            self._guess(nursery)
            return
        nursery.start_soon(self._follow, nursery, found)
        self._guess(nursery)
        self._take(page)

    def _found(self, chain: Chain, point: str, page: ListPage) -> Chain | None:
        """The chain that begins with the first name after a guess; None if that is not new."""
        ends = self._ends(page)
        limit = chain.limit
        if self._order(chain.at) < self._order(point) < self._order(limit):
            chain.limit = point
        if ends is None or ends[0] in self._firsts or self._order(ends[0]) <= self._order(chain.at):
            return None
        return self._begin_chain(page, limit)

    # -- pages

    def _names(self, page: ListPage) -> tuple[list[str], list[str]]:
        """Of files, and of directories with their slashes."""
        skip = len(self._prefix)
        return [meta.key[skip:] for meta in page.objects], [common[skip:] for common in page.prefixes]

    def _ends(self, page: ListPage) -> tuple[str, str] | None:
        """Record the first and last item of a page, and the model of its names."""
        ends: list[str] = []
        for names in self._names(page):
            if names:
                ends += (names[0], names[-1])
                self._space.learn(names)
                self._check_order(names)
        return (min(ends, key=self._order), max(ends, key=self._order)) if ends else None

    def _check_order(self, names: list[str]) -> None:
        """A store classified as unordered may have byte order; without either order there are no guesses."""
        if self._orderly and not _is_sorted(names, self._order):
            self._order = _by_bytes
            self._orderly = _is_sorted(names, self._order)


def _by_bytes(name: str) -> str:
    """S3's order (that of code points is that of UTF-8)."""
    return name


def _by_name(name: str) -> str:
    """A tree walk's order."""
    return name.removesuffix("/")


def _is_sorted(names: list[str], order: Callable[[str], str]) -> bool:
    keys = names if order is _by_bytes else [order(name) for name in names]
    return all(one < other for one, other in pairwise(keys))
