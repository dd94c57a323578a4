"""Builds the optional C libraries; everything else is in pyproject.toml.

`lakefs_fuse/fuse/hooks.c`, `receiving.c`, `remembered.c`, `creating.c`, `lent_names.c` and `privileges.c` become
`lakefs_fuse/fuse/_hooks*.so`, `direntries.c` becomes `_direntries*.so`: plain shared objects that the program loads
with ctypes (they are not Python modules).
Without a compiler or libfuse's headers the install goes on without them, and the mount works, slower.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from setuptools import Extension, setup

HOOKS = "lakefs_fuse/fuse/hooks.c"
RECEIVING = "lakefs_fuse/fuse/receiving.c"
CREATING = "lakefs_fuse/fuse/creating.c"
LENT_NAMES = "lakefs_fuse/fuse/lent_names.c"
PRIVILEGES = "lakefs_fuse/fuse/privileges.c"
REMEMBERED = "lakefs_fuse/fuse/remembered.c"
HEADERS = ("receiving", "remembered", "creating", "lent_names", "privileges", "slots")
DIRENTRIES = "lakefs_fuse/fuse/direntries.c"


def fuse_flags(what: str, usual: str) -> list[str]:
    """What pkg-config says about libfuse; the usual thing if it does not know."""
    try:
        answer = subprocess.run(["pkg-config", "fuse3", what], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return [usual]
    return shlex.split(answer.stdout)


def hooks() -> list[Extension]:
    """``optional`` makes a failed compilation a warning."""
    if not (Path(__file__).parent / HOOKS).exists():
        return []
    return [
        Extension(
            "lakefs_fuse.fuse._hooks",
            sources=[HOOKS, RECEIVING, REMEMBERED, CREATING, LENT_NAMES, PRIVILEGES],
            depends=[f"lakefs_fuse/fuse/{name}.h" for name in HEADERS],
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
            "lakefs_fuse.fuse._direntries",
            sources=[DIRENTRIES],
            define_macros=[("_GNU_SOURCE", None)],
            extra_compile_args=["-O2", "-fvisibility=hidden"],
            libraries=["dl"],
            optional=True,
        )
    ]


setup(ext_modules=[*hooks(), *direntries()])
