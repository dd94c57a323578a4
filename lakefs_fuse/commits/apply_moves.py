"""Renames keep identity: the rows of what a commit moved move too, before its operations are applied to them.

Only a hint, and followed only where nothing is lost by it: everything known below the source is named by an operation
of the record (or not in the store yet), nothing newer is known of either name, and no directory with something in it is
in the way. Otherwise the operations alone make the same names, with other inodes.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from lakefs_fuse.commits.applier import Applier, files_below
from lakefs_fuse.commits.record import THIS, Mkdir, Put, Record, Symlink
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import Entry, Flag

Made: TypeAlias = dict[tuple[str, bool], Put | Symlink | Mkdir]
"""What a record says of a path, as a file (or symbolic link) and as a directory."""


def carry_over(applier: Applier, record: Record, stamp: int) -> list[int]:
    """Move the rows of a record's ``moves``; answers the directories that they left, none where nothing moved."""
    made: Made = {
        (operation.path, isinstance(operation, Mkdir)): operation
        for operation in record.operations
        if isinstance(operation, Put | Symlink | Mkdir)
    }
    chosen: list[tuple[str, str, Entry]] = []
    sources = {source for source, _ in record.moves}
    for source, target in record.moves:
        entry = _find(applier, source)
        if entry is None or not _is_covered(applier, entry, source, target, record, made, stamp):
            return []
        if target not in sources and not _is_free(applier, entry, target, stamp):
            return []
        chosen.append((source, target, entry))
    if len({entry.inode for _, _, entry in chosen}) < len(chosen):
        return []  # several renames in one commit: of one name again, once another had it
    for source, _, entry in chosen:
        _free_from_key(applier, entry, source)
        _uncover(applier, entry)
    moving = [(source, target, _find(applier, source)) for source, target, _ in chosen]
    for _, _, found in moving:
        if found is not None:
            batch = Batch()
            applier.tree.detach(batch, found)
            applier.show_file(batch, found)
            applier.database.commit(batch)
            applier.tell(found.parent, found.name)
    applier.forget_paths()
    for _, target, found in moving:
        if found is not None:
            _attach(applier, found, target, record.time)
    return [found.parent for _, _, found in moving if found is not None]


def _is_free(applier: Applier, entry: Entry, target: str, stamp: int) -> bool:
    """What is at the target, if anything, is what the record replaces."""
    above, _, name = target.rpartition("/")
    parent = applier.directory(above)
    if parent is None:
        return True
    file, directory = (applier.tree.named(parent, name.encode() + end) for end in (b"", b"/"))
    there, other = (directory, file) if entry.is_dir else (file, directory)
    if other is not None:
        return False
    return there is None or (there.stamp <= stamp and not applier.tree.has_children(there.inode))


def _find(applier: Applier, path: str) -> Entry | None:
    above, _, name = path.rpartition("/")
    parent = applier.directory(above)
    return None if parent is None else applier.tree.child(parent, name.encode())


def _is_covered(
    applier: Applier, entry: Entry, source: str, target: str, record: Record, made: Made, stamp: int
) -> bool:
    """The record says of everything in sight where it is now, and is the newest to speak of it."""
    every = [(target, entry), *(files_below(applier.tree, entry.inode, target) if entry.is_dir else ())]
    for path, found in every:
        if found.flags & (Flag.LOCAL | Flag.SHADOWED):
            if found.stamp > stamp:
                return False
            continue
        tombstone = applier.tree.tombstones.get(path.encode() + (b"/" if found.is_dir else b""))
        operation = made.get((path, found.is_dir))
        if (
            operation is None
            or not _is_meant(found, source + path[len(target) :], operation, record)
            or found.stamp > stamp
            or (tombstone is not None and tombstone.stamp > stamp)
        ):
            return False
    return True


def _is_meant(found: Entry, path: str, operation: Put | Symlink | Mkdir, record: Record) -> bool:
    """A plain object carries no commit's time: the one under the name may be newer than what was renamed."""
    if not found.is_plain:
        return True
    if not isinstance(operation, Put) or operation.object <= THIS:
        return False
    ref = record.objects[operation.object]
    return ref.key == path and ref.etag == found.etag


def _free_from_key(applier: Applier, entry: Entry, source: str) -> None:
    """Plain objects stay at their keys when their names move: from now on the rows say so."""
    every = [(source, entry)]
    if entry.is_dir:
        every += files_below(applier.tree, entry.inode, source)
    for path, found in every:
        if found.is_plain:
            number = applier.tree.objects.number(path, found.etag, found.size)
            batch = Batch()
            freed = msgspec.structs.replace(found, place=number, etag="")
            applier.tree.update(batch, freed)
            applier.database.commit(batch)
            applier.watcher.relocated(freed)


def _uncover(applier: Applier, entry: Entry) -> None:
    """What is not in the store yet replaces nothing at its new path, whatever it replaced before."""
    batch = Batch()
    for _, found in files_below(applier.tree, entry.inode, "") if entry.is_dir else ():
        if found.is_local and (found.etag or found.stamp):
            applier.tree.update(batch, msgspec.structs.replace(found, etag="", stamp=0, place=0, offset=0))
    applier.database.commit(batch)


def _attach(applier: Applier, entry: Entry, target: str, time: int) -> None:
    above, _, name = target.rpartition("/")
    parent = applier.ensure_directory(above, time)
    batch = Batch()
    for sort_name in (name.encode(), name.encode() + b"/"):
        there = applier.tree.named(parent, sort_name)
        if there is not None:
            applier.tree.remove(batch, there)
    applier.database.commit(batch)
    batch = Batch()
    moved = applier.tree.attach(batch, entry, parent, name.encode())
    applier.database.commit(batch)
    applier.forget_paths()
    applier.watcher.updated(moved)
    applier.tell(parent, name.encode())
