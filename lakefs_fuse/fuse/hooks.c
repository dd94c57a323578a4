/*
 * Kernel hooks: what pyfuse3 does not pass on.
 *
 * Loaded with RTLD_GLOBAL before pyfuse3, so that pyfuse3's call of fuse_session_new arrives here. The operation table
 * is copied, INIT, FLUSH, GETXATTR and FORGET are wrapped, and libfuse's own function does the rest. Without this library
 * the mount works as well, but cannot tell which process closes a file, and answers more requests in Python.
 *
 * Single-threaded by construction: libfuse calls the handlers from the one thread that reads /dev/fuse, and the Python
 * coroutine of a request begins to run before the next request is read.
 */
#define fuse_session_new fuse_session_new_as_declared
#include <fuse_lowlevel.h>
#undef fuse_session_new

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "receiving.h"

static struct fuse_lowlevel_ops operations;
static const struct fuse_ctx *(*context_of)(fuse_req_t);
static void (*next_flush)(fuse_req_t, fuse_ino_t, struct fuse_file_info *);
static int session_hooked;
static int64_t flush_pid;
static int (*reply_error)(fuse_req_t, int);
static void (*next_getxattr)(fuse_req_t, fuse_ino_t, const char *, size_t);
static int64_t xattrs_answered;
static void (*reply_none)(fuse_req_t);
static int64_t forgets_taken;
static void (*next_init)(void *, struct fuse_conn_info *);

/*
 * With ATOMIC_O_TRUNC the kernel forgets the attributes of every file it opens with O_TRUNC, those it has just created
 * included, and asks for them again. Without it only a file that was there before is truncated by a request of its own.
 */
static void init(void *userdata, struct fuse_conn_info *connection)
{
	next_init(userdata, connection);
	connection->want &= ~FUSE_CAP_ATOMIC_O_TRUNC;
}

static void flush(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	flush_pid = context_of(request)->pid;
	next_flush(request, inode, info);
}

/*
 * The kernel asks for security.capability before the first write to every file, and ls(1) for access lists. There are
 * none here, ever, and saying so takes no Python.
 */
static int xattr_error(const char *name)
{
	return strncmp(name, "security.", 9) == 0 ? ENODATA : strncmp(name, "system.", 7) == 0 ? EOPNOTSUPP : 0;
}

int lakefs_hooks_never_has(const char *name)
{
	return next_getxattr && xattr_error(name);
}

static void getxattr(fuse_req_t request, fuse_ino_t inode, const char *name, size_t size)
{
	if (xattr_error(name)) {
		xattrs_answered++;
		reply_error(request, xattr_error(name));
	} else {
		next_getxattr(request, inode, name, size);
	}
}

/* Inodes are numbers here, which nobody counts: what the kernel forgets needs no answer. */
static void forget(fuse_req_t request, fuse_ino_t inode, uint64_t lookups)
{
	(void)inode;
	(void)lookups;
	forgets_taken++;
	reply_none(request);
}

static void forget_multi(fuse_req_t request, size_t count, struct fuse_forget_data *forgets)
{
	(void)count;
	(void)forgets;
	forgets_taken++;
	reply_none(request);
}

struct fuse_session *fuse_session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *table, size_t size,
				      void *userdata);

struct fuse_session *fuse_session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *table, size_t size,
				      void *userdata)
{
	void *libfuse = dlopen("libfuse3.so.3", RTLD_NOW | RTLD_LOCAL);
	struct fuse_session *(*next)(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t, void *) = NULL;
	struct fuse_session *made;

	if (libfuse) {
		*(void **)&next = dlsym(libfuse, "fuse_session_new");
		*(void **)&context_of = dlsym(libfuse, "fuse_req_ctx");
		*(void **)&reply_error = dlsym(libfuse, "fuse_reply_err");
		*(void **)&reply_none = dlsym(libfuse, "fuse_reply_none");
	}
	if (!next)
		return NULL;
	memset(&operations, 0, sizeof(operations));
	memcpy(&operations, table, size < sizeof(operations) ? size : sizeof(operations));
	if (operations.flush && context_of) {
		next_flush = operations.flush;
		operations.flush = flush;
		session_hooked = 1;
	}
	if (operations.init) {
		next_init = operations.init;
		operations.init = init;
	}
	if (operations.getxattr && reply_error) {
		next_getxattr = operations.getxattr;
		operations.getxattr = getxattr;
	}
	if (reply_none) {
		operations.forget = forget;
		operations.forget_multi = forget_multi;
	}
	made = next(args, &operations, size < sizeof(operations) ? size : sizeof(operations), userdata);
	lakefs_receiving_session(made, libfuse);
	return made;
}

/* Whether the hooks are in the way of this process's session. */
int lakefs_hooks_active(void)
{
	return session_hooked;
}

/* Requests for extended attributes that were answered here. */
int64_t lakefs_hooks_xattrs_answered(void)
{
	return xattrs_answered;
}

/* FORGET requests, of one inode or of many, that were taken here. */
int64_t lakefs_hooks_forgets_taken(void)
{
	return forgets_taken;
}

/* The thread that sent the FLUSH whose handler runs now; 0 where it is in another pid namespace. */
int64_t lakefs_hooks_flush_pid(void)
{
	return flush_pid;
}
