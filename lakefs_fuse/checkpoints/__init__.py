"""What a checkpoint is, when it is complete, and in which order checkpoints came: rules only, no files are touched."""
