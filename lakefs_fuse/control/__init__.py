"""The control socket: how `lakefs-fuse stats`, `umount`, `flush`, `wait` and `orphans` talk to the daemon of a mount.

Nothing here knows the filesystem: the server is given a view of it (`server.FilesystemView`). The client blocks, for
the command line; the server is a trio task of the daemon.
"""
