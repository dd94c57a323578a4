"""From a `StoreConfig` to an open `ObjectStore`, or to one line that says what to do.

Blocking; called once, before anything is served. Only the kind of store that is asked for is loaded: boto3 alone takes
as long as a mount of a directory.
"""

from __future__ import annotations

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import ConfigError
from lakefs_fuse.store.protocol import ObjectStore
from lakefs_fuse.store.rate_limit import Pace


def open_store(config: StoreConfig, node: Node, pace: Pace | None = None) -> ObjectStore:
    """``pace`` limits what uploads send. Raises ConfigError, NoSuchBucket, AccessDenied, Unavailable, or another
    StoreError."""
    if config.source.scheme == "file":
        from lakefs_fuse.store.local.store import LocalStore

        return LocalStore(config.source.bucket, node.random.stream("local-store"), node.clock, pace)
    if config.source.scheme != "s3":
        raise ConfigError(f"source {config.source}: expected s3://… or file:///…")
    from lakefs_fuse.store.s3.open import open_s3

    return open_s3(config, node.clock, pace)
