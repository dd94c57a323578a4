"""Values for changes of names that are in no commit yet, and for a commit on its way.

The journal stores `Change` and `Sending` as they are: a new field gets a default, and no field is removed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from lakefs_fuse.commits.record import (
    ANY,
    OWN,
    THIS,
    Mkdir,
    ObjectRef,
    Operation,
    Put,
    Record,
    Relocate,
    Remove,
    SetAttr,
    Symlink,
    is_of_version,
    says_again,
    says_what,
)
from lakefs_fuse.meta.rows import Deletion

BeforeSending = Callable[[str], Awaitable[None]]
"""Called with a commit's key before anything of it is sent."""
OPERATIONS_AT_ONCE = 1536
"""Maximum operations of a commit that is applied in one step, for which all other tasks wait, here and on every other
node. A pack has no more files; a commit of more operations is applied in steps (`Applier.apply_in_steps`)."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Operations that are committed together. ``objects`` is as in `Record`; a `Put` into THIS has the index of its
    member as ``offset``. ``doomed`` are objects to delete once the change is committed."""

    operations: list[Operation] = []
    objects: list[ObjectRef] = msgspec.field(default_factory=lambda: [ObjectRef()])
    moves: list[tuple[str, str]] = []
    doomed: list[Deletion] = []
    after: int = 0
    """The change is held until every version that write-back acknowledged up to this number is in the store."""
    ahead: bool = False
    """True for changes that state where an acknowledged file is stored: they may be sent ahead of held changes."""
    made: int = 0
    """When the change was journaled, by the clock that dates commits; 0 if unknown. No commit that was in effect here
    is later."""

    def replacing(self) -> dict[str, str]:
        """Return the paths at which the change replaces or removes any file there, with the ETags that it hides.

        A removal that names the version of a plain object is not among them (`removing`): it touches no other version.
        Nor is what states where an acknowledged file is, or is of an earlier program."""
        if self.ahead or not self.made:
            return {}
        found: dict[str, str] = {}
        for number, each in enumerate(self.operations, 1):
            is_mark = number < len(self.operations) and says_again(each, self.operations[number])
            is_put = isinstance(each, Put) and each.object > THIS and each.replaces == ANY
            is_removal = isinstance(each, Remove) and not each.directory and (each.by_date or not each.hides)
            if is_put or isinstance(each, Symlink) or (is_removal and not is_mark):
                found[each.path] = each.hides  # type: ignore[union-attr]
        for each in self.operations if found else ():
            if isinstance(each, Put) and each.object == OWN:
                found.pop(each.path, None)
        return found

    def removing(self) -> dict[str, str]:
        """Return the paths at which the change removes the version of a plain object that it names, with the ETags; as
        `replacing` otherwise. The same bytes that are there again are another version."""
        if self.ahead or not self.made:
            return {}
        removals = (each for each in self.operations if isinstance(each, Remove) and not each.directory)
        named = {each.path: each.hides for each in removals if each.hides and not each.by_date}
        for each in self.operations if named else ():
            if isinstance(each, Put) and each.object == OWN:
                named.pop(each.path, None)
        return named

    def telling(self) -> dict[str, str]:
        """Return the paths at which the change states that a plain object of this node is the file, with the ETags."""
        if not self.ahead or not self.made:
            return {}
        puts = (each for each in self.operations if isinstance(each, Put) and each.object == OWN)
        return {each.path: each.hides for each in puts}

    def may_be_overtaken(self) -> bool:
        """Return whether commits of which this node did not know when it was made may withdraw operations of the
        change: `replacing`, `removing` or `telling` is not empty."""
        return bool(self.replacing() or self.removing() or self.telling())

    def referred(self) -> dict[str, ObjectRef]:
        """Return the object elsewhere that each file in `replacing` has its bytes in, by path."""
        paths = self.replacing()
        puts = (each for each in self.operations if isinstance(each, Put) and each.path in paths)
        return {each.path: self.objects[each.object] for each in puts if each.object > THIS}

    def sources_of(self, paths: Collection[str]) -> set[str]:
        """Return the paths from which the change moves these ones."""
        return {
            source + path[len(target) :]
            for source, target in self.moves
            for path in paths
            if path == target or path.startswith(target + "/")
        }

    def about(self, paths: Collection[str]) -> list[Operation]:
        """Return the operations that say which files the paths have."""
        return [each for each in self.operations if each.path in paths and says_what(each) and not is_of_version(each)]

    def without(self, gone: Sequence[Operation]) -> Change:
        """Return the change without some of its operations, and without moves of their paths.

        Of the doomed objects only those at the paths of other operations stay: `gc` finds the rest."""
        numbers, paths = {id(each) for each in gone}, {each.path for each in gone}
        kept = [each for each in self.operations if id(each) not in numbers]
        moves = [pair for pair in self.moves if not paths.intersection(pair)]
        left = {each.path for each in kept}
        doomed = [each for each in self.doomed if each.key in left]
        return msgspec.structs.replace(self, operations=kept, moves=moves, doomed=doomed)

    def mentioned(self) -> frozenset[str]:
        """Return the keys that the change mentions. It says which bytes the file at that path has, that a name refers
        to the object there, or that a name at another path no longer does (`leaving`)."""
        named = (each.path for each in self.operations if isinstance(each, Put))
        return frozenset([*named, *self.leaving(), *(ref.key for ref in self.objects[1:])])

    def leaving(self) -> list[str]:
        """Return the keys of doomed objects that held the bytes of a name at another path."""
        paths = {each.path for each in self.operations} if self.doomed else ()
        return [each.key for each in self.doomed if each.key not in paths]


class Committed(msgspec.Struct, frozen=True):
    """A commit in the store: its object, its bytes, and the offsets of its members' data. It has no bytes if there was
    nothing to commit."""

    ref: ObjectRef
    body: bytes
    offsets: Sequence[int] = ()


class Sending(msgspec.Struct, frozen=True):
    """A commit that was, or is about to be, sent with the journaled changes ``sequences``. It overtakes the held
    changes ``passed``, and what it says of ``paths`` is newer than what they say."""

    time: int
    key: str
    sequences: list[int] = []
    passed: list[int] = []
    paths: list[str] = []
    operations: int = 0
    """How many of its operations, from the first on, are those of journaled changes."""
    moves: int = 0
    """The same for its moves."""


class Unsure(msgspec.Struct, frozen=True):
    """A commit that may be in the store without being in effect here. If it is there, ``doomed`` are to be deleted."""

    record: Record
    doomed: list[Deletion]


def merged(changes: Sequence[Change], writer: str, time: int, offsets: Sequence[int] = ()) -> Record:
    """Return one record of several changes, in their order."""
    objects = [ObjectRef()]
    numbers: dict[ObjectRef, int] = {}
    operations: list[Operation] = []
    for change in changes:
        places = [THIS]
        for ref in change.objects[1:]:
            if ref not in numbers:
                numbers[ref] = len(objects)
                objects.append(ref)
            places.append(numbers[ref])
        if offsets or places != [*range(len(places))]:
            operations += [_renumbered(operation, places, offsets) for operation in change.operations]
        else:
            operations += change.operations
    moves = [pair for change in changes for pair in change.moves]
    return Record(writer=writer, time=time, objects=objects, moves=moves, operations=operations)


def paths_of(operations: Sequence[Operation]) -> set[str]:
    """Return the paths of files that operations put, link or remove; attributes and relocations do not count."""
    return {each.path for each in operations if not isinstance(each, SetAttr | Relocate) and not is_of_directory(each)}


def relocations(record: Record) -> dict[ObjectRef, ObjectRef]:
    """Return the objects to which a record relocates bytes, by the objects in which the bytes were."""
    return {
        record.objects[each.from_object]: record.objects[each.object]
        for each in record.operations
        if isinstance(each, Relocate) and each.from_object > THIS and each.object > THIS
    }


def is_of_directory(operation: Operation) -> bool:
    return isinstance(operation, Mkdir) or (isinstance(operation, Remove) and operation.directory)


def _renumbered(operation: Operation, places: list[int], offsets: Sequence[int]) -> Operation:
    if isinstance(operation, Put) and operation.replaces > THIS:
        operation = msgspec.structs.replace(operation, replaces=places[operation.replaces])
    if isinstance(operation, Put) and operation.object == THIS:
        return msgspec.structs.replace(operation, offset=offsets[operation.offset])
    if isinstance(operation, Put | SetAttr) and operation.object > THIS:
        return msgspec.structs.replace(operation, object=places[operation.object])
    if isinstance(operation, Relocate):
        there = places[operation.object] if operation.object > THIS else operation.object
        before = places[operation.from_object] if operation.from_object > THIS else operation.from_object
        offset = offsets[operation.offset] if operation.object == THIS else operation.offset
        return msgspec.structs.replace(operation, object=there, from_object=before, offset=offset)
    return operation
