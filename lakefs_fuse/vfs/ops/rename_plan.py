"""Plans a rename from a snapshot of the facts: `plan_in_steps` for a commit, `plan_local_rename` for a row.

What always holds (*plans are pure*): no function here reads a row, a clock or the store, or changes its arguments; the
same facts give the same plan. `rename` reads the facts in the step in which it plans, or plans again if they changed
meanwhile. A crash leaves what the one batch, or commit, of the rename had written.
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
    """How a rename reaches the store."""

    LOCAL = "the file is stored under its new name later; what it replaces stays for others until then"
    JOURNALED = "write-back commits it after what was acknowledged before it"
    HELD = "it builds on changes that are not in the store: journaled, and committed with them before the answer"
    COMMITTED = "it is in the store before the answer"


def route_of(ends: Sequence[Entry], *, is_writeback: bool, is_held: bool) -> Route:
    """Return the route of a rename. ``ends`` are the entries that move: one, or two in an exchange. ``is_writeback``:
    both paths are under write-back. ``is_held``: the committer holds changes that are not in the store."""
    is_exchange, is_local = len(ends) > 1, all(end.flags & Flag.LOCAL for end in ends)
    if is_local and not is_exchange:
        return Route.LOCAL
    if is_writeback and not is_exchange:
        return Route.JOURNALED
    return Route.HELD if is_held or is_local else Route.COMMITTED  # no commit names files that only this node has


class MovedName(msgspec.Struct, frozen=True):
    """A name that moves. ``hides`` is the ETag of the plain object at the key of its new path; ``orphans`` are objects
    that may be unreferenced without the name."""

    before: str
    after: str
    entry: Entry
    hides: str = ""
    orphans: tuple[Deletion, ...] = ()
    is_end: bool = False
    """Whether the caller named it; False for a name below that."""

    @property
    def row(self) -> tuple[str, bool]:
        """Its old path, and whether it is a directory: a file and a directory may have the same path."""
        return self.before, bool(self.entry.flags & Flag.DIRECTORY)

    @property
    def moves_here_only(self) -> bool:
        """True for a file that is not in the store yet: it is stored under its new name later."""
        return bool(self.entry.flags & Flag.LOCAL)


class RenameFacts(msgspec.Struct, frozen=True):
    """The facts from which a rename is planned. ``names`` has the source and everything below it, in an exchange then
    the target and everything below it. ``replaced`` are objects that may be unreferenced without the target.
    ``parent`` is the path and entry of the directory that other nodes would not see without the name that leaves it."""

    names: tuple[MovedName, ...]
    rows: RowSnapshot = RowSnapshot()
    replaced: tuple[Deletion, ...] = ()
    parent: tuple[str, Entry] | None = None

    @property
    def moves(self) -> list[tuple[str, str]]:
        return [(name.before, name.after) for name in self.names if name.is_end]


Planner = Callable[[RenameFacts, int], Generator[None, None, Change]]
"""Plans one commit from the facts, and yields each time it has handled the given number of names."""


def plan_in_steps(facts: RenameFacts, names_max: int) -> Generator[None, None, Change]:
    """Plan the whole rename as one commit of the names in the store; yield after every ``names_max`` names."""
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
    for at in range(0, len(facts.names), names_max):  # the version that an unstored file covers is removed, not moved
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
    """The facts about a file that is not stored yet. ``is_visible``: other nodes may see something under its name.
    ``there`` is the entry that it replaces, ``there_etag`` the ETag of the plain object at that path, ``there_row`` the
    object with the bytes of ``there``."""

    before: str
    entry: Entry
    is_visible: bool = False
    orphans: tuple[Deletion, ...] = ()
    there: Entry | None = None
    there_etag: str = ""
    there_row: ObjectRow | None = None


class LocalRename(msgspec.Struct, frozen=True):
    """The plan for a file that is not stored yet. ``removal`` removes the version that it had replaced under its old
    name; ``row`` is the entry to attach; ``copied_from`` is the key of the object elsewhere that other nodes see under
    the new name until the file is stored."""

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
