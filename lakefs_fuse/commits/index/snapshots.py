"""Named snapshots: the names of a whole lake at one moment, kept under a name until it is deleted.

Under `.lakefs/snapshots/<name>/` lie the files of an index (`index`), `objects` (which packs and other objects of ours
its files have bytes in) and, written last, the manifest: a snapshot without a manifest does not exist. `gc` leaves
those objects alone. Plain objects of the lake are not kept: who removes or replaces one has the snapshot miss it.

Raises StoreError kinds throughout. A crash while one is written leaves objects without a manifest, which writing or
deleting that name takes away; while one is deleted, the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import aclosing
from pathlib import Path

import msgspec

from lakefs_fuse.commits.index.index import (
    FORMAT,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    decode,
    fetch_files,
    write_index,
)
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import ConfigError, DamagedCommit, LakeError, NotFound
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.object_table import Objects
from lakefs_fuse.meta.sorted_tables import DumpedFile
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient

SNAPSHOTS = f"{RESERVED_PREFIX}snapshots/"
OBJECTS = "objects"
OBJECTS_BYTES_MAX = 256 << 20
NAME_CHARACTERS = "letters, digits, '.', '_' and '-', at most 100 and a letter or digit first"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(name: str) -> str:
    """Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a snapshot: {NAME_CHARACTERS}")
    return name


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
    try:
        time = msgspec.msgpack.decode(fetched.data, type=dict[str, object]).get("time")
        manifest = decode(fetched.data, time if isinstance(time, int) else -1)
        if manifest.format != FORMAT:
            raise DamagedCommit(f"format {manifest.format}, and files of a snapshot are its own")
        return manifest
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCommit(f"{key}: not a manifest: {str(error)[:200]}") from error
    except DamagedCommit as error:
        raise DamagedCommit(f"{key}: {error}") from error


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
    """Into a database without names; ``directory`` is for files on their way. Raises DamagedCommit, CacheError."""
    try:
        paths = await fetch_files(client, threads, manifest, tables.empty_directory(directory), prefix=prefix_of(name))
        marks = tables.Marks(inode=manifest.inode, object=manifest.object, newest=manifest.newest)
        tables.ingest(database, paths, marks, directory)
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
) -> Manifest:
    """Store what is dumped under a name. Raises ConfigError where that exists."""
    await check_free(client, name)
    await _clear(client, name)
    kept = [row.key for row in objects.rows() if row.entries > 0 and row.key.startswith(RESERVED_PREFIX)]
    await client.put(prefix_of(name) + OBJECTS, msgspec.msgpack.encode(kept))
    return await write_index(client, threads, dump, time=time, horizon=horizon, wrote=wrote, prefix=prefix_of(name))


async def replace(client: StoreClient, threads: Threads, name: str, before: Manifest, dump: tables.Dump) -> None:
    """Store what is dumped, into files of other names, in place of the rows of a snapshot: the PUT of the manifest is
    the moment. A crash leaves files that no manifest names, which deleting the snapshot takes away."""
    prefix = prefix_of(name)
    time, horizon = before.time, before.horizon
    await write_index(client, threads, dump, time=time, horizon=horizon, wrote=lambda _: None, prefix=prefix)
    failed = await client.delete_many([prefix + file.name for file in before.files])
    if failed:
        key, why = next(iter(failed.items()))
        raise LakeError(f"{key} cannot be removed: {why}")


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
    await client.delete(prefix_of(name) + MANIFEST)
    await _clear(client, name)


async def _clear(client: StoreClient, name: str) -> None:
    async with aclosing(client.list_all(prefix_of(name))) as pages:
        async for page in pages:
            failed = await client.delete_many([meta.key for meta in page.objects])
            if failed:
                key, why = next(iter(failed.items()))
                raise LakeError(f"{key} cannot be removed: {why}")


async def kept_objects(client: StoreClient) -> set[str]:
    """Keys of all objects below `.lakefs/` that some snapshot has bytes in; also of one that is being written."""
    kept: set[str] = set()
    for name in await names(client):
        try:
            fetched = await client.get(prefix_of(name) + OBJECTS, 0, OBJECTS_BYTES_MAX)
        except NotFound:
            continue  # it is being deleted, or has just begun
        kept.update(_decode_objects(name, fetched.data))
    return kept


def _decode_objects(name: str, raw: object) -> Iterable[str]:
    try:
        return msgspec.msgpack.decode(raw, type=list[str])  # type: ignore[call-overload,no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCommit(
            f"{prefix_of(name)}{OBJECTS} cannot be read, so nobody knows what it keeps: delete that snapshot"
        ) from error
