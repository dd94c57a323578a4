"""Names by which others know this product: program, filesystem type, keys in the store, attributes, environment.

*One name, one place*: no other module spells one of them out (`tests/test_layers.py`), except in sentences for users
and in the symbols of the C library. Keys, attributes and metadata are stored: changing one breaks existing lakes.
"""

from __future__ import annotations

PROGRAM = "lakefs-fuse"
"""The command, the distribution, and its directories for caches, logs and sockets."""
FILESYSTEM = "lakefs"
FUSE_TYPE = f"fuse.{FILESYSTEM}"
"""Type of its mounts in mountinfo."""

RESERVED_NAME = ".lakefs"
"""First component of every key of this program's own objects; hidden from listings, refused in paths."""
RESERVED_PREFIX = f"{RESERVED_NAME}/"
PLACEHOLDER = ".lakefs-directory"
"""Object that keeps an empty directory, on stores without objects whose keys end in a slash."""
METADATA_PREFIX = "lakefs-"
"""Of metadata that this program adds to objects."""

RESERVED_XATTR = "user.lakefs."
"""Extended attributes that users may read and not set."""
XATTR_STATE, XATTR_LOCATION = f"{RESERVED_XATTR}state", f"{RESERVED_XATTR}location"
XATTR_VERSION = f"{RESERVED_XATTR}version"

ENVIRONMENT_PREFIX = "LAKEFS_"
NODE_NAME_VARIABLE = f"{ENVIRONMENT_PREFIX}NODE_NAME"
"""Name of this machine as its scheduler knows it, where that is not the host name."""
