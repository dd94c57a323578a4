"""Named snapshots: the names of a whole lake, or of one directory, at one moment, kept until the snapshot is deleted.

Below `.lakefs/snapshots/<name>/` are the files of an index (`index`), `objects` (the list of packs and other objects
below `.lakefs/` in which its files have bytes) and, written last, the manifest: a snapshot without a manifest does not
exist. `gc` leaves the listed objects alone. Plain objects of the lake are not kept: when one is removed or replaced, it
is missing from the snapshot. A version of a dataset (`datasets`) is a snapshot of a directory, and names no plain
object.

Raises StoreError kinds throughout. A crash while a snapshot is written or deleted leaves objects without a manifest,
which writing or deleting that name removes.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable
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
    """Return the name of a snapshot. Raises ConfigError if it cannot be one."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a snapshot: {NAME_CHARACTERS}")
    return name


def removal_of(name: str) -> str:
    """Return the command that deletes a snapshot; by its name it may be a version of a dataset."""
    version = DatasetName.of_snapshot(name)
    return f"`lakefs-fuse {f'snapshot SOURCE --delete {name}' if version is None else f'dataset rm SOURCE {version}'}`"


def prefix_of(name: str) -> str:
    return f"{SNAPSHOTS}{name}/"


async def names(client: StoreClient) -> list[str]:
    """Return the names of all snapshots, sorted, including those that are being written or were never finished."""
    found: list[str] = []
    async for page in client.list_all(SNAPSHOTS, delimiter="/"):
        found += [prefix[len(SNAPSHOTS) : -1] for prefix in page.prefixes]
    return sorted(name for name in found if _NAME.fullmatch(name))


async def fetch_manifest(client: StoreClient, name: str) -> Manifest:
    """Fetch the manifest of a snapshot. Raises NotFound if there is none of this name, DamagedCommit if it cannot be
    used."""
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
    """Fetch the manifest of a snapshot, as `fetch_manifest`. Raises ConfigError that says which snapshots there are."""
    try:
        return await fetch_manifest(client, check_name(name))
    except NotFound as error:
        there = ", ".join(await names(client)) or "none"
        raise ConfigError(f"there is no snapshot {name}; there are: {there} (`lakefs-fuse snapshot SOURCE --name "
                          f"{name}` makes one of now)") from error  # fmt: skip


async def take_in(
    client: StoreClient, threads: Threads, name: str, manifest: Manifest, database: Database, directory: Path
) -> None:
    """Ingest a snapshot into a database without names; ``directory`` is for files in transit. Raises DamagedCommit,
    also if a file is gone, and CacheError."""
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
    """Store a dump as a snapshot. Its name must be free (`check_free`), and cleared of what was never finished
    (`clear`). Raises CacheError, StoreError kinds; then there is no snapshot."""
    await put_objects(client, name, objects)
    prefix = prefix_of(name)
    return await write_index(
        client, threads, dump, time=time, horizon=horizon, wrote=wrote, prefix=prefix, dataset=dataset
    )


async def put_objects(client: StoreClient, name: str, objects: Objects) -> None:
    """Store the list of objects below `.lakefs/` that these rows name. From then on none of them is deleted, even
    before the snapshot is finished. Raises LakeError if there are too many."""
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
    """Replace the rows of a snapshot by a dump, with the PUT of the manifest. The dump goes into files of other names;
    a crash leaves files that no manifest names, which deleting the snapshot removes."""
    prefix = prefix_of(name)
    time, horizon = before.time, before.horizon
    await write_index(
        client, threads, dump, time=time, horizon=horizon, wrote=lambda _: None, prefix=prefix, dataset=before.dataset
    )
    await client.delete_all([prefix + file.name for file in before.files])


async def check_free(client: StoreClient, name: str) -> None:
    """Raise ConfigError if a snapshot has this name, or if no snapshot can have it."""
    try:
        await client.head(prefix_of(check_name(name)) + MANIFEST)
    except NotFound:
        return
    raise ConfigError(f"there is a snapshot {name} already: `lakefs-fuse snapshot SOURCE --delete {name}` first")


async def delete(client: StoreClient, name: str) -> None:
    """Delete a snapshot, its manifest first; `gc` frees what it kept. Raises ConfigError if there is none."""
    if name not in await names(client):
        raise ConfigError(f"there is no snapshot {name}: `lakefs-fuse snapshot SOURCE --list` shows all")
    await remove(client, name)


async def remove(client: StoreClient, name: str) -> None:
    """Remove what there is of a snapshot, its manifest first."""
    await client.delete(prefix_of(name) + MANIFEST)
    await clear(client, name)


async def clear(client: StoreClient, name: str) -> None:
    """Remove what there is of a snapshot without a manifest."""
    async for page in client.list_all(prefix_of(name)):
        await client.delete_all([meta.key for meta in page.objects])


async def remove_unfinished(client: StoreClient, before_ns: int) -> int:
    """Remove snapshots that have no manifest and were last written to before a time; returns how many.

    Only for a command that holds the maintenance lease, as every writer of a snapshot does. Raises StoreError kinds,
    LakeError."""
    last: dict[str, int] = {}
    finished = set[str]()
    async for page in client.list_all(SNAPSHOTS):
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
    """The keys of all objects below `.lakefs/` in which a snapshot has bytes, also one that is being written.

    What always holds (*at least those*): keys that a snapshot listed when `refresh` began are contained, or `refresh`
    fails. Keys are remembered as 64-bit hashes, 8 bytes each, so another key may be contained as well, whose object
    then stays. A list is read once for each version of its object. Trio thread only."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._sums: dict[str, tuple[str, array[int]]] = {}
        """By key of a list: its ETag, and the sorted hashes."""

    async def refresh(self) -> None:
        """Read the lists that have changed. Raises LakeError: DamagedCommit if a list cannot be read, or is gone."""
        found: dict[str, tuple[str, array[int]]] = {}
        finished, listed = set[str](), set[str]()
        async for page in self._client.list_all(SNAPSHOTS):
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
        """Check that a snapshot of which LIST showed the manifest, but no list, is being deleted, manifest first.
        Raises DamagedCommit if its manifest is still there."""
        try:
            await self._client.head(prefix_of(name) + MANIFEST)
        except NotFound:
            return
        raise DamagedCommit(
            f"{prefix_of(name)}{OBJECTS} is gone, so nobody knows what it keeps: {removal_of(name)} deletes it"
        )

    async def _read(self, key: str) -> tuple[str, array[int]] | None:
        """Read a list; None if it was deleted meanwhile."""
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
        """Return the number of keys in all lists; a key in several of them counts several times."""
        return sum(len(sums) for _, sums in self._sums.values())


async def kept_objects(client: StoreClient) -> KeptObjects:
    """Return the objects that snapshots keep now. Raises LakeError."""
    kept = KeptObjects(client)
    await kept.refresh()
    return kept
