"""What the system calls that change names do: create, remove, rename, set attributes."""
