"""Reading object versions: blocks in memory, on the cache disk, and from the store in few GETs."""
