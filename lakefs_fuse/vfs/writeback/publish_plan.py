"""Plans the publication of a version: its key, pack or plain object, and what is to be done before and after
(`plan_publish`); and once a plain object is stored, how other nodes learn of it (`plan_telling`).

What always holds (*plans are pure*): the functions here read only the facts that they are given, so the same facts give
the same plan. `ObjectWriter` gathers the facts between two awaits, and executes the plan. Callable from any thread;
nothing here survives a crash.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.meta.entry import UNSET, Entry, Flag
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.path_rules import PackPolicy


class Form(StrEnum):
    """The kind of object that contains the bytes of a version."""

    PLAIN = "plain"
    """A plain object."""
    PACK = "pack"
    """A pack: a commit that contains the bytes, with other files or alone."""
    PACK_WITH_OTHERS = "pack-with-others"
    """A pack if other files join while it gathers; otherwise the version is planned again as a plain object."""


class VersionFacts(msgspec.Struct, frozen=True):
    """A version that is about to be published, and what this node knows of its name and of its possible keys."""

    path: str
    draft_id: str
    size: int
    policy: PackPolicy
    upload_key: str = ""
    """The key of an upload that has begun; empty if none has."""
    is_key_taken: bool = False
    """True if the file's own key cannot be used: it has or will have bytes of another name, other nodes still look for
    such bytes there, or the store refuses the key."""
    is_alone: bool = False
    """True if the version does not wait for other files."""
    are_others_closing: bool = False
    """True if other small files are being closed or written."""
    if_absent: bool = False
    """True if the file was created with O_EXCL, so that nothing may be at its name."""
    own_etag: str = ""
    """ETag of the plain object that is known to be at the file's own key, hidden or not; empty if none is."""
    etag_in_place: str = ""
    """ETag of the object at the file's own key that it was opened on; empty if its bytes were elsewhere."""
    superseded_etag: str = ""
    """ETag of the object at the file's own key that this node is about to delete; empty if there is none."""
    etag_there: str | None = None
    """ETag of the object that a HEAD has just found at the key, empty for none; None if no HEAD was sent."""
    place: int = 0
    """Number of the object that the file's row refers to; 0 if its bytes are at its own key."""
    place_at_key: int = 0
    """Number of the object at the upload's key that other names refer to; 0 if there is none."""
    is_key_journaled: bool = False
    """True if a journaled change that may be sent mentions the object at the key."""
    is_synced: bool = False
    """True if an fsync waits for the version, after which its writer may continue."""
    is_removal_journaled: bool = False
    """True if a journaled change that may be sent removes the file that had the name before."""
    is_key_of_another: bool = False
    """True if the object at the key of an upload that began under an earlier name is known to be another file."""
    is_key_refused: bool = False
    """True if the store has refused the key although no object is there."""
    gone_at_key: tuple[str, ...] = ()
    """ETags of objects that may still be at the upload's key although its name no longer refers to them, the likeliest
    first."""


class PublishPlan(msgspec.Struct, frozen=True):
    """The steps of a publication, in the order of the fields."""

    key: str
    path: str
    """The path of the file if it differs from ``key``, otherwise empty."""
    form: Form
    frees_key: bool = False
    """The bytes of another name are first copied from the key to another one."""
    commits_first: bool = False
    """Journaled changes are committed first; otherwise a later commit would name bytes that no longer exist."""
    if_absent: bool = False
    """The version is refused for good if the key has other bytes: another client has created the name."""
    expected: str | None = None
    """ETag of the object that the version replaces, empty for none; None if it replaces any object. If another object
    is there, the store is asked for it, and the version is planned again."""
    leaves_key: bool = False
    """The upload that has begun is given up, and the version is planned again, because the upload's key belongs to
    another file or the store refuses it. Nothing else is done."""


def choose_key(path: str, draft_id: str, *, is_taken: bool) -> tuple[str, str]:
    """Return the key of an object, and the path of its file if that differs. If the file's own key is taken, the object
    gets a key below `.lakefs/objects/`."""
    return (OBJECTS + draft_id, path) if is_taken else (path, "")


def is_packable(policy: PackPolicy, size: int, *, has_upload: bool) -> bool:
    """Return whether a pack may contain the version: it is small by the rules of its path, and has no upload."""
    return policy.mode != "never" and size <= policy.threshold_bytes and not has_upload


def plan_publish(facts: VersionFacts) -> PublishPlan:
    """Return the plan by which a version is stored."""
    if facts.upload_key:
        key, path = facts.upload_key, facts.path if facts.upload_key != facts.path else ""
    else:
        key, path = choose_key(facts.path, facts.draft_id, is_taken=facts.is_key_taken)
    if is_renamed_since(facts.upload_key, facts.path):
        is_unknown = facts.etag_there not in (None, "", *facts.gone_at_key)
        if facts.is_key_of_another or is_unknown:
            return PublishPlan(key, path, Form.PLAIN, leaves_key=True)
    if facts.is_key_refused and facts.upload_key:
        return PublishPlan(key, path, Form.PLAIN, leaves_key=True)
    form = _choose_form(facts, key)
    return PublishPlan(
        key,
        path,
        form,
        frees_key=bool(facts.upload_key and facts.place_at_key and facts.place_at_key != facts.place),
        commits_first=form is Form.PLAIN and facts.is_key_journaled,
        if_absent=facts.if_absent and not facts.own_etag,  # what may still lie there counts as removed
        expected=_expected(facts, key),
    )


def is_renamed_since(upload_key: str, path: str) -> bool:
    """Return whether the upload began at the file's own key, and the file was renamed to ``path`` since."""
    return upload_key not in ("", path) and not upload_key.startswith(OBJECTS)


def _expected(facts: VersionFacts, key: str) -> str | None:
    if is_renamed_since(facts.upload_key, facts.path):
        return next(iter(facts.gone_at_key), "") if facts.etag_there is None else facts.etag_there
    if key != facts.path or facts.place_at_key:
        return None
    if facts.etag_there is None:
        return facts.etag_in_place or facts.superseded_etag
    return facts.etag_there


def _choose_form(facts: VersionFacts, key: str) -> Form:
    if facts.is_alone or not is_packable(facts.policy, facts.size, has_upload=bool(facts.upload_key)):
        return Form.PLAIN
    if facts.policy.mode != "auto" or key != facts.path:
        return Form.PACK
    if facts.is_synced and _needs_commit_beside(facts):
        return Form.PACK
    return Form.PACK_WITH_OTHERS if facts.are_others_closing else Form.PLAIN


def _needs_commit_beside(facts: VersionFacts) -> bool:
    """Return whether a plain object would need a commit as well.

    That is a commit before it if the removal of the object there is journaled, or one after it to say that it replaces
    an object that a pack hides."""
    return facts.is_removal_journaled or bool(facts.place and facts.superseded_etag)


class Telling(StrEnum):
    """How other nodes learn that a plain object is the newest version of a name."""

    NONE = "none"
    """Not at all: another writer has replaced it, or the file has no name any more."""
    ANNOUNCED = "announced"
    """The next commit announces it, and a LIST shows it as it is."""
    COMMITTED = "committed"
    """A journaled change, without which a LIST would not show the file as it is, or commits would hide it."""
    REMOVED = "removed"
    """Not at all: another node saw it, and removed or replaced it, before its writer heard that it is stored."""


class StoredFacts(msgspec.Struct, frozen=True):
    """A plain object that was just stored, and what this node knows of its name now."""

    path: str
    key: str
    etag: str
    entry: Entry
    """The file, with the attributes that it has now."""
    shown: tuple[int, int, int]
    """The mode, uid and gid of files whose objects have none."""
    row: Entry | None
    """Of the file's inode."""
    has_tombstone: bool
    """True if commits have removed or hidden a plain object at the path."""
    replaced: str = ""
    """ETag of the object replaced at the path, if no commit has told of it here; empty otherwise."""
    is_back: bool = False
    """True if an earlier version of the file had these bytes, and other bytes replaced it."""
    is_superseded: bool = False
    """True if another writer's version has replaced it already."""
    is_unlinked: bool = False
    was_seen_and_removed: bool = False
    """See `Telling.REMOVED`."""

    @property
    def is_named(self) -> bool:
        """Return whether commits have told of the name."""
        return self.has_tombstone or bool(self.row is not None and (self.row.stamp or self.row.flags & Flag.OVERRIDING))

    @property
    def is_again(self) -> bool:
        """Return whether it has the bytes that it replaced."""
        return self.row is not None and self.row.etag == self.etag and self.row.is_plain


def plan_telling(facts: StoredFacts) -> Telling:
    """Return how other nodes learn of a plain object."""
    if facts.is_superseded:
        return Telling.NONE
    commits = facts.is_again or facts.is_back or bool(facts.replaced)
    if not commits:
        commits = needs_commit(
            facts.entry, facts.shown, key=facts.key, path=facts.path, is_named_by_commit=facts.is_named
        )
    if not commits or facts.is_unlinked:
        return Telling.ANNOUNCED if facts.key == facts.path else Telling.NONE
    return Telling.REMOVED if facts.was_seen_and_removed else Telling.COMMITTED


def needs_commit(entry: Entry, shown: tuple[int, int, int], *, key: str, path: str, is_named_by_commit: bool) -> bool:
    """Return whether a LIST alone would not show the file as it is: its bytes are elsewhere, commits have named it, or
    its attributes differ from the defaults.

    ``shown`` are the mode, uid and gid of files whose objects have none.
    """
    if key != path or is_named_by_commit or entry.flags & (Flag.XATTRS | Flag.MTIME_KEPT):
        return True
    held = (entry.mode, entry.uid, entry.gid)
    return any(each not in (UNSET, default) for each, default in zip(held, shown, strict=True))


def superseded_at(path: str, own_etag: str, *, is_reserved: bool) -> list[Deletion]:
    """Return the deletion of the plain object at a name's own key once its bytes are elsewhere. Empty if there is no
    such object, or other nodes still need the key."""
    return [Deletion(path, own_etag)] if own_etag and not is_reserved else []
