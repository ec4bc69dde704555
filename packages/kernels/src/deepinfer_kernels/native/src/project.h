// The projections around an attention, each with what stands between its products: for few rows,
// where one pass over the weights costs less than the calls it would take, and where sums must run in
// one order however many rows there are.
#pragma once

#include "cache.h"
#include "common.h"
#include "norm.h"

namespace di {

constexpr int64_t kProjectRows = 64;  // rows whose intermediate results stay in cache

// As parallel_rows, with body(first, rows) for at most kProjectRows rows at a time.
template <class Body>
void parallel_blocks(int64_t n, int64_t operations_per_row, const Body& body) {
  parallel_rows(n, operations_per_row, [&body](int64_t first, int64_t last) {
    for (; first < last; first += kProjectRows) body(first, std::min(kProjectRows, last - first));
  });
}

// x [dim] rounded as T and turned, then rounded as its cache record rounds it; x is overwritten.
template <class T, class A>
inline void rotate_and_quantise(A* x, const A* cos, const A* sin, int64_t dim, int64_t pairs,
                                int record, T* out) {
  rotate_row(x, cos, sin, false, dim, pairs, x);
  round_through<T>(x, dim);
  fake_quant_row(x, dim, record, out);
}

template <class T>
void norm_rope_quant(const T* x, const acc_t<T>* weight, double eps, const acc_t<T>* cos,
                     const acc_t<T>* sin, int64_t n, int64_t dim, int64_t pairs, int record,
                     T* out) {
  using A = acc_t<T>;
  parallel_rows(n, 20 * dim, [=](int64_t row, int64_t last) {
    A* wide = scratch<A>(dim);
    for (; row < last; ++row) {
      norm_row(x + row * dim, weight, eps, dim, wide);
      round_through<T>(wide, dim);
      rotate_and_quantise(wide, cos + row * pairs, sin + row * pairs, dim, pairs, record,
                          out + row * dim);
    }
  });
}

template <class T>
struct QueryKeyWeights {
  const T *wq_a, *wq_b, *wkv;
  const acc_t<T>*q_norm, *kv_norm;
  double eps;
  int64_t width, rank, heads, dim, pairs;
  int record;
};

template <class T>
void mla_query_key(const T* x, const QueryKeyWeights<T>& w, const acc_t<T>* cos,
                   const acc_t<T>* sin, int64_t n, T* latent, T* q, T* key) {
  using A = acc_t<T>;
  const int64_t per_row =
      2 * (w.width * (w.rank + w.dim) + w.rank * w.heads * w.dim);
  parallel_blocks(n, per_row, [=, &w](int64_t first, int64_t rows) {
    const int64_t dim = w.dim;
    A* wide = scratch<A>(rows * std::max(w.width, w.rank));
    A* narrow = scratch<A>(rows * std::max(w.rank, dim), 1);
    A* heads = scratch<A>(rows * w.heads * dim, 2);
    widen(x + first * w.width, wide, rows * w.width);
    product(w.wkv, dim, wide, rows, w.width, narrow);
    round_through<T>(narrow, rows * dim);
    for (int64_t r = 0; r < rows; ++r) {
      A* row = narrow + r * dim;
      norm_row(row, w.kv_norm, w.eps, dim, row);
      round_through<T>(row, dim);
      const int64_t at = first + r;
      rotate_and_quantise(row, cos + at * w.pairs, sin + at * w.pairs, dim, w.pairs, w.record,
                          key + at * dim);
    }
    product(w.wq_a, w.rank, wide, rows, w.width, narrow);
    round_through<T>(narrow, rows * w.rank);
    for (int64_t r = 0; r < rows; ++r) {
      T* out = latent + (first + r) * w.rank;
      norm_row(narrow + r * w.rank, w.q_norm, w.eps, w.rank, out);
      widen(out, wide + r * w.rank, w.rank);
    }
    product(w.wq_b, w.heads * dim, wide, rows, w.rank, heads);
    round_through<T>(heads, rows * w.heads * dim);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < w.heads; ++h) {
        const int64_t at = first + r;
        rotate_row(heads + (r * w.heads + h) * dim, cos + at * w.pairs, sin + at * w.pairs, false,
                   dim, w.pairs, q + (at * w.heads + h) * dim);
      }
  });
}

// out [n, heads, dim] turned back, then wo_a [groups, rank, heads / groups * dim] a group, then
// wo_b [width, groups * rank].
template <class T>
void mla_output(const T* out, const acc_t<T>* cos, const acc_t<T>* sin, const T* wo_a,
                const T* wo_b, int64_t n, int64_t heads, int64_t dim, int64_t pairs,
                int64_t groups, int64_t rank, int64_t width, T* y) {
  using A = acc_t<T>;
  const int64_t part = heads / groups * dim, joined = groups * rank;
  parallel_blocks(n, 2 * joined * (part + width), [=](int64_t first, int64_t rows) {
    A* turned = scratch<A>(rows * heads * dim);  // [groups, rows, part]
    A* latent = scratch<A>(rows * joined, 1);
    A* one = scratch<A>(rows * std::max(rank, width), 2);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = first + r, group = h * dim / part, within = h * dim % part;
        A* to = turned + (group * rows + r) * part + within;
        rotate_row(out + (at * heads + h) * dim, cos + at * pairs, sin + at * pairs, true, dim,
                   pairs, to);
      }
    round_through<T>(turned, rows * heads * dim);
    for (int64_t g = 0; g < groups; ++g) {
      product(wo_a + g * rank * part, rank, turned + g * rows * part, rows, part, one);
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(latent + r * joined + g * rank, one + r * rank, rank * sizeof(A));
    }
    round_through<T>(latent, rows * joined);
    product(wo_b, width, latent, rows, joined, one);
    for (int64_t i = 0; i < rows * width; ++i) store(y[first * width + i], one[i]);
  });
}

}  // namespace di
