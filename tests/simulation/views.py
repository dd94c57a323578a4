"""What users may rely on while a lake changes: promises that the tree after a round does not show.

What always holds: each check decides from what users were told and shown, and leaves out what another node's change of
the same name, or of a directory above it, may excuse. Everything here is of one round: `check` ends it.

* *no way back*: a node that showed the version which is there in the end showed nothing else after it;
* *taken along*: the rename of a directory moves every file that was closed in it before, on whichever node;
* *not beside itself*: a file is kept as NAME.conflict-… only if two nodes wrote the name, and neither replaced what
  the other wrote (`Oracle.may_be_beside`);
* *no conflict with itself*: the close of a file that was created with O_EXCL fails with EEXIST only if another node
  wrote the name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tests.simulation.oracle import CONFLICT, DIRECTORY, Oracle, Removal, Version, describe


class Views:
    """See the module's head."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._shown: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        self._to_move: list[tuple[str, str, Version, str, int]] = []
        """Old and new path, version, node and number of the rename of what was closed below a renamed directory."""

    def count(self, node: str, path: str) -> int:
        """How many versions a node has shown at a path, one after another."""
        return len(self._shown[node, path])

    def show(self, node: str, path: str, data: bytes, before: int | None = None) -> None:
        """A node showed this, or an error that begins with an exclamation mark, as what is at a path. ``before`` is the
        `count` of when the operation began: it does not count if the node has shown something else meanwhile."""
        shown = self._shown[node, path]
        if (not shown or shown[-1] != data) and before in (None, len(shown)):
            shown.append(data)

    def forget(self, node: str) -> None:
        """The node lost its disk, and with it what it alone had shown."""
        for key in [each for each in self._shown if each[0] == node]:
            del self._shown[key]

    def closed_below(self, directory: str) -> list[tuple[str, Version]]:
        """Files that were closed below a directory, and that nobody is replacing, moving or removing now. A symbolic
        link is in the store with a later commit."""
        return [
            (path, version)
            for path, versions in list(self._oracle.versions.items())
            if path.startswith(directory + "/")
            for version in versions
            if version.is_certain and version.data != DIRECTORY and version.data[:3] != b"-> "
            if self._is_alone(path, version)
        ]

    def _is_alone(self, path: str, version: Version) -> bool:
        """The newest of its path, with no removal of the path or of a directory above that began since the round."""
        others = [each for each in self._oracle.versions[path] if each is not version and not each.is_withdrawn]
        return all(each in version.known for each in others) and not self._removals(path)

    def _removals(self, path: str) -> list[Removal]:
        """Removals of a path, and of directories above it."""
        above = [path[:at] for at, mark in enumerate(path + "/") if mark == "/"]
        return [each for where in above for each in self._oracle.removals.get(where, ()) if not each.is_withdrawn]

    def renamed(self, node: str, operation: int, old: str, new: str, closed: list[tuple[str, Version]]) -> None:
        """A rename of the directory above these succeeded."""
        self._to_move += [(path, new + path[len(old) :], version, node, operation) for path, version in closed]

    def has_other_writer(self, node: str, path: str) -> bool:
        """Somebody else than this node wrote a name in this round, or a directory above it, or it was there before."""
        above = [path[:at] for at, mark in enumerate(path + "/") if mark == "/"]
        written = {each.node for each in self._oracle.versions.get(path, ()) if not each.is_withdrawn}
        moved = {each.node for each in self._removals(path)} | {
            version.node
            for each in above[:-1]
            for version in self._oracle.versions.get(each, ())
            if version.node != "everybody" and not version.is_withdrawn
        }
        return bool((written | moved) - {node})

    def check(self, tree: Mapping[str, bytes]) -> list[str]:
        """What is wrong with a tree on which all nodes agree, and with what they showed before."""
        wrong = [*self._ways_back(tree), *self._left_behind(tree), *self._beside(tree)]
        self._shown.clear()
        self._to_move.clear()
        return wrong

    def _ways_back(self, tree: Mapping[str, bytes]) -> list[str]:
        wrong = []
        for (node, path), shown in sorted(self._shown.items()):
            data = tree.get(path)
            if data is None or data not in shown or shown[-1] == data == shown[0]:
                continue
            after = [each for each in shown[shown.index(data) :] if each != data]
            if after and len(self._oracle.carrying(path, data)) == 1:  # else it may have come back
                wrong.append(f"{node} showed {describe(data)} at {path}, then {describe(after[0])}; the first is newer")
        return wrong

    def _left_behind(self, tree: Mapping[str, bytes]) -> list[str]:
        wrong = []
        for path, new, version, node, operation in self._to_move:
            if tree.get(new) == version.data:
                continue  # whether it may be under its old name too is for the oracle to say
            if self._is_of_another(path, version, operation):
                continue
            later = self._oracle.carrying(path, version.data) - {version}
            others = [each for each in self._removals(path) if each.operation != operation]
            moved = [each for each in version.moved_to if each.operation == operation]  # the oracle decides about those
            if tree.get(path) == version.data and not later and not others and not moved:
                wrong.append(f"{path} stayed behind when {node} renamed its directory: {version} was closed before")
        return wrong

    def _is_of_another(self, path: str, version: Version, operation: int) -> bool:
        """The rename was of another version, of which one or the other is not the object at its own key: the later
        commit wins, or both are there (SEMANTICS)."""
        return any(
            removal.operation == operation
            and version not in removal.named
            and not (version.is_plain and removal.is_plain)
            for removal in self._oracle.removals.get(path, ())
        )

    def _beside(self, tree: Mapping[str, bytes]) -> list[str]:
        wrong = []
        for path in tree:
            name, mark, _ = path.partition(CONFLICT)
            versions = self._oracle.versions.get(path, ())
            is_moved = any(each.origin is not None and CONFLICT in each.origin.path for each in versions)
            if not mark or is_moved or any(each.node == "everybody" for each in versions):
                continue
            puts = [each for where in self._oracle.names_of(name) for each in self._oracle.versions.get(where, ())]
            nodes = {each.node for each in puts if not each.is_withdrawn}
            only = nodes.pop() if len(nodes) == 1 else ""
            if only and not self.has_other_writer(only, name):
                wrong.append(f"{path} is kept beside what {only} alone wrote")
            elif not only and not self._oracle.may_be_beside(name, tree[path]):
                wrong.append(f"{path} is kept beside {name}, which its writer replaced")
        return wrong
