"""Bytes of files on this node: the block cache and the reader over it, staging and the uploader."""
