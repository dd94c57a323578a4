"""Random change records, and every way to say something in one that a reader must refuse."""

from __future__ import annotations

from hypothesis import strategies as st

from lakefs_fuse.commits import record as rec
from lakefs_fuse.commits.record import (
    OWN,
    THIS,
    UNSET,
    Mkdir,
    ObjectRef,
    Operation,
    Put,
    Record,
    Relocate,
    Remove,
    SetAttr,
    Symlink,
)
from lakefs_fuse.meta.entry import ETAG_BYTES_MAX, MTIME_NS_MAX, MTIME_NS_MIN

WRITER = "0badcafe"
TIME = 1_700_000_000_000_000_000

# Mapped, not filtered: hypothesis 6 looks at the source of a filter again for each value that it draws.
names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20).map(
    lambda name: name + "_" if name in (".", "..", ".lakefs") else name
)
paths = st.lists(names, min_size=1, max_size=5).map("/".join)
etags = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=ETAG_BYTES_MAX)
modes = st.integers(0, rec.MODE_MAX) | st.just(UNSET)
owners = st.integers(0, UNSET)
times = st.integers(MTIME_NS_MIN, MTIME_NS_MAX)
xattrs = st.dictionaries(names.map(lambda name: f"user.{name}"), st.binary(max_size=100), max_size=3)
targets = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=100)
numbers = st.integers(0, rec.SIZE_MAX)
refs = st.builds(ObjectRef, paths | paths.map(lambda path: rec.COMMITS + path), etags, numbers)


@st.composite
def operations(draw: st.DrawFn, objects: list[ObjectRef]) -> Operation:
    def place(size: int) -> tuple[int, int]:
        fitting = [OWN, THIS, *(index for index, ref in enumerate(objects) if index and ref.size >= size)]
        index = draw(st.sampled_from(fitting))
        top = 0 if index == OWN else rec.SIZE_MAX if index == THIS else objects[index].size - size
        return index, draw(st.integers(0, top))

    path, size = draw(paths), draw(numbers)
    who = draw(owners), draw(owners), draw(times)
    match draw(st.integers(0, 5)):
        case 0:
            return Put(path, *place(size), size, draw(modes), *who, draw(etags), draw(xattrs))
        case 1:
            return Mkdir(path, draw(modes), *who, draw(xattrs))
        case 2:
            return Symlink(path, draw(targets), *who, draw(etags), draw(xattrs))
        case 3:
            return Remove(path, draw(st.booleans()), draw(etags))
        case 4:
            return SetAttr(path, *place(size), size, draw(etags), draw(modes), *who, draw(xattrs))
        case _:
            return Relocate(path, *place(size), draw(etags), *place(size), size, draw(modes), *who, draw(etags))


@st.composite
def valid_records(draw: st.DrawFn) -> Record:
    objects = [ObjectRef(), *draw(st.lists(refs, max_size=4))]
    return Record(
        writer=draw(st.from_regex(rec.WRITER, fullmatch=True)),
        time=draw(st.integers(0, rec.TIME_NS_MAX)),
        objects=objects,
        moves=draw(st.lists(st.tuples(paths, paths), max_size=3)),
        operations=draw(st.lists(operations(objects), max_size=8)),
    )


def put(path: str = "a", *, object: int = THIS, offset: int = 0, size: int = 0, hides: str = "") -> Put:
    """A file of which the rest does not matter."""
    return Put(path, object, offset, size, UNSET, UNSET, UNSET, 0, hides)


def record_of(*operations: Operation, objects: tuple[ObjectRef, ...] = (), time: int = TIME) -> Record:
    """A record of these operations."""
    return Record(writer=WRITER, time=time, objects=[ObjectRef(), *objects], operations=list(operations))
