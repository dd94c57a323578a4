"""Other programs of a simulation: what the oracle is told of their objects, and which of them they leave alone."""

from __future__ import annotations

import hashlib

from lakefs_fuse.store.protocol import Capabilities
from tests.simulation.lake_reader import Lake, StoredObject, read_lake
from tests.simulation.object_store import SimulatedStore
from tests.simulation.oracle import PROGRAM, Oracle
from tests.simulation.other_programs import OtherPrograms
from tests.simulation.test_lake_reader import NS, START_S, M, Operation, archive, key_of, put
from tests.simulation.trace import Commits

FIRST, SECOND = "0badcafe", "1badcafe"
"""Writers of commits, of the nodes a and b."""


class World:
    """A store, an oracle that knows what was committed, and the other programs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = SimulatedStore(Capabilities(name="simulated"), lambda: int((START_S + self.now_s) * NS))
        self.oracle = Oracle(deletes_conditionally=True)
        self.others = OtherPrograms(self.store, self.oracle, self.lake)
        self._commits = Commits()

    def lake(self) -> Lake:
        objects = self.store.objects.items()
        return read_lake({key: StoredObject(data, meta.etag, meta.mtime_ns) for key, (data, meta) in objects})

    def commit(self, node: str, writer: str, *operations: Operation, **how: object) -> None:
        """A node puts a commit, which is dated now."""
        raw = archive(self.now_s, *operations, record={"writer": writer}, **how)  # type: ignore[arg-type]
        self.store.sender = node
        self.store.put(key_of(self.now_s, writer), raw)

    def packed(self, data: bytes) -> None:
        """Node a has the file f in a pack, and everybody knows."""
        self.now_s += 10
        self.commit("a", FIRST, put("f", M("m")), members={"m": data})
        self.agree()
        self.now_s += 10

    def agree(self) -> None:
        tree = {path: name.data for path, name in self.lake().names.items() if name.data is not None}
        self.oracle.begin(tree, ["a", "b", PROGRAM])

    def check(self) -> list[str]:
        names = self.lake().names.items()
        return self.oracle.check({path: name.data for path, name in names if name.data is not None})


def etag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def test_object_in_place_of_a_file_replaces_it() -> None:
    world = World()
    world.packed(b"packed")
    assert world.others.put("f", b"foreign", 1) == "ok"
    assert world.check() == []
    world.store.remove("f")
    assert world.check() == [f"f shows packed+6 again, which was replaced by foreign+7 of {PROGRAM}"]


def test_object_that_a_commit_hides_promises_nothing() -> None:
    world = World()
    world.now_s = 10
    world.commit("a", FIRST, put("f", M("m"), hides=etag(b"foreign")), members={"m": b"packed"})
    world.agree()
    world.now_s = 20
    assert world.others.put("f", b"foreign", 1) == "hidden"
    assert world.check() == []


def test_removal_before_a_node_has_committed_it_brings_the_file_back_or_leaves_nothing() -> None:
    world = World()
    world.packed(b"packed")
    assert world.others.put("f", b"foreign", 1) == "ok"
    assert world.others.delete("f", 2) == "ok"
    assert world.lake().names["f"].data == b"packed"
    assert world.check() == []
    world.now_s += 5
    world.commit("b", SECOND, put("f", -1, 0, 7, hides=etag(b"foreign")))
    assert "f" not in world.lake().names
    assert world.check() == []


def test_renamed_file_that_comes_back_gets_what_is_written_in_its_place_unaware() -> None:
    """Node b writes at the key of a file that node a has renamed; a program puts an object in place of that, and
    removes it."""
    world = World()
    world.store.put_as("old", b"bytes", etag(b"bytes"))
    world.agree()
    world.now_s = 10
    bytes_of = world.oracle.matching("old", b"bytes")
    (origin,) = bytes_of
    world.oracle.remove("old", "a", bytes_of, is_rename=True, operation=1).is_certain = True
    world.oracle.put("f", b"bytes", "a", frozenset(), origin=origin, operation=1).is_certain = True
    renamed = put("f", 1, 0, 5), ["remove", "old", False, etag(b"bytes")]
    world.commit("a", FIRST, *renamed, objects=[["old", etag(b"bytes"), 5]])
    assert world.others.put("f", b"foreign", 2) == world.others.delete("f", 3) == "ok"
    assert world.lake().names["f"].data == b"bytes"
    written = world.oracle.put("old", b"written", "b", bytes_of, operation=4)
    written.is_plain = written.is_certain = True
    world.store.put_as("old", b"written", etag(b"written"))
    world.now_s = 20
    adopted = [*put("f", 2, 0, 7), {}, 1], ["remove", "old", False, etag(b"written")]
    objects = [["old", etag(b"bytes"), 5], ["old", etag(b"written"), 7]]
    world.commit("b", SECOND, *adopted, objects=objects)
    assert world.lake().names["f"].data == b"written"
    assert world.check() == []


def test_object_with_the_bytes_of_another_name_is_left_alone() -> None:
    world = World()
    assert world.others.put("old", b"bytes", 1) == "ok"
    world.now_s = 10
    renamed = put("new", 1, 0, 5), ["remove", "old", False, etag(b"bytes")]
    world.commit("a", FIRST, *renamed, objects=[["old", etag(b"bytes"), 5]])
    assert world.others.put("old", b"others", 2) == world.others.delete("old", 3) == "of another name"
    assert world.lake().names["new"].data == b"bytes"


def test_removal_of_what_is_not_there_or_not_shown_does_nothing() -> None:
    world = World()
    assert world.others.delete("f", 1) == "nothing there"
    world.store.put_as("f", b"left", etag(b"left"))
    world.now_s = 10
    world.commit("a", FIRST, ["remove", "f", False, etag(b"left")])
    assert world.others.delete("f", 2) == "not shown"
    assert "f" in world.store.objects


def test_directory_may_go_with_its_last_object() -> None:
    world = World()
    assert world.others.put("d/f", b"bytes", 1) == "ok"
    world.agree()
    assert world.others.delete("d/f", 2) == "ok"
    assert "d" not in world.lake().names
    assert world.check() == []


def test_what_a_node_replaced_stays_whatever_another_node_says_of_the_object_before() -> None:
    """Node b says late that f is the object of a program, after node a has replaced and deleted that."""
    world = World()
    world.packed(b"packed")
    assert world.others.put("f", b"foreign", 1) == "ok"
    world.now_s += 5
    seen = world.oracle.matching("f", b"foreign")
    world.oracle.observe("a", "f", seen)
    world.oracle.put("f", b"later", "a", seen).is_certain = True
    world.commit("a", FIRST, put("f", M("m"), hides=etag(b"foreign")), members={"m": b"later"})
    world.now_s += 1
    world.commit("b", SECOND, put("f", -1, 0, 7, hides=etag(b"foreign")))
    world.store.remove("f")
    assert world.check() == []
    assert world.lake().names["f"].data == b"later"
