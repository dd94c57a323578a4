"""The change record of one commit: which names changed, and where their bytes are now.

A record is msgpack of `Record`, an ordered list of operations on paths. Paths are relative to the lake, UTF-8, without
leading or trailing slash. What always holds after `decode`: every path is one that a file system can have, every object
index exists, every number is in bounds. Records come from the store and are hostile until then.

For each path the operation with the newest commit time wins (see `apply`). `SetAttr` and `Relocate` are conditional:
they change a file that is still the version they name, and nothing else.

A large record is kept as its bytes (`Operations`): as objects its operations would take four times as much memory.
"""

from __future__ import annotations

import operator
import re
import struct
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias, overload

import msgspec
import xxhash

from lakefs_fuse.errors import MALFORMED, DamagedCommit
from lakefs_fuse.meta.entry import ETAG_BYTES_MAX, MTIME_NS_MAX, MTIME_NS_MIN, kept_ns
from lakefs_fuse.product import RESERVED_NAME, RESERVED_PREFIX, RESERVED_XATTR
from lakefs_fuse.store.protocol import Buffer

FORMATS = (1, 2)
"""Records that this program reads. They differ in the number only, which programs older than the lake record refuse."""
SIZE_MAX = 1 << 47
"""140 TB: more than a store holds in one object (S3: 50 TB), and a set of its blocks (`BlockSet`) is 16 MiB."""
OPERATIONS_MAX = 20_000_000
STORED_MAX = 1024
"""Paths of `Record.stored`: a reader takes them up between two awaits, in some 20 ms."""
LAZY_BYTES_MIN = 1 << 20
"""Records from this size on keep their operations as bytes."""
ENCODED_AT_ONCE = 4096
"""Operations; 2 ms. More are encoded this many at a time, so that a thread which does that lets the others run."""
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
"""Where commits lie."""
OBJECTS = f"{RESERVED_PREFIX}objects/"
"""Where plain objects lie whose own key other bytes occupy. A record may point into no other place under
``.lakefs``."""
UNSET = 0xFFFF_FFFF
"""A mode, uid or gid that was never set."""

WRITER = re.compile(r"[0-9a-f]{8}")
"""What a daemon calls itself in its commits: random, new at each start."""

_ETAG = re.compile(rf"[ -~]{{0,{ETAG_BYTES_MAX}}}")

OWN = -1
"""Object index: the plain object whose key is the path itself; its ETag is in ``hides``."""
THIS = 0
"""Object index: the archive that this record is in."""
ANY = -2
"""No object index: whatever has the name."""


class ObjectRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An object that operations point into. ``key`` relative to the lake, ``size`` of the whole object in bytes.
    Entry 0 of a record's table is the archive itself and has none of them."""

    key: str = ""
    etag: str = ""
    size: int = 0


def key_of_copy(unique: str, source: ObjectRef) -> str:
    """A key below `OBJECTS` for a copy of one object, which tells of what it is a copy."""
    return f"{OBJECTS}{unique}-{_mark_of(source)}"


def is_copy(key: str, source: ObjectRef) -> bool:
    """A key is that of a copy of this object."""
    return key.startswith(OBJECTS) and key.endswith(f"-{_mark_of(source)}")


def _mark_of(source: ObjectRef) -> str:
    return xxhash.xxh3_64_hexdigest(f"{source.key}\0{source.etag}".encode())


class Put(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="put"):
    """A file: ``size`` bytes of ``objects[object]`` from ``offset`` on. ``hides`` is the ETag of the plain object at
    the path itself that this file replaces (or is, for OWN); empty where there is none. ``replaces``, if not ANY, is
    the object which is the file before, or which was copied from that: then this applies to that version alone, and the
    name keeps its time.
    ``dated_s`` (OWN only): the store dates this version not earlier, in seconds since 1970; 0 where unknown."""

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
    """A directory with its attributes, made or changed; it stays even where nothing is in it."""

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
    """The removal of a file or symbolic link, or (``directory``) of a directory, which is shown for as long as
    something is below it. ``hides`` as in `Put`. ``by_date``: older plain objects at the path are hidden too, as they
    were while the file was there, whose bytes are elsewhere. ``dated_s``: the store's date of the version with the ETag
    ``hides``, in seconds since 1970; 0 where unknown."""

    path: str
    directory: bool = False
    hides: str = ""
    by_date: bool = False
    dated_s: int = 0


class SetAttr(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="setattr"):
    """New attributes of the file of ``size`` bytes that is at ``objects[object]``, ``offset`` (OWN: whose ETag is
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
    """The new place of a file's bytes. Applies to the file that is at ``from_object``, ``from_offset`` (OWN: whose
    ETag is ``from_etag``); it keeps its attributes and its commit time where it has them already. ``hides`` as in
    `Put`."""

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
    """It applies to one version of a file, and leaves the time of the name as it is."""
    return isinstance(operation, SetAttr | Relocate) or (isinstance(operation, Put) and operation.replaces != ANY)


def says_what(operation: Operation) -> bool:
    """Of a file's name: which bytes it has, or that it is gone."""
    return isinstance(operation, Put | Symlink) or (isinstance(operation, Remove) and not operation.directory)


def removes_unnamed(operation: Operation) -> bool:
    """A removal of a file that names no version: in front of a put in the same record it says that what is put there
    is there again."""
    return isinstance(operation, Remove) and not (operation.directory or operation.hides or operation.by_date)


def count_repeated(operations: Sequence[Operation], said: Counter[str], per_step: int) -> Iterator[None]:
    """Count operations that say what a name is by path in ``said``, for paths that occur more than once; it yields
    after each ``per_step``. A bitmap of eight bits for each operation finds the candidates in the first pass; a few
    others pass it, too."""
    bits, again = bytearray(len(operations)), set[int]()
    for number, operation in enumerate(operations, 1):
        if says_what(operation):
            at = _bit(operation.path, len(bits))
            if bits[at >> 3] & 1 << (at & 7):
                again.add(at)
            bits[at >> 3] |= 1 << (at & 7)
        if not number % per_step:
            yield
    for number, operation in enumerate(operations if again else (), 1):
        if says_what(operation) and _bit(operation.path, len(bits)) in again:
            said[operation.path] += 1
        if not number % per_step:
            yield


def _bit(path: str, length: int) -> int:
    """Which bit of so many bytes a path has."""
    return zlib.crc32(path.encode()) % (8 * length)


Operation: TypeAlias = Put | Mkdir | Symlink | Remove | SetAttr | Relocate


class Operations(Sequence[Operation]):
    """Operations as their bytes, each decoded whenever it is asked for: two answers are equal, and not the same object.
    Costs 8 bytes an operation besides ``raw``."""

    __slots__ = ("_ends", "_raw")

    def __init__(self, raw: Buffer) -> None:
        """``raw`` is an array in msgpack. Raises msgspec.DecodeError for anything else; whether its elements are
        operations comes out when they are asked for."""
        view = memoryview(raw)
        lengths = [memoryview(each).nbytes for each in _ARRAY.decode(view)]
        self._raw = view[view.nbytes - sum(lengths) :]
        self._ends = array("Q", accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Operation: ...

    @overload
    def __getitem__(self, index: slice) -> list[Operation]: ...

    def __getitem__(self, index: int | slice) -> Operation | list[Operation]:
        """Raises msgspec.DecodeError."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return _OPERATION.decode(self._raw[self._ends[at] : self._ends[at + 1]])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Operation]:
        raw, ends, decode = self._raw, self._ends, _OPERATION.decode
        return (decode(raw[ends[at] : ends[at + 1]]) for at in range(len(self)))


_ARRAY = msgspec.msgpack.Decoder(list[msgspec.Raw])
_OPERATION: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``time`` as in the commit's name. ``moves`` are pairs of paths that a rename moved: the operations say all that
    changed, the pairs only say that a directory or file kept its identity (an exchange has two pairs). ``stored`` are
    paths where the writer has stored plain objects that no operation names: a hint to ask the store for them."""

    format: int = 1
    writer: str
    time: int
    objects: list[ObjectRef] = msgspec.field(default_factory=lambda: [ObjectRef()])
    moves: list[tuple[str, str]] = []
    operations: Sequence[Operation] = []
    stored: list[str] = []


class _Outline(Record, frozen=True, kw_only=True):
    """A record with its operations as bytes."""

    operations: msgspec.Raw = msgspec.Raw(b"\x90")  # type: ignore[assignment]


class _Written(Record, frozen=True, kw_only=True):
    """A record as it is stored: with the newest format that its writer's program reads."""

    reads: int = FORMATS[-1]


class _Reads(msgspec.Struct):
    """The field that says what the writer reads; programs older than the lake record do not write it."""

    reads: int = 1


def encode(record: Record, format: int = 1) -> bytes:
    """The bytes of a record in the ``format`` of its lake (`StoreClient.commit_format`), with the nearest times that
    readers take: a commit that they refused for one file would be lost with all others in it."""
    count = len(record.operations)
    operations: list[Operation] | msgspec.Raw = list(map(_within_limits, record.operations))
    if count > ENCODED_AT_ONCE:
        header = struct.pack(">BI", 0xDD, count) if count > 0xFFFF else struct.pack(">BH", 0xDC, count)
        encode_one, pieces = msgspec.msgpack.Encoder().encode, [header]
        pieces += (  # other threads wait for the interpreter during each of these
            b"".join(map(encode_one, operations[at : at + ENCODED_AT_ONCE])) for at in range(0, count, ENCODED_AT_ONCE)
        )
        operations = msgspec.Raw(b"".join(pieces))
    fields = {**msgspec.structs.asdict(record), "operations": operations, "format": max(record.format, format)}
    return msgspec.msgpack.encode(_Written(**fields))


def _within_limits(operation: Operation) -> Operation:
    """The operation with times that readers take. Programs choose any mtime, and stores date objects as they like."""
    mtime_ns, dated_s = getattr(operation, "mtime_ns", 0), getattr(operation, "dated_s", 0)
    if not MTIME_NS_MIN <= mtime_ns <= MTIME_NS_MAX:
        operation = msgspec.structs.replace(operation, mtime_ns=kept_ns(mtime_ns))
    if not 0 <= dated_s <= DATED_S_MAX:
        operation = msgspec.structs.replace(operation, dated_s=min(max(dated_s, 0), DATED_S_MAX))
    return operation


def newest_read(raw: Buffer) -> int:
    """The newest format that the program reads which wrote this record. Raises DamagedCommit."""
    try:
        return msgspec.msgpack.decode(raw, type=_Reads).reads
    except MALFORMED as error:
        raise DamagedCommit(f"not a change record: {str(error)[:200]}") from error


def decode(raw: Buffer) -> Record:
    """The checked record of some bytes; large ones are kept and must not be changed. Raises DamagedCommit."""
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
    outline = msgspec.msgpack.decode(raw, type=_Outline)
    fields = msgspec.structs.asdict(outline)
    return Record(**{**fields, "operations": Operations(memoryview(outline.operations))})


class _Format(msgspec.Struct):
    """The field that every format has."""

    format: int


def _check_format(raw: Buffer) -> None:
    """Raise DamagedCommit that names the format where a record has another one."""
    try:
        found = msgspec.msgpack.decode(raw, type=_Format).format
    except MALFORMED:
        return
    if found not in FORMATS:
        raise _other_format(found)


def _other_format(found: int) -> DamagedCommit:
    return DamagedCommit(f"change record of format {found}: this program reads up to {FORMATS[-1]}")


def check(record: Record) -> None:
    """Raises DamagedCommit unless every field can be used as it stands."""
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
    for operation in record.operations:
        _check_operation(operation, record.objects)


def check_path(path: str) -> None:
    """Raises DamagedCommit unless every component could be a file name."""
    if not path or len(_encoded(path)) > KEY_BYTES_MAX:
        raise DamagedCommit(f"path {path[:80]!r}")
    for component in path.split("/"):
        if component in ("", ".", "..") or "\0" in component or len(component.encode()) > NAME_BYTES_MAX:
            raise DamagedCommit(f"path {path[:80]!r}")
    if path == RESERVED_NAME or path.startswith(RESERVED_PREFIX):
        raise DamagedCommit(f"path {path[:80]!r} is reserved")


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DamagedCommit("text that is not UTF-8") from error


def _check_etag(etag: str) -> None:
    """Raises DamagedCommit unless an ETag can be a header field, and fits into a row."""
    if not _ETAG.fullmatch(etag):
        raise DamagedCommit(f"ETag {etag[:80]!r} of {len(etag)} characters")


def _check_operation(operation: Operation, objects: list[ObjectRef]) -> None:
    check_path(operation.path)
    if isinstance(operation, Put | SetAttr):
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
    owners = operation.uid, operation.gid
    if not (0 <= mode <= MODE_MAX or mode == UNSET) or any(not 0 <= owner <= UNSET for owner in owners):
        raise DamagedCommit(f"attributes of {operation.path!r}")
    if not isinstance(operation, Relocate) and operation.xattrs:
        _check_xattrs(operation.path, operation.xattrs)


def _check_xattrs(path: str, xattrs: dict[str, bytes]) -> None:
    """Raises DamagedCommit for extended attributes that `setxattr` on a mount, or the kernel, would refuse."""
    length = 0
    for name, value in xattrs.items():
        raw = _encoded(name)
        is_ours = name.startswith(XATTR_PREFIX) and not name.startswith(RESERVED_XATTR)
        if not is_ours or "\0" in name or len(raw) > NAME_BYTES_MAX:
            raise DamagedCommit(f"extended attribute {name[:80]!r} of {path!r}")
        length += len(raw) + len(value)
    if length > XATTRS_BYTES_MAX:
        raise DamagedCommit(f"{length} bytes of extended attributes of {path!r}")
