"""Reads the bytes of many files with few requests: one GET for neighbours in an object.

What always holds (*verified bytes*): bytes from a pack match the CRC-32 in its directory. A file whose version is gone,
or whose bytes do not match, is None. Tasks of one trio loop.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.commits.archive_check import fetch_directory
from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.config import KIB, MIB
from lakefs_fuse.errors import DamagedCommit, NotFound, PreconditionFailed
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer, Fetched
from lakefs_fuse.sync.nursery import for_each

GETS_AT_ONCE = 16
CHUNK_BYTES = 16 * MIB
"""Bytes in memory at a time, unless one file is larger."""
CHUNK_FILES = 1024
RANGE_BYTES_MAX = 8 * MIB
GAP_BYTES_MAX = 64 * KIB
"""A smaller gap between two files is read, to save a request."""
DIRECTORIES_MAX = 64
"""Directories of packs in memory, about 100 bytes a member."""


@dataclass(frozen=True, slots=True)
class Moving:
    """A file whose bytes are to be moved; ``entry`` has its attributes."""

    path: str
    entry: Entry
    source: Extent


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes of one file; ``metadata`` is that of the object, if one GET read all of it and had it."""

    data: bytes
    metadata: Mapping[str, str] | None = None


@dataclass(slots=True)
class _Range:
    version: Version
    start: int
    end: int
    members: list[int]


class ExtentReader:
    """Reads extents; keeps the directories of recent packs."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._checksums: dict[Version, dict[tuple[int, int], int] | None] = {}
        self.damaged = 0

    async def read(self, files: Sequence[Moving]) -> list[Bytes | None]:
        """Raises LakeError for a store that does not answer."""
        data: list[Bytes | None] = [Bytes(b"") if not file.source.size else None for file in files]

        async def fetch(wanted: _Range) -> None:
            fetched = await self._get(wanted)
            if fetched is None:
                return
            raw = memoryview(fetched.data)
            for index in wanted.members:
                at = files[index].source.offset - wanted.start
                data[index] = Bytes(bytes(raw[at : at + files[index].source.size]), fetched.meta.metadata)

        await for_each(_ranges(files), fetch, GETS_AT_ONCE)
        for index, file in enumerate(files):
            found = data[index]
            if found is not None and not await self._is_sound(file.source, found.data):
                self.damaged += 1
                data[index] = None
        return data

    async def _get(self, wanted: _Range) -> Fetched | None:
        version = wanted.version
        try:
            fetched = await self._client.get(version.key, wanted.start, wanted.end, etag=version.etag)
        except (NotFound, PreconditionFailed):
            return None
        return fetched if len(fetched.data) == wanted.end - wanted.start else None

    async def _is_sound(self, extent: Extent, data: bytes) -> bool:
        if not extent.version.key.startswith(COMMITS):
            return True
        known = await self.directory(extent.version)
        return known is not None and (not data or known.get((extent.offset, extent.size)) == zlib.crc32(data))

    async def directory(self, version: Version) -> dict[tuple[int, int], int] | None:
        """CRC-32 of a pack's members by offset and size; None where they cannot be read. Raises LakeError."""
        if version not in self._checksums:

            async def fetch(start: int, end: int) -> Buffer:
                return (await self._client.get(version.key, start, end, etag=version.etag)).data

            found: dict[tuple[int, int], int] | None = None
            try:
                found = (await fetch_directory(version.size, fetch)).checksums()
            except (DamagedCommit, NotFound, PreconditionFailed):
                pass
            self._checksums[version] = found
            if len(self._checksums) > DIRECTORIES_MAX:
                del self._checksums[next(iter(self._checksums))]
        return self._checksums[version]


def _ranges(files: Sequence[Moving]) -> list[_Range]:
    ranges: list[_Range] = []
    order = sorted(range(len(files)), key=lambda index: _place(files[index].source))
    for index in order:
        extent = files[index].source
        if not extent.size:
            continue
        start, end = extent.offset, extent.offset + extent.size
        last = ranges[-1] if ranges else None
        if (
            last is not None
            and last.version == extent.version
            and start - last.end <= GAP_BYTES_MAX
            and end - last.start <= RANGE_BYTES_MAX
        ):
            last.end = max(last.end, end)
            last.members.append(index)
        else:
            ranges.append(_Range(extent.version, start, end, [index]))
    return ranges


def _place(extent: Extent) -> tuple[str, str, int]:
    return extent.version.key, extent.version.etag, extent.offset


def chunks(files: Sequence[Moving]) -> list[Sequence[Moving]]:
    """Parts of a sequence that fit in memory."""
    found: list[Sequence[Moving]] = []
    begin, size = 0, 0
    for index, file in enumerate(files):
        if index > begin and (size + file.source.size > CHUNK_BYTES or index - begin >= CHUNK_FILES):
            found.append(files[begin:index])
            begin, size = index, 0
        size += file.source.size
    if begin < len(files):
        found.append(files[begin:])
    return found
