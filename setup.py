"""Builds the optional C library; everything else is in pyproject.toml.

`lakefs_fuse/kernel/native/*.c` becomes `_native*.so`: a plain shared object that the program loads with ctypes (it is
not a Python module). Without a compiler or libfuse's headers the install goes on without it, and the mount works,
slower.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("lakefs_fuse/kernel/native")
PARTS = (
    "dispatch", "request_loop", "leases", "attribute_cache", "create_offload", "privileges", "direntries",
)  # fmt: skip


def fuse_flags(what: str, usual: str) -> list[str]:
    """What pkg-config says about libfuse; the usual thing if it does not know."""
    try:
        answer = subprocess.run(["pkg-config", "fuse3", what], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return [usual]
    return shlex.split(answer.stdout)


def native() -> list[Extension]:
    """``optional`` makes a failed compilation a warning."""
    if not (Path(__file__).parent / NATIVE / "native.h").exists():
        return []
    return [
        Extension(
            "lakefs_fuse.kernel.native._native",
            sources=[str(NATIVE / f"{name}.c") for name in PARTS],
            depends=[str(NATIVE / "native.h")],
            define_macros=[("FUSE_USE_VERSION", "312"), ("_GNU_SOURCE", None)],
            undef_macros=["NDEBUG"],  # the assertions of create_offload.c are part of it
            extra_compile_args=["-O2", "-fvisibility=default", *fuse_flags("--cflags", "-I/usr/include/fuse3")],
            # ctypes binds every symbol at once: libfuse comes with the library, which is loaded before pyfuse3.
            extra_link_args=fuse_flags("--libs", "-lfuse3"),
            libraries=["dl"],
            optional=True,
        )
    ]


setup(ext_modules=native())
