/*
 * Pointers to libfuse's functions, found at load time in the libfuse that pyfuse3 is linked with.
 *
 * This library is therefore linked with no libfuse, and one build serves libfuse3.so.3 and libfuse3.so.4. The
 * structures that it shares with libfuse (fuse_lowlevel_ops, fuse_file_info, fuse_conn_info, fuse_buf, fuse_custom_io)
 * have the same layout in both: later versions only append members, or use reserved space.
 *
 * This header also declares the functions that the library defines under libfuse's names, because later versions of
 * libfuse declare some of them as inline functions or macros.
 */
#ifndef LAKEFS_LIBFUSE_H
#define LAKEFS_LIBFUSE_H

#define fuse_session_new_versioned fuse_session_new_versioned_as_declared
#define fuse_reply_attr fuse_reply_attr_as_declared
#define fuse_reply_entry fuse_reply_entry_as_declared
#define fuse_reply_err fuse_reply_err_as_declared
#define fuse_reply_open fuse_reply_open_as_declared
#define fuse_session_receive_buf fuse_session_receive_buf_as_declared
#include <fuse_lowlevel.h>
#undef fuse_session_new
#undef fuse_session_new_versioned
#undef fuse_reply_attr
#undef fuse_reply_entry
#undef fuse_reply_err
#undef fuse_reply_open
#undef fuse_session_receive_buf
struct fuse_session *fuse_session_new(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t, void *userdata);
/* Since 3.17, whose headers map fuse_session_new to it. `version` is that of the headers that the caller used. */
struct fuse_session *fuse_session_new_versioned(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t,
						void *version, void *userdata);
int fuse_reply_attr(fuse_req_t request, const struct stat *attributes, double timeout_s);
int fuse_reply_entry(fuse_req_t request, const struct fuse_entry_param *entry);
int fuse_reply_err(fuse_req_t request, int error);
int fuse_reply_open(fuse_req_t request, const struct fuse_file_info *info);
int fuse_session_receive_buf(struct fuse_session *session, struct fuse_buf *buf);

#define LIBFUSE_FUNCTIONS(each)                                                                                        \
	each(add_direntry_plus) each(pkgversion) each(reply_attr) each(reply_create) each(reply_entry) each(reply_err) \
	each(reply_none) each(reply_open) each(reply_write) each(req_ctx) each(session_exited) each(session_fd)       \
	each(session_process_buf) each(session_receive_buf)

struct libfuse {
#define DECLARE(name) __typeof__(&fuse_##name) name;
	LIBFUSE_FUNCTIONS(DECLARE)
#undef DECLARE
	/* At least one of these two is set; NULL if this libfuse lacks the function. */
	__typeof__(&fuse_session_new) session_new;
	__typeof__(&fuse_session_new_versioned) session_new_versioned;
	/* The variant of 3.13, which takes the structure without the members of later versions; NULL before 3.13. */
	int (*session_custom_io)(struct fuse_session *, const struct fuse_custom_io *, int);
};

/* All members are NULL until `lakefs_bind_libfuse` has found every required function; until then sessions fail. */
extern struct libfuse libfuse;

#endif
