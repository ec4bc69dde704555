/* Lookups in the open-addressing table of the index: `EntryTable._find` in `log/index.py`. */
#include "native.h"

#include <string.h>

#define EMPTY 0xFFFFFFFFU
#define DEAD 0xFFFFFFFEU
#define MIX 0x9E3779B97F4A7C15ULL

/* Where the fields of a row lie: `ROW` in `log/index.py`. */
enum { AT_LOW = 0, AT_HIGH = 8, AT_KIND = 28, AT_SHARD = 29, ROW_BYTES = 40 };

enum { SLOTS, ROWS, LOWS, HIGHS, KINDS, SHARDS, FOUND, ARRAYS };

static const uint8_t *item(const Py_buffer *array, Py_ssize_t i)
{
    return (const uint8_t *)array->buf + i * array->strides[0];
}

static uint64_t word(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static int64_t find_one(const Py_buffer *all, unsigned shift, uint64_t mask, Py_ssize_t i)
{
    uint64_t low = word(item(&all[LOWS], i)), high = word(item(&all[HIGHS], i));
    uint8_t kind = *item(&all[KINDS], i), shard = *item(&all[SHARDS], i);
    const uint32_t *slots = all[SLOTS].buf;
    const uint8_t *rows = all[ROWS].buf;
    uint64_t at = ((low ^ ((uint64_t)kind << 8 | shard)) * MIX) >> shift;
    for (uint64_t seen = 0; seen <= mask; seen++, at = (at + 1) & mask) {
        uint32_t number = slots[at];
        if (number == EMPTY)
            break;
        if (number == DEAD || number >= (uint64_t)all[ROWS].shape[0])
            continue;
        const uint8_t *row = rows + (uint64_t)number * ROW_BYTES;
        if (word(row + AT_LOW) == low && word(row + AT_HIGH) == high && row[AT_KIND] == kind &&
            row[AT_SHARD] == shard)
            return number;
    }
    return -1;
}

/* find_rows(slots, rows, lows, highs, kinds, shards, found) */
PyObject *find_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    static const Py_ssize_t sizes[ARRAYS] = {4, ROW_BYTES, 8, 8, 1, 1, 8};
    Py_buffer all[ARRAYS] = {0};
    PyObject *answer = NULL;
    int held = 0, fits = 1;
    if (nargs != ARRAYS) {
        PyErr_SetString(PyExc_TypeError, "find_rows: see native/_routines.pyi");
        return NULL;
    }
    for (; held < ARRAYS; held++) {
        int flags = held == FOUND ? PyBUF_STRIDED : PyBUF_STRIDED_RO;
        if (PyObject_GetBuffer(args[held], &all[held], flags) < 0)
            goto end;
        fits = fits && all[held].ndim == 1 && all[held].itemsize == sizes[held];
    }
    uint64_t slots = fits ? (uint64_t)all[SLOTS].shape[0] : 0;
    fits = fits && slots >= 2 && !(slots & (slots - 1)) && all[SLOTS].strides[0] == 4 &&
           all[ROWS].strides[0] == ROW_BYTES && all[FOUND].strides[0] == 8;
    for (int i = LOWS; fits && i < ARRAYS; i++)
        fits = all[i].shape[0] == all[LOWS].shape[0];
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the arrays of a lookup do not fit each other");
        goto end;
    }
    unsigned shift = 64 - (unsigned)__builtin_ctzll(slots);
    int64_t *found = all[FOUND].buf;
    for (Py_ssize_t i = 0; i < all[LOWS].shape[0]; i++)
        found[i] = find_one(all, shift, slots - 1, i);
    answer = Py_NewRef(Py_None);
end:
    while (held--)
        PyBuffer_Release(&all[held]);
    return answer;
}
