"""Decides how a version gets into the store: its key, pack or plain object, what comes first, and what a commit adds.

What always holds (*plans are pure*): the functions here read the facts that they are given and nothing else, so the
same facts give the same plan. `ObjectWriter` gathers the facts between two awaits, and carries the plan out. Callable
from any thread; nothing here survives a crash.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.meta.entry import UNSET, Entry, Flag
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.path_rules import PackPolicy


class Form(StrEnum):
    """What holds the bytes of a version."""

    PLAIN = "plain"
    """A plain object."""
    PACK = "pack"
    """A commit, with others or alone."""
    PACK_WITH_OTHERS = "pack-with-others"
    """A commit, if others join while it gathers; else the version is planned again, as a plain object."""


class VersionFacts(msgspec.Struct, frozen=True):
    """A version that is about to be published, and what this node knows of its name and of the keys it may get."""

    path: str
    draft_id: str
    size: int
    policy: PackPolicy
    upload_key: str = ""
    """Of the upload that began already; empty where none did."""
    is_key_taken: bool = False
    """Bytes that belong to another name are, or will be, at the file's own key, or others still look for them there, or
    the store refuses it."""
    is_alone: bool = False
    """No other file is waited for."""
    are_others_closing: bool = False
    """Other small files close now, or are being written."""
    if_absent: bool = False
    """The name was created: nothing may be there."""
    own_etag: str = ""
    """Of the plain object that is known to lie at the file's own key, seen or hidden."""
    etag_in_place: str = ""
    """Of the object at its own key on which the file was opened; empty where its bytes were elsewhere."""
    superseded_etag: str = ""
    """Of the object at the file's own key that this node is to delete."""
    etag_there: str | None = None
    """ETag of the object that a HEAD has just shown at the key, empty for none; None where there was no look."""
    place: int = 0
    """Number of the object that the file's row names; 0 where that is its own key."""
    place_at_key: int = 0
    """Number of the object at the upload's key that names elsewhere mean; 0 for none."""
    is_key_journaled: bool = False
    """A change that is journaled, and may be sent, names the object at the key."""
    is_synced: bool = False
    """An fsync waits for it, and its writer may go on."""
    is_removal_journaled: bool = False
    """A change that is journaled, and may be sent, removes the file that had the name before."""
    is_key_of_another: bool = False
    """Another file is known to be the object at the key of an upload that began under an earlier name."""
    is_key_refused: bool = False
    """The store has refused the key, at which nothing is."""
    gone_at_key: tuple[str, ...] = ()
    """ETags of objects that may still be at that key although its name no longer refers to them, the likeliest
    first."""


class PublishPlan(msgspec.Struct, frozen=True):
    """The steps of a publication, in the order of the fields."""

    key: str
    path: str
    """Of the file, where ``key`` is another; else empty."""
    form: Form
    frees_key: bool = False
    """Another name's bytes are copied away from the key first."""
    commits_first: bool = False
    """Journaled changes are committed first, or a commit would name bytes that no longer exist."""
    if_absent: bool = False
    """Other bytes at the key refuse the version for good: another client has created the name."""
    expected: str | None = None
    """ETag of what the version is to replace, empty for nothing. Where something else is there, the store is asked what
    that is, and the version is planned again. None where it replaces whatever is there."""
    leaves_key: bool = False
    """Nothing else is done: the key of the upload that began is another file's, or the store refuses it, so the upload
    is given up, and the version is planned again."""


def choose_key(path: str, draft_id: str, *, is_taken: bool) -> tuple[str, str]:
    """Key of an object, and the path of its file where that is another: a hidden key where the file's own is taken."""
    return (OBJECTS + draft_id, path) if is_taken else (path, "")


def is_packable(policy: PackPolicy, size: int, *, has_upload: bool) -> bool:
    """Small enough for a pack by the rules of its path, and no part of it was sent."""
    return policy.mode != "never" and size <= policy.threshold_bytes and not has_upload


def plan_publish(facts: VersionFacts) -> PublishPlan:
    """How to store a version."""
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
    """The upload of the file at ``path`` began at the file's own key, and that is the key of an earlier name now."""
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
    """A plain object would need a commit as well: before it, because the removal of the object there is journaled, or
    after it, to say that it replaces one which a pack hides."""
    return facts.is_removal_journaled or bool(facts.place and facts.superseded_etag)


def needs_commit(entry: Entry, shown: tuple[int, int, int], *, key: str, path: str, is_named_by_commit: bool) -> bool:
    """A listing alone would not show this file: it is elsewhere, commits named it before, or attributes differ.

    ``shown`` are the mode, uid and gid of files that name none.
    """
    if key != path or is_named_by_commit or entry.flags & (Flag.XATTRS | Flag.MTIME_KEPT):
        return True
    held = (entry.mode, entry.uid, entry.gid)
    return any(each not in (UNSET, default) for each, default in zip(held, shown, strict=True))


def superseded_at(path: str, own_etag: str, *, is_reserved: bool) -> list[Deletion]:
    """The plain object at a name's own key goes when the name is elsewhere, unless other nodes still need the key."""
    return [Deletion(path, own_etag)] if own_etag and not is_reserved else []
