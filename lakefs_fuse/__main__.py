"""`python -m lakefs_fuse`: the command line, where the `lakefs-fuse` program is not on the path."""

from lakefs_fuse.cli import main

if __name__ == "__main__":
    main()
