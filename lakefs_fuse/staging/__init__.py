"""Bytes of files that are not in the store yet, on the local disk."""
