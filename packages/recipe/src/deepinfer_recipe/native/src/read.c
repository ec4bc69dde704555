/* Reading JSON text: the strict rules of `json_text.loads`.
 *
 * The text is UTF-8. Runs of plain ASCII are passed many bytes at a time and copied; a string with
 * escapes or other characters takes one more pass. The end of the input is checked before every
 * byte that is looked at.
 */
#include "native.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Keys repeat from object to object: each is made once a document. */
#define KEY_SLOTS 128
#define MAX_KEY_BYTES 32
/* Escaped strings up to this length are put together on the stack. */
#define STACK_BYTES 1024
/* More digits than any number that a double can tell from its neighbours needs in practice;
 * longer ones go to the twin. */
#define MAX_NUMBER_BYTES 64

typedef struct {
    const unsigned char *at;
    const unsigned char *end;
    int depth;
    PyObject *keys[KEY_SLOTS];
} Reader;

static PyObject *read_value(Reader *reader);

static void skip_space(Reader *reader)
{
    while (reader->at < reader->end &&
           (*reader->at == ' ' || *reader->at == '\n' || *reader->at == '\r' ||
            *reader->at == '\t'))
        reader->at++;
}

/* Whether the next byte is `wanted`; if so it is passed. */
static int passes(Reader *reader, char wanted)
{
    if (reader->at >= reader->end || *reader->at != (unsigned char)wanted)
        return 0;
    reader->at++;
    return 1;
}

/* The first byte from `at` on that is no plain ASCII of a string, or `end`. */
static const unsigned char *plain_end(const unsigned char *at, const unsigned char *end)
{
#ifdef __SSE2__
    for (; end - at >= 16; at += 16) {
        unsigned special = special_bits(at, 1);
        if (special)
            return at + __builtin_ctz(special);
    }
#endif
    while (at < end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\')
        at++;
    return at;
}

static PyObject *ascii_string(const unsigned char *text, Py_ssize_t length)
{
    PyObject *string = PyUnicode_New(length, 127);
    if (string != NULL && length > 0)
        memcpy(PyUnicode_1BYTE_DATA(string), text, (size_t)length);
    return string;
}

static int hex_digits(const unsigned char *at, Py_UCS4 *value)
{
    *value = 0;
    for (int i = 0; i < 4; i++) {
        unsigned char digit = at[i];
        Py_UCS4 part;
        if (digit >= '0' && digit <= '9')
            part = digit - '0';
        else if (digit >= 'a' && digit <= 'f')
            part = digit - 'a' + 10;
        else if (digit >= 'A' && digit <= 'F')
            part = digit - 'A' + 10;
        else
            return 0;
        *value = *value << 4 | part;
    }
    return 1;
}

/* Append a character outside the surrogates as UTF-8. */
static unsigned char *put_utf8(unsigned char *out, Py_UCS4 character)
{
    if (character < 0x80) {
        *out++ = (unsigned char)character;
        return out;
    }
    if (character < 0x800) {
        *out++ = (unsigned char)(0xC0 | character >> 6);
    } else {
        if (character < 0x10000) {
            *out++ = (unsigned char)(0xE0 | character >> 12);
        } else {
            *out++ = (unsigned char)(0xF0 | character >> 18);
            *out++ = (unsigned char)(0x80 | (character >> 12 & 0x3F));
        }
        *out++ = (unsigned char)(0x80 | (character >> 6 & 0x3F));
    }
    *out++ = (unsigned char)(0x80 | (character & 0x3F));
    return out;
}

/* Read the escape behind a backslash at `at`; `end` is where the string's text ends. Returns
 * what follows, NULL for what is no escape of one whole character. */
static const unsigned char *read_escape(const unsigned char *at, const unsigned char *end,
                                        Py_UCS4 *character)
{
    static const char names[] = "\"\\/bfnrt";
    static const char meant[] = "\"\\/\b\f\n\r\t";
    if (at >= end)
        return NULL;
    if (*at != 'u') {
        const char *found = *at == '\0' ? NULL : strchr(names, *at);
        if (found == NULL)
            return NULL;
        *character = (Py_UCS4)meant[found - names];
        return at + 1;
    }
    if (end - at < 5 || !hex_digits(at + 1, character))
        return NULL;
    at += 5;
    if (*character < 0xD800 || *character > 0xDFFF)
        return at;
    Py_UCS4 low;
    if (*character > 0xDBFF || end - at < 6 || at[0] != '\\' || at[1] != 'u' ||
        !hex_digits(at + 2, &low) || low < 0xDC00 || low > 0xDFFF)
        return NULL;
    *character = 0x10000 + ((*character - 0xD800) << 10) + (low - 0xDC00);
    return at + 6;
}

/* The string whose text, with escapes, is `at` up to `end`. An escape is never shorter than the
 * UTF-8 of what it means, so the text's length is room enough. */
static PyObject *unescaped(const unsigned char *at, const unsigned char *end)
{
    unsigned char stack[STACK_BYTES];
    unsigned char *buffer = stack;
    PyObject *string = NULL;
    if (end - at > STACK_BYTES) {
        buffer = PyMem_Malloc((size_t)(end - at));
        if (buffer == NULL)
            return PyErr_NoMemory();
    }
    unsigned char *out = buffer;
    while (at < end) {
        const unsigned char *escape = memchr(at, '\\', (size_t)(end - at));
        size_t run = (size_t)((escape == NULL ? end : escape) - at);
        memcpy(out, at, run);
        out += run;
        at += run;
        if (escape == NULL)
            break;
        Py_UCS4 character;
        at = read_escape(at + 1, end, &character);
        if (at == NULL) {
            refuse("an escape that is none");
            goto done;
        }
        out = put_utf8(out, character);
    }
    string = PyUnicode_DecodeUTF8((const char *)buffer, out - buffer, NULL);
done:
    if (buffer != stack)
        PyMem_Free(buffer);
    return string;
}

/* The rest of a string behind its opening quote. */
static PyObject *read_string(Reader *reader)
{
    const unsigned char *start = reader->at;
    int has_escape = 0, is_ascii = 1;
    for (;;) {
        reader->at = plain_end(reader->at, reader->end);
        if (reader->at >= reader->end || *reader->at < 0x20)
            return refuse("a string that does not end");
        if (*reader->at == '"')
            break;
        if (*reader->at == '\\') {
            has_escape = 1;
            if (reader->end - reader->at < 2)
                return refuse("a string that does not end");
            reader->at += 2;
            continue;
        }
        is_ascii = 0;
        while (reader->at < reader->end && *reader->at >= 0x80)
            reader->at++;
    }
    const unsigned char *end = reader->at++;
    if (has_escape)
        return unescaped(start, end);
    if (is_ascii)
        return ascii_string(start, end - start);
    return PyUnicode_DecodeUTF8((const char *)start, end - start, NULL);
}

/* A key behind its opening quote; short plain ones are made once. Returns a new reference. */
static PyObject *read_key(Reader *reader)
{
    const unsigned char *start = reader->at;
    uint32_t hash = 2166136261u;
    Py_ssize_t length = 0;
    while (length < MAX_KEY_BYTES && start + length < reader->end) {
        unsigned char byte = start[length];
        if (byte == '"' || byte == '\\' || byte < 0x20 || byte >= 0x80)
            break;
        hash = (hash ^ byte) * 16777619u;
        length++;
    }
    if (start + length >= reader->end || start[length] != '"')
        return read_string(reader);
    reader->at += length + 1;
    PyObject **slot = &reader->keys[(hash ^ hash >> 16) % KEY_SLOTS];
    if (*slot == NULL || PyUnicode_GET_LENGTH(*slot) != length ||
        memcmp(PyUnicode_1BYTE_DATA(*slot), start, (size_t)length) != 0) {
        PyObject *key = ascii_string(start, length);
        if (key == NULL)
            return NULL;
        Py_XSETREF(*slot, key);
    }
    return Py_NewRef(*slot);
}

/* Integers outside 64 bits become doubles, and so does `-0`. */
static PyObject *integer(const unsigned char *digits, const unsigned char *end, int is_negative)
{
    uint64_t value = 0;
    for (; digits < end; digits++) {
        uint64_t digit = (uint64_t)(*digits - '0');
        if (value > (UINT64_MAX - digit) / 10)
            return NULL;
        value = value * 10 + digit;
    }
    if (!is_negative)
        return PyLong_FromUnsignedLongLong(value);
    if (value == 0 || value > (uint64_t)INT64_MAX + 1)
        return NULL;
    return PyLong_FromLongLong((long long)(0 - value));
}

static PyObject *real(const unsigned char *start, Py_ssize_t length)
{
    char text[MAX_NUMBER_BYTES + 1];
    char *stop;
    if (length > MAX_NUMBER_BYTES)
        return refuse("a long number");
    memcpy(text, start, (size_t)length);
    text[length] = '\0';
    double value = PyOS_string_to_double(text, &stop, NULL);
    if (value == -1.0 && PyErr_Occurred())
        return NULL;
    if (stop != text + length || isinf(value))
        return refuse("a number out of range");
    return PyFloat_FromDouble(value);
}

static int is_digit(const Reader *reader)
{
    return reader->at < reader->end && *reader->at >= '0' && *reader->at <= '9';
}

static PyObject *read_number(Reader *reader)
{
    const unsigned char *start = reader->at;
    int is_negative = passes(reader, '-');
    const unsigned char *digits = reader->at;
    int is_integer = 1;
    if (!is_digit(reader))
        return refuse("no JSON value");
    if (!passes(reader, '0'))
        while (is_digit(reader))
            reader->at++;
    const unsigned char *digits_end = reader->at;
    if (passes(reader, '.')) {
        is_integer = 0;
        if (!is_digit(reader))
            return refuse("a fraction without digits");
        while (is_digit(reader))
            reader->at++;
    }
    if (passes(reader, 'e') || passes(reader, 'E')) {
        is_integer = 0;
        if (!passes(reader, '-'))
            passes(reader, '+');
        if (!is_digit(reader))
            return refuse("an exponent without digits");
        while (is_digit(reader))
            reader->at++;
    }
    if (is_integer) {
        PyObject *value = integer(digits, digits_end, is_negative);
        if (value != NULL || PyErr_Occurred())
            return value;
    }
    return real(start, reader->at - start);
}

static PyObject *read_word(Reader *reader, const char *word, PyObject *value)
{
    size_t length = strlen(word);
    if ((size_t)(reader->end - reader->at) < length || memcmp(reader->at, word, length) != 0)
        return refuse("no JSON value");
    reader->at += length;
    return Py_NewRef(value);
}

/* The rest of a list behind its bracket. */
static PyObject *read_list(Reader *reader)
{
    PyObject *list = PyList_New(0);
    if (list == NULL)
        return NULL;
    skip_space(reader);
    if (passes(reader, ']'))
        return list;
    for (;;) {
        PyObject *item = read_value(reader);
        if (item == NULL)
            break;
        int failed = PyList_Append(list, item);
        Py_DECREF(item);
        if (failed)
            break;
        skip_space(reader);
        if (passes(reader, ']'))
            return list;
        if (!passes(reader, ',')) {
            refuse("a list that does not go on");
            break;
        }
    }
    Py_DECREF(list);
    return NULL;
}

/* One `"key": value` of an object; of equal keys the last wins, at the place of the first. */
static int read_member(Reader *reader, PyObject *object)
{
    skip_space(reader);
    if (!passes(reader, '"')) {
        refuse("a key is missing");
        return -1;
    }
    PyObject *key = read_key(reader);
    if (key == NULL)
        return -1;
    PyObject *value = NULL;
    int result = -1;
    skip_space(reader);
    if (passes(reader, ':'))
        value = read_value(reader);
    else
        refuse("a colon is missing");
    if (value != NULL)
        result = PyDict_SetItem(object, key, value);
    Py_XDECREF(value);
    Py_DECREF(key);
    return result;
}

/* The rest of an object behind its brace. */
static PyObject *read_object(Reader *reader)
{
    PyObject *object = PyDict_New();
    if (object == NULL)
        return NULL;
    skip_space(reader);
    if (passes(reader, '}'))
        return object;
    while (read_member(reader, object) == 0) {
        skip_space(reader);
        if (passes(reader, '}'))
            return object;
        if (!passes(reader, ',')) {
            refuse("an object that does not go on");
            break;
        }
    }
    Py_DECREF(object);
    return NULL;
}

static PyObject *read_container(Reader *reader)
{
    if (reader->depth == MAX_DEPTH)
        return refuse("nested too deep");
    reader->depth++;
    PyObject *value = *reader->at++ == '{' ? read_object(reader) : read_list(reader);
    reader->depth--;
    return value;
}

static PyObject *read_value(Reader *reader)
{
    skip_space(reader);
    if (reader->at >= reader->end)
        return refuse("no JSON value");
    switch (*reader->at) {
    case '"':
        reader->at++;
        return read_string(reader);
    case '{':
    case '[':
        return read_container(reader);
    case 't':
        return read_word(reader, "true", Py_True);
    case 'f':
        return read_word(reader, "false", Py_False);
    case 'n':
        return read_word(reader, "null", Py_None);
    default:
        return read_number(reader);
    }
}

PyObject *json_loads(PyObject *module, PyObject *text)
{
    (void)module;
    const char *data;
    Py_ssize_t length;
    if (PyBytes_CheckExact(text)) {
        data = PyBytes_AS_STRING(text);
        length = PyBytes_GET_SIZE(text);
    } else if (PyUnicode_CheckExact(text)) {
        data = PyUnicode_AsUTF8AndSize(text, &length);
        if (data == NULL)
            return NULL;
    } else {
        return refuse("neither bytes nor str");
    }
    Reader reader = {.at = (const unsigned char *)data,
                     .end = (const unsigned char *)data + length};
    PyObject *value = read_value(&reader);
    skip_space(&reader);
    if (value != NULL && reader.at != reader.end) {
        Py_CLEAR(value);
        refuse("text behind the value");
    }
    for (int slot = 0; slot < KEY_SLOTS; slot++)
        Py_XDECREF(reader.keys[slot]);
    return value;
}
