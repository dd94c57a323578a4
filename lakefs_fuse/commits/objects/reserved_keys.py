"""Keys where other nodes still find the bytes of a name, though here it has them elsewhere, or is gone.

A key is here from the moment a change is journaled that dooms its object, which is not at a path the change speaks of,
until that change is in the store. Until then the key is nobody's to write to. Trio thread only.
"""

from __future__ import annotations

from lakefs_fuse.commits.change import Change


class Leaving:
    """See the module's head. Changes are known by their numbers in the journal."""

    def __init__(self) -> None:
        self._keys: dict[int, list[str]] = {}
        self._newest: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._newest

    def begin(self, sequence: int, change: Change) -> None:
        """The change is journaled."""
        if keys := change.leaving():
            self._keys[sequence] = keys
            self._newest |= dict.fromkeys(keys, sequence)

    def end(self, sequence: int) -> None:
        """The change is in the store."""
        for key in self._keys.pop(sequence, ()):
            if self._newest.get(key) == sequence:
                del self._newest[key]
