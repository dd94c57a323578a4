"""For how long a listing of each directory counts, and so how often the store is asked for other programs' changes.

Commits contain or announce what mounts store, so a LIST finds only what other programs stored, or a mount that died
before it announced it. ``--foreign SECONDS`` sets the interval of all directories. Otherwise the interval of a
directory begins with the TTL, and doubles with each LIST of this directory alone that found nothing of that kind.

What always holds:

* *found is looked for again*: after a LIST with a difference that no commit announced, the interval is the TTL;
* *cheap looks stay*: the interval is the TTL if one LIST answers for many directories, or if the lake is not known to
  be large;
* *bounded*: an interval is at most INTERVAL_S_MAX, or the TTL if that is longer.

Trio thread only. Nothing survives a crash: intervals begin with the TTL again, which costs a few LISTs.
"""

from __future__ import annotations

from collections import OrderedDict

NS = 1_000_000_000
INTERVAL_S_MAX = 3600.0
DIRECTORIES_MAX = 16_384
"""Maximum directories with an interval longer than the first, some 2 MB; the one listed longest ago is forgotten."""


class LookIntervals:
    """See the module's head."""

    def __init__(self, ttl_s: float, foreign_s: float | None) -> None:
        """``foreign_s`` is the interval of all directories, if it is not None."""
        first_s = ttl_s if foreign_s is None else foreign_s
        self.first_ns = int(first_s * NS)
        self._ns_max = int(max(first_s, INTERVAL_S_MAX if foreign_s is None else 0.0) * NS)
        self._longer: OrderedDict[int, int] = OrderedDict()

    def doubled(self, interval_ns: int) -> int:
        """Return the interval that follows one after which nothing new was found."""
        return min(2 * interval_ns, self._ns_max)

    def interval_ns(self, directory: int) -> int:
        """Return for how long the last listing of a directory counts."""
        return self._longer.get(directory, self.first_ns)

    def lengthen(self, directory: int) -> None:
        """Double the interval of a directory: a LIST of it alone found nothing new."""
        interval_ns = self.doubled(self.interval_ns(directory))
        if interval_ns > self.first_ns:
            self._longer[directory] = interval_ns
            self._longer.move_to_end(directory)
            if len(self._longer) > DIRECTORIES_MAX:
                self._longer.popitem(last=False)

    def reset(self, directory: int) -> None:
        """Set the interval of a directory to the first: a LIST found something new, or LISTs cost little."""
        self._longer.pop(directory, None)
