"""How much of everything: what a full run measures, and what a quick one does to show that all of it works."""

from __future__ import annotations

import msgspec

MIB = 1 << 20


class Sizes(msgspec.Struct, frozen=True):
    """Counts, bytes and seconds of a run."""

    names: int
    """In one directory that is listed."""
    files: int
    file_bytes_min: int
    file_bytes_max: int
    readers: tuple[int, ...]
    loader_workers: int
    """Of torch's DataLoader; 0: without it."""
    large_bytes: int
    pieces: int
    piece_bytes: int
    checkpoint_bytes: int
    ranks: int
    shard_bytes: int
    written_files: int
    writers: int
    tree_files: int
    """Of the directory that is renamed, and of the one that is removed."""
    loaded_files: int
    """Of the data set that is loaded from the local disk."""
    delay_ms: int
    """By which every request to the store is held back."""
    repeats: int
    limit_s: float
    """Of most workloads; what is reached until then counts."""
    long_limit_s: float
    """Of epochs with the most readers: what is fetched behind the first of them has come meanwhile."""
    listing_limit_s: float
    drain_limit_s: float
    warm_bytes: int
    disk_bytes: int
    """What has to be free before it begins."""
    budget_s: float
    """A round of a group that would go beyond it, as long as its first one took, is left out."""
    fill_limit_s: float
    """For peers whose data has to be written through their own mount."""

    def loops(self) -> tuple[int | None, ...]:
        """How an epoch is read, one after the other: so many readers; None is torch's DataLoader."""
        return (*self.readers, None) if self.loader_workers else self.readers

    @property
    def warm_readers(self) -> int:
        """Processes of an epoch after a warm."""
        return max(self.readers, default=2)

    def is_long(self, readers: int | None) -> bool:
        """Whether that is the loop that is given the most time, and is read once more after a restart."""
        return readers is not None and readers == max(self.readers)

    def epoch_limit_s(self, readers: int | None) -> float:
        return self.long_limit_s if self.is_long(readers) else self.limit_s


FULL = Sizes(
    names=100_000,
    files=20_000,
    file_bytes_min=10_000,
    file_bytes_max=100_000,
    readers=(1, 4, 16),
    loader_workers=4,
    large_bytes=512 * MIB,
    pieces=1000,
    piece_bytes=65_536,
    checkpoint_bytes=1024 * MIB,
    ranks=8,
    shard_bytes=128 * MIB,
    written_files=20_000,
    writers=16,
    tree_files=1000,
    loaded_files=4000,
    delay_ms=15,
    repeats=3,
    limit_s=4.0,
    long_limit_s=12.0,
    listing_limit_s=15.0,
    drain_limit_s=15.0,
    warm_bytes=2048 * MIB,
    disk_bytes=28 * 1024 * MIB,
    budget_s=3400.0,
    fill_limit_s=120.0,
)

QUICK = Sizes(
    names=2000,
    files=600,
    file_bytes_min=10_000,
    file_bytes_max=100_000,
    readers=(),
    loader_workers=2,
    large_bytes=32 * MIB,
    pieces=50,
    piece_bytes=65_536,
    checkpoint_bytes=32 * MIB,
    ranks=4,
    shard_bytes=8 * MIB,
    written_files=400,
    writers=16,
    tree_files=50,
    loaded_files=200,
    delay_ms=2,
    repeats=1,
    limit_s=0.7,
    long_limit_s=0.7,
    listing_limit_s=3.0,
    drain_limit_s=8.0,
    warm_bytes=64 * MIB,
    disk_bytes=3 * 1024 * MIB,
    budget_s=600.0,
    fill_limit_s=20.0,
)
