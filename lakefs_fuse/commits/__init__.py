"""Commits: what changed, in immutable ZIP objects that are packs at the same time; and the merged view they make."""
