"""Whether small files are being accepted one after the other, so fast that storing them meanwhile would hold them up.

Packing, sending and noting a file costs this node about as much as accepting it does. So while a burst lasts packs
wait, up to `PATIENCE` times as long as they do anyway. Times are of the trio clock.
"""

from __future__ import annotations

WINDOW_S = 0.5
FILES_MIN = 40
"""So many in a window are a burst."""
PATIENCE = 15


class Bursts:
    """Counts what is accepted, window by window."""

    def __init__(self) -> None:
        self._began_s = self._busy_until_s = 0.0
        self._count = 0

    def came(self, now_s: float) -> None:
        """One more was accepted."""
        if now_s - self._began_s > WINDOW_S:
            self._began_s, self._count = now_s, 0
        self._count += 1
        if self._count >= FILES_MIN:
            self._busy_until_s = now_s + WINDOW_S

    def lasts(self, now_s: float) -> bool:
        """More are likely to come at once."""
        return now_s < self._busy_until_s
