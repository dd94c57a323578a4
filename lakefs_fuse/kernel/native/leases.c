/*
 * Leases: rights of this library to reply without entering Python, until they expire or Python revokes them.
 *
 * Lease on opening a file: the file may be opened for reading, as Python has opened it before. Python revokes the lease
 * before the inode is removed or refers to another version, or before a decision depends on open handles, and then owns
 * the handles that were issued. While it lasts, this library may also know the attributes of the file, with which it
 * replies to GETATTR. They are forgotten before Python gets a request that may change them, and all of them when a name
 * changes that this mount did not change.
 *
 * Lease on the names of a directory: this library knows every name that Python has, or may have, in the directory, so
 * any other name is absent and may be created. It keeps hashes of the names. If an absent name has the hash of a known
 * one, the request is passed to Python, as for every name that is not certainly absent. The hash of a removed name is
 * removed; if another name had the same (2^-64 for two names), a file of that name is created as its next version.
 * Hashes of a directory whose names are revoked are kept until those of all are.
 */
#include "native.h"

#define OPEN_SLOTS (1U << 16)
#define DIRECTORIES 256
#define NAME_SLOTS (1U << 18)
/* What reserved names begin with (product.py). */
#define RESERVED ".lakefs"

static struct open_lease opens[OPEN_SLOTS];
static uint64_t attributes_round = 1; /* attributes of earlier rounds are forgotten */
static int watching;
static struct name_lease directories[DIRECTORIES];
static uint64_t names[NAME_SLOTS];
static uint32_t names_used;
static uint64_t seeds;

static struct open_lease *slot_of(uint64_t inode, unsigned probe)
{
	return &opens[slot_index(inode, probe, OPEN_SLOTS)];
}

struct open_lease *lakefs_open_lease(uint64_t inode)
{
	for (unsigned probe = 0; probe < PROBES; probe++)
		if (slot_of(inode, probe)->inode == inode)
			return slot_of(inode, probe);
	return NULL;
}

struct open_lease *lakefs_known_attributes(uint64_t inode)
{
	struct open_lease *lease = lakefs_open_lease(inode);

	if (!lease || lease->known.round != attributes_round || lease->until_ns <= lakefs_request_time.monotonic_ns)
		return NULL;
	return lease;
}

void lakefs_reply_known(fuse_req_t request, const struct open_lease *lease)
{
	const struct known_attributes *known = &lease->known;
	int64_t left_ns = lease->until_ns - lakefs_monotonic_ns();
	struct stat attributes = {
		.st_ino = lease->inode,
		.st_nlink = 1,
		.st_mode = known->mode,
		.st_uid = known->uid,
		.st_gid = known->gid,
		.st_size = (off_t)known->size,
		.st_blocks = (blkcnt_t)((known->size + 511) / 512),
		.st_blksize = FILE_BLOCK_BYTES,
		.st_mtim = timespec_of(known->mtime_ns),
		.st_atim = timespec_of(known->mtime_ns),
		.st_ctim = timespec_of(known->ctime_ns),
	};

	libfuse.reply_attr(request, &attributes, left_ns > 0 ? (double)left_ns / NS : 0);
}

void lakefs_forget_attributes(uint64_t inode)
{
	struct open_lease *lease = lakefs_open_lease(inode);

	if (lease)
		lease->known.round = 0;
}

void lakefs_watch_changes(void)
{
	watching = 1;
}

void lakefs_forget_before(const struct fuse_in_header *head)
{
	const void *body = head + 1;

	if (!head) {
		attributes_round++;
		return;
	}
	switch (head->opcode) {
	case FUSE_OPEN:
		if ((((const struct fuse_open_in *)body)->flags & O_ACCMODE) != O_RDONLY)
			lakefs_forget_attributes(head->nodeid);
		break;
	case FUSE_LINK:
		lakefs_forget_attributes(((const struct fuse_link_in *)body)->oldnodeid);
		break;
	case FUSE_COPY_FILE_RANGE:
		lakefs_forget_attributes(((const struct fuse_copy_file_range_in *)body)->nodeid_out);
		break;
	case FUSE_LOOKUP:
	case FUSE_GETATTR:
	case FUSE_GETXATTR:
	case FUSE_LISTXATTR:
	case FUSE_READ:
	case FUSE_FLUSH:
	case FUSE_RELEASE:
	case FUSE_FSYNC:
		break;
	default: /* about a file that changes, or a directory, whose attributes are not here */
		lakefs_forget_attributes(head->nodeid);
	}
}

static uint64_t hash_of(uint64_t seed, const char *name, size_t bytes)
{
	uint64_t hash = seed ^ 0xCBF29CE484222325ULL;

	for (size_t at = 0; at < bytes; at++)
		hash = (hash ^ (uint8_t)name[at]) * 0x100000001B3ULL;
	hash ^= hash >> 32;
	hash *= 0x9E3779B97F4A7C15ULL;
	return hash ? hash : 1; /* 0 marks a free slot */
}

static uint32_t home_of(uint64_t hash)
{
	return (uint32_t)(hash >> 40) % NAME_SLOTS;
}

static uint64_t *place_of(uint64_t hash)
{
	uint32_t at = home_of(hash);

	while (names[at] && names[at] != hash)
		at = (at + 1) % NAME_SLOTS;
	return &names[at];
}

void lakefs_add_name(const struct name_lease *lease, const char *name, size_t bytes)
{
	uint64_t hash = hash_of(lease->seed, name, bytes), *place = place_of(hash);

	names_used += !*place;
	*place = hash;
}

/* Free a slot. Hashes after it, up to the next free slot, move back if they are still found from their home then. */
static void free_place(uint64_t *place)
{
	uint32_t hole = (uint32_t)(place - names), at = hole;

	while (names[at = (at + 1) % NAME_SLOTS])
		if ((at - home_of(names[at])) % NAME_SLOTS >= (at - hole) % NAME_SLOTS) {
			names[hole] = names[at];
			hole = at;
		}
	names[hole] = 0;
	names_used--;
}

int lakefs_is_name_table_full(void)
{
	return names_used >= NAME_SLOTS / 2;
}

struct name_lease *lakefs_name_lease(uint64_t directory)
{
	for (unsigned at = 0; at < DIRECTORIES; at++)
		if (directories[at].directory == directory)
			return &directories[at];
	return NULL;
}

/* Return whether every store accepts the name, it is not reserved, and it has `bytes_max` bytes at most. */
static int is_plain(const char *name, size_t bytes_max)
{
	size_t bytes;

	if (!strncmp(name, RESERVED, strlen(RESERVED)) || !strcmp(name, ".") || !strcmp(name, ".."))
		return 0;
	for (bytes = 0; name[bytes]; bytes++)
		if (name[bytes] < ' ' || name[bytes] > '~' || name[bytes] == '\\' || bytes >= bytes_max)
			return 0;
	return bytes > 0;
}

struct name_lease *lakefs_name_lease_lacking(uint64_t directory, const char *name)
{
	struct name_lease *lease = lakefs_name_lease(directory);

	if (!lease || lakefs_is_name_table_full() || lease->until_ns <= lakefs_request_time.monotonic_ns ||
	    !is_plain(name, lease->name_bytes_max))
		return NULL;
	return *place_of(hash_of(lease->seed, name, strlen(name))) ? NULL : lease;
}

/* -- called from Python */

/* Lease opening a file for reading for this time, or renew the lease. Of the slots that the inode may have, a new lease
 * takes the one without handles that expires first; if there is none, nothing is leased. */
void lakefs_lease_open(uint64_t inode, int64_t for_ns)
{
	struct open_lease *lease = lakefs_open_lease(inode);

	for (unsigned probe = 0; probe < PROBES && (!lease || lease->inode != inode); probe++) {
		struct open_lease *other = slot_of(inode, probe);

		if (!other->handles && (!lease || other->until_ns < lease->until_ns))
			lease = other;
	}
	if (!lease)
		return;
	if (lease->inode != inode)
		lease->known.round = 0;
	lease->inode = inode;
	lease->until_ns = lakefs_monotonic_ns() + for_ns;
}

/* Reply to GETATTR of a file with these attributes, as long as opening it is leased. It has one name and no holes. */
void lakefs_know_attributes(uint64_t inode, uint32_t mode, uint32_t uid, uint32_t gid, uint64_t size, int64_t mtime_ns,
			    int64_t ctime_ns)
{
	struct open_lease *lease = watching ? lakefs_open_lease(inode) : NULL;

	if (lease)
		lease->known = (struct known_attributes){attributes_round, size, mtime_ns, ctime_ns, mode, uid, gid};
}

/* Forget the attributes of all files. */
void lakefs_forget_all_attributes(void)
{
	attributes_round++;
}

/* Revoke the lease on opening this inode, and drop its cached attributes. Returns how many handles were issued and not
 * released, which Python now owns. */
uint64_t lakefs_revoke_open(uint64_t inode)
{
	struct open_lease *lease = lakefs_open_lease(inode);
	uint64_t handles = lease ? lease->handles : 0;

	if (lease)
		memset(lease, 0, sizeof(*lease));
	lakefs_drop_attributes(inode);
	return handles;
}

/* Lease the names of a directory, of which none is known yet, or renew the lease. Returns 0 if all slots for
 * directories are in use, or the table of names is full. */
int lakefs_lease_names(uint64_t directory, int64_t for_ns, int64_t timeout_ns, uint32_t name_bytes_max,
		       int takes_exclusive)
{
	struct name_lease *lease = lakefs_name_lease(directory);

	if (!lease && (lease = lakefs_name_lease(0)))
		lease->seed = ++seeds * 0x9E3779B97F4A7C15ULL;
	if (!lease || lakefs_is_name_table_full())
		return 0;
	lease->directory = directory;
	lease->until_ns = lakefs_monotonic_ns() + for_ns;
	lease->timeout_ns = timeout_ns;
	lease->takes_exclusive = takes_exclusive;
	lease->name_bytes_max = name_bytes_max < NAME_BYTES_MAX ? name_bytes_max : NAME_BYTES_MAX;
	return 1;
}

/* Add names of a directory: `bytes` bytes, each name ended by a zero. Returns 0 if its names are not leased, or the
 * table of names is full. */
int lakefs_add_names(uint64_t directory, const char *more, size_t bytes)
{
	struct name_lease *lease = lakefs_name_lease(directory);
	const char *end = more + bytes;

	for (; lease && more < end && !lakefs_is_name_table_full(); more += strlen(more) + 1)
		lakefs_add_name(lease, more, strlen(more));
	return lease && !lakefs_is_name_table_full();
}

/* Remove a name of a directory, which it no longer has. */
void lakefs_remove_name(uint64_t directory, const char *name)
{
	struct name_lease *lease = lakefs_name_lease(directory);
	uint64_t *place = lease ? place_of(hash_of(lease->seed, name, strlen(name))) : NULL;

	if (place && *place)
		free_place(place);
}

/* Revoke the lease on the names of a directory. Their hashes stay until `lakefs_revoke_all_names` drops all. */
void lakefs_revoke_names(uint64_t directory)
{
	struct name_lease *lease = lakefs_name_lease(directory);

	if (lease)
		memset(lease, 0, sizeof(*lease));
}

/* Revoke the leases on all names. Files that this library has created in the directories stay as they are. */
void lakefs_revoke_all_names(void)
{
	memset(directories, 0, sizeof(directories));
	if (names_used)
		memset(names, 0, sizeof(names));
	names_used = 0;
}
