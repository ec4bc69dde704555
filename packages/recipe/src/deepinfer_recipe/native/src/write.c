/* Writing JSON text: `json_text.quote`, `json_text.between`, `prompt_json` and `compact_json`.
 *
 * Text is written at the width of its widest character (1, 2 or 4 bytes), as Python keeps it.
 * Runs without escapes are found many characters at a time and copied.
 */
#include "native.h"
#include "widths.h"

#include <math.h>
#include <string.h>

/* Nothing here makes a container, so no garbage collection starts and no Python code runs: what
 * is borrowed from a value stays alive while it is written. */

/* Deeper values go to the twin, which knows Python's own limit. */
#define MAX_WRITE_DEPTH 200
#define SHORT 4096

typedef struct {
    void *data;
    int width; /* bytes of a character: 1, 2 or 4 */
    Py_UCS4 max_char; /* class of the widest character so far, as PyUnicode_New takes it */
    Py_ssize_t length;
    Py_ssize_t capacity;
} Writer;

/* -- escaping: a function for every pair of widths ------------------------------------- */

/* How many characters stand for each of those up to the backslash. */
static const unsigned char escaped_lengths['\\' + 1] = {
    6, 6, 6, 6, 6, 6, 6, 6, 2, 2, 2, 6, 2, 2, 6, 6, /* \b \t \n \f \r */
    6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6,
    1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, /* the quote */
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2,          /* the backslash */
};

static inline int needs_escape(Py_UCS4 character)
{
    return character <= '\\' && escaped_lengths[character] > 1;
}

static void escape(Py_UCS4 character, char out[6])
{
    static const char hex[] = "0123456789abcdef";
    out[0] = '\\';
    switch (character) {
    case '\b': out[1] = 'b'; break;
    case '\f': out[1] = 'f'; break;
    case '\n': out[1] = 'n'; break;
    case '\r': out[1] = 'r'; break;
    case '\t': out[1] = 't'; break;
    case '"': case '\\': out[1] = (char)character; break;
    default:
        memcpy(out + 1, "u00", 3);
        out[4] = hex[character >> 4];
        out[5] = hex[character & 15];
    }
}

/* Length of the run that `text` begins with and that needs no escape. */

static Py_ssize_t clean_Py_UCS1(const Py_UCS1 *text, Py_ssize_t length)
{
    Py_ssize_t at = 0;
#ifdef __SSE2__
    for (; length - at >= 16; at += 16) {
        unsigned special = special_bits(text + at, 0);
        if (special)
            return at + __builtin_ctz(special);
    }
#endif
    while (at < length && !needs_escape(text[at]))
        at++;
    return at;
}

#define DEFINE_CLEAN(IN)                                                                       \
    static Py_ssize_t clean_##IN(const IN *text, Py_ssize_t length)                            \
    {                                                                                          \
        Py_ssize_t at = 0;                                                                     \
        for (; length - at >= BLOCK; at += BLOCK) {                                            \
            IN dirty = 0;                                                                      \
            for (int i = 0; i < BLOCK; i++)                                                    \
                dirty |= (IN)((text[at + i] < 0x20) | (text[at + i] == '"') |                  \
                              (text[at + i] == '\\'));                                         \
            if (dirty)                                                                         \
                break;                                                                         \
        }                                                                                      \
        while (at < length && !needs_escape(text[at]))                                         \
            at++;                                                                              \
        return at;                                                                             \
    }

#define DEFINE_LENGTH(IN)                                                                      \
    /* Length of `text` with its escapes; -1 if that is more than there can be. */             \
    static Py_ssize_t escaped_length_##IN(const IN *text, Py_ssize_t length)                   \
    {                                                                                          \
        Py_ssize_t total = length;                                                             \
        for (Py_ssize_t at = 0; (at += clean_##IN(text + at, length - at)) < length; at++) {   \
            if (total > PY_SSIZE_T_MAX - 6)                                                    \
                return -1;                                                                     \
            total += escaped_lengths[text[at]] - 1;                                              \
        }                                                                                      \
        return total;                                                                          \
    }

#define DEFINE_ESCAPED(IN, OUT)                                                                \
    /* Returns how many characters were written. */                                            \
    static Py_ssize_t put_escaped_##IN##_##OUT(OUT *out, const IN *text, Py_ssize_t length)    \
    {                                                                                          \
        OUT *start = out;                                                                      \
        for (Py_ssize_t at = 0;; at++) {                                                       \
            Py_ssize_t run = clean_##IN(text + at, length - at);                               \
            copy_##IN##_##OUT(out, text + at, run);                                            \
            out += run;                                                                        \
            at += run;                                                                         \
            if (at == length)                                                                  \
                return out - start;                                                            \
            char escaped[6];                                                                   \
            escape(text[at], escaped);                                                         \
            for (int i = 0; i < escaped_lengths[text[at]]; i++)                           \
                *out++ = (OUT)escaped[i];                                                      \
        }                                                                                      \
    }

DEFINE_CLEAN(Py_UCS2)
DEFINE_CLEAN(Py_UCS4)
DEFINE_LENGTH(Py_UCS1)
DEFINE_LENGTH(Py_UCS2)
DEFINE_LENGTH(Py_UCS4)
DEFINE_ESCAPED(Py_UCS1, Py_UCS1)
DEFINE_ESCAPED(Py_UCS1, Py_UCS2)
DEFINE_ESCAPED(Py_UCS1, Py_UCS4)
DEFINE_ESCAPED(Py_UCS2, Py_UCS2)
DEFINE_ESCAPED(Py_UCS2, Py_UCS4)
DEFINE_ESCAPED(Py_UCS4, Py_UCS4)

static Py_ssize_t escaped_length(PyObject *text)
{
    Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    const void *data = PyUnicode_DATA(text);
    switch (PyUnicode_KIND(text)) {
    case PyUnicode_1BYTE_KIND: return escaped_length_Py_UCS1(data, length);
    case PyUnicode_2BYTE_KIND: return escaped_length_Py_UCS2(data, length);
    default: return escaped_length_Py_UCS4(data, length);
    }
}

/* -- the writer ------------------------------------------------------------------------ */

static char *end_of(Writer *writer)
{
    return (char *)writer->data + writer->length * writer->width;
}

static int grow(Writer *writer, Py_ssize_t more, int width)
{
    if (more > PY_SSIZE_T_MAX / 16 - writer->length) {
        PyErr_NoMemory();
        return -1;
    }
    if (width < writer->width)
        width = writer->width;
    Py_ssize_t capacity = (writer->length + more) * 2;
    void *data = PyMem_Malloc((size_t)capacity * (size_t)width);
    if (data == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    (void)BY_WIDTHS(copy, writer->width, width, data, writer->data, writer->length);
    PyMem_Free(writer->data);
    writer->data = data;
    writer->width = width;
    writer->capacity = capacity;
    return 0;
}

/* Room for `more` characters of class `max_char`. Returns 0, or -1 with an error set. */
static inline int reserve(Writer *writer, Py_ssize_t more, Py_UCS4 max_char)
{
    int width = max_char > 0xFFFF ? 4 : max_char > 0xFF ? 2 : 1;
    if (max_char > writer->max_char)
        writer->max_char = max_char;
    if (width <= writer->width && more <= writer->capacity - writer->length)
        return 0;
    return grow(writer, more, width);
}

/* These three need room reserved for what they write. */

static void put_ascii(Writer *writer, const char *text, Py_ssize_t length)
{
    writer->length += BY_WIDTHS(copy, 1, writer->width, end_of(writer), text, length);
}

static void put_text(Writer *writer, PyObject *text)
{
    int width = (int)PyUnicode_KIND(text);
    Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    writer->length +=
        BY_WIDTHS(copy, width, writer->width, end_of(writer), PyUnicode_DATA(text), length);
}

static void put_quoted(Writer *writer, PyObject *text)
{
    int width = (int)PyUnicode_KIND(text);
    Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    put_ascii(writer, "\"", 1);
    writer->length +=
        BY_WIDTHS(put_escaped, width, writer->width, end_of(writer), PyUnicode_DATA(text), length);
    put_ascii(writer, "\"", 1);
}

static int write_ascii(Writer *writer, const char *text, Py_ssize_t length)
{
    if (reserve(writer, length, 127) < 0)
        return -1;
    put_ascii(writer, text, length);
    return 0;
}

static int write_quoted(Writer *writer, PyObject *text)
{
    if (make_ready(text) < 0)
        return -1;
    Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    /* For a short text room for the worst case is cheaper than counting. */
    length = length <= SHORT ? 6 * length : escaped_length(text);
    if (length < 0) {
        PyErr_NoMemory();
        return -1;
    }
    if (reserve(writer, length + 2, PyUnicode_MAX_CHAR_VALUE(text)) < 0)
        return -1;
    put_quoted(writer, text);
    return 0;
}

static int write_text(Writer *writer, PyObject *text)
{
    if (reserve(writer, PyUnicode_GET_LENGTH(text), PyUnicode_MAX_CHAR_VALUE(text)) < 0)
        return -1;
    put_text(writer, text);
    return 0;
}

/* -- values ---------------------------------------------------------------------------- */

static int write_value(Writer *writer, PyObject *value, int is_compact, int depth);

static int write_integer(Writer *writer, PyObject *value)
{
    char digits[24];
    int overflow;
    long long small = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (!overflow)
        return write_ascii(writer, digits, snprintf(digits, sizeof digits, "%lld", small));
    PyObject *text = PyLong_Type.tp_repr(value);
    if (text == NULL)
        return -1;
    int result = write_text(writer, text);
    Py_DECREF(text);
    return result;
}

static int write_real(Writer *writer, double value)
{
    if (!isfinite(value)) {
        refuse("not a number of JSON");
        return -1;
    }
    char *digits = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    if (digits == NULL)
        return -1;
    int result = write_ascii(writer, digits, (Py_ssize_t)strlen(digits));
    PyMem_Free(digits);
    return result;
}

static int write_separator(Writer *writer, char separator, int is_compact)
{
    char text[2] = {separator, ' '};
    return write_ascii(writer, text, is_compact ? 1 : 2);
}

static int write_list(Writer *writer, PyObject *value, int is_compact, int depth)
{
    Py_ssize_t length = PyList_GET_SIZE(value);
    if (write_ascii(writer, "[", 1) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < length; i++)
        if ((i > 0 && write_separator(writer, ',', is_compact) < 0) ||
            write_value(writer, PyList_GET_ITEM(value, i), is_compact, depth) < 0)
            return -1;
    return write_ascii(writer, "]", 1);
}

static int write_dict(Writer *writer, PyObject *value, int is_compact, int depth)
{
    PyObject *key, *member;
    Py_ssize_t place = 0;
    int is_first = 1;
    if (write_ascii(writer, "{", 1) < 0)
        return -1;
    while (PyDict_Next(value, &place, &key, &member)) {
        if (!is_first && write_separator(writer, ',', is_compact) < 0)
            return -1;
        is_first = 0;
        if (!PyUnicode_CheckExact(key)) {
            refuse("a key that is no text");
            return -1;
        }
        if (write_quoted(writer, key) < 0 || write_separator(writer, ':', is_compact) < 0 ||
            write_value(writer, member, is_compact, depth) < 0)
            return -1;
    }
    return write_ascii(writer, "}", 1);
}

static int write_value(Writer *writer, PyObject *value, int is_compact, int depth)
{
    if (PyUnicode_CheckExact(value))
        return write_quoted(writer, value);
    if (value == Py_None)
        return write_ascii(writer, "null", 4);
    if (value == Py_True)
        return write_ascii(writer, "true", 4);
    if (value == Py_False)
        return write_ascii(writer, "false", 5);
    if (PyLong_CheckExact(value))
        return write_integer(writer, value);
    if (PyFloat_CheckExact(value))
        return write_real(writer, PyFloat_AS_DOUBLE(value));
    if (depth < MAX_WRITE_DEPTH && PyDict_CheckExact(value))
        return write_dict(writer, value, is_compact, depth + 1);
    if (depth < MAX_WRITE_DEPTH && PyList_CheckExact(value))
        return write_list(writer, value, is_compact, depth + 1);
    refuse("not a value that is written here");
    return -1;
}

static PyObject *written(PyObject *value, int is_compact)
{
    Writer writer = {.width = 1, .max_char = 127};
    PyObject *text = NULL;
    if (reserve(&writer, 256, 127) == 0 && write_value(&writer, value, is_compact, 0) == 0) {
        text = PyUnicode_New(writer.length, writer.max_char);
        if (text != NULL)
            (void)BY_WIDTHS(copy, writer.width, writer.width, PyUnicode_DATA(text), writer.data,
                            writer.length);
    }
    PyMem_Free(writer.data);
    return text;
}

PyObject *json_prompt(PyObject *module, PyObject *value)
{
    (void)module;
    return written(value, 0);
}

PyObject *json_compact(PyObject *module, PyObject *value)
{
    (void)module;
    return written(value, 1);
}

/* -- one string ------------------------------------------------------------------------ */

/* `head`, the quoted text, `tail`; either end may be NULL. */
static PyObject *quoted_between(PyObject *head, PyObject *text, PyObject *tail)
{
    if (make_ready(text) < 0 || (head != NULL && make_ready(head) < 0) ||
        (tail != NULL && make_ready(tail) < 0))
        return NULL;
    PyObject *ends[2] = {head, tail};
    Py_UCS4 max_char = PyUnicode_MAX_CHAR_VALUE(text);
    Py_ssize_t length = escaped_length(text);
    Py_ssize_t total = length + 2;
    if (length < 0 || length > PY_SSIZE_T_MAX - 2)
        return PyErr_NoMemory();
    for (int i = 0; i < 2; i++) {
        if (ends[i] == NULL)
            continue;
        if (PyUnicode_MAX_CHAR_VALUE(ends[i]) > max_char)
            max_char = PyUnicode_MAX_CHAR_VALUE(ends[i]);
        if (PyUnicode_GET_LENGTH(ends[i]) > PY_SSIZE_T_MAX - total)
            return PyErr_NoMemory();
        total += PyUnicode_GET_LENGTH(ends[i]);
    }
    PyObject *result = PyUnicode_New(total, max_char);
    if (result == NULL)
        return NULL;
    Writer writer = {.data = PyUnicode_DATA(result),
                     .width = (int)PyUnicode_KIND(result),
                     .max_char = max_char,
                     .capacity = total};
    if (head != NULL)
        put_text(&writer, head);
    put_quoted(&writer, text);
    if (tail != NULL)
        put_text(&writer, tail);
    return result;
}

PyObject *json_quote(PyObject *module, PyObject *text)
{
    (void)module;
    if (!PyUnicode_Check(text)) {
        PyErr_Format(PyExc_TypeError, "quote() takes a str, got %.100s", Py_TYPE(text)->tp_name);
        return NULL;
    }
    return quoted_between(NULL, text, NULL);
}

PyObject *json_between(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 3 || !PyUnicode_Check(args[0]) || !PyUnicode_Check(args[1]) ||
        !PyUnicode_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "between() takes three str: head, text, tail");
        return NULL;
    }
    return quoted_between(args[0], args[1], args[2]);
}
