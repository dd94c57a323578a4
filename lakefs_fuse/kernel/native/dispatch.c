/*
 * The session, its features, and handlers that reply to requests without entering Python.
 *
 * The library copies pyfuse3's operation table and wraps some of its handlers. A mount works without the library, but
 * then it cannot tell which process closes a file, needs OPEN and OPENDIR, and handles more requests in Python.
 */
#include "native.h"

/* Numbered as in hooks.py. */
enum feature {
	EXPLICIT_INVAL_DATA = 1, /* changed attributes drop no pages; a second listing requests no attributes */
	STATELESS_OPENDIR = 2,	 /* the kernel accepts ENOSYS for OPENDIR; READDIR then has the inode as handle */
	STATELESS_OPEN = 4,	 /* the same for OPEN and READ */
	NOFLUSH = 8,		 /* closing a file opened for reading sends no FLUSH */
	CACHE_SYMLINKS = 16,
	HANDLE_KILLPRIV = 32, /* the daemon drops suid and sgid: privileges.c */
	PARALLEL_DIROPS = 64, /* LOOKUP and READDIR of a directory do not wait for each other: init_flags.c */
};

/* One of FUSE_CAP_* since libfuse 3.17; unused before. */
#define CAP_HANDLE_KILLPRIV_V2 (1U << 21)

struct fuse_session *lakefs_session;
static struct fuse_lowlevel_ops next; /* pyfuse3's handlers */
static int hooked;
static uint32_t requested, granted;
static uint32_t background_max;
static int64_t flush_pid;
static int cached_write;

/*
 * Handle INIT. With ATOMIC_O_TRUNC the kernel drops the attributes of every file that it opens with O_TRUNC, also of a
 * file that it has just created, and requests them again. Without it the kernel truncates with a separate request, and
 * only a file that existed before.
 */
static void init(void *userdata, struct fuse_conn_info *connection)
{
	next.init(userdata, connection);
	connection->want &= ~FUSE_CAP_ATOMIC_O_TRUNC;
	connection->want &= ~FUSE_CAP_SPLICE_READ;     /* this library reads written bytes */
	connection->want &= ~FUSE_CAP_HANDLE_KILLPRIV; /* the first version does not say who may keep suid */
	connection->want &= ~CAP_HANDLE_KILLPRIV_V2;   /* init_flags.c requests it with every libfuse */
	granted = requested & NOFLUSH;
	if (requested & PARALLEL_DIROPS && lakefs_accept_init_flag(FUSE_PARALLEL_DIROPS))
		granted |= PARALLEL_DIROPS;
	if (requested & HANDLE_KILLPRIV && lakefs_accept_init_flag(FUSE_HANDLE_KILLPRIV_V2))
		granted |= HANDLE_KILLPRIV;
	lakefs_set_killpriv(!!(granted & HANDLE_KILLPRIV));
	if (requested & EXPLICIT_INVAL_DATA && connection->capable & FUSE_CAP_EXPLICIT_INVAL_DATA) {
		/* AUTO_INVAL_DATA would take precedence. */
		connection->want &= ~FUSE_CAP_AUTO_INVAL_DATA;
		connection->want |= FUSE_CAP_EXPLICIT_INVAL_DATA;
		granted |= EXPLICIT_INVAL_DATA;
	}
	if (requested & CACHE_SYMLINKS && connection->capable & FUSE_CAP_CACHE_SYMLINKS) {
		connection->want |= FUSE_CAP_CACHE_SYMLINKS;
		granted |= CACHE_SYMLINKS;
	}
	if (connection->capable & FUSE_CAP_NO_OPENDIR_SUPPORT)
		granted |= requested & STATELESS_OPENDIR;
	if (connection->capable & FUSE_CAP_NO_OPEN_SUPPORT)
		granted |= requested & STATELESS_OPEN;
	if (background_max) {
		connection->max_background = background_max;
		connection->congestion_threshold = background_max / 4 * 3;
	}
}

struct copy_request {
	uint64_t source;
	uint64_t target;
	int64_t offset;
	int64_t target_offset;
	uint64_t bytes;
};

/* -- requests that need no Python */

/*
 * Return the error of an extended attribute that no file has; 0 for others. The kernel requests security.capability
 * before the first write to every file, and ls(1) requests access lists; no file has either.
 */
static int xattr_error(const char *name)
{
	return strncmp(name, "security.", 9) == 0 ? ENODATA : strncmp(name, "system.", 7) == 0 ? EOPNOTSUPP : 0;
}

/* Return the lease under which this file may be opened, or NULL. */
static struct open_lease *lease_to_open(uint64_t inode, uint32_t flags)
{
	struct open_lease *lease = lakefs_open_lease(inode);

	if (!lease || (flags & (O_ACCMODE | O_TRUNC)) != O_RDONLY)
		return NULL;
	return lease->until_ns > lakefs_request_time.monotonic_ns ? lease : NULL;
}

/* Return the lease under which this handle was issued; NULL if there is none, or it was revoked. */
static struct open_lease *lease_of_handle(uint64_t inode, uint64_t handle)
{
	struct open_lease *lease = handle & HANDLE_LEASED ? lakefs_open_lease(inode) : NULL;

	return lease && lease->handles ? lease : NULL;
}

/* Return whether SETATTR only repeats the mtime that is known, as the kernel does with a new ctime after a rename. The
 * kernel shows its own ctime of a file that it knows. */
static int repeats_times(uint64_t inode, uint32_t valid, int64_t mtime_s, uint32_t mtime_ns)
{
	const struct open_lease *lease = lakefs_known_attributes(inode);
	struct timespec known;

	if (!lease || valid != (FATTR_MTIME | FATTR_CTIME))
		return 0;
	known = timespec_of(lease->known.mtime_ns);
	return known.tv_sec == mtime_s && known.tv_nsec == (long)mtime_ns;
}

/*
 * The request loop asks this before it processes a request without the GIL, and the handler below decides again, from
 * what libfuse parsed. Nothing changes between the two. What always holds: where this returns 1, the handler replies
 * itself. If it called `next`, Python would handle the request before it got what request_loop.c hands over first, and
 * nothing would fail. The converse costs time only. So a condition is one function, which both call with the same values.
 */
int lakefs_dispatch_answers(const struct fuse_in_header *head, const void *body)
{
	const struct fuse_setattr_in *setting = body;

	if (!hooked)
		return 0;
	switch (head->opcode) {
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
	case FUSE_IOCTL: /* Some languages check whether an opened file is a terminal; libfuse refuses. */
		return 1;
	case FUSE_GETATTR:
		return lakefs_has_attributes(head->nodeid) || lakefs_known_attributes(head->nodeid);
	case FUSE_LOOKUP:
		return lakefs_knows_directory(head->nodeid, body);
	case FUSE_SETATTR:
		return repeats_times(head->nodeid, setting->valid, (int64_t)setting->mtime, setting->mtimensec);
	case FUSE_GETXATTR:
		return xattr_error((const char *)body + sizeof(struct fuse_getxattr_in));
	case FUSE_OPEN:
		return !!lease_to_open(head->nodeid, ((const struct fuse_open_in *)body)->flags);
	case FUSE_FLUSH:
		return !!(((const struct fuse_flush_in *)body)->fh & HANDLE_READING);
	case FUSE_RELEASE:
		return !!lease_of_handle(head->nodeid, ((const struct fuse_release_in *)body)->fh);
	default:
		return 0;
	}
}

/* -- handlers */

static void lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	if (lakefs_knows_directory(parent, name))
		lakefs_reply_directory(request, parent, name);
	else
		next.lookup(request, parent, name);
}

static void getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	const struct open_lease *lease = lakefs_known_attributes(inode);

	if (lakefs_has_attributes(inode)) {
		lakefs_reply_attributes(request, inode);
	} else if (lease) {
		lakefs_count(FUSE_GETATTR);
		lakefs_reply_known(request, lease);
	} else {
		next.getattr(request, inode, info);
	}
}

static void setattr(fuse_req_t request, fuse_ino_t inode, struct stat *attributes, int to_set,
		    struct fuse_file_info *info)
{
	const struct timespec *mtime = &attributes->st_mtim;

	if (info || !repeats_times(inode, (uint32_t)to_set, mtime->tv_sec, (uint32_t)mtime->tv_nsec)) {
		next.setattr(request, inode, attributes, to_set, info);
		return;
	}
	lakefs_count(FUSE_SETATTR);
	lakefs_reply_known(request, lakefs_known_attributes(inode));
}

static void getxattr(fuse_req_t request, fuse_ino_t inode, const char *name, size_t size)
{
	if (!xattr_error(name)) {
		next.getxattr(request, inode, name, size);
		return;
	}
	lakefs_count(FUSE_GETXATTR);
	libfuse.reply_err(request, xattr_error(name));
}

/* Open a leased file without entering Python, which leases only files that are clean and current. */
static void open_file(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	struct open_lease *lease = lease_to_open(inode, info->flags);

	if (!lease) {
		next.open(request, inode, info);
		return;
	}
	info->fh = HANDLE_READING | HANDLE_LEASED | inode;
	info->keep_cache = 1;
	lakefs_count(FUSE_OPEN);
	lease->handles++;
	if (fuse_reply_open(request, info) == -ENOENT) /* the open was interrupted: no RELEASE will come */
		lease->handles--;
}

/*
 * With its write-back cache on, the kernel sends FLUSH whatever the reply to OPEN was. The close of a file opened for
 * reading has no effect, so its FLUSH needs no Python.
 */
static void flush(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	if (!(info->fh & HANDLE_READING)) {
		flush_pid = libfuse.req_ctx(request)->pid;
		next.flush(request, inode, info);
		return;
	}
	lakefs_count(FUSE_FLUSH);
	libfuse.reply_err(request, 0);
}

static void release(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	struct open_lease *lease = lease_of_handle(inode, info->fh);

	if (!lease) {
		next.release(request, inode, info);
		return;
	}
	lease->handles--;
	lakefs_count(FUSE_RELEASE);
	libfuse.reply_err(request, 0);
}

/* The filesystem does not count lookups, so FORGET has no effect. */
static void forget(fuse_req_t request, fuse_ino_t inode, uint64_t lookups)
{
	(void)inode;
	(void)lookups;
	lakefs_count(FUSE_FORGET);
	libfuse.reply_none(request);
}

static void forget_multi(fuse_req_t request, size_t count, struct fuse_forget_data *forgets)
{
	(void)count;
	(void)forgets;
	lakefs_count(FUSE_FORGET);
	libfuse.reply_none(request);
}

/* Use the inode as the handle if there is none, as after a reply of ENOSYS to OPEN or OPENDIR. pyfuse3 does not pass on
 * the inode. */
static void set_missing_handle(struct fuse_file_info *info, fuse_ino_t inode)
{
	if (!info->fh)
		info->fh = inode;
}

static void read_file(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *info)
{
	set_missing_handle(info, inode);
	next.read(request, inode, size, offset, info);
}

static void readdirplus(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *info)
{
	set_missing_handle(info, inode);
	next.readdirplus(request, inode, size, offset, info);
}

static void fsyncdir(fuse_req_t request, fuse_ino_t inode, int datasync, struct fuse_file_info *info)
{
	set_missing_handle(info, inode);
	next.fsyncdir(request, inode, datasync, info);
}

/* Record whether the bytes come from the kernel's page cache, which libfuse passes on and pyfuse3 does not. */
static void write_buf(fuse_req_t request, fuse_ino_t inode, struct fuse_bufvec *bytes, off_t offset,
		      struct fuse_file_info *info)
{
	cached_write = info->writepage;
	next.write_buf(request, inode, bytes, offset, info);
}

/*
 * The last COPY_FILE_RANGE. pyfuse3 does not support it, so it is passed to pyfuse3's handler of GETXATTR, which can
 * send the reply, a `struct fuse_write_out`, as a value. Python distinguishes the two by the name, which no caller of
 * getxattr(2) can leave empty, and gets the arguments with `lakefs_copy_request`.
 */
static struct copy_request copy;

static void copy_file_range_here(fuse_req_t request, fuse_ino_t source, off_t offset, struct fuse_file_info *source_info,
				 fuse_ino_t target, off_t target_offset, struct fuse_file_info *target_info,
				 size_t bytes, int flags)
{
	(void)source_info;
	(void)target_info;
	(void)flags;
	copy = (struct copy_request){source, target, offset, target_offset, bytes};
	next.getxattr(request, target, "", sizeof(struct fuse_write_out));
}

/* -- the session */

/* Set noflush, if granted, for a file opened for reading. The structure, which is pyfuse3's own, is changed in place: a
 * copy would lack members that a later libfuse appends. */
int fuse_reply_open(fuse_req_t request, const struct fuse_file_info *info)
{
	if (granted & NOFLUSH && (info->flags & O_ACCMODE) == O_RDONLY)
		((struct fuse_file_info *)info)->noflush = 1;
	return libfuse.reply_open(request, info);
}

/* The kernel does not wait for the reply to an interrupted request (`lakefs_interrupt_request`), which is no failure. */
int fuse_reply_err(fuse_req_t request, int error)
{
	int result = libfuse.reply_err(request, error);

	return result == -ENOENT ? 0 : result;
}

/* Return whether the table has all handlers that are called unchecked; pyfuse3's has. */
static int is_complete(const struct fuse_lowlevel_ops *table)
{
	return table->init && table->getattr && table->getxattr && table->open && table->flush && table->release &&
	       table->read && table->readdirplus && table->fsyncdir && table->lookup && table->create &&
	       table->write_buf && table->setattr;
}

static void wrap(struct fuse_lowlevel_ops *operations)
{
	next = *operations;
	operations->init = init;
	operations->lookup = lookup;
	operations->getattr = getattr;
	operations->setattr = setattr;
	operations->getxattr = getxattr;
	operations->copy_file_range = copy_file_range_here;
	operations->open = open_file;
	operations->flush = flush;
	operations->release = release;
	operations->forget = forget;
	operations->forget_multi = forget_multi;
	operations->read = read_file;
	operations->write_buf = write_buf;
	operations->readdirplus = readdirplus;
	operations->fsyncdir = fsyncdir;
	lakefs_wrap_offloaded(operations);
}

/* Copy pyfuse3's table and wrap its handlers; return the size of the copy. Handlers that only a later libfuse knows are
 * omitted. */
static size_t wrap_table(struct fuse_lowlevel_ops *operations, const struct fuse_lowlevel_ops *table, size_t size)
{
	size_t known = size < sizeof(*operations) ? size : sizeof(*operations);

	memcpy(operations, table, known);
	hooked = is_complete(operations);
	if (hooked)
		wrap(operations);
	return known;
}

struct fuse_session *fuse_session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *table, size_t size,
				      void *userdata)
{
	struct fuse_lowlevel_ops operations = {0};

	if (!libfuse.session_new)
		return NULL;
	size = wrap_table(&operations, table, size);
	return lakefs_session = libfuse.session_new(args, &operations, size, userdata);
}

struct fuse_session *fuse_session_new_versioned(struct fuse_args *args, const struct fuse_lowlevel_ops *table,
						size_t size, void *version, void *userdata)
{
	struct fuse_lowlevel_ops operations = {0};

	if (!libfuse.session_new_versioned)
		return NULL;
	size = wrap_table(&operations, table, size);
	return lakefs_session = libfuse.session_new_versioned(args, &operations, size, version, userdata);
}

/* -- called from Python */

/* Set what the next session requests: features, and a maximum of background requests (0: the kernel's default). */
void lakefs_request_features(uint32_t features, uint32_t background)
{
	requested = features;
	background_max = background;
}

/* Return the features of the session, which are known after the reply to INIT. */
uint32_t lakefs_granted_features(void)
{
	return granted;
}

/* Return whether requests of this process's session go through this library. */
int lakefs_is_hooked(void)
{
	return hooked;
}

/* Return the COPY_FILE_RANGE whose handler runs. */
const struct copy_request *lakefs_copy_request(void)
{
	return &copy;
}

/* Return whether the WRITE whose handler runs has bytes of the kernel's page cache. */
int lakefs_is_cached_write(void)
{
	return cached_write;
}

/* Return the thread that sent the FLUSH whose handler runs; 0 if it is in another pid namespace. */
int64_t lakefs_flush_pid(void)
{
	return flush_pid;
}
