"""Measures what folds cost: many of them, each of some changes to random names, with a store in memory.

    PYTHONPATH=. python -m scripts.measure_folds --names 1000000 --folds 1000 --changes 1000

takes 40 minutes on two cores, and ten with `--names 200000 --changes 200`. Prints the mean requests and bytes of a
fold as the worker of a mount runs it, without its lease and inspection; the size of all objects of the index over
that of the newest base; and what a mount with an empty cache fetches.

Of the changes of a fold a tenth are new names, a tenth removals, and the others new bytes for names that are there.
They are in two commits.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import trio

from lakefs_fuse.admin.fold_database import FoldDatabase, open_fold_view
from lakefs_fuse.admin.snapshot import fold
from lakefs_fuse.commits.index.index import INDEX, Manifest, load_newest_index
from lakefs_fuse.commits.record import COMMITS, Operation, Remove
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.store.protocol import Capabilities
from tests.admin.lakes import give_commit, give_pack, silent, work_of
from tests.fakes import open_database, store_client
from tests.memory_store import MemoryStore, Request
from tests.vfs.lakes import Clock

FILES_PER_DIRECTORY = 1000
PACK_FILES = 20_000
LOOK_EVERY = 50


class Names:
    """Paths of a lake; numbers are drawn evenly."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self._there, self._next, self._rng = list(range(count)), count, rng

    def change(self, count: int) -> tuple[list[str], list[str]]:
        """Paths to put, and paths to remove."""
        there, rng = self._there, self._rng
        removed = [self._take() for _ in range(count // 10)]
        new = list(range(self._next, self._next + count // 10))
        self._next += len(new)
        put = {there[rng.randrange(len(there))] for _ in range(count - 2 * (count // 10))}
        there.extend(new)
        return [path_of(number) for number in (*put, *new)], [path_of(number) for number in removed]

    def _take(self) -> int:
        at = self._rng.randrange(len(self._there))
        self._there[at], self._there[-1] = self._there[-1], self._there[at]
        return self._there.pop()


def path_of(number: int) -> str:
    return f"data/part-{number // FILES_PER_DIRECTORY:05d}/sample-{number:09d}.jpg"


def give_changes(store: MemoryStore, clock: Clock, put: list[str], removed: list[str], writer: str) -> None:
    clock.advance(1)
    give_pack(store, clock, dict.fromkeys(put, b"x"), writer=writer)
    clock.advance(1)
    operations: Iterator[Operation] = (Remove(path) for path in removed)
    give_commit(store, clock, *operations, writer=writer)


def bytes_of(store: MemoryStore, requests: list[Request]) -> int:
    """Of bodies, in both directions."""
    sent = sum(each.size for each in requests if each.what == "put")
    return sent + sum(
        min(each.size, len(store.objects[each.key][0]))
        for each in requests
        if each.what == "get" and each.key in store.objects
    )


def index_bytes(store: MemoryStore) -> int:
    return sum(len(data) for key, (data, _) in store.objects.items() if key.startswith(INDEX))


async def measure(names: int, folds: int, changes: int, directory: Path) -> None:
    store, clock, rng = MemoryStore(Capabilities(name="memory")), Clock(), random.Random(1)
    there = Names(names, rng)
    for first in range(0, names, PACK_FILES):
        clock.advance(1)
        give_pack(store, clock, {path_of(each): b"x" for each in range(first, min(first + PACK_FILES, names))})
    work = work_of(store, clock, directory, levels=True)
    database = FoldDatabase(directory / "folded")

    async def fold_once(known: Manifest | None) -> Manifest:
        async with open_fold_view(work.client, work, database) as lake:
            return await fold(lake, list_all=False, is_new=True, known=known, report=silent)

    clock.advance(1000)
    newest = await fold_once(None)
    print(f"{names:,} names: an index of {newest.bytes:,} bytes", flush=True)
    counts: Counter[str] = Counter()
    sizes, ratios, seconds = list[int](), list[float](), list[float]()
    for number in range(1, folds + 1):
        give_changes(store, clock, *there.change(changes), f"{number:08x}")
        clock.advance(1000)
        store.requests.clear()
        began_s = time.process_time()
        newest = await fold_once(newest)
        seconds.append(time.process_time() - began_s)
        done = [each for each in store.requests if not each.key.startswith(COMMITS) or each.what == "list"]
        deleted = [each for each in done if each.what == "delete" and not each.key.endswith("manifest")]
        counts.update(each.what for each in done if each not in deleted)
        counts["delete_many"] += bool(deleted)  # of the store in memory it is a request for each key
        sizes.append(bytes_of(store, store.requests))
        ratios.append(index_bytes(store) / newest.bytes_base)
        if number % LOOK_EVERY == 0:
            print(f"{number} folds: {sum(counts.values()) / number:.2f} requests {dict(counts)}, {mean(sizes):,.0f} "
                  f"bytes, index {mean(ratios):.3f} (now {ratios[-1]:.3f}, at most {max(ratios):.3f}), "
                  f"{len(newest.increments)} increments, {mean(seconds):.2f} s of CPU", flush=True)  # fmt: skip
    store.requests.clear()
    fresh = open_database(directory / "fresh" / "meta", "lake")
    client = store_client(store, store.capabilities)
    taken = await load_newest_index(fresh, client, WorkerThreads(), directory / "in")
    assert taken is not None
    kept = sum(path.stat().st_size for path in (directory / "folded").rglob("*") if path.is_file())
    print(f"a fresh mount: {len(store.requests)} requests, {bytes_of(store, store.requests):,} bytes")
    print(f"the fold database: {kept:,} bytes")
    fresh.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=int, default=200_000)
    parser.add_argument("--folds", type=int, default=200)
    parser.add_argument("--changes", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trio.run(measure, args.names, args.folds, args.changes, Path(directory))


if __name__ == "__main__":
    main()
