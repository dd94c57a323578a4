/*
 * Declares the functions of CPython that the library uses: all are part of its stable ABI (3.11). Macros are not used,
 * because they depend on the layouts of one version.
 *
 * One build of this library therefore serves every later version of CPython, and needs no headers of CPython. A test
 * compiles these declarations together with Python.h (tests/kernel/test_hooks_library.py).
 */
#ifndef LAKEFS_PYTHON_ABI_H
#define LAKEFS_PYTHON_ABI_H

#include <stddef.h>
#include <sys/types.h>

#ifndef Py_PYTHON_H
typedef ssize_t Py_ssize_t;
typedef struct _object PyObject;
typedef struct _ts PyThreadState;
#endif

extern PyObject *PyExc_TypeError, *PyExc_ValueError;

PyObject *Py_BuildValue(const char *format, ...);
void Py_IncRef(PyObject *object);
void Py_DecRef(PyObject *object);
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *state);
void PyErr_Clear(void);
void PyErr_Fetch(PyObject **type, PyObject **value, PyObject **trace);
PyObject *PyErr_Occurred(void);
void PyErr_Restore(PyObject *type, PyObject *value, PyObject *trace);
void PyErr_SetString(PyObject *type, const char *message);
int PyBytes_AsStringAndSize(PyObject *bytes, char **data, Py_ssize_t *length);
int PyDict_Contains(PyObject *dict, PyObject *key);
Py_ssize_t PyDict_Size(PyObject *dict);
int PyIter_Check(PyObject *object);
PyObject *PyIter_Next(PyObject *iterator);
PyObject *PyLong_FromUnsignedLongLong(unsigned long long value);
PyObject *PyObject_CallFunctionObjArgs(PyObject *callable, ...);
PyObject *PyTuple_GetItem(PyObject *tuple, Py_ssize_t index);
Py_ssize_t PyTuple_Size(PyObject *tuple);
PyObject *PyUnicode_DecodeUTF8(const char *text, Py_ssize_t bytes, const char *errors);

#endif
