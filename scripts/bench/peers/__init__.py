"""Who is compared. Each peer is one small class; `everybody` makes them, in the order in which reports name them."""

from __future__ import annotations

from scripts.bench.peers.bare import BareBoto3, BareObstore, LocalDisk
from scripts.bench.peers.others import JuiceFS, JuiceFSWriteback, Rclone, S3fs, WeedMount
from scripts.bench.peers.ours import Lakefs, LakefsImmutable, LakefsPacked, LakefsWriteback
from scripts.bench.peers.peer import Peer
from scripts.bench.stage import Stage

CLASSES: tuple[type[Peer], ...] = (
    Lakefs,
    LakefsWriteback,
    LakefsImmutable,
    LakefsPacked,
    Rclone,
    S3fs,
    WeedMount,
    JuiceFS,
    JuiceFSWriteback,
    BareObstore,
    BareBoto3,
    LocalDisk,
)
NAMES = tuple(each.name for each in CLASSES)

__all__ = ["CLASSES", "NAMES", "Peer", "everybody"]


def everybody(stage: Stage, names: tuple[str, ...] = NAMES) -> list[Peer]:
    """Those that are wanted."""
    return [each(stage) for each in CLASSES if each.name in names]
