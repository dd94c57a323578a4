"""One file of a sharded checkpoint: what ``torch.load`` or safetensors read.

The tensors are streamed from the shards to the file, so memory is bounded by what `sharded` reads at a time. The file
is written beside its name, read again and compared with the CRC-32 of what was written, and only then renamed.

What always holds: DST is the whole checkpoint or what it was before. Blocking, one thread; a crash leaves a file whose
name begins with a dot and ends in ``.consolidating``, which nothing reads: it may be deleted.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lakefs_fuse.checkpoints.sharded import ShardedCheckpoint, ShardedTensor
from lakefs_fuse.checkpoints.torch_pickle import DTYPE_BYTES, NewTensor, dump
from lakefs_fuse.errors import LakeError

SAFETENSORS_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "uint64": "U64", "uint32": "U32",
    "uint16": "U16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
ALIGN_BYTES = 64
"""Of the bytes of a tensor in a file of torch."""
PIECE_BYTES = 8 << 20
NAME_CHARS = 40
"""Of the target's name in that of the file that is written: with the host's, which has up to 64 bytes, it has 255 bytes
at most, whatever the characters."""
EMPTY_ITEMS_MAX = 1 << 20
"""Empty dictionaries in lists, of which a checkpoint says nothing: 8 MiB of memory."""
_DATE = (1980, 1, 1, 0, 0, 0)
_LOCAL_BYTES, _ZIP64_BYTES, _PADDING_ID = 30, 20, 0x4246


@dataclass(frozen=True, slots=True)
class Consolidated:
    """What is in the file; ``left_out`` are the names of what is not a tensor."""

    path: str
    format: str
    tensors: int
    bytes: int
    objects: int
    left_out: Sequence[str]


def consolidate(
    source: Path, target: Path, *, prefix: str = "", tensors_only: bool = False, force: bool = False,
    begun: Callable[[int], object] = id, advanced: Callable[[int], object] = id, sync: Callable[[int], object] = id,
) -> Consolidated:  # fmt: skip
    """Write ``target`` from the shards in ``source``: for safetensors if its name ends so, else for torch. Of what has
    names that begin with ``prefix``, without it. ``begun`` is told the bytes to come, twice those of the tensors, and
    ``advanced`` each piece. ``sync`` makes an open file, by its descriptor, safe from a power cut where closing it does
    not. Raises LakeError."""
    is_safetensors = target.suffix == ".safetensors"
    if os.path.isdir(target):
        raise LakeError(f"{target} is a directory: name the file to write")
    if os.path.exists(target) and not force:
        raise LakeError(f"{target} exists: --force replaces it")
    new = target.with_name(f".{target.name[:NAME_CHARS]}.{os.uname().nodename}-{os.getpid()}.consolidating")
    with ShardedCheckpoint(source) as checkpoint:
        tensors = [each for each in checkpoint.tensors if each.name.startswith(prefix)]
        objects = [each for each in checkpoint.objects if each.name.startswith(prefix)]
        if not tensors and not objects:
            raise LakeError(f"nothing in {source} has a name that begins with {prefix!r}")
        total = sum(tensor.bytes for tensor in tensors)
        begun(2 * total)
        kept = [] if tensors_only or is_safetensors else objects
        left_out = [each.name for each in objects] if not kept else []
        try:
            with new.open("wb") as out:
                if is_safetensors:
                    spans = _write_safetensors(out, checkpoint, tensors, len(prefix), advanced)
                else:
                    spans = _write_torch(
                        out, checkpoint, tensors, [(e, checkpoint.value(e)) for e in kept], prefix, advanced
                    )
                out.flush()
                sync(out.fileno())
            _verify(new, spans, advanced)
            if os.path.exists(target) and not force:
                raise LakeError(f"{target} was made meanwhile: --force replaces it")
            os.replace(new, target)
        except OSError as error:
            raise LakeError(f"{error.filename or new}: {error.strerror}") from error
        finally:
            with suppress(OSError):  # where it was never made, or the disk fails: that was said, or nothing reads it
                new.unlink()
    return Consolidated(
        str(target), "safetensors" if is_safetensors else "torch", len(tensors), total, len(kept), left_out
    )


Span = tuple[str, int, int, int]
"""The name of a tensor, begin and length of its bytes in the file, and their CRC-32."""


def copy_tensor(
    checkpoint: ShardedCheckpoint, tensor: ShardedTensor, write: Callable[[memoryview], object],
    advanced: Callable[[int], object],
) -> int:  # fmt: skip
    """Write the bytes of a tensor; returns their CRC-32."""
    checksum = 0
    for piece in checkpoint.read(tensor):
        write(piece)
        checksum = zlib.crc32(piece, checksum)
        advanced(len(piece))
    return checksum


def _verify(path: Path, spans: Sequence[Span], advanced: Callable[[int], object]) -> None:
    """Raises LakeError unless the file has the bytes that were written."""
    with path.open("rb") as file:
        for name, begin, length, expected in spans:
            checksum = 0
            for at in range(begin, begin + length, PIECE_BYTES):
                data = os.pread(file.fileno(), min(PIECE_BYTES, begin + length - at), at)
                checksum = zlib.crc32(data, checksum)
                advanced(len(data))
            if checksum != expected:
                raise LakeError(f"{name} was not written as it was read: {path} is damaged; run the command again")


# -- safetensors


def _write_safetensors(
    out: BinaryIO, checkpoint: ShardedCheckpoint, tensors: Sequence[ShardedTensor], skipped: int,
    advanced: Callable[[int], object],
) -> list[Span]:  # fmt: skip
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, ordered = 0, sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
    for tensor in ordered:
        if tensor.dtype not in SAFETENSORS_TYPES:
            raise LakeError(f"{tensor.name} is of {tensor.dtype}, which safetensors does not have: choose a .pt file")
        header[tensor.name[skipped:]] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype], "shape": tensor.size, "data_offsets": (at, at + tensor.bytes),
        }  # fmt: skip
        at += tensor.bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    out.write(struct.pack("<Q", len(raw)) + raw)
    spans, begin = list[Span](), 8 + len(raw)
    for tensor in ordered:
        spans.append((tensor.name, begin, tensor.bytes, copy_tensor(checkpoint, tensor, out.write, advanced)))
        begin += tensor.bytes
    return spans


# -- torch


class _Forward(io.RawIOBase):
    """A file that is written from begin to end, as a mount likes it: sums of members come behind them."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._at = out, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._out.write(data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        self._out.flush()


def _write_torch(
    out: BinaryIO, checkpoint: ShardedCheckpoint, tensors: Sequence[ShardedTensor],
    objects: Sequence[tuple[Any, Any]], prefix: str, advanced: Callable[[int], object],
) -> list[Span]:  # fmt: skip
    tree = _Tree(gaps_max=len(checkpoint.tensors) + len(checkpoint.objects) + EMPTY_ITEMS_MAX)
    for key, tensor in enumerate(tensors):
        tree.insert(_without(tensor.path, prefix), NewTensor(str(key), tensor.dtype, tensor.size))
    for item, value in objects:
        tree.insert(_without(item.path, prefix), value)
    spans = list[Span]()
    file = _Forward(out)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _add(archive, "archive/data.pkl", dump(tree.root))
        _add(archive, "archive/byteorder", b"little")
        for key, tensor in enumerate(tensors):
            info = zipfile.ZipInfo(f"archive/data/{key}", _DATE)
            begin = file.tell() + _LOCAL_BYTES + len(info.filename) + _ZIP64_BYTES
            padding = -(begin + 4) % ALIGN_BYTES
            info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=True) as member:
                begin = file.tell()
                checksum = copy_tensor(checkpoint, tensor, member.write, advanced)
            spans.append((tensor.name, begin, tensor.bytes, checksum))
        _add(archive, "archive/version", b"3\n")
    return spans


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _DATE), data)


def _without(path: tuple[str | int, ...], prefix: str) -> tuple[str | int, ...]:
    """A path without a text with which its name begins; its last key keeps at least that."""
    for number, key in enumerate(path):
        if not prefix or number == len(path) - 1 or not prefix.startswith(f"{key}."):
            left = str(key).removeprefix(prefix)
            return (left, *path[number + 1 :]) if prefix and left else path[number:]
        prefix = prefix.removeprefix(f"{key}.")
    return path


class _Tree:
    """Nested dictionaries and lists, from values and the paths of keys and positions that lead to them."""

    def __init__(self, gaps_max: int) -> None:
        """So many positions of lists, all together, may be skipped before they are filled, if they ever are."""
        self.root: dict[str | int, Any] = {}
        self._gaps_left = gaps_max

    def insert(self, path: Sequence[str | int], value: object) -> None:
        """Raises LakeError where something else is there, or a position cannot be that of an item."""
        container: Any = self.root
        for key, following in zip(path, (*path[1:], None), strict=True):
            if isinstance(container, list):
                there = self._extend(container, key, path)
            elif isinstance(container, dict):
                there = container.get(key)
            else:
                raise LakeError(f"{path} leads through a value")
            if following is None:
                if there is not None:
                    raise LakeError(f"{path} is the place of two values")
                container[key] = value
            elif there is None:
                there = container[key] = [] if isinstance(following, int) else {}
            container = there

    def _extend(self, items: list[Any], position: str | int, path: Sequence[str | int]) -> Any:
        """Make a list long enough for a position; what is there."""
        if not isinstance(position, int):
            raise LakeError(f"{path} leads through a list")
        gaps = max(0, position - len(items))
        if position < 0 or gaps > self._gaps_left:
            raise LakeError(f"{path} leads to position {position} of a list, which no item has")
        self._gaps_left -= gaps
        items += [None] * (position + 1 - len(items))
        return items[position]
