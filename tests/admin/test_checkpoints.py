"""`checkpoint` without a mount, on a store in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lakefs_fuse.admin.checkpoints import NO_CHECKPOINT, run_checkpoint, run_verify
from lakefs_fuse.admin.work import Work
from lakefs_fuse.commits.record import Symlink
from lakefs_fuse.control.worker_protocol import CheckpointArgs, VerifyArgs
from tests.admin.lakes import give_commit, work_of
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock

URL = "s3://bucket/ckpt"
SUM = hashlib.sha256(b"weights").hexdigest()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    made = MemoryStore()
    made.clock = clock
    made.equal_bytes_have_equal_etags = True
    return made


@pytest.fixture
async def work(store: MemoryStore, clock: Clock, tmp_path: Path) -> Work:
    return replace(work_of(store, clock, tmp_path), path="ckpt")


async def verify(work: Work, *names: str) -> dict[str, str]:
    """The problems of all checkpoints, by path."""
    done = await run_verify(work, VerifyArgs(url=URL, names=names, md5_etags=True))
    checkpoints = done.summary["checkpoints"]
    assert isinstance(checkpoints, list)
    found = {each["path"]: each["problem"] for checked in checkpoints for each in checked["problems"]}
    assert done.exit_code == bool(found)
    return found


async def test_verify_of_an_emptied_file_finds_it_by_its_sum_and_header(store: MemoryStore, work: Work) -> None:
    store.give("ckpt/step1/weights.bin", b"weights")
    store.give("ckpt/step1/SHA256SUMS", f"{SUM}  weights.bin\n".encode())
    assert await verify(work) == {}
    store.give("ckpt/step1/weights.bin", b"")
    store.give("ckpt/step1/model.safetensors", b"")
    assert await verify(work) == {
        "weights.bin": "its SHA-256 is not the one in SHA256SUMS",
        "model.safetensors": "the length of its safetensors header is wrong",
    }


async def test_verify_takes_links_that_lists_name_as_there(store: MemoryStore, clock: Clock, work: Work) -> None:
    store.give("blobs/1", b"weights")
    store.give("ckpt/step1/config.json", b"{}")
    store.give("ckpt/step1/SHA256SUMS", f"{SUM}  weights.bin\n{SUM}  gone.bin\n".encode())
    shards = {"weight_map": {"a": "weights.bin", "b": "lost.bin"}}
    store.give("ckpt/step1/model.safetensors.index.json", json.dumps(shards).encode())
    give_commit(store, clock, Symlink("ckpt/step1/weights.bin", "../../blobs/1", 0, 0, 0))
    assert await verify(work) == {
        "gone.bin": "missing, though SHA256SUMS has it",
        "lost.bin": "missing, though model.safetensors.index.json names it",
    }


@pytest.mark.parametrize("name", ["ckpt/step1", "notes.txt", "step7"])
async def test_verify_of_a_name_that_is_no_checkpoint_says_how_to_find_one(
    store: MemoryStore, work: Work, name: str
) -> None:
    store.give("ckpt/step1/a.bin", b"weights")
    store.give("ckpt/notes.txt", b"notes")
    assert await verify(work, name) == {name: NO_CHECKPOINT}


@pytest.mark.parametrize("target", ["step1", "step1/deep/a.bin", "../ckpt/step1/deep/a.bin", "/mnt/ckpt/step1"])
async def test_listing_shows_into_which_checkpoint_a_link_leads(
    store: MemoryStore, clock: Clock, work: Work, target: str
) -> None:
    for step in (1, 2):
        store.give(f"ckpt/step{step}/deep/a.bin", b"weights")
    give_commit(store, clock, Symlink("ckpt/best", target, 0, 0, 0))
    done = await run_checkpoint(work, CheckpointArgs(action="ls", url=URL))
    checkpoints = done.summary["checkpoints"]
    assert isinstance(checkpoints, list)
    assert [each["name"] for each in checkpoints if each["linked"]] == ["step1"]
