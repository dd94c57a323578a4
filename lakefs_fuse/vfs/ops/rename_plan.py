"""What a rename changes, decided once from a snapshot of the facts: `plan_in_steps` and `plan_local_rename`.

What always holds (*plans are pure*): nothing here reads a row, a clock or the store, or changes what it is given; the
same facts give the same plan. `rename` reads the facts in the step in which the plan is carried out, so nothing can
change between the two. A crash leaves what that step's one batch, or commit, had written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from enum import Enum

import msgspec

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.record import Remove
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder, RowSnapshot


class Route(Enum):
    """How a rename gets into the store."""

    LOCAL = "the file is stored under its new name later; what it replaces stays for others until then"
    JOURNALED = "write-back commits it after what was acknowledged before it"
    HELD = "it builds on changes that are not in the store: journaled, and committed with them before the answer"
    COMMITTED = "it is in the store before the answer"


def route_of(ends: Sequence[Entry], *, is_writeback: bool, is_held: bool) -> Route:
    """``ends`` are what changes places: one name, or in an exchange two. ``is_writeback``: of both paths. ``is_held``:
    the committer holds changes that are not in the store."""
    is_exchange, is_local = len(ends) > 1, all(end.flags & Flag.LOCAL for end in ends)
    if is_local and not is_exchange:
        return Route.LOCAL
    if is_writeback and not is_exchange:
        return Route.JOURNALED
    return Route.HELD if is_held or is_local else Route.COMMITTED  # of files that are only here no commit tells


class MovedName(msgspec.Struct, frozen=True):
    """A name that moves. ``hides`` is the ETag of the plain object at the key of its next path; ``orphans`` are objects
    that only the name needs."""

    before: str
    after: str
    entry: Entry
    hides: str = ""
    orphans: tuple[Deletion, ...] = ()
    is_end: bool = False
    """It is what the caller named, not something below it."""

    @property
    def row(self) -> tuple[str, bool]:
        """Its path, and whether it is a directory: a file and a directory may have the same path."""
        return self.before, bool(self.entry.flags & Flag.DIRECTORY)

    @property
    def moves_here_only(self) -> bool:
        """A file that is not in the store yet: it is stored under its new name later."""
        return bool(self.entry.flags & Flag.LOCAL)


class RenameFacts(msgspec.Struct, frozen=True):
    """``names`` has the source and all that is below it, then in an exchange the target and all that is below it.
    ``replaced`` are objects that only the target needs; ``parent`` is the source's directory where that would not be
    visible without the source, and its path."""

    names: tuple[MovedName, ...]
    rows: RowSnapshot = RowSnapshot()
    replaced: tuple[Deletion, ...] = ()
    parent: tuple[str, Entry] | None = None

    @property
    def moves(self) -> list[tuple[str, str]]:
        return [(name.before, name.after) for name in self.names if name.is_end]


Planner = Callable[[RenameFacts, int], Generator[None, None, Change]]
"""Makes one commit of the facts; it yields after so many names."""


def plan_in_steps(facts: RenameFacts, names_max: int) -> Generator[None, None, Change]:
    """The whole rename as one commit, of names that are in the store; it yields after so many names."""
    builder = ChangeBuilder(facts.rows)
    builder.moves += facts.moves
    doomed = list(facts.replaced)
    moving: list[MovedName] = []
    made: set[tuple[str, bool]] = set()
    for at in range(0, len(facts.names), names_max):
        names = facts.names[at : at + names_max]
        some = [name for name in names if not name.moves_here_only]
        moving += some
        made.update((name.after, name.row[1]) for name in some)
        builder.add_moves([(name.before, name.after, name.entry, name.hides) for name in some])
        yield
    if facts.parent is not None:
        builder.mkdir(*facts.parent)
    for at in range(0, len(facts.names), names_max):  # what a file not stored yet covers stays, and must not come back
        for name in facts.names[at : at + names_max]:
            if name.moves_here_only and (name.entry.etag or name.entry.stamp):
                doomed += name.orphans
                if (name.before, False) not in made:
                    builder.remove(name.before, name.entry)
        yield
    moving.reverse()
    for at in range(0, len(moving), names_max):
        leaving = [name for name in moving[at : at + names_max] if name.row not in made]
        builder.add_removals([(name.before, name.entry) for name in leaving])
        yield
    return msgspec.structs.replace(builder.change(), doomed=doomed)


class LocalRenameFacts(msgspec.Struct, frozen=True):
    """Of a file not stored yet. ``is_visible``: others may see something under its name. ``there`` is what it replaces,
    with that one's ``there_etag`` (of the plain object at the path) and ``there_row`` (the object of its bytes)."""

    before: str
    entry: Entry
    is_visible: bool = False
    orphans: tuple[Deletion, ...] = ()
    there: Entry | None = None
    there_etag: str = ""
    there_row: ObjectRow | None = None


class LocalRename(msgspec.Struct, frozen=True):
    """``removal`` hides what the file had replaced under its old name; ``row`` is the entry to attach; ``copied_from``
    the key of the object that others see under the new name until the file is stored."""

    removal: Change | None
    row: Entry
    copied_from: str = ""


def plan_local_rename(facts: LocalRenameFacts) -> LocalRename:
    entry, there, row = facts.entry, facts.there, facts.there_row
    removal = None
    if entry.etag or entry.stamp or facts.is_visible:
        by_date = bool(entry.place or entry.flags & Flag.OVERRIDING)
        removal = Change(operations=[Remove(facts.before, False, entry.etag, by_date)], doomed=list(facts.orphans))
    flags = entry.flags & ~Flag.OVERRIDING
    moving = msgspec.structs.replace(entry, flags=flags, etag="", stamp=0, place=0, offset=0)
    if there is None:
        return LocalRename(removal, moving)
    if there.place or there.flags & (Flag.SYMLINK | Flag.OVERRIDING):
        flags |= Flag.OVERRIDING
    moving = msgspec.structs.replace(moving, flags=flags, etag=facts.there_etag, stamp=there.stamp)
    if row is None or row.is_pack:
        return LocalRename(removal, moving)
    return LocalRename(removal, msgspec.structs.replace(moving, place=row.number), row.key)
