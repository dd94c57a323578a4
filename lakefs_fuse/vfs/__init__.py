"""The filesystem: names over listings, files over versions and drafts, what each POSIX call means. Knows no FUSE."""

from lakefs_fuse.metrics import Unfinished
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.open import assembled

__all__ = ["Filesystem", "Unfinished", "assembled"]
