/* What the files of the compiled routines share.
 *
 * Every routine has a twin in Python and gives the same result or refuses: it raises ValueError
 * for whatever it does not handle, and the caller then asks the twin, which also words the error.
 */
#ifndef DEEPINFER_RECIPE_NATIVE_H
#define DEEPINFER_RECIPE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Containers inside each other that a body may have; the twin's MAX_DEPTH. */
#define MAX_DEPTH 127

/* Characters looked at together where nothing needs attention. Compilers make it a few vector
 * instructions, unless it is so few that they unroll the loop first. */
#define BLOCK 32

#ifdef __SSE2__
#include <emmintrin.h>

/* A bit for each of the 16 bytes from `text` on that a JSON string cannot hold as it is; with
 * `and_wide` also for those that are no ASCII. */
static inline unsigned special_bits(const unsigned char *text, int and_wide)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)text);
    __m128i control = _mm_cmpeq_epi8(_mm_min_epu8(bytes, _mm_set1_epi8(0x1f)), bytes);
    __m128i quote = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('"'));
    __m128i backslash = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'));
    __m128i special = _mm_or_si128(control, _mm_or_si128(quote, backslash));
    if (and_wide)
        special = _mm_or_si128(special, bytes); /* the mask takes the highest bit of each */
    return (unsigned)_mm_movemask_epi8(special);
}
#endif

/* Strings of old extension modules may still lack the form that is read here. Returns 0, or -1
 * with an error set. */
static inline int make_ready(PyObject *text)
{
#if PY_VERSION_HEX < 0x030C0000
    return PyUnicode_READY(text);
#else
    (void)text;
    return 0;
#endif
}

/* Refuse: the twin decides. Returns NULL. */
PyObject *refuse(const char *why);

/* read.c */
PyObject *json_loads(PyObject *module, PyObject *text);

/* copy.c */
PyObject *json_copy(PyObject *module, PyObject *value);

/* write.c */
PyObject *json_quote(PyObject *module, PyObject *text);
PyObject *json_between(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *json_prompt(PyObject *module, PyObject *value);
PyObject *json_compact(PyObject *module, PyObject *value);

/* find.c */
PyObject *json_find_list(PyObject *module, PyObject *const *args, Py_ssize_t count);

/* plain.c */
PyObject *text_is_plain(PyObject *module, PyObject *const *args, Py_ssize_t count);

/* event.c */
int add_event_type(PyObject *module);

/* join.c */
PyObject *text_join(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
