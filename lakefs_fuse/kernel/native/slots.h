/* Where an inode is in a table of a fixed size: one of the PROBES slots that begin with that of its hash. */
#ifndef LAKEFS_SLOTS_H
#define LAKEFS_SLOTS_H

#include <stdint.h>

#define PROBES 8

/* `slots`: how many there are, at most 2^24. */
static inline uint32_t lakefs_slot(uint64_t inode, unsigned probe, uint32_t slots)
{
	return ((uint32_t)(inode * 0x9E3779B97F4A7C15ULL >> 40) + probe) % slots;
}

#endif
