/* Rows of bytes into other rows, past the caches where they are many: nobody reads them soon. */
#include "native.h"

#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define STREAMED_BYTES (1 << 20) /* fewer may be read again while a cache still holds them */

static void copy_streaming(uint8_t *to, const uint8_t *from, size_t length)
{
#if defined(__x86_64__)
    size_t head = -(uintptr_t)to & 63;
    head = head < length ? head : length;
    memcpy(to, from, head);
    to += head, from += head, length -= head;
    for (; length >= 64; length -= 64, to += 64, from += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
#endif
    memcpy(to, from, length);
}

/* Memory of rows of bytes: [rows, length] with any distance between rows. */
static int rows_of(Py_buffer *view, PyObject *object, int flags)
{
    if (PyObject_GetBuffer(object, view, PyBUF_STRIDED_RO | flags) < 0)
        return -1;
    if (view->ndim == 2 && view->itemsize == 1 && view->strides[1] == 1)
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "rows of bytes are needed");
    return -1;
}

/* copy_rows(source, target, slots, scatter): target[i] = source[slots[i]], or with `scatter`
   target[slots[i]] = source[i]. */
PyObject *copy_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Py_buffer source = {0}, target = {0}, slots = {0};
    PyObject *answer = NULL;
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "copy_rows: see native/_routines.pyi");
        return NULL;
    }
    int scatter = PyObject_IsTrue(args[3]);
    if (scatter < 0 || rows_of(&source, args[0], 0) < 0)
        return NULL;
    if (rows_of(&target, args[1], PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(args[2], &slots, PyBUF_SIMPLE) < 0)
        goto end;
    const int64_t *slot = slots.buf;
    size_t count = (size_t)slots.len / sizeof *slot, length = (size_t)source.shape[1];
    Py_ssize_t numbered = scatter ? target.shape[0] : source.shape[0];
    int fits = target.shape[1] == source.shape[1] && (size_t)slots.len % sizeof *slot == 0 &&
               (Py_ssize_t)count == (scatter ? source.shape[0] : target.shape[0]);
    for (size_t i = 0; fits && i < count; i++)
        fits = slot[i] >= 0 && slot[i] < numbered;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "rows and slots do not fit each other");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    int streaming = count * length >= STREAMED_BYTES;
    for (size_t i = 0; i < count; i++) {
        Py_ssize_t there = scatter ? (Py_ssize_t)i : slot[i];
        Py_ssize_t here = scatter ? slot[i] : (Py_ssize_t)i;
        const uint8_t *from = (const uint8_t *)source.buf + there * source.strides[0];
        uint8_t *to = (uint8_t *)target.buf + here * target.strides[0];
        if (streaming)
            copy_streaming(to, from, length);
        else
            memmove(to, from, length);
    }
#if defined(__x86_64__)
    _mm_sfence(); /* what is written next, by whomever, comes after these */
#endif
    Py_END_ALLOW_THREADS
    answer = Py_NewRef(Py_None);
end:
    PyBuffer_Release(&source);
    if (target.obj)
        PyBuffer_Release(&target);
    if (slots.obj)
        PyBuffer_Release(&slots);
    return answer;
}
