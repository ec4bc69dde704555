/* Finding a member of a JSON object without reading it: see `protocols/tool_lists.py`.
 *
 * Nothing is checked here. In valid JSON the place found is right; in anything else it may be
 * wrong, and whoever uses it must read what is around it.
 */
#include "native.h"

#include <string.h>

typedef const unsigned char *Place;

static Place skip_space(Place at, Place end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

/* What follows the string whose opening quote is at `start`; NULL if it does not end. */
static Place skip_string(Place start, Place end)
{
    for (Place at = start + 1;; at++) {
        at = memchr(at, '"', (size_t)(end - at));
        if (at == NULL)
            return NULL;
        Place run = at;
        while (run[-1] == '\\')
            run--;
        if ((at - run) % 2 == 0)
            return at + 1;
    }
}

/* What follows the list or object that begins at `at`; NULL if it does not end. */
static Place skip_container(Place at, Place end)
{
    Py_ssize_t depth = 0;
    while (at < end) {
        unsigned char byte = *at;
        if (byte == '"') {
            at = skip_string(at, end);
            if (at == NULL)
                return NULL;
            continue;
        }
        at++;
        if (byte == '[' || byte == '{')
            depth++;
        else if ((byte == ']' || byte == '}') && --depth == 0)
            return at;
    }
    return NULL;
}

static Place skip_value(Place at, Place end)
{
    if (at >= end)
        return NULL;
    if (*at == '"')
        return skip_string(at, end);
    if (*at == '[' || *at == '{')
        return skip_container(at, end);
    while (at < end && *at != ',' && *at != '}')
        at++;
    return at;
}

/* Find the member `name` of the object if its value is a list; of several the last, which is the
 * one that counts when they are read. Returns whether it did. */
static int find_list(Place at, Place end, const char *name, size_t name_length, Place *start,
                     Place *stop)
{
    *start = NULL;
    at = skip_space(at, end);
    if (at >= end || *at != '{')
        return 0;
    do {
        Place key = skip_space(at + 1, end);
        if (key >= end || *key != '"')
            return 0;
        Place key_end = skip_string(key, end);
        if (key_end == NULL)
            return 0;
        size_t length = (size_t)(key_end - key) - 2;
        if (memchr(key, '\\', length + 1) != NULL)
            return 0; /* what it spells would have to be read */
        at = skip_space(key_end, end);
        if (at >= end || *at != ':')
            return 0;
        Place value = skip_space(at + 1, end);
        at = skip_value(value, end);
        if (at == NULL)
            return 0;
        if (length == name_length && memcmp(key + 1, name, length) == 0) {
            if (*value != '[')
                return 0;
            *start = value;
            *stop = at;
        }
        at = skip_space(at, end);
    } while (at < end && *at == ',');
    return *start != NULL;
}

PyObject *json_find_list(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_ssize_t name_length;
    if (count != 2 || !PyBytes_CheckExact(args[0]) || !PyUnicode_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "find_list() takes bytes and a str");
        return NULL;
    }
    const char *name = PyUnicode_AsUTF8AndSize(args[1], &name_length);
    if (name == NULL)
        return NULL;
    Place text = (Place)PyBytes_AS_STRING(args[0]);
    Place start, stop;
    if (!find_list(text, text + PyBytes_GET_SIZE(args[0]), name, (size_t)name_length, &start, &stop))
        Py_RETURN_NONE;
    return Py_BuildValue("(nn)", (Py_ssize_t)(start - text), (Py_ssize_t)(stop - text));
}
