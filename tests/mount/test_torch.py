"""Training jobs: worker processes read images, checkpoints are saved and loaded."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import STORES, LakeMaker
from tests.mount.lakes import MIB, PART_BYTES, Lake, eventually, number, scale

IMAGES = scale("IMAGES", 500, short=120)
CHECKPOINT_BYTES = scale("CHECKPOINT_MIB", 48, short=24) * MIB
READ_BYTES_MIN = 128 << 10
"""The kernel may cut what it wants into reads of this size."""

STATE = """
import sys, torch
torch.set_num_threads(1)
path, size = sys.argv[1], int(sys.argv[2])
def state():
    torch.manual_seed(7)
    pieces = 12
    return {f"layer{i}.weight": torch.rand(size // 4 // pieces) for i in range(pieces)}
def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
"""

SAVE_AND_LOAD = (
    STATE
    + """
import ctypes, json, mmap, os
def absent_runs(path):
    libc = ctypes.CDLL(None, use_errno=True)
    length = os.path.getsize(path)
    pages = -(-length // mmap.PAGESIZE)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as view:
        here = (ctypes.c_ubyte * pages)()
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        at = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert libc.mincore(at, length, here) == 0
        assert libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(length)) == 0
    runs, run = [], 0
    for byte in bytes(here) + b"\\1":
        if byte & 1:
            runs += [run] if run else []
            run = 0
        else:
            run += 1
    return [run * mmap.PAGESIZE for run in runs]
saved = state()
torch.save(saved, path)
print(json.dumps("saved"), flush=True)
for line in sys.stdin:
    absent = absent_runs(path)
    same(saved, torch.load(path))
    if line == "mapped\\n":
        same(saved, torch.load(path, mmap=True))
    print(json.dumps(absent), flush=True)
"""
)

LOAD_AGAIN = (
    STATE
    + """
saved = state()
same(saved, torch.load(path))
same(saved, torch.load(path, mmap=True))
"""
)

SAFETENSORS = (
    STATE
    + """
from safetensors import safe_open
from safetensors.torch import load_file, save
saved = state()
if len(sys.argv) > 3:
    with open(path, "wb") as file:
        file.write(save(saved, metadata={"format": "pt"}))
same(saved, load_file(path))
with safe_open(path, framework="pt") as file:
    assert torch.equal(file.get_slice("layer3.weight")[10:20], saved["layer3.weight"][10:20])
"""
)

SAVE_FILE = (
    STATE
    + """
from safetensors.torch import load_file, save_file
for turn in range(3):
    saved = {name: value + turn for name, value in state().items()}
    save_file(saved, path)
    same(saved, load_file(path))
"""
)

LOADER = """
import hashlib, os, sys, torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from lakefs_fuse.torch import ReadAhead, ReadAheadDataset
class Images(Dataset):
    def __init__(self, root):
        self.paths = sorted(os.path.join(at, name) for at, _, names in os.walk(root) for name in names)
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            data = file.read()
        number = int(os.path.basename(self.paths[index]).split(".")[0])
        assert data[:8] == number.to_bytes(8, "little"), self.paths[index]
        pixels = torch.frombuffer(bytearray(data[8:3080]), dtype=torch.uint8).reshape(3, 32, 32)
        return pixels, number, len(data)
images = Images(sys.argv[1])
dataset, sampler = images, RandomSampler(images)
if sys.argv[3] == "sampler":
    sampler = ReadAhead(sampler, images.paths, ahead=64)
if sys.argv[3] == "dataset":
    dataset = ReadAheadDataset(images, images.paths)
for epoch in range(2):
    torch.manual_seed(epoch)
    seen = []
    for pixels, numbers, sizes in DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=4):
        seen += numbers.tolist()
    assert sorted(seen) == list(range(int(sys.argv[2]))), len(seen)
    print("epoch", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def script(text: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that is talked to in lines; it must end with 0."""
    process = subprocess.Popen(
        [sys.executable, "-c", text, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    with process:
        try:
            yield process
        finally:
            process.communicate(timeout=300)
    assert process.returncode == 0


def run(text: str, *args: str) -> None:
    with script(text, *args):
        pass


def answer(process: subprocess.Popen[str]) -> object:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def ask(process: subprocess.Popen[str], what: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()


def test_a_checkpoint_just_saved_is_loaded_from_memory(s3: Lake) -> None:
    """It is sent once, in parts. No GET ever, and no READ but for pages that the kernel itself had dropped. By a mount
    that knows nothing of it, each block is fetched once."""
    path = s3.path / "model.pt"
    excess = []
    with script(SAVE_AND_LOAD, str(path), str(CHECKPOINT_BYTES)) as process:
        assert answer(process) == "saved"
        size = path.stat().st_size
        assert s3.outside.objects()["model.pt"] == size > CHECKPOINT_BYTES
        check_it_was_sent_once(s3, size)
        for _ in range(3):
            before = s3.stats()
            ask(process)
            absent = answer(process)
            assert isinstance(absent, list)
            after = s3.stats()
            assert number(after, "store.requests.get") == 0
            assert number(after, "upcalls.open") - number(before, "upcalls.open") == 2
            reads = number(after, "upcalls.read") - number(before, "upcalls.read")
            excess.append(reads - sum(1 + run // READ_BYTES_MIN for run in absent))
            if excess[-1] <= 0:
                break
        assert min(excess) <= 0, f"READs beyond what was missing from the page cache: {excess}"
        assert s3.outside.uploads() == []
        s3.remount(empty_cache=True)
        ask(process, "mapped")
        answer(process)
        check_each_block_was_fetched_once(s3, path)


def check_it_was_sent_once(lake: Lake, size: int) -> None:
    stats = lake.stats()
    assert number(stats, "store.requests.part") <= math.ceil(size / PART_BYTES)
    assert number(stats, "upcalls.write") <= size // MIB + 3
    assert size <= number(stats, "store.bytes.written") < 1.01 * size


def check_each_block_was_fetched_once(lake: Lake, path: Path) -> None:
    size = path.stat().st_size
    assert lake.number("store.requests.get") <= size // MIB // 2
    assert size <= lake.number("store.bytes.read") <= size + MIB
    assert lake.number("memory.rss") < 400 * MIB


@pytest.mark.long  # the test above does, on one store
def test_a_checkpoint_is_loaded_by_a_mount_that_knows_nothing(either: Lake) -> None:
    path = either.path / "model.pt"
    with script(SAVE_AND_LOAD, str(path), str(CHECKPOINT_BYTES)) as process:
        assert answer(process) == "saved"
    either.remount(empty_cache=True)
    run(LOAD_AGAIN, str(path), str(CHECKPOINT_BYTES))
    check_each_block_was_fetched_once(either, path)


@pytest.mark.long  # the test above reads with mmap, too
def test_safetensors(either: Lake) -> None:
    path = either.path / "model.safetensors"
    run(SAFETENSORS, str(path), str(CHECKPOINT_BYTES), "save")
    assert either.outside.objects()["model.safetensors"] > CHECKPOINT_BYTES // 12 * 11
    either.remount(empty_cache=True)
    run(SAFETENSORS, str(path), str(CHECKPOINT_BYTES))


@pytest.mark.long  # test_commits.py renames over files, too
@pytest.mark.parametrize("size", [100_000, CHECKPOINT_BYTES])
def test_safetensors_save_file(either: Lake, size: int) -> None:
    """It writes a temporary file and renames it, over the one before as well."""
    path = either.path / "model.safetensors"
    run(SAVE_FILE, str(path), str(size))
    assert [entry.name for entry in either.path.iterdir()] == ["model.safetensors"]
    saved = path.read_bytes()
    assert len(saved) > size // 12 * 11
    either.remount(empty_cache=True)
    assert [entry.name for entry in either.path.iterdir()] == ["model.safetensors"]
    assert path.read_bytes() == saved


def put_images(lake: Lake) -> None:
    def put(index: int) -> None:
        data = index.to_bytes(8, "little") + bytes([index % 251]) * (4096 + index * 37 % 20_000)
        lake.outside.replace(f"train/class-{index % 10}/{index:06d}.bin", data)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(IMAGES)))


def stats_after_epochs(lake: Lake, named_by: str = "") -> list[dict[str, Any]]:
    """Counters after the first and the second epoch of a loader; ``named_by``: what names its files to the mount."""
    found = []
    with script(LOADER, str(lake.path / "train"), str(IMAGES), named_by) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "epoch\n"
            found.append(lake.stats())
            ask(process)
    return found


@pytest.mark.parametrize("store", STORES)
def test_a_data_loader_with_four_workers(store: str, make_lake: LakeMaker) -> None:
    lake = make_lake(store, "--refresh", "1h", "--metadata-ttl", "1h")
    put_images(lake)
    lake.mount()
    first, second = stats_after_epochs(lake)
    assert number(first, "store.requests.get") == IMAGES
    assert number(first, "store.requests.list") <= 24
    assert second["store"] == first["store"], "the second epoch asks the store for nothing"
    lake.remount()
    assert all(path.read_bytes()[8:9] for path in (lake.path / "train" / "class-3").iterdir())
    assert lake.number("store.requests.get") == 0, "the cache outlives the daemon"


@pytest.mark.long  # tests/test_torch.py and vfs/test_upcoming_reads.py show it
@pytest.mark.parametrize("named_by", ["sampler", "dataset"])
def test_a_data_loader_whose_files_are_read_ahead(named_by: str, make_lake: LakeMaker) -> None:
    """Each file costs the store one request all the same, and the page cache serves no fewer of them."""
    lake = make_lake("seaweedfs", "--refresh", "1h", "--metadata-ttl", "1h")
    put_images(lake)
    lake.mount()
    first, second = stats_after_epochs(lake, named_by)
    assert number(first, "store.requests.get") == IMAGES
    assert number(second, "store.requests.get") == IMAGES
    named = 2 * IMAGES
    eventually(lambda: lake.number("upcoming.files") + lake.number("upcoming.local") == named, "all files were named")
    assert lake.number("upcoming.local") >= IMAGES
    assert lake.number("upcoming.dropped") == lake.number("upcoming.failed") == 0
