/* Who drops suid and sgid when a file is written: see privileges.c. */
#ifndef LAKEFS_PRIVILEGES_H
#define LAKEFS_PRIVILEGES_H

struct fuse_session;

/* From here on requests are read and answers written by way of privileges.c. */
void lakefs_privileges_begin(struct fuse_session *session, int fd);

/* While INIT is answered: takes the duty over where the kernel offers that, and answers whether it does. */
int lakefs_privileges_take(void);

#endif
