// Cache records: quantise and write, read and dequantise; and the pooling of a group.
#pragma once

#include "common.h"

namespace di {

enum Record { kFp8 = 0, kFp4 = 1, kIndexFp4 = 2, kRaw = 3 };

// E4M3 code of v, nearest with ties to even, saturating at 448. NaN keeps its sign. Every case is
// computed and one selected, so that a loop over it becomes vector code.
DI_INLINE uint32_t encode_e4m3(float v) {
  const uint32_t bits = to_bits(v), sign = (bits >> 24) & 0x80, raw = bits & 0x7FFFFFFF;
  const float magnitude = from_bits(raw);
  // Below 2^-6 the codes are multiples of 2^-9: the float 1.5 * 2^14 has its last place there.
  const uint32_t small = to_bits(magnitude + 24576.0f) - to_bits(24576.0f);
  const uint32_t normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - (120 << 3);
  uint32_t code = magnitude < 0.015625f ? small : normal;
  code = magnitude >= 448.0f ? 0x7E : code;
  code = raw > 0x7F800000 ? 0x7F : code;
  return code | sign;
}

DI_INLINE uint32_t encode_e2m1(float v) {  // NaN takes code 7
  const float m = from_bits(to_bits(v) & 0x7FFFFFFF);
  const uint32_t code = uint32_t(m > 0.25f) + uint32_t(m >= 0.75f) + uint32_t(m > 1.25f) +
                        uint32_t(m >= 1.75f) + uint32_t(m > 2.5f) + uint32_t(m >= 3.5f) +
                        uint32_t(m > 5.0f);
  return (m != m ? 7 : code) | ((to_bits(v) >> 28) & 8);
}

inline uint8_t encode_pow2_ceil(float v) {
  const uint32_t bits = to_bits(v);
  const uint32_t exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0);
  return static_cast<uint8_t>(std::min<uint32_t>(exponent, 255));
}

// The codes below 8 have exponent 0 and are multiples of 2^-9; 0x7F is NaN. No table: a loop over
// these becomes vector code.
DI_INLINE float decode_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7F, sign = (code & 0x80) << 24;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0.001953125f;
  const uint32_t bits = magnitude < 8 ? to_bits(small) : (magnitude << 20) + (120u << 23);
  return from_bits((magnitude == 0x7F ? 0x7FC00000u : bits) | sign);
}

DI_INLINE float decode_e2m1(uint32_t code) {  // magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6
  const uint32_t magnitude = code & 7, sign = (code & 8) << 28;
  const uint32_t small = magnitude ? 126u << 23 : 0;
  return from_bits((magnitude < 2 ? small : (magnitude << 22) + (126u << 23)) | sign);
}

inline float decode_ue8m0(uint8_t code) {  // 2^(code - 127); 0 is the subnormal 2^-127
  return from_bits(code == 255 ? 0x7FC00000u : code ? static_cast<uint32_t>(code) << 23 : 1u << 22);
}

inline uint8_t scale_code(float amax, int record) {
  if (record == kFp8) return encode_pow2_ceil((amax < 1e-4f ? 1e-4f : amax) / 448.0f);
  if (record == kIndexFp4) {
    const float floor = 6 * 1.17549435e-38f;
    return encode_pow2_ceil((amax < floor ? floor : amax) / 6.0f);
  }
  return static_cast<uint8_t>(encode_e4m3((amax < 0.01171875f ? 0.01171875f : amax) / 6.0f));
}
inline float scale_value(uint8_t code, int record) {
  return record == kFp4 ? decode_e4m3(code) : decode_ue8m0(code);
}
inline int block_of(int record) { return record == kFp4 ? 16 : 32; }

// N values of one block divided by their scale, whose code is returned; loops that become vector code.
template <int N, class T>
DI_INLINE uint8_t scaled_block(const T* x, int record, float* values) {
  uint32_t top = 0;
  for (int i = 0; i < N; ++i) values[i] = static_cast<float>(load(x[i]));
  // As integers: the order of magnitudes is that of their bits, and a NaN is above them all.
  for (int i = 0; i < N; ++i) top = std::max(top, to_bits(values[i]) & 0x7FFFFFFF);
  const uint8_t code = scale_code(from_bits(top), record);
  const float scale = scale_value(code, record);
  for (int i = 0; i < N; ++i) values[i] /= scale;
  return code;
}

// N values of one block to codes.
template <int N, class T>
DI_INLINE void pack_block(const T* x, int record, uint8_t* data, uint8_t* scale_to) {
  float values[N];
  uint32_t codes[N];
  *scale_to = scaled_block<N>(x, record, values);
  if (record == kFp8) {
    for (int i = 0; i < N; ++i) codes[i] = encode_e4m3(values[i]);
    for (int i = 0; i < N; ++i) data[i] = static_cast<uint8_t>(codes[i]);
  } else {
    for (int i = 0; i < N; ++i) codes[i] = encode_e2m1(values[i]);
    for (int i = 0; i < N / 2; ++i)
      data[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
}

// One vector to payload and scales.
template <class T>
inline void pack_row(const T* x, int64_t dim, int record, uint8_t* data, uint8_t* scales) {
  if (record == kRaw) {
    std::memcpy(data, x, dim * sizeof(T));
    return;
  }
  const int block = block_of(record), bytes = record == kFp8 ? block : block / 2;
  for (int64_t start = 0; start < dim; start += block, data += bytes, ++scales) {
    if (block == 16)
      pack_block<16>(x + start, record, data, scales);
    else
      pack_block<32>(x + start, record, data, scales);
  }
}

// 8 bytes to 16 values, the low nibble first.
template <class O>
DI_INLINE void unpack_nibbles(const uint8_t* data, float scale, O* __restrict to) {
  float values[16];
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  typedef uint8_t bytes_t __attribute__((vector_size(8)));
  typedef uint32_t words_t __attribute__((vector_size(64)));
  bytes_t packed;
  std::memcpy(&packed, data, 8);
  const auto codes = __builtin_shufflevector(packed & 15, packed >> 4, 0, 8, 1, 9, 2, 10, 3, 11, 4,
                                             12, 5, 13, 6, 14, 7, 15);
  const words_t code = __builtin_convertvector(codes, words_t), magnitude = code & 7;
  const words_t half = {126u << 23};  // the bits of 0.5, as in decode_e2m1
  const words_t halves = __builtin_shufflevector(half, half, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                                 0, 0, 0);
  const words_t small = magnitude == 0 ? words_t{} : halves;
  const words_t bits = (magnitude < 2 ? small : (magnitude << 22) + halves) | (code & 8) << 28;
  std::memcpy(values, &bits, sizeof values);
#else
  for (int i = 0; i < 16; ++i) values[i] = decode_e2m1(data[i / 2] >> i % 2 * 4 & 15);
#endif
  for (int i = 0; i < 16; ++i) store(to[i], values[i] * scale);
}

// Payload and scales to O; a raw record holds T, the others know no type.
template <class T, class O>
inline void unpack_row(const uint8_t* data, const uint8_t* scales, int64_t dim, int record,
                       O* __restrict to) {
  if (record == kRaw) {
    for (int64_t i = 0; i < dim; ++i) {
      T value;  // records are not aligned for T
      std::memcpy(&value, data + i * sizeof(T), sizeof(T));
      store(to[i], load(value));
    }
    return;
  }
  const int block = block_of(record);
  for (int64_t start = 0; start < dim; start += block, to += block) {
    const float scale = scale_value(*scales++, record);
    if (record == kFp8) {
      for (int i = 0; i < 32; ++i) store(to[i], decode_e4m3(data[i]) * scale);
      data += 32;
    } else {
      for (int i = 0; i < block; i += 16, data += 8) unpack_nibbles(data, scale, to + i);
    }
  }
}

// Where entry `place` of a page keeps its payload and its scales.
struct Layout {
  int64_t stride, entries, data_bytes, scale_bytes;
  bool sectioned;
  uint8_t* data(uint8_t* page, int64_t place) const {
    return page + place * (sectioned ? data_bytes : data_bytes + scale_bytes);
  }
  uint8_t* scales(uint8_t* page, int64_t place) const {
    return sectioned ? page + entries * data_bytes + place * scale_bytes
                     : data(page, place) + data_bytes;
  }
};
template <class T>
inline Layout layout_of(int64_t stride, int64_t entries, int64_t dim, int record) {
  if (record == kRaw) return {stride, entries, dim * static_cast<int64_t>(sizeof(T)), 0, false};
  return {stride, entries, record == kFp8 ? dim : dim / 2, dim / block_of(record),
          record == kIndexFp4};
}

template <class T>
int kv_store(const T* x, uint8_t* cache, const int64_t* slot, int64_t n, int64_t dim,
             int64_t pages, int64_t stride, int64_t entries, int record) {
  const Layout at = layout_of<T>(stride, entries, dim, record);
  for (int64_t i = 0; i < n; ++i)  // all or nothing: look before the first byte is written
    if (slot[i] >= pages * entries) return kIndexOutOfRange;
  for (int64_t i = 0; i < n; ++i, x += dim) {
    if (slot[i] < 0) continue;
    uint8_t* page = cache + slot[i] / entries * stride;
    const int64_t place = slot[i] % entries;
    pack_row(x, dim, record, at.data(page, place), at.scales(page, place));
  }
  return kOk;
}

// T is what a raw record holds, O what is written.
template <class T, class O>
int kv_load(const uint8_t* cache, const int64_t* slot, int64_t n, int64_t dim, int64_t pages,
            int64_t stride, int64_t entries, int record, O* out) {
  const Layout at = layout_of<T>(stride, entries, dim, record);
  for (int64_t i = 0; i < n; ++i)
    if (slot[i] >= pages * entries) return kIndexOutOfRange;
  parallel_rows(n, 4 * dim, [=](int64_t i, int64_t last) {
    for (; i < last; ++i) {
      O* to = out + i * dim;
      if (slot[i] < 0) {
        for (int64_t d = 0; d < dim; ++d) store(to[d], acc_t<O>(0));
        continue;
      }
      uint8_t* page = const_cast<uint8_t*>(cache) + slot[i] / entries * stride;
      const int64_t place = slot[i] % entries;
      unpack_row<T>(at.data(page, place), at.scales(page, place), dim, record, to);
    }
  });
  return kOk;
}

// x [N] as its record would give it back; out may be x.
template <int N, class T, class O>
DI_INLINE void fake_quant_block(const T* x, int record, O* out) {
  float values[N];
  const float scale = scale_value(scaled_block<N>(x, record, values), record);
  if (record == kFp8)
    for (int i = 0; i < N; ++i) values[i] = decode_e4m3(encode_e4m3(values[i]));
  else
    for (int i = 0; i < N; ++i) values[i] = decode_e2m1(encode_e2m1(values[i]));
  for (int i = 0; i < N; ++i) store(out[i], values[i] * scale);
}

// x [dim] as its record would give it back; out may be x.
template <class T, class O>
inline void fake_quant_row(const T* x, int64_t dim, int record, O* out) {
  if (record == kRaw) {
    for (int64_t i = 0; i < dim; ++i) store(out[i], load(x[i]));
    return;
  }
  const int block = block_of(record);
  for (int64_t start = 0; start < dim; start += block) {
    if (block == 16)
      fake_quant_block<16>(x + start, record, out + start);
    else
      fake_quant_block<32>(x + start, record, out + start);
  }
}

template <class T>
void fake_quant(const T* x, int64_t rows, int64_t dim, int record, T* out) {
  parallel_rows(rows, 20 * dim, [=](int64_t row, int64_t last) {
    for (; row < last; ++row) fake_quant_row(x + row * dim, dim, record, out + row * dim);
  });
}

template <class T>
void compress_pool(const T* values, const T* gates, int64_t m, int64_t r, int64_t dim,
                   acc_t<T>* pooled) {
  using A = acc_t<T>;
  constexpr int L = lanes<A>();
  parallel_rows(m, 20 * r * dim, [=](int64_t row, int64_t last) {
    for (; row < last; ++row) {
      const T *value = values + row * r * dim, *gate = gates + row * r * dim;
      A* out = pooled + row * dim;
      int64_t d = 0;
      for (; r == 2 && d + L <= dim; d += L) {  // the larger gate's weight is 1: one exp
        const wide_t<A> g0 = load_wide(gate + d), g1 = load_wide(gate + dim + d);
        const wide_t<A> peak = g1 > g0 ? g1 : g0, other = g1 > g0 ? g0 : g1;
        const wide_t<A> less = exp_wide(other - peak);
        const wide_t<A> one = A(1) + (peak - peak);  // NaN where the peak is not finite
        const wide_t<A> w0 = g1 > g0 ? less : one, w1 = g1 > g0 ? one : less;
        store_wide(out + d, (w0 * load_wide(value + d) + w1 * load_wide(value + dim + d)) / (w0 + w1));
      }
      for (; d + L <= dim; d += L) {
        wide_t<A> peak = load_wide(gate + d);
        for (int64_t i = 1; i < r; ++i) {
          const wide_t<A> g = load_wide(gate + i * dim + d);
          peak = g > peak ? g : peak;
        }
        wide_t<A> total = {}, sum = {};
        for (int64_t i = 0; i < r; ++i) {
          const wide_t<A> w = exp_wide(load_wide(gate + i * dim + d) - peak);
          total += w;
          sum += w * load_wide(value + i * dim + d);
        }
        store_wide(out + d, sum / total);
      }
      for (; d < dim; ++d) {
        A peak = load(gate[d]), total = 0, sum = 0;
        for (int64_t i = 1; i < r; ++i) {
          const A g = load(gate[i * dim + d]);
          peak = g > peak ? g : peak;
        }
        for (int64_t i = 0; i < r; ++i) {
          const A w = exp_fast(load(gate[i * dim + d]) - peak);
          total += w;
          sum = mul_add(w, A(load(value[i * dim + d])), sum);
        }
        out[d] = sum / total;
      }
    }
  });
}

}  // namespace di
