"""Tries the requests that a mount sends to a store, verb by verb, and reports those that these credentials may not
send.

Everything is written below a temporary key, ``.lakefs/probe-<random>/``, and removed by `Checkup.clean`, which the
caller always calls. A crash leaves a few small objects there, like a crash of a probe; no mount shows them.

*Silence ends it*: after a request that got no answer for SILENCE_S no other is sent, so that a firewall that drops
packets costs one timeout, and not one for each check.

Blocking; one thread, except `put_scratch` and `get_scratch`, which may be called from several.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from lakefs_fuse.checks import CheckResult, Severity, failed, ok, skipped, warning
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import LakeError, NotFound, PreconditionFailed, StoreError, Unavailable, Unsupported
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.open_retries import retry_unavailable
from lakefs_fuse.store.probe import OTHER_ETAG, PROBES
from lakefs_fuse.store.protocol import Body, DirectoryStore, NetworkStore, ObjectStore, PartRef

T = TypeVar("T")

BODY = b"0123456789"
ROUND_TRIPS = 9
"""Requests of which the median is taken."""
ROUND_TRIP_S_MAX = 0.15
"""Above this latency, 32 concurrent requests are too few to read small files at a good rate."""
SILENCE_S = 10.0
"""Half the time after which a connection that brings nothing counts as broken (`StoreConfig.read_timeout_s`)."""
SKEW_S_MAX = 2.0
"""Mounts correct a larger one by the store's clock (docs/operations.md)."""
SKEW_S_REFUSED = 900.0
"""S3 refuses signatures of another time: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html."""
NS = 1_000_000_000


class Checkup:
    """One round of checks of one store."""

    def __init__(self, store: ObjectStore, rng: random.Random, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self.base = f"{PROBES}{rng.getrandbits(64):016x}/"
        """Prefix of temporary keys."""
        self._written: list[str] = []
        self._uploads: list[tuple[str, str]] = []
        self._is_silent = False
        self._readable = ""
        """A key that can be read; empty where none is known."""

    def reading(self) -> Iterator[CheckResult]:
        """LIST, HEAD and GET of an existing object."""
        yield self._try("store.list", "LIST", self._find_readable)
        if self._readable:
            yield self._try("store.head", "HEAD", lambda: self._store.head(self._readable))
            yield self._try("store.get", "GET", lambda: self._store.get(self._readable, 0, 1))
        else:
            yield skipped("store.get", "there is no object to read: put one there, then run this again")

    def writing(self) -> Iterator[CheckResult]:
        """PUT, multipart uploads, copies and preconditions; then LIST, HEAD and GET of the written objects."""
        key = self.base + "object"
        put = self._try("store.put", "PUT", lambda: self.put_scratch("object", BODY))
        yield put
        if put.severity is Severity.OK:
            self._readable = key
        yield from self.reading()
        yield from self._uploading()
        yield self._try(
            "store.list-uploads", "list of unfinished uploads", lambda: self._store.list_multipart(self.base)
        )
        if self._readable == key:
            yield self._copying(key)
            yield self._conditions(key)

    def clock_skew(self) -> CheckResult:
        """This machine's clock against the store's."""
        check = "store.clock"
        try:
            before_ns = self._clock.wall_ns()
            store_ns = self._ask(self._store.time_ns)
            skew_s = ((before_ns + self._clock.wall_ns()) / 2 - store_ns) / NS
        except Unsupported:
            return skipped(check, "the store's answers have no date to compare this machine's clock with: run NTP")
        except LakeError as error:
            return failed(check, str(error))
        text = f"this machine's clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the store's"
        if abs(skew_s) >= SKEW_S_REFUSED:
            return failed(check, f"{text}, and requests are refused: set it, best with NTP", skew_s=round(skew_s, 1))
        if abs(skew_s) > SKEW_S_MAX:
            return warning(check, f"{text}: run NTP; until then mounts correct it", skew_s=round(skew_s, 1))
        return ok(check, text, skew_s=round(skew_s, 1))

    def round_trip(self) -> CheckResult:
        """The median of some small requests, after one that opens the connection."""
        check, head = "store.round-trip", bool(self._readable)
        taken: list[float] = []
        try:
            for _ in range(ROUND_TRIPS + 1):
                began_s = self._clock.mono_s()
                if head:
                    self._store.head(self._readable)
                else:
                    self._store.list_page(self.base, keys_max=1)
                taken.append(self._clock.mono_s() - began_s)
        except LakeError as error:
            return failed(check, str(error))
        median_s = statistics.median(taken[1:])
        text = f"{median_s * 1000:.1f} ms, the median of {ROUND_TRIPS} {'HEAD' if head else 'LIST'} requests"
        if median_s > ROUND_TRIP_S_MAX:
            return warning(
                check, f"{text}: raise --requests, or mount nearer to the store", median_s=round(median_s, 4)
            )
        return ok(check, text, median_s=round(median_s, 4))

    def put_scratch(self, name: str, body: Body) -> None:
        """Store a temporary object. Raises StoreError."""
        key = self.base + name
        if key not in self._written:
            self._written.append(key)
        self._store.put(key, body)

    def get_scratch(self, name: str, start: int, end: int) -> int:
        """Read a range of a temporary object; returns the number of received bytes. Raises StoreError."""
        return len(self._store.get(self.base + name, start, end).data)

    def clean(self) -> CheckResult | None:
        """Remove the objects written since the last call; the result is the check of DELETE. None if there were
        none."""
        failure: LakeError | None = None
        written, uploads, self._written, self._uploads = self._written, self._uploads, [], []
        for key, upload_id in uploads:
            try:
                self._ask(partial(self._store.abort_multipart, key, upload_id))
            except LakeError as error:
                failure = error
        for key in written:
            try:
                self._delete(key)
            except LakeError as error:
                failure = error
        if written:
            self._remove_directories()
            if isinstance(self._store, DirectoryStore):
                self._store.remove_own_directories()
        if failure is not None:
            return failed(
                "store.delete", f"{failure}; what was written, if anything, stays at {self.base}: remove it by hand"
            )
        return ok("store.delete", "DELETE is allowed, and nothing is left of this check") if written else None

    # -- single checks -------------------------------------------------------------------------------------------

    def _find_readable(self) -> None:
        page = self._store.list_page("", keys_max=100)
        if not self._readable:
            self._readable = next((meta.key for meta in page.objects if meta.size), "")

    def _uploading(self) -> Iterator[CheckResult]:
        key, begun = self.base + "upload", list[str]()
        checks = ("store.create-upload", "store.upload-part", "store.complete-upload", "store.abort-upload")
        yield self._try(checks[0], "begin of a multipart upload", lambda: begun.append(self._begin(key)))
        if not begun:
            for check in checks[1:]:
                yield skipped(check, "no upload could be begun: allow that first")
            return
        parts = list[PartRef]()
        yield self._try(
            checks[1], "upload of a part", lambda: parts.append(self._store.upload_part(key, begun[0], 1, BODY))
        )
        if parts:
            yield self._try(checks[2], "end of a multipart upload", lambda: self._complete(key, begun[0], parts))
        else:
            yield skipped(checks[2], "no part could be uploaded: allow that first")
        yield self._try(checks[3], "abort of a multipart upload", lambda: self._abort(self.base + "aborted"))

    def _begin(self, key: str) -> str:
        upload_id = self._store.create_multipart(key)
        self._uploads.append((key, upload_id))
        return upload_id

    def _complete(self, key: str, upload_id: str, parts: Sequence[PartRef]) -> None:
        self._written.append(key)
        self._store.complete_multipart(key, upload_id, parts)
        self._uploads.remove((key, upload_id))

    def _abort(self, key: str) -> None:
        upload_id = self._begin(key)
        self._store.abort_multipart(key, upload_id)
        self._uploads.remove((key, upload_id))

    def _copying(self, key: str) -> CheckResult:
        target = self.base + "copy"
        self._written.append(target)
        return self._try("store.copy", "copy", lambda: self._store.copy(key, target))

    def _conditions(self, key: str) -> CheckResult:
        """Whether a PUT whose condition does not hold is refused."""
        check = "store.conditions"
        try:
            absent = self._refuses(lambda: self._store.put(key, BODY, if_absent=True))
            match = self._refuses(lambda: self._store.put(key, BODY, etag=OTHER_ETAG))
        except StoreError as error:
            return failed(check, str(error))
        if absent and not isinstance(self._store, NetworkStore):
            # A directory compares the ETag and writes in two steps, so mounts do not rely on it.
            text = "no two nodes create one name; of two that replace one file at the same moment, both may succeed"
            return ok(check, text, if_absent=True, if_match=False)
        if absent and match:
            return ok(check, "conditional writes (If-None-Match, If-Match) are honoured", if_absent=True, if_match=True)
        ignored = " and ".join(
            name for name, honoured in (("If-None-Match", absent), ("If-Match", match)) if not honoured
        )
        return warning(
            check,
            f"{ignored} of writes is ignored, so two nodes that write one name at the same moment may both succeed: "
            "write each name from one node, or use a store that honours it",
            if_absent=absent,
            if_match=match,
        )

    def _refuses(self, call: Callable[[], object]) -> bool:
        try:
            self._ask(call)
        except PreconditionFailed:
            return True
        except Unsupported:
            return False
        return False

    def _remove_directories(self) -> None:
        """A server that keeps its keys in directories continues to list empty ones as prefixes."""
        with contextlib.suppress(LakeError):
            self._ask(partial(self._store.delete, self.base))
            page = self._store.list_page(RESERVED_PREFIX, delimiter="/", keys_max=2)
            if not page.prefixes and [meta.key for meta in page.objects] == [RESERVED_PREFIX]:
                self._store.delete(RESERVED_PREFIX)

    def _delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete(key))
        try:
            self._ask(lambda: self._store.head(key))
        except NotFound:
            return
        raise StoreError(f"delete {key!r}: the object is still there: see whether the store keeps deleted objects")

    # -- how calls are made --------------------------------------------------------------------------------------

    def _ask(self, call: Callable[[], T]) -> T:
        if self._is_silent:
            raise Unavailable("not sent, because the store did not answer before")
        began_s = self._clock.mono_s()
        try:
            return retry_unavailable(call, self._clock, tries_s_max=SILENCE_S)
        except Unavailable:
            self._is_silent = self._clock.mono_s() - began_s >= SILENCE_S
            raise

    def _try(self, check: str, verb: str, call: Callable[[], object]) -> CheckResult:
        if self._is_silent:
            return skipped(check, "not tried, because the store did not answer before: fix that first")
        began_s = self._clock.mono_s()
        try:
            self._ask(call)
        except LakeError as error:
            return failed(check, str(error))
        took_s = self._clock.mono_s() - began_s
        return ok(check, f"{verb} is allowed", took_s=round(took_s, 4))
