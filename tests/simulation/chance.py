"""Chance that does not shift: a number depends on what it is for, not on how many were drawn before.

What always holds: dropping an operation from a plan changes the chance of no other one, so that plans can be shrunk.
"""

from __future__ import annotations

import hashlib
import random


class Chance:
    """Draws numbers by purpose, key and attempt."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._attempts: dict[str, int] = {}

    def number(self, purpose: str) -> float:
        """From 0 to 1, other than at the last draw for this purpose."""
        attempt = self._attempts[purpose] = self._attempts.get(purpose, 0) + 1
        raw = hashlib.blake2b(f"{self._seed}/{purpose}/{attempt}".encode(), digest_size=8).digest()
        return int.from_bytes(raw, "little") / 2**64

    def happens(self, purpose: str, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return probability > 0 and self.number(purpose) < probability

    def generator(self, purpose: str) -> random.Random:
        """A generator for one use."""
        return random.Random(f"{self._seed}/{purpose}/{self.number(purpose)}")
