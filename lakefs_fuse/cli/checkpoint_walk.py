"""Finds and deletes the checkpoints of a directory in a mount, with ordinary system calls.

A directory is deleted in three steps: renamed to a temporary name (one commit, so that *no node sees a part of it*
under its own name), emptied, removed. After a crash the remaining files count as incomplete, and the next `prune`
deletes them.

A walk costs two requests to the mount for a directory. States are asked for by directory, and by file only in a
directory that holds a file that is not in the store.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress

from lakefs_fuse.checkpoints.model import DURABLE, Checkpoint, Listing, Seen, is_checkpoint, make_listing, marker_names
from lakefs_fuse.checkpoints.names import PRUNED_PREFIX, linked_names
from lakefs_fuse.errors import LakeError
from lakefs_fuse.product import XATTR_STATE

LABEL_BYTES_MAX = 200
"""Separates the name of a checkpoint from the rest of the temporary name."""


def find_checkpoints(path: str, *, marker: str | None, match: str | None) -> Listing:
    """The checkpoints directly in ``path``, an absolute path. Raises LakeError where it cannot be read."""
    asked = marker_names(marker)
    linked: set[str] = set()
    found: list[Seen] = []
    try:
        places = {path, os.path.realpath(path)}
        for entry in _entries(path):
            if entry.is_symlink():
                linked.update(*(linked_names(place, os.readlink(entry.path)) for place in places))
                continue
            is_dir = entry.is_dir(follow_symlinks=False)
            if is_checkpoint(entry.name, match, is_dir=is_dir) and (is_dir or entry.is_file(follow_symlinks=False)):
                found.append(_read_directory(entry, asked) if is_dir else _read_file(entry))
        _read_states(path, found)
    except OSError as error:
        raise LakeError(f"{path} cannot be read: {error.strerror}") from error
    for item in found:
        item.linked = item.name in linked
    return make_listing(path, found, marker=marker, match=match, now_ns=time.time_ns())


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        yield from entries


def _read_file(entry: os.DirEntry[str]) -> Seen:
    seen = Seen(name=entry.name, is_dir=False)
    _add(seen, entry)
    return seen


def _read_directory(top: os.DirEntry[str], asked: tuple[str, ...]) -> Seen:
    seen = Seen(name=top.name, is_dir=True)
    for directory, entry in _files_below(top.path):
        _add(seen, entry)
        if directory == top.path and entry.name in asked:
            seen.markers.add(entry.name)
    return seen


def _files_below(top: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every regular file below a directory, with the directory that holds it."""
    waiting = [top]
    while waiting:
        directory = waiting.pop()
        try:
            for entry in _entries(directory):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield directory, entry
        except FileNotFoundError:
            continue  # removed meanwhile


def _add(seen: Seen, entry: os.DirEntry[str]) -> None:
    try:
        status = entry.stat(follow_symlinks=False)
        seen.add(entry.name, status.st_size, status.st_mtime_ns)
    except FileNotFoundError:
        pass  # removed meanwhile


def _read_states(path: str, found: list[Seen]) -> None:
    """Count the states of the files in ``found``, the checkpoints in ``path``. This follows the walk, so that a file
    that the walk has seen while it was being written is either in the store by now, or counted as not there."""
    if _state_of(path) == DURABLE:
        return
    for item in found:
        top = os.path.join(path, item.name)
        state = _state_of(top)
        if state == DURABLE:
            continue
        if not item.is_dir:
            item.states = {state or DURABLE: 1}
            continue
        item.states = {}
        for _, entry in _files_below(top):
            state = _state_of(entry.path) or DURABLE
            item.states[state] = item.states.get(state, 0) + 1


def _state_of(path: str) -> str:
    """The state of a file, or of the files below a directory, as the mount reports it; empty if it reports none."""
    try:
        return os.getxattr(path, XATTR_STATE, follow_symlinks=False).decode("ascii", "replace")
    except FileNotFoundError:
        return DURABLE  # removed meanwhile
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return ""
        raise


def delete(directory: str, checkpoint: Checkpoint) -> None:
    """Delete a checkpoint of ``directory``; one that does not exist is no error. Raises OSError."""
    path = os.path.join(directory, checkpoint.name)
    try:
        if checkpoint.kind == "file":
            os.unlink(path)
            return
        if not checkpoint.name.startswith(PRUNED_PREFIX):
            label = os.fsencode(checkpoint.name)[:LABEL_BYTES_MAX].decode("utf-8", "ignore")
            aside = os.path.join(directory, f"{PRUNED_PREFIX}{label}-{secrets.token_hex(4)}")
            os.rename(path, aside)
            path = aside
        _delete_tree(path)
    except FileNotFoundError:
        pass


def _delete_tree(path: str) -> None:
    """Delete a directory and its contents; another run may delete some of them at the same time. Not shutil.rmtree:
    this follows no link, and asks for names only."""
    entries: list[os.DirEntry[str]] = []
    with suppress(FileNotFoundError):
        entries = list(_entries(path))
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            _delete_tree(entry.path)
        else:
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
    with suppress(FileNotFoundError):
        os.rmdir(path)


def is_directory(path: str) -> bool:
    """Whether ``path`` is a directory. Raises LakeError where that cannot be found out."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise LakeError(f"{path} cannot be read: {error.strerror}") from error
