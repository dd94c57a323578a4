"""Lists directories again, whenever they were listed before: all at or below one, level by level, or those on a path.

Memory holds the numbers of one level's directories (8 bytes each) and a page of a listing for each of LISTINGS_AT_ONCE.
Tasks of one trio loop. A crash leaves the rows of the directories that were listed by then.
"""

from __future__ import annotations

import errno
import logging
from array import array
from collections.abc import Awaitable, Callable

import trio

from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.namespace.namespace import Namespace

LISTINGS_AT_ONCE = 16
log = logging.getLogger(__name__)


async def _nothing_more(_inode: int, _is_new: bool) -> None: ...


async def list_everything(
    namespace: Namespace,
    report: Callable[[int], None],
    *,
    top: int = ROOT_INODE,
    listed: Callable[[int, bool], Awaitable[None]] = _nothing_more,
) -> None:
    """List ``top`` and all directories below it, whenever they were listed before. Raises LakeError.

    ``report`` is called with the number of names so far, and ``listed`` with each directory once its rows exist, and
    whether it had never been listed."""
    names = directories = 0
    began_ns = namespace.now_ns()

    async def list_one(inode: int) -> None:
        nonlocal names, directories
        is_new = namespace.tree.listing(inode) is None
        try:
            await namespace.list_directory(inode, since_ns=began_ns)
        except FileError as error:
            if error.errno != errno.ESTALE:
                raise
            return  # it was removed in the meantime
        await listed(inode, is_new)
        directories += 1
        for children in namespace.tree.children_in_steps(inode):
            names += len(children)
            below.extend(child.inode for child in children if child.is_dir)
            await trio.lowlevel.checkpoint()
        report(names)

    level = array("Q", [top])
    while level:
        below = array("Q")
        await for_each(level, list_one, min(LISTINGS_AT_ONCE, len(level)))
        level = below
    log.info("%d directories listed, %d names", directories, names)


async def list_again(namespace: Namespace, path: str, *, recursive: bool) -> None:
    """Ask the store for each name of a path, and list the directory there again; with ``recursive`` also all
    directories below it. Raises LakeError."""
    began_ns, directory = namespace.now_ns(), ROOT_INODE
    for name in path.split("/") if path else ():
        entry, _ = await namespace.lookup(directory, name.encode("utf-8", "surrogatepass"), ask=True)
        if entry is None or not entry.is_dir:
            return
        directory = entry.inode
    if recursive:
        await list_everything(namespace, lambda _names: None, top=directory)
    else:
        await namespace.list_directory(directory, since_ns=began_ns)
