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

/* With `for_ns` the attributes may replace those of another directory that have expired; without such a slot they are
 * not cached. */
void lakefs_keep_attributes(const struct stat *attributes, int64_t for_ns)
{
	struct cached *slot = find(attributes->st_ino);

	for (unsigned probe = 0; !slot && for_ns > 0 && probe < PROBES; probe++)
		if (slot_of(attributes->st_ino, probe)->until_ns < lakefs_monotonic_ns())
			slot = slot_of(attributes->st_ino, probe);
	if (!slot)
		return;
	if (for_ns > 0)
		slot->until_ns = lakefs_monotonic_ns() + for_ns;
	slot->attributes = *attributes;
}
