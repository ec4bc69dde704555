/* Joining the pieces of a prompt: the compiled form of `prompt_builder._join`. */
#include "widths.h"

/* What is noted of a piece: where it begins, and whether it is a special token. */
typedef struct {
    Py_ssize_t start;
    int is_special;
} Piece;

/* Note all pieces, with one more for the end. Returns the widest character's class, or
 * (Py_UCS4)-1 with an error set. */
static Py_UCS4 note_pieces(PyObject *parts, PyObject *special_type, Piece *pieces)
{
    Py_ssize_t count = PyList_GET_SIZE(parts);
    Py_ssize_t total = 0;
    Py_UCS4 max_char = 127;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *part = PyList_GET_ITEM(parts, i);
        if (!PyUnicode_Check(part)) {
            PyErr_SetString(PyExc_TypeError, "join() takes a list of str");
            return (Py_UCS4)-1;
        }
        if (make_ready(part) < 0)
            return (Py_UCS4)-1;
        pieces[i].start = total;
        pieces[i].is_special = (PyObject *)Py_TYPE(part) == special_type;
        if (PyUnicode_GET_LENGTH(part) > PY_SSIZE_T_MAX - total) {
            PyErr_NoMemory();
            return (Py_UCS4)-1;
        }
        total += PyUnicode_GET_LENGTH(part);
        if (PyUnicode_MAX_CHAR_VALUE(part) > max_char)
            max_char = PyUnicode_MAX_CHAR_VALUE(part);
    }
    pieces[count].start = total;
    return max_char;
}

static PyObject *joined(PyObject *parts, const Piece *pieces, Py_UCS4 max_char)
{
    Py_ssize_t count = PyList_GET_SIZE(parts);
    PyObject *text = PyUnicode_New(pieces[count].start, max_char);
    if (text == NULL)
        return NULL;
    int width = (int)PyUnicode_KIND(text);
    char *out = PyUnicode_DATA(text);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *part = PyList_GET_ITEM(parts, i);
        int part_width = (int)PyUnicode_KIND(part);
        out += width * BY_WIDTHS(copy, part_width, width, out, PyUnicode_DATA(part),
                                 PyUnicode_GET_LENGTH(part));
    }
    return text;
}

/* Append `(start, end)` to the list. Returns 0, or -1 with an error set. */
static int append_range(PyObject *list, Py_ssize_t start, Py_ssize_t end)
{
    PyObject *range = PyTuple_New(2);
    if (range == NULL)
        return -1;
    PyTuple_SET_ITEM(range, 0, PyLong_FromSsize_t(start));
    PyTuple_SET_ITEM(range, 1, PyLong_FromSsize_t(end));
    int failed = PyTuple_GET_ITEM(range, 0) == NULL || PyTuple_GET_ITEM(range, 1) == NULL ||
                 PyList_Append(list, range) < 0;
    Py_DECREF(range);
    return failed ? -1 : 0;
}

static PyObject *special_ranges(const Piece *pieces, Py_ssize_t count)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++)
        if (pieces[i].is_special &&
            append_range(list, pieces[i].start, pieces[i + 1].start) < 0)
            Py_CLEAR(list);
    return list;
}

/* The offsets of spans that are given in numbers of pieces. */
static PyObject *span_ranges(PyObject *spans, const Piece *pieces, Py_ssize_t count)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(spans); i++) {
        Py_ssize_t start, end;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(spans, i), "nn", &start, &end)) {
            Py_CLEAR(list);
        } else if (start < 0 || start > end || end > count) {
            PyErr_SetString(PyExc_IndexError, "a span lies outside the pieces");
            Py_CLEAR(list);
        } else if (append_range(list, pieces[start].start, pieces[end].start) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyObject *text_join(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 3 || !PyList_CheckExact(args[0]) || !PyType_Check(args[1]) ||
        !PyList_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "join() takes a list, a type and a list");
        return NULL;
    }
    Py_ssize_t length = PyList_GET_SIZE(args[0]);
    Piece *pieces = PyMem_New(Piece, (size_t)length + 1);
    if (pieces == NULL)
        return PyErr_NoMemory();
    PyObject *result = NULL;
    Py_UCS4 max_char = note_pieces(args[0], args[1], pieces);
    if (max_char != (Py_UCS4)-1) {
        /* From the first range on only the notes are used: making one may run finalizers. */
        PyObject *text = joined(args[0], pieces, max_char);
        PyObject *special = text == NULL ? NULL : special_ranges(pieces, length);
        PyObject *answers = special == NULL ? NULL : span_ranges(args[2], pieces, length);
        if (answers != NULL)
            result = PyTuple_Pack(3, text, special, answers);
        Py_XDECREF(text);
        Py_XDECREF(special);
        Py_XDECREF(answers);
    }
    PyMem_Free(pieces);
    return result;
}
