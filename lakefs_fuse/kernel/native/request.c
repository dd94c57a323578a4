/*
 * What all handlers know of requests: when the last one was read, its number, whether it is handled without the GIL, and
 * how many were handled without entering Python.
 */
#include "native.h"

struct request_time lakefs_request_time;
uint64_t lakefs_request_unique;
int lakefs_without_python;
static int64_t answered[FUSE_BATCH_FORGET + 1]; /* by opcode */

int64_t lakefs_monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * NS + now.tv_nsec;
}

void lakefs_note_request_time(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	lakefs_request_time.realtime_ns = (int64_t)now.tv_sec * NS + now.tv_nsec;
	lakefs_request_time.monotonic_ns = lakefs_monotonic_ns();
}

void lakefs_count(uint32_t opcode)
{
	answered[opcode]++;
}

/* Return how many requests of a kind were handled without entering Python; FORGET includes BATCH_FORGET. Called from
 * Python. */
int64_t lakefs_answered(uint32_t opcode)
{
	return answered[opcode];
}
