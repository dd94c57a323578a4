"""What has to be known, and to be in the store, before a rename is planned.

Within the TTL a listing is believed, but files that other nodes put below a directory since must move along, or a
directory of shards from several nodes would be published in part. One LIST of all keys below (1,000 a request) and one
for commits show what is not known here; only directories where something is new are listed again.

What always holds: nothing is renamed here, and everything here can be repeated. While the store is away it is tried
again as long as a writer would wait for room (``patience_s``). Memory holds the numbers of one level's directories (8
bytes each). Trio thread only; a crash leaves nothing.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from lakefs_fuse.commits.objects.deletion_queue import HEARD_S
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace.key_mapping import paths_of_keys
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.renamed_objects import RenamedObjects
from lakefs_fuse.vfs.writeback.publisher import Publisher
from lakefs_fuse.vfs.writeback.queue import PAUSE_S_FIRST, WAITABLE, WriteBack

LISTINGS_AT_ONCE = 8
DIRECTORIES_PER_STEP = 512
"""Of which is looked up whether they have to be listed: 5 ms."""
log = logging.getLogger(__name__)


class RenamePreparation:
    """See the module's head."""

    def __init__(
        self,
        namespace: Namespace,
        files: FileTable,
        client: StoreClient,
        heard: Callable[[float], Awaitable[object]],
        publisher: Publisher,
        writeback: WriteBack,
        renamed: RenamedObjects,
        patience_s: float,
    ) -> None:
        """``heard`` as `Poller.heard`."""
        self._ns, self._files, self._client, self._heard = namespace, files, client, heard
        self._publisher, self._writeback, self._patience_s = publisher, writeback, patience_s
        self.renamed = renamed

    async def hear(self) -> None:
        """What others did to names before HEARD_S is known here: an object that they removed since is still there.
        Raises LakeError."""
        await self._heard(HEARD_S)
        if self.renamed.adopting:
            await self.renamed.wait_adopted()

    async def prepare(self, moving: Sequence[Entry], replaced: Entry | None = None) -> None:
        """What changes places, one entry or in an exchange two, is known here with all that is below it, and in the
        store as far as it has to be there before, when this returns. ``replaced`` is what loses its name. Raises
        LakeError."""
        is_exchange = len(moving) > 1
        for entry in moving:
            if entry.flags & Flag.DIRECTORY:
                await self.list_below(self._ns.path_of(entry), entry)
        for entry in moving:
            await self._drain_older(entry)
        for entry in [*moving, *([] if replaced is None else [replaced])]:
            file = self._files.get(entry.inode)
            if file is not None and await self.is_stored_late(file):
                await self._publisher.publish(file)
        if is_exchange:
            await self._publish_closed(moving)
        for entry in moving:
            if self._writeback.versions and (is_exchange or entry.flags & Flag.DIRECTORY):
                await self._drain_below(self._ns.path_of(entry))

    async def is_stored_late(self, file: OpenFile) -> bool:
        """An attempt to store the newest version had no answer, and the store has it at the name that the file has: it
        would be left behind there, or be shown in place of what gets that name. Raises LakeError."""
        meta = None if file.draft is None else await self._writeback.find_late_object(file.draft)
        return meta is not None and meta.key == file.key

    async def _retry_while_away(self, path: str, attempt: Callable[[], Awaitable[None]]) -> None:
        """Where ``path`` is write-back's, ``attempt`` is made again while the store is away, as long as a writer would
        wait for room. Raises what the last attempt did."""
        deadline_s = trio.current_time() + self._patience_s
        while True:
            try:
                await attempt()
                return
            except WAITABLE as error:
                if trio.current_time() >= deadline_s or not self._writeback.is_for(path):
                    raise
                log.info("a change of %s waits for the store: %s", path, error)
            await trio.sleep(PAUSE_S_FIRST)

    # -- what others put below a directory

    async def list_below(self, path: str, directory: Entry) -> None:
        """Every name below the directory is known when this returns. Raises LakeError."""
        await self._retry_while_away(path, partial(self._list_below, directory))

    async def _list_below(self, directory: Entry) -> None:
        await self._heard(0.0)
        await self._list_unlisted(directory)
        if await self._list_changed(directory):
            await self._list_unlisted(directory)

    async def _list_unlisted(self, directory: Entry) -> None:
        level = array("Q", [directory.inode])
        while level:
            await self._list_all(await self._unlisted_of(level), self._ns.ensure_listed)
            below = array("Q")
            for inode in level:
                for children in self._ns.tree.children_in_steps(inode):
                    below.extend(child.inode for child in children if child.flags & Flag.DIRECTORY)
                    await trio.lowlevel.checkpoint()
            level = below

    async def _unlisted_of(self, directories: Sequence[int]) -> Sequence[int]:
        unlisted = array("Q")
        for number, inode in enumerate(directories, 1):
            if self._ns.fresh_s(inode, within_ttl=True) <= 0:
                unlisted.append(inode)
            if number % DIRECTORIES_PER_STEP == 0:
                await trio.lowlevel.checkpoint()
        return unlisted

    @staticmethod
    async def _list_all(directories: Sequence[int], list_one: Callable[[int], Awaitable[object]]) -> None:
        if directories:
            await for_each(directories, list_one, min(LISTINGS_AT_ONCE, len(directories)))

    async def _list_changed(self, directory: Entry) -> bool:
        """List directories again below which the store has a key that is not known here; whether there were any."""
        prefix = self._ns.key(directory)
        changed: set[int] = set()
        token: str | None = None
        while True:
            page = await self._client.list_page(prefix, token=token)
            changed |= {self._nearest(meta.key.removesuffix("/")) for meta in self._unknown(page.objects)}
            token = page.next_token
            if token is None:
                break
        await self._list_all([*changed], self._ns.list_directory)
        return bool(changed)

    def _unknown(self, objects: Sequence[ObjectMeta]) -> list[ObjectMeta]:
        """Those of which neither a name, nor a tombstone, nor an object of another name is known here."""
        tree = self._ns.tree
        paths = paths_of_keys([meta.key for meta in objects])
        unknown = []
        for meta, path, entry in zip(objects, paths, tree.children_at(paths), strict=True):
            is_dir = entry is not None and bool(entry.flags & Flag.DIRECTORY)
            if path.endswith(b"/"):
                is_known = is_dir
            elif entry is not None and not is_dir:
                is_known = entry.etag == meta.etag or bool(entry.flags & Flag.LOCAL)
            else:
                tombstone = tree.tombstones.get(path)
                hidden = tombstone is not None and tombstone.hides(meta.etag, meta.mtime_ns)
                is_known = hidden or tree.objects.used(meta.key) is not None
            if not is_known:
                unknown.append(meta)
        return unknown

    def _nearest(self, path: str) -> int:
        """Inode of the nearest directory above a path that is known here."""
        while path:
            path = path.rpartition("/")[0]
            inode = self._ns.directory(path)
            if inode is not None:
                return inode
        raise AssertionError("the root is always known")

    # -- what this node has not stored

    async def _publish_closed(self, entries: Sequence[Entry]) -> None:
        """An exchange is made in the store: files that are only here have to be there before, but for those that are
        being written, which move here only. Raises LakeError."""
        for entry in entries:
            file = self._files.get(entry.inode) if entry.is_local else None
            if file is not None and not file.writers:
                await self._publisher.publish(file)

    async def _drain_older(self, source: Entry) -> None:
        """An acknowledged version that is not the newest becomes visible under the name it had, or not at all. So does
        one that came back at mount, which may be in the store under that name. Raises LakeError."""
        file = self._files.get(source.inode)
        if file is not None and (replayed := self._writeback.unreconciled(file)):
            await self._retry_while_away(file.key, partial(self._writeback.drain, replayed))
        while file is not None and file.behind:
            drafts = [each.draft for each in file.behind if each.draft is not None]
            items = [item for draft in drafts if (item := self._writeback.item_of(draft)) is not None]
            try:
                await self._writeback.drain(items)
            except LakeError as error:
                log.info("only the newest version of %s is renamed and stored: %s", file.key, error)
            self._writeback.supersede_all(file)

    async def _drain_below(self, path: str) -> None:
        """What write-back acknowledged at or below a path is in the store before the path's new name is. Raises
        LakeError."""

        async def drain() -> None:
            await self._writeback.drain(self._writeback.below(path))

        await self._retry_while_away(path, drain)
