"""Opening a store from its configuration, and finding the lake that a place in it belongs to.

The root of a lake is the nearest place, at or above the one given, that has commits, indexes or snapshots; else the
nearest that has a lake record, as where a mount has committed nothing yet. Only the kind of store that is asked for is
imported: boto3 alone takes as long as a mount of a directory. Errors say what to do. Blocking; called once, before
anything is served.
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
"""A place with one of these below its reserved name is the root of a lake."""
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
    """The lake that a place is in, or without one the place itself; ``path`` is that of the place in it. ``exists``: it
    has commits; ``is_recorded``: it has a lake record at least."""

    store: StoreConfig
    path: str
    exists: bool
    is_recorded: bool = False


def search_lake(place: StoreConfig, node: Node) -> FoundLake:
    """The lake that a place is in; one LIST for each level. A bucket in another region is followed there, and that
    is in the answer. Raises StoreError, ConfigError."""
    if place.source.scheme == "file":
        return _nearest(place, _local_names)
    from lakefs_fuse.store.s3.store import open_s3

    store = open_s3(place, node.clock, None)
    try:
        return _search_bucket(store, place, node)
    finally:
        store.close()


def _search_bucket(store: S3Store, place: StoreConfig, node: Node) -> FoundLake:
    """As `search_lake`, with a store that is open at the place. Above the place we may not be allowed to look; then we
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
    """``names_of`` answers which names of the lake's own objects and directories there are at a level."""
    recorded = None
    for level, path in _candidates(place):
        found = names_of(level)
        if not found.isdisjoint(LAKE_DIRECTORIES):
            return FoundLake(level, path, exists=True, is_recorded=True)
        if recorded is None and RECORD in found:
            recorded = FoundLake(level, path, exists=False, is_recorded=True)
    return recorded or FoundLake(place, "", exists=False)


def require_root(store: ObjectStore, place: StoreConfig, node: Node) -> None:
    """Raises MountError where the place, at which `open_store` opened ``store``, is no lake yet and is in one: a mount
    that may change it would begin a second lake there, and would not show what the first has in packs. One LIST where
    there is a lake; else one more for each level. Raises StoreError, too."""
    try:
        if retry_unavailable(lambda: _is_lake(place, store), node.clock):
            return
    except AccessDenied:
        return  # the mount says which permission is missing
    is_local = place.source.scheme == "file"
    found = search_lake(place, node) if is_local else _search_bucket(cast("S3Store", store), place, node)
    if found.exists and found.path:
        raise MountError(
            f"{place.source} is the directory {found.path} of the lake {found.store.source}: mount that, or this "
            "directory alone with --immutable"
        )


def find_lake(place: StoreConfig, node: Node) -> tuple[StoreConfig, str]:
    """Store and path of `search_lake`."""
    found = search_lake(place, node)
    return found.store, found.path


def _candidates(place: StoreConfig) -> list[tuple[StoreConfig, str]]:
    """The place itself, then what is above it, nearest first."""
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
    """Of a local directory, which needs no store to be looked at."""
    reserved = os.path.join(config.source.bucket, RESERVED_NAME)
    names = {name for name in LAKE_DIRECTORIES if os.path.isdir(os.path.join(reserved, name))}
    return names | ({RECORD} if os.path.isfile(os.path.join(reserved, RECORD)) else set())
