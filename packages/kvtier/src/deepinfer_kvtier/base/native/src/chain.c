/* The chain of block digests: BLAKE3 (keyed) of the digest before, and of the block's tokens.

   From the algorithm's specification, for messages of one chunk: those need no tree. */
#include "native.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define CHUNK_BYTES 1024
#define BLOCK_BYTES 64
#define ROUNDS 7
enum { CHUNK_START = 1, CHUNK_END = 2, ROOT = 8, KEYED = 16 };

static const uint32_t IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                               0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

/* Mixes one block of a message into the state `cv`. */
typedef void compressor(uint32_t *cv, const uint8_t *block, uint32_t length, uint32_t flags);

#define ROTATED(x, n) ((x) >> (n) | (x) << (32 - (n)))
#define QUARTER(a, b, c, d, x, y)                                                                   \
    (a += b + (x), d = ROTATED(d ^ a, 16), c += d, b = ROTATED(b ^ c, 12), a += b + (y),            \
     d = ROTATED(d ^ a, 8), c += d, b = ROTATED(b ^ c, 7))

static void compress_plain(uint32_t *cv, const uint8_t *block, uint32_t length, uint32_t flags)
{
    static const uint8_t order[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    uint32_t m[16], next[16];
    uint32_t v[16] = {cv[0], cv[1], cv[2], cv[3], cv[4], cv[5], cv[6], cv[7],
                      IV[0], IV[1], IV[2], IV[3], 0,     0,     length, flags};
    memcpy(m, block, sizeof m);
    for (int round = 0; round < ROUNDS; round++) {
        QUARTER(v[0], v[4], v[8], v[12], m[0], m[1]);
        QUARTER(v[1], v[5], v[9], v[13], m[2], m[3]);
        QUARTER(v[2], v[6], v[10], v[14], m[4], m[5]);
        QUARTER(v[3], v[7], v[11], v[15], m[6], m[7]);
        QUARTER(v[0], v[5], v[10], v[15], m[8], m[9]);
        QUARTER(v[1], v[6], v[11], v[12], m[10], m[11]);
        QUARTER(v[2], v[7], v[8], v[13], m[12], m[13]);
        QUARTER(v[3], v[4], v[9], v[14], m[14], m[15]);
        for (int i = 0; i < 16; i++)
            next[i] = m[order[i]];
        memcpy(m, next, sizeof m);
    }
    for (int i = 0; i < 8; i++)
        cv[i] = v[i] ^ v[i + 8];
}

#if defined(__x86_64__)
/* One row of the state a register; the message lies in the order in which a round takes it. */
__attribute__((target("avx512f,avx512vl"))) static void
compress_avx512(uint32_t *cv, const uint8_t *block, uint32_t length, uint32_t flags)
{
    /* Words for the four columns (first halves, second halves), then for the diagonals, which are
       mixed one column further left than they stand: the row that stays is the second. */
    const __m512i taken = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 14, 8, 10, 12, 15, 9, 11, 13);
    const __m512i turned =
        _mm512_setr_epi32(1, 5, 7, 2, 3, 10, 0, 15, 12, 4, 11, 13, 9, 14, 6, 8);
    __m512i m = _mm512_permutexvar_epi32(taken, _mm512_loadu_si512(block));
    __m128i a = _mm_loadu_si128((const void *)cv), b = _mm_loadu_si128((const void *)(cv + 4));
    __m128i c = _mm_loadu_si128((const void *)IV), d = _mm_setr_epi32(0, 0, (int)length, (int)flags);
#define HALF(x, y)                                                                                  \
    (a = _mm_add_epi32(_mm_add_epi32(a, x), b), d = _mm_ror_epi32(_mm_xor_si128(d, a), 16),         \
     c = _mm_add_epi32(c, d), b = _mm_ror_epi32(_mm_xor_si128(b, c), 12),                           \
     a = _mm_add_epi32(_mm_add_epi32(a, y), b), d = _mm_ror_epi32(_mm_xor_si128(d, a), 8),          \
     c = _mm_add_epi32(c, d), b = _mm_ror_epi32(_mm_xor_si128(b, c), 7))
    for (int round = 0; round < ROUNDS; round++) {
        HALF(_mm512_castsi512_si128(m), _mm512_extracti32x4_epi32(m, 1));
        a = _mm_shuffle_epi32(a, _MM_SHUFFLE(2, 1, 0, 3));
        d = _mm_shuffle_epi32(d, _MM_SHUFFLE(1, 0, 3, 2));
        c = _mm_shuffle_epi32(c, _MM_SHUFFLE(0, 3, 2, 1));
        HALF(_mm512_extracti32x4_epi32(m, 2), _mm512_extracti32x4_epi32(m, 3));
        a = _mm_shuffle_epi32(a, _MM_SHUFFLE(0, 3, 2, 1));
        d = _mm_shuffle_epi32(d, _MM_SHUFFLE(1, 0, 3, 2));
        c = _mm_shuffle_epi32(c, _MM_SHUFFLE(2, 1, 0, 3));
        m = _mm512_permutexvar_epi32(turned, m);
    }
    _mm_storeu_si128((void *)cv, _mm_xor_si128(a, c));
    _mm_storeu_si128((void *)(cv + 4), _mm_xor_si128(b, d));
}
#endif

static compressor *compress = compress_plain;

void choose_compressor(const char *name)
{
    compress = compress_plain;
#if defined(__x86_64__)
    if (!strcmp(name, "avx512") && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512vl"))
        compress = compress_avx512;
#endif
    (void)name;
}

/* The digest of one message of at least one byte and at most a chunk. */
static void digest_of(uint8_t *out, const uint32_t *key, const uint8_t *message, size_t length)
{
    uint32_t cv[8], flags = KEYED | CHUNK_START;
    memcpy(cv, key, sizeof cv);
    for (; length > BLOCK_BYTES; length -= BLOCK_BYTES, message += BLOCK_BYTES) {
        compress(cv, message, BLOCK_BYTES, flags);
        flags = KEYED;
    }
    uint8_t last[BLOCK_BYTES] = {0};
    memcpy(last, message, length);
    compress(cv, last, (uint32_t)length, flags | CHUNK_END | ROOT);
    memcpy(out, cv, sizeof cv);
}

/* chain_digests(key, before, blocks, size) -> the digest of every `size` bytes of `blocks`. */
PyObject *chain_digests(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 4 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) != DIGEST_BYTES ||
        !PyBytes_Check(args[1]) || PyBytes_GET_SIZE(args[1]) != DIGEST_BYTES) {
        PyErr_SetString(PyExc_TypeError, "chain_digests: see native/_routines.pyi");
        return NULL;
    }
    size_t size = PyLong_AsSize_t(args[3]);
    if (size == (size_t)-1 && PyErr_Occurred())
        return NULL;
    Py_buffer blocks;
    if (PyObject_GetBuffer(args[2], &blocks, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *found = NULL;
    if (!size || size > CHUNK_BYTES - DIGEST_BYTES || (size_t)blocks.len % size) {
        PyErr_SetString(PyExc_ValueError, "blocks have 1 to 992 bytes each, and are whole");
        goto end;
    }
    uint32_t key[8];
    uint8_t message[CHUNK_BYTES];
    memcpy(key, PyBytes_AS_STRING(args[0]), sizeof key);
    memcpy(message, PyBytes_AS_STRING(args[1]), DIGEST_BYTES);
    Py_ssize_t count = blocks.len / (Py_ssize_t)size;
    if (!(found = PyList_New(count)))
        goto end;
    for (Py_ssize_t i = 0; i < count; i++) {
        memcpy(message + DIGEST_BYTES, (const uint8_t *)blocks.buf + size * (size_t)i, size);
        digest_of(message, key, message, DIGEST_BYTES + size);
        PyObject *digest = PyBytes_FromStringAndSize((const char *)message, DIGEST_BYTES);
        if (!digest) {
            Py_CLEAR(found);
            goto end;
        }
        PyList_SET_ITEM(found, i, digest);
    }
end:
    PyBuffer_Release(&blocks);
    return found;
}
