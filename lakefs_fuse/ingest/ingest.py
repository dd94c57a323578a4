"""Loads a tree or a tar stream into a lake, past any mount: small files into packs, large ones as plain objects.

What always holds:

* *whole packs*: every pack is a commit of its own, visible to mounts once it is stored; no partial file is visible;
* *bounded memory*: at most ``uploads_max`` packs are uploaded while one more is filled, whatever the source holds. What
  is known of earlier files is in a temporary file; a tar stream also costs about 400 bytes for each of its packs;
* *last one wins*: a later item replaces an earlier one of the same path, as in tar; but one that is no directory does
  not replace a directory, and is refused by name;
* *no object of another name is replaced*: a large file at whose key another name has its bytes, after a rename, gets a
  key below `.lakefs/objects/`. A rename between the last look and the end of the upload is not seen.

A crash or an interruption leaves the commits stored so far, which are whole; perhaps an unfinished multipart upload, or
an object below `.lakefs/objects/` that no commit names, which `gc` removes, or a plain object whose attributes no
commit has yet. A second run does all of it again, with the same result.

A mount lists commits of the last two minutes before the newest it knows. A pack whose upload takes longer than SLOW_S
is repeated by another, small commit of the present time, so that no mount misses it: what it says of names of which no
later commit speaks, nor a pack of this run that was sealed since.

For tasks of one trio loop; what blocks is in `pack_filler` and the sources, and runs in threads.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import TypeVar

import trio
from msgspec import structs

from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.future_commits import linked, still_newest
from lakefs_fuse.commits.hybrid_clock import HybridClock
from lakefs_fuse.commits.record import OBJECTS, UNSET, Mkdir, ObjectRef, Operation, Record
from lakefs_fuse.config import MIB
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import (
    FileError,
    KeyRefused,
    LakeError,
    NotFound,
    Overtaken,
    PreconditionFailed,
    Unsupported,
    sole_error,
)
from lakefs_fuse.ingest.pack_filler import CopyOf, Full, NeedsStored, Pack, PackFiller, Totals
from lakefs_fuse.ingest.source import Attributes, Changed, File, Refused, Source, SourceError
from lakefs_fuse.ingest.tar_source import TarSource
from lakefs_fuse.ingest.tree_source import TreeSource
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import PARTS_MAX, Body, ObjectMeta, PartRef
from lakefs_fuse.store.server_copy import COPY_BYTES_MAX, COPY_PART_BYTES

PART_BYTES = 16 * MIB
PARTS_BYTES_MAX = 64 * MIB
"""Parts of a large file in memory at once, while they are no larger than PART_BYTES."""
SLOW_S = 60.0
ID_BITS = 128
"""Of the random number in a key below `OBJECTS`."""
NOTES_MAX = 20
"""Refused names that get a line each; the others are counted."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_./=-]+")
"""Keys that no store was ever seen to change."""

T = TypeVar("T")
Report = Callable[[Totals, Totals | None], None]
"""Reports what is done, and the totals where they are known."""
IsReserved = Callable[[str], Awaitable[bool]]
"""Whether another name has, or lately had, its bytes at this key. Raises LakeError."""


class Ingest:
    """One run; owns the packer and its source."""

    def __init__(
        self,
        client: StoreClient,
        packer: PackFiller,
        node: Node,
        *,
        open_names: Callable[[], AbstractAsyncContextManager[IsReserved]],
        uploads_max: int = 3,
        report: Report,
        note: Callable[[str], None],
    ) -> None:
        """``open_names`` opens the names of the lake, where a large file meets an object at its key."""
        self._client, self._packer, self._threads = client, packer, node.threads
        self._source = packer.source
        self._open_names, self._report, self._note = open_names, report, note
        self._names = AsyncExitStack()
        self._is_reserved: IsReserved | None = None
        self._clock = HybridClock(node.clock, rng=node.random.stream("commit-times"))
        writer = f"{node.random.stream('writer').getrandbits(32):08x}"
        self._ids = node.random.stream("object-ids")
        self._log = CommitLog(client, self._clock, node.threads, writer=writer)
        self._slots = trio.Semaphore(uploads_max)
        self._in_flight: dict[int, list[Operation]] = {}
        """Of each pack that is sealed, and not stored or not repeated yet: what it says of names of which no pack
        speaks that was sealed since."""
        self._landed = trio.Event()
        self._total: Totals | None = None
        self.done = Totals()

    async def run(self, *, count: bool = False) -> Totals:
        """Load everything; ``count`` the source first, for `Report`. Raises LakeError, or a group of them."""
        counting, watching = trio.CancelScope(), trio.CancelScope()
        try:
            # Commits of this run have to be later than all that are there, whatever this machine's clock says.
            await self._log.read_time()
            await self._log.latest_time()
            async with trio.open_nursery() as nursery:
                await nursery.start(self._interrupt_when_cancelled, watching)
                if count:
                    nursery.start_soon(self._count, counting)
                async with self._names:
                    await self._work(nursery)
                counting.cancel()
                watching.cancel()
        finally:
            self._packer.close()
            with trio.CancelScope(shield=True):
                await self._threads.run(self._source.close)
        self._report_refused_sum()
        return self.done

    async def _count(self, scope: trio.CancelScope) -> None:
        with scope:
            found = await self._threads.run(self._source.count, abandon_on_cancel=True)
            if found is not None:
                self._total = Totals(files=found[0], bytes=found[1])

    async def _interrupt_when_cancelled(self, scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
        """Wake a thread that waits for a silent stream, because the run waits for the thread."""
        task_status.started()
        try:
            with scope:
                await trio.sleep_forever()
        finally:
            self._source.interrupt()

    async def _blocking(self, call: Callable[..., T], *args: object) -> T:
        """Run in a thread; the error of an interrupted source becomes the cancellation that interrupted it."""
        try:
            return await self._threads.run(call, *args)
        except SourceError:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise

    async def _work(self, nursery: trio.Nursery) -> None:
        while True:
            step = await self._blocking(self._packer.fill)
            self._report_refused()
            match step:
                case Full(end):
                    pack = self._packer.take()
                    if pack is not None:
                        await self._send(pack, nursery)
                    if end:
                        return
                case File():
                    await self._upload_large(step)
                case CopyOf():
                    await self._copy_linked(step)
                case NeedsStored():
                    while self._in_flight:
                        self._landed = trio.Event()
                        await self._landed.wait()

    # -- packs

    async def _send(self, pack: Pack, nursery: trio.Nursery) -> None:
        """Seal a pack and start its upload, when fewer than ``uploads_max`` are under way."""
        if not pack.operations:
            pack.file.close()
            return
        try:
            await self._slots.acquire()
            # Not a moment earlier: mounts look for new commits among those of the last minutes.
            time = self._clock.now()
            record = Record(writer=self._log.writer, time=time, objects=pack.objects, operations=pack.operations)
            named = set(map(_named, pack.operations))
            for number, operations in self._in_flight.items():
                self._in_flight[number] = [each for each in operations if _named(each) not in named]
            self._in_flight[pack.number] = pack.operations
            await self._threads.run(self._packer.seal, pack, self._log.encode(record))
        except BaseException:
            pack.file.close()
            raise
        nursery.start_soon(self._store, pack, record)

    async def _store(self, pack: Pack, record: Record) -> None:
        began = trio.current_time()
        with pack.file:
            meta = await self._log.put(self._log.key(record.time), pack.body())
        ref = ObjectRef(meta.key, meta.etag, pack.size)
        if trio.current_time() - began > SLOW_S:
            await self._repeat_commit(pack, record, ref)
        self._packer.set_stored(pack, ref)
        pack.totals.packs = 1
        self.done.add(pack.totals)
        self._report(self.done, self._total)
        del self._in_flight[pack.number]
        self._slots.release()
        self._landed.set()

    async def _repeat_commit(self, pack: Pack, record: Record, ref: ObjectRef) -> None:
        """Store the operations that are still the newest in a small commit of the present time, which refers to the
        pack. Raises LakeError."""
        newest = set(map(id, await still_newest(self._log, record)))
        change = linked(ref, record, [each for each in self._in_flight[pack.number] if id(each) in newest])
        if change.operations:
            again = structs.replace(
                record, time=self._clock.now(), objects=change.objects, operations=change.operations
            )
            await self._log.put_record(again)

    # -- plain objects

    async def _upload_large(self, step: File) -> None:
        """Upload a file while the source waits. An error of this file alone is reported, and the rest goes on."""
        try:
            key, hides = await self._choose_key(step.path)
            meta = await self._upload(step, key)
        except (Changed, KeyRefused, Overtaken, FileError) as error:
            self._packer.refused.append(Refused(step.path, str(error)))
        except OSError as error:
            self._packer.refused.append(Refused(step.path, f"cannot be read: {error.strerror}"))
        else:
            self._packer.add_object(step, ObjectRef(key, meta.etag, meta.size), hides)
            self._count_object()
        finally:
            step.content.close()
        self._report_refused()

    async def _choose_key(self, path: str) -> tuple[str, str]:
        """The key for a large file: its own, unless another name has its bytes there. Then also the ETag of those."""
        there = await self._client.find(path)
        if there is None:
            return path, ""
        if self._is_reserved is None:
            self._is_reserved = await self._names.enter_async_context(self._open_names())
        if not await self._is_reserved(path):
            return path, ""
        return f"{OBJECTS}{self._ids.getrandbits(ID_BITS):032x}", there.etag

    async def _upload(self, step: File, key: str) -> ObjectMeta:
        client, size = self._client, step.content.size
        part_bytes = max(PART_BYTES, -(-size // (PARTS_MAX * MIB)) * MIB)
        room = trio.Semaphore(max(1, PARTS_BYTES_MAX // part_bytes))
        parts: dict[int, PartRef] = {}
        sent = 0

        async def send(upload_id: str, number: int, body: Body) -> None:
            nonlocal sent
            parts[number] = await client.upload_part(key, upload_id, number, body)
            sent += parts[number].size
            self.done.bytes += parts[number].size
            self._report(self.done, self._total)
            room.release()

        async with self._multipart(step, key) as upload_id:
            try:
                async with trio.open_nursery() as nursery:
                    for number, start in enumerate(range(0, size, part_bytes), 1):
                        await room.acquire()
                        length = min(part_bytes, size - start)
                        body = await self._blocking(step.content.read, start, length)
                        nursery.start_soon(send, upload_id, number, body)
                await self._threads.run(step.content.check)
                meta = await self._complete(step, key, upload_id, [parts[number] for number in sorted(parts)], size)
                await self._check_name(key)
                return meta
            except BaseException as error:
                self.done.bytes -= sent
                raise sole_error(error) from None

    @asynccontextmanager
    async def _multipart(self, step: File | CopyOf, key: str) -> AsyncIterator[str]:
        """A multipart upload for ``step``, which is aborted if the body fails."""
        upload_id = await self._client.create_multipart(key, metadata=_metadata(step.attributes))
        try:
            yield upload_id
        except BaseException:
            with trio.CancelScope(shield=True), suppress(LakeError):  # `gc` aborts what is left
                await self._client.abort_multipart(key, upload_id)
            raise

    async def _complete(
        self, step: File | CopyOf, key: str, upload_id: str, parts: list[PartRef], size: int
    ) -> ObjectMeta:
        if key == step.path and (await self._choose_key(key))[0] != key:
            raise Overtaken("the object at its key was given to another name meanwhile: run this again")
        try:
            return await self._client.complete_multipart(key, upload_id, parts)
        except NotFound:
            # Perhaps it was completed, and the answer was lost; an earlier object has another time.
            meta = await self._client.head(key)
            sent, found = _metadata(step.attributes), meta.metadata or {}
            if meta.size != size or any(found.get(name) != value for name, value in sent.items()):
                raise
            return meta

    async def _check_name(self, key: str) -> None:
        """Some gateways change a character in a key. Raises KeyRefused."""
        if _PLAIN_NAME.fullmatch(key):
            return
        async for page in self._client.list_all(key):
            if any(meta.key == key for meta in page.objects):
                return
        raise KeyRefused(f"the store changed its name ({key!r})")

    async def _copy_linked(self, step: CopyOf) -> None:
        try:
            key, hides = await self._choose_key(step.path)
            meta = await self._copy(step, key)
        except (Unsupported, KeyRefused, NotFound, Overtaken, PreconditionFailed) as error:
            self._packer.refused.append(Refused(step.path, f"a hard link to {step.source}: {error}"))
            self._report_refused()
            return
        self._packer.add_object(step, ObjectRef(key, meta.etag, step.size), hides)
        self._count_object()

    async def _copy(self, step: CopyOf, key: str) -> ObjectMeta:
        """A copy that the store makes."""
        client = self._client
        if step.size <= COPY_BYTES_MAX:
            return await client.copy(step.source, key, etag=step.etag)
        parts: list[PartRef] = []
        async with self._multipart(step, key) as upload_id:
            for number, start in enumerate(range(0, step.size, COPY_PART_BYTES), 1):
                end = min(start + COPY_PART_BYTES, step.size)
                parts.append(
                    await client.upload_part_copy(key, upload_id, number, step.source, start, end, etag=step.etag)
                )
            return await self._complete(step, key, upload_id, parts, step.size)

    def _count_object(self) -> None:
        self.done.files += 1
        self.done.objects += 1
        self._report(self.done, self._total)

    # -- reports

    def _report_refused(self) -> None:
        for each in self._packer.pop_refused():
            if each.special:
                self.done.special += 1
                continue
            self.done.refused += 1
            if self.done.refused <= NOTES_MAX:
                self._note(f"left out: {printable(each.name)}: {each.why}")

    def _report_refused_sum(self) -> None:
        if self.done.refused > NOTES_MAX:
            self._note(f"left out: {self.done.refused - NOTES_MAX} more")


def open_source(name: str, clock: Clock, threads: Threads) -> Source:
    """A directory, a tar archive, or ``-`` for standard input. Raises SourceError where it cannot be read."""
    if name == "-":
        return TarSource(os.dup(0), "standard input")
    try:
        if os.path.isdir(name):
            with os.scandir(name):
                return TreeSource(name, clock, threads)
        return TarSource(os.open(name, os.O_RDONLY | os.O_CLOEXEC), name)
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror}") from error


def printable(name: str) -> str:
    """A name as the protocol carries it, without escapes: the terminal makes those, also of backslashes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:300]


def _named(operation: Operation) -> tuple[str, bool]:
    """The name that an operation speaks of: files and directories are separate ones."""
    return operation.path, isinstance(operation, Mkdir)


def _metadata(about: Attributes) -> Mapping[str, str]:
    """Attributes as mounts write them, and s3fs and rclone read them: `vfs.namespace.attributes`."""
    sign, ns = "-" if about.mtime_ns < 0 else "", abs(about.mtime_ns)
    owners = {name: str(value) for name, value in (("uid", about.uid), ("gid", about.gid)) if value != UNSET}
    mtime = f"{sign}{ns // 1_000_000_000}.{ns % 1_000_000_000:09d}"
    return {"mode": str(stat.S_IFREG | about.mode), **owners, "mtime": mtime}
