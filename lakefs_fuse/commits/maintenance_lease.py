"""The maintenance lease, by which commands that delete or move objects of a lake exclude one another, on all nodes.

It is the object `.lakefs/maintenance-lease`, which names its holder; `docs/format.md` has its contents.

What always holds:

* *one holder*: a process creates the object only if there is none, and replaces that of another holder only if it is
  still the version that was read, whose lease has ended. Its id is random and each renewal has a number, so no two
  versions are equal;
* *dated by the store*: a lease ends VALID_S after the LastModified of its last renewal, on the store's clock. No clock
  of the holder counts for others;
* *no change without the lease*: requests through the client of `held` change the store only while the last renewal is
  younger than USABLE_S, by the time since boot and by the wall clock. After that (the process was stopped, the machine
  suspended, the store away) the lease is renewed first, which fails if another process has taken it over.

If a store ignores the conditions on PUT, the object is read before the PUT, and, if the lease was free or had ended,
once more CONFIRM_S after it. Two processes that take it in the same moment are then kept apart only if their requests
take less than that.

For tasks of one trio loop; `is_held` from any thread. After a crash the object stays, and no process can take the lease
for up to VALID_S.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
import trio
from msgspec.structs import replace

from lakefs_fuse.commits.record import TIME_NS_MAX
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import (
    MALFORMED,
    LakeError,
    LeaseHeld,
    NotCarriedOut,
    NotFound,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)
from lakefs_fuse.metrics import REQUEST_KINDS
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient, Transport
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import collecting

KEY = f"{RESERVED_PREFIX}maintenance-lease"
FORMAT = 1
RECORD_BYTES_MAX = 4 << 10
VALID_S = 90
"""How long a lease outlives a holder that was killed."""
VALID_S_MAX = 3600
"""Maximum in a record that another program wrote; a record with more counts as damaged."""
USABLE_S = 60
"""VALID_S less 30 s: a request that was sent may take effect until its client gives it up (5 s to connect and 20 s to
read), and LastModified has whole seconds."""
RENEW_S = 20
"""A third of USABLE_S: two renewals may fail."""
CONFIRM_S = 5
"""Time before the second read on a store without conditions: longer than a request takes."""
RELEASE_S_MAX = 5.0
"""How long a command that ends waits for the store to free the lease; after that the lease ends by itself."""
TRIES_MAX = 4
"""Attempts to take or renew the lease while its version changes."""
CHANGES = frozenset(REQUEST_KINDS) - {"get", "head", "list"}
"""Kinds of requests that change the store."""
NS = 1_000_000_000

T = TypeVar("T")


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the object. ``id`` is of one run of the ``command``, ``taken_ns`` in ns since 1970 by the holder's
    clock. The lease ends ``valid_s`` after LastModified, at once if that is 0."""

    format: int = FORMAT
    id: str
    command: str
    host: str
    process: int
    taken_ns: int
    renewal: int = 0
    valid_s: int = VALID_S


class MaintenanceLease:
    """The lease of one command: see the module's head. ``command``, ``host`` and ``process`` tell other commands who
    the holder is."""

    def __init__(
        self, client: StoreClient, clock: Clock, rng: random.Random, *, command: str, host: str, process: int,
        sleep: Callable[[float], Awaitable[None]] = trio.sleep,
    ) -> None:  # fmt: skip
        self._client, self._clock, self._sleep = client, clock, sleep
        self._record = LeaseRecord(
            id=f"{rng.getrandbits(128):032x}", command=command, host=host, process=process, taken_ns=clock.wall_ns()
        )
        self._etag = ""
        self._renewed_ns: tuple[int, int] | None = None
        """When the last renewal was sent, by the time since boot and by the wall clock; None: not held."""
        self._lock = trio.Lock()

    @property
    def is_held(self) -> bool:
        """True if the lease was renewed so recently that no other process can have taken it."""
        renewed_ns = self._renewed_ns
        if renewed_ns is None:
            return False
        passed_ns = max(now - then for now, then in zip(self._now_ns(), renewed_ns, strict=True))
        return passed_ns < USABLE_S * NS

    async def acquire(self) -> None:
        """Take the lease. Raises LeaseHeld if another process has it, and StoreError kinds."""
        async with self._lock:
            etag, began_ns = "", self._now_ns()
            for _ in range(TRIES_MAX):
                with suppress(PreconditionFailed, NotFound):
                    await self._write(etag, is_contended=True)
                    return
                found = await _find(self._client)
                if found is not None and found[0].id == self._record.id:  # an answer was lost
                    self._etag, self._renewed_ns = found[1].etag, began_ns
                    return
                if found is not None and not await _has_ended(self._client, self._clock, *found):
                    raise LeaseHeld(_held(*found))
                etag = "" if found is None else found[1].etag
            raise LeaseHeld("other commands take the lease of this lake at the same time: run this again")

    async def renew(self) -> None:
        """Renew the lease. Raises LeaseHeld if another process has taken it over, and StoreError kinds."""
        async with self._lock:
            await self._renew()

    async def confirm(self) -> None:
        """Renew the lease, as `renew`, unless it is certainly held."""
        async with self._lock:
            if not self.is_held:
                await self._renew()

    async def release(self) -> None:
        """Free the lease, if it is still this one. If the store does not do it, the lease ends by itself."""
        async with self._lock:
            able, was_held, self._renewed_ns = self._client.capabilities, self.is_held, None
            with suppress(LakeError):
                if able.put_if_match and not able.delete_if_match:
                    freed = replace(self._record, valid_s=0)
                    await self._client.put(KEY, msgspec.msgpack.encode(freed), etag=self._etag)
                elif able.delete_if_match or was_held:  # else another process may come between HEAD and DELETE
                    await self._client.delete(KEY, etag=self._etag)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[StoreClient]:
        """Hold the lease while the block runs; its client changes the store only while the lease is held.

        Raises LeaseHeld, also in the midst of the block, and StoreError kinds."""
        try:
            await self.acquire()
            async with collecting() as nursery:
                nursery.start_soon(self._keep)
                yield self._client.through(lambda transport: _LeasedTransport(transport, self))
                nursery.cancel_scope.cancel()
        finally:
            if self._etag:
                with trio.move_on_after(RELEASE_S_MAX, shield=True):
                    await self.release()

    async def _keep(self) -> None:
        while True:
            await self._sleep(RENEW_S)
            with suppress(Unavailable):  # the next change of the store tries again
                await self.renew()

    async def _renew(self) -> None:
        self._record = replace(self._record, renewal=self._record.renewal + 1)
        for _ in range(TRIES_MAX):
            with suppress(PreconditionFailed, NotFound):
                await self._write(self._etag, is_contended=not self.is_held)
                return
            found = await _find(self._client)
            if found is None or found[0].id != self._record.id:
                self._renewed_ns = None
                raise LeaseHeld(_lost(found))
            self._etag = found[1].etag  # an answer was lost
        raise LeaseHeld(_lost(None))

    async def _write(self, etag: str, *, is_contended: bool) -> None:
        """Store the record in place of the version ``etag``, or of none if that is empty. Raises PreconditionFailed or
        NotFound if there is another."""
        able, body, began_ns = self._client.capabilities, msgspec.msgpack.encode(self._record), self._now_ns()
        if able.put_if_match if etag else able.put_if_absent:
            meta = await self._client.put(KEY, body, if_absent=not etag, etag=etag or None)
        else:
            there = await self._client.find(KEY)
            if etag != ("" if there is None else there.etag):
                raise PreconditionFailed(f"{KEY} is another version")
            meta = await self._client.put(KEY, body)
            self._etag = meta.etag  # so that a command that is cancelled meanwhile releases the lease
            if is_contended:
                await self._sleep(CONFIRM_S)
                if (await self._client.head(KEY)).etag != meta.etag:
                    raise PreconditionFailed(f"another process has replaced {KEY}")
        self._etag, self._renewed_ns = meta.etag, began_ns

    def _now_ns(self) -> tuple[int, int]:
        return self._clock.boot_ns(), self._clock.wall_ns()


async def find_holder(client: StoreClient, clock: Clock) -> str:
    """Return who has the lease of a lake, in words; empty if it is free. Raises StoreError kinds."""
    found = await _find(client)
    return "" if found is None or await _has_ended(client, clock, *found) else _holder(found[0])


async def _find(client: StoreClient) -> tuple[LeaseRecord, ObjectMeta] | None:
    try:
        fetched = await client.get(KEY, 0, RECORD_BYTES_MAX)
    except NotFound:
        return None
    try:
        record = msgspec.msgpack.decode(fetched.data, type=LeaseRecord)
    except MALFORMED:
        record = None
    if record is None or not 0 <= record.valid_s <= VALID_S_MAX or not 0 <= record.taken_ns <= TIME_NS_MAX:
        record = LeaseRecord(id="", command="a command", host="unknown", process=0, taken_ns=fetched.meta.mtime_ns)
    return record, fetched.meta


async def _has_ended(client: StoreClient, clock: Clock, record: LeaseRecord, meta: ObjectMeta) -> bool:
    if not record.valid_s:
        return True
    try:
        now_ns = await client.time_ns()
    except Unsupported:
        now_ns = clock.wall_ns()
    return abs(now_ns - meta.mtime_ns) >= record.valid_s * NS  # a date in the future is of a clock that was set


class _LeasedTransport:
    """Sends requests that change the store only while the lease is held; checks again in the thread of the request."""

    def __init__(self, transport: Transport, lease: MaintenanceLease) -> None:
        self._transport, self._lease = transport, lease

    async def run(self, kind: str, call: Callable[[], T], *, abandon: bool) -> T:
        if kind not in CHANGES:
            return await self._transport.run(kind, call, abandon=abandon)
        await self._lease.confirm()

        def guarded() -> T:
            if not self._lease.is_held:
                raise NotCarriedOut("the lease of this lake ran out before a request was sent: run this again")
            return call()

        return await self._transport.run(kind, guarded, abandon=abandon)


def _time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / NS, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _holder(record: LeaseRecord) -> str:
    return f"{record.command} (host {record.host}, process {record.process}, since {_time(record.taken_ns)})"


def _held(record: LeaseRecord, meta: ObjectMeta) -> str:
    until = _time(meta.mtime_ns + record.valid_s * NS)
    return f"{_holder(record)} is changing this lake: wait for its end, or, if it was killed, until {until}"


def _lost(found: tuple[LeaseRecord, ObjectMeta] | None) -> str:
    taker = "another command" if found is None else _holder(found[0])
    return (
        f"{taker} took over the lease of this lake, because this process did not renew it in time: what was done until "
        "then stays; run this again when that has ended"
    )
