"""Named points at which a test makes the daemon die, as if the power had gone between two instructions.

Set ``LAKEFS_FAILPOINT=name`` or ``name:n`` in the daemon's environment and it kills itself with SIGKILL when it comes
to that point (for the ``n``-th time). `NAMES` has every point with what a crash there leaves behind; the tables of
docs/architecture.md say what the next mount makes of it. Without the variable a point costs one comparison.
A simulation puts a `HOOK` of its own in place, for each node.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from contextvars import ContextVar

from lakefs_fuse.product import ENVIRONMENT_PREFIX

VARIABLE = f"{ENVIRONMENT_PREFIX}FAILPOINT"
NAMES = {
    "accept.synced": "the bytes of a closed file are staged, its journal record does not say so yet",
    "accept.recorded": "the file is acknowledged, close() has not returned",
    "publish.begun": "the file and its draft are locked; nothing was planned or made visible yet",
    "publish.sent": "every part is in the store, or the object was put; the node has not recorded it",
    "publish.noted": "the new version is visible and known here, the staged bytes are not deleted yet",
    "commit.noted": "a commit is about to be sent",
    "commit.sent": "a commit is in the store; the node has not recorded it",
    "rename.moved": "a file not yet in the store has its new name in memory, and perhaps in the journal",
    "discard.begun": "a superseded version is about to be deleted",
    "apply.step": "a large commit of another node is applied in part",
    "replay.restored": "acknowledged files are back at mount, no upload was resumed yet",
}

_name, _, _count = os.environ.get(VARIABLE, "").partition(":")
_times = itertools.count(1)
_last = int(_count) if _count.isdecimal() else 1


def _kill_if_asked(name: str) -> None:
    if name == _name and next(_times) >= _last:
        os.kill(os.getpid(), signal.SIGKILL)


HOOK: ContextVar[Callable[[str], None]] = ContextVar("HOOK", default=_kill_if_asked)
"""What a point calls with its name. Tasks and worker threads inherit it, so each node of a simulation has its own."""


def reached(name: str) -> None:
    """Pass the point ``name``; the hook may end the process, or raise."""
    HOOK.get()(name)
