"""Databases on a disk that is full when a test says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from lakefs_fuse.environment.storage_engine import Step
from lakefs_fuse.meta import database as module
from lakefs_fuse.meta.database import RocksEngine, RocksEngines


class FullDisk(RocksEngines):
    """Opens databases that refuse writes while ``is_full``. ``logs_next`` makes the next write fail, too, but it is
    in the log, and in the database when that is opened again."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = self.logs_next = False
        self._logged: Sequence[Step] = ()

    def open(self, directory: Path) -> RocksEngine:
        disk = self

        class Full(RocksEngine):
            def write(self, steps: Sequence[Step], *, sync: bool) -> None:
                if not (disk.is_full or disk.logs_next):
                    super().write(steps, sync=sync)
                    return
                if disk.logs_next:
                    disk._logged, disk.logs_next = steps, False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        engine = Full(directory, module.MEMORY_BYTES)
        RocksEngine.write(engine, self._logged, sync=False)
        self._logged = ()
        return engine
