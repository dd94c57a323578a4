"""What the tests of this layer share: a lake in memory, opened as the engines do, and data sets in it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from lakefs_fuse.admin.lake_view import LakeView, open_lake_view
from lakefs_fuse.admin.work import Work
from lakefs_fuse.commits.archive import Member, build, commit_key
from lakefs_fuse.commits.index.index import write_index
from lakefs_fuse.commits.record import COMMITS, THIS, ObjectRef, Operation, Put, Record, encode
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.meta.sorted_tables import Dump
from lakefs_fuse.store.lake_record import change_record
from tests.fakes import node_of, store_client
from tests.memory_store import MemoryStore
from tests.upload.drafting import noise
from tests.vfs.lakes import Clock

STORE = StoreConfig(source=Source("file", "/nowhere", ""))
WRITER = "0badcafe"


@asynccontextmanager
async def headless(
    store: MemoryStore,
    clock: Clock,
    *,
    seed: int = 7,
    cache_dir: str | None = None,
    lists: bool = True,
    may_lack_names: bool = False,
) -> AsyncIterator[LakeView]:
    """The store as an engine sees it."""
    store.clock = clock
    client = store_client(store, store.capabilities, retry_timeout_s=0, seed=seed)
    # Of its own, because names of temporary files depend on the seed alone, and tests run in several processes.
    with tempfile.TemporaryDirectory() as scratch:
        async with open_lake_view(
            client, STORE, node=node_of(clock, str(seed)), scratch=scratch, cache_dir=cache_dir, lists=lists,
            may_lack_names=may_lack_names,
        ) as lake:  # fmt: skip
            yield lake


def work_of(
    store: MemoryStore, clock: Clock, scratch: Path, *, seed: int = 7, levels: bool = False, lake_id: str = ""
) -> Work:
    """A run of a command, of another process for each seed; ``scratch`` is of one test. The lake has ``levels``."""
    store.clock = clock
    return Work(
        client=store_client(store, store.capabilities, retry_timeout_s=0, seed=seed),
        store=STORE,
        path="",
        progress=lambda progress: None,
        note=lambda text: None,
        node=node_of(clock, str(seed)),
        scratch=str(scratch),
        change_record=partial(change_record, store, clock),
        host="here",
        process=seed,
        levels=levels,
        lake_id=lake_id,
    )


async def fold_all(view: LakeView, horizon: int) -> None:
    """An index of all that is known."""
    with tempfile.TemporaryDirectory() as directory:
        dump = Dump(view.fs.database, Path(directory), applied_since=0)
        try:
            await write_index(
                view.client, view.node.threads, dump, time=view.clock.now(), horizon=horizon, wrote=lambda _: None
            )
        finally:
            dump.close()


def dataset(count: int, directory: str = "data", size: int = 2000, first: int = 0) -> dict[str, bytes]:
    """Files with bytes of their own."""
    return {f"{directory}/{number:04d}": noise(number, size) for number in range(first, first + count)}


def give_pack(store: MemoryStore, clock: Clock, files: Mapping[str, bytes], *, writer: str = WRITER) -> str:
    """A commit of these files, as a writer elsewhere makes it; answers its key."""

    def operations(offsets: list[int]) -> list[Operation]:
        return [
            Put(path, THIS, offset, len(data), 0o640, 1, 2, 1_500_000_000_000_000_000)
            for (path, data), offset in zip(files.items(), offsets, strict=True)
        ]

    members = [Member(path, data, len(data), 0o640, 0, 1, 2) for path, data in files.items()]
    raw = build(members, lambda offsets: encode(record(clock, operations(offsets), writer=writer)))
    return store.give(commit_key(clock(), writer), raw).key


def record(
    clock: Clock, operations: list[Operation], *, writer: str = WRITER, objects: tuple[ObjectRef, ...] = ()
) -> Record:
    return Record(writer=writer, time=clock(), objects=[ObjectRef(), *objects], operations=operations)


def give_commit(
    store: MemoryStore, clock: Clock, *operations: Operation, objects: tuple[ObjectRef, ...] = (), writer: str = WRITER
) -> str:
    """A commit without files of its own."""
    raw = build((), lambda _: encode(record(clock, list(operations), writer=writer, objects=objects)))
    return store.give(commit_key(clock(), writer), raw).key


def commits(store: MemoryStore) -> list[str]:
    return sorted(key for key in store.objects if key.startswith(COMMITS))


def plain(store: MemoryStore) -> list[str]:
    return sorted(key for key in store.objects if not key.startswith(".lakefs/"))


def silent(what: str, files: int, size: int) -> None:
    """A report that nobody reads."""
