"""Copies of renamed objects to the keys of their names, from before the store is asked for them until it is known here.

What always holds: an object that this node's store may have copied to a key, and that no commit tells of, is noted here
with what it looks like, through any number of deaths. So nobody takes it for a version that somebody else stored, even
where the object that it is a copy of is gone. Trio thread only.
"""

from __future__ import annotations

import msgspec

from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.store.protocol import ObjectMeta


class BegunCopy(msgspec.Struct, frozen=True, array_like=True):
    """ETag of the object that is copied, and its draft's token: a copy in parts has another ETag, and the token. Both
    may be empty."""

    etag: str
    token: str

    def is_it(self, meta: ObjectMeta, token: str) -> bool:
        return meta.etag == self.etag or bool(token and token == self.token)


class BegunCopies:
    """By the path that is copied to."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._held = {
            key[1:].decode("utf-8", "surrogatepass"): msgspec.msgpack.decode(raw, type=BegunCopy)
            for key, raw in database.scan(b"Y", b"Z")
        }

    def paths(self) -> list[str]:
        return list(self._held)

    def get(self, path: str) -> BegunCopy | None:
        return self._held.get(path)

    def begin(self, path: str, copy: BegunCopy) -> None:
        """Raises CacheError."""
        batch = Batch()
        batch.put(_key(path), msgspec.msgpack.encode(copy))
        self._db.commit(batch)
        self._held[path] = copy

    def end(self, path: str) -> None:
        """The copy is told of, or gone, or never came. Raises CacheError."""
        if path in self._held:
            batch = Batch()
            batch.delete(_key(path))
            self._db.commit(batch)
            del self._held[path]


def _key(path: str) -> bytes:
    return b"Y" + path.encode("utf-8", "surrogatepass")
