"""Groups of workloads that share a mount: in which order a peer does what. Read `method` for who calls these."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from scripts.bench import machine, workloads
from scripts.bench.access import Access
from scripts.bench.jobs import (
    Command,
    Epoch,
    Listing,
    Load,
    Loader,
    Looking,
    Remove,
    Rename,
    Save,
    Scattered,
    Sequential,
    WriteSmall,
)
from scripts.bench.method import Session, attached
from scripts.bench.sizes import Sizes
from scripts.bench.worker import Outcome

Group = Callable[[Session], None]
CHECKPOINT = "step1.pt"


def names(session: Session) -> None:
    """List, list again, and after a restart."""
    sizes, peer = session.stage.sizes, session.peer
    if session.hopeless(workloads.FIRST):
        return
    peer.provide("names", "names")
    with attached(session, "names") as access:
        limit_s = sizes.listing_limit_s
        first = session.measure(workloads.FIRST, Listing(access, "d", sizes.names, limit_s))
        if first is None or first.stopped or peer.kind == "client":
            return
        session.measure(workloads.AGAIN, Listing(access, "d", sizes.names, limit_s))
        access = peer.restart()
        session.measure(workloads.REMOUNTED, Listing(access, "d", sizes.names, limit_s))
        session.measure(workloads.LOOKED, Looking(access, "d", sizes.names, limit_s))


def epochs(session: Session) -> None:
    """First and second epoch, with each number of readers, each on a fresh mount; one more after a restart."""
    sizes, peer = session.stage.sizes, session.peer
    peer.provide("set", "set")
    order = session.stage.set_names()
    for readers in sizes.loops():
        with attached(session, "set") as access:

            def job(names: list[str], readers: int | None = readers, access: Access = access) -> Epoch | Loader:
                if readers is None:
                    return Loader(access, names, sizes.loader_workers, sizes.limit_s)
                return Epoch(access, names, readers, sizes.epoch_limit_s(readers))

            first = session.measure(workloads.first_epoch(readers), job(order))
            if first is None or peer.kind == "client":
                continue
            seen = was_read(order, first, readers or 1)
            if seen:
                random.Random(session.round).shuffle(seen)
                session.measure(workloads.second_epoch(readers), job(seen))
            if seen and sizes.is_long(readers):
                random.Random(-session.round).shuffle(seen)
                session.measure(workloads.epoch_after_restart(readers), job(seen, access=peer.restart()))


def was_read(order: list[str], outcome: Outcome, readers: int) -> list[str]:
    """The names that an epoch got to: each reader has every n-th, from the first on."""
    each = outcome.each or [0] * readers
    return [name for number, count in enumerate(each) for name in order[number::readers][:count]]


def large(session: Session) -> None:
    """One file through, another in pieces; each cold, then warm."""
    sizes, peer = session.stage.sizes, session.peer
    peer.provide("large", "large")
    with attached(session, "large") as access:
        through = Sequential(access, "through.bin", sizes.large_bytes, sizes.limit_s)
        cold = session.measure(workloads.THROUGH_COLD, through)
        warm = peer.kind != "client"
        if warm and cold is not None and not cold.stopped:
            session.measure(workloads.THROUGH_WARM, through)
        pieces = scattered(access, sizes, sizes.pieces)
        cold = session.measure(workloads.SCATTERED_COLD, pieces)
        if warm and cold is not None and cold.operations:
            session.measure(workloads.SCATTERED_WARM, scattered(access, sizes, cold.operations))


def scattered(access: Access, sizes: Sizes, count: int) -> Scattered:
    """The first ``count`` of the same offsets, whoever asks."""
    return Scattered(access, "scattered.bin", sizes.large_bytes, sizes.piece_bytes, count, sizes.limit_s)


def area_of(session: Session) -> str:
    """Where nobody else writes."""
    return f"w/{session.peer.name.replace(' ', '-')}-{session.round}"


def checkpoint(session: Session) -> None:
    """Save, load, all ranks at once, and load where nothing is cached."""
    sizes, peer = session.stage.sizes, session.peer
    if not peer.writes:
        return
    prefix, patience_s = f"{area_of(session)}/ckpt", 7 * sizes.limit_s
    peer.area(prefix)
    with attached(session, prefix) as access:
        size = sizes.checkpoint_bytes
        saved = session.measure(workloads.SAVE, Save(access, [CHECKPOINT], size, patience_s), drain=True)
        if saved is not None and not saved.stopped:
            session.measure(workloads.LOAD, Load(access, CHECKPOINT, size, patience_s))
        shards = [f"rank{number}.pt" for number in range(sizes.ranks)]
        session.measure(workloads.RANKS, Save(access, shards, sizes.shard_bytes, patience_s), drain=True)
    if saved is None or saved.stopped:
        return
    if session.undurable:
        session.failed([workloads.LOAD_COLD], "what was saved was not in the store when the time for that was over")
        return
    with attached(session, prefix) as access:
        session.measure(workloads.LOAD_COLD, Load(access, CHECKPOINT, size, patience_s))


def small(session: Session) -> None:
    """Write many, remove a directory, rename another."""
    sizes, peer = session.stage.sizes, session.peer
    if not peer.writes:
        return
    prefix = f"{area_of(session)}/small"
    peer.provide(prefix, "tree")
    with attached(session, prefix) as access:
        limit_s = sizes.limit_s
        wanted = session.stage.small_sizes(sizes.written_files)
        session.measure(workloads.WRITE, WriteSmall(access, "new", wanted, sizes.writers, limit_s), drain=True)
        session.measure(workloads.REMOVE, Remove(access, "removed", sizes.tree_files, limit_s), drain=True)
        if not session.hopeless(workloads.RENAME):
            session.measure(workloads.RENAME, Rename(access, "renamed", "final", sizes.tree_files, limit_s), drain=True)


def warm(session: Session) -> None:
    """Have the whole data set fetched ahead, then read it. A bare client only reads it, as the local disk does."""
    sizes, peer = session.stage.sizes, session.peer
    order, wanted = session.stage.set_names(), session.stage.small_sizes(sizes.files)
    limit_s = 7 * sizes.limit_s
    epoch = partial(Epoch, readers=sizes.warm_readers, limit_s=limit_s)
    command = peer.warming("set")
    if command is None and peer.kind not in ("client", "disk"):
        return
    peer.provide("set", "set")
    with attached(session, "set") as access:
        if command is None:
            session.measure(workloads.WARM if peer.kind == "client" else workloads.WARMED, epoch(access, order))
            return
        job = Command(tuple(command), {}, len(wanted), sum(wanted), limit_s)
        if session.measure(workloads.WARM, job) is not None:
            session.measure(workloads.WARMED, epoch(access, order))


def ingest(session: Session) -> None:
    """A local directory is loaded by the program that each has for it."""
    sizes, peer = session.stage.sizes, session.peer
    source = session.stage.source("load")
    command = peer.loading(source, f"{area_of(session)}/load")
    if command is None:
        return
    machine.drop_caches()
    wanted, limit_s = session.stage.small_sizes(sizes.loaded_files), 7 * sizes.limit_s
    job = Command(tuple(command[0]), command[1], len(wanted), sum(wanted), limit_s)
    session.measure(workloads.LOAD_SET, job)


ALL: dict[str, Group] = {
    "names": names,
    "epochs": epochs,
    "large files": large,
    "checkpoint": checkpoint,
    "small files": small,
    "warm": warm,
    "ingest": ingest,
}


def table(sizes: Sizes, only: list[str]) -> dict[str, tuple[Group, list[str]]]:
    """The groups that are wanted, each with the names of its workloads."""
    notes = workloads.notes(sizes)
    return {
        name: (group, [note.name for note in notes if note.group == name])
        for name, group in ALL.items()
        if not only or name in only
    }
