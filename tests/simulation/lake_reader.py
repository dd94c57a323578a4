"""A reader of a lake that shares nothing with the program but `docs/format.md`, from which it is written.

`read_lake` takes what lies in the store and answers the tree of names, with bytes and attributes, that every mount has
to show. Where the program and this module disagree, one of them or the page is wrong.

What always holds:

* *independent*: it imports nothing of `lakefs_fuse`;
* *parsed once*: a `Reader` parses an archive or an index once for its key and ETag, and never changes the result;
* *whole*: a commit is refused or applied, never in part.
"""

from __future__ import annotations

import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash
from msgspec import MsgspecError, json, msgpack
from rocksdict import Options, Rdict

NS = 1_000_000_000
COMMIT_AHEAD_MAX_S = 60
"""How far ahead of the reader's clock a commit may be (docs/format.md, "The name of a commit")."""
COMMITS_BEFORE_NEWEST_S = 120
"""How far before the newest commit of an index there may be commits that it lacks ("The index")."""
PUT_AGAIN_AFTER_S = 2
"""An object with a removed ETag and a date this long after the removal is a new one ("Plain objects and commits")."""
ANY_OBJECT = -2
"""Of a put that replaces whatever has the name ("The change record")."""
UNSET = 0xFFFFFFFF
"""A mode, uid or gid that is not set ("The change record")."""

RESERVED, COMMITS, OBJECTS = ".lakefs", ".lakefs/commits/", ".lakefs/objects/"
INDEX, SNAPSHOTS = ".lakefs/index/", ".lakefs/snapshots/"
PLACEHOLDER = ".lakefs-directory"
FEATURES = frozenset({"commit-format-2", "index-format-2"})

_COMMIT_NAME = re.compile(r"\.lakefs/commits/([0-9a-f]{16})-([0-9a-f]{8})\.zip")
_COMMIT_TIME_MAX = 0x4000000000000000
_COMMENT = re.compile(rb"lakefs1 (0|[1-9][0-9]*) (0|[1-9][0-9]*) ([0-9a-f]{8})")
_COMMENT_BYTES_MAX = 56
_MTIME = re.compile(r"(-?)([0-9]+)\.([0-9]{9})")
_MANIFEST = re.compile(r"\.lakefs/index/([0-9a-f]{16})/manifest")
_RECORD_BYTES_MAX, _OPERATIONS_MAX = 1 << 30, 20_000_000
_PATH_BYTES_MAX, _NAME_BYTES_MAX, _TARGET_BYTES_MAX = 1024, 255, 4095
_ETAG_CHARS_MAX, _XATTRS_BYTES_MAX, _XATTR_NAME_BYTES_MAX = 255, 64 << 10, 255
_SIZE_MAX, _MTIME_MAX, _MODE_MAX = 1 << 47, 1 << 62, 0o7777

Kind = Literal["file", "directory", "symlink"]


@dataclass(frozen=True)
class StoredObject:
    """An object in the store: its bytes, and what HEAD answers."""

    data: bytes
    etag: str
    mtime_ns: int
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Name:
    """One entry of the tree.

    ``data`` is a file's bytes or a link's target, None for a directory and for a file whose bytes cannot be read;
    ``problem`` then says why. The bytes are ``size`` bytes from ``offset`` of the object ``key`` with ``etag``; without
    bytes in the store ``key`` is empty. Attributes are those of the commit, else of the object's metadata, else None.
    """

    kind: Kind
    data: bytes | None = None
    key: str = ""
    etag: str = ""
    offset: int = 0
    size: int = 0
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    problem: str = ""


@dataclass
class Lake:
    """The tree of a lake, and what lies in the store beside it.

    ``names`` has paths without a slash at either end, and no root. ``hidden_files`` are files that a directory of the
    same path hides; they come back when it goes. ``named_objects`` are the key and ETag of every object that a name of
    either needs. ``unreferenced`` are keys below `.lakefs/objects/` that no name and no snapshot needs. ``leftovers``
    are keys of plain objects that a commit hides and no name needs; ``unshown`` those that cannot be paths, with the
    reason. ``refused`` are commits with the reason, ``postponed`` those too far ahead of the clock, and
    ``refused_indexes`` manifests with the reason.
    """

    names: dict[str, Name] = field(default_factory=dict)
    hidden_files: dict[str, Name] = field(default_factory=dict)
    named_objects: set[tuple[str, str]] = field(default_factory=set)
    unreferenced: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    unshown: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    postponed: list[str] = field(default_factory=list)
    refused_indexes: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    """The object is not what the page says; the text says in which way."""


class _Attributes(NamedTuple):
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    xattrs: Mapping[str, bytes] = {}


class _Place(NamedTuple):
    """Where bytes begin. The ETag is empty for archives, because a record does not have its own."""

    key: str
    etag: str
    offset: int


class _Operation(NamedTuple):
    """An operation with its indexes resolved; ``place`` is None where it has no bytes."""

    kind: str
    path: str
    place: _Place | None = None
    size: int = 0
    source: _Place | None = None
    target: bytes = b""
    is_directory: bool = False
    hides: str = ""
    attributes: _Attributes = _Attributes()
    is_own: bool = False
    """A put that names the plain object at the key of the path."""
    is_by_date: bool = False
    """A removal of a file whose bytes are elsewhere: older plain objects go, too."""
    dated: int = 0
    """The store's date, in seconds, of the plain object with the ETag ``hides``; 0 where it is unknown."""
    is_again: bool = False
    """The removal before this put says that the plain object is there again."""


class _Order(NamedTuple):
    """The age of a commit: of two with the same time, the name that sorts last is newer."""

    time: int
    commit: str


class _File(NamedTuple):
    """What the newest commit says of a path that was not removed."""

    order: _Order
    place: _Place | None
    size: int
    target: bytes | None
    hides: str
    attributes: _Attributes
    is_put_again: bool = False
    """An earlier commit that names its ETag means another version."""
    is_dated_again: bool = False
    """The same, and dates tell which commits do."""
    is_relocated: bool = False
    """It has the bytes of the plain object that it hides."""

    def own_etag(self, path: str) -> str:
        """Of the plain object at the key of the path that it is, or hides."""
        return self.place.etag if self.place is not None and self.is_at_own_key(path) else self.hides

    def is_at_own_key(self, path: str) -> bool:
        """The file is the plain object at the key of its path, whatever version is there."""
        return self.place is not None and self.place.key == path and self.place.offset == 0


def _is_copied_from(known: _File, source: _Place) -> bool:
    """A file's bytes are a copy of this object's, as the key of the copy says."""
    mark = xxhash.xxh3_64_hexdigest(f"{source.key}\0{source.etag}".encode())
    key, _, offset = known.place or source
    return key.startswith(OBJECTS) and key.endswith("-" + mark) and not offset


def _is_put_since(dated: int, order: _Order) -> bool:
    """A plain object that the store dates so, in seconds (0: unknown), was put there after a commit."""
    return dated > 0 and dated * NS >= order.time + PUT_AGAIN_AFTER_S * NS


class _Directory(NamedTuple):
    order: _Order
    exists: bool
    attributes: _Attributes


_BEFORE_ALL = _Order(0, "")
_NO_ATTRIBUTES = _Attributes()


@dataclass(frozen=True)
class _Grave:
    """What was removed at a path: the newest removal of a file elsewhere, and what was replaced since; the same where
    no plain object was told of since; when each ETag was named; when what ended each had not named it; and the newest
    date of a version with an ETag that was removed, and of one that was put again."""

    elsewhere: _Order = _BEFORE_ALL
    floor: _Order = _BEFORE_ALL
    gone: Mapping[str, _Order] = field(default_factory=dict)
    ended: Mapping[str, _Order] = field(default_factory=dict)
    dated: Mapping[str, int] = field(default_factory=dict)
    put: Mapping[str, int] = field(default_factory=dict)

    @property
    def newest(self) -> _Order:
        """When a version went last."""
        return max([self.elsewhere, *self.gone.values(), *self.ended.values()])

    def when_gone(self, etag: str) -> _Order:
        return max(self.gone.get(etag, _BEFORE_ALL), self.ended.get(etag, _BEFORE_ALL))

    def when_dated(self, etag: str) -> int:
        return max(self.dated.get(etag, 0), self.put.get(etag, 0))

    def bury(
        self, elsewhere: _Order, floor: _Order = _BEFORE_ALL, etag: str = "", at: _Order = _BEFORE_ALL, dated: int = 0
    ) -> _Grave:
        gone = dict(self.gone)
        if etag:
            gone[etag] = max(gone.get(etag, _BEFORE_ALL), at)
        dates = {**self.dated, etag: dated} if etag and dated > self.dated.get(etag, 0) else self.dated
        newest = max(self.elsewhere, elsewhere, floor)
        return _Grave(newest, max(self.floor, floor), gone, self.ended, dates, self.put)

    def end(self, etag: str, at: _Order) -> _Grave:
        """A version of which commits told went, and what ended it did not name it."""
        return replace(self, ended={**self.ended, etag: max(self.ended.get(etag, _BEFORE_ALL), at)}) if etag else self

    def date(self, etag: str, put: int) -> _Grave:
        return self if put <= self.put.get(etag, 0) else replace(self, put={**self.put, etag: put})

    def undated(self, etag: str) -> _Grave:
        dated, put = ({known: at for known, at in all_.items() if known != etag} for all_ in (self.dated, self.put))
        return replace(self, dated=dated, put=put)

    def without(self, etag: str) -> _Grave:
        return replace(self.unended(etag), gone={known: at for known, at in self.gone.items() if known != etag})

    def unended(self, etag: str) -> _Grave:
        return replace(self, ended={known: at for known, at in self.ended.items() if known != etag})

    def without_floor(self) -> _Grave:
        """What lies at the key of the path is the file, whatever its date."""
        return replace(self, elsewhere=max(self.elsewhere, self.floor), floor=_BEFORE_ALL)

    def hides(self, etag: str, mtime_ns: int, *, is_told: bool = False) -> bool:
        """``is_told``: a commit has told since of an object at this key."""
        gone = self.gone.get(etag, _BEFORE_ALL) if is_told else self.when_gone(etag)
        if gone > _BEFORE_ALL and mtime_ns < gone.time + PUT_AGAIN_AFTER_S * NS:
            return True
        return not is_told and mtime_ns + NS <= self.floor.time


_NO_GRAVE = _Grave()


# -- archives


def _ensure(condition: bool, reason: str) -> None:
    if not condition:
        raise Refused(reason)


def _record_range(archive: bytes) -> tuple[int, bytes]:
    """Offset and bytes of the record, which the comment at the end of the archive locates."""
    for length in range(min(_COMMENT_BYTES_MAX, len(archive) - 22) + 1):
        end = len(archive) - length - 22
        if archive[end : end + 4] == b"PK\x05\x06" and archive[end + 20 : end + 22] == struct.pack("<H", length):
            found = _COMMENT.fullmatch(archive, end + 22)
            if found is not None:
                break
    else:
        raise Refused("no comment that locates the record")
    offset, size, crc = int(found[1]), int(found[2]), int(found[3], 16)
    _ensure(size <= _RECORD_BYTES_MAX and offset + size <= end, "the record is not inside the object")
    raw = archive[offset : offset + size]
    _ensure(zlib.crc32(raw) == crc, "the CRC-32 of the record is another")
    return offset, raw


def _member_sums(archive: bytes, record_offset: int) -> dict[int, tuple[int, int]]:
    """Size and CRC-32 of each member, by the offset of its bytes, from the local headers, which have no gaps."""
    sums: dict[int, tuple[int, int]] = {}
    at = 0
    while at < record_offset and archive[at : at + 4] == b"PK\x03\x04":
        crc, size, _, name, extra = struct.unpack_from("<IIIHH", archive, at + 14)
        start = at + 30 + name + extra
        if size == 0xFFFFFFFF:
            field_id, _, size = struct.unpack_from("<HHQ", archive, at + 30 + name)
            if field_id != 1:
                break
        sums[start] = size, crc
        at = start + size
    return sums


def _is_component(name: str) -> bool:
    return name not in ("", ".", "..") and "\0" not in name and len(name.encode()) <= _NAME_BYTES_MAX


def _check_key(key: str) -> None:
    _ensure(type(key) is str and len(key.encode()) <= _PATH_BYTES_MAX, "a path is not a text, or too long")
    _ensure(all(map(_is_component, key.split("/"))), f"{key!r} is not a path")


def _check_path(path: str) -> None:
    _check_key(path)
    _ensure(path.split("/", 1)[0] != RESERVED, f"{path!r} is reserved")


def _check_etag(etag: str) -> None:
    _ensure(type(etag) is str and len(etag) <= _ETAG_CHARS_MAX, "an ETag is not a text, or too long")
    _ensure(all(" " <= char <= "~" for char in etag), "an ETag is not printable ASCII")


def _integer(low: int, high: int, unset: int | None = None) -> Callable[[object], None]:
    def check(value: object) -> None:
        _ensure(
            type(value) is int and (low <= value <= high or value == unset), f"{value!r} is not a number within limits"
        )

    return check


def _check_xattrs(xattrs: dict[str, bytes]) -> None:
    _ensure(type(xattrs) is dict, "extended attributes are no map")
    total = 0
    for name, value in xattrs.items():
        _ensure(type(name) is str and type(value) is bytes, "an extended attribute is not a text and bytes")
        is_allowed = name.startswith("user.") and not name.startswith("user.lakefs.") and "\0" not in name
        _ensure(is_allowed, f"{name!r} is not allowed")
        _ensure(len(name.encode()) <= _XATTR_NAME_BYTES_MAX, "the name of an extended attribute is too long")
        total += len(name.encode()) + len(value)
    _ensure(total <= _XATTRS_BYTES_MAX, "extended attributes are too large")


def _check_target(target: str) -> None:
    _ensure(type(target) is str and len(target.encode()) <= _TARGET_BYTES_MAX, "a target is not a text, or too long")
    _ensure(target != "" and "\0" not in target, "a target is empty, or has a NUL")


def _check_flag(value: object) -> None:
    _ensure(type(value) is bool, f"{value!r} is not a bool")


_FIELDS = {
    "put": ("path object offset size mode uid gid mtime", "hides xattrs replaces dated"),
    "mkdir": ("path mode uid gid mtime", "xattrs"),
    "symlink": ("path target uid gid mtime", "hides xattrs"),
    "remove": ("path", "directory hides by_date dated"),
    "setattr": ("path object offset size hides mode uid gid mtime", "xattrs"),
    "relocate": ("path from_object from_offset from_etag object offset size mode uid gid mtime", "hides"),
}
"""Fields of each kind of operation: those that must be there, and those that may be left out at the end."""
_ABSENT: dict[str, Any] = {
    "hides": "", "xattrs": {}, "directory": False, "by_date": False, "replaces": ANY_OBJECT, "dated": 0
}  # fmt: skip
_CHECKS: dict[str, Callable[[Any], None]] = {
    "path": _check_path,
    "target": _check_target,
    "hides": _check_etag,
    "from_etag": _check_etag,
    "xattrs": _check_xattrs,
    "directory": _check_flag,
    "by_date": _check_flag,
    "mode": _integer(0, _MODE_MAX, UNSET),
    "uid": _integer(0, UNSET),
    "gid": _integer(0, UNSET),
    "mtime": _integer(-1 << 63, 1 << 64),
    "object": _integer(-1, 1 << 32),
    "from_object": _integer(-1, 1 << 32),
    "replaces": _integer(1, 1 << 32, ANY_OBJECT),
    "dated": _integer(0, 1 << 33),
    "offset": _integer(0, _SIZE_MAX),
    "from_offset": _integer(0, _SIZE_MAX),
    "size": _integer(0, _SIZE_MAX),
}


class _Archive:
    """A commit: its operations, and the bytes of its members as they are asked for. Raises `Refused`."""

    def __init__(self, key: str, data: bytes) -> None:
        self.key, self._data = key, data
        self._record_offset, raw = _record_range(data)
        self._members: dict[int, tuple[int, int]] | None = None
        self._read: dict[tuple[int, int], tuple[bytes | None, str]] = {}
        try:
            record = msgpack.decode(raw)
        except MsgspecError as error:
            raise Refused(f"the record is not msgpack: {error}") from error
        _ensure(type(record) is dict, "the record is not a map")
        _ensure(type(record.get("format")) is int and record["format"] in (1, 2), "a format that is not known")
        named = _COMMIT_NAME.fullmatch(key)
        _ensure(
            named is not None and (record.get("time"), record.get("writer")) == (int(named[1], 16), named[2]),
            "time and writer are not those of the name",
        )
        self.order = _Order(record["time"], key)
        self._objects = self._checked_objects(record.get("objects"))
        for move in _array(record.get("moves", []), "moves"):
            for path in _array(move, "a move"):
                _check_path(path)
        operations = _array(record.get("operations"), "operations")
        _ensure(len(operations) <= _OPERATIONS_MAX, "too many operations")
        parsed = [self._operation(_array(operation, "an operation")) for operation in operations]
        self.operations = list(_without_marks(parsed))

    def _checked_objects(self, objects: object) -> list[tuple[str, str, int]]:
        checked = [(self.key, "", self._record_offset)]
        for number, item in enumerate(_array(objects, "objects")):
            key, etag, size = _array(item, "an object", 3)[:3]
            if number == 0:
                _ensure((key, etag, size) == ("", "", 0), "the first object is not this archive")
                continue
            _check_key(key)
            _ensure(key.split("/")[0] != RESERVED or key.startswith((COMMITS, OBJECTS)), f"{key!r} is reserved")
            _check_etag(etag)
            _CHECKS["size"](size)
            checked.append((key, "" if key.startswith(COMMITS) else etag, size))
        return checked

    def _place(self, path: str, number: int, offset: int, etag: str, size: int) -> _Place:
        if number < 0:
            _ensure(offset == 0, f"{path!r}: a plain object begins at 0")
            return _Place(path, etag, 0)
        _ensure(number < len(self._objects), f"{path!r}: no object {number}")
        key, listed, whole = self._objects[number]
        _ensure(offset + size <= whole, f"{path!r}: the range ends beyond its object")
        return _Place(key, listed, offset)

    def _operation(self, values: list[Any]) -> _Operation:
        kind = values[0] if values else None
        _ensure(type(kind) is str and kind in _FIELDS, f"an operation of the kind {kind!r}")
        required, optional = (names.split() for names in _FIELDS[str(kind)])
        _ensure(len(values) > len(required), f"{kind}: a field is missing")
        fields = _ABSENT | dict(zip(required + optional, values[1:], strict=False))
        for name, value in fields.items():
            _CHECKS[name](value)
        if "mtime" in fields:
            fields["mtime"] = min(max(fields["mtime"], -_MTIME_MAX), _MTIME_MAX)
        path, hides, size = fields["path"], fields["hides"], fields.get("size", 0)
        place = source = None
        if "object" in fields:
            place = self._place(path, fields["object"], fields["offset"], hides, size)
        if kind == "relocate":
            source = self._place(path, fields["from_object"], fields["from_offset"], fields["from_etag"], size)
        if kind == "put" and fields["replaces"] != ANY_OBJECT:
            source = self._place(path, fields["replaces"], 0, "", 0)
        mode, uid, gid = (None if fields.get(name, UNSET) == UNSET else fields[name] for name in ("mode", "uid", "gid"))
        attributes = _Attributes(mode, uid, gid, fields.get("mtime"), fields["xattrs"])
        target = fields.get("target", "").encode()
        is_own = kind == "put" and fields["object"] < 0
        flags = fields["directory"], fields["by_date"]
        return _Operation(
            str(kind), path, place, size, source, target, flags[0], hides, attributes, is_own, flags[1],
            fields["dated"],
        )  # fmt: skip

    def read(self, offset: int, size: int) -> tuple[bytes | None, str]:
        """Bytes of a member, or None and why they cannot be read."""
        found = self._read.get((offset, size))
        if found is None:
            if self._members is None:
                self._members = _member_sums(self._data, self._record_offset)
            found = self._read[offset, size] = self._verify(offset, size)
        return found

    def _verify(self, offset: int, size: int) -> tuple[bytes | None, str]:
        assert self._members is not None
        member = self._members.get(offset)
        if member is None or member[0] != size:
            return None, f"no member of {size} bytes at {offset} of {self.key}"
        data = self._data[offset : offset + size]
        return (data, "") if zlib.crc32(data) == member[1] else (None, f"wrong CRC-32 at {offset} of {self.key}")


def _without_marks(operations: list[_Operation]) -> Iterator[_Operation]:
    """Operations, but for each removal that says of the next only that its plain object is there again."""
    is_again = False
    for operation, following in pairwise([*operations, None]):
        assert operation is not None
        is_mark = operation.kind == "remove" and not (operation.is_directory or operation.hides or operation.is_by_date)
        if is_mark and following is not None and following.is_own and following.path == operation.path:
            is_again = True
        else:
            yield operation._replace(is_again=is_again)
            is_again = False


def _array(value: object, what: str, length_min: int = 0) -> list[Any]:
    if type(value) is not list or len(value) < length_min:
        raise Refused(f"{what}: not an array of {length_min} or more")
    return value


# -- merging


class _State:
    """What commits say of each path, whatever the order in which they are applied."""

    def __init__(self, base: _State | None = None, plain: Mapping[str, StoredObject] | None = None) -> None:
        """``plain`` are objects by key, plain ones among them."""
        self.plain = plain or {}
        self.files: dict[str, _File] = dict(base.files) if base else {}
        self.graves: dict[str, _Grave] = dict(base.graves) if base else {}
        self.directories: dict[str, _Directory] = dict(base.directories) if base else {}
        self.changed: dict[str, dict[_Place, tuple[_Order, _Attributes]]] = {}
        """Attributes set later than the bytes: by path, and by the place of the version that they are of."""
        for path, versions in base.changed.items() if base else ():
            self.changed[path] = dict(versions)

    def apply(self, archive: _Archive) -> None:
        for operation in archive.operations:
            self._APPLY[operation.kind](self, archive.order, operation)

    def _is_there(self, path: str, etag: str, removed_ns: int) -> bool:
        """The plain object at a path has this ETag, and was not put there again after a removal."""
        there = self.plain.get(path)
        return there is not None and there.etag == etag and there.mtime_ns < removed_ns + PUT_AGAIN_AFTER_S * NS

    def _name_directory(self, order: _Order, operation: _Operation) -> None:
        known = self.directories.get(operation.path)
        if known is None or known.order <= order:
            made = operation.kind == "mkdir"
            self.directories[operation.path] = _Directory(order, made, operation.attributes if made else _Attributes())

    def _name_file(self, order: _Order, operation: _Operation) -> None:
        if operation.is_directory:
            self._name_directory(order, operation)
            return
        path, known = operation.path, self.files.get(operation.path)
        if operation.source is not None:  # of one version only, which keeps its time
            if known is not None and (known.place == operation.source or _is_copied_from(known, operation.source)):
                self.files[path] = known._replace(
                    place=operation.place, size=operation.size, attributes=operation.attributes
                )
            return
        if operation.kind == "remove":
            if self._removes(order, operation):
                self.files.pop(path, None)
                self._forget_attributes(path, order)
            return
        decide = self._is_own_put if operation.is_own else self._is_put
        is_dated = operation.is_own and operation.dated > 0 and not operation.is_again
        is_again = is_dated or operation.is_again or not operation.is_own
        if decide(order, operation):
            target = operation.target if operation.kind == "symlink" else None
            self.files[path] = _File(
                order,
                operation.place,
                operation.size,
                target,
                operation.hides,
                operation.attributes,
                is_again,
                is_dated,
            )
            self._forget_attributes(path, order)

    def _forget_attributes(self, path: str, order: _Order) -> None:
        versions = self.changed.get(path, {})
        for place in [place for place, (changed, _) in versions.items() if changed <= order]:
            del versions[place]

    def _grave(self, path: str) -> _Grave:
        return self.graves.get(path, _NO_GRAVE)

    def _bury_replaced(self, path: str, known: _File, etag: str = "") -> None:
        """A file elsewhere goes, and every plain object that was older, but for the one with ``etag``."""
        hidden = known.hides if known.hides != etag else ""
        self.graves[path] = self._grave(path).bury(_BEFORE_ALL, known.order, hidden, known.order)

    def _end_older(self, path: str, order: _Order) -> None:
        """A plain object that was removed had replaced what was elsewhere until then."""
        known = self.files.get(path)
        if known is not None and not known.is_at_own_key(path) and known.order < order:
            self._bury_replaced(path, known)
            del self.files[path]
        self.graves[path] = self._grave(path).bury(order)

    def _is_own_put(self, order: _Order, operation: _Operation) -> bool:
        """A record tells of a plain object at its own key. It is gone where another named it, whatever the times."""
        path, etag = operation.path, operation.hides
        known, grave = self.files.get(path), self._grave(path)
        is_elsewhere = known is not None and not known.is_at_own_key(path)
        is_hidden = is_elsewhere and known is not None and known.hides == etag
        hidden = known.order if is_hidden and known is not None else _BEFORE_ALL  # that, too, where it was relocated
        if is_hidden and not (operation.is_again or _is_put_since(operation.dated, hidden)):
            return False
        is_again = operation.is_again or operation.dated > 0
        named = max(hidden, grave.gone.get(etag, _BEFORE_ALL))
        is_version_gone = named != order and 0 < operation.dated <= grave.dated.get(etag, 0)
        gone = max(hidden, grave.when_gone(etag))  # by what named it, or else by what is later
        is_named = is_hidden or etag in grave.gone
        if gone > order or (is_named and (not is_again or is_version_gone)):
            if grave.floor > order:
                self.graves[path] = grave.end(etag, grave.floor)
            else:
                self._end_older(path, min(order, gone))
            return False
        if grave.floor > order:
            self.graves[path] = grave.end(etag, grave.floor)
            return False
        if grave.newest > order and not self._is_there(path, etag, grave.newest.time):
            return False
        if known is not None and known.order > order:
            if is_elsewhere:
                self.graves[path] = grave.end(etag, known.order)
            return False
        if known is not None and is_elsewhere:
            self._bury_replaced(path, known, etag)
        grave = self._grave(path).unended(etag)
        grave = grave.without(etag) if is_again else grave
        self.graves[path] = grave.without_floor().date(etag, operation.dated)
        return True

    def _names(self, order: _Order, operation: _Operation, known: _File) -> bool:
        """An operation names the plain object of which a later commit tells: that one's writer had not seen it. Where
        that was put again, the date says whether it is the same version."""
        dated = self._grave(operation.path).when_dated(operation.hides)
        is_it = not known.is_put_again
        if not is_it and operation.kind == "remove":
            is_it = 0 < dated <= operation.dated
        elif not is_it:
            is_it = known.is_dated_again and not _is_put_since(dated, order)
        is_later = known.is_at_own_key(operation.path) and known.order > order and is_it
        return is_later and bool(operation.hides) and known.own_etag(operation.path) == operation.hides

    def _is_put(self, order: _Order, operation: _Operation) -> bool:
        """A record puts a file elsewhere, or renames one back to its own key."""
        path, hides, place = operation.path, operation.hides, operation.place
        known, grave = self.files.get(path), self._grave(path)
        is_back = place is not None and place.key == path and not place.offset
        is_elsewhere = known is not None and not known.is_at_own_key(path)
        is_older = known is not None and known.order > order and not self._names(order, operation, known)
        is_ended = is_back and place is not None and grave.when_gone(place.etag) > order
        if is_older or is_ended or grave.elsewhere > order:
            if is_back and place is not None:
                later = known.order if is_elsewhere and known is not None else grave.floor
                if later > order:
                    self.graves[path] = grave.end(place.etag, later)
                return False
            if hides and not (is_elsewhere and known is not None and known.hides == hides):
                grave = grave.bury(_BEFORE_ALL, etag=hides, at=order)
            if not is_elsewhere:
                is_later = known is not None and known.order > order
                grave = grave.bury(order, _BEFORE_ALL if is_later else order)
                if known is not None and (
                    known.order < order or (not known.is_dated_again and self._names(order, operation, known))
                ):
                    grave = grave.end(known.own_etag(path), order)
                    del self.files[path]
            self.graves[path] = grave
            return False
        if is_back and place is not None:
            if is_elsewhere and known is not None:
                self._bury_replaced(path, known, place.etag)
            self.graves[path] = self._grave(path).without(place.etag).without_floor().undated(place.etag)
            return True
        if known is not None and is_elsewhere and known.hides not in ("", hides):
            grave = grave.bury(_BEFORE_ALL, etag=known.hides, at=order)
        elif known is not None and not is_elsewhere and known.own_etag(path) != hides:
            grave = grave.end(known.own_etag(path), order)
        grave = grave.without(hides) if grave.when_gone(hides) <= order else grave
        self.graves[path] = grave if grave.gone or grave.ended or grave.dated or grave.put else _NO_GRAVE
        return True

    def _removes(self, order: _Order, operation: _Operation) -> bool:
        path, hides = operation.path, operation.hides
        known = self.files.get(path)
        is_own = known is not None and known.is_at_own_key(path)
        removes, is_by_date = True, operation.is_by_date or not hides
        if known is not None and not is_own and not is_by_date:
            is_replaced = operation.dated > 0 and known.order.time < (operation.dated + 1) * NS
            removes = known.is_relocated if known.hides == hides else is_replaced
            removes = removes and known.order <= order
        elif known is not None and not self._names(order, operation, known):
            removes = known.order <= order
            is_version = is_own and not is_by_date and hides != known.own_etag(path)
            if removes and is_version and known.order < order:
                removes = not self._is_there(path, known.own_etag(path), order.time)
        if removes and known is not None:
            if not is_own:
                self._bury_replaced(path, known)
            elif is_by_date and known.own_etag(path) != hides:
                self.graves[path] = self._grave(path).end(known.own_etag(path), order)
            else:
                self.graves[path] = self._grave(path).bury(min(known.order, order))  # what it had replaced
        is_moot = False
        if known is not None and not removes:
            is_later = known.is_put_again and known.order > order and known.own_etag(path) == hides
            is_moot = is_later if is_own else known.order > order and hides in ("", known.hides)
        if not is_moot:
            is_later = is_own and known is not None and known.order > order
            floor = order if is_by_date and not is_later else _BEFORE_ALL
            self.graves[path] = self._grave(path).bury(floor, floor, hides, order, operation.dated)
        return removes

    def _set_attributes(self, order: _Order, operation: _Operation) -> None:
        assert operation.place is not None
        known = self.files.get(operation.path)
        versions = self.changed.setdefault(operation.path, {})
        newest = self._grave(operation.path).newest if known is None else known.order
        if newest <= order and versions.get(operation.place, (_BEFORE_ALL,))[0] <= order:
            versions[operation.place] = order, operation.attributes

    def _relocate(self, order: _Order, operation: _Operation) -> None:
        path, source, place = operation.path, operation.source, operation.place
        assert source is not None and place is not None
        known = self.files.get(path)
        grave = self._grave(path)
        is_unknown = known is None and grave.newest < order and grave.when_gone(source.etag) == _BEFORE_ALL
        is_replaced = known is not None and known.is_at_own_key(path) and known.place != source and known.order < order
        if source.key == path and (is_unknown or is_replaced):
            order = _BEFORE_ALL if known is None else known.order
            known = _File(order, source, operation.size, None, operation.hides, operation.attributes)
        if known is None or known.place != source:
            if source.key != path and place.key == path:
                self._note_copied(path, place.etag, order)
            return
        is_relocated = source.key == path or known.is_relocated
        self.files[path] = _File(
            known.order, place, operation.size, None, operation.hides, known.attributes, is_relocated=is_relocated
        )
        versions = self.changed.get(path, {})
        if source in versions:
            versions[place] = versions.pop(source)

    def _note_copied(self, path: str, etag: str, order: _Order) -> None:
        """An object at the own key is a copy of bytes that the file does not have any more."""
        known, grave = self.files.get(path), self._grave(path)
        ended = grave.floor
        if known is not None:
            ended = _BEFORE_ALL if known.is_at_own_key(path) or known.hides == etag else known.order
        if ended > _BEFORE_ALL:
            self.graves[path] = grave.bury(_BEFORE_ALL, etag=etag, at=max(order, ended))

    _APPLY: Mapping[str, Callable[[_State, _Order, _Operation], None]] = {
        "put": _name_file,
        "symlink": _name_file,
        "remove": _name_file,
        "mkdir": _name_directory,
        "setattr": _set_attributes,
        "relocate": _relocate,
    }

    def attributes(self, path: str, place: _Place, otherwise: _Attributes) -> _Attributes:
        """Those of the version of a file whose bytes are at a place."""
        changed = self.changed.get(path, {}).get(place)
        return otherwise if changed is None else changed[1]


def _plain_wins(file: _File | None, grave: _Grave, path: str, etag: str, mtime_ns: int) -> bool:
    """Whether the plain object at a path is its file, rather than what commits say of the path."""
    if file is None:
        return not grave.hides(etag, mtime_ns)
    if file.is_at_own_key(path):
        return etag == file.own_etag(path) or not grave.hides(etag, mtime_ns, is_told=True)
    return etag != file.hides and mtime_ns + NS > file.order.time and not grave.hides(etag, mtime_ns)


# -- indexes


class _Index:
    """The names of a lake at one moment, and which commits it contains. Raises `Refused`."""

    def __init__(self, key: str, manifest: dict[str, Any], files: Mapping[str, StoredObject]) -> None:
        self.state = _State()
        self.newest: int = manifest["newest"]
        _ensure(manifest.get("rows") == 2, "a layout of rows that is not known")
        with tempfile.TemporaryDirectory() as directory:
            rows = _sorted_rows(Path(directory, "base"), _stored_files(key, manifest["files"], files))
            for since, changed, removed in manifest.get("increments", ()):
                rows |= _sorted_rows(Path(directory, f"{since}"), _stored_files(key, changed, files))
                for data in _stored_files(key, removed, files):
                    for row in msgpack.decode(data):
                        rows.pop(row, None)
        self.applied = {(_big(row[1:9]), row[9:].decode()) for row in rows if row[:1] == b"A"}
        self._take_names(rows)
        for row, value in rows.items():
            if row[:1] == b"T":
                self._take_tombstone(row[1:].decode(), _big(value[:8]), value[8:].decode())

    def _take_tombstone(self, path: str, time: int, text: str) -> None:
        if path.endswith("/"):
            self.state.directories[path[:-1]] = _Directory(_Order(time, ""), False, _NO_ATTRIBUTES)
            return
        first, *others = text.removeprefix("\1").split("\0")
        dated = {each[17:]: int(each[:16], 16) for each in others if each[16:17] == "\2"}
        unlisted = {each[17:]: _Order(int(each[:16], 16), "") for each in others if each[16:17] == "\3"}
        ended = {each[17:]: _Order(int(each[:16], 16), "") for each in others if each[16:17] == "\5"}
        put = {each[17:]: int(each[:16], 16) for each in others if each[16:17] == "\6"}
        told = [int(each[:16], 16) for each in others if each[16:17] == "\7"]
        gone = {
            each[16:]: _Order(int(each[:16], 16), "") for each in others if each[16:17] not in tuple("\2\3\4\5\6\7")
        }
        floor = gone.pop("", _BEFORE_ALL)
        if text.startswith("\1") or not text:
            floor = _Order(time, "")
        if first:
            gone[first] = _Order(time, "")
        self.state.graves[path] = _Grave(_Order(max(time, *told, 0), ""), floor, gone, ended, dated, put)
        for etag, order in unlisted.items():
            own = _File(order, _Place(path, etag, 0), 0, None, etag, _NO_ATTRIBUTES)
            self.state.files.setdefault(path, own)

    def _take_names(self, rows: Mapping[bytes, bytes]) -> None:
        entries = {value[:8]: (row[1:9], value) for row, value in rows.items() if row[:1] == b"D"}
        paths: dict[bytes, str] = {struct.pack("<Q", 1): ""}

        def path_of(inode: bytes) -> str:
            if inode not in paths:
                directory, value = entries[inode]
                name = value[_ENTRY.size + value[_ENTRY.size - 1] :].decode()
                paths[inode] = f"{path_of(directory[::-1])}/{name}".lstrip("/")
            return paths[inode]

        for inode, (_, value) in entries.items():
            self._take_entry(path_of(inode), value, rows, inode[::-1])

    def _take_entry(self, path: str, value: bytes, rows: Mapping[bytes, bytes], inode: bytes) -> None:
        flags, mode, uid, gid, size, mtime, ctime, time, number, offset, length = _ENTRY.unpack_from(value)
        etag = value[_ENTRY.size : _ENTRY.size + length].decode()
        xattrs = msgpack.decode(rows[b"X" + inode]) if flags & 128 else {}
        kept = [None if number == UNSET else number for number in (mode, uid, gid)] if flags & 4 else [None] * 3
        attributes = _Attributes(kept[0], kept[1], kept[2], mtime if flags & (4 | 16) else None, xattrs)
        order = _Order(time, "")
        if flags & 1:
            if time:
                self.state.directories[path] = _Directory(order, True, attributes)
            return
        target = rows[b"S" + inode] if flags & 64 else None
        place = None if flags & 64 else _Place(path, etag, 0)
        if number:
            stored = rows[b"P" + struct.pack(">Q", number)]
            key = stored[25 + stored[24] :].decode()
            place = _Place(key, "" if key.startswith(COMMITS) else stored[25 : 25 + stored[24]].decode(), offset)
        if time or number or flags & 64:
            again, by_date = bool(flags & 1024), bool(flags & 8192)
            self.state.files[path] = _File(
                order, place, size, target, etag, attributes, again, by_date, is_relocated=bool(flags & 2048)
            )
        if flags & 512 and place is not None:
            self.state.changed[path] = {place: (_Order(ctime, ""), attributes)}


_ENTRY = struct.Struct("<8xHIIIQqqQIQB")


def _big(raw: bytes) -> int:
    return int.from_bytes(raw, "big")


def _stored_files(key: str, named: Iterable[list[Any]], files: Mapping[str, StoredObject]) -> list[bytes]:
    """Files that the manifest at ``key`` names: of its own index, or by a path below `.lakefs/index/`. Raises
    `Refused`."""
    found = []
    for name, size, digest, *_ in named:
        stored = files.get(INDEX + name if "/" in name else key.removesuffix("manifest") + name)
        _ensure(stored is not None and len(stored.data) == size, f"{name} is gone, or of another size")
        assert stored is not None
        _ensure(xxhash.xxh3_128_hexdigest(stored.data) == digest, f"{name} has another digest")
        found.append(stored.data)
    return found


def _sorted_rows(directory: Path, tables: list[bytes]) -> dict[bytes, bytes]:
    """The rows of RocksDB tables."""
    paths = [Path(f"{directory}-{number}.sst") for number, _ in enumerate(tables)]
    if not paths:
        return {}
    for path, data in zip(paths, tables, strict=True):
        path.write_bytes(data)
    database = Rdict(str(directory), Options(raw_mode=True))
    try:
        database.ingest_external_file([str(path) for path in paths])
        items: Any = database.items()
        return dict(items)
    finally:
        database.close()


# -- the tree


def _unshown(key: str) -> tuple[str, str]:
    """Why a key outside `.lakefs/` cannot be a path, empty if it can; and the directory that it makes all the same."""
    components = key.removesuffix("/").split("/")
    for number, name in enumerate(components):
        reason = ""
        if name in ("", ".", ".."):
            reason = "component"
        elif "\0" in name:
            reason = "nul"
        elif len(name.encode()) > _NAME_BYTES_MAX:
            reason = "long"
        elif (number == 0 and name == RESERVED) or (name == PLACEHOLDER and key != "/".join(components[: number + 1])):
            reason = "reserved"
        if reason:
            return reason, "/".join(components[:number])
    return "", ""


class Reader:
    """Reads lakes, and keeps what it parsed of archives and indexes for the next call."""

    def __init__(self) -> None:
        self._archives: dict[tuple[str, str], _Archive | str] = {}
        self._indexes: dict[tuple[str, str], _Index | str] = {}

    def read_lake(self, objects: Mapping[str, StoredObject], *, now_ns: int | None = None) -> Lake:
        """The lake of these objects, by key; commits ahead of ``now_ns``, if given, are postponed."""
        _check_lake_record(objects)
        lake = Lake()
        archives = self._parse_archives(objects, lake)
        index = self._newest_index(objects, lake)
        state = _State(index.state if index else None, objects)
        for archive in archives.values():
            time, writer = archive.order.time, archive.key[-12:-4]
            if now_ns is not None and time > now_ns + COMMIT_AHEAD_MAX_S * NS:
                lake.postponed.append(archive.key)
            elif index is None or (
                time >= index.newest - COMMITS_BEFORE_NEWEST_S * NS and (time, writer) not in index.applied
            ):
                state.apply(archive)
        _Tree(objects, archives, state, lake).build()
        snapshots = _snapshot_keys(objects)
        used = {key for key, _ in lake.named_objects} | snapshots
        lake.unreferenced = sorted(key for key in objects if key.startswith(OBJECTS) and key not in used)
        lake.leftovers = sorted(key for key in lake.leftovers if (key, objects[key].etag) not in lake.named_objects)
        return lake

    def _parse_archives(self, objects: Mapping[str, StoredObject], lake: Lake) -> dict[str, _Archive]:
        """Archives that are not refused, in the order of their names."""
        archives = {}
        for key in sorted(key for key in objects if key.startswith(COMMITS)):
            version = key, objects[key].etag
            found = self._archives.get(version)
            if found is None:
                named = _COMMIT_NAME.fullmatch(key)
                if named is None or int(named[1], 16) > _COMMIT_TIME_MAX:
                    continue
                try:
                    found = _Archive(key, objects[key].data)
                except Refused as refused:
                    found = str(refused)
                self._archives[version] = found
            if isinstance(found, _Archive):
                archives[key] = found
            else:
                lake.refused[key] = found
        return archives

    def _newest_index(self, objects: Mapping[str, StoredObject], lake: Lake) -> _Index | None:
        """The newest index that can be used, once commits may have been deleted; None before that."""
        keys = sorted(key for key in objects if key.startswith(INDEX) and _MANIFEST.fullmatch(key))
        manifests = {key: _manifest(objects[key].data) for key in keys}
        lake.refused_indexes |= {key: "not a manifest" for key, manifest in manifests.items() if not manifest}
        if not any(manifest.get("horizon", 0) for manifest in manifests.values()):
            return None
        for key in reversed(keys):
            version = key, objects[key].etag
            found = self._indexes.get(version)
            if found is None and manifests[key]:
                try:
                    found = _Index(key, manifests[key], objects)
                except Refused as refused:
                    found = str(refused)
                self._indexes[version] = found
            if isinstance(found, _Index):
                return found
            lake.refused_indexes[key] = found or "not a manifest"
        return None


class _Tree:
    """Names, from what commits say and from plain objects; fills a `Lake`."""

    def __init__(
        self,
        objects: Mapping[str, StoredObject],
        archives: Mapping[str, _Archive],
        state: _State,
        lake: Lake,
    ) -> None:
        self._objects, self._archives, self._state, self._lake = objects, archives, state, lake
        self._directories: dict[str, _Attributes] = {}
        self._renamed: dict[str, set[str]] = {}
        """ETags of plain objects that names elsewhere mean, by the keys at which they lie."""
        for path, file in state.files.items():
            if file.place is not None and not file.place.key.startswith(RESERVED + "/") and file.place.key != path:
                self._renamed.setdefault(file.place.key, set()).add(file.place.etag)

    def build(self) -> None:
        lake, state = self._lake, self._state
        plain: set[str] = set()
        for key in self._objects:
            if key.startswith(RESERVED + "/"):
                continue
            reason, above = _unshown(key)
            if reason:
                lake.unshown[key] = reason
                if above:
                    self._directories[above] = _Attributes()
            elif key.endswith("/") or key.rpartition("/")[2] == PLACEHOLDER:
                self._add_marker(key)
            else:
                plain.add(key)
        files: dict[str, Name] = {}
        for path in plain | state.files.keys():
            name = self._file(path, self._objects[path] if path in plain else None)
            if name is not None:
                files[path] = name
        for path, directory in state.directories.items():
            if directory.exists:
                self._directories[path] = directory.attributes
        for path in [*files, *self._directories]:
            while (path := path.rpartition("/")[0]) and path not in self._directories:
                self._directories[path] = _Attributes()
        lake.names = {path: Name("directory", None, "", "", 0, 0, *kept) for path, kept in self._directories.items()}
        for path, name in files.items():
            (lake.hidden_files if path in self._directories else lake.names)[path] = name
            if name.key:
                lake.named_objects.add((name.key, name.etag))
            if name.key == path and path in self._directories:
                lake.unshown[path] = "conflict"
        lake.leftovers += [
            key for key in plain if (name := files.get(key)) is None or (name.key, name.etag) != (key, self._etag(key))
        ]

    def _etag(self, key: str) -> str:
        return self._objects[key].etag

    def _add_marker(self, key: str) -> None:
        """A marker makes its directory, unless the directory was removed later."""
        path = key.rpartition("/")[0]
        known = self._state.directories.get(path)
        if not path:
            return
        if known is None or known.exists or self._objects[key].mtime_ns // NS >= known.order.time // NS:
            self._directories[path] = _Attributes()
        else:
            self._lake.leftovers.append(key)

    def _file(self, path: str, plain: StoredObject | None) -> Name | None:
        """The file of a path, None if there is none."""
        file, grave = self._state.files.get(path), self._state.graves.get(path, _NO_GRAVE)
        is_elsewhere = file is not None and not file.is_at_own_key(path)
        if plain is not None and is_elsewhere and (_is_copy(path, plain) or self._is_of_renamed(path, plain)):
            plain = None
        if plain is not None and _plain_wins(file, grave, path, plain.etag, plain.mtime_ns):
            place = _Place(path, plain.etag, 0)
            own = file.attributes if file is not None and file.place == place else _Attributes()
            kept = _with_metadata(self._state.attributes(path, place, own), plain.metadata)
            return Name("file", plain.data, path, plain.etag, 0, len(plain.data), *kept)
        if file is None or file.is_at_own_key(path):
            return None
        if file.target is not None:
            return Name("symlink", file.target, "", "", 0, len(file.target), *file.attributes)
        assert file.place is not None
        kept = self._state.attributes(path, file.place, file.attributes)
        key, etag, offset = file.place
        data, problem = self._read(file.place, file.size)
        if not problem and not key.startswith(COMMITS):
            kept = _with_metadata(kept, self._objects[key].metadata)
        if key in self._objects and not etag:
            etag = self._etag(key)
        return Name("file", data, key, etag, offset, file.size, *kept, problem)

    def _is_of_renamed(self, path: str, plain: StoredObject) -> bool:
        """The object is a later version of one at this key that another name means."""
        etags = self._renamed.get(path, set()) - {plain.etag}
        history = plain.metadata.get("lakefs-replaces", "").split(",")
        return bool(etags) and (history[-1] != "" or not etags.isdisjoint(history))

    def _read(self, place: _Place, size: int) -> tuple[bytes | None, str]:
        key, etag, offset = place
        stored = self._objects.get(key)
        if stored is None:
            return None, f"{key} is gone"
        if etag and stored.etag != etag:
            return None, f"{key} is another version"
        archive = self._archives.get(key)
        if archive is not None:
            return archive.read(offset, size)
        if offset + size > len(stored.data):
            return None, f"the range ends beyond {key}"
        if key.startswith(COMMITS):
            return None, f"{key} is refused"
        return stored.data[offset : offset + size], ""


def _is_copy(path: str, plain: StoredObject) -> bool:
    """The object at a path is a copy of bytes which the file of its name has elsewhere."""
    return plain.metadata.get("lakefs-copy") == xxhash.xxh3_128_hexdigest(path.encode("utf-8", "surrogatepass"))


def _with_metadata(attributes: _Attributes, metadata: Mapping[str, str]) -> _Attributes:
    """Attributes of a file in a plain object: those of its commit, or where that sets none, of the metadata."""
    if attributes[:3] != (None, None, None):
        return attributes
    mode, uid, gid = (
        int(text) if (text := metadata.get(name, "")).isdigit() else None for name in ("mode", "uid", "gid")
    )
    found = _MTIME.fullmatch(metadata.get("mtime", ""))
    mtime_ns = attributes.mtime_ns
    if found:
        mtime_ns = (int(found[2]) * NS + int(found[3])) * (-1 if found[1] else 1)
    return _Attributes(None if mode is None else mode & _MODE_MAX, uid, gid, mtime_ns, attributes.xattrs)


def _check_lake_record(objects: Mapping[str, StoredObject]) -> None:
    stored = objects.get(".lakefs/lake")
    if stored is not None:
        unknown = set(json.decode(stored.data).get("features_to_read", ())) - FEATURES
        if unknown:
            raise Refused(f"the lake has features that are not known: {sorted(unknown)}")


def _manifest(data: bytes) -> dict[str, Any]:
    """A manifest of an index; empty if it is none."""
    try:
        found = msgpack.decode(data)
    except MsgspecError:
        return {}
    return found if isinstance(found, dict) and found.get("format") in (1, 2) else {}


def _snapshot_keys(objects: Mapping[str, StoredObject]) -> set[str]:
    """Keys of the objects that named snapshots need."""
    return {
        key
        for listed, stored in objects.items()
        if listed.startswith(SNAPSHOTS) and listed.endswith("/objects") and f"{listed[:-7]}manifest" in objects
        for key in msgpack.decode(stored.data)
    }


def read_lake(objects: Mapping[str, StoredObject], *, now_ns: int | None = None) -> Lake:
    """Read a lake once; see `Reader.read_lake`."""
    return Reader().read_lake(objects, now_ns=now_ns)
