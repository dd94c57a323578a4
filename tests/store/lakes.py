"""The four stores that the contract is run against, opened the way a mount opens them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.store.open import open_store
from lakefs_fuse.store.probe import probe
from lakefs_fuse.store.protocol import Capabilities, NetworkStore, ObjectStore
from tests.servers import Server

NAMES = ("local", "seaweedfs", "moto", "rclone")
FIXTURES = {"seaweedfs": "seaweed", "moto": "moto", "rclone": "rclone"}


@dataclass(frozen=True)
class Lake:
    """An open store, empty, and what is known of it."""

    name: str
    store: ObjectStore
    capabilities: Capabilities
    config: StoreConfig


_found: dict[str, Capabilities] = {}
"""Probed once a session: it is the server's nature, not the bucket's."""


def open_lake(name: str, request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[Server], str]) -> Lake:
    """A bucket (with a prefix) or directory of its own."""
    config = config_of(name, request, tmp_path, new_bucket)
    store = open_store(config, Node.of_this_machine())
    if name not in _found:
        _found[name] = probe(store, random.Random(7), SystemClock())
    elif isinstance(store, NetworkStore):
        store.adapt(_found[name])
    return Lake(name, store, _found[name], config)


def config_of(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[Server], str]
) -> StoreConfig:
    """Where a new lake lies."""
    if name == "local":
        directory = tmp_path / "lake"
        directory.mkdir()
        return StoreConfig(source=Source.parse(f"file://{directory}"))
    server: Server = request.getfixturevalue(FIXTURES[name])
    return s3_config(server, new_bucket(server) + "/some prefix")


def s3_config(server: Server, where: str, *, read_timeout_s: float = 20.0) -> StoreConfig:
    """A bucket, or ``bucket/prefix``, of a server."""
    return StoreConfig(
        source=Source.parse(f"s3://{where}"), endpoint_url=server.url, read_timeout_s=read_timeout_s, region="us-east-1"
    )
