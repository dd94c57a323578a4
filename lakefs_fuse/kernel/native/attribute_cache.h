/* What remembered.c answers, and for whom. */
#ifndef LAKEFS_REMEMBERED_H
#define LAKEFS_REMEMBERED_H

#include <fuse_lowlevel.h>
#include <stdint.h>

/* How libfuse replies to GETATTR; NULL where it has no such function. */
void lakefs_remembered_replies(int (*reply)(fuse_req_t, const struct stat *, double));

/* Whether GETATTR of this inode is answered here, as things are; only then call the second. */
int lakefs_remembered_answers(uint64_t inode);
void lakefs_remembered_answer(fuse_req_t request, uint64_t inode);

/* A name was made in this directory at that time. */
void lakefs_remembered_touch(uint64_t inode, int64_t now_ns);

/* Nothing is known of this inode here any more. */
void lakefs_remembered_take(uint64_t inode);

#endif
