"""The command line with a fault: its daemon does not sync the log of the metadata database.

`python -m scripts.crash.unsynced mount …`: what a power cut takes then has to be noticed.
"""

from __future__ import annotations

import sys

from lakefs_fuse.cli import main, spawn
from lakefs_fuse.daemon import mount_daemon as daemon
from lakefs_fuse.meta.database import Batch, Database

DAEMON = (sys.executable, "-P", "-m", "scripts.crash.unsynced", "daemon")


def _break() -> None:
    commit = Database.commit

    def unsynced_commit(self: Database, batch: Batch, *, sync: bool = False) -> None:
        commit(self, batch)

    Database.commit = unsynced_commit  # type: ignore[method-assign]
    Database.sync = lambda self: None  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1:2] == ["daemon"]:
        _break()
        sys.exit(daemon.run(sys.argv[2:]))
    spawn.program = lambda config: DAEMON
    main()
