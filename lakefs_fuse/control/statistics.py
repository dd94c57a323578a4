"""What ``stats --json`` prints: the filesystem's numbers and what only the process knows.

Called on the trio thread between two awaits, so that the numbers belong together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from lakefs_fuse import __version__
from lakefs_fuse.config import MountConfig
from lakefs_fuse.control.protocol import FILES_MAX, UnfinishedFile, printable


class UnfinishedView(Protocol):
    """The fields of the filesystem's own record that the control socket passes on."""

    @property
    def id(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def age_s(self) -> float: ...
    @property
    def error(self) -> str: ...
    @property
    def parts_done(self) -> int: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def missing(self) -> int: ...


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wire_files(files: Sequence[UnfinishedView]) -> tuple[UnfinishedFile, ...]:
    """The first FILES_MAX, as they go over the socket."""
    return tuple(
        UnfinishedFile(
            id=file.id,
            path=printable(file.path),
            bytes=file.bytes,
            state=file.state,
            age_s=file.age_s,
            error=printable(file.error),
            parts_done=file.parts_done,
            bytes_done=file.bytes_done,
            missing=file.missing,
        )
        for file in files[:FILES_MAX]
    )


def assemble(
    values: dict[str, object],
    unfinished: Sequence[UnfinishedView],
    *,
    config: MountConfig,
    capabilities: dict[str, object],
    uptime_s: float,
    restarts: int,
) -> dict[str, object]:
    """``values`` (which is not changed) with memory, mount, daemon, capabilities and unfinished files added."""
    memory = values.get("memory")
    return {
        **values,
        "memory": {**(memory if isinstance(memory, dict) else {}), "rss": resident_bytes()},
        "daemon": {
            "pid": os.getpid(),
            "version": __version__,
            "uptime_s": round(uptime_s, 3),
            "restarts": restarts,
            "supervised": config.supervise,
        },
        "mount": {
            "source": str(config.store.source),
            "mountpoint": config.mountpoint,
            "cache_dir": config.cache_dir,
            "log_file": config.log_file or "",
            "read_only": config.read_only,
        },
        "capabilities": capabilities,
        "unfinished": [msgspec.to_builtins(file) for file in wire_files(unfinished)],
    }
