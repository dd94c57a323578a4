"""Flat listings, LISTs without a delimiter: one answers for all directories of a subtree with few plain objects.

Listed one by one, a thousand directories cost a thousand LISTs each TTL, although all their files are in packs. So if
several directories must be listed, the topmost one above them is listed once with all keys below it. If these fit one
page, each directory below is merged from that page while it is no older than the TTL; if not, that subtree is not tried
again for a while, and the next one further down is.

What always holds (*as if it were slow*): a directory is merged from a `FlatListing` as if a LIST of that directory had
begun with it and ended now: names that were changed or asked for since stay as they are (`FlatListing.touched`). A
directory is never merged from it if it was listed alone since, if it has come to its path since, or if no earlier
listing answers for the names that would stay. Memory is bounded: `FLAT_LISTINGS_MAX` pages, and the changes since they
began.

Trio thread only; all code between two awaits is atomic. A crash leaves nothing behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import trio

from lakefs_fuse.errors import LakeError
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.parallel_list import Lister
from lakefs_fuse.store.protocol import ListPage, ObjectMeta
from lakefs_fuse.sync.nursery import for_each

NS = 1_000_000_000
KEYS_MAX = 1000
"""S3's largest page: a subtree of more objects is listed directory by directory."""
FLAT_LISTINGS_MAX = 16
"""Flat listings in memory, some 300 KB each."""
SUBTREES_MAX = 4096
"""Maximum of subtrees that are classified as large or not; the least recently used are forgotten."""
CHANGES_MAX = 4096
"""Maximum names that may change below a flat listing before it is dropped."""
LARGE_S_FIRST, LARGE_S_MAX = 600.0, 3600.0
"""How long a subtree counts as large; the time doubles with each further attempt."""
_BEHIND_RESERVED = RESERVED_PREFIX + "~"
"""A LIST after this has no reserved key."""


@dataclass(frozen=True, slots=True)
class Place:
    """A directory in the tree: its inode, its prefix, and the parent and name of it and of each directory above it."""

    inode: int
    prefix: str
    names: Sequence[tuple[int, bytes]]
    is_listed: bool = False
    """True if an earlier listing counts for the directory's names but for those that are ``outdated``."""
    outdated: Collection[bytes] = ()


@dataclass(slots=True)
class FlatListing:
    """All objects below a prefix but reserved ones, in the order of their keys, as of ``began_ns`` (wall clock)."""

    began_ns: int
    strays: set[str]
    """Keys that no listing may show, as of the beginning and the end of the LIST."""
    objects: list[ObjectMeta] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    touched: dict[int, set[bytes]] = field(default_factory=dict)
    """Names that were changed or asked for since the LIST began, by directory, and in directories above changed names
    the names that lead there."""
    touched_count: int = 0
    asked: set[int] = field(default_factory=set)
    """Directories that were listed alone since, or have to be."""
    is_complete: bool = False
    renamed: set[tuple[int, bytes]] = field(default_factory=set)
    """Names that changed since the LIST began, with their directories."""
    merged: set[int] = field(default_factory=set)
    """Directories that were merged from it; no more than two are kept, because only that number matters."""

    def fill(self, objects: list[ObjectMeta]) -> None:
        """Set the objects of the LIST, which is complete."""
        self.objects = sorted(objects, key=lambda meta: meta.key)
        self.keys = [meta.key for meta in self.objects]
        self.is_complete = True

    def touch(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Leave a name, given with its directory, and those that lead there from above to what is known of them now."""
        for directory, name in names:
            touched = self.touched.setdefault(directory, set())
            if name in touched:
                return  # and those above are, too: a rename of a directory touches those above its new place
            touched.add(name)
            self.touched_count += 1

    def answers(self, place: Place) -> bool:
        """Return whether the directory can be merged from this listing, but for its touched names."""
        touched = self.touched.get(place.inode, ())
        return (
            (not touched or (place.is_listed and not any(name in touched for name in place.outdated)))
            and place.inode not in self.asked
            and self.renamed.isdisjoint(place.names)
            and not any(key.startswith(place.prefix) and "/" not in key[len(place.prefix) :] for key in self.strays)
        )

    def below(self, prefix: str) -> list[ObjectMeta]:
        """Return all objects whose keys begin with ``prefix``."""
        first = bisect_left(self.keys, prefix)
        return [*_while_below(self.objects[first:], prefix)]

    def page(self, prefix: str) -> ListPage:
        """Return the page that a LIST of the directory with this prefix would, with the delimiter "/"."""
        objects: list[ObjectMeta] = []
        prefixes: dict[str, None] = {}
        for meta in self.below(prefix):
            name, slash, _ = meta.key[len(prefix) :].partition("/")
            if slash:
                prefixes[prefix + name + slash] = None
            else:
                objects.append(meta)
        return ListPage(objects, [*prefixes], None)


def _while_below(objects: Sequence[ObjectMeta], prefix: str) -> Iterator[ObjectMeta]:
    for meta in objects:
        if not meta.key.startswith(prefix):
            return
        yield meta


@dataclass(slots=True)
class _Subtree:
    """How the subtree at one prefix has been listed so far."""

    asked: set[int] = field(default_factory=set)
    """Directories that had to be listed since ``asked_ns``; no more than two are kept."""
    asked_ns: int = 0
    large_until_ns: int = 0
    """0 if it fitted one page when it was listed last, or was never listed."""
    large_s: float = LARGE_S_FIRST
    is_shared: bool = False
    """Set if the last flat listing served several directories: the next one is made for the first that needs it."""
    done: trio.Event | None = None
    """Set at the end of the LIST under way; None if there is none."""


class SubtreeListings:
    """See the module's head."""

    def __init__(
        self, client: Lister, clock_ns: Callable[[], int], ttl_ns: int, strays: Callable[[], Iterable[str]]
    ) -> None:
        """``strays`` returns keys that no listing may show."""
        self._client, self._clock_ns, self._ttl_ns, self._strays = client, clock_ns, ttl_ns, strays
        self._subtrees: OrderedDict[str, _Subtree] = OrderedDict()
        self.flat_listings: OrderedDict[str, FlatListing] = OrderedDict()
        """Flat listings by prefix, including those under way. While it is empty, `name_changed` need not be called."""

    def name_changed(self, directory: int, name: bytes, above: Callable[[int], Iterable[tuple[int, bytes]]]) -> None:
        """Record that a name changes now. ``above`` returns the name of its directory, and of each above, with the
        directory that it is in."""
        for flat in self._live():
            flat.renamed.add((directory, name))
        self.name_asked(directory, name, above)

    def name_asked(self, directory: int, name: bytes, above: Callable[[int], Iterable[tuple[int, bytes]]]) -> None:
        """Record that the store is asked about a name now. See `name_changed`."""
        for flat in self._live():
            flat.touch(chain(((directory, name),), above(directory)))

    def _live(self) -> list[FlatListing]:
        """Drop flat listings that are too old, or below which too much changed, and return the rest."""
        for prefix, flat in [*self.flat_listings.items()]:
            if not self._is_recent(flat.began_ns) or len(flat.renamed) + flat.touched_count > CHANGES_MAX:
                del self.flat_listings[prefix]
        return [*self.flat_listings.values()]

    def directory_asked(self, directory: int) -> None:
        """Record that a directory is listed alone, or must be: flat listings no longer cover it."""
        for flat in self.flat_listings.values():
            flat.asked.add(directory)

    def is_shared(self, place: Place) -> bool:
        """Return whether `flat_listing` serves a directory without a LIST, or with one that is likely to serve
        others."""
        for prefix in _prefixes(place.prefix):
            flat, subtree = self.flat_listings.get(prefix), self._subtrees.get(prefix)
            if flat is not None and flat.is_complete and self._is_recent(flat.began_ns):
                return flat.answers(place)
            if subtree is not None and subtree.large_until_ns <= self._clock_ns():
                return subtree.is_shared
        return False

    def is_in_large(self, prefix: str) -> bool:
        """Return whether the subtree of a directory, or one above it, did not fit one page when it was listed last."""
        subtrees = (self._subtrees.get(above) for above in _prefixes(prefix))
        return any(subtree.large_until_ns > 0 for subtree in subtrees if subtree is not None)

    async def flat_listing(self, place: Place, since_ns: int = 0) -> FlatListing | None:
        """Return a flat listing that began at ``since_ns`` or later, from which to merge a directory; None if the
        directory must be listed alone.

        It may send a LIST, or two for the root of the lake. It never raises LakeError: the LIST of the directory itself
        reports what is wrong."""
        for prefix in _prefixes(place.prefix):
            subtree = self._subtree(prefix)
            while subtree.done is not None:
                await subtree.done.wait()
            flat = self._usable(prefix, since_ns)
            if flat is None:
                if subtree.large_until_ns > self._clock_ns():
                    continue
                if not self._is_wanted(subtree, place.inode):
                    return None
                flat = await self._list(prefix, subtree)
            if flat is not None:
                if not flat.answers(place):
                    return None
                if len(flat.merged) < 2:
                    flat.merged.add(place.inode)
                    subtree.is_shared = len(flat.merged) > 1
                return flat
        return None

    async def flat_listing_above(self, prefix: str, since_ns: int) -> FlatListing | None:
        """Return a flat listing that began at ``since_ns`` or later, and that has all objects below a prefix; None if
        these are many. It may send a LIST for each directory above, and never raises LakeError."""
        for above in _prefixes(prefix):
            subtree = self._subtree(above)
            while subtree.done is not None:
                await subtree.done.wait()
            flat = self._usable(above, since_ns)
            if flat is None and subtree.large_until_ns <= self._clock_ns():
                flat = await self._list(above, subtree)
            if flat is not None:
                return flat
        return None

    def _usable(self, prefix: str, since_ns: int) -> FlatListing | None:
        flat = self.flat_listings.get(prefix)
        if flat is None or not flat.is_complete or not self._is_recent(flat.began_ns) or flat.began_ns < since_ns:
            return None
        return flat

    def _subtree(self, prefix: str) -> _Subtree:
        subtree = self._subtrees.setdefault(prefix, _Subtree())
        self._subtrees.move_to_end(prefix)
        if len(self._subtrees) > SUBTREES_MAX:
            self._subtrees.popitem(last=False)
        return subtree

    def _is_recent(self, at_ns: int) -> bool:
        return 0 <= self._clock_ns() - at_ns < self._ttl_ns

    def _is_wanted(self, subtree: _Subtree, directory: int) -> bool:
        """Return whether one LIST for the subtree saves requests: a second directory in it has to be listed within the
        TTL, or the last flat listing served several."""
        if subtree.is_shared:
            return True
        if not self._is_recent(subtree.asked_ns):
            subtree.asked.clear()
            subtree.asked_ns = self._clock_ns()
        subtree.asked.add(directory)
        return len(subtree.asked) > 1

    async def _list(self, prefix: str, subtree: _Subtree) -> FlatListing | None:
        """List a subtree. Returns None if it is large, or if the store answers an error."""
        subtree.done = trio.Event()
        flat = FlatListing(self._clock_ns(), set(self._strays()))
        self.flat_listings.pop(prefix, None)
        self.flat_listings[prefix] = flat
        try:
            objects = await (self._list_root() if not prefix else self._list_below(prefix))
            if objects is None:
                subtree.large_until_ns = self._clock_ns() + int(subtree.large_s * NS)
                subtree.large_s = min(2 * subtree.large_s, LARGE_S_MAX)
            else:
                flat.fill(objects)
                flat.strays |= set(self._strays())
                subtree.large_s, subtree.large_until_ns = LARGE_S_FIRST, 0
        except LakeError:
            pass  # the LIST of the directory itself reports it
        finally:
            subtree.done.set()
            subtree.done, subtree.is_shared = None, False
            is_kept = self.flat_listings.get(prefix) is flat
            if is_kept and not flat.is_complete:
                del self.flat_listings[prefix]
        while len(self.flat_listings) > FLAT_LISTINGS_MAX:
            self.flat_listings.popitem(last=False)
        return flat if is_kept and flat.is_complete else None

    async def _list_below(self, prefix: str) -> list[ObjectMeta] | None:
        """Return all objects below a prefix; None if they do not fit one page. Raises LakeError."""
        page = await self._client.list_page(prefix, keys_max=KEYS_MAX)
        return [*page.objects] if page.next_token is None else None

    async def _list_root(self) -> list[ObjectMeta] | None:
        """Return all objects but those with reserved keys, of which there may be many; None if they do not fit one
        page. Two LISTs fetch what is before and after the reserved keys. Raises LakeError."""
        if not self._client.capabilities.sorted_listing:
            return None
        pages: dict[str, ListPage] = {}

        async def get(after: str) -> None:
            pages[after] = await self._client.list_page("", start_after=after, keys_max=KEYS_MAX)

        await for_each(("", _BEHIND_RESERVED), get, 2)
        first, behind = pages[""], pages[_BEHIND_RESERVED]
        before = [meta for meta in first.objects if meta.key < RESERVED_PREFIX]
        if behind.next_token is not None or (first.next_token is not None and len(before) == len(first.objects)):
            return None
        objects = [*before, *(meta for meta in behind.objects if not meta.key.startswith(RESERVED_PREFIX))]
        return objects if len(objects) <= KEYS_MAX else None


def _prefixes(prefix: str) -> Iterator[str]:
    """Yield the prefix of each directory above, the root first, and then the prefix itself."""
    yield ""
    at = prefix.find("/")
    while at >= 0:
        yield prefix[: at + 1]
        at = prefix.find("/", at + 1)
