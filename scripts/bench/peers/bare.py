"""What a mount is held against: the bare store clients, and a directory on the local disk."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path

from scripts.bench import machine
from scripts.bench.access import Access, Boto3, Obstore, Paths
from scripts.bench.peers.peer import Peer


class BareObstore(Peer):
    """No filesystem: the Rust client."""

    name, kind = "obstore", "client"
    remark = (
        "no filesystem: names and bytes in memory, a checkpoint serialised beforehand, nothing cached; a rename is "
        "copies and deletes"
    )

    def version(self) -> str:
        return version("obstore")

    def options(self) -> str:
        return "large objects in ranges of 8 MiB and parts of 16 MiB, 8 at once"

    def attach(self, prefix: str) -> Access:
        return Obstore(self.stage.store.url, *self.stage.place(prefix))

    def restart(self) -> Access:
        return self.attach("names")

    def detach(self) -> None:
        """There is nothing."""


class BareBoto3(BareObstore):
    """No filesystem: the client of AWS for Python."""

    name = "boto3"

    def version(self) -> str:
        return version("boto3")

    def attach(self, prefix: str) -> Access:
        return Boto3(self.stage.store.url, *self.stage.place(prefix))


class LocalDisk(Peer):
    """A directory beside the caches of the mounts."""

    name, kind = "local disk", "disk"
    remark = "no store behind it; cold means that the kernel's caches were dropped"

    def _root(self, prefix: str) -> Path:
        return self.stage.directory / "local" / prefix

    def version(self) -> str:
        return machine.filesystem_of(self.stage.directory)

    def options(self) -> str:
        return "as the machine has it mounted"

    def provide(self, prefix: str, what: str) -> None:
        root = self._root(prefix)
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(self.stage.source(what), root)

    def area(self, prefix: str) -> None:
        shutil.rmtree(self._root("w"), ignore_errors=True)
        self._root(prefix).mkdir(parents=True, exist_ok=True)

    def attach(self, prefix: str) -> Access:
        machine.drop_caches()
        self._prefix = prefix
        return Paths(str(self._root(prefix)))

    def restart(self) -> Access:
        return self.attach(self._prefix)

    def drained(self, limit_s: float) -> bool:
        os.sync()
        return True

    def detach(self) -> None:
        """What was written stays until the next is."""
