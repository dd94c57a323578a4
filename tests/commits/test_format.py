"""`docs/format.md`: the reader in it runs as it is printed, and what it says of bytes and limits is so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from lakefs_fuse.commits import archive
from lakefs_fuse.commits import hybrid_clock as clock
from lakefs_fuse.commits import record as rec
from lakefs_fuse.commits.archive import build, commit_key, locate
from lakefs_fuse.commits.commit_log import TAIL_BYTES
from lakefs_fuse.commits.record import OWN, ObjectRef, Operation, Relocate, Remove, Symlink, encode, key_of_copy
from lakefs_fuse.meta.entry import ETAG_BYTES_MAX, MTIME_NS_MAX, MTIME_NS_MIN
from tests.commits.archives import member
from tests.commits.records import WRITER, put, record_of

TEXT = (Path(__file__).parents[2] / "docs/format.md").read_text()
S = 1_000_000_000
Plain = dict[str, tuple[str, int]]
Places = dict[str, tuple[object, ...]]


@pytest.fixture(scope="module")
def files() -> Callable[[dict[str, bytes], Plain], Places]:
    """The reader of the document."""
    (source,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(source, "docs/format.md", "exec"), names)
    assert len([line for line in source.splitlines() if line.strip()]) < 90
    return cast(Callable[[dict[str, bytes], Plain], Places], names["files"])


Reader = Callable[[dict[str, bytes], Plain], Places]


class Lake:
    """Commits one second apart, from second 100 on."""

    def __init__(self) -> None:
        self.commits: dict[str, bytes] = {}

    def commit(
        self, *operations: Operation, objects: tuple[ObjectRef, ...] = (), pack: dict[str, bytes] | None = None
    ) -> str:
        """With ``pack``, its files are put; answers the commit's key."""
        time = (100 + len(self.commits)) * S
        content = pack or {}

        def make_record(offsets: list[int]) -> bytes:
            puts = [put(path, offset=at, size=len(content[path])) for path, at in zip(content, offsets, strict=True)]
            return encode(record_of(*puts, *operations, objects=objects, time=time))

        key = commit_key(time, WRITER)
        self.commits[key] = build([member(path, data) for path, data in content.items()], make_record)
        return key

    def offset(self, key: str, content: bytes) -> int:
        return self.commits[key].index(content)

    def bytes_at(self, where: tuple[object, ...]) -> bytes:
        key, _, offset, size = cast(tuple[str, str | None, int, int], where)
        return self.commits[key][offset : offset + size]


def test_files_of_a_pack_and_the_last_commit_wins(files: Reader) -> None:
    lake = Lake()
    first = lake.commit(pack={"a": b"first a", "d/b": b"first b"})
    second = lake.commit(pack={"a": b"second a"})
    found = files(lake.commits, {})
    assert {path: lake.bytes_at(where) for path, where in found.items()} == {"a": b"second a", "d/b": b"first b"}
    assert (found["a"][0], found["d/b"][0]) == (second, first)


def test_renamed_linked_and_removed(files: Reader) -> None:
    lake = Lake()
    key = lake.commit(pack={"a": b"packed"})
    ref = ObjectRef(key, "etag of the pack", len(lake.commits[key]))
    at = lake.offset(key, b"packed")
    lake.commit(put("b", object=1, offset=at, size=6), Remove("a"), objects=(ref,))
    lake.commit(Symlink("link", "b", 0, 0, 0), put("c", object=1, size=4), objects=(ObjectRef("plain", "e", 4),))
    found = files(lake.commits, {"plain": ("e", 0)})
    assert lake.bytes_at(found.pop("b")) == b"packed"
    assert found == {"link": (None, "b"), "c": ("plain", "e", 0, 4), "plain": ("plain", "e", 0, None)}


def test_plain_objects_and_commits(files: Reader) -> None:
    lake = Lake()
    lake.commit(
        put("replaced", size=0, hides="known"), put("taken back", hides="known"), Remove("removed", hides="known"),
        Remove("made again", hides="known"), put("own", object=OWN, size=7, hides="known"),
        put("own but replaced", object=OWN, size=7, hides="known"), put("own but gone", object=OWN, hides="known"),
        put("written late", hides=""),
    )  # fmt: skip
    plain = {
        "never named": ("x", 0), "replaced": ("known", 500 * S), "taken back": ("other", 101 * S),
        "removed": ("known", 50 * S), "made again": ("other", 100 * S), "own": ("known", 99 * S),
        "own but replaced": ("other", 101 * S), "written late": ("old", 98 * S),
    }  # fmt: skip
    found = files(lake.commits, plain)
    (key,) = lake.commits
    assert {path: where[0] for path, where in found.items()} == {
        "never named": "never named", "replaced": key, "taken back": "taken back", "made again": "made again",
        "own": "own", "own but replaced": "own but replaced", "written late": key,
    }  # fmt: skip
    assert found["own"] == ("own", "known", 0, 7)


def test_relocated_only_where_it_is_still_that_version(files: Reader) -> None:
    lake = Lake()
    key = lake.commit(pack={"packed": b"bytes!", "changed": b"before"})
    ref = ObjectRef(key, "etag", len(lake.commits[key]))
    lake.commit(put("replaced in place", object=OWN, hides="before"), pack={"changed": b"after!"})

    def to_this(path: str, index: int, offset: int, etag: str = "") -> Relocate:
        return Relocate(path, index, offset, etag, 0, 99, 6, 0, 0, 0, 0, hides=etag)

    moved = lake.commit(
        to_this("packed", 1, lake.offset(key, b"bytes!")), to_this("changed", 1, lake.offset(key, b"before")),
        to_this("plain", OWN, 0, "e"), to_this("plain and gone", OWN, 0, "e"), to_this("plain, another", OWN, 0, "e"),
        to_this("replaced in place", OWN, 0, "e"), objects=(ref,),
    )  # fmt: skip
    found = files(lake.commits, {"plain": ("e", 90 * S), "plain, another": ("f", 90 * S)})
    assert lake.bytes_at(found.pop("changed")) == b"after!"
    assert found.pop("plain, another")[0] == "plain, another"
    names = ("packed", "plain", "plain and gone", "replaced in place")
    assert found == dict.fromkeys(names, (moved, None, 99, 6))


def test_plain_object_that_was_relocated_before_a_commit_named_it_stays_relocated(files: Reader) -> None:
    lake = Lake()
    moved = lake.commit(Relocate("f", OWN, 0, "e", 0, 99, 6, 0, 0, 0, 0, hides="e"))
    lake.commit(put("f", object=OWN, size=6, hides="e"))
    assert files(lake.commits, {}) == files(lake.commits, {"f": ("e", 90 * S)}) == {"f": (moved, None, 99, 6)}


def test_copy_of_what_the_name_is_not_any_more_is_hidden(files: Reader) -> None:
    lake = Lake()
    key = lake.commit(pack={"f": b"bytes!", "g": b"others"})
    ref = ObjectRef(key, "etag", len(lake.commits[key]))
    lake.commit(Remove("g", by_date=True), pack={"f": b"after!"})
    lake.commit(
        Relocate("f", 1, lake.offset(key, b"bytes!"), "", OWN, 0, 6, 0, 0, 0, 0, hides="copy"),
        Relocate("g", 1, lake.offset(key, b"others"), "", OWN, 0, 6, 0, 0, 0, 0, hides="copy"),
        objects=(ref,),
    )
    found = files(lake.commits, dict.fromkeys("fg", ("copy", 101 * S)))
    assert {path: lake.bytes_at(where) for path, where in found.items()} == {"f": b"after!"}


def test_bytes_of_which_a_commit_told_are_put_again_after_a_removal_of_others(files: Reader) -> None:
    lake = Lake()
    told = put("f", object=OWN, size=1, hides="first")
    lake.commit(told)
    lake.commit(Remove("f", hides="second"))
    assert files(lake.commits, {"f": ("first", 100 * S)})["f"] == ("f", "first", 0, 1)
    lake.commit(pack={"f": b"packed"})
    lake.commit(told)
    assert files(lake.commits, {"f": ("first", 103 * S)})["f"] == ("f", "first", 0, 1)


def test_other_bytes_of_a_renamed_object_count_for_that_version_alone(files: Reader) -> None:
    lake = Lake()
    objects = ObjectRef("old", "e", 5), ObjectRef("old", "f", 3)
    paths = "new", "other", "copied", "elsewhere"
    lake.commit(*(put(path, object=1, size=5) for path in paths), objects=objects)
    lake.commit(Remove("other", by_date=True))
    copies = [ObjectRef(key_of_copy("1", objects[0]), "g", 5), ObjectRef(key_of_copy("1", objects[1]), "h", 5)]
    for path, copy in zip(("copied", "elsewhere"), copies, strict=True):
        lake.commit(Relocate(path, 1, 0, "", 2, 0, 5, 0o644, 1, 2, 0), objects=(objects[0], copy))
    replaced = [msgspec.structs.replace(put(path, object=2, size=3), replaces=1) for path in paths]
    lake.commit(*replaced, objects=objects)
    assert files(lake.commits, {}) == {
        "new": ("old", "f", 0, 3), "copied": ("old", "f", 0, 3), "elsewhere": (copies[1].key, "h", 0, 5)
    }  # fmt: skip


def test_the_numbers_in_the_text_are_those_of_the_code() -> None:
    said = " ".join(TEXT.split())
    assert rec.FORMATS == (1, 2)
    assert f"at most `{rec.TIME_NS_MAX:016x}`" in said
    assert archive.RECORD_BYTES_MAX == 1 << 30
    assert "| record | 1 GiB, 20,000,000 operations |" in said
    assert rec.OPERATIONS_MAX == 20_000_000
    assert f"{rec.KEY_BYTES_MAX:,} bytes; {rec.NAME_BYTES_MAX} bytes for each name" in said
    assert f"{rec.TARGET_BYTES_MAX:,} bytes" in said
    assert f"{rec.XATTRS_BYTES_MAX >> 10} KiB in all" in said
    assert rec.SIZE_MAX == 1 << 47
    assert "| offset, size | 2^47 |" in said
    assert f"| ETag | {ETAG_BYTES_MAX} printable ASCII characters |" in said
    assert (MTIME_NS_MIN, MTIME_NS_MAX) == (-(1 << 62), 1 << 62)
    assert rec.DATED_S_MAX == 1 << 33
    assert f"| mode | 0{rec.MODE_MAX:o} |" in said
    assert rec.UNSET == 0xFFFF_FFFF
    assert f"The comment has {archive.COMMENT_BYTES_MAX} bytes at most" in said
    assert TAIL_BYTES == 256 << 10
    assert clock.COMMIT_AHEAD_MAX_S == 60
    assert f"{clock.COMMIT_AHEAD_MAX_S} seconds (`COMMIT_AHEAD_MAX_S`)" in said
    assert clock.DIFFERENCE_NS_MAX == 2 * S
    assert (archive.LOCAL.size, archive.CENTRAL.size, archive.END64.size, archive.LOCATOR64.size) == (30, 46, 56, 20)


def test_the_longest_comment_is_read() -> None:
    comment = b"lakefs1 %d %d %08x" % (10**18 - 1, 1 << 30, 0)
    end = archive.END.pack(archive.END_MAGIC, 0, 0, 0, 0, 0, 0, len(comment)) + comment
    assert len(comment) <= archive.COMMENT_BYTES_MAX
    assert locate(bytes(100) + end, 1 << 62).offset == 10**18 - 1


def test_every_operation_is_described_with_its_fields() -> None:
    described = dict(re.findall(r"^\| `(\w+)` \| (path.*?) \|$", TEXT, re.MULTILINE))
    kinds: list[type[Operation]] = list(Operation.__args__)
    assert list(described) == [kind.__struct_config__.tag for kind in kinds]
    for kind in kinds:
        fields = [name.removesuffix("_ns") for name in kind.__struct_fields__]
        written = re.sub(r"\(bool\)|[\[\]]", "", described[str(kind.__struct_config__.tag)]).split(",")
        assert [name.strip() for name in written] == fields
        optional = len(kind.__struct_defaults__)
        bracketed = re.search(r"\[(.*)\]", described[str(kind.__struct_config__.tag)])
        assert (bracketed[1].count(",") + 1 if bracketed else 0) == optional
