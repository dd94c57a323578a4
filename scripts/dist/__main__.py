"""Builds the packages that `pip` and `apt` install, into one directory; publishes nothing.

    python -m scripts.dist wheels [--out dist]      source distribution, wheels, and what pyfuse3 takes
    python -m scripts.dist deb [--out dist]         the same, and a Debian package for the release that this machine runs

What is built is the working tree as it is; the version comes from the repository's tags.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from scripts.dist.deb import SYSTEM_PYTHON, build_deb
from scripts.dist.wheels import build_pyfuse3, build_sdist, build_wheels, clear


def main() -> None:
    """Build what the command line says; an error of a tool that is run is shown, and ends this."""
    parser = argparse.ArgumentParser(prog="python -m scripts.dist", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["wheels", "deb"])
    parser.add_argument("--out", type=Path, default=Path("dist"), help="directory for the packages (default: dist)")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    clear(out)
    try:
        wheels = build_wheels(build_sdist(out), out)
        pythons = [sys.executable, *([SYSTEM_PYTHON] if given.what == "deb" else [])]
        build_pyfuse3(out, pythons)
        if given.what == "deb":
            build_deb(wheels, out)
    except subprocess.CalledProcessError as error:
        sys.exit(f"dist: `{' '.join(map(str, error.cmd))}` failed with {error.returncode}")
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path}")


if __name__ == "__main__":
    main()
