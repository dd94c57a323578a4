"""Answers LIST requests of a local store in S3's order: by UTF-8 bytes of keys, a directory sorting as ``name/``.

What always holds:

* sorting ``str`` is sorting UTF-8 bytes (that encoding keeps the order of code points);
* every directory is at least one key: its marker, if it has one or has no entries; so a directory is a common prefix
  without being read (but for one that is being removed, which is still a prefix, and no key);
* memory of a LIST is bounded: names of a directory are read `NAMES_MAX` at a time, and at most `OPEN_MAX` walks
  wait for their next page. A walk that was dropped begins again after the last key answered.

A token is that last key; it is valid in any process. Called from any worker thread.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from lakefs_fuse.errors import StoreError, Unsupported
from lakefs_fuse.product import RESERVED_NAME, RESERVED_PREFIX
from lakefs_fuse.store.local.tree import HIDDEN, LocalTree, empty_directory, file_object, is_utf8, translated
from lakefs_fuse.store.protocol import ListPage, ObjectMeta

NAMES_MAX = 65_536
OPEN_MAX = 8

_LAST = "\U0010ffff"
"""Sorts after every name; appended to a prefix, after every key below it."""

Item = ObjectMeta | str
_Walk = Iterator[Item]


class LocalPages:
    """Walks of one tree, continued from page to page."""

    def __init__(self, tree: LocalTree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, str, str], _Walk] = OrderedDict()

    def page(self, prefix: str, delimiter: str, start_after: str, token: str | None, keys_max: int) -> ListPage:
        """See `ObjectStore.list_page`."""
        if delimiter not in ("", "/"):
            raise Unsupported(f"delimiter {delimiter!r}: only '/' or none")
        walk = None
        self._tree.require_root()
        if token is not None:
            with self._lock:
                walk = self._open.pop((prefix, delimiter, token), None)
        if walk is None:
            walk = self._begin(prefix, delimiter, _after_token(token) if token is not None else start_after)
        items = list(islice(walk, keys_max))
        next_token = None
        if len(items) == keys_max and (following := next(walk, None)) is not None:
            last = items[-1]
            next_token = "p" + last if isinstance(last, str) else "k" + last.key
            self._keep((prefix, delimiter, next_token), chain((following,), walk))
        self._tree.require_root()  # still: without it, directories seem to have been removed
        objects = [item for item in items if isinstance(item, ObjectMeta)]
        prefixes = [item for item in items if isinstance(item, str)]
        return ListPage(objects, prefixes, next_token)

    def _keep(self, name: tuple[str, str, str], walk: _Walk) -> None:
        with self._lock:
            self._open[name] = walk
            while len(self._open) > OPEN_MAX:
                self._open.popitem(last=False)

    def _begin(self, prefix: str, delimiter: str, after: str) -> _Walk:
        directory, _, name_prefix = prefix.rpartition("/")
        base = directory + "/" if directory else ""
        if prefix.startswith("/") or (base and self._tree.refusal(base) is not None):
            return iter(())
        path = f"{self._tree.root}/{base}".rstrip("/")
        if os.path.realpath(path) != path:
            return iter(())
        return self._items(base, name_prefix, after) if delimiter else self._walk(base, name_prefix, after)

    def _walk(self, base: str, name_prefix: str, after: str) -> _Walk:
        """As `_items`, with what is below each directory in its place. Paths are deeper than Python's stack."""
        above = [self._items(base, name_prefix, after)]
        while above:
            item = next(above[-1], None)
            if item is None:
                above.pop()
            elif isinstance(item, str):
                above.append(self._items(item, "", after))
            else:
                yield item

    def _items(self, base: str, name_prefix: str, after: str) -> _Walk:
        """What is in directory ``base`` ('' or ending in '/'), of names that start with ``name_prefix``; of directories
        their keys."""
        tree, directory = self._tree, f"{self._tree.root}/{base}"
        bound, first = after, True
        while True:
            names, more, any_entry = self._names(base, name_prefix, bound)
            if first and base and not name_prefix and base > after:
                found = tree.marker(directory, base)
                if found is None and not any_entry and base != RESERVED_PREFIX:
                    found = empty_directory(directory, base)
                if found is not None:
                    yield found
            first = False
            for name in names:
                key = base + name
                if not name.endswith("/"):
                    if (status := tree.stat_for_listing(directory + name)) is not None:
                        yield file_object(key, status)
                elif base == "" and name == RESERVED_PREFIX and not self._reserved_has_keys():
                    continue
                else:
                    yield key
            if not more:
                return
            last = base + names[-1]
            bound = last + _LAST if last.endswith("/") else last

    def _names(self, base: str, name_prefix: str, after: str) -> tuple[list[str], bool, bool]:
        """The next names in order (directories end in '/'), whether there are more, and whether any entry exists."""
        names: list[str] = []
        more = any_entry = False
        try:
            with translated("list", base or "/"), os.scandir(f"{self._tree.root}/{base}") as entries:
                for entry in entries:
                    name = entry.name
                    if base == RESERVED_PREFIX and name in HIDDEN:
                        continue
                    any_entry = True
                    if not name.startswith(name_prefix):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        name += "/"
                    elif not (entry.is_file(follow_symlinks=False) or entry.is_symlink()):
                        continue
                    key = base + name
                    inside = name[-1] == "/" and after.startswith(key) and after != key + _LAST
                    if (inside or key > after) and is_utf8(name):
                        names.append(name)
                        if len(names) >= 2 * NAMES_MAX:
                            names.sort()
                            del names[NAMES_MAX:]
                            more = True
        except StoreError as error:
            if base == "" or not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise
            return [], False, True
        names.sort()
        if len(names) > NAMES_MAX:
            del names[NAMES_MAX:]
            more = True
        return names, more, any_entry

    def _reserved_has_keys(self) -> bool:
        path = f"{self._tree.root}/{RESERVED_NAME}"
        try:
            with os.scandir(path) as entries:
                return any(entry.name not in HIDDEN for entry in entries)
        except OSError:
            return False


def _after_token(token: str) -> str:
    return token[1:] + _LAST if token.startswith("p") else token[1:]
