"""A tar stream as a source of `ingest`: in any compression that Python's tarfile reads, never sought in.

What always holds (*no silent end*): a stream that is cut short is an error, also between two members, which tarfile
itself takes for the end; and so is one whose compressed bytes do not match their checksum, which tarfile does not
compare for gzip. That shows at the end of what was compressed, when packs of it may be stored. Memory holds one file of
up to `pack_filler.PACK_BYTES`, or a part of a larger one.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import os
import re
import select
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from decimal import Decimal, InvalidOperation
from typing import IO, TYPE_CHECKING, Literal

from lakefs_fuse.ingest.source import (
    Attributes,
    Content,
    Directory,
    File,
    HardLink,
    Item,
    Link,
    Refused,
    Source,
    SourceError,
    attributes,
    link_refusal,
    refusal,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

READ_BYTES = 1 << 20
MAGIC_BYTES = 10
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_READERS: tuple[tuple[re.Pattern[bytes], Callable[[IO[bytes]], io.BufferedIOBase]], ...] = (
    (re.compile(rb"\x1f\x8b\x08"), gzip.open),
    (re.compile(rb"BZh.1AY&SY", re.DOTALL), bz2.open),
    (re.compile(rb"\xfd7zXZ|\x5d\x00\x00\x80"), lzma.open),
)
"""How a compressed stream begins, and what reads it: all its members, of which there may be several, with their
checksums. `tarfile` itself reads one, and compares no checksum of gzip."""
NS = 1_000_000_000


class _Info(tarfile.TarInfo):
    """A header that reports what tarfile hides: that the stream did not end with the mark of its end."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _Info:
        try:
            return super().fromtarfile(tarfile)
        except Exception as error:
            if tarfile.offset and type(error).__name__ in ("EmptyHeaderError", "TruncatedHeaderError"):
                raise SourceError("it ends without the mark of its end: it is cut short") from error
            if tarfile.offset and type(error).__name__ == "InvalidHeaderError":
                raise SourceError(f"it is damaged after {tarfile.offset} bytes") from error
            raise


class _Member(Content):
    """Content of the current member of the stream."""

    def __init__(self, file: IO[bytes], size: int, name: str) -> None:
        self._file = file
        self._name = name
        self.size = size

    def read(self, offset: int, length: int) -> bytes:
        with _damage(self._name):
            data = self._file.read(length)
        if len(data) != length:
            raise SourceError(f"{self._name}: it ends in the midst of a file: it is cut short")
        return data

    def close(self) -> None:
        self._file.close()


@contextmanager
def _damage(name: str) -> Iterator[None]:
    try:
        yield
    except SourceError as error:
        raise SourceError(f"{name}: {error}") from error
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError) as error:
        raise SourceError(f"{name}: not a tar archive, or damaged: {error}") from error


class TarSource(Source):
    """A tar stream; owns the descriptor."""

    links = True

    def __init__(self, fd: int, name: str) -> None:
        self._raw = _Interruptible(fd)
        self._stream = io.BufferedReader(self._raw, READ_BYTES)
        self._name = name

    def interrupt(self) -> None:
        self._raw.interrupt()

    def close(self) -> None:
        self._stream.close()

    def items(self) -> Iterator[Item]:
        with _damage(self._name):
            start = self._raw.peek(MAGIC_BYTES)
        if start.startswith(ZSTD_MAGIC) and not hasattr(tarfile.TarFile, "zstopen"):
            raise SourceError(
                f"{self._name} is compressed with zstd, which this Python cannot read: pipe it in, "
                "`zstd -dc FILE | lakefs-fuse ingest - PATH`"
            )
        for begin, open_compressed in _READERS:
            if begin.match(start):
                with closing(open_compressed(self._stream)) as stream:
                    yield from self._members(stream, "r|")
                    with _damage(self._name):
                        while stream.read(READ_BYTES):  # the checksum is at the end
                            pass
                return
        yield from self._members(self._stream, "r|*")

    def _members(self, stream: io.BufferedIOBase, mode: Literal["r|", "r|*"]) -> Iterator[Item]:
        with _damage(self._name):
            archive = tarfile.open(  # noqa: SIM115  # closed below
                fileobj=stream,
                mode=mode,
                bufsize=READ_BYTES,
                tarinfo=_Info,
                encoding="utf-8",
                errors="surrogateescape",
            )
        try:
            while True:
                with _damage(self._name):
                    info = archive.next()
                if info is None:
                    return
                # tarfile would remember every member.
                vars(archive)["members"].clear()
                yield self._item(archive, info)
        finally:
            archive.close()

    def _item(self, archive: tarfile.TarFile, info: tarfile.TarInfo) -> Item:
        path, why = _path(info.name)
        if not path and not why:
            return Directory("", _attributes(info)) if info.isdir() else Refused(info.name, "not a path")
        if why:
            return Refused(info.name, why)
        about = _attributes(info)
        if info.isdir():
            return Directory(path, about)
        if info.issym():
            why = link_refusal(info.linkname)
            return Refused(info.name, why) if why else Link(path, about, info.linkname)
        if info.islnk():
            target, why = _path(info.linkname)
            return (
                Refused(info.name, f"a hard link to {info.linkname}: {why or 'not a file'}")
                if (why or not target)
                else HardLink(path, about, target)
            )
        if not info.isfile():
            return Refused(info.name, "neither a file, a directory nor a link", special=True)
        with _damage(self._name):
            file = archive.extractfile(info)
        if file is None:
            return Refused(info.name, "a file without bytes")
        return File(path, about, _Member(file, info.size, self._name))


class _Interruptible(io.RawIOBase):
    """A descriptor whose reader can be interrupted, because a pipe may stay silent for any time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._woken = os.eventfd(0, os.EFD_CLOEXEC)
        self._peeked = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if self._peeked:
            target = memoryview(buffer)
            piece, self._peeked = self._peeked[: len(target)], self._peeked[len(target) :]
            target[: len(piece)] = piece
            return len(piece)
        return self._receive(buffer)

    def peek(self, size: int) -> bytes:
        """The first bytes of the stream, which are read again later; fewer where it ends before."""
        data = bytearray(size)
        while len(self._peeked) < size and (count := self._receive(memoryview(data)[len(self._peeked) :])):
            self._peeked = bytes(data[: len(self._peeked) + count])
        return self._peeked

    def _receive(self, buffer: WriteableBuffer) -> int:
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        waiting.register(self._woken, select.POLLIN)
        if any(fd == self._woken for fd, _ in waiting.poll()):
            raise SourceError("interrupted")
        return os.readv(self._fd, [buffer])

    def interrupt(self) -> None:
        """Make this and all later reads fail. In any thread, before `close`."""
        os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
            os.close(self._woken)
        super().close()


def _path(name: str) -> tuple[str, str]:
    """The path of a member in the lake (empty for the root), or the reason why it has none."""
    if name.startswith("/"):
        return "", "absolute"
    path = "/".join(component for component in name.split("/") if component not in ("", "."))
    return path, refusal(path) if path else ""


def _attributes(info: tarfile.TarInfo) -> Attributes:
    mtime_ns = 0
    if math.isfinite(info.mtime):  # else it has a million digits, perhaps
        mtime_ns = int(info.mtime) * NS
        with suppress(KeyError, InvalidOperation, ValueError):  # as a float it has lost the nanoseconds
            mtime_ns = int(Decimal(info.pax_headers["mtime"]) * NS)
    return attributes(stat.S_IMODE(info.mode), mtime_ns, info.uid, info.gid)
