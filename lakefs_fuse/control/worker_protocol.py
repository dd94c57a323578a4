"""Messages between the command line and its workers: one `Request` to `lakefs_fuse.daemon.admin_worker`, or one
`Diagnosis` to `lakefs_fuse.daemon.diagnosis`, and JSON lines out.

The lines are any number of `Progress` and `Note`, and of `Row` where a result is printed while it comes, then one
`Finished` or `Failed`. Both ends belong to one installation, so there is no version. *No secrets*: credentials are in
the environment only.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from lakefs_fuse.checks import CheckResult
from lakefs_fuse.config import DELETE_AFTER_S, MountConfig, StoreConfig
from lakefs_fuse.control.protocol import encode as encode
from lakefs_fuse.control.protocol import printable as printable
from lakefs_fuse.errors import EXIT_FAILURE
from lakefs_fuse.errors import EXIT_INTERRUPTED as EXIT_INTERRUPTED

REQUEST_BYTES_MAX = 1 << 20
LINE_BYTES_MAX = 16 << 20


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The store and the path that a command works on."""

    store: StoreConfig
    path: str = ""
    """In the lake, without slashes at its ends; empty is all of it."""
    find_root: bool = False
    """``store`` names a directory in a lake, whose root is the nearest directory at or above it that has commits, or
    else the directory itself; ``path`` is relative to that root."""
    mountpoint: str = ""
    """The mountpoint, if the place was given as a path in a mount; empty for a URL."""
    lake_id: str = ""
    """Of the lake of that mount; empty where it has no lake record."""


class Request(Place, frozen=True, kw_only=True):
    """Run ``command`` of `admin_worker.COMMANDS`; ``args`` is the JSON of its arguments."""

    command: str
    args: msgspec.Raw
    uploads_max: int = 4
    upload_bytes_s_max: int = 0
    """As `MountConfig` has it."""
    scratch: str = ""
    """Directory for temporary files; empty: that of the environment (TMPDIR)."""
    background: bool = False
    """Run at the lowest priority."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The request to `lakefs_fuse.daemon.diagnosis`: what to check besides the programs of this installation."""

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


class IngestArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `ingest`. ``source`` is an absolute path, or ``-`` for standard input; ``count`` it first, for a progress
    bar."""

    source: str
    count: bool = False


class RelocateArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `relocate`."""

    dry_run: bool = False


class PackArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `pack`, and with ``back`` of `unpack`, which uses ``dry_run`` only."""

    back: bool = False
    threshold_bytes: int = 1 << 20
    grace_s: float = DELETE_AFTER_S
    dry_run: bool = False


class GcArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `gc`. ``live_below`` is a share (0 to 1) of the bytes of a pack.

    The default is 0.75, because a dataset of which half was removed has packs with about half of their bytes live."""

    live_below: float = 0.75
    grace_s: float = 3600.0
    uploads_older_s: float = 7 * 86400.0
    wait: bool = False
    dry_run: bool = False


class MaintenanceArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `maintenance`. ``interval_s`` and ``commits_max`` as `admin.maintenance.Inspector` has them; objects are
    deleted only if the starter ``may_delete``. ``fold_database`` is the directory of `admin.fold_database`, empty for
    none."""

    interval_s: float
    commits_max: int
    may_delete: bool = True
    fold_database: str = ""


class SnapshotArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `snapshot`. ``cache_dir``: of a node, or of an earlier run; None for a temporary one.

    ``name`` is that of a snapshot to keep, instead of an index; ``delete`` one, or ``list`` all, and do nothing else.
    ``accept_loss``: write an index of the remaining names if names may be missing."""

    cache_dir: str | None = None
    name: str = ""
    delete: str = ""
    list: bool = False
    accept_loss: bool = False


class DatasetArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `dataset`, whose ``action`` is one of `admin.datasets.ACTIONS`. ``dataset`` is NAME or NAME@VERSION; ``other``
    the second one of a comparison; ``path`` the directory of a new version, below that of the place. ``files``: show
    each file; ``read``: compare the bytes with their sums."""

    action: str
    dataset: str = ""
    other: str = ""
    path: str = ""
    files: bool = False
    read: bool = False


class FsckArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `fsck`. ``cache_dir``: of a node, which may know names that the store has lost. ``rebind``: name the present
    ETags of objects, and check nothing else; ``dry_run`` is for that."""

    quick: bool = False
    repair: bool = False
    rebind: bool = False
    dry_run: bool = False
    cache_dir: str | None = None


class LogArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `log`: the last ``count`` entries, all without one; with ``follow`` then new ones, polled for every
    ``refresh_s``."""

    count: int | None = None
    follow: bool = False
    refresh_s: float = 5.0


class UpgradeArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `upgrade`: none."""


class CheckpointArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `checkpoint ls` and `latest` without a mount (``action``); ``url`` is the place as the user named it."""

    action: str
    url: str
    marker: str | None = None
    match: str | None = None


class VerifyArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Of `checkpoint verify`. Without ``names``, it verifies all complete checkpoints.

    ``md5_etags``: whether a mount found that ETags of its store are MD5s, None if unknown; ``not_stored``: checkpoints
    that are not entirely in the store yet."""

    names: tuple[str, ...]
    url: str
    marker: str | None = None
    match: str | None = None
    md5_etags: bool | None = None
    not_stored: tuple[str, ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """The progress of a command. An unknown total is None; totals may grow."""

    what: str = ""
    files_done: int = 0
    bytes_done: int = 0
    files_total: int | None = None
    bytes_total: int | None = None


class Note(msgspec.Struct, frozen=True, tag="note"):
    """One line for the user, printed immediately to standard error."""

    text: str


class LogStart(msgspec.Struct, frozen=True, kw_only=True, tag="log_start"):
    """The first answer of `log`: the time from which it is complete (ns since 1970, 0: there is no commit). Unless
    ``is_whole``, earlier commits were folded into an index and deleted, except packs that are in use."""

    since_ns: int
    is_whole: bool


class LogEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="log_entry"):
    """A change of a name: ``put``, ``link`` (bytes that were stored before, under the name ``source`` if that is
    known), ``rename`` (from ``source``), ``remove``, ``rmdir``, ``mkdir``, ``symlink`` (to ``target``) or ``setattr``.
    ``size`` in bytes, where the entry is of a file's bytes."""

    time_ns: int
    writer: str
    operation: str
    path: str
    size: int | None = None
    source: str = ""
    target: str = ""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="file_entry"):
    """A file of a version of a dataset, or a symbolic link (to ``target``): ``size`` bytes from ``offset`` on of the
    object ``key`` with the ETag ``etag``. ``mtime_ns`` since 1970."""

    path: str
    size: int
    mtime_ns: int
    key: str = ""
    etag: str = ""
    offset: int = 0
    target: str = ""


class FileChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="file_change"):
    """A name that is not the same in two versions: ``added``, ``removed``, ``changed`` (other bytes, or another target)
    or ``attributes`` (mode, owner, mtime or extended attributes). ``path`` ends in a slash where it is a directory.
    Sizes in bytes, of files."""

    change: str
    path: str
    size_before: int | None = None
    size: int | None = None


class ChangeTotals(msgspec.Struct, frozen=True, kw_only=True, tag="change_totals"):
    """The last answer of a comparison: numbers of names, and bytes of files that were added or changed."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    attributes: int = 0
    same: int = 0
    bytes_new: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The command ran to its end. ``summary`` is for ``--json``, ``text`` for users.

    ``exit_code`` is not 0 if something was skipped or found damaged."""

    summary: dict[str, object]
    text: str
    exit_code: int = 0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The command did not run to its end."""

    message: str
    exit_code: int = EXIT_FAILURE


Row: TypeAlias = LogStart | LogEntry | CheckResult | FileEntry | FileChange | ChangeTotals
"""Part of a result that is printed while it comes."""
Answer: TypeAlias = Progress | Note | Row | Finished | Failed

_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def decode_answer(line: bytes) -> Answer:
    """Raises msgspec.DecodeError."""
    return _answers.decode(line)
