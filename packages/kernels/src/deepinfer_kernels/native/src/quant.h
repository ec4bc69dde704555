// Products with weights that stay as they are stored: blocks of 32 along a row (Q8_0, Q4_0, Q4_1 of
// GGUF), or bfloat16.
//
// Rows may also be packed by 16: their blocks side by side, field by field and four bytes by four, so
// that one load reads a piece of every row. Gathering it from plain rows costs several times as much.
//
// The activations are rounded to int8 per 32 (scale amax / 127), so that a block is an integer dot
// product; `exact` keeps them as they are and widens the weights instead.
#pragma once

#include <type_traits>

#include "common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace di {

enum Stored { kQ8_0 = 0, kQ4_0 = 1, kQ4_1 = 2, kBf16 = 3 };

constexpr int64_t kBlock = 32;
constexpr int64_t kPacked = 16;

DI_INLINE int64_t block_bytes(int stored) {
  return stored == kQ8_0 ? 34 : stored == kQ4_0 ? 18 : 20;
}

DI_INLINE float half_to_float(const uint8_t* from) {
  uint16_t h;
  std::memcpy(&h, from, 2);
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7FFF;
  if (rest >= 0x7C00) return from_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);
  if (rest < 0x400) return from_bits(sign | to_bits(static_cast<float>(rest) * 0x1p-24f));
  return from_bits(sign | ((rest << 13) + (112u << 23)));
}

// The 32 integers of a block, its scale and its offset: value = scale * integer + offset.
DI_INLINE void unpack_stored(const uint8_t* block, int stored, int8_t* to, float* scale,
                             float* offset) {
  *scale = half_to_float(block);
  *offset = 0;
  if (stored == kQ8_0) {
    std::memcpy(to, block + 2, 32);
    return;
  }
  if (stored == kQ4_1) *offset = half_to_float(block + 2);
  const uint8_t* data = block + (stored == kQ4_1 ? 4 : 2);
  const int8_t zero = stored == kQ4_0 ? 8 : 0;
  for (int i = 0; i < 16; ++i) {
    to[i] = static_cast<int8_t>((data[i] & 15) - zero);
    to[i + 16] = static_cast<int8_t>((data[i] >> 4) - zero);
  }
}

// Activations in int8, with the scale and the sum of the integers of each block.
struct Rounded {
  int64_t channels, blocks;
  int8_t* q;       // [n, channels]
  float* scale;    // [n, blocks]
  int32_t* total;  // [n, blocks]
};

template <class T>
void round_rows(const T* x, int64_t first, int64_t last, const Rounded& r) {
  for (int64_t row = first; row < last; ++row)
    for (int64_t b = 0; b < r.blocks; ++b) {
      const T* from = x + row * r.channels + b * kBlock;
      int8_t* q = r.q + row * r.channels + b * kBlock;
      float v[kBlock];
      uint32_t top = 0;  // as integers: the order of magnitudes is that of their bits, NaN above all
      for (int i = 0; i < kBlock; ++i) v[i] = static_cast<float>(load(from[i]));
      for (int i = 0; i < kBlock; ++i) top = std::max(top, to_bits(v[i]) & 0x7FFFFFFF);
      const float amax = from_bits(top);
      const bool finite = top < 0x7F800000;
      const float inverse = finite && amax > 0 ? 127.0f / amax : 0.0f;
      int32_t total = 0, wide[kBlock];
      for (int i = 0; i < kBlock; ++i)
        wide[i] = finite ? static_cast<int32_t>(std::nearbyintf(v[i] * inverse)) : 0;
      for (int i = 0; i < kBlock; ++i) total += wide[i];
      for (int i = 0; i < kBlock; ++i) q[i] = static_cast<int8_t>(wide[i]);
      // A NaN or infinity in the block makes the row NaN, and not a wrong number.
      r.scale[row * r.blocks + b] =
          finite ? amax / 127.0f : std::numeric_limits<float>::quiet_NaN();
      r.total[row * r.blocks + b] = total;
    }
}

// Weight rows of which one panel of lanes holds a row each.
struct StoredRows {
  const uint8_t* data;
  int64_t row_bytes, rows;
  int stored;
  bool packed;

  // The packed block `b` of the 16 rows around `row`: 16 scales, 16 offsets where there are any, and
  // then the bytes.
  const uint8_t* group(int64_t row, int64_t b) const {
    return data + row / kPacked * kPacked * row_bytes + b * kPacked * block_bytes(stored);
  }
  // Block b of one row, its bytes together.
  const uint8_t* block(int64_t row, int64_t b, uint8_t* space) const {
    if (!packed) return data + row * row_bytes + b * block_bytes(stored);
    const uint8_t* from = group(row, b);
    const int64_t lane = row % kPacked, bytes = block_bytes(stored);
    uint8_t* to = space;
    for (int64_t i = stored == kQ4_1 ? 2 : 1; i > 0; --i, from += 2 * kPacked, to += 2)
      std::memcpy(to, from + 2 * lane, 2);
    for (; to < space + bytes; to += 4, from += 4 * kPacked) std::memcpy(to, from + 4 * lane, 4);
    return space;
  }
};

// c[i][lane] = sum over blocks, in their order, of scale_w * scale_x * (q_w . q_x) + offset_w *
// scale_x * sum(q_x), for M rows of x from `row` on and the weight rows from `panel` on.
template <int M>
inline void panel_plain(const StoredRows& w, int64_t panel, const Rounded& x, int64_t row,
                        float* c) {
  int8_t q[kBlock];
  uint8_t space[40];
  float scale, offset, sums[M] = {};
  for (int64_t b = 0; b < x.blocks; ++b) {
    unpack_stored(w.block(panel, b, space), w.stored, q, &scale, &offset);
    for (int i = 0; i < M; ++i) {
      const int8_t* own = x.q + (row + i) * x.channels + b * kBlock;
      const int64_t at = (row + i) * x.blocks + b;
      int32_t dot = 0;
      for (int j = 0; j < kBlock; ++j)
        dot += static_cast<int32_t>(q[j]) * static_cast<int32_t>(own[j]);
      sums[i] += scale * x.scale[at] * static_cast<float>(dot);
      if (w.stored == kQ4_1) sums[i] += offset * (x.scale[at] * static_cast<float>(x.total[at]));
    }
  }
  for (int i = 0; i < M; ++i) c[i] = sums[i];
}

DI_INLINE int32_t four_bytes(const int8_t* from) {
  int32_t word;
  std::memcpy(&word, from, 4);
  return word;
}

#if defined(__AVX2__)
// 8 weight rows, one a lane: 4 bytes of each are gathered at once, so no sum over lanes is needed.
template <int M>
inline void panel_avx2(const StoredRows& w, int64_t panel, const Rounded& x, int64_t row,
                       float* c) {
  const int bytes = static_cast<int>(block_bytes(w.stored));
  const int header = w.stored == kQ4_1 ? 4 : 2;
  int offsets[8];
  for (int l = 0; l < 8; ++l)
    offsets[l] = static_cast<int>(std::min<int64_t>(l, w.rows - 1 - panel) * w.row_bytes);
  const __m256i index = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offsets));
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const uint8_t* base = w.data + panel * w.row_bytes;
  const auto gather = [&](const uint8_t* at) {
    return _mm256_i32gather_epi32(reinterpret_cast<const int*>(at), index, 1);
  };
  const auto halves = [](__m256i low) {  // 8 float16 in the low words
    const __m256i packed = _mm256_packus_epi32(low, low);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 8)));
  };
  __m256 sums[M];
  for (int i = 0; i < M; ++i) sums[i] = _mm256_setzero_ps();
  const auto near = [](const uint8_t* at) {  // 8 float16
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  };
  const int64_t lane = panel % kPacked;
  for (int64_t b = 0; b < x.blocks; ++b, base += bytes) {
    const uint8_t* group = w.group(panel, b);
    const __m256i head = w.packed ? _mm256_setzero_si256() : gather(base);
    const __m256 scale = w.packed ? near(group + 2 * lane)
                                  : halves(_mm256_and_si256(head, _mm256_set1_epi32(0xFFFF)));
    __m256i q[8];
    for (int g = 0; g < (w.stored == kQ8_0 ? 8 : 4); ++g) {
      const uint8_t* at = group + kPacked * (header + 4 * g) + 4 * lane;
      const __m256i raw = w.packed ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))
                                   : gather(base + header + 4 * g);
      q[g] = raw;
      if (w.stored != kQ8_0) {
        q[g] = _mm256_and_si256(raw, nibble);
        q[g + 4] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
      }
    }
    for (int i = 0; i < M; ++i) {
      const int64_t at = (row + i) * x.blocks + b;
      const int8_t* own = x.q + (row + i) * x.channels + b * kBlock;
      __m256i dots = _mm256_set1_epi32(w.stored == kQ4_0 ? -8 * x.total[at] : 0);
      for (int g = 0; g < 8; ++g) {
        __m256i word = _mm256_set1_epi32(four_bytes(own + 4 * g)), weight = q[g];
        if (w.stored == kQ8_0) {  // |w| * (x with the sign of w): two products fit 16 bits
          word = _mm256_sign_epi8(word, weight);
          weight = _mm256_abs_epi8(weight);
        }
        dots = _mm256_add_epi32(dots,
                                _mm256_madd_epi16(_mm256_maddubs_epi16(weight, word), ones));
      }
      const __m256 own_scale = _mm256_set1_ps(x.scale[at]);
      sums[i] = _mm256_fmadd_ps(_mm256_mul_ps(scale, own_scale), _mm256_cvtepi32_ps(dots), sums[i]);
      if (w.stored == kQ4_1) {
        const __m256 offset = w.packed ? near(group + 2 * (kPacked + lane))
                                       : halves(_mm256_srli_epi32(head, 16));
        const float total = x.scale[at] * static_cast<float>(x.total[at]);
        sums[i] = _mm256_fmadd_ps(offset, _mm256_set1_ps(total), sums[i]);
      }
    }
  }
  for (int i = 0; i < M; ++i) _mm256_storeu_ps(c + i * 8, sums[i]);
}
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
// As panel_avx2 with 16 rows and one instruction for four products and their sum.
template <int M, int STORED, bool PACKED>
__attribute__((target("avx512vnni"))) inline void panel_vnni_of(const StoredRows& w, int64_t panel,
                                                                const Rounded& x, int64_t row,
                                                                float* c) {
  constexpr int kBytes = STORED == kQ8_0 ? 34 : STORED == kQ4_0 ? 18 : 20;
  constexpr int kHeader = STORED == kQ4_1 ? 4 : 2;
  constexpr int kZero = STORED == kQ8_0 ? 128 : STORED == kQ4_0 ? 8 : 0;  // weights are unsigned
  int offsets[16];
  for (int l = 0; l < 16; ++l)
    offsets[l] = static_cast<int>(std::min<int64_t>(l, w.rows - 1 - panel) * w.row_bytes);
  const __m512i index = _mm512_loadu_si512(offsets);
  const __m512i nibble = _mm512_set1_epi8(15);
  const uint8_t* base = w.data + panel * w.row_bytes;
  __m512 sums[M];
  for (int i = 0; i < M; ++i) sums[i] = _mm512_setzero_ps();
  const auto near = [](const uint8_t* at) {  // 16 float16
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  };
  for (int64_t b = 0; b < x.blocks; ++b, base += kBytes) {
    const uint8_t* group = w.group(panel, b);
    __m512i head = _mm512_setzero_si512();
    if (!PACKED) head = _mm512_i32gather_epi32(index, base, 1);
    const __m512 scale = _mm512_cvtph_ps(PACKED ? near(group) : _mm512_cvtepi32_epi16(head));
    __m512i q[8];
    for (int g = 0; g < (STORED == kQ8_0 ? 8 : 4); ++g) {
      const __m512i raw = PACKED ? _mm512_loadu_si512(group + kPacked * (kHeader + 4 * g))
                                 : _mm512_i32gather_epi32(index, base + kHeader + 4 * g, 1);
      if (STORED == kQ8_0) {
        q[g] = _mm512_xor_si512(raw, _mm512_set1_epi8(static_cast<char>(128)));  // plus 128
      } else {
        q[g] = _mm512_and_si512(raw, nibble);
        q[g + 4] = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
      }
    }
    __m512 offset = _mm512_setzero_ps();
    if (STORED == kQ4_1)
      offset = _mm512_cvtph_ps(PACKED ? near(group + 2 * kPacked)
                                      : _mm512_cvtepi32_epi16(_mm512_srli_epi32(head, 16)));
    for (int i = 0; i < M; ++i) {
      const int64_t at = (row + i) * x.blocks + b;
      const int8_t* own = x.q + (row + i) * x.channels + b * kBlock;
      __m512i dots = _mm512_set1_epi32(-kZero * x.total[at]);
      for (int g = 0; g < 8; ++g)
        dots = _mm512_dpbusd_epi32(dots, q[g], _mm512_set1_epi32(four_bytes(own + 4 * g)));
      const __m512 own_scale = _mm512_set1_ps(x.scale[at]);
      sums[i] = _mm512_fmadd_ps(_mm512_mul_ps(scale, own_scale), _mm512_cvtepi32_ps(dots), sums[i]);
      if (STORED == kQ4_1) {
        const float total = x.scale[at] * static_cast<float>(x.total[at]);
        sums[i] = _mm512_fmadd_ps(offset, _mm512_set1_ps(total), sums[i]);
      }
    }
  }
  for (int i = 0; i < M; ++i) _mm512_storeu_ps(c + i * 16, sums[i]);
}

template <int M>
inline void panel_vnni(const StoredRows& w, int64_t panel, const Rounded& x, int64_t row,
                       float* c) {
  const auto of = [&](auto stored) {
    constexpr int kStored = decltype(stored)::value;
    return w.packed ? panel_vnni_of<M, kStored, true>(w, panel, x, row, c)
                    : panel_vnni_of<M, kStored, false>(w, panel, x, row, c);
  };
  if (w.stored == kQ8_0) return of(std::integral_constant<int, kQ8_0>());
  if (w.stored == kQ4_0) return of(std::integral_constant<int, kQ4_0>());
  return of(std::integral_constant<int, kQ4_1>());
}
#endif

// The widest kernel of this machine: how many weight rows a panel has, and its forms for 1 and for
// kTogether rows of x.
constexpr int kTogether = 8;
struct PanelKernel {
  using Form = void (*)(const StoredRows&, int64_t, const Rounded&, int64_t, float*);
  int64_t lanes;
  Form one, together;
};
inline PanelKernel panel_kernel() {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if (__builtin_cpu_supports("avx512vnni")) return {16, panel_vnni<1>, panel_vnni<kTogether>};
#endif
#if defined(__AVX2__)
  return {8, panel_avx2<1>, panel_avx2<kTogether>};
#else
  return {1, panel_plain<1>, panel_plain<kTogether>};
#endif
}

// out [n, m] = x [n, k] . weight [m, k]^T + bias, with activations rounded to int8.
template <class T>
void linear_rounded(const T* x, const StoredRows& w, const float* bias, int64_t n, int64_t k,
                    T* out) {
  const int64_t blocks = k / kBlock, m = w.rows;
  // Of this call and not of the thread: the slices below read them from other threads.
  std::vector<int8_t> q(n * k);
  std::vector<float> scale(n * blocks);
  std::vector<int32_t> total(n * blocks);
  const Rounded rounded = {k, blocks, q.data(), scale.data(), total.data()};
  parallel_rows(n, 8 * k, [=, &rounded](int64_t first, int64_t last) {
    round_rows(x, first, last, rounded);
  });
  static const PanelKernel kernel = panel_kernel();
  const int64_t lanes = kernel.lanes, panels = (m + lanes - 1) / lanes;
  parallel_rows(panels, n * k * lanes / 8, [=, &rounded, &w](int64_t panel, int64_t last) {
    float c[16 * kTogether];
    for (; panel < last; ++panel) {
      const int64_t from = panel * lanes, count = std::min(lanes, m - from);
      for (int64_t row = 0, step; row < n; row += step) {
        step = n - row >= kTogether ? kTogether : 1;
        (step == 1 ? kernel.one : kernel.together)(w, from, rounded, row, c);
        for (int64_t i = 0; i < step; ++i)
          for (int64_t l = 0; l < count; ++l)
            store(out[(row + i) * m + from + l],
                  acc_t<T>(c[i * lanes + l] + (bias ? bias[from + l] : 0.0f)));
      }
    }
  });
}

// One weight row widened, for the exact product.
template <class A>
void widen_stored(const StoredRows& w, int64_t row, int64_t k, A* to) {
  if (w.stored == kBf16) {
    const uint8_t* from = w.data + row * w.row_bytes;
    for (int64_t i = 0; i < k; ++i) {
      bf16 value;
      std::memcpy(&value, from + 2 * i, 2);
      to[i] = load(value);
    }
    return;
  }
  int8_t q[kBlock];
  uint8_t space[40];
  float scale, offset;
  for (int64_t b = 0; b < k / kBlock; ++b) {
    unpack_stored(w.block(row, b, space), w.stored, q, &scale, &offset);
    for (int i = 0; i < kBlock; ++i) to[b * kBlock + i] = A(scale) * A(q[i]) + A(offset);
  }
}

constexpr int64_t kWidenedRows = 4;

// out [n, m] = x . weight^T + bias with the weights widened; x as it is.
template <class T>
void linear_exact(const T* x, const StoredRows& w, const acc_t<T>* bias, int64_t n, int64_t k,
                  T* out) {
  const int64_t m = w.rows;
  using A = acc_t<T>;
  std::vector<A> copy;
  const A* wide;
  if constexpr (std::is_same_v<T, A>) {
    wide = x;
  } else {
    copy.resize(n * k);
    widen(x, copy.data(), n * k);
    wide = copy.data();
  }
  parallel_rows(m, 2 * n * k, [=, &w](int64_t row, int64_t last) {
    std::vector<A> rows(kWidenedRows * k), c(n * kWidenedRows);
    for (; row < last; row += kWidenedRows) {
      const int64_t count = std::min(kWidenedRows, last - row);
      for (int64_t i = 0; i < count; ++i)
        widen_stored(w, row + i, k, rows.data() + i * k);
      // Always four rows, so that a row's sum runs in one order whatever slice it is in.
      product(rows.data(), kWidenedRows, wide, n, k, c.data());
      for (int64_t j = 0; j < n; ++j)
        for (int64_t i = 0; i < count; ++i)
          store(out[j * m + row + i], c[j * kWidenedRows + i] + (bias ? bias[row + i] : A(0)));
    }
  });
}

}  // namespace di
