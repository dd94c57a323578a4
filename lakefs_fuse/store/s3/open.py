"""From a `StoreConfig` to an open `S3Store`, or to one line that says what to do.

One listing of one key is the whole test: it needs the bucket, the credentials and the region to be right. Blocking.
"""

from __future__ import annotations

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import AccessDenied, ConfigError, NoSuchBucket, NotFound, StoreError, Unavailable
from lakefs_fuse.store.open_retries import retry_unavailable
from lakefs_fuse.store.rate_limit import Pace
from lakefs_fuse.store.s3.client import connect
from lakefs_fuse.store.s3.errors import WrongRegion
from lakefs_fuse.store.s3.store import S3Store


def open_s3(config: StoreConfig, clock: Clock, pace: Pace | None) -> S3Store:
    """Raises as `lakefs_fuse.store.open.open_store`."""
    access = connect(config, clock)
    store = S3Store(access, clock, pace)
    try:
        retry_unavailable(lambda: store.list_page("", keys_max=1), clock)
    except StoreError as error:
        store.close()
        raise _advice(config, access.base_url, error) from error
    except BaseException:
        store.close()
        raise
    return store


def _advice(config: StoreConfig, base_url: str, error: StoreError) -> Exception:
    bucket = config.source.bucket
    if isinstance(error, NoSuchBucket | NotFound):
        return NoSuchBucket(f"bucket {bucket!r} does not exist at {base_url}: create it, or check --endpoint-url")
    if isinstance(error, AccessDenied):
        return AccessDenied(f"bucket {bucket!r} at {base_url}: access denied: {error}")
    if isinstance(error, Unavailable):
        return Unavailable(f"{base_url} cannot be reached: check --endpoint-url and the network: {error}")
    if isinstance(error, WrongRegion):
        return ConfigError(f"bucket {bucket!r}: {error}")
    return type(error)(f"bucket {bucket!r} at {base_url}: {error}")
