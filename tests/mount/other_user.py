"""An ordinary user who runs the program: another uid, with a home and a Python that it may execute.

Root's Python and this checkout may be closed to others, so a directory that everybody can read has links to what the
program needs. Without root, the user is the one who runs the tests.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import site
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mount.lakes import environment

PACKAGE = Path(__file__).parents[2] / "lakefs_fuse"
NOT_NEEDED = (
    "torch torch-* torchgen functorch nvidia* triton* sympy* moto* weed* seaweedfs* rclone* mypy* test idlelib "
    "site-packages *.a"
).split()
"""Large, or useless to the program."""


@dataclass(frozen=True)
class User:
    """How to run things as the user: put ``prefix`` before a command and use ``env``."""

    uid: int
    gid: int
    directory: Path
    prefix: list[str]
    env: dict[str, str]
    python: str

    @property
    def command(self) -> list[str]:
        """The program."""
        return [*self.prefix, self.python, "-P", "-m", "lakefs_fuse"]

    def own(self, path: Path) -> None:
        """Give a directory tree to the user."""
        if os.geteuid() == 0:
            for each in (path, *path.rglob("*")):
                os.chown(each, self.uid, self.gid)

    def sh(self, script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a shell script as the user; the working directory is entered by the user."""
        return subprocess.run(
            [*self.prefix, "sh", "-ec", f'cd "$0"; {script}', str(cwd)],
            env=self.env, cwd="/", capture_output=True, text=True, check=False,
        )  # fmt: skip


def _open_to_all(path: Path) -> bool:
    return all(each.stat().st_mode & 0o005 == 0o005 for each in (path, *path.parents))


def _link(source: Path, target: Path) -> None:
    """A tree of hard links, or of copies where the file system is another one."""

    def link(one: str, other: str) -> str:
        try:
            os.link(one, other, follow_symlinks=True)
        except OSError:
            shutil.copy2(one, other)
        return other

    shutil.copytree(source, target, copy_function=link, ignore=shutil.ignore_patterns(*NOT_NEEDED))


def _python(directory: Path, env: dict[str, str]) -> str:
    """A Python with the program in it; ``env`` is completed."""
    base = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not _open_to_all(base):
        home = directory / "python"
        (home / "lib").mkdir(parents=True)
        _link(base / "lib" / version, home / "lib" / version)
        for library in (base / "lib").glob("libpython*.so*"):
            shutil.copy2(library, home / "lib" / library.name)
        (home / "bin").mkdir()
        shutil.copy2(base / "bin" / version, home / "bin" / version)
        base = home
        env["PYTHONHOME"], env["LD_LIBRARY_PATH"] = str(home), str(home / "lib")
    packages = directory / "packages"
    packages.mkdir()
    for found in dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]):
        for entry in Path(found).iterdir():
            target = packages / entry.name
            if not target.exists() and not shutil.ignore_patterns(*NOT_NEEDED)(found, [entry.name]):
                if entry.is_dir():
                    _link(entry, target)
                else:
                    shutil.copy2(entry, target)
    shutil.copytree(PACKAGE, packages / "lakefs_fuse", dirs_exist_ok=True)
    env["PYTHONPATH"] = str(packages)
    return str(base / "bin" / version)


@contextmanager
def other_user() -> Iterator[User]:
    """An unprivileged user; /dev/fuse is open to everybody meanwhile, as it is on any desktop."""
    with _device_open_to_all():
        yield from _user()


@contextmanager
def _device_open_to_all() -> Iterator[None]:
    """One test process at a time, so that none takes the permission away from another."""
    device = Path("/dev/fuse")
    if os.geteuid() != 0:
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"lakefs-test-dev-fuse-{os.geteuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mode = stat.S_IMODE(device.stat().st_mode)
        device.chmod(0o666)
        try:
            yield
        finally:
            device.chmod(mode)


def _user() -> Iterator[User]:
    directory = Path(tempfile.mkdtemp(prefix="lakefs-test-"))
    try:
        directory.chmod(0o755)
        home = directory / "home"
        home.mkdir()
        env = environment(home)
        if os.geteuid() == 0:
            entry = pwd.getpwnam("nobody")
            prefix = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
            user = User(entry.pw_uid, entry.pw_gid, directory, prefix, env, _python(directory, env))
        else:
            user = User(os.getuid(), os.getgid(), directory, [], env, sys.executable)
        user.own(home)
        yield user
    finally:
        shutil.rmtree(directory)
