"""Runs a trio program in virtual time, so that a seed decides everything that happens.

What always holds (*same seed, same history*): tasks that can run are run in an order drawn from the seed, time passes
only while every task waits, and the garbage collector runs at no other time than between two runs. Hashes of strings
have to be the same in each process (``PYTHONHASHSEED=0``; `require_fixed_hashes`).
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
import trio.testing
from trio._core import _run as trio_run

T = TypeVar("T")


def require_fixed_hashes(module: str) -> None:
    """Run the program again as ``python -m module`` with fixed hashes, unless it has them."""
    if sys.flags.hash_randomization:
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})


def run(main: Callable[[], Awaitable[T]], seed: str) -> T:
    """What ``main`` answers or raises; its time begins at 0."""
    scheduler = vars(trio_run)
    order, allowed = scheduler["_r"], scheduler["_ALLOW_DETERMINISTIC_SCHEDULING"]
    scheduler["_r"] = random.Random(f"scheduler/{seed}")
    scheduler["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        scheduler["_r"], scheduler["_ALLOW_DETERMINISTIC_SCHEDULING"] = order, allowed
        gc.collect()
        if was_enabled:
            gc.enable()
