"""A killed daemon that the kernel cannot release, because a request waits for the daemon itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.control.fakes import mount_config
from tests.mount.lakes import eventually

ROOT = Path(__file__).parents[2]

SUPERVISOR = """
import sys
from lakefs_fuse.daemon import supervisor
supervisor.DEATH_CHECK_S = 0.5
sys.exit(supervisor.run(sys.argv[2:], [sys.executable, sys.argv[1]]))
"""

DAEMON = """
import argparse, errno, json, os, stat, sys, threading
import pyfuse3, trio

parser = argparse.ArgumentParser()
parser.add_argument("--ready-fd", type=int)
parser.add_argument("--restarts", type=int)
parser.add_argument("--replace", default="")
given = parser.parse_args()
point = json.load(sys.stdin)["mountpoint"]

class Files(pyfuse3.Operations):
    \"\"\"A file a that cannot be renamed: meanwhile the kernel is told to forget it.\"\"\"

    async def getattr(self, inode, ctx=None):
        found = pyfuse3.EntryAttributes()
        found.st_ino = inode
        found.st_mode = stat.S_IFDIR | 0o755 if inode == pyfuse3.ROOT_INODE else stat.S_IFREG | 0o644
        found.st_nlink = 1
        return found

    async def lookup(self, parent, name, ctx=None):
        if name != b"a":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(2)

    async def rename(self, old_parent, old, new_parent, new, flags, ctx):
        threading.Thread(target=pyfuse3.invalidate_entry, args=(old_parent, b"a"), daemon=True).start()
        await trio.sleep_forever()

if given.restarts:
    os.write(given.ready_fd, b'{"error": "enough", "exit_code": 0}\\n')
    sys.exit(0)
pyfuse3.init(Files(), point, {*pyfuse3.default_options, "fsname=stuck"})
os.write(given.ready_fd, b"{}\\n")
trio.run(pyfuse3.main)
"""


def threads_held(pid: int) -> int:
    """Threads of a process that sleep and cannot be interrupted."""
    states = [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return states.count("D")


def daemon_of(supervisor: int) -> int:
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return int(children[0])


def test_supervisor_ends_a_mount_whose_killed_daemon_the_kernel_holds(dev_fuse: Path, tmp_path: Path) -> None:
    point, daemon, log = tmp_path / "mnt", tmp_path / "daemon.py", tmp_path / "log"
    point.mkdir()
    daemon.write_text(DAEMON)
    config = msgspec.structs.replace(mount_config(str(point)), log_file=str(log))
    reading, writing = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SUPERVISOR, str(daemon), "--ready-fd", str(writing)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writing], env=environment) as supervisor:
        try:
            os.close(writing)
            assert supervisor.stdin is not None
            supervisor.stdin.write(msgspec.json.encode(config))
            supervisor.stdin.close()
            assert os.read(reading, 100) == b"{}\n"
            pid = daemon_of(supervisor.pid)
            with subprocess.Popen(["mv", str(point / "a"), str(point / "b")], stderr=subprocess.DEVNULL) as renaming:
                eventually(lambda: threads_held(pid) > 0, "the kernel holds a thread of the daemon")
                os.kill(pid, signal.SIGKILL)
                assert supervisor.wait(60) == 0
                assert renaming.wait(60) != 0
            assert "was killed and cannot end" in log.read_text()
            assert not Path(f"/proc/{pid}").exists()
        finally:
            os.close(reading)
            if supervisor.poll() is None:
                supervisor.kill()
            subprocess.run(["fusermount3", "-u", "-z", str(point)], capture_output=True, check=False)
