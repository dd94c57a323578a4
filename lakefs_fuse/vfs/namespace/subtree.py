"""Every name below a directory, as the store has it now: what a rename of the directory has to know.

Within the TTL a listing is believed, but files that other nodes put there since must move along, or a directory of
shards from several nodes would be published in part. One LIST of all keys below (1,000 a request) and one for commits
tell what is not known here; only directories where something is new are listed again. Trio thread only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.product import PLACEHOLDER
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import collecting
from lakefs_fuse.vfs.namespace.namespace import Namespace

LISTED_AT_ONCE = 8
"""Directories listed at a time."""


class LookingBelow:
    """See the module's head."""

    def __init__(self, namespace: Namespace, client: StoreClient, look_again: Callable[[], Awaitable[object]]) -> None:
        """``look_again`` asks the store what others committed."""
        self._ns, self._client, self._look_again = namespace, client, look_again

    async def run(self, directory: Entry) -> None:
        """Every name below the directory is known when this returns. Raises LakeError."""
        await self._look_again()
        await self._list_unlisted(directory)
        if await self._list_changed(directory):
            await self._list_unlisted(directory)

    async def _list_unlisted(self, directory: Entry) -> None:
        queue = [directory.inode]
        few = trio.CapacityLimiter(LISTED_AT_ONCE)

        async def listed(inode: int) -> None:
            async with few:
                await self._ns.ensure_listed(inode)

        while queue:
            async with collecting() as nursery:
                for inode in queue:
                    nursery.start_soon(listed, inode)
            queue = [child.inode for inode in queue for child in self._ns.tree.children(inode) if child.is_dir]

    async def _list_changed(self, directory: Entry) -> bool:
        """List directories again below which the store has a key that is not known here; whether there were any."""
        prefix = self._ns.key(directory)
        changed: set[int] = set()
        token: str | None = None
        while True:
            page = await self._client.list_page(prefix, token=token)
            for meta in page.objects:
                if not self._is_known(meta):
                    changed.add(self._nearest(meta.key.removesuffix("/")))
            token = page.next_token
            if token is None:
                break
        for inode in changed:
            await self._ns.list_directory(inode)
        return bool(changed)

    def _is_known(self, meta: ObjectMeta) -> bool:
        path = meta.key.removesuffix(PLACEHOLDER)
        entry = self._ns.at(path.removesuffix("/"))
        if path.endswith("/"):
            return entry is not None and entry.is_dir
        if entry is not None and not entry.is_dir:
            return entry.is_local or entry.etag == meta.etag
        tombstone = self._ns.tree.tombstones.get(path.encode("utf-8", "surrogatepass"))
        hidden = tombstone is not None and tombstone.hides(meta.etag, meta.mtime_ns)
        return hidden or self._ns.tree.objects.used(meta.key) is not None

    def _nearest(self, path: str) -> int:
        """Inode of the nearest directory above a path that is known here."""
        while path:
            path = path.rpartition("/")[0]
            inode = self._ns.directory(path)
            if inode is not None:
                return inode
        raise AssertionError("the root is always known")
