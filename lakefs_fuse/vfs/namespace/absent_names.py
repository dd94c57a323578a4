"""Names that the kernel may hold as absent although the first listing of their directory brings them.

A directory that is listed for the first time announces none of its names, because the kernel has to ask for them in any
case: except for those that were asked for by themselves before, and were not there. What was answered while an earlier
listing counted, which was dropped since, is not known by name: then all names that came since count.

Trio thread only; memory has the bounds below. Neither this state nor the kernel's caches survive a crash.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

NAMES_MAX = 256
"""Names of one directory; with more, all that came since count."""
DIRECTORIES_MAX = 16_384
"""Beyond, the directory that was added first is forgotten: for the rest of the TTL its names may stay absent."""


@dataclass(slots=True)
class Absences:
    """The names of one directory, or (``is_any``) all with a cookie beyond ``after``."""

    after: int
    names: set[bytes] = field(default_factory=set)
    is_any: bool = False


class AbsentNames:
    """See the module's head."""

    def __init__(self) -> None:
        self.directories: OrderedDict[int, Absences] = OrderedDict()
        """Not to be changed."""

    def add(self, directory: int, name: bytes, last_cookie: int) -> None:
        """A name was not there when ``last_cookie`` was the last that any name had been given."""
        absences = self._of(directory, last_cookie)
        if not absences.is_any:
            absences.names.add(name)
            if len(absences.names) > NAMES_MAX:
                self._widen(absences)

    def add_any(self, directory: int, last_cookie: int) -> None:
        """As `add`, of names that are not known."""
        self._widen(self._of(directory, last_cookie))

    def discard(self, directory: int, name: bytes) -> bool:
        """Record that the kernel no longer holds a name as absent. Returns whether it may have."""
        absences = self.directories.get(directory)
        if absences is None or name not in absences.names:
            return absences is not None and absences.is_any
        absences.names.discard(name)
        return True

    def pop(self, directory: int) -> Absences | None:
        """A directory was listed; None where no name of it was asked for before."""
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
