"""The process of `doctor` and `mount --explain`: `python -m lakefs_fuse.daemon.diagnosis`, run by `cli.worker`.

It is a separate process because the command line does not load the libraries of the store and of the kernel. It reads
one `Diagnosis` from the descriptor that ``--request-fd`` names and writes each result as soon as it is known. Checks
run one after another, because they measure. SIGINT and SIGTERM end it with `store.checkup.Checkup.clean`.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import structs

from lakefs_fuse.checks import CheckResult, Severity, failed, ok, skipped, warning
from lakefs_fuse.config import MountConfig, StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.control.interrupts import release_interrupts
from lakefs_fuse.daemon.admin_worker import Answers, read_request, run_process
from lakefs_fuse.environment.descriptor_limit import DESCRIPTORS_MIN
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import AccessDenied, LakeError, StoreError
from lakefs_fuse.kernel.features import background_max, features_for
from lakefs_fuse.kernel.native import hooks
from lakefs_fuse.store import lake_record
from lakefs_fuse.store.checkup import SILENCE_S, Checkup
from lakefs_fuse.store.open import find_lake, open_store
from lakefs_fuse.store.protocol import NetworkStore, ObjectStore

DESCRIPTORS_FEW = 4096
"""Below this, a quarter is fewer files than the block cache opens for one dataset in random order."""
SYNC_S_MAX = 0.01
"""Slower disks make each acknowledged file of write-back wait longer than a round trip to most stores."""
DISK_BYTES_S_MIN = 100e6
"""Slower disks hold up an upload over a network of 1 Gbit/s."""
DISK_BYTES = 64 << 20
"""Enough to leave the disk's own cache, and written within a second by any disk that is fit for use."""
DISK_PIECE_BYTES = 1 << 20
DISK_WRITE_S_MAX = 2.0
"""A slow disk has written less by then."""
DISK_SYNCS = 20
DISK_SYNC_BYTES = 4096
DISK_SYNCS_S_MAX = 2.0
THROUGHPUT_S = 5.0
"""In total: half for uploads, half for downloads."""
THROUGHPUT_BYTES = 8 << 20
"""Of an object: as large as the parts in which large files are uploaded and prefetched."""
THROUGHPUT_REQUESTS = 4
EXPLAIN_CONNECT_S_MAX = 2.0
"""A user waits for the result, which then lacks only these values."""
THROUGHPUT_BYTES_MAX = 1 << 30
"""In each direction, so that a fast network does not cost much."""


def programs() -> Iterator[CheckResult]:
    """The versions of libfuse and of the C library, and the limit of open files."""
    version = hooks.libfuse_version()
    if hooks.library() is None:
        yield warning("machine.fast-paths", hooks.why_inactive())
        yield skipped("machine.libfuse", "its version is known with the C library only")
    else:
        yield ok("machine.fast-paths", "the C library is there")
        yield ok("machine.libfuse", f"libfuse {version}", version=version)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    raise_it = "raise the hard limit (`ulimit -Hn`, LimitNOFILE= of a systemd unit)"
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_MIN:
        yield failed("machine.open-files", f"{text} open files are too few for a mount: {raise_it}", hard=hard)
    elif hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_FEW:
        yield warning("machine.open-files", f"{text} open files leave few for the cache: {raise_it}", hard=hard)
    else:
        yield ok("machine.open-files", f"the hard limit is {text}", hard=hard)


@dataclasses.dataclass(frozen=True, slots=True)
class DiskSpeed:
    """The speed of a disk: bytes written and synced per second, and the median time of a small synced write."""

    bytes_s: float
    sync_s: float


def measure_disk(directory: str) -> DiskSpeed:
    """Measure the disk of a directory in which this user may write, with a temporary file without a name: nothing is
    left behind, not even by a crash. Raises OSError."""
    piece = os.urandom(DISK_PIECE_BYTES)
    with tempfile.TemporaryFile(dir=directory) as file:
        descriptor = file.fileno()
        began_s, written = time.monotonic(), 0
        while written < DISK_BYTES and time.monotonic() - began_s < DISK_WRITE_S_MAX:
            written += os.pwrite(descriptor, piece, written)
        os.fdatasync(descriptor)
        bytes_s = written / max(1e-9, time.monotonic() - began_s)
        taken: list[float] = []
        began_s = time.monotonic()
        while len(taken) < DISK_SYNCS and time.monotonic() - began_s < DISK_SYNCS_S_MAX:
            before_s = time.monotonic()
            os.pwrite(descriptor, piece[:DISK_SYNC_BYTES], written + len(taken) * DISK_SYNC_BYTES)
            os.fdatasync(descriptor)
            taken.append(time.monotonic() - before_s)
    return DiskSpeed(bytes_s, statistics.median(taken))


def disk(cache_dir: str) -> CheckResult:
    """How fast the disk of a cache directory is."""
    check, directory = "cache.speed", Path(cache_dir)
    while not os.path.exists(directory) and directory != directory.parent:
        directory = directory.parent
    try:
        speed = measure_disk(str(directory))
    except OSError as error:
        return failed(check, f"{directory} cannot be written to ({error.strerror}): choose another --cache-dir")
    text = f"{speed.bytes_s / 1e6:,.0f} MB/s written, {speed.sync_s * 1000:.2f} ms for a synced write at {directory}"
    values = {"bytes_s": round(speed.bytes_s), "sync_s": round(speed.sync_s, 6)}
    if speed.sync_s > SYNC_S_MAX or speed.bytes_s < DISK_BYTES_S_MIN:
        return warning(check, f"{text}: choose a --cache-dir on NVMe", **values)
    return ok(check, text, **values)


def store_checks(request: protocol.Diagnosis, config: StoreConfig, node: Node) -> Iterator[CheckResult]:
    """All checks of a store. Objects that they write are removed in every case."""
    if config.source.scheme != "s3":
        try:
            store = open_store(config, node)
        except LakeError as error:
            yield failed("store.list", str(error))
            return
        yield from _checks_of(request, store, node, lambda: iter(()))
        return
    from lakefs_fuse.store.s3 import advice, bucket
    from lakefs_fuse.store.s3.access import connect
    from lakefs_fuse.store.s3.store import S3Store, open_s3

    try:
        asked = connect(config, node.clock)
    except LakeError as error:
        yield failed("store.credentials", str(error))
        return
    yield bucket.credentials(asked, node.clock)
    try:
        store = open_s3(config, node.clock, None, tries_s_max=SILENCE_S)
    except LakeError as error:
        useless = any(advice.OF_CODES[code] in str(error) for code in advice.OF_CREDENTIALS)
        if useless or not isinstance(error, AccessDenied):
            yield failed("store.bucket", str(error))
            yield skipped("store.requests", "no other request was sent, and nothing written: fix that first")
            return
        store = S3Store(asked, node.clock)  # LIST is not allowed; the other requests may be
    else:
        yield ok("store.bucket", f"{config.source.bucket} is there, and can be listed")
    yield bucket.region(asked, store.access)
    yield from _checks_of(request, store, node, lambda: bucket.configuration(store.access))


def _checks_of(
    request: protocol.Diagnosis, store: ObjectStore, node: Node, configuration: Callable[[], Iterator[CheckResult]]
) -> Iterator[CheckResult]:
    checkup = Checkup(store, node.random.stream("checkup"), node.clock)
    try:
        yield checkup.clock_skew()
        found = dict[str, Severity]()
        for result in checkup.reading() if request.read_only else checkup.writing():
            found[result.check] = result.severity
            yield result
        if Severity.OK in found.values():
            yield lake_of(store, node)
            yield checkup.round_trip()
            keeps_versions = isinstance(store, NetworkStore)
            for result in configuration():
                keeps_versions = bool(result.values.get("keeps_versions", keeps_versions))
                yield result
            if request.throughput and found.get("store.put") is Severity.OK:
                yield throughput(checkup, node, repeats=not keeps_versions)
            elif request.throughput:
                yield skipped("store.throughput", "it needs a temporary object, which may not be written here")
        if (cleaned := checkup.clean()) is not None:
            yield cleaned
    finally:
        checkup.clean()
        store.close()


def lake_of(store: ObjectStore, node: Node) -> CheckResult:
    """Whether this program knows the features of the lake in a store."""
    check = "store.lake"
    try:
        record, _ = lake_record.read_record(store, node.clock)
        unknown = () if record is None else lake_record.check_features(record)
    except LakeError as error:
        return failed(check, str(error))
    if record is None:
        return ok(check, f"there is no {lake_record.KEY} yet: the first writable mount makes it")
    if unknown:
        return warning(check, f"mounts are read-only, as the lake has {', '.join(unknown)}: install a newer version")
    return ok(check, f"lake {record.id} has no feature that this version does not know", id=record.id)


def throughput(checkup: Checkup, node: Node, *, repeats: bool) -> CheckResult:
    """Bytes per second to and from a store, with several concurrent requests, each on its own temporary object;
    ``repeats``: they may be overwritten repeatedly, because no versions of them are kept."""
    check, body = "store.throughput", node.random.stream("throughput").randbytes(THROUGHPUT_BYTES)

    def rate_of(request: Callable[[int], int], bytes_max: int) -> float:
        began_s = time.monotonic()

        def work(number: int) -> int:
            moved = request(number)
            while moved < bytes_max // THROUGHPUT_REQUESTS and time.monotonic() - began_s < THROUGHPUT_S / 2:
                moved += request(number)
            return moved

        with ThreadPoolExecutor(THROUGHPUT_REQUESTS) as pool:
            return sum(pool.map(work, range(THROUGHPUT_REQUESTS))) / (time.monotonic() - began_s)

    def send(number: int) -> int:
        checkup.put_scratch(f"throughput-{number}", body)
        return THROUGHPUT_BYTES

    try:
        up = rate_of(send, THROUGHPUT_BYTES_MAX if repeats else 0)
        down = rate_of(
            lambda number: checkup.get_scratch(f"throughput-{number}", 0, THROUGHPUT_BYTES), THROUGHPUT_BYTES_MAX
        )
    except StoreError as error:
        return failed(check, str(error))
    return ok(
        check,
        f"{up / 1e6:,.0f} MB/s to the store, {down / 1e6:,.0f} MB/s from there, with {THROUGHPUT_REQUESTS} requests",
        up_bytes_s=round(up),
        down_bytes_s=round(down),
    )


def explain(config: MountConfig, node: Node) -> dict[str, object]:
    """What a mount of this configuration would use of its store and of the kernel."""
    store = structs.replace(config.store, connect_timeout_s=EXPLAIN_CONNECT_S_MAX)
    return {"kernel": _kernel_of(config), "store": _store_of(store, node, finds_lake=config.immutable)}


def _kernel_of(config: MountConfig) -> dict[str, object]:
    native = hooks.library() is not None
    return {
        "hooks": native,
        "libfuse": hooks.libfuse_version(),
        "requested": [str(feature.name).lower() for feature in features_for(config)] if native else [],
        "writeback_cache": not config.read_only,
        "max_background": background_max(config) if native else 0,
        "missing": [] if native else [hooks.why_inactive()],
    }


def _store_of(config: StoreConfig, node: Node, *, finds_lake: bool) -> dict[str, object]:
    """Its settings, and its capabilities according to the lake record; ``error`` if it cannot be asked."""
    found: dict[str, object] = {"source": str(config.source)}
    try:
        if config.source.scheme == "s3":
            from lakefs_fuse.store.s3 import bucket
            from lakefs_fuse.store.s3.access import connect
            from lakefs_fuse.store.s3.store import follow_region

            access = follow_region(connect(config, node.clock), node.clock)
            found |= {"region": access.region, "endpoint": access.base_url, "proxied": access.proxy_url is not None}
            found["credentials"] = bucket.credentials(access, node.clock).text
        lake, _ = find_lake(config, node) if finds_lake else (config, "")
        return found | capabilities(lake, node)
    except LakeError as error:
        return found | {"error": protocol.printable(str(error))}


def capabilities(config: StoreConfig, node: Node) -> dict[str, object]:
    """The capabilities of a store in the lake record; without an entry the minimum is assumed. Raises LakeError."""
    store = open_store(config, node)
    try:
        opened = lake_record.open_record(store, config, node.random.stream("probe"), node.clock, may_write=False)
        known = opened.record is not None and any(each is opened.finding for each in opened.record.stores)
        return {
            "probed": known,
            "lake": opened.record.id if opened.record is not None else None,
            "needs_newer_program": list(opened.unknown),
            "capabilities": msgspec.to_builtins(opened.capabilities),
        }
    finally:
        store.close()


def diagnose(request: protocol.Diagnosis, answers: Answers, node: Node) -> protocol.Finished:
    """Run the checks, or explain a mount."""
    if request.explains is not None:
        return protocol.Finished(summary=explain(request.explains, node), text="")
    for result in programs():
        answers.send(result)
    if request.cache_dir:
        answers.send(disk(request.cache_dir))
    if request.store is not None:
        for result in store_checks(request, request.store, node):
            answers.send(result)
    return protocol.Finished(summary={}, text="")


def run(argv: Sequence[str], descriptor: int) -> int:
    """Run one request, and return the exit code, which is also in the last answer on ``descriptor``."""
    request = read_request(argv, protocol.Diagnosis)
    answers = Answers(descriptor)
    last: protocol.Finished | protocol.Failed
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        release_interrupts()
        last = diagnose(request, answers, Node.of_this_machine())
    except BrokenPipeError:
        return protocol.EXIT_INTERRUPTED
    except KeyboardInterrupt:
        last = protocol.Failed(message="interrupted", exit_code=protocol.EXIT_INTERRUPTED)
    except LakeError as error:
        last = protocol.Failed(message=protocol.printable(str(error)), exit_code=error.exit_code)
    return answers.finish(last)


if __name__ == "__main__":
    run_process(run)
