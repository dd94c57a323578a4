"""Builds the optional C libraries; everything else is in pyproject.toml.

`lakefs_fuse/kernel/native/direntries.c` becomes `_direntries*.so`, the other C files there `_hooks*.so`: plain
shared objects that the program loads with ctypes (they are not Python modules).
Without a compiler or libfuse's headers the install goes on without them, and the mount works, slower.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("lakefs_fuse/kernel/native")
HOOKS = [
    str(NATIVE / f"{name}.c")
    for name in ("dispatch", "request_loop", "attribute_cache", "create_offload", "leases", "privileges")
]
HEADERS = ("request_loop", "attribute_cache", "create_offload", "leases", "privileges", "slots")
DIRENTRIES = str(NATIVE / "direntries.c")


def fuse_flags(what: str, usual: str) -> list[str]:
    """What pkg-config says about libfuse; the usual thing if it does not know."""
    try:
        answer = subprocess.run(["pkg-config", "fuse3", what], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return [usual]
    return shlex.split(answer.stdout)


def hooks() -> list[Extension]:
    """``optional`` makes a failed compilation a warning."""
    if not (Path(__file__).parent / HOOKS[0]).exists():
        return []
    return [
        Extension(
            "lakefs_fuse.kernel.native._hooks",
            sources=HOOKS,
            depends=[str(NATIVE / f"{name}.h") for name in HEADERS],
            define_macros=[("FUSE_USE_VERSION", "312"), ("_GNU_SOURCE", None)],
            extra_compile_args=["-O2", "-fvisibility=default", *fuse_flags("--cflags", "-I/usr/include/fuse3")],
            # ctypes binds every symbol at once, and libfuse is not there yet when the hooks are loaded.
            extra_link_args=fuse_flags("--libs", "-lfuse3"),
            libraries=["dl"],
            optional=True,
        )
    ]


def direntries() -> list[Extension]:
    if not (Path(__file__).parent / DIRENTRIES).exists():
        return []
    return [
        Extension(
            "lakefs_fuse.kernel.native._direntries",
            sources=[DIRENTRIES],
            define_macros=[("_GNU_SOURCE", None)],
            extra_compile_args=["-O2", "-fvisibility=hidden"],
            libraries=["dl"],
            optional=True,
        )
    ]


setup(ext_modules=[*hooks(), *direntries()])
