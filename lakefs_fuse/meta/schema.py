"""Every kind of row in a node's database: the first byte of its key, the rest of it, and its value.

What always holds (*one place for keys*): no module outside `meta` names a kind or builds a key; they use the stores of
`rows`, `Tree` and `sorted_tables`. The bytes are those of schema version `VERSION`, which the row ``Mschema`` has;
another layout needs another version. Numbers in keys are 8 bytes, big-endian, so that their order is that of the keys.
Pure functions, callable from any thread.
"""

from __future__ import annotations

from struct import Struct

VERSION = b"2"

APPLIED = b"A"
"""``time writer``, value empty: a commit that was applied (`rows.CommitRows`)."""
BYTES = b"B"
"""``draft id`` in ASCII: bytes of an acknowledged file whose segment was not synced (`rows.Journal.put_bytes`)."""
CHANGE = b"C"
"""``sequence``: a change of names made here that is in no commit yet, msgpack of `commits.change.Change`."""
ENTRY = b"D"
"""``parent cookie``: packed `Entry`; one range scan reads a directory."""
DELETION = b"G"
"""``path`` of a plain object to be deleted: msgpack of `rows.Deletion`."""
DELETION_DUE = b"H"
"""``time path``, value empty: index of `DELETION` by the time when the object is due."""
INODE = b"I"
"""``inode``: parent and cookie of its entry."""
DRAFT = b"J"
"""``draft id`` in ASCII: journal record of bytes that are not in the store yet (`staging.draft_record`)."""
PIN = b"K"
"""``path`` of a checkpoint that stays in the cache: msgpack of `vfs.pinning.pinner.Row`."""
LISTING = b"L"
"""``inode`` of a directory that was listed completely: packed `tree.Listing`."""
SINGLE = b"M"
"""Single rows; their keys are below."""
NAME = b"N"
"""``parent sort-name``: cookie; the order is the store's LIST order."""
OBJECT = b"P"
"""``number``: packed `object_table.ObjectRow`, an object with bytes of entries."""
OBJECT_NUMBER = b"Q"
"""``path NUL etag``: number of that object."""
REFUSED = b"R"
"""``time writer``, value empty: a commit that is damaged, or dated in the future, and was skipped."""
SYMLINK = b"S"
"""``inode``: target of a symbolic link."""
TOMBSTONE = b"T"
"""``path`` of a removed name, with a slash behind directories: packed `tombstones.Tombstone`."""
CHANGED = b"U"
"""``mark key``: a row of names, by its key, that was written since the index of the time ``mark`` (`changed_rows`)."""
HISTORY = b"V"
"""``path``: msgpack of `commits.name_history.History`, what commits have said of the name lately."""
UNANNOUNCED = b"W"
"""``path``, value empty: a plain object that this node stored, and that none of its commits names yet
(`rows.UnannouncedRows`)."""
XATTRS = b"X"
"""``inode``: extended attributes, msgpack of a map."""

SINGLE_IDENTITY = b"Midentity"
"""Name of the lake."""
SINGLE_LAKE = b"Mlake"
"""Id of the lake record whose names these are."""
SINGLE_VERSION = b"Mschema"
SINGLE_INODE = b"Minode"
"""Inode numbers below this were issued, or are reserved."""
SINGLE_OBJECT = b"Mobject"
"""The last issued object number."""
SINGLE_NEWEST = b"Mnewest"
"""Time of the newest commit that was applied."""
SINGLE_POLLED = b"Mpolled"
"""Time of the newest commit known at the beginning of the last completed poll."""
SINGLE_COMPLETE = b"Mcomplete"
"""Every commit up to this time is known: an older one can no longer become visible, or is in an index."""
SINGLE_REAPPLY = b"Mreapply"
"""Names were dropped, with the effect of changes that are in no commit yet."""
SINGLE_UNAPPLIED = b"Munapplied"
"""The number of the newest journaled change, as long as that may not be in effect here."""
SINGLE_OUTDATED = b"Moutdated"
"""All names must be dropped when a daemon begins."""
SINGLE_MISSING = b"Mmissing"
"""Commits before this time were collected, and their changes are missing here."""
SINGLE_LOST = b"Mlost"
"""The database is new, or rows of it were lost: the staging area was not searched for their files yet."""
SINGLE_FOLDED = b"Mfolded"
"""Two times of indexes (`changed_rows.Folded`): the names are those of the first, except changes in `CHANGED`."""
SINGLE_WRITER = b"Mwriter"
"""Who committed last from this cache directory."""
SINGLE_SENDING = b"Msending"
"""A commit on its way: msgpack of `commits.change.Sending`."""
SINGLE_SENT = b"Msent"
"""Times of commits with which this node sent journaled changes while others stayed in the journal: 8 bytes each."""
SINGLE_STATE = b"Mstate"
"""An immutable mount's state of the lake: msgpack of `vfs.immutable.states.Note`."""

NAME_KINDS = (APPLIED, ENTRY, INODE, LISTING, NAME, OBJECT, OBJECT_NUMBER, SYMLINK, TOMBSTONE, XATTRS)
"""Rows of names and what belongs to them, in the order of keys: an index of a lake has these."""
LOCAL_KINDS = (CHANGE, DRAFT)
"""Rows of names and bytes that are in no store yet."""
NUMBER = Struct(">Q")
"""Numbers in keys, and counters; a missing row counts as 0."""
PATH = ("utf-8", "surrogatepass")
"""The codec of paths, and of objects' keys, in the keys of rows: surrogates stand for what is not UTF-8."""


def end_of(kind: bytes) -> bytes:
    """The first key after all rows of a kind."""
    return bytes([kind[0] + 1])
