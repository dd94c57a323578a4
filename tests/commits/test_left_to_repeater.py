"""Followers of many writers: what they leave to a repeater, and whose bundles are one's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.commits import repeater_election
from lakefs_fuse.commits.bundles import MIXED, Copy, bundle_key
from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.record import Mkdir
from tests.commits.committing import Daemon, Site


async def make(daemon: Daemon, name: str) -> None:
    await daemon.committer.commit(Change(operations=[Mkdir(name, 0o755, 0, 0, 0)]))


@pytest.mark.parametrize("is_believed", [False, True])
async def test_commits_that_are_left_to_a_repeater_are_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_believed: bool
) -> None:
    """Whatever this mount has committed itself since; also where an old bundle is taken for one of a repeater."""
    if is_believed:
        monkeypatch.setattr(repeater_election, "REPEATER_AGE_NS", 86_400_000_000_000)
    site = Site(tmp_path)
    site.clock.seconds = 1000.0
    with site.daemon("one") as one, site.daemon("two") as two:
        await make(one, "early")
        await two.poller.poll()
        for number in range(20):
            site.clock.seconds += 1
            await make(one, f"a{number}")
        metas = [site.store.objects[key][1] for key in site.commits()][-20:]
        copies = [Copy(meta.key, meta.etag, site.store.data(meta.key)) for meta in metas]
        site.store.give(bundle_key(copies, MIXED), msgspec.msgpack.encode(copies))
        site.clock.seconds += 600
        for number in range(20):
            site.clock.seconds += 1
            await make(one, f"b{number}")
        site.clock.seconds += 600
        await make(two, "own")
        await two.poller.poll_in_background()
        assert (two.find("b19") is None) == is_believed
        site.clock.seconds += 5
        await two.poller.poll()
        assert two.find("b19") is not None


async def test_bundle_of_this_mount_is_of_no_repeater(tmp_path: Path) -> None:
    """Nor is an old one of another."""
    site = Site(tmp_path)
    with site.daemon("one") as one, site.daemon("two") as two:
        for number in range(20):
            await make(one, f"a{number}")
        await two.poller.poll()
        assert two.log.bundles_written == 1
        for number in range(20):
            await make(one, f"b{number}")
        await two.poller.poll_in_background()
        assert two.find("b19") is not None
