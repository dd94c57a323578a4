"""Messages between the command line and `lakefs_fuse.daemon.diagnosis`: one `Diagnosis` in, JSON lines out.

The lines are any number of `CheckResult`, then one `Finished` or `Failed` of `worker_protocol`. Both ends belong to one
installation, so there is no version. *No secrets*: credentials are in the environment only.
"""

from __future__ import annotations

import msgspec

from lakefs_fuse.config import MountConfig, StoreConfig


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What to check besides the programs of this installation."""

    cache_dir: str = ""
    """A directory on the disk to measure, or on that of its nearest existing parent; empty for none."""
    store: StoreConfig | None = None
    read_only: bool = False
    """Nothing is written to the store."""
    throughput: bool = True
    """Measure it, which moves bytes for `daemon.diagnosis.THROUGHPUT_S`."""
    explains: MountConfig | None = None
    """Check nothing, write nothing, and report what a mount of this configuration would use, as the summary of
    `Finished`."""
