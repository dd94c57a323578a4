"""The change record of one commit: which names changed, and where their bytes are now.

A record is msgpack of `Record`, an ordered list of operations on paths. Paths are relative to the lake, UTF-8, without
leading or trailing slash. What always holds after `decode`: every path is one that a file system can have, every object
index exists, every number is in bounds. Before that, a record from the store counts as hostile.

For each path the operation with the newest commit time wins (see `applier`). `SetAttr` and `Relocate` are conditional:
they change a file only if it is still the version that they name.

A large record is kept as its bytes (`Operations`): as objects its operations would take four times as much memory.
"""

from __future__ import annotations

import errno
import operator
import re
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, overload

import msgspec
import xxhash

from lakefs_fuse.errors import MALFORMED, DamagedCommit, FileError
from lakefs_fuse.meta.entry import ETAG_BYTES_MAX, MTIME_NS_MAX, MTIME_NS_MIN, kept_ns
from lakefs_fuse.product import RESERVED_NAME, RESERVED_PREFIX, RESERVED_XATTR
from lakefs_fuse.store.protocol import Buffer

FORMATS = (1, 2)
"""Formats that this program reads. They differ only in the number: programs older than the lake record refuse 2."""
SIZE_MAX = 1 << 47
"""140 TB: more than a store holds in one object (S3: 50 TB). A set of its blocks (`BlockSet`) is 16 MiB."""
OPERATIONS_MAX = 20_000_000
STORED_MAX = 1024
"""Paths of `Record.stored`: a reader handles them between two awaits, in some 20 ms."""
LAZY_BYTES_MIN = 1 << 20
"""Records from this size on keep their operations as bytes."""
ENCODED_AT_ONCE = 4096
"""Operations, or objects, that are encoded at a time, in 2 ms, so that other threads run in between."""
DECODED_AT_ONCE = 64
"""Operations that are decoded together, if all are read: one by one each takes twice as long."""
KEY_BYTES_MAX = 1024
NAME_BYTES_MAX = 255
TARGET_BYTES_MAX = 4095
XATTRS_BYTES_MAX = 64 << 10
XATTR_PREFIX = "user."
"""The only namespace of extended attributes: the others (`security.`, `trusted.`, `system.`) are the kernel's."""
MODE_MAX = 0o7777
TIME_NS_MAX = 1 << 62
"""Latest time of a commit, and of an index."""
DATED_S_MAX = 1 << 33
COMMITS = f"{RESERVED_PREFIX}commits/"
"""The prefix of the keys of commits."""
OBJECTS = f"{RESERVED_PREFIX}objects/"
"""The prefix of the keys of plain objects whose own key other bytes occupy. Below ``.lakefs``, a record may refer only
to these and to commits."""
UNSET = 0xFFFF_FFFF
"""A mode, uid or gid that was never set."""

WRITER = re.compile(r"[0-9a-f]{8}")
"""The id of a daemon in its commits: random, new at each start."""

_ETAG = re.compile(rf"[ -~]{{0,{ETAG_BYTES_MAX}}}")

OWN = -1
"""Object index: the plain object whose key is the path itself; its ETag is in ``hides``."""
THIS = 0
"""Object index: the archive that this record is in."""
ANY = -2
"""No object index: the put replaces whatever has the name."""


class ObjectRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An object to which operations refer.

    ``key`` is relative to the lake, ``size`` is that of the whole object in bytes. Entry 0 of a record's table is the
    archive itself, and has none of these."""

    key: str = ""
    etag: str = ""
    size: int = 0


def key_of_copy(unique: str, source: ObjectRef) -> str:
    """Return a key below `OBJECTS` for a copy of an object; the key identifies that object."""
    return f"{OBJECTS}{unique}-{_mark_of(source)}"


def is_copy(key: str, source: ObjectRef) -> bool:
    """Return whether a key is that of a copy of this object."""
    return key.startswith(OBJECTS) and key.endswith(f"-{_mark_of(source)}")


def _mark_of(source: ObjectRef) -> str:
    return xxhash.xxh3_64_hexdigest(f"{source.key}\0{source.etag}".encode())


class Put(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="put"):
    """A file: ``size`` bytes of ``objects[object]`` from ``offset`` on.

    ``hides`` is the ETag of the plain object at the path itself that this file replaces (or is, for OWN); empty if
    there is none. ``replaces``, if not ANY, is the object whose bytes the file had before, or from which these were
    copied: then the put applies to that version alone, and the name keeps its time. ``dated_s`` (OWN only): the store
    dates this version no earlier, in seconds since 1970; 0 if unknown."""

    path: str
    object: int
    offset: int
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    hides: str = ""
    xattrs: dict[str, bytes] = {}
    replaces: int = ANY
    dated_s: int = 0


class Mkdir(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="mkdir"):
    """A directory with its attributes, made or changed; it stays even if it is empty."""

    path: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: dict[str, bytes] = {}


class Symlink(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="symlink"):
    """A symbolic link, made or changed."""

    path: str
    target: str
    uid: int
    gid: int
    mtime_ns: int
    hides: str = ""
    xattrs: dict[str, bytes] = {}


class Remove(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="remove"):
    """The removal of a file or symbolic link or, with ``directory``, of a directory.

    A removed directory is shown for as long as something is below it. ``hides`` is as in `Put`. ``by_date``: the file
    was elsewhere and hid older plain objects at the path, which stay hidden. ``dated_s``: the store's date of the
    version with the ETag ``hides``, in seconds since 1970; 0 if unknown."""

    path: str
    directory: bool = False
    hides: str = ""
    by_date: bool = False
    dated_s: int = 0


class SetAttr(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="setattr"):
    """New attributes of the file of ``size`` bytes at ``objects[object]``, ``offset`` (OWN: with the ETag
    ``hides``)."""

    path: str
    object: int
    offset: int
    size: int
    hides: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: dict[str, bytes] = {}


class Relocate(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="relocate"):
    """The new place of a file's bytes.

    It applies to the file at ``from_object``, ``from_offset`` (OWN: with the ETag ``from_etag``), which keeps the
    attributes and the commit time that it already has. ``hides`` is as in `Put`."""

    path: str
    from_object: int
    from_offset: int
    from_etag: str
    object: int
    offset: int
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    hides: str = ""


def is_of_version(operation: Operation) -> bool:
    """Return whether the operation applies to one version of a file, and keeps the time of the name."""
    return isinstance(operation, SetAttr | Relocate) or (isinstance(operation, Put) and operation.replaces != ANY)


def says_what(operation: Operation) -> bool:
    """Return whether the operation says which bytes a file's name has, or that it is gone."""
    if isinstance(operation, Remove):
        return not operation.directory
    return isinstance(operation, Put) or isinstance(operation, Symlink)  # noqa: SIM101 (a union is slower)


def says_again(operation: Operation, following: Operation) -> bool:
    """Return whether an operation only says that the plain object that the next one puts is there again."""
    if not isinstance(operation, Remove) or operation.directory or operation.hides or operation.by_date:
        return False
    return isinstance(following, Put) and following.object == OWN and following.path == operation.path


def count_repeated(operations: Sequence[Operation], said: dict[str, int], per_step: int) -> Iterator[None]:
    """Count in ``said``, by path, the operations that say what a name is, if there are several.

    It yields after each ``per_step`` operations. In the first pass a bitmap of eight bits for each operation finds the
    candidates; a few other paths pass it, too."""
    bits, again = bytearray(len(operations)), set[str]()
    for number, operation in enumerate(operations, 1):
        if says_what(operation):
            at = zlib.crc32(operation.path.encode()) % (8 * len(bits))
            if bits[at >> 3] & 1 << (at & 7):
                again.add(operation.path)
            bits[at >> 3] |= 1 << (at & 7)
        if not number % per_step:
            yield
    for number, operation in enumerate(operations if again else (), 1):
        if operation.path in again and says_what(operation):
            said[operation.path] = said.get(operation.path, 0) + 1
        if not number % per_step:
            yield


Operation: TypeAlias = Put | Mkdir | Symlink | Remove | SetAttr | Relocate


class Operations(Sequence[Operation]):
    """Operations kept as bytes, and decoded at each access.

    Two results for one index are equal, but not the same object. It takes 8 bytes an operation besides ``raw``."""

    __slots__ = ("_ends", "_raw")

    def __init__(self, raw: Buffer, ends: array[int]) -> None:
        """``raw`` is operations in msgpack, one after the other; ``ends`` are 0 and where each of them ends.

        Elements that are not operations are found only at their access."""
        self._raw, self._ends = memoryview(raw), ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Operation: ...

    @overload
    def __getitem__(self, index: slice) -> list[Operation]: ...

    def __getitem__(self, index: int | slice) -> Operation | list[Operation]:
        """Raises msgspec.DecodeError."""
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step == 1 and 0 < end - begin <= DECODED_AT_ONCE:
                raw = struct.pack(">BH", 0xDC, end - begin) + self._raw[self._ends[begin] : self._ends[end]]
                return _OPERATIONS.decode(raw)
            return [self[each] for each in range(begin, end, step)]
        at = range(len(self))[index]
        return _OPERATION.decode(self._raw[self._ends[at] : self._ends[at + 1]])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Operation]:
        for at in range(0, len(self), DECODED_AT_ONCE):
            yield from self[at : at + DECODED_AT_ONCE]


_OPERATION: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)
_OPERATIONS: msgspec.msgpack.Decoder[list[Operation]] = msgspec.msgpack.Decoder(list[Operation])


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What one commit changes.

    ``time`` is that in the commit's name. ``moves`` are pairs of paths that a rename moved: the operations say all that
    changed, the pairs only that a directory or file kept its identity (an exchange has two pairs). ``stored`` are paths
    at which the writer has stored plain objects that no operation names: a hint to ask the store for them."""

    format: int = 1
    writer: str
    time: int
    objects: list[ObjectRef] = msgspec.field(default_factory=lambda: [ObjectRef()])
    moves: list[tuple[str, str]] = []
    operations: Sequence[Operation] = []
    stored: list[str] = []


class _Object:
    """An `ObjectRef` that a hook of the decoder has taken."""


class _Operation:
    """An operation that a hook of the decoder has taken."""


class _Outline(Record, frozen=True, kw_only=True):
    """A record for whose objects and operations the decoder calls a hook, one after the other."""

    objects: list[_Object] | None = None  # type: ignore[assignment]
    operations: list[_Operation] = []  # type: ignore[assignment]


class _Written(Record, frozen=True, kw_only=True):
    """A record as it is stored, with the newest format that its writer's program reads."""

    reads: int = FORMATS[-1]


class _Reads(msgspec.Struct):
    """The field that says what the writer reads; programs older than the lake record do not write it."""

    reads: int = 1


def encode_checked(record: Record, format: int = 1) -> bytes:
    """As `encode`, but raise FileError(EINVAL) for a record that `decode` refuses."""
    record = _with_times_within_limits(record)
    with _refusing():
        check(record)
    return _encode(record, format)


def refuse_unreadable(operations: Sequence[Operation], objects: list[ObjectRef]) -> None:
    """Raise FileError(EINVAL) for operations with which no node could read a commit, nor the other changes in it."""
    with _refusing():
        _check_operations([*map(_within_limits, operations)], objects)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except DamagedCommit as error:
        raise FileError(errno.EINVAL, f"no node could read this change: {error}") from error


def encode(record: Record, format: int = 1) -> bytes:
    """Return the bytes of a record in the ``format`` of its lake (`StoreClient.commit_format`).

    Times become the nearest ones that readers accept: if they refused a commit for one file, they would lose all its
    other files, too."""
    return _encode(_with_times_within_limits(record), format)


def _with_times_within_limits(record: Record) -> Record:
    return msgspec.structs.replace(record, operations=list(map(_within_limits, record.operations)))


def _encode(record: Record, format: int) -> bytes:
    arrays = {"objects": _encode_array(record.objects), "operations": _encode_array(record.operations)}
    fields = {**msgspec.structs.asdict(record), **arrays, "format": max(record.format, format)}
    return msgspec.msgpack.encode(_Written(**fields))


def _encode_array(items: Sequence[msgspec.Struct]) -> msgspec.Raw:
    """Encode a list of any length, ENCODED_AT_ONCE of its items at a time."""
    count, encode_one = len(items), msgspec.msgpack.Encoder().encode
    if count <= ENCODED_AT_ONCE:
        return msgspec.Raw(encode_one(items))
    pieces = [struct.pack(">BI", 0xDD, count) if count > 0xFFFF else struct.pack(">BH", 0xDC, count)]
    pieces += (  # other threads wait for the interpreter during each of these
        b"".join(map(encode_one, items[at : at + ENCODED_AT_ONCE])) for at in range(0, count, ENCODED_AT_ONCE)
    )
    return msgspec.Raw(b"".join(pieces))


def _within_limits(operation: Operation) -> Operation:
    """Return the operation with times that readers accept.

    Programs choose any mtime, and stores date objects as they like."""
    mtime_ns, dated_s = getattr(operation, "mtime_ns", 0), getattr(operation, "dated_s", 0)
    if not MTIME_NS_MIN <= mtime_ns <= MTIME_NS_MAX:
        operation = msgspec.structs.replace(operation, mtime_ns=kept_ns(mtime_ns))
    if not 0 <= dated_s <= DATED_S_MAX:
        operation = msgspec.structs.replace(operation, dated_s=min(max(dated_s, 0), DATED_S_MAX))
    return operation


def newest_read(raw: Buffer) -> int:
    """Return the newest format that the program of this record's writer reads. Raises DamagedCommit."""
    try:
        return msgspec.msgpack.decode(raw, type=_Reads).reads
    except MALFORMED as error:
        raise DamagedCommit(f"not a change record: {str(error)[:200]}") from error


def decode(raw: Buffer) -> Record:
    """Return the checked record of some bytes; large ones are kept and must not be changed. Raises DamagedCommit."""
    try:
        record = msgspec.msgpack.decode(raw, type=Record) if len(raw) < LAZY_BYTES_MIN else _decode_lazily(raw)
        if record.format not in FORMATS:
            raise _other_format(record.format)
        check(record)
    except MALFORMED as error:
        _check_format(raw)
        raise DamagedCommit(f"not a change record: {str(error)[:200]}") from error
    return record


def _decode_lazily(raw: Buffer) -> Record:
    """Return the record of some bytes with its operations as bytes of their own.

    A decoder keeps the GIL, except while it calls Python. So other threads wait for one object or operation at most,
    however many the record has."""
    objects, kept, ends = list[ObjectRef](), bytearray(), array("Q", (0,))
    encode_into, taken = msgspec.msgpack.Encoder().encode_into, {_Object: _Object(), _Operation: _Operation()}

    def take(kind: type[object], item: object) -> object:
        if kind is _Object:
            objects.append(msgspec.convert(item, ObjectRef))
        else:
            encode_into(item, kept, -1)
            ends.append(len(kept))
        return taken[kind]

    outline = msgspec.msgpack.Decoder(_Outline, dec_hook=take).decode(raw)
    fields = {**msgspec.structs.asdict(outline), "objects": objects, "operations": Operations(kept, ends)}
    if outline.objects is None:
        del fields["objects"]
    return Record(**fields)


class _Format(msgspec.Struct):
    """The field that every format has."""

    format: int


def _check_format(raw: Buffer) -> None:
    """Raise DamagedCommit, with the format, if a record has one that this program does not read."""
    try:
        found = msgspec.msgpack.decode(raw, type=_Format).format
    except MALFORMED:
        return
    if found not in FORMATS:
        raise _other_format(found)


def _other_format(found: int) -> DamagedCommit:
    return DamagedCommit(f"change record of format {found}: this program reads up to {FORMATS[-1]}")


def check(record: Record) -> None:
    """Check that every field can be used as it stands; raises DamagedCommit otherwise."""
    if not 0 <= record.time <= TIME_NS_MAX or not WRITER.fullmatch(record.writer):
        raise DamagedCommit(f"a change record of time {record.time} by {record.writer[:80]!r}")
    if len(record.operations) > OPERATIONS_MAX:
        raise DamagedCommit(f"{len(record.operations)} operations")
    if not record.objects or record.objects[0] != ObjectRef():
        raise DamagedCommit("object 0 is not the archive itself")
    for ref in record.objects[1:]:
        # A file system's own rules, because the local directory store makes file names of keys.
        check_path(ref.key.removeprefix(COMMITS).removeprefix(OBJECTS))
        if len(_encoded(ref.key)) > KEY_BYTES_MAX or not 0 <= ref.size <= SIZE_MAX:
            raise DamagedCommit(f"object {ref.key[:80]!r} of {ref.size} bytes")
        _check_etag(ref.etag)
    for pair in record.moves:
        for path in pair:
            check_path(path)
    if len(record.stored) > STORED_MAX:
        raise DamagedCommit(f"{len(record.stored)} stored objects")
    for path in record.stored:
        check_path(path)
    _check_operations(record.operations, record.objects)


def _check_operations(operations: Sequence[Operation], objects: list[ObjectRef]) -> None:
    above = ""  # the directory of the path before, which was checked
    for operation in operations:
        path, at = operation.path, operation.path.rfind("/")
        if at > 0 and path[:at] == above:
            if len(_encoded(path)) > KEY_BYTES_MAX:
                raise DamagedCommit(f"path {path[:80]!r}")
            _check_name(path[at + 1 :], path)
        else:
            check_path(path)
            above = path[: max(at, 0)]
        _check_fields(operation, objects)


def check_path(path: str) -> None:
    """Check that every component of a path could be a file name; raises DamagedCommit otherwise."""
    if not path or len(_encoded(path)) > KEY_BYTES_MAX:
        raise DamagedCommit(f"path {path[:80]!r}")
    for component in path.split("/"):
        _check_name(component, path)
    if path == RESERVED_NAME or path.startswith(RESERVED_PREFIX):
        raise DamagedCommit(f"path {path[:80]!r} is reserved")


def _check_name(name: str, path: str) -> None:
    if name in ("", ".", "..") or "\0" in name or len(name.encode()) > NAME_BYTES_MAX:
        raise DamagedCommit(f"path {path[:80]!r}")


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DamagedCommit("text that is not UTF-8") from error


def _check_etag(etag: str) -> None:
    """Check that an ETag can be a header field, and fits into a row; raises DamagedCommit otherwise."""
    if not _ETAG.fullmatch(etag):
        raise DamagedCommit(f"ETag {etag[:80]!r} of {len(etag)} characters")


def _check_fields(operation: Operation, objects: list[ObjectRef]) -> None:
    """Check everything but the path."""
    if isinstance(operation, Remove):
        pass
    elif isinstance(operation, Put | SetAttr):
        _check_place(operation.object, operation.offset, operation.size, objects)
        if isinstance(operation, Put) and not (operation.replaces == ANY or THIS < operation.replaces < len(objects)):
            raise DamagedCommit(f"{operation.path!r} replaces object {operation.replaces}")
    elif isinstance(operation, Relocate):
        _check_place(operation.from_object, operation.from_offset, operation.size, objects)
        _check_place(operation.object, operation.offset, operation.size, objects)
        _check_etag(operation.from_etag)
    elif isinstance(operation, Symlink):
        _check_target(operation)
    if not isinstance(operation, Mkdir):
        _check_etag(operation.hides)
    if isinstance(operation, Put | Remove) and not 0 <= operation.dated_s <= DATED_S_MAX:
        raise DamagedCommit(f"{operation.path!r} of {operation.dated_s} s")
    if not isinstance(operation, Remove):
        _check_attributes(operation)


def _check_target(link: Symlink) -> None:
    if not link.target or "\0" in link.target or len(_encoded(link.target)) > TARGET_BYTES_MAX:
        raise DamagedCommit(f"target of {link.path!r}")


def _check_place(index: int, offset: int, size: int, objects: list[ObjectRef]) -> None:
    if not OWN <= index < len(objects) or not 0 <= offset <= SIZE_MAX or not 0 <= size <= SIZE_MAX:
        raise DamagedCommit(f"bytes {offset} to {offset + size} of object {index}")
    if index == OWN and offset:
        raise DamagedCommit("an offset in a plain object at its own key")
    if index > THIS and offset + size > objects[index].size:
        raise DamagedCommit(f"bytes {offset} to {offset + size} of {objects[index].size}")


def _check_attributes(operation: Put | Mkdir | Symlink | SetAttr | Relocate) -> None:
    mode = UNSET if isinstance(operation, Symlink) else operation.mode
    is_owned = 0 <= operation.uid <= UNSET and 0 <= operation.gid <= UNSET
    if not (0 <= mode <= MODE_MAX or mode == UNSET) or not is_owned:
        raise DamagedCommit(f"attributes of {operation.path!r}")
    if not isinstance(operation, Relocate) and operation.xattrs:
        _check_xattrs(operation.path, operation.xattrs)


def _check_xattrs(path: str, xattrs: dict[str, bytes]) -> None:
    """Raise DamagedCommit for extended attributes that `setxattr` on a mount, or the kernel, would refuse."""
    length = 0
    for name, value in xattrs.items():
        raw = _encoded(name)
        is_ours = name.startswith(XATTR_PREFIX) and not name.startswith(RESERVED_XATTR)
        if not is_ours or "\0" in name or len(raw) > NAME_BYTES_MAX:
            raise DamagedCommit(f"extended attribute {name[:80]!r} of {path!r}")
        length += len(raw) + len(value)
    if length > XATTRS_BYTES_MAX:
        raise DamagedCommit(f"{length} bytes of extended attributes of {path!r}")
