"""Drafts: files being written, uploaded in parts, published as objects."""
