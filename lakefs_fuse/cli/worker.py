"""Runs commands that need no mount in a child process (`daemon.admin_worker`) and shows their progress.

The request goes over an inherited descriptor, the answers come as JSON lines over a pipe; standard input is passed on
only to a command that reads it. Credentials are only ever in the environment. The child is a session of its own, so
that Ctrl-C reaches it once, from here: it cleans up and says so; a second Ctrl-C kills it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import click
import msgspec

from lakefs_fuse.cli.daemons import locate, open_daemon
from lakefs_fuse.cli.progress import progress_bar
from lakefs_fuse.cli.store_options import StoreOptions, any_given, build_store
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.errors import ConfigError, LakeError

OFFLINE: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.daemon.admin_worker")
"""-P: the directory in which a user happens to be is not where modules come from."""
END_S_MAX = 30.0
"""How long the child may take to end after its last line."""


class OfflineFailed(LakeError):
    """The child's own error, with the exit code it chose."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a lake a command works: the fields of a `protocol.Request`."""

    store: StoreConfig
    path: str = ""
    find_root: bool = False
    mountpoint: str = ""
    """Where PATH is in a mount."""


def find_place(path: str, options: StoreOptions, lake: str | None = None) -> Place:
    """What PATH means: a source URL with the options of a store, or a path in a mount, whose daemon knows the rest.

    ``lake`` is the URL of the lake's root where the user gave it. Raises LakeError.
    """
    if "://" in path:
        store = build_store(Source.parse(path), options)
        if lake is None:
            return Place(store=store, find_root=True)
        root = Source.parse(lake)
        return Place(store=msgspec.structs.replace(store, source=root), path=_below(store.source, root, path, lake))
    if named := (lake and "--lake") or any_given(options):
        raise ConfigError(f"{named} goes with a source URL; {path} is a path, whose mount knows its store")
    try:
        mountpoint, inside = locate(path)
    except LakeError as error:
        raise LakeError(f"{path} is neither inside a mount of this program nor a source URL such as s3://…") from error
    try:
        inside.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path!r}: names in a lake are UTF-8") from error
    with open_daemon(mountpoint) as client:
        known = client.store()
    if known.find_root:
        return Place(store=place_below(known.store, inside), find_root=True, mountpoint=mountpoint)
    return Place(store=known.store, path=inside, mountpoint=mountpoint)


def place_below(store: StoreConfig, path: str) -> StoreConfig:
    """The same with a directory of it as the source."""
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
        raise ConfigError(f"{path} is not in --lake {lake}")
    return whole(place)[len(whole(root)) :].strip("/")


def run_offline(
    command: str,
    place: Place,
    args: msgspec.Struct,
    *,
    as_json: bool = False,
    uploads_max: int = 4,
    reads_stdin: bool = False,
    program: Sequence[str] = OFFLINE,
) -> int:
    """Run it, with a progress bar where standard error is a terminal; print its summary; answer the exit code.

    Raises OfflineFailed, and LakeError where the child ended without a word.
    """
    request = protocol.Request(
        command=command,
        store=place.store,
        path=place.path,
        find_root=place.find_root,
        args=msgspec.Raw(msgspec.json.encode(args)),
        uploads_max=uploads_max,
    )
    child = _start(program, protocol.encode(request), reads_stdin=reads_stdin)
    try:
        last = _follow(child)
    finally:
        _end(child)
    if last is None:
        raise LakeError(f"{command} ended without a word (status {child.returncode})")
    if isinstance(last, protocol.Failed):
        raise OfflineFailed(last.message, last.exit_code)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(last.summary), indent=2).decode())
    else:
        click.echo(last.text)
    return last.exit_code


def _start(program: Sequence[str], request: bytes, *, reads_stdin: bool) -> subprocess.Popen[bytes]:
    descriptor = os.memfd_create("lakefs-fuse-request", 0)
    try:
        os.write(descriptor, request)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return subprocess.Popen(
            [*program, "--request-fd", str(descriptor)],
            stdin=None if reads_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


class _Lines:
    """Answers out of a pipe. Not a generator: Ctrl-C in the midst of a read loses nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()

    def next_answer(self) -> protocol.Answer | None:
        """None at the end. Raises LakeError for what is no answer."""
        while (end := self._buffer.find(b"\n")) < 0:
            piece = os.read(self._descriptor, 1 << 16)
            if not piece or len(self._buffer) > protocol.LINE_BYTES_MAX:
                return None
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return protocol.decode_answer(line)
        except msgspec.DecodeError as error:
            raise LakeError(f"an answer that makes no sense ({error})") from error


def _follow(child: subprocess.Popen[bytes]) -> protocol.Finished | protocol.Failed | None:
    """Show what it says until its last line, which is answered. Ctrl-C is passed on; twice kills."""
    assert child.stdout is not None
    lines = _Lines(child.stdout.fileno())
    interrupted = False
    with progress_bar() as bar:
        while True:
            try:
                answer = lines.next_answer()
                match answer:
                    case protocol.Progress():
                        of = f" of {answer.files_total:,}" if answer.files_total else ""
                        files = f"{answer.files_done:,}{of} files"
                        bar.update(answer.what, answer.bytes_done, answer.bytes_total, files)
                    case protocol.Note(text):
                        bar.note(f"lakefs-fuse: {text}")
                    case _:
                        return answer
            except KeyboardInterrupt:
                child.send_signal(signal.SIGKILL if interrupted else signal.SIGINT)
                interrupted = True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Its exit, gently first. A child that still works sees its pipe closed and ends."""
    assert child.stdout is not None
    child.stdout.close()
    try:
        child.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
