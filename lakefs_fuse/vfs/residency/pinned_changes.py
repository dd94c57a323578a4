"""Which changes of names are at or below a pin, in a mount that may change."""

from __future__ import annotations

import math

from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.residency.pins import Pins


class PinnedChanges:
    """Marks pins stale with each change at or below one. It listens while there are pins, so a mount without any pays
    nothing.

    Trio thread only; nothing survives a crash, or has to: each daemon begins with stale pins.
    """

    def __init__(self, pins: Pins, namespace: Namespace) -> None:
        self._pins, self._ns = pins, namespace
        self._directory = (math.nan, False)
        """The directory that was asked about last, and whether a pin covers it: changes come by directory."""
        self._is_listening = False
        pins.changed.append(self._listen)
        self._listen()

    def _listen(self) -> None:
        """The pins are others now."""
        self._directory = (math.nan, False)
        events, is_needed = self._ns.events, len(self._pins) > 0
        if is_needed == self._is_listening:
            return
        self._is_listening = is_needed
        change = list.append if is_needed else list.remove
        change(events.version_stored, self._stored)
        change(events.path_renamed, self._renamed)
        change(events.name_changed, self._changed)

    def _stored(self, path: str, *_: object) -> None:
        if self._pins.covering(path) is not None:
            self._pins.mark_stale()

    def _renamed(self, *paths: str) -> None:
        self._directory = (math.nan, False)
        if any(self._pins.covering(path) is not None or self._pins.below(path) for path in paths):
            self._pins.mark_stale()

    def _changed(self, directory: int, name: bytes) -> None:
        if directory != self._directory[0]:
            names = self._ns.tree.path(directory) or []
            path = b"/".join(names).decode("utf-8", "surrogateescape")
            is_covered = self._pins.covering(path) is not None
            self._directory = (directory, is_covered or bool(self._pins.below(path)))
        if self._directory[1]:
            self._pins.mark_stale()
