"""What system calls do: reading and writing through handles, changes of names, attributes, extended attributes."""
