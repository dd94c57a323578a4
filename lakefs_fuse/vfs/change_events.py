"""All events of one filesystem, made by `wiring` and given to constructors. Listeners append themselves to a list.

What always holds (*events flow upwards*): a part announces what it changed and knows none of its listeners, so that the
kernel's adapter and the write-back queue can react to changes of modules below them. For the rules see `TreeEvents`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.tree_events import TreeEvents


@dataclass(slots=True)
class ChangeEvents(TreeEvents):
    """One list of listeners for each event of a filesystem."""

    name_changed: list[Callable[[int, bytes], object]] = field(default_factory=list)
    """A name means something else than the kernel may have cached; by its directory and name."""
    object_overridden: list[Callable[[Entry], object]] = field(default_factory=list)
    """A listing shows a plain object in place of bytes elsewhere; its entry."""
    leases_revoked: list[Callable[[int], int]] = field(default_factory=list)
    """The leases on an inode end; answers how many handles were opened under them, which are released here."""
    statistics_requested: list[Callable[[], dict[str, object]]] = field(default_factory=list)
    """Counters are about to be read; answers what a listener adds to them."""

    def announce_name(self, directory: int, name: bytes) -> None:
        """Call the listeners of `name_changed`."""
        for listener in self.name_changed:
            listener(directory, name)
