"""The compiled library: that installing built it, and that it can be loaded as the program loads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "lakefs_fuse" / "kernel" / "native"

LOAD = """
import ctypes, sys
library = ctypes.PyDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
assert ctypes.CDLL(None).fuse_session_new, "pyfuse3 would not find the hooks"
assert library.lakefs_is_hooked() == 0
"""

PRIVILEGES = """
import ctypes, struct, sys
library = ctypes.PyDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
INIT, SETATTR, WRITE, CREATE, OPEN = 26, 4, 16, 35, 14
HANDLE_KILLPRIV_V2 = 1 << 28

class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]

def parse(opcode, body, unique=9):
    head = struct.pack("<IIQQIIIHH", 40 + len(body), opcode, unique, 1, 0, 0, 0, 0, 0)
    library.lakefs_parse_killpriv(head + body)
    return library.lakefs_kills_privileges()

def amended(unique, error=0):
    head = ctypes.create_string_buffer(struct.pack("<IiQ", 80, error, unique), 16)
    body = ctypes.create_string_buffer(struct.pack("<IIII", 7, 38, 1 << 20, 1), 64)
    parts = (Iovec * 2)((ctypes.addressof(head), 16), (ctypes.addressof(body), 64))
    library.lakefs_amend_init(parts, 2)
    return struct.unpack_from("<I", body, 12)[0]

def init(flags):
    parse(INIT, struct.pack("<IIII", 7, 38, 0, flags) + bytes(48), unique=2)
    return library.lakefs_accept_killpriv()

def write(flags):
    return parse(WRITE, struct.pack("<QQIIQII", 1, 0, 4, flags, 0, 0, 0) + b"data")

assert init(1) == 0 and amended(2) == 1 and write(1 << 2) == 0, "not offered by the kernel"
assert init(1 | HANDLE_KILLPRIV_V2) == 1
assert amended(2) == 1 | HANDLE_KILLPRIV_V2
assert amended(4) == 1 and amended(2, error=-5) == 1, "not the answer to INIT"
assert [write(0), write(1 << 0), write(1 << 2), write(1 << 2 | 1 << 1)] == [0, 0, 1, 1]
assert [parse(SETATTR, struct.pack("<II", valid, 0) + bytes(80)) for valid in (1 << 3, 1 << 11 | 1 << 3)] == [0, 1]
assert [parse(CREATE, struct.pack("<IIII", 0o1101, 0o644, 0, flags) + b"f\\0") for flags in (0, 1)] == [0, 1]
assert parse(OPEN, struct.pack("<II", 0, 1)) == 0
"""


def test_requests_tell_what_drops_privileges_and_the_answer_to_init_asks_for_that() -> None:
    for path in sorted(NATIVE.glob("_native*.so")):
        result = subprocess.run(
            [sys.executable, "-c", PRIVILEGES, path], capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stderr


def test_the_hooks_are_built_and_load_before_libfuse() -> None:
    built = sorted(NATIVE.glob("_native*.so"))
    assert built, "not compiled: `pip install -e .` does that where there is a compiler"
    for path in built:
        # In a process of its own: nothing may have loaded libfuse before.
        result = subprocess.run(
            [sys.executable, "-c", LOAD, path], capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stderr
