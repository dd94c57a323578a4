"""A data lake (a bucket of an S3-compatible object store) mounted as a POSIX tree, for training jobs."""

try:
    from lakefs_fuse import _version
except ImportError:  # a checkout that was never installed
    __version__ = "0+unknown"
else:
    __version__ = _version.__version__
