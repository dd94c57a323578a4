"""LISTs that show a plain object only after what was committed before it was stored.

A plain object is in every LIST as soon as it is stored; commits that its writer sent before, a rename for example, are
seen with the next poll. A program that waits for the object and then opens a committed file would not find it: a
table's manifest and its data files, ``_SUCCESS`` and the files that it marks as complete. So the mount polls for
commits before it merges a page with an unknown object that may be newer than the last poll.

What always holds (*seen in the order of writing*): a program that sees a plain object by a LIST also sees the commits
that its writer had sent before, unless the poll fails. If the store dates an object by the beginning of its upload, as
S3 does with multipart uploads, these are the commits before that time. Commits announce plain objects a second or two
after they were stored. So for `ANNOUNCED_NS` after a new object is seen, a name that an older LIST lacked is looked up
again (`Namespace`).

An object that another tool stored long ago costs nothing, a new one a LIST of the commits. Trio thread only. Nothing
here survives a crash, or has to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from lakefs_fuse.commits.poller import Poller
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Capabilities, ListPage, ObjectMeta
from lakefs_fuse.vfs.change_events import ChangeEvents
from lakefs_fuse.vfs.namespace.key_mapping import path_of_key
from lakefs_fuse.vfs.namespace.listing_merge import is_object_removed

NS = 1_000_000_000
CLOCK_NS = 4 * NS
"""LastModified is in seconds of the store's clock, which is followed where it differs by more than two."""
ANNOUNCED_NS = 3 * NS
"""Time within which a commit normally announces a stored plain object."""
log = logging.getLogger(__name__)


class OrderedLists:
    """LISTs of one mount, through the listeners of `ChangeEvents.objects_listed`."""

    def __init__(self, client: StoreClient, events: ChangeEvents, seen: Callable[[], None]) -> None:
        """``seen`` is called before a page with an unknown new object is returned."""
        self._client, self._events, self._seen = client, events, seen

    @property
    def capabilities(self) -> Capabilities:
        """The store's."""
        return self._client.capabilities

    async def list_page(
        self, prefix: str, *, delimiter: str = "", start_after: str = "", token: str | None = None,
        keys_max: int = 1000,
    ) -> ListPage:  # fmt: skip
        """As `StoreClient.list_page`."""
        page = await self._client.list_page(
            prefix, delimiter=delimiter, start_after=start_after, token=token, keys_max=keys_max
        )
        for listener in self._events.objects_listed:
            if await listener(page.objects):
                self._seen()
        return page


class CommitOrder:
    """See the module's head. ``is_announced`` is `Namespace.is_announced`."""

    def __init__(self, tree: Tree, poller: Poller, is_announced: Callable[[str], bool]) -> None:
        self._tree, self._poller, self._is_announced = tree, poller, is_announced
        self._polling = trio.Lock()
        """One of several concurrent LISTs polls for all that were answered before."""

    async def objects_listed(self, objects: Sequence[ObjectMeta]) -> bool:
        """Poll if one of these may have been stored after commits that are unknown here; returns whether it may."""
        since_ns = self._poller.heard_ns - CLOCK_NS
        if not any(meta.mtime_ns > since_ns and self._is_unknown(meta) for meta in objects):
            return False
        answered_s = trio.current_time()
        try:
            async with self._polling:
                await self._poller.catch_up(trio.current_time() - answered_s)
        except LakeError as error:
            log.info("polling for what was committed before a new object failed: %s", error)
        return True

    def _is_unknown(self, meta: ObjectMeta) -> bool:
        path = path_of_key(meta.key).encode("utf-8", "surrogatepass")
        if meta.key.startswith(RESERVED_PREFIX) or path.endswith(b"/") or not path:
            return False
        entry = self._tree.resolve(path.split(b"/"))
        if entry is not None and entry.etag == meta.etag:
            return False
        if is_object_removed(self._tree, path, meta, entry):
            return False
        return self._tree.objects.find(meta.key, meta.etag) is None and not self._is_announced(meta.key)
