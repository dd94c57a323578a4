"""Plain objects that follow their names: copies to the keys of renamed files."""
