"""The FUSE side: the pyfuse3 adapter, the session, and the C library with features that pyfuse3 lacks. Every module of
this package loads the library before pyfuse3, whose calls it receives.
"""

from lakefs_fuse.kernel.native import hooks

__all__ = ["hooks"]
