"""The states of a file in use: the table, and which of its methods lead where."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_target import DraftTarget
from lakefs_fuse.vfs.files.open_file import TRANSITIONS, OpenFile, OpenState

CLEAN, WRITING, ACKNOWLEDGED, UNLINKED = OpenState
EXTENT = Extent(Version("d/f", "etag", 1), 0, 1)


def draft(*, sequence: int = 0) -> Draft:
    target = DraftTarget("f", lambda: ({}, {}), if_absent=True)
    return cast("Draft", SimpleNamespace(sequence=sequence, target=target, save=lambda: None))


def acknowledge(file: OpenFile) -> None:
    assert file.draft is not None
    file.draft.sequence = 1
    file.follow_draft()


def store(file: OpenFile) -> None:
    newest = file.versions[0].draft
    assert newest is not None
    file.install(newest, file.entry, EXTENT, {})


def file_in(state: OpenState) -> OpenFile:
    """With a draft of its own where it is being written."""
    file = OpenFile(Entry(ROOT_INODE, 2, b"f", 3, Flag.LOCAL), "f", None)
    if state in (WRITING, ACKNOWLEDGED):
        file.begin(draft())
    if state is ACKNOWLEDGED:
        acknowledge(file)
    if state is UNLINKED:
        file.unlink()
    return file


@pytest.mark.parametrize("to", OpenState)
@pytest.mark.parametrize("state", OpenState)
def test_transition_by_the_table_only(state: OpenState, to: OpenState) -> None:
    file = file_in(state)
    assert file.state is state
    if to in TRANSITIONS[state]:
        file.transition(to)
        assert file.state is to
    else:
        with pytest.raises(AssertionError, match=f"f: {state} cannot become {to}"):
            file.transition(to)
        assert file.state is state


STEPS: list[tuple[OpenState, Callable[[OpenFile], object], OpenState]] = [
    (CLEAN, lambda file: file.begin(draft()), WRITING),
    (CLEAN, lambda file: file.begin(draft(sequence=1)), ACKNOWLEDGED),
    (CLEAN, OpenFile.follow_draft, CLEAN),
    (CLEAN, OpenFile.unlink, UNLINKED),
    (CLEAN, OpenFile.relink, CLEAN),
    (WRITING, acknowledge, ACKNOWLEDGED),
    (WRITING, OpenFile.end_draft, CLEAN),
    (WRITING, store, CLEAN),
    (WRITING, OpenFile.take_up, CLEAN),
    (WRITING, OpenFile.unlink, UNLINKED),
    (ACKNOWLEDGED, OpenFile.leave_behind, CLEAN),
    (ACKNOWLEDGED, OpenFile.end_draft, CLEAN),
    (ACKNOWLEDGED, store, CLEAN),
    (ACKNOWLEDGED, OpenFile.unlink, UNLINKED),
    (UNLINKED, lambda file: file.begin(draft()), UNLINKED),
    (UNLINKED, OpenFile.unlink, UNLINKED),
    (UNLINKED, OpenFile.relink, CLEAN),
]


@pytest.mark.parametrize(("state", "step", "after"), STEPS)
def test_step_leads_to_state(state: OpenState, step: Callable[[OpenFile], object], after: OpenState) -> None:
    file = file_in(state)
    step(file)
    assert file.state is after


@pytest.mark.parametrize("state", [WRITING, ACKNOWLEDGED])
def test_relink_after_a_failed_removal_enters_the_state_before(state: OpenState) -> None:
    file = file_in(state)
    file.unlink()
    file.relink()
    assert file.state is state


def test_take_up_of_an_acknowledged_version_makes_it_newest_again() -> None:
    file = file_in(ACKNOWLEDGED)
    acknowledged = file.draft
    earlier = file.leave_behind()
    file.begin(draft())
    assert (earlier.state, file.state) == (ACKNOWLEDGED, WRITING)
    file.take_up()
    assert (file.draft, file.state, file.behind) == (acknowledged, ACKNOWLEDGED, [])


def test_install_of_a_version_behind_leaves_the_newest_in_its_state() -> None:
    file = file_in(ACKNOWLEDGED)
    file.leave_behind()
    newest = draft()
    file.begin(newest)
    store(file)
    assert (file.state, file.draft, file.behind, file.extent) == (WRITING, newest, [], EXTENT)
    assert (newest.target.replaces, newest.target.if_absent) == ("etag", False)
