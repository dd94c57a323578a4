"""The rules for what each operation of a commit makes of a file's name, without the rows.

A `Step` holds what is known of a name, and what the operations so far make of it; `Application` reads it, and writes
the result. Several methods decide what is newer: `is_older` for files that are put, and before it `_is_told_late` for a
plain object that is put at its own key; `_is_removing` for files that are removed; `_applies` and
`_is_attributed_later` for changes of one version. If the name has a history (`name_history`), only listed objects and
pending changes of this node can be newer; without one, an operation that comes late yields to what is known.

What always holds (*nothing is written*): rules change steps alone; only `FileRules.number` adds rows, to the object
table. Trio thread only. A crash leaves such rows at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType

import msgspec

from lakefs_fuse.commits.doubt import Doubt
from lakefs_fuse.commits.path_tree import (
    PathTree,
    is_hiding,
    is_only_listed,
    is_removing,
    lies_elsewhere,
    when_replaced,
)
from lakefs_fuse.commits.record import (
    ANY,
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
    is_copy,
    is_of_version,
)
from lakefs_fuse.meta.entry import NO_OBJECT, PENDING, Entry, Flag
from lakefs_fuse.meta.tombstones import (
    Tombstone,
    beside_file,
    bury,
    is_put_since,
    is_replaced,
    put_back,
    with_put,
    with_unlisted,
    without,
)

NS = 1_000_000_000
TOLD_AFTER_NS = 10 * NS
"""A commit that puts a plain object comes this long after the object at most, as a rule: some time between the two,
another client may have replaced the object. Commits later than that count as late (`poller`)."""
RELOCATED = 1
"""Stamp of a plain object that was relocated: older than any commit, because the name keeps its bytes."""
NOTHING: Mapping[str, str] = MappingProxyType({})
KNOWN = Flag.ATTRIBUTES_KNOWN | Flag.MTIME_KEPT


class Place(msgspec.Struct, frozen=True, gc=False):
    """The location of a file's bytes, as in `Entry`."""

    number: int
    offset: int
    etag: str


class Effect(IntEnum):
    """What operations did to the file of a name."""

    NONE = 0
    NOTED = 1
    """It is the same; only a flag in its row changed."""
    UPDATED = 2
    """The same bytes have other attributes."""
    RELOCATED = 3
    """The same bytes are in another place."""
    SET = 4
    """It was set as a whole."""
    GONE = 5


def is_perhaps_replaced(put: Entry, known: Entry) -> bool:
    """Return whether the plain object ``known`` may have replaced the one that a commit has ``put`` at the same key.

    The object at the key is the file, whatever its date. Commits do not tell which it is: they come after the objects,
    and not in the order of these. A row that this node wrote has the time of this machine, whose clock may be wrong."""
    is_other = put.is_plain and known.is_plain and not known.is_local and put.etag != known.etag
    is_dated = known.is_dated_by_store or known.ctime_ns == known.stamp or known.flags & Flag.ATTRIBUTED
    is_recent = not is_dated or max(known.stamp, known.ctime_ns) + TOLD_AFTER_NS > put.stamp
    return is_other and put.stamp > RELOCATED and is_recent


class Step(msgspec.Struct):
    """An operation being applied, with what is known of its name at that time.

    ``name`` is the sort name in the directory ``parent``, which is None if that does not exist; ``raw`` is the path of
    the tombstone. ``other`` is the directory with the name of a missing file, or the file with that of a missing
    directory.
    """

    operation: Operation
    parent: int | None
    name: bytes
    raw: bytes
    is_last: bool
    """No later operation of the record says which bytes the name has."""
    is_only: bool
    """No other operation of the commit says so."""
    is_again: bool = False
    """The record says that the plain object that it puts is there again (`record.says_again`)."""
    row: Entry | None = None
    """The row in the tree."""
    before: Entry | None = None
    """What the name was before, as the row tells. That of a removed file stays while the file is being written here."""
    current: Entry | None = None
    """What the name is now. A new file has no parent, cookie or inode yet."""
    buried: Tombstone | None = None
    """The tombstone that is in the tree."""
    tombstone: Tombstone | None = None
    other: Entry | None = None
    effect: Effect = Effect.NONE
    xattrs: dict[str, bytes] | None = None
    """Extended attributes of ``current``; None if they are unchanged."""
    target: bytes = b""
    """The target of ``current``, if that is a new symbolic link."""
    relocated: tuple[str, str, int] | None = None
    """Key, ETag and offset at which the bytes were before."""
    relists: bool = False
    """The next listing shows what is at the key."""
    is_outdated: bool = False
    """Perhaps another plain object is at the key than ``current``: the store is asked for the name when it is used."""
    uncovered: set[int] = set()
    """Times of commits to apply again: a plain object that counted in place of their files, by its date, is gone."""

    def become(self, entry: Entry, effect: Effect, xattrs: dict[str, bytes] | None = None, target: bytes = b"") -> None:
        """Set what the name is from now on."""
        self.current, self.effect = entry, effect
        if effect == Effect.SET:
            self.xattrs, self.target = xattrs, target
        elif xattrs is not None:
            self.xattrs = xattrs

    def drop(self) -> None:
        """Remove the file from the name."""
        self.current, self.effect, self.xattrs, self.target = None, Effect.GONE, None, b""


class FileRules:
    """The rules for the operations of one record."""

    def __init__(
        self,
        paths: PathTree,
        record: Record,
        this: ObjectRef,
        stamp: int,
        *,
        own: bool = False,
        outdated: Mapping[str, str] = NOTHING,
    ) -> None:
        """See `Application` for the arguments."""
        self._own, self._outdated = own, outdated
        self._paths, self._tree = paths, paths.tree
        self._record, self._this, self._stamp, self._time = record, this, stamp, record.time
        self._numbers: dict[int, int] = {}
        """Numbers of objects by their index in the record, as of the last call of `number` that needed them."""

    def number(self, operations: Iterator[Operation]) -> None:
        """Assign numbers to the objects that operations name; only then can these operations be applied."""
        named = {index for operation in operations for index in self._elsewhere(operation)}
        known, get = self._numbers, self._tree.objects.get
        refs = {index: self._ref(index) for index in named if index not in known or get(known[index]) is None}
        if refs:
            numbers = self._tree.objects.numbers([(ref.key, ref.etag, ref.size) for ref in refs.values()])
            known.update(zip(refs, numbers, strict=True))

    def apply(self, step: Step) -> None:
        """Apply the operation of a step, which concerns a file."""
        match operation := step.operation:
            case Put():
                self._put(step, operation)
            case Symlink():
                self._symlink(step, operation)
            case Remove():
                self._remove(step, operation)
            case SetAttr():
                self._set_attributes(step, operation)
            case Relocate():
                self._relocate(step, operation)

    def _ref(self, index: int) -> ObjectRef:
        return self._this if index == THIS else self._record.objects[index]

    def _elsewhere(self, operation: Operation) -> Iterator[int]:
        """Yield the indexes of objects that an operation names, and that need numbers."""
        if isinstance(operation, Remove) or not isinstance(operation, Put | SetAttr | Relocate):
            return
        if not self._is_own(operation.path, operation.object, operation.offset, operation.size):
            yield operation.object
        if isinstance(operation, Put) and operation.replaces != ANY:
            yield operation.replaces
        if isinstance(operation, Relocate):
            before = operation.from_object
            if not self._is_own(operation.path, before, operation.from_offset, operation.size):
                yield before

    def _is_own(self, path: str, index: int, offset: int, size: int) -> bool:
        """Return whether the bytes are the plain object at the path's own key, perhaps after a rename back."""
        if index == OWN:
            return True
        ref = self._ref(index)
        return ref.key == path and not offset and size == ref.size

    def _place(self, path: str, index: int, offset: int, size: int, hides: str) -> Place:
        if not self._is_own(path, index, offset, size):
            return Place(self._numbers[index], offset, hides)
        return Place(0, 0, hides if index == OWN else self._ref(index).etag)

    def is_at(self, entry: Entry, place: Place, path: str) -> bool:
        if entry.flags & NO_OBJECT:
            return False
        if place.number:
            return entry.place == place.number and entry.offset == place.offset
        if not entry.place:
            return entry.etag == place.etag
        row = self._tree.objects.get(entry.place)  # renamed back to its own key
        return row is not None and (row.key, row.etag, row.size) == (path, place.etag, entry.size) and not entry.offset

    def is_older(self, step: Step, hides: str) -> bool:
        """Return whether something newer than this record is known of the name."""
        tombstone, current = step.tombstone, step.current
        if tombstone is not None and self._is_ended(step, tombstone):
            return True
        if current is None:
            return False
        return current.stamp > self._stamp or self._is_unknown(current, step.operation.path, hides)

    def _is_ended(self, step: Step, tombstone: Tombstone) -> bool:
        """Return whether a later removal ended what the record puts."""
        is_own = isinstance(step.operation, Put) and step.operation.object == OWN
        return (tombstone.newest if is_own else tombstone.stamp) > self._stamp

    def _etag_back(self, operation: Operation) -> str:
        """Return the ETag of the own-key object to which a file is renamed back; empty for another operation."""
        if not isinstance(operation, Put) or operation.object == OWN:
            return ""
        is_own = self._is_own(operation.path, operation.object, operation.offset, operation.size)
        return self._ref(operation.object).etag if is_own else ""

    def _is_gone(self, step: Step, etag: str, dated_s: int) -> bool:
        """Return whether a commit ended this very plain object by name, or the file hides it, whatever the times.

        If the record puts the object there again, only a removal of that version counts, not of an earlier one."""
        current, tombstone = step.current, step.tombstone or Tombstone(0)
        hidden = current.stamp if current is not None and is_hiding(current, etag) else 0
        if hidden and not (step.is_again or is_put_since(dated_s, hidden)):
            return True
        named = max(hidden, tombstone.when_named(etag))
        if not (dated_s or step.is_again):
            return named not in (0, self._stamp)
        is_before = 0 < named < self._stamp  # what went with this record came back with it, if it is applied again
        return is_before and 0 < dated_s <= tombstone.when_removed(etag)

    def _bury(
        self, step: Step, stamp: int = 0, *,
        floor: int = 0, etag: str = "", ended: str = "", at: int = 0, dated_s: int = 0,
        told: tuple[str, int] = ("", 0),
    ) -> None:  # fmt: skip
        current = step.current
        if current is not None and current.is_plain and current.stamp > floor:  # what lies there is the file
            stamp, floor = max(stamp, floor), 0
        step.tombstone = bury(
            step.tombstone, stamp, floor=floor, etag=etag, ended=ended, at=at, dated_s=dated_s, told=told
        )

    def _end_unlisted(self, step: Step, hides: str, *, is_replaced: bool = True) -> None:
        """End the plain object that a listing no longer showed, if the record is later or names it.

        With ``is_replaced`` its ETag is gone, too: a file elsewhere replaced it, or a removal ended every version."""
        if step.tombstone is None or not step.tombstone.has_ended_unlisted(self._stamp, hides):
            return
        etag, stamp = step.tombstone.unlisted
        step.tombstone = with_unlisted(step.tombstone)
        self._bury(step, told=(etag, stamp), ended=etag if is_replaced else "", at=self._stamp)

    def _bury_replaced(self, step: Step, current: Entry, etag: str = "") -> None:
        """Record in the tombstone that a file elsewhere is replaced or removed.

        What it hid stays hidden, except the plain object ``etag``."""
        if current.etag and current.etag != etag:
            self._bury(step, etag=current.etag, at=current.stamp if current.stamp > RELOCATED else self._stamp)
        self._bury(step, floor=current.stamp)

    def _note_lost(self, step: Step, place: Place, hides: str) -> None:
        """Account for an operation that is left out as older than what is known.

        What it replaced stays gone all the same."""
        current, tombstone = step.current, step.tombstone
        is_elsewhere = current is not None and lies_elsewhere(current)
        if place.number or isinstance(step.operation, Symlink):
            if hides and not (is_elsewhere and current.etag == hides):  # type: ignore[union-attr]
                self._bury(step, etag=hides, at=max(self._stamp, when_replaced(current, tombstone)))
            if not is_elsewhere:
                self._bury(step, floor=self._stamp)
            is_told = step.tombstone is not None and step.tombstone.unlisted[1] > self._stamp
            listed = current if current is not None and current.is_plain and not current.stamp else None
            if listed is not None and is_told:
                if listed.etag == hides:
                    self._drop_listed(step, listed)
            elif listed is not None:
                if self._own or self._is_unknown(listed, step.operation.path, hides):
                    flags = listed.flags | Flag.OVERRIDING
                    step.become(msgspec.structs.replace(listed, flags=flags), Effect.NOTED)
                else:  # older than what was removed since
                    self._uncover(step, step.tombstone, listed)
                    step.drop()
        elif is_elsewhere and current.stamp > self._stamp:  # type: ignore[union-attr]
            self._bury(step, ended=place.etag, at=current.stamp)  # type: ignore[union-attr]
        elif tombstone is not None and tombstone.floor > self._stamp:
            self._bury(step, ended=place.etag, at=tombstone.floor)
            if current is not None and current.is_plain and not current.stamp and current.etag == place.etag:
                self._drop_listed(step, current)

    def _drop_listed(self, step: Step, current: Entry) -> None:
        """Drop a plain object that was only listed: it counted by its date, and is gone by its ETag."""
        self._uncover(step, step.tombstone, current)
        step.drop()

    def _end_older(self, step: Step, stamp: int, etag: str) -> None:
        """End the older file elsewhere that a removed plain object had replaced.

        That file may have been put earlier in this record."""
        current = step.current
        if current is not None and lies_elsewhere(current) and 0 < current.stamp < stamp:
            self._bury_replaced(step, current)
            step.drop()
        elif current is not None and lies_elsewhere(current) and current.stamp == stamp == self._stamp and step.is_last:
            self._bury(step, etag=current.etag, at=stamp)
            step.drop()
        self._bury(step, told=(etag, stamp))

    def _note_not_moved(self, step: Step, etag: str, *, since: int) -> None:
        """Mark a plain object as gone if, after ``since``, its name got another file, or one was removed there.

        If ``since`` is 0, the object is a copy of bytes that the name no longer has, and only files elsewhere count;
        otherwise it is a version that was moved away, and later replaced at its key or removed."""
        current, ended = step.current, 0
        listed = None if since or current is None or not is_only_listed(current, etag) else current
        if current is not None and (since or lies_elsewhere(current)):
            ended = current.stamp if current.etag != etag else 0
        elif (current is None or listed is not None) and step.tombstone is not None:
            ended = step.tombstone.newest if since else step.tombstone.floor
        if ended > since:
            self._bury(step, etag=etag, at=max(self._stamp, ended))
            if listed is not None:
                step.drop()

    def _uncover(self, step: Step, tombstone: Tombstone | None, current: Entry) -> None:
        """Record which commit to apply again when a plain object goes that was only listed.

        The file elsewhere that it hid by its date is not known here, and other nodes may show it."""
        is_over = current.flags & Flag.OVERRIDING and not current.stamp
        if is_over and tombstone is not None and 0 < tombstone.floor < PENDING:
            step.uncovered.add(tombstone.floor)

    def _note_won(self, step: Step, place: Place, hides: str, *, is_again: bool) -> None:
        """Update the tombstone for an operation that says what the name is from now on.

        A tombstone stays for what is gone; beside a file elsewhere, that file stands for the rest."""
        current = step.current
        if current is not None and current.flags & Flag.LOCAL:
            current = None
        if place.number or isinstance(step.operation, Symlink):
            if current is not None and current.stamp > 0 and current.etag not in ("", hides):
                named, ended = (current.etag, "") if lies_elsewhere(current) else ("", current.etag)
                self._bury(step, etag=named, ended=ended, at=self._stamp)
            self._end_unlisted(step, hides)
            if step.tombstone is not None:
                step.tombstone = beside_file(step.tombstone, self._stamp, hides)
        else:
            if current is not None and lies_elsewhere(current) and current.stamp > 0:
                self._bury_replaced(step, current, place.etag)
            elif current is not None and current.is_plain and 0 < current.stamp < self._stamp:
                self._bury(step, told=(current.etag, current.stamp))
            self._end_unlisted(step, place.etag, is_replaced=False)
            dated_s = step.operation.dated_s if isinstance(step.operation, Put) else 0
            if step.tombstone is not None or dated_s:
                rest = step.tombstone or Tombstone(0)
                rest = without(rest, place.etag) if is_again else rest
                is_undated = bool(self._etag_back(step.operation) or (step.is_again and not dated_s))
                step.tombstone = bury(put_back(rest, place.etag, undated=is_undated), etag=place.etag, put_s=dated_s)

    def _is_covered(self, step: Step, current: Entry) -> bool:
        """Return whether a file not yet in the store replaced what this, or a later, operation of the record puts."""
        is_local = bool(current.flags & Flag.LOCAL)
        return is_local and (not step.is_last or (step.is_only and current.stamp == self._stamp))

    def _is_unknown(self, current: Entry, path: str, hides: str) -> bool:
        """Return whether this is a plain object that the writer did not know, and that is not older.

        See docs/format.md, "Plain objects and commits"."""
        if current.stamp or current.place or current.flags & NO_OBJECT or current.etag == hides:
            return False
        if current.flags & Flag.ATTRIBUTED:  # the time of the commit that changed it
            date_ns = current.ctime_ns
        elif current.is_dated_by_store or self._outdated is NOTHING:
            date_ns = current.ctime_ns + NS  # LastModified is in whole seconds
        else:
            date_ns = self._time + 1  # dated by this node's clock, which may be wrong: the store is asked
        newer = self._stamp < PENDING and date_ns > self._time
        return newer and self._outdated.get(path) != current.etag

    def doubt(self, operation: Operation, current: Entry | None) -> Doubt | None:
        """Return what to ask the store for before an operation is applied, because of the row of the file at its path,
        ``current``."""
        if isinstance(operation, SetAttr | Relocate):
            return self._doubt_version(operation, current)
        if not isinstance(operation, Put | Symlink | Remove) or is_of_version(operation):
            return None
        if isinstance(operation, Remove) and operation.directory:
            return None
        if isinstance(operation, Remove) and current is not None and self._is_other(current, operation):
            # No commit named a listed object, so the removed version has not replaced it: any date is right.
            return Doubt(operation.path, current.etag, operation.hides, self._time if current.stamp else PENDING)
        if isinstance(operation, Put) and operation.object == OWN and current is None:
            tombstone = self._tree.tombstones.get(operation.path.encode())
            is_later = tombstone is not None and PENDING > tombstone.newest > self._stamp >= tombstone.floor
            if is_later and not tombstone.when_gone(operation.hides):  # type: ignore[union-attr]
                return Doubt(operation.path, operation.hides, "", removed_ns=tombstone.newest)  # type: ignore[union-attr]
        if current is None or (current.is_dated_by_store and current.ctime_ns > self._time + NS):
            return None
        if self._is_unknown(current, operation.path, operation.hides):
            return Doubt(operation.path, current.etag, operation.hides)
        return None

    def _doubt_version(self, operation: SetAttr | Relocate, current: Entry | None) -> Doubt | None:
        index = operation.from_object if isinstance(operation, Relocate) else operation.object
        if index != OWN or current is None or not current.is_plain or current.etag == operation.hides:
            return None
        if isinstance(operation, SetAttr) and self._is_known_before(current):
            return Doubt(operation.path, current.etag, operation.hides, sets_attributes=True)
        if isinstance(operation, Relocate) and not current.stamp and current.flags & Flag.ATTRIBUTED:
            return Doubt(operation.path, current.etag, "", PENDING)  # its attributes do not say which is newer
        return None

    def _is_other(self, current: Entry, removal: Remove) -> bool:
        """Return whether a removal names another plain object than the one that is known here.

        The removal's writer had not seen that one, or another client has put it there since."""
        is_earlier = current.stamp < self._stamp and not self._own
        is_version = current.is_plain and not removal.by_date
        return is_earlier and is_version and removal.hides not in ("", current.etag)

    def _put(self, step: Step, operation: Put) -> None:
        if operation.replaces != ANY:
            self._replace_version(step, operation)
            return
        if operation.object == OWN and self._is_told_late(step, operation):
            if not self._is_hidden_by(step.current, operation):
                gone = 0 if step.tombstone is None else step.tombstone.when_gone(operation.hides)
                self._end_older(step, min(gone - 1, self._stamp), operation.hides)
            return
        place = self._place(operation.path, operation.object, operation.offset, operation.size, operation.hides)
        said = operation.mode != UNSET or operation.uid != UNSET or operation.gid != UNSET
        is_told_again = operation.dated_s > 0 or operation.object != OWN or step.is_again
        is_again = not place.number and is_told_again
        self._set_file(
            step, place, operation.hides, (KNOWN if said else 0) | Flag.PUT_AGAIN * is_again,
            size=operation.size, mode=operation.mode, uid=operation.uid, gid=operation.gid,
            mtime_ns=operation.mtime_ns, xattrs=operation.xattrs,
        )  # fmt: skip

    def _is_hidden_by(self, current: Entry | None, operation: Put) -> bool:
        """Return whether the current file is, or hides, this plain object, not just an earlier one of equal bytes."""
        is_earlier = current is not None and lies_elsewhere(current) and is_put_since(operation.dated_s, current.stamp)
        return current is not None and current.etag == operation.hides and not is_earlier

    def _is_told_late(self, step: Step, operation: Put) -> bool:
        """Return whether the plain object that is put at its own key is gone.

        A change made here knew that when it was made, but not what other nodes' commits have said since; therefore its
        own commit is applied like theirs."""
        return self._is_gone(step, operation.hides, operation.dated_s)

    def _replace_version(self, step: Step, operation: Put) -> None:
        """Give a file other bytes, if it still is the version that the operation replaces."""
        current, before = step.current, Place(self._numbers[operation.replaces], 0, "")
        if current is None or current.is_local:
            return
        if not (self.is_at(current, before, operation.path) or self._is_copy(current, self._ref(operation.replaces))):
            return
        place = self._place(operation.path, operation.object, operation.offset, operation.size, current.etag)
        self._set_file(
            step, place, current.etag, KNOWN,
            size=operation.size, mode=operation.mode, uid=operation.uid, gid=operation.gid,
            mtime_ns=operation.mtime_ns, xattrs=operation.xattrs, stamp=current.stamp,
        )  # fmt: skip

    def _is_copy(self, current: Entry, source: ObjectRef) -> bool:
        """Return whether the file's bytes were copied from ``source``; the operation's writer had not seen that."""
        row = self._tree.objects.get(current.place) if current.place and not current.offset else None
        return row is not None and is_copy(row.key, source)

    def _symlink(self, step: Step, operation: Symlink) -> None:
        target = operation.target.encode()
        self._set_file(
            step, Place(0, 0, operation.hides), operation.hides, KNOWN | Flag.SYMLINK,
            size=len(target), mode=0o777, uid=operation.uid, gid=operation.gid,
            mtime_ns=operation.mtime_ns, xattrs=operation.xattrs, target=target,
        )  # fmt: skip

    def _set_file(
        self, step: Step, place: Place, hides: str, flags: int, *, size: int, mode: int, uid: int, gid: int,
        mtime_ns: int, xattrs: dict[str, bytes], target: bytes = b"", stamp: int | None = None,
    ) -> None:  # fmt: skip
        """Set the file of a name, unless something newer is known or covers it; ``stamp`` defaults to the record's."""
        current = step.current
        if self.is_older(step, hides):
            if stamp is None:
                self._note_lost(step, place, hides)
            return
        if current is not None and self._is_covered(step, current):
            return
        flags |= Flag.XATTRS if xattrs else 0
        if stamp is None:  # else it still hides what was removed: only this version may come into sight
            self._note_won(step, place, hides, is_again=bool(flags & Flag.PUT_AGAIN))
        entry = Entry(
            0, 0, step.name, 0, flags, mode, uid, gid, size, mtime_ns, self._time, place.etag,
            self._stamp if stamp is None else stamp, place.number, place.offset,
        )  # fmt: skip
        step.is_outdated = not self._own and current is not None and is_perhaps_replaced(entry, current)
        step.become(entry, Effect.SET, xattrs, target)

    def _remove(self, step: Step, operation: Remove) -> None:
        """Apply the removal of a file."""
        current, before = step.current, step.tombstone
        if self._is_removing(step, operation) and current is not None:
            self._uncover(step, before, current)
            step.drop()

    def _is_removing(self, step: Step, operation: Remove) -> bool:
        """Return whether the file goes, if there is one, and update the tombstone.

        What the removal names is gone in any case."""
        current, hides, floor = step.current, operation.hides, 0
        if operation.by_date or not hides:
            floor = self._stamp
        removes = True
        if current is not None and self._is_other(current, operation):
            removes = self._outdated.get(operation.path) == current.etag
        elif current is not None and lies_elsewhere(current) and not is_removing(self._tree, operation, current):
            is_older = current.stamp < self._stamp and is_replaced(current.stamp, operation.dated_s)
            removes = is_older and current.etag != hides
        elif current is not None:
            removes = current.stamp <= self._stamp and not self._is_unknown(current, operation.path, hides)
        if removes and current is not None and not current.flags & Flag.LOCAL and current.stamp > 0:
            if lies_elsewhere(current):
                self._bury_replaced(step, current)
            elif floor and current.etag and current.etag != hides:
                self._bury(step, ended=current.etag, at=self._stamp)
            else:
                self._bury(step, told=(current.etag, current.stamp))
        if removes:
            self._end_unlisted(step, hides, is_replaced=bool(floor))
        self._bury(step, floor, floor=floor, etag=hides, at=self._stamp, dated_s=operation.dated_s)
        return removes

    def _applies(self, step: Step, place: Place) -> bool:
        """Return whether the name is still the version at ``place``, or may be.

        If no file is known, a plain object at its own key may still appear with a listing."""
        current, tombstone, path = step.current, step.tombstone or Tombstone(0), step.operation.path
        is_told = current is not None and current.is_plain and current.stamp > 0
        is_gone = tombstone.when_ended(place.etag, is_told=is_told) > 0
        if current is not None:
            return self.is_at(current, place, path) or (not is_gone and self._may_follow(step, current, place))
        unknown = not place.number and tombstone.newest < self._stamp and not is_gone
        if unknown and not self._own:  # the last listing did not show it
            step.relists = True
        return unknown

    def _may_follow(self, step: Step, current: Entry, place: Place) -> bool:
        """Return whether the plain object that the operation names may be newer than the one known here.

        If that one was only listed, a new listing is made to show which it is. If a commit named or changed it, the
        store was asked."""
        if self._own or place.number or current.place or current.flags & NO_OBJECT:
            return False
        if current.stamp or current.flags & Flag.ATTRIBUTED:
            return current.stamp < self._stamp and self._outdated.get(step.operation.path) == current.etag
        if current.ctime_ns >= self._time + NS:
            return False
        step.relists = True
        return True

    def _is_known_before(self, current: Entry) -> bool:
        """Return whether an earlier commit named the plain object that is known, or changed its attributes."""
        since = current.stamp or (current.ctime_ns if current.flags & Flag.ATTRIBUTED else 0)
        return current.is_plain and 0 < since < self._stamp

    def _is_replaced(self, current: Entry, before: Place) -> bool:
        """Return whether the plain object that a commit named was replaced at its key by the one that is relocated.

        No commit has to name that one; the writer of the relocation had seen it."""
        is_told = current.is_plain and 0 < current.stamp < self._stamp
        return is_told and not before.number and current.etag != before.etag

    def _set_attributes(self, step: Step, operation: SetAttr) -> None:
        """Set the attributes of one version, whose stamp stays.

        So a writer that replaces the version without knowing of the attributes wins everywhere."""
        place = self._place(operation.path, operation.object, operation.offset, operation.size, operation.hides)
        current = step.current
        if not self._applies(step, place):
            return
        if current is None or not self.is_at(current, place, operation.path):
            if current is not None and current.stamp:  # no commit names the new one; a listing would not show this
                step.tombstone = with_unlisted(step.tombstone, current.etag, current.stamp)
            self._set_file(
                step, place, current.etag if current else operation.hides, KNOWN | Flag.ATTRIBUTED,
                size=operation.size, mode=operation.mode, uid=operation.uid, gid=operation.gid,
                mtime_ns=operation.mtime_ns, xattrs=operation.xattrs, stamp=0,
            )  # fmt: skip
            return
        if current.size != operation.size or (self._stamp < PENDING and self._is_attributed_later(current)):
            return
        self._note_date(step, current)
        flags = (current.flags & ~Flag.XATTRS) | KNOWN | Flag.ATTRIBUTED | (Flag.XATTRS if operation.xattrs else 0)
        entry = msgspec.structs.replace(
            current, flags=flags, mode=operation.mode, uid=operation.uid, gid=operation.gid,
            mtime_ns=operation.mtime_ns, ctime_ns=self._time,
        )  # fmt: skip
        is_said = bool((flags | current.flags) & Flag.XATTRS)
        step.become(entry, Effect.UPDATED, operation.xattrs if is_said else None)

    def _note_date(self, step: Step, current: Entry) -> None:
        """Keep in the tombstone how the store dates an object that was removed before, and is there again.

        The row keeps the time of the attributes instead. A removal of the object has the date."""
        tombstone, etag = step.tombstone, current.etag
        is_listed = current.is_plain and not current.stamp and current.is_dated_by_store
        if is_listed and tombstone is not None and (tombstone.when_gone(etag) or tombstone.when_dated(etag)):
            step.tombstone = with_put(tombstone, etag, current.ctime_ns // NS)

    def _is_attributed_later(self, current: Entry) -> bool:
        return current.stamp >= PENDING or bool(current.flags & Flag.ATTRIBUTED and current.ctime_ns > self._time)

    def _relocate(self, step: Step, operation: Relocate) -> None:
        before = self._place(
            operation.path, operation.from_object, operation.from_offset, operation.size, operation.from_etag
        )
        after = self._place(operation.path, operation.object, operation.offset, operation.size, operation.hides)
        current = step.current
        relocated_flag = 0 if before.number else Flag.RELOCATED
        is_replaced = current is not None and self._is_replaced(current, before)
        if not is_replaced and not self._applies(step, before):
            if not before.number:
                self._note_not_moved(step, before.etag, since=self._stamp)
            elif not after.number:
                self._note_not_moved(step, after.etag, since=0)
            return
        if current is not None and current.flags & Flag.OVERRIDING and current.is_plain and not current.stamp:
            step.is_outdated = True  # relocated, it is older than the file that it covers: a listing will not show it
            return
        if current is None or not self.is_at(current, before, operation.path):
            self._set_file(
                step, after, current.etag if current else operation.hides, KNOWN | relocated_flag,
                size=operation.size, mode=operation.mode, uid=operation.uid, gid=operation.gid,
                mtime_ns=operation.mtime_ns, xattrs={},
                stamp=current.stamp if current is not None and is_replaced else RELOCATED,
            )  # fmt: skip
            return
        if current.size != operation.size:
            return
        relocated = msgspec.structs.replace(
            current, place=after.number, offset=after.offset, etag=after.etag, stamp=current.stamp or RELOCATED,
            flags=current.flags | relocated_flag,
        )  # fmt: skip
        if not current.flags & Flag.ATTRIBUTES_KNOWN:
            relocated = msgspec.structs.replace(
                relocated, flags=relocated.flags | KNOWN, mode=operation.mode, uid=operation.uid, gid=operation.gid,
                mtime_ns=operation.mtime_ns,
            )  # fmt: skip
        ref = self._ref(operation.from_object) if before.number else ObjectRef(operation.path, before.etag)
        step.become(relocated, Effect.RELOCATED)
        step.relocated = ref.key, ref.etag, operation.from_offset
