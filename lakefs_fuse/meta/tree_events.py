"""Events of the tree to which other components react. A listener subscribes by appending itself to an event's list.
What always holds (*listeners return at once*): listeners are plain functions that do not wait or raise; they run in the
step in which the tree changes, in the order of subscription. Trio thread only; nothing survives a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lakefs_fuse.meta.entry import Entry


@dataclass(slots=True)
class TreeEvents:
    """One list of listeners for each event of a `Tree`."""

    inode_dropped: list[Callable[[int], object]] = field(default_factory=list)
    """The rows of an inode are about to be removed, or replaced by another version."""
    directory_updated: list[Callable[[Entry], object]] = field(default_factory=list)
    """The attributes of a directory have changed to these."""
    listing_dropped: list[Callable[[int], object]] = field(default_factory=list)
    """A directory must be listed again; called before that is committed."""
    mirrored_name_added: list[Callable[[int, bytes], object]] = field(default_factory=list)
    """A name was added to a directory of `Tree.mirrored`."""
    mirrored_name_removed: list[Callable[[int, bytes], object]] = field(default_factory=list)
    """A name was removed from a directory of `Tree.mirrored`; called after that is committed."""
    mirror_dropped: list[Callable[[int], object]] = field(default_factory=list)
    """A directory has left `Tree.mirrored`: its names are uncertain."""
    names_requested: list[Callable[[], object]] = field(default_factory=list)
    """A decision depends on all names: names that only a mirror has received must be inserted now."""
