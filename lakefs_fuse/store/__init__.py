"""Object stores: the protocol, S3, the local directory, and the client that retries, counts and keeps off the loop."""
