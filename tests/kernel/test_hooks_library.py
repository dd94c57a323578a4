"""The compiled library: that installing built it, that it can be loaded as the program loads it, and that it works
with a libfuse of either kind: before 3.17, and since."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

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
HANDLE_KILLPRIV_V2, PARALLEL_DIROPS = 1 << 28, 1 << 18

class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]

def parse(opcode, body, unique=9):
    head = struct.pack("<IIQQIIIHH", 40 + len(body), opcode, unique, 1, 0, 0, 0, 0, 0)
    library.lakefs_record_offer(head + body)
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
    is_accepted = library.lakefs_accept_init_flag(HANDLE_KILLPRIV_V2)
    library.lakefs_set_killpriv(is_accepted)
    return is_accepted

def write(flags):
    return parse(WRITE, struct.pack("<QQIIQII", 1, 0, 4, flags, 0, 0, 0) + b"data")

assert init(1) == 0 and amended(2) == 1 and write(1 << 2) == 0, "not offered by the kernel"
assert init(1 | HANDLE_KILLPRIV_V2) == 1
assert amended(2) == 1 | HANDLE_KILLPRIV_V2
assert library.lakefs_accept_init_flag(PARALLEL_DIROPS) == 0 and amended(2) == 1 | HANDLE_KILLPRIV_V2, "not offered"
assert amended(4) == 1 and amended(2, error=-5) == 1, "not the answer to INIT"
assert init(HANDLE_KILLPRIV_V2 | PARALLEL_DIROPS) and library.lakefs_accept_init_flag(PARALLEL_DIROPS)
assert amended(2) == 1 | HANDLE_KILLPRIV_V2 | PARALLEL_DIROPS
assert [write(0), write(1 << 0), write(1 << 2), write(1 << 2 | 1 << 1)] == [0, 0, 1, 1]
assert [parse(SETATTR, struct.pack("<II", valid, 0) + bytes(80)) for valid in (1 << 3, 1 << 11 | 1 << 3)] == [0, 1]
assert parse(CREATE, struct.pack("<IIII", 0o1101, 0o644, 0, 1) + b"f\\0") == 0, "it opens no file that exists"
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


LIBFUSE = """
#include <stddef.h>
#include <stdint.h>
const char *fuse_pkgversion(void) { return "3.99"; }
%(functions)s
static intptr_t made;
void *MAKER(void *args, void **table, size_t size%(version)s, void *userdata)
{
	made = %(made)s;
	return table;
}
intptr_t how_made(void) { return made; }
"""
PYFUSE3 = """
#include <stddef.h>
void *MAKER(void *args, void **table, size_t size%(version)s, void *userdata);
int fuse_reply_open(void *request, void *info);
int fuse_session_receive_buf(void *session, void *buf);
size_t fuse_add_direntry_plus(void *request, char *buffer, size_t room, const char *name, void *param, long off);
static void *table[50];
int make_session(void)
{
	static int version[4] = {3, 17, 2};
	for (int at = 0; at < 50; at++)
		table[at] = &make_session;
	(void)version;
	return MAKER(NULL, table, sizeof(table)%(given)s, NULL) != NULL;
}
"""
"""As pyfuse3: a table with all handlers; the version is that of the headers that it was compiled with."""
MAKERS = {
    "fuse_session_new": {"version": "", "given": "", "made": "1"},
    "fuse_session_new_versioned": {
        "version": ", int *version", "given": ", version", "made": "version[1]",
    },
}  # fmt: skip
SONAMES = {"fuse_session_new": "libfuse3.so.3", "fuse_session_new_versioned": "libfuse3.so.4"}
MAKE = """
import ctypes, sys
native, pyfuse3, libfuse, made = sys.argv[1:]
library = ctypes.PyDLL(native, mode=ctypes.RTLD_GLOBAL)
library.lakefs_libfuse_version.restype = ctypes.c_char_p
assert library.lakefs_libfuse_version() == b""
assert library.lakefs_bind_libfuse(b"/nowhere/pyfuse3.so") == 0
assert library.lakefs_bind_libfuse(pyfuse3.encode()) == 1
assert library.lakefs_libfuse_version() == b"3.99"
assert library.lakefs_is_hooked() == 0
assert ctypes.PyDLL(pyfuse3).make_session() == 1
assert library.lakefs_is_hooked() == 1, "pyfuse3's session did not come through the library"
assert ctypes.PyDLL(libfuse).how_made() == int(made), "nor go on to libfuse as it came"
"""


def compile_shared(source: str, target: Path, *more: str) -> Path:
    """Compile C to a shared object at ``target``."""
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(target), *more]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return target


@pytest.mark.parametrize(("maker", "soname"), SONAMES.items())
def test_hooks_with_either_libfuse_wrap_the_session_that_pyfuse3_makes(tmp_path: Path, maker: str, soname: str) -> None:
    functions = re.findall(r"each\((\w+)\)", (NATIVE / "libfuse.h").read_text())
    assert {"reply_open", "pkgversion"} <= set(functions)
    values = MAKERS[maker]
    stubs = "\n".join(f"int fuse_{name}() {{ return 0; }}" for name in functions if name != "pkgversion")
    define, runpath = f"-DMAKER={maker}", f"-Wl,-rpath,{tmp_path}"
    libfuse = compile_shared(
        LIBFUSE % {**values, "functions": stubs}, tmp_path / soname, define, f"-Wl,-soname,{soname}"
    )
    pyfuse3 = compile_shared(PYFUSE3 % values, tmp_path / "pyfuse3.so", define, runpath, str(libfuse))
    for path in sorted(NATIVE.glob("_native*.so")):
        result = subprocess.run(
            [sys.executable, "-c", MAKE, path, pyfuse3, libfuse, "17" if values["version"] else "1"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr


def test_declarations_of_python_agree_with_its_headers(tmp_path: Path) -> None:
    """C refuses two declarations of one function that differ."""
    include = sysconfig.get_path("include")
    both = f'#define Py_LIMITED_API 0x030B0000\n#include <Python.h>\n#include "{NATIVE}/python_abi.h"\n'
    compile_shared(both, tmp_path / "agree.so", f"-I{include}", "-Werror")
    differing = both + "int PyDict_Size(int dict);\n"
    with pytest.raises(subprocess.CalledProcessError):
        compile_shared(differing, tmp_path / "differ.so", f"-I{include}")


def test_hooks_are_linked_with_neither_libfuse_nor_python() -> None:
    for path in sorted(NATIVE.glob("_native*.so")):
        shown = subprocess.run(["ldd", path], capture_output=True, text=True, check=True, timeout=60).stdout
        assert "libc.so" in shown
        assert "libfuse" not in shown
        assert "libpython" not in shown
