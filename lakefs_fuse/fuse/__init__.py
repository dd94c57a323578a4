"""The kernel's side: the pyfuse3 adapter, the session, and the C hooks that tell what pyfuse3 does not."""
