"""A set of small numbers in one bit each, for inodes and object numbers. For one task at a time."""

from __future__ import annotations


class NumberSet:
    """A set of numbers from 0 on; memory grows with the largest."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, number: int) -> None:
        at = number >> 3
        if at >= len(self._bits):
            self._bits += bytes(at + 4096 - len(self._bits))
        self._bits[at] |= 1 << (number & 7)

    def discard(self, number: int) -> None:
        if number in self:
            self._bits[number >> 3] &= ~(1 << (number & 7))

    def __contains__(self, number: int) -> bool:
        at = number >> 3
        return at < len(self._bits) and bool(self._bits[at] & 1 << (number & 7))
