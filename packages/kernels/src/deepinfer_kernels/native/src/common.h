// Element types, vectors and small numeric helpers shared by every kernel.
//
// T is the activation type (float, bf16, double), A the accumulation type (double for double,
// float otherwise). Each row is computed by itself and in one fixed order, so a row's result never
// depends on the other rows of the batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define DI_VECTOR_BYTES 64
#else
#define DI_VECTOR_BYTES 32
#endif

// Small functions inside hot loops: the compiler's own limit on growth would leave calls there, and
// a loop with a call is not made vector code.
#define DI_INLINE inline __attribute__((always_inline))

namespace di {

enum Status { kOk = 0, kIndexOutOfRange = 1, kUnknownType = 2, kNotPositive = 3, kNoMemory = 100 };

struct bf16 {
  uint16_t bits;
};

template <class T>
struct accumulate {
  using type = float;
};
template <>
struct accumulate<double> {
  using type = double;
};
template <class T>
using acc_t = typename accumulate<T>::type;

DI_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
DI_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

DI_INLINE float load(float v) { return v; }
DI_INLINE double load(double v) { return v; }
DI_INLINE float load(bf16 v) { return from_bits(static_cast<uint32_t>(v.bits) << 16); }

DI_INLINE void store(float& to, float v) { to = v; }
DI_INLINE void store(double& to, double v) { to = v; }
DI_INLINE void store(bf16& to, float v) {  // nearest, ties to even; NaN stays NaN
  const uint32_t bits = to_bits(v);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>(v != v ? 0x7FC0 : rounded);
}

// Fixed-width vectors through the compiler's extension: they lower to whatever the target has.
template <class A, int BYTES>
struct vector_of {
  typedef A type __attribute__((vector_size(BYTES)));
};
template <class A>
using wide_t = typename vector_of<A, DI_VECTOR_BYTES>::type;
template <class A>
constexpr int lanes() {
  return DI_VECTOR_BYTES / static_cast<int>(sizeof(A));
}

template <class A>
DI_INLINE wide_t<A> load_wide(const A* from) {
  wide_t<A> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
DI_INLINE wide_t<float> load_wide(const bf16* from) {
#if defined(__AVX512F__)  // compilers make two halves of the plain form
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (wide_t<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
  typedef uint16_t half_t __attribute__((vector_size(DI_VECTOR_BYTES / 2)));
  typedef uint32_t word_t __attribute__((vector_size(DI_VECTOR_BYTES)));
  half_t half;
  std::memcpy(&half, from, sizeof half);
  word_t word = __builtin_convertvector(half, word_t) << 16;
  wide_t<float> v;
  std::memcpy(&v, &word, sizeof v);
  return v;
#endif
}
DI_INLINE void store_wide(float* to, const wide_t<float>& v) { std::memcpy(to, &v, sizeof v); }
DI_INLINE void store_wide(double* to, const wide_t<double>& v) { std::memcpy(to, &v, sizeof v); }
DI_INLINE void store_wide(bf16* to, const wide_t<float>& v) {  // as store, each lane
#if defined(__AVX512F__)
  const __m512i bits = (__m512i)v, one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  const __m512i word = _mm512_mask_blend_epi32(nan, _mm512_srli_epi32(up, 16),
                                               _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(word));
#else
  typedef uint16_t half_t __attribute__((vector_size(DI_VECTOR_BYTES / 2)));
  typedef uint32_t word_t __attribute__((vector_size(DI_VECTOR_BYTES)));
  word_t bits;
  std::memcpy(&bits, &v, sizeof v);
  const word_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const word_t word = (bits & 0x7FFFFFFF) > 0x7F800000 ? word_t{} + 0x7FC0 : rounded;
  const half_t half = __builtin_convertvector(word, half_t);
  std::memcpy(to, &half, sizeof half);
#endif
}
DI_INLINE float sum_of_16_bytes(vector_of<float, 16>::type v) { return (v[0] + v[1]) + (v[2] + v[3]); }
DI_INLINE double sum_of_16_bytes(vector_of<double, 16>::type v) { return v[0] + v[1]; }

// Sum over the lanes by halves: a chain of single additions would cost more than the products.
template <class A, int BYTES>
DI_INLINE A sum_halves(const typename vector_of<A, BYTES>::type& v) {
  if constexpr (BYTES == 16) {
    return sum_of_16_bytes(v);
  } else {
    typename vector_of<A, BYTES / 2>::type low, high;
    std::memcpy(&low, &v, BYTES / 2);
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + BYTES / 2, BYTES / 2);
    return sum_halves<A, BYTES / 2>(low + high);
  }
}
template <class A>
DI_INLINE A sum_lanes(const wide_t<A>& v) {
  return sum_halves<A, DI_VECTOR_BYTES>(v);
}

template <class T, class A>
inline void widen(const T* from, A* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = load(from[i]);
}

template <class T>
inline acc_t<T> sum_of_squares(const T* x, int64_t n) {
  using A = acc_t<T>;
  constexpr int L = lanes<A>();
  wide_t<A> even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * L <= n; i += 2 * L) {
    const wide_t<A> a = load_wide(x + i), b = load_wide(x + i + L);
    even += a * a;
    odd += b * b;
  }
  A total = sum_lanes<A>(even + odd);
  for (; i < n; ++i) total += load(x[i]) * load(x[i]);
  return total;
}

template <class A>
inline A sum_array(const A* x, int64_t n) {
  constexpr int L = lanes<A>();
  wide_t<A> sums = {};
  int64_t i = 0;
  for (; i + L <= n; i += L) sums += load_wide(x + i);
  A total = sum_lanes<A>(sums);
  for (; i < n; ++i) total += x[i];
  return total;
}

// exp for float loops: within 2 ulp on [-87, 88], 0 below, inf above; vectorises where libm's does
// not. The bound above is where the power of two becomes inf.
DI_INLINE float exp_fast(float x) {
  const float bounded = std::min(std::max(x, -87.0f), 89.0f);
  const float n = std::nearbyintf(bounded * 1.44269504088896341f);
  const float r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = p * r * r + r + 1.0f;
  const uint32_t scale = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  const float value = y * from_bits(scale);
  return x < -87.0f ? 0.0f : value;
}
DI_INLINE double exp_fast(double x) { return std::exp(x); }

// exp_fast of every lane.
DI_INLINE wide_t<float> exp_wide(const wide_t<float>& x) {
  typedef int32_t word_t __attribute__((vector_size(DI_VECTOR_BYTES)));
  const wide_t<float> none = {}, low = none - 87.0f, high = none + 89.0f;
  wide_t<float> bounded = x < low ? low : x;  // NaN stays
  bounded = bounded > high ? high : bounded;
  const wide_t<float> magic = none + 12582912.0f;  // 1.5 * 2^23, whose last place is 1: rounds
  const wide_t<float> n = (bounded * 1.44269504088896341f + magic) - magic;
  const wide_t<float> r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  wide_t<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const wide_t<float> y = p * r * r + r + 1.0f;
  const word_t scale = (__builtin_convertvector(n, word_t) + 127) << 23;
  wide_t<float> factor;
  std::memcpy(&factor, &scale, sizeof factor);
  const wide_t<float> value = y * factor;
  return x < low ? none : value;
}
DI_INLINE wide_t<double> exp_wide(const wide_t<double>& x) {
  wide_t<double> value;
  for (int l = 0; l < lanes<double>(); ++l) value[l] = exp_fast(x[l]);
  return value;
}

template <class A>
DI_INLINE A sigmoid(A x) {
  return A(1) / (A(1) + std::exp(-x));
}

// a * b + c rounded once where the machine does so: a loop's last elements are then rounded like
// those of its vectors, whatever the compiler makes of the loop.
DI_INLINE float mul_add(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
DI_INLINE double mul_add(double a, double b, double c) {
#ifdef __FMA__
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

template <class A>
inline A* scratch(int64_t count, int which = 0) {
  static thread_local std::vector<A> buffers[4];
  std::vector<A>& buffer = buffers[which];
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

// Sums over the lanes of four vectors side by side, each in the order of sum_lanes: four times less
// shuffling than one after the other.
template <class A, int BYTES>
DI_INLINE void sum_four(const typename vector_of<A, BYTES>::type* v, A* sums) {
  using half = typename vector_of<A, BYTES / 2>::type;
  if constexpr (BYTES == 16) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
    if constexpr (sizeof(A) == 4) {
      const auto ab = __builtin_shufflevector(v[0], v[1], 0, 2, 4, 6) +
                      __builtin_shufflevector(v[0], v[1], 1, 3, 5, 7);
      const auto cd = __builtin_shufflevector(v[2], v[3], 0, 2, 4, 6) +
                      __builtin_shufflevector(v[2], v[3], 1, 3, 5, 7);
      const auto all = __builtin_shufflevector(ab, cd, 0, 2, 4, 6) +
                       __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
      std::memcpy(sums, &all, sizeof all);
      return;
    }
#endif
    for (int i = 0; i < 4; ++i) sums[i] = sum_of_16_bytes(v[i]);
  } else {
    half halves[4];
    for (int i = 0; i < 4; ++i) {
      half low, high;
      std::memcpy(&low, &v[i], BYTES / 2);
      std::memcpy(&high, reinterpret_cast<const char*>(&v[i]) + BYTES / 2, BYTES / 2);
      halves[i] = low + high;
    }
    sum_four<A, BYTES / 2>(halves, sums);
  }
}

// M rows of w (4 or 1) against N rows of x: c[n][m] = sum_k w[m][k] * x[n][k]. M*N independent sums.
template <int M, int N, class T, class A>
DI_INLINE void product_tile(const T* w, int64_t ldw, const A* x, int64_t ldx, int64_t k, A* c,
                         int64_t ldc) {
  constexpr int L = lanes<A>();
  wide_t<A> sums[N][M] = {};
  int64_t i = 0;
  for (; i + L <= k; i += L) {
    wide_t<A> rows[M];
    for (int m = 0; m < M; ++m) rows[m] = load_wide(w + m * ldw + i);
    for (int n = 0; n < N; ++n) {
      const wide_t<A> column = load_wide(x + n * ldx + i);
      for (int m = 0; m < M; ++m) sums[n][m] += rows[m] * column;
    }
  }
  for (int n = 0; n < N; ++n) {
    A totals[M];
    if constexpr (M == 4)
      sum_four<A, DI_VECTOR_BYTES>(sums[n], totals);
    else
      totals[0] = sum_lanes<A>(sums[n][0]);
    for (int m = 0; m < M; ++m) {
      for (int64_t j = i; j < k; ++j)
        totals[m] = mul_add(A(load(w[m * ldw + j])), x[n * ldx + j], totals[m]);
      c[n * ldc + m] = totals[m];
    }
  }
}

// Columns of a tile: as many independent sums as the registers hold beside their operands.
#if defined(__AVX512F__)
constexpr int kTileColumns = 6;
#elif defined(__AVX2__)
constexpr int kTileColumns = 3;
#else
constexpr int kTileColumns = 1;
#endif

// c [n, m] = x [n, k] . w [m, k]^T; every element is summed in the same order whatever n is.
// Rows of w are ldw apart, those of x ldx.
template <class T, class A>
void product(const T* w, int64_t ldw, int64_t m, const A* x, int64_t ldx, int64_t n, int64_t k,
             A* c) {
  constexpr int N = kTileColumns;
  int64_t row = 0;
  for (; row + 4 <= m; row += 4) {
    const T* wr = w + row * ldw;
    int64_t col = 0;
    for (; col + N <= n; col += N)
      product_tile<4, N>(wr, ldw, x + col * ldx, ldx, k, c + col * m + row, m);
    for (; col + 2 <= n; col += 2)
      product_tile<4, 2>(wr, ldw, x + col * ldx, ldx, k, c + col * m + row, m);
    for (; col < n; ++col)
      product_tile<4, 1>(wr, ldw, x + col * ldx, ldx, k, c + col * m + row, m);
  }
  for (; row < m; ++row)
    for (int64_t col = 0; col < n; ++col)
      product_tile<1, 1>(w + row * ldw, ldw, x + col * ldx, ldx, k, c + col * m + row, m);
}
template <class T, class A>
void product(const T* w, int64_t m, const A* x, int64_t n, int64_t k, A* c) {
  product(w, k, m, x, k, n, k, c);
}

// Values of A rounded to T in place, as a separate layer would have rounded its output.
template <class T, class A>
inline void round_through(A* values, int64_t n) {
  if (sizeof(T) == sizeof(A)) return;
  for (int64_t i = 0; i < n; ++i) {
    T narrow;
    store(narrow, values[i]);
    values[i] = load(narrow);
  }
}

}  // namespace di
