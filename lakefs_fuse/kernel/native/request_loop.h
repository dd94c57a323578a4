/* What receiving.c and hooks.c know of each other. */
#ifndef LAKEFS_RECEIVING_H
#define LAKEFS_RECEIVING_H

#include <stdint.h>

struct fuse_session;

/* Whether hooks.c answers such a request itself, as things are. */
int lakefs_hooks_answers_getxattr(const char *name);
int lakefs_hooks_answers_open(uint64_t inode, uint32_t flags);
int lakefs_hooks_answers_flush(uint64_t handle);
int lakefs_hooks_answers_release(uint64_t inode, uint64_t handle);

/* The session whose requests are read, as libfuse has just made it. */
void lakefs_receiving_session(struct fuse_session *made, void *libfuse);

/* On the clock that goes on whatever anybody sets. */
int64_t lakefs_now_ns(void);

/* When the request that is being looked at was read, on that clock and since 1970: whether it can be answered without
 * Python is asked twice, and has to be the same. */
int64_t lakefs_request_ns(void);
int64_t lakefs_request_realtime_ns(void);

/* Requests are being answered without the GIL: who has something for Python says so when that is over. */
int lakefs_receiving_without_python(void);

#endif
