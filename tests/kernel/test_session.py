"""What a session is asked to be, by the configuration of its mount."""

from __future__ import annotations

import pyfuse3
import pytest
import trio
from msgspec import structs

from lakefs_fuse.config import GIB, MIB, MountConfig, Source, StoreConfig
from lakefs_fuse.kernel import session
from lakefs_fuse.kernel.features import BACKGROUND_REQUESTS_MAX, background_max, features_for
from lakefs_fuse.kernel.native.hooks import Feature

CONFIG = MountConfig(store=StoreConfig(source=Source.parse("file:///data")), mountpoint="/mnt", cache_dir="/cache")


@pytest.mark.parametrize(("staging_bytes", "requests"), [(10 * GIB, 64), (512 * MIB, 64), (64 * MIB, 8), (MIB, 1)])
def test_writes_under_way_are_a_small_part_of_staging(staging_bytes: int, requests: int) -> None:
    config = structs.replace(CONFIG, staging_bytes_max=staging_bytes)
    assert background_max(config) == requests
    assert background_max(structs.replace(config, read_only=True)) == BACKGROUND_REQUESTS_MAX


def test_what_a_mount_can_use() -> None:
    always = Feature.EXPLICIT_INVAL_DATA | Feature.PARALLEL_DIROPS
    listings = always | Feature.STATELESS_OPENDIR
    assert features_for(CONFIG) == listings | Feature.HANDLE_KILLPRIV
    assert features_for(structs.replace(CONFIG, metadata_ttl_s=0.5)) == always | Feature.HANDLE_KILLPRIV
    assert features_for(structs.replace(CONFIG, read_only=True)) == listings | Feature.NOFLUSH
    immutable = features_for(structs.replace(CONFIG, read_only=True, immutable=True))
    assert immutable == listings | Feature.STATELESS_OPEN | Feature.CACHE_SYMLINKS


@pytest.mark.parametrize("error", [ConnectionAbortedError(103, "aborted"), OSError(5, "an error of the device")])
async def test_requests_are_served_until_the_connection_ends_while_one_is_read(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    async def read() -> None:
        raise error

    async def main(**_: object) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(trio.sleep_forever)

    monkeypatch.setattr(pyfuse3, "main", main)
    if isinstance(error, ConnectionAbortedError):
        await session.serve_requests()
    else:
        with pytest.raises(ExceptionGroup):
            await session.serve_requests()
