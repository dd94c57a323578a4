/*
 * The names of directories that Python has lent: which there are, and so which there are not.
 *
 * What always holds: every name that Python has, or may have, in a directory that is lent, is here. Names are kept as
 * hashes, which a name that is not there may share with one that is: then Python is asked, as for all that this does not
 * know. They stay until no directory is lent any more.
 *
 * Single-threaded, as hooks.c.
 */
#include "leases.h"

#include <string.h>

#include "request_loop.h"

#define DIRECTORIES 64
#define NAMES (1U << 18)

static struct directory directories[DIRECTORIES];
static uint64_t names[NAMES];
static uint32_t names_used;
static uint64_t seeds;

static uint64_t hash_of(uint64_t seed, const char *name, size_t bytes)
{
	uint64_t hash = seed ^ 0xCBF29CE484222325ULL;

	for (size_t at = 0; at < bytes; at++)
		hash = (hash ^ (uint8_t)name[at]) * 0x100000001B3ULL;
	hash ^= hash >> 32;
	hash *= 0x9E3779B97F4A7C15ULL;
	return hash ? hash : 1; /* 0 is a free slot */
}

static uint64_t *place_of(uint64_t hash)
{
	uint32_t at = (uint32_t)(hash >> 40) % NAMES;

	while (names[at] && names[at] != hash)
		at = (at + 1) % NAMES;
	return &names[at];
}

void lakefs_lent_add(const struct directory *directory, const char *name, size_t bytes)
{
	uint64_t hash = hash_of(directory->seed, name, bytes), *place = place_of(hash);

	names_used += !*place;
	*place = hash;
}

int lakefs_lent_full(void)
{
	return names_used >= NAMES / 2;
}

struct directory *lakefs_lent_directory(uint64_t inode)
{
	for (unsigned at = 0; at < DIRECTORIES; at++)
		if (directories[at].inode == inode)
			return &directories[at];
	return NULL;
}

/* Names that need no second look: every store takes them, and none is reserved. */
static int is_plain(const char *name, size_t bytes_max)
{
	size_t bytes;

	if (*name == '.')
		return 0;
	for (bytes = 0; name[bytes]; bytes++)
		if (name[bytes] < ' ' || name[bytes] > '~' || name[bytes] == '\\' || bytes >= bytes_max)
			return 0;
	return bytes > 0;
}

struct directory *lakefs_lent_lacking(uint64_t parent, const char *name)
{
	struct directory *directory = lakefs_lent_directory(parent);

	if (!directory || lakefs_lent_full() || directory->until_ns <= lakefs_request_ns() ||
	    !is_plain(name, directory->name_bytes_max))
		return NULL;
	return *place_of(hash_of(directory->seed, name, strlen(name))) ? NULL : directory;
}

/* -- what Python says */

/* Names of a directory that is lent: so many bytes, each ended by a zero. Answers 0 where it is not, or has too many. */
int lakefs_lent_names(uint64_t inode, const char *more, size_t bytes)
{
	struct directory *directory = lakefs_lent_directory(inode);
	const char *end = more + bytes;

	for (; directory && more < end && !lakefs_lent_full(); more += strlen(more) + 1)
		lakefs_lent_add(directory, more, strlen(more));
	return directory && !lakefs_lent_full();
}

/* The directory is lent so long, without names at first; or, where it is lent already, from now on so long. Answers 0
 * where there is no room. */
int lakefs_lent_lend(uint64_t inode, int64_t for_ns, int64_t remembered_ns, uint32_t name_bytes_max)
{
	struct directory *directory = lakefs_lent_directory(inode);

	if (!directory && (directory = lakefs_lent_directory(0)))
		directory->seed = ++seeds * 0x9E3779B97F4A7C15ULL;
	if (!directory || lakefs_lent_full())
		return 0;
	directory->inode = inode;
	directory->until_ns = lakefs_now_ns() + for_ns;
	directory->remembered_ns = remembered_ns;
	directory->name_bytes_max = name_bytes_max < NAME_BYTES_MAX ? name_bytes_max : NAME_BYTES_MAX;
	return 1;
}

/* No directory is lent any more. What was created in them stays as it is. */
void lakefs_lent_none(void)
{
	memset(directories, 0, sizeof(directories));
	if (names_used)
		memset(names, 0, sizeof(names));
	names_used = 0;
}

/* This one is not, if it was. Its names are forgotten with all others. */
void lakefs_lent_take(uint64_t inode)
{
	struct directory *directory = lakefs_lent_directory(inode);

	if (directory)
		memset(directory, 0, sizeof(*directory));
}
