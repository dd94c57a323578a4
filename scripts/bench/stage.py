"""Where it happens: SeaweedFS, HAProxy with latency in front of all of its doors, and the data that everybody is given.

Everything lies in one temporary directory. Data are made once as local files (`source`), and put into the bucket past
the proxy when somebody asks for them (`Bucket.provide`); peers that keep their bytes in a form of their own are filled
through themselves. Written areas are a prefix for each peer and round, so that nobody meets what another left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from scripts.bench import machine
from scripts.bench.sizes import Sizes
from scripts.bench.tally import Tally
from tests.servers import (
    ACCESS_KEY,
    EACH_REQUEST,
    GRPC_OFFSET,
    REGION,
    SECRET_KEY,
    Server,
    Way,
    free_port,
    haproxy,
    make_bucket,
    s3_answers,
    s3_client,
    seaweedfs,
)

BUCKET = "bench"
PUTS_AT_ONCE = 48
DIRECTORIES = 20
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWSACCESSKEYID": ACCESS_KEY,
    "AWSSECRETACCESSKEY": SECRET_KEY,
    "ACCESS_KEY": ACCESS_KEY,
    "SECRET_KEY": SECRET_KEY,
}
"""In the environment of everything that is started: for boto3, obstore, rclone and us; for s3fs; for JuiceFS."""


@dataclass
class Stage:
    """The store and the data of a run."""

    directory: Path
    sizes: Sizes
    direct: Server
    """Past the proxy: for filling and looking, never for measuring."""
    store: Server
    """Through the proxy, with latency; its ``filer`` too."""
    tally: Tally
    provided: set[str] = field(default_factory=set)
    areas: set[str] = field(default_factory=set)
    """Buckets of what is being written."""

    def source(self, what: str) -> Path:
        """A directory of local files that are the data called ``what``: names, set, large, tree, load."""
        path = self.directory / "data" / what
        if not path.exists():
            new = path.with_name(what + ".new")
            new.mkdir(parents=True)
            makers = {"names": self._names, "set": self._set, "large": self._large, "tree": self._tree}
            {**makers, "load": self._load}[what](new)
            new.rename(path)
        return path

    def set_names(self) -> list[str]:
        """Of the small files, in the order of a first epoch."""
        names = [f"d{index % DIRECTORIES:02d}/f{index:06d}.jpg" for index in range(self.sizes.files)]
        random.Random(3).shuffle(names)
        return names

    def small_sizes(self, count: int) -> list[int]:
        """Of so many small files, in bytes."""
        choose = random.Random(5)
        return [choose.randint(self.sizes.file_bytes_min, self.sizes.file_bytes_max) for _ in range(count)]

    def place(self, prefix: str) -> tuple[str, str]:
        """Bucket, and prefix in it. Each written area has a bucket of its own, which goes with all that it holds."""
        if not prefix.startswith("w/"):
            return BUCKET, prefix
        _, area, rest = prefix.split("/", 2)
        bucket = f"w-{area}".lower()
        if bucket not in self.areas:
            make_bucket(self.direct, bucket)
            self.areas.add(bucket)
        return bucket, rest

    def clear_areas(self) -> None:
        """What was written is gone, and its disk space free."""
        client = s3_client(self.direct)
        for bucket in list(self.areas):
            with contextlib.suppress(ClientError, BotoCoreError):
                client.delete_bucket(Bucket=bucket)
        self.provided -= {prefix for prefix in self.provided if prefix.startswith("w/")}
        self.areas.clear()
        client.close()

    def provide(self, prefix: str, what: str) -> None:
        """The data are objects below ``prefix``; once for each prefix."""
        if prefix not in self.provided:
            asyncio.run(self._put(prefix, self.source(what)))
            self.provided.add(prefix)

    def scrub(self, text: str) -> str:
        """Without the paths and ports of this run."""
        for found in (self.store, self.direct):
            for address in (found.url, found.filer):
                if address:
                    text = text.replace(address, "STORE")
        return text.replace(str(self.directory), "DIR")

    def _names(self, path: Path) -> None:
        (path / "d").mkdir()
        for index in range(self.sizes.names):
            os.close(os.open(path / "d" / f"image-{index:08d}.jpg", os.O_CREAT | os.O_WRONLY))

    def _set(self, path: Path) -> None:
        self._small(path, self.sizes.files)

    def _load(self, path: Path) -> None:
        self._small(path, self.sizes.loaded_files)

    def _small(self, path: Path, count: int) -> None:
        noise = os.urandom(self.sizes.file_bytes_max + (1 << 20))
        for number in range(DIRECTORIES):
            (path / f"d{number:02d}").mkdir()
        for index, size in enumerate(self.small_sizes(count)):
            start = index * 64 % (1 << 20)
            (path / f"d{index % DIRECTORIES:02d}" / f"f{index:06d}.jpg").write_bytes(noise[start : start + size])

    def _large(self, path: Path) -> None:
        for name in ("through.bin", "scattered.bin"):
            with (path / name).open("wb") as file:
                for _ in range(self.sizes.large_bytes >> 20):
                    file.write(os.urandom(1 << 20))

    def _tree(self, path: Path) -> None:
        for name in ("renamed", "removed"):
            (path / name).mkdir()
            for index in range(self.sizes.tree_files):
                (path / name / f"f{index:06d}").write_bytes(os.urandom(4096))

    async def _put(self, prefix: str, source: Path) -> None:
        import obstore
        from obstore.store import S3Store

        bucket, inside = self.place(prefix)
        store = S3Store(
            bucket, endpoint=self.direct.url, region=REGION, access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY,
            client_options={"allow_http": True}, virtual_hosted_style_request=False,
        )  # fmt: skip
        files = [path for path in source.rglob("*") if path.is_file()]

        async def share(first: int) -> None:
            for path in files[first::PUTS_AT_ONCE]:
                await obstore.put_async(store, f"{inside}/{path.relative_to(source)}", path.read_bytes())

        await asyncio.gather(*(share(first) for first in range(PUTS_AT_ONCE)))


def marker(stage: Stage, prefix: str) -> None:
    """An empty directory, as S3 tools make one: some mounts refuse a prefix that is not there."""
    bucket, inside = stage.place(prefix)
    client = s3_client(stage.direct)
    client.put_object(Bucket=bucket, Key=f"{inside}/", Body=b"")
    client.close()


@contextlib.contextmanager
def credentials() -> Iterator[None]:
    """In the environment, alone, and as it was afterwards."""
    before = dict(os.environ)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        os.environ.pop(name, None)
    os.environ.update(CREDENTIALS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def opened(sizes: Sizes, prices: dict[str, float], running: Server | None = None) -> Iterator[Stage]:
    """A stage; all of it is gone afterwards, but for what is in a SeaweedFS that was ``running`` before."""
    directory = Path(tempfile.mkdtemp(prefix="lakefs-bench-", dir=machine.roomy_directory(sizes.disk_bytes)))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.enter_context(credentials())
        direct = running or stack.enter_context(seaweedfs(directory / "server"))
        make_bucket(direct, BUCKET)
        s3_port, filer_port = free_port(), free_port(with_grpc=True)
        filer_host, _, upstream = direct.filer.partition(":")
        store = Server("seaweedfs", f"http://127.0.0.1:{s3_port}", filer=f"127.0.0.1:{filer_port}")
        ways = [
            Way(s3_port, urlsplit(direct.url).netloc),
            Way(filer_port, direct.filer),
            Way(filer_port + GRPC_OFFSET, f"{filer_host}:{int(upstream) + GRPC_OFFSET}", grpc=True),
        ]
        proxy = haproxy(ways, directory / "proxy", sizes.delay_ms, lambda: s3_answers(store), log=EACH_REQUEST)
        stack.enter_context(proxy)
        tally = Tally(directory / "proxy" / "haproxy.log", prices)
        yield Stage(directory, sizes, direct, store, tally)
