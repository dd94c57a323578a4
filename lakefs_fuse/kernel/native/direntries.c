/*
 * Writes directory entries for READDIRPLUS from rows of the database directly into the buffer of the reply.
 *
 * pyfuse3 adds an entry to a reply with fuse_add_direntry_plus: one call, and several Python objects, for each name. If
 * rows were passed before (`lakefs_begin_entries`), one call writes as many entries as fit; otherwise the call is
 * passed on to libfuse. A mount works without this library, but lists more slowly.
 *
 * Called with the GIL held. `lakefs_begin_entries`, pyfuse3's readdir_reply and `lakefs_end_entries` follow each other;
 * no other Python runs between them than the iterator over the rows and, for files in use, `row_of`.
 *
 * meta/entry.py describes the layout of a row.
 */
#include "native.h"
#include "python_abi.h"

enum { KEY_PREFIX = 9, KEY_BYTES = 17, HEAD_BYTES = 67, ROW_NAME_BYTES_MAX = 255 };
enum { DIRECTORY = 1, SYMLINK = 64, SHADOWED = 256 };
enum { FETCHED = 2 | 4 | SYMLINK }; /* the attributes need no request to the store: metadata_fetch.py */
enum { PASSED_OVER = -3, BEYOND_END = -2, INVALID = -1 };
static const uint32_t UNSET = 0xffffffff;

/* Attributes that entries without their own show, and st_blksize; laid out as in readdir.py. */
struct defaults {
	uint32_t uid, gid, dir_mode, file_mode, unfetched_mode, dir_blksize, file_blksize;
};

static PyObject *rows, *in_use, *row_of_file, *damaged;
static unsigned char prefix[KEY_PREFIX];
static struct defaults shown;
static double timeout_s;
static Py_ssize_t entries;
static uint64_t last_off;
static int begun, reached;
static PyObject *error_type, *error_value, *error_trace;

/* Replace the reference that a variable owns; `value` may be NULL. */
static void replace(PyObject **variable, PyObject *value)
{
	PyObject *before = *variable;

	Py_IncRef(value);
	*variable = value;
	Py_DecRef(before);
}

static uint64_t little(const unsigned char *at, int bytes)
{
	uint64_t value = 0;

	memcpy(&value, at, bytes); /* rows are little-endian, as is every machine that this runs on */
	return value;
}

static uint64_t big(const unsigned char *at)
{
	uint64_t value = 0;

	for (int byte = 0; byte < 8; byte++)
		value = value << 8 | at[byte];
	return value;
}

/* Return whether `unpack_entry` of meta/tree.py accepts the row: its ETag is UTF-8, and the kernel accepts its name. */
static int is_whole(const unsigned char *row, Py_ssize_t length)
{
	Py_ssize_t etag_length, name_length, at;
	const unsigned char *name;

	if (length < HEAD_BYTES)
		return 0;
	etag_length = row[HEAD_BYTES - 1];
	name = row + HEAD_BYTES + etag_length;
	name_length = length - HEAD_BYTES - etag_length;
	if (name_length <= 0 || name_length > ROW_NAME_BYTES_MAX)
		return 0;
	if (memchr(name, '/', name_length) || memchr(name, 0, name_length))
		return 0;
	if (name[0] == '.' && (name_length == 1 || (name_length == 2 && name[1] == '.')))
		return 0;
	for (at = 0; at < etag_length; at++) {
		if (row[HEAD_BYTES + at] & 0x80) {
			PyObject *text = PyUnicode_DecodeUTF8((const char *)row + HEAD_BYTES, etag_length, NULL);

			if (!text) {
				PyErr_Clear();
				return 0;
			}
			Py_DecRef(text);
			break;
		}
	}
	return 1;
}

static void fill_attributes(struct fuse_attr *attributes, const unsigned char *row)
{
	uint32_t flags = (uint32_t)little(row + 8, 2), mode = (uint32_t)little(row + 10, 4);
	uint32_t type = flags & DIRECTORY ? S_IFDIR : flags & SYMLINK ? S_IFLNK : S_IFREG;
	struct timespec mtime = timespec_of((int64_t)little(row + 30, 8));
	struct timespec ctime = timespec_of((int64_t)little(row + 38, 8));

	if (mode == UNSET)
		mode = (flags & DIRECTORY ? shown.dir_mode : flags & FETCHED ? shown.file_mode : shown.unfetched_mode) &
		       0xffff & ~S_IFMT;
	attributes->ino = little(row, 8);
	attributes->mode = type | mode;
	attributes->nlink = 1;
	attributes->uid = (uint32_t)little(row + 14, 4);
	attributes->gid = (uint32_t)little(row + 18, 4);
	if (attributes->uid == UNSET)
		attributes->uid = shown.uid;
	if (attributes->gid == UNSET)
		attributes->gid = shown.gid;
	attributes->size = little(row + 22, 8);
	attributes->blocks = attributes->size / 512 + (attributes->size % 512 != 0);
	attributes->blksize = flags & DIRECTORY ? shown.dir_blksize : shown.file_blksize;
	attributes->atime = attributes->mtime = (uint64_t)mtime.tv_sec;
	attributes->atimensec = attributes->mtimensec = (uint32_t)mtime.tv_nsec;
	attributes->ctime = (uint64_t)ctime.tv_sec;
	attributes->ctimensec = (uint32_t)ctime.tv_nsec;
}

/* Write one entry to the buffer; return its length, or 0 if it does not fit. */
static Py_ssize_t add(char *buffer, size_t room, const unsigned char *key, const unsigned char *row, Py_ssize_t length)
{
	struct fuse_direntplus entry;
	Py_ssize_t name_at = HEAD_BYTES + row[HEAD_BYTES - 1];
	Py_ssize_t name_length = length - name_at;
	size_t bytes = FUSE_DIRENT_ALIGN(sizeof(entry) + name_length);

	if (bytes > room)
		return 0;
	memset(&entry, 0, sizeof(entry));
	fill_attributes(&entry.entry_out.attr, row);
	entry.entry_out.nodeid = entry.dirent.ino = entry.entry_out.attr.ino;
	entry.entry_out.entry_valid = entry.entry_out.attr_valid = (uint64_t)timeout_s;
	entry.entry_out.entry_valid_nsec = entry.entry_out.attr_valid_nsec =
		(uint32_t)((timeout_s - (double)entry.entry_out.entry_valid) * 1.0e9);
	entry.dirent.off = last_off = big(key + KEY_PREFIX);
	entry.dirent.namelen = (uint32_t)name_length;
	entry.dirent.type = entry.entry_out.attr.mode >> 12 & 15;
	memcpy(buffer, &entry, sizeof(entry));
	memcpy(buffer + sizeof(entry), row + name_at, name_length);
	memset(buffer + sizeof(entry) + name_length, 0, bytes - sizeof(entry) - name_length);
	return (Py_ssize_t)bytes;
}

/* Return the row to show, because that of a file in use may be outdated. A new reference, or NULL with an error. */
static PyObject *current_row(const unsigned char *row, PyObject *value)
{
	PyObject *inode, *better = NULL;
	int used;

	if (!PyDict_Size(in_use)) {
		Py_IncRef(value);
		return value;
	}
	inode = PyLong_FromUnsignedLongLong(little(row, 8));
	if (!inode)
		return NULL;
	used = PyDict_Contains(in_use, inode);
	if (used == 0) {
		Py_IncRef(value);
		better = value;
	} else if (used > 0) {
		better = PyObject_CallFunctionObjArgs(row_of_file, inode, NULL);
	}
	Py_DecRef(inode);
	return better;
}

/* Borrow the data of an object; return 0, with an error, if it is not bytes. */
static int borrow(PyObject *bytes, const unsigned char **data, Py_ssize_t *length)
{
	return PyBytes_AsStringAndSize(bytes, (char **)data, length) == 0;
}

/* As `add`, for the current row of this key; INVALID if it is damaged, PASSED_OVER if a directory hides the file. */
static Py_ssize_t add_current(char *buffer, size_t room, const unsigned char *key, PyObject *value)
{
	const unsigned char *row;
	Py_ssize_t length;

	if (!borrow(value, &row, &length) || !is_whole(row, length))
		return INVALID;
	return little(row + 8, 2) & SHADOWED ? PASSED_OVER : add(buffer, room, key, row, length);
}

/* As `add`, for a pair of key and row. Also returns INVALID, with or without an error; BEYOND_END after the rows of the
 * directory; PASSED_OVER for a damaged row, and for a file that a directory of the same name hides. */
static Py_ssize_t add_item(char *buffer, size_t room, PyObject *item)
{
	const unsigned char *key, *row;
	Py_ssize_t key_length, length, added;
	PyObject *value;

	if (PyTuple_Size(item) != 2 || !borrow(PyTuple_GetItem(item, 0), &key, &key_length) ||
	    !borrow(PyTuple_GetItem(item, 1), &row, &length)) {
		PyErr_Clear(); /* the caller sets its own error */
		return INVALID;
	}
	if (key_length != KEY_BYTES || memcmp(key, prefix, KEY_PREFIX))
		return BEYOND_END;
	if (!is_whole(row, length)) {
		replace(&damaged, PyTuple_GetItem(item, 0));
		return PASSED_OVER;
	}
	value = current_row(row, PyTuple_GetItem(item, 1));
	if (!value)
		return INVALID;
	added = add_current(buffer, room, key, value);
	Py_DecRef(value);
	return added;
}

static size_t fill(char *buffer, size_t room)
{
	size_t filled = 0;
	PyObject *item;

	while ((item = PyIter_Next(rows))) {
		Py_ssize_t added = add_item(buffer + filled, room - filled, item);

		Py_DecRef(item);
		if (added == PASSED_OVER)
			continue;
		if (added == INVALID && !PyErr_Occurred())
			PyErr_SetString(PyExc_ValueError, "a row of a directory is not a pair of key and row");
		if (added <= 0)
			break;
		filled += (size_t)added;
		entries++;
	}
	if (PyErr_Occurred())
		PyErr_Fetch(&error_type, &error_value, &error_trace); /* the caller cannot raise it */
	return filled;
}

size_t fuse_add_direntry_plus(fuse_req_t request, char *buffer, size_t room, const char *name,
			      const struct fuse_entry_param *param, off_t off)
{
	reached = 1;
	if (begun) {
		begun = 0;
		return fill(buffer, room);
	}
	return lakefs_add_direntry(request, buffer, room, name, param, off);
}

/* -- called from Python */

/* Return whether a call of pyfuse3 has ever reached this library. */
int lakefs_is_direntry_reached(void)
{
	return reached;
}

/*
 * Replace the next entry that pyfuse3 adds by as many of these as fit: pairs of key and row, in order, of the directory
 * whose keys begin with `begin`. `files` is a dict by inode; the row of an inode in it is the result of `row_of`.
 */
PyObject *lakefs_begin_entries(PyObject *pairs, PyObject *files, PyObject *row_of, const char *begin, double timeout,
			       const struct defaults *defaults)
{
	if (!PyIter_Check(pairs) || PyDict_Size(files) < 0) {
		PyErr_Clear();
		PyErr_SetString(PyExc_TypeError, "rows are an iterator, and files a dict");
		return NULL;
	}
	replace(&rows, pairs);
	replace(&in_use, files);
	replace(&row_of_file, row_of);
	memcpy(prefix, begin, KEY_PREFIX);
	timeout_s = timeout < 0 ? 0 : timeout;
	shown = *defaults;
	entries = 0;
	last_off = 0;
	begun = 1;
	return Py_BuildValue("");
}

/*
 * Return the number of entries added since `lakefs_begin_entries`, the cookie of the last one, and the key of the last
 * damaged row that was passed over, or None. Raises the error of reading the rows.
 */
PyObject *lakefs_end_entries(void)
{
	PyObject *key = damaged ? damaged : Py_BuildValue("");

	damaged = NULL;
	begun = 0;
	replace(&rows, NULL);
	replace(&in_use, NULL);
	replace(&row_of_file, NULL);
	if (error_type) {
		PyErr_Restore(error_type, error_value, error_trace);
		error_type = error_value = error_trace = NULL;
		Py_DecRef(key);
		return NULL;
	}
	return Py_BuildValue("nKN", entries, (unsigned long long)last_off, key);
}
