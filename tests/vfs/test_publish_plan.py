"""The table of how a version gets into the store."""

from __future__ import annotations

from typing import Any

import pytest

from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.path_rules import PackPolicy
from lakefs_fuse.vfs.writeback.publish_plan import (
    Form,
    PublishPlan,
    StoredFacts,
    Telling,
    VersionFacts,
    choose_key,
    is_packable,
    needs_commit,
    plan_publish,
    plan_telling,
    superseded_at,
)

AUTO, ALWAYS, NEVER = (PackPolicy(mode, 1000) for mode in ("auto", "always", "never"))
HIDDEN = OBJECTS + "id"
SHOWN = (0o644, 1000, 1000)

NOTHING: dict[str, Any] = {"own_etag": "", "etag_in_place": ""}
CASES: list[tuple[str, dict[str, Any], PublishPlan]] = [
    ("alone", {}, PublishPlan("p/f", "", Form.PLAIN, expected="r")),
    ("others close", {"are_others_closing": True}, PublishPlan("p/f", "", Form.PACK_WITH_OTHERS, expected="r")),
    ("others, too large", {"are_others_closing": True, "size": 1001}, PublishPlan("p/f", "", Form.PLAIN, expected="r")),
    (
        "others, just small",
        {"are_others_closing": True, "size": 1000},
        PublishPlan("p/f", "", Form.PACK_WITH_OTHERS, expected="r"),
    ),
    (
        "others, not waited for",
        {"are_others_closing": True, "is_alone": True},
        PublishPlan("p/f", "", Form.PLAIN, expected="r"),
    ),
    ("never", {"policy": NEVER, "are_others_closing": True}, PublishPlan("p/f", "", Form.PLAIN, expected="r")),
    ("synced", {"is_synced": True}, PublishPlan("p/f", "", Form.PLAIN, expected="r")),
    (
        "synced, the name was removed just before",
        {"is_synced": True, "is_removal_journaled": True, "is_key_journaled": True},
        PublishPlan("p/f", "", Form.PACK, expected="r"),
    ),
    (
        "closed, the name was removed just before",
        {"is_removal_journaled": True, "is_key_journaled": True},
        PublishPlan("p/f", "", Form.PLAIN, commits_first=True, expected="r"),
    ),
    (
        "synced in a pack that hides an object",
        {"is_synced": True, "place": 7, "superseded_etag": "s"},
        PublishPlan("p/f", "", Form.PACK, expected="r"),
    ),
    ("synced in a pack", {"is_synced": True, "place": 7}, PublishPlan("p/f", "", Form.PLAIN, expected="r")),
    (
        "synced, large, the name was removed just before",
        {"is_synced": True, "is_removal_journaled": True, "is_key_journaled": True, "size": 1001},
        PublishPlan("p/f", "", Form.PLAIN, commits_first=True, expected="r"),
    ),
    ("always", {"policy": ALWAYS}, PublishPlan("p/f", "", Form.PACK, expected="r")),
    ("always, too large", {"policy": ALWAYS, "size": 1001}, PublishPlan("p/f", "", Form.PLAIN, expected="r")),
    ("always, not waited for", {"policy": ALWAYS, "is_alone": True}, PublishPlan("p/f", "", Form.PLAIN, expected="r")),
    ("key taken", {"is_key_taken": True}, PublishPlan(HIDDEN, "p/f", Form.PACK)),
    ("key taken, large", {"is_key_taken": True, "size": 1001}, PublishPlan(HIDDEN, "p/f", Form.PLAIN)),
    ("key taken, never", {"is_key_taken": True, "policy": NEVER}, PublishPlan(HIDDEN, "p/f", Form.PLAIN)),
    ("upload began", {"upload_key": "p/f", "policy": ALWAYS}, PublishPlan("p/f", "", Form.PLAIN, expected="r")),
    (
        "upload began, then the key was taken",
        {"upload_key": "p/f", "is_key_taken": True, "place_at_key": 7},
        PublishPlan("p/f", "", Form.PLAIN, frees_key=True),
    ),
    (
        "upload began over the file's own object",
        {"upload_key": "p/f", "place": 7, "place_at_key": 7},
        PublishPlan("p/f", "", Form.PLAIN),
    ),
    ("upload began, then renamed", {"upload_key": "p/old"}, PublishPlan("p/old", "p/f", Form.PLAIN, expected="")),
    (
        "upload began over what was renamed too",
        {"upload_key": "p/old", "gone_at_key": ("g", "h")},
        PublishPlan("p/old", "p/f", Form.PLAIN, expected="g"),
    ),
    (
        "upload began, then renamed, and a look found nothing",
        {"upload_key": "p/old", "gone_at_key": ("g", "h"), "etag_there": ""},
        PublishPlan("p/old", "p/f", Form.PLAIN, expected=""),
    ),
    (
        "upload began, then renamed, and a look found what is gone",
        {"upload_key": "p/old", "gone_at_key": ("g", "h"), "etag_there": "h"},
        PublishPlan("p/old", "p/f", Form.PLAIN, expected="h"),
    ),
    (
        "upload began, then renamed, and a look found another version",
        {"upload_key": "p/old", "gone_at_key": ("g",), "etag_there": "x"},
        PublishPlan("p/old", "p/f", Form.PLAIN, leaves_key=True),
    ),
    (
        "upload began, then renamed, and the old name is another file",
        {"upload_key": "p/old", "is_key_of_another": True},
        PublishPlan("p/old", "p/f", Form.PLAIN, leaves_key=True),
    ),
    (
        "upload began at a key that the store refuses",
        {"upload_key": "p/f", "is_key_refused": True},
        PublishPlan("p/f", "", Form.PLAIN, leaves_key=True),
    ),
    ("upload began at a hidden key", {"upload_key": HIDDEN}, PublishPlan(HIDDEN, "p/f", Form.PLAIN)),
    ("created", {"if_absent": True, **NOTHING}, PublishPlan("p/f", "", Form.PLAIN, if_absent=True, expected="")),
    (
        "created over what was removed",
        {"if_absent": True, "etag_in_place": ""},
        PublishPlan("p/f", "", Form.PLAIN, expected=""),
    ),
    (
        "new, and what was removed waits for its deletion",
        {"etag_in_place": "", "superseded_etag": "e"},
        PublishPlan("p/f", "", Form.PLAIN, expected="e"),
    ),
    (
        "that was deleted meanwhile",
        {"etag_in_place": "", "superseded_etag": "e", "etag_there": ""},
        PublishPlan("p/f", "", Form.PLAIN, expected=""),
    ),
    ("nothing known at the key", NOTHING, PublishPlan("p/f", "", Form.PLAIN, expected="")),
    ("found by a look", {**NOTHING, "etag_there": "f"}, PublishPlan("p/f", "", Form.PLAIN, expected="f")),
    (
        "found by a look, and another name's",
        {**NOTHING, "etag_there": "f", "is_key_taken": True, "is_alone": True},
        PublishPlan(HIDDEN, "p/f", Form.PLAIN),
    ),
    ("journaled", {"is_key_journaled": True}, PublishPlan("p/f", "", Form.PLAIN, commits_first=True, expected="r")),
    (
        "journaled, in a pack",
        {"is_key_journaled": True, "policy": ALWAYS},
        PublishPlan("p/f", "", Form.PACK, expected="r"),
    ),
]


@pytest.mark.parametrize(("facts", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_plan_publish_of_each_case_is_the_same_twice(facts: dict[str, Any], expected: PublishPlan) -> None:
    version = VersionFacts(
        **{"path": "p/f", "draft_id": "id", "size": 10, "policy": AUTO, "own_etag": "e", "etag_in_place": "r", **facts}
    )
    assert plan_publish(version) == expected
    assert plan_publish(version) == expected


def test_choose_key_of_a_taken_key_is_hidden() -> None:
    assert choose_key("p/f", "id", is_taken=False) == ("p/f", "")
    assert choose_key("p/f", "id", is_taken=True) == (HIDDEN, "p/f")


@pytest.mark.parametrize(
    ("policy", "size", "has_upload", "expected"),
    [
        (AUTO, 1000, False, True),
        (AUTO, 1001, False, False),
        (AUTO, 10, True, False),
        (NEVER, 0, False, False),
        (ALWAYS, 0, False, True),
    ],
)
def test_is_packable_by_policy_size_and_upload(policy: PackPolicy, size: int, has_upload: bool, expected: bool) -> None:
    assert is_packable(policy, size, has_upload=has_upload) is expected


@pytest.mark.parametrize(
    ("attributes", "where", "expected"),
    [
        ({}, {}, False),
        ({"mode": 0o644, "uid": 1000, "gid": 1000}, {}, False),
        ({"mode": 0o600}, {}, True),
        ({"uid": 0}, {}, True),
        ({"gid": 0}, {}, True),
        ({"flags": Flag.XATTRS}, {}, True),
        ({"flags": Flag.MTIME_KEPT}, {}, True),
        ({}, {"key": HIDDEN}, True),
        ({}, {"is_named_by_commit": True}, True),
    ],
)
def test_needs_commit_where_a_listing_would_lack_something(
    attributes: dict[str, Any], where: dict[str, Any], expected: bool
) -> None:
    entry = Entry(1, 2, b"f", 3, **attributes)
    assert needs_commit(entry, SHOWN, **{"key": "p/f", "path": "p/f", "is_named_by_commit": False, **where}) is expected


PLAIN = Entry(1, 2, b"f", 3, etag="e")
COMMITTED: dict[str, Any] = {"has_tombstone": True}
TELLINGS: list[tuple[str, dict[str, Any], Telling]] = [
    ("as a LIST shows it", {}, Telling.ANNOUNCED),
    ("at another key", {"key": HIDDEN}, Telling.COMMITTED),
    ("at another key, without a name", {"key": HIDDEN, "is_unlinked": True}, Telling.NONE),
    ("without a name", {"is_unlinked": True, **COMMITTED}, Telling.ANNOUNCED),
    ("other attributes", {"entry": Entry(1, 2, b"f", 3, mode=0o755)}, Telling.COMMITTED),
    ("removed before", COMMITTED, Telling.COMMITTED),
    ("named before", {"row": Entry(1, 2, b"f", 3, stamp=7)}, Telling.COMMITTED),
    ("over a file elsewhere", {"row": Entry(1, 2, b"f", 3, flags=Flag.OVERRIDING)}, Telling.COMMITTED),
    ("the bytes that it replaced", {"row": PLAIN}, Telling.COMMITTED),
    ("the bytes of a local row", {"row": Entry(1, 2, b"f", 3, etag="e", place=5)}, Telling.ANNOUNCED),
    ("bytes of an earlier version", {"is_back": True}, Telling.COMMITTED),
    ("over an untold object", {"replaced": "r"}, Telling.COMMITTED),
    ("another writer's since", {"is_superseded": True, **COMMITTED}, Telling.NONE),
    ("removed since", {"was_seen_and_removed": True, **COMMITTED}, Telling.REMOVED),
    ("removed since, where no commit tells", {"was_seen_and_removed": True}, Telling.ANNOUNCED),
]


@pytest.mark.parametrize(("facts", "expected"), [case[1:] for case in TELLINGS], ids=[case[0] for case in TELLINGS])
def test_plan_telling_of_each_case_is_the_same_twice(facts: dict[str, Any], expected: Telling) -> None:
    known: dict[str, Any] = {
        "path": "p/f", "key": "p/f", "etag": "e", "entry": Entry(1, 2, b"f", 3), "shown": SHOWN, "row": None,
        "has_tombstone": False, **facts,
    }  # fmt: skip
    assert [plan_telling(StoredFacts(**known)) for _ in range(2)] == [expected, expected]


def test_superseded_at_a_reserved_key_is_nothing() -> None:
    assert superseded_at("p/f", "e", is_reserved=False) == [Deletion("p/f", "e")]
    assert superseded_at("p/f", "e", is_reserved=True) == []
    assert superseded_at("p/f", "", is_reserved=False) == []
