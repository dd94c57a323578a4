"""What a command beside the mounts works with, and the answer that it ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from lakefs_fuse.commits.maintenance_lease import MaintenanceLease
from lakefs_fuse.config import StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.environment.node import Node
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.lake_record import LakeRecord

NS = 1_000_000_000

Report = Callable[[str, int, int], None]
"""Reports the current step, with files (or names, commits) and bytes done."""
ChangeRecord = Callable[[Callable[[LakeRecord | None], LakeRecord]], LakeRecord]
"""Blocking; see `lake_record.change_record`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One run of a command; ``path`` is what it works on in the lake, empty for all of it."""

    client: StoreClient
    store: StoreConfig
    """Of the root of the lake."""
    path: str
    progress: Callable[[protocol.Progress], None]
    note: Callable[[str], None]
    node: Node
    scratch: str
    """Directory for temporary files."""
    change_record: ChangeRecord
    host: str
    process: int
    """Of the command, for others who want to change the lake."""
    show: Callable[[protocol.Row], None] = lambda _: None
    """Prints part of the result while the command runs."""
    levels: bool = False
    """The lake has levels of the index (`lake_record.LEVELS`)."""
    lake_id: str = ""
    """Of the lake record; empty where there is none."""
    uploads_max: int = 4
    began_s: float = field(default_factory=trio.current_time)

    def lease(self, command: str) -> MaintenanceLease:
        """The lease of the lake for this run, not taken yet."""
        rng = self.node.random.stream("maintenance-lease")
        return MaintenanceLease(
            self.client, self.node.clock, rng, command=command, host=self.host, process=self.process
        )

    def report(self, what: str, files: int, size: int) -> None:
        self.progress(protocol.Progress(what=what, files_done=files, bytes_done=size))

    def finished(self, summary: dict[str, object], text: str, *, failed: bool = False) -> protocol.Finished:
        """The answer, with the time that the command took; exit code 1 if it ``failed``."""
        return protocol.Finished(
            summary={**summary, "seconds": round(trio.current_time() - self.began_s, 3)},
            text=protocol.printable(text),
            exit_code=int(failed),
        )
