"""Which libfuse a process has loaded."""

from __future__ import annotations

import pytest

from lakefs_fuse.kernel.installation import libfuse_file

LIBRARIES = "/usr/lib/x86_64-linux-gnu"


@pytest.mark.parametrize("name", ["libfuse3.so.3.14.0", "libfuse3.so.4", "libfuse3-1a2b3c.so.3.17.2"])
def test_libfuse_file_is_found_among_other_libraries(name: str) -> None:
    maps = [
        f"7f00-7f01 r--p 00000000 fd:00 11 {LIBRARIES}/libc.so.6",
        f"7f02-7f03 r-xp 00000000 fd:00 12 {LIBRARIES}/{name}",
        "7f04-7f05 rw-p 00000000 00:00 0 ",
    ]
    assert libfuse_file(maps) == name
    assert libfuse_file(maps[:1]) == ""
