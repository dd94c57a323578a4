"""How long a listing of each directory counts: how often the store is asked what other programs put there.

What mounts store is in commits, or announced by them, so a LIST finds what other programs did, or a mount that died
before it could say so. A number of seconds counts for every directory. Without one the interval of a directory is the
TTL, and doubles with each LIST that found nothing of that kind, where the LIST is for that directory alone.

What always holds:

* *found is looked for again*: after a difference that no commit announced the interval is the TTL;
* *cheap looks stay*: it is the TTL, too, where one LIST answers for many directories, or for a lake that is not known
  to be large;
* *bounded*: an interval is INTERVAL_S_MAX at most, or the TTL where that is longer.

Trio thread only. Nothing survives a crash: intervals begin with the TTL again, which costs a few LISTs.
"""

from __future__ import annotations

from collections import OrderedDict

NS = 1_000_000_000
INTERVAL_S_MAX = 3600.0
DIRECTORIES_MAX = 16_384
"""Directories with a longer interval than the first, some 2 MB; those listed longest ago are forgotten."""


class LookIntervals:
    """See the module's head."""

    def __init__(self, ttl_s: float, foreign_s: float | None) -> None:
        """``foreign_s`` is the interval of all directories, if it is not None."""
        first_s = ttl_s if foreign_s is None else foreign_s
        self.first_ns = int(first_s * NS)
        self._ns_max = int(max(first_s, INTERVAL_S_MAX if foreign_s is None else 0.0) * NS)
        self._longer: OrderedDict[int, int] = OrderedDict()

    def interval_ns(self, directory: int) -> int:
        """How long the last listing of a directory counts."""
        return self._longer.get(directory, self.first_ns)

    def lengthen(self, directory: int) -> None:
        """A LIST of this directory alone found nothing new."""
        interval_ns = min(2 * self.interval_ns(directory), self._ns_max)
        if interval_ns > self.first_ns:
            self._longer[directory] = interval_ns
            self._longer.move_to_end(directory)
            if len(self._longer) > DIRECTORIES_MAX:
                self._longer.popitem(last=False)

    def reset(self, directory: int) -> None:
        """Something is found here, or looking for it costs little."""
        self._longer.pop(directory, None)
