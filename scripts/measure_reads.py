"""Small files that are in the page cache: open, read, close in one thread, beside other mounts and the local disk.

    PYTHONPATH=. python scripts/measure_reads.py --files 20000 --repeats 5

Starts SeaweedFS, puts the files there once, and mounts everybody side by side, us read-write and immutable. In each
round all have their turn, in which everything is read twice and the second time counts; who is first moves on. Prints
files per second, the upcalls that ours took, and the median over the rounds of each ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from scripts.bench import machine, stage, tally
from scripts.bench.access import Paths
from scripts.bench.peers import Peer, everybody
from scripts.bench.sizes import FULL

FILE_BYTES = 50_000
READERS = 16
"""Threads that read everything for the first time."""
OURS = ("lakefs immutable", "lakefs")
THEIRS = ("weed mount", "rclone", "s3fs")
DISK = "local disk"


def read_all(root: str, names: list[str]) -> float:
    """Files in a second."""
    began = time.perf_counter()
    for name in names:
        descriptor = os.open(root + name, os.O_RDONLY)
        os.read(descriptor, FILE_BYTES + 1)
        os.close(descriptor)
    return len(names) / (time.perf_counter() - began)


def upcalls_of(peer: Peer) -> Callable[[], dict[str, int]]:
    """So many since this was called, by kind; none where the peer does not count them."""
    before = peer.upcalls() or {}
    return lambda: {kind: now - before.get(kind, 0) for kind, now in (peer.upcalls() or {}).items()}


def measure(repeats: int, names: list[str], peers: list[Peer], places: dict[str, Paths]) -> dict[str, list[float]]:
    """Files per second of each peer, round by round."""
    roots = {name: f"{place.root}/" for name, place in places.items()}
    with ThreadPoolExecutor(READERS) as pool:
        for root in roots.values():
            list(pool.map(partial(read_all, root), (names[number::READERS] for number in range(READERS))))
    rates: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for turn in range(repeats):
        for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
            read_all(roots[peer.name], names)  # what the kernel forgot while others had their turn
            upcalls = upcalls_of(peer)
            rates[peer.name].append(read_all(roots[peer.name], names))
            told = " ".join(f"{count:,} {kind}" for kind, count in upcalls().items() if count > 2)
            print(f"  {peer.name}: {rates[peer.name][-1]:,.0f} files/s {told}", flush=True)
    return rates


def show(rates: dict[str, list[float]]) -> None:
    best = max((name for name in THEIRS if name in rates), key=lambda name: statistics.median(rates[name]))
    for ours in OURS:
        for other in (DISK, best):
            ratios = [mine / theirs for mine, theirs in zip(rates[ours], rates[other], strict=True)]
            told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{ours} / {other}: {statistics.median(ratios):.2f} ({told})", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Small files that are in the page cache.")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", nargs="+", default=["weed mount"], choices=THEIRS, help="whom to stand beside")
    options = parser.parse_args()
    sizes = msgspec.structs.replace(
        FULL, files=options.files, file_bytes_min=FILE_BYTES, file_bytes_max=FILE_BYTES, delay_ms=0
    )
    with stage.opened(sizes, tally.price_list()[1]) as made, contextlib.ExitStack() as stack:
        machine.warm(made.directory, sizes.warm_bytes)
        peers = everybody(made, (*OURS, *options.peers, DISK))
        for peer in peers:
            stack.callback(peer.close)
            peer.provide("set", "set")
        attached = {peer.name: peer.attach("set") for peer in peers}
        places = {name: place for name, place in attached.items() if isinstance(place, Paths)}
        show(measure(options.repeats, made.set_names(), peers, places))
    return 0


if __name__ == "__main__":
    sys.exit(main())
