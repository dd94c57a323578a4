"""The C library that replies to FUSE requests without entering Python, and its loader."""
