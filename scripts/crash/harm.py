"""Breaks something behind the daemon's back, so that one sees that the comparison notices it.

A crash test that cannot fail says nothing. Each of these is what a bug of one kind would do; the run must end with a
failure.
"""

from __future__ import annotations

import random
import shutil

from scripts.crash.host import Host
from scripts.crash.store_view import StoreView

HARMS = {
    "staging": "the bytes of files that were accepted are gone from the local disk",
    "journal": "the metadata database, and the journal in it, is gone",
    "cache": "the whole cache directory is gone",
    "short": "an object in the store is cut short",
    "mixed": "half of an object in the store is of another",
    "commit": "the newest commit is gone from the store",
    "object": "an object is gone from the store",
}
UNSYNCED = "unsynced"
"""Of the daemon itself: it does not sync the log of its metadata database, which only a power cut shows."""


def do(what: str, host: Host, view: StoreView, chosen: random.Random) -> None:
    """One of HARMS, while no daemon runs."""
    if what == "staging":
        for path in (host.cache / "staging").iterdir():
            path.unlink()
    elif what == "journal":
        shutil.rmtree(host.cache / "meta")
    elif what == "cache":
        shutil.rmtree(host.cache)
    elif what == "commit":
        commits = sorted(key for key in view.listing() if key.startswith(".lakefs/commits/"))
        view.delete(commits[-1])
    else:
        _harm_object(what, view, chosen)


def _harm_object(what: str, view: StoreView, chosen: random.Random) -> None:
    plain = sorted(key for key in view.listing() if key[:1] == "w" and not key.endswith("/"))
    key = chosen.choice(plain)
    data = view.read(key)
    if what == "short":
        view.replace(key, data[: len(data) // 2])
    elif what == "mixed":
        view.replace(key, data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    else:
        view.delete(key)
