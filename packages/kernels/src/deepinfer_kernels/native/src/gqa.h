// Grouped-query attention over pages of keys and values, and what stands before it.
#pragma once

#include "common.h"
#include "norm.h"

namespace di {

// One of the two caches [pages, entries, kv_heads, dim]; strides in elements, channels adjacent.
template <class T>
struct HeadPages {
  T* data;
  int64_t page_stride, entry_stride, head_stride;
  T* at(int64_t page, int64_t entry, int64_t head) const {
    return data + page * page_stride + entry * entry_stride + head * head_stride;
  }
};

// Turns channel i with channel i + pairs (halves), or 2i with 2i + 1 (adjacent); 2 * pairs channels
// from the first on, the others are copied. out may be x.
template <class T, class A, class O>
DI_INLINE void turn_pairs(const T* x, const A* cos, const A* sin, bool adjacent, int64_t dim,
                          int64_t pairs, O* out) {
  if (adjacent) {
    for (int64_t i = 0; i < pairs; ++i) {
      const A a = load(x[2 * i]), b = load(x[2 * i + 1]);
      store(out[2 * i], a * cos[i] - b * sin[i]);
      store(out[2 * i + 1], b * cos[i] + a * sin[i]);
    }
  } else {
    for (int64_t i = 0; i < pairs; ++i) {
      const A a = load(x[i]), b = load(x[i + pairs]);
      store(out[i], a * cos[i] - b * sin[i]);
      store(out[i + pairs], b * cos[i] + a * sin[i]);
    }
  }
  for (int64_t i = 2 * pairs; i < dim; ++i) store(out[i], load(x[i]));
}

template <class T>
void rope_half(const T* x, const acc_t<T>* cos, const acc_t<T>* sin, int64_t n, int64_t middle,
               int64_t dim, int64_t pairs, T* out) {
  parallel_rows(n, 4 * middle * dim, [=](int64_t row, int64_t last) {
    for (; row < last; ++row)
      for (int64_t at = row * middle * dim; at < (row + 1) * middle * dim; at += dim)
        turn_pairs(x + at, cos + row * pairs, sin + row * pairs, false, dim, pairs, out + at);
  });
}

template <class T>
struct Heads {
  using A = acc_t<T>;
  const A *q_norm, *k_norm, *cos, *sin;  // norms may be null
  double eps;
  int64_t heads, kv_heads, dim, pairs;
  bool adjacent;
};

// qkv [n, heads + 2 * kv_heads, dim]: queries normed and turned to q [n, heads, dim]; keys normed and
// turned, and values, to their slots (page * entries + entry; -1 is skipped).
template <class T>
int qkv_rope_store(const T* qkv, const Heads<T>& h, const HeadPages<T>& keys,
                   const HeadPages<T>& values, const int64_t* slot, int64_t pages, int64_t entries,
                   int64_t n, T* q) {
  using A = acc_t<T>;
  for (int64_t i = 0; i < n; ++i)  // all or nothing
    if (slot[i] >= pages * entries) return kIndexOutOfRange;
  const int64_t width = h.heads + 2 * h.kv_heads, dim = h.dim;
  parallel_rows(n, 8 * width * dim, [=, &h, &keys, &values](int64_t row, int64_t last) {
    A* wide = scratch<A>(dim);
    for (; row < last; ++row) {
      const T* from = qkv + row * width * dim;
      const A *cos = h.cos + row * h.pairs, *sin = h.sin + row * h.pairs;
      const int64_t page = slot[row] / entries, entry = slot[row] % entries;
      for (int64_t head = 0; head < h.heads + h.kv_heads; ++head, from += dim) {
        const bool key = head >= h.heads;
        if (key && slot[row] < 0) continue;
        T* to = key ? keys.at(page, entry, head - h.heads) : q + (row * h.heads + head) * dim;
        const A* norm = key ? h.k_norm : h.q_norm;
        if (norm) {
          norm_row(from, norm, h.eps, dim, wide);
          round_through<T>(wide, dim);
          turn_pairs(wide, cos, sin, h.adjacent, dim, h.pairs, to);
        } else {
          turn_pairs(from, cos, sin, h.adjacent, dim, h.pairs, to);
        }
      }
      if (slot[row] < 0) continue;
      for (int64_t head = 0; head < h.kv_heads; ++head, from += dim)
        std::memcpy(values.at(page, entry, head), from, dim * sizeof(T));
    }
  });
  return kOk;
}

constexpr int64_t kQueriesAtOnce = 12;  // query vectors that share the reading of a key

// A run of at most kQueriesAtOnce / group rows of one sequence against one key head.
struct AttentionUnit {
  int64_t sequence, head, first, count;
};

// scores[m][k] = q[m] . keys[k] for one page.
template <class T, class A>
DI_INLINE void score_page(const T* keys, int64_t stride, int64_t count, const A* q, int64_t queries,
                          int64_t dim, A* scores, int64_t padded) {
  constexpr int N = kTileColumns;
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    const T* w = keys + k * stride;
    int64_t m = 0;
    for (; m + N <= queries; m += N)
      product_tile<4, N>(w, stride, q + m * dim, dim, dim, scores + m * padded + k, padded);
    for (; m < queries; ++m)
      product_tile<4, 1>(w, stride, q + m * dim, dim, dim, scores + m * padded + k, padded);
  }
  for (; k < count; ++k)
    for (int64_t m = 0; m < queries; ++m)
      product_tile<1, 1>(keys + k * stride, stride, q + m * dim, dim, dim, scores + m * padded + k,
                         padded);
}

// sums[m][d] += sum_k w[m][k] * values[k][d] for Q query vectors.
template <int Q, class T, class A>
DI_INLINE void weigh_page(const T* values, int64_t stride, int64_t count, const A* w,
                          int64_t padded, int64_t dim, A* sums) {
  constexpr int L = lanes<A>(), V = 4;
  int64_t d = 0;
  for (; d + V * L <= dim; d += V * L) {
    wide_t<A> part[Q][V];
    for (int m = 0; m < Q; ++m)
      for (int v = 0; v < V; ++v) part[m][v] = load_wide(sums + m * dim + d + v * L);
    for (int64_t k = 0; k < count; ++k) {
      const T* row = values + k * stride + d;
      for (int v = 0; v < V; ++v) {
        const wide_t<A> value = load_wide(row + v * L);
        for (int m = 0; m < Q; ++m) part[m][v] += w[m * padded + k] * value;
      }
    }
    for (int m = 0; m < Q; ++m)
      for (int v = 0; v < V; ++v)
        std::memcpy(sums + m * dim + d + v * L, &part[m][v], sizeof part[m][v]);
  }
  for (; d + L <= dim; d += L) {
    wide_t<A> part[Q];
    for (int m = 0; m < Q; ++m) part[m] = load_wide(sums + m * dim + d);
    for (int64_t k = 0; k < count; ++k) {
      const wide_t<A> value = load_wide(values + k * stride + d);
      for (int m = 0; m < Q; ++m) part[m] += w[m * padded + k] * value;
    }
    for (int m = 0; m < Q; ++m) std::memcpy(sums + m * dim + d, &part[m], sizeof part[m]);
  }
  for (; d < dim; ++d)
    for (int m = 0; m < Q; ++m) {
      A sum = sums[m * dim + d];
      for (int64_t k = 0; k < count; ++k)
        sum = mul_add(w[m * padded + k], A(load(values[k * stride + d])), sum);
      sums[m * dim + d] = sum;
    }
}

template <class T>
struct Sequences {
  const int64_t *first, *start, *table;  // [S + 1], [S], [S, table_width]
  int64_t count, table_width, pages, entries;
};

template <class T>
void attend_unit(const T* q, const AttentionUnit& unit, const Sequences<T>& s,
                 const HeadPages<T>& keys, const HeadPages<T>& values, int64_t heads,
                 int64_t kv_heads, int64_t dim, acc_t<T> scale, T* out) {
  using A = acc_t<T>;
  const int64_t group = heads / kv_heads, queries = unit.count * group;
  const int64_t row = s.first[unit.sequence] + unit.first;
  const int64_t seen = s.start[unit.sequence] + unit.first + 1;  // keys of the unit's first row
  const int64_t most = seen + unit.count - 1, padded = (most + 15) / 16 * 16;
  const int64_t* table = s.table + unit.sequence * s.table_width;
  A* wide = scratch<A>(queries * dim);
  A* scores = scratch<A>(queries * padded, 1);
  A* sums = scratch<A>(queries * dim, 2);
  for (int64_t r = 0; r < unit.count; ++r)
    widen(q + ((row + r) * heads + unit.head * group) * dim, wide + r * group * dim, group * dim);
  for (int64_t at = 0, page = 0; at < most; at += s.entries, ++page)
    score_page(keys.at(table[page], 0, unit.head), keys.entry_stride,
               std::min(s.entries, most - at), wide, queries, dim, scores + at, padded);
  for (int64_t m = 0; m < queries; ++m) {
    A* w = scores + m * padded;
    const int64_t limit = seen + m / group;
    A peak = -std::numeric_limits<A>::infinity();
    for (int64_t k = 0; k < limit; ++k) {
      w[k] *= scale;
      peak = w[k] > peak ? w[k] : peak;
    }
    for (int64_t k = 0; k < limit; ++k) w[k] = exp_fast(w[k] - peak);
    const A gain = A(1) / sum_array(w, limit);
    for (int64_t k = 0; k < limit; ++k) w[k] *= gain;
  }
  for (int64_t i = 0; i < queries * dim; ++i) sums[i] = 0;
  // Keys in ascending order for every row, whatever unit it is in. What a row does not see is not
  // multiplied by zero: a NaN there must not reach it.
  const auto weigh = [&](int64_t from, int64_t to, int64_t m, int64_t end) {
    while (from < to) {
      const int64_t entry = from % s.entries, count = std::min(s.entries - entry, to - from);
      const T* rows = values.at(table[from / s.entries], entry, unit.head);
      int64_t i = m;
      for (; i + 3 <= end; i += 3)
        weigh_page<3>(rows, values.entry_stride, count, scores + i * padded + from, padded, dim,
                      sums + i * dim);
      for (; i < end; ++i)
        weigh_page<1>(rows, values.entry_stride, count, scores + i * padded + from, padded, dim,
                      sums + i * dim);
      from += count;
    }
  };
  weigh(0, seen, 0, queries);
  for (int64_t r = 1; r < unit.count; ++r) weigh(seen, seen + r, r * group, (r + 1) * group);
  for (int64_t r = 0; r < unit.count; ++r) {
    T* to = out + ((row + r) * heads + unit.head * group) * dim;
    for (int64_t i = 0; i < group * dim; ++i) store(to[i], sums[r * group * dim + i]);
  }
}

// q, out [n, heads, dim]; rows first[s] .. first[s + 1] are sequence s, the first of them at position
// start[s]; a row sees the keys of its sequence up to its own position.
template <class T>
int gqa_attention(const T* q, const Sequences<T>& s, const HeadPages<T>& keys,
                  const HeadPages<T>& values, int64_t n, int64_t heads, int64_t kv_heads,
                  int64_t dim, double scale, T* out) {
  using A = acc_t<T>;
  const int64_t group = heads / kv_heads;
  const int64_t run = std::max<int64_t>(1, kQueriesAtOnce / group);
  std::vector<AttentionUnit> units;
  int64_t operations = 0;
  if (s.count && (s.first[0] != 0 || s.first[s.count] != n)) return kNotPositive;
  for (int64_t i = 0; i < s.count; ++i) {
    const int64_t rows = s.first[i + 1] - s.first[i], length = s.start[i] + rows;
    if (rows < 0 || s.start[i] < 0) return kNotPositive;
    if (rows == 0) continue;
    const int64_t used = (length + s.entries - 1) / s.entries;
    if (used > s.table_width) return kIndexOutOfRange;
    for (int64_t p = 0; p < used; ++p) {
      const int64_t page = s.table[i * s.table_width + p];
      if (page < 0 || page >= s.pages) return kIndexOutOfRange;
    }
    operations += 4 * rows * heads * dim * length;
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t at = 0; at < rows; at += run)
        units.push_back({i, head, at, std::min(run, rows - at)});
  }
  parallel_units(units.size(), operations, [&](int64_t i) {
    attend_unit(q, units[i], s, keys, values, heads, kv_heads, dim, A(scale), out);
  });
  return kOk;
}

// sum = x + residual, rounded; the squares of sum are added as in sum_of_squares.
template <class T>
inline acc_t<T> add_row(const T* x, const T* residual, int64_t width, T* sum) {
  using A = acc_t<T>;
  constexpr int L = lanes<A>();
  const T* done = sum;
  wide_t<A> even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * L <= width; i += 2 * L) {
    store_wide(sum + i, load_wide(x + i) + load_wide(residual + i));
    store_wide(sum + i + L, load_wide(x + i + L) + load_wide(residual + i + L));
    const wide_t<A> a = load_wide(done + i), b = load_wide(done + i + L);
    even += a * a;
    odd += b * b;
  }
  A total = sum_lanes<A>(even + odd);
  for (; i < width; ++i) {
    store(sum[i], load(x[i]) + load(residual[i]));
    total += load(sum[i]) * load(sum[i]);
  }
  return total;
}

// sum = x + residual, rounded; out = its norm.
template <class T>
void add_rms_norm(const T* x, const T* residual, const acc_t<T>* weight, double eps, int64_t n,
                  int64_t width, T* out, T* sum) {
  parallel_rows(n, 6 * width, [=](int64_t row, int64_t last) {
    for (; row < last; ++row) {
      const int64_t at = row * width;
      const acc_t<T> squares = add_row(x + at, residual + at, width, sum + at);
      norm_row_of(sum + at, squares, weight, eps, width, out + at);
    }
  });
}

// gate_up [n, 2 * width] to silu(gate) * up [n, width].
template <class T>
void silu_mul(const T* gate_up, int64_t n, int64_t width, T* out) {
  using A = acc_t<T>;
  constexpr int L = lanes<A>();
  parallel_rows(n, 20 * width, [=](int64_t row, int64_t last) {
    for (; row < last; ++row) {
      const T *gate = gate_up + row * 2 * width, *up = gate + width;
      T* to = out + row * width;
      int64_t i = 0;
      for (; i + L <= width; i += L) {
        const wide_t<A> g = load_wide(gate + i);
        store_wide(to + i, g / (A(1) + exp_wide(-g)) * load_wide(up + i));
      }
      for (; i < width; ++i) {
        const A g = load(gate[i]);
        store(to[i], g / (A(1) + exp_fast(-g)) * A(load(up[i])));
      }
    }
  });
}

}  // namespace di
