"""Immutable mounts: one database for each state of the lake."""
