"""Checkpoints saved under temporary names and renamed: other nodes see whole checkpoints only."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import eventually
from tests.mount.test_commits import another

WATCHED = ("config.json", "model.safetensors", "optimizer.pt", "trainer_state.json")

TRANSFORMERS_STYLE = """
import json, os, sys, torch
from safetensors.torch import save_file
torch.set_num_threads(1)
root = sys.argv[1]
for step in range(3):
    staging, final = f"{root}/tmp-checkpoint-{step}", f"{root}/checkpoint-{step}"
    os.makedirs(staging)
    torch.manual_seed(step)
    save_file({"weight": torch.rand(300_000)}, f"{staging}/model.safetensors", metadata={"format": "pt"})
    with open(f"{staging}/config.json", "w") as file:
        json.dump({"step": step}, file)
    torch.save({"state": torch.rand(100_000), "step": step}, f"{staging}/optimizer.pt")
    with open(f"{staging}/trainer_state.json", "w") as file:
        json.dump({"global_step": step}, file)
    os.rename(staging, final)
    directory = os.open(root, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
"""

DISTRIBUTED = """
import sys, torch
import torch.distributed.checkpoint as dcp
torch.set_num_threads(1)
path = sys.argv[1] + "/dcp"
def state(seed):
    torch.manual_seed(seed)
    return {"model": {f"layer{i}": torch.rand(50_000) for i in range(8)}, "step": torch.tensor(seed)}
for seed in (1, 2):  # the second over the first
    dcp.save(state(seed), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
loaded = state(7)
dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), no_dist=True)
wanted = state(2)
assert torch.equal(loaded["step"], wanted["step"])
assert all(torch.equal(loaded["model"][name], wanted["model"][name]) for name in wanted["model"])
"""

SAFETENSORS = """
import os, sys, torch
from safetensors.torch import save_file, load_file
torch.set_num_threads(1)
path = sys.argv[1]
for seed in range(2):
    torch.manual_seed(seed)
    tensors = {"a": torch.rand(200_000), "b": torch.rand(100_000)}
    save_file(tensors, path + ".tmp")
    os.chmod(path + ".tmp", 0o640)
    os.rename(path + ".tmp", path)
    loaded = load_file(path)
    assert all(torch.equal(tensors[name], loaded[name]) for name in tensors)
"""


def run(script: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.long  # test_commits.py renames directories of many files
def test_checkpoint_directories_of_torch_appear_whole(make_lake: LakeMaker, tmp_path: Path) -> None:
    """As transformers saves: another node never sees a checkpoint with a file missing."""
    lake = make_lake("seaweedfs").mount()
    incomplete: list[str] = []
    done = threading.Event()
    with another(lake, tmp_path, "--refresh", "0.2", "--metadata-ttl", "0.2") as other:

        def watch() -> None:
            while not done.is_set():
                for name in os.listdir(other.path):
                    found = sorted(os.listdir(other.path / name)) if name.startswith("checkpoint-") else list(WATCHED)
                    if found != list(WATCHED):
                        incomplete.append(f"{name}: {found}")
                done.wait(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            run(TRANSFORMERS_STYLE, str(lake.path))
        finally:
            done.set()
            watcher.join()
        assert incomplete == []
        expected = [f"checkpoint-{step}" for step in range(3)]
        eventually(lambda: sorted(os.listdir(other.path)) == expected, "all are there")
        for name in expected:
            for file in WATCHED:
                assert (other.path / name / file).read_bytes() == (lake.path / name / file).read_bytes()


@pytest.mark.long  # which imports all of torch.distributed
def test_distributed_checkpoint_saved_twice_in_one_place_is_the_second(make_lake: LakeMaker, tmp_path: Path) -> None:
    lake = make_lake("seaweedfs").mount()
    with another(lake, tmp_path, "--refresh", "0.2", "--metadata-ttl", "0.2") as other:
        run(DISTRIBUTED, str(lake.path))
        distributed = contents(lake.path / "dcp")
        assert ".metadata" in distributed
        assert not [name for name in distributed if name.endswith(".tmp")]
        eventually((other.path / "dcp").exists, "it is seen")
        eventually(lambda: contents(other.path / "dcp") == distributed, "the second version is there")


@pytest.mark.long
def test_safetensors_with_a_temporary_name(make_lake: LakeMaker, tmp_path: Path) -> None:
    lake = make_lake("seaweedfs").mount()
    run(SAFETENSORS, str(lake.path / "model.safetensors"))
    assert os.listdir(lake.path) == ["model.safetensors"]
    with another(lake, tmp_path) as other:
        assert (other.path / "model.safetensors").read_bytes() == (lake.path / "model.safetensors").read_bytes()
        assert (other.path / "model.safetensors").stat().st_mode & 0o777 == 0o640
