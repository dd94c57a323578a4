"""One rename: of a file or a directory of any size, over nothing, over something, or in exchange. One PUT.

The commit says of everything that moves where it is now and that it is not where it was; the bytes stay. The rows of
this node keep their inodes. Files that are not in the store yet move here only, and are stored under their new name;
those that are being written go on under it. Made for one call by `changes`.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.path_tree import files_below
from lakefs_fuse.commits.record import Remove
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.errors import FileError, LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder
from lakefs_fuse.vfs.ops.unlink import Unlinker
from lakefs_fuse.vfs.relocation.relocator import Relocator, renamed_objects
from lakefs_fuse.vfs.writeback.queue import WriteBack

if TYPE_CHECKING:
    from lakefs_fuse.vfs.ops.changes import Changes

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
NS = 1_000_000_000
RELOCATION_SLACK_NS = 30 * NS
log = logging.getLogger(__name__)


class Renaming:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        files: FileTable,
        committer: Committer,
        changes: Changes,
        relocator: Relocator,
        writeback: WriteBack,
        unlinker: Unlinker,
        *,
        patience_s: float,
        relocate_after_s: float,
        clock: Clock,
    ) -> None:
        self._db, self._ns, self._files, self._committer = database, namespace, files, committer
        self._unlinker, self._patience_s = unlinker, patience_s
        self._changes, self._relocator, self._writeback = changes, relocator, writeback
        self._relocate_after_s, self._clock_ns = relocate_after_s, clock.wall_ns

    async def run(self, source: Entry, parent: int, name: bytes, target: Entry | None, *, exchange: bool) -> None:
        """Raises LakeError; then nothing was renamed, or (where the store did not answer) all of it a little later."""
        if await self._run(source, parent, name, target, exchange=exchange):
            while self._committer.held_until:
                await self._writeback.drain(list(self._writeback.items))
            await self._committer.flush()

    async def _run(self, source: Entry, parent: int, name: bytes, target: Entry | None, *, exchange: bool) -> bool:
        """Whether it is journaled, and has to be in the store before anybody is told."""
        waits = False
        if exchange:
            await self._store_first(source, target)
        await self._settle_versions(source)
        if source.is_dir or exchange:
            await self._store_accepted(source, *([target] if exchange and target is not None else []))
        async with self._not_publishing(source):
            now = self._ns.tree.entry(source.inode)
            if now is None:
                raise FileError(errno.ENOENT)
            if now.is_local:
                await self._rename_here(now, parent, name)
                return False
            there = self._ns.tree.child(parent, name)
            old, new = self._changes.path(now), self._ns.prefix(parent) + name.decode()
            opened = None if there is None or exchange else self._files.hold(there.inode)

            renamed: list[str] = []

            def change() -> Change:
                made = self._change(source.inode, parent, name, exchange)
                renamed[:] = renamed_objects(made)
                return made

            async def commit(_: Entry) -> None:
                async with self._relocator.hold_copies(old, new):
                    await commit_now()

            async def commit_now() -> None:
                nonlocal waits
                if self._is_put_off(now, parent, name, exchange):
                    async with self._committer.quiet():
                        self._withhold_older(source, old)
                        self._changes.enqueue(change(), self._promised(source, new, opened))
                elif self._committer.held_until:  # what it builds on is not in the store yet
                    waits = True
                    async with self._committer.quiet():
                        self._committer.enqueue(change(), self._promised(source, new, opened))
                else:
                    await self._committer.commit(change)

            if opened is not None:
                await self._unlinker.unlink(opened, commit)
            else:
                await commit(source)
            self._files.moved()
            self._announce_renamed(old, new)
            self._relocator.note(renamed)
        return waits

    def _announce_renamed(self, old: str, new: str) -> None:
        for listener in self._ns.events.path_renamed:
            listener(old, new)

    def _withhold_older(self, source: Entry, path: str) -> None:
        """A version of the file waits for the store, and will be stored under its next name only: what an earlier
        rename says of ``path`` are older bytes, which nobody shall see there. Raises CacheError."""
        file = self._files.get(source.inode)
        draft = None if file is None else file.draft
        if draft is not None and draft.accepted:
            self._committer.withhold(path, draft.accepted, self._writeback.sequence, self._committer.journal.newest)

    def _promised(self, source: Entry, path: str, replaced: OpenFile | None) -> Batch:
        batch = Batch()
        self._unlinker.journal_moved(batch, self._files.get(source.inode), path)
        self._unlinker.journal_dropped(batch, replaced)
        return batch

    async def _store_first(self, *entries: Entry | None) -> None:
        """An exchange is made in the store: what is only here has to be there before."""
        for entry in entries:
            file = self._files.get(entry.inode) if entry is not None and entry.is_local else None
            if file is not None:
                await self._unlinker.publisher.publish(file)

    async def _settle_versions(self, source: Entry) -> None:
        """An accepted version that is not the newest becomes visible under the name it had, or not at all. So does one
        that came back at mount, which may be in the store under that name."""
        file = self._files.get(source.inode)
        if file is not None and (replayed := self._writeback.unreconciled(file)):
            drain = partial(self._writeback.drain, replayed)
            await self._writeback.retry_while_away(file.key, drain, self._patience_s)
        while file is not None and file.behind:
            drafts = [each.draft for each in file.behind if each.draft is not None]
            items = [item for draft in drafts if (item := self._writeback.item_of(draft)) is not None]
            try:
                await self._writeback.drain(items)
            except LakeError as error:
                log.info("only the newest version of %s is renamed and stored: %s", file.key, error)
            self._writeback.supersede_all(file)

    async def _store_accepted(self, *entries: Entry) -> None:
        """What write-back accepted below a directory is in the store before its new name is. While the store is away
        this waits, as long as a writer would for room."""
        for entry in entries:
            path = self._changes.path(entry)
            drain = partial(self._drain_below, path)
            await self._writeback.retry_while_away(path, drain, self._patience_s)

    async def _drain_below(self, path: str) -> None:
        if len(self._writeback):
            await self._writeback.drain(self._writeback.below(path))

    def _is_put_off(self, source: Entry, parent: int, name: bytes, exchange: bool) -> bool:
        """Under write-back a rename is journaled, and in the store after what was accepted before it."""
        new = self._ns.prefix(parent) + name.decode()
        return not exchange and self._writeback.is_for(self._changes.path(source)) and self._writeback.is_for(new)

    @asynccontextmanager
    async def _not_publishing(self, source: Entry) -> AsyncIterator[None]:
        """What is being stored when it is renamed is stored first, under its old name."""
        file = self._files.get(source.inode)
        if file is None or file.draft is None:
            yield
            return
        async with file.publishing:
            yield

    # -- what is not in the store

    async def _rename_here(self, entry: Entry, parent: int, name: bytes) -> None:
        """The file gets its new name when it is stored; what it replaces stays for others until then."""
        there = self._ns.tree.child(parent, name)
        old, new = self._changes.path(entry), self._ns.prefix(parent) + name.decode()
        opened = None if there is None else self._files.hold(there.inode)

        async def move(_: Entry) -> None:  # what was known before may have been stored meanwhile
            async with self._relocator.hold_copies(old, new):
                now = self._ns.tree.entry(entry.inode)
                if now is None:
                    raise FileError(errno.ENOENT)
                self._move_row(now, parent, name, self._ns.tree.child(parent, name))

        if opened is not None:
            await self._unlinker.unlink(opened, move)
        else:
            await move(entry)
        self._files.moved()
        self._announce_renamed(old, new)

    def _move_row(self, entry: Entry, parent: int, name: bytes, there: Entry | None) -> None:
        self._ns.changing(entry.parent, entry.name)
        self._ns.changing(parent, name)
        old = self._changes.path(entry)
        if entry.etag or entry.stamp or self._committer.may_have(old):  # what it had replaced shall nobody see again
            doomed = self._changes.orphaned(old, entry)
            self._changes.enqueue(Change(operations=[Remove(old, hides=entry.etag)], doomed=doomed))
        moving = msgspec.structs.replace(entry, etag="", stamp=0, place=0, offset=0)
        copied_from = ""
        batch = Batch()
        if there is not None:
            path = self._changes.path(there)
            row = self._ns.tree.objects.get(there.place) if there.place else None
            moving = msgspec.structs.replace(moving, etag=self._ns.own_etag(path), stamp=there.stamp)
            if row is not None and not row.is_pack:  # for others these are the bytes of the name until it is stored
                moving, copied_from = msgspec.structs.replace(moving, place=row.number), row.key
            self._ns.tree.remove(batch, there)
        self._ns.tree.detach(batch, entry)
        moved = self._ns.tree.attach(batch, moving, parent, name, before=entry)
        self._files.replaces(moved, copied_from)
        self._unlinker.journal_dropped(batch, None if there is None else self._files.get(there.inode))
        file = self._files.get(entry.inode)
        if file is not None:
            self._files.move(batch, file, self._ns.prefix(parent) + name.decode("utf-8", "surrogatepass"))
        self._db.commit(batch, sync=file is not None and file.is_promised)
        self._files.updated(moved)
        reached("rename.moved")

    # -- what is

    def _change(self, inode: int, parent: int, name: bytes, exchange: bool) -> Change:
        """The whole rename, as things are at the moment it is committed."""
        source = self._ns.tree.entry(inode)
        if source is None:
            raise FileError(errno.ENOENT)
        target = self._ns.tree.child(parent, name)
        old, new = self._changes.path(source), self._ns.prefix(parent) + name.decode()
        builder = ChangeBuilder(self._ns.tree)
        below = list(self._below(old, new, source))
        builder.moves.append((old, new))
        doomed: list[Deletion] = []
        if exchange and target is not None:
            below += self._below(new, old, target)
            builder.moves.append((new, old))
        elif target is not None:
            doomed = self._replaced(new, target)
        moving = [each for each in below if not each[2].is_local or each[2] in (source, target)]
        covering = [(before, entry) for before, _, entry in below if entry.is_local and entry not in (source, target)]
        made = {(after, entry.is_dir) for _, after, entry in moving}
        for before, after, entry in moving:
            self._ns.checked_key("", before)
            self._ns.checked_key("", after)
            if entry.is_dir:
                builder.mkdir(after, entry)
            else:
                builder.put(after, entry, key=before, hides=self._ns.own_etag(after))
        self._changes.keep_parent(builder, source)
        for before, entry in covering:  # what it covers stays behind, and shall nobody see again
            if entry.etag or entry.stamp:
                covered = self._changes.orphaned(before, entry)
                doomed += covered
                if (before, False) not in made:
                    builder.remove(before, entry)
        for before, _, entry in reversed(moving):
            if (before, entry.is_dir) not in made:
                builder.remove(before, entry, self._ns.hidden_etag(entry))
        change = builder.change()
        return msgspec.structs.replace(change, doomed=doomed)

    def _below(self, old: str, new: str, entry: Entry) -> Iterator[tuple[str, str, Entry]]:
        """Everything, with its path before and after; below a directory also what is not in the store yet."""
        yield old, new, entry
        if entry.is_dir:
            for path, below in files_below(self._ns.tree, entry.inode, old):
                yield path, new + path[len(old) :], below

    def _replaced(self, path: str, target: Entry) -> list[Deletion]:
        """What lay under the new name goes, late enough for the renamed object to be copied over it before."""
        due = self._clock_ns() + int(self._relocate_after_s * NS) + RELOCATION_SLACK_NS if self._relocate_after_s else 0
        if target.is_dir:
            return []
        return [msgspec.structs.replace(doomed, due_ns=due) for doomed in self._changes.orphaned(path, target)]
