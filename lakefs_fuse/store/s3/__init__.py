"""The S3 store: one bucket, or a prefix of one, of any S3-compatible server."""
