"""A request that the store refuses by its permissions is not sent again for an hour, and then tried again: an
administrator may have allowed it, or credentials that had expired may have been renewed.

Trio thread only. A crash forgets it: the next daemon tries at once.
"""

from __future__ import annotations

import trio

REFUSED_S = 3600.0


class Refusal:
    """Of one kind of request."""

    def __init__(self) -> None:
        self._until_s = 0.0

    def note(self) -> None:
        """The store has just refused it."""
        self._until_s = trio.current_time() + REFUSED_S

    @property
    def is_in_effect(self) -> bool:
        """Do not send the request now."""
        return bool(self._until_s) and trio.current_time() < self._until_s
