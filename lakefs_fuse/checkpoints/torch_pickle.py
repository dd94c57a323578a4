"""Pickles that torch makes and reads, without torch: no code of a pickle runs.

`load` answers plain values and stand-ins. A class or function of torch becomes a `Made`, which has its name, what it
was called with and its state; tensors become `Strided`. Anything else that a pickle wants to import is refused.
`dump` writes what ``torch.load(weights_only=True)`` reads. Blocking; no I/O.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lakefs_fuse.errors import LakeError

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex128": 16, "complex64": 8, "complex32": 4, "uint64": 8, "uint32": 4, "uint16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Size of an element by the name of its type in torch."""
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}  # fmt: skip
"""Types whose storages have a class of their own; those of all others have no type."""
STORAGE_OF = {dtype: storage for storage, dtype in STORAGES.items()}
WITH_TORCH = "the directory with torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
"""What errors advise where only torch itself can read a tensor."""
PLAIN = {"set": set, "frozenset": frozenset, "bytearray": bytearray, "complex": complex}


class Dtype(NamedTuple):
    """The type of elements, by its name in torch."""

    name: str


class Storage(NamedTuple):
    """The bytes of tensors: the record ``data/KEY`` of the file that the pickle is in. No ``dtype``: just bytes."""

    key: str
    dtype: str


class Strided(NamedTuple):
    """A tensor of a storage; ``offset`` and ``stride`` count elements."""

    key: str
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size > 1 and stride != expected:
                return 0 in self.size
            expected *= size
        return True


class NewTensor(NamedTuple):
    """A contiguous tensor that is written: the record ``data/KEY``."""

    key: str
    dtype: str
    size: tuple[int, ...]


class Made:
    """What a class or function of torch was asked to make."""

    name = ""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __getattr__(self, name: str) -> Any:
        raise LakeError(f"a {self.name} without {name}: it was written by a version of torch that is not known")


def _rebuild_v2(
    storage: Storage, offset: int, size: Sequence[int], stride: Sequence[int], _: object, __: object,
    view: object = None,
) -> Strided:  # fmt: skip
    """``view`` says that the tensor is a conjugate or a negative of the bytes: torch sets a bit, and leaves the bytes.
    Raises LakeError for such a tensor."""
    if view:
        raise LakeError(
            "its bytes are the conjugates or negatives of its values (as with torch.conj): save resolve_conj() or "
            f"resolve_neg() of it, or convert {WITH_TORCH}"
        )
    return Strided(storage.key, storage.dtype, offset, tuple(size), tuple(stride))


def _rebuild_v3(
    storage: Storage, offset: int, size: Sequence[int], stride: Sequence[int], _: object, __: object, dtype: Dtype,
    view: object = None,
) -> Strided:  # fmt: skip
    return _rebuild_v2(Storage(storage.key, dtype.name), offset, size, stride, _, __, view)


def _rebuild_parameter(data: Strided, *_: object) -> Strided:
    return data


_TENSORS: dict[str, Callable[..., Strided]] = {
    "_rebuild_tensor_v2": _rebuild_v2,
    "_rebuild_tensor_v3": _rebuild_v3,
    "_rebuild_parameter": _rebuild_parameter,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in DTYPE_BYTES:
            return Dtype(name)
        if module == "torch" and name in STORAGES:
            return Dtype(STORAGES[name])
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return Dtype("")
        if module == "torch._utils" and name in _TENSORS:
            return _TENSORS[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("builtins", "__builtin__") and name in PLAIN:
            return PLAIN[name]
        if module.partition(".")[0] in ("torch", "pathlib"):
            return type(name, (Made,), {"name": f"{module}.{name}"})
        raise LakeError(f"it holds a {module}.{name}, which only its own program can read")

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, Dtype):
            raise LakeError(f"it refers to {kind!r}, which is not known")
        return Storage(str(key), dtype.name)


def load(data: bytes) -> Any:
    """What the pickle holds. Raises LakeError."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except LakeError:
        raise
    except Exception as error:  # of a damaged pickle any
        raise LakeError(f"it cannot be read: {error}") from error


def is_plain(value: object) -> bool:
    """Whether `dump` can write it."""
    if isinstance(value, Mapping):
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    if isinstance(value, list) or (isinstance(value, tuple) and not isinstance(value, Dtype | NewTensor | Strided)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Dtype | NewTensor)


def dump(value: object) -> bytes:
    """A pickle of plain values, types and new tensors. Raises LakeError for any other."""
    out = io.BytesIO()
    out.write(pickle.PROTO + b"\x02")
    _write(out.write, value)
    out.write(pickle.STOP)
    return out.getvalue()


def _write(put: Callable[[bytes], object], value: object) -> None:
    match value:
        case None:
            put(pickle.NONE)
        case bool():
            put(pickle.NEWTRUE if value else pickle.NEWFALSE)
        case int():
            raw = pickle.encode_long(value)
            put(pickle.LONG1 + bytes((len(raw),)) + raw if len(raw) < 256 else pickle.LONG4 + _length(raw) + raw)
        case float():
            put(pickle.BINFLOAT + struct.pack(">d", value))
        case str():
            raw = value.encode("utf-8", "surrogatepass")
            put(pickle.BINUNICODE + _length(raw) + raw)
        case Dtype(name):
            put(_global("torch", name))
        case NewTensor():
            _write_tensor(put, value)
        case tuple():
            put(pickle.MARK)
            for each in value:
                _write(put, each)
            put(pickle.TUPLE)
        case list():
            put(pickle.EMPTY_LIST + pickle.MARK)
            for each in value:
                _write(put, each)
            put(pickle.APPENDS)
        case Mapping():
            put(pickle.EMPTY_DICT + pickle.MARK)
            for key, each in value.items():
                _write(put, key)
                _write(put, each)
            put(pickle.SETITEMS)
        case _:
            raise LakeError(f"a {type(value).__name__} cannot be written")


def _length(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw))


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _write_tensor(put: Callable[[bytes], object], tensor: NewTensor) -> None:
    storage, elements, stride = STORAGE_OF.get(tensor.dtype), 1, list[int]()
    for size in reversed(tensor.size):
        stride.insert(0, elements)
        elements *= max(1, size)
    count = 0 if 0 in tensor.size else elements
    put(_global("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3") + pickle.MARK + pickle.MARK)
    _write(put, "storage")
    put(_global("torch", storage) if storage else _global("torch.storage", "UntypedStorage"))
    _write(put, tensor.key)
    _write(put, "cpu")
    _write(put, count if storage else count * DTYPE_BYTES[tensor.dtype])
    put(pickle.TUPLE + pickle.BINPERSID)
    for each in (0, tensor.size, tuple(stride), False):
        _write(put, each)
    put(_global("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE)
    if not storage:
        _write(put, Dtype(tensor.dtype))
    put(pickle.TUPLE + pickle.REDUCE)
