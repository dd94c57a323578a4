"""Kernel features of a mount: those that it requests, has and lacks, for the log and `stats`.

Readahead is raised through sysfs, which needs root: the reply to INIT can only lower it. `raise_read_ahead` blocks: it
is called once, in a worker thread, when the mount answers.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from lakefs_fuse.config import MountConfig
from lakefs_fuse.kernel.native import hooks
from lakefs_fuse.kernel.native.hooks import Feature

READ_AHEAD_KIB = 1024
"""Readahead of the mount: the maximum of one READ, and a block of the cache. The kernel's own default is 128."""
PASSTHROUGH_SINCE = (3, 17)
"""The first libfuse with FUSE_PASSTHROUGH: the kernel reads a file without the daemon."""
LISTINGS_HELD_S_MIN = 1.0
"""With a shorter TTL the kernel does not cache listings: they would be invalidated continuously."""
BACKGROUND_REQUESTS_MAX = 64
"""READs of readahead and WRITEs of write-back that the kernel may have in progress; its own default is 12."""
BACKGROUND_SHARE = 8
"""WRITEs in progress fill at most 1 / BACKGROUND_SHARE of staging. The reason is that incomplete parts of a file
cannot be uploaded to free space."""
WRITE_BYTES_MAX = 1 << 20
BDI = Path("/sys/class/bdi")


def features_for(config: MountConfig) -> Feature:
    """Return the kernel features that a mount requests."""
    features = Feature.EXPLICIT_INVAL_DATA | Feature.PARALLEL_DIROPS
    if config.immutable:
        return features | Feature.STATELESS_OPENDIR | Feature.STATELESS_OPEN | Feature.CACHE_SYMLINKS
    listed_s = config.metadata_ttl_s if config.foreign_s is None else min(config.metadata_ttl_s, config.foreign_s)
    if listed_s >= LISTINGS_HELD_S_MIN:
        features |= Feature.STATELESS_OPENDIR
    return features | (Feature.NOFLUSH if config.read_only else Feature.HANDLE_KILLPRIV)


def background_max(config: MountConfig) -> int:
    """Return how many background requests the kernel may have in progress: readahead, and write-back of pages."""
    writes_max = config.staging_bytes_max // (BACKGROUND_SHARE * WRITE_BYTES_MAX)
    return BACKGROUND_REQUESTS_MAX if config.read_only else max(1, min(BACKGROUND_REQUESTS_MAX, writes_max))


def raise_read_ahead(mountpoint: str, bdi: Path = BDI) -> tuple[int, str]:
    """Raise the kernel's readahead for a mount. Returns its new size in KiB (0: not known), and why it is not
    larger."""
    device = os.stat(mountpoint).st_dev
    path = bdi / f"{os.major(device)}:{os.minor(device)}" / "read_ahead_kb"
    try:
        now = int(path.read_text())
    except (OSError, ValueError):
        return 0, f"read-ahead is as it was: {path} is not there"
    if now >= READ_AHEAD_KIB:
        return now, ""
    try:
        path.write_text(str(READ_AHEAD_KIB))
    except OSError as error:
        return now, f"read-ahead stays at {now} KiB: raising it takes root ({path}: {error.strerror})"
    return READ_AHEAD_KIB, ""


@dataclass(slots=True)
class KernelFeatures:
    """Features that one session requested and has; complete once the mount answers."""

    wanted: Feature
    writeback_cache: bool
    background_max: int
    read_ahead_kib: int = 0
    notes: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, object]:
        """Return the values of ``kernel`` in `stats`."""
        granted = hooks.granted()
        return {
            "hooks": hooks.active(),
            "libfuse": hooks.libfuse_version(),
            "writeback_cache": self.writeback_cache,
            **{str(feature.name).lower(): feature in granted for feature in Feature},
            "passthrough": False,
            "max_background": self.background_max if hooks.active() else 0,
            "read_ahead_kib": self.read_ahead_kib,
            "answered": hooks.answered(),
            "missing": self.missing(),
        }

    def missing(self) -> list[str]:
        """Return the features that are off and could be on, each with the reason."""
        if not hooks.active():
            return [hooks.why_inactive(), *self.notes]
        refused = self.wanted & ~hooks.granted()
        return [
            *(f"{str(each.name).lower()}: not known to this kernel" for each in refused),
            _passthrough(),
            *self.notes,
        ]

    def line(self) -> str:
        """Return one line for the log."""
        granted = [str(feature.name).lower() for feature in hooks.granted()]
        on = ["hooks" if hooks.active() else "no hooks", *granted, f"read-ahead {self.read_ahead_kib} KiB"]
        return f"kernel: {', '.join(on)}; missing: {'; '.join(self.missing())}"


def _passthrough() -> str:
    version = hooks.libfuse_version()
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if number < PASSTHROUGH_SINCE:
        return f"passthrough: not available, libfuse {version or 'of unknown version'} is older than 3.17"
    return "passthrough: not used by this version of lakefs-fuse"
