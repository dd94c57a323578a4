/*
 * Creates and writes new small files without entering Python, which then receives each file whole.
 *
 * In a directory whose names are leased (leases.c) this library keeps a new file while it is written, up to
 * FILE_BYTES_MAX. The first close, or an earlier request that depends on the file, hands the file over to Python: the
 * library calls `receive`, which gets each file with `lakefs_next_file` and stores it as if it had been created and
 * written at that moment. FLUSH waits until Python calls `lakefs_answer_close`. From then on Python owns the file, and
 * the library has only its handle, which it releases without entering Python. The close of a descriptor that a shell
 * has duplicated, before anything was written, is no first close: the library asks `keeps_open`, and keeps the file.
 *
 * Invariants. "Absent": no file is created here under a name that Python has, or may have. "In order": Python gets a
 * file before any request that could tell the difference. "No promise": a file that only this library has was not
 * acknowledged, so a crash loses no acknowledged file.
 *
 * `receive` and `keeps_open` are called with the GIL; nothing else here needs the GIL.
 */
#include "native.h"

#include <assert.h>
#include <stdlib.h>

#define FILES 128
#define FILE_BYTES_MAX (256U << 10)
/* A program chose an mtime that is this far from now, or that is set with an atime; the kernel set any other. */
#define MTIME_OF_NOW_S 60
#define MTIME_S_MAX ((INT64_C(1) << 62) / NS)
#define NO_TIME INT64_MIN
#define ATTRIBUTES (FATTR_MODE | FATTR_UID | FATTR_GID | FATTR_MTIME)

/* States of a file in this library. Once it is handed over, ReceivedState of create_offload.py tracks it, too. */
enum state {
	FREE,
	RECEIVING, /* Python does not know the file */
	CLOSING,   /* FLUSH waits until Python has closed the file */
	CLOSED,	   /* Python owns the file, the library its handle */
};

static const unsigned successors[] = {
	[FREE] = 1 << RECEIVING,
	[RECEIVING] = 1 << CLOSING | 1 << FREE, /* FREE: Python got all of it, or CREATE was interrupted */
	[CLOSING] = 1 << CLOSED,
	[CLOSED] = 1 << FREE,
};

/* Set of the parts of a file that are handed over, numbered as in create_offload.py. */
enum parts {
	BYTES = 1,
	HANDLE = 2,
};

struct created {
	enum state state;
	unsigned due;	  /* parts to hand over; while FLUSH waits, first BYTES alone */
	int handle_given; /* while FLUSH waits: HANDLE was handed over */
	uint64_t inode;
	uint64_t parent;
	int64_t created_ns;
	int64_t written_ns;
	int64_t changed_ns; /* when a program set attributes */
	int64_t mtime_ns;   /* chosen by a program */
	int is_mtime_chosen, is_exclusive;
	int is_kept_open, is_last_close; /* what the FLUSH that is handled next is, if the file has no bytes */
	uint32_t mode, uid, gid, pid;
	uint32_t size, room;
	char *data;
	fuse_req_t flush;
	uint64_t flush_unique;
	char name[NAME_BYTES_MAX + 1];
};

/* A file as it is handed over, laid out as in create_offload.py. */
struct handed_over {
	uint64_t inode;
	uint64_t parent;
	uint64_t flush_unique; /* 0: no FLUSH waits, or its number is not known */
	int64_t created_ns;
	int64_t written_ns;
	int64_t changed_ns;
	int64_t mtime_ns;
	uint32_t mode, uid, gid, pid;
	uint32_t size, parts;
	uint32_t is_mtime_chosen, is_exclusive;
	const char *data;
	const char *name;
};

static struct created files[FILES];
static unsigned used; /* slots from this one on are free */
static unsigned receiving;
static int some_due;
static uint64_t inode_next, inode_end;
static void (*receive)(void);
static int (*keeps_open)(uint64_t parent, const char *name, uint32_t pid);
static struct fuse_lowlevel_ops next;

/* -- files */

static void transition(struct created *file, enum state to)
{
	assert(successors[file->state] & 1U << to);
	receiving += to == RECEIVING;
	receiving -= file->state == RECEIVING;
	file->state = to;
}

static struct created *find_file(uint64_t inode)
{
	for (unsigned at = 0; at < used; at++)
		if (files[at].state != FREE && files[at].inode == inode)
			return &files[at];
	return NULL;
}

static struct created *free_file(void)
{
	unsigned at = 0;

	while (at < used && files[at].state != FREE)
		at++;
	if (at == FILES)
		return NULL;
	if (at == used)
		used++;
	return &files[at];
}

static void drop_file(struct created *file)
{
	transition(file, FREE);
	free(file->data);
	memset(file, 0, sizeof(*file));
	while (used && files[used - 1].state == FREE)
		used--;
}

static struct created *received(uint64_t inode)
{
	struct created *file = receiving ? find_file(inode) : NULL;

	return file && file->state == RECEIVING ? file : NULL;
}

static struct stat attributes_of(const struct created *file)
{
	int64_t mtime_ns = file->is_mtime_chosen ? file->mtime_ns : file->written_ns;
	int64_t ctime_ns = file->changed_ns > file->written_ns ? file->changed_ns : file->written_ns;

	return (struct stat){
		.st_ino = file->inode,
		.st_nlink = 1,
		.st_mode = file->mode,
		.st_uid = file->uid,
		.st_gid = file->gid,
		.st_size = file->size,
		.st_blocks = (file->size + 511) / 512,
		.st_blksize = FILE_BLOCK_BYTES,
		.st_mtim = timespec_of(mtime_ns),
		.st_atim = timespec_of(mtime_ns),
		.st_ctim = timespec_of(ctime_ns),
	};
}

static void reply_attributes(fuse_req_t request, const struct created *file)
{
	struct name_lease *lease = lakefs_name_lease(file->parent);
	struct stat attributes = attributes_of(file);

	libfuse.reply_attr(request, &attributes, lease ? (double)lease->timeout_ns / NS : 0);
}

/* -- requests that need no Python */

/* Return whether CREATE needs no Python. Python handles suid and sgid, because the first write drops them. */
static int may_create(uint64_t parent, const char *name, uint32_t flags, uint32_t mode)
{
	const struct name_lease *lease = lakefs_name_lease_lacking(parent, name);

	return lease && (!(flags & O_EXCL) || lease->takes_exclusive) && !(mode & (S_ISUID | S_ISGID)) &&
	       !(flags & O_APPEND) && (flags & O_ACCMODE) != O_RDONLY && inode_next < inode_end && used < FILES &&
	       !lakefs_is_name_table_full();
}

static int may_write(uint64_t inode, uint64_t offset, uint64_t bytes)
{
	struct created *file = received(inode);

	return file && !file->is_mtime_chosen && offset <= file->size && bytes <= FILE_BYTES_MAX &&
	       offset + bytes <= FILE_BYTES_MAX;
}

/* Return a time in ns; NO_TIME if rows and commits cannot keep it (MTIME_NS_MAX): Python replaces it by the nearest. */
static int64_t ns_of(int64_t seconds, int64_t ns)
{
	return seconds < -MTIME_S_MAX || seconds >= MTIME_S_MAX ? NO_TIME : seconds * NS + ns;
}

/* Return whether a program chose this mtime; otherwise the kernel reports the time of its writes. */
static int is_chosen(const struct created *file, uint32_t valid, int64_t mtime_ns)
{
	int64_t late_s = mtime_ns / NS - lakefs_request_time.realtime_ns / NS;

	return (valid & FATTR_ATIME) || late_s <= -MTIME_OF_NOW_S || late_s >= MTIME_OF_NOW_S ||
	       (file->is_mtime_chosen && mtime_ns == file->mtime_ns);
}

/* Return whether SETATTR needs no Python. A chosen mtime stays until another is chosen; Python handles later writes.
 * Setting the size that the file has changes nothing: programs that open a file without O_TRUNC truncate it so. */
static int may_set(uint64_t inode, uint32_t valid, uint32_t mode, int64_t mtime_ns, uint64_t size)
{
	const uint32_t known = ATTRIBUTES | FATTR_ATIME | FATTR_ATIME_NOW | FATTR_CTIME | FATTR_FH | FATTR_LOCKOWNER |
			       FATTR_KILL_SUIDGID | FATTR_SIZE;
	struct created *file = received(inode);

	if (!file || !(valid & (ATTRIBUTES | FATTR_SIZE)) || (valid & ~known))
		return 0;
	if ((valid & FATTR_ATIME && !(valid & FATTR_MTIME)) || (valid & FATTR_SIZE && size != file->size))
		return 0;
	if ((valid & FATTR_MODE) && (mode & (S_ISUID | S_ISGID)))
		return 0;
	if ((valid & FATTR_MTIME) && mtime_ns == NO_TIME)
		return 0;
	return !(valid & FATTR_MTIME) || !file->is_mtime_chosen || is_chosen(file, valid, mtime_ns);
}

/* Return whether the thread that created a file closes it, and that close is meant to publish it. */
static int may_close(uint64_t inode, uint32_t pid)
{
	struct created *file = received(inode);

	return file && (file->size || file->is_last_close) && file->pid == pid;
}

static int may_release(uint64_t inode, uint64_t handle)
{
	struct created *file = handle & HANDLE_CREATED ? find_file(inode) : NULL;

	return file && file->state == CLOSED;
}

int lakefs_offload_answers(const struct fuse_in_header *head, const void *body, size_t bytes)
{
	const struct fuse_write_in *writing = body;
	const struct fuse_setattr_in *setting = body;
	const struct fuse_create_in *creating = body;

	switch (head->opcode) {
	case FUSE_LOOKUP:
		return !!lakefs_name_lease_lacking(head->nodeid, body);
	case FUSE_CREATE:
		return may_create(head->nodeid, (const char *)(creating + 1), creating->flags, creating->mode);
	case FUSE_WRITE:
		return bytes == sizeof(*writing) + writing->size &&
		       may_write(head->nodeid, writing->offset, writing->size);
	case FUSE_SETATTR:
		return may_set(head->nodeid, setting->valid, setting->mode,
			       ns_of((int64_t)setting->mtime, setting->mtimensec), setting->size);
	case FUSE_GETATTR:
		return !!received(head->nodeid);
	case FUSE_FLUSH:
		return may_close(head->nodeid, head->pid);
	case FUSE_RELEASE:
		return may_release(head->nodeid, ((const struct fuse_release_in *)body)->fh);
	default:
		return 0;
	}
}

static void lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	struct name_lease *lease = lakefs_name_lease_lacking(parent, name);
	struct fuse_entry_param absent = {0};

	if (!lease) {
		next.lookup(request, parent, name);
		return;
	}
	absent.entry_timeout = (double)(lease->until_ns - lakefs_request_time.monotonic_ns) / NS;
	lakefs_count(FUSE_LOOKUP);
	libfuse.reply_entry(request, &absent);
}

static void create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *info)
{
	const struct fuse_ctx *context = libfuse.req_ctx(request);
	struct fuse_entry_param entry = {0};
	struct name_lease *lease;
	struct created *file;

	if (!may_create(parent, name, info->flags, mode) || !(file = free_file())) {
		next.create(request, parent, name, mode, info);
		return;
	}
	lease = lakefs_name_lease(parent);
	transition(file, RECEIVING);
	file->inode = inode_next++;
	file->parent = parent;
	file->created_ns = file->written_ns = lakefs_request_time.realtime_ns;
	file->mode = S_IFREG | (mode & 07777);
	file->uid = context->uid;
	file->gid = context->gid;
	file->pid = context->pid;
	file->is_exclusive = !!(info->flags & O_EXCL);
	strcpy(file->name, name);
	lakefs_add_name(lease, name, strlen(name));
	lakefs_touch_attributes(parent, file->created_ns);
	info->fh = HANDLE_CREATED | file->inode;
	info->keep_cache = 1;
	entry.ino = file->inode;
	entry.attr = attributes_of(file);
	entry.attr_timeout = entry.entry_timeout = (double)lease->timeout_ns / NS;
	lakefs_count(FUSE_CREATE);
	if (libfuse.reply_create(request, &entry, info) == -ENOENT) /* interrupted: the file is not open */
		drop_file(file);
}

/* Make room for bytes up to `end`; return 0 if there is no memory. The second allocation has room for all bytes. */
static int make_room(struct created *file, uint32_t end)
{
	uint32_t room = file->room ? FILE_BYTES_MAX : end;
	char *data = end > file->room ? realloc(file->data, room) : file->data;

	if (end > file->room && data) {
		file->data = data;
		file->room = room;
	}
	return end <= file->room;
}

static void write_buf(fuse_req_t request, fuse_ino_t inode, struct fuse_bufvec *bytes, off_t offset,
		      struct fuse_file_info *info)
{
	const struct fuse_buf *buf = &bytes->buf[0];
	int here = bytes->count == 1 && !(buf->flags & FUSE_BUF_IS_FD) && may_write(inode, offset, buf->size);
	struct created *file = here ? received(inode) : NULL;
	uint32_t end = (uint32_t)(offset + buf->size);

	if (!file) {
		next.write_buf(request, inode, bytes, offset, info);
		return;
	}
	if (!make_room(file, end)) {
		libfuse.reply_err(request, ENOMEM);
		return;
	}
	memcpy(file->data + offset, buf->mem, buf->size);
	if (end > file->size)
		file->size = end;
	if (!info->writepage) /* the kernel sends the time of bytes of its cache with SETATTR, if it has not sent it yet */
		file->written_ns = lakefs_request_time.realtime_ns;
	lakefs_count(FUSE_WRITE);
	libfuse.reply_write(request, buf->size);
}

/* The bits of `to_set` are those of the kernel, except those for handles and locks. */
static void setattr(fuse_req_t request, fuse_ino_t inode, struct stat *attributes, int to_set,
		    struct fuse_file_info *info)
{
	int64_t mtime_ns = ns_of(attributes->st_mtim.tv_sec, attributes->st_mtim.tv_nsec);
	struct created *file = received(inode);
	uint32_t valid = (uint32_t)to_set;

	if (!file || !may_set(inode, valid, attributes->st_mode, mtime_ns, (uint64_t)attributes->st_size)) {
		next.setattr(request, inode, attributes, to_set, info);
		return;
	}
	if (valid & FATTR_MODE)
		file->mode = S_IFREG | (attributes->st_mode & 07777);
	if (valid & FATTR_UID)
		file->uid = attributes->st_uid;
	if (valid & FATTR_GID)
		file->gid = attributes->st_gid;
	if ((valid & FATTR_MTIME) && !is_chosen(file, valid, mtime_ns)) {
		file->written_ns = mtime_ns;
	} else if (valid & FATTR_MTIME) {
		file->mtime_ns = mtime_ns;
		file->is_mtime_chosen = 1;
	}
	if (valid & (FATTR_MODE | FATTR_UID | FATTR_GID) || file->is_mtime_chosen)
		file->changed_ns = lakefs_request_time.realtime_ns;
	lakefs_count(FUSE_SETATTR);
	reply_attributes(request, file);
}

static void getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	struct created *file = received(inode);

	if (!file) {
		next.getattr(request, inode, info);
		return;
	}
	lakefs_count(FUSE_GETATTR);
	reply_attributes(request, file);
}

static void flush(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	struct created *file = received(inode);

	if (file && file->is_kept_open) {
		file->is_kept_open = 0;
		lakefs_count(FUSE_FLUSH);
		libfuse.reply_err(request, 0);
		return;
	}
	if (!may_close(inode, libfuse.req_ctx(request)->pid)) {
		next.flush(request, inode, info);
		return;
	}
	transition(file, CLOSING);
	file->due = BYTES;
	file->flush = request;
	file->flush_unique = lakefs_request_unique;
	some_due = 1;
	lakefs_count(FUSE_FLUSH);
	if (!lakefs_without_python)
		lakefs_hand_over_closed();
}

static void release(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	if (!may_release(inode, info->fh)) {
		next.release(request, inode, info);
		return;
	}
	drop_file(find_file(inode));
	lakefs_count(FUSE_RELEASE);
	libfuse.reply_err(request, 0);
}

void lakefs_wrap_offloaded(struct fuse_lowlevel_ops *operations)
{
	next = *operations;
	operations->lookup = lookup;
	operations->create = create;
	operations->write_buf = write_buf;
	operations->setattr = setattr;
	operations->getattr = getattr;
	operations->flush = flush;
	operations->release = release;
}

int lakefs_is_receiving(void)
{
	return receiving || some_due;
}

/* -- handing over */

/* Mark as due what Python needs for a request about `inode`, or about `all` files: all parts of a file that was not
 * closed yet, also if `inode` is its directory; with `handles`, also the handle of a closed file. */
static void make_due(uint64_t inode, int all, int handles)
{
	for (unsigned at = 0; at < used; at++) {
		struct created *file = &files[at];
		int meant = all || file->inode == inode;

		if (file->state == RECEIVING && (meant || file->parent == inode))
			file->due = BYTES | HANDLE;
		else if ((file->state == CLOSED || file->state == CLOSING) && meant && handles && !file->handle_given)
			file->due |= HANDLE;
		else
			continue;
		some_due = 1;
	}
}

void lakefs_hand_over_closed(void)
{
	if (some_due && receive)
		receive();
	some_due = 0;
}

/* Find out whether the thread that created a file, and closes it without having written, has it open elsewhere. Return 0
 * if that is not the case of this FLUSH. */
static int examine_close(const struct fuse_in_header *head)
{
	struct created *file = received(head->nodeid);

	if (!file || file->size || file->pid != head->pid || !keeps_open)
		return 0;
	file->is_kept_open = keeps_open(file->parent, file->name, file->pid);
	file->is_last_close = !file->is_kept_open;
	return 1;
}

void lakefs_hand_over_before(const struct fuse_in_header *head)
{
	if (!used)
		return;
	switch (head ? head->opcode : FUSE_RENAME) {
	case FUSE_UNLINK:
	case FUSE_RMDIR:
	case FUSE_RENAME:
	case FUSE_RENAME2:
	case FUSE_COPY_FILE_RANGE:
	case FUSE_SYNCFS:
	case FUSE_DESTROY:
		make_due(0, 1, 1);
		break;
	case FUSE_INTERRUPT:
		break;
	case FUSE_LOOKUP:
	case FUSE_OPEN:
	case FUSE_GETATTR:
	case FUSE_GETXATTR:
	case FUSE_LISTXATTR:
		make_due(head->nodeid, 0, 0);
		break;
	case FUSE_FLUSH:
		if (examine_close(head))
			break;
		/* fall through */
	default:
		make_due(head->nodeid, 0, 1);
	}
	lakefs_hand_over_closed();
}

/* -- called from Python */

/* Return how many files are being written that Python does not know. */
int lakefs_files_receiving(void)
{
	return (int)receiving;
}

/* Return when the newest file that Python does not know was created in a directory; INT64_MIN if there is none. */
static int64_t newest_created_ns(uint64_t directory)
{
	int64_t newest_ns = INT64_MIN;

	for (unsigned at = 0; at < used && receiving; at++)
		if (files[at].state == RECEIVING && files[at].parent == directory && files[at].created_ns > newest_ns)
			newest_ns = files[at].created_ns;
	return newest_ns;
}

/* Cache attributes of a directory (attribute_cache.c), for this time or, with 0, instead of those that are cached. Their
 * times are no earlier than the newest file that was created here. */
void lakefs_cache_attributes(uint64_t inode, uint32_t mode, uint32_t uid, uint32_t gid, int64_t mtime_ns,
			     int64_t ctime_ns, uint32_t block_bytes, int64_t for_ns)
{
	struct stat attributes = {
		.st_ino = inode,
		.st_nlink = 1,
		.st_mode = mode,
		.st_uid = uid,
		.st_gid = gid,
		.st_blksize = block_bytes,
		.st_mtim = timespec_of(mtime_ns),
		.st_atim = timespec_of(mtime_ns),
		.st_ctim = timespec_of(ctime_ns),
	};

	lakefs_keep_attributes(&attributes, for_ns);
	if (newest_created_ns(inode) > mtime_ns)
		lakefs_touch_attributes(inode, newest_created_ns(inode));
}

/* Mark everything that Python does not have yet as due; the caller then gets it with `lakefs_next_file`. */
void lakefs_hand_over_all(void)
{
	make_due(0, 1, 1);
	some_due = 0;
}

/* Hand over the next file that has due parts; return 0 if there is none. Its bytes are valid until the next call. */
int lakefs_next_file(struct handed_over *handed_over)
{
	static char *data;
	static char name[NAME_BYTES_MAX + 1];
	struct created *file = files;

	free(data);
	data = NULL;
	while (file < files + used && !file->due)
		file++;
	if (file == files + used)
		return 0;
	strcpy(name, file->name);
	*handed_over = (struct handed_over){
		.inode = file->inode,
		.parent = file->parent,
		.flush_unique = file->flush_unique,
		.created_ns = file->created_ns,
		.written_ns = file->written_ns,
		.changed_ns = file->changed_ns,
		.mtime_ns = file->mtime_ns,
		.mode = file->mode & 07777,
		.uid = file->uid,
		.gid = file->gid,
		.pid = file->pid,
		.size = file->size,
		.parts = file->due,
		.is_mtime_chosen = file->is_mtime_chosen,
		.is_exclusive = file->is_exclusive,
		.data = file->data,
		.name = name,
	};
	data = file->data;
	file->data = NULL;
	if (file->state != CLOSING) {
		drop_file(file);
		return 1;
	}
	if (file->due & BYTES)
		handed_over->parts = BYTES;
	else
		file->handle_given = 1;
	file->due &= ~handed_over->parts;
	return 1;
}

/* Reply to the FLUSH of a file. The library then releases its handle without entering Python; but after an error, or if
 * the handle was handed over, Python owns it. Returns 0 if no FLUSH waits. */
int lakefs_answer_close(uint64_t inode, int error)
{
	struct created *file = find_file(inode);
	fuse_req_t request;

	if (!file || file->state != CLOSING || !receive)
		return 0;
	request = file->flush;
	transition(file, CLOSED);
	if (error || file->handle_given)
		drop_file(file);
	libfuse.reply_err(request, error);
	return 1;
}

/* Set what is called to hand over files, and to ask whether a process keeps a file open that it closes. */
void lakefs_set_receiver(void (*receive_files)(void), int (*is_open)(uint64_t, const char *, uint32_t))
{
	receive = receive_files;
	keeps_open = is_open;
}

/* Reserve inodes for files created here. Those of the last call that are left are never used. */
void lakefs_reserve_inodes(uint64_t first, uint64_t count)
{
	inode_next = first;
	inode_end = first + count;
}

uint64_t lakefs_inodes_left(void)
{
	return inode_end - inode_next;
}
