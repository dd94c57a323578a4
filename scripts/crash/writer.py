"""One writer: changes its own names through the mount, one system call after the other, and knows what must be left.

A writer is a process that outlives the daemons. Each change is a *step*: the tree before it, the tree after it, the
system call. A step that returned 0 happened. The step during which the daemon died happened or did not; `check` finds
out which, and nothing else is accepted. Only this process ever touches the names below ``top`` and those in ``shared/``
that begin with it, so there is nothing to be guessed.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.crash.content import Ids, segment
from scripts.crash.contest import Change
from scripts.crash.tree import Kind, Node, Tree, below, differences, move, survivors, walk
from scripts.crash.watcher import Sighting

DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
"""What a system call answers whose daemon has died."""
NO_DISK = frozenset({errno.EIO, errno.EROFS})
"""And in the moment between the end of its disk and its own."""
HISTORY_LINES = 60
LAG_NS = 4_000_000_000
"""Another node may show a listing that is a second old (its --metadata-ttl), and machines are slow."""


class Died(Exception):
    """The daemon is gone."""


class Unexpected(Exception):
    """A system call failed though the daemon lives."""


class Lost(Exception):
    """A system call failed as it may: another node was there before."""


@dataclass(slots=True)
class OpenFile:
    """A file this writer has open over several steps; ``path`` is empty once its name was deleted."""

    fd: int
    path: str
    content: list[int]
    size: int


@dataclass(slots=True)
class HotWrite:
    """One rename onto a name that all writers rename onto; times in ns, ``ended_ns`` 0 while its fate is not known."""

    name: str
    content: Ids
    began_ns: int
    ended_ns: int = 0
    happened: bool = False
    after: Tree | None = None
    step: int = 0
    """Of the writer that did it."""


@dataclass(slots=True)
class Checkpoint:
    """Files of a directory that are to be seen all together: not before the marker, which is closed last, or, where
    ``marker`` is empty, before the rename of the directory."""

    directory: str
    marker: str
    files: dict[str, Ids] = field(default_factory=dict)
    complete_ns: int = 0
    removing_ns: int = 0


class Writer:
    """See the module's head."""

    def __init__(
        self, number: int, seed: str, root: Path, *, durability: str, mounts: int = 1, contends: bool = False,
        power_cuts: bool = False,
    ) -> None:  # fmt: skip
        """``contends``: it changes names that a writer of each of the other ``mounts`` changes, too (`contest`).
        ``power_cuts``: what was not synced may be gone after a death."""
        self.number, self.root, self.top = number, root, f"w{number}"
        self.mounts, self.contends, self.power_cuts = mounts, contends, power_cuts
        self.is_writeback = durability == "writeback"
        self.random = random.Random(seed)
        self.tree: Tree = {}
        self.in_flight: Tree | None = None
        self.unsynced: list[tuple[Tree, int]] = []
        """What a power cut may go back to: trees, oldest first, each with the number of steps that had been made."""
        self.changes: list[Change] = []
        """Of contested names."""
        self.open: list[OpenFile] = []
        self.renamed: set[str] = set()
        """Names that a rename gave, which only fsync of a directory takes to the store."""
        self.lengths: dict[int, int] = {}
        self.history: dict[str, set[Ids]] = {}
        self.targets: dict[str, set[str]] = {}
        self.claims: dict[str, Ids] = {}
        """Content that is in the store under these paths, as was promised."""
        self.hot: list[HotWrite] = []
        self.checkpoints: dict[str, Checkpoint] = {}
        self.turns: dict[int, int] = {}
        """The turn of each segment in the pair of files that are written by turns."""
        self.being_written: list[str] = []
        """What the operation under way has open."""
        self.early = 0
        """How often another node saw the marker of a checkpoint, and not yet all that it stands for."""
        self.log: list[str] = []
        self.steps = self.bytes_written = 0
        self.next_id = ((number + 1) << 40) + 1
        """Of the next segment."""

    # -- steps

    def path(self, relative: str) -> str:
        return os.fspath(self.root / relative)

    def say(self, text: str) -> None:
        self.log.append(f"{time.monotonic():.6f} {text}")

    @contextmanager
    def step(
        self,
        what: str,
        after: Tree | None = None,
        touched: Sequence[str] = (),
        *,
        syncs: bool = False,
        lost: frozenset[int] = frozenset(),
    ) -> Iterator[None]:
        """One system call; ``after`` is the tree once it has succeeded (None: as before). ``touched`` are paths, with
        all below, whose content in the store may change from now on. ``syncs``: it survives a power cut, with all
        before it. Raises Died, Unexpected, and Lost for an error in ``lost``, which changes nothing."""
        after = self.tree if after is None else after
        for path in touched:
            for claimed in [one for one in self.claims if one == path or one.startswith(path + "/")]:
                del self.claims[claimed]
        self._note_versions(after)
        self.in_flight = after
        try:
            yield
        except OSError as error:
            self.say(f"{what}: {error.strerror}")
            if error.errno in DEAD or self._mount_is_dead() or (self.power_cuts and error.errno in NO_DISK):
                raise Died from error
            if error.errno in lost:
                self.in_flight = None
                raise Lost from error
            raise Unexpected(f"w{self.number}: {what}: {error}") from error
        self.say(what)
        if syncs:
            self.unsynced.clear()
        elif self.power_cuts and after is not self.tree:
            self.unsynced.append((self.tree, self.steps))
        self.tree, self.in_flight = after, None
        self.steps += 1

    def _mount_is_dead(self) -> bool:
        """A daemon that dies while the kernel hands it what was written makes that EIO."""
        try:
            os.statvfs(self.root)
        except OSError as error:
            return error.errno in DEAD
        return False

    def _note_versions(self, after: Tree) -> None:
        for path, node in after.items():
            if self.tree.get(path) is not node:
                if node.content is not None:
                    self.history.setdefault(path, set()).add(node.content)
                if node.target:
                    self.targets.setdefault(path, set()).add(node.target)

    def new_segment(self, length: int) -> tuple[int, bytes]:
        identity, self.next_id = self.next_id, self.next_id + 1
        self.lengths[identity] = length
        self.bytes_written += length
        return identity, segment(identity, length)

    def claim(self, *paths: str) -> None:
        """These are in the store now, as they are."""
        for path in paths:
            node = self.tree.get(path)
            if node is not None and node.content is not None:
                self.claims[path] = node.content

    def claim_synced(self, path: str) -> None:
        """A file, or a directory with all that is below, was synced, and is not being written."""
        held = {file.path for file in self.open}
        if self.tree[path].kind is Kind.DIRECTORY:
            self.renamed = {name for name in self.renamed if not f"{name}/".startswith(path + "/")}
            self.claim(*(each for each in below(self.tree, path) if each not in held))
        elif not any(path == name or path.startswith(name + "/") for name in self.renamed):
            self.claim(path)

    def rename(self, old: str, new: str) -> None:
        with self.step(f"rename {old} {new}", move(self.tree, old, new), [old, new]):
            os.rename(self.path(old), self.path(new))
        self.renamed.update((old, new))
        for file in self.open:
            if file.path == old or file.path.startswith(old + "/"):
                file.path = new + file.path[len(old) :]
        if not self.is_writeback:
            self.claim(new, *below(self.tree, new))

    def drop_handles(self) -> None:
        """The daemon that had them is gone."""
        for file in self.open:
            try:
                os.close(file.fd)
            except OSError:
                pass
        self.open.clear()

    def unclosed(self) -> list[str]:
        """Paths that an unfinished file may have: of those that are open, and of what the step in flight is about."""
        changing = [] if self.in_flight is None else [
            path
            for path in {*self.tree, *self.in_flight}
            if self.tree.get(path) is not self.in_flight.get(path)
        ]  # fmt: skip
        phantoms = [path for path, node in self.tree.items() if node.kind is Kind.FILE and node.content is None]
        return [*changing, *phantoms, *self.being_written, *(file.path for file in self.open)]

    # -- checking

    def check(self, *, strict: bool = False, root: Path | None = None) -> list[str]:
        """Compare with what a mount shows. ``strict``: nothing was in flight, another node must see just this."""
        root = root or self.root
        try:
            mine = [f"shared/{name}" for name in os.listdir(root / "shared") if name.startswith(f"{self.top}-")]
        except OSError as error:
            return [f"shared: cannot be listed: {error}"]
        seen = walk(root, [self.top, *mine])
        candidates = [self.tree]
        if not strict:
            candidates += [self._half_told(self.in_flight)] if self.in_flight is not None else []
            candidates += [tree for tree, _ in reversed(self.unsynced)]
        wrong = [differences(survivors(tree), seen) for tree in candidates]
        best = min(range(len(candidates)), key=lambda index: len(wrong[index]))
        if not strict and not wrong[best]:
            self._resolve_hot(candidates[best], happened=best == 1)
            self.tree = survivors(candidates[best])
            self.in_flight = None
            self.unsynced.clear()
        return [self.tell(path, what) for path, what in wrong[best]]

    def _half_told(self, after: Tree) -> Tree:
        """A close that was not answered: the new version may be there without its attributes."""
        return {
            path: replace(node, mode=None)
            if node.content is not None and (path not in self.tree or self.tree[path].content != node.content)
            else node
            for path, node in after.items()
        }

    def _resolve_hot(self, found: Tree, *, happened: bool) -> None:
        kept = next((steps for tree, steps in self.unsynced if tree is found), self.steps)
        for write in self.hot:
            if not write.ended_ns:
                write.happened = happened and self.in_flight is not None and write.after is self.in_flight
                write.ended_ns = time.monotonic_ns()
            elif write.step > kept:  # a power cut took it away
                write.happened = False

    def tell(self, path: str, what: str) -> str:
        """A complaint, with what this writer did to the name and to those above it."""
        names = {path, *(above for above in (os.path.dirname(path),) if above not in ("", "shared", self.top))}
        lines = [line for line in self.log if names & {part.rstrip(":") for part in line.split()}]
        return "\n".join([f"w{self.number}: {path} {what}", *(f"      {line}" for line in lines[-HISTORY_LINES:])])

    def check_store(self, seen: Mapping[str, Node], *, strict: bool = False) -> list[str]:
        """Compare with what lies in the store (files and links): whole versions only, what was promised, in order."""
        mine = {path: node for path, node in seen.items() if path.startswith((f"{self.top}/", f"shared/{self.top}-"))}
        wrong = self._check_versions(mine, "in the store")
        for path, content in self.claims.items():
            there = mine.get(path)
            if there is None or there.content != content:
                wrong.append((path, f"in the store: {there or 'nothing'}; promised was {list(content)}"))
        wrong += self._check_order(mine)
        if strict:
            files = {path: node for path, node in survivors(self.tree).items() if node.kind is not Kind.DIRECTORY}
            loose = {path: Node(node.kind, node.content, node.target) for path, node in files.items()}
            wrong += [(path, f"in the store at the end: {what}") for path, what in differences(loose, mine)]
        return [self.tell(path, what) for path, what in wrong]

    def check_sightings(self, sightings: Sequence[Sighting]) -> list[str]:
        """Compare with what another node saw while this writer was at work."""
        wrong: dict[tuple[str, str], None] = {}
        for sighting in sightings:
            if not f"{sighting.directory}/".startswith((f"{self.top}/", "shared/")):
                continue
            wrong.update(dict.fromkeys(self._check_versions(sighting.nodes, "on the other node")))
            group = self.checkpoints.get(sighting.directory)
            if group is None or not group.complete_ns or 0 < group.removing_ns < sighting.ended_ns:
                continue
            if found := incomplete(replace(group, removing_ns=0), sighting.nodes):
                self.early += 1
                if sighting.began_ns - group.complete_ns > LAG_NS:
                    wrong.update(dict.fromkeys((path, f"{what} (on the other node)") for path, what in found))
        return [self.tell(path, what) for path, what in list(wrong)[:5]]

    def _check_versions(self, seen: Mapping[str, Node], where: str) -> list[tuple[str, str]]:
        """Whole versions only, each of which the name once had."""
        wrong = []
        for path, node in seen.items():
            if not path.startswith((f"{self.top}/", f"shared/{self.top}-")):
                continue
            if node.damage:
                wrong.append((path, f"{where}: {node.damage}"))
            elif node.kind is Kind.LINK and node.target not in self.targets.get(path, ()):
                wrong.append((path, f"{where}: a link to {node.target}, which it never was"))
            elif node.content is not None and node.content not in self.history.get(path, ()):
                wrong.append((path, f"{where}: {node}, which was never closed under this name"))
        return wrong

    def _check_order(self, seen: Mapping[str, Node]) -> list[tuple[str, str]]:
        wrong = [each for group in self.checkpoints.values() for each in incomplete(group, seen)]
        first, second = (self.turn(seen, name) for name in ("a", "b"))
        if second > first:
            wrong.append(
                (f"{self.top}/turns/b", f"turn {second} is in the store, and only turn {first} of a before it")
            )
        return wrong

    def turn(self, seen: Mapping[str, Node], name: str) -> int:
        node = seen.get(f"{self.top}/turns/{name}")
        return self.turns.get(node.content[0], 0) if node is not None and node.content else 0


def incomplete(group: Checkpoint, seen: Mapping[str, Node]) -> list[tuple[str, str]]:
    """Files of a checkpoint that are missing, or others, though it says that it is complete."""
    if group.removing_ns:
        return []
    if group.marker:
        shown = f"{group.directory}/{group.marker}" in seen
    else:
        shown = any(path.startswith(group.directory + "/") for path in seen)
    if not shown:
        return []
    return [
        (f"{group.directory}/{name}", f"in the store: {seen.get(f'{group.directory}/{name}', 'nothing')}, though the "
         f"{'marker' if group.marker else 'directory'} is there; expected {list(content)}")
        for name, content in group.files.items()
        if (there := seen.get(f"{group.directory}/{name}")) is None or there.content != content
    ]  # fmt: skip
