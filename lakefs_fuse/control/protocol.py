"""Messages of the control socket: one JSON object per line, in both directions.

A connection carries requests one after another. `MakeDurable`, `FinishOrphan`, `AbortOrphan`, `Refresh`, `Clone`,
`WaitPath`, `WaitEnd` and `CacheRequest` are answered by any number of `Progress` lines and then one other; every other
request by one line. A `CacheRequest` is about the paths that `SelectPaths` named before on the connection. *Bounded
lines*: both sides bound their length. Both ends belong to one installation, so no version is negotiated; `Hello` has
the version for users.
"""

from __future__ import annotations

import msgspec

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.errors import EXIT_FAILURE, MALFORMED, LakeError
from lakefs_fuse.metrics import Unfinished

REQUEST_BYTES_MAX = 64 * 1024
"""A path of 4,096 bytes, every one escaped as six characters, fits twice."""
REPLY_BYTES_MAX = 16 * 1024 * 1024
FILES_MAX = 1000
"""Unfinished files named in one reply; counts are always complete."""
SELECTED_MAX = 100_000
"""Paths of one request about the cache: about 20 MB while it runs, 400 MB of the longest paths. Only the owner of the
daemon and root send any."""
UNKNOWN_REQUEST = "not a control request"
"""The message of a daemon that does not know a request begins so."""


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Asks for `Statistics`."""


class ListUnfinished(msgspec.Struct, frozen=True, tag="unfinished"):
    """Asks for `UnfinishedFiles`; with ``orphans`` for those that are orphans, without the first ``skip``."""

    orphans: bool = False
    skip: int = 0


class MakeDurable(msgspec.Struct, frozen=True, tag="make_durable"):
    """Store everything below ``path`` (relative to the mount's root; empty is everything); retries failed uploads."""

    path: str = ""


class FinishOrphan(msgspec.Struct, frozen=True, tag="finish_orphan"):
    """Publish an orphan; with ``incomplete`` also one with failed writes. `Progress` without numbers, then `Done` or
    `Failed`. A client that disconnects ends it, and the orphan stays."""

    id: str
    incomplete: bool = False


class AbortOrphan(msgspec.Struct, frozen=True, tag="abort_orphan"):
    """Delete an orphan, its bytes and its upload. Answered as `FinishOrphan`."""

    id: str


class Refresh(msgspec.Struct, frozen=True, tag="refresh"):
    """Ask the store what is at ``path`` (relative to the mount's root), with ``recursive`` below it, too; an immutable
    mount moves to the present state of its lake as a whole. `Progress` without numbers, then `Statistics` of that."""

    path: str = ""
    recursive: bool = False


class Clone(msgspec.Struct, frozen=True, tag="clone"):
    """Copy ``source`` to ``target`` (relative to the mount's root) inside the lake. `Progress` without numbers, then
    `Done` or `Failed`."""

    source: str
    target: str
    force: bool = False


class WaitPath(msgspec.Struct, frozen=True, tag="wait_path"):
    """Answered when ``path`` (relative to the mount's root) exists, or is a file of ``version``, if that is not empty;
    `Failed` after ``timeout_s``. A symbolic link on the way ends the wait, too: the client follows it."""

    path: str
    version: str = ""
    timeout_s: float | None = None


class Unmount(msgspec.Struct, frozen=True, tag="unmount"):
    """Stop serving the mount, as SIGTERM does."""


class WaitEnd(msgspec.Struct, frozen=True, tag="wait_end"):
    """Answered when the mount has ended and the daemon has drained, or ended draining."""


class SelectPaths(msgspec.Struct, frozen=True, tag="select_paths"):
    """Add to the selection of the next request about the cache: paths relative to the mount's root, each with a glob
    below it, or an empty text for the path itself."""

    paths: tuple[tuple[str, str], ...]


class WarmCache(msgspec.Struct, frozen=True, kw_only=True, tag="warm_cache"):
    """Bring the selection into the cache. ``pin``: and keep it there; ``partial``: as much as fits; ``background``:
    answered when it is known to fit. `Progress`, then `Statistics` of the result. A client that disconnects ends it."""

    bytes_s_max: int = 0
    partial: bool = False
    background: bool = False
    pin: bool = False


class StopWarming(msgspec.Struct, frozen=True, tag="stop_warming"):
    """End the warms in the background. Answered by `Statistics` with their number."""


class ListCache(msgspec.Struct, frozen=True, tag="list_cache"):
    """How much of each path of the selection is in the cache; ``pinned``: of the pins at and below the paths.
    `Progress` without numbers, then `Statistics`."""

    pinned: bool = False


class EvictCache(msgspec.Struct, frozen=True, tag="evict_cache"):
    """Remove the blocks of the selection from the cache. `Progress` without numbers, then `Statistics` of that."""


class UnpinCache(msgspec.Struct, frozen=True, tag="unpin_cache"):
    """End the pins at and below the selection. `Progress` without numbers, then `Statistics` of that."""


class ReadAhead(msgspec.Struct, frozen=True, tag="read_ahead"):
    """Files that will be read next, in this order, by their paths in the mount. Answered immediately by `Done`."""

    paths: tuple[str, ...]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for `Hello`."""


class GetStore(msgspec.Struct, frozen=True, tag="get_store"):
    """Asks for `StoreOf`."""


CacheRequest = WarmCache | ListCache | EvictCache | UnpinCache
"""About what `SelectPaths` named."""
Request = (
    GetStore
    | Stats
    | ListUnfinished
    | MakeDurable
    | FinishOrphan
    | AbortOrphan
    | Refresh
    | Clone
    | WaitPath
    | SelectPaths
    | WarmCache
    | StopWarming
    | ListCache
    | EvictCache
    | UnpinCache
    | ReadAhead
    | Unmount
    | WaitEnd
    | Ping
)


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Who answers."""

    pid: int
    version: str
    source: str
    mountpoint: str
    log_file: str
    starting: bool = False
    """The daemon is about to replace a dead mount; the present mount is not its own."""
    draining: bool = False
    """The mount has ended, and the daemon stores what is left."""


class StoreOf(msgspec.Struct, frozen=True, tag="store"):
    """The mounted lake, and the settings of its store; nothing secret. With ``find_root`` the source is a directory in
    a lake, whose root is that directory or one above. If a ``dataset`` is shown, paths in the mount are not those of
    the lake. ``lake_id``: of its lake record, empty without one."""

    store: StoreConfig
    find_root: bool = False
    dataset: str = ""
    lake_id: str = ""


class Statistics(msgspec.Struct, frozen=True, tag="statistics"):
    """The nested values that ``stats --json`` prints."""

    values: dict[str, object]


class UnfinishedFiles(msgspec.Struct, frozen=True, tag="files"):
    """At most FILES_MAX files of ``count``, oldest first."""

    files: tuple[Unfinished, ...]
    count: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Bytes in the store, of bytes known to be needed (which grows while a file is being written); for a warm: bytes
    fetched, of all missing bytes, and its ``stage`` (`metrics.Warming`)."""

    bytes_done: int
    bytes_total: int
    files_left: int
    files_total: int = 0
    stage: str = ""
    unfit_bytes: int = 0


NOTHING = Progress(bytes_done=0, bytes_total=0, files_left=0)
"""For requests that move no bytes: it shows that the daemon is alive."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request succeeded."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The request failed; ``files`` are those that are not durable, if that was the request."""

    message: str
    exit_code: int = EXIT_FAILURE
    files: tuple[Unfinished, ...] = ()


Reply = Hello | StoreOf | Statistics | UnfinishedFiles | Progress | Done | Failed

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
_encoder = msgspec.json.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One line, newline included."""
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises LakeError for anything that is not a request."""
    try:
        return _requests.decode(line)
    except MALFORMED as error:
        raise LakeError(f"{UNKNOWN_REQUEST}: {error}") from error


def decode_reply(line: bytes) -> Reply:
    """Raises LakeError for anything that is not a reply."""
    try:
        return _replies.decode(line)
    except MALFORMED as error:
        raise LakeError(f"the daemon's reply is invalid ({error}); is it of another version?") from error


def printable(text: str) -> str:
    """``text`` as JSON can carry it: names that are not UTF-8 get replacement characters."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
