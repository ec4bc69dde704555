/* Plain text of an answer: the compiled form of `holding.Patterns.is_plain`. */
#include "native.h"

/* Whether the text from `at` on begins with the pattern, as far as either goes. */
static int agrees(PyObject *text, Py_ssize_t at, PyObject *pattern)
{
    int text_kind = (int)PyUnicode_KIND(text), pattern_kind = (int)PyUnicode_KIND(pattern);
    const void *text_data = PyUnicode_DATA(text), *pattern_data = PyUnicode_DATA(pattern);
    Py_ssize_t length = PyUnicode_GET_LENGTH(pattern);
    if (length > PyUnicode_GET_LENGTH(text) - at)
        length = PyUnicode_GET_LENGTH(text) - at;
    for (Py_ssize_t i = 0; i < length; i++)
        if (PyUnicode_READ(text_kind, text_data, at + i) !=
            PyUnicode_READ(pattern_kind, pattern_data, i))
            return 0;
    return 1;
}

/* Whether the text holds the pattern, or ends with its beginning; -1 with an error set. */
static int touches(PyObject *text, PyObject *pattern)
{
    Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    Py_UCS4 first = PyUnicode_READ_CHAR(pattern, 0);
    for (Py_ssize_t at = 0;; at++) {
        at = PyUnicode_FindChar(text, first, at, length, 1);
        if (at < 0)
            return at == -1 ? 0 : -1;
        if (agrees(text, at, pattern))
            return 1;
    }
}

PyObject *text_is_plain(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || !PyUnicode_Check(args[0]) || !PyTuple_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "is_plain() takes a str and a tuple of str");
        return NULL;
    }
    PyObject *text = args[0];
    if (make_ready(text) < 0)
        return NULL;
    Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    if (length > 0 && PyUnicode_READ_CHAR(text, length - 1) == '\n')
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); i++) {
        PyObject *pattern = PyTuple_GET_ITEM(args[1], i);
        if (!PyUnicode_Check(pattern) || make_ready(pattern) < 0 ||
            PyUnicode_GET_LENGTH(pattern) == 0) {
            PyErr_SetString(PyExc_TypeError, "is_plain() takes patterns that are not empty");
            return NULL;
        }
        int found = touches(text, pattern);
        if (found < 0)
            return NULL;
        if (found)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}
