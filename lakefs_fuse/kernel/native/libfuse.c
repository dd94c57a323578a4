/* Finds the functions of the libfuse that pyfuse3 is linked with. */
#include "native.h"

#include <dlfcn.h>

struct libfuse libfuse;

/*
 * Find libfuse's functions; called from Python before pyfuse3 is imported. `pyfuse3` is the path of its extension
 * module. A search of the module's dependencies finds the libfuse that it uses, whatever the file is named, and never
 * the functions of this library. Returns 0 if the module cannot be loaded or a required function is missing; then
 * nothing of this library may be used.
 */
int lakefs_bind_libfuse(const char *pyfuse3)
{
	void *handle = dlopen(pyfuse3, RTLD_NOW | RTLD_LOCAL);
	int complete;

	if (!handle)
		return 0;
	*(void **)&libfuse.session_new = dlsym(handle, "fuse_session_new");
	*(void **)&libfuse.session_new_versioned = dlsym(handle, "fuse_session_new_versioned");
	*(void **)&libfuse.session_custom_io = dlvsym(handle, "fuse_session_custom_io", "FUSE_3.0");
	complete = libfuse.session_new || libfuse.session_new_versioned;
#define FIND(name)                                                                                                     \
	*(void **)&libfuse.name = dlsym(handle, "fuse_" #name);                                                        \
	complete = complete && libfuse.name;
	LIBFUSE_FUNCTIONS(FIND)
#undef FIND
	if (!complete)
		memset(&libfuse, 0, sizeof(libfuse));
	return complete;
}

/* -- called from Python */

const char *lakefs_libfuse_version(void)
{
	return libfuse.pkgversion ? libfuse.pkgversion() : "";
}

/* Return whether libfuse lets init_flags.c read requests and write replies. */
int lakefs_has_custom_io(void)
{
	return !!libfuse.session_custom_io;
}
