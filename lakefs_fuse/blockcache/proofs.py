"""Proofs: which bytes of a range of an object a checksum of the store verifies, whatever their source.

For a pack these are the files that are completely in the range, by the CRC-32 in its directory. For a plain object it
is the whole object, if it is one range and its ETag is an MD5 sum. No other bytes are proven. Headers between the files
of a pack, which are not passed to readers, are not compared. The source may be trusted instead: then files are compared
with the CRC-32 in the headers in the range, which detects damage in transit, and bytes without a checksum are accepted.

What always holds: unless the bytes are trusted, sums come from the store. Memory is bounded: `SUMS_MAX` sums of packs
are kept, those used last. Trio thread, but for `Proof.holds`.
"""

from __future__ import annotations

import hashlib
import logging
import re
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import trio

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.blockcache.verified_get import Spans
from lakefs_fuse.errors import DamagedCommit, LakeError
from lakefs_fuse.store.protocol import Buffer

SUMS_MAX = 1 << 20
"""Of 20 bytes each."""
REFUTED_MAX = 4
"""After this many consecutive objects whose ETags are not MD5 sums, no plain object counts as proven."""
_MD5 = re.compile(r"[0-9a-f]{32}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proof:
    """How a range of an object is verified."""

    holds: Callable[[bytearray], bool]
    """Whether the bytes of the range, except the unproven ones, are right. In any thread."""
    unproven: Spans = ()
    """The ranges of the object that must come from the store."""
    is_md5: bool = False
    """By the ETag of a whole object."""


def _no_contradiction(wrong_members: Callable[[Buffer], Spans] | None) -> Proof:
    """Accepts any range that does not contradict itself: ``wrong_members`` finds the damaged files in a range of a
    pack."""
    return Proof(lambda data: wrong_members is None or not wrong_members(data))


def _md5_proof(etag: str) -> Proof:
    return Proof(lambda data: hashlib.md5(data, usedforsecurity=False).hexdigest() == etag, is_md5=True)


class PackSums:
    """The sums of one pack, in the order of its bytes. To make them takes 3 µs each; in any thread."""

    def __init__(self, checksums: Mapping[tuple[int, int], int]) -> None:
        """``checksums`` are the CRC-32 of each file, by offset and size."""
        found = sorted((offset, offset + size, crc) for (offset, size), crc in checksums.items() if size)
        self.offsets, self.ends = (array("Q", (each[at] for each in found)) for at in (0, 1))
        self.crcs = array("I", (each[2] for each in found))

    def proof(self, start: int, end: int) -> Proof | None:
        """The proof of bytes [start, end); None if more than half of them would be unproven."""
        first, stop = bisect_left(self.offsets, start), bisect_right(self.ends, end)
        if first >= stop:
            return None
        unproven = []
        if first and self.ends[first - 1] > start:
            unproven.append((start, self.ends[first - 1]))
        if stop < len(self.offsets) and self.offsets[stop] < end:
            unproven.append((self.offsets[stop], end))
        if 2 * sum(stop_at - at for at, stop_at in unproven) > end - start:
            return None
        return Proof(lambda data: self._match(memoryview(data), start, range(first, stop)), unproven)

    def _match(self, view: memoryview, start: int, members: range) -> bool:
        """Whether files have their sums in a range that begins at ``start``."""
        return all(
            zlib.crc32(view[self.offsets[at] - start : self.ends[at] - start]) == self.crcs[at] for at in members
        )


class Proofs:
    """See the module's head. ``pack_sums`` asks the store for the checksums of a pack, and is None if the bytes are
    trusted; ``md5_etags`` is False if ETags of plain objects are known not to be MD5 sums."""

    def __init__(
        self,
        *,
        is_pack: Callable[[str], bool],
        wrong_members: Callable[[Buffer], Spans],
        pack_sums: Callable[[Version], Awaitable[PackSums]] | None,
        md5_etags: bool,
    ) -> None:
        self.trusts_proxies = pack_sums is None
        self._is_pack, self._wrong_members, self._pack_sums = is_pack, wrong_members, pack_sums
        self._refuted = 0 if md5_etags else REFUTED_MAX
        self._packs: OrderedDict[Version, PackSums | None] = OrderedDict()
        self._fetching: dict[Version, trio.Event] = {}
        self._kept = 0

    async def proof(self, version: Version, start: int, end: int) -> Proof | None:
        """None if the range must come from the store."""
        if self._is_pack(version.key):
            if self._pack_sums is None:
                return _no_contradiction(self._wrong_members)
            sums = await self._sums(version, self._pack_sums)
            return None if sums is None else sums.proof(start, end)
        if self._refuted < REFUTED_MAX and (start, end) == (0, version.size) and _MD5.fullmatch(version.etag):
            return _md5_proof(version.etag)
        return _no_contradiction(None) if self.trusts_proxies else None

    def record_result(self, proof: Proof, *, holds: bool) -> None:
        """A proof held, or the store itself answers bytes of which it does not."""
        if proof.is_md5 and self._refuted < REFUTED_MAX:
            self._refuted = 0 if holds else self._refuted + 1
            if self._refuted == REFUTED_MAX:
                _log.info("ETags of this store are not MD5 sums: plain objects are not compared with them")

    async def _sums(self, version: Version, fetch: Callable[[Version], Awaitable[PackSums]]) -> PackSums | None:
        fetching = self._fetching.get(version)
        if fetching is not None:
            await fetching.wait()
            return self._packs.get(version)  # None where that failed: the range comes from the store
        if version in self._packs:
            self._packs.move_to_end(version)
            return self._packs[version]
        self._fetching[version] = fetched = trio.Event()
        try:
            sums: PackSums | None = await fetch(version)
        except DamagedCommit as error:
            _log.warning("%s does not come from the cluster cache: its directory is damaged: %s", version.key, error)
            sums = None
        except LakeError as error:
            _log.info("%s does not come from the cluster cache: its checksums cannot be read: %s", version.key, error)
            return None
        finally:
            del self._fetching[version]
            fetched.set()
        self._packs[version] = sums
        self._kept += _weight(sums)
        while self._kept > SUMS_MAX and len(self._packs) > 1:
            self._kept -= _weight(self._packs.popitem(last=False)[1])
        return sums


def _weight(sums: PackSums | None) -> int:
    return 1 if sums is None else 1 + len(sums.offsets)
