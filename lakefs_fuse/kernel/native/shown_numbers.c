/*
 * The inode number that stat(2) shows of a file that link(2) made: that of the file it was linked to, for as long as
 * Python says so. Programs compare the two after a link. Node ids, by which the kernel asks, stay the files' own, so the
 * number is replaced on its way out only; pyfuse3 has one field for both.
 */
#include "native.h"

#define SLOTS (1U << 12)

static struct {
	uint64_t inode, number;
} slots[SLOTS];
static int used; /* any was ever */

/* Called by Python; 0: its own from now on. Answers 0 where there is no room. */
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

/* Changed in place and back: a copy would lack what a later libfuse has at its end. */
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
