"""Exponential backoff: how long to pause before the next try of something that failed.

What always holds (*bounded backoff*): a pause is never longer than ``max_s``, and without jitter never shorter than the
one before it. For one caller at a time; nothing survives a crash.
"""

from __future__ import annotations

import random


class Backoff:
    """Pauses that double from ``first_s`` to ``max_s``."""

    __slots__ = ("_first_s", "_max_s", "_pause_s", "_rng")

    def __init__(self, first_s: float, max_s: float, rng: random.Random | None = None) -> None:
        """With ``rng`` each pause is drawn between 0 and its bound (full jitter): for what many nodes do at once."""
        self._first_s = self._pause_s = first_s
        self._max_s = max_s
        self._rng = rng

    def next_s(self, scale: float = 1.0) -> float:
        """The pause after another failure, in seconds; ``scale`` lengthens this one, within ``max_s``."""
        pause_s = min(self._max_s, scale * self._pause_s)
        self._pause_s = min(self._max_s, 2 * self._pause_s)
        return pause_s if self._rng is None else self._rng.uniform(0, pause_s)

    def reset(self) -> None:
        """Something succeeded."""
        self._pause_s = self._first_s
