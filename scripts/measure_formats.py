"""What readers of the usual file formats of training make the mount fetch, beside what they asked for.

    PYTHONPATH=. python scripts/measure_formats.py --mib 256

SeaweedFS behind HAProxy, which keeps each request for 15 ms; each row on a mount with empty caches, with plain files.
For each reader: bytes that it used, bytes and GETs that the mount sent for, seconds, and the seconds in which obstore
fetches as many bytes of the same object in ranges of 8 MiB, eight at a time. Parquet needs pyarrow, and is left out
without it.
"""

from __future__ import annotations

import argparse
import io
import random
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import obstore
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lakefs_fuse.kernel.native import hooks as hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
from tests.mount.lakes import Lake, number, s3_lake
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, Server, latency, make_bucket, seaweedfs

MIB = 1 << 20
BUCKET = "lake"
MEMBER_BYTES, SHARDS = 50_000, 4
TENSORS, GROUPS, COLUMNS = 64, 32, 8
SOME = 8
"""Tensors, or row groups, that a reader takes of all."""
RANGE_BYTES, RANGES_AT_ONCE = 8 * MIB, 8


def make(directory: Path, mib: int) -> None:
    """The files, of so many MiB each."""
    noise = np.random.default_rng(1)
    for shard in range(SHARDS):
        with tarfile.open(directory / f"{shard}.tar", "w") as tar:
            for index in range(mib * MIB // SHARDS // MEMBER_BYTES):
                member = tarfile.TarInfo(f"{index:06d}.jpg")
                member.size = MEMBER_BYTES
                tar.addfile(member, io.BytesIO(noise.bytes(MEMBER_BYTES)))
    count = mib * MIB // TENSORS // 4
    tensors = {f"layer.{index}": torch.from_numpy(noise.random(count, dtype=np.float32)) for index in range(TENSORS)}
    save_file(tensors, directory / "model.safetensors")
    torch.save(tensors, directory / "model.pt")
    if find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        rows = mib * MIB // GROUPS // COLUMNS // 8
        schema = pyarrow.schema([(f"c{column}", pyarrow.float64()) for column in range(COLUMNS)])
        with pyarrow.parquet.ParquetWriter(
            directory / "table.parquet", schema, compression="none", use_dictionary=False
        ) as writer:
            for _ in range(GROUPS):
                writer.write_table(pyarrow.table([noise.random(rows) for _ in range(COLUMNS)], schema=schema), rows)


def _chosen(count: int) -> list[int]:
    return random.Random(7).sample(range(count), SOME)


def tar_shards(root: Path) -> int:
    """As webdataset reads: streams, a worker for each shard."""

    def stream(shard: int) -> int:
        size = 0
        with open(root / f"{shard}.tar", "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                opened = tar.extractfile(member)
                assert opened is not None
                size += len(opened.read())
        return size

    with ThreadPoolExecutor(SHARDS) as pool:
        return sum(pool.map(stream, range(SHARDS)))


def parquet_groups(root: Path, columns: int = COLUMNS) -> int:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(root / "table.parquet")
    names = [f"c{column}" for column in range(columns)]
    return sum(int(file.read_row_group(group, columns=names).nbytes) for group in _chosen(GROUPS))


def parquet_columns(root: Path) -> int:
    return parquet_groups(root, 2)


def some_safetensors(root: Path) -> int:
    with safe_open(root / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(f"layer.{index}").clone().nbytes for index in _chosen(TENSORS))


def all_safetensors(root: Path) -> int:
    with safe_open(root / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(f"layer.{index}").clone().nbytes for index in range(TENSORS))


def some_of_checkpoint(root: Path) -> int:
    loaded = torch.load(root / "model.pt", mmap=True)
    return sum(loaded[f"layer.{index}"].clone().nbytes for index in _chosen(TENSORS))


def all_of_checkpoint(root: Path) -> int:
    return sum(tensor.nbytes for tensor in torch.load(root / "model.pt").values())


READERS: dict[str, tuple[str, Callable[[Path], int]]] = {
    "tar shards, 4 streams": ("0.tar", tar_shards),
    f"parquet, {SOME} of {GROUPS} row groups": ("table.parquet", parquet_groups),
    f"parquet, 2 of {COLUMNS} columns of them": ("table.parquet", parquet_columns),
    f"safetensors, {SOME} of {TENSORS} tensors": ("model.safetensors", some_safetensors),
    "safetensors, all": ("model.safetensors", all_safetensors),
    f"torch.load(mmap), {SOME} of {TENSORS} tensors": ("model.pt", some_of_checkpoint),
    "torch.load": ("model.pt", all_of_checkpoint),
}


def fetch(server: Server, key: str, size: int) -> float:
    """Seconds in which obstore fetches so many bytes of an object, from its beginning again and again."""
    store = obstore.store.S3Store(
        BUCKET, endpoint=server.url, access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY, region=REGION,
        client_options={"allow_http": True}, virtual_hosted_style_request=False,
    )  # fmt: skip
    length = obstore.head(store, key)["size"]
    ranges = [(at % length, min(RANGE_BYTES, size - at, length - at % length)) for at in range(0, size, RANGE_BYTES)]
    began_s = time.monotonic()
    with ThreadPoolExecutor(RANGES_AT_ONCE) as pool:
        list(pool.map(lambda each: obstore.get_range(store, key, start=each[0], length=each[1]), ranges))
    return time.monotonic() - began_s


def measure(lake: Lake, reader: Callable[[Path], int]) -> tuple[int, int, int, float]:
    """Bytes used, bytes fetched, GETs and seconds, with empty caches."""
    lake.umount()
    shutil.rmtree(lake.cache_dir)
    lake.mount()
    list((lake.path / "set").iterdir())
    before, began_s = lake.stats(), time.monotonic()
    used = reader(lake.path / "set")
    took_s, after = time.monotonic() - began_s, lake.stats()
    read, gets = (number(after, name) - number(before, name) for name in ("store.bytes.read", "store.requests.get"))
    return used, read, gets, took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="of each format")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="measure-formats-") as name:
        directory = Path(name)
        with seaweedfs(directory / "store") as server, latency(server, directory) as behind:
            make_bucket(server, BUCKET)
            with s3_lake(server, BUCKET, directory / "lake", "--metadata-ttl", "1h", through=behind) as lake:
                lake.mount()
                (lake.path / "set").mkdir()
                make(directory, options.mib)
                for path in directory.glob("*.*"):
                    if path.suffix in (".tar", ".parquet", ".safetensors", ".pt"):
                        shutil.copyfile(path, lake.path / "set" / path.name)
                        path.unlink()
                print("| reader | used | fetched | GETs | seconds | obstore |\n|---|---|---|---|---|---|")
                for what, (file, reader) in READERS.items():
                    if not (lake.path / "set" / file).exists():
                        continue
                    used, read, gets, took_s = measure(lake, reader)
                    bare_s = fetch(behind, f"{lake.outside.source_prefix}set/{file}", used)
                    row = what, f"{used / MIB:.0f} MiB", f"{read / used:.2f} ×", gets, f"{took_s:.2f}", f"{bare_s:.2f}"
                    print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
