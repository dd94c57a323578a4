"""A local directory as a source of `ingest`: walked in an order that keeps neighbours together.

The caller's thread reads the files while that is fast, as from the page cache and from NVMe, because passing them
between threads costs half as much again. Where reading is slow, threads read ahead for a while.

A directory comes before its contents, names in order (of each CHUNK names, so that a directory of millions is never in
memory as a whole). A file that vanishes or cannot be read is refused by name.

What always holds (*no link followed*): everything is opened by its name in an open directory, so nothing outside the
root is read, whatever others make of the tree meanwhile. The root itself may be a symbolic link.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator
from itertools import islice
from queue import SimpleQueue

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.ingest.source import (
    Attributes,
    Bytes,
    Changed,
    Content,
    Directory,
    File,
    Item,
    Link,
    Refused,
    Source,
    SourceError,
    attributes,
    link_refusal,
    refusal,
)
from lakefs_fuse.store.protocol import FileSlice

BATCH = 16
"""Files that one thread reads."""
BATCHES_MAX = 6
"""Batches that are read ahead, each in a thread, until they are asked for."""
SLOW_S = 0.0005
"""A mean time to read a file at which reading ahead pays off."""
SLOW_BATCHES = 128
"""Number of batches for which reading counts as slow."""
SMALL_BYTES_MAX = 256 << 10
"""Maximum size of a file that is read ahead; a larger one is only opened."""
CHUNK = 10_000


class FileContent(Content):
    """Content of a file of the source, which is open."""

    def __init__(self, fd: int, status: os.stat_result) -> None:
        self._fd = fd
        self._status = status
        self.size = status.st_size

    def read(self, offset: int, length: int) -> FileSlice:
        return FileSlice(self._fd, offset, length)

    def check(self) -> None:
        _check_same(self._status, os.fstat(self._fd))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _check_same(before: os.stat_result, after: os.stat_result) -> None:
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise Changed("it was changed while it was read")


class TreeSource(Source):
    """A local directory."""

    links = False

    def __init__(self, root: str, clock: Clock, threads: Threads) -> None:
        self._root = root
        self._clock, self._threads = clock, threads
        self._pending: deque[SimpleQueue[list[Item] | BaseException]] = deque()
        """Batches that are read ahead; each queue gets one answer."""

    def interrupt(self) -> None:
        """Nothing: reading a batch is short."""

    def close(self) -> None:
        while self._pending:
            answer = self._pending.popleft().get()
            if not isinstance(answer, BaseException):
                _close_all(answer)

    def count(self) -> tuple[int, int] | None:
        files = size = 0
        for _, entry, _ in _walk(self._root):
            try:
                if isinstance(entry, os.DirEntry) and entry.is_file(follow_symlinks=False):
                    files, size = files + 1, size + entry.stat(follow_symlinks=False).st_size
            except OSError:
                continue
        return files, size

    def items(self) -> Iterator[Item]:
        try:
            status = os.stat(self._root)
        except OSError as error:
            raise SourceError(f"{self._root} cannot be read: {error.strerror}") from error
        yield Directory("", _attributes(status))
        for batch in self._batches(_walk(self._root)):
            ready = deque(batch)
            try:
                while ready:
                    yield ready.popleft()
            finally:
                _close_all(ready)

    def _batches(self, walk: Iterator[Found]) -> Iterator[list[Item]]:
        ahead = 0
        while batch := list(islice(walk, BATCH)):
            if ahead:
                ahead -= 1
                self._begin_reading(batch)
                if len(self._pending) >= BATCHES_MAX:
                    yield self._next_read()
                continue
            while self._pending:
                yield self._next_read()
            began = self._clock.mono_s()
            items = _read_batch(batch)
            if self._clock.mono_s() - began > SLOW_S * len(batch):
                ahead = SLOW_BATCHES
            yield items
        while self._pending:
            yield self._next_read()

    def _begin_reading(self, batch: list[Found]) -> None:
        answers: SimpleQueue[list[Item] | BaseException] = SimpleQueue()

        def read() -> None:
            try:
                answers.put(_read_batch(batch))
            except BaseException as error:
                answers.put(error)

        try:
            self._threads.start(read, "ingest-read")
        except RuntimeError:  # no more threads
            read()
        self._pending.append(answers)

    def _next_read(self) -> list[Item]:
        answer = self._pending.popleft().get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class _OpenDirectory:
    """A directory, which is closed when nothing refers to it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


Found = tuple[str, "os.DirEntry[str] | str", _OpenDirectory | None]
"""A path, its entry or the reason why it cannot be read, and the directory that the entry is in."""


def _walk(root: str) -> Iterator[Found]:
    """Everything below, parents first; nothing below a name that no lake can have."""
    stack: list[Iterator[Found]] = [_names("", root)]
    while stack:
        found = next(stack[-1], None)
        if found is None:
            stack.pop()
            continue
        path, entry, directory = found
        if isinstance(entry, str):
            yield found
            continue
        try:
            is_dir = entry.is_dir(follow_symlinks=False)  # asks the disk where listings do not tell
        except OSError as error:
            yield path, f"cannot be read: {error.strerror}", None
            continue
        yield found
        if is_dir and not refusal(path):
            stack.append(_names(path, entry.name, directory))


def _names(path: str, name: str, above: _OpenDirectory | None = None) -> Iterator[Found]:
    """What is in the directory ``name``, of the directory ``above`` where that is given."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        if above is None:
            directory = _OpenDirectory(os.open(name, flags))
        else:
            directory = _OpenDirectory(os.open(name, flags | os.O_NOFOLLOW, dir_fd=above.fd))
        with os.scandir(directory.fd) as entries:
            while chunk := sorted(islice(entries, CHUNK), key=lambda entry: entry.name):
                for entry in chunk:
                    yield (f"{path}/{entry.name}" if path else entry.name), entry, directory
    except OSError as error:
        yield path or ".", f"cannot be listed: {error.strerror}", None


def _read_batch(batch: list[Found]) -> list[Item]:
    items: list[Item] = []
    try:
        for path, entry, directory in batch:
            items.append(_read(path, entry, directory))
    except BaseException:
        _close_all(items)
        raise
    return items


def _read(path: str, entry: os.DirEntry[str] | str, directory: _OpenDirectory | None) -> Item:
    if isinstance(entry, str) or directory is None:
        return Refused(path, str(entry))
    try:
        is_dir = entry.is_dir(follow_symlinks=False)
        if why := refusal(path):
            return Refused(path, why + (", left out with all below it" if is_dir else ""))
        if entry.is_file(follow_symlinks=False):
            return _read_file(path, entry.name, directory)
        status = entry.stat(follow_symlinks=False)
        if is_dir:
            return Directory(path, _attributes(status))
        if not stat.S_ISLNK(status.st_mode):
            return Refused(path, "neither a file, a directory nor a symbolic link", special=True)
        target = os.readlink(entry.name, dir_fd=directory.fd)
        return Refused(path, why) if (why := link_refusal(target)) else Link(path, _attributes(status), target)
    except Changed as error:
        return Refused(path, str(error))
    except OSError as error:
        return Refused(path, f"cannot be read: {error.strerror}")


def _read_file(path: str, name: str, directory: _OpenDirectory) -> File:
    # Not blocking, should a fifo have taken the file's place.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory.fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Changed("it was replaced while it was read")
        if status.st_size > SMALL_BYTES_MAX:
            content = FileContent(fd, status)
            fd = -1
            return File(path, _attributes(status), content)
        data = os.read(fd, status.st_size + 1)
        if len(data) != status.st_size:
            raise Changed("it was changed while it was read")
        _check_same(status, os.fstat(fd))
        return File(path, _attributes(status), Bytes(data))
    finally:
        if fd >= 0:
            os.close(fd)


def _attributes(status: os.stat_result) -> Attributes:
    return attributes(status.st_mode, status.st_mtime_ns, status.st_uid, status.st_gid)


def _close_all(items: list[Item] | deque[Item]) -> None:
    for item in items:
        if isinstance(item, File):
            item.content.close()
