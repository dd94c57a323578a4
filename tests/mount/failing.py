"""A lake on a store that fails on command: SeaweedFS behind a proxy, mounted once for a module."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults import Faults, faulty
from tests.mount.conftest import Place, new_place
from tests.mount.lakes import Lake, eventually, s3_lake
from tests.servers import Server, make_bucket

RETRY_S = "1.2"
"""How long a request is tried again."""


@dataclass(frozen=True)
class Failing:
    """A directory of its own in that lake."""

    here: Place
    faults: Faults

    @property
    def lake(self) -> Lake:
        return self.here.lake

    @property
    def path(self) -> Path:
        return self.here.path

    def url(self, name: str) -> str:
        """What requests about a file of this directory, and no others, have in their URL."""
        return self.here.prefix + name

    def put_by_others(self, name: str, data: bytes) -> Path:
        """A file that another client wrote, seen here already."""
        self.here.outside.replace(self.here.prefix + name, data)
        eventually((self.path / name).exists, "seen after the TTL")
        return self.path / name


@contextmanager
def failing_lake(seaweed: Server, directory: Path) -> Iterator[tuple[Lake, Faults]]:
    """Mounted; names are looked up anew after a moment."""
    bucket = f"failing-{random.SystemRandom().getrandbits(48):012x}"
    make_bucket(seaweed, bucket)
    options = ("--retry-timeout", RETRY_S, "--metadata-ttl", "0.2", "--refresh", "1h")
    with faulty(seaweed) as (proxied, faults), s3_lake(seaweed, bucket, directory, *options, through=proxied) as lake:
        yield lake.mount(), faults
        faults.clear()


@contextmanager
def failing_place(lake: Lake, faults: Faults) -> Iterator[Failing]:
    """Everything works before and after the body."""
    faults.clear()
    yield Failing(new_place(lake), faults)
    faults.clear()
