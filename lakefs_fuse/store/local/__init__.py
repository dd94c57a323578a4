"""The `file:///dir` store: objects are plain files under a directory."""
