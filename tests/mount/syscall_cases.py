"""A table of system calls, run on any file system by any user, to compare answers and effects.

``python syscall_cases.py DIRECTORY UID GID EVERY`` takes one in so many of the cases, makes what they need, makes one
call for each as that user, and writes as JSON what each call answered and what is there afterwards. A case is named
``CALL TARGET``. It has a directory of its own, which is the working directory of the call.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

Call: TypeAlias = "Callable[[str], object]"
State: TypeAlias = "dict[str, list[object]]"
Times: TypeAlias = "dict[str, tuple[int, int]]"

FIXED_NS = 1_000_000_000_123_456_789
DATA = b"0123456789"
PAUSE_S = 0.02
"""Beyond the granularity of any file system's clock: what changes later has other times."""


def _write(path: str, mode: int = 0o644) -> None:
    with open(path, "wb") as stream:
        stream.write(DATA)
    os.chmod(path, mode)


class Fixture:
    """Makes the target of a case, as root; what is the user's is given to the user."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid, self.gid = uid, gid

    def _give(self, *paths: str) -> None:
        for path in paths:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def file(self) -> str:
        _write("t")
        self._give("t")
        return "t"

    def file_of_root(self) -> str:
        _write("t")
        return "t"

    def setid_file(self) -> str:
        _write("t")
        self._give("t")
        os.chmod("t", 0o6775)
        return "t"

    def setid_file_of_root(self) -> str:
        _write("t", 0o6777)
        return "t"

    def locking_file(self) -> str:
        """Its setgid bit means mandatory locking: the group may not execute it."""
        _write("t")
        self._give("t")
        os.chmod("t", 0o2666)
        return "t"

    def directory(self) -> str:
        os.mkdir("t", 0o755)
        self._give("t")
        return "t"

    def full_directory(self) -> str:
        os.mkdir("t", 0o755)
        _write("t/f")
        self._give("t", "t/f")
        return "t"

    def in_directory_of_root(self) -> str:
        os.mkdir("d", 0o755)
        _write("d/t")
        self._give("d/t")
        return "d/t"

    def in_sticky_directory(self) -> str:
        os.mkdir("d")
        os.chmod("d", 0o1777)
        _write("d/t", 0o666)
        return "d/t"

    def link_to_file(self) -> str:
        _write("f")
        os.symlink("f", "t")
        self._give("f", "t")
        return "t"

    def dangling_link(self) -> str:
        os.symlink("none", "t")
        self._give("t")
        return "t"

    def loop(self) -> str:
        os.symlink("t", "t")
        self._give("t")
        return "t"

    def missing(self) -> str:
        return "t"

    def below_file(self) -> str:
        _write("f")
        self._give("f")
        return "f/t"

    def long_name(self) -> str:
        return "t" * 256

    def nothing(self) -> str:
        return ""


FIXTURES = [name for name in vars(Fixture) if not name.startswith("_")]


def _fd_call(call: Callable[[int], object], flags: int = os.O_RDWR) -> Call:
    def with_fd(path: str) -> None:
        fd = os.open(path, flags)
        try:
            call(fd)
        finally:
            os.close(fd)

    return with_fd


def _open(flags: int) -> Call:
    return lambda path: os.close(os.open(path, flags, 0o640))


def _unlinked(call: Callable[[int], object]) -> Call:
    def with_fd(path: str) -> object:
        fd = os.open(path, os.O_RDWR)
        try:
            os.unlink(path)
            call(fd)
            found = os.fstat(fd)
            return [found.st_nlink, found.st_size, stat.S_IMODE(found.st_mode)]
        finally:
            os.close(fd)

    return with_fd


def _make_full_directory() -> None:
    os.mkdir("other")
    _write("other/f")


def _onto(make: Callable[[], object]) -> Call:
    """Rename to what is there already."""

    def rename(path: str) -> None:
        os.rename(path, "other")

    rename.make = make  # type: ignore[attr-defined]
    return rename


def calls(uid: int, gid: int) -> dict[str, Call]:
    """Each takes the path of its target."""
    return {
        "chmod 0600": lambda path: os.chmod(path, 0o600),
        "chmod 0644": lambda path: os.chmod(path, 0o644),
        "chmod 7777": lambda path: os.chmod(path, 0o7777),
        "fchmod 0640": _fd_call(lambda fd: os.fchmod(fd, 0o640)),
        "chown user": lambda path: os.chown(path, uid, gid),
        "chown root": lambda path: os.chown(path, 0, 0),
        "chown nobody": lambda path: os.chown(path, -1, -1),
        "lchown other": lambda path: os.lchown(path, 1234, 4321),
        "truncate 0": lambda path: os.truncate(path, 0),
        "truncate 5": lambda path: os.truncate(path, 5),
        "truncate 10": lambda path: os.truncate(path, 10),
        "truncate 100": lambda path: os.truncate(path, 100),
        "truncate -1": lambda path: os.truncate(path, -1),
        "ftruncate 5": _fd_call(lambda fd: os.ftruncate(fd, 5)),
        "ftruncate read-only": _fd_call(lambda fd: os.ftruncate(fd, 5), os.O_RDONLY),
        "write": _fd_call(lambda fd: os.pwrite(fd, b"new", 3)),
        "mkdir": lambda path: os.mkdir(path, 0o750),
        "mkdir 7777": lambda path: os.mkdir(path, 0o7777),
        "rmdir": os.rmdir,
        "unlink": os.unlink,
        "symlink": partial(os.symlink, "any/target"),
        "readlink": os.readlink,
        "open read": _open(os.O_RDONLY),
        "open write": _open(os.O_WRONLY),
        "open create": _open(os.O_CREAT | os.O_WRONLY),
        "open exclusive": _open(os.O_CREAT | os.O_EXCL | os.O_RDWR),
        "open truncate": _open(os.O_TRUNC | os.O_WRONLY),
        "open directory": _open(os.O_DIRECTORY),
        "open nofollow": _open(os.O_NOFOLLOW),
        "open append": _open(os.O_APPEND | os.O_RDWR),
        "utimensat now": os.utime,
        "utimensat set": lambda path: os.utime(path, ns=(FIXED_NS, FIXED_NS)),
        "utimensat nofollow": lambda path: os.utime(path, ns=(FIXED_NS, FIXED_NS), follow_symlinks=False),
        "rename": lambda path: os.rename(path, "new"),
        "rename to itself": lambda path: os.rename(path, path),
        "rename below itself": lambda path: os.rename(path, path + "/below"),
        "rename onto file": _onto(lambda: _write("other")),
        "rename onto directory": _onto(lambda: os.mkdir("other")),
        "rename onto full directory": _onto(_make_full_directory),
        "rename file onto": lambda path: os.rename("other", path),
        "fstat unlinked": _unlinked(lambda fd: None),
        "fchmod unlinked": _unlinked(lambda fd: os.fchmod(fd, 0o600)),
        "ftruncate unlinked": _unlinked(lambda fd: os.ftruncate(fd, 5)),
    }


def _walk(top: str) -> list[str]:
    found = []
    for at, directories, files in os.walk(top):
        found += [os.path.join(at, name) for name in (*directories, *files)]
    return [top, *sorted(found)]


def state(top: str) -> State:
    """Type, permissions, owner; of what is no directory also size and links."""
    found: State = {}
    for path in _walk(top):
        at = os.lstat(path)
        mode = "" if stat.S_ISLNK(at.st_mode) else f"{stat.S_IMODE(at.st_mode):04o}"
        found[os.path.relpath(path, top)] = [stat.filemode(at.st_mode)[0], mode, at.st_uid, at.st_gid]
        if not stat.S_ISDIR(at.st_mode):
            found[os.path.relpath(path, top)] += [at.st_size, at.st_nlink]
    return found


def times(top: str) -> Times:
    """mtime and ctime in ns, by inode, as names change."""
    found: Times = {}
    for path in _walk(top):
        at = os.lstat(path)
        found[str(at.st_ino)] = at.st_mtime_ns, at.st_ctime_ns
    return found


def moved(top: str, before: Times) -> dict[str, str]:
    """Which of its times moved, of what was there before."""
    found = {}
    for path in _walk(top):
        at = os.lstat(path)
        then = before.get(str(at.st_ino))
        if then is not None:
            mtime, ctime = at.st_mtime_ns != then[0], at.st_ctime_ns != then[1]
            found[os.path.relpath(path, top)] = " ".join((["mtime"] if mtime else []) + (["ctime"] if ctime else []))
    return found


def _answer(call: Call, path: str) -> object:
    try:
        answer = call(path)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "0" if answer is None else answer


def run(top: str, uid: int, gid: int, every: int) -> dict[str, object]:
    """One in so many of the cases, each call made by the user."""
    fixture = Fixture(uid, gid)
    os.umask(0o022)
    table = [(f"{name} {target}", call, target) for name, call in calls(uid, gid).items() for target in FIXTURES]
    table = table[::every]
    paths: dict[str, str] = {}
    for number, (case, call, target) in enumerate(table):
        os.chdir(top)
        os.mkdir(str(number))
        os.chown(str(number), uid, gid)
        os.chdir(str(number))
        paths[case] = getattr(fixture, target)()
        if make := getattr(call, "make", None):
            make()
            os.chown("other", uid, gid)
        elif case.startswith("rename file onto"):
            _write("other")
            os.chown("other", uid, gid)
    time.sleep(PAUSE_S)
    before = {}
    for number, (case, _, _) in enumerate(table):
        before[case] = times(os.path.join(top, str(number)))
    os.chdir(top)
    here = os.open(".", os.O_RDONLY)
    answers: dict[str, object] = {}
    was_root = os.geteuid() == 0
    if was_root:
        os.setgroups([])
        os.setresgid(gid, gid, 0)
        os.setresuid(uid, uid, 0)
    for number, (case, call, _) in enumerate(table):
        os.fchdir(here)
        os.chdir(str(number))
        answers[case] = _answer(call, paths[case])
    if was_root:  # to look at all of it
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
    found: dict[str, object] = {}
    for number, (case, _, _) in enumerate(table):
        directory = os.path.join(top, str(number))
        found[case] = {"answer": answers[case], "state": state(directory), "moved": moved(directory, before[case])}
    return found


if __name__ == "__main__":
    json.dump(run(sys.argv[1], *map(int, sys.argv[2:])), sys.stdout)
