/* Copying decoded JSON by the rules that its text would be read with: `json_text.load_body`.
 *
 * Only what reading JSON gives is copied (exact types, text keys, numbers within range, no lone
 * surrogates); the twin knows what becomes of anything else.
 */
#include "native.h"

#include <math.h>

static PyObject *copy_value(PyObject *value, int depth);

#define DEFINE_HAS_SURROGATE(NAME, CHARACTER)                                                  \
    static int NAME(const CHARACTER *text, Py_ssize_t length)                                  \
    {                                                                                          \
        Py_ssize_t at = 0;                                                                     \
        for (; length - at >= BLOCK; at += BLOCK) {                                            \
            CHARACTER found = 0;                                                               \
            for (int i = 0; i < BLOCK; i++)                                             \
                found |= (CHARACTER)((CHARACTER)(text[at + i] - 0xD800) < 0x800);              \
            if (found)                                                                         \
                return 1;                                                                      \
        }                                                                                      \
        for (; at < length; at++)                                                              \
            if ((CHARACTER)(text[at] - 0xD800) < 0x800)                                        \
                return 1;                                                                      \
        return 0;                                                                              \
    }

DEFINE_HAS_SURROGATE(has_surrogate_ucs2, Py_UCS2)
DEFINE_HAS_SURROGATE(has_surrogate_ucs4, Py_UCS4)

static int is_plain_string(PyObject *value)
{
    if (!PyUnicode_CheckExact(value))
        return 0;
    if (make_ready(value) < 0) {
        PyErr_Clear();
        return 0;
    }
    Py_ssize_t length = PyUnicode_GET_LENGTH(value);
    switch (PyUnicode_KIND(value)) {
    case PyUnicode_1BYTE_KIND:
        return 1;
    case PyUnicode_2BYTE_KIND:
        return !has_surrogate_ucs2(PyUnicode_2BYTE_DATA(value), length);
    default:
        return !has_surrogate_ucs4(PyUnicode_4BYTE_DATA(value), length);
    }
}

static int is_plain_number(PyObject *value)
{
    if (PyFloat_CheckExact(value))
        return isfinite(PyFloat_AS_DOUBLE(value));
    if (!PyLong_CheckExact(value))
        return 0;
    int overflow;
    PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow > 0) {
        PyLong_AsUnsignedLongLong(value);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
    }
    return overflow >= 0;
}

/* Making a container may start a garbage collection, whose finalizers are Python code: what is
 * copied is held while it is copied, and sizes are asked for anew. */

static PyObject *copy_list(PyObject *value, int depth)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(value); i++) {
        PyObject *member = Py_NewRef(PyList_GET_ITEM(value, i));
        PyObject *item = copy_value(member, depth);
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
        Py_DECREF(member);
    }
    return list;
}

static PyObject *copy_dict(PyObject *value, int depth)
{
    PyObject *dict = PyDict_New();
    PyObject *key, *member;
    Py_ssize_t place = 0;
    while (dict != NULL && PyDict_Next(value, &place, &key, &member)) {
        Py_INCREF(key);
        Py_INCREF(member);
        PyObject *item = is_plain_string(key) ? copy_value(member, depth) : refuse("an odd key");
        if (item == NULL || PyDict_SetItem(dict, key, item) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(item);
        Py_DECREF(member);
        Py_DECREF(key);
    }
    return dict;
}

static PyObject *copy_value(PyObject *value, int depth)
{
    if (value == Py_None || value == Py_True || value == Py_False || is_plain_string(value) ||
        is_plain_number(value))
        return Py_NewRef(value);
    if (depth == MAX_DEPTH)
        return refuse("nested too deep");
    if (PyDict_CheckExact(value))
        return copy_dict(value, depth + 1);
    if (PyList_CheckExact(value))
        return copy_list(value, depth + 1);
    return refuse("not what reading JSON gives");
}

PyObject *json_copy(PyObject *module, PyObject *value)
{
    (void)module;
    return copy_value(value, 0);
}
