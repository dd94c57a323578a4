"""What is known of a version between the request that stored it and the batch that records it.

What always holds (*frozen*): these are values. `publisher` makes and uses them, on the trio thread; none of them
survives a crash, after which the journal record of the draft is compared with the store.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.publish import Published
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.writeback.publish_plan import PublishPlan
from lakefs_fuse.vfs.writeback.removed_versions import KnownAt


class StoredVersion(msgspec.Struct, frozen=True):
    """A version that the store has, and what the tree says of it at the same moment."""

    entry: Entry
    """Its future row."""
    row: Entry | None
    """Of its inode; None where the name has another version here."""
    is_removed: bool
    """Another node saw these bytes, and removed or renamed them, before their writer heard that they are there."""
    extent: Extent
    described: Mapping[str, str]
    """The attributes that the store was given."""
    published: Published | None
    """None for a file in a pack."""
    needs_sync: bool = False
    """Commits hide it until they tell of it: the journaled change that does is synced before its user is answered."""
    unannounced: str = ""
    """The path at which it is to be announced; empty if a commit names it."""


class PlainObject(msgspec.Struct, frozen=True):
    """A version that the store has as a plain object, and what was planned and known before it was sent."""

    published: Published
    plan: PublishPlan
    before: KnownAt | None
    """What was known of the path; None if an earlier attempt may have stored the version before."""
    there: ObjectMeta | None
    """What a look had shown at the key."""


class Unrecorded(msgspec.Struct, frozen=True):
    """A draft that the store has: the object of the version before it, and the draft's own, None for a pack."""

    before: ObjectRow | None
    plain: PlainObject | None


class Publication(msgspec.Struct, frozen=True):
    """A version of a file that is in the store, and not recorded here yet."""

    file: OpenFile
    draft: Draft
    stored: StoredVersion
