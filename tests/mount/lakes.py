"""A lake mounted by the real program, with the store as another client sees it.

`Lake` runs the `lakefs-fuse` command as a user does; counters, which tests ask for most often, come from the control
socket. `close` leaves no mount and no daemon behind, and fails the test if the daemon's log holds a traceback or a
secret.

Sizes are small; the environment raises them:

=========================== ======= ==================================================================
LAKEFS_TEST_STORES          *       stores, by commas, of tests that run on any: file, seaweedfs (default), moto, rclone
LAKEFS_TEST_LARGE_MIB       40      size of a file that takes several parts (17 in `make test`, 33 at least in others)
LAKEFS_TEST_DIRECTORIES     30      directories of the lake that is listed
LAKEFS_TEST_OBJECTS         3000    objects in them, all together (1500 in `make test`)
LAKEFS_TEST_IMAGES          120     files that a DataLoader reads
LAKEFS_TEST_FIO_MIB         6       size of each file that fio writes and verifies
LAKEFS_TEST_CHECKPOINT_MIB  48      size of the state dict that torch saves and loads (24 in `make test`)
=========================== ======= ==================================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import obstore
from obstore.store import S3Store

from lakefs_fuse.cli.daemons import open_daemon
from lakefs_fuse.errors import LakeError
from tests import servers
from tests.mount import fork_server
from tests.mount.fork_server import PATCH, ForkServer
from tests.servers import Server, s3_client
from tests.tiers import IS_LONG, sized

MIB = 1 << 20
PART_BYTES = sized(fork_server.PART_BYTES, 16 * MIB)
"""The first parts of an upload are so large; smaller files are one PUT."""
STOP_TIMEOUT_S = 30.0
PAUSE_S_MAX, PAUSE_SHARE = 0.3, 0.06
"""Between two questions of `eventually`: this share of the time it has waited."""
START_HEADS, START_LISTS = 1, 3
"""What every mount asks when it begins: what time it is there; the horizon, and which indexes and commits there are."""
RECORD = ".lakefs/lake"
CLI = [sys.executable, "-P", "-m", "lakefs_fuse"]

Stats = dict[str, object]


def scale(name: str, default: int, *, short: int | None = None) -> int:
    """Return a size of a test from the environment (see the module's head); without it, ``short`` in `make test`."""
    return int(os.environ.get(f"LAKEFS_TEST_{name}", sized(default if short is None else short, default)))


SYNC_FILE_RANGE_WRITE = 2
LARGE_BYTES = scale("LARGE_MIB", 40, short=17) * MIB


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not repeat, the same for a seed."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 15.0, pause_s: float = 0.03) -> None:
    """Wait for something that another process does; ``pause_s`` between two questions, and more after seconds: a
    question to a daemon takes 10 ms of CPU, and whoever waits for long need not know at once."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(max(pause_s, min(PAUSE_S_MAX, waited_s * PAUSE_SHARE)))


def start_writeback(fd: int) -> None:
    """Have the kernel send dirty pages to the daemon now. It keeps those of a FUSE mount until they are some 1 % of the
    memory, or 30 s old, and less only where other disks were written to lately."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), SYNC_FILE_RANGE_WRITE):
        raise OSError(ctypes.get_errno(), "sync_file_range")


def given_away(path: Path, uid: int, gid: int) -> tuple[int, int]:
    """Give a file to another user, as only root may; an ordinary user is refused and keeps it. Answers whose it is."""
    try:
        os.chown(path, uid, gid)
    except PermissionError:
        assert os.geteuid() != 0
        uid, gid = os.geteuid(), os.getegid()
        os.chown(path, uid, gid)
    else:
        assert os.geteuid() == 0
    return uid, gid


class Outside(Protocol):
    """The store as another client sees it; keys are relative to the lake."""

    source_prefix: str
    """What the lake's keys begin with in the bucket."""

    def objects(self) -> dict[str, int]:
        """Keys and sizes, directory markers included, but for the lake record."""

    def versions(self) -> dict[str, tuple[str, int]]:
        """Keys with their ETags and LastModified (ns since 1970), as a listing tells them."""

    def read(self, key: str) -> bytes: ...
    def replace(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        """Another client's atomic upload."""

    def delete(self, key: str) -> None: ...
    def metadata(self, key: str) -> Mapping[str, str]: ...
    def uploads(self) -> list[str]:
        """Keys of unfinished multipart uploads."""


class Directory:
    """A ``file:///dir`` lake seen with ordinary system calls."""

    def __init__(self, root: Path) -> None:
        self.root, self.source_prefix = root, ""
        root.mkdir(parents=True, exist_ok=True)

    @property
    def source(self) -> str:
        return f"file://{self.root}"

    def objects(self) -> dict[str, int]:
        return {
            str(path.relative_to(self.root)): path.stat().st_size
            for path in self.root.rglob("*")
            if path.is_file() and not path.is_relative_to(self.root / ".lakefs")
        }

    def versions(self) -> dict[str, tuple[str, int]]:
        raise AssertionError("only a bucket tells ETags to other clients")

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def replace(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(".new-" + path.name)
        new.write_bytes(data)
        if metadata:
            version = f"{new.stat().st_mtime_ns}-{len(data)}"
            document = {"version": version, "metadata": dict(metadata)}
            os.setxattr(new, "user.lakefs.metadata", json.dumps(document).encode())
        new.rename(path)

    def delete(self, key: str) -> None:
        (self.root / key).unlink()

    def metadata(self, key: str) -> Mapping[str, str]:
        document = json.loads(os.getxattr(self.root / key, "user.lakefs.metadata"))
        found: dict[str, str] = document["metadata"]
        return found

    def uploads(self) -> list[str]:
        return [json.loads(path.read_text())["key"] for path in self.root.glob(".lakefs/uploads/*/upload.json")]


class Bucket:
    """A lake in a bucket, seen with boto3. What the first mount found out about its server holds for others of it."""

    findings: ClassVar[dict[str, bytes]] = {}
    """Lake records by the server's URL."""

    def __init__(self, server: Server, bucket: str, prefix: str) -> None:
        self.bucket, self.source_prefix = bucket, prefix
        self.client = s3_client(server)
        self.url = server.url

    def tell_findings(self) -> None:
        """As if the lake had been mounted before; not where it was."""
        known = self.findings.get(self.url)
        if known is None:
            return
        with contextlib.suppress(self.client.exceptions.ClientError):
            self.client.put_object(Bucket=self.bucket, Key=self.source_prefix + RECORD, Body=known, IfNoneMatch="*")

    def learn_findings(self) -> None:
        with contextlib.suppress(self.client.exceptions.ClientError):
            self.findings.setdefault(self.url, self.read(RECORD))

    @property
    def source(self) -> str:
        return f"s3://{self.bucket}/{self.source_prefix}".rstrip("/")

    def objects(self) -> dict[str, int]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.source_prefix)
        found = [item for page in pages for item in page.get("Contents", ())]
        keys = {item["Key"][len(self.source_prefix) :]: item["Size"] for item in found}
        keys.pop(RECORD, None)
        return keys

    def versions(self) -> dict[str, tuple[str, int]]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.source_prefix)
        return {
            item["Key"][len(self.source_prefix) :]: (
                item["ETag"].strip('"'),
                int(item["LastModified"].timestamp() * 1_000_000_000),
            )
            for page in pages
            for item in page.get("Contents", ())
            if item["Key"] != self.source_prefix + RECORD
        }

    def read(self, key: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=self.source_prefix + key)["Body"].read()
        return body

    def replace(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        self.client.put_object(
            Bucket=self.bucket, Key=self.source_prefix + key, Body=data, Metadata=dict(metadata or {})
        )

    def replace_all(self, objects: Mapping[str, bytes]) -> None:
        """As `replace`, for many objects, in a fifth of the CPU time of boto3."""
        store = S3Store(
            self.bucket, prefix=self.source_prefix, endpoint=self.url, region=servers.REGION,
            access_key_id=servers.ACCESS_KEY, secret_access_key=servers.SECRET_KEY,
            client_options={"allow_http": True}, virtual_hosted_style_request=False,
        )  # fmt: skip
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(partial(obstore.put, store, use_multipart=False), objects, objects.values()))

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self.source_prefix + key)

    def metadata(self, key: str) -> Mapping[str, str]:
        found: dict[str, str] = self.client.head_object(Bucket=self.bucket, Key=self.source_prefix + key)["Metadata"]
        return found

    def uploads(self) -> list[str]:
        answer = self.client.list_multipart_uploads(Bucket=self.bucket)
        return [upload["Key"][len(self.source_prefix) :] for upload in answer.get("Uploads", ())]


def environment(home: Path) -> dict[str, str]:
    """What the program is started with: the test identity, and nothing of this user's own configuration."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "XDG_"))}
    return {
        **inherited,
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Lake:
    """One lake on one mountpoint with one cache directory; mounted any number of times, one after another."""

    def __init__(self, outside: Outside, source: str, directory: Path, *options: str) -> None:
        self.outside = outside
        self.source = source
        self.path = directory / "mnt"
        self.cache_dir = directory / "cache"
        self.log_file = directory / "log"
        self.options = options
        self.command = CLI
        for made in (self.path, directory / "home"):
            made.mkdir(parents=True)
        self.env = environment(directory / "home")
        self.pid = 0

    # -- the program

    def cli(self, *args: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        if self.command is CLI and not IS_LONG:
            server = ForkServer.of_this_process()
            if server.suits(self.env):
                return server.run(args, self.env, timeout_s)
            assert PATCH not in self.env, "what is started does not read it"
        return subprocess.run(
            [*self.command, *args],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd="/",
        )

    def try_mount(self, *options: str) -> subprocess.CompletedProcess[str]:
        args = ["--cache-dir", str(self.cache_dir), "--log-file", str(self.log_file), "--free-space", "64M"]
        args.append("--no-supervise")  # A test that kills a daemon looks at what it leaves behind.
        if self.command is CLI and not {"--immutable", "--dataset"} & {*self.options, *options}:
            args += ["--delete-after", "0"]  # nobody else renames what a test removed
        return self.cli("mount", self.source, str(self.path), *args, *self.options, *options)

    def mount(self, *options: str) -> Lake:
        server = self.outside if isinstance(self.outside, Bucket) and self.command is CLI else None
        if server is not None:
            server.tell_findings()
        done = self.try_mount(*options)
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"
        if server is not None:
            server.learn_findings()
        self.pid = self.number("daemon.pid")
        return self

    def umount(self) -> None:
        done = self.cli("umount", str(self.path))
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"
        assert not os.path.ismount(self.path)
        assert not is_running(self.pid)
        self.pid = 0

    def remount(self, *options: str, empty_cache: bool = False) -> Lake:
        self.umount()
        if empty_cache:
            shutil.rmtree(self.cache_dir)
        return self.mount(*options)

    def kill(self) -> None:
        """A crash: SIGKILL, and the dead mount cleared away as the program itself advises."""
        self._signal(signal.SIGKILL)
        refused = self.try_mount()
        assert refused.returncode == 1
        assert f"lakefs-fuse umount {self.path}" in refused.stderr
        cleared = self.cli("umount", str(self.path))
        assert cleared.returncode == 1, "bytes may be in the cache directory only"
        assert not os.path.ismount(self.path), cleared.stderr

    def _signal(self, number: signal.Signals) -> None:
        pidfd = os.pidfd_open(self.pid)
        try:
            signal.pidfd_send_signal(pidfd, number)
            assert select.select([pidfd], [], [], STOP_TIMEOUT_S)[0], "the daemon does not end"
        finally:
            os.close(pidfd)
        self.pid = 0

    def serving(self) -> bool:
        """The daemon of the last mount runs."""
        return is_running(self.pid)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def close(self) -> None:
        """Detach, end the daemon by its id, and look at what it logged."""
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["fusermount3", "-u", "-z", str(self.path)], capture_output=True, check=False)
        if self.pid:
            try:
                self._signal(signal.SIGTERM)
            except ProcessLookupError:
                pass
            except AssertionError:
                os.kill(self.pid, signal.SIGKILL)
                raise
        log = self.log()
        assert servers.SECRET_KEY not in log
        assert "Traceback" not in log, log[-6000:]

    # -- what it says

    def stats(self) -> Stats:
        if self.command is CLI:
            with open_daemon(str(self.path)) as client:
                return client.statistics()
        done = self.cli("stats", "--json", str(self.path))
        if done.returncode:  # as the client raises, for example while a daemon is being started again
            raise LakeError(done.stderr)
        values: Stats = json.loads(done.stdout)
        return values

    def number(self, dotted: str) -> int:
        return number(self.stats(), dotted)

    def puts(self) -> int:
        """PUTs but those of bundles, which come some time after the commits that are in them, and of announcements, of
        which there is one a second at most."""
        stats = self.stats()
        others = number(stats, "commits.bundles_written") + number(stats, "commits.announcements")
        return number(stats, "store.requests.put") - others

    def unfinished(self) -> list[dict[str, object]]:
        files = self.stats()["unfinished"]
        assert isinstance(files, list)
        return files

    def sync(self) -> None:
        """Every change of a name is in the store when this returns."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def settle(self) -> None:
        """As `sync`, and the objects that the changes left behind are deleted."""
        self.sync()
        eventually(lambda: self.number("commits.deletions_waiting") == 0, "plain objects of removed names are deleted")

    def plain(self) -> dict[str, int]:
        """Objects that any S3 client takes for files, with their sizes."""
        return {key: size for key, size in self.outside.objects().items() if not key.startswith(".lakefs/")}

    def staged_files(self) -> list[str]:
        return os.listdir(self.cache_dir / "staging")


MAINTENANCE_PATCH = """
from lakefs_fuse.admin import maintenance
maintenance.INTERVAL_S = {interval_s}
maintenance.COMMITS_MAX = maintenance.LEVELS_COMMITS_MAX = {commits_max}
"""


def hasten_maintenance(lake: Lake, directory: Path, *, interval_s: float, commits_max: int) -> Lake:
    """A mount looks about every ``interval_s``, not every hour, and 24 of these are a day; a fold is due after so many
    commits, not after 300. ``directory`` is for a file that the program imports."""
    return patch_program(lake, directory, MAINTENANCE_PATCH.format(interval_s=interval_s, commits_max=commits_max))


def patch_program(lake: Lake, directory: Path, patch: str) -> Lake:
    """This source runs before the program, and before each that it starts, which imports it from ``directory``."""
    (directory / "sitecustomize.py").write_text(patch)
    path = os.pathsep.join([str(directory), *filter(None, [lake.env.get("PYTHONPATH")])])
    if IS_LONG:
        lake.env["PYTHONPATH"] = path
    else:
        lake.env[PATCH] = f"import os\nos.environ['PYTHONPATH'] = {path!r}\n{patch}"
    return lake


def is_running(pid: int) -> bool:
    """A process that ended and was not waited for yet does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or before it is read
        return False


def number(stats: Stats, dotted: str) -> int:
    """A value of `stats --json` by its path, as in ``store.requests.list``."""
    value: object = stats
    for name in dotted.split("."):
        assert isinstance(value, dict)
        value = value[name]
    assert isinstance(value, int)
    return value


@contextlib.contextmanager
def file_lake(directory: Path, *options: str) -> Iterator[Lake]:
    """A lake on a local directory, not mounted yet."""
    outside = Directory(directory / "store")
    lake = Lake(outside, outside.source, directory / "node", *options)
    try:
        yield lake
    finally:
        lake.close()


@contextlib.contextmanager
def s3_lake(
    server: Server,
    bucket: str,
    directory: Path,
    *options: str,
    prefix: str = "some/lake/",
    through: Server | None = None,
) -> Iterator[Lake]:
    """A lake in a bucket, not mounted yet; ``through`` is the same server behind a proxy, which only the mount uses."""
    outside = Bucket(server, bucket, prefix)
    url = (through or server).url
    lake = Lake(
        outside, outside.source, directory / "node", "--endpoint-url", url, "--region", servers.REGION, *options
    )
    try:
        yield lake
    finally:
        lake.close()
        outside.client.close()
