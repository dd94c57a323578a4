"""Copies files and directories inside the lake, by one commit each, without moving a byte through the node.

Packs and hidden objects, below ``.lakefs/``, never change: a copy names the same bytes there. Another node or program
may replace any other object at its key, so the store first copies it to a hidden key, which belongs to the copy alone
(ADR 0146).

What always holds (*whole copies*): every observer of the lake sees all of a copy or none of it; the copy is the source
as it was at the moment of the commit, attributes included; a later change of one does not affect the other. Trio thread
only. A crash before the commit leaves hidden objects that no name refers to, which `gc` deletes.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Generator, Iterator
from itertools import islice

import msgspec
import trio

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.errors import FileError, LakeError, NotFound, PreconditionFailed
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.store.server_copy import copy_object
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder, ObjectRows
from lakefs_fuse.vfs.ops.name_changes import NameChanges
from lakefs_fuse.vfs.ops.rename import Renames
from lakefs_fuse.vfs.ops.rename_plan import MovedName, RenameFacts
from lakefs_fuse.vfs.ops.rename_preparation import RenamePreparation

COPIES_AT_ONCE = 16
ROUNDS_MAX = 8
"""Attempts to copy a source that changes meanwhile; then the clone fails with EBUSY."""
NAMES_PER_STEP = 512
"""Names handled between two turns of other tasks: 5 ms."""
log = logging.getLogger(__name__)

Source = tuple[str, str, int]
"""Key, ETag and size of an object to copy."""


class Uncopied(LakeError):
    """The source refers to an object that has no copy yet: it changed after the objects were copied."""


class Clones:
    """Copies files and directories; see the module's head."""

    def __init__(
        self,
        namespace: Namespace,
        names: NameChanges,
        renames: Renames,
        preparation: RenamePreparation,
        client: StoreClient,
        deletions: DeletionQueue,
        new_id: Callable[[], str],
    ) -> None:
        """``new_id`` returns a name for a new hidden object."""
        self._ns, self._names, self._renames, self._preparation = namespace, names, renames, preparation
        self._client, self._deletions, self._new_id = client, deletions, new_id

    async def clone(self, source_path: str, target_path: str, *, force: bool = False) -> None:
        """Copy a file, a symbolic link or a directory to another path. Both paths are relative to the root. With
        ``force`` the copy replaces a file, or an empty directory.

        Raises FileError: ENOENT, ENOTDIR, EEXIST, EISDIR, ENOTEMPTY; EINVAL if the target is the root, or the source
        or below it; EBUSY if the source has a file that is not in the store, or changes too fast; ESTALE if it was
        renamed or removed meanwhile. Raises LakeError."""
        above, _, name = target_path.rpartition("/")
        if not source_path or not name or f"{target_path}/".startswith(f"{source_path}/"):
            why = "its target would be in the copy itself" if name else "the root of the lake exists already"
            shown = self._shown(source_path), self._shown(target_path)
            raise FileError(errno.EINVAL, f"{shown[0]} cannot be copied to {shown[1]}: {why}")
        source = await self._lookup(source_path)
        if source is None:
            raise FileError(errno.ENOENT, f"{self._shown(source_path)} does not exist")
        parent = await self._directory(above)
        self._ns.keys.checked_path(parent, name.encode())
        await self._check_target(source, parent, name.encode(), force=force)
        if source.is_dir:
            await self._preparation.list_below(source_path, source)
        await self._names.flush()
        copies: dict[Source, ObjectMeta] = {}
        used = set[Source]()
        try:
            for _ in range(ROUNDS_MAX):
                await self._copy_objects(source, source_path, copies)
                await self._check_target(source, parent, name.encode(), force=force)  # copying may take long
                used.clear()
                try:
                    await self._commit(source, parent, name.encode(), copies, used, force=force)
                except Uncopied:
                    continue
                except FileError as error:
                    if error.errno != errno.ESTALE:
                        raise
                    source = await self._look_up_again(source, source_path)
                    continue
                break
            else:
                used.clear()
                raise FileError(errno.EBUSY, f"{self._shown(source_path)} is changed faster than it can be copied")
        except BaseException:
            used.clear()
            raise
        finally:
            await self._discard([copied for each, copied in copies.items() if each not in used])
        self._ns.invalidate_name(parent, name.encode())
        for listener in self._ns.events.kernel_told:
            await listener()

    def _shown(self, path: str) -> str:
        """Return a path of the lake below the mount point, as programs use it."""
        return os.path.join(self._ns.mountpoint, path) if path else self._ns.mountpoint

    async def _look_up_again(self, source: Entry, path: str) -> Entry:
        """Return the present entry of a source that may have been replaced. Raises FileError(ESTALE) if the name is
        gone, or if it was replaced and was, or is now, a directory."""
        now = await self._lookup(path)
        if now is None or (now.inode != source.inode and (source.is_dir or now.is_dir)):
            raise FileError(errno.ESTALE, f"{self._shown(path)} was renamed or removed while it was copied")
        return now

    async def _lookup(self, path: str) -> Entry | None:
        entry, directory = None, ROOT_INODE
        for name in path.split("/"):
            if entry is not None and not entry.is_dir:
                raise FileError(errno.ENOTDIR)
            entry, _ = await self._ns.lookup(directory, name.encode())
            if entry is None:
                return None
            directory = entry.inode
        return entry

    async def _directory(self, path: str) -> int:
        if not path:
            return ROOT_INODE
        entry = await self._lookup(path)
        if entry is None or not entry.is_dir:
            code, why = (errno.ENOENT, "does not exist") if entry is None else (errno.ENOTDIR, "is no directory")
            raise FileError(code, f"{self._shown(path)} {why}")
        return entry.inode

    async def _check_target(self, source: Entry, parent: int, name: bytes, *, force: bool) -> None:
        there, _ = await self._ns.lookup(parent, name)
        if there is None:
            return
        path = self._shown(self._ns.path_of(there))
        if not force:
            raise FileError(errno.EEXIST, f"{path} exists")
        if there.is_dir != source.is_dir:
            what = "a directory" if there.is_dir else "no directory"
            raise FileError(errno.EISDIR if there.is_dir else errno.ENOTDIR, f"{path} exists, and is {what}")
        if there.is_dir:
            await self._ns.check_empty(there)

    # -- objects

    async def _copy_objects(self, source: Entry, path: str, copies: dict[Source, ObjectMeta]) -> None:
        """Have the store copy every object of the source that may change and has no copy yet. If one changes before it
        is copied, look up its file again. Raises LakeError."""
        wanted = await self._find_sources(source, path)

        async def copy(each: Source) -> None:
            key, etag, size = each
            try:
                copies[each] = await copy_object(self._client, key, etag, size, OBJECTS + self._new_id())
            except (NotFound, PreconditionFailed):
                log.info("%s changed while it was to be copied", key)
                await self._look_again(wanted[each], key)

        await for_each([each for each in wanted if each not in copies], copy, COPIES_AT_ONCE)

    async def _look_again(self, path: str, key: str) -> None:
        """Find out which version a file has after its object was replaced. Raises LakeError."""
        if key != path:
            await self._preparation.renamed.adopt(path)
            return
        above, _, name = path.rpartition("/")
        directory = self._ns.directory(above)
        if directory is not None:
            await self._ns.lookup(directory, name.encode(), ask=True)

    async def _find_sources(self, source: Entry, path: str) -> dict[Source, str]:
        """Return the objects to copy, each with the path of a file whose bytes it has. Raises FileError(EBUSY)."""
        found: dict[Source, str] = {}
        entries = self._below(source, path)
        while some := list(islice(entries, NAMES_PER_STEP)):
            for at, entry in some:
                if (each := _find_source(at, entry, self._ns.tree.objects, self._shown)) is not None:
                    found[each] = at
            await trio.lowlevel.checkpoint()
        return found

    def _below(self, source: Entry, path: str) -> Iterator[tuple[str, Entry]]:
        now = self._ns.tree.entry(source.inode)
        if now is not None:
            yield path, now
            if now.is_dir:
                yield from self._ns.tree.below(now.inode, path)

    async def _discard(self, copied: list[ObjectMeta]) -> None:
        with trio.CancelScope(shield=True):
            for at in range(0, len(copied), NAMES_PER_STEP):
                self._deletions.schedule(*(Deletion(each.key, each.etag) for each in copied[at : at + NAMES_PER_STEP]))
                await trio.lowlevel.checkpoint()

    # -- the commit

    async def _commit(
        self,
        source: Entry,
        parent: int,
        name: bytes,
        copies: dict[Source, ObjectMeta],
        used: set[Source],
        *,
        force: bool,
    ) -> None:
        def plan(facts: RenameFacts, names_max: int) -> Generator[None, None, Change]:
            used.clear()
            return plan_clone(facts, copies, used, names_max, self._shown)

        await self._renames.commit_copy(source, parent, name, plan, replaces=force)


def _find_source(path: str, entry: Entry, objects: ObjectRows, shown: Callable[[str], str]) -> Source | None:
    """Return the object to copy for a clone of the entry. None if the clone has no bytes, or may name the same ones.
    Raises FileError(EBUSY) for a file that is not in the store."""
    if entry.flags & Flag.LOCAL:
        raise FileError(errno.EBUSY, f"{shown(path)} is not in the store yet: close it, or run `lakefs-fuse flush`")
    if entry.flags & (Flag.DIRECTORY | Flag.SYMLINK):
        return None
    row: ObjectRow | None = objects.get(entry.place) if entry.place else None
    if row is None:
        return path, entry.etag, entry.size
    return None if row.key.startswith(RESERVED_PREFIX) else (row.key, row.etag, row.size)


def plan_clone(
    facts: RenameFacts,
    copies: dict[Source, ObjectMeta],
    used: set[Source],
    names_max: int,
    shown: Callable[[str], str],
) -> Generator[None, None, Change]:
    """Plan the copy as one commit; yield after every ``names_max`` names. The copies that the commit names are added to
    ``used``; ``shown`` formats a path for errors. Raises Uncopied, and FileError(EBUSY) as `Clones.clone`."""
    builder = ChangeBuilder(facts.rows)

    def copied(name: MovedName) -> tuple[str, str, Entry, str]:
        each = _find_source(name.before, name.entry, facts.rows.objects, shown)
        if each is None:
            return name.before, name.after, name.entry, name.hides
        if each not in copies:
            raise Uncopied(f"{each[0]} is new")
        used.add(each)
        entry = msgspec.structs.replace(name.entry, place=0, offset=0, etag=copies[each].etag)
        return copies[each].key, name.after, entry, name.hides

    for at in range(0, len(facts.names), names_max):
        builder.add_moves(copied(name) for name in facts.names[at : at + names_max])
        yield
    return msgspec.structs.replace(builder.change(), doomed=list(facts.replaced))
