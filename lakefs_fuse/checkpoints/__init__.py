"""Rules for checkpoints: what counts as one, when it is complete, and their order. No file is accessed."""
