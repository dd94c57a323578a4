"""What each mechanism that is there for speed gains: workloads with it on and off, in turns, on real mounts.

    PYTHONPATH=. python scripts/measure_mechanisms.py --quick
    PYTHONPATH=. python scripts/measure_mechanisms.py --only create-offload open-leases

Two daemons serve a lake each. One is as it is; in the other a function or a constant is replaced when it starts, so
that the mechanism is never used. They have their turns in pairs, and who begins alternates. Printed are the medians
over the pairs of time, and of CPU time of the daemon, without the mechanism by that with it, each with an interval that
holds the median of such ratios with a probability of 96 % (the second smallest to the second largest of nine); and for
one run the requests of the kernel, the READs among them, the requests that entered Python, and requests and bytes to
and from the store. On a busy machine time says little, CPU time more, and counts all.

Lakes lie in a local directory, in SeaweedFS, or in SeaweedFS behind HAProxy, which keeps each request for 15 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from lakefs_fuse.kernel.native import hooks as hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
from tests.mount.lakes import Bucket, Directory, Lake, eventually, file_lake, s3_lake
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, Server, latency, make_bucket, seaweedfs

PAIRS = 9
CPUCLOCK_SCHED = 2
"""Of another process, in the number of its clock (linux/posix-timers.h)."""
SITE = """
import sys
if "lakefs_fuse.daemon.mount_daemon" in sys.orig_argv:
    from lakefs_fuse.kernel.native import hooks
    {}
"""
"""`sitecustomize` of a daemon that lacks a mechanism. The library is loaded before pyfuse3, as it has to be."""
KEPT = ("--metadata-ttl", "1h", "--refresh", "1h")
WRITE_BACK = ("--durability", "writeback", *KEPT)
PACKED = ("--pack", "always", *WRITE_BACK)
FILE_BYTES = 4096
IMAGE_BYTES = 50_000
SAMPLE_BYTES = 64 << 10
MIB = 1 << 20
WRITERS = READERS = 16
PUTS_AT_ONCE = 16
NAMES_IN_EACH = 6
"""Directories of which that many names are asked for."""
BUCKET = "lake"
NEAR, FAR, REMOTE = "near", "far", "remote"
DELAY_MS = {FAR: 15, REMOTE: 100}


def replaced(*pairs: tuple[str, str]) -> str:
    """Python that replaces ``module:attribute`` of the product by an expression, for each pair. Raises AttributeError
    where the product has no such attribute any more."""
    lines = []
    for target, value in pairs:
        module, _, attribute = target.partition(":")
        attrgetter(attribute)(import_module(f"lakefs_fuse.{module}"))
        lines.append(f"import lakefs_fuse.{module}; lakefs_fuse.{module}.{attribute} = {value}")
    return "\n    ".join(lines)


NO_OFFLOAD = replaced(("kernel.create_offload:CreateOffload._reserve_inodes", "lambda self, library: None"))


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one run."""

    requests: int = 0
    reads: int = 0
    in_python: int = 0
    to_store: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.requests - other.requests, self.reads - other.reads,
            self.in_python - other.in_python, self.to_store - other.to_store,
            self.bytes_read - other.bytes_read, self.bytes_written - other.bytes_written,
        )  # fmt: skip


def counts_of(lake: Lake) -> Counts:
    """Since the lake was mounted, but for FORGET, which comes when the kernel likes."""
    stats = lake.stats()
    upcalls, kernel, store = (dict(stats[name]) for name in ("upcalls", "kernel", "store"))  # type: ignore[call-overload]
    answered = {name: count for name, count in kernel["answered"].items() if name != "forget"}
    requests = sum(count for name, count in upcalls.items() if name != "forget")
    return Counts(
        requests, upcalls.get("read", 0), requests - sum(answered.values()), sum(store["requests"].values()),
        store["bytes"]["read"], store["bytes"]["written"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """``prepare`` is called once for a lake that is not mounted, and mounts it; ``run`` once for each of its turns."""

    title: str
    prepare: Callable[[Lake, int], object]
    run: Callable[[Lake, int, int], object]
    files: int
    """What it is repeated for; a fifth of that with ``--quick``."""
    begin: Callable[[Lake], object] = lambda lake: None
    """Before each turn, not timed and not counted."""
    store: str = ""
    """``NEAR`` or ``FAR``: SeaweedFS; else a local directory."""


@dataclass(frozen=True, slots=True)
class Mechanism:
    """``off`` is Python that a daemon without it runs first; ``both`` what both run."""

    name: str
    off: str
    workloads: tuple[Workload, ...]
    both: str = ""


# -- what is there before ----------------------------------------------------------------------------------------------


def put(lake: Lake, objects: Mapping[str, bytes]) -> None:
    """Another client puts objects there."""
    if isinstance(lake.outside, Directory):
        for key, data in objects.items():
            path = lake.outside.root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return
    assert isinstance(lake.outside, Bucket)
    asyncio.run(_put_all(lake.outside, list(objects.items())))


async def _put_all(outside: Bucket, objects: list[tuple[str, bytes]]) -> None:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        outside.bucket, endpoint=outside.url, region=REGION, access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY,
        client_options={"allow_http": True}, virtual_hosted_style_request=False,
    )  # fmt: skip

    async def share(first: int) -> None:
        for key, data in objects[first::PUTS_AT_ONCE]:
            await obstore.put_async(store, outside.source_prefix + key, data)

    await asyncio.gather(*(share(first) for first in range(PUTS_AT_ONCE)))


def mount_for_writing(lake: Lake, files: int) -> None:
    lake.mount(*WRITE_BACK)


def mount_for_closing(lake: Lake, files: int) -> None:
    lake.mount(*KEPT)


def mount_with_files(lake: Lake, files: int) -> None:
    lake.mount(*WRITE_BACK)
    (lake.path / "set").mkdir()
    for number in range(files):
        (lake.path / "set" / f"{number}").write_bytes(bytes(FILE_BYTES))
    lake.settle()
    read_all(lake, 0, files)


def mount_listed(lake: Lake, files: int) -> None:
    mount_unlisted(lake, files)
    os.listdir(lake.path / "set")


def mount_unlisted(lake: Lake, files: int) -> None:
    put(lake, {f"set/image-{number:08}.jpg": b"" for number in range(files)})
    lake.mount(*KEPT)


def mount_packed(lake: Lake, files: int, *options: str, size: int = FILE_BYTES) -> None:
    """The blocks of the packs are in the cache on the disk."""
    lake.mount(*PACKED)
    (lake.path / "set").mkdir()
    for number in range(files):
        (lake.path / "set" / f"{number:06}").write_bytes(os.urandom(size))
    lake.settle()
    lake.umount()
    lake.mount(*options)


def mount_images(lake: Lake, files: int) -> None:
    mount_packed(lake, files, *PACKED, size=IMAGE_BYTES)


def mount_epochs(lake: Lake, files: int) -> None:
    """A directory of plain objects for each turn, which no turn before has read."""
    data = os.urandom(IMAGE_BYTES)
    put(lake, {f"set-{turn}/{number:06}": data for turn in range(PAIRS) for number in range(files)})
    lake.mount(*KEPT)


def mount_few_names(lake: Lake, files: int) -> None:
    names = range(NAMES_IN_EACH)
    every = ((turn, number, name) for turn in range(PAIRS) for number in range(files) for name in names)
    put(lake, {f"turn-{turn}/{number}/{name}": b"" for turn, number, name in every})
    lake.mount(*KEPT)


def mount_large(lake: Lake, mib: int) -> None:
    put(lake, {"large": os.urandom(mib * MIB)})
    lake.mount(*KEPT)


def mount_large_cached(lake: Lake, mib: int) -> None:
    mount_large(lake, mib)
    read_large(lake, 0, mib)


def mount_samples(lake: Lake, samples: int) -> None:
    mount_large(lake, 64)


def mount_samples_cached(lake: Lake, samples: int) -> None:
    mount_large_cached(lake, 64)


def mount_cached(lake: Lake, files: int) -> None:
    mount_epochs(lake, files)
    for turn in range(PAIRS):
        read_epoch(lake, turn, files)


# -- before each turn -------------------------------------------------------------------------------------------------


def drop_listing(lake: Lake) -> None:
    """A change makes the kernel drop the listing that it keeps."""
    (lake.path / "set" / "changed").touch()
    (lake.path / "set" / "changed").unlink()


def drop_pages(lake: Lake, *options: str) -> None:
    """Pages that the kernel has of the files go with the mount. A listing lets it know their inodes."""
    lake.remount(*options)
    for entry in os.scandir(lake.path):
        entry.stat()
        if entry.is_dir():
            for below in os.scandir(entry):
                below.stat()


def drop_image_pages(lake: Lake) -> None:
    drop_pages(lake, *PACKED)


def drop_object_pages(lake: Lake) -> None:
    drop_pages(lake, *KEPT)


def drop_cache(lake: Lake) -> None:
    lake.remount(*KEPT, empty_cache=True)
    os.stat(lake.path)


def save_and_remount(lake: Lake) -> None:
    with (lake.path / "saved").open("wb") as file:
        for _ in range(16):
            file.write(os.urandom(MIB))
    lake.remount(*KEPT)


# -- what is measured -------------------------------------------------------------------------------------------------


def create(lake: Lake, turn: int, files: int) -> None:
    """A single writer would wait for a sync of the disk with each file. Two files come before names are leased."""
    directory = lake.path / f"new-{turn}"
    directory.mkdir()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda number: (directory / f"{number}").write_bytes(bytes(FILE_BYTES)), range(files)))


def create_alone(lake: Lake, turn: int, files: int) -> None:
    directory = lake.path / f"new-{turn}"
    directory.mkdir()
    for number in range(files):
        (directory / f"{number}").write_bytes(bytes(FILE_BYTES))


def probe_absent(lake: Lake, turn: int, files: int) -> None:
    """Programs that look for a name before they create it."""
    directory = lake.path / f"new-{turn}"
    directory.mkdir()

    def probe_and_create(number: int) -> None:
        if not (directory / f"{number}").exists():
            (directory / f"{number}").write_bytes(bytes(FILE_BYTES))

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(probe_and_create, range(files)))


def create_and_stat(lake: Lake, turn: int, files: int) -> None:
    """Each name makes the kernel drop its directory's attributes, which the next path needs."""
    directory = lake.path / f"new-{turn}" / "below"
    directory.mkdir(parents=True)
    for number in range(files):
        (directory / f"{number}").touch()
        os.stat(directory)


def read_all(lake: Lake, turn: int, files: int) -> None:
    for number in range(files):
        (lake.path / "set" / f"{number}").read_bytes()


def read_in_order(lake: Lake, turn: int, files: int) -> None:
    for number in range(files):
        (lake.path / "set" / f"{number:06}").read_bytes()


def read_shuffled(lake: Lake, turn: int, files: int) -> None:
    numbers = list(range(files))
    random.Random(turn).shuffle(numbers)
    for number in numbers:
        (lake.path / "set" / f"{number:06}").read_bytes()


def read_epoch(lake: Lake, turn: int, files: int) -> None:
    directory = lake.path / f"set-{turn}"
    os.listdir(directory)
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda number: (directory / f"{number:06}").read_bytes(), range(files)))


def read_large(lake: Lake, turn: int, mib: int) -> None:
    with (lake.path / "large").open("rb", buffering=0) as file:
        while file.read(MIB):
            pass


def read_samples(lake: Lake, turn: int, samples: int) -> None:
    """Advised against reading ahead, as data loaders do, the kernel asks for no more than is read."""
    chosen = random.Random(turn)
    with (lake.path / "large").open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(samples):
            os.pread(file.fileno(), SAMPLE_BYTES, chosen.randrange(0, size // SAMPLE_BYTES) * SAMPLE_BYTES)


def read_saved(lake: Lake, turn: int, files: int) -> None:
    (lake.path / "saved").read_bytes()


def list_all(lake: Lake, turn: int, files: int) -> None:
    found = len(os.listdir(lake.path / "set"))
    assert found == files, found


def list_first(lake: Lake, turn: int, files: int) -> None:
    """Only the first name is waited for."""
    with os.scandir(lake.path / "set") as names:
        next(names)


def ask_few_names(lake: Lake, turn: int, directories: int) -> None:
    for number in range(directories):
        for name in range(NAMES_IN_EACH):
            os.stat(lake.path / f"turn-{turn}" / f"{number}" / f"{name}")


def save(lake: Lake, turn: int, mib: int) -> None:
    data = os.urandom(MIB)
    with (lake.path / f"saved-{turn}").open("wb") as file:
        for _ in range(mib):
            file.write(data)


def save_sparse(lake: Lake, turn: int, mib: int) -> None:
    with (lake.path / f"sparse-{turn}").open("wb") as file:
        file.write(bytes(range(256)))
        file.truncate(mib * MIB)


def start_anew(lake: Lake, turn: int, files: int) -> None:
    """Until nothing is left to be counted."""
    lake.remount(*KEPT)
    eventually(lambda: bool(lake.stats()["cache"]["counted"]), "the cache is counted")  # type: ignore[index]


CREATE = Workload("create, write and close, 16 writers", mount_for_writing, create, 2000)
CREATE_ALONE = Workload("create, write and close, one after another", mount_for_writing, create_alone, 1000)
CLOSE = Workload("create, write and close durably, 16 writers", mount_for_closing, create, 1000)
PROBE = Workload("look for a name, create it, 16 writers", mount_for_writing, probe_absent, 2000)
CREATE_AND_STAT = Workload("create, and stat of the directory", mount_for_writing, create_and_stat, 2000)
REREAD = Workload("open, read and close, from the page cache", mount_with_files, read_all, 5000)
LIST_AGAIN = Workload("list a directory", mount_listed, list_all, 50_000, drop_listing)
PUSH = Workload(
    "read packed files in order, immutable, blocks on the disk",
    lambda lake, files: mount_packed(lake, files, "--immutable"),
    read_in_order, 2000, lambda lake: drop_pages(lake, "--immutable"),
)  # fmt: skip
ORDERED = Workload(
    "read packed files in order, blocks on the disk", mount_images, read_in_order, 2500, drop_image_pages
)
SHUFFLED = Workload(
    "read packed files in random order, blocks on the disk", mount_images, read_shuffled, 2500, drop_image_pages
)
EPOCH = Workload("read plain files for the first time, 16 readers", mount_epochs, read_epoch, 2000)
EPOCH_NEAR = Workload("read plain objects for the first time, 16 readers", mount_epochs, read_epoch, 1000, store=NEAR)
LARGE_FAR = Workload("read a large object in order, MiB", mount_large, read_large, 160, drop_cache, FAR)
LARGE_CACHED = Workload(
    "read a large object in order from the disk, MiB", mount_large_cached, read_large, 640,
    drop_object_pages,
)  # fmt: skip
SAMPLES_FAR = Workload("read samples of 64 KiB of a 64 MiB object", mount_samples, read_samples, 1000, drop_cache, FAR)
SAMPLES_CACHED = Workload(
    "read samples of 64 KiB of a 64 MiB object on the disk", mount_samples_cached, read_samples, 5000,
    drop_object_pages,
)  # fmt: skip
LIST_FAR = Workload("list a directory for the first time", mount_unlisted, list_all, 100_000, drop_cache, REMOTE)
LIST_NEAR = Workload("list a directory for the first time", mount_unlisted, list_all, 100_000, drop_cache, NEAR)
FIRST_NAME = Workload("the first name of a directory", mount_unlisted, list_first, 100_000, drop_cache, FAR)
FEW_NAMES = Workload("ask for 6 names of each directory", mount_few_names, ask_few_names, 100, store=FAR)
SAVE = Workload("write a file and close it under write-back, MiB", mount_for_writing, save, 320)
SPARSE = Workload("store a file that is a hole, MiB", mount_for_closing, save_sparse, 640, store=NEAR)
READ_BACK = Workload("read 16 MiB back that were written", mount_for_closing, read_saved, 5, save_and_remount, NEAR)
START = Workload("mount again over cached files", mount_cached, start_anew, 2000)

MECHANISMS = (
    Mechanism("create-offload", NO_OFFLOAD, (CREATE,)),
    Mechanism(
        "name-leases",
        replaced(("kernel.leases:Leases.count_created", "lambda self, file: None")),
        (PROBE,),
        both=NO_OFFLOAD,
    ),
    Mechanism("open-leases", replaced(("kernel.native.hooks:lease_open", "lambda *_: None")), (REREAD,)),
    Mechanism(
        "attribute-cache",
        replaced(("kernel.native.hooks:cache_attributes", "lambda *_, **__: None")),
        (CREATE_AND_STAT,),
    ),
    Mechanism("readdirplus-in-c", replaced(("kernel.readdir:is_reached", "lambda: False")), (LIST_AGAIN,)),
    Mechanism(
        "page-cache-push",
        replaced(
            ("kernel.page_cache_push:PageCachePush.is_due", "lambda *_: False"),
            ("kernel.page_cache_push:PageCachePush.count_read", "lambda *_: None"),
        ),
        (PUSH,),
    ),
    Mechanism("request-loop", replaced(("kernel.request_loop:begin", "lambda waiting: False")), (CREATE, SHUFFLED)),
    Mechanism("reading-turns", replaced(("kernel.request_loop:BURST_S", "0.0")), (CLOSE, EPOCH)),
    Mechanism("directory-block-size", replaced(("kernel.reply:DIRECTORY_BLKSIZE", "4096")), (LIST_AGAIN,)),
    Mechanism("kernel-readahead", replaced(("kernel.features:READ_AHEAD_KIB", "0")), (LARGE_CACHED,)),
    Mechanism(
        "presence-filter",
        replaced(("blockcache.cache_directory:CacheDirectory.may_have", "lambda *_: True")),
        (EPOCH,),
    ),
    Mechanism(
        "presence-saved",
        replaced(("blockcache.cache_directory:PresenceFilter.load", "lambda *_: False")),
        (START,),
    ),
    Mechanism(
        "inline-reads",
        replaced(("blockcache.async_cache:SMALL_READ_BYTES_MAX", "0")),
        (SHUFFLED, SAMPLES_CACHED),
    ),
    Mechanism(
        "write-batches",
        replaced(("blockcache.async_cache:SMALL_WRITE_BYTES_MAX", "0")),
        (EPOCH,),
    ),
    Mechanism(
        "memory-cache",
        replaced(("blockcache.memory_cache:RecentBlocks.put", "lambda *_: None")),
        (LARGE_CACHED,),
        both=replaced(("kernel.features:READ_AHEAD_KIB", "0")),
    ),
    Mechanism(
        "partial-reads",
        replaced(("blockcache.reader:BlockReader._in_parts", "lambda *_: False")),
        (SHUFFLED, SAMPLES_CACHED),
    ),
    Mechanism(
        "readahead",
        replaced(
            (
                "blockcache.readahead:Readahead.plan",
                "(lambda plan: lambda self, *read: plan(self, *read) and None)"
                "(lakefs_fuse.blockcache.readahead.Readahead.plan)",
            )
        ),
        (LARGE_FAR,),
    ),
    Mechanism(
        "readahead-local-window", replaced(("blockcache.readahead:LOCAL_WINDOW_BYTES_MAX", "32 << 20")), (LARGE_CACHED,)
    ),
    Mechanism(
        "readahead-whole-pieces",
        "import lakefs_fuse.blockcache.reader\n    " + replaced(("blockcache.readahead:PIECE_BYTES", "1 << 60")),
        (LARGE_FAR,),
    ),
    Mechanism(
        "object-prefetch",
        replaced(("blockcache.prefetch:ObjectPrefetch.missed", "lambda *_: None")),
        (SAMPLES_FAR,),
    ),
    Mechanism(
        "adoption",
        replaced(
            ("blockcache.cache_directory:CacheDirectory.adopt", "lambda self, path, *_: __import__('os').unlink(path)")
        ),
        (READ_BACK,),
    ),
    Mechanism(
        "inline-syncs",
        replaced(("vfs.writeback.group_commit:INLINE_BYTES_MAX", "-1")),
        (CREATE, CREATE_ALONE),
    ),
    Mechanism("bursts", replaced(("vfs.writeback.queue:Bursts.is_lasting", "lambda *_: False")), (CREATE,)),
    Mechanism(
        "segments", replaced(("staging.staging_area:MEMORY_BYTES_MAX", "0")), (CREATE, CREATE_ALONE), both=NO_OFFLOAD
    ),
    Mechanism("early-writeout", replaced(("environment.disk:start_writeout", "lambda *_: None")), (SAVE,)),
    Mechanism("gathered-closes", replaced(("vfs.writeback.packer:GATHER_S_MAX", "0.0")), (CLOSE,)),
    Mechanism("zero-objects", replaced(("upload.missing_parts:_copies_zeros", "lambda *_: False")), (SPARSE,)),
    Mechanism(
        "parallel-list",
        replaced(("store.parallel_list:CHAINS_MAX", "1")),
        (LIST_FAR,),
    ),
    Mechanism("list-expression", replaced(("store.s3.list_pages:parse_usual", "lambda *_: None")), (LIST_NEAR,)),
    Mechanism("obstore", replaced(("store.s3.store:is_expressible", "lambda *_: False")), (EPOCH_NEAR,)),
    Mechanism("first-pages", replaced(("vfs.namespace.namespace:FIRST_PAGE_LOOKUPS", "-1")), (FEW_NAMES,)),
    Mechanism(
        "readable-listings", replaced(("vfs.namespace.listing_flight:Flight.is_readable", "False")), (FIRST_NAME,)
    ),
    Mechanism(
        "first-listing-merge",
        replaced(
            (
                "vfs.namespace.listing_merge:DirectoryMerge._merge_first",
                "lambda self, batch, found: self._merge_all(batch, found, set())",
            )
        ),
        (LIST_NEAR,),
    ),
)


class Stores:
    """Where lakes lie. SeaweedFS is started when it is first needed."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack, self._directory = stack, directory
        self._server: Server | None = None
        self._proxied: dict[str, Server] = {}

    def lake(self, store: str, directory: Path, *, prefix: str) -> AbstractContextManager[Lake]:
        """Not mounted yet."""
        if not store:
            return file_lake(directory)
        if self._server is None:
            self._server = self._stack.enter_context(seaweedfs(self._directory / "seaweedfs"))
            make_bucket(self._server, BUCKET)
        if store in DELAY_MS and store not in self._proxied:
            way = latency(self._server, self._directory / store, DELAY_MS[store])
            self._proxied[store] = self._stack.enter_context(way)
        return s3_lake(self._server, BUCKET, directory, prefix=prefix, through=self._proxied.get(store))


@contextmanager
def mounted(
    directory: Path, mechanism: Mechanism, workload: Workload, files: int, stores: Stores, *, on: bool
) -> Iterator[Lake]:
    site = directory / "site"
    site.mkdir(parents=True)
    lines = [mechanism.both or "pass", *([] if on else [mechanism.off])]
    (site / "sitecustomize.py").write_text(SITE.format("\n    ".join(lines)))
    with stores.lake(workload.store, directory / "lake", prefix=f"{directory.parent.name}/{directory.name}/") as lake:
        lake.env["PYTHONPATH"] = os.pathsep.join([str(site), str(Path(__file__).parents[1])])
        lake.env.pop("LAKEFS_FUSE_HOOKS", None)
        workload.prepare(lake, files)
        yield lake
        lake.umount()


def cpu_s(lake: Lake) -> float:
    """Of the daemon, to the nanosecond: `/proc` counts ticks of 10 ms."""
    return time.clock_gettime(~lake.pid << 3 | CPUCLOCK_SCHED)


@dataclass(frozen=True, slots=True)
class Run:
    """``daemon_s``: CPU time."""

    lasted_s: float
    daemon_s: float
    counts: Counts


def run_once(workload: Workload, lake: Lake, turn: int, files: int) -> Run:
    """What is written back later counts as CPU time and in counts, but takes no time. A daemon that ``run`` starts
    counts from 0 on."""
    workload.begin(lake)
    before, used_s, pid, began_s = counts_of(lake), cpu_s(lake), lake.pid, time.perf_counter()
    workload.run(lake, turn, files)
    lasted_s = time.perf_counter() - began_s
    eventually(lambda: lake.number("dirty.files") == 0, "what was written is stored", 120.0)
    if lake.pid != pid:
        before, used_s = Counts(), 0.0
    return Run(lasted_s, cpu_s(lake) - used_s, counts_of(lake) - before)


def show_ratios(what: str, ratios: list[float]) -> None:
    ordered = sorted(ratios)
    print(f"  {what} off / on: {statistics.median(ordered):.2f} ({ordered[1]:.2f} to {ordered[-2]:.2f})", flush=True)


def measure(mechanism: Mechanism, workload: Workload, directory: Path, files: int, stores: Stores) -> None:
    with ExitStack() as stack:
        lakes = {
            on: stack.enter_context(
                mounted(directory / ("on" if on else "off"), mechanism, workload, files, stores, on=on)
            )
            for on in (True, False)
        }
        pairs = []
        for turn in range(PAIRS):
            order = (True, False) if turn % 2 else (False, True)
            pairs.append({on: run_once(workload, lakes[on], turn, files) for on in order})
    print(f"{mechanism.name}: {workload.title}, {files}{f', {workload.store}' if workload.store else ''}", flush=True)
    show_ratios("time", [pair[False].lasted_s / pair[True].lasted_s for pair in pairs])
    show_ratios("CPU of the daemon", [pair[False].daemon_s / pair[True].daemon_s for pair in pairs])
    for on in (True, False):
        counts = pairs[-1][on].counts
        print(
            f"  {'on ' if on else 'off'}: {counts.requests} requests, {counts.reads} READ, {counts.in_python} in "
            f"Python, {counts.to_store} to the store, {counts.bytes_read / MIB:.1f} MiB from it, "
            f"{counts.bytes_written / MIB:.1f} MiB to it; "
            f"{statistics.median(pair[on].lasted_s for pair in pairs):.2f} s, "
            f"{statistics.median(pair[on].daemon_s for pair in pairs):.2f} s CPU", flush=True,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="What each mechanism that is there for speed gains.")
    parser.add_argument("--quick", action="store_true", help="a fifth of the files")
    names = [mechanism.name for mechanism in MECHANISMS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which")
    options = parser.parse_args()
    chosen = [mechanism for mechanism in MECHANISMS if mechanism.name in options.only]
    with tempfile.TemporaryDirectory(prefix="lakefs-mechanisms-") as made, ExitStack() as stack:
        stores = Stores(stack, Path(made))
        for mechanism in chosen:
            for number, workload in enumerate(mechanism.workloads):
                directory = Path(made) / f"{mechanism.name}-{number}"
                measure(mechanism, workload, directory, workload.files // (5 if options.quick else 1), stores)
                shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
