"""Finds out which libfuse is installed here and which fast paths work with it; prints both as JSON.

`python -m lakefs_fuse.kernel.installation` is a separate process, because it loads libfuse and the C library and makes
a session, as a mount does, on a mount point that cannot exist. It mounts nothing and needs no /dev/fuse.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pyfuse3

from lakefs_fuse.kernel import hooks, request_loop

NO_MOUNTPOINT = "/dev/null/none"
"""libfuse makes the session and then finds that it cannot be mounted there."""


def libfuse_file(maps: Iterable[str]) -> str:
    """Return the name of the libfuse that a process has loaded, from the lines of its /proc/PID/maps; empty if none."""
    for line in maps:
        found = re.search(r"/(libfuse3[^/\s]*)$", line)
        if found is not None:
            return found[1]
    return ""


def fast_paths() -> dict[str, str]:
    """Return why each fast path does not work; empty for one that works."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stderr.fileno())  # libfuse complains about the mount point
    try:
        pyfuse3.init(pyfuse3.Operations(), NO_MOUNTPOINT, set(pyfuse3.default_options))
    except RuntimeError:
        pass
    if hooks.library() is None:
        why = f"the hooks library is {hooks.why_absent()}"
    elif not hooks.active():
        why = f"pyfuse3 {pyfuse3.__version__} makes its session in another way"
    else:
        why = ""
    loop = "" if request_loop.is_possible() else f"pyfuse3 {pyfuse3.__version__} waits for requests in another way"
    suid = "" if hooks.has_custom_io() else "libfuse is older than 3.13"
    return {"requests": why, "request loop": why or loop, "directory entries": why, "suid and sgid": why or suid}


def main() -> None:
    """Print the JSON object: libfuse, file, pyfuse3, fast_paths."""
    paths = fast_paths()
    file = libfuse_file(Path("/proc/self/maps").read_text().splitlines())
    found = {
        "libfuse": hooks.libfuse_version(),
        "file": file,
        "pyfuse3": pyfuse3.__version__,
        "fast_paths": paths,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
