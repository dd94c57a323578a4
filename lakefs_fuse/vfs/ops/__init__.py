"""The operations behind system calls: reading and writing through handles, names, attributes, extended attributes."""
