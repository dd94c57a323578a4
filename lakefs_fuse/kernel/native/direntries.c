/*
 * Directory entries for READDIRPLUS, from the database's rows straight into the answer's buffer.
 *
 * pyfuse3 adds an entry to an answer with fuse_add_direntry_plus, called for each name with objects made for it. Loaded
 * with RTLD_GLOBAL before pyfuse3, this library is what that call reaches. Where rows were given beforehand (`give`),
 * one call writes as many entries as fit, else it is passed on to libfuse. Without this library the mount works as
 * well, and lists slower.
 *
 * Called with the interpreter's lock held: `give`, pyfuse3's readdir_reply and `taken` follow each other on the one
 * thread that answers requests, without anything else of Python in between but the iterator over the rows and, for
 * files in use, `substitute`.
 *
 * The layout of a row is that of meta/entry.py, and that of an answer Linux's (struct fuse_direntplus in linux/fuse.h,
 * unchanged since protocol 7.21 but for fields that are 0 here).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>

#define EXPORT __attribute__((visibility("default")))

enum { KEY_PREFIX = 9, KEY_BYTES = 17, HEAD_BYTES = 67, NAME_BYTES_MAX = 255, NS = 1000000000 };
enum { DIRECTORY = 1, SYMLINK = 64, SHADOWED = 256 };
enum { ASKED = 2 | 4 | SYMLINK }; /* no object has to be asked for the attributes: see asking.py */
static const uint32_t UNSET = 0xffffffff;

struct attributes {
	uint64_t ino, size, blocks, atime, mtime, ctime;
	uint32_t atimensec, mtimensec, ctimensec, mode, nlink, uid, gid, rdev, blksize, flags;
};

struct entry {
	uint64_t nodeid, generation, entry_valid, attr_valid;
	uint32_t entry_valid_nsec, attr_valid_nsec;
	struct attributes attributes;
	uint64_t ino, off;
	uint32_t namelen, type;
};

_Static_assert(sizeof(struct entry) == 152, "the kernel's layout");

struct lakefs_shown {
	uint32_t uid, gid, dir_mode, file_mode, unasked_mode, dir_blksize, file_blksize;
};

static PyObject *rows, *in_use, *substitute, *damaged;
static unsigned char prefix[KEY_PREFIX];
static struct lakefs_shown shown;
static double timeout_s;
static Py_ssize_t entries;
static uint64_t last_off;
static int given, ever_reached;
static PyObject *error_type, *error_value, *error_trace;

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

static void split_time(int64_t ns, uint64_t *seconds, uint32_t *rest)
{
	int64_t whole = ns / NS;
	int64_t left = ns % NS;

	if (left < 0) {
		whole--;
		left += NS;
	}
	*seconds = (uint64_t)whole;
	*rest = (uint32_t)left;
}

/* As `unpack` of meta/entry.py: the row has an ETag in UTF-8 and a name that the kernel takes. */
static int is_whole(const unsigned char *row, Py_ssize_t length)
{
	Py_ssize_t etag_length, name_length, at;
	const unsigned char *name;

	if (length < HEAD_BYTES)
		return 0;
	etag_length = row[HEAD_BYTES - 1];
	name = row + HEAD_BYTES + etag_length;
	name_length = length - HEAD_BYTES - etag_length;
	if (name_length <= 0 || name_length > NAME_BYTES_MAX)
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
			Py_DECREF(text);
			break;
		}
	}
	return 1;
}

/* One entry at the end of the buffer; its length, 0 where it does not fit. */
static Py_ssize_t add(char *buffer, size_t room, const unsigned char *key, const unsigned char *row, Py_ssize_t length)
{
	struct entry entry;
	Py_ssize_t name_at = HEAD_BYTES + row[HEAD_BYTES - 1];
	Py_ssize_t name_length = length - name_at;
	size_t bytes = (sizeof(entry) + name_length + 7) & ~(size_t)7;
	uint32_t flags, mode, type;

	if (bytes > room)
		return 0;
	memset(&entry, 0, sizeof(entry));
	flags = (uint32_t)little(row + 8, 2);
	mode = (uint32_t)little(row + 10, 4);
	type = flags & DIRECTORY ? S_IFDIR : flags & SYMLINK ? S_IFLNK : S_IFREG;
	if (mode == UNSET)
		mode = (flags & DIRECTORY ? shown.dir_mode : flags & ASKED ? shown.file_mode : shown.unasked_mode) &
		       0xffff & ~S_IFMT;
	entry.ino = entry.nodeid = entry.attributes.ino = little(row, 8);
	entry.entry_valid = entry.attr_valid = (uint64_t)timeout_s;
	entry.entry_valid_nsec = entry.attr_valid_nsec = (uint32_t)((timeout_s - (double)entry.entry_valid) * 1.0e9);
	entry.attributes.mode = type | mode;
	entry.attributes.nlink = 1;
	entry.attributes.uid = (uint32_t)little(row + 14, 4);
	entry.attributes.gid = (uint32_t)little(row + 18, 4);
	if (entry.attributes.uid == UNSET)
		entry.attributes.uid = shown.uid;
	if (entry.attributes.gid == UNSET)
		entry.attributes.gid = shown.gid;
	entry.attributes.size = little(row + 22, 8);
	entry.attributes.blocks = entry.attributes.size / 512 + (entry.attributes.size % 512 != 0);
	entry.attributes.blksize = flags & DIRECTORY ? shown.dir_blksize : shown.file_blksize;
	split_time((int64_t)little(row + 30, 8), &entry.attributes.mtime, &entry.attributes.mtimensec);
	entry.attributes.atime = entry.attributes.mtime;
	entry.attributes.atimensec = entry.attributes.mtimensec;
	split_time((int64_t)little(row + 38, 8), &entry.attributes.ctime, &entry.attributes.ctimensec);
	entry.off = last_off = big(key + KEY_PREFIX);
	entry.namelen = (uint32_t)name_length;
	entry.type = entry.attributes.mode >> 12 & 15;
	memcpy(buffer, &entry, sizeof(entry));
	memcpy(buffer + sizeof(entry), row + name_at, name_length);
	memset(buffer + sizeof(entry) + name_length, 0, bytes - sizeof(entry) - name_length);
	return (Py_ssize_t)bytes;
}

/* A file that is being written is not as its row says. A new reference, or NULL with an error. */
static PyObject *as_it_is(const unsigned char *row, PyObject *value)
{
	PyObject *inode, *better = NULL;
	int used;

	if (!PyDict_GET_SIZE(in_use))
		return Py_NewRef(value);
	inode = PyLong_FromUnsignedLongLong(little(row, 8));
	if (!inode)
		return NULL;
	used = PyDict_Contains(in_use, inode);
	if (used == 0)
		better = Py_NewRef(value);
	else if (used > 0)
		better = PyObject_CallOneArg(substitute, inode);
	Py_DECREF(inode);
	if (better && !PyBytes_Check(better)) {
		PyErr_SetString(PyExc_TypeError, "a row is bytes");
		Py_CLEAR(better);
	}
	return better;
}

/* As `add`, for a pair of key and row; -1 for what is none, -2 beyond the directory's end, -3 to pass it over. */
static Py_ssize_t add_item(char *buffer, size_t room, PyObject *item)
{
	PyObject *key, *value;
	const unsigned char *row;
	Py_ssize_t added = -1;

	if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2)
		return -1;
	key = PyTuple_GET_ITEM(item, 0);
	value = PyTuple_GET_ITEM(item, 1);
	if (!PyBytes_Check(key) || !PyBytes_Check(value))
		return -1;
	if (PyBytes_GET_SIZE(key) != KEY_BYTES || memcmp(PyBytes_AS_STRING(key), prefix, KEY_PREFIX))
		return -2;
	if (!is_whole((const unsigned char *)PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))) {
		Py_XSETREF(damaged, Py_NewRef(key));
		return -3;
	}
	value = as_it_is((const unsigned char *)PyBytes_AS_STRING(value), value);
	if (!value)
		return -1;
	row = (const unsigned char *)PyBytes_AS_STRING(value);
	if (!is_whole(row, PyBytes_GET_SIZE(value)))
		added = -1;
	else if (little(row + 8, 2) & SHADOWED)
		added = -3;
	else
		added = add(buffer, room, (const unsigned char *)PyBytes_AS_STRING(key), row, PyBytes_GET_SIZE(value));
	Py_DECREF(value);
	return added;
}

static size_t fill(char *buffer, size_t room)
{
	size_t filled = 0;
	PyObject *item;

	while ((item = PyIter_Next(rows))) {
		Py_ssize_t added = add_item(buffer + filled, room - filled, item);

		Py_DECREF(item);
		if (added == -3)
			continue;
		if (added == -1 && !PyErr_Occurred())
			PyErr_SetString(PyExc_ValueError, "a row of a directory was cut");
		if (added <= 0)
			break;
		filled += (size_t)added;
		entries++;
	}
	if (PyErr_Occurred())
		PyErr_Fetch(&error_type, &error_value, &error_trace); /* whoever called this cannot pass it on */
	return filled;
}

EXPORT size_t fuse_add_direntry_plus(void *request, char *buffer, size_t room, const char *name, const void *param,
				     int64_t off)
{
	static size_t (*next)(void *, char *, size_t, const char *, const void *, int64_t);

	ever_reached = 1;
	if (given) {
		given = 0;
		return fill(buffer, room);
	}
	if (!next) {
		void *libfuse = dlopen("libfuse3.so.3", RTLD_NOW | RTLD_LOCAL);

		if (libfuse)
			*(void **)&next = dlsym(libfuse, "fuse_add_direntry_plus");
	}
	return next ? next(request, buffer, room, name, param, off) : SIZE_MAX;
}

/* Whether a call of pyfuse3's was ever seen here. */
EXPORT int lakefs_direntries_reached(void)
{
	return ever_reached;
}

/*
 * The next entry that is added is all of these: pairs of key and row, in order, of the directory whose keys begin with
 * ``begin``. ``files`` is a dict by inode; the row of an inode in it is what ``row_of`` answers.
 */
EXPORT PyObject *lakefs_direntries_give(PyObject *pairs, PyObject *files, PyObject *row_of, const char *begin,
					double timeout, const struct lakefs_shown *defaults)
{
	if (!PyIter_Check(pairs) || !PyDict_Check(files)) {
		PyErr_SetString(PyExc_TypeError, "an iterator and a dict are wanted");
		return NULL;
	}
	Py_XSETREF(rows, Py_NewRef(pairs));
	Py_XSETREF(in_use, Py_NewRef(files));
	Py_XSETREF(substitute, Py_NewRef(row_of));
	memcpy(prefix, begin, KEY_PREFIX);
	timeout_s = timeout < 0 ? 0 : timeout;
	shown = *defaults;
	entries = 0;
	last_off = 0;
	given = 1;
	Py_RETURN_NONE;
}

/*
 * How many entries were added since `give`, the cookie of the last, and the key of the last damaged row that was passed
 * over, or None. Raises what reading them raised.
 */
EXPORT PyObject *lakefs_direntries_taken(void)
{
	PyObject *key = damaged ? damaged : Py_NewRef(Py_None);

	damaged = NULL;
	given = 0;
	Py_CLEAR(rows);
	Py_CLEAR(in_use);
	Py_CLEAR(substitute);
	if (error_type) {
		PyErr_Restore(error_type, error_value, error_trace);
		error_type = error_value = error_trace = NULL;
		Py_DECREF(key);
		return NULL;
	}
	return Py_BuildValue("nKN", entries, (unsigned long long)last_off, key);
}
