"""The compiled kernel hooks: that installing built them, and that they can be loaded as the program loads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUSE = Path(__file__).parent.parent / "lakefs_fuse" / "fuse"

LOAD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
assert ctypes.CDLL(None).fuse_session_new, "pyfuse3 would not find the hooks"
assert library.lakefs_hooks_active() == 0
"""


def test_the_hooks_are_built_and_load_before_libfuse() -> None:
    built = sorted(FUSE.glob("_hooks*.so"))
    assert built, "not compiled: `pip install -e .` does that where there is a compiler"
    for path in built:
        # In a process of its own: nothing may have loaded libfuse before.
        result = subprocess.run(
            [sys.executable, "-c", LOAD, path], capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stderr
