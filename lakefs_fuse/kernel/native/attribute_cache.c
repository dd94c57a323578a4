/*
 * A cache of directory attributes, from which GETATTR is replied to without entering Python.
 *
 * When a name is created or removed, the kernel drops the attributes of its directory, permissions included, and
 * requests them before it resolves the next path through the directory. Python passes on the attributes that it replied
 * with, and for how long they are valid; later the new attributes after each change.
 *
 * The name of such a directory may be known, too. mkdir(2) of a name that exists, as programs call it before they write
 * a file, makes the kernel look it up each time. Python reports the name that it replied with. Names in a directory are
 * forgotten when Python replaces its attributes, as with each change of a name there, or when those expire; and all
 * names when another client changed some.
 */
#include "native.h"

#define SLOTS (1U << 12)
#define BY_NAME (1U << 13)
#define KNOWN_NAME_BYTES_MAX 47

struct cached {
	struct stat attributes;
	int64_t until_ns;
	int64_t named_until_ns;
	uint64_t names_version; /* another one when a name in this directory may have changed */
	uint64_t names_round;	/* in which the name of this directory became known */
	uint64_t parent;
	uint64_t parent_version;
	char name[KNOWN_NAME_BYTES_MAX + 1];
};

static struct cached slots[SLOTS];
static uint64_t by_name[BY_NAME]; /* inodes, by a hash of directory and name; the latest one stays */
static uint64_t names_round = 1, names_versions;

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
	if (slot->attributes.st_ino != attributes->st_ino)
		slot->names_round = 0;
	if (for_ns <= 0 || slot->attributes.st_ino != attributes->st_ino || slot->until_ns < lakefs_monotonic_ns())
		slot->names_version = ++names_versions;
	if (for_ns > 0)
		slot->until_ns = lakefs_monotonic_ns() + for_ns;
	slot->attributes = *attributes;
}

/* -- names */

static uint64_t *place_of(uint64_t parent, const char *name)
{
	uint64_t hash = parent * 0x9E3779B97F4A7C15ULL ^ 0xCBF29CE484222325ULL;

	for (; *name; name++)
		hash = (hash ^ (uint8_t)*name) * 0x100000001B3ULL;
	return &by_name[(hash ^ hash >> 32) % BY_NAME];
}

static struct cached *find_named(uint64_t parent, const char *name)
{
	uint64_t inode = *place_of(parent, name);
	struct cached *slot = inode ? find(inode) : NULL, *above = slot ? find(parent) : NULL;

	if (!above || slot->names_round != names_round || slot->parent != parent || strcmp(slot->name, name))
		return NULL;
	if (!lakefs_has_attributes(parent) || slot->parent_version != above->names_version)
		return NULL;
	return slot->named_until_ns > lakefs_request_time.monotonic_ns && lakefs_has_attributes(inode) ? slot : NULL;
}

int lakefs_knows_directory(uint64_t parent, const char *name)
{
	return !!find_named(parent, name);
}

void lakefs_reply_directory(fuse_req_t request, uint64_t parent, const char *name)
{
	const struct cached *slot = find_named(parent, name);
	int64_t now_ns = lakefs_request_time.monotonic_ns;
	struct fuse_entry_param entry = {
		.ino = slot->attributes.st_ino,
		.attr = slot->attributes,
		.attr_timeout = (double)(slot->until_ns - now_ns) / NS,
		.entry_timeout = (double)(slot->named_until_ns - now_ns) / NS,
	};

	lakefs_count(FUSE_LOOKUP);
	libfuse.reply_entry(request, &entry);
}

/* -- called from Python */

/* Reply to LOOKUP of a directory for this time, if its attributes and those of its parent are cached. */
void lakefs_know_directory(uint64_t parent, const char *name, uint64_t inode, int64_t for_ns)
{
	struct cached *slot = find(inode), *above = find(parent);

	if (!slot || !above || strlen(name) > KNOWN_NAME_BYTES_MAX)
		return;
	slot->parent = parent;
	slot->parent_version = above->names_version;
	slot->names_round = names_round;
	slot->named_until_ns = lakefs_monotonic_ns() + for_ns;
	strcpy(slot->name, name);
	*place_of(parent, name) = inode;
}

/* Forget the names of all directories. */
void lakefs_forget_directories(void)
{
	names_round++;
}
