"""The daemon under test on this machine: started as a user would, killed, and its dead mount taken away.

`Host` owns one mountpoint and one cache directory. It kills by the id of the process that it started, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lakefs_fuse.control.mounts import abort, mount_at
from scripts.crash.disk import Disk
from tests import servers
from tests.servers import Server

START_S_MAX = 60.0
END_S_MAX = 120.0
DEATH_S_MAX = 3.0
"""What is killed ends sooner, unless the kernel holds it in a request that it asked of itself."""
LAKEFS = [sys.executable, "-P", "-m", "lakefs_fuse"]
REPOSITORY = Path(__file__).parents[2]
UNSYNCED = [sys.executable, "-P", "-m", "scripts.crash.unsynced"]


class HostError(Exception):
    """The daemon did what it must not: ended by itself, hung, or refused."""


class Host:
    """See the module's head. ``options`` are those of ``lakefs-fuse mount``."""

    def __init__(
        self, server: Server, source: str, directory: Path, *options: str, power_cuts: bool = False,
        syncs: bool = True,
    ) -> None:  # fmt: skip
        """``power_cuts``: a death takes what was not synced of the cache directory. Not ``syncs``: the daemon is broken
        on purpose."""
        self.server, self.source, self.directory, self.options = server, source, directory, list(options)
        self.mountpoint, self.cache = directory / "mnt", directory / "cache"
        self.log = directory / "log"
        self.cut_off = 0
        """Mounts whose dead daemon the kernel would not let go."""
        self._after_cuts: list[tuple[int, int]] = []
        """Where the log has what a daemon said between the end of its disk and its own."""
        self._command = LAKEFS if syncs else UNSYNCED
        for made in (self.mountpoint, directory / "home"):
            made.mkdir(parents=True)
        self._disk = Disk(directory) if power_cuts else None
        if self._disk is not None:
            self.cache = self._disk.root / "cache"
        self._process: subprocess.Popen[bytes] | None = None
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "XDG_", "LAKEFS_"))},
            "HOME": str(directory / "home"),
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
            "PYTHONPATH": str(REPOSITORY),
        }

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    # -- the daemon

    def start(self, failpoint: str = "") -> None:
        """Start the daemon; does not wait for the mount. ``failpoint`` names a point of `environment.failpoints`."""
        assert self._process is None
        command = [*self._command, "mount", self.source, str(self.mountpoint), "--foreground", "--no-supervise"]
        command += ["--cache-dir", str(self.cache), "--log-file", str(self.log), "--free-space", "64M"]
        command += ["--endpoint-url", self.server.url, "--region", servers.REGION, *self.options]
        environment = {**self.environment, **({"LAKEFS_FAILPOINT": failpoint} if failpoint else {})}
        with (self.directory / "stderr").open("ab") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, cwd="/"
            )

    def wait_mounted(self, *, may_die: bool = False) -> bool:
        """Whether the mount answers; with ``may_die`` it may also have been killed meanwhile. Raises HostError."""
        deadline = time.monotonic() + START_S_MAX
        while not os.path.ismount(self.mountpoint):
            if self.has_died():
                if may_die and self.died_by_sigkill():
                    return False
                raise HostError(f"the daemon ended with {self._code()} instead of mounting:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise HostError(f"not mounted after {START_S_MAX:.0f} s:\n{self.tail()}")
            time.sleep(0.01)
        try:
            os.statvfs(self.mountpoint)
        except OSError as error:
            if may_die:
                self.wait_died(5.0)
                return False
            raise HostError(f"the daemon died: {error}\n{self.tail()}") from error
        return True

    def _code(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def has_died(self) -> bool:
        return self._code() is not None

    def died_by_sigkill(self) -> bool:
        return self._code() == -signal.SIGKILL

    def wait_died(self, timeout_s: float) -> bool:
        """Whether it died by itself within this time. Raises HostError where that was no SIGKILL."""
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if not self.died_by_sigkill():
            raise HostError(f"the daemon ended with {self._code()}:\n{self.tail()}")
        return True

    def kill(self, *, cut_first: bool = False) -> None:
        """SIGKILL, whatever it is doing; with ``cut_first`` its disk goes a moment before."""
        assert self._process is not None
        logged = self._log_bytes()
        if cut_first and self._disk is not None:
            self._disk.cut()
        self._process.kill()
        try:
            self._process.wait(DEATH_S_MAX)
        except subprocess.TimeoutExpired:
            self._cut_off()
            self._process.wait(10)
        if cut_first:
            self._after_cuts.append((logged, self._log_bytes()))

    def _log_bytes(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def _cut_off(self) -> None:
        """What a supervisor does where the kernel holds a thread of the dead daemon."""
        self.cut_off += 1
        mounted = mount_at(os.fspath(self.mountpoint))
        if mounted is not None:
            abort(mounted)

    def clear(self) -> None:
        """Take the dead mount away, and what its disk had not synced."""
        self._process = None
        while os.path.ismount(self.mountpoint) or _is_dead(self.mountpoint):
            subprocess.run(["fusermount3", "-u", "-z", str(self.mountpoint)], capture_output=True, check=False)
        if left := os.listdir(self.mountpoint):
            raise HostError(f"something was written below the mountpoint: {left}")
        if self._disk is not None:
            self._disk.cut()
            self._disk.unmount()
            self._disk.mount()

    def umount(self) -> None:
        """The user's way: everything durable first. Raises HostError."""
        done = self.cli("umount", str(self.mountpoint))
        if done.returncode:
            raise HostError(f"umount: {done.stderr}\n{self.tail()}")
        assert self._process is not None
        self._process.wait(END_S_MAX)
        if self._code():
            raise HostError(f"the daemon ended with {self._code()} after umount:\n{self.tail()}")
        self._process = None

    def close(self) -> None:
        """Leave no mount and no process."""
        if self._process is not None and not self.has_died():
            self.kill()
        self._process = None
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["fusermount3", "-u", "-z", str(self.mountpoint)], capture_output=True, check=False)
        if self._disk is not None:
            self._disk.unmount()

    # -- what it says

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*LAKEFS, *args],
            env=self.environment, capture_output=True, text=True, timeout=END_S_MAX, check=False, cwd="/",
        )  # fmt: skip

    def flush(self) -> None:
        done = self.cli("flush", str(self.mountpoint))
        if done.returncode:
            raise HostError(f"flush: {done.stderr}\n{self.tail()}")

    def statistics(self) -> dict[str, object]:
        done = self.cli("stats", "--json", str(self.mountpoint))
        if done.returncode:
            raise HostError(f"stats: {done.stderr}\n{self.tail()}")
        told: dict[str, object] = json.loads(done.stdout)
        return told

    def complaints(self) -> list[str]:
        """What no log may hold."""
        said = self.log.read_bytes() if self.log.exists() else b""
        for begin, end in reversed(self._after_cuts):
            said = said[:begin] + said[end:]
        text = said.decode(errors="replace")
        found = [text[text.index("Traceback") - 500 :][:3000]] if "Traceback" in text else []
        return [f"the daemon's log: {each}" for each in found]

    def tail(self) -> str:
        parts = [self.log, self.directory / "stderr"]
        return "\n".join(part.read_text(errors="replace")[-2500:] for part in parts if part.exists())


def _is_dead(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError:
        return True
    return False
