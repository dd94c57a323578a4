"""Commit objects for tests, and a client over a store in memory to read them through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from lakefs_fuse.commits.archive import Member, build, commit_key
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.hybrid_clock import HybridClock
from lakefs_fuse.commits.record import Operation, Record, encode
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.store.client import StoreClient
from tests.commits.records import TIME, WRITER, put, record_of
from tests.fakes import store_client
from tests.memory_store import MemoryStore

KEY = commit_key(TIME, WRITER)
FILES = {"data/a.bin": b"the first file", "data/empty": b"", "ünï/😀.txt": b"\0\1\2" * 50}


def member(path: str, data: bytes = b"") -> Member:
    return Member(path, data, len(data))


def commit_of(files: dict[str, bytes], *, record: Record | None = None, more: Sequence[Operation] = ()) -> bytes:
    """A commit that puts these files."""

    def make_record(offsets: list[int]) -> bytes:
        puts = [
            put(path, offset=offset, size=len(data))
            for (path, data), offset in zip(files.items(), offsets, strict=True)
        ]
        base = record_of() if record is None else record
        return encode(msgspec.structs.replace(base, operations=[*puts, *base.operations, *more]))

    return build([member(path, data) for path, data in files.items()], make_record)


def log_of(client: StoreClient, writer: str = WRITER) -> CommitLog:
    """The commits of a store, as a node with this machine's clock and threads reads and writes them."""
    return CommitLog(client, HybridClock(SystemClock()), WorkerThreads(), writer=writer)


def client_of(store: MemoryStore) -> StoreClient:
    return store_client(store, store.capabilities, retry_timeout_s=0)


def fixed(raw: bytes) -> Callable[[list[int]], bytes]:
    """Makes this record wherever the files are."""
    return lambda _offsets: raw
