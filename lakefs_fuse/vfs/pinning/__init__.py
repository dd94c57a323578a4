"""The newest checkpoints, pinned in the block cache."""
