/*
 * FUSE_HANDLE_KILLPRIV_V2: the daemon, not the kernel, drops suid and sgid of a file that is written or truncated.
 *
 * A kernel that drops them itself requests security.capability before every write(2). With the feature the kernel
 * requests it once for each file, and a flag of WRITE and SETATTR says that the caller lacks CAP_FSETID. OPEN never
 * carries the flag, because O_TRUNC arrives as SETATTR (`init` of dispatch.c), and CREATE opens no file that exists.
 *
 * libfuse before 3.17 does not know the feature, and does not pass on the flags. libfuse of every version therefore
 * reads requests through `read_request`, which records the flag of each, and writes replies through `write_answer`,
 * which adds the feature to the reply to INIT. Another thread may write nothing but notifications to the kernel.
 */
#include "native.h"

#include <stddef.h>
#include <sys/uio.h>
#include <unistd.h>

static uint64_t init_unique;
static int offered, accepted;
static int kills;

static int offers(const struct fuse_init_in *init)
{
	return init->major == FUSE_KERNEL_VERSION && init->flags & FUSE_HANDLE_KILLPRIV_V2;
}

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

/* Record the flag of a request from the kernel; of INIT, whether it offers the feature. */
void lakefs_parse_killpriv(const struct fuse_in_header *head)
{
	kills = accepted && carries_flag(head);
	if (head->opcode == FUSE_INIT) {
		init_unique = head->unique;
		offered = offers((const struct fuse_init_in *)(head + 1));
	}
}

/* Add the feature, if accepted, to the reply to INIT; other replies stay as they are. */
void lakefs_amend_init(const struct iovec *iov, int count)
{
	const struct fuse_out_header *head = iov[0].iov_base;

	if (accepted && head->unique == init_unique && !head->error && count == 2 &&
	    iov[1].iov_len >= offsetof(struct fuse_init_out, flags) + sizeof(uint32_t))
		((struct fuse_init_out *)iov[1].iov_base)->flags |= FUSE_HANDLE_KILLPRIV_V2;
}

static ssize_t read_request(int fd, void *buf, size_t bytes, void *userdata)
{
	ssize_t size = read(fd, buf, bytes);

	(void)userdata;
	if (size >= (ssize_t)sizeof(struct fuse_in_header))
		lakefs_parse_killpriv(buf);
	return size;
}

static ssize_t write_answer(int fd, struct iovec *iov, int count, void *userdata)
{
	(void)userdata;
	lakefs_amend_init(iov, count);
	return writev(fd, iov, count);
}

void lakefs_watch_privileges(struct fuse_session *session, int fd)
{
	static const struct fuse_custom_io io = {.writev = write_answer, .read = read_request};

	if (libfuse.session_custom_io)
		libfuse.session_custom_io(session, &io, fd);
}

int lakefs_accept_killpriv(void)
{
	accepted = offered;
	return accepted;
}

/* Called from Python: return whether the request whose handler runs must drop suid and sgid. */
int lakefs_kills_privileges(void)
{
	return kills;
}
