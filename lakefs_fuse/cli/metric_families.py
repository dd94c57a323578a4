"""The counters of daemons as Prometheus metrics: `FAMILIES` is every metric, with the place of its value in `stats`.

What always holds: names and labels are final once released, for alerts rely on them. Each sample has the label
``mountpoint``. A value that a mount does not report (an immutable one has no staging) has no sample. A daemon that
hangs does not keep others from answering: all are asked at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lakefs_fuse.metrics import LATENCY_BOUNDS_S

Values = Mapping[str, object]
MOUNTPOINT = "mountpoint"


class Family(NamedTuple):
    """One metric. ``at`` is the path of its value in `stats --json`; with ``label`` that is a mapping with a sample for
    each key, and where ``by_rule``, there is one such mapping for each path rule."""

    kind: str
    name: str
    at: str
    help: str
    label: str = ""
    by_rule: bool = False


FAMILIES = (
    Family("counter", "fuse_requests", "upcalls", "FUSE requests that the daemon answered", "operation"),
    Family("histogram", "store_request_duration_seconds", "store.latency", "Requests to the store", "kind"),
    Family("counter", "store_bytes", "store.bytes", "Payload read from the store and written to it", "direction"),
    Family("counter", "store_retries", "store.retries", "Requests to the store that were repeated"),
    Family("counter", "store_throttled", "store.throttled", "Requests that the store refused with 503 or 429"),
    Family("counter", "store_errors", "store.errors", "Requests to the store that failed"),
    Family("histogram", "read_duration_seconds", "reads", "READ requests, from the request to its answer"),
    Family(
        "counter", "read_bytes", "reads.by_rule.*.bytes",
        "Bytes read by programs, by where they were", "source", by_rule=True,
    ),
    Family(
        "counter", "read_waited_seconds", "reads.by_rule.*.waited_s",
        "Time in which programs waited for reads, by what they waited for", "source", by_rule=True,
    ),
    Family("counter", "cache_hits", "cache.hits", "Blocks that readers requested and that were in memory or in the "
        "local cache"),
    Family("counter", "cache_misses", "cache.misses", "Blocks that readers requested and that were fetched from the "
        "store"),
    Family("counter", "cache_evicted_bytes", "cache.evicted_bytes", "Bytes deleted from the local cache to make room"),
    Family("counter", "cache_damaged_blocks", "cache.damaged", "Blocks of the local cache with wrong bytes"),
    Family("counter", "cache_bypasses", "cache.bypasses", "Ranges read without caching, because the cache is full of "
        "blocks in use"),
    Family("counter", "read_ahead_files", "upcoming.files", "Files that a job named before it read them"),
    Family("counter", "read_ahead_dropped", "upcoming.dropped", "Of these files, those that the job read before they "
        "were fetched"),
    Family("counter", "download_throttled_seconds", "cache.throttled_s", "Time for which --download-limit held reads"),
    Family("gauge", "cache_bytes", "cache.bytes", "Size of the local cache"),
    Family("gauge", "cache_max_bytes", "cache.bytes_max", "Limit of the size of the local cache"),
    Family("gauge", "cache_warm_running", "warm.running", "1 while `cache warm` fetches files"),
    Family("counter", "cache_warm_bytes", "warm.fetched_bytes", "Bytes that `cache warm` fetched"),
    Family("counter", "cache_warm_failures", "warm.failed", "Runs of `cache warm` that failed"),
    Family("gauge", "cache_pinned_bytes", "pins.disk_bytes", "Disk space of pinned files in the local cache"),
    Family("gauge", "cache_pinned_max_bytes", "pins.limit_bytes", "Limit of this disk space"),
    Family("gauge", "cache_pins_refused_bytes", "pins.refused_bytes", "Bytes of pinned paths beyond the limit"),
    Family("counter", "cluster_cache_requests", "cluster_cache.requests", "Requests to proxies of the cluster cache"),
    Family("counter", "cluster_cache_hits", "cluster_cache.hits", "Of these, requests that a proxy answered from its "
        "cache"),
    Family("counter", "cluster_cache_failures", "cluster_cache.failures", "Of these, requests without a usable answer"),
    Family("counter", "cluster_cache_bytes", "cluster_cache.bytes_read", "Bytes read from proxies"),
    Family("counter", "upload_parts", "upload.parts", "Parts of multipart uploads that were sent"),
    Family("counter", "upload_files", "upload.publishes", "Files that were stored as plain objects"),
    Family("counter", "upload_failures", "upload.failures", "Attempts to store a file that failed"),
    Family("counter", "upload_writer_waits", "upload.writer_waits", "Times a writer waited because staging was full"),
    Family("counter", "upload_throttled_seconds", "upload.throttled_s", "Time for which --upload-limit held uploads"),
    Family("gauge", "staging_bytes", "staging.bytes", "Bytes on the local disk that are not in the store"),
    Family("gauge", "staging_max_bytes", "staging.bytes_max", "Limit of these bytes, --staging-size"),
    Family("gauge", "dirty_files", "dirty.files", "Files that are not in the store yet"),
    Family("gauge", "dirty_bytes", "dirty.bytes", "Size of these files"),
    Family("gauge", "dirty_failed_files", "dirty.failed", "Of these files, those with an error"),
    Family("gauge", "orphans", "dirty.orphans", "Files that were left unfinished, as `lakefs-fuse orphans` lists them"),
    Family("gauge", "writeback_files", "writeback.files", "Closed files that wait for their upload"),
    Family("gauge", "writeback_bytes", "writeback.bytes", "Size of these files"),
    Family("gauge", "writeback_oldest_seconds", "writeback.oldest_s", "Age of the oldest of these files"),
    Family("gauge", "writeback_failed_files", "writeback.failed", "Of these files, those that the store refused"),
    Family("counter", "writeback_conflicts", "writeback.conflicts", "Files kept beside another node's version"),
    Family("counter", "commits_written", "commits.written", "Commits of this node"),
    Family("counter", "commits_applied", "commits.applied", "Commits of all nodes that were applied"),
    Family("counter", "commit_failures", "commits.failures", "Commits that could not be written, and were tried again"),
    Family("counter", "commits_damaged", "commits.damaged", "Commits of others that cannot be read"),
    Family("counter", "operations_withdrawn", "commits.withdrawn", "Changes of names left out for newer versions"),
    Family("gauge", "names_missing", "commits.names_missing", "1 if names may be missing, because an index is lost"),
    Family("gauge", "object_numbers", "commits.object_numbers", "Numbers for packs and moved objects that are used"),
    Family("gauge", "object_numbers_max", "commits.object_numbers_max", "Maximum of these numbers in a lake"),
    Family("counter", "commit_polls", "commits.polls", "Polls for commits of other nodes"),
    Family("gauge", "commit_lag_seconds", "commits.lag_s", "Age of the newest commit of another node when applied"),
    Family("gauge", "clock_offset_seconds", "commits.clock_offset_s", "How far the store's clock is ahead of this one"),
    Family("counter", "listings", "namespace.listings", "Listings of directories by the store"),
    Family("counter", "listing_pages", "namespace.listing_pages", "Pages of these listings"),
    Family("gauge", "hints_connected", "hints.connected", "1 while the channel of hints is connected"),
    Family("gauge", "maintenance_backlog_commits", "maintenance.backlog", "Commits newer than the index"),
    Family("gauge", "maintenance_overdue", "maintenance.overdue", "1 if maintenance has been due for a day"),
    Family(
        "gauge", "maintenance_last_fold_timestamp_seconds", "maintenance.last_fold_s",
        "When commits were folded into the index last, by any node",
    ),
    Family(
        "gauge", "maintenance_last_collection_timestamp_seconds", "maintenance.last_collection_s",
        "When garbage was collected last, by any node",
    ),
    Family("gauge", "resident_memory_bytes", "memory.rss", "Resident memory of the daemon"),
    Family("gauge", "uptime_seconds", "daemon.uptime_s", "Time since the daemon started"),
    Family("counter", "restarts", "daemon.restarts", "Times the supervisor restarted the daemon"),
)  # fmt: skip
UP, INFO = "lakefs_fuse_up", "lakefs_fuse_mount_info"


class MountCollector(Collector):
    """Asks for the counters of each mount with every scrape. ``ask`` returns None where no daemon answers."""

    def __init__(self, mountpoints: tuple[str, ...], ask: Callable[[str], Values | None]) -> None:
        self._mountpoints, self._ask = mountpoints, ask

    def collect(self) -> Iterator[Metric]:
        with ThreadPoolExecutor(len(self._mountpoints)) as threads:
            asked = dict(zip(self._mountpoints, threads.map(self._ask, self._mountpoints), strict=True))
        up = GaugeMetricFamily(UP, "1 if the daemon of the mount answers", labels=[MOUNTPOINT])
        info = GaugeMetricFamily(INFO, "1, with what is mounted", labels=[MOUNTPOINT, "source", "version"])
        found = {mountpoint: values for mountpoint, values in asked.items() if values is not None}
        for mountpoint, values in asked.items():
            up.add_metric([mountpoint], int(values is not None))
        for mountpoint, values in found.items():
            info.add_metric([mountpoint, str(_at(values, "mount.source")), str(_at(values, "daemon.version"))], 1)
        yield up
        yield info
        for family in FAMILIES:
            yield _metric(family, found)


def registry_of(mountpoints: tuple[str, ...], ask: Callable[[str], Values | None]) -> CollectorRegistry:
    """What to make text of, or to serve."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MountCollector(mountpoints, ask))
    return registry


def full_name(family: Family) -> str:
    """As it is scraped."""
    return f"lakefs_fuse_{family.name}{'_total' if family.kind == 'counter' else ''}"


def _metric(family: Family, found: Mapping[str, Values]) -> Metric:
    name = f"lakefs_fuse_{family.name}"
    labels = [MOUNTPOINT, *(["rule"] if family.by_rule else []), *([family.label] if family.label else [])]
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.help, labels=labels)
        for mountpoint, values in found.items():
            for more, counts, total_s in _histograms(family, values):
                histogram.add_metric([mountpoint, *more], _cumulative(counts), total_s)
        return histogram
    metric = (CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily)(name, family.help, labels=labels)
    for mountpoint, values in found.items():
        for more, value in _samples(family, values):
            metric.add_metric([mountpoint, *more], value)
    return metric


def _samples(family: Family, values: Values) -> Iterator[tuple[list[str], float]]:
    if family.by_rule:
        above, _, below = family.at.partition(".*.")
        for rule, each in _mapping(_at(values, above)).items():
            for key, value in _mapping(_at(_mapping(each), below)).items():
                yield [rule, key], _number(value)
    elif family.label:
        for key, value in _mapping(_at(values, family.at)).items():
            yield [key], _number(value)
    elif (value := _at(values, family.at)) is not None:
        yield [], _number(value)


def _histograms(family: Family, values: Values) -> Iterator[tuple[list[str], list[int], float]]:
    """Labels, the counts of each bucket, and the sum."""
    if family.label:
        counts, sums = _mapping(_at(values, f"{family.at}_counts")), _mapping(_at(values, f"{family.at}_s_sum"))
        for key, each in counts.items():
            yield [key], _counts(each), _number(sums.get(key))
    else:
        of = _mapping(_at(values, family.at))
        if of:
            yield [], _counts(of.get("latency_counts")), _number(of.get("seconds"))


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    found, total = list[tuple[str, float]](), 0
    for bound, count in zip([*map(str, LATENCY_BOUNDS_S), "+Inf"], counts, strict=True):
        total += count
        found.append((bound, total))
    return found


def _at(values: Values, path: str) -> object:
    found: object = values
    for key in path.split("."):
        found = _mapping(found).get(key)
    return found


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _counts(value: object) -> list[int]:
    return list(value) if isinstance(value, list) else [0] * (len(LATENCY_BOUNDS_S) + 1)
