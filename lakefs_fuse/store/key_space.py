"""A model of the distribution of names, from the names seen so far: proposes where to split a range of names.

It records for each column of a name which characters were seen there; a column with one digit may have all digits. A
wrong guess costs one request: no listing depends on it for being complete. Pure computation; memory is bounded by
`COLUMNS_MAX` and `CHARACTERS_MAX`.
"""

from __future__ import annotations

import string
from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice

COLUMNS_MAX = 128
"""Only this many first characters of a name are compared."""
CHARACTERS_MAX = 256
"""Characters recorded of one column."""
SAMPLE_STEP = 16
"""One name in this many is recorded."""
DIGITS_OF_GUESS = 6
LAST = "\U0010ffff"
"""Sorts after every character; appended to a prefix, after every name that begins with it."""

_DIGITS = frozenset(string.digits)
_HEX = frozenset("abcdef"), frozenset("ABCDEF")
_LETTERS = frozenset(string.ascii_lowercase), frozenset(string.ascii_uppercase)


def shared(one: str, other: str) -> int:
    """Length of the longest common prefix, in characters."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


class KeySpace:
    """Characters by column, and guesses that follow from them."""

    def __init__(self) -> None:
        self._seen: list[set[str]] = []
        self._alphabets: dict[int, list[str]] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Record some of the names of a page."""
        for name in islice(names, 0, None, SAMPLE_STEP):
            for column, character in enumerate(name[:COLUMNS_MAX]):
                if column == len(self._seen):
                    self._seen.append(set())
                seen = self._seen[column]
                if character not in seen and len(seen) < CHARACTERS_MAX:
                    seen.add(character)
                    self._alphabets.pop(column, None)

    def _alphabet(self, column: int) -> list[str]:
        """Possible characters of a column, in order."""
        known = self._alphabets.get(column)
        if known is None:
            seen = self._seen[column] if column < len(self._seen) else set()
            known = self._alphabets[column] = sorted(_extended(seen) or _DIGITS)
        return known

    def _first_varied(self, column: int) -> int:
        while column < len(self._seen) and len(self._seen[column]) < 2:
            column += 1
        return column

    def _number(self, name: str, column: int) -> int:
        """What follows ``column`` as a number whose digits are places in the alphabets; a name that ends goes on with
        first characters."""
        number = 0
        for at in range(column, column + DIGITS_OF_GUESS):
            alphabet = self._alphabet(at)
            if at >= len(name):
                digit = 0
            elif name[at] == LAST:
                digit = len(alphabet)
            else:
                digit = bisect_left(alphabet, name[at])
            number = number * len(alphabet) + digit
        return number

    def pages_left(self, begin: str, at: str, limit: str, pages: int) -> float:
        """Estimated pages between ``at`` and ``limit``, with the density of names of the ``pages`` from ``begin`` to
        ``at``; infinity if unknown."""
        column = shared(at, limit)
        if self._first_varied(column) > column:
            return float("inf")
        column = shared(begin, limit)
        first, last = self._number(begin, column), self._number(at, column)
        left = self._number(limit, column) - last
        return left * pages / (last - first) if last > first else float("inf")

    def cut(self, at: str, limit: str) -> str | None:
        """A string between two names, different from both; None if none is found."""
        column = shared(at, limit)
        varied = self._first_varied(column)
        if column < varied <= len(at):
            # All names seen are alike up to here. Whether there are others is asked in the middle of it.
            middle = (column + varied + 1) // 2
            point = at[:middle] + LAST
            return point if at < point < limit else None
        low, high = self._number(at, column), self._number(limit, column)
        return self._named(at[:column], column, (low + high) // 2, at, limit)

    def _named(self, prefix: str, column: int, number: int, low: str, high: str) -> str | None:
        digits: list[tuple[int, int]] = []
        for at in range(column + DIGITS_OF_GUESS - 1, column - 1, -1):
            number, digit = divmod(number, len(self._alphabet(at)))
            digits.append((at, digit))
        point = prefix
        for at, digit in reversed(digits):
            point += self._alphabet(at)[digit]
            if low < point < high:
                return point
        return None


def _extended(seen: set[str]) -> set[str]:
    """One digit implies all digits, two letters imply all of their kind."""
    found = set(seen)
    has_digits = bool(seen & _DIGITS)
    if has_digits:
        found |= _DIGITS
    for hexadecimal, letters in zip(_HEX, _LETTERS, strict=True):
        here = seen & letters
        if has_digits and here and here <= hexadecimal:
            found |= hexadecimal
        elif len(here) >= 2:
            found |= letters
    return found
