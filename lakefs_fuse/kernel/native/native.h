/*
 * What the parts of the library share. Python's declarations of what it calls are in hooks.py and create_offload.py.
 *
 * pyfuse3's calls of fuse_session_new (fuse_session_new_versioned since libfuse 3.17), fuse_reply_attr,
 * fuse_reply_entry, fuse_reply_open, fuse_session_receive_buf and fuse_add_direntry_plus arrive in this library, which
 * is loaded with RTLD_GLOBAL before pyfuse3, and go on to libfuse. All functions of libfuse are called through `libfuse` (libfuse.h).
 *
 * Invariant "one thread": libfuse calls the handlers from the one thread that reads /dev/fuse, and the Python
 * coroutine of a request begins to run before the next request is read. Nothing here is locked.
 */
#ifndef LAKEFS_NATIVE_H
#define LAKEFS_NATIVE_H

#include "libfuse.h"

#include <linux/fuse.h>

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define NS 1000000000LL

/* Handles: files that were opened for reading have the first bit, as open_file.py gives them out. Handles that are
 * given out here have one of the others as well, and the inode as the rest. */
#define HANDLE_READING (1ULL << 62)
#define HANDLE_LEASED (1ULL << 61)
#define HANDLE_CREATED (1ULL << 60)

/* A longer name is left to Python. */
#define NAME_BYTES_MAX 200

static inline struct timespec timespec_of(int64_t ns)
{
	int before = ns % NS < 0;

	return (struct timespec){ns / NS - before, ns % NS + before * NS};
}

/* -- dispatch.c */

/* A request that is answered here is counted by its opcode, for the statistics. */
void lakefs_count(uint32_t opcode);

/* A request that dispatch.c answers without Python, as things are. */
int lakefs_dispatch_answers(const struct fuse_in_header *head, const void *body);

/* -- request_loop.c */

/* When the request in hand was read: whether it can be answered without Python is asked twice, and has to be the
 * same. */
struct request_time {
	int64_t monotonic_ns;
	int64_t realtime_ns; /* since 1970 */
};
extern struct request_time lakefs_request_time;

int64_t lakefs_monotonic_ns(void);

/* Requests of this session are to be read by request_loop.c. */
void lakefs_set_session(struct fuse_session *session);

/* Requests are being answered without the GIL; files are handed over to Python when that is over. */
int lakefs_is_without_python(void);

/* -- leases.c */

struct open_lease {
	uint64_t inode;
	int64_t until_ns;
	uint64_t handles; /* given out and not released */
};

/* The lease of opening this file; else NULL. It may have expired. */
struct open_lease *lakefs_open_lease(uint64_t inode);

struct name_lease {
	uint64_t directory;
	uint64_t seed; /* of its names' hashes */
	int64_t until_ns;
	int64_t timeout_ns; /* how long the kernel may cache what is answered */
	uint32_t name_bytes_max;
	int takes_exclusive; /* O_EXCL relies on what Python knows of the names */
};

/* The lease of this directory's names; else NULL. It may have expired. */
struct name_lease *lakefs_name_lease(uint64_t directory);

/* The same, where the directory certainly lacks the name; else NULL. */
struct name_lease *lakefs_name_lease_lacking(uint64_t directory, const char *name);

void lakefs_add_name(const struct name_lease *lease, const char *name, size_t bytes);

/* No more names can be kept. */
int lakefs_is_name_table_full(void);

/* Tables of a fixed size: an inode is in one of the PROBES slots that begin with that of its hash. `slots` is 2^24 at
 * most. */
#define PROBES 8
static inline uint32_t slot_index(uint64_t inode, unsigned probe, uint32_t slots)
{
	return ((uint32_t)(inode * 0x9E3779B97F4A7C15ULL >> 40) + probe) % slots;
}

/* -- attribute_cache.c */

int lakefs_has_attributes(uint64_t inode);
/* Only of an inode of which there are attributes. */
void lakefs_reply_attributes(fuse_req_t request, uint64_t inode);
/* A name was created in this directory at that time. */
void lakefs_touch_attributes(uint64_t inode, int64_t now_ns);
void lakefs_drop_attributes(uint64_t inode);

/* -- shown_numbers.c */

/* libfuse's fuse_add_direntry_plus, with the inode number that is shown. */
size_t lakefs_add_direntry(fuse_req_t request, char *buffer, size_t room, const char *name,
			   const struct fuse_entry_param *entry, off_t off);

/* -- create_offload.c */

void lakefs_wrap_offloaded(struct fuse_lowlevel_ops *operations);

/* A request, whose body is so long, that create_offload.c answers without Python, as things are. */
int lakefs_offload_answers(const struct fuse_in_header *head, const void *body, size_t bytes);

/* A request goes to Python, which gets before it all files that the request might be about; all where it is not in
 * memory (NULL). */
void lakefs_hand_over_before(const struct fuse_in_header *head);

/* Python gets the files that were closed, if any were. */
void lakefs_hand_over_closed(void);

/* When the newest file was created in a directory that Python does not know of; INT64_MIN where it knows all. */
int64_t lakefs_newest_created_ns(uint64_t directory);

/* There are files that Python does not know of. */
int lakefs_is_receiving(void);

/* -- privileges.c */

/* From here on requests are read and answers written by way of privileges.c. */
void lakefs_watch_privileges(struct fuse_session *session, int fd);

/* While INIT is answered: accepts the duty where the kernel offers it, and answers whether it does. */
int lakefs_accept_killpriv(void);

#endif
