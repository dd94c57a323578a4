"""Tombstones: what commits removed at a name, so that objects still there, or named later, stay hidden.

What always holds (*in any order*): a tombstone says the same whatever the order in which `bury` added its parts, as
long as they are no more than `GONE_MAX`, and `TOLD_MAX` of ``told``. One part depends on the order: the date of a put
(``put_s``) keeps out only earlier namings of its ETag that are added after it; the caller removes those from before.

A row that cannot be decoded is left out and counted (`Database.note_damaged`). Trio thread only; a crash leaves the
rows of whole batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import PENDING
from lakefs_fuse.meta.schema import NUMBER

NS = 1_000_000_000
SAME_VERSION_NS = 2 * NS
"""An object dated this long after its removal was put again, even with the same bytes (stores date to the
second)."""
BY_DATE = b"\1"
"""In a tombstone's row, before the ETag: ``floor`` is ``stamp``. No ETag begins with it."""
DATED = "\2"
"""In a text of a tombstone's row, between a date in seconds and its ETag in ``dated``. No ETag begins with it."""
UNLISTED = "\3"
"""As `DATED`, between the stamp and the ETag of ``unlisted``."""
AGAIN = "\4"
"""A text without meaning in rows that an earlier version of the program wrote. No ETag is this."""
ENDED = "\5"
"""As `DATED`, between the stamp and an ETag of ``ended``."""
PUT = "\6"
"""As `DATED`, for ``put``."""
TOLD = "\7"
"""As `DATED`, between the stamp and an ETag of ``told``."""
GONE_MAX = 8
"""ETags in each field of a tombstone. Only what may still be at the key, or what a late commit may name, matters."""
TOLD_MAX = 4
"""ETags in ``told``. A file elsewhere hides one at most, so the newest two decide; each of the others stands in for one
that a late commit names. Each takes 50 bytes of the row."""


class Tombstone(msgspec.Struct, frozen=True, gc=False):
    """What commits removed at a name, or replaced by a file elsewhere.

    It stays if the name is something else since. Stamps are as in `Entry`.

    ``stamp``: files elsewhere that are older count as removed. ``floor`` is the newest removal of a file elsewhere, if
    no commit has put a plain object since: every older plain object counts as removed. ``gone`` are the ETags of plain
    objects that commits named when they removed or replaced them, with the newest stamp of each, newest first: these
    versions count as removed whatever the times. ``ended`` are ETags as in ``gone``, but the commits that ended them
    did not name them, because their writers did not know them: a later commit that names one puts it there again.

    ``dated`` are ETags with the newest date, in seconds, of a version with those bytes that was removed; ``put`` are
    those of a version that was put there again after another was removed. ``told`` are ETags of plain objects that no
    longer count, with the newest stamp of a commit that named each: the same bytes that come back are another version.
    ``unlisted`` is the plain object that the newest commit named, and that a later listing did not show, or in whose
    place a later commit changed the attributes of another: its ETag, and the stamp of the commit that named it, or 0.
    """

    stamp: int
    floor: int = 0
    gone: tuple[tuple[str, int], ...] = ()
    dated: tuple[tuple[str, int], ...] = ()
    unlisted: tuple[str, int] = ("", 0)
    ended: tuple[tuple[str, int], ...] = ()
    put: tuple[tuple[str, int], ...] = ()
    told: tuple[tuple[str, int], ...] = ()

    @property
    def all_gone(self) -> tuple[tuple[str, int], ...]:
        """The pairs of ``gone`` and ``ended``."""
        return self.gone + self.ended

    @property
    def etag(self) -> str:
        """The ETag of the plain object that was removed last; empty if none is known."""
        return max(self.all_gone, key=lambda each: each[1], default=("", 0))[0]

    @property
    def newest(self) -> int:
        """The stamp of the last removal or replacement of a version."""
        return max([self.stamp, *(at for _, at in self.all_gone)])

    def when_gone(self, etag: str) -> int:
        """Return when the plain object with this ETag was removed or replaced; 0 if it was not."""
        return max(_find(self.gone, etag), _find(self.ended, etag))

    def when_named(self, etag: str) -> int:
        """Return when a commit that named the plain object removed or replaced it; 0 if none did."""
        return _find(self.gone, etag)

    def when_dated(self, etag: str) -> int:
        """Return the date, in seconds, of the newest version with this ETag removed or put again; 0 if unknown."""
        return max(_find(self.dated, etag), _find(self.put, etag))

    def when_told(self, etag: str) -> int:
        """Return when a commit last named a plain object with this ETag that no longer counts; 0 if unknown."""
        return _find(self.told, etag)

    def when_removed(self, etag: str) -> int:
        """Return the date, in seconds, of the newest version with this ETag that was removed; 0 if unknown."""
        return _find(self.dated, etag)

    def when_put(self, etag: str) -> int:
        """Return the date, in seconds, of the newest version with this ETag that was put there again; 0 if unknown."""
        return _find(self.put, etag)

    def is_put_again_since(self, etag: str, at: int, dated_s: int = 0) -> bool:
        """Return whether a commit names an earlier version with this ETag than the one that was put there again.

        The commit is of the time ``at``, and dates what it names ``dated_s``."""
        return dated_s < self.when_put(etag) and is_put_since(self.when_put(etag), at)

    def has_ended_unlisted(self, stamp: int, hides: str) -> bool:
        """Return whether a commit of this stamp, which names ``hides``, ended ``unlisted``.

        It did if it is later than the commit that named that object, or names the object itself."""
        etag, told = self.unlisted
        is_named = etag == hides and not self.is_put_again_since(etag, stamp)
        return bool(told) and (told < stamp or is_named)

    def when_ended(self, etag: str, *, is_told: bool = False) -> int:
        """Return when the plain object with this ETag, which lies at the key, was removed; 0 if it counts.

        If a commit has named an object here since (``is_told``, or ``unlisted``), only a removal that named this one
        counts."""
        return self.when_named(etag) if is_told or self.unlisted[1] else self.when_gone(etag)

    def hides(self, etag: str, mtime_ns: int, *, by_date: bool = True, is_told: bool = False) -> bool:
        """Return whether the plain object of this ETag and LastModified counts as removed; ``is_told`` as above.

        Without ``by_date``, only a removal of its ETag counts. An object that was put there again is like any other."""
        stamp = self.when_ended(etag, is_told=is_told)
        is_told = is_told or self.unlisted[1] > 0
        is_named = bool(stamp) and mtime_ns < stamp + SAME_VERSION_NS
        return is_named or (by_date and not is_told and mtime_ns + NS <= self.floor)

    @property
    def committed(self) -> Tombstone:
        """The tombstone without the removals of changes that are in no commit yet."""
        gone, ended, told = (
            tuple(each for each in of if each[1] < PENDING) for of in (self.gone, self.ended, self.told)
        )
        stamp, floor = (0 if at >= PENDING else at for at in (self.stamp, self.floor))
        return msgspec.structs.replace(self, stamp=stamp, floor=floor, gone=gone, ended=ended, told=told)

    def restamped(self, before: int, after: int) -> Tombstone:
        """Return the tombstone with ``after`` in place of ``before``, and of the stamps of earlier pending changes."""

        def replaced(stamp: int) -> int:
            return after if stamp == before or PENDING <= stamp < before else stamp

        gone, ended, told = (
            _newest_first((etag, replaced(at)) for etag, at in each) for each in (self.gone, self.ended, self.told)
        )
        return msgspec.structs.replace(
            self, stamp=replaced(self.stamp), floor=replaced(self.floor), gone=gone, ended=ended, told=told
        )  # fmt: skip


def is_replaced(stamp: int, dated_s: int) -> bool:
    """Return whether a plain object that the store dates ``dated_s`` counts in place of a file elsewhere.

    The file is of this stamp, and does not hide the object."""
    return bool(dated_s) and stamp < (dated_s + 1) * NS


def is_put_since(dated_s: int, stamp: int) -> bool:
    """Return whether a plain object was put where it is after a commit of this stamp.

    The store dates the object ``dated_s``; 0 if that is unknown."""
    return bool(dated_s) and dated_s * NS >= stamp + SAME_VERSION_NS


def bury(
    tombstone: Tombstone | None, stamp: int = 0, *,
    floor: int = 0, etag: str = "", ended: str = "", at: int = 0, dated_s: int = 0, put_s: int = 0,
    told: tuple[str, int] = ("", 0),
) -> Tombstone:  # fmt: skip
    """Return a tombstone with additions: a removal at ``stamp``, a ``floor``, and ETags with times or dates.

    ``etag`` is gone, and ``ended`` is ended, ``at`` a time. The store dates the version of ``etag`` that was removed
    ``dated_s``, or the one that was put there again ``put_s``. ``told`` is an ETag and a stamp for the field of that
    name."""
    known = tombstone or Tombstone(0)
    etag = "" if known.is_put_again_since(etag, at, dated_s) else etag
    return Tombstone(
        max(known.stamp, stamp, floor), max(known.floor, floor), _with(known.gone, etag, at),
        _with(known.dated, etag, dated_s), known.unlisted, _with(known.ended, ended, at),
        _with(known.put, etag, put_s), _with(known.told, *told, TOLD_MAX),
    )  # fmt: skip


def beside_file(tombstone: Tombstone, stamp: int, hides: str) -> Tombstone | None:
    """Return what remains of a tombstone beside a file elsewhere of this stamp; None if nothing does.

    The file hides the plain object ``hides``."""
    if not (tombstone.gone or tombstone.ended or tombstone.dated or tombstone.put or tombstone.told):
        return None
    rest = without(tombstone, hides) if tombstone.when_gone(hides) <= stamp else tombstone
    rest = msgspec.structs.replace(rest, told=tuple(each for each in rest.told if each[1] > stamp))
    return rest if rest.all_gone or rest.dated or rest.put or rest.told else None


def without(tombstone: Tombstone, etag: str) -> Tombstone:
    """Return a tombstone without ``etag`` as gone."""
    gone, ended = (tuple(each for each in pairs if each[0] != etag) for pairs in (tombstone.gone, tombstone.ended))
    return msgspec.structs.replace(tombstone, gone=gone, ended=ended)


def put_back(tombstone: Tombstone, etag: str, *, undated: bool) -> Tombstone:
    """Return the tombstone of a name that now is the plain object with this ETag.

    ``undated``: no date says whether an earlier removal concerns that object."""
    ended = tuple(each for each in tombstone.ended if each[0] != etag)
    dated, put = (
        tuple(each for each in pairs if not undated or each[0] != etag) for pairs in (tombstone.dated, tombstone.put)
    )
    return msgspec.structs.replace(with_unlisted(tombstone), floor=0, ended=ended, dated=dated, put=put)


def with_put(tombstone: Tombstone, etag: str, put_s: int) -> Tombstone:
    """Return a tombstone with the date of a version with this ETag that was put there again."""
    return msgspec.structs.replace(tombstone, put=_with(tombstone.put, etag, put_s))


def with_unlisted(tombstone: Tombstone | None, etag: str = "", stamp: int = 0) -> Tombstone:
    """Return a tombstone with this plain object as ``unlisted``; without an ETag, with none."""
    return msgspec.structs.replace(tombstone or Tombstone(0), unlisted=(etag, stamp))


def _find(pairs: tuple[tuple[str, int], ...], etag: str) -> int:
    return next((at for known, at in pairs if known == etag), 0) if etag else 0


def _with(
    pairs: tuple[tuple[str, int], ...], etag: str, at: int, pairs_max: int = GONE_MAX
) -> tuple[tuple[str, int], ...]:
    if not etag or _find(pairs, etag) >= at:
        return pairs
    return _newest_first([(etag, at), *(each for each in pairs if each[0] != etag)], pairs_max)


def _newest_first(pairs: Iterable[tuple[str, int]], pairs_max: int = GONE_MAX) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(pairs, key=lambda each: (-each[1], each[0]))[:pairs_max])


def pack_tombstone(tombstone: Tombstone) -> bytes:
    """Return the row of a tombstone: ``stamp`` and the ETag that went with it, then everything else."""
    stamp, floor, gone = tombstone.stamp, tombstone.floor, list(tombstone.gone)
    others_of = {DATED: tombstone.dated, ENDED: tombstone.ended, PUT: tombstone.put, TOLD: tombstone.told}
    first = gone.pop(0)[0] if gone and gone[0][1] == stamp else ""
    gone += [(mark + etag, at) for mark, pairs in others_of.items() for etag, at in pairs]
    if tombstone.unlisted[0]:
        gone.append((UNLISTED + tombstone.unlisted[0], tombstone.unlisted[1]))
    is_by_date = floor == stamp and bool(first or gone)
    others = [("", floor)] if floor != stamp and (floor or not (first or gone)) else []
    row = [first, *(f"{at:016x}{etag}" for etag, at in [*others, *gone])]
    return NUMBER.pack(stamp) + BY_DATE * is_by_date + "\0".join(row).encode()


def unpack_tombstone(raw: bytes) -> Tombstone:
    """Return the tombstone of a row; raises ValueError if it is not one."""
    if len(raw) < NUMBER.size:
        raise ValueError(f"a tombstone of {len(raw)} bytes")
    (stamp,) = NUMBER.unpack_from(raw)
    is_by_date = raw[8:9] == BY_DATE
    first, *others = raw[8 + is_by_date :].decode().split("\0")
    if not others:  # most rows: a file elsewhere was removed, or one object
        return Tombstone(stamp, stamp if is_by_date or not first else 0, ((first, stamp),) if first else ())
    gone = [(each[16:], int(each[:16], 16)) for each in others]
    floor = stamp if is_by_date or not (first or gone) else max((at for etag, at in gone if not etag), default=0)
    marked: dict[str, list[tuple[str, int]]] = {mark: [] for mark in (DATED, UNLISTED, AGAIN, ENDED, PUT, TOLD)}
    named = [(first, stamp)] if first else []
    for etag, at in gone:
        if etag[:1] in marked:
            marked[etag[0]].append((etag[1:], at))
        elif etag:
            named.append((etag, at))
    dated, ended, put, told = (_newest_first(marked[mark]) for mark in (DATED, ENDED, PUT, TOLD))
    unlisted = marked[UNLISTED][0] if marked[UNLISTED] else ("", 0)
    return Tombstone(stamp, floor, _newest_first(named), dated, unlisted, ended, put, told)


class Tombstones:
    """Tombstones by path, because a removed directory has no inode. Paths of directories end in a slash."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def get(self, path: bytes) -> Tombstone | None:
        key = schema.TOMBSTONE + path
        return self._read(key, self._db.get(key))

    def get_many(self, paths: Iterable[bytes]) -> list[Tombstone | None]:
        """Return the tombstone of each path; None for a path without one."""
        keys = [schema.TOMBSTONE + path for path in paths]
        return [self._read(key, raw) for key, raw in zip(keys, self._db.get_many(keys), strict=True)]

    def _read(self, key: bytes, raw: bytes | None) -> Tombstone | None:
        try:
            return None if raw is None else unpack_tombstone(raw)
        except ValueError as error:
            self._db.note_damaged(key, error)
            return None

    def write(self, batch: Batch, tombstones: Mapping[bytes, Tombstone | None]) -> None:
        """Put tombstones at paths, and delete those of paths with None."""
        for path, tombstone in tombstones.items():
            batch.rows[schema.TOMBSTONE + path] = None if tombstone is None else pack_tombstone(tombstone)

    def below(self, prefix: bytes) -> Iterator[tuple[bytes, Tombstone]]:
        """Yield paths that begin with ``prefix`` (empty, or ending in a slash), in order, with their tombstones."""
        end = schema.TOMBSTONE + prefix[:-1] + b"0" if prefix else schema.end_of(schema.TOMBSTONE)
        for key, raw in self._db.scan(schema.TOMBSTONE + prefix, end):
            tombstone = self._read(key, raw)
            if tombstone is not None:
                yield key[1:], tombstone
