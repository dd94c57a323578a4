"""Opens a store from its configuration, and finds the lake of a directory in it. The root of a lake is the nearest
directory, at or above the given one, that has commits, indexes or snapshots; else the nearest that has a lake record,
for example before the first commit. Only the requested kind of store is imported: boto3 alone takes as long as a mount
of a directory. Errors say what to do. Blocking; called once, before anything is served.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from msgspec import structs

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import AccessDenied, ConfigError, MountError
from lakefs_fuse.product import RESERVED_NAME, RESERVED_PREFIX
from lakefs_fuse.store.lake_record import KEY
from lakefs_fuse.store.open_retries import retry_unavailable
from lakefs_fuse.store.protocol import ListPage, ObjectStore
from lakefs_fuse.store.rate_limit import RateLimiter

if TYPE_CHECKING:
    from lakefs_fuse.store.s3.store import S3Store

LAKE_DIRECTORIES = ("commits", "index", "snapshots")
"""A directory with one of these below its reserved name is the root of a lake."""
RECORD = KEY.removeprefix(RESERVED_PREFIX)


def open_store(config: StoreConfig, node: Node, limiter: RateLimiter | None = None) -> ObjectStore:
    """``limiter`` limits what uploads send. Raises ConfigError, NoSuchBucket, AccessDenied, Unavailable, or another
    StoreError."""
    if config.source.scheme == "file":
        from lakefs_fuse.store.local.store import LocalStore

        return LocalStore(config.source.bucket, node.random.stream("local-store"), node.clock, limiter)
    if config.source.scheme != "s3":
        raise ConfigError(f"source {config.source}: expected s3://… or file:///…")
    from lakefs_fuse.store.s3.store import open_s3

    return open_s3(config, node.clock, limiter)


@dataclass(frozen=True, slots=True)
class FoundLake:
    """The lake that contains a directory, or without one the directory itself; ``path`` is that of the directory in the
    lake. ``exists``: it has commits; ``is_recorded``: it has a lake record at least."""

    store: StoreConfig
    path: str
    exists: bool
    is_recorded: bool = False


def search_lake(place: StoreConfig, node: Node) -> FoundLake:
    """The lake that contains a directory; one LIST for each level. A bucket in another region is accessed there, and
    the result has that region. Raises StoreError, ConfigError."""
    if place.source.scheme == "file":
        return _nearest(place, _local_names)
    from lakefs_fuse.store.s3.store import open_s3

    store = open_s3(place, node.clock, None)
    try:
        return _search_bucket(store, place, node)
    finally:
        store.close()


def _search_bucket(store: S3Store, place: StoreConfig, node: Node) -> FoundLake:
    """As `search_lake`, with a store that is open at the directory. If the credentials may not list above it, they
    could not write commits there either."""

    def names_of(level: StoreConfig) -> set[str]:
        try:
            return _names_in(
                retry_unavailable(lambda: store.list_level(level.source.prefix + RESERVED_PREFIX), node.clock)
            )
        except AccessDenied:
            return set()

    return _nearest(structs.replace(place, region=store.access.config.region), names_of)


def _nearest(place: StoreConfig, names_of: Callable[[StoreConfig], set[str]]) -> FoundLake:
    """``names_of`` returns the names of the lake's own objects and directories at a level."""
    recorded = None
    for level, path in _candidates(place):
        found = names_of(level)
        if not found.isdisjoint(LAKE_DIRECTORIES):
            return FoundLake(level, path, exists=True, is_recorded=True)
        if recorded is None and RECORD in found:
            recorded = FoundLake(level, path, exists=False, is_recorded=True)
    return recorded or FoundLake(place, "", exists=False)


def require_root(store: ObjectStore, place: StoreConfig, node: Node) -> None:
    """Raise MountError if the directory at which `open_store` opened ``store`` is not a lake but is inside one: a
    writable mount would begin a second lake there, without the packed files of the first. A lake record is enough for
    either, because a mount of that lake may pack files at any time. One LIST where there are commits; else one more for
    each level. Raises StoreError, too."""
    try:
        if retry_unavailable(lambda: _is_lake(place, store), node.clock):
            return
    except AccessDenied:
        return  # the mount reports which permission is missing
    is_local = place.source.scheme == "file"
    found = search_lake(place, node) if is_local else _search_bucket(cast("S3Store", store), place, node)
    if found.is_recorded and found.path:
        root = found.store.source
        unused = "" if found.exists else f"; if no mount uses {root}, delete its {RESERVED_PREFIX}{RECORD} instead"
        raise MountError(
            f"{place.source} is the directory {found.path} of the lake {root}: mount that, or this directory alone "
            f"with --immutable{unused}"
        )


def find_lake(place: StoreConfig, node: Node) -> tuple[StoreConfig, str]:
    """Store and path of `search_lake`."""
    found = search_lake(place, node)
    return found.store, found.path


def _candidates(place: StoreConfig) -> list[tuple[StoreConfig, str]]:
    """The directory itself, then those above it, nearest first."""
    source = place.source
    whole = source.bucket.strip("/") if source.scheme == "file" else source.prefix.rstrip("/")
    parts = whole.split("/") if whole else []
    found = []
    for count in range(len(parts), 0 if source.scheme == "file" and parts else -1, -1):
        above = "/".join(parts[:count])
        root = (
            Source("file", "/" + above, "")
            if source.scheme == "file"
            else Source("s3", source.bucket, above + "/" if above else "")
        )
        found.append((structs.replace(place, source=root), "/".join(parts[count:])))
    return found


def _is_lake(config: StoreConfig, store: ObjectStore) -> bool:
    if config.source.scheme == "file":
        found = _local_names(config)
    else:
        page = store.list_page(RESERVED_PREFIX, delimiter="/")
        found = {name.removeprefix(RESERVED_PREFIX) for name in _names_in(page)}
    return not found.isdisjoint(LAKE_DIRECTORIES)


def _names_in(page: ListPage) -> set[str]:
    keys = [*page.prefixes, *(each.key for each in page.objects)]
    return {key.rstrip("/") for key in keys}


def _local_names(config: StoreConfig) -> set[str]:
    """For a local directory, which needs no store."""
    reserved = os.path.join(config.source.bucket, RESERVED_NAME)
    names = {name for name in LAKE_DIRECTORIES if os.path.isdir(os.path.join(reserved, name))}
    return names | ({RECORD} if os.path.isfile(os.path.join(reserved, RECORD)) else set())
