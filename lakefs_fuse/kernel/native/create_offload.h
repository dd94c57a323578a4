/* New small files, received whole before Python hears of them: see creating.c. */
#ifndef LAKEFS_CREATING_H
#define LAKEFS_CREATING_H

#include <fuse_lowlevel.h>
#include <linux/fuse.h>

#include <stdint.h>

/* The session's handlers are wrapped, and libfuse's functions for answers found. */
void lakefs_creating_wrap(struct fuse_lowlevel_ops *operations, void *libfuse);

/* The request, whose body is so long, can be answered without Python. */
int lakefs_creating_answers(const struct fuse_in_header *head, const void *body, size_t bytes);

/* The request is one for Python, which is told before of what it might see; NULL where nobody knows what it is. */
void lakefs_creating_before(const struct fuse_in_header *head);

/* When the newest name was made in a directory that Python does not know of; INT64_MIN where it knows all. */
int64_t lakefs_creating_newest(uint64_t parent);

/* There are files that Python does not know of. */
int lakefs_creating_some(void);

/* Python is told of the files that were closed, if any were. */
void lakefs_creating_after(void);

#endif
