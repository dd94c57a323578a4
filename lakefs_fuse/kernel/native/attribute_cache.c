/*
 * A cache of directory attributes, from which GETATTR is replied to without entering Python.
 *
 * When a name is created or removed, the kernel drops the attributes of its directory, permissions included, and
 * requests them before it resolves the next path through the directory. Python passes on the attributes that it replied
 * with, and for how long they are valid; later the new attributes after each change.
 */
#include "native.h"

#define SLOTS (1U << 12)

struct cached {
	struct stat attributes;
	int64_t until_ns;
};

static struct cached slots[SLOTS];

static struct cached *slot_of(uint64_t inode, unsigned probe)
{
	return &slots[slot_index(inode, probe, SLOTS)];
}

static struct cached *find(uint64_t inode)
{
	for (unsigned probe = 0; probe < PROBES; probe++)
		if (slot_of(inode, probe)->attributes.st_ino == inode)
			return slot_of(inode, probe);
	return NULL;
}

int lakefs_has_attributes(uint64_t inode)
{
	struct cached *slot = find(inode);

	return slot && slot->until_ns > lakefs_request_time.monotonic_ns;
}

void lakefs_reply_attributes(fuse_req_t request, uint64_t inode)
{
	struct cached *slot = find(inode);
	int64_t left_ns = slot->until_ns - lakefs_monotonic_ns();

	lakefs_count(FUSE_GETATTR);
	libfuse.reply_attr(request, &slot->attributes, left_ns > 0 ? (double)left_ns / NS : 0);
}

void lakefs_drop_attributes(uint64_t inode)
{
	struct cached *slot = find(inode);

	if (slot)
		memset(slot, 0, sizeof(*slot));
}

void lakefs_touch_attributes(uint64_t inode, int64_t now_ns)
{
	struct cached *slot = find(inode);

	if (slot)
		slot->attributes.st_mtim = slot->attributes.st_atim = slot->attributes.st_ctim = timespec_of(now_ns);
}

/*
 * Cache attributes of a directory; called from Python. With `for_ns` they are valid for this time, and may replace
 * those of another directory that have expired; without such a slot they are not cached. With 0 they replace the
 * directory's cached attributes, if there are any, and expire when those would have.
 */
void lakefs_cache_attributes(uint64_t inode, uint32_t mode, uint32_t uid, uint32_t gid, int64_t mtime_ns,
			     int64_t ctime_ns, uint32_t block_bytes, int64_t for_ns)
{
	struct cached *slot = find(inode);

	for (unsigned probe = 0; !slot && for_ns > 0 && probe < PROBES; probe++)
		if (slot_of(inode, probe)->until_ns < lakefs_monotonic_ns())
			slot = slot_of(inode, probe);
	if (!slot)
		return;
	if (for_ns > 0)
		slot->until_ns = lakefs_monotonic_ns() + for_ns;
	slot->attributes = (struct stat){
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
	if (lakefs_newest_created_ns(inode) > mtime_ns)
		lakefs_touch_attributes(inode, lakefs_newest_created_ns(inode));
}
