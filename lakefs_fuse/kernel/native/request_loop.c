/*
 * Reading requests: pyfuse3's call of fuse_session_receive_buf arrives here.
 *
 * Once `lakefs_receiving_begin` was called, a read never waits: where there is no request it answers EINTR, which
 * pyfuse3 takes for "wait until there is one", and `lakefs_receiving_drained` says so. Requests that need no Python
 * (those that hooks.c answers) are answered right here, and the next one is read. Before that, and in a process without
 * hooks, libfuse's own function does what it always did.
 *
 * Whoever sends such requests often sends the next at once, and waking this thread costs more than answering: after
 * one it looks for the next for AWAIT_NS, without the GIL, and altogether no longer than AWAY_NS, for the loop that
 * called has other things to do.
 *
 * Single-threaded, as hooks.c: one thread reads.
 */
#define fuse_session_receive_buf fuse_session_receive_buf_as_declared
#include <fuse_lowlevel.h>
#undef fuse_session_receive_buf

#include <linux/fuse.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "create_offload.h"
#include "privileges.h"
#include "request_loop.h"
#include "attribute_cache.h"

#define AWAIT_NS 150000
#define AWAY_NS 1000000
/* Or no longer than this while new files come: the more of them are closed together, the less each costs. */
#define AWAY_CREATING_NS 3000000

static int (*next_receive)(struct fuse_session *, struct fuse_buf *);
static void (*process)(struct fuse_session *, const struct fuse_buf *);
static int (*session_exited)(struct fuse_session *);
static int (*session_fd)(struct fuse_session *);
static struct fuse_session *session;
static int64_t request_ns, request_realtime_ns;
static int begun, without_python;
static int drained = 1;
static void *(*release_gil)(void);
static void (*acquire_gil)(void *);

void lakefs_receiving_session(struct fuse_session *made, void *libfuse)
{
	session = made;
	*(void **)&next_receive = dlsym(libfuse, "fuse_session_receive_buf");
	*(void **)&process = dlsym(libfuse, "fuse_session_process_buf");
	*(void **)&session_exited = dlsym(libfuse, "fuse_session_exited");
	*(void **)&session_fd = dlsym(libfuse, "fuse_session_fd");
}

/* The request is in memory, whole, and one that the wrapped operations answer without Python. */
static int needs_no_python(const struct fuse_buf *buf)
{
	const struct fuse_in_header *head = buf->mem;
	const void *body = head + 1;

	if ((buf->flags & FUSE_BUF_IS_FD) || buf->size < sizeof(*head))
		return 0;
	switch (head->opcode) {
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
	case FUSE_IOCTL: /* Some languages ask whether what they open is a terminal; libfuse says that there are none. */
		return 1;
	case FUSE_GETATTR:
		if (lakefs_remembered_answers(head->nodeid))
			return 1;
		break;
	case FUSE_GETXATTR:
		return lakefs_hooks_answers_getxattr((const char *)body + sizeof(struct fuse_getxattr_in));
	case FUSE_OPEN:
		return lakefs_hooks_answers_open(head->nodeid, ((const struct fuse_open_in *)body)->flags);
	case FUSE_FLUSH:
		if (lakefs_hooks_answers_flush(((const struct fuse_flush_in *)body)->fh))
			return 1;
		break;
	case FUSE_RELEASE:
		if (lakefs_hooks_answers_release(head->nodeid, ((const struct fuse_release_in *)body)->fh))
			return 1;
		break;
	}
	return lakefs_creating_answers(head, body, buf->size - sizeof(*head));
}

int64_t lakefs_request_ns(void)
{
	return request_ns;
}

int64_t lakefs_request_realtime_ns(void)
{
	return request_realtime_ns;
}

/* As libfuse does it, and what time it is. */
static int receive(struct fuse_session *se, struct fuse_buf *buf)
{
	int size = next_receive(se, buf);
	struct timespec now;

	if (size > 0) {
		clock_gettime(CLOCK_REALTIME, &now);
		request_realtime_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
		request_ns = lakefs_now_ns();
	}
	return size;
}

/* Who waits for an answer is likely to go on when it comes; nobody waits for that of FORGET. */
static int64_t followed_within_ns(const struct fuse_buf *buf)
{
	uint32_t opcode = ((const struct fuse_in_header *)buf->mem)->opcode;

	return opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET ? 0 : AWAIT_NS;
}

/* Answers the request, and others, until one needs Python (its size), there is none, others have to have their turn
 * (both -EAGAIN), or the session ends (0 or an error). */
static int answer_and_look(struct fuse_session *se, struct fuse_buf *buf)
{
	int64_t begin = lakefs_now_ns(), until;
	int size;

	do {
		until = followed_within_ns(buf);
		process(se, buf);
		until += lakefs_now_ns();
		while ((size = receive(se, buf)) == -EAGAIN && lakefs_now_ns() < until)
			sched_yield();
	} while (size > 0 && needs_no_python(buf) &&
		 until - begin < (lakefs_creating_some() ? AWAY_CREATING_NS : AWAY_NS));
	return size;
}

int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf);

int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
	int size;

	if (!next_receive)
		*(void **)&next_receive = dlsym(dlopen("libfuse3.so.3", RTLD_NOW | RTLD_LOCAL), "fuse_session_receive_buf");
	if (!begun || se != session)
		return next_receive(se, buf);
	size = receive(se, buf);
	if (size > 0 && needs_no_python(buf)) {
		void *python = release_gil();

		without_python = 1;
		size = answer_and_look(se, buf);
		without_python = 0;
		acquire_gil(python);
	}
	if (size > 0 && !needs_no_python(buf))
		lakefs_creating_before(buf->flags & FUSE_BUF_IS_FD ? NULL : buf->mem);
	else
		lakefs_creating_after();
	drained = size == -EAGAIN;
	return drained ? -EINTR : size;
}

int lakefs_receiving_without_python(void)
{
	return without_python;
}

/* From here on reading does not wait. Answers 0 where that cannot be had: then nothing is different. */
int lakefs_receiving_begin(void)
{
	int fd, flags;

	*(void **)&release_gil = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
	*(void **)&acquire_gil = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
	if (!session || !next_receive || !process || !session_exited || !session_fd || !release_gil || !acquire_gil)
		return 0;
	fd = session_fd(session);
	flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return 0;
	lakefs_privileges_begin(session, fd);
	begun = 1;
	return 1;
}

/* The last read found no request. */
int lakefs_receiving_drained(void)
{
	return drained;
}

/* The kernel has let go of the mount, or somebody ended the session. */
int lakefs_receiving_exited(void)
{
	return session_exited(session);
}

int lakefs_receiving_fd(void)
{
	return session_fd(session);
}
