"""The index that fresh mounts begin with, and named snapshots."""
