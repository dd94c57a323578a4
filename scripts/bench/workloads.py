"""The workloads by name: what each stands for and how it is run. The report quotes these words beside the numbers."""

from __future__ import annotations

from scripts.bench.results import WorkloadNote
from scripts.bench.sizes import MIB, Sizes

FIRST, AGAIN, REMOUNTED, LOOKED = "list, first", "list, again", "list, after remount", "metadata after restart"
THROUGH_COLD, THROUGH_WARM = "large file, sequential, cold", "large file, sequential, warm"
SCATTERED_COLD, SCATTERED_WARM = "large file, random, cold", "large file, random, warm"
SAVE, LOAD, RANKS, LOAD_COLD = "torch.save", "torch.load, just saved", "ranks save shards", "torch.load, elsewhere"
WRITE, RENAME, REMOVE = "write small files", "rename a directory", "remove a directory"
LOAD_SET = "load a data set"
WARM, WARMED = "warm a data set", "epoch after a warm"

CLIENT, DISK = "client", "disk"
"""What a workload is held against: cold ones against the bare store client, warm ones against the local disk."""


def first_epoch(readers: int | None) -> str:
    """None: with torch's DataLoader."""
    return f"first epoch, {_readers(readers)}"


def second_epoch(readers: int | None) -> str:
    return f"second epoch, {_readers(readers)}"


def epoch_after_restart(readers: int | None) -> str:
    """From the local disk."""
    return f"epoch after restart, {_readers(readers)}"


def _readers(readers: int | None) -> str:
    return "DataLoader" if readers is None else f"{readers} reader{'s' if readers > 1 else ''}"


def notes(sizes: Sizes) -> list[WorkloadNote]:
    """Of all workloads at these sizes."""
    groups = (_names, _epochs, _large, _checkpoints, _small, _warm, _ingest)
    return [note for group in groups for note in group(sizes)]


def _names(sizes: Sizes) -> list[WorkloadNote]:
    names = f"{sizes.names:,} names in one directory"
    return [
        WorkloadNote(
            FIRST, "names", "names/s", CLIENT, "A job begins: it lists its data set and shuffles the names.",
            f"`os.listdir` of {names}, then a shuffle; nothing is cached anywhere.",
        ),
        WorkloadNote(
            AGAIN, "names", "names/s", DISK, "Another worker, or the next epoch, lists the same directory.",
            "The same at once again.",
        ),
        WorkloadNote(
            REMOUNTED, "names", "names/s", DISK, "The job is started again on a node that it ran on before.",
            "Unmounted, the kernel's caches dropped, mounted again with what the mount keeps on disk; then listed.",
        ),
        WorkloadNote(
            LOOKED, "names", "names/s", DISK,
            "A data loader that wants sizes, or `rsync`, after such a restart.",
            f"`os.stat` of each of the {names}, after the listing that follows the restart.",
        ),
    ]  # fmt: skip


def _epochs(sizes: Sizes) -> list[WorkloadNote]:
    low, high = sizes.file_bytes_min // 1000, sizes.file_bytes_max // 1000
    files = f"{sizes.files:,} files of {low}–{high} KB in 20 directories, in shuffled order"
    found = []
    for readers in sizes.loops():
        who = f"{sizes.loader_workers} workers of torch's DataLoader" if readers is None else f"{readers} processes"
        limit_s = f"up to {sizes.epoch_limit_s(readers):g} s"
        limit = f"{limit_s}; a peer that is not done by then has its rate taken from what it read"
        found += [
            WorkloadNote(
                first_epoch(readers), "epochs", "files/s", CLIENT,
                "Training begins on a node that has none of the images yet.",
                f"{files}, opened, read and closed by {who}, {limit}.",
            ),
            WorkloadNote(
                second_epoch(readers), "epochs", "files/s", DISK,
                "Training goes on: the node has seen every image.",
                f"The files that the first epoch read, in another order, by {who}, {limit}.",
            ),
        ]  # fmt: skip
        if sizes.is_long(readers):
            found.append(
                WorkloadNote(
                    epoch_after_restart(readers), "epochs", "files/s", DISK,
                    "The job goes on after a restart, or the data set is larger than memory: files come from the disk.",
                    "Unmounted, the kernel's caches dropped, mounted again with what the mount keeps on disk; then the "
                    f"same files in another order, by {who}, {limit}.",
                )
            )  # fmt: skip
    return found


def _large(sizes: Sizes) -> list[WorkloadNote]:
    file = f"a file of {sizes.large_bytes // MIB} MiB"
    piece = f"{sizes.piece_bytes >> 10} KiB at {sizes.pieces:,} random offsets of {file}, one after the other"
    return [
        WorkloadNote(
            THROUGH_COLD, "large files", "MiB/s", CLIENT, "A tokenised corpus, or weights, read for the first time.",
            f"{file}, from its beginning to its end, 1 MiB a read.",
        ),
        WorkloadNote(
            THROUGH_WARM, "large files", "MiB/s", DISK, "It is read again on the same node.", "The same at once again.",
        ),
        WorkloadNote(
            SCATTERED_COLD, "large files", "reads/s", CLIENT, "Samples are drawn from a large file by index.",
            f"{piece}; nothing of it is cached.",
        ),
        WorkloadNote(
            SCATTERED_WARM, "large files", "reads/s", DISK, "The same samples are drawn again.",
            "The same at once again.",
        ),
    ]  # fmt: skip


def _checkpoints(sizes: Sizes) -> list[WorkloadNote]:
    whole, shard = sizes.checkpoint_bytes // MIB, sizes.shard_bytes // MIB
    return [
        WorkloadNote(
            SAVE, "checkpoint", "MiB/s", CLIENT, "A checkpoint is written; training waits for it.",
            f"`torch.save` of {whole} MiB, until it returns. *Durable* is when the store has all of it.",
        ),
        WorkloadNote(
            LOAD, "checkpoint", "MiB/s", DISK, "Training resumes on the node that saved.",
            "`torch.load` of that checkpoint at once.",
        ),
        WorkloadNote(
            RANKS, "checkpoint", "MiB/s", CLIENT, "All ranks of a node save their shards in the same moment.",
            f"{sizes.ranks} processes each `torch.save` {shard} MiB; until the last one returns.",
        ),
        WorkloadNote(
            LOAD_COLD, "checkpoint", "MiB/s", CLIENT, "Training resumes on another node.",
            "`torch.load` of the checkpoint through a mount with empty caches.",
        ),
    ]  # fmt: skip


def _small(sizes: Sizes) -> list[WorkloadNote]:
    tree = f"a directory of {sizes.tree_files:,} files of 4 KiB"
    return [
        WorkloadNote(
            WRITE, "small files", "files/s", CLIENT, "Preprocessing writes its results.",
            f"{sizes.written_files:,} files of {sizes.file_bytes_min // 1000}–{sizes.file_bytes_max // 1000} KB by "
            f"{sizes.writers} threads, up to {sizes.limit_s:g} s. *Durable* is when the store has all of them.",
        ),
        WorkloadNote(
            REMOVE, "small files", "files/s", CLIENT, "Old results go.", f"`rm -r` of {tree}.",
        ),
        WorkloadNote(
            RENAME, "small files", "files/s", CLIENT, "A finished directory gets its name.", f"`os.rename` of {tree}.",
        ),
    ]  # fmt: skip


def _warm(sizes: Sizes) -> list[WorkloadNote]:
    low, high = sizes.file_bytes_min // 1000, sizes.file_bytes_max // 1000
    files = f"{sizes.files:,} files of {low}–{high} KB"
    return [
        WorkloadNote(
            WARM, "warm", "files/s", CLIENT, "A node fetches the data set while the job before still runs.",
            f"All {files}: `lakefs-fuse cache warm`, `juicefs warmup`; of a bare client, {sizes.warm_readers} "
            "processes that read them.",
        ),
        WorkloadNote(
            WARMED, "warm", "files/s", DISK, "Training begins on the node that was warmed.",
            f"The same files in shuffled order, opened, read and closed by {sizes.warm_readers} processes.",
        ),
    ]  # fmt: skip


def _ingest(sizes: Sizes) -> list[WorkloadNote]:
    low, high = sizes.file_bytes_min // 1000, sizes.file_bytes_max // 1000
    return [
        WorkloadNote(
            LOAD_SET, "ingest", "files/s", CLIENT, "A data set is brought into the store, without a mount.",
            f"{sizes.loaded_files:,} files of {low}–{high} KB of the local disk: `lakefs-fuse ingest`, `rclone copy`.",
        ),
    ]  # fmt: skip
