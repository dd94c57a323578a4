/*
 * Kernel hooks: what pyfuse3 does not pass on.
 *
 * Loaded with RTLD_GLOBAL before pyfuse3, so that pyfuse3's calls of fuse_session_new and fuse_reply_open arrive here.
 * The operation table is copied, some handlers are wrapped, and libfuse's own functions do the rest. Without this
 * library the mount works as well, but cannot tell which process closes a file, needs OPEN and OPENDIR, and answers more
 * requests in Python.
 *
 * Single-threaded by construction: libfuse calls the handlers from the one thread that reads /dev/fuse, and the Python
 * coroutine of a request begins to run before the next request is read.
 */
#define fuse_session_new fuse_session_new_as_declared
#define fuse_reply_open fuse_reply_open_as_declared
#include <fuse_lowlevel.h>
#undef fuse_session_new
#undef fuse_reply_open

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "create_offload.h"
#include "privileges.h"
#include "request_loop.h"
#include "attribute_cache.h"
#include "slots.h"

/* As hooks.py numbers them. */
enum feature {
	EXPLICIT_INVAL_DATA = 1, /* attributes that changed drop no pages, and listing asks for none */
	STATELESS_OPENDIR = 2,	 /* the kernel takes ENOSYS for OPENDIR, and READDIR gets the inode as its handle */
	STATELESS_OPEN = 4,	 /* the same for OPEN and READ */
	NOFLUSH = 8,		 /* closing what was opened for reading sends no FLUSH */
	CACHE_SYMLINKS = 16,
	HANDLE_KILLPRIV = 32, /* dropping suid and sgid is left to us: privileges.c */
};

/* Handles of files that were opened for reading have this bit, as filesystem.py gives them out. */
#define READING (1ULL << 62)
/* Handles that are given out here have this one as well; the rest is the inode. */
#define LENT (1ULL << 61)

static struct fuse_lowlevel_ops operations;
static struct fuse_lowlevel_ops next;
static const struct fuse_ctx *(*context_of)(fuse_req_t);
static int (*reply_error)(fuse_req_t, int);
static int (*reply_open)(fuse_req_t, const struct fuse_file_info *);
static void (*reply_none)(fuse_req_t);
static int session_hooked;
static uint32_t wanted, granted;
static uint32_t background_max;
static const char *(*version_of_libfuse)(void);
static int64_t flush_pid;
static int64_t xattrs_answered, flushes_answered, opens_answered, releases_answered, forgets_taken;

/*
 * Files that may be opened for reading without asking: Python has opened them before, said until when that counts, and
 * takes them back (`lakefs_hooks_take`) before their inode comes to mean nothing. Of the slots that an inode may have, one
 * that nobody has open gives way. `opens` is how many handles are lent and not released.
 */
#define SLOTS (1U << 16)

struct lent {
	uint64_t inode;
	int64_t until_ns;
	uint64_t opens;
};

static struct lent slots[SLOTS];

static struct lent *slot_of(uint64_t inode, unsigned probe)
{
	return &slots[lakefs_slot(inode, probe, SLOTS)];
}

static struct lent *find_lent(uint64_t inode)
{
	for (unsigned probe = 0; probe < PROBES; probe++)
		if (slot_of(inode, probe)->inode == inode)
			return slot_of(inode, probe);
	return NULL;
}

int64_t lakefs_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/*
 * With ATOMIC_O_TRUNC the kernel forgets the attributes of every file it opens with O_TRUNC, those it has just created
 * included, and asks for them again. Without it only a file that was there before is truncated by a request of its own.
 */
static void init(void *userdata, struct fuse_conn_info *connection)
{
	next.init(userdata, connection);
	connection->want &= ~FUSE_CAP_ATOMIC_O_TRUNC;
	connection->want &= ~FUSE_CAP_SPLICE_READ; /* what is written is looked at here */
	connection->want &= ~FUSE_CAP_HANDLE_KILLPRIV; /* its first version does not tell who may keep suid */
	granted = wanted & NOFLUSH;
	if (wanted & HANDLE_KILLPRIV && lakefs_privileges_take())
		granted |= HANDLE_KILLPRIV;
	if (wanted & EXPLICIT_INVAL_DATA && connection->capable & FUSE_CAP_EXPLICIT_INVAL_DATA) {
		/* AUTO_INVAL_DATA would take precedence. */
		connection->want &= ~FUSE_CAP_AUTO_INVAL_DATA;
		connection->want |= FUSE_CAP_EXPLICIT_INVAL_DATA;
		granted |= EXPLICIT_INVAL_DATA;
	}
	if (wanted & CACHE_SYMLINKS && connection->capable & FUSE_CAP_CACHE_SYMLINKS) {
		connection->want |= FUSE_CAP_CACHE_SYMLINKS;
		granted |= CACHE_SYMLINKS;
	}
	if (connection->capable & FUSE_CAP_NO_OPENDIR_SUPPORT)
		granted |= wanted & STATELESS_OPENDIR;
	if (connection->capable & FUSE_CAP_NO_OPEN_SUPPORT)
		granted |= wanted & STATELESS_OPEN;
	if (background_max) {
		connection->max_background = background_max;
		connection->congestion_threshold = background_max / 4 * 3;
	}
}

/*
 * Where the kernel's write-back cache is on it sends FLUSH whatever OPEN was answered. Closing what was only read means
 * nothing here, and saying so takes no Python.
 */
static void flush(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info);

int lakefs_hooks_answers_flush(uint64_t handle)
{
	return session_hooked && handle & READING;
}

static void flush(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	if (lakefs_hooks_answers_flush(info->fh)) {
		flushes_answered++;
		reply_error(request, 0);
		return;
	}
	flush_pid = context_of(request)->pid;
	next.flush(request, inode, info);
}

/*
 * The kernel asks for security.capability before the first write to every file, and ls(1) for access lists. There are
 * none here, ever, and saying so takes no Python.
 */
static int xattr_error(const char *name)
{
	return strncmp(name, "security.", 9) == 0 ? ENODATA : strncmp(name, "system.", 7) == 0 ? EOPNOTSUPP : 0;
}

static void getxattr(fuse_req_t request, fuse_ino_t inode, const char *name, size_t size)
{
	if (xattr_error(name)) {
		xattrs_answered++;
		reply_error(request, xattr_error(name));
	} else {
		next.getxattr(request, inode, name, size);
	}
}

int lakefs_hooks_answers_getxattr(const char *name)
{
	return operations.getxattr == getxattr && xattr_error(name);
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

/* Once OPEN or OPENDIR was answered ENOSYS there are no handles: the inode is all that tells what is meant. */
static struct fuse_file_info with_handle(const struct fuse_file_info *info, fuse_ino_t inode)
{
	struct fuse_file_info named = *info;

	if (!named.fh)
		named.fh = inode;
	return named;
}

static void read_file(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *info)
{
	struct fuse_file_info named = with_handle(info, inode);

	next.read(request, inode, size, offset, &named);
}

static void readdirplus(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *info)
{
	struct fuse_file_info named = with_handle(info, inode);

	next.readdirplus(request, inode, size, offset, &named);
}

static void fsyncdir(fuse_req_t request, fuse_ino_t inode, int datasync, struct fuse_file_info *info)
{
	struct fuse_file_info named = with_handle(info, inode);

	next.fsyncdir(request, inode, datasync, &named);
}

int fuse_reply_open(fuse_req_t request, const struct fuse_file_info *info);

static void open_file(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info);

int lakefs_hooks_answers_open(uint64_t inode, uint32_t flags)
{
	struct lent *lent = (flags & (O_ACCMODE | O_TRUNC)) == O_RDONLY ? find_lent(inode) : NULL;

	return operations.open == open_file && lent && lent->until_ns > lakefs_request_ns();
}

int lakefs_hooks_answers_release(uint64_t inode, uint64_t handle)
{
	struct lent *lent = handle & LENT ? find_lent(inode) : NULL;

	return lent && lent->opens; /* else not lent, or taken back */
}

/* A file that is clean and current, as far as Python said, is opened and closed here. */
static void open_file(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	struct lent *lent = find_lent(inode);

	if (!lakefs_hooks_answers_open(inode, info->flags)) {
		next.open(request, inode, info);
		return;
	}
	info->fh = READING | LENT | inode;
	info->keep_cache = 1;
	opens_answered++;
	lent->opens++;
	if (fuse_reply_open(request, info) == -ENOENT) /* the open was interrupted: nobody will release it */
		lent->opens--;
}

static void getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	if (lakefs_remembered_answers(inode))
		lakefs_remembered_answer(request, inode);
	else
		next.getattr(request, inode, info);
}

static void release(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	if (!lakefs_hooks_answers_release(inode, info->fh)) {
		next.release(request, inode, info);
		return;
	}
	find_lent(inode)->opens--;
	releases_answered++;
	reply_error(request, 0);
}

int fuse_reply_open(fuse_req_t request, const struct fuse_file_info *info)
{
	struct fuse_file_info answer = *info;

	if (granted & NOFLUSH && (info->flags & O_ACCMODE) == O_RDONLY)
		answer.noflush = 1;
	return reply_open(request, &answer);
}

static void hook(void)
{
	if (operations.flush && context_of && reply_error) {
		operations.flush = flush;
		session_hooked = 1;
	}
	if (operations.init)
		operations.init = init;
	if (operations.getxattr && reply_error)
		operations.getxattr = getxattr;
	if (reply_none) {
		operations.forget = forget;
		operations.forget_multi = forget_multi;
	}
	if (operations.read)
		operations.read = read_file;
	if (operations.open && operations.release && reply_error) {
		operations.open = open_file;
		operations.release = release;
	}
	if (operations.getattr)
		operations.getattr = getattr;
	if (operations.readdirplus)
		operations.readdirplus = readdirplus;
	if (operations.fsyncdir)
		operations.fsyncdir = fsyncdir;
}

struct fuse_session *fuse_session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *table, size_t size,
				      void *userdata);

struct fuse_session *fuse_session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *table, size_t size,
				      void *userdata)
{
	void *libfuse = dlopen("libfuse3.so.3", RTLD_NOW | RTLD_LOCAL);
	struct fuse_session *(*make)(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t, void *) = NULL;
	struct fuse_session *made;

	if (libfuse) {
		*(void **)&make = dlsym(libfuse, "fuse_session_new");
		*(void **)&context_of = dlsym(libfuse, "fuse_req_ctx");
		*(void **)&reply_error = dlsym(libfuse, "fuse_reply_err");
		*(void **)&reply_open = dlsym(libfuse, "fuse_reply_open");
		*(void **)&reply_none = dlsym(libfuse, "fuse_reply_none");
		lakefs_remembered_replies(dlsym(libfuse, "fuse_reply_attr"));
		*(void **)&version_of_libfuse = dlsym(libfuse, "fuse_pkgversion");
	}
	if (!make || !reply_open)
		return NULL;
	memset(&operations, 0, sizeof(operations));
	memcpy(&operations, table, size < sizeof(operations) ? size : sizeof(operations));
	next = operations;
	hook();
	lakefs_creating_wrap(&operations, libfuse);
	made = make(args, &operations, size < sizeof(operations) ? size : sizeof(operations), userdata);
	lakefs_receiving_session(made, libfuse);
	return made;
}

/* What the session that is made next shall have: features, and requests in the background (0: as the kernel likes). */
void lakefs_hooks_want(uint32_t features, uint32_t background)
{
	wanted = features;
	background_max = background;
}

/* The features that the session has, known once INIT was answered. */
uint32_t lakefs_hooks_granted(void)
{
	return granted;
}

/* Of the libfuse that makes the session; empty before there is one. */
const char *lakefs_hooks_libfuse(void)
{
	return version_of_libfuse ? version_of_libfuse() : "";
}

/* Opening this file for reading need not be asked for so long. */
void lakefs_hooks_lend(uint64_t inode, int64_t for_ns)
{
	struct lent *slot = find_lent(inode);

	for (unsigned probe = 0; probe < PROBES && (!slot || slot->inode != inode); probe++) {
		struct lent *other = slot_of(inode, probe);

		if (!other->opens && (!slot || other->until_ns < slot->until_ns))
			slot = other;
	}
	if (!slot)
		return;
	slot->inode = inode;
	slot->until_ns = lakefs_now_ns() + for_ns;
}

/* Nothing is answered here of this inode any more; who has it open, as many as are answered, is Python's from now on. */
uint64_t lakefs_hooks_take(uint64_t inode)
{
	struct lent *slot = find_lent(inode);
	uint64_t opens = slot ? slot->opens : 0;

	if (slot)
		memset(slot, 0, sizeof(*slot));
	lakefs_remembered_take(inode);
	return opens;
}

/* OPENs that were answered here. */
int64_t lakefs_hooks_opens_answered(void)
{
	return opens_answered;
}

/* RELEASEs that were answered here. */
int64_t lakefs_hooks_releases_answered(void)
{
	return releases_answered;
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

/* FLUSHes that were answered here. */
int64_t lakefs_hooks_flushes_answered(void)
{
	return flushes_answered;
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
