"""Bounds the size of packs, so that their PUTs end soon.

What always holds (*packs in time*): a pack gets no more bytes than the store receives in `PUT_S`, by the upload limit
and by the packs before it. The time of a commit is before its PUT, and other nodes look for it no further back than a
window (`hybrid_clock.WINDOW_NS`); all other changes of names wait for it; and all of it is sent again if it is
interrupted. A single file may be larger than that, and so may the first pack on a slow connection: a small commit
repeats one that is late (`Committer`).

Trio thread only. Nothing is stored: a new daemon begins with the limit.
"""

from __future__ import annotations

from lakefs_fuse.config import KIB, MIB

PUT_S = 15.0
"""An eighth of the window in which other nodes look for a commit."""
PACK_BYTES_MIN, PACK_BYTES_MAX = 256 * KIB, 64 * MIB


class PackBudget:
    """The size bound of packs: see the module's head. ``bytes_max`` is that of the next pack."""

    def __init__(self, limit_bytes_s: int = 0, memory_bytes: int = PACK_BYTES_MAX) -> None:
        """``limit_bytes_s`` is the limit of all uploads in bytes per second; 0: none. A pack has no more than
        ``memory_bytes``, because it is made in memory."""
        self._most = min(memory_bytes, PACK_BYTES_MAX)
        self._most = self.bytes_max = self._bounded(limit_bytes_s * PUT_S or self._most)

    def record_put(self, size: int, took_s: float) -> None:
        """Record that the store received a commit of ``size`` bytes. Packs get smaller only if that took too long."""
        possible = self._bounded(size * PUT_S / took_s) if took_s > 0 else self._most
        self.bytes_max = possible if took_s > PUT_S else max(self.bytes_max, possible)

    def record_failure(self, size: int) -> None:
        """Record that no attempt stored a commit. It may be too large for as long as connections last."""
        if size > self.bytes_max // 2:
            self.bytes_max = self._bounded(self.bytes_max / 2)

    def _bounded(self, size: float) -> int:
        return max(PACK_BYTES_MIN, min(int(size), self._most))
