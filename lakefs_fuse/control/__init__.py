"""The control socket: how `lakefs-fuse stats`, `umount`, `flush` and `orphans` talk to the daemon of a mount.

Nothing here knows the filesystem: the server is given a view of it (`server.FilesystemView`). The client half blocks
and is what the command line uses; the server half is trio and lives in the daemon.
"""
