/*
 * Reads requests, and handles consecutive ones that need no Python without the GIL.
 *
 * After `lakefs_begin_reading` a read never blocks: if there is no request it returns -EINTR, whereupon pyfuse3 waits
 * for one, and `lakefs_is_drained` returns true. Requests that need no Python are handled here, and the next one is
 * read. Before that call a read is libfuse's own.
 *
 * A client that sends such a request often sends the next one immediately, and waking this thread costs more than
 * replying. After each reply the thread therefore polls for the next request for AWAIT_NS, without the GIL. After
 * AWAY_NS in all it returns, because the caller's event loop has other tasks to run.
 */
#include "native.h"
#include "python_abi.h"

#include <sched.h>
#include <unistd.h>

#define AWAIT_NS 150000
#define AWAY_NS 1000000
/* The same limit while files are received: the more of them are closed together, the less each one costs. */
#define AWAY_RECEIVING_NS 3000000

static int begun;
static int drained = 1;
static struct request_origin {
	uint64_t unique; /* `lakefs_request_unique` */
	uint32_t thread; /* 0: in another pid namespace, or none waits for the reply */
} origin;

/* Return whether the request is in memory and the wrapped operations handle it without entering Python. */
static int needs_no_python(const struct fuse_buf *buf)
{
	const struct fuse_in_header *head = buf->mem;

	return !(buf->flags & FUSE_BUF_IS_FD) && buf->size >= sizeof(*head) &&
	       (lakefs_dispatch_answers(head, head + 1) ||
		lakefs_offload_answers(head, head + 1, buf->size - sizeof(*head)));
}

/* Receive a request as libfuse does, and record the time and its number. */
static int receive(struct fuse_session *se, struct fuse_buf *buf)
{
	int size = libfuse.session_receive_buf(se, buf);

	if (size > 0) {
		lakefs_note_request_time();
		lakefs_request_unique =
			buf->flags & FUSE_BUF_IS_FD ? 0 : ((const struct fuse_in_header *)buf->mem)->unique;
	}
	return size;
}

/* Return how long to poll for the next request. A client that gets a reply often sends another; FORGET has no reply. */
static int64_t followed_within_ns(const struct fuse_buf *buf)
{
	uint32_t opcode = ((const struct fuse_in_header *)buf->mem)->opcode;

	return opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET ? 0 : AWAIT_NS;
}

/* Handle the request and those after it. Returns the size of the next request if it needs Python or the time is
 * over, -EAGAIN if there is none, and 0 or an error if the session ends. */
static int answer_in_a_row(struct fuse_session *se, struct fuse_buf *buf)
{
	int64_t begin = lakefs_monotonic_ns(), until;
	int size;

	do {
		until = followed_within_ns(buf);
		libfuse.session_process_buf(se, buf);
		until += lakefs_monotonic_ns();
		while ((size = receive(se, buf)) == -EAGAIN && lakefs_monotonic_ns() < until)
			sched_yield();
	} while (size > 0 && needs_no_python(buf) &&
		 until - begin < (lakefs_is_receiving() ? AWAY_RECEIVING_NS : AWAY_NS));
	return size;
}

int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
	int size = receive(se, buf);

	if (!begun || se != lakefs_session)
		return size;
	if (size > 0 && needs_no_python(buf)) {
		PyThreadState *python = PyEval_SaveThread();

		lakefs_without_python = 1;
		size = answer_in_a_row(se, buf);
		lakefs_without_python = 0;
		PyEval_RestoreThread(python);
	}
	if (size > 0 && !needs_no_python(buf)) {
		const struct fuse_in_header *head = buf->flags & FUSE_BUF_IS_FD ? NULL : buf->mem;

		origin = (struct request_origin){lakefs_request_unique, head ? head->pid : 0};
		lakefs_forget_before(head);
		lakefs_hand_over_before(head);
	} else {
		lakefs_hand_over_closed();
	}
	drained = size == -EAGAIN;
	return drained ? -EINTR : size;
}

/* -- called from Python */

/* Make reads non-blocking from now on. Returns 0 if that is not possible; then nothing has changed. */
int lakefs_begin_reading(void)
{
	int fd, flags;

	if (!lakefs_session)
		return 0;
	fd = libfuse.session_fd(lakefs_session);
	flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return 0;
	lakefs_watch_session(lakefs_session, fd);
	lakefs_watch_changes();
	begun = 1;
	return 1;
}

/* Return whether the last read found no request. */
int lakefs_is_drained(void)
{
	return drained;
}

/* Return whether the session has ended, for example because the filesystem was unmounted. */
int lakefs_session_exited(void)
{
	return libfuse.session_exited(lakefs_session);
}

int lakefs_session_fd(void)
{
	return libfuse.session_fd(lakefs_session);
}

/* Return the origin of the request whose handler begins. */
const struct request_origin *lakefs_request_origin(void)
{
	return &origin;
}

/* Reply EINTR to a request whose handler goes on; return whether the kernel took it. For the kernel the request is over
 * then, and libfuse, which knows nothing of this, gets ENOENT for the reply that follows. */
int lakefs_interrupt_request(uint64_t unique)
{
	const struct fuse_out_header reply = {.len = sizeof(reply), .error = -EINTR, .unique = unique};

	return unique && write(libfuse.session_fd(lakefs_session), &reply, sizeof(reply)) == (ssize_t)sizeof(reply);
}
