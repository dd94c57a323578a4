"""Which answers of a store are compared with sums: those that come over plain http.

Over https TLS has done so already, for less CPU and for every byte; a local directory has no way to go.
"""

from __future__ import annotations

from lakefs_fuse.blockcache.verified_get import VerifiedGet
from lakefs_fuse.commits.archive import wrong_members
from lakefs_fuse.meta.object_table import is_pack_key
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import StoreClient


def verification(client: StoreClient, metrics: Metrics, *, read_only: bool) -> VerifiedGet | None:
    """None where nothing needs to be compared. ``read_only``: the probe could not put an object to learn of ETags."""
    if client.is_guarded:
        return None
    md5_etags = True if client.capabilities.md5_etags else None if read_only else False
    return VerifiedGet(client, metrics.cache, is_pack=is_pack_key, wrong_members=wrong_members, md5_etags=md5_etags)
