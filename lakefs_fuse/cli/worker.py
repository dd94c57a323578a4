"""Runs commands that need no mount in a child process (`daemon.admin_worker`) and shows their progress.

The child reads its request from an inherited descriptor and writes answers, JSON lines, to a pipe; it inherits standard
input only for a command that reads it. Credentials are only in the environment. The child runs in a new session, so
Ctrl-C reaches it only through this process: the first one cancels the command, as soon as the child can handle it
(`control.interrupts`), a second one kills it. When this process ends in any way, the pipe has no reader, and the child
ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import IO

import msgspec

from lakefs_fuse.cli.daemons import checked_text, locate, open_daemon
from lakefs_fuse.cli.store_options import Options, any_given, build_store
from lakefs_fuse.cli.terminal import Bar, print_json, print_text, progress_bar
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.control.interrupts import held_interrupts
from lakefs_fuse.control.supervision import encode_document, memory_file
from lakefs_fuse.control.worker_protocol import Place
from lakefs_fuse.errors import MALFORMED, ConfigError, LakeError, ReportedError
from lakefs_fuse.quantity import counted

OFFLINE: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.daemon.admin_worker")
DIAGNOSIS: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.daemon.diagnosis")
"""-P: the working directory of the user is no place to import modules from."""
END_S_MAX = 30.0
"""Time for the child to end after its last line."""


def find_place(path: str, options: Options, lake: str | None = None, *, is_lake: bool = False) -> Place:
    """The place that PATH names: a URL with store options, or a path in a mount, whose daemon knows the store.

    ``lake`` is the URL of the lake's root, if --lake gives it. ``is_lake``: PATH identifies a lake, not a file or
    directory in it. Raises LakeError, ConfigError for a path in a mount of a dataset where one is.
    """
    if "://" in path:
        store = build_store(Source.parse(path), options)
        if lake is None:
            return Place(store=store, find_root=True)
        root = Source.parse(lake)
        return Place(store=msgspec.structs.replace(store, source=root), path=_below(store.source, root, path, lake))
    if named := (lake and "--lake") or any_given(options):
        raise ConfigError(f"{named} goes with a source URL, and {path} is a path: leave {named} out")
    try:
        mountpoint, inside = locate(path)
    except LakeError as error:
        raise LakeError(
            f"{path} is not inside a mount of this program, and not a source URL: give a path in a mount, or s3://…"
        ) from error
    checked_text(inside)
    with open_daemon(mountpoint) as client:
        known = client.store()
    if known.dataset and (inside or not is_lake):
        raise ConfigError(
            f"{path} shows the dataset {known.dataset}, whose paths are not those of the lake: name the lake by its "
            f"URL, {known.store.source}"
        )
    if known.find_root:
        store = place_below(known.store, inside)
        return Place(store=store, find_root=True, mountpoint=mountpoint, lake_id=known.lake_id)
    return Place(store=known.store, path=inside, mountpoint=mountpoint, lake_id=known.lake_id)


def place_below(store: StoreConfig, path: str) -> StoreConfig:
    """``store`` with a directory below its source as the source."""
    source = store.source
    if path and source.scheme == "file":
        source = msgspec.structs.replace(source, bucket=f"{source.bucket.rstrip('/')}/{path}")
    elif path:
        source = msgspec.structs.replace(source, prefix=f"{source.prefix}{path}/")
    return msgspec.structs.replace(store, source=source)


def _below(place: Source, root: Source, path: str, lake: str) -> str:
    """``place`` relative to ``root``. Raises ConfigError."""

    def whole(source: Source) -> str:
        return f"{source}".rstrip("/") + "/"

    if not whole(place).startswith(whole(root)):
        raise ConfigError(f"{path} is not in --lake {lake}: give the SOURCE that the lake is mounted with")
    return whole(place)[len(whole(root)) :].strip("/")


def run_offline(
    command: str,
    place: Place,
    args: msgspec.Struct,
    *,
    as_json: bool = False,
    uploads_max: int = 4,
    reads_stdin: bool = False,
    show: Callable[[protocol.Row], None] | None = None,
    print_text: Callable[[str], None] = print_text,
    program: Sequence[str] = OFFLINE,
) -> int:
    """Run a command in a child, show its progress, have ``print_text`` print its summary, and return its exit code.
    With ``show`` that prints the result while it comes, without progress and summary; where it raises, the child is
    ended.

    Raises ReportedError, and LakeError where the child ended without an answer.
    """
    request = protocol.Request(
        **msgspec.structs.asdict(place),
        command=command,
        args=msgspec.Raw(encode_document(args)),
        uploads_max=uploads_max,
    )
    last = run_child(program, request, command=command, show=show, reads_stdin=reads_stdin)
    if as_json:
        print_json(last.summary)
    elif show is None:
        print_text(last.text)  # names in it are those that any client of the lake chose
    return last.exit_code


def run_child(
    program: Sequence[str],
    request: msgspec.Struct,
    *,
    command: str,
    show: Callable[[protocol.Row], None] | None = None,
    reads_stdin: bool = False,
) -> protocol.Finished:
    """Run a child that answers in the form of `worker_protocol`, and return its last answer. With ``show`` that prints
    the result while it comes; where it raises, the child is ended.

    Raises ReportedError, and LakeError where the child ended without an answer.
    """
    with ExitStack() as handlers:
        with held_interrupts():
            child = _start(program, encode_document(request), reads_stdin=reads_stdin)
            interrupts = handlers.enter_context(_interrupts_passed_on(child))
        try:
            last = _follow(child, show)
        except BaseException:
            child.terminate()
            raise
        finally:
            _end(child)
    if last is None and interrupts:
        raise ReportedError("interrupted", protocol.EXIT_INTERRUPTED)
    if last is None:
        raise LakeError(f"{command} ended without an answer (status {child.returncode}): run it again")
    if isinstance(last, protocol.Failed):
        raise ReportedError(last.message, last.exit_code)
    return last


def _start(program: Sequence[str], request: bytes, *, reads_stdin: bool) -> subprocess.Popen[bytes]:
    descriptor = memory_file(request)
    try:
        return subprocess.Popen(
            [*program, "--request-fd", str(descriptor)],
            stdin=None if reads_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


@contextmanager
def _interrupts_passed_on(child: subprocess.Popen[bytes]) -> Iterator[list[signal.Signals]]:
    """Ctrl-C interrupts the child, a second one kills it, and nothing is interrupted here; the signals that were sent,
    in a list that grows. An ignored Ctrl-C stays so."""
    sent: list[signal.Signals] = []

    def pass_on(*_: object) -> None:
        sent.append(signal.SIGKILL if sent else signal.SIGINT)
        child.send_signal(sent[-1])

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield sent
        return
    signal.signal(signal.SIGINT, pass_on)
    try:
        yield sent
    finally:
        signal.signal(signal.SIGINT, before)


def _answers(stream: IO[bytes]) -> Iterator[protocol.Answer]:
    """Until the last whole line; one of any length, as the worker holds it, too. Raises LakeError for a line that is no
    answer."""
    while (line := stream.readline()).endswith(b"\n"):
        try:
            yield protocol.decode_answer(line)
        except MALFORMED as error:
            raise LakeError(
                f"the worker sent an answer that makes no sense ({error}): run the command again"
            ) from error


def _follow(
    child: subprocess.Popen[bytes], show: Callable[[protocol.Row], None] | None
) -> protocol.Finished | protocol.Failed | None:
    """Show progress until the last answer, and return that; None where there is none."""
    assert child.stdout is not None
    # What a bar draws would be mixed with what ``show`` prints.
    with progress_bar() if show is None else nullcontext(Bar()) as bar:
        for answer in _answers(child.stdout):
            match answer:
                case protocol.Progress():
                    done = f"{answer.files_done:,} of " if answer.files_total else ""
                    files = f"{done}{counted(answer.files_total or answer.files_done, 'file')}"
                    bar.update(answer.what, answer.bytes_done, answer.bytes_total, files)
                case protocol.Note(text):
                    bar.note(f"lakefs-fuse: {text}")
                case protocol.Finished() | protocol.Failed():
                    return answer
                case _:
                    assert show is not None, "only a caller that shows them asks for rows"
                    show(answer)
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Wait for the child, whose pipe is closed, and kill it after END_S_MAX."""
    assert child.stdout is not None
    child.stdout.close()
    try:
        child.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
