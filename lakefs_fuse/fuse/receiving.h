/* What receiving.c and hooks.c know of each other. */
#ifndef LAKEFS_RECEIVING_H
#define LAKEFS_RECEIVING_H

struct fuse_session;

/* Extended attributes of these names are answered by hooks.c, whatever the file. */
int lakefs_hooks_never_has(const char *name);

/* The session whose requests are read, as libfuse has just made it. */
void lakefs_receiving_session(struct fuse_session *made, void *libfuse);

#endif
