"""Records in the store how much of a dataset is on this node, so that a scheduler can place jobs near the bytes.

What always holds (*bounded cost*): one PUT in REPORT_S at most, none while the cache does not change but one in
`node_records.RENEW_S`, and counting takes a 20th of the time at most, whatever the number of files; an empty cache is
not counted. Where the store does not take records, nothing else fails. When the mount ends, it writes a last record, if
the store accepted the one before.

Trio thread only. A crash leaves a record that says that the node mounts the dataset, until it expires.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import trio
import xxhash
from msgspec import structs

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.commits.index.node_records import RENEW_S, RESIDENCY, NodeRecord, key_of, put_record
from lakefs_fuse.config import MountConfig
from lakefs_fuse.errors import AccessDenied, LakeError
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.sync.refusal import Refusal
from lakefs_fuse.vfs.residency.residency import Residency

REPORT_S = 60.0
PAUSE_SHARE = 20
"""After counting for a time, nothing is counted for this many times that."""
COUNTED_S = 1.0
"""Until the cache itself is counted, it is asked so often whether it is."""
LAST_S_MAX = 5.0
"""Time for the last record, when the mount ends."""
NODE_ID_MAX = 64
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine of a mount: ``name`` as its scheduler knows it, and ``machine``, its host name, of which each
    container may have another one."""

    name: str = ""
    machine: str = ""


class ResidencyReport:
    """Writes the record of one mount."""

    def __init__(
        self,
        config: MountConfig,
        host: Host,
        client: StoreClient,
        residency: Residency,
        cache: BlockCache,
        size_bytes: int,
    ) -> None:
        """``size_bytes`` is that of all files."""
        self._client, self._residency, self._cache = client, residency, cache
        self._key = key_of(config.snapshot, node_id(host, config.cache_dir))
        self._record = NodeRecord(
            node=host.name, mountpoint=config.mountpoint, mounted=True, local_bytes=0, bytes=size_bytes
        )
        self._dataset = config.dataset
        self._counted_bytes = 0
        """Bytes in the cache when what is local was counted last."""
        self._written: NodeRecord | None = None
        """None where the store has none, or may have another one."""
        self._written_s = 0.0
        self._has_failed, self._refusal = False, Refusal()

    async def run(self) -> None:
        """Until cancelled; then the last record is written."""
        try:
            while True:
                began_s, is_counted = trio.current_time(), self._cache.counted
                if is_counted and not self._refusal.is_in_effect:
                    await self._attempt()
                pause_s = max(REPORT_S, PAUSE_SHARE * (trio.current_time() - began_s))
                await trio.sleep(pause_s if is_counted else COUNTED_S)
        finally:
            if self._written is not None:
                with trio.move_on_after(LAST_S_MAX, shield=True):
                    await self._write(structs.replace(self._written, mounted=False))

    async def _attempt(self) -> None:
        try:
            await self.report()
        except Exception:
            log.exception("recording what is local of %s", self._dataset)

    async def report(self) -> None:
        """Count, if the cache has changed, and write the record, if it has changed or is to be renewed."""
        used_bytes = self._cache.statistics().bytes_used
        if used_bytes != self._counted_bytes:
            try:
                (row,) = await self._residency.inspect([("", "")])
            except LakeError as error:
                log.info("what is local of %s cannot be counted: %s", self._dataset, error)
                return
            self._counted_bytes = used_bytes
            self._record = structs.replace(self._record, local_bytes=row.local_bytes)
        is_due = trio.current_time() - self._written_s >= RENEW_S
        if self._record != self._written or is_due:
            await self._write(self._record)

    async def _write(self, record: NodeRecord) -> None:
        try:
            await put_record(self._client, self._key, record)
        except LakeError as error:
            self._written = None
            is_refused = isinstance(error, AccessDenied)
            if is_refused:
                self._refusal.note()
            if not self._has_failed:
                why = f": allow s3:PutObject below {RESIDENCY}" if is_refused else ""
                log.warning("`dataset status` does not show this node, as the store does not take %s (%s)%s",
                            self._key, error, why)  # fmt: skip
            self._has_failed = True
        else:
            self._written, self._written_s, self._has_failed = record, trio.current_time(), False


def node_id(host: Host, cache_dir: str) -> str:
    """Name of the record of a mount: one for each cache directory of a machine, or of a container."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", host.name).strip("-.")[:NODE_ID_MAX] or "node"
    meant = f"{host.name}\0{host.machine}\0{Path(cache_dir).absolute()}"
    digest = xxhash.xxh3_64_hexdigest(meant.encode("utf-8", "surrogateescape"))
    return f"{readable}-{digest}"
