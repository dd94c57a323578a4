"""A data lake (a bucket of an S3-compatible object store) mounted as a POSIX tree, for training jobs."""

__version__ = "0.1.0"
