"""Names: directory listings merged into the metadata cache, keys mapped to paths, attributes."""
