"""A doubt: what a record says of a name and what is known of it here disagree, and only the store can tell which is
newer. `Application.doubts` has them, the poller asks the store. They live for as long as a record is being applied.
"""

from __future__ import annotations

import msgspec

from lakefs_fuse.meta.tombstones import SAME_VERSION_NS


class Doubt(msgspec.Struct, frozen=True):
    """A record says that ``path`` is something else than the plain object ``etag`` that is known there, and knew of
    ``hides``; which of the two is newer only the store can tell."""

    path: str
    etag: str
    hides: str
    removed_ns: int = 0
    """The time of a removal of another version, which does not touch what has been there since before it; `PENDING`
    where any date is right, and for a relocation of another version. 0: what is there counts where it is not older than
    the record."""
    sets_attributes: bool = False
    """The record sets attributes of the version ``hides``, which counts only if it lies there. Where nothing does, the
    version ``etag`` may have replaced that, and be in a pack since."""

    def is_there(self, etag: str, mtime_ns: int) -> bool:
        """With ``removed_ns`` or ``sets_attributes``: the object that lies at the key is the version in doubt, and was
        not put there again; or it is another than the one that gets attributes."""
        if self.sets_attributes:
            return etag != self.hides
        return etag == self.etag and mtime_ns < self.removed_ns + SAME_VERSION_NS
