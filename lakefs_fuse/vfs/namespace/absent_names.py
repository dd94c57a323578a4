"""Names that the kernel may have cached as absent before the first listing of their directory shows them.

The first listing of a directory invalidates none of its names, because the kernel has to look them up in any case,
except names that were looked up before the listing and were absent. If an earlier listing answered such lookups and was
dropped since, their names are not known: then all names that were added since count as looked up.

Trio thread only; memory has the bounds below. Neither this state nor the kernel's caches survive a crash.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

NAMES_MAX = 256
"""Maximum names of one directory; beyond, all names that were added since count."""
DIRECTORIES_MAX = 16_384
"""Maximum directories; beyond, the one added first is forgotten, and its names may stay absent for the rest of the
TTL."""


@dataclass(slots=True)
class Absences:
    """The absent names of one directory; with ``is_any``, all names with a cookie beyond ``after``."""

    after: int
    names: set[bytes] = field(default_factory=set)
    is_any: bool = False


class AbsentNames:
    """See the module's head."""

    def __init__(self) -> None:
        self.directories: OrderedDict[int, Absences] = OrderedDict()
        """Absences by inode, for readers."""

    def add(self, directory: int, name: bytes, last_cookie: int) -> None:
        """Record that a name was absent when ``last_cookie`` was the newest cookie of all names."""
        absences = self._of(directory, last_cookie)
        if not absences.is_any:
            absences.names.add(name)
            if len(absences.names) > NAMES_MAX:
                self._widen(absences)

    def add_any(self, directory: int, last_cookie: int) -> None:
        """Record that any names of a directory may have been absent then."""
        self._widen(self._of(directory, last_cookie))

    def discard(self, directory: int, name: bytes) -> bool:
        """Record that the kernel no longer holds a name as absent. Returns whether it may have."""
        absences = self.directories.get(directory)
        if absences is None or name not in absences.names:
            return absences is not None and absences.is_any
        absences.names.discard(name)
        return True

    def pop(self, directory: int) -> Absences | None:
        """Remove and return the absences of a directory that was listed; None if there are none."""
        return self.directories.pop(directory, None)

    def _of(self, directory: int, last_cookie: int) -> Absences:
        absences = self.directories.get(directory)
        if absences is None:
            absences = self.directories[directory] = Absences(last_cookie)
            if len(self.directories) > DIRECTORIES_MAX:
                self.directories.popitem(last=False)
        return absences

    @staticmethod
    def _widen(absences: Absences) -> None:
        absences.is_any = True
        absences.names.clear()
