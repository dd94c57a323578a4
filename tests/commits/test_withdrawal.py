"""Journaled changes that are sent after other nodes have stored newer versions at their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from lakefs_fuse.commits import name_history, path_tree
from lakefs_fuse.commits.archive import Member
from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.change_journal import ChangeJournal
from lakefs_fuse.commits.record import OWN, THIS, Mkdir, ObjectRef, Operation, Put, Relocate, Remove, SetAttr, Symlink
from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.meta.sorted_tables import drop_names
from tests.commits.committing import Daemon, Site
from tests.commits.nodes import NS

LATER_S = 3600.0
PACK = ObjectRef("elsewhere", "e0", 1)


def link(path: str, target: str) -> Symlink:
    return Symlink(path, target, 0, 0, 0)


def moved(path: str, hides: str = "") -> Put:
    """A file from another key, as a rename puts it."""
    return Put(path, 1, 0, 1, 0o644, 0, 0, 0, hides=hides)


def target(daemon: Daemon, path: str) -> str:
    entry = daemon.find(path)
    return "" if entry is None else daemon.tree.target(entry.inode).decode()


def change(*operations: Operation, after: int = 0) -> Change:
    return Change(operations=list(operations), objects=[ObjectRef(), PACK], after=after)


async def fresh(site: Site) -> dict[str, tuple[object, ...]]:
    """What a mount without any cache makes of the store."""
    site.clock.seconds += 1
    with site.daemon(f"fresh{len(list(site.root.iterdir()))}") as daemon:
        await daemon.poller.poll()
        return daemon.shown()


OVERTAKEN = {
    "removal": change(Remove("f", by_date=True)),
    "removal_without_etag": change(Remove("f")),
    "rename": change(moved("f"), Remove("g", by_date=True)),
    "link": change(link("f", "ours")),
}


@pytest.mark.parametrize("way", ["heard", "unheard", "died", "read_again", "indexed"])
@pytest.mark.parametrize("what", OVERTAKEN)
async def test_late_change_leaves_the_version_that_another_node_stored_since(
    tmp_path: Path, what: str, way: str
) -> None:
    """Also where the names come from an index, which says nothing of the versions before."""
    site = Site(tmp_path)
    with site.daemon("b") as b:
        with site.daemon("a") as a:
            await a.committer.commit(change(link("f", "before"), link("g", "g"), link("h", "h")))
            await b.poller.poll()
            site.clock.seconds = 10
            a.committer.enqueue(OVERTAKEN[what])
            a.enqueue(Remove("h", by_date=True))
            site.clock.seconds = LATER_S
            await b.committer.commit(change(link("f", "theirs")))
            if way in ("heard", "died"):
                await a.poller.poll()
            assert target(a, "f") != "theirs"  # until it is sent, the change counts here
            if way in ("read_again", "indexed"):
                drop_names(a.database)
            if way == "indexed":
                await a.poller.poll()
                for _ in a.applier.forget_histories(site.clock() + 1):
                    pass
        with site.daemon("a") as a:  # the journal of the last one
            site.clock.seconds += 1
            await a.committer.reconcile_journal()
            await a.poller.poll()
            await a.committer.flush()
            assert target(a, "f") == "theirs" and a.find("h") is None
            assert (a.find("g") is None) == (what == "rename")
            assert not a.committer.journal.changes and a.metrics.withdrawn > 0
            await a.poller.poll()
            await b.poller.poll()
            assert a.shown() == b.shown() == await fresh(site)


async def test_late_change_is_withdrawn_while_the_daemon_runs(tmp_path: Path) -> None:
    """What was held is sent when the files before it are in the store; the kernel is notified of the name."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        await a.committer.commit(change(link("f", "before")))
        await b.poller.poll()
        a.committer.enqueue(change(Remove("f", by_date=True), after=1))
        site.clock.seconds = 1
        await b.committer.commit(change(link("f", "theirs")))
        await a.poller.poll()
        await a.committer.flush()
        assert a.find("f") is None and a.committer.journal.operations == 1
        a.watcher.told.clear()
        a.acknowledged.durable_up_to = 1
        site.clock.seconds = 2
        await a.committer.flush()
        assert target(a, "f") == "theirs" and b"f" in a.watcher.told
        await b.poller.poll()
        assert a.shown() == b.shown() == await fresh(site)


async def test_late_change_leaves_a_plain_object_that_no_commit_names(tmp_path: Path) -> None:
    """The version of the very time of the change, which no listing has covered yet, is back."""
    site = Site(tmp_path)
    site.store.put("elsewhere", b"x")
    with site.daemon("a") as a:
        await a.committer.commit(change(link("f", "before")))
        a.committer.enqueue(change(moved("f"), moved("g", hides=site.store.put("g", b"before").etag)))
        site.clock.seconds = LATER_S
        site.store.put("f", b"theirs")
        site.store.requests.clear()
        await a.committer.flush()
        of_names = [each for each in site.store.requests if not each.key.startswith(".lakefs/")]
        assert [each.what for each in of_names] == ["list", "head", "head"]  # both names, the newer, and "elsewhere"
        assert sorted(a.shown()) == ["f", "g"] and target(a, "f") == "before"
        assert a.shown() == await fresh(site)


async def test_late_rename_of_many_names_leaves_newer_versions_at_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that such a rename moves have no history when it is journaled."""
    for module in name_history, path_tree:
        monkeypatch.setattr(module, "MOVED_MAX", 0)
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        await a.committer.commit(change(link("f", "before")))
        await b.poller.poll()
        site.clock.seconds = 10
        a.committer.enqueue(a.rename("f", "g"))
        for seconds in LATER_S, LATER_S + 1:
            site.clock.seconds = seconds
            await b.committer.commit(change(link("f", f"theirs at {seconds}")))
            await a.poller.poll()
        site.clock.seconds += LATER_S
        for _ in a.applier.forget_histories(site.clock()):
            pass
        await a.committer.flush()
        await b.poller.poll()
        assert (target(a, "f"), target(a, "g")) == (f"theirs at {LATER_S + 1}", "before")
        assert a.shown() == b.shown() == await fresh(site)


async def test_late_changes_of_one_name_leave_a_newer_version_however_many_they_are(tmp_path: Path) -> None:
    """A job on a node that is cut off points a link at each of its checkpoints. The name was that of an object once."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        await a.committer.commit(change(Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides="e1")))
        await a.committer.commit(change(Remove("f", hides="e1"), link("f", "before")))
        await b.poller.poll()
        for number in range(3 * name_history.FACTS_MAX):
            site.clock.seconds += 1
            a.enqueue(link("f", f"ours {number}"))
        site.clock.seconds = LATER_S
        await b.committer.commit(change(link("f", "theirs")))
        await a.committer.flush()
        for each in (a, b):
            await each.poller.poll()
        assert target(a, "f") == "theirs"
        assert a.shown() == b.shown() == await fresh(site)


@pytest.mark.parametrize("theirs", ["relocated", "removed"])
async def test_late_rename_of_bytes_that_are_gone_leaves_what_others_see(tmp_path: Path, theirs: str) -> None:
    """A collection, or another node's removal, has deleted the object that the journaled rename names."""
    site = Site(tmp_path)
    old, new = (site.store.put(key, b"x") for key in (".lakefs/objects/old", ".lakefs/objects/new"))
    objects = [ObjectRef(), *(ObjectRef(meta.key, meta.etag, 1) for meta in (old, new))]
    operations: list[Operation] = [Remove("f", by_date=True)]
    if theirs == "relocated":
        operations = [Relocate("f", 1, 0, "", 2, 0, 1, 0o644, 0, 0, 0)]
    with site.daemon("b") as b:
        with site.daemon("a") as a:
            await a.committer.commit(Change(operations=[moved("f")], objects=objects))
            await b.poller.poll()
            a.committer.enqueue(a.rename("f", "g"))
            site.clock.seconds = LATER_S
            await b.committer.commit(Change(operations=operations, objects=objects))
            site.store.delete(old.key)
            if theirs == "relocated":  # and the names are read again
                drop_names(a.database)
                await a.poller.poll()
        with site.daemon("a") as a:
            await a.poller.poll()
            await a.committer.flush()
            await b.poller.poll()
            assert list(a.shown()) == (["f"] if theirs == "relocated" else [])
            assert a.shown() == b.shown() == await fresh(site)


@pytest.mark.parametrize("is_heard", [False, True])
@pytest.mark.parametrize("dies", [False, True])
async def test_rename_of_bytes_that_were_deleted_while_the_node_was_away_is_left_out(
    tmp_path: Path, dies: bool, is_heard: bool
) -> None:
    """The rename is young; what the node knew of the file when it was made is old. The next daemon, which begins within
    the second, does not know when the last one heard of others."""
    site = Site(tmp_path)
    old = site.store.put(".lakefs/objects/old", b"x")
    objects = [ObjectRef(), ObjectRef(old.key, old.etag, 1)]
    with site.daemon("b") as b:
        with site.daemon("a") as a:
            await a.committer.commit(Change(operations=[moved("f")], objects=objects))
            for each in (a, b):
                await each.poller.poll()
            site.clock.seconds = LATER_S
            await b.committer.commit(change(link("f", "theirs")))
            site.clock.seconds += 600
            site.store.delete(old.key)
            a.committer.enqueue(a.rename("f", "g"))
            site.clock.seconds += 1
            if is_heard:  # by a poll that ended before the change is sent
                await a.poller.poll()
            if dies:
                site.kill(a, "a2")
            else:
                await check_rename_is_left_out(site, a, b)
        if dies:
            with site.daemon("a2") as again:
                await again.committer.reconcile_journal()
                if is_heard:
                    await again.poller.poll()
                await check_rename_is_left_out(site, again, b)


async def check_rename_is_left_out(site: Site, a: Daemon, b: Daemon) -> None:
    await a.committer.flush()
    for each in (a, b):
        await each.poller.poll()
    assert list(a.shown()) == ["f"] and target(a, "f") == "theirs"
    assert a.shown() == b.shown() == await fresh(site)


@pytest.mark.parametrize("what", ["file", "link"])
async def test_file_is_back_whole_after_a_rename_over_it_is_left_out(tmp_path: Path, what: str) -> None:
    """Nothing else has its object, or its target, which goes with its row."""
    site = Site(tmp_path)
    old, other = (site.store.put(f".lakefs/objects/{name}", b"x") for name in ("old", "other"))
    objects = [ObjectRef(), *(ObjectRef(meta.key, meta.etag, 1) for meta in (old, other))]
    there = Put("g", 2, 0, 1, 0o644, 0, 0, 0, xattrs={"user.x": b"y"}) if what == "file" else link("g", "before")
    with site.daemon("a") as a, site.daemon("b") as b:
        await a.committer.commit(Change(operations=[moved("f"), there], objects=objects))
        for each in (a, b):
            await each.poller.poll()
        a.committer.enqueue(a.rename("f", "g"))
        site.clock.seconds = LATER_S
        await b.committer.commit(change(link("f", "theirs")))
        site.store.delete(old.key)
        await a.committer.flush()
        for each in (a, b):
            await each.poller.poll()
        assert a.shown() == b.shown() == await fresh(site)
        assert sorted(a.shown()) == ["f", "g"]


@pytest.mark.parametrize("ours", ["rename", "removal"])
async def test_name_is_what_others_see_after_a_change_of_a_file_that_was_relocated_is_left_out(
    tmp_path: Path, ours: str
) -> None:
    """`gc` has moved the bytes of the file while the node that had replaced or removed it was cut off."""
    site = Site(tmp_path)
    old, other, new = (site.store.put(f".lakefs/objects/{name}", b"x") for name in ("old", "other", "new"))
    objects = [ObjectRef(), *(ObjectRef(meta.key, meta.etag, 1) for meta in (old, other, new))]
    there = Put("g", 2, 0, 1, 0o644, 0, 0, 0)
    with site.daemon("a") as a, site.daemon("b") as b:
        await a.committer.commit(Change(operations=[moved("f"), there], objects=objects))
        for each in (a, b):
            await each.poller.poll()
        a.committer.enqueue(a.rename("f", "g") if ours == "rename" else change(Remove("g", by_date=True)))
        site.clock.seconds = LATER_S
        relocate = Relocate("g", 3, 0, "", 2, 0, 1, 0o644, 0, 0, 0)
        await b.committer.commit(Change(operations=[relocate], objects=objects))
        await a.poller.poll()
        site.clock.seconds += LATER_S
        await b.committer.commit(change(link("f" if ours == "rename" else "g", "theirs")))
        for meta in (old, other):
            site.store.delete(meta.key)
        await a.committer.flush()
        for each in (a, b):
            await each.poller.poll()
        assert a.shown() == b.shown() == await fresh(site)
        assert sorted(a.shown()) == ["f", "g"]


KEPT: dict[str, tuple[Callable[[Daemon], Change], list[Operation]]] = {
    "another_removed_it": (lambda _: change(Remove("f", by_date=True)), [link("f", "ours")]),
    "another_set_attributes": (
        lambda b: Change(
            operations=[SetAttr("f", 1, b.found("f").offset, 1, "", 0o600, 0, 0, 0)],
            objects=[ObjectRef(), pack_of(b, "f")],
        ),
        [link("f", "ours")],
    ),
    "another_made_a_directory": (lambda _: change(Mkdir("f", 0o755, 0, 0, 0)), [link("f", "ours")]),
    "another_named_the_object_that_is_hidden": (
        lambda _: change(Put("f", OWN, 0, 1, 0o644, 0, 0, 0, hides="e1")),
        [Symlink("f", "ours", 0, 0, 0, hides="e1")],
    ),
}


def pack_of(daemon: Daemon, path: str) -> ObjectRef:
    row = daemon.tree.objects.get(daemon.found(path).place)
    assert row is not None
    return ObjectRef(row.key, row.etag, row.size)


@pytest.mark.parametrize("what", KEPT)
async def test_late_change_counts_over_what_is_no_newer_version(tmp_path: Path, what: str) -> None:
    theirs, ours = KEPT[what]
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        member = Member("f", b"x", 1, 0o644, 0, 0, 0)
        await a.committer.commit(Change(operations=[Put("f", THIS, 0, 1, 0o644, 0, 0, 0)]), [member])
        await b.poller.poll()
        a.enqueue(*ours)
        site.clock.seconds = LATER_S
        await b.committer.commit(theirs(b))
        site.clock.seconds += 1
        await a.committer.flush()
        assert f"{link('f', 'ours').target}" in str((await fresh(site))["f"])


async def test_removal_that_names_a_plain_object_is_sent_over_a_newer_version(tmp_path: Path) -> None:
    """It touches no other version, and others must learn that this one is gone."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        a.enqueue(Remove("f", hides="e1"))
        site.clock.seconds = LATER_S
        await b.committer.commit(change(link("f", "theirs")))
        await a.committer.flush()
        for daemon in (a, b):
            await daemon.poller.poll()
            assert target(daemon, "f") == "theirs"
        tombstone = b.tree.tombstones.get(b"f")
        assert tombstone is not None and tombstone.when_named("e1")


@pytest.mark.parametrize("way", ["heard", "unheard", "read_again"])
@pytest.mark.parametrize("is_dated", [False, True])
async def test_removal_that_names_a_plain_object_leaves_the_same_bytes_that_are_stored_again(
    tmp_path: Path, is_dated: bool, way: str
) -> None:
    """Their ETag is the same, which makes no version of them: markers without bytes are written by every run of a job.
    Another program's object, of which no commit tells, is not asked for."""
    site = Site(tmp_path)
    meta = site.store.put("f", b"")
    with site.daemon("b") as b:
        with site.daemon("a") as a:
            await a.committer.commit(change(Put("f", OWN, 0, 0, 0o644, 0, 0, 0, hides=meta.etag)))
            await b.poller.poll()
            site.clock.seconds = 10
            a.enqueue(Remove("f", hides=meta.etag), doomed=(Deletion("f", meta.etag),))
            site.clock.seconds = LATER_S
            site.store.put("f", b"")
            again = Put("f", OWN, 0, 0, 0o644, 0, 0, 0, hides=meta.etag)
            if is_dated:
                again = replace(again, dated_s=site.clock() // NS)
            await b.committer.commit(change(again) if is_dated else change(Remove("f"), again))
            if way == "heard":
                await a.poller.poll()
            if way == "read_again":
                drop_names(a.database)
        with site.daemon("a") as a:
            await a.poller.poll()
            await a.committer.flush()
            await b.poller.poll()
            assert list(a.shown()) == ["f"] and not a.doomed() and not a.committer.journal.changes
            assert a.shown() == b.shown() == await fresh(site)


@pytest.mark.parametrize("way", ["heard", "unheard"])
@pytest.mark.parametrize("end", [moved("f", hides="e1"), Remove("f", hides="e1"), link("f", "theirs")])
async def test_late_change_does_not_tell_of_a_version_that_another_node_has_replaced_or_removed(
    tmp_path: Path, end: Put | Remove | Symlink, way: str
) -> None:
    """A node has stored a plain object, and dies before the commit that tells of it."""
    site = Site(tmp_path)
    end = replace(end, hides="e1")
    told = replace(change(Put("f", OWN, 0, 4, 0o644, 0, 0, 0, hides="e1")), ahead=True)
    with site.daemon("b") as b:
        with site.daemon("a") as a:
            a.committer.enqueue(told)
            site.clock.seconds = LATER_S
            await b.committer.commit(change(end))
            if way == "heard":
                await a.poller.poll()
        with site.daemon("a") as a:
            await a.committer.flush()
            for daemon in (a, b):
                await daemon.poller.poll()
            assert not a.committer.journal.changes
            assert a.shown() == b.shown() == await fresh(site)
            entry = b.find("f")
            assert entry is None if isinstance(end, Remove) else entry is not None and not entry.is_plain


async def test_late_change_tells_of_a_version_that_stands(tmp_path: Path) -> None:
    """Another node has removed the version that was there before it."""
    site = Site(tmp_path)
    with site.daemon("b") as b, site.daemon("a") as a:
        await b.committer.commit(change(Put("f", OWN, 0, 4, 0o644, 0, 0, 0, hides="e0")))
        await a.poller.poll()
        a.committer.enqueue(replace(change(Put("f", OWN, 0, 4, 0o644, 0, 0, 0, hides="e1")), ahead=True))
        site.clock.seconds = LATER_S
        await b.committer.commit(change(Remove("f", hides="e0")))
        await a.committer.flush()
        for daemon in (a, b):
            await daemon.poller.poll()
            assert daemon.found("f").etag == "e1"


@pytest.mark.parametrize("is_read_again", [False, True])
async def test_change_that_builds_on_one_sent_before_it_is_not_withdrawn(tmp_path: Path, is_read_again: bool) -> None:
    """This node's own commit is later than the change. Commits may be applied again, or all names be read again."""
    site = Site(tmp_path)
    with site.daemon("a") as a:
        a.enqueue(link("f", "first"))
        a.committer.enqueue(change(Remove("f", by_date=True), after=1))
        site.clock.seconds = 5
        await a.committer.flush()
        a.applier.commits.forget_all()
        await a.poller.poll()
        assert a.committer.journal.operations == 1 and a.committer.journal.sent
        if is_read_again:
            drop_names(a.database)
    with site.daemon("b") as b:
        await b.poller.poll()
        assert target(b, "f") == "first"
    with site.daemon("a") as a:
        a.acknowledged.durable_up_to = 1
        await a.poller.poll()
        await a.committer.flush()
        assert a.find("f") is None and not a.committer.journal.sent
    assert await fresh(site) == {}


async def test_change_of_a_version_that_replaced_another_nodes_is_not_withdrawn(tmp_path: Path) -> None:
    """The other node's version is newer than the change, but older than the commit of the version that it is about."""
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        for each in (a, b):
            await each.poller.poll()
        a.enqueue(link("f", "ours"))
        a.committer.enqueue(change(link("g", "ours"), Remove("f", by_date=True), after=1))
        site.clock.seconds = 1
        await b.committer.commit(change(link("f", "theirs")))
        site.clock.seconds = 2
        await a.committer.flush()
        await a.poller.poll()
        a.acknowledged.durable_up_to = 1
        site.clock.seconds = 3
        await a.committer.flush()
        await b.poller.poll()
        assert a.shown() == b.shown() == await fresh(site)
        assert b.find("f") is None and target(b, "g") == "ours"


async def test_withdrawal_that_the_disk_ends_is_completed_by_the_next_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    with site.daemon("a") as a, site.daemon("b") as b:
        await a.committer.commit(change(link("f", "before")))
        await b.poller.poll()
        a.enqueue(Remove("f", by_date=True))
        site.clock.seconds = LATER_S
        await b.committer.commit(change(link("f", "theirs")))
        with monkeypatch.context() as patched:
            patched.setattr(ChangeJournal, "replace", refuse)
            with pytest.raises(CacheError):
                await a.committer.flush()
    with site.daemon("a") as a:
        await a.committer.flush()
        assert target(a, "f") == "theirs" and not a.committer.journal.changes
    assert "theirs" in str((await fresh(site))["f"])


def refuse(*_: object) -> None:
    raise CacheError("the machine lost its power")
