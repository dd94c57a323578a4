/*
 * Attributes of directories, answered without Python.
 *
 * Each name that is created or removed makes the kernel drop its directory's attributes, permissions included, and
 * ask for them before it resolves the next path through it. Python passes on what it has answered, and for how long
 * that is valid; later what the attributes are after each change.
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
 * Called by Python: attributes of a directory. With `for_ns` they may be answered for so long, and replace others that
 * have expired; with 0 they replace those that may be answered already, if there are any.
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
