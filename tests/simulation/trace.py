"""What a request to the store was, as a line of a history that a person reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lakefs_fuse.commits.archive import locate, parse_commit_key, read_record
from lakefs_fuse.commits.record import Mkdir, Operation, Record, Remove, is_of_version


class Commits:
    """The commits of a store, each read once."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def newest(self, path: str, objects: Mapping[str, bytes]) -> tuple[str, Operation] | None:
        """Key of the newest commit that says which file a path is, and its last operation on it. What applies to one
        version of it does not say that: it has no effect where that version is gone."""
        for key, record in self._newest_first(objects):
            for operation in reversed(record.operations):
                if operation.path == path and not isinstance(operation, Mkdir) and not is_of_version(operation):
                    return key, operation
        return None

    def is_directory_made(self, path: str, objects: Mapping[str, bytes]) -> bool:
        """Whether the newest commit that makes or removes the directory at a path makes it."""
        for _, record in self._newest_first(objects):
            for operation in reversed(record.operations):
                if operation.path == path and (isinstance(operation, Mkdir) or _removes_directory(operation)):
                    return isinstance(operation, Mkdir)
        return False

    def is_directory_moved(self, old: str, new: str, objects: Mapping[str, bytes]) -> bool:
        """Whether the newest commit that moves ``old``, or what is above it, to ``new`` removes a directory ``old``."""
        for _, record in self._newest_first(objects):
            paths = {target + old[len(source) :] for source, target in record.moves if _is_in(old, source)}
            if new in paths:
                return any(each.path == old and _removes_directory(each) for each in record.operations)
        return False

    def _newest_first(self, objects: Mapping[str, bytes]) -> Iterator[tuple[str, Record]]:
        for key in sorted(objects, reverse=True):
            if parse_commit_key(key) is not None:
                if key not in self._records:
                    self._records[key] = read(key, objects[key])
                yield key, self._records[key]


def _is_in(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory}/")


def _removes_directory(operation: Operation) -> bool:
    return isinstance(operation, Remove) and operation.directory


def read(key: str, data: bytes) -> Record:
    """The record of a commit."""
    where = locate(data, len(data))
    named = parse_commit_key(key)
    assert named is not None
    return read_record(data[where.offset : where.offset + where.length], where, *named)


def describe_put(key: str, data: bytes) -> str:
    """What a commit says; empty for other objects."""
    if parse_commit_key(key) is None:
        return ""
    record = read(key, data)
    lines = [f"moves {moved[0]} to {moved[1]}" for moved in record.moves]
    return " | ".join(lines + [_describe(operation, record) for operation in record.operations])


def _describe(operation: Operation, record: Record) -> str:
    kind = type(operation).__name__.lower()
    words = [kind, operation.path]
    index = getattr(operation, "object", None)
    if index is not None:
        words.append("own" if index < 0 else record.objects[index].key[-24:] if index else f"this[{operation.size}]")  # type: ignore[union-attr]
    if hides := getattr(operation, "hides", ""):
        words.append(f"hides {hides[:6]}")
    return " ".join(words)
