/*
 * Features that the kernel offers in INIT, and that libfuse does not request: FUSE_HANDLE_KILLPRIV_V2, which libfuse
 * before 3.17 does not know, and FUSE_PARALLEL_DIROPS, which libfuse counts as requested and leaves out of its reply.
 * Without the latter the kernel sends LOOKUP and READDIR of one directory one after the other.
 *
 * libfuse of every version reads requests and writes replies through these functions, which add the features to the
 * reply to INIT. Another thread may write nothing but notifications to the kernel.
 */
#include "native.h"

#include <stddef.h>
#include <sys/uio.h>
#include <unistd.h>

static uint64_t init_unique;
static uint32_t offered, accepted;

/* Record what INIT offers; other requests change nothing. */
void lakefs_record_offer(const struct fuse_in_header *head)
{
	const struct fuse_init_in *init = (const struct fuse_init_in *)(head + 1);

	if (head->opcode != FUSE_INIT)
		return;
	init_unique = head->unique;
	offered = init->major == FUSE_KERNEL_VERSION ? init->flags : 0;
	accepted = 0;
}

int lakefs_accept_init_flag(uint32_t flag)
{
	accepted |= offered & flag;
	return !!(offered & flag);
}

/* Add the accepted features to the reply to INIT; other replies stay as they are. */
void lakefs_amend_init(const struct iovec *iov, int count)
{
	const struct fuse_out_header *head = iov[0].iov_base;

	if (head->unique == init_unique && !head->error && count == 2 &&
	    iov[1].iov_len >= offsetof(struct fuse_init_out, flags) + sizeof(uint32_t))
		((struct fuse_init_out *)iov[1].iov_base)->flags |= accepted;
}

static ssize_t read_request(int fd, void *buf, size_t bytes, void *userdata)
{
	ssize_t size = read(fd, buf, bytes);

	(void)userdata;
	if (size >= (ssize_t)sizeof(struct fuse_in_header)) {
		lakefs_record_offer(buf);
		lakefs_parse_killpriv(buf);
	}
	return size;
}

static ssize_t write_answer(int fd, struct iovec *iov, int count, void *userdata)
{
	(void)userdata;
	lakefs_amend_init(iov, count);
	return writev(fd, iov, count);
}

void lakefs_watch_session(struct fuse_session *session, int fd)
{
	static const struct fuse_custom_io io = {.writev = write_answer, .read = read_request};

	if (libfuse.session_custom_io)
		libfuse.session_custom_io(session, &io, fd);
}
