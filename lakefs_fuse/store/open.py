"""From a `StoreConfig` to an open `ObjectStore`, or to one line that says what to do.

Blocking; called once, before anything is served. Only the kind of store that is asked for is loaded: boto3 alone takes
as long as a mount of a directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.errors import ConfigError
from lakefs_fuse.store.protocol import ObjectStore


def open_store(config: StoreConfig, *, sleep: Callable[[float], None] = time.sleep) -> ObjectStore:
    """Raises ConfigError, NoSuchBucket, AccessDenied, Unavailable, or another StoreError."""
    if config.source.scheme == "file":
        from lakefs_fuse.store.local.store import LocalStore

        return LocalStore(config.source.bucket)
    if config.source.scheme != "s3":
        raise ConfigError(f"source {config.source}: expected s3://… or file:///…")
    from lakefs_fuse.store.s3.open import open_s3

    return open_s3(config, sleep)
