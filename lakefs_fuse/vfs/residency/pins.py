"""Paths whose bytes stay in the block cache: what `lakefs-fuse cache pin` asked for.

A pin is of a path: whatever version is there is kept, and of a directory all files below it, those that come later
included. The paths are in one file of the cache directory; what they mean is worked out from the names (`update_kept`),
and the blocks are given to the cache, whose eviction spares them. So a version that was replaced is evictable as soon
as the next `update_kept` has ended.

What always holds: pinned blocks take up at most `limit_bytes` of the disk, so that a quarter of the cache serves
everything else; what is beyond, because pinned directories grew, is not kept and counted in ``refused_bytes``. At most
`OBJECTS_MAX` objects are pinned (*bounded memory*: 200 bytes each). A damaged line of the file loses that pin only, and
no pin loses more than a fetch. Trio thread only; a crash leaves the file as it was before or after a change.
"""

from __future__ import annotations

import logging
import math
import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.cache_file import name_digest
from lakefs_fuse.blockcache.object_version import BlockSet, Extent, Version
from lakefs_fuse.blockcache.warmer import disk_bytes
from lakefs_fuse.environment.disk import Disk
from lakefs_fuse.errors import CacheError, ConfigError, FileError, LakeError, StoreError
from lakefs_fuse.path_rules import translate
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.residency.selection import (
    Found,
    Names,
    Selected,
    find,
    passing_over,
    paths_above,
    shown_path,
    visit_files,
)

SHARE_MAX = 0.75
"""Of the cache: the rest serves what is not pinned."""
OBJECTS_MAX = 1 << 17
PATHS_MAX = 10_000
REFUSED_SHOWN_MAX = 10
log = logging.getLogger(__name__)


class PinFile:
    """The pinned paths of a cache directory: a line for each, a CRC-32 and the path as JSON."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk = path, disk

    def load(self) -> list[str]:
        """Paths in the order in which they were pinned; damaged lines are left out. Raises CacheError."""
        paths = []
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheError(f"{self._path} cannot be read: {error.strerror}") from error
        for line in lines:
            checksum, _, text = line.partition(b" ")
            if checksum == _checksum(text):
                paths.append(msgspec.json.decode(text, type=str))
            else:
                log.warning("%s: a pin is lost, because its line is damaged: %.80r", self._path, line)
        return paths

    def save(self, paths: Iterable[str]) -> None:
        """Raises CacheError; then the file is as it was."""
        texts = map(msgspec.json.encode, paths)
        new = self._path.with_name(self._path.name + ".new")
        try:
            with new.open("wb") as file:
                file.write(b"".join(_checksum(text) + b" " + text + b"\n" for text in texts))
                file.flush()
                self._disk.sync_data(file.fileno())
            os.replace(new, self._path)
        except OSError as error:
            raise CacheError(f"the pins cannot be saved: {self._path}: {error.strerror}") from error


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


@dataclass(slots=True)
class PinStatistics:
    """``bytes`` of the pinned ``files``, which take up ``disk_bytes`` at most; ``refused_bytes`` exceed the limit."""

    files: int = 0
    bytes: int = 0
    disk_bytes: int = 0
    refused_bytes: int = 0


@dataclass(slots=True)
class _Plan:
    """The blocks of pinned files, by the digests of their objects."""

    limit_bytes: int
    kept: dict[bytes, BlockSet] = field(default_factory=dict)
    found: PinStatistics = field(default_factory=PinStatistics)
    unreadable: dict[str, None] = field(default_factory=dict)
    """Pinned paths that the store refuses to look up."""
    refused: list[str] = field(default_factory=list)
    """Why directories cannot be listed, or pinned paths not be looked up: of the first REFUSED_SHOWN_MAX."""

    def refuse(self, error: StoreError) -> None:
        if len(self.refused) < REFUSED_SHOWN_MAX:
            self.refused.append(str(error))

    def add(self, extent: Extent) -> None:
        digest = name_digest(extent.version)
        before = self.kept.get(digest, 0)
        blocks = before | extent.block_set
        cost = disk_bytes(extent.version, blocks) - (disk_bytes(extent.version, before) if before else 0)
        if self.found.disk_bytes + cost > self.limit_bytes or (not before and len(self.kept) >= OBJECTS_MAX):
            self.found.refused_bytes += extent.size
            return
        self.kept[digest] = blocks
        self.found.disk_bytes += cost
        self.found.files += 1
        self.found.bytes += extent.size


class Pins:
    """See the module's head."""

    def __init__(self, names: Names, cache: BlockCache, file: PinFile, reserved_bytes_max: int) -> None:
        """``names`` need not be newer than the last listings; ``reserved_bytes_max`` of the cache may be kept by
        others."""
        self.names, self._cache, self._file, self._reserved_bytes_max = names, cache, file, reserved_bytes_max
        self._paths = dict.fromkeys(file.load())
        self._sorted = list[str]()
        """The paths in the order of their names, or nothing, so that those below another are found at once."""
        self._stale, self._planning = trio.Event(), trio.Lock()
        self.changed = list[Callable[[], object]]()
        """Listeners, called when the paths are others."""
        self._found, self._refused = PinStatistics(), list[str]()
        self._unreadable = dict[str, None]()
        if self._paths:
            cache.files.spare_since(0)  # all of it, until `update_kept` has found what is pinned
            self.mark_stale()

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def paths(self) -> Sequence[str]:
        return list(self._paths)

    @property
    def limit_bytes(self) -> int:
        """Disk space that pins may take up."""
        return max(0, int(self._cache.capacity_bytes * SHARE_MAX) - self._reserved_bytes_max)

    @property
    def disk_bytes(self) -> int:
        """Disk space that is pinned."""
        return self._found.disk_bytes

    def statistics(self) -> dict[str, int]:
        """Nested plain values; names are final once released."""
        return {**msgspec.to_builtins(self._found), "paths": len(self._paths), "limit_bytes": self.limit_bytes}

    @property
    def readable_paths(self) -> Sequence[str]:
        """Without those that the store refused to look up when `update_kept` ran last."""
        return [path for path in self._paths if path not in self._unreadable]

    def blocks_of(self, version: Version) -> BlockSet:
        """The pinned blocks of a version."""
        return self._cache.files.kept_blocks(version)

    def covering(self, path: str) -> str | None:
        """The pin that a path is at or below."""
        while True:
            if path in self._paths:
                return path
            if not path:
                return None
            path = path.rpartition("/")[0]

    def below(self, path: str) -> list[str]:
        """Pins at and below a path: all of them as they were pinned, others by name."""
        if not path:
            return list(self._paths)
        if len(self._sorted) != len(self._paths):
            self._sorted = sorted(self._paths)
        first, stop = (bisect_left(self._sorted, path + end) for end in ("/", "0"))  # the character after the slash
        return [path] * (path in self._paths) + self._sorted[first:stop]

    def check_count(self, count: int) -> None:
        """Raises CacheError for more paths than can be pinned."""
        if count > PATHS_MAX:
            raise CacheError(f"a mount has {PATHS_MAX} pins at most: pin the directories of these files")

    # -- changes

    def mark_stale(self, *_: object) -> None:
        """Names at or below a pin may have changed."""
        self._stale.set()

    def clear_stale(self) -> None:
        """For the one task that waits: it looks at everything that has changed until now."""
        self._stale = trio.Event()

    async def wait_stale(self) -> None:
        await self._stale.wait()

    async def add(self, paths: Iterable[str]) -> None:
        """Pin paths, which exist. Raises CacheError, where there is no room for all of them, too; then nothing is
        pinned that was not before."""
        added = [path for path in dict.fromkeys(paths) if path not in self._paths]
        self.check_count(len(self._paths) + len(added))
        async with self._planning:
            plan = await self._plan([*self._paths, *added], strictly=set(added))
            if plan.found.refused_bytes:
                self._refuse(plan)
            self._save([*self._paths, *added])  # without paths unpinned since, whose `update_kept` is next
            self._apply(plan)

    def _save(self, paths: Sequence[str]) -> None:
        self._file.save(paths)
        self._paths, self._sorted = dict.fromkeys(paths), []
        self.mark_stale()
        for listener in self.changed:
            listener()

    def _refuse(self, plan: _Plan) -> None:
        if len(plan.kept) >= OBJECTS_MAX:
            raise CacheError(
                f"pins hold {OBJECTS_MAX} objects at most: move small files into packs (`lakefs-fuse pack`), or pin "
                "fewer of them. Nothing was pinned"
            )
        limit, before = plan.limit_bytes >> 20, self._found.disk_bytes >> 20
        raise CacheError(
            f"{plan.found.refused_bytes >> 20} MiB do not fit: pins may take up {limit} MiB, which leaves a quarter of "
            f"the cache for everything else, and others have {before} MiB of that. Nothing was pinned: raise "
            "--cache-size, or `lakefs-fuse cache unpin` what is not needed"
        )

    async def remove(self, selection: Iterable[tuple[str, str]]) -> int:
        """Unpin the pins at and below paths, and those that globs match; how many there were. Raises ConfigError for a
        path without any."""
        gone = set[str]()
        for selected in map(Selected._make, selection):
            matched = self._matched(selected)
            if not matched:
                above, shown = self.covering(selected.path), partial(shown_path, self.names)
                why = "is not pinned" if above is None else f"is pinned with {shown(above)}: unpin that"
                raise ConfigError(f"{shown(str(selected))} {why}")
            gone.update(matched)
        left = [path for path in self._paths if path not in gone]
        self._save(left)
        try:
            await self.update_kept()
        except LakeError as error:  # they are unpinned, and the task that waits tries again
            log.warning("what was unpinned is kept until names can be read: %s", error)
        return len(gone)

    def _matched(self, selected: Selected) -> list[str]:
        below = self.below(selected.path)
        if not selected.pattern:
            return below
        pattern = re.compile(translate(selected.pattern), re.DOTALL)
        return [path for path in below if pattern.fullmatch(path.removeprefix(selected.path).lstrip("/"))]

    async def update_kept(self, names: Names | None = None) -> None:
        """Keep what the pinned paths mean now, and nothing else; ``names`` may ask the store what that is. What the
        store refuses to list is kept as far as it is known. Raises LakeError; then what was kept stays."""
        async with self._planning:
            plan = await self._plan(list(self._paths), names)
            if len(plan.refused) > len(self._refused):
                log.warning("pinned files are kept as far as their names are known: %s", "; ".join(plan.refused))
            if plan.found.refused_bytes > self._found.refused_bytes:
                log.warning(
                    "%d bytes of pinned paths are not kept: pins may take up %d MiB, three quarters of the cache",
                    plan.found.refused_bytes, plan.limit_bytes >> 20,
                )  # fmt: skip
            self._apply(plan)

    def _apply(self, plan: _Plan) -> None:
        self._cache.files.keep(plan.kept)
        self._found, self._unreadable, self._refused = plan.found, plan.unreadable, plan.refused

    async def _plan(self, paths: Iterable[str], names: Names | None = None, strictly: Collection[str] = ()) -> _Plan:
        """Raises LakeError: of what the store refuses only at and below the paths of ``strictly``."""
        plan, names = _Plan(self.limit_bytes), names or self.names

        def see(found: Found) -> None:
            try:
                extent = self.names.extent(found.entry)
            except FileError:  # of an object that is not known here
                return
            if extent is not None and extent.size:
                plan.add(extent)

        pinned = dict.fromkeys(paths)
        for path in pinned:
            await trio.lowlevel.checkpoint()
            if any(above in pinned for above in paths_above(path)):
                continue  # its files are counted with that
            refused, plan.unreadable[path] = None if path in strictly else plan.refuse, None
            with passing_over(refused):
                entry = await find(names, path)
                del plan.unreadable[path]
                if entry is not None:
                    await visit_files(names, Found(path, entry), see, refused)
        return plan


class PinnedChanges:
    """Marks pins stale with each change at or below one, in a mount that may change. It listens while there are pins,
    so a mount without any pays nothing.

    Nothing survives a crash, or has to: each daemon begins with stale pins.
    """

    def __init__(self, pins: Pins, namespace: Namespace) -> None:
        self._pins, self._ns = pins, namespace
        self._directory = (math.nan, False)
        """The directory that was asked about last, and whether its names matter: changes come by directory."""
        self._above: Collection[str] = ()
        """Paths of all directories with pins below them, so that a change costs the depth of its path."""
        self._is_listening = False
        pins.changed.append(self._listen)
        self._listen()

    def _listen(self) -> None:
        """The pins are others now."""
        self._directory = (math.nan, False)
        self._above = {above for path in self._pins.paths for above in paths_above(path)}
        events, is_needed = self._ns.events, len(self._pins) > 0
        if is_needed == self._is_listening:
            return
        self._is_listening = is_needed
        change = list.append if is_needed else list.remove
        change(events.version_stored, self._stored)
        change(events.path_renamed, self._renamed)
        change(events.name_changed, self._changed)

    def _stored(self, path: str, *_: object) -> None:
        if self._pins.covering(path) is not None:
            self._pins.mark_stale()

    def _renamed(self, moves: Sequence[tuple[str, str]]) -> None:
        self._directory = (math.nan, False)
        if any(self._matters(path) for move in moves for path in move):
            self._pins.mark_stale()

    def _changed(self, directory: int, name: bytes) -> None:
        if directory != self._directory[0]:
            names = self._ns.tree.path(directory) or []
            path = b"/".join(names).decode("utf-8", "surrogateescape")
            self._directory = (directory, self._matters(path))
        if self._directory[1]:
            self._pins.mark_stale()

    def _matters(self, path: str) -> bool:
        """Whether there is a pin at, above or below a path."""
        return self._pins.covering(path) is not None or path in self._above
