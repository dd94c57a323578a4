"""Prepares a rename: learns the names that it moves, and stores the versions that must be in the store before.

Within the TTL a listing counts, but files that other nodes have put below a directory since must move with it, or a
directory of shards from several nodes would be published in part. One LIST of all keys below (1,000 a request) and one
for commits show what this node does not know; only directories with new names are listed again.

What always holds: nothing is renamed here, and every step can be repeated. While the store is away, a step for a path
under write-back is tried again for as long as a writer would wait for room (``patience_s``). Memory holds the inodes of
the directories of one level (8 bytes each). Trio thread only; a crash leaves nothing.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from lakefs_fuse.commits.objects.deletion_queue import CAUGHT_UP_S
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace.key_mapping import paths_of_keys
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.renamed_objects import RenamedObjects
from lakefs_fuse.vfs.writeback.publisher import Publisher
from lakefs_fuse.vfs.writeback.queue import PAUSE_S_FIRST, WAITABLE, WriteBackQueue

LISTINGS_AT_ONCE = 8
DIRECTORIES_PER_STEP = 512
"""Directories that are checked between two turns of other tasks: 5 ms."""
log = logging.getLogger(__name__)


class RenamePreparation:
    """Prepares renames; see the module's head."""

    def __init__(
        self,
        namespace: Namespace,
        files: FileTable,
        client: StoreClient,
        catch_up: Callable[[float], Awaitable[object]],
        publisher: Publisher,
        writeback: WriteBackQueue,
        renamed: RenamedObjects,
        patience_s: float,
    ) -> None:
        """``catch_up`` as `Poller.catch_up`."""
        self._ns, self._files, self._client, self._catch_up = namespace, files, client, catch_up
        self._publisher, self._writeback, self._patience_s = publisher, writeback, patience_s
        self.renamed = renamed

    async def catch_up(self) -> None:
        """Apply commits that were visible CAUGHT_UP_S ago, and wait until renamed objects are adopted. An object
        that other nodes removed later still exists. Raises LakeError."""
        await self._catch_up(CAUGHT_UP_S)
        if self.renamed.adopting:
            await self.renamed.wait_adopted()

    async def prepare(self, moving: Sequence[Entry], replaced: Entry | None = None) -> None:
        """Prepare a rename of the entries ``moving``: one, or two in an exchange. When this returns, everything below
        them is known here, and what must be in the store before is there. ``replaced`` is the entry that loses its
        name. Raises LakeError."""
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
        """Return whether the store has the newest version, from an attempt that had no answer, at the file's key, or
        from one that could not be recorded. It would stay there, or be shown in place of the file that gets that name.
        Raises LakeError."""
        if file.draft is not None and file.draft.state is DraftState.PUBLISHED:
            return True
        meta = None if file.draft is None else await self._writeback.find_late_object(file.draft)
        return meta is not None and meta.key == file.key

    async def _retry_while_away(self, path: str, attempt: Callable[[], Awaitable[None]]) -> None:
        """Make an ``attempt``. If ``path`` is under write-back, repeat it while the store is away, for ``patience_s``
        at most. Raises the error of the last attempt."""
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

    # -- names that other nodes put below a directory

    async def list_below(self, path: str, directory: Entry) -> None:
        """Learn every name below the directory. Raises LakeError."""
        await self._retry_while_away(path, partial(self._list_below, directory))

    async def _list_below(self, directory: Entry) -> None:
        await self._catch_up(0.0)
        await self._list_unlisted(directory, self._ns.ensure_listed)
        began_ns = self._ns.now_ns()
        if await self._list_changed(directory):  # older listings do not know what is in directories that are new
            await self._list_unlisted(directory, partial(self._ns.list_directory, since_ns=began_ns))

    async def _list_unlisted(self, directory: Entry, list_one: Callable[[int], Awaitable[object]]) -> None:
        level = array("Q", [directory.inode])
        while level:
            await self._list_all(await self._unlisted_of(level), list_one)
            below = array("Q")
            for inode in level:
                for children in self._ns.tree.children_in_steps(inode):
                    below.extend(child.inode for child in children if child.flags & Flag.DIRECTORY)
                    await trio.lowlevel.checkpoint()
            level = below

    async def _unlisted_of(self, directories: Sequence[int]) -> Sequence[int]:
        unlisted = array("Q")
        for number, inode in enumerate(directories, 1):
            if self._ns.directory_fresh_s(inode, within_ttl=True) <= 0:
                unlisted.append(inode)
            if number % DIRECTORIES_PER_STEP == 0:
                await trio.lowlevel.checkpoint()
        return unlisted

    @staticmethod
    async def _list_all(directories: Sequence[int], list_one: Callable[[int], Awaitable[object]]) -> None:
        if directories:
            await for_each(directories, list_one, min(LISTINGS_AT_ONCE, len(directories)))

    async def _list_changed(self, directory: Entry) -> bool:
        """List directories again in which the store has unknown keys; return whether there were any."""
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
        """Return the objects of which no name, no tombstone and no use by another name is known here."""
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
        """Return the inode of the nearest known directory above a path."""
        while path:
            path = path.rpartition("/")[0]
            inode = self._ns.directory(path)
            if inode is not None:
                return inode
        raise AssertionError("the root is always known")

    # -- versions that this node has not stored

    async def _publish_closed(self, entries: Sequence[Entry]) -> None:
        """Publish the local files of an exchange, which is made in the store. Those that are being written move on this
        node only. Raises LakeError."""
        for entry in entries:
            file = self._files.get(entry.inode) if entry.is_local else None
            if file is not None and not file.writers:
                await self._publisher.publish(file)

    async def _drain_older(self, source: Entry) -> None:
        """Publish, or else supersede, acknowledged versions that are not the newest. They become visible under the old
        name or not at all, unless the newest is not acknowledged: then they stay, because it does not survive a crash.
        First publish versions that were restored at mount, which may be in the store under that name already. Raises
        LakeError."""
        file = self._files.get(source.inode)
        if file is not None and (replayed := self._writeback.unreconciled(file)):
            await self._retry_while_away(file.key, partial(self._writeback.drain, replayed))
        while file is not None and file.behind:
            drafts = [each.draft for each in file.behind if each.draft is not None]
            items = [item for draft in drafts if (item := self._writeback.item_of(draft)) is not None]
            try:
                await self._writeback.drain(items)
            except LakeError as error:
                if file.draft is None or not file.draft.sequence:
                    log.info("acknowledged versions of %s are renamed with it: %s", file.key, error)
                    return
                log.info("only the newest version of %s is renamed and stored: %s", file.key, error)
            self._writeback.supersede_all(file)

    async def _drain_below(self, path: str) -> None:
        """Wait until all that write-back acknowledged at or below a path is in the store. It must be there before the
        new name is. Raises LakeError."""

        async def drain() -> None:
            await self._writeback.drain(self._writeback.below(path))

        await self._retry_while_away(path, drain)
