"""The kernel's side: the pyfuse3 adapter, the session, and the C library that does what pyfuse3 does not.

Whatever of this package is imported first, the library is loaded before pyfuse3, whose calls it receives.
"""

from lakefs_fuse.kernel.native import hooks

__all__ = ["hooks"]
