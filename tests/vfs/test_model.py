"""Random operations on the filesystem layer and on a plain directory find them equal.

See `model.searched` for longer runs; by default it is a minute's worth.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.upload.drafting import noise
from tests.vfs.lakes import RENAME_EXCHANGE, RENAME_NOREPLACE
from tests.vfs.model import DIRECTORIES, FILES, PATHS, Model, Operation, searched

MODES = (0o600, 0o644, 0o755) if os.geteuid() == 0 else (0o700, 0o744, 0o755)
"""The plain directory refuses to go into a directory that its owner may not search, unless root asks."""
SCRATCH = os.environ.get("LAKEFS_MODEL_SCRATCH")
KIB = 1024
NS = 1_000_000_000

files = st.sampled_from(("a", "a", "a", "d/x", "d/x", *FILES))
directories, paths = st.sampled_from(DIRECTORIES), st.sampled_from(PATHS)
which = st.integers(0, 3)
sizes = st.one_of(
    st.integers(0, 300 * KIB),
    st.sampled_from((0, 1, 4095, 4096, 4097, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 640 * KIB, 3400 * KIB, 4000 * KIB)),
)
seeds = st.integers(0, 99)
contents = st.builds(noise, seeds, st.sampled_from((1, 5, 100, 4096, 10_000, 64 * KIB, 100 * KIB, 200 * KIB)))
saved_sizes = st.sampled_from((0, 10, 64 * KIB, 64 * KIB + 1, 300_000, 700_000, 3300 * KIB, 4100 * KIB))
patches = st.lists(st.tuples(sizes, contents), min_size=1, max_size=4)


def operation(what: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Operation]:
    return st.tuples(*arguments).map(lambda drawn: Operation(what, drawn))


renamings = st.sampled_from((0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE))
openings = st.sampled_from(
    (
        (os.O_RDWR, True),
        (os.O_RDWR, True),
        (os.O_RDWR | os.O_TRUNC, True),
        (os.O_WRONLY | os.O_EXCL, True),
        (os.O_RDWR, False),
        (os.O_WRONLY | os.O_TRUNC, False),
        (os.O_RDONLY, False),
    )
)
opens = st.tuples(files, openings).map(lambda drawn: Operation("open", (drawn[0], *drawn[1])))
writes = operation("write", which, sizes, contents)
saves = operation("save", files, seeds, saved_sizes, st.sampled_from((10_000, 64 * KIB, 128 * KIB, 1 << 20)))
patched = operation("patch", files, patches, st.booleans())
operations = st.one_of(
    opens,
    opens,
    saves,
    saves,
    patched,
    patched,
    patched,
    writes,
    writes,
    writes,
    writes,
    operation("read", which, sizes, st.sampled_from((1, 4096, 70_000, 300 * KIB))),
    operation("truncate_handle", which, sizes),
    operation("truncate", files, sizes),
    operation("flush", which),
    operation("fsync", which),
    operation("close", which),
    operation("close", which),
    operation("unlink", files),
    operation("mkdir", directories, st.sampled_from((0o755, 0o700))),
    operation("mkdir", directories, st.sampled_from((0o755, 0o700))),
    operation("rmdir", directories),
    operation("read_directory", st.sampled_from(("", "d", "d/e")), st.integers(1, 3), st.booleans()),
    operation("stat", paths),
    operation("chmod", paths, st.sampled_from(MODES)),
    operation("utime", files, st.sampled_from((0, 1_600_000_000 * NS + 123_456_789, 1_700_000_000 * NS + 1))),
    operation("rename", paths, paths, renamings),
    operation("rename", paths, paths, renamings),
    operation("rename", paths, paths, renamings),
    operation("rename", files, files, renamings),
    operation("symlink", files, st.sampled_from(("nowhere", "../no/where"))),
    operation("set_xattr", paths, st.sampled_from(("user.a", "user.b")), st.sampled_from((b"", b"one", b"two", None))),
    operation("expire"),
    operation("sync_names"),
    operation("settle"),
    operation("second_mount_sees"),
    operation("remount", st.booleans()),
)

# Directories are there more often than not.
preludes = st.sampled_from(
    (
        [],
        [Operation("mkdir", ("d", 0o755))],
        [Operation("mkdir", ("d", 0o755)), Operation("mkdir", ("d/e", 0o755))],
        [Operation("save", ("a", 1, 3300 * KIB, 128 * KIB)), Operation("mkdir", ("d", 0o755))],
        [Operation("save", ("a", 1, 700_000, 10_000)), Operation("remount", (True,))],
    )
)


@pytest.mark.usefixtures("small_parts_may_be_copied")
@searched(80)
@given(preludes, st.lists(operations, min_size=15, max_size=60), st.booleans(), st.sampled_from(("auto", "always")))
def test_a_lake_is_a_directory(prelude: list[Operation], sequence: list[Operation], in_memory: bool, pack: str) -> None:
    os.umask(0o022)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as root:
        trio.run(Model(Path(root), in_memory=in_memory, pack=pack).run, [*prelude, *sequence])
