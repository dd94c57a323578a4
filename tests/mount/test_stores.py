"""One job on every supported store."""

from __future__ import annotations

import errno
import os
import time

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import PART_BYTES, Lake, noise, number

MIB = 1 << 20


@pytest.fixture(
    params=["seaweedfs", "rclone", *(pytest.param(name, marks=pytest.mark.long) for name in ("file", "moto"))]
)
def anywhere(request: pytest.FixtureRequest, make_lake: LakeMaker) -> Lake:
    return make_lake(request.param).mount()


def test_a_dataset_and_a_checkpoint_come_back_from_an_empty_cache(anywhere: Lake) -> None:
    """Small files, an empty one, an empty directory, and a large file whose header is written last."""
    dataset = anywhere.path / "data" / "train"
    dataset.mkdir(parents=True)
    images = {f"{i:03d} ü+%.jpg": noise(20_000 + i, i) for i in range(20)} | {"empty": b""}
    for name, image in images.items():
        (dataset / name).write_bytes(image)
    (anywhere.path / "data" / "nothing").mkdir()
    body = noise(2 * PART_BYTES + 6 * MIB + 5, 7)
    with open(anywhere.path / "model.pt", "wb") as file:
        file.write(bytes(100) + body[100:])
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        file.write(body[:100])
    assert anywhere.outside.read("model.pt") == body

    anywhere.remount(empty_cache=True)

    assert {path.name: path.read_bytes() for path in dataset.iterdir()} == images
    assert sorted(os.listdir(anywhere.path / "data")) == ["nothing", "train"]
    assert os.listdir(anywhere.path / "data" / "nothing") == []
    assert (anywhere.path / "model.pt").read_bytes() == body
    assert anywhere.outside.uploads() == []


def test_a_header_rewritten_while_parts_are_on_their_way(anywhere: Lake) -> None:
    """Where a store takes a part once only, the upload starts anew."""
    body = noise(3 * PART_BYTES, 9)
    with open(anywhere.path / "big", "wb") as file:
        file.write(bytes(64) + body[64:])
        file.seek(0)
        file.write(body[:64])
        file.truncate(2 * PART_BYTES + MIB + 1)
    assert anywhere.outside.read("big") == body[: 2 * PART_BYTES + MIB + 1]
    assert anywhere.outside.uploads() == []


def test_emptying_and_removing_a_directory(anywhere: Lake) -> None:
    """A directory stays when its last file goes, and goes when it is removed; so it is after a remount."""
    place = anywhere.path / "a" / "b"
    place.mkdir(parents=True)
    (place / "only").write_bytes(b"x")
    (place / "only").unlink()
    anywhere.remount(empty_cache=True)
    assert os.listdir(anywhere.path / "a") == ["b"]
    place.rmdir()
    anywhere.remount(empty_cache=True)
    assert os.listdir(anywhere.path) == ["a"]
    assert os.listdir(anywhere.path / "a") == []


def test_what_others_replaced_is_never_mixed_in(anywhere: Lake) -> None:
    """The version that was opened, or ESTALE; and the new one once the listing is older than the TTL."""
    old, new = b"o" * (5 * MIB), b"n" * (5 * MIB)
    anywhere.outside.replace("shared.bin", old)
    anywhere.remount("--metadata-ttl", "1", empty_cache=True)
    with open(anywhere.path / "shared.bin", "rb", buffering=0) as file:
        assert file.read(1000) == old[:1000]
        anywhere.outside.replace("shared.bin", new)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        seen = b""
        try:
            while piece := file.read(MIB):
                seen += piece
        except OSError as error:
            assert error.errno == errno.ESTALE
        assert set(seen) <= {ord("o")}
    time.sleep(1.5)
    assert (anywhere.path / "shared.bin").read_bytes() == new
    assert number(anywhere.stats(), "namespace.entries_changed") >= 1
