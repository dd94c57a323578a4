"""Named snapshots: the names of a whole lake, or of one directory, at one moment, kept until the snapshot is deleted.

Under `.lakefs/snapshots/<name>/` lie the files of an index (`index`), `objects` (which packs and other objects of ours
its files have bytes in) and, written last, the manifest: a snapshot without a manifest does not exist. `gc` leaves
those objects alone. Plain objects of the lake are not kept: who removes or replaces one has the snapshot miss it. A
version of a dataset (`datasets`) is a snapshot of a directory, which names no plain object.

Raises StoreError kinds throughout. A crash while one is written leaves objects without a manifest, which writing or
deleting that name takes away; while one is deleted, the same.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from struct import Struct

import msgspec
import xxhash

from lakefs_fuse.commits.index.index import (
    FORMAT,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Dataset,
    Manifest,
    decode,
    fetch_files,
    write_index,
)
from lakefs_fuse.config import DatasetName
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import MALFORMED, ConfigError, DamagedCommit, LakeError, NotFound
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.object_table import Objects
from lakefs_fuse.meta.schema import PATH
from lakefs_fuse.meta.sorted_tables import DumpedFile
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient

SNAPSHOTS = f"{RESERVED_PREFIX}snapshots/"
OBJECTS = "objects"
OBJECTS_BYTES_MAX = 256 << 20
NAME_CHARACTERS = "letters, digits, '.', '_' and '-', at most 100 and a letter or digit first"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ARRAY = Struct(">BI")
"""Head of an array of msgpack with a 32-bit length."""
_encoder = msgspec.msgpack.Encoder()


def check_name(name: str) -> str:
    """Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a snapshot: {NAME_CHARACTERS}")
    return name


def removal_of(name: str) -> str:
    """The command that deletes a snapshot, by its name: a version of a dataset, or not."""
    version = DatasetName.of_snapshot(name)
    return f"`lakefs-fuse {f'snapshot SOURCE --delete {name}' if version is None else f'dataset rm SOURCE {version}'}`"


def prefix_of(name: str) -> str:
    return f"{SNAPSHOTS}{name}/"


async def names(client: StoreClient) -> list[str]:
    """Of all that exist, sorted; those that are being written, or were never finished, too."""
    found: list[str] = []
    async for page in client.list_all(SNAPSHOTS, delimiter="/"):
        found += [prefix[len(SNAPSHOTS) : -1] for prefix in page.prefixes]
    return sorted(name for name in found if _NAME.fullmatch(name))


async def fetch_manifest(client: StoreClient, name: str) -> Manifest:
    """Raises NotFound where there is none of this name, DamagedCommit where it cannot be used."""
    key = prefix_of(name) + MANIFEST
    fetched = await client.get(key, 0, MANIFEST_BYTES_MAX)
    lost = (
        "if no newer version of this program wrote it, restore it, if the bucket keeps versions, or delete what is "
        f"left with {removal_of(name)}"
    )
    try:
        time = msgspec.msgpack.decode(fetched.data, type=dict[str, object]).get("time")
        manifest = decode(fetched.data, time if isinstance(time, int) else -1)
    except MALFORMED as error:
        raise DamagedCommit(f"{key}: not a manifest: {str(error)[:200]}: {lost}") from error
    except DamagedCommit as error:
        raise DamagedCommit(f"{key}: {error}: {lost}") from error
    if manifest.format != FORMAT:
        raise DamagedCommit(f"{key}: format {manifest.format}, and files of a snapshot are its own")
    return manifest


async def manifest_of(client: StoreClient, name: str) -> Manifest:
    """As `fetch_manifest`. Raises ConfigError that says which there are."""
    try:
        return await fetch_manifest(client, check_name(name))
    except NotFound as error:
        there = ", ".join(await names(client)) or "none"
        raise ConfigError(f"there is no snapshot {name}; there are: {there} (`lakefs-fuse snapshot SOURCE --name "
                          f"{name}` makes one of now)") from error  # fmt: skip


async def take_in(
    client: StoreClient, threads: Threads, name: str, manifest: Manifest, database: Database, directory: Path
) -> None:
    """Into a database without names; ``directory`` is for files on their way. Raises DamagedCommit, also where a file
    is gone, CacheError."""
    try:
        paths = await fetch_files(client, threads, manifest, tables.empty_directory(directory), prefix=prefix_of(name))
        marks = tables.Marks(inode=manifest.inode, object=manifest.object, newest=manifest.newest)
        tables.ingest(database, paths, marks, directory)
    except (NotFound, DamagedCommit) as error:
        told = manifest.dataset
        what = f"snapshot {name}" if told is None else f"{told.name}@{told.version}"
        raise DamagedCommit(
            f"{what} is lost, because a file of its manifest is gone or damaged ({error}): restore that, if the bucket "
            f"keeps versions, or delete what is left with {removal_of(name)}"
        ) from error
    finally:
        tables.remove_directory(directory)


async def write(
    client: StoreClient,
    threads: Threads,
    name: str,
    dump: tables.AnyDump,
    objects: Objects,
    *,
    time: int,
    horizon: int,
    wrote: Callable[[DumpedFile], None],
    dataset: Dataset | None = None,
) -> Manifest:
    """Store what is dumped under a name that is free (`check_free`), and cleared of what was never finished (`clear`).
    Raises CacheError, StoreError kinds; then there is no snapshot."""
    await put_objects(client, name, objects)
    prefix = prefix_of(name)
    return await write_index(
        client, threads, dump, time=time, horizon=horizon, wrote=wrote, prefix=prefix, dataset=dataset
    )


async def put_objects(client: StoreClient, name: str, objects: Objects) -> None:
    """From now on nobody deletes the objects below `.lakefs/` that these rows name: for a snapshot that is not finished
    yet, or for good. Raises LakeError where there are too many."""
    raw, count = bytearray(5), 0
    for row in objects.rows():
        if row.entries > 0 and row.key.startswith(RESERVED_PREFIX):
            _encoder.encode_into(row.key, raw, -1)
            count += 1
    raw[:5] = _ARRAY.pack(0xDD, count)
    if len(raw) > OBJECTS_BYTES_MAX:
        raise LakeError(
            f"a snapshot keeps at most {OBJECTS_BYTES_MAX >> 20} MiB of keys, and these {count:,} objects have more: "
            "`lakefs-fuse pack` moves small files into fewer"
        )
    await client.put(prefix_of(name) + OBJECTS, bytes(raw))


async def replace(client: StoreClient, threads: Threads, name: str, before: Manifest, dump: tables.Dump) -> None:
    """Store what is dumped, into files of other names, in place of the rows of a snapshot: the PUT of the manifest is
    the moment. A crash leaves files that no manifest names, which deleting the snapshot takes away."""
    prefix = prefix_of(name)
    time, horizon = before.time, before.horizon
    await write_index(
        client, threads, dump, time=time, horizon=horizon, wrote=lambda _: None, prefix=prefix, dataset=before.dataset
    )
    await client.delete_all([prefix + file.name for file in before.files])


async def check_free(client: StoreClient, name: str) -> None:
    """Raises ConfigError where a snapshot has this name."""
    try:
        await client.head(prefix_of(check_name(name)) + MANIFEST)
    except NotFound:
        return
    raise ConfigError(f"there is a snapshot {name} already: `lakefs-fuse snapshot SOURCE --delete {name}` first")


async def delete(client: StoreClient, name: str) -> None:
    """Its manifest first; `gc` gives back what it kept. Raises ConfigError where there is none."""
    if name not in await names(client):
        raise ConfigError(f"there is no snapshot {name}")
    await remove(client, name)


async def remove(client: StoreClient, name: str) -> None:
    """Take away what there is of a snapshot, its manifest first."""
    await client.delete(prefix_of(name) + MANIFEST)
    await clear(client, name)


async def clear(client: StoreClient, name: str) -> None:
    """Take away what there is of a snapshot without a manifest."""
    async with aclosing(client.list_all(prefix_of(name))) as pages:
        async for page in pages:
            await client.delete_all([meta.key for meta in page.objects])


async def remove_unfinished(client: StoreClient, before_ns: int) -> int:
    """Take away snapshots that have no manifest and were written to before that time only; how many. For a command with
    the maintenance lease, which every writer of one holds. Raises StoreError kinds, LakeError."""
    last: dict[str, int] = {}
    finished = set[str]()
    async with aclosing(client.list_all(SNAPSHOTS)) as pages:
        async for page in pages:
            for meta in page.objects:
                name, _, file = meta.key.removeprefix(SNAPSHOTS).partition("/")
                if file == MANIFEST:
                    finished.add(name)
                if _NAME.fullmatch(name):
                    last[name] = max(meta.mtime_ns, last.get(name, 0))
    doomed = [name for name, at_ns in last.items() if name not in finished and at_ns < before_ns]
    for name in doomed:
        await clear(client, name)
    return len(doomed)


class KeptObjects:
    """Keys of all objects below `.lakefs/` that some snapshot has bytes in, also one that is being written.

    What always holds (*at least those*): what a snapshot named when `refresh` began is in it, or `refresh` fails. Keys
    are remembered as 64-bit sums, 8 bytes each, so it may have another one as well, which then stays. A list is read
    once for each version of its object. Trio thread only."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._sums: dict[str, tuple[str, array[int]]] = {}
        """By key of the list: its ETag, and sums in order."""

    async def refresh(self) -> None:
        """Read what has changed. Raises LakeError: DamagedCommit where a list cannot be read, or is gone."""
        found: dict[str, tuple[str, array[int]]] = {}
        finished, listed = set[str](), set[str]()
        async with aclosing(self._client.list_all(SNAPSHOTS)) as pages:
            async for page in pages:
                for meta in page.objects:
                    name, _, file = meta.key.removeprefix(SNAPSHOTS).partition("/")
                    if not _NAME.fullmatch(name):
                        continue
                    if file == MANIFEST:
                        finished.add(name)
                    if file != OBJECTS:
                        continue
                    listed.add(name)
                    before = self._sums.get(meta.key)
                    if before is not None and before[0] == meta.etag:
                        found[meta.key] = before
                    elif (sums := await self._read(meta.key)) is not None:
                        found[meta.key] = sums
        for name in sorted(finished - listed):
            await self._check_deleted(name)
        self._sums = found

    async def _check_deleted(self, name: str) -> None:
        """A snapshot of which LIST shows the manifest and no list is being deleted, manifest first."""
        try:
            await self._client.head(prefix_of(name) + MANIFEST)
        except NotFound:
            return
        raise DamagedCommit(
            f"{prefix_of(name)}{OBJECTS} is gone, so nobody knows what it keeps: {removal_of(name)} deletes it"
        )

    async def _read(self, key: str) -> tuple[str, array[int]] | None:
        """None for one that is deleted meanwhile."""
        try:
            fetched = await self._client.get(key, 0, OBJECTS_BYTES_MAX)
        except NotFound:
            return None
        try:
            keys = msgspec.msgpack.decode(fetched.data, type=list[str])
        except MALFORMED as error:
            name = key.removeprefix(SNAPSHOTS).partition("/")[0]
            why = f"{key} cannot be read, so nobody knows what it keeps"
            raise DamagedCommit(f"{why}: {removal_of(name)} deletes it") from error
        return fetched.meta.etag, array("Q", sorted(xxhash.xxh3_64_intdigest(each.encode(*PATH)) for each in keys))

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, str)
        digest = xxhash.xxh3_64_intdigest(key.encode(*PATH))
        for _, sums in self._sums.values():
            at = bisect_left(sums, digest)
            if at < len(sums) and sums[at] == digest:
                return True
        return False

    def __len__(self) -> int:
        """Keys of all lists; one that several have counts several times."""
        return sum(len(sums) for _, sums in self._sums.values())


async def kept_objects(client: StoreClient) -> KeptObjects:
    """What snapshots keep now. Raises LakeError."""
    kept = KeptObjects(client)
    await kept.refresh()
    return kept
