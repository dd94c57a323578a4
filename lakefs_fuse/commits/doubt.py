"""Doubts: a record disagrees with what is known here of a name, and only the store can say which is newer.

`name_history.doubts` yields them, and the poller asks the store. They live as long as a record is being applied.
"""

from __future__ import annotations

import msgspec

from lakefs_fuse.meta.tombstones import SAME_VERSION_NS


class Doubt(msgspec.Struct, frozen=True):
    """A record and the plain object ``etag`` disagree about ``path``; only the store can say which is newer. The
    record's writer knew of the object ``hides`` there, empty for none."""

    path: str
    etag: str
    hides: str
    removed_ns: int = 0
    """Time of a removal of another version, which does not affect the version in doubt if that was at the key before it
    and is still; `PENDING` if any date is right, and for a relocation of another version. 0: the object at the key
    counts, unless it is the version ``hides``, a version of a renamed file, or older than the record."""
    sets_attributes: bool = False
    """True if the record sets attributes of the version ``hides``, which counts only if it is at the key. If no object
    is there, the version ``etag`` may have replaced that one, and have been packed since."""

    def is_there(self, etag: str, mtime_ns: int) -> bool:
        """Return whether the object found at the key lets the version in doubt count.

        With ``removed_ns`` it has to be that version, not put there again since the removal; with ``sets_attributes``
        any other version than the one that gets attributes."""
        if self.sets_attributes:
            return etag != self.hides
        return etag == self.etag and mtime_ns < self.removed_ns + SAME_VERSION_NS
