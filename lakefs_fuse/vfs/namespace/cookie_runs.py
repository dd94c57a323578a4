"""Cookies in 8 bytes each, added in any order and read in ascending order: which names of a directory a LIST confirmed.

Sorted are RUN_COOKIES at a time, when they are added; reading merges the runs. So no step takes long, and there is a
Python object for one run and for one cookie of each run only. For one task at a time.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator

RUN_COOKIES = 4096
"""Sorting as many takes about 1 ms."""


class CookieRuns:
    """See the module's head."""

    def __init__(self) -> None:
        self._newest = array("Q")
        self._runs: list[array[int]] = []

    def add(self, cookie: int) -> None:
        """Any number of times."""
        self._newest.append(cookie)
        if len(self._newest) >= RUN_COOKIES:
            self._end_run()

    def ascending(self) -> Iterator[int]:
        """Each cookie that was added, once. None is added while it is read."""
        self._end_run()
        before = -1
        for cookie in heapq.merge(*self._runs):
            if cookie != before:
                yield cookie
            before = cookie

    def _end_run(self) -> None:
        run, self._newest = array("Q", sorted(self._newest)), array("Q")
        if self._runs and run and self._runs[-1][-1] <= run[0]:  # a LIST mostly brings names in the order of cookies
            self._runs[-1].extend(run)
        elif run:
            self._runs.append(run)
