"""Bundles: objects that repeat many small commits, so that whoever has not seen these fetches them with one GET.

A bundle lies beside the commits and holds whole commit objects, of `COMMIT_BYTES_MAX` at most, with their ETags. Its
name tells the times of the first and the last, and how many there are. Any mount may write one: a mount repeats its own
commits when it has made several, and what it fetched one by one when that was much.

What always holds (*only a copy*): a commit counts because LIST shows it, never because a bundle has it; one that no
bundle has, or has with another ETag, is fetched by itself. So a bundle that is missing, damaged or deleted costs
requests and nothing else, and a program that does not know of bundles misses nothing.

Trio thread only. Memory is bounded: `LOADED_MAX` bundles of `BUNDLE_BYTES_MAX`. A crash loses a bundle that was to
be written, and nothing else.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import msgspec

from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.errors import AccessDenied, LakeError
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer, ObjectMeta

COMMIT_BYTES_MAX = 16 << 10
"""A larger commit is a pack, or tells of hundreds of names: there are few of these, and a GET each pays off."""
BUNDLE_BYTES_MAX = 4 << 20
BUNDLE_COMMITS_MAX = 8192
LOADED_MAX = 4
TRIES_MAX = 2
"""Bundles that are loaded for one commit."""
OWN_COMMITS_MIN = 8
"""A mount repeats so many commits of its own, or more, in one bundle."""
OWN_DELAY_S = 1.5
"""Between the first bundle's worth of own commits and the bundle: commits of that time go into it too."""
SUFFIX = ".bundle"
"""Of the name of a bundle."""
MIXED = "0" * 8
"""In the name of a bundle, in place of a writer: it has commits of several."""
_NAME = re.compile(
    re.escape(COMMITS) + r"([0-9a-f]{16})-([0-9a-f]{8})-([0-9a-f]{16})-([0-9a-f]{8})" + re.escape(SUFFIX)
)
log = logging.getLogger(__name__)


class Bundle(NamedTuple):
    """What the name of a bundle tells: times of the newest and the oldest commit in it, whose they are, and how many
    it has."""

    last: int
    writer: str
    first: int
    commits: int
    meta: ObjectMeta

    def may_have(self, time: int, writer: str) -> bool:
        """The commit of this time and writer is in it, as far as the name tells."""
        return self.first <= time <= self.last and self.writer in (writer, MIXED)


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A commit object in a bundle."""

    key: str
    etag: str
    body: bytes


Found: TypeAlias = tuple[int, str, ObjectMeta]
"""A commit that LIST showed: its time, its writer, the object."""
_COPIES: msgspec.msgpack.Decoder[list[Copy]] = msgspec.msgpack.Decoder(list[Copy])


def parse_bundle(meta: ObjectMeta) -> Bundle | None:
    """The bundle that an object is by its name; None for any other, and for one that is too large."""
    match = _NAME.fullmatch(meta.key)
    if match is None or not 0 < meta.size <= 2 * BUNDLE_BYTES_MAX:
        return None
    return Bundle(int(match[1], 16), match[2], int(match[3], 16), int(match[4], 16), meta)


def bundle_key(copies: Sequence[Copy], writer: str) -> str:
    """The name of a bundle of these commits, which are in the order of their times."""
    first, last = (each.key[len(COMMITS) : len(COMMITS) + 16] for each in (copies[0], copies[-1]))
    return f"{COMMITS}{last}-{writer}-{first}-{len(copies):08x}{SUFFIX}"


class BundleReader:
    """The bundles that a LIST of commits has shown, loaded as commits in them are needed."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._found: list[Bundle] = []
        self._loaded: OrderedDict[str, dict[str, Copy]] = OrderedDict()

    def begin(self, objects: Iterable[ObjectMeta]) -> None:
        """Take up the bundles that a LIST has shown, instead of those of the one before."""
        found = [bundle for meta in objects if (bundle := parse_bundle(meta)) is not None]
        self._found = sorted(found, key=lambda bundle: bundle.commits, reverse=True)
        self._loaded.clear()

    def end(self) -> None:
        """Everything that was found is applied."""
        self._found.clear()
        self._loaded.clear()

    def gets_for(self, commits: Sequence[Found]) -> int:
        """How many GETs these commits take, as far as names tell."""
        left, gets = list(commits), 0
        for bundle in self._found:
            others = [each for each in left if not bundle.may_have(each[0], each[1])]
            if len(left) - len(others) > 1:
                left, gets = others, gets + 1
        return gets + len(left)

    async def load_for(self, commits: Sequence[Found]) -> int:
        """Load the bundles that have these commits; answers how many GETs the commits take altogether, those
        included that are in no bundle. Raises nothing: these are fetched by themselves."""
        gets = 0
        for number, (time, writer, meta) in enumerate(commits):
            rest = commits[number:]
            useful = (each for each in self._found if each.may_have(time, writer) and _saves(each, rest))
            for bundle in list(islice(useful, TRIES_MAX)):
                if self.has(meta):
                    break
                gets += 1
                await self._load(bundle)
            gets += not self.has(meta)
        return gets

    async def _load(self, bundle: Bundle) -> None:
        self._found.remove(bundle)
        meta = bundle.meta
        try:
            raw = (await self._client.get(meta.key, 0, meta.size, etag=meta.etag)).data
            copies = _COPIES.decode(raw)
        except (LakeError, msgspec.DecodeError) as error:
            log.info("bundle %s is not read, its commits are: %s", meta.key, error)
            return
        self._loaded[meta.key] = {each.key: each for each in copies}
        if len(self._loaded) > LOADED_MAX:
            self._loaded.popitem(last=False)

    def has(self, meta: ObjectMeta) -> bool:
        """A loaded bundle has the commit object that LIST showed as ``meta``."""
        return any(_is_of(copies.get(meta.key), meta) for copies in self._loaded.values())

    def pop(self, meta: ObjectMeta) -> bytes | None:
        """The commit object that LIST showed as ``meta``, once; None where no loaded bundle has it (any more)."""
        for copies in self._loaded.values():
            copy = copies.pop(meta.key, None)
            if copy is not None and _is_of(copy, meta):
                return copy.body
        return None


def _saves(bundle: Bundle, commits: Sequence[Found]) -> bool:
    """The bundle may have several of these commits."""
    return sum(bundle.may_have(time, writer) for time, writer, _ in commits) > 1


def _is_of(copy: Copy | None, meta: ObjectMeta) -> bool:
    return copy is not None and (copy.etag, len(copy.body)) == (meta.etag, meta.size)


class BundleWriter:
    """Gathers commits, and repeats them in bundles."""

    def __init__(self, client: StoreClient, writer: str) -> None:
        self._client, self._writer = client, writer
        self._copies: dict[str, Copy] = {}
        self._bytes = 0
        self._is_refused = False
        self.written = 0
        """Bundles that are in the store."""

    @property
    def is_full(self) -> bool:
        """What was gathered is as much as a bundle may have."""
        return self._bytes >= BUNDLE_BYTES_MAX - COMMIT_BYTES_MAX or len(self._copies) >= BUNDLE_COMMITS_MAX

    def add(self, meta: ObjectMeta, body: Buffer) -> None:
        """Gather a commit object, unless it is large. Those that there is no room for are left out."""
        if len(body) <= COMMIT_BYTES_MAX and not (self.is_full or self._is_refused):
            self._copies[meta.key] = Copy(meta.key, meta.etag, bytes(body))
            self._bytes += len(body)

    def clear(self) -> None:
        """Forget what was gathered."""
        self._copies, self._bytes = {}, 0

    async def write(self) -> None:
        """Store a bundle of what was gathered. Raises nothing: it is a copy."""
        copies = sorted(self._copies.values(), key=lambda copy: copy.key)
        self.clear()
        if len(copies) < 2 or self._is_refused:
            return
        try:
            await self._client.put(bundle_key(copies, self._writer), msgspec.msgpack.encode(copies))
            self.written += 1
        except AccessDenied as error:
            log.info("no bundles are written: %s", error)
            self._is_refused = True
        except LakeError as error:
            log.info("a bundle of %d commits is not written: %s", len(copies), error)
