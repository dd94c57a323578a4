"""The kernel's side: the pyfuse3 adapter, the session, and the C libraries that do what pyfuse3 does not.

Whatever of this package is imported first, the libraries are there before pyfuse3, whose calls they are to receive.
"""

from lakefs_fuse.kernel.native import direntries, hooks

__all__ = ["direntries", "hooks"]
