"""One file from the shards of torch.distributed.checkpoint, as torch and safetensors read it."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from lakefs_fuse.checkpoints import consolidate as module
from lakefs_fuse.checkpoints import sharded
from lakefs_fuse.checkpoints.consolidate import consolidate
from lakefs_fuse.checkpoints.torch_pickle import DTYPE_BYTES
from lakefs_fuse.cli import run
from lakefs_fuse.errors import LakeError

if TYPE_CHECKING:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors import torch as safetensors_torch
else:

    class LazyModule:
        """A module that its first use imports: torch takes nine seconds of CPU, and each worker collects this file."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("_"):  # pytest asks all global objects for marks
                raise AttributeError(attribute)
            return getattr(importlib.import_module(self._name), attribute)

    torch, dcp = LazyModule("torch"), LazyModule("torch.distributed.checkpoint")
    safetensors_torch = LazyModule("safetensors.torch")

FOUR_RANKS = Path(__file__).parents[1] / "fixtures" / "four_ranks"
"""What `RANKS` saved with torch 2.13."""
RANKS = """
# torch._dynamo is imported for all ranks before the fork: distribute_tensor would import it in each of them.
import os, sys, torch, torch._dynamo, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
torch.set_num_threads(1)
directory, rank, others = sys.argv[1], 3, []
for number in range(3):
    others.append(os.fork())
    if not others[-1]:
        rank, others = number, []
        break
dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
torch.manual_seed(1)
placed = {
    "rows": ((10, 6), [Shard(0), Shard(0)]), "columns": ((7, 12), [Shard(1), Shard(1)]),
    "both": ((9, 5, 4), [Shard(0), Shard(1)]), "last": ((3, 2, 8), [Shard(2), Shard(1)]),
    "copies": ((3,), [Replicate(), Replicate()]), "few": ((2,), [Shard(0), Shard(0)]),
}
full = {name: torch.rand(*size) for name, (size, _) in placed.items()}
state = {name: distribute_tensor(full[name], mesh, where) for name, (_, where) in placed.items()}
dcp.save({"model": state, "step": 3}, checkpoint_id=f"{directory}/shards")
if rank == 0:
    torch.save(full, f"{directory}/full.pt")
dist.destroy_process_group()
sys.exit(any(os.waitpid(other, 0)[1] for other in others))
"""


def save(directory: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(directory))
    return directory


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        first, second = (each.reshape(-1).view(torch.uint8) for each in (one, other))
        return bool((one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(first, second))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def ordered(value: Any) -> Any:
    """Names are stored in no order."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    return [ordered(each) for each in value] if isinstance(value, list) else value


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_values_of_every_kind_are_those_that_were_saved(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "none": torch.zeros(0, 3), "one": torch.tensor(5)},
        "types": {name: torch.ones(3).to(getattr(torch, name)) for name in DTYPE_BYTES if hasattr(torch, name)},
        "step": 7,
        "optimizer": {
            "lr": 0.1, "betas": (0.9, 0.99), "state": [torch.zeros(3), {"x": torch.ones(1)}], "name": "adämß",
            "big": -(1 << 100), "flags": [True, False, None], "empty": [], "dtype": torch.bfloat16,
        },
    }  # fmt: skip
    made = consolidate(save(tmp_path / "shards", state), tmp_path / "all.pt")
    assert made.left_out == []
    for options in ({}, {"mmap": True}):
        found = torch.load(tmp_path / "all.pt", weights_only=True, **options)
        assert same(ordered(found), ordered(state))
    assert [path.name for path in tmp_path.iterdir()].count("all.pt") == 1
    assert len(list(tmp_path.iterdir())) == 2
    with zipfile.ZipFile(tmp_path / "all.pt") as archive:
        assert archive.testzip() is None


def test_safetensors_have_the_tensors_below_a_prefix(tmp_path: Path) -> None:
    model = {"a": torch.rand(3, 4), "b": {"c": torch.ones(5, dtype=torch.bfloat16), "d": torch.tensor([True])}}
    shards = save(tmp_path / "shards", {"model": model, "optimizer": {"m": torch.zeros(9)}, "step": 1})
    made = consolidate(shards, tmp_path / "m.safetensors", prefix="model.")
    found = safetensors_torch.load_file(tmp_path / "m.safetensors")
    assert same(ordered(found), {"a": model["a"], "b.c": model["b"]["c"], "b.d": model["b"]["d"]})
    assert (made.tensors, made.objects, made.format) == (3, 0, "safetensors")
    consolidate(shards, tmp_path / "m.pt", prefix="model.")
    assert same(ordered(torch.load(tmp_path / "m.pt")), ordered(model))
    for prefix, expected in {"mod": {"el": model}, "model.b.": model["b"], "model.b.c": {"c": model["b"]["c"]}}.items():
        consolidate(shards, tmp_path / "m.pt", prefix=prefix, force=True)
        assert same(ordered(torch.load(tmp_path / "m.pt")), ordered(expected)), prefix
    assert consolidate(shards, tmp_path / "all.safetensors").left_out == ["step"]
    with pytest.raises(LakeError, match="complex128, which safetensors does not have"):
        consolidate(save(tmp_path / "c", {"c": torch.zeros(1, dtype=torch.complex128)}), tmp_path / "c.safetensors")


@pytest.mark.parametrize("torch_version", ["2.13", pytest.param("installed", marks=pytest.mark.long)])
def test_shards_of_four_ranks_in_any_dimension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_version: str
) -> None:
    """Four ranks take thirteen seconds of CPU to save what they saved once with another version."""
    saved = FOUR_RANKS if torch_version == "2.13" else tmp_path
    if saved == tmp_path:
        subprocess.run([sys.executable, "-W", "ignore", "-c", RANKS, str(tmp_path)], check=True, timeout=120)
    full = torch.load(saved / "full.pt")
    for slab_bytes in (8 << 20, 100, 16):
        monkeypatch.setattr(sharded, "SLAB_BYTES", slab_bytes)
        consolidate(saved / "shards", tmp_path / "one.pt", force=True)
        found = torch.load(tmp_path / "one.pt")
        assert found["step"] == 3
        assert same(ordered(found["model"]), ordered(full)), slab_bytes


def test_memory_does_not_depend_on_the_size_of_tensors(tmp_path: Path) -> None:
    shards = save(tmp_path / "shards", {f"w{number}": torch.rand(4 << 20) for number in range(6)})
    measure = (
        "import resource, sys; from pathlib import Path\n"
        "from lakefs_fuse.checkpoints.consolidate import consolidate\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "consolidate(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", measure, str(shards), str(tmp_path / "one.pt")],
        capture_output=True,
        text=True,
        check=True,
    )
    grown_kib, has_torch = done.stdout.split()
    assert int(grown_kib) < 48 << 10, "of 96 MiB"
    assert has_torch == "False"


def damaged(shards: Path, at: int) -> None:
    path = next(shards.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_and_what_is_missing_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "one.pt"
    target.write_bytes(b"before")
    shards = save(tmp_path / "shards", {"w": torch.full((100_000,), 7.0)})
    with pytest.raises(LakeError, match="exists: --force"):
        consolidate(shards, target)
    damaged(shards, 200_000)
    with pytest.raises(LakeError, match=r"w in .* is damaged"):
        consolidate(shards, target, force=True)
    damaged(shards, 200_000)
    monkeypatch.setattr(module, "copy_tensor", lambda *_: 1)
    with pytest.raises(LakeError, match="was not written as it was read"):
        consolidate(shards, target, force=True)
    monkeypatch.undo()
    next(shards.glob("*.distcp")).unlink()
    with pytest.raises(LakeError, match="No such file"):
        consolidate(shards, target, force=True)
    with pytest.raises(LakeError, match=r"has no \.metadata"):
        consolidate(tmp_path, target, force=True)
    with pytest.raises(LakeError, match=r"nothing in .* begins with 'x\.'"):
        consolidate(shards, target, prefix="x.", force=True)
    assert target.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.pt", "shards"]


def test_tensor_whose_bytes_are_not_its_values_is_refused(tmp_path: Path) -> None:
    """torch.save keeps the bytes of the tensor that a conjugate is a view of."""
    conjugate = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    shards = save(tmp_path / "shards", {"z": conjugate})
    with pytest.raises(LakeError, match=r"z in .*: its bytes are the conjugates or negatives of its values"):
        consolidate(shards, tmp_path / "one.pt")
    consolidate(save(tmp_path / "resolved", {"z": conjugate.resolve_conj()}), tmp_path / "one.pt")
    assert torch.equal(torch.load(tmp_path / "one.pt")["z"], conjugate)


def test_shards_that_were_saved_without_checksums_are_read(tmp_path: Path) -> None:
    state = {"w": torch.rand(100), "step": 3}
    torch.serialization.set_crc32_options(False)
    try:
        shards = save(tmp_path / "shards", state)
    finally:
        torch.serialization.set_crc32_options(True)
    consolidate(shards, tmp_path / "one.pt")
    assert same(ordered(torch.load(tmp_path / "one.pt")), ordered(state))


def test_target_that_cannot_be_written_is_an_error_that_says_why(tmp_path: Path) -> None:
    shards = save(tmp_path / "shards", {"w": torch.ones(3)})
    (tmp_path / "file").touch()
    with pytest.raises(LakeError, match="Not a directory"):
        consolidate(shards, tmp_path / "file" / "one.pt")
    for directory in (tmp_path, Path("/"), Path()):
        with pytest.raises(LakeError, match="is a directory"):
            consolidate(shards, directory, force=True)
    with pytest.raises(LakeError, match="File name too long"):
        consolidate(shards, tmp_path / ("n" * 256))
    consolidate(shards, tmp_path / ("ä" * 127))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("it runs",)


def test_no_code_of_a_pickle_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shards = save(tmp_path / "shards", {"w": torch.ones(3), "evil": Evil(), "some": {1, 2}})
    capfd.readouterr()
    with pytest.raises(LakeError, match=r"evil: it holds a __builtin__\.print"):
        consolidate(shards, tmp_path / "one.pt")
    assert consolidate(shards, tmp_path / "one.pt", tensors_only=True).left_out == ["evil", "some"]
    (shards / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(LakeError, match=r"holds a builtins\.print"):
        consolidate(shards, tmp_path / "two.pt")
    (shards / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(LakeError, match="cannot be read"):
        consolidate(shards, tmp_path / "two.pt")
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("boxes", "is_refused"),
    [
        ([((0, 0), (2, 6)), ((0, 0), (2, 6))], True),
        ([((0, 0), (2, 4)), ((0, 3), (4, 3)), ((2, 0), (2, 2))], True),
        ([((0, 0), (2, 4)), ((0, 4), (4, 2)), ((2, 0), (2, 4))], False),
        ([((0, 0), (4, 6)), ((0, 6), (4, 0)), ((4, 0), (0, 6))], False),
    ],
)
def test_chunks_that_overlap_are_an_error_though_their_sum_is_right(
    boxes: list[tuple[tuple[int, int], tuple[int, int]]], is_refused: bool, tmp_path: Path
) -> None:
    shards = save(tmp_path / "shards", {"w": torch.ones(4, 6)})
    path = shards / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (info,) = metadata.storage_data.values()
    metadata.state_dict_metadata["w"].chunks = [
        dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
    ]
    metadata.storage_data = {dcp.metadata.MetadataIndex("w", torch.Size(offsets)): info for offsets, _ in boxes}
    path.write_bytes(pickle.dumps(metadata))
    if is_refused:
        with pytest.raises(LakeError, match="the chunks of w overlap"):
            sharded.ShardedCheckpoint(shards)
    else:
        sharded.ShardedCheckpoint(shards)


def test_damaged_bytes_anywhere_are_an_error_that_says_so(tmp_path: Path) -> None:
    shards = save(tmp_path / "shards", {"w": torch.rand(100), "step": 3, "b": torch.ones(2, 3)})
    errors = 0
    for path in sorted(shards.iterdir()):
        before, rng = path.read_bytes(), Random(path.name)
        for _ in range(150):
            data = bytearray(before)
            data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])
            try:
                consolidate(shards, tmp_path / "one.pt", force=True)
            except LakeError:
                errors += 1
        path.write_bytes(before)
    assert errors > 100
    consolidate(shards, tmp_path / "one.pt", force=True)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b"])
def test_shards_outside_of_the_directory_are_not_read(name: str, tmp_path: Path) -> None:
    shards = save(tmp_path / "shards", {"w": torch.ones(3)})
    path = shards / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(LakeError, match="a shard is said to lie at"):
        consolidate(shards, tmp_path / "one.pt")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (("l", 10**9), "position 1000000000 of a list"),
        (("l", -1), "position -1 of a list"),
        (("l", 0), "place of two values"),
        (("l",), "place of two values"),
        (("l", "0"), "leads through a list"),
        (("l", 0, "x"), "leads through a value"),
        (("l", 1), ""),
        (("l", 5000), ""),  # those before may be empty dictionaries
    ],
)
def test_place_where_no_second_value_can_be_is_an_error(place: tuple[str | int, ...], why: str, tmp_path: Path) -> None:
    shards = save(tmp_path / "shards", {"l": [torch.ones(3)], "w": torch.zeros(3)})
    path = shards / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data["w"] = place
    path.write_bytes(pickle.dumps(metadata))
    if why:
        with pytest.raises(LakeError, match=why):
            consolidate(shards, tmp_path / "one.pt")
        return
    consolidate(shards, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)["l"]
    assert same(found[0], torch.ones(3))
    assert same(found[-1], torch.zeros(3))
    assert len(found) == int(place[-1]) + 1


def test_command_says_what_it_wrote(tmp_path: Path) -> None:
    shards = save(tmp_path / "shards", {"w": torch.ones(3), "step": 1})
    command = [sys.executable, "-m", "lakefs_fuse", "checkpoint", "consolidate", str(shards)]
    done = subprocess.run([*command, str(tmp_path / "one.safetensors")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 tensor, 12 B" in done.stdout
    assert "omitted, because they are not tensors: step" in done.stderr
    done = subprocess.run([*command, str(tmp_path / "one.pt"), "--json"], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["objects"] == 1
    done = subprocess.run([*command, "s3://lake/one.pt"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is a URL" in done.stderr


@pytest.mark.parametrize("name", ["one.pt", "one.safetensors"])
def test_file_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target, shards = tmp_path / name, save(tmp_path / "shards", {"w": torch.ones(3)})
    synced: list[tuple[int, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_size, target.exists())))
    assert run(["checkpoint", "consolidate", str(shards), str(target)]) == 0
    assert synced == [(target.stat().st_size, False)]


def test_target_that_appears_during_the_run_is_kept(tmp_path: Path) -> None:
    target, shards = tmp_path / "one.pt", save(tmp_path / "shards", {"w": torch.full((10,), 7.0)})
    with pytest.raises(LakeError, match="was made meanwhile: --force"):
        consolidate(shards, target, advanced=lambda _: target.write_bytes(b"of another"))
    assert target.read_bytes() == b"of another"


def test_runs_of_two_processes_for_one_target_write_to_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, shards = tmp_path / "one.pt", save(tmp_path / "shards", {"w": torch.full((10,), 7.0)})
    other_runs: list[object] = []

    def run_other(_: int) -> None:
        if not other_runs:
            other_runs.append("begun")
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: 1)
                other_runs.append(consolidate(shards, target, force=True))

    consolidate(shards, target, force=True, advanced=run_other)
    assert len(other_runs) == 2
    assert torch.equal(torch.load(target)["w"], torch.full((10,), 7.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.pt", "shards"]
