/*
 * New small files: created, written and closed without Python, which takes them whole.
 *
 * In a directory that Python has lent, with all the names there are in it, a file that is created is kept here while it
 * is written, up to FILE_BYTES_MAX. Its first close, or whatever request needs to know of it before, hands it to Python
 * (`serve`, which asks for each with `lakefs_creating_next`): to be taken as if it had been created and written just
 * then. A close waits until Python says what came of it (`lakefs_creating_closed`); after that the file is Python's, and
 * only its handle is known here, to be released without asking. Nothing that is here only was ever promised to anybody.
 *
 * What always holds: a name that Python has, or may have, is not created here; Python is told of a file before it sees
 * any request that could tell the difference.
 *
 * Single-threaded, as hooks.c. `serve` is called with the GIL, everything else without asking for it.
 */
#include "create_offload.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "leases.h"
#include "request_loop.h"
#include "attribute_cache.h"

/* In the numbers of handles that are given out here; the rest is the inode. */
#define CREATED (1ULL << 60)
#define FILES 128
#define FILE_BYTES_MAX (256U << 10)
#define NS 1000000000LL
/* An mtime this far from now was chosen by somebody: operations for Python. */
#define CHOSEN_S 60
#define BLOCK_BYTES (128U << 10)

enum state {
	FREE,
	RECEIVING, /* Python knows nothing of it */
	CLOSING,   /* handed over, and the FLUSH waits */
	CLOSED,	   /* Python's, but for the handle */
};

/* What Python is to do with a file, as creating.py numbers them. */
enum wanted {
	NOTHING,
	OPEN,	/* take it, and the handle */
	CLOSE,	/* take it, close it, and say when that is done */
	HANDLE, /* it was taken before: take the handle too */
};

struct created {
	enum state state;
	enum wanted wanted;
	int handle_too; /* CLOSE, then HANDLE */
	int given;	/* CLOSING, but the handle is Python's by now */
	uint64_t inode;
	uint64_t parent;
	int64_t created_ns;
	int64_t written_ns;
	uint32_t mode, uid, gid, pid;
	uint32_t size, room;
	char *data;
	fuse_req_t flush;
	char name[NAME_BYTES_MAX + 1];
};

/* A file as Python gets it. */
struct taken {
	uint64_t inode;
	uint64_t parent;
	int64_t created_ns;
	int64_t written_ns;
	uint32_t mode, uid, gid, pid;
	uint32_t size, wanted;
	const char *data;
	const char *name;
};

static struct created files[FILES];
static unsigned used; /* slots from here on are free */
static unsigned receiving, waiting;
static uint64_t inode_next, inode_end;
static void (*serve)(void);
static int64_t answered[FUSE_CREATE + 1]; /* by opcode */

static struct fuse_lowlevel_ops next;
static const struct fuse_ctx *(*context_of)(fuse_req_t);
static int (*reply_error)(fuse_req_t, int);
static int (*reply_entry)(fuse_req_t, const struct fuse_entry_param *);
static int (*reply_create)(fuse_req_t, const struct fuse_entry_param *, const struct fuse_file_info *);
static int (*reply_attr)(fuse_req_t, const struct stat *, double);
static int (*reply_write)(fuse_req_t, size_t);

/* -- files */

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

static void forget_file(struct created *file)
{
	receiving -= file->state == RECEIVING;
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

static struct timespec time_of(int64_t ns)
{
	return (struct timespec){ns / NS, ns % NS};
}

static struct stat attributes_of(const struct created *file)
{
	return (struct stat){
		.st_ino = file->inode,
		.st_nlink = 1,
		.st_mode = file->mode,
		.st_uid = file->uid,
		.st_gid = file->gid,
		.st_size = file->size,
		.st_blocks = (file->size + 511) / 512,
		.st_blksize = BLOCK_BYTES,
		.st_mtim = time_of(file->written_ns),
		.st_atim = time_of(file->written_ns),
		.st_ctim = time_of(file->written_ns),
	};
}

static double seconds_left(const struct directory *directory)
{
	int64_t left_ns = directory->until_ns - lakefs_request_ns();

	return left_ns > 0 ? (double)left_ns / NS : 0;
}

/* -- what is answered here */

/* What has suid or sgid would lose it with the first write: a case for Python. */
static int may_create(uint64_t parent, const char *name, uint32_t flags, uint32_t mode)
{
	return (flags & O_TRUNC) && !(mode & (S_ISUID | S_ISGID)) && !(flags & (O_EXCL | O_APPEND)) && (flags & O_ACCMODE) != O_RDONLY &&
	       inode_next < inode_end && used < FILES && !lakefs_lent_full() && lakefs_lent_lacking(parent, name);
}

static int may_write(uint64_t inode, uint64_t offset, uint64_t bytes)
{
	struct created *file = received(inode);

	return file && offset <= file->size && bytes <= FILE_BYTES_MAX && offset + bytes <= FILE_BYTES_MAX;
}

static int may_set(uint64_t inode, uint32_t valid, int64_t mtime_s)
{
	int64_t late_s = mtime_s - lakefs_request_realtime_ns() / NS;

	return received(inode) && (valid & FATTR_MTIME) && late_s > -CHOSEN_S && late_s < CHOSEN_S &&
	       !(valid & ~(FATTR_MTIME | FATTR_CTIME | FATTR_FH | FATTR_LOCKOWNER));
}

/* The close that its writer means. */
static int may_close(uint64_t inode, uint32_t pid)
{
	struct created *file = received(inode);

	return file && file->size && file->pid == pid;
}

static int may_release(uint64_t inode, uint64_t handle)
{
	struct created *file = handle & CREATED ? find_file(inode) : NULL;

	return file && file->state == CLOSED;
}

int lakefs_creating_answers(const struct fuse_in_header *head, const void *body, size_t bytes)
{
	const struct fuse_write_in *writing = body;
	const struct fuse_setattr_in *setting = body;
	const struct fuse_create_in *creating = body;

	if (!reply_create)
		return 0;
	switch (head->opcode) {
	case FUSE_LOOKUP:
		return !!lakefs_lent_lacking(head->nodeid, body);
	case FUSE_CREATE:
		return may_create(head->nodeid, (const char *)(creating + 1), creating->flags,
				  creating->mode);
	case FUSE_WRITE:
		return bytes == sizeof(*writing) + writing->size &&
		       may_write(head->nodeid, writing->offset, writing->size);
	case FUSE_SETATTR:
		return may_set(head->nodeid, setting->valid, (int64_t)setting->mtime);
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
	struct directory *directory = lakefs_lent_lacking(parent, name);
	struct fuse_entry_param absent = {0};

	if (!directory) {
		next.lookup(request, parent, name);
		return;
	}
	answered[FUSE_LOOKUP]++;
	absent.entry_timeout = seconds_left(directory);
	reply_entry(request, &absent);
}

static void create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *info)
{
	const struct fuse_ctx *context = context_of(request);
	struct fuse_entry_param entry = {0};
	struct directory *directory;
	struct created *file;

	if (!may_create(parent, name, info->flags, mode) || !(file = free_file())) {
		next.create(request, parent, name, mode, info);
		return;
	}
	directory = lakefs_lent_directory(parent);
	file->state = RECEIVING;
	receiving++;
	file->inode = inode_next++;
	file->parent = parent;
	file->created_ns = file->written_ns = lakefs_request_realtime_ns();
	file->mode = S_IFREG | (mode & 07777);
	file->uid = context->uid;
	file->gid = context->gid;
	file->pid = context->pid;
	strcpy(file->name, name);
	lakefs_lent_add(directory, name, strlen(name));
	lakefs_remembered_touch(parent, file->created_ns);
	info->fh = CREATED | file->inode;
	info->keep_cache = 1;
	entry.ino = file->inode;
	entry.attr = attributes_of(file);
	entry.attr_timeout = entry.entry_timeout = (double)directory->remembered_ns / NS;
	answered[FUSE_CREATE]++;
	if (reply_create(request, &entry, info) == -ENOENT) /* interrupted: nobody has it open */
		forget_file(file);
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
	if (end > file->room) {
		uint32_t room = file->room ? FILE_BYTES_MAX : end;
		char *data = realloc(file->data, room);

		if (!data) {
			reply_error(request, ENOMEM);
			return;
		}
		file->data = data;
		file->room = room;
	}
	memcpy(file->data + offset, buf->mem, buf->size);
	if (end > file->size)
		file->size = end;
	file->written_ns = lakefs_request_realtime_ns();
	answered[FUSE_WRITE]++;
	reply_write(request, buf->size);
}

static void setattr(fuse_req_t request, fuse_ino_t inode, struct stat *attributes, int to_set,
		    struct fuse_file_info *info)
{
	const int times = FUSE_SET_ATTR_MTIME | FUSE_SET_ATTR_CTIME;
	struct directory *directory;
	struct created *file = to_set & ~times ? NULL : received(inode);
	struct stat now;

	if (!file || !may_set(inode, to_set & times ? FATTR_MTIME : 0, attributes->st_mtim.tv_sec)) {
		next.setattr(request, inode, attributes, to_set, info);
		return;
	}
	file->written_ns = (int64_t)attributes->st_mtim.tv_sec * NS + attributes->st_mtim.tv_nsec;
	now = attributes_of(file);
	directory = lakefs_lent_directory(file->parent);
	answered[FUSE_SETATTR]++;
	reply_attr(request, &now, directory ? (double)directory->remembered_ns / NS : 0);
}

static void getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	struct created *file = received(inode);
	struct directory *directory = file ? lakefs_lent_directory(file->parent) : NULL;
	struct stat now;

	if (!file) {
		next.getattr(request, inode, info);
		return;
	}
	now = attributes_of(file);
	answered[FUSE_GETATTR]++;
	reply_attr(request, &now, directory ? (double)directory->remembered_ns / NS : 0);
}

static void flush(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	struct created *file;

	if (!may_close(inode, context_of(request)->pid)) {
		next.flush(request, inode, info);
		return;
	}
	file = received(inode);
	file->state = CLOSING;
	file->wanted = CLOSE;
	file->flush = request;
	receiving--;
	waiting++;
	answered[FUSE_FLUSH]++;
	if (!lakefs_receiving_without_python())
		lakefs_creating_after();
}

static void release(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *info)
{
	if (!may_release(inode, info->fh)) {
		next.release(request, inode, info);
		return;
	}
	forget_file(find_file(inode));
	answered[FUSE_RELEASE]++;
	reply_error(request, 0);
}

void lakefs_creating_wrap(struct fuse_lowlevel_ops *operations, void *libfuse)
{
	*(void **)&context_of = dlsym(libfuse, "fuse_req_ctx");
	*(void **)&reply_error = dlsym(libfuse, "fuse_reply_err");
	*(void **)&reply_entry = dlsym(libfuse, "fuse_reply_entry");
	*(void **)&reply_attr = dlsym(libfuse, "fuse_reply_attr");
	*(void **)&reply_write = dlsym(libfuse, "fuse_reply_write");
	*(void **)&reply_create = dlsym(libfuse, "fuse_reply_create");
	next = *operations;
	if (!context_of || !reply_error || !reply_entry || !reply_attr || !reply_write || !next.lookup || !next.create ||
	    !next.write_buf || !next.setattr || !next.getattr || !next.flush || !next.release)
		reply_create = NULL; /* nothing is ever created here */
	if (!reply_create)
		return;
	operations->lookup = lookup;
	operations->create = create;
	operations->write_buf = write_buf;
	operations->setattr = setattr;
	operations->getattr = getattr;
	operations->flush = flush;
	operations->release = release;
}

int64_t lakefs_creating_newest(uint64_t parent)
{
	int64_t newest_ns = INT64_MIN;

	for (unsigned at = 0; at < used && receiving; at++)
		if (files[at].state == RECEIVING && files[at].parent == parent && files[at].created_ns > newest_ns)
			newest_ns = files[at].created_ns;
	return newest_ns;
}

int lakefs_creating_some(void)
{
	return receiving || waiting;
}

/* -- handing over */

/* A file, those in a directory that nobody has closed yet, or all. */
static void want(uint64_t inode, int all, int handles)
{
	for (unsigned at = 0; at < used; at++) {
		struct created *file = &files[at];
		int meant = all || file->inode == inode;

		if (file->state == RECEIVING && (meant || file->parent == inode))
			file->wanted = OPEN;
		else if ((file->state == CLOSED || file->state == CLOSING) && meant && handles && !file->given)
			file->wanted == CLOSE ? (file->handle_too = 1) : (file->wanted = HANDLE);
		else
			continue;
		waiting++;
	}
}

void lakefs_creating_after(void)
{
	if (waiting && serve)
		serve();
	waiting = 0;
}

void lakefs_creating_before(const struct fuse_in_header *head)
{
	if (!used)
		return;
	switch (head ? head->opcode : FUSE_RENAME) {
	case FUSE_UNLINK:
	case FUSE_RMDIR:
	case FUSE_RENAME:
	case FUSE_RENAME2:
	case FUSE_SYNCFS:
	case FUSE_DESTROY:
		want(0, 1, 1);
		break;
	case FUSE_INTERRUPT:
		break;
	case FUSE_LOOKUP:
	case FUSE_OPEN:
	case FUSE_GETATTR:
	case FUSE_GETXATTR:
	case FUSE_LISTXATTR:
		want(head->nodeid, 0, 0);
		break;
	default:
		want(head->nodeid, 0, 1);
	}
	lakefs_creating_after();
}

/* Everything that Python does not know yet, for it to be told by `lakefs_creating_next`. */
void lakefs_creating_want_all(void)
{
	want(0, 1, 1);
	waiting = 0;
}

/* The next file that Python is to do something with; 0 where there is none. The bytes are there until the next call. */
int lakefs_creating_next(struct taken *taken)
{
	static char *handed;
	static char name[NAME_BYTES_MAX + 1];

	free(handed);
	handed = NULL;
	for (unsigned at = 0; at < used; at++) {
		struct created *file = &files[at];

		if (file->state == FREE || file->wanted == NOTHING)
			continue;
		strcpy(name, file->name);
		*taken = (struct taken){
			file->inode, file->parent, file->created_ns, file->written_ns, file->mode & 07777, file->uid,
			file->gid, file->pid, file->size, file->wanted, file->data, name,
		};
		handed = file->data;
		file->data = NULL;
		if (file->state != CLOSING) {
			forget_file(file);
			return 1;
		}
		file->given = file->wanted == HANDLE;
		file->wanted = file->handle_too ? HANDLE : NOTHING;
		file->handle_too = 0;
		return 1;
	}
	return 0;
}

/* What came of closing files: from here on their handles are released without asking, or, after an error, are
 * Python's. Answers 0 where nobody waited for one of them. */
int lakefs_creating_closed(uint64_t inode, int error)
{
	struct created *file = find_file(inode);
	fuse_req_t request;

	if (!file || file->state != CLOSING || !serve)
		return 0;
	request = file->flush;
	file->state = CLOSED;
	file->flush = NULL;
	if (error || file->given)
		forget_file(file);
	reply_error(request, error);
	return 1;
}

void lakefs_creating_serve(void (*callback)(void))
{
	serve = callback;
}

/* Inodes that may be given out here; those of the last call that were not are never used. */
void lakefs_creating_inodes(uint64_t first, uint64_t count)
{
	inode_next = first;
	inode_end = first + count;
}

uint64_t lakefs_creating_inodes_left(void)
{
	return inode_end - inode_next;
}

/* Requests of a kind that were answered here. */
int64_t lakefs_creating_answered(uint32_t opcode)
{
	return opcode <= FUSE_CREATE ? answered[opcode] : 0;
}
