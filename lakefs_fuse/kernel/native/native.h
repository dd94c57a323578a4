/*
 * Declares what the parts of the library share. hooks.py declares the functions that Python calls; structures that both
 * use are repeated there, in create_offload.py and in readdir.py.
 *
 * The library is loaded with RTLD_GLOBAL before pyfuse3. It therefore receives pyfuse3's calls of fuse_session_new
 * (fuse_session_new_versioned since libfuse 3.17), fuse_reply_attr, fuse_reply_entry, fuse_reply_open,
 * fuse_session_receive_buf and fuse_add_direntry_plus, and passes them on to libfuse. It calls all functions of libfuse
 * through `libfuse` (libfuse.h).
 *
 * Invariant "one thread": libfuse calls the handlers from the one thread that reads /dev/fuse, and the Python
 * coroutine of a request begins to run before the next request is read. The library therefore needs no locks.
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

/* Bits of file handles, as in handle_bits.py. HANDLE_READING, which Python sets too: the file was opened for reading.
 * The two others: this library issued the handle, and its low bits are the inode. */
#define HANDLE_READING (1ULL << 62)
#define HANDLE_LEASED (1ULL << 61)
#define HANDLE_CREATED (1ULL << 60)

/* st_blksize of files, as FILE_BLKSIZE of reply.py. */
#define FILE_BLOCK_BYTES (128U << 10)

/* Requests for a longer name are passed to Python. */
#define NAME_BYTES_MAX 200

static inline struct timespec timespec_of(int64_t ns)
{
	int before = ns % NS < 0;

	return (struct timespec){ns / NS - before, ns % NS + before * NS};
}

/* A hash table of a fixed size keeps an inode in one of PROBES consecutive slots, from that of its hash on. `slots` is
 * 2^24 at most. */
#define PROBES 8
static inline uint32_t slot_index(uint64_t inode, unsigned probe, uint32_t slots)
{
	return ((uint32_t)(inode * 0x9E3779B97F4A7C15ULL >> 40) + probe) % slots;
}

/* The parts follow from the lowest to the highest: each uses those before it, none those after it. */

/* -- request.c */

/* When the last request was read. More than one check finds out whether that request needs Python; all of them use this
 * time, so that they agree. */
struct request_time {
	int64_t monotonic_ns;
	int64_t realtime_ns; /* since 1970 */
};
extern struct request_time lakefs_request_time;
void lakefs_note_request_time(void);
/* The kernel's number of the request that is handled, never used twice; 0: not known. */
extern uint64_t lakefs_request_unique;

int64_t lakefs_monotonic_ns(void);

/* Requests are being handled without the GIL; closed files are handed over to Python afterwards. */
extern int lakefs_without_python;

/* Count, by opcode, a request that this library handles without entering Python. */
void lakefs_count(uint32_t opcode);

/* -- attribute_cache.c */

int lakefs_has_attributes(uint64_t inode);
/* Reply to GETATTR. Requires `lakefs_has_attributes`. */
void lakefs_reply_attributes(fuse_req_t request, uint64_t inode);
/* Cache attributes of a directory. With `for_ns` they are valid for this time. With 0 they replace those that are
 * cached, if there are any, and expire when those would have. */
void lakefs_keep_attributes(const struct stat *attributes, int64_t for_ns);
/* Set the times of a directory's cached attributes, because a name was created in it. */
void lakefs_touch_attributes(uint64_t inode, int64_t now_ns);
void lakefs_drop_attributes(uint64_t inode);
/* Return whether the directory of this name is known, with its attributes. */
int lakefs_knows_directory(uint64_t parent, const char *name);
/* Reply to LOOKUP. Requires `lakefs_knows_directory`. */
void lakefs_reply_directory(fuse_req_t request, uint64_t parent, const char *name);

/* -- leases.c */

struct known_attributes {
	uint64_t round; /* 0: none are known */
	uint64_t size;
	int64_t mtime_ns, ctime_ns;
	uint32_t mode, uid, gid;
};

struct open_lease {
	uint64_t inode;
	int64_t until_ns;
	uint64_t handles; /* issued and not released */
	struct known_attributes known;
};

/* Return the lease on opening this file, or NULL. The lease may have expired. */
struct open_lease *lakefs_open_lease(uint64_t inode);

/* Return the lease on opening this file if it has not expired and the file's attributes are known; else NULL. */
struct open_lease *lakefs_known_attributes(uint64_t inode);
void lakefs_reply_known(fuse_req_t request, const struct open_lease *lease);
void lakefs_forget_attributes(uint64_t inode);

/* From now on `lakefs_forget_before` is called with each request before Python gets it. Without that no attributes of
 * files are kept. */
void lakefs_watch_changes(void);
/* Forget the attributes that the request may change. NULL is a request about data. */
void lakefs_forget_before(const struct fuse_in_header *head);

struct name_lease {
	uint64_t directory;
	uint64_t seed; /* of its names' hashes */
	int64_t until_ns;
	int64_t timeout_ns; /* how long the kernel may cache a created file's name and attributes */
	uint32_t name_bytes_max;
	int takes_exclusive; /* O_EXCL never asks the store, so this library may handle it */
};

/* Return the lease on the names of this directory, or NULL. The lease may have expired. */
struct name_lease *lakefs_name_lease(uint64_t directory);

/* Return the lease if it has not expired and the directory certainly lacks the name; else NULL. */
struct name_lease *lakefs_name_lease_lacking(uint64_t directory, const char *name);

void lakefs_add_name(const struct name_lease *lease, const char *name, size_t bytes);

/* Return whether the table of names is full. */
int lakefs_is_name_table_full(void);

/* -- shown_numbers.c */

/* Call libfuse's fuse_add_direntry_plus with the inode number that the file shows. */
size_t lakefs_add_direntry(fuse_req_t request, char *buffer, size_t room, const char *name,
			   const struct fuse_entry_param *entry, off_t off);

/* -- create_offload.c */

void lakefs_wrap_offloaded(struct fuse_lowlevel_ops *operations);

/* Return whether create_offload.c can now handle a request, with a body of `bytes`, without entering Python. */
int lakefs_offload_answers(const struct fuse_in_header *head, const void *body, size_t bytes);

/* Hand over to Python all files that a request may depend on, before Python gets it. NULL, for a request that is not in
 * memory, hands over all files. */
void lakefs_hand_over_before(const struct fuse_in_header *head);

/* Hand over to Python the files that are due; a file that was closed is. */
void lakefs_hand_over_closed(void);

/* Return whether files are being received, or wait to be handed over to Python. */
int lakefs_is_receiving(void);

/* -- privileges.c */

/* Record the flag of a request from the kernel. */
void lakefs_parse_killpriv(const struct fuse_in_header *head);

/* Say whether requests carry the flag from now on: whether FUSE_HANDLE_KILLPRIV_V2 was accepted. */
void lakefs_set_killpriv(int is_accepted);

/* -- init_flags.c */

/* Make libfuse read requests and write replies through init_flags.c from now on. Does nothing before libfuse 3.13. */
void lakefs_watch_session(struct fuse_session *session, int fd);

/* Request a feature (FUSE_* of INIT) if INIT offers it; return whether it does. For the handler of INIT. */
int lakefs_accept_init_flag(uint32_t flag);

/* -- dispatch.c */

/* The session that was made last; NULL before. */
extern struct fuse_session *lakefs_session;

/* Return whether dispatch.c can now handle a request without entering Python. */
int lakefs_dispatch_answers(const struct fuse_in_header *head, const void *body);

#endif
