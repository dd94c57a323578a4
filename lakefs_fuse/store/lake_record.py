"""The lake record `.lakefs/lake`: identity and features of a lake, and the capabilities of its stores; one JSON object.

What always holds:

* its id never changes; a new lake has all features, and else they are only added, by `upgrade`; a mount that does not
  know a feature does not read, or does not write, the lake;
* a mount that may not write (``--read-only``, unknown features) does not write the record or probe by writing;
* a change replaces the version that was read: with ``If-Match`` where the store has it, else after another GET, so that
  of two changes within milliseconds one may be lost. A finding that was lost is made again.

A finding is valid for `KEPT_NS`, for one endpoint, one server name (header ``Server``), one kind of encryption and one
version of the probe (`PROBE`); then the store is probed again. Blocking; called before anything is served. A crash
leaves the record unchanged or changed as a whole.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from lakefs_fuse import __version__
from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import MALFORMED, ConfigError, LakeError, NotFound, PreconditionFailed
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.open_retries import retry_unavailable
from lakefs_fuse.store.probe import PROBES, probe
from lakefs_fuse.store.protocol import Capabilities, NetworkStore, ObjectStore

KEY = f"{RESERVED_PREFIX}lake"
FORMAT = 1
"""Of the record itself."""
FORMAT_2 = "commit-format-2"
"""Commits have format 2, which programs that do not read the lake record refuse."""
LEVELS = "index-format-2"
"""Indexes have increments, and name files of earlier ones, which programs that do not know it cannot read."""
FEATURES = frozenset({FORMAT_2, LEVELS})
"""Features that this program knows. Readers must know each of them."""
RECORD_BYTES_MAX = 256 << 10
PROBE = 1
"""Number of the set of questions that `probe` asks: one more with each that is added, or has another meaning."""
KEPT_NS = 30 * 24 * 3600 * 1_000_000_000
"""Servers are upgraded; those that send their version in ``Server`` are probed again immediately."""
FINDINGS_MAX = 16
"""Endpoints and servers of one lake; the oldest finding goes."""
TRIES_MAX = 5
log = logging.getLogger(__name__)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a probe of one store. ``endpoint`` is empty for AWS and directories, ``encryption`` is ``kms`` if
    objects were stored with a KMS key, because then ETags are not MD5 sums."""

    endpoint: str
    server: str
    probe: int
    found_ns: int
    expires_ns: int
    capabilities: Capabilities
    encryption: str = ""

    def is_about(self, other: Finding) -> bool:
        return self.is_of_store(other) and self.encryption == other.encryption

    def is_of_store(self, other: Finding) -> bool:
        """Whatever encryption either was made with."""
        return (self.endpoint, self.server, self.probe) == (other.endpoint, other.server, other.probe)


class LakeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the object. Programs that change the lake must know ``features_to_write``, all programs
    ``features_to_read``."""

    format: int = FORMAT
    id: str
    features_to_read: tuple[str, ...] = ()
    features_to_write: tuple[str, ...] = ()
    stores: tuple[Finding, ...] = ()

    def with_finding(self, finding: Finding) -> LakeRecord:
        """Add a finding, which replaces an older one about the same store."""
        kept = [each for each in self.stores if not each.is_about(finding)]
        newest = sorted([*kept, finding], key=lambda each: each.found_ns)[-FINDINGS_MAX:]
        return replace(self, stores=tuple(newest))

    @property
    def commit_format(self) -> int:
        """The format in which commits are written."""
        return 2 if FORMAT_2 in self.features_to_read else 1


@dataclass(frozen=True, slots=True)
class OpenedLake:
    """A lake as its record describes it, if it has one."""

    record: LakeRecord | None
    finding: Finding
    unknown: tuple[str, ...] = ()
    """Features without which it cannot be written."""

    @property
    def capabilities(self) -> Capabilities:
        return self.finding.capabilities

    @property
    def commit_format(self) -> int:
        return self.record.commit_format if self.record is not None else 1

    @property
    def has_levels(self) -> bool:
        """Whether indexes are written with increments."""
        return self.record is not None and LEVELS in self.record.features_to_read


def open_record(
    store: ObjectStore,
    config: StoreConfig,
    rng: random.Random,
    clock: Clock,
    *,
    may_write: bool,
) -> OpenedLake:
    """One GET where the record is there and fresh; else the store is probed, and what was found goes into the record.
    Where there is no record and nothing else of a lake, it has every feature.

    Adapts the store. Raises ConfigError where the lake cannot be read by this program or the record is damaged, and as
    `probe.probe` does.
    """
    record, _ = read_record(store, clock)
    unknown = check_features(record) if record is not None else ()
    may_write = may_write and not unknown
    now = clock.wall_ns()
    known = None if record is None else _fresh(record, _finding(store, config, now, Capabilities(name="")), may_write)
    if known is not None:
        if isinstance(store, NetworkStore):
            store.adapt(known.capabilities)
        return OpenedLake(record, known, unknown)
    features = FEATURES if record is None and may_write and _is_new(store, clock) else frozenset[str]()
    finding = _finding(store, config, now, probe(store, rng, clock, read_only=not may_write))
    if not may_write:
        return OpenedLake(record, finding, unknown)
    try:
        record = change_record(store, clock, lambda old: (old or _new(rng, features)).with_finding(finding))
    except ConfigError:
        raise
    except LakeError as error:
        log.warning(
            "the capabilities of the store could not be written to %s, and will be probed again: %s", KEY, error
        )
    return OpenedLake(record, finding)


def read_record(store: ObjectStore, clock: Clock) -> tuple[LakeRecord | None, str]:
    """The record and its ETag, or None. Raises ConfigError for one that is damaged or of another format."""
    try:
        fetched = retry_unavailable(lambda: store.get(KEY, 0, RECORD_BYTES_MAX), clock)
    except NotFound:
        return None, ""
    return decode_record(bytes(fetched.data)), fetched.meta.etag


def decode_record(data: bytes) -> LakeRecord:
    """Raises ConfigError for one that is damaged or of another format."""
    try:
        record = msgspec.json.decode(data, type=LakeRecord)
    except MALFORMED as error:
        raise ConfigError(f"{KEY}, the record of this lake, is damaged ({error}): bring it back") from error
    if record.format != FORMAT:
        raise ConfigError(
            f"{KEY} is of format {record.format}, and lakefs-fuse {__version__} knows {FORMAT}: install a newer one"
        )
    return record


def check_features(record: LakeRecord) -> tuple[str, ...]:
    """Features that keep this program from writing the lake. Raises ConfigError where it must not even read it."""
    unknown = sorted(set(record.features_to_read) - FEATURES)
    if unknown:
        raise ConfigError(
            f"this lake has {', '.join(unknown)}, which lakefs-fuse {__version__} cannot read: install a newer one"
        )
    return tuple(sorted(set(record.features_to_write) - FEATURES))


def change_record(store: ObjectStore, clock: Clock, change: Callable[[LakeRecord | None], LakeRecord]) -> LakeRecord:
    """Read the record, change it, write it; repeat that if another mount wrote it in between. The store is adapted.
    Raises LakeError."""
    failure: LakeError = LakeError("")
    for _ in range(TRIES_MAX):
        old, etag = read_record(store, clock)
        new = change(old)
        if new == old:
            return new
        try:
            _write(store, new, etag, clock)
        except PreconditionFailed as error:
            failure = error
        else:
            return new
    raise failure


def without_findings(record: LakeRecord | None) -> LakeRecord:
    """A change of a record: the store is probed again by the next mount."""
    assert record is not None
    return replace(record, stores=())


def _write(store: ObjectStore, record: LakeRecord, etag: str, clock: Clock) -> None:
    body = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    if not etag:
        retry_unavailable(lambda: store.put(KEY, body, if_absent=True), clock)
    elif isinstance(store, NetworkStore) and store.capabilities.put_if_match:
        retry_unavailable(lambda: store.put(KEY, body, etag=etag), clock)
    else:
        if read_record(store, clock)[1] != etag:
            raise PreconditionFailed(f"another mount changed {KEY}")
        retry_unavailable(lambda: store.put(KEY, body), clock)


def _is_new(store: ObjectStore, clock: Clock) -> bool:
    """Whether no mount has written anything yet; others may be probing the store."""
    page = retry_unavailable(lambda: store.list_page(RESERVED_PREFIX), clock)
    return page.next_token is None and all(
        meta.key == RESERVED_PREFIX or meta.key.startswith(PROBES) for meta in page.objects
    )


def _new(rng: random.Random, features: frozenset[str]) -> LakeRecord:
    return LakeRecord(id=f"{rng.getrandbits(128):032x}", features_to_read=tuple(sorted(features)))


def _finding(store: ObjectStore, config: StoreConfig, now_ns: int, capabilities: Capabilities) -> Finding:
    """Made after a GET, in whose answer the server says its name."""
    return Finding(
        endpoint=config.meant[1],
        server=store.server if isinstance(store, NetworkStore) else "",
        probe=PROBE,
        found_ns=now_ns,
        expires_ns=now_ns + KEPT_NS,
        capabilities=capabilities,
        encryption="kms" if config.sse.startswith("kms") else "",
    )


def _fresh(record: LakeRecord, asked: Finding, may_write: bool) -> Finding | None:
    """The finding about this store. A reader uses an expired one, too, and one that was made with another encryption:
    it cannot probe by writing, and stores nothing."""
    found = next((each for each in record.stores if each.is_about(asked)), None)
    if found is None and not may_write:
        found = next((each for each in record.stores if each.is_of_store(asked)), None)
    if found is None or (may_write and not found.found_ns <= asked.found_ns < found.expires_ns):
        return None
    return found
