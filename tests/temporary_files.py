"""Where tests keep their temporary files: in memory, if this machine has enough of it.

The program, its database and the stores sync files all the time, and on a disk a fifth of the time of the tests is
waiting for that. No test depends on what a sync does: a killed process loses nothing without it, and what a power cut
loses is simulated. `make test-long` uses the disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from tests.tiers import IS_LONG

MEMORY = Path("/dev/shm")
GIB = 1 << 30
FREE_MIN = 8 * GIB
"""Of the filesystem in memory. Directories of tests that passed are deleted, so that a run takes a quarter of it."""
AVAILABLE_MIN = 14 * GIB
"""Of memory, for these files and for all workers."""
DISK = tempfile.gettempdir()
"""Where Python itself has temporary files."""
PYTEST_DIRECTORY = "PYTEST_DEBUG_TEMPROOT"
"""Where pytest has them."""
CHOICES = (PYTEST_DIRECTORY, "TMPDIR", "TEMP", "TMP")
"""Who sets one of these has chosen a directory."""


def available_bytes() -> int:
    """Memory that programs can get without swapping."""
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next((int(row[1]) << 10 for row in rows if row[0] == "MemAvailable:"), 0)


def is_suitable(directory: Path) -> bool:
    """Programs can be started there, and there is room."""
    if not os.access(directory, os.W_OK):
        return False
    may_start_programs = not os.statvfs(directory).f_flag & os.ST_NOEXEC
    has_room = shutil.disk_usage(directory).free >= FREE_MIN and available_bytes() >= AVAILABLE_MIN
    return may_start_programs and has_room


def use_memory(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let pytest and `tempfile` make temporary directories in memory, unless somebody chose where, or this is
    `make test-long`. Workers of a run inherit its choice."""
    if not IS_LONG and not any(name in environment for name in CHOICES) and is_suitable(MEMORY):
        environment[PYTEST_DIRECTORY] = str(MEMORY)
    if environment.get(PYTEST_DIRECTORY) == str(MEMORY):
        tempfile.tempdir = str(MEMORY)


@contextmanager
def directory_on_disk() -> Iterator[Path]:
    """For tests that find out whether a read has to wait for the disk, which a filesystem in memory does not tell."""
    with tempfile.TemporaryDirectory(prefix="lakefs-test-", dir=DISK) as directory:
        yield Path(directory)
