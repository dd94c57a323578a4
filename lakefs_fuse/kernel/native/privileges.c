/*
 * FUSE_HANDLE_KILLPRIV_V2: the daemon, not the kernel, drops suid and sgid of a file that is written or truncated.
 *
 * A kernel that drops them itself requests security.capability before every write(2). With the feature the kernel
 * requests it once for each file, and a flag of WRITE and SETATTR says that the caller lacks CAP_FSETID. OPEN never
 * carries the flag, because O_TRUNC arrives as SETATTR (`init` of dispatch.c), and CREATE opens no file that exists.
 *
 * libfuse before 3.17 does not pass on the flags, so init_flags.c shows each request to this file.
 */
#include "native.h"

static int accepted;
static int kills;

static int carries_flag(const struct fuse_in_header *head)
{
	const void *body = head + 1;

	switch (head->opcode) {
	case FUSE_WRITE:
		return !!(((const struct fuse_write_in *)body)->write_flags & FUSE_WRITE_KILL_SUIDGID);
	case FUSE_SETATTR:
		return !!(((const struct fuse_setattr_in *)body)->valid & FATTR_KILL_SUIDGID);
	default:
		return 0;
	}
}

/* Record the flag of a request from the kernel. */
void lakefs_parse_killpriv(const struct fuse_in_header *head)
{
	kills = accepted && carries_flag(head);
}

void lakefs_set_killpriv(int is_accepted)
{
	accepted = is_accepted;
}

/* Called from Python: return whether the request whose handler runs must drop suid and sgid. */
int lakefs_kills_privileges(void)
{
	return kills;
}
