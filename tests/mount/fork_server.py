"""Runs the program in forks of a process that has imported it: half of the CPU time of a mount is imports.

`ForkServer.run` is `subprocess.run` of the command line, captured. The server forks for each command, and that process
forks instead of starting `python -P -m lakefs_fuse…`: a daemon, a worker, or a supervisor, which forks its daemons.
Everything else of `subprocess.Popen` and `os.posix_spawn` is as it was. What is not the same: modules that a program
would not have loaded are there, ``/proc/PID/cmdline`` is the server's, and an upload has smaller parts (`PART_BYTES`),
because bytes are most of the cost of a large file. `make test-long` starts the program itself
(`tiers.IS_LONG`), and so do tests that change what an import depends on (`IMPORT_PREFIXES`) or the command. A test that
changes the program itself has `PATCH`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

PACKAGE = "lakefs_fuse"
FIRST = ("lakefs_fuse.kernel.session", "rocksdict", "obstore.store")
"""The first loads a C library before pyfuse3; the others are loaded by functions."""
START = [sys.executable, "-P", "-m"]
FORKED = (
    "lakefs_fuse.daemon.mount_daemon",
    "lakefs_fuse.daemon.admin_worker",
    "lakefs_fuse.daemon.diagnosis",
    "lakefs_fuse.daemon.supervisor",
)
IMPORT_PREFIXES = ("LAKEFS_", "LD_", "PYTHON")
"""Variables that modules and the interpreter look at when they are loaded."""
PATCH = "LAKEFS_TEST_PATCH"
"""Variable with Python source that a command runs first; so a daemon that it forks has run it, too."""
READ_LATER = frozenset({"LAKEFS_CLUSTER_CACHE_TOKEN", "LAKEFS_HINTS_PASSWORD", PATCH})
"""Variables with such a prefix that the program reads when it runs."""
REQUEST_BYTES_MAX = 1 << 18
PART_BYTES = 8 << 20
"""The first parts of an upload in a fork: a multiple of the cache's block, and no less than S3 takes (5 MiB)."""
STANDARD = ((0, "r"), (1, "w"), (2, "w"))
"""Descriptors and how they are opened."""


def of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in environment if name.startswith(IMPORT_PREFIXES) and name not in READ_LATER)
    return {name: environment[name] for name in names}


class ForkServer:
    """The client's side; the server ends when the client does."""

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        """``variables`` are its environment, but for credentials."""
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        environment = {name: value for name, value in variables.items() if not name.startswith(("AWS_", "XDG_"))}
        self._of_imports = of_imports(environment)
        with other:
            self._server = subprocess.Popen(
                [sys.executable, "-P", __file__, str(other.fileno())],
                pass_fds=[other.fileno()], env=environment, cwd="/", stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @classmethod
    @functools.cache
    def of_this_process(cls) -> ForkServer:
        """Started when it is needed first."""
        server = cls()
        atexit.register(server.close)
        return server

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with these variables would load the modules that the server has."""
        return of_imports(environment) == self._of_imports

    def run(
        self, args: Sequence[str], environment: Mapping[str, str], timeout_s: float, directory: str = "/"
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` with captured text, in ``directory``."""
        reading, writing = os.pipe()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, open(reading, "rb") as answers:
            request = json.dumps([list(args), dict(environment), directory]).encode()
            descriptors = array.array("i", [output.fileno(), errors.fileno(), writing])
            self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            os.close(writing)
            pid = int(answers.readline())
            if not select.select([answers], [], [], timeout_s)[0]:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(args), timeout_s)
            code = int(answers.readline() or -signal.SIGKILL)
            for file in (output, errors):
                file.seek(0)
            return subprocess.CompletedProcess(list(args), code, output.read().decode(), errors.read().decode())

    def close(self) -> None:
        self._socket.close()
        self._server.wait()


# -- the server


class ForkedPopen(subprocess.Popen[Any]):
    """Forks where a module of the program would be started by an interpreter of its own."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        (_, pass_fds, cwd, env, _, _, _), pipes, (*_, start_new_session, _) = more[:7], more[7:13], more[13:]
        if [*args[:3]] != START or args[3] not in FORKED or env is not None or cwd is not None:
            super()._execute_child(args, executable, preexec_fn, *more)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            run_child([pipes[0], pipes[3], pipes[5]], pass_fds, lambda: run_module(args[3], args[4:]))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


posix_spawn = os.posix_spawn
handlers_of_the_parent: list[logging.Handler] = []
"""Kept, because one that is collected closes its descriptor, which may be another file's by then."""


def fork_or_spawn(
    path: Any, argv: Any, env: Any, *, file_actions: Any = (), setsid: bool = False, **options: Any
) -> int:
    """As `os.posix_spawn`, by which a supervisor starts daemons; the actions are those of POSIX_SPAWN_DUP2."""
    if [*argv[:3]] != START or argv[3] not in FORKED or options:
        return posix_spawn(path, argv, env, file_actions=file_actions, setsid=setsid, **options)
    pid = os.fork()
    if pid == 0:
        if setsid:
            os.setsid()
        be_spawned(argv, env, file_actions)
    return pid


def be_spawned(argv: Sequence[str], env: Mapping[str, str], file_actions: Sequence[tuple[int, int, int]]) -> NoReturn:
    sources = {target: descriptor for _, descriptor, target in file_actions}
    kept = [descriptor for descriptor in map(int, os.listdir("/proc/self/fd")) if is_inheritable(descriptor)]
    handlers_of_the_parent.extend(logging.root.handlers)
    logging.root.handlers.clear()
    os.environ.clear()
    os.environ.update(env)
    run_child([sources.get(target, -1) for target in range(3)], kept, lambda: run_module(argv[3], argv[4:]))


def is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # that of the listing itself
        return False


def run_child(standard: Sequence[int], kept: Collection[int], body: Callable[[], int]) -> NoReturn:
    """Be the program from here on: with these descriptors as the standard ones (-1: as they are), and those kept."""
    code = 1
    try:
        for target, descriptor in enumerate(standard):
            if descriptor != -1:
                os.dup2(descriptor, target)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in kept:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, *filter(is_handled, signal.valid_signals())):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, 1, closefd=False) for number, mode in STANDARD)
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def is_handled(signum: int) -> bool:
    """By a function of Python, which a program that is started would not have."""
    return callable(signal.getsignal(signum)) and not isinstance(signal.getsignal(signum), signal.Handlers)


def run_module(name: str, args: Sequence[str]) -> int:
    """As ``python -m`` does. The exit code."""
    sys.argv = [name, *args]
    sys.modules.pop(name, None) if name != PACKAGE else None
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def answer(args: list[str], environment: dict[str, str], directory: str, descriptors: list[int]) -> NoReturn:
    """In a fork: run one command, and say its process id and its exit code."""
    output, errors, answers = descriptors
    os.write(answers, b"%d\n" % os.getpid())

    def command() -> int:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        exec(os.environ.pop(PATCH, ""), {})
        code = run_module(PACKAGE, args)
        sys.stdout.flush()
        os.write(answers, b"%d\n" % code)
        return code

    run_child([-1, output, errors], [answers], command)


def load() -> None:
    """Import all of the program, and nothing that starts a thread."""
    make_parts_small()
    for name in FIRST:
        importlib.import_module(name)
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        if not module.name.rpartition(".")[2].startswith("_"):  # neither `__main__` nor the C library
            importlib.import_module(module.name)
    parse_service_files()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread only"
    gc.freeze()


def make_parts_small() -> None:
    """Before any other module has taken the sizes from this one."""
    from lakefs_fuse.staging import part_layout

    (_, count), *others = part_layout.SPANS
    part_layout.SPANS = ((PART_BYTES, count), *others)  # type: ignore[assignment]
    part_layout.PartLayout.__init__.__defaults__ = (part_layout.SPANS,)


def parse_service_files() -> None:
    """What the program keeps for its next S3 client: half of the CPU time of a mount on S3."""
    from lakefs_fuse.config import Source, StoreConfig
    from lakefs_fuse.environment.clock import SystemClock
    from lakefs_fuse.store.s3.access import connect

    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")  # or it would look for them on the network
    os.environ.update(dict.fromkeys(names, "none"))
    connect(StoreConfig(source=Source.parse("s3://bucket"), endpoint_url="http://127.0.0.1:9"), SystemClock())


def serve(requests: socket.socket) -> None:
    load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the forks: they say how they end.
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    os.posix_spawn = fork_or_spawn
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            args, environment, directory = json.loads(request)
            answer(args, environment, directory, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
