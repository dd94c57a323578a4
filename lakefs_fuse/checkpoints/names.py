"""Rules for names of checkpoints: whether a checkpoint is still being written, and its step.

Pure functions. The command line, the commands beside the mounts and the filesystem share them.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence

MARKERS = ("_SUCCESS", ".metadata", "COMPLETE")
"""Written last into a directory of shards: Hadoop's, torch.distributed.checkpoint's, and a plain word."""
TEMPORARY_PREFIXES = (".", "tmp", "_tmp")
TEMPORARY_SUFFIXES = (".tmp", ".partial", ".incomplete")
TEMPORARY_PARTS = (".orbax-checkpoint-tmp",)
PRUNED_PREFIX = ".pruned-"
"""What `checkpoint prune` renames a directory to before it deletes what is in it."""
FILE_SUFFIXES = frozenset({
    ".bin", ".ckpt", ".distcp", ".gguf", ".h5", ".hdf5", ".joblib", ".keras", ".msgpack", ".npy", ".npz", ".onnx",
    ".orbax", ".pdparams", ".pickle", ".pkl", ".pt", ".pt2", ".pth", ".safetensors", ".tar",
})  # fmt: skip
"""A regular file with another ending is no checkpoint (a config.json, a log) unless the user's pattern says so."""

_STEP = re.compile(r"(?<![a-z])(?:global_?step|step|iteration|iter)s?[-_=.]?(\d{1,18})(?!\d)", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


def looks_temporary(name: str) -> bool:
    """Whether a name means that the checkpoint is unfinished."""
    return (
        name.startswith(TEMPORARY_PREFIXES)
        or name.endswith(TEMPORARY_SUFFIXES)
        or any(part in name for part in TEMPORARY_PARTS)
    )


def is_checkpoint_file(name: str) -> bool:
    """Whether a regular file of this name counts as a checkpoint, finished or not."""
    return _suffix(_finished(name)) in FILE_SUFFIXES


def linked_names(directory: str, target: str) -> set[str]:
    """What a symbolic link in ``directory``, an absolute path, may lead to: the last component of its target, and the
    name in the directory that the target is, or is below."""
    directory = directory.rstrip("/") + "/"
    whole = os.path.normpath(os.path.join(directory, target))
    inside = whole.removeprefix(directory).partition("/")[0] if whole.startswith(directory) else ""
    return {os.path.basename(os.path.normpath(target)), inside} - {""}


def _finished(name: str) -> str:
    for suffix in TEMPORARY_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _suffix(name: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return (dot + suffix).lower() if stem else ""


def _stem(name: str) -> str:
    suffix = _suffix(name)
    return name[: -len(suffix)] if suffix in FILE_SUFFIXES else name


def step_of(name: str) -> int | None:
    """The last number after ``step`` or ``iter``, else the last number of the name; None without any.

    The suffix of a file (``.pt2``) does not count."""
    stem = _stem(name)
    found = _STEP.findall(stem) or _NUMBER.findall(stem)
    return int(found[-1]) if found else None


def steps_order(names: Sequence[str]) -> list[tuple[int, ...]] | None:
    """Sort keys of checkpoints by their names; None where the names define no order.

    They do if every name has a number after ``step`` or ``iter``, or if the names differ only in their numbers, which
    are compared from left to right, so that dates and ``epoch=3-batch=40`` are in order.
    """
    stems = [_stem(name) for name in names]
    named = [_STEP.findall(stem) for stem in stems]
    if all(named):
        return [(int(found[-1]),) for found in named]
    if len({_NUMBER.sub("#", stem) for stem in stems}) != 1:
        return None
    keys = [tuple(int(digits) for digits in _NUMBER.findall(stem)) for stem in stems]
    return keys if all(keys) else None
