"""Source distribution and wheels of this program, and those of pyfuse3, which PyPI has as source only.

*One wheel for a platform*: the C library depends on no version of Python and of libfuse, so a wheel serves all of them.
Clang as `ziglang` brings it compiles for a glibc of GLIBC, on any machine and for either architecture; `auditwheel`
checks that nothing newer is needed.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.dist.manual import write_manual

MANUAL = "man"
"""Directory beside setup.py from which a wheel takes its manual pages."""
GLIBC = "2.28"
"""That of Debian 10, RHEL 8 and Ubuntu 18.10; no release older than that has a Python of 3.11."""
ARCHITECTURES = ("x86_64", "aarch64")
PATTERNS = ("lakefs_fuse-*.tar.gz", "lakefs_fuse-*.whl", "pyfuse3-*", "lakefs-fuse_*.deb")
"""What a build makes, and the next one replaces."""


def run(*command: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a program, and return what it printed; its errors go to ours. Raises CalledProcessError."""
    print("+", *command, flush=True)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **(environment or {})}, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout


def clear(out: Path) -> None:
    """Remove what an earlier build put there."""
    for pattern in PATTERNS:
        for path in out.glob(pattern):
            path.unlink()


def only(directory: Path, pattern: str) -> Path:
    """The one file of that name. Raises ValueError where there is another number of them."""
    (found,) = directory.glob(pattern)
    return found


def build_sdist(out: Path) -> Path:
    """Build the source distribution of this working tree."""
    run(sys.executable, "-m", "build", "--installer", "uv", "--sdist", "--outdir", out, ".")
    return only(out, "lakefs_fuse-*.tar.gz")


def unpack(sdist: Path, directory: Path) -> Path:
    """Unpack the source distribution, and return its directory. The tarfile of Python 3.11.0 to 3.11.3 (Debian 12) has
    no filters, without which that of later ones warns."""
    run("tar", "-xzf", sdist, "-C", directory)
    return only(directory, "lakefs_fuse-*")


def build_wheels(sdist: Path, out: Path) -> dict[str, Path]:
    """Build a wheel for each architecture from the source distribution, with the manual; they are returned by
    architecture.

    Raises ValueError where one needs a newer glibc than its name says.
    """
    with tempfile.TemporaryDirectory() as scratch:
        manual = Path(scratch) / MANUAL
        write_manual(manual, sdist.name.removeprefix("lakefs_fuse-").removesuffix(".tar.gz"))
        return {architecture: _build_wheel(sdist, manual, out, architecture) for architecture in ARCHITECTURES}


def _build_wheel(sdist: Path, manual: Path, out: Path, architecture: str) -> Path:
    platform = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    compiler = f"{sys.executable} -m ziglang cc -target {architecture}-linux-gnu.{GLIBC}"
    with tempfile.TemporaryDirectory() as scratch:
        source = unpack(sdist, Path(scratch))
        shutil.copytree(manual, source / MANUAL)
        run(
            sys.executable, "-m", "build", "--installer", "uv", "--wheel", "--outdir", out,
            f"--config-setting=--build-option=--plat-name={platform}", source,
            environment={"CC": compiler, "LDSHARED": f"{compiler} -shared", "LAKEFS_FUSE_NATIVE": "required"},
        )  # fmt: skip
    wheel = only(out, f"lakefs_fuse-*-py3-none-{platform}.whl")
    check_platform(wheel)
    return wheel


def check_platform(wheel: Path) -> None:
    """Check with auditwheel that a wheel runs with a glibc of GLIBC, and needs no library beside it."""
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    found = re.search(r'consistent with the following platform tag:\s+"manylinux_(\d+)_(\d+)_', shown)
    if found is None or (int(found[1]), int(found[2])) > tuple(int(part) for part in GLIBC.split(".")):
        raise ValueError(f"{wheel.name} needs more than glibc {GLIBC}:\n{shown}")


def build_pyfuse3(out: Path, pythons: Sequence[str]) -> None:
    """Fetch the source of pyfuse3, which its licence (LGPL) wants beside it, and build a wheel for each Python.

    Its version is the one that is installed here, with which the tests ran.
    """
    version = importlib.metadata.version("pyfuse3")
    run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "pyfuse3", "--dest", out,
        f"pyfuse3=={version}",
    )  # fmt: skip
    source = only(out, "pyfuse3-*.tar.gz")
    minors: set[str] = set()
    for python in pythons:
        minor = run(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])").strip()
        if minor not in minors:
            minors.add(minor)
            run(sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--python", python, "--out-dir", out, source)
    (out / ".gitignore").unlink(missing_ok=True)  # uv's
