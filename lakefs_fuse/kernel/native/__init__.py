"""C libraries that answer FUSE requests without Python, and their loaders."""
