/* XXH3's 128-bit sum (seed 0, default secret) of more than 240 bytes that may lie in pieces. */
#include "native.h"

#include <string.h>

#define STRIPE 64
#define STRIPES_A_BLOCK 16 /* each takes the secret 8 bytes further on */
#define SECRET_BYTES 192

static const uint64_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87ULL, P64_2 = 0xC2B2AE3D27D4EB4FULL;
static const uint64_t P64_3 = 0x165667B19E3779F9ULL, P64_4 = 0x85EBCA77C2B2AE63ULL;
static const uint64_t P64_5 = 0x27D4EB2F165667C5ULL;

/* The default secret that the algorithm's specification fixes. */
static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t load64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* `count` neighbouring stripes into the sums; `at` counts the stripes of the current block. */
typedef void mixer(uint64_t *sums, const uint8_t *data, size_t count, unsigned *at);

static void mix_plain(uint64_t *sums, const uint8_t *data, size_t count, unsigned *at)
{
    for (; count; count--, data += STRIPE) {
        const uint8_t *secret = SECRET + 8 * *at;
        for (int i = 0; i < 8; i++) {
            uint64_t word = load64(data + 8 * i), key = word ^ load64(secret + 8 * i);
            sums[i ^ 1] += word;
            sums[i] += (key & 0xFFFFFFFFU) * (key >> 32);
        }
        if (++*at == STRIPES_A_BLOCK) {
            *at = 0;
            for (int i = 0; i < 8; i++) {
                uint64_t sum = sums[i] ^ sums[i] >> 47;
                sums[i] = (sum ^ load64(SECRET + SECRET_BYTES - STRIPE + 8 * i)) * P32_1;
            }
        }
    }
}

#if defined(__x86_64__)
#include <immintrin.h>

#define SWAP_HALVES 0x31 /* of 64-bit words: the upper 32 bits come down */
#define SWAP_WORDS 0x4E  /* neighbouring 64-bit words */
#define AHEAD 512        /* bytes on their way while others are mixed */

__attribute__((target("avx2"))) static inline __m256i mixed_2(__m256i sum, const uint8_t *data,
                                                              const uint8_t *secret)
{
    __m256i word = _mm256_loadu_si256((const __m256i *)data);
    __m256i key = _mm256_xor_si256(word, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_shuffle_epi32(key, SWAP_HALVES));
    sum = _mm256_add_epi64(sum, _mm256_shuffle_epi32(word, SWAP_WORDS));
    return _mm256_add_epi64(sum, product);
}

__attribute__((target("avx2"))) static inline __m256i scrambled_2(__m256i sum, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi64x((long long)P32_1);
    sum = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    sum = _mm256_xor_si256(sum, _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) static void mix_avx2(uint64_t *sums, const uint8_t *data,
                                                     size_t count, unsigned *at)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)sums);
    __m256i high = _mm256_loadu_si256((const __m256i *)(sums + 4));
    unsigned stripe = *at;
    while (count) {
        unsigned end = count < STRIPES_A_BLOCK - stripe ? stripe + (unsigned)count : STRIPES_A_BLOCK;
        count -= end - stripe;
        for (; stripe < end; stripe++, data += STRIPE) {
            const uint8_t *secret = SECRET + 8 * stripe;
            _mm_prefetch((const char *)data + AHEAD, _MM_HINT_T0);
            low = mixed_2(low, data, secret);
            high = mixed_2(high, data + 32, secret + 32);
        }
        if (stripe == STRIPES_A_BLOCK) {
            stripe = 0;
            low = scrambled_2(low, SECRET + SECRET_BYTES - STRIPE);
            high = scrambled_2(high, SECRET + SECRET_BYTES - STRIPE + 32);
        }
    }
    *at = stripe;
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)(sums + 4), high);
}

__attribute__((target("avx512f"))) static inline void mix_8(__m512i *sum, __m512i *products,
                                                            const uint8_t *data,
                                                            const uint8_t *secret)
{
    _mm_prefetch((const char *)data + AHEAD, _MM_HINT_T0);
    __m512i word = _mm512_loadu_si512(data);
    __m512i key = _mm512_xor_si512(word, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    *sum = _mm512_add_epi64(*sum, _mm512_shuffle_epi32(word, SWAP_WORDS));
    *products = _mm512_add_epi64(*products, product);
}

__attribute__((target("avx512f"))) static void mix_avx512(uint64_t *sums, const uint8_t *data,
                                                          size_t count, unsigned *at)
{
    const __m512i prime = _mm512_set1_epi64((long long)P32_1);
    const __m512i last = _mm512_loadu_si512(SECRET + SECRET_BYTES - STRIPE);
    __m512i sum = _mm512_loadu_si512(sums), products = _mm512_setzero_si512();
    unsigned stripe = *at;
    while (count) {
        if (stripe == 0 && count >= STRIPES_A_BLOCK) {
            /* Unrolled, so that the secrets of a whole block stay in registers. */
#pragma GCC unroll 16
            for (unsigned i = 0; i < STRIPES_A_BLOCK; i++)
                mix_8(&sum, &products, data + STRIPE * i, SECRET + 8 * i);
            stripe = STRIPES_A_BLOCK, count -= STRIPES_A_BLOCK, data += STRIPE * STRIPES_A_BLOCK;
        }
        for (; count && stripe < STRIPES_A_BLOCK; stripe++, count--, data += STRIPE)
            mix_8(&sum, &products, data, SECRET + 8 * stripe);
        sum = _mm512_add_epi64(sum, products);
        products = _mm512_setzero_si512();
        if (stripe == STRIPES_A_BLOCK) {
            stripe = 0;
            sum = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
            sum = _mm512_xor_si512(sum, last);
            __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
            sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32));
        }
    }
    *at = stripe;
    _mm512_storeu_si512(sums, sum);
}
#endif

static mixer *mix = mix_plain;

void choose_mixer(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        mix = mix_avx512;
    else if (__builtin_cpu_supports("avx2"))
        mix = mix_avx2;
#endif
    choose_compressor("avx512");
}

int use_mixer(const char *name)
{
    choose_compressor(name);
    if (!strcmp(name, "plain")) {
        mix = mix_plain;
        return 1;
    }
#if defined(__x86_64__)
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2")) {
        mix = mix_avx2;
        return 1;
    }
    if (!strcmp(name, "avx512") && __builtin_cpu_supports("avx512f")) {
        mix = mix_avx512;
        return 1;
    }
#endif
    return 0;
}

static uint64_t folded(uint64_t one, uint64_t two)
{
    unsigned __int128 product = (unsigned __int128)one * two;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merged(const uint64_t *sums, const uint8_t *secret, uint64_t value)
{
    for (int i = 0; i < 4; i++)
        value += folded(sums[2 * i] ^ load64(secret + 16 * i),
                        sums[2 * i + 1] ^ load64(secret + 16 * i + 8));
    value = (value ^ value >> 37) * 0x165667919E3779F9ULL;
    return value ^ value >> 32;
}

static void big_endian(uint8_t *out, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(value >> (56 - 8 * i));
}

/* The last stripe covers the last 64 bytes, whatever came before. */
static void last_bytes(uint8_t *out, const struct iovec *pieces, int count)
{
    size_t left = STRIPE;
    for (int i = count - 1; left; i--) {
        size_t some = pieces[i].iov_len < left ? pieces[i].iov_len : left;
        left -= some;
        memcpy(out + left, (const uint8_t *)pieces[i].iov_base + pieces[i].iov_len - some, some);
    }
}

void checksum(uint8_t *out, const struct iovec *pieces, int count, size_t length)
{
    uint64_t sums[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    uint8_t stripe[STRIPE];
    size_t left = (length - 1) / STRIPE, held = 0;
    unsigned at = 0;
    for (int i = 0; i < count && left; i++) {
        const uint8_t *data = pieces[i].iov_base;
        size_t here = pieces[i].iov_len;
        if (!here)
            continue;
        if (held) { /* a stripe that began in an earlier piece */
            size_t some = here < STRIPE - held ? here : STRIPE - held;
            memcpy(stripe + held, data, some);
            held += some, data += some, here -= some;
            if (held < STRIPE)
                continue;
            mix(sums, stripe, 1, &at);
            held = 0, left--;
        }
        size_t whole = here / STRIPE < left ? here / STRIPE : left;
        mix(sums, data, whole, &at);
        left -= whole;
        held = here - whole * STRIPE;
        if (left && held)
            memcpy(stripe, data + whole * STRIPE, held);
    }
    last_bytes(stripe, pieces, count);
    const uint8_t *secret = SECRET + SECRET_BYTES - STRIPE - 7;
    for (int i = 0; i < 8; i++) {
        uint64_t word = load64(stripe + 8 * i), key = word ^ load64(secret + 8 * i);
        sums[i ^ 1] += word;
        sums[i] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
    uint64_t low = merged(sums, SECRET + 11, (uint64_t)length * P64_1);
    uint64_t high = merged(sums, SECRET + SECRET_BYTES - STRIPE - 11, ~((uint64_t)length * P64_2));
    big_endian(out, high);
    big_endian(out + 8, low);
}
