"""Files in use: open handles, leases, and what they are pinned to."""
