// Routed experts of many bfloat16 rows, by the processor's dot products of bfloat16 pairs.
//
// A lane is a row: the rows of an expert stand transposed, two neighbouring channels in a word, and
// each pair of a weight is broadcast from where it is stored. So the weights are read as they are,
// once a block of rows, and a row is summed in the same order in any company.
#pragma once

#include <algorithm>
#include <vector>

#include "moe.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && (defined(__clang__) || __GNUC__ >= 10)
#define DI_BF16_DOT 1
#include <immintrin.h>
#endif

namespace di {

struct Matrices {  // [experts, rows, columns]; columns are adjacent
  const uint16_t* data;
  int64_t expert_stride, row_stride;
  const uint16_t* row(int64_t expert, int64_t i) const {
    return data + expert * expert_stride + i * row_stride;
  }
};

struct DotMlp {  // w1, w3 [experts, inner, width]; w2 [experts, width, inner]; both sizes even
  Matrices w1, w3, w2;
  float limit;
  int64_t width, inner, experts;
};

#if defined(DI_BF16_DOT)
inline bool has_bf16_dot() { return __builtin_cpu_supports("avx512bf16"); }

constexpr int kDotLanes = 16;
constexpr int kDotVectors = 6;                      // most vectors of rows in a block
constexpr int kDotRows = kDotVectors * kDotLanes;
constexpr int kDotOutputs = 16;                     // weight rows between two transpositions
constexpr int64_t kDotBlockBytes = 640 << 10;       // of transposed rows: what a core's own cache keeps

// c [M][kDotRows] = weights [M] . rows, where rows is [pairs][V * 16] words.
template <int V, int M>
__attribute__((target("avx512bf16"), noinline)) void dot_tile(const uint32_t* rows, int64_t pairs,
                                                              const uint16_t* const* weights,
                                                              float* c) {
  const uint16_t* w[M];
  for (int m = 0; m < M; ++m) w[m] = weights[m];
  __m512 sums[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sums[m][v] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p, rows += V * kDotLanes) {
    __m512i x[V];
    for (int v = 0; v < V; ++v) x[v] = _mm512_loadu_si512(rows + v * kDotLanes);
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, w[m] + 2 * p, 4);
      const __m512i both = _mm512_set1_epi32(pair);
      for (int v = 0; v < V; ++v)
        sums[m][v] = _mm512_dpbf16_ps(sums[m][v], (__m512bh)x[v], (__m512bh)both);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + m * kDotRows + v * kDotLanes, sums[m][v]);
}

// As many weight rows as keep all registers at work, by the vectors of rows.
struct DotTile {
  int outputs;
  void (*run)(const uint32_t*, int64_t, const uint16_t* const*, float*);
};
inline DotTile dot_tile_of(int vectors) {
  switch (vectors) {
    case 1: return {8, dot_tile<1, 8>};
    case 2: return {8, dot_tile<2, 8>};
    case 3: return {8, dot_tile<3, 8>};
    case 4: return {4, dot_tile<4, 4>};
    case 5: return {4, dot_tile<5, 4>};
    default: return {4, dot_tile<6, 4>};
  }
}

DI_INLINE uint32_t rounded_bits(float v) {
  bf16 narrow;
  store(narrow, v);
  return narrow.bits;
}
DI_INLINE float rounded(float v) { return from_bits(rounded_bits(v) << 16); }

struct DotBlock {  // rows of one expert: pairs [first, first + count) of the sorted order
  int64_t expert, first;
  int count;
};

// The block's rows through its expert, to down [pair][width]. Gate, up, their product and the result
// round to bfloat16, as separate layers would have rounded them.
inline void run_dot_block(const DotMlp& m, const bf16* x, const int64_t* order, int64_t topk,
                          const DotBlock& block, bf16* down) {
  const int vectors = (block.count + kDotLanes - 1) / kDotLanes, wide = vectors * kDotLanes;
  const DotTile tile = dot_tile_of(vectors);
  const int64_t width = m.width, inner = m.inner;
  uint32_t* rows = scratch<uint32_t>((width + inner) / 2 * wide);
  uint32_t* hidden = rows + width / 2 * wide;
  const int64_t* pairs = order + block.first;
  for (int r = 0; r < wide; ++r) {
    const bf16* from = x + pairs[std::min(r, block.count - 1)] / topk * width;
    for (int64_t p = 0; p < width / 2; ++p) std::memcpy(rows + p * wide + r, from + 2 * p, 4);
  }
  alignas(64) float sums[kDotOutputs * kDotRows] = {};
  const uint16_t* weights[8];
  const int half = tile.outputs / 2;  // gate rows, then the same rows of up
  for (int64_t n = 0; n < inner; n += half) {
    for (int i = 0; i < half; ++i) {
      const int64_t row = std::min(n + i, inner - 1);
      weights[i] = m.w1.row(block.expert, row);
      weights[half + i] = m.w3.row(block.expert, row);
    }
    tile.run(rows, width / 2, weights, sums);
    for (int i = 0; i < half && n + i < inner; i += 2) {
      const float *gate = sums + i * kDotRows, *up = gate + half * kDotRows;
      uint32_t* to = hidden + (n + i) / 2 * wide;
      for (int r = 0; r < wide; ++r) {
        const float low = gated<float>(rounded(gate[r]), rounded(up[r]), m.limit);
        const float high =
            gated<float>(rounded(gate[kDotRows + r]), rounded(up[kDotRows + r]), m.limit);
        to[r] = rounded_bits(low) | rounded_bits(high) << 16;
      }
    }
  }
  uint16_t narrow[kDotOutputs * kDotRows];
  for (int64_t n = 0; n < width; n += kDotOutputs) {
    const int outputs = static_cast<int>(std::min<int64_t>(kDotOutputs, width - n));
    for (int i = 0; i < outputs; i += tile.outputs) {
      for (int j = 0; j < tile.outputs; ++j)
        weights[j] = m.w2.row(block.expert, std::min(n + i + j, width - 1));
      tile.run(hidden, inner / 2, weights, sums + i * kDotRows);
    }
    for (int i = 0; i < kDotOutputs * kDotRows; ++i)
      narrow[i] = static_cast<uint16_t>(rounded_bits(sums[i]));
    for (int r = 0; r < block.count; ++r) {
      bf16* to = down + pairs[r] * width + n;
      if (outputs == kDotOutputs)
        for (int i = 0; i < kDotOutputs; ++i) to[i].bits = narrow[i * kDotRows + r];
      else
        for (int i = 0; i < outputs; ++i) to[i].bits = narrow[i * kDotRows + r];
    }
  }
}

inline int moe_experts_dot(const bf16* x, const int64_t* idx, const float* w, const DotMlp& m,
                           int64_t n, int64_t topk, bf16* out) {
  const int64_t pairs = n * topk, width = m.width;
  for (int64_t p = 0; p < pairs; ++p)
    if (idx[p] < 0 || idx[p] >= m.experts) return kIndexOutOfRange;
  std::vector<int64_t> order(pairs), start(m.experts + 1);
  for (int64_t p = 0; p < pairs; ++p) ++start[idx[p] + 1];
  for (int64_t e = 0; e < m.experts; ++e) start[e + 1] += start[e];
  for (int64_t p = 0; p < pairs; ++p) order[start[idx[p]]++] = p;  // start[e] is now e's end
  const int64_t fit = kDotBlockBytes / (2 * kDotLanes * std::max(width, m.inner));
  const int64_t most = std::min<int64_t>(std::max<int64_t>(fit, 3), kDotVectors) * kDotLanes;
  std::vector<DotBlock> blocks;
  for (int64_t e = 0, first = 0; e < m.experts; first = start[e++]) {
    const int64_t count = start[e] - first, parts = (count + most - 1) / most;
    for (int64_t i = 0; i < parts; ++i) {  // of nearly one size
      const int64_t begin = count * i / parts, end = count * (i + 1) / parts;
      blocks.push_back({e, first + begin, static_cast<int>(end - begin)});
    }
  }
  std::vector<bf16> down(pairs * width);
  parallel_units(static_cast<int64_t>(blocks.size()), 6 * pairs * m.inner * width, [&](int64_t i) {
    run_dot_block(m, x, order.data(), topk, blocks[i], down.data());
  });
  moe_combine<bf16>(down.data(), nullptr, w, n, topk, width, out);
  return kOk;
}
#else
inline bool has_bf16_dot() { return false; }
inline int moe_experts_dot(const bf16*, const int64_t*, const float*, const DotMlp&, int64_t,
                           int64_t, bf16*) {
  return kUnknownType;
}
#endif

}  // namespace di
