"""`lakefs-fuse checkpoint` and the keep-newest policy, on SeaweedFS with checkpoints of torch."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lakefs_fuse.admin.checkpoints import NO_CHECKPOINT
from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, Lake, eventually, noise
from tests.servers import Server

SAVE = """
import sys, torch
torch.set_num_threads(1)
torch.manual_seed(1)
torch.serialization.set_crc32_options(sys.argv[1] == "crc32")
for path in sys.argv[2:]:
    torch.save({f"layer{i}": torch.rand(40_000) for i in range(4)}, path)
"""
JSON = dict[str, object]


def torch_save(*paths: Path, sums: str = "crc32") -> None:
    """Save a checkpoint in each file, no two the same."""
    subprocess.run([sys.executable, "-c", SAVE, sums, *map(str, paths)], check=True)


def ask(lake: Lake, action: str, path: str, *args: str, code: int = 0) -> JSON:
    done = lake.cli("checkpoint", action, path, *args, "--json")
    assert done.returncode == code, (done.stdout, done.stderr)
    found: JSON = json.loads(done.stdout)
    return found


def url_options(lake: Lake) -> tuple[str, ...]:
    return (*lake.options[: lake.options.index("--region") + 2], "--lake", lake.source)


def names(found: JSON) -> list[str]:
    items = found["checkpoints"]
    assert isinstance(items, list)
    return [item["name"] for item in items]


def of(found: JSON, name: str) -> dict[str, object]:
    items = found["checkpoints"]
    assert isinstance(items, list)
    (item,) = [item for item in items if item["name"] == name]
    assert isinstance(item, dict)
    return item


def problems(found: JSON, name: str) -> list[dict[str, str]]:
    listed = of(found, name)["problems"]
    assert isinstance(listed, list)
    return listed


def zipped(seed: int, size: int = 50_000) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as made:
        made.writestr("archive/data.pkl", noise(100, seed))
        made.writestr("archive/data/0", noise(size, seed + 1))
    return target.getvalue()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_listing_and_the_newest(s3: Lake) -> None:
    ckpt = s3.path / "ckpt"
    ckpt.mkdir()
    for step in (5, 10, 9):
        shards = ckpt / f"tmp-step{step}"
        shards.mkdir()
        for rank in range(2):
            (shards / f"rank{rank}.pt").write_bytes(zipped(step))
        shards.rename(ckpt / f"step{step}")
    (ckpt / "step11").mkdir()
    (ckpt / "tmp-step12").mkdir()
    (ckpt / "tmp-step12" / "rank0.pt").write_bytes(b"begun")
    (ckpt / "notes.txt").write_bytes(b"no checkpoint")
    s3.sync()
    for place, args in ((str(ckpt), ()), (f"{s3.source}/ckpt", url_options(s3))):
        found = ask(s3, "ls", place, *args)
        local = place == str(ckpt)
        empty = ["step11"] if local else []  # in a bucket, a directory without files is not seen from outside
        assert sorted(names(found)) == sorted(["tmp-step12", *empty, "step10", "step9", "step5"])
        assert [name for name in names(found) if name in ("step10", "step9", "step5")] == ["step10", "step9", "step5"]
        assert (found["latest"], found["order"]) == ("step10", "step")
        begun = of(found, "tmp-step12")
        assert (begun["complete"], begun["reason"]) == (False, "the name is a temporary one")
        assert of(found, "step9")["files"] == 2
        newest = s3.cli("checkpoint", "latest", place, *args)
        assert newest.stdout.strip() == f"{place}/step10", newest.stderr
        assert ask(s3, "latest", place, *args)["step"] == 10
    (ckpt / "step10" / "_SUCCESS").write_bytes(b"")
    (ckpt / "step9" / "_SUCCESS").write_bytes(b"")
    assert of(ask(s3, "ls", str(ckpt)), "step5")["reason"] == "no _SUCCESS"
    text = s3.cli("checkpoint", "ls", str(ckpt)).stdout
    assert "yes, newest" in text
    assert "no: no _SUCCESS" in text
    (ckpt / "none").mkdir()
    none = s3.cli("checkpoint", "latest", str(ckpt / "none"))
    assert (none.returncode, none.stdout) == (1, "")
    assert "has no complete checkpoint" in none.stderr


@pytest.mark.long
def test_verifying_reads_the_store(s3: Lake) -> None:
    ckpt = s3.path / "ckpt"
    (ckpt / "step1").mkdir(parents=True)
    torch_save(ckpt / "step1" / "a.pt", ckpt / "step1" / "b.pt", ckpt / "step2.pt")
    large = noise(18 * MIB, seed=3)  # two parts
    (ckpt / "step1" / "optimizer.bin").write_bytes(large)
    place, outside = str(ckpt), (f"{s3.source}/ckpt", *url_options(s3))
    good = ask(s3, "verify", place)
    assert good["bad"] == []
    assert of(good, "step1")["proofs"] == {"etag": 3, "zip": 2}
    assert ask(s3, "verify", *outside)["bad"] == []
    assert good["bytes"] == sum(path.stat().st_size for path in ckpt.rglob("*") if path.is_file())

    # Damage behind the mount's back that leaves size and name: this node's caches still have the right bytes.
    data = s3.outside.read("ckpt/step1/b.pt")
    s3.outside.replace("ckpt/step1/b.pt", flipped(data, len(data) // 2))
    assert (ckpt / "step1" / "b.pt").read_bytes() == data
    found = ask(s3, "verify", place, code=1)
    assert found["bad"] == ["step1"]
    (problem,) = problems(found, "step1")
    assert problem["path"] == "b.pt"
    assert "CRC-32" in problem["problem"]
    assert of(found, "step2.pt")["ok"]
    assert ask(s3, "verify", place, "step2.pt")["bad"] == []
    assert ask(s3, "verify", outside[0], "step1", *outside[1:], code=1)["bad"] == ["step1"]
    text = s3.cli("checkpoint", "verify", place)
    assert text.returncode == 1
    assert "step1: BAD" in text.stdout

    s3.outside.replace("ckpt/step1/b.pt", data[:-100])
    assert "cut short" in problems(ask(s3, "verify", place, "step1", code=1), "step1")[0]["problem"]
    assert problems(ask(s3, "verify", place, "step7", code=1), "step7") == [{"path": "step7", "problem": NO_CHECKPOINT}]


def test_verifying_by_lists_of_sums_and_of_shards(s3: Lake) -> None:
    ckpt = s3.path / "ckpt"
    (ckpt / "1").mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}).encode()
    (ckpt / "1" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"12345")
    (ckpt / "1" / "model.bin").write_bytes(b"weights")
    right = hashlib.sha256(b"weights").hexdigest()
    (ckpt / "1" / "SHA256SUMS").write_text(f"{right}  model.bin\n")
    index = {"weight_map": {"w": "model.safetensors"}}
    (ckpt / "1" / "model.safetensors.index.json").write_text(json.dumps(index))
    good = ask(s3, "verify", str(ckpt))
    assert good["bad"] == []
    proofs = of(good, "1")["proofs"]
    assert isinstance(proofs, dict)
    assert (proofs["sha256"], proofs["safetensors"]) == (1, 1)
    (ckpt / "1" / "model.bin").write_bytes(b"weighty")
    (ckpt / "1" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    (ckpt / "1" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    bad = {item["path"]: item["problem"] for item in problems(ask(s3, "verify", str(ckpt), code=1), "1")}
    assert bad.keys() == {"model.bin", "model.safetensors", "gone.safetensors"}
    assert "SHA-256" in bad["model.bin"]
    assert "missing" in bad["gone.safetensors"]


@pytest.mark.long
def test_verifying_packed_files_and_renamed_ones(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", "--pack", "always").mount()
    ckpt = lake.path / "ckpt"
    (ckpt / "step1").mkdir(parents=True)
    (ckpt / "step1" / "a.pt").write_bytes(zipped(1))
    (ckpt / "step1" / "b.bin").write_bytes(noise(1000, 77))
    (ckpt / "large").write_bytes(noise(18 * MIB, 3))  # a plain object
    (ckpt / "large").rename(ckpt / "step1" / "c.bin")
    good = ask(lake, "verify", str(ckpt))
    assert good["bad"] == []
    assert of(good, "step1")["proofs"] == {"crc32": 2, "etag": 1, "zip": 1}
    (key,) = [key for key in lake.outside.objects() if noise(1000, 77) in lake.outside.read(key) and "commits" in key]
    pack = lake.outside.read(key)
    lake.outside.replace(key, flipped(pack, pack.index(noise(1000, 77)) + 500))
    found = ask(lake, "verify", str(ckpt), code=1)
    assert {item["path"] for item in problems(found, "step1")} >= {"b.bin"}


@pytest.mark.long
def test_a_store_that_keeps_no_sums(lake: Lake) -> None:
    """A local directory: what a file does not bring itself cannot be proven, which is said and not guessed."""
    ckpt = lake.path / "ckpt"
    ckpt.mkdir()
    (ckpt / "1.bin").write_bytes(noise(1000, 1))
    (ckpt / "2.pt").write_bytes(zipped(1))
    for place in (str(ckpt), f"{lake.source}/ckpt"):
        found = ask(lake, "verify", place)
        assert (of(found, "1.bin")["unproven"], of(found, "2.pt")["proofs"]) == (1, {"zip": 1})
    assert "by their size only" in lake.cli("checkpoint", "verify", str(ckpt)).stdout
    lake.outside.replace("ckpt/2.pt", flipped(zipped(1), 20_000))
    found = ask(lake, "verify", f"{lake.source}/ckpt", code=1)
    assert found["bad"] == ["2.pt"]


@pytest.mark.long
def test_sums_that_torch_was_told_not_to_write(s3: Lake) -> None:
    ckpt = s3.path / "ckpt"
    ckpt.mkdir()
    torch_save(ckpt / "1.pt", sums="none")
    found = ask(s3, "verify", str(ckpt))
    assert found["bad"] == []
    assert of(found, "1.pt")["proofs"] == {"etag": 1}


def test_pruning(s3: Lake) -> None:
    ckpt = s3.path / "ckpt"
    ckpt.mkdir()
    for step in range(1, 5):
        (ckpt / f"step{step}").mkdir()
        for rank in range(3):
            (ckpt / f"step{step}" / f"rank{rank}.pt").write_bytes(noise(1000, step))
        (ckpt / f"step{step}" / "COMPLETE").write_bytes(b"")
    (ckpt / "step0").mkdir()
    (ckpt / "step0" / "rank0.pt").write_bytes(b"never finished")
    (ckpt / "best.pt").write_bytes(b"best")
    everything = {"step0", "step1", "step2", "step3", "step4", "best.pt"}
    dry = ask(s3, "prune", str(ckpt), "--keep", "2", "--dry-run")
    assert dry["deleted"] != []
    assert {path.name for path in ckpt.iterdir()} == everything
    assert s3.cli("checkpoint", "prune", str(ckpt), "--keep", "2").returncode == 0
    left = {path.name for path in ckpt.iterdir()}
    assert left == everything - {"step1", "step2"}
    assert ask(s3, "prune", str(ckpt), "--older-than", "1h")["deleted"] == []
    s3.settle()
    assert {key.split("/")[1] for key in s3.plain() if key.startswith("ckpt/s")} <= {"step0", "step3", "step4"}
    (ckpt / "best.pt").unlink()
    (ckpt / "step4" / "rank0.pt").write_bytes(b"again, so that step0 is older")
    gone = ask(s3, "prune", str(ckpt), "--keep", "1", "--incomplete")
    deleted = gone["deleted"]
    assert isinstance(deleted, list)
    assert sorted(item["name"] for item in deleted) == ["step0", "step3"]
    assert [path.name for path in ckpt.iterdir()] == ["step4"]
    assert ask(s3, "latest", str(ckpt))["name"] == "step4"


@pytest.fixture
def keeping(make_lake: LakeMaker, tmp_path: Path) -> Lake:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npath = "ckpt/**"\nkeep-newest = 1\n')
    return make_lake("seaweedfs", "--rules", str(rules), "--cache-size", "64MiB", "--pack", "never")


@pytest.mark.long
def test_the_newest_checkpoint_outlives_a_full_cache_and_a_remount(keeping: Lake) -> None:
    keeping.mount()
    ckpt, data = keeping.path / "ckpt", keeping.path / "data"
    ckpt.mkdir()
    data.mkdir()
    saved = {}
    for step in (1, 2):
        work = ckpt / f"tmp{step}"
        work.mkdir()
        for rank in range(2):
            saved[step, rank] = noise(5 * MIB, seed=10 * step + rank)
            (work / f"rank{rank}").write_bytes(saved[step, rank])
        work.rename(ckpt / f"step{step}")
    eventually(lambda: keeping.number("kept.files") == 2, "the newest checkpoint is kept")
    assert keeping.number("kept.bytes") == 10 * MIB
    assert keeping.number("kept.missing_bytes") == 0
    for turn in range(2):
        for number in range(8):
            (data / f"{turn}-{number}").write_bytes(noise(12 * MIB, seed=100 + number))
        assert keeping.number("cache.evicted_bytes") > 0
        keeping.remount()
        assert keeping.number("kept.checkpoints") == 1
        before = keeping.number("store.requests.get")
        for rank in range(2):
            assert (ckpt / "step2" / f"rank{rank}").read_bytes() == saved[2, rank]
        assert keeping.number("store.requests.get") == before
    assert (ckpt / "step1" / "rank0").read_bytes() == saved[1, 0]
    assert keeping.number("store.requests.get") > before


def test_what_write_back_has_not_stored_yet_is_incomplete(
    make_lake: LakeMaker, faults: tuple[Server, Faults], tmp_path: Path
) -> None:
    """While the store is away a checkpoint is there for this node, and not complete; then it is."""
    through, store = faults
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npath = "ckpt/**"\ndurability = "writeback"\nkeep-newest = 1\n')
    lake = make_lake("seaweedfs", "--rules", str(rules), "--pack", "never", through=through).mount()
    ckpt = lake.path / "ckpt"
    ckpt.mkdir()
    (ckpt / "step1").mkdir()
    (ckpt / "step1" / "a.bin").write_bytes(noise(1000, 1))
    assert lake.cli("flush", str(ckpt)).returncode == 0
    store.slow_down(1_000_000)
    (ckpt / "step2").mkdir()
    (ckpt / "step2" / "a.bin").write_bytes(noise(1000, 2))
    found = ask(lake, "ls", str(ckpt))
    assert found["latest"] == "step1"
    begun = of(found, "step2")
    assert (begun["where"], begun["complete"]) == ("node", False)
    assert str(begun["reason"]).startswith("not in the store yet")
    store.clear()
    assert lake.cli("flush", str(ckpt)).returncode == 0
    assert ask(lake, "latest", str(ckpt))["name"] == "step2"
    assert ask(lake, "verify", str(ckpt))["bad"] == []
