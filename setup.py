"""Builds the optional C library, and takes the manual pages along; everything else is in pyproject.toml.

`lakefs_fuse/kernel/native/*.c` becomes `_native.abi3.so`: a plain shared object that the program loads with ctypes (it
is not a Python module), which depends on no version of Python and is linked with no libfuse. So a wheel depends on the
platform alone. Without a compiler or libfuse's headers the install goes on without it, and the mount works, slower.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

NATIVE = Path("lakefs_fuse/kernel/native")
PARTS = (
    "attribute_cache", "create_offload", "direntries", "dispatch", "init_flags", "leases", "libfuse", "privileges",
    "request", "request_loop", "shown_numbers",
)  # fmt: skip


class Wheel(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag of a wheel with an extension, less what it says of Python."""
        return "py3", "none", super().get_tag()[2]


def fuse_headers() -> list[str]:
    """Where pkg-config says that libfuse's headers are; the usual place if it does not know."""
    try:
        answer = subprocess.run(["pkg-config", "fuse3", "--cflags"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ["-I/usr/include/fuse3"]
    return shlex.split(answer.stdout)


def native() -> list[Extension]:
    """``optional`` makes a failed compilation a warning; the environment can ask for an error."""
    if not (Path(__file__).parent / NATIVE / "native.h").exists():
        return []
    return [
        Extension(
            "lakefs_fuse.kernel.native._native",
            sources=[str(NATIVE / f"{name}.c") for name in PARTS],
            depends=[str(NATIVE / name) for name in ("native.h", "libfuse.h", "python_abi.h")],
            define_macros=[("FUSE_USE_VERSION", "312"), ("_GNU_SOURCE", None)],
            undef_macros=["NDEBUG"],  # the assertions of create_offload.c are part of it
            extra_compile_args=["-O2", "-fvisibility=default", *fuse_headers()],
            libraries=["dl"],
            py_limited_api=True,
            optional=os.environ.get("LAKEFS_FUSE_NATIVE") != "required",
        )
    ]


def manual() -> list[tuple[str, list[str]]]:
    """The pages that `make dist` puts beside this file; pip installs them where man(1) looks for those of a program."""
    sections = {f"man{number}": sorted(map(str, Path("man", f"man{number}").glob("*"))) for number in (1, 8)}
    return [(f"share/man/{section}", pages) for section, pages in sections.items() if pages]


setup(ext_modules=native(), data_files=manual(), cmdclass={"bdist_wheel": Wheel})
