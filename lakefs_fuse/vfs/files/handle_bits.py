"""Bits of the numbers of file handles, as in native.h: whether Python or the C library issued one, and for what.

A number without LEASED and without CREATED is one that `Handles` counted up, perhaps with READING. The others are the
inode with these bits. What always holds (*one table*): a test compares the bits with native.h.
"""

READING = 1 << 62
"""The file was opened for reading: closing the handle publishes nothing."""
LEASED = 1 << 61
"""The C library opened the file under a lease. The handle has READING, too."""
CREATED = 1 << 60
"""The C library created the file."""


def inode_of(handle: int) -> int:
    """Return the inode of a handle that was opened under a lease; 0 for other handles."""
    return handle & ~(READING | LEASED) if handle & LEASED else 0
