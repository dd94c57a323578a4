"""How late a commit may come into sight and still be found by everybody."""

WINDOW_NS = 120_000_000_000
"""Polls look for commits whose time is no more than this behind the newest one seen. Half of it is for clocks that
differ after correction; a writer whose PUT took the other half says everything again under a new time."""
