"""The blocking half of `ingest`: puts the items of a source into a pack, until the pack is full.

`PackFiller.fill` and `PackFiller.seal` are called from worker threads, never two at a time; the rest of a `Pack` is for
the trio thread. A pack is a temporary file without a name, so a crash leaves nothing behind.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from lakefs_fuse.commits.archive import ArchiveBuilder, Member, fd_sink
from lakefs_fuse.commits.change import OPERATIONS_AT_ONCE
from lakefs_fuse.commits.record import OWN, THIS, Mkdir, ObjectRef, Operation, Put, Symlink
from lakefs_fuse.config import MIB
from lakefs_fuse.environment.disk import Disk
from lakefs_fuse.errors import FileError, LakeError
from lakefs_fuse.ingest.source import (
    Attributes,
    Changed,
    Directory,
    File,
    HardLink,
    Item,
    Link,
    NamedItem,
    Refused,
    Source,
    is_reserved,
    refusal,
)
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.protocol import FileSlice

PACK_BYTES = 64 * MIB
"""A pack is sealed before it grows beyond this; larger files become plain objects."""
MEMBER_BYTES_EXTRA = 512
"""About what a member takes besides its bytes and its name, directory and record included."""
OPERATIONS_MAX = OPERATIONS_AT_ONCE
LARGE = -1
"""In place of a pack's number: a plain object."""


@dataclass(slots=True)
class Totals:
    """Result of a run, or of counting a source. Files and bytes count when the store holds them."""

    files: int = 0
    bytes: int = 0
    directories: int = 0
    links: int = 0
    packs: int = 0
    objects: int = 0
    refused: int = 0
    special: int = 0

    def summary(self) -> dict[str, object]:
        """For scripts; the names are final."""
        return {
            "files": self.files,
            "bytes": self.bytes,
            "directories": self.directories,
            "symlinks": self.links,
            "packs": self.packs,
            "objects": self.objects,
            "refused": self.refused,
            "skipped": self.special,
        }

    def describe(self) -> str:
        """For people."""
        text = (
            f"{counted(self.files, 'file')} of {counted(self.bytes, 'byte')} in {counted(self.packs, 'pack')} and "
            f"{counted(self.objects, 'plain object')}; {counted(self.directories, 'directory', 'directories')}, "
            f"{counted(self.links, 'symbolic link')}"
        )
        if self.special:
            text += f"; {counted(self.special, 'device, fifo or socket', 'devices, fifos or sockets')} skipped"
        return text + (f"; {self.refused:,} left out, see above" if self.refused else "")

    def add(self, other: Totals) -> None:
        """Add the counts of ``other``."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True, eq=False)
class Pack:
    """One commit that is being built; ``size`` is set when it is sealed."""

    number: int
    file: BinaryIO
    builder: ArchiveBuilder
    operations: list[Operation] = field(default_factory=list)
    objects: list[ObjectRef] = field(default_factory=lambda: [ObjectRef()])
    indexes: dict[int, int] = field(default_factory=dict)
    """Number of another pack, or of an object that is not at its own key → its index in ``objects``."""
    totals: Totals = field(default_factory=Totals)
    size: int = 0

    def body(self) -> FileSlice:
        return FileSlice(self.file.fileno(), 0, self.size)


@dataclass(frozen=True, slots=True)
class Full:
    """The pack can be sealed and sent; `PackFiller.take` answers it. ``end``: nothing follows."""

    end: bool = False


@dataclass(frozen=True, slots=True)
class CopyOf(NamedItem):
    """A hard link to a plain object, which needs a copy of its own."""

    source: str
    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class NeedsStored:
    """A hard link points into a pack that is not in the store yet: call again when all are."""


Step = Full | File | CopyOf | NeedsStored
"""A `File` is too large for packs: it is uploaded, then passed to `PackFiller.add_object`, while the source waits."""


class Places:
    """The places of the files of this run, for hard links, its directories, and the plain objects at the keys of its
    large files: a temporary database, because their number has no bound. Raises sqlite3.Error where the disk of
    temporary files fails."""

    def __init__(self) -> None:
        # The empty name is a database that SQLite keeps in memory while it is small, and removes itself.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute(
            "CREATE TABLE places (path TEXT PRIMARY KEY, pack INT, offset INT, size INT, text TEXT) WITHOUT ROWID"
        )
        self._db.execute("CREATE TABLE directories (path TEXT PRIMARY KEY) WITHOUT ROWID")
        self._db.execute("CREATE TABLE plain (path TEXT PRIMARY KEY, etag TEXT) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def put_plain(self, path: str, etag: str) -> None:
        """Set the ETag of the plain object at ``path``, which files of that name hide from now on."""
        self._db.execute("INSERT OR REPLACE INTO plain VALUES (?, ?)", (path, etag))

    def plain(self, path: str) -> str:
        """The ETag that `put_plain` set, or nothing."""
        row: tuple[str] | None = self._db.execute("SELECT etag FROM plain WHERE path = ?", (path,)).fetchone()
        return "" if row is None else row[0]

    def put_directory(self, path: str) -> None:
        """Add a directory, and those above it."""
        while path and self._db.execute("INSERT OR IGNORE INTO directories VALUES (?)", (path,)).rowcount:
            path = path.rpartition("/")[0]

    def is_directory(self, path: str) -> bool:
        return self._db.execute("SELECT 1 FROM directories WHERE path = ?", (path,)).fetchone() is not None

    def put(self, path: str, pack: int | None, offset: int, size: int, text: str) -> None:
        """``pack`` is None for a symbolic link, whose target is ``text``; for LARGE ``text`` is the ETag."""
        self._db.execute("INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?, ?)", (path, pack, offset, size, text))

    def get(self, path: str) -> tuple[int | None, int, int, str] | None:
        row: tuple[int | None, int, int, str] | None = self._db.execute(
            "SELECT pack, offset, size, text FROM places WHERE path = ?", (path,)
        ).fetchone()
        return row

    def close(self) -> None:
        self._db.close()


class PackFiller:
    """Fills packs from a source. ``path`` is the place of the source's root in the lake, empty for the lake's own;
    ``prefix_bytes`` is the length of the prefix of all keys; packs are built in ``directory``."""

    def __init__(
        self,
        source: Source,
        disk: Disk,
        *,
        path: str,
        prefix_bytes: int,
        directory: str,
    ) -> None:
        self.source = source
        self._items: Iterator[Item] = source.items()
        self._held: Item | None = None
        self._path = path
        self._prefix_bytes = prefix_bytes
        self._disk, self._directory = disk, directory
        self._places = Places()
        self._stored: dict[int, ObjectRef] = {}
        """By number, if the source has hard links: packs, and objects that are not at their own keys."""
        self._pack: Pack | None = None
        self._packs = 0
        self.refused: list[Refused] = []
        """The caller pops them after each `fill`."""

    def pop_refused(self) -> list[Refused]:
        """Remove and return what was refused since the last call."""
        refused, self.refused = self.refused, []
        return refused

    def close(self) -> None:
        if self._pack is not None:
            self._pack.file.close()
        self._places.close()

    # -- worker threads

    def fill(self) -> Step:
        """Read items until the caller has to act. Raises LakeError."""
        while True:
            item, self._held = self._held, None
            if item is None:
                item = next(self._items, None)
            if item is None:
                return Full(end=True)
            step = self._take(item)
            if step is not None:
                return step

    def seal(self, pack: Pack, record: bytes) -> None:
        """Write the end of the archive. Raises LakeError."""
        with self._building():
            pack.size = pack.builder.finish(record)

    # -- trio thread, while no `fill` runs

    def take(self) -> Pack | None:
        """The full pack, None if there is nothing in it."""
        pack, self._pack = self._pack, None
        return pack

    def add_object(self, step: File | CopyOf, ref: ObjectRef, hides: str) -> None:
        """Record a plain object: the next commit has its attributes. Where its key is not its own, ``hides`` is the
        ETag of what is there."""
        pack, about = self._current(), step.attributes
        number, index = LARGE, OWN
        if ref.key == step.path:
            hides = ref.etag
        else:
            number, self._packs = self._packs, self._packs + 1
            if self.source.links:
                self._stored[number] = ref
            index = self._index(pack, number, ref)
        with self._building():
            self._places.put_plain(step.path, hides)
        pack.operations.append(
            Put(step.path, index, 0, ref.size, about.mode, about.uid, about.gid, about.mtime_ns, hides=hides)
        )
        self._remember(step.path, number, 0, ref.size, hides)

    def set_stored(self, pack: Pack, ref: ObjectRef) -> None:
        """Record that the store holds a pack. Any time."""
        if self.source.links:
            self._stored[pack.number] = ref

    # -- one item

    def _current(self) -> Pack:
        if self._pack is None:
            with self._building():
                file = self._disk.temporary_file(self._directory)
            self._pack = Pack(self._packs, file, ArchiveBuilder(fd_sink(file.fileno())))
            self._packs += 1
        return self._pack

    def _take(self, item: Item) -> Step | None:
        if isinstance(item, Refused):
            self.refused.append(item)
            return None
        path = "/".join(part for part in (self._path, item.path) if part)
        if not path:
            return None  # The lake's own root keeps its attributes.
        why = refusal(path, before_bytes=self._prefix_bytes) or self._conflict(path, item)
        if why:
            self.refused.append(Refused(item.path, why))
            if isinstance(item, File):
                item.content.close()
            return None
        if isinstance(item, File) and item.content.size > PACK_BYTES:
            if self._pack is not None and len(self._pack.operations) >= OPERATIONS_MAX:
                self._held = item
                return Full()
            return replace(item, path=path)
        pack, about = self._current(), item.attributes
        if not self._has_room(pack, path, item):
            self._held = item
            return Full()
        match item:
            case File():
                self._add_file(pack, path, item)
            case Directory():
                pack.operations.append(Mkdir(path, about.mode, about.uid, about.gid, about.mtime_ns))
                pack.totals.directories += 1
            case Link():
                self._add_link(pack, path, about, item.target)
            case HardLink():
                return self._add_hard_link(pack, path, item)
        return None

    def _conflict(self, path: str, item: Item) -> str:
        """Why an item cannot have its path in this lake; empty if it can. A tar stream may have a directory, and later
        something else of its name, which the directory would hide."""
        if is_reserved(path):
            return ".lakefs is reserved"
        if not self.source.links:
            return ""
        with self._building():
            if not isinstance(item, Directory) and self._places.is_directory(path):
                return "a directory of this name came before it"
            self._places.put_directory(path if isinstance(item, Directory) else path.rpartition("/")[0])
        return ""

    def _has_room(self, pack: Pack, path: str, item: Item) -> bool:
        if len(pack.operations) >= OPERATIONS_MAX:
            return False
        if not isinstance(item, File) or not pack.operations:
            return True
        taken = pack.builder.size + len(pack.operations) * MEMBER_BYTES_EXTRA
        return taken + item.content.size + 3 * len(path) <= PACK_BYTES

    def _add_file(self, pack: Pack, path: str, item: File) -> None:
        content, about = item.content, item.attributes
        try:
            data = content.read(0, content.size)
            whole = b"".join(data.pieces()) if isinstance(data, FileSlice) else data
            content.check()
        except (Changed, FileError) as error:
            self.refused.append(Refused(item.path, str(error)))
            return
        except OSError as error:
            self.refused.append(Refused(item.path, f"cannot be read: {error.strerror}"))
            return
        finally:
            content.close()
        size = len(whole)
        with self._building():
            offset = pack.builder.add(Member(path, whole, size, about.mode, about.mtime_ns, about.uid, about.gid))
        self._put(pack, path, about, THIS, offset, size)
        pack.totals.bytes += size
        self._remember(path, pack.number, offset, size, "")

    def _put(self, pack: Pack, path: str, about: Attributes, index: int, offset: int, size: int) -> None:
        hides = self._hidden_by(path)
        pack.operations.append(
            Put(path, index, offset, size, about.mode, about.uid, about.gid, about.mtime_ns, hides=hides)
        )
        pack.totals.files += 1

    def _add_link(self, pack: Pack, path: str, about: Attributes, target: str) -> None:
        hides = self._hidden_by(path)
        pack.operations.append(Symlink(path, target, about.uid, about.gid, about.mtime_ns, hides=hides))
        pack.totals.links += 1
        self._remember(path, None, 0, 0, target)

    def _add_hard_link(self, pack: Pack, path: str, item: HardLink) -> Step | None:
        target = "/".join(part for part in (self._path, item.target) if part)
        with self._building():
            place = self._places.get(target)
        if place is None:
            self.refused.append(Refused(item.path, f"a hard link to {item.target}, which did not come before it"))
            return None
        number, offset, size, text = place
        about = item.attributes
        if number is None:
            self._add_link(pack, path, about, text)
            return None
        if number == LARGE:
            # Its own object: one that two names shared would be gone for both when one is removed.
            return None if target == path else CopyOf(path, about, target, text, size)
        index = THIS
        if number != pack.number:
            if number not in self._stored:
                self._held = item
                return NeedsStored()
            index = self._index(pack, number, self._stored[number])
        self._put(pack, path, about, index, offset, size)
        self._remember(path, number, offset, size, "")
        return None

    def _index(self, pack: Pack, number: int, ref: ObjectRef) -> int:
        """The index of another object in the record of a pack."""
        if number not in pack.indexes:
            pack.indexes[number] = len(pack.objects)
            pack.objects.append(ref)
        return pack.indexes[number]

    def _hidden_by(self, path: str) -> str:
        """The ETag of the plain object that a file of this name hides; empty without one."""
        with self._building():
            return self._places.plain(path)

    def _remember(self, path: str, pack: int | None, offset: int, size: int, text: str) -> None:
        if self.source.links:
            with self._building():
                self._places.put(path, pack, offset, size, text)

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Errors of the disk that packs are built on become a LakeError that says so."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            why = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
            raise LakeError(
                f"packs are built in {self._directory}, which fails ({why}): "
                f"make room for {PACK_BYTES // MIB} MiB for each upload at once, or set TMPDIR"
            ) from error
