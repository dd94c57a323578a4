"""Histories: what recent commits say of a contested name, in the order of commit times.

Commits may arrive in another order than that of their times if their writers had not seen each other's. A row holds
only what the newest of them made of a name, so a commit that comes late cannot be inserted before it. The history of a
name therefore holds what the name was before the first of them, and a fact for what each said. If a commit comes late,
all facts are applied again in order.

What always holds:

* *commits alone*: what a listing shows is kept apart (``listed``), and laid over the result of the commits. If
  something else has changed the name's row or tombstone since the last fact (``mark``), the history starts again;
* *no older fact*: everything that commits said before ``since`` is in the base, and cannot be separated from it.

A name that one commit began, and that has no tombstone, has no history: its row shows what that commit said
(`begun_by`). A crash leaves the histories of whole batches. `Histories.forget_before` deletes histories once no commit
can come late any more. An index contains those of the minutes before it. Trio thread only.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import count, islice

import msgspec
import xxhash

from lakefs_fuse.commits.doubt import Doubt
from lakefs_fuse.commits.file_rules import (
    NOTHING,
    RELOCATED,
    TOLD_AFTER_NS,
    Effect,
    FileRules,
    Step,
    is_perhaps_replaced,
)
from lakefs_fuse.commits.path_tree import MOVED_MAX, Carried, PathTree, Replaced, lies_elsewhere
from lakefs_fuse.commits.record import (
    OWN,
    THIS,
    UNSET,
    ObjectRef,
    Operation,
    Put,
    Record,
    Relocate,
    Remove,
    SetAttr,
    Symlink,
    is_of_version,
)
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import NO_OBJECT, PENDING, Entry, Flag
from lakefs_fuse.meta.rows import PathRows
from lakefs_fuse.meta.tombstones import NS, Tombstone, bury, is_put_since, with_unlisted
from lakefs_fuse.meta.tree import Tree, pack_entry, unpack_entry

FACTS_MAX = 16
"""Facts of a name. Beyond these, the older half goes into the base."""
PENDING_FACTS_MAX = 128
"""Facts of a name while one of them is of a change that is in no commit yet: these, and later ones of other nodes, stay
apart from the base, or it would not be known that another node's version is newer than the change. Some 20 KB, which
take 10 ms to apply again. Beyond these, the history starts again."""
OBJECTS_MAX = 1000
"""Object references kept in memory. The files of one record mostly have their bytes in few packs."""
DOUBTS_AT_ONCE = 128
"""Operations that are searched for doubts between two turns of the loop: 4 ms of CPU at most."""
ROWS_AT_ONCE = 256
"""Histories that are read in one step: about 2 ms."""
RUNS = count(1)
"""Counts applications of records in this process, so that two that begin at the same time are different runs."""
ENCODE = msgspec.msgpack.Encoder().encode
_MARK = struct.Struct("<QIQQI")
_SECOND_FACT = Flag.ATTRIBUTED | Flag.RELOCATED | Flag.OVERRIDING | Flag.PUT_AGAIN | Flag.LOCAL


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """What one commit said of a name with one operation, at ``stamp``.

    ``time`` is that of the record, and ``writer`` its writer, empty if that is not known. ``objects`` are those that
    the operation names, after a placeholder. ``outdated`` is an ETag that was no longer at the key, as the store
    answered. ``run`` is different for each application of a commit, and 0 for changes of this node. ``is_last``,
    ``is_only`` and ``is_again`` are as in `Step`."""

    stamp: int
    time: int
    operation: Operation
    objects: list[ObjectRef]
    is_last: bool = True
    is_only: bool = False
    outdated: str = ""
    run: int = 0
    is_again: bool = False
    writer: str = ""

    def record(self) -> Record:
        """Return a record that says only this."""
        return Record(writer="", time=self.time, objects=self.objects, operations=[self.operation])

    def place(self) -> tuple[str, int, str] | None:
        """Return where it puts the file's bytes, or what ends them; None if it only changes a version."""
        said = self.operation
        if isinstance(said, Symlink):
            return "", 0, said.target
        if isinstance(said, Remove):
            return "", 0, ""
        if not isinstance(said, Put) or is_of_version(said):
            return None
        ref = ObjectRef(said.path, said.hides) if said.object == OWN else self.objects[said.object]
        return ref.key, said.offset, ref.etag

    def changes(self) -> str:
        """Return the ETag of the plain object at the path of which it sets attributes; empty if it does not."""
        said = self.operation
        if not isinstance(said, SetAttr) or said.offset:
            return ""
        ref = ObjectRef(said.path, said.hides) if said.object == OWN else self.objects[said.object]
        return ref.etag if ref.key == said.path else ""

    def settles(self) -> str:
        """Return the ETag of the plain object at the path that it puts, replaces or removes; empty if there is none."""
        return self.operation.hides if isinstance(self.operation, Put | Remove | Symlink) else ""

    def is_put_of(self, versions: Set[tuple[str, int, str]]) -> bool:
        """Return whether it puts one of these versions, each of which is as `place` returns it."""
        said = self.operation
        if isinstance(said, Put) and said.object == OWN:
            return (said.path, 0, said.hides) in versions
        return self.place() in versions

    def tells_of(self, etags: Set[str]) -> bool:
        """Return whether it puts the plain object at the path, with one of these ETags."""
        said = self.operation
        return isinstance(said, Put) and said.object == OWN and said.hides in etags

    def restamped(self, before: int, after: int) -> Fact:
        """Return the fact with one stamp replaced, as in `Tombstone.restamped`, and its time too."""
        if self.stamp == before or PENDING <= self.stamp < before:
            return msgspec.structs.replace(self, stamp=after, time=after)
        return self


class Base(msgspec.Struct, frozen=True, array_like=True):
    """A file: its row, and what other rows hold of it. ``object`` is where its bytes are, if elsewhere."""

    row: bytes
    object: ObjectRef | None = None
    xattrs: dict[str, bytes] = {}
    target: bytes = b""


class History(msgspec.Struct, frozen=True, array_like=True):
    """The history of one name; see the module.

    ``base`` and ``buried`` are the file and the tombstone before the first fact. ``mark`` is `mark_of` the row and the
    tombstone after the last. ``absent`` is the ETag and stamp of a plain object that a commit named and that a later
    listing did not show. ``outdated`` is the last ETag that was no longer at the key, as the store answered."""

    facts: list[Fact]
    base: Base | None = None
    buried: Tombstone | None = None
    since: int = 0
    mark: int = 0
    listed: Base | None = None
    absent: tuple[str, int] = ("", 0)
    outdated: str = ""

    def is_behind(self, stamp: int) -> bool:
        """Return whether some fact is later than this stamp."""
        return any(fact.stamp > stamp for fact in self.facts[-1:])

    def is_moved_by(self, operation: Operation, stamp: int) -> bool:
        """Return whether the operation moves or replaces one version, and all later facts are in no commit yet.

        There is at least one later fact; the operation may concern the version that these facts made. Then they would
        bring back the earlier place of its bytes."""
        if isinstance(operation, SetAttr) or not is_of_version(operation):
            return False
        later = [fact.stamp for fact in self.facts if fact.stamp > stamp]
        return bool(later) and min(later) >= PENDING

    def can_have(self, stamp: int) -> bool:
        """Return whether a fact of this time can be inserted: nothing in the base is later, but for pending changes.

        Every commit comes before those, and they count over it in the base as well."""
        return stamp >= self.since or self.since >= PENDING

    def has_before(self, fact: Fact) -> bool:
        """Return whether the commit of a fact was applied before, and is now applied again."""
        return any(self._is_repeated(each, fact) for each in self.facts)

    @staticmethod
    def _is_repeated(known: Fact, fact: Fact) -> bool:
        is_of_another = known.writer and fact.writer and known.writer != fact.writer
        return fact.run > 0 and known.stamp == fact.stamp and known.run != fact.run and not is_of_another

    def tells_of(self, etag: str) -> bool:
        """Return whether a commit puts this plain object: then commits decide whether it counts, not its date."""
        own = (fact.operation for fact in self.facts if isinstance(fact.operation, Put))
        return any(put.object == OWN and put.hides == etag for put in own)

    def has_version_since(self, time: int, hides: str, own: Collection[int], *, is_named: bool = False) -> bool:
        """Return whether the newest commit of another node after ``time`` gave the name a version that was not known
        then. The plain object with the ETag ``hides`` was known, unless it was put there again; with ``is_named``, only
        that counts. ``own`` are times of commits of this node, of changes before this one: a version of theirs that is
        later has replaced the other node's."""
        later = [fact for fact in self.facts if time < fact.stamp < PENDING and fact.place() is not None]
        others = [fact for fact in later if fact.run and fact.stamp not in own]
        if not others or isinstance(others[-1].operation, Remove):
            return False
        newest, said = others[-1], others[-1].operation
        after = (fact for fact in later if fact.stamp > newest.stamp and fact.stamp in own)
        if any(not isinstance(fact.operation, Remove) for fact in after):
            return False
        if isinstance(said, Put) and said.object == OWN:
            is_again = newest.is_again or said.dated_s * NS > time
            return is_again if said.hides == hides else not is_named
        known = [fact.place() for fact in self.facts if fact.stamp != newest.stamp]
        return not is_named and newest.place() not in known

    def ends(self, etag: str, time: int, own: Collection[int]) -> bool:
        """Return whether another node has committed after ``time`` that the plain object with this ETag is no longer
        the file. ``own`` are as in `has_version_since`."""
        since = (fact for fact in self.facts if fact.run and time < fact.stamp < PENDING and fact.stamp not in own)
        return any(fact.settles() == etag and not fact.tells_of({etag}) for fact in since)

    def withdrawn(self, stamp: int, time: int) -> History:
        """Return the history without what a pending change said under this stamp. What cannot be separated from the
        base gets the time at which the change was made."""
        facts = [fact for fact in self.facts if fact.stamp != stamp]
        buried = None if self.buried is None else self.buried.restamped(stamp, time)
        since = time if self.since == stamp else self.since
        return msgspec.structs.replace(self, facts=facts, buried=buried, since=since)

    def object_before(self, stamp: int) -> str:
        """Return the ETag of the plain object that commits of before this time made of the name; empty if it was
        none."""
        before = [(fact.operation.path, fact.place()) for fact in self.facts if fact.stamp < stamp]
        path, place = next(((path, place) for path, place in reversed(before) if place is not None), ("", None))
        if place is not None:
            return place[2] if place[:2] == (path, 0) else ""
        base = None if self.base is None else unpack_entry(0, 0, self.base.row)
        return base.etag if base is not None and base.is_plain else ""

    def gave_file(self, stamp: int) -> bool:
        """Return whether a commit of this time put a file elsewhere at the name."""
        said = (fact.operation for fact in self.facts if fact.stamp == stamp)
        return any(isinstance(each, Symlink) or (isinstance(each, Put) and each.object != OWN) for each in said)

    def relocates(self, row: Entry) -> bool:
        """Return whether a commit relocated this plain object's bytes, but arrived before this node knew the object."""
        said = (fact.operation for fact in self.facts if isinstance(fact.operation, Relocate))
        return row.is_plain and any(each.from_object == OWN and each.from_etag == row.etag for each in said)

    def with_fact(self, fact: Fact) -> History:
        """Return the history with one more fact, after those of the same time.

        If the commit is applied again, its facts of the earlier application are dropped."""
        facts = [each for each in self.facts if not self._is_repeated(each, fact)]
        facts.insert(bisect_right([each.stamp for each in facts], fact.stamp), fact)
        return msgspec.structs.replace(self, facts=facts)

    def answered(self, fact: Fact) -> History:
        """Return the history with the store's answer for this fact, without the listed object if that is gone or older.
        The answer before no longer counts if the fact puts that object again."""
        if not fact.outdated:
            is_back = bool(self.outdated) and fact.tells_of({self.outdated})
            return msgspec.structs.replace(self, outdated="") if is_back else self
        listed = None if self.listed is None else unpack_entry(0, 0, self.listed.row)
        is_there = listed is not None and listed.etag != fact.outdated
        return msgspec.structs.replace(self, listed=self.listed if is_there else None, outdated=fact.outdated)

    def without(self, versions: Set[tuple[str, int, str]]) -> History:
        """Return the history without puts of these versions, and without what a listing showed."""
        facts = [fact for fact in self.facts if not fact.is_put_of(versions)]
        return msgspec.structs.replace(self, facts=facts, listed=None)

    def with_listing(self, listed: Base | None, etag: str, absent: tuple[str, int]) -> History:
        """Return the history with what a listing has shown since.

        Facts that set attributes of plain objects other than ``etag`` are dropped: they can show nothing any more.
        Perhaps no fact is left until the next one."""
        facts = [fact for fact in self.facts if fact.changes() in ("", etag)]
        return msgspec.structs.replace(self, facts=facts, listed=listed, absent=absent)

    def is_replaced_by(self, entry: Entry | None) -> bool:
        """Return whether another plain object is the file: then the listed one is no longer at the key."""
        if self.listed is None or entry is None or not entry.is_plain:
            return False
        return unpack_entry(0, 0, self.listed.row).etag != entry.etag

    def answers(self) -> Mapping[str, str]:
        """Return the argument ``outdated`` of `Application`."""
        return {self.facts[0].operation.path: self.outdated} if self.outdated else NOTHING

    def restamped(self, before: int, after: int) -> History:
        """Return the history with one stamp replaced, as in `Tombstone.restamped`, and the facts in their new order."""
        facts = sorted((fact.restamped(before, after) for fact in self.facts), key=lambda fact: fact.stamp)
        buried = None if self.buried is None else self.buried.restamped(before, after)
        since = after if self.since == before or PENDING <= self.since < before else self.since
        return msgspec.structs.replace(self, facts=facts, buried=buried, since=since)


def mark_of(entry: Entry | None, tombstone: Tombstone | None) -> int:
    """Return a number that changes with what a row and a tombstone say of a name, except attributes and inode."""
    row = b""
    if entry is not None and (not entry.is_local or entry.stamp or entry.etag):
        flags = entry.flags & ~(Flag.ATTRIBUTES_KNOWN | Flag.MTIME_KEPT | Flag.SHADOWED | Flag.XATTRS)
        row = _MARK.pack(entry.stamp, entry.place, entry.offset, entry.size, flags) + entry.etag.encode()
    return xxhash.xxh3_64_intdigest(row + (b"" if tombstone is None else b"\0" + ENCODE(tombstone)))


def is_listed(entry: Entry) -> bool:
    """Return whether a listing shows the file, and no commit says anything of it."""
    return not (entry.stamp or entry.place or entry.flags & (NO_OBJECT | Flag.ATTRIBUTED))


def lay_over(listed: Entry, step: Step) -> bool:
    """Lay an object that a listing shows over the result of the commits; return whether the object counts."""
    entry, tombstone = step.current, step.tombstone
    is_told = entry is not None and entry.is_plain and entry.stamp > 0
    if tombstone is not None:
        is_gone = tombstone.when_ended(listed.etag, is_told=is_told) > 0
        if is_gone and not listed.is_dated_by_store:  # this node stored it before it knew of the removal
            return False
        if tombstone.hides(listed.etag, listed.ctime_ns, is_told=is_told):
            return False
    flags = listed.flags & ~Flag.OVERRIDING
    if entry is not None:
        if entry.etag == listed.etag or listed.ctime_ns + NS <= entry.stamp or entry.stamp >= PENDING:
            return False
        if lies_elsewhere(entry):
            step.tombstone = bury(tombstone, floor=entry.stamp, etag=entry.etag, at=entry.stamp)
            flags |= Flag.OVERRIDING
    step.become(msgspec.structs.replace(listed, flags=flags), Effect.SET, {})
    return True


def is_begun(entry: Entry) -> bool:
    """Return whether a file may be what one commit said, and nothing else."""
    return entry.stamp > RELOCATED and not entry.flags & _SECOND_FACT


def is_same(row: Entry, step: Step) -> bool:
    """Return whether a row already says what a step resulted in."""
    entry = step.current
    if entry is None or mark_of(row, None) != mark_of(entry, None):
        return False
    if (row.flags | entry.flags) & (Flag.XATTRS | Flag.SYMLINK):
        return False
    if entry.flags & Flag.ATTRIBUTED and row.ctime_ns != entry.ctime_ns:
        return False
    is_known = bool(entry.flags & Flag.ATTRIBUTES_KNOWN)
    return not is_known or all(
        getattr(row, name) == getattr(entry, name) for name in ("mode", "uid", "gid", "mtime_ns")
    )


def fact_of(
    operation: Operation, record: Record, this: ObjectRef, stamp: int, *,
    is_last: bool, is_only: bool, is_again: bool, outdated: Mapping[str, str], run: int,
) -> Fact:  # fmt: skip
    """Return the fact for one operation of a record."""
    objects: list[ObjectRef] = [ObjectRef()]
    numbers: dict[int, int] = {}

    def number(index: int) -> int:
        if index < THIS:
            return index
        if index not in numbers:
            numbers[index] = len(objects)
            objects.append(this if index == THIS else record.objects[index])
        return numbers[index]

    if isinstance(operation, Put):
        operation = msgspec.structs.replace(
            operation, object=number(operation.object), replaces=number(operation.replaces)
        )
    elif isinstance(operation, SetAttr):
        operation = msgspec.structs.replace(operation, object=number(operation.object))
    elif isinstance(operation, Relocate):
        operation = msgspec.structs.replace(
            operation, object=number(operation.object), from_object=number(operation.from_object)
        )
    answer = outdated.get(operation.path, "")
    return Fact(stamp, record.time, operation, objects, is_last, is_only, answer, run, is_again, record.writer)


class Histories:
    """The rows of histories by path, and how histories are made from the tree. Trio thread only."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._rows = PathRows(tree.database, schema.HISTORY, History)
        self.get_many, self.write = self._rows.get_many, self._rows.write
        """See `PathRows`. A name without a history has None."""
        self._objects: dict[int, ObjectRef] = {}
        """By number, for those that were looked up."""
        self._replaced: Mapping[int, Replaced] = {}
        """By inode, of files that the moves of the record replaced."""

    def forget_before(self, time: int) -> Iterator[None]:
        """Delete histories whose facts are all older than ``time``, `ROWS_AT_ONCE` of them in each step. Those of names
        with a pending change stay."""
        names = self._rows.items()
        while some := list(islice(names, ROWS_AT_ONCE)):
            batch = Batch()
            for path, history in some:
                if not history.is_behind(time - 1) and history.since < PENDING:
                    self._rows.delete(batch, path)
            self._tree.database.commit(batch)
            names = self._rows.items(after=some[-1][0])
            yield

    def begin(self, path: str, row: Entry | None, buried: Tombstone | None, fact: Fact) -> History | None:
        """Return the history of a name that was ``row`` and ``buried`` before this fact; None if there can be none."""
        if (unlisted := self.begun_unlisted(path, row, buried)) is not None:
            return unlisted.with_fact(fact)
        newest = 0 if buried is None else max(buried.newest, buried.unlisted[1])
        if row is None or row.flags & Flag.LOCAL:
            return History([fact], buried=buried, since=newest)
        if is_listed(row):
            return History([fact], buried=buried, since=newest, listed=self._base_of(row))
        first = self.begun_by(path, row) if buried is None else None
        if first is not None:
            run = fact.run if first.stamp == fact.stamp else 0
            return History([msgspec.structs.replace(first, run=run), fact])
        if row.stamp >= PENDING:
            return None
        return History([fact], self._base_of(row), buried, max(newest, row.stamp))

    def found(self, history: History, row: Entry | None, tombstone: Tombstone | None) -> History | None:
        """Return the history as it continues from what the tree holds now; None if that is not known."""
        if history.mark == mark_of(row, tombstone):
            return history
        absent = ("", 0) if tombstone is None else tombstone.unlisted
        if row is None or (row.is_local and not row.stamp and not row.etag):
            is_known = bool(absent[0]) or history.listed is not None
            return history.with_listing(None, absent[0], absent) if is_known else None
        return history.with_listing(self._base_of(row), row.etag, absent) if is_listed(row) else None

    def keep(self, replaced: Mapping[int, Replaced]) -> None:
        """Keep what is known of files, by inode, that the moves of a record replaced."""
        self._replaced = replaced

    def _rows_of(self, entry: Entry) -> Replaced:
        """Return what else is known of a file."""
        return self._replaced.get(entry.inode) or Replaced(
            self._object(entry.place),
            self._tree.xattrs(entry.inode) if entry.flags & Flag.XATTRS else {},
            self._tree.target(entry.inode) if entry.flags & Flag.SYMLINK else b"",
        )

    def _object(self, number: int) -> ObjectRef | None:
        """Return the object with this number; None for 0, and if it is not known."""
        ref = self._objects.get(number)
        if ref is None and number and (row := self._tree.objects.get(number)) is not None:
            if len(self._objects) >= OBJECTS_MAX:
                self._objects.clear()
            ref = self._objects[number] = ObjectRef(row.key, row.etag, row.size)
        return ref

    def _base_of(self, entry: Entry) -> Base:
        return Base(pack_entry(entry), *self._rows_of(entry))

    def base_after(self, step: Step) -> Base | None:
        """Return the base of a history that begins after a step."""
        entry = step.current
        if entry is None:
            return None
        return Base(pack_entry(entry), self._object(entry.place), step.xattrs or {}, step.target)

    def entry_of(self, base: Base) -> Entry:
        """Return the file of a base, without parent, cookie and inode."""
        entry = msgspec.structs.replace(unpack_entry(0, 0, base.row), cookie=0, inode=0)
        if base.object is not None:
            ref = base.object
            entry = msgspec.structs.replace(entry, place=self._tree.objects.number(ref.key, ref.etag, ref.size))
        return entry

    def lay_listing_over(self, history: History, step: Step) -> bool:
        """Lay what a listing shows over the result of the commits; return whether a listed object counts."""
        entry = step.current
        listed = None if history.listed is None else self.entry_of(history.listed)
        if entry is not None and entry.is_plain and entry.stamp and (entry.etag, entry.stamp) == history.absent:
            step.tombstone = with_unlisted(step.tombstone, *history.absent)
            step.drop()
            if listed is not None and listed.etag == entry.etag:  # a listing shows it again
                step.become(listed, Effect.SET, {})
                return True
        elif listed is not None and history.tells_of(listed.etag):
            return False
        return listed is not None and lay_over(listed, step)

    def is_perhaps_replaced(self, history: History, entry: Entry | None) -> bool:
        """Return whether the object that a listing shows may have replaced the file that the commits resulted in."""
        listed = None if history.listed is None else self.entry_of(history.listed)
        return listed is not None and entry is not None and is_perhaps_replaced(entry, listed)

    def begun_unlisted(self, path: str, row: Entry | None, buried: Tombstone | None) -> History | None:
        """Return the history of a name for which one commit put a plain object that a listing no longer showed.

        Return None for any other name."""
        stamp = 0 if buried is None or buried != with_unlisted(None, *buried.unlisted) else buried.unlisted[1]
        if buried is None or not 0 < stamp < PENDING or not (row is None or row.is_local or is_listed(row)):
            return None
        put = Put(path, OWN, 0, 0, UNSET, UNSET, UNSET, 0, buried.unlisted[0])
        listed = None if row is None or row.is_local else self._base_of(row)
        return History([Fact(stamp, stamp, put, [ObjectRef()])], listed=listed, absent=buried.unlisted)

    def begun_with(self, path: str, entry: Entry) -> History | None:
        """Return the history of a file that `is_begun` and has no tombstone; None for any other."""
        first = self.begun_by(path, entry)
        return None if first is None else History([first], mark=mark_of(entry, None))

    def begun_by(self, path: str, entry: Entry) -> Fact | None:
        """Return the fact that made a file that `is_begun`; None for any other."""
        if not is_begun(entry):
            return None
        ref, xattrs, target = self._rows_of(entry)
        time = entry.ctime_ns if entry.stamp >= PENDING else entry.stamp
        if entry.is_symlink:
            link = Symlink(path, target.decode(), entry.uid, entry.gid, entry.mtime_ns, entry.etag, xattrs)
            return Fact(entry.stamp, time, link, [ObjectRef()])
        if entry.place and ref is None:
            return None
        put = Put(
            path, OWN if ref is None else 1, entry.offset, entry.size, entry.mode, entry.uid, entry.gid,
            entry.mtime_ns, entry.etag, xattrs,
        )  # fmt: skip
        return Fact(entry.stamp, time, put, [ObjectRef()] if ref is None else [ObjectRef(), ref])


def doubts(paths: PathTree, record: Record) -> Iterator[list[Doubt]]:
    """Yield, for DOUBTS_AT_ONCE operations at a time, what to ask the store for before a record is applied."""
    rules, histories = FileRules(paths, record, ObjectRef(), record.time, outdated={}), Histories(paths.tree)
    operations = iter(record.operations)
    while some := list(islice(operations, DOUBTS_AT_ONCE)):
        rows = paths.find_many([each.path.encode() for each in some])
        found = [rules.doubt(operation, row) for operation, row in zip(some, rows, strict=True)]
        late = [removal for removal, row in zip(some, rows, strict=True) if _is_known_later(removal, row, record.time)]
        yield [doubt for doubt in (*found, *_doubts_before(histories, late, record.time)) if doubt is not None]


def _is_known_later(operation: Operation, row: Entry | None, time: int) -> bool:
    """Return whether it is the removal of a version that a later commit named, or of one that is gone."""
    if not isinstance(operation, Remove) or operation.directory or operation.by_date or not operation.hides:
        return False
    return row is None or (row.is_plain and row.etag == operation.hides and row.stamp > time)


def _doubts_before(histories: Histories, removals: Sequence[Operation], time: int) -> Iterator[Doubt]:
    """Yield what to ask for because of removals that come late. The object that the history shows without the removed
    version may have been replaced by it."""
    known = histories.get_many([each.path for each in removals]) if removals else []
    for removal, history in zip(removals, known, strict=True):
        if isinstance(removal, Remove) and history is not None and history.is_behind(time):
            etag = history.object_before(time)
            if etag not in ("", removal.hides):
                yield Doubt(removal.path, etag, removal.hides, time)


class OrderedRules:
    """The rules for one record's operations, applied as if all commits had arrived in the order of their times."""

    def __init__(
        self, paths: PathTree, record: Record, this: ObjectRef, stamp: int, *,
        own: bool, outdated: Mapping[str, str], withdraws: bool = False,
    ) -> None:  # fmt: skip
        """See `Application` for the arguments."""
        self._withdraws = withdraws
        self._paths, self._record, self._this, self._stamp, self._outdated = paths, record, this, stamp, outdated
        self.rules = FileRules(paths, record, this, stamp, own=own, outdated=outdated)
        self._histories = Histories(paths.tree)
        self._run = 0 if own else paths.database.clock.boot_ns() + next(RUNS)
        self._moved, self._before = set[str](), dict[str, Entry]()
        self._left = set[str]()
        """Paths from which a change of this node moved rows before a crash, if it is applied again after that."""
        self._known: dict[str, History] = {}
        """Histories of the names that were read together, by path."""
        self._changed: list[tuple[Step, History | None]] = []

    def move(self, carried: Carried) -> None:
        """Register which rows moved with the record."""
        self._before.update(carried.before)
        self._histories.keep(carried.replaced)
        if carried.directories:
            self._moved.update(path for pair in self._record.moves for path in pair)
        elif not self._run:
            self._left.update(old for old, _ in self._record.moves)

    def read(self, steps: Sequence[Step]) -> None:
        """Read the histories of these steps' names, and number their objects, before `apply` and `write` for them."""
        self.rules.number(step.operation for step in steps)
        files = [step.operation.path for step in steps if not step.raw.endswith(b"/")]
        histories = zip(files, self._histories.get_many(files), strict=True)
        self._known = {path: history for path, history in histories if history is not None}

    def apply(self, step: Step) -> None:
        """Apply an operation on a file, and then again what later commits said, as far as that is known."""
        if self._withdraws:
            self._withdraw(step)
            return
        path, known = step.operation.path, self._known.get(step.operation.path)
        is_left = known is not None and step.row is None and self._is_below(path, self._left)
        is_carried = is_left or self._is_below(path, self._moved)
        history = self._begun_later(step) if known is None else self._found(step, known, is_carried)
        if history is None:
            self.rules.apply(step)
            history = self._begin(step, is_carried)
        else:
            history = self._continue(step, history, is_carried)
        step.is_outdated = step.is_outdated or self._is_put_beside_removal(step, history)
        if history is not None or known is not None:
            self._changed.append((step, history))

    def _is_put_beside_removal(self, step: Step, history: History | None) -> bool:
        """Return whether the name is a plain object that the record puts, and another node removed, renamed or replaced
        another version a moment before: that may have replaced the object, and the record's writer did not know it."""
        said, current = step.operation, step.current
        if not self._run or step.tombstone is None or not isinstance(said, Put) or said.object != OWN:
            return False
        if current is None or (current.etag, current.stamp) != (said.hides, self._stamp):
            return False
        removed = {
            at
            for etag, at in step.tombstone.gone
            if etag != said.hides and at < self._stamp < at + TOLD_AFTER_NS and not is_put_since(said.dated_s, at)
        }
        facts = () if history is None else history.facts
        return not removed <= {fact.stamp for fact in facts if fact.writer == self._record.writer}

    def _withdraw(self, step: Step) -> None:
        """Set the name to what it is without the operation, by its history, and have it listed again. Without a history
        what was removed stays so, at the time at which the change was made."""
        known, row = self._known.get(step.operation.path), step.row
        history = None if known is None else self._histories.found(known, row, step.buried)
        if history is None and row is not None and row.stamp == self._stamp and step.buried is None:
            first = self._histories.begun_by(step.operation.path, row)
            history = None if first is None else History([first])
        if history is not None:
            history = history.withdrawn(self._stamp, self._record.time)
            self._replay(step, history)
        elif step.buried is not None:
            step.tombstone = step.buried.restamped(self._stamp, self._record.time)
        if history is not None or known is not None:
            self._changed.append((step, history if history is not None and history.facts else None))
        step.relists = True

    def _found(self, step: Step, known: History, is_carried: bool) -> History | None:
        """Return the history as `Histories.found` does.

        If rows moved with the record, what the name was before that counts."""
        if not is_carried:
            return self._histories.found(known, step.row, step.buried)
        before = self._before.get(step.operation.path)
        if before is not None and is_listed(before):
            return self._histories.found(known, before, step.buried)
        if known.listed is None or len(self._record.operations) > MOVED_MAX:
            return known
        is_there = before is not None and not known.is_replaced_by(before)
        if before is None and step.row is not None:  # perhaps no row moved here
            is_there = step.row.is_plain and not known.is_replaced_by(step.row)
        return known if is_there else known.with_listing(None, known.absent[0], known.absent)

    def _begun_later(self, step: Step) -> History | None:
        """Return the history of a name that began with one commit, if that is later than the record."""
        if step.buried is not None:
            later = self._histories.begun_unlisted(step.operation.path, step.row, step.buried)
            return later if later is not None and later.is_behind(self._stamp) else None
        if step.row is None or step.row.stamp <= self._stamp:
            return None
        first = self._histories.begun_by(step.operation.path, step.row)
        return None if first is None else History([first])

    def write(self, batch: Batch) -> None:
        """Write the histories for the operations applied since the last call.

        The steps already hold the rows that their names got."""
        histories: dict[str, History | None] = {}
        for step, history in self._changed:
            if history is not None:
                listed = None if history.is_replaced_by(step.current) else history.listed
                mark = mark_of(step.current, step.tombstone)
                history = msgspec.structs.replace(history, listed=listed, mark=mark)
            histories[step.operation.path] = history
        self._changed = []
        self._histories.write(batch, histories)

    def _continue(self, step: Step, history: History, is_carried: bool) -> History | None:
        fact = self._fact(step)
        history = history.answered(fact)
        can_have = history.can_have(self._stamp)
        if history.is_moved_by(step.operation, self._stamp) or not can_have:
            self.rules.apply(step)
            return history.with_fact(fact) if can_have and step.effect == Effect.NONE else None
        is_late = history.is_behind(self._stamp) or history.has_before(fact)
        replays = is_late or is_carried or (step.row is not None and history.relocates(step.row))
        if not replays:
            self.rules.apply(step)
        if len(history.facts) >= FACTS_MAX and not is_late:
            history = self._fold(step, history)
            if len(history.facts) >= PENDING_FACTS_MAX:
                if replays:
                    self.rules.apply(step)
                return self._begin(step, is_carried)
        history = history.with_fact(fact)
        if replays or not step.uncovered.isdisjoint(fact.stamp for fact in history.facts):
            self._replay(step, history)
        return history

    def _fold(self, step: Step, history: History) -> History:
        """Return a history with its older half in the base, but for changes of this node whose times are not known yet,
        and what other nodes said since the first of them was made."""
        made = next((fact.time for fact in history.facts if fact.stamp >= PENDING), PENDING)
        half = max(FACTS_MAX // 2, len(history.facts) - FACTS_MAX)
        older = [fact for fact in history.facts[:half] if fact.stamp < made]
        if not older:
            return history
        again = self._replayed(step, msgspec.structs.replace(history, facts=older))
        base = self._histories.base_after(again)
        since = max(history.since, older[-1].stamp)
        facts = history.facts[len(older) :]
        return msgspec.structs.replace(history, facts=facts, base=base, buried=again.tombstone, since=since)

    def _fact(self, step: Step) -> Fact:
        return fact_of(
            step.operation, self._record, self._this, self._stamp,
            is_last=step.is_last, is_only=step.is_only, is_again=step.is_again, outdated=self._outdated, run=self._run,
        )  # fmt: skip

    def _begin(self, step: Step, is_carried: bool) -> History | None:
        """Return a history whose base is what the name was before the step.

        Return None if the row says all, if too many names move, or if the history cannot begin."""
        path, row = step.operation.path, step.before
        if is_carried and (row is None or row.stamp != self._stamp):  # else the record has said what the name is
            if len(self._record.operations) > MOVED_MAX:
                return None
            row = self._before.get(path)
        made = step.current if step.effect == Effect.SET else None
        is_known = row is not None and not row.flags & Flag.LOCAL
        if not is_known and made is not None and is_begun(made) and step.buried is None and step.tombstone is None:
            return None
        fact = self._fact(step)
        history = self._histories.begin(path, row, step.buried, fact)
        return None if history is None else history.answered(fact)

    @staticmethod
    def _is_below(path: str, moved: Set[str]) -> bool:
        """Return whether the name, or a directory above it, is in ``moved``."""
        while path and moved:
            if path in moved:
                return True
            path = path.rpartition("/")[0]
        return False

    def find_without(
        self, path: str, row: Entry, buried: Tombstone | None, versions: Set[tuple[str, int, str]]
    ) -> Step | None:
        """Return what commits make of a name if puts of these versions are left out; each is as in `Fact.place`.

        ``row`` is what the name is now. What a listing shows is left out, too. Return None if the name has no history
        that continues from what the tree holds, or if nothing is left."""
        (known,) = self._histories.get_many([path])
        history = None if known is None else self._histories.found(known, row, buried)
        rest = None if history is None else history.without(versions)
        if history is None or rest is None or not (rest.facts or rest.base):
            return None
        raw = path.encode(*schema.PATH)
        return self._replayed(Step(history.facts[0].operation, row.parent, row.name, raw, True, True), rest)

    def _replay(self, step: Step, history: History) -> None:
        """Set a step to what the history of its name results in."""
        row, again = step.row, self._replayed(step, history)
        is_listed_now = self._histories.lay_listing_over(history, again)
        step.tombstone, step.relists = again.tombstone, again.relists
        step.is_outdated = again.is_outdated or self._histories.is_perhaps_replaced(history, again.current)
        step.uncovered = again.uncovered - {fact.stamp for fact in history.facts}
        step.current, step.effect = row, Effect.NONE
        if again.current is None:
            if row is not None and not row.is_local:
                step.drop()
        elif row is not None and ((row.is_local and not step.is_last) or is_same(row, again)):
            pass
        else:
            step.become(again.current, Effect.SET, again.xattrs or {}, again.target)
            step.relists = step.relists or is_listed_now

    def _replayed(self, step: Step, history: History) -> Step:
        """Return a step with the result of all facts of a history, without what a listing shows."""
        missing = set[str]()  # versions of which attributes were set, and that no listing had shown by then
        again = Step(step.operation, step.parent, step.name, step.raw, True, False, tombstone=history.buried)
        if history.base is not None:
            again.current = self._histories.entry_of(history.base)
            again.xattrs, again.target = history.base.xattrs, history.base.target
        for fact in history.facts:
            answers, file = history.answers(), again.current
            if isinstance(fact.operation, Relocate) and file is not None and not file.stamp and file.is_plain:
                answers = {fact.operation.path: file.etag}  # attributes alone do not say that it is there
            rules = FileRules(self._paths, fact.record(), ObjectRef(), fact.stamp, outdated=answers)
            rules.number(iter((fact.operation,)))
            again.operation, again.is_last, again.is_only = fact.operation, fact.is_last, fact.is_only
            again.is_again = fact.is_again
            again.relists = False
            rules.apply(again)
            if again.relists:
                missing.add(fact.changes())
            if settled := fact.settles():
                missing.discard(settled)
        again.relists = bool(missing)
        return again
