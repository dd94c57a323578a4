"""A cluster in virtual time: mounts of one lake, a store that counts what each asks for, and maintenance by the mounts.

The nodes are those of `tests.simulation`. What is added here: a store with pages of 1,000 names that counts requests
and bytes by kind and place, and that may refuse requests as S3 does; programs that count as questions, so that mounts
become idle as they do under a kernel; and maintenance, which runs in the process of the simulation.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import trio

from lakefs_fuse.admin.commands import run_maintenance
from lakefs_fuse.admin.fold_database import FoldDatabase
from lakefs_fuse.admin.maintenance import INTERVAL_S, LEVELS_COMMITS_MAX, Inspector
from lakefs_fuse.admin.work import Work
from lakefs_fuse.commits.index.index import INDEX
from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.daemon.maintenance import Maintenance
from lakefs_fuse.environment.node import Node, RandomStreams
from lakefs_fuse.errors import LakeError, NotCarriedOut
from lakefs_fuse.metrics import StoreMetrics
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.lake_record import LakeRecord
from lakefs_fuse.store.protocol import Capabilities, Fetched, ObjectMeta
from tests.simulation.chance import Chance
from tests.simulation.machine import MachineClock, MachineThreads
from tests.simulation.memory_engine import MemoryEngines
from tests.simulation.network import Link, Weather
from tests.simulation.node import STORE, SimulatedDisk, SimulatedNode, World
from tests.simulation.object_store import SimulatedStore

LATENCY = Weather(latency_s=(0.0075, 0.05))
"""Each way, so that a request takes 15 to 100 ms, as S3 answers small ones from within its region."""
PAGE_KEYS = 1000
PLACES = ("commits", "index", "other", "files")
"""Where a request goes: below `.lakefs/commits/`, `.lakefs/index/`, elsewhere below `.lakefs/`, and outside of it."""


def place_of(key: str) -> str:
    if key.startswith(COMMITS):
        return "commits"
    if key.startswith(INDEX):
        return "index"
    return "other" if key.startswith(RESERVED_PREFIX) else "files"


@dataclass
class Counts:
    """Requests by kind and place, and bytes of bodies."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: int = 0
    """To the store."""
    received: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Answered with 503."""

    def of(self, kind: str, *places: str) -> int:
        """Requests of a kind, to some places (to all if none is named)."""
        return sum(count for (what, place), count in self.requests.items()
                   if what == kind and (not places or place in places))  # fmt: skip

    def copy(self) -> Counts:
        return Counts(self.requests.copy(), self.sent, self.received, self.refused.copy())

    def since(self, before: Counts) -> Counts:
        return Counts(
            self.requests - before.requests, self.sent - before.sent, self.received - before.received,
            self.refused - before.refused,
        )  # fmt: skip


class CountingStore(SimulatedStore):
    """Counts requests of each sender. With ``puts_s`` and ``gets_s`` it takes so many a second, in bursts of a second,
    and answers 503 to more; LIST counts as GET does."""

    def __init__(self, clock: MachineClock, *, puts_s: float = 0.0, gets_s: float = 0.0) -> None:
        able = Capabilities(name="simulated", put_if_match=True, complete_if_match=True, delete_if_match=True)
        super().__init__(able, clock.wall_ns)
        self.page_keys_max = PAGE_KEYS
        self.versions = _Nothing()
        self.senders = _Nothing()
        self.counts: dict[str, Counts] = {}
        """By sender."""
        self._rates = {"put": puts_s, "get": gets_s}
        self._spent = {"put": (0.0, 0.0), "get": (0.0, 0.0)}
        """What was taken of each rate, and when."""
        self._mono_s = clock.mono_s

    @property
    def _counted(self) -> Counts:
        return self.counts.setdefault(self.sender, Counts())

    def total(self, prefix: str = "") -> Counts:
        """Of all senders whose names begin so."""
        total = Counts()
        for sender, counts in self.counts.items():
            if sender.startswith(prefix):
                total.requests.update(counts.requests)
                total.refused.update(counts.refused)
                total.sent, total.received = total.sent + counts.sent, total.received + counts.received
        return total

    def _note(self, what: str, key: str, detail: str = "") -> None:
        kind = _KINDS.get(what, "put")
        counts, where = self._counted, (kind, place_of(key))
        if kind != "free" and not self._has_room("put" if kind in ("put", "delete") else "get"):
            counts.refused[where] += 1
            raise NotCarriedOut("503 SlowDown", throttled=True)
        counts.requests[where] += 1

    def _has_room(self, rate: str) -> bool:
        limit = self._rates[rate]
        if not limit:
            return True
        (spent, at_s), now_s = self._spent[rate], self._mono_s()
        spent = max(0.0, spent - (now_s - at_s) * limit)
        has_room = spent + 1 <= limit
        self._spent[rate] = spent + has_room, now_s
        return has_room

    def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        fetched = super().get(key, start, end, etag=etag)
        self._counted.received += len(fetched.data)
        return fetched

    def put_as(self, key: str, data: bytes, etag: str, metadata: Mapping[str, str] | None = None) -> ObjectMeta:
        self._counted.sent += len(data)
        return super().put_as(key, data, etag, metadata)

    def restore(self, data: bytes, meta: ObjectMeta) -> None:
        """Put an object there with the date that it had."""
        self.put_as(meta.key, data, meta.etag)
        self.objects[meta.key] = data, meta
        self._listed[meta.key] = meta

    def delete_many(self, keys: Sequence[str]) -> Mapping[str, str]:
        self._note("delete", keys[0])
        for key in keys:
            self.remove(key)
        return {}

    def own(self) -> tuple[int, int]:
        """Objects below `.lakefs/`, and their bytes."""
        sizes = [len(data) for key, (data, _) in self.objects.items() if key.startswith(RESERVED_PREFIX)]
        return len(sizes), sum(sizes)


_KINDS = {"get": "get", "head": "get", "list": "list", "list_multipart": "list", "time": "get", "delete": "delete",
          "abort_multipart": "delete"}  # fmt: skip
"""As S3 counts and charges requests; all others are `put`."""


class _Nothing(dict):  # type: ignore[type-arg]
    """A dictionary that keeps nothing, so that a year needs no more memory than the lake has bytes."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


class MountedNode(SimulatedNode):
    """A node whose programs count as questions, and whose mount does maintenance."""

    asked = 0

    async def serve(self, *, maintains: bool) -> None:
        """Mount. Raises LakeError."""
        await self.start()
        self.lake.fs.namespace.idleness.watch(lambda: self.asked)
        if maintains:
            self.world.nursery.start_soon(self._maintain)

    async def ask(self) -> None:
        """Before each call of a program: an idle mount polls first."""
        self.asked += 1
        idleness = self.lake.fs.namespace.idleness
        if idleness.is_idle:
            await idleness.wake()

    async def write(self, path: str, data: bytes) -> None:
        """A file, closed. Raises LakeError."""
        await self.ask()
        await self.lake.write(path, data)

    async def mkdir(self, path: str) -> None:
        """Raises LakeError."""
        await self.ask()
        await self.lake.mkdir(path)

    async def remove_tree(self, path: str) -> None:
        """As `rm -r`. Raises LakeError."""
        await self.ask()
        for name in await self.lake.names(path):
            await self.lake.unlink(f"{path}/{name}")
        await self.lake.rmdir(path)

    async def _maintain(self) -> None:
        name = f"{self.name}-maintenance"
        chance, streams = Chance(f"{self.world.seed}/{name}"), RandomStreams(self.world.seed, name)
        threads = MachineThreads(chance)
        link = Link(chance, self.world.fired, self.world.announced(name))
        link.weather = self.weather
        client = StoreClient(
            self.world.store, self.world.store.capabilities, StoreMetrics(),
            transport=link, clock=self.clock, rng=streams.stream("retries"),
        )  # fmt: skip
        node = Node(self.clock, streams, threads, SimulatedDisk(streams.stream("temporary-names"), threads),
                    self.world.engines)  # fmt: skip
        directory = self.world.scratch / name
        database = FoldDatabase(directory / "folded")
        inspector = Inspector(
            client, self.clock, interval_s=INTERVAL_S, commits_max=LEVELS_COMMITS_MAX, database=database,
            has_levels=True,
        )  # fmt: skip
        await Maintenance(
            inspector,
            _Worker(client, node, directory),
            streams.stream("maintenance"),
            database,
            lambda: self.lake.metrics.commits.applied,
            threads,
        ).run()


class _Worker:
    """The process of `BackgroundWorker`, in that of the simulation."""

    def __init__(self, client: StoreClient, node: Node, directory: Path) -> None:
        self._client, self._node, self._directory = client, node, directory
        self.step = ""
        self.runs: list[dict[str, object]] = []

    async def run(self, command: str, args: msgspec.Struct, *, room_bytes: int) -> protocol.Finished | protocol.Failed:
        assert command == "maintenance" and isinstance(args, protocol.MaintenanceArgs)
        scratch = self._directory / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        work = Work(
            client=self._client, store=STORE, path="", progress=lambda _: None, note=lambda _: None, node=self._node,
            scratch=str(scratch), change_record=_keep_record, host=self._directory.name, process=1, levels=True,
        )  # fmt: skip
        try:
            return await run_maintenance(work, args)
        except LakeError as error:
            return protocol.Failed(message=str(error), exit_code=1)

    async def clear(self) -> None:
        """Nothing is left."""


def _keep_record(_: object) -> LakeRecord:
    raise AssertionError("maintenance does not change the record of a lake")


@dataclass
class Cluster:
    """Mounts of one lake. Leave `opened` to end them."""

    world: World
    store: CountingStore
    began_s: float
    """What the clocks of all machines show of the time before this run."""
    nodes: list[MountedNode] = field(default_factory=list)

    async def add(self, count: int = 1, *, maintains: bool = True, **config: object) -> None:
        """Mount the lake on so many more nodes, all at once."""
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                node = MountedNode(self.world, f"n{len(self.nodes)}", MachineClock(self.began_s), **config)
                node.weather = LATENCY
                self.nodes.append(node)
                nursery.start_soon(partial(node.serve, maintains=maintains))

    async def fresh_mount(self) -> Counts:
        """What a mount with an empty cache asks for until it serves, and has polled."""
        node = MountedNode(self.world, f"fresh{len(self.store.counts)}", MachineClock(self.began_s), read_only=True)
        node.weather = LATENCY
        await node.start()
        await node.lake.parts.poller.poll()
        daemon = node.daemon
        assert daemon is not None
        daemon.scope.cancel()
        await daemon.ended.wait()
        if self.world.engines is not None:
            self.world.engines.forget(daemon.directory)
        return self.store.total(f"{node.name}#")


@asynccontextmanager
async def opened(
    scratch: Path, seed: str, *, collect_each_s: float, began_s: float = 0.0, puts_s: float = 0.0,
    gets_s: float = 0.0, **config: object,
) -> AsyncIterator[Cluster]:  # fmt: skip
    """A cluster without nodes, inside of `scheduler.run`. The databases of its mounts are in memory: reading RocksDB
    takes half of the CPU time of a simulated node. ``collect_each_s``: how often to collect cyclic garbage, which holds
    pages of LIST and bodies of GET: the scheduler has switched the collector off, because it runs by chance."""
    store = CountingStore(MachineClock(began_s), puts_s=puts_s, gets_s=gets_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_collect_garbage, collect_each_s)
        yield Cluster(World(store, nursery, seed, scratch, config, engines=MemoryEngines()), store, began_s)
        nursery.cancel_scope.cancel()


async def _collect_garbage(each_s: float) -> None:
    while True:
        await trio.sleep(each_s)
        gc.collect()
