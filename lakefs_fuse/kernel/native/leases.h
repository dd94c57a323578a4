/* Directories that are lent, with all the names there are in them: see lent_names.c. */
#ifndef LAKEFS_LENT_NAMES_H
#define LAKEFS_LENT_NAMES_H

#include <stddef.h>
#include <stdint.h>

/* A longer name is left to Python. */
#define NAME_BYTES_MAX 200

struct directory {
	uint64_t inode;
	uint64_t seed; /* of its names' hashes */
	int64_t until_ns;
	int64_t remembered_ns; /* how long the kernel may remember what is answered */
	uint32_t name_bytes_max;
};

/* The directory, if it is lent; else NULL. */
struct directory *lakefs_lent_directory(uint64_t inode);

/* The directory, where it is lent and has no such name; else NULL. */
struct directory *lakefs_lent_lacking(uint64_t inode, const char *name);

/* It has this name from now on. */
void lakefs_lent_add(const struct directory *directory, const char *name, size_t bytes);

/* No more names can be kept. */
int lakefs_lent_full(void);

#endif
