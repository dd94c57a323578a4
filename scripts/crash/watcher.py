"""Another node: a second mount with a cache of its own, which lives on while the first dies.

What is seen is kept with the time it was seen at; the writers say afterwards whether it may have been. One thread
looks; `take` and `stop` are called from the campaign's.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.crash.host import Host
from scripts.crash.tree import Kind, Node, Tree, look
from tests.servers import Server

PAUSE_S = 0.03
SIGHTINGS_MAX = 20_000
MAY_BE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EINVAL})
"""Names go while one looks, or (EINVAL) a link becomes a file before it is read."""
TURNS = ("b", "a")
"""Of the files written by turns the later one is looked at first."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """Names of one directory, each looked at between the two times (ns, monotonic)."""

    directory: str
    began_ns: int
    ended_ns: int
    nodes: Tree


class Watcher:
    """See the module's head."""

    def __init__(self, server: Server, source: str, directory: Path, seed: str) -> None:
        options = ["--read-only", "--refresh", "0.2", "--metadata-ttl", "1", "--cache-size", "256M"]
        self.host = Host(server, source, directory, *options)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._sightings: list[Sighting] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self.host.start()
        self.host.wait_mounted()
        self._thread.start()

    def stop(self) -> None:
        """Look no more; the mount stays."""
        self._stopping.set()
        self._thread.join(30)

    def take(self) -> list[Sighting]:
        """What was seen since the last time."""
        with self._lock:
            taken, self._sightings = self._sightings, []
        return taken

    def _watch(self) -> None:
        while not self._stopping.wait(PAUSE_S):
            began = time.monotonic_ns()
            directory, nodes = self._look_around()
            with self._lock:
                if nodes and len(self._sightings) < SIGHTINGS_MAX:
                    self._sightings.append(Sighting(directory, began, time.monotonic_ns(), nodes))

    def _look_around(self) -> tuple[str, Tree]:
        """One directory somewhere below the root, with its files and links."""
        directory = ""
        try:
            while True:
                names = os.listdir(self.host.mountpoint / directory)
                self._random.shuffle(names)
                here = [name for name in names if (self.host.mountpoint / directory / name).is_dir()]
                if not here or (directory and self._random.random() < 0.4):
                    break
                directory = f"{directory}/{here[0]}".lstrip("/")
        except OSError as error:
            return directory, self._failed(directory, error)
        if directory.endswith("/turns"):
            names = list(TURNS)
        # The marker of a checkpoint comes first: what it promises has to be there from then on.
        names.sort(key=lambda name: not name.startswith("_"))
        found: dict[str, Node] = {}
        for name in names:
            path = f"{directory}/{name}".lstrip("/")
            try:
                found[path] = look(self.host.mountpoint, path, at_rest=False)
            except OSError as error:
                found.update(self._failed(path, error))
        return directory, {path: node for path, node in found.items() if node.kind is not Kind.DIRECTORY}

    @staticmethod
    def _failed(path: str, error: OSError) -> Tree:
        if error.errno in MAY_BE:
            return {}
        return {path: Node(Kind.FILE, damage=f"cannot be read on the other node: {error}")}
