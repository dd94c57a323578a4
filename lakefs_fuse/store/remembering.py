"""What a store can do, as it was found out before: kept in the cache directory for a day, so that a mount that is made
again asks one question in place of fifty.

It counts only for the same program, the same place in the same store, and the same right to write. One LIST is made all
the same: wrong keys, a bucket that is gone and a store that is away are told before anything is served. What is
missing, older or cannot be understood is found out anew. The file is whole or not there, also after a crash.

Blocking; called once per mount, before anything is served.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from lakefs_fuse import __version__
from lakefs_fuse.config import MountConfig
from lakefs_fuse.store.patience import patiently
from lakefs_fuse.store.probe import probe
from lakefs_fuse.store.probeable import Adaptable
from lakefs_fuse.store.protocol import Capabilities, ObjectStore

FILE = "store.json"
KEPT_NS = 24 * 3600 * 1_000_000_000
log = logging.getLogger(__name__)


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The file. ``about`` says whose findings these are."""

    about: str
    at_ns: int
    capabilities: Capabilities


def find_out(
    store: ObjectStore,
    config: MountConfig,
    rng: random.Random,
    *,
    clock_ns: Callable[[], int] = time.time_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> Findings:
    """What the store can do, which it is adapted to. Raises as `probe.probe` does."""
    known = _recall(config, clock_ns())
    if known is None:
        found = probe(store, rng, read_only=config.read_only, sleep=sleep)
        return Findings(about=_about(config), at_ns=clock_ns(), capabilities=found)
    patiently(lambda: store.list_page("", keys_max=1), sleep)
    if isinstance(store, Adaptable):
        store.adapt(known.capabilities)
    return known


def remember(config: MountConfig, findings: Findings) -> None:
    """For the next mount. The cache directory is there, and the caller's."""
    path = _path(config)
    aside = path.with_suffix(".tmp")
    try:
        aside.write_bytes(msgspec.json.encode(findings))
        aside.rename(path)
    except OSError as error:
        log.warning("what the store can do will be found out again at the next mount: %s", error)


def _recall(config: MountConfig, now_ns: int) -> Findings | None:
    try:
        known = msgspec.json.decode(_path(config).read_bytes(), type=Findings)
    except (OSError, msgspec.MsgspecError):
        return None
    return known if known.about == _about(config) and 0 <= now_ns - known.at_ns < KEPT_NS else None


def _path(config: MountConfig) -> Path:
    return Path(config.cache_dir).absolute() / FILE


def _about(config: MountConfig) -> str:
    where = config.store
    rights = "reads" if config.read_only else "writes"
    return "\n".join([__version__, *where.meant, where.region or "", where.addressing_style, rights])
