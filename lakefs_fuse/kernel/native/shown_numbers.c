/*
 * Replaces the inode numbers that stat(2) shows for files created by link(2).
 *
 * Until Python ends it, such a file shows the inode number of the file that it was linked to, because programs compare
 * the two after a link. The kernel still identifies each file by its own node id. pyfuse3 has one field for the node id
 * and the inode number, so this library replaces the number in replies.
 */
#include "native.h"

#define SLOTS (1U << 12)

static struct {
	uint64_t inode, number;
} slots[SLOTS];
static int used; /* whether any slot was ever filled */

/* Called from Python: show a number in place of the file's own; 0 shows its own. Returns 0 if there is no free slot. */
int lakefs_show_number(uint64_t inode, uint64_t number)
{
	for (unsigned probe = 0; probe < PROBES; probe++) {
		uint32_t at = slot_index(inode, probe, SLOTS);

		if (slots[at].inode == inode) {
			slots[at].number = number;
			return 1;
		}
	}
	for (unsigned probe = 0; number && probe < PROBES; probe++) {
		uint32_t at = slot_index(inode, probe, SLOTS);

		if (!slots[at].number) {
			slots[at].inode = inode;
			slots[at].number = number;
			used = 1;
			return 1;
		}
	}
	return !number;
}

static uint64_t shown(uint64_t inode)
{
	for (unsigned probe = 0; used && inode && probe < PROBES; probe++) {
		uint32_t at = slot_index(inode, probe, SLOTS);

		if (slots[at].inode == inode && slots[at].number)
			return slots[at].number;
	}
	return inode;
}

/* Set the inode number of an entry, and return the old one, which the caller restores. The structure is not copied: a
 * copy would lack members that a later libfuse appends. */
static uint64_t exchange(const struct fuse_entry_param *entry, uint64_t number)
{
	uint64_t before = entry->attr.st_ino;

	((struct fuse_entry_param *)entry)->attr.st_ino = number;
	return before;
}

int fuse_reply_entry(fuse_req_t request, const struct fuse_entry_param *entry)
{
	uint64_t before = exchange(entry, shown(entry->attr.st_ino));
	int result = libfuse.reply_entry(request, entry);

	exchange(entry, before);
	return result;
}

size_t lakefs_add_direntry(fuse_req_t request, char *buffer, size_t room, const char *name,
			   const struct fuse_entry_param *entry, off_t off)
{
	uint64_t before = exchange(entry, shown(entry->attr.st_ino));
	size_t bytes = libfuse.add_direntry_plus(request, buffer, room, name, entry, off);

	exchange(entry, before);
	return bytes;
}

int fuse_reply_attr(fuse_req_t request, const struct stat *attributes, double timeout_s)
{
	struct stat copy = *attributes;

	copy.st_ino = shown(attributes->st_ino);
	return libfuse.reply_attr(request, &copy, timeout_s);
}
