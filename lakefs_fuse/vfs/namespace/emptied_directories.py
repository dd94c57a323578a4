"""Directories that a LIST shows although all of their names were removed or renamed.

The objects of removed names are deleted later, and those of renamed names stay where they are. Until another program
stores something below such a directory, it is not shown; to know that takes a LIST of its own. So one listing without a
delimiter answers for several of them, if there are few objects (`SubtreeListings`). In a large lake an answer counts
for the interval of `LookIntervals` at first, and each further one twice as long.

What always holds:

* *a change is asked about*: an answer no longer counts once a commit that may concern the name was applied, or another
  node announced a name there (`forget`);
* *who asks strictly is told*: a listing that relied on earlier answers says so (`relies`), and `rmdir`, renames of
  directories and `refresh` list again.

Trio thread only. Nothing survives a crash: a new mount asks about each of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.namespace.look_intervals import LookIntervals
from lakefs_fuse.vfs.namespace.subtree_listing import FlatListing, SubtreeListings

NAMES_MAX = 16_384
"""Maximum names with an answer, some 3 MB, and maximum directories whose listings relied on answers. Those in the
directory asked about longest ago are forgotten."""


class EmptiedDirectories:
    """See the module's head."""

    def __init__(
        self,
        client: StoreClient,
        subtrees: SubtreeListings,
        intervals: LookIntervals,
        clock_ns: Callable[[], int],
        is_removed: Callable[[ObjectMeta], bool],
    ) -> None:
        """``is_removed`` returns whether an object counts as removed, or as that of another name."""
        self._client, self._subtrees, self._intervals = client, subtrees, intervals
        self._clock_ns, self._is_removed = clock_ns, is_removed
        self._looked: OrderedDict[int, dict[bytes, tuple[int, int]]] = OrderedDict()
        """When it was asked, and for how long that counts, by name, by the directory above."""
        self._count = 0
        """Names in ``_looked``."""
        self._forgotten = 0
        """Calls of `forget` so far: an answer to a question that was asked before one is not kept."""
        self._relying: dict[int, None] = {}
        """Directories whose last listing relied on earlier answers, the latest last."""

    async def begin(
        self, directory: int, prefix: str, names: Sequence[bytes], flat: FlatListing | None, since_ns: int
    ) -> tuple[FlatListing | None, set[bytes]]:
        """Begin to look below names of a directory. Return a flat listing that answers for all of them, which began at
        ``since_ns`` or later; or None, and the names of which an earlier answer counts: there is nothing below."""
        if flat is None and len(names) > 1:
            flat = await self._subtrees.flat_listing_above(prefix, since_ns)
        empty: set[bytes] = set()
        if flat is None and self._subtrees.is_in_large(prefix):
            known, now_ns = self._looked.get(directory, {}), self._clock_ns()
            for name in names:
                asked_ns, interval_ns = known.get(name, (0, 0))
                if 0 <= now_ns - asked_ns < interval_ns:
                    empty.add(name)
        self._relying.pop(directory, None)
        if empty:
            self._relying[directory] = None
            if len(self._relying) > NAMES_MAX:
                del self._relying[next(iter(self._relying))]
        return flat, empty

    async def has_visible_name(self, directory: int, prefix: str, name: bytes, flat: FlatListing | None) -> bool:
        """Return whether a visible object is below a name, by the flat listing or by LISTs. Raises LakeError."""
        below, asked_ns = prefix + name.decode("utf-8", "surrogatepass") + "/", self._clock_ns()
        if flat is not None:
            return not all(map(self._is_removed, flat.below(below)))
        token, forgotten = None, self._forgotten
        while True:
            page = await self._client.list_page(below, token=token)
            if not all(map(self._is_removed, page.objects)):
                self.forget(directory, name)
                return True
            token = page.next_token
            if token is None:
                if self._forgotten == forgotten:
                    self._found_nothing(directory, name, asked_ns)
                return False

    def _found_nothing(self, directory: int, name: bytes, asked_ns: int) -> None:
        names = self._looked.setdefault(directory, {})
        self._looked.move_to_end(directory)
        known = names.get(name)
        self._count += known is None
        names[name] = asked_ns, self._intervals.first_ns if known is None else self._intervals.doubled(known[1])
        while self._count > NAMES_MAX and len(self._looked) > 1:
            self.forget(next(iter(self._looked)), b"")

    def forget(self, directory: int, name: bytes) -> None:
        """Forget what is known of a name; of all names in the directory if it is empty."""
        self._forgotten += 1
        names = self._looked.get(directory)
        if names is None:
            return
        gone = len(names) if not name else 1 if names.pop(name, None) else 0
        self._count -= gone
        if not name or not names:
            del self._looked[directory]

    def relies(self, directory: int) -> bool:
        """Return whether the last listing of a directory relied on earlier answers."""
        return directory in self._relying
