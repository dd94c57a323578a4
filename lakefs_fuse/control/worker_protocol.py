"""What the command line and `lakefs_fuse.daemon.admin_worker` say to each other: one `Request` in, JSON lines out.

The lines are any number of `Progress` and `Note` and then exactly one `Finished` or `Failed`. Both ends are always of
one installation, so there is no version. Nothing in here is a secret: credentials are in the environment only.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.control.protocol import encode as encode
from lakefs_fuse.control.protocol import printable as printable
from lakefs_fuse.errors import EXIT_FAILURE
from lakefs_fuse.errors import EXIT_INTERRUPTED as EXIT_INTERRUPTED

REQUEST_BYTES_MAX = 1 << 20
LINE_BYTES_MAX = 16 << 20


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Run ``command`` of `offline.COMMANDS` on one lake. ``args`` is JSON of the command's own arguments."""

    command: str
    store: StoreConfig
    args: msgspec.Raw
    path: str = ""
    """In the lake, without slashes at its ends; empty is all of it."""
    find_root: bool = False
    """``store`` names a place in a lake, not its root: the root is the nearest place at or above it that has commits,
    and ``path`` is what is below that. Where there is none, the place itself is taken for the root."""
    uploads_max: int = 4


class IngestArgs(msgspec.Struct, frozen=True, kw_only=True):
    """``source`` is an absolute path, or ``-`` for standard input. ``count``: somebody watches a progress bar, which
    needs to know how much there is."""

    source: str
    count: bool = False


class PackArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `pack`, and with ``back`` of `unpack`, which takes no other but ``dry_run``."""

    back: bool = False
    threshold_bytes: int = 1 << 20
    grace_s: float = 30.0
    dry_run: bool = False


class GcArgs(msgspec.Struct, frozen=True, kw_only=True):
    """``live_below`` is a share (0 to 1) of a pack's bytes."""

    live_below: float
    grace_s: float
    uploads_older_s: float
    wait: bool = False
    dry_run: bool = False


class SnapshotArgs(msgspec.Struct, frozen=True, kw_only=True):
    """``cache_dir``: of a node, or kept from an earlier run; None for one that goes with the run. ``name``: of a
    snapshot to be kept, in place of an index; ``delete`` one, or ``list`` all, and nothing else."""

    cache_dir: str | None = None
    name: str = ""
    delete: str = ""
    list: bool = False


class FsckArgs(msgspec.Struct, frozen=True, kw_only=True):
    """``cache_dir``: that of a node, which may know names that the store does not tell any more."""

    quick: bool = False
    repair: bool = False
    cache_dir: str | None = None


class UpgradeArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `upgrade`, which has none."""


class CheckpointArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `checkpoint`, without a mount. ``action`` is ``ls`` or ``latest``; ``url`` what the user called the place."""

    action: str
    url: str
    marker: str | None = None
    match: str | None = None


class VerifyArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `checkpoint verify`. No ``names``: all complete ones. ``md5_etags``: what a mount knows of its store, None
    where nobody knows. ``not_stored``: checkpoints that are not, or not wholly, in the store yet."""

    names: tuple[str, ...]
    url: str
    marker: str | None = None
    match: str | None = None
    md5_etags: bool | None = None
    not_stored: tuple[str, ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far it is. A total that is not known is None; it may grow."""

    what: str = ""
    files_done: int = 0
    bytes_done: int = 0
    files_total: int | None = None
    bytes_total: int | None = None


class Note(msgspec.Struct, frozen=True, tag="note"):
    """One line that the user should see now, on standard error."""

    text: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """It ran to its end. ``summary`` is what ``--json`` prints, ``text`` what people read; ``exit_code`` is not 0 where
    something was left out or found damaged."""

    summary: dict[str, object]
    text: str
    exit_code: int = 0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It did not run to its end."""

    message: str
    exit_code: int = EXIT_FAILURE


Answer: TypeAlias = Progress | Note | Finished | Failed

_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def decode_answer(line: bytes) -> Answer:
    """Raises msgspec.DecodeError."""
    return _answers.decode(line)
