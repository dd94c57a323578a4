"""Checkpoints of ``torch.distributed.checkpoint`` (DCP; FSDP writes them, too): what is in them, and their bytes.

A directory has ``.metadata``, a pickle that says which chunk of which tensor lies where, and files of shards. A chunk
is a file of ``torch.save`` inside one of these: a ZIP archive whose member ``data/0`` has the bytes. No code of a
pickle runs (`torch_pickle`), and torch is not needed.

What always holds: memory is bounded by `SLAB_BYTES` and the directory of one chunk, whatever the size of a tensor;
bytes are answered only if their chunks cover the tensor once, and all of a chunk has its CRC-32, unless torch was told
to compute none (``torch.serialization.set_crc32_options``): then that of every member is 0. Blocking, one thread.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from lakefs_fuse.checkpoints.torch_pickle import DTYPE_BYTES, WITH_TORCH, Dtype, Strided, is_plain, load
from lakefs_fuse.errors import LakeError

METADATA = ".metadata"
METADATA_BYTES_MAX = 1 << 30
SLAB_BYTES = 8 << 20
FILES_OPEN_MAX = 32
BROKEN = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, KeyError, ValueError, RuntimeError, OverflowError,
)  # fmt: skip
"""What `zipfile` raises for an archive that is damaged, encrypted, or of a kind that it does not read."""
_LOCAL = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item lies: bytes [offset, offset + length) of a file of shards."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor: the box of ``sizes`` at ``offsets``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """``path`` are the keys in nested dictionaries, and positions in lists, that lead to it."""

    name: str
    path: tuple[str | int, ...]
    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardedObject:
    """Anything that is not a tensor."""

    name: str
    path: tuple[str | int, ...]
    place: Place


class ShardedCheckpoint:
    """See the module's head."""

    def __init__(self, directory: Path) -> None:
        """Raises LakeError where it is no such checkpoint."""
        self._directory = directory
        self._files: dict[str, BinaryIO] = {}
        self.tensors: list[ShardedTensor] = []
        self.objects: list[ShardedObject] = []
        path = directory / METADATA
        try:
            with path.open("rb") as file:
                raw = file.read(METADATA_BYTES_MAX + 1)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise LakeError(
                f"{directory} is no checkpoint of torch.distributed.checkpoint: it has no {METADATA}"
            ) from error
        except OSError as error:
            raise LakeError(f"{path}: {error.strerror}") from error
        if len(raw) > METADATA_BYTES_MAX:
            raise LakeError(f"{path} has more than {METADATA_BYTES_MAX >> 20} MiB")
        try:
            self._read_metadata(load(raw))
        except LakeError as error:
            raise LakeError(f"{path}: {error}") from error
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise LakeError(f"{path} is not as torch writes it: {error!r}") from error

    def __enter__(self) -> ShardedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def _read_metadata(self, metadata: Any) -> None:
        places: dict[tuple[str, tuple[int, ...]], Place] = {}
        for index, info in metadata.storage_data.items():
            if getattr(info, "__dict__", {}).get("transform_descriptors"):
                raise LakeError(f"{index.fqn} is compressed or encrypted: read it with torch")
            place = Place(_inside(info.relative_path), int(info.offset), int(info.length))
            places[index.fqn, tuple(vars(index).get("offset") or ())] = place
        paths = metadata.planner_data or {}
        for name, item in metadata.state_dict_metadata.items():
            path = tuple(paths.get(name) or (name,))
            if not all(isinstance(key, str | int) for key in path):
                raise LakeError(f"{name} lies at {path}, which has keys that are neither text nor numbers")
            if item.name.endswith(".BytesStorageMetadata"):
                self.objects.append(ShardedObject(name, path, places[name, ()]))
                continue
            size, dtype = tuple(item.size), _dtype(item.properties)
            chunks = tuple(
                Chunk(tuple(each.offsets), tuple(each.sizes), places[name, tuple(each.offsets)]) for each in item.chunks
            )
            _check_cover(name, size, chunks)
            self.tensors.append(ShardedTensor(name, path, dtype.name, size, chunks))

    # -- bytes

    def value(self, item: ShardedObject) -> Any:
        """Raises LakeError, for a value that is not plain, too."""
        try:
            archive, pickled = self._archive(item.place)
            value = load(archive.read(pickled))
        except LakeError as error:
            raise LakeError(f"{item.name}: {error}") from error
        except BROKEN as error:
            raise LakeError(f"{item.name} in {item.place.file} cannot be read: {error}") from error
        if not is_plain(value):
            raise LakeError(f"{item.name} holds a {type(value).__name__}, which only its own program can read")
        return value

    def read(self, tensor: ShardedTensor) -> Iterator[memoryview]:
        """The bytes of a tensor in row-major order, in pieces that are valid until the next one. Raises LakeError."""
        boxes = [self._box(tensor, chunk) for chunk in tensor.chunks]
        yield from _stream(tensor.size, boxes, DTYPE_BYTES[tensor.dtype])
        for box in boxes:
            box.source.check()

    def _box(self, tensor: ShardedTensor, chunk: Chunk) -> _Box:
        """Where the bytes of a chunk are. Raises LakeError."""
        where = f"{tensor.name} in {chunk.place.file}"
        try:
            archive, pickled = self._archive(chunk.place)
            found = load(archive.read(pickled))
            if not isinstance(found, Strided) or (found.size, found.dtype) != (chunk.sizes, tensor.dtype):
                raise LakeError("it is not what the metadata says")
            if not found.is_contiguous:
                raise LakeError(f"its rows do not follow each other (as with channels_last): convert {WITH_TORCH}")
            info = archive.getinfo(f"{pickled.removesuffix('data.pkl')}data/{found.key}")
            begin = chunk.place.offset + _data_offset(archive, info)
        except LakeError as error:
            raise LakeError(f"{where}: {error}") from error
        except BROKEN as error:
            raise LakeError(f"{where} cannot be read: {error}") from error
        itemsize = DTYPE_BYTES[tensor.dtype]
        length, skipped = math.prod(chunk.sizes) * itemsize, found.offset * itemsize
        if info.compress_type or skipped + length > info.file_size:
            raise LakeError(f"{where}: its bytes are compressed, or not all there")
        checksum = getattr(info, "CRC", None) if length == info.file_size else None
        source = _Source(partial(self._open, chunk.place.file), begin + skipped, checksum, where)
        return _Box(chunk.offsets, chunk.sizes, source, 0)

    def _archive(self, place: Place) -> tuple[zipfile.ZipFile, str]:
        archive = zipfile.ZipFile(_Slice(self._open(place.file), place.offset, place.length))
        if not any(info.CRC for info in archive.infolist()):
            for info in archive.infolist():
                del info.CRC  # then `zipfile` compares none
        pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if pickled is None:
            raise LakeError("it is no file of torch.save")
        return archive, pickled

    def _open(self, name: str) -> BinaryIO:
        file = self._files.pop(name, None)
        if file is None:
            try:
                file = (self._directory / name).open("rb")
            except OSError as error:
                raise LakeError(f"{self._directory / name}: {error.strerror}") from error
            if len(self._files) >= FILES_OPEN_MAX:
                self._files.pop(next(iter(self._files))).close()
        self._files[name] = file
        return file


def _inside(path: str) -> str:
    """Raises LakeError for a path that leads out of the directory."""
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise LakeError(f"a shard is said to lie at {path!r}")
    return path


def _dtype(properties: Any) -> Dtype:
    """Of `TensorProperties`, which torch pickles as a tuple of their fields."""
    found = properties.state[0] if "state" in vars(properties) else properties.dtype
    if not isinstance(found, Dtype) or found.name not in DTYPE_BYTES:
        raise LakeError("a tensor has a type that is not known")
    return found


def _check_cover(name: str, size: Sequence[int], chunks: Sequence[Chunk]) -> None:
    """Raises LakeError unless the chunks cover the tensor, each element once."""
    total = 0
    for chunk in chunks:
        box = list(zip(chunk.offsets, chunk.sizes, size, strict=True))
        if any(offset < 0 or length < 0 or offset + length > whole for offset, length, whole in box):
            raise LakeError(f"a chunk of {name} lies outside of it")
        total += math.prod(chunk.sizes)
    if total != math.prod(size):
        raise LakeError(f"the chunks of {name} are {total} elements, not {math.prod(size)}: a shard is missing")
    if _have_overlap([(tuple(each.offsets), tuple(each.sizes)) for each in chunks if math.prod(each.sizes)]):
        raise LakeError(f"the chunks of {name} overlap, and so leave a part of it out: save the checkpoint again")


def _have_overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two boxes (offsets and sizes, none of them empty) have an element in common. Of the boxes that share an
    index of the first dimension, the other dimensions decide; it is enough to ask where a box begins."""
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1
    there: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for first, beginning in groupby(sorted(boxes), key=lambda box: box[0][0]):
        there = [box for box in there if box[0][0] + box[1][0] > first] + list(beginning)
        if _have_overlap([(offsets[1:], sizes[1:]) for offsets, sizes in there]):
            return True
    return False


class _Slice(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = self._length if whence == os.SEEK_END else self._at if whence == os.SEEK_CUR else 0
        self._at = max(0, begin + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = os.pread(self._file.fileno(), left if size < 0 else min(size, left), self._offset + self._at)
        self._at += len(data)
        return data


def _data_offset(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    file = archive.fp
    assert file is not None
    file.seek(info.header_offset)
    magic, name_bytes, extra_bytes = _LOCAL.unpack(file.read(_LOCAL.size))
    if magic != b"PK\x03\x04":
        raise LakeError("its directory is wrong")
    return info.header_offset + _LOCAL.size + int(name_bytes) + int(extra_bytes)


class _Source:
    """The bytes of one chunk, each of which is read once, in order."""

    def __init__(self, opened: Callable[[], BinaryIO], begin: int, checksum: int | None, where: str) -> None:
        self._opened, self._begin, self._checksum, self._where = opened, begin, checksum, where
        self._crc, self._at = 0, 0

    def read(self, at: int, length: int) -> bytes:
        data = os.pread(self._opened().fileno(), length, self._begin + at)
        if len(data) != length:
            raise LakeError(f"{self._where}: the file is shorter than its metadata says")
        if at == self._at:
            self._crc, self._at = zlib.crc32(data, self._crc), at + length
        return data

    def check(self) -> None:
        """Raises LakeError where what was read is damaged."""
        if self._checksum is not None and self._crc != self._checksum:
            raise LakeError(f"{self._where} is damaged: its bytes do not have their CRC-32")


@dataclass(frozen=True, slots=True)
class _Box:
    """A chunk, or one index of its first dimension: ``begin`` is where its bytes begin in the source."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: _Source
    begin: int

    def row(self, index: int, itemsize: int) -> _Box:
        stride = math.prod(self.sizes[1:]) * itemsize
        return _Box(self.offsets[1:], self.sizes[1:], self.source, self.begin + (index - self.offsets[0]) * stride)

    def has_row(self, index: int) -> bool:
        return self.offsets[0] <= index < self.offsets[0] + self.sizes[0]


def _stream(size: tuple[int, ...], boxes: Sequence[_Box], itemsize: int) -> Iterator[memoryview]:
    boxes = [box for box in boxes if math.prod(box.sizes)]
    if all(box.sizes[1:] == size[1:] for box in boxes):
        for box in sorted(boxes, key=lambda box: box.offsets):
            length = math.prod(box.sizes) * itemsize
            for at in range(0, length, SLAB_BYTES):
                yield memoryview(box.source.read(box.begin + at, min(SLAB_BYTES, length - at)))
        return
    row_bytes = math.prod(size[1:]) * itemsize
    if row_bytes > SLAB_BYTES:
        for index in range(size[0]):
            yield from _stream(size[1:], [box.row(index, itemsize) for box in boxes if box.has_row(index)], itemsize)
        return
    rows = max(1, SLAB_BYTES // row_bytes)
    for first in range(0, size[0], rows):
        stop = min(first + rows, size[0])
        slab = memoryview(bytearray((stop - first) * row_bytes))
        for box in boxes:
            begin, end = max(first, box.offsets[0]), min(stop, box.offsets[0] + box.sizes[0])
            if begin < end:
                top = box.row(begin, itemsize).begin
                data = box.source.read(top, (end - begin) * math.prod(box.sizes[1:]) * itemsize)
                at = (begin - first) * row_bytes
                _put(
                    slab[at:],
                    (size[0], *size[1:]),
                    (end - begin, *box.sizes[1:]),
                    box.offsets[1:],
                    memoryview(data),
                    itemsize,
                )
        yield slab


def _put(
    slab: memoryview, size: Sequence[int], sizes: Sequence[int], offsets: Sequence[int], data: memoryview, itemsize: int
) -> None:
    """Copy a box of ``sizes`` to its place in rows of ``size``, in runs that are adjacent in both."""
    run, dimensions = itemsize, len(sizes)
    while dimensions > 1 and sizes[dimensions - 1] == size[dimensions - 1]:
        dimensions -= 1
        run *= sizes[dimensions]
    run *= sizes[dimensions - 1]
    strides = [math.prod(size[at + 1 :]) * itemsize for at in range(len(size))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides[1:], strict=True))
    index, at = [0] * (dimensions - 1), 0
    while at < len(data):
        to = base + sum(each * stride for each, stride in zip(index, strides, strict=False))
        slab[to : to + run] = data[at : at + run]
        at += run
        for place in reversed(range(dimensions - 1)):
            index[place] += 1
            if index[place] < sizes[place]:
                break
            index[place] = 0
