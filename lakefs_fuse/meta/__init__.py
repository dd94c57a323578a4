"""The metadata cache of one node, in RocksDB: names, inodes, listings, and the journal of what is not yet durable."""
