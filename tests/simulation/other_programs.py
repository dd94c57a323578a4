"""Programs that know nothing of the lake: they put, replace and delete plain objects, as `aws s3 cp` and `rm` do.

Each acts at one moment, on what lies in the store then; for the oracle it is a node that has seen just that. What
an object means for its name is decided by the reader of the raw store, from docs/format.md, right after the request:

* a put counts as acknowledged if its name shows it. Else a commit hides it: that knew of its ETag, or is dated later;
  nobody is promised anything, but where it took the place of an object that was shown, that is removed;
* a removal of the object that its name shows removes that version. Where it wins over bytes that a commit names, and
  no commit has said so yet, the name may show those again, or be gone. A renamed file comes back as one: with what was
  written in place of the object by who had not heard of the rename. So may a directory in which nothing else was go;
* an object that has the bytes of another name (which a rename has left there, perhaps one that only its node knows of)
  is left alone, as is one that no name shows: a program that touches the first destroys a file, and a node may be about
  to give the second a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from tests.simulation.lake_reader import Lake
from tests.simulation.object_store import SimulatedStore
from tests.simulation.oracle import DIRECTORY, PROGRAM, Oracle, Version


class OtherPrograms:
    """See the module's head. ``read_lake`` answers what the store holds now, ``is_renamed`` whether some node has the
    bytes of another name at a key. Each request answers what came of it."""

    def __init__(
        self,
        store: SimulatedStore,
        oracle: Oracle,
        read_lake: Callable[[], Lake],
        is_renamed: Callable[[str], bool] = lambda _key: False,
    ) -> None:
        self._store, self._oracle, self._read_lake, self._is_renamed = store, oracle, read_lake, is_renamed
        self._put: set[tuple[str, str]] = set()
        """Keys and ETags of all that was put."""
        self._deleted: set[str] = set()
        """Keys whose last object was deleted."""

    def put(self, path: str, data: bytes, operation: int) -> str:
        """Store an object at the key of a path."""
        before = self._read_lake()
        if _is_of_another_name(before, path) or self._is_renamed(path):
            return "of another name"
        shown = self._shown(before, path)
        version = self._oracle.put(path, data, PROGRAM, shown, operation=operation)
        version.is_plain = True
        if len([removal for removal in self._oracle.removals[path] if not removal.is_withdrawn]) > 1:
            version.removals_before = frozenset()  # not each of them may be in the store
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self._store.sender = PROGRAM
        self._store.put_as(path, data, etag)
        self._deleted.discard(path)
        self._put.add((path, etag))
        after = self._read_lake()
        if _is_own(after, path):
            version.is_certain = True
            self._oracle.observe(PROGRAM, path, frozenset({version}))
            return "ok"
        if _is_own(before, path):
            self._remove(path, shown, operation, after)
        return "hidden"

    def delete(self, path: str, operation: int) -> str:
        """Delete the object at the key of a path."""
        if path not in self._store.objects:
            return "nothing there"
        before = self._read_lake()
        if _is_of_another_name(before, path) or self._is_renamed(path):
            return "of another name"
        if not _is_own(before, path):
            return "not shown"
        shown = self._shown(before, path)
        self._store.remove(path)
        self._deleted.add(path)
        after = self._read_lake()
        self._remove(path, shown, operation, after)
        for directory in sorted(before.names.keys() - after.names.keys() - {path}):
            self._oracle.remove(directory, PROGRAM, self._oracle.matching(directory, DIRECTORY), operation=operation)
        return "ok"

    def destroyed(self) -> list[str]:
        """Files whose bytes were replaced or deleted where a rename had left them: by a program, or by a node's copy of
        what it put, which looks alike."""
        if not self._put and not self._deleted:
            return []
        names, copies, senders = self._read_lake().names, self._store.copies, self._store.senders
        return [
            path
            for path, name in sorted(names.items())
            if name.problem
            and name.key != path
            and (senders.get(name.key) == PROGRAM or name.key in copies or name.key in self._deleted)
        ]

    def has_deleted(self, path: str) -> bool:
        """A program has deleted an object at this key."""
        return path in self._deleted

    def _shown(self, lake: Lake, path: str) -> frozenset[Version]:
        name = lake.names.get(path)
        shown = frozenset() if name is None or name.data is None else self._oracle.matching(path, name.data)
        self._oracle.observe(PROGRAM, path, shown)
        return shown

    def _remove(self, path: str, shown: frozenset[Version], operation: int, after: Lake) -> None:
        """The object that had the name is gone; what shows ``after`` it may come back."""
        removal = self._oracle.remove(path, PROGRAM, shown, operation=operation)
        removal.is_plain = removal.is_certain = True
        name = after.names.get(path)
        if name is not None and name.data is not None:
            back = self._oracle.matching(path, name.data)
            origins = dict.fromkeys(version.origin for version in sorted(back, key=lambda each: each.number))
            for origin in origins or [None]:
                self._oracle.put(path, name.data, PROGRAM, frozenset(), origin=origin, operation=operation)


def _is_own(lake: Lake, path: str) -> bool:
    """The name shows the object at its own key."""
    name = lake.names.get(path)
    return name is not None and name.key == path


def _is_of_another_name(lake: Lake, key: str) -> bool:
    """The object at a key has the bytes of another name."""
    return any(
        name.key == key and path != key for names in (lake.names, lake.hidden_files) for path, name in names.items()
    )
