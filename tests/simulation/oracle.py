"""What may be in the lake: decided from what users were told, and what each node knew when it did something.

The lake is a set of registers, one for each path. A *put* writes a version; a *removal* names the version that it
removes, and touches no other. A put *knows* the versions of its path that its node had seen when it began: it comes
after them. Puts that do not know of each other come in either order. So a path may show

* a version that no acknowledged put knows, and no acknowledged removal names; or
* nothing, if nothing was put, or if a version that may be the last one was removed.

A rename is a removal and a put of the same bytes. What was not acknowledged may have happened or not. Everything else
is a loss, a resurrection or a tear, but for the cases that docs/SEMANTICS.md lists under "What others see, and when":
plain objects are changed in place, so of two nodes that had not seen each other's change

* the later commit wins, a removal like any other (*later commit*; also one of equal bytes, which have one ETag), but
  that
* a rename and a write in place, or a removal and a write, leave the new bytes under the new name (*carried*), unless
  a later commit removes that; whenever they are stored, also over what was put there since, if the write has not
  succeeded before that (*stored late*);
* a rename and a deletion leave the new name, or neither where it was another program's deletion (*deleted*);
* a rename by a node that was cut off for longer than removed objects stay is left out where another node had replaced
  the file, so that its object is gone (*left out*);
* a deletion and a write in place leave the written file, but on stores that ignore If-Match on DELETE, and where the
  same bytes are written again, between a look and the DELETE (*unchecked*).

Some defects are known, and are counted in `Oracle.known` in place of being reported, unless the oracle is strict:

* *late copy*: a renamed object is copied to its new key, or a packed file unpacked to its own, while another node
  renames or removes that name, which shows again;
* *destroyed bytes*: a file was renamed after another program had replaced its object, in the same second: it cannot be
  read under its new name until its user removes it.

A directory that no commit makes is there for as long as something is in it (*emptied*). Who removes the last name in
one has it made by a commit; of two nodes that remove the last two names neither knows that it has to. A rename of a
directory above takes it along unless its node has heard of both removals before it commits.

The oracle starts anew whenever all nodes agreed on a tree, with what they agreed on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

DIRECTORY = b"<directory>"
PROGRAM = "foreign"
"""The node that stands for other programs."""
PATHS_MAX = 50
NOTHING: Mapping[str, bytes] = MappingProxyType({})
CONFLICT = ".conflict-"
"""In the name under which a version is kept where another client had created the file first."""


@dataclass(eq=False)
class Version:
    """A put of bytes at a path; ``is_certain`` once its user was told so."""

    path: str
    data: bytes
    node: str
    number: int
    known: frozenset[Version] = frozenset()
    shown: frozenset[Version] = frozenset()
    """What the node showed at the path when the put began: what a plain object replaces in place."""
    is_certain: bool = False
    told: int = 0
    """The number of the last version that was put before its user was told so, of a write."""
    origin: Version | None = None
    """The version that a rename moved here."""
    moved_to: list[Version] = field(default_factory=list)
    operation: int = -1
    is_withdrawn: bool = False
    """It never began."""
    is_plain: bool = False
    """It is the object at its own key."""
    is_exclusive: bool = False
    """Its file was opened with O_EXCL."""
    removals_before: frozenset[Removal] = frozenset()
    """Its node knew them: it had seen what they removed, and saw nothing there any more."""

    def __str__(self) -> str:
        return f"{describe(self.data)} of {self.node}{'' if self.is_certain else '?'}"

    def origins(self) -> list[Version]:
        """What renames moved here, one after another, the newest first."""
        return [] if self.origin is None else [self.origin, *self.origin.origins()]

    def moved_on(self) -> list[Version]:
        """What renames by its own node made of it, one after another."""
        own = [each for each in self.moved_to if each.node == self.node and not each.is_withdrawn]
        return own + [later for each in own for later in each.moved_on()]


@dataclass(eq=False)
class Removal:
    """A removal of one of ``named``; all of them are the same bytes or may be the one."""

    path: str
    node: str
    named: frozenset[Version]
    known: frozenset[Version] = frozenset()
    """What its node had seen at the path."""
    is_plain: bool = False
    """What it removes is the object at its own key."""
    is_rename: bool = False
    is_certain: bool = False
    operation: int = -1
    is_withdrawn: bool = False


def describe(data: bytes) -> str:
    """A version's bytes in a few characters."""
    if data in (b"", DIRECTORY) or data.startswith(b"-> "):
        return repr(data)
    return f"{data[:8].decode(errors='replace')}+{len(data)}"


def _may_be_plain(version: Version) -> bool:
    """It is, or may become, the object at its own key, in place of what is there: also where renames had moved it
    before it was stored."""
    is_new = not any(each.is_certain for each in (version, *version.origins()))
    return (version.is_plain or is_new) and version.data != DIRECTORY


def _is_unaware(version: Version, removal: Removal) -> bool:
    """Neither the one's node nor the other's knew of both."""
    return version not in removal.known and removal not in version.removals_before


def _replaces(version: Version) -> set[Version]:
    """What its node showed at the path when it was put, when that was put, and so on."""
    found, pending = set(version.shown), list(version.shown)
    while pending:
        pending += (before := pending.pop().shown - found)
        found |= before
    return found


class Oracle:
    """See the module's head."""

    def __init__(
        self, *, deletes_conditionally: bool, is_strict: bool = False,
        last_remover: Callable[[str], str] = lambda _: "", is_copy: Callable[[str], bool] = lambda _: False,
        is_made: Callable[[str], bool] = lambda _: True, is_moved: Callable[[str, str], bool] = lambda *_: True,
    ) -> None:  # fmt: skip
        """``last_remover`` answers which node wrote the newest commit of a path, if that removes it; ``is_copy``
        whether the object at a path's own key was made from another; ``is_made`` whether the newest commit of a
        directory makes it; ``is_moved`` whether a commit took a directory from one path to another."""
        self.is_copy, self.is_made, self.is_moved = is_copy, is_made, is_moved
        self.deletes_conditionally, self.is_strict = deletes_conditionally, is_strict
        self.last_remover = last_remover
        self.known: Counter[str] = Counter()
        """How often a known defect was met."""
        self.versions: dict[str, list[Version]] = defaultdict(list)
        self.removals: dict[str, list[Removal]] = defaultdict(list)
        self.seen: dict[tuple[str, str], set[Version]] = defaultdict(set)
        """By node and path."""
        self.disturbed: set[str] = set()
        """Nodes that died since everybody agreed, or waited in vain for an answer of the store."""
        self.long_away: set[str] = set()
        """Nodes that were cut off for longer than removed objects stay since everybody agreed."""
        self.applied: dict[tuple[str, bytes], set[bytes]] = {}
        """By node and bytes: what the node had applied under the name when its first request with the bytes came to the
        store, as a plain object."""
        self.deleted_unseen: set[tuple[str, bytes]] = set()
        """Plain objects, by path and bytes, that were stored between the look of their deleter and its DELETE."""
        self.ever: dict[str, set[bytes]] = defaultdict(set)
        """All bytes that were ever at a path, since the beginning."""
        self.met: Counter[str] = Counter()
        """How often something was decided by each rule."""
        self._asked_about: set[Version] = set()
        """Versions of which `_may_have_been_there` is being asked."""
        self.hidden: set[bytes] = set()
        """Bytes of names that were files and directories in one round: a directory may hide the file, and no node shows
        where that goes with the directories above."""
        self._serial = 0

    def begin(self, tree: Mapping[str, bytes], nodes: Iterable[str], *, plain: Container[str] = ()) -> None:
        """Everybody agrees on this tree. ``plain`` are files that are the objects at their own keys."""
        hidden = [(path, data) for path in tree if tree[path] == DIRECTORY for data in self._files_at(path)]
        for versions in self.versions.values():
            if any(version.data == DIRECTORY for version in versions):
                self.hidden.update(version.data for version in versions if version.data != DIRECTORY)
        self.versions.clear()
        self.removals.clear()
        self.seen.clear()
        self.disturbed.clear()
        self.long_away.clear()
        self.applied.clear()
        self.deleted_unseen.clear()
        names = list(nodes)
        for path, data in tree.items():
            version = self.put(path, data, "everybody", frozenset())
            version.is_certain, version.is_plain = True, path in plain
            for node in names:
                self.seen[node, path].add(version)
        for path, data in hidden:
            self.put(path, data, "everybody", frozenset())

    def _files_at(self, path: str) -> set[bytes]:
        """Files that a directory of this name may hide: they are seen once that is gone."""
        put = [version for version in self.versions.get(path, ()) if not version.is_withdrawn]
        return {version.data for version in put if version.data != DIRECTORY and not self._removed(version)}

    def put(
        self, path: str, data: bytes, node: str, shown: frozenset[Version], *, origin: Version | None = None,
        operation: int = -1,
    ) -> Version:  # fmt: skip
        """A put begins; it is not certain yet."""
        self._serial += 1
        known = frozenset(self.seen[node, path]) | (shown if len(shown) == 1 else frozenset())
        version = Version(path, data, node, self._serial, known, shown, origin=origin, operation=operation)
        if not shown:
            version.removals_before = self._removals_known(path, node)
        self.versions[path].append(version)
        self.ever[path].add(data)
        if origin is not None:
            origin.moved_to.append(version)
        return version

    def _removals_known(self, path: str, node: str) -> frozenset[Removal]:
        """Of what a node had seen at a path where it sees nothing: its own, and others' of what it neither removed nor
        replaced itself."""
        seen = self.seen[node, path]
        own = [removal for removal in self.removals[path] if removal.node == node and not removal.is_withdrawn]
        gone = seen.difference(*(named.known | {named} for removal in own for named in removal.named))
        others = [removal for removal in self.removals[path] if removal.node != node and removal.named & gone]
        certain = [removal for removal in others if removal.is_certain]  # or it saw one that is on its way
        return frozenset([*(certain or others), *(removal for removal in own if removal.named & seen)])

    def remove(
        self, path: str, node: str, named: frozenset[Version], *, is_rename: bool = False, operation: int = -1
    ) -> Removal:
        """A removal begins."""
        known = frozenset(self.seen[node, path]) | named
        removal = Removal(path, node, named, known, is_rename=is_rename, operation=operation)
        self.removals[path].append(removal)
        return removal

    def matching(self, path: str, data: bytes) -> frozenset[Version]:
        """The versions of a path that have these bytes; else those that a rename moved there and took them along."""
        versions = [version for version in self.versions.get(path, ()) if not version.is_withdrawn]
        found = frozenset(version for version in versions if version.data == data)
        return found or frozenset(version for version in versions if data in self._bytes_of(version))

    def carrying(self, path: str, data: bytes) -> frozenset[Version]:
        """The versions of a path that may have taken these bytes along, which were written in place of an origin."""
        return frozenset(v for v in self.versions.get(path, ()) if data in self._bytes_of(v) and not v.is_withdrawn)

    def follow(self, path: str, data: bytes) -> frozenset[Version]:
        """What is shown here, and was put elsewhere before another node renamed a directory, is a version of this path
        from now on."""
        return frozenset(
            self.put(path, data, version.node, frozenset(), origin=version) for version in self._moved_along(path, data)
        )

    def acknowledge(self, version: Version) -> None:
        """The user of a write is told that it succeeded."""
        version.is_certain, version.told = True, self._serial

    def observe(self, node: str, path: str, versions: frozenset[Version]) -> None:
        """A node was shown one of these."""
        if len(versions) == 1:
            self.seen[node, path] |= versions

    # -- decisions

    def check(self, tree: Mapping[str, bytes]) -> list[str]:
        """What is wrong with a tree on which all nodes agree."""
        paths = {*tree, *self.versions, *self.removals}
        return [wrong for path in sorted(paths) if (wrong := self._check(path, tree))]

    def _check(self, path: str, tree: Mapping[str, bytes]) -> str:
        data = tree.get(path)
        if CONFLICT in path:
            is_known = data is None or any(data in ever for ever in self.ever.values())
            return "" if is_known else f"{path} has bytes that nobody wrote"
        versions = [version for version in self.versions.get(path, ()) if not version.is_withdrawn]
        if data is None:
            return self._check_absent(path, versions, tree)
        if data == DIRECTORY and (
            any(below.startswith(path + "/") for below in tree)
            or any(map(self._is_changed_below, [path, *self.moved_from(path)]))
        ):
            return ""
        found = [version for version in versions if data in self._bytes_of(version)]
        if not found and self._is_moved_along(path, data):
            self.met["moved along"] += 1
            return ""
        if not found and data in self.hidden:
            self.met["hidden"] += 1
            return ""
        if not found:
            listed = ", ".join(map(str, versions)) or "nothing"
            return f"{path} shows {describe(data)}, which nobody put there ({listed} was put)"
        allowed = [version for version in found if not self._replaced(version, tree) and not self._removed(version)]
        if not allowed and any(self._is_stored_late(version, data) for version in found):
            self.met["stored late"] += 1
            return ""
        if not allowed and self._is_left_and_moved_along(found, path, data):
            self.met["moved along"] += 1
            return ""
        if not allowed and self.is_copy(path) and self.is_known("late copy"):
            return ""
        if not allowed:
            return f"{path} shows {describe(data)} again, which was {self._why_gone(found[0])}"
        return ""

    def _check_absent(self, path: str, versions: list[Version], tree: Mapping[str, bytes]) -> str:
        certain = [version for version in versions if version.is_certain]
        if not certain:
            return ""
        for version in versions:
            if not self._replaced(version) and self._may_be_removed(version, tree):
                return ""
        if all(version.data == DIRECTORY and self._is_emptied(version) for version in certain):
            self.met["emptied"] += 1
            return ""
        lost = [version for version in certain if not self._replaced(version)] or certain
        return f"{path} is gone: {', '.join(map(str, lost))} was put and nobody removed it"

    def is_known(self, defect: str) -> bool:
        """Count a known defect; False where it has to be reported."""
        if self.is_strict:
            return False
        self.known[defect] += 1
        return True

    def _is_moved_along(self, path: str, data: bytes) -> bool:
        return bool(self._moved_along(path, data))

    def _is_left_and_moved_along(self, found: list[Version], path: str, data: bytes) -> bool:
        """These bytes were written in place of a file that another node renamed to this path. A user removed that file
        before its node had seen them, so they are still under the old name, and a rename of its directory took them
        here."""
        left = [each for each in self._moved_along(path, data) if not self._replaced(each) and not self._removed(each)]
        return bool(left) and all(version.data != data for version in found)

    def _moved_along(self, path: str, data: bytes) -> list[Version]:
        """Versions with these bytes that were being written, and may be here as another node renamed a directory."""
        return [
            version
            for versions in list(self.versions.values())
            for version in versions
            if version.data == data and not version.is_withdrawn and path in self._along(version)
        ]

    def _along(self, version: Version) -> set[str]:
        """Paths to which a version that was not in the store yet goes, because another node renamed a directory, and
        from there because its own node did later. As the renames are in no order here, they may go in circles."""
        found, pending = set[str](), [version.path]
        while pending and len(found) < PATHS_MAX:
            path = pending.pop(0)
            for at in [at for at, mark in enumerate(path) if mark == "/"]:
                for directory in self.versions.get(path[:at], ()):
                    for moved in directory.moved_to:
                        along = moved.path + path[at:]
                        is_own = moved.node == version.node
                        if is_own and (path == version.path or moved.number < version.number):
                            continue  # what its own node showed when it began a rename is put under the new name
                        if not moved.is_withdrawn and along not in found:
                            found.add(along)
                            pending.append(along)
        return found

    def _is_emptied(self, version: Version) -> bool:
        """No commit makes the directory any more, here or, when a rename that was to take it here was committed, at its
        earlier name: it was there only because of what was below it."""
        moved = version
        while (origin := moved.origin) is not None and not self.is_moved(origin.path, moved.path):
            if self._is_left_by_all(origin.path, moved.operation):
                return True
            moved = origin
        return self._is_left_by_all(version.path)

    def _is_left_by_all(self, path: str, rename: int | None = None) -> bool:
        """Who removed the last names below a path had no reason to make the directory. Those that this operation
        renamed do not count."""
        below = [each for where, some in self.removals.items() if where.startswith(path + "/") for each in some]
        removers = {each.node for each in below if not each.is_withdrawn and each.operation != rename}
        return not self.is_made(path) and len(removers) > (0 if self.last_remover(path) else 1)

    def _is_changed_below(self, path: str) -> bool:
        """A directory that one node removed while another changed something in it stays."""
        removers = {removal.node for removal in self.removals[path] if not removal.is_withdrawn}
        changes: tuple[Mapping[str, list[Version]] | Mapping[str, list[Removal]], ...] = self.versions, self.removals
        return any(
            change.node != "everybody" and not change.is_withdrawn and {change.node} != removers
            for changed in changes
            for below, some in changed.items()
            if below.startswith(path + "/")
            for change in some
        )

    def moved_from(self, path: str) -> set[str]:
        """Where something was before directories above it were renamed, one after the other."""
        found, pending = set[str](), [path]
        while pending and len(found) < PATHS_MAX:
            path = pending.pop()
            for at in [at for at, mark in enumerate(path) if mark == "/"]:
                for directory in self.versions.get(path[:at], ()):
                    if directory.origin is not None and not directory.is_withdrawn:
                        before = directory.origin.path + path[at:]
                        pending += [before] if before not in found else []
                        found.add(before)
        return found

    def names_of(self, path: str) -> list[str]:
        """A path, and where its file was before it, or a directory above it, was renamed."""
        origins = {each.path for version in self.versions.get(path, ()) for each in version.origins()}
        return [path, *sorted((self.moved_from(path) | origins) - {path})]

    def _replaced(self, version: Version, tree: Mapping[str, bytes] = NOTHING) -> bool:
        """An acknowledged put knew it, which is not under the name from which a rename was to take it along."""
        return any(
            version in later.known
            and later.is_certain
            and not self._is_left_behind(later, tree)
            and not any(self._may_be_left_out(each) for each in (later, *later.origins()))
            for later in self.versions[version.path]
        )

    def _is_left_behind(self, version: Version, tree: Mapping[str, bytes]) -> bool:
        """It was stored while another node renamed it, and is under the old name after all."""
        is_taken_along = version.origin is not None and version.operation == -1
        return is_taken_along and tree.get(version.origin.path) == version.data  # type: ignore[union-attr]

    def _removed(self, version: Version) -> bool:
        """An acknowledged removal named it, and it alone."""
        return any(r.is_certain and r.named == {version} for r in self.removals[version.path])

    def _may_be_removed(self, version: Version, tree: Mapping[str, bytes]) -> bool:
        if any(tree.get(path) == version.data for path in self._along(version)):
            self.met["moved along"] += 1
            return True
        if self._is_written_under_another_name(version):
            self.met["moved along"] += 1
            return True
        if version.is_plain and (version.path, version.data) in self.deleted_unseen:
            self.met["unchecked"] += 1
            return True
        for removal in self.removals[version.path]:
            if removal.is_withdrawn:
                continue
            if self._may_have_taken(removal, version, tree):
                return True
            is_in_place = any(
                version in self._in_place_of(named) or version in self._created_after(named) for named in removal.named
            )
            if removal.is_rename and is_in_place and self._is_carried(version, removal, tree):
                self.met["carried"] += 1
                return True
            is_unaware = _is_unaware(version, removal) or self._is_later(removal, version)
            if is_unaware and not (version.is_plain and removal.is_plain):
                self.met["later commit"] += 1
                return True
            is_same = any(named.data == version.data for named in removal.named)
            if is_unaware and is_same and self.last_remover(version.path) == removal.node:
                self.met["later commit of equal bytes"] += 1
                return True
            if not removal.is_rename and not self.deletes_conditionally and version.node != removal.node:
                self.met["unchecked"] += 1
                return True
        if version.origin is not None and version.operation == -1 and self._is_at(version.origin, tree):
            self.met["not moved along"] += 1
            return True
        moved = version
        while moved.origin is not None:
            there = self._in_place_of(moved.origin)
            for removal in self.removals[moved.origin.path]:
                if there & removal.named and not removal.is_rename and removal.node != moved.node:
                    self.met["deleted"] += 1
                    return True
            if self._may_be_left_out(moved):
                self.met["left out"] += 1
                return True
            moved = moved.origin
        return False

    def _is_later(self, removal: Removal, version: Version) -> bool:
        """The newest commit of the path is this removal, whose node did not know the version. That one's node saw
        nothing at the path, but perhaps only because a third node had removed the same."""
        others = [each for each in version.removals_before if each.node not in (removal.node, version.node)]
        is_explained = any(each.is_certain and each.named & removal.named for each in others)
        is_newest = self.last_remover(version.path) == removal.node
        return version not in removal.known and is_explained and is_newest

    def _may_be_left_out(self, version: Version) -> bool:
        """The node that renamed it here was away for so long that the object may have been deleted before: another
        node had replaced or removed the file, or what was written in its place."""
        origin = version.origin
        if origin is None or version.node not in self.long_away:
            return False
        there = self._in_place_of(origin)
        return any(
            there & later.known and later.node != version.node and not later.is_withdrawn
            for later in self.versions[origin.path]
        ) or any(
            there & removal.named and removal.node != version.node and not removal.is_withdrawn
            for removal in self.removals[origin.path]
        )

    def _is_written_under_another_name(self, version: Version) -> bool:
        """What its node wrote in its place was acknowledged where another node's rename had taken the file."""
        later = (each for each in self.versions[version.path] if version in each.known)
        return any(moved.is_certain and moved.operation == -1 for each in later for moved in each.moved_to)

    def _may_have_taken(self, removal: Removal, version: Version, tree: Mapping[str, bytes]) -> bool:
        """It named the version, and has happened, whatever its user was told."""
        return version in removal.named and not removal.is_withdrawn and self._has_arrived(removal, tree)

    def _has_arrived(self, removal: Removal, tree: Mapping[str, bytes]) -> bool:
        """What an uncertain rename may have taken from its old name is under the new one then, or something that came
        after it there. A certain one has said so itself."""
        moved = [
            each
            for named in removal.named
            for each in named.moved_to
            if each.operation == removal.operation and not each.is_withdrawn
        ]
        return removal.is_certain or not moved or any(self._may_have_been_there(each, tree) for each in moved)

    def _may_have_been_there(self, version: Version, tree: Mapping[str, bytes]) -> bool:
        """It is under its path, or another put may have replaced it, or a removal removed it. Renames, of which each
        may have taken what the next one moved, do not prove one another."""
        if version in self._asked_about:
            return False
        others = [each for each in self.versions[version.path] if each is not version and each not in version.known]
        if tree.get(version.path) in self._bytes_of(version) or any(not each.is_withdrawn for each in others):
            return True
        self._asked_about.add(version)
        try:
            return self._may_be_removed(version, tree)
        finally:
            self._asked_about.discard(version)

    def may_be_beside(self, path: str, data: bytes) -> bool:
        """These bytes may be kept beside what is at a path: another node put something there that their writer had not
        seen when it began. Unless the writer created the file with O_EXCL, or was disturbed, it had not applied that
        either when it sent the bytes, as a plain object."""
        paths = self.names_of(path)
        puts = [each for where in paths for each in self.versions.get(where, ()) if not each.is_withdrawn]
        mine = [each for each in puts if each.data == data]
        return not mine or any(self._is_met(version, other) for version in mine for other in puts)

    def _is_met(self, version: Version, other: Version) -> bool:
        """The node of a version found another's put at its name, which it does not replace."""
        node = version.node
        if other.node == node or other in version.known:
            return False
        if node in self.disturbed:
            return True
        mine = (version, *(each for each in _replaces(version) if each.node == node))
        sent = [self.applied[node, each.data] for each in mine if (node, each.data) in self.applied]
        is_unaware = any(each.is_exclusive for each in mine) or any(other.data not in applied for applied in sent)
        return is_unaware and version not in other.known

    def _in_place_of(self, version: Version) -> set[Version]:
        """The version, and those that were written in its place, one after another, or by who had not heard of it: the
        object at the key, which stays for a while where the name is gone. Equal bytes are one version."""
        found, before = {version}, 0
        while len(found) > before:
            before, data = len(found), {each.data for each in found}
            for later in self.versions[version.path]:
                is_unaware = version not in later.known and later not in version.known and _may_be_plain(later)
                is_overwritten = version in later.known and version.is_plain and later.is_plain
                is_later = is_unaware or is_overwritten or any(each.data in data for each in later.shown)
                is_later = is_later or (later.node == PROGRAM and version in later.known)  # or after a removal
                if not later.is_withdrawn and is_later:
                    found.add(later)
        return found

    def _created_after(self, version: Version) -> set[Version]:
        """Plain files that who had removed the version, or one written in its place, created under its name, and stored
        over its object."""
        there = self._in_place_of(version)
        removals = [r for r in self.removals[version.path] if not (r.is_rename or r.is_withdrawn)]
        return {
            later
            for later in self.versions[version.path]
            if _may_be_plain(later) and not later.is_withdrawn
            if any(r.node == later.node and r.named & there & (later.known - later.shown) for r in removals)
        }

    def _is_at(self, version: Version, tree: Mapping[str, bytes]) -> bool:
        """A file that was stored while another node renamed its directory may be under the old name after all."""
        return tree.get(version.path) == version.data or self._replaced(version) or self._removed(version)

    def _is_carried(self, version: Version, removal: Removal, tree: Mapping[str, bytes]) -> bool:
        """A rename that removed what a version replaced in place took its bytes along."""
        pending = [moved for named in removal.named for moved in named.moved_to]
        while pending:
            moved = pending.pop()
            shown = tree.get(moved.path)
            if (
                shown == version.data
                or self._replaced(moved)
                or self._removed(moved)
                or self._is_overtaken(moved, shown)
            ):
                return True
            if self._is_removed_later(moved) or self._may_be_replaced(moved, shown):
                return True
            if shown is None and any(self._may_have_taken(r, moved, tree) for r in self.removals[moved.path]):
                return True
            pending += moved.moved_to
        return False

    def _may_be_replaced(self, version: Version, shown: bytes | None) -> bool:
        """A put that knew it has happened, whatever its user was told: it is there, or what it took along, or a removal
        named it and nothing is."""
        later = [each for each in self.versions[version.path] if version in each.known]
        named = [removal.named for removal in self.removals[version.path] if not removal.is_withdrawn]
        if shown is None:
            return any(each in some for each in later for some in named)
        return any(shown in self._bytes_of(each) for each in later)

    def _is_removed_later(self, version: Version) -> bool:
        """The newest commit of its path is a removal by another node, which did not know it and takes all the same what
        is there. What was written in place of its origin goes with it."""
        remover = self.last_remover(version.path)
        return remover not in ("", version.node) and any(
            removal.node == remover and not removal.is_withdrawn and _is_unaware(version, removal)
            for removal in self.removals[version.path]
            if not (version.is_plain and removal.is_plain)
        )

    def _is_overtaken(self, version: Version, shown: bytes | None) -> bool:
        """Another put that it did not know came to the same path, as its user was told, or as the path shows."""
        others = [each for each in self.versions[version.path] if each is not version and each not in version.known]
        return any((each.is_certain or each.data == shown) and not each.is_withdrawn for each in others)

    def _bytes_of(self, version: Version) -> set[bytes]:
        """Its own, and those that were written in place of an origin, or of a file created there after that was
        removed, by who had not seen the rename."""
        found = {version.data}
        for _, origin in self._moves_to(version):
            found |= {other.data for other in self._in_place_of(origin) | self._created_after(origin)}
        return found

    def _moves_to(self, version: Version) -> Iterator[tuple[Version, Version]]:
        """What renames moved here, one after another, as it was after and before each. That may be any version of
        equal bytes from before the rename."""
        pending, walked = [version], set[Version]()
        while pending:
            moved = pending.pop()
            if (origin := moved.origin) is None:
                continue
            equal = (each for each in self.versions[origin.path] if each.data == origin.data and not each.is_withdrawn)
            for each in [origin, *(each for each in equal if each is not origin and each.number < moved.number)]:
                if each not in walked:
                    walked.add(each)
                    pending.append(each)
                    yield moved, each

    def _is_stored_late(self, version: Version, data: bytes) -> bool:
        """Another node was writing what a rename moved here. Its user was told of no success, or not before all that
        was put here since, so it may have been stored after that. Of equal bytes the rename may have seen any."""
        puts = self.versions[version.path]
        since = [later.number for later in puts if version in later.known and later.is_certain]
        for moved, origin in self._moves_to(version):
            there = self._in_place_of(origin)
            for removal in self.removals[origin.path]:
                known = removal.known - removal.named if len(removal.named) > 1 else removal.known
                unseen = there - known if removal.operation == moved.operation else ()
                late = [each for each in unseen if not each.is_certain or (since and each.told >= max(since))]
                if any(each.data == data and each.node != removal.node for each in late):
                    return True
        return False

    def _why_gone(self, version: Version) -> str:
        for later in self.versions[version.path]:
            if version in later.known and later.is_certain:
                return f"replaced by {later}"
        for removal in self.removals[version.path]:
            if removal.is_certain and removal.named == {version}:
                return f"removed by {removal.node}"
        return "gone"
