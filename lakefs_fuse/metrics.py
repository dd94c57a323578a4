"""Counters of one daemon, and its files that are not in the store, under the names that `stats` prints.

Counts start at 0 with the daemon and only grow; gauges are read from their owners on demand. *One thread a counter*:
each owner increments from one thread, so no increment is lost; `StoreMetrics` belongs to the async client.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec

UPCALLS = (
    "lookup", "forget", "getattr", "setattr", "readlink", "mknod", "mkdir", "unlink", "rmdir", "symlink", "rename",
    "link", "open", "read", "write", "flush", "release", "fsync", "opendir", "readdir", "releasedir", "fsyncdir",
    "statfs", "setxattr", "getxattr", "listxattr", "removexattr", "access", "create", "copy_file_range",
)  # fmt: skip

REQUEST_KINDS = ("get", "put", "part", "list", "head", "copy", "delete", "other")
"""Kinds of store request. ``part`` is UploadPart; creating, completing and aborting an upload are ``other``."""


LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets that latencies are counted in; one more bucket has what is above."""


def no_latencies() -> list[int]:
    return [0] * (len(LATENCY_BOUNDS_S) + 1)


@dataclass(slots=True)
class StoreMetrics:
    """Requests are attempts that left this machine, retries included; bytes are payload, headers not included."""

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REQUEST_KINDS, 0))
    retries: int = 0
    errors: int = 0
    throttled: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    latency_s_sum: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REQUEST_KINDS, 0.0))
    latency_s_max: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REQUEST_KINDS, 0.0))
    latency_counts: dict[str, list[int]] = field(
        default_factory=lambda: {kind: no_latencies() for kind in REQUEST_KINDS}
    )
    """By kind, in the buckets of LATENCY_BOUNDS_S."""

    def as_dict(self) -> dict[str, object]:
        values: dict[str, object] = msgspec.to_builtins(self)
        values["bytes"] = {"read": values.pop("bytes_read"), "written": values.pop("bytes_written")}
        return values


@dataclass(slots=True)
class ReadMetrics:
    """READ requests, by where their bytes were when they came: in memory (also what was fetched ahead), on the local
    disk (cache and staging), in the store. Of the seconds from a request to its answer the waits for the last two are
    counted; the rest is the daemon's own. An OPEN that fetches what the first READ needs waits here, too. A request is
    counted when it ends, so that no value goes down."""

    count: int = 0
    seconds: float = 0.0
    bytes_of_memory: int = 0
    bytes_of_disk: int = 0
    bytes_of_store: int = 0
    waited_disk_s: float = 0.0
    waited_store_s: float = 0.0
    waited_daemon_s: float = 0.0
    latency_counts: list[int] = field(default_factory=no_latencies)

    def count_read(self, request: ReadMetrics, seconds: float) -> None:
        """Count a request that took so long, and what it counted itself."""
        request.waited_daemon_s = max(0.0, seconds - request.waited_disk_s - request.waited_store_s)
        self._add(request)
        self.count += 1
        self.seconds += seconds
        self.latency_counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1

    def add_waits(self, opening: ReadMetrics) -> None:
        """An OPEN fetched what the first READ needs, and waited."""
        self.seconds += opening.waited_store_s + opening.waited_disk_s
        self.waited_store_s += opening.waited_store_s
        self.waited_disk_s += opening.waited_disk_s

    def _add(self, other: ReadMetrics) -> None:
        self.bytes_of_memory += other.bytes_of_memory
        self.bytes_of_disk += other.bytes_of_disk
        self.bytes_of_store += other.bytes_of_store
        self.waited_disk_s += other.waited_disk_s
        self.waited_store_s += other.waited_store_s
        self.waited_daemon_s += other.waited_daemon_s

    def add(self, other: ReadMetrics) -> None:
        """Add the counters of other requests."""
        self._add(other)
        self.count += other.count
        self.seconds += other.seconds
        self.latency_counts = [a + b for a, b in zip(self.latency_counts, other.latency_counts, strict=True)]

    def as_dict(self) -> dict[str, object]:
        return {
            "count": self.count,
            "seconds": self.seconds,
            "bytes": {"memory": self.bytes_of_memory, "disk": self.bytes_of_disk, "store": self.bytes_of_store},
            "waited_s": {"store": self.waited_store_s, "disk": self.waited_disk_s, "daemon": self.waited_daemon_s},
            "latency_counts": list(self.latency_counts),
        }


@dataclass(slots=True)
class CacheMetrics:
    """The block cache. A hit or miss is one block that a reader needs; ``fetched_whole`` counts objects prefetched
    because they are read in random order; ``bypasses`` counts ranges that were read past a cache in which everything is
    in use; ``wrong_sums`` counts responses whose bytes did not match their sum; ``throttled_s`` is how long GETs waited
    for their limit, added up over all of them."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    evicted_bytes: int = 0
    prefetched_blocks: int = 0
    fetched_whole: int = 0
    bypasses: int = 0
    wrong_sums: int = 0
    throttled_s: float = 0.0


@dataclass(slots=True)
class ClusterCacheMetrics:
    """The cluster cache. ``requests`` to its proxies; of those, ``hits``, which the proxy says that it had, and
    ``failures``, without an answer that could be used. ``damaged`` ranges came with bytes that did not have their sum.
    ``fallbacks`` are ranges that were fetched from the store for either reason. Payload: ``bytes_read`` of proxies,
    ``bytes_of_store`` of the store, for what no proxy gave or no sum proves."""

    requests: int = 0
    hits: int = 0
    failures: int = 0
    damaged: int = 0
    fallbacks: int = 0
    bytes_read: int = 0
    bytes_of_store: int = 0


@dataclass(slots=True)
class UploadMetrics:
    """The write path. ``idle_with_work_s`` is time in which a complete part waited although a slot was free;
    ``throttled_s`` is how long uploads waited for their limit, ``bytes_s_max`` (0: none), added up over all of them."""

    parts: int = 0
    parts_repeated: int = 0
    parts_copied: int = 0
    parts_spilled: int = 0
    publishes: int = 0
    failures: int = 0
    writer_waits: int = 0
    idle_with_work_s: float = 0.0
    bytes_s_max: int = 0
    throttled_s: float = 0.0


@dataclass(slots=True)
class NamespaceMetrics:
    """Listings of directories and their pages, lookups of single names, and what these changed."""

    listings: int = 0
    listing_pages: int = 0
    point_lookups: int = 0
    entries_added: int = 0
    entries_changed: int = 0
    entries_removed: int = 0
    invalidations: int = 0


@dataclass(slots=True)
class CommitMetrics:
    """Commits. ``files_packed`` and ``bytes_packed`` were closed here and went into a pack; ``batch_files_max`` is the
    largest number of files in one. ``lag_s`` is how long after its time the newest commit of another node was
    applied. ``future`` were left out for being dated too far ahead. ``clock_jumps`` of this machine's wall clock were
    noticed, and the store's clock is ``clock_offset_s`` ahead of it. ``redated`` commits of this node were committed
    again under right dates. ``withdrawn`` operations of this node were left out for newer versions. ``names_missing``
    is 1 where names may be missing, as no index that has collected commits can be used. ``announcements`` of those
    written have no operations: they name stored objects only."""

    written: int = 0
    announcements: int = 0
    operations_written: int = 0
    failures: int = 0
    applied: int = 0
    operations_applied: int = 0
    damaged: int = 0
    future: int = 0
    polls: int = 0
    deep_polls: int = 0
    packs: int = 0
    files_packed: int = 0
    bytes_packed: int = 0
    batch_files_max: int = 0
    operations_batch_max: int = 0
    lag_s: float = 0.0
    objects_deleted: int = 0
    clock_jumps: int = 0
    clock_offset_s: float = 0.0
    redated: int = 0
    withdrawn: int = 0
    names_missing: int = 0

    def count_commit(self, operations: int) -> None:
        self.written += 1
        self.announcements += not operations
        self.operations_written += operations
        self.operations_batch_max = max(self.operations_batch_max, operations)


@dataclass(slots=True)
class HintMetrics:
    """Hints, where there is a channel. ``published`` counts commits of this node; ``received`` messages, of which
    ``foreign`` name no commit; ``polls`` were made because of hints; ``errors`` are failed calls and lost connections.
    """

    connected: bool = False
    published: int = 0
    received: int = 0
    foreign: int = 0
    polls: int = 0
    errors: int = 0


@dataclass(slots=True)
class WriteBackMetrics:
    """Write-back. ``accepted`` counts acknowledged files; each is published, ``superseded`` by a newer version, or kept
    beside the version of another node (``conflicts``). ``replayed`` counts files taken over at mount."""

    accepted: int = 0
    superseded: int = 0
    replayed: int = 0
    conflicts: int = 0
    failures: int = 0


class Unfinished(msgspec.Struct, frozen=True):
    """A file whose newest bytes are not all in the store; sizes in bytes.

    ``state`` is a `DraftState`, ``orphan`` (left by a daemon that died), or ``journaled`` for changes of names;
    ``bytes_done`` are uploaded; ``error`` is why the last attempt failed."""

    id: str
    path: str
    bytes: int
    state: str
    age_s: float
    error: str
    parts_done: int
    bytes_done: int
    missing: int = 0
    """Bytes whose writes were refused: the file is not published as long as there are any."""


@dataclass(slots=True)
class WarmMetrics:
    """Warms of the block cache. ``fetched_bytes`` came from the store for them; ``last_error`` ended one in the
    background since the last one that finished."""

    finished: int = 0
    failed: int = 0
    fetched_bytes: int = 0
    last_error: str = ""


@dataclass(slots=True)
class Warming:
    """How far one warm is: of its files those that are local, and of the bytes that are missing those that came. The
    totals grow while ``stage`` is ``counting``, are final when it is ``fetching``; before that it is ``waiting``."""

    stage: str = "waiting"
    files_done: int = 0
    files_total: int = 0
    bytes_total: int = 0
    unfit_bytes: int = 0
    """So much disk space is missing; files are left out for it."""
    fetch_bytes_done: int = 0
    fetch_bytes_total: int = 0


@dataclass(slots=True)
class UpcomingMetrics:
    """Files that jobs named (`vfs.residency.upcoming_reads`): read ahead, with their ``bytes``; ``local`` already;
    ``dropped`` because the job was faster; ``failed``."""

    files: int = 0
    bytes: int = 0
    local: int = 0
    dropped: int = 0
    failed: int = 0


@dataclass(slots=True)
class Metrics:
    """All counters of one daemon."""

    upcalls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UPCALLS, 0))
    store: StoreMetrics = field(default_factory=StoreMetrics)
    reads: dict[str, ReadMetrics] = field(default_factory=dict)
    """By the glob of the path rule that holds for the file; empty where none does."""
    cache: CacheMetrics = field(default_factory=CacheMetrics)
    cluster_cache: ClusterCacheMetrics = field(default_factory=ClusterCacheMetrics)
    upload: UploadMetrics = field(default_factory=UploadMetrics)
    namespace: NamespaceMetrics = field(default_factory=NamespaceMetrics)
    commits: CommitMetrics = field(default_factory=CommitMetrics)
    hints: HintMetrics = field(default_factory=HintMetrics)
    writeback: WriteBackMetrics = field(default_factory=WriteBackMetrics)
    warm: WarmMetrics = field(default_factory=WarmMetrics)
    upcoming: UpcomingMetrics = field(default_factory=UpcomingMetrics)

    def reads_of(self, glob: str) -> ReadMetrics:
        """The counters of READ requests for files of a rule, made when first asked for."""
        return self.reads.setdefault(glob, ReadMetrics())

    def _reads(self) -> dict[str, object]:
        total = ReadMetrics()
        for each in self.reads.values():
            total.add(each)
        return {**total.as_dict(), "by_rule": {glob: each.as_dict() for glob, each in self.reads.items()}}

    def as_dict(self) -> dict[str, object]:
        """Nested plain values: ``stats --json`` before gauges are added."""
        values: dict[str, object] = msgspec.to_builtins(self)
        return values | {"reads": self._reads(), "store": self.store.as_dict()}
