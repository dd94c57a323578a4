/*
 * Attributes of directories, which need no Python.
 *
 * Each name that is made or taken away makes the kernel forget its directory's attributes, permissions included, and
 * ask for them before it takes the next path through it. Python says here what it has answered, and for how long that
 * counts; later what they are after each change.
 *
 * Single-threaded, as hooks.c.
 */
#include "attribute_cache.h"

#include <string.h>

#include "create_offload.h"
#include "request_loop.h"
#include "slots.h"

/* Of those that an inode may have, one that has ended gives way. */
#define SLOTS (1U << 12)
#define NS 1000000000LL

struct remembered {
	struct stat attributes;
	int64_t until_ns;
};

static struct remembered slots[SLOTS];
static int (*reply_attr)(fuse_req_t, const struct stat *, double);
static int64_t answered;

void lakefs_remembered_replies(int (*reply)(fuse_req_t, const struct stat *, double))
{
	reply_attr = reply;
}

static struct remembered *slot_of(uint64_t inode, unsigned probe)
{
	return &slots[lakefs_slot(inode, probe, SLOTS)];
}

static struct remembered *find(uint64_t inode)
{
	for (unsigned probe = 0; probe < PROBES; probe++)
		if (slot_of(inode, probe)->attributes.st_ino == inode)
			return slot_of(inode, probe);
	return NULL;
}

int lakefs_remembered_answers(uint64_t inode)
{
	struct remembered *slot = reply_attr ? find(inode) : NULL;

	return slot && slot->until_ns > lakefs_request_ns();
}

void lakefs_remembered_answer(fuse_req_t request, uint64_t inode)
{
	struct remembered *slot = find(inode);
	int64_t left_ns = slot->until_ns - lakefs_now_ns();

	answered++;
	reply_attr(request, &slot->attributes, left_ns > 0 ? (double)left_ns / NS : 0);
}

void lakefs_remembered_take(uint64_t inode)
{
	struct remembered *slot = find(inode);

	if (slot)
		memset(slot, 0, sizeof(*slot));
}

static struct timespec time_of(int64_t ns)
{
	int64_t rest_ns = (ns % NS + NS) % NS;

	return (struct timespec){(ns - rest_ns) / NS, rest_ns};
}

void lakefs_remembered_touch(uint64_t inode, int64_t now_ns)
{
	struct remembered *slot = find(inode);

	if (slot)
		slot->attributes.st_mtim = slot->attributes.st_atim = slot->attributes.st_ctim = time_of(now_ns);
}

/*
 * Attributes of a directory. With `for_ns` they may be answered for so long; with 0 they are what has come of those
 * that may be answered already, if any may.
 */
void lakefs_remember(uint64_t inode, uint32_t mode, uint32_t uid, uint32_t gid, int64_t mtime_ns, int64_t ctime_ns,
		     uint32_t block_bytes, int64_t for_ns)
{
	struct remembered *slot = find(inode);

	for (unsigned probe = 0; !slot && for_ns > 0 && probe < PROBES; probe++)
		if (slot_of(inode, probe)->until_ns < lakefs_now_ns())
			slot = slot_of(inode, probe);
	if (!slot)
		return;
	if (for_ns > 0)
		slot->until_ns = lakefs_now_ns() + for_ns;
	slot->attributes = (struct stat){
		.st_ino = inode,
		.st_nlink = 1,
		.st_mode = mode,
		.st_uid = uid,
		.st_gid = gid,
		.st_blksize = block_bytes,
		.st_mtim = time_of(mtime_ns),
		.st_atim = time_of(mtime_ns),
		.st_ctim = time_of(ctime_ns),
	};
	if (lakefs_creating_newest(inode) > mtime_ns)
		lakefs_remembered_touch(inode, lakefs_creating_newest(inode));
}

/* GETATTRs that were answered here. */
int64_t lakefs_remembered_answered(void)
{
	return answered;
}
