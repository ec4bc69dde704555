// Routing, and the routed experts with the rows grouped by expert.
#pragma once

#include "common.h"
#include "norm.h"

namespace di {

template <class A>
struct Router {
  const A *weight, *bias;  // [experts, width]; [experts], or a row each where bias_stride is not 0
  int64_t bias_stride, topk, width, experts;
  double scaling;
};

// NaN before everything, as in a descending sort of torch: a broken row stays visible.
template <class A>
DI_INLINE bool ranks_before(A a, A b) {
  return a > b || (a != a && b == b);
}

// rows [n, width]; idx, w [n, topk].
template <class A>
void route(const A* rows, const Router<A>& r, const A* bias, int64_t n, int64_t* idx, A* w) {
  A* scores = scratch<A>(n * r.experts, 1);
  A* ranks = scratch<A>(r.experts, 2);
  product(r.weight, r.experts, rows, n, r.width, scores);
  for (int64_t row = 0; row < n; ++row, scores += r.experts, bias += r.bias_stride, idx += r.topk,
               w += r.topk) {
    for (int64_t e = 0; e < r.experts; ++e) {
      const A z = scores[e];
      scores[e] = std::sqrt(z > A(20) ? z : std::log1p(std::exp(z)));
      ranks[e] = scores[e] + bias[e];
    }
    A total = 0;
    for (int64_t k = 0; k < r.topk; ++k) {  // strictly greater: on ties the lower expert stays
      int64_t best = -1;
      for (int64_t e = 0; e < r.experts; ++e) {
        bool taken = false;
        for (int64_t before = 0; before < k; ++before) taken |= idx[before] == e;
        if (!taken && (best < 0 || ranks_before(ranks[e], ranks[best]))) best = e;
      }
      idx[k] = best;
      total += w[k] = scores[best];
    }
    const A gain = A(r.scaling) / std::max(total, A(1e-20));
    for (int64_t k = 0; k < r.topk; ++k) w[k] *= gain;
  }
}

constexpr int64_t kMoeRows = 256;  // rows whose intermediate results stay in cache

template <class T>
void moe_gate(const T* x, const Router<acc_t<T>>& r, int64_t n, int64_t* idx, acc_t<T>* w) {
  using A = acc_t<T>;
  parallel_rows(n, 2 * r.width * r.experts, [=, &r](int64_t row, int64_t last) {
    for (; row < last; row += kMoeRows) {
      const int64_t count = std::min(kMoeRows, last - row);
      A* wide = scratch<A>(count * r.width);
      widen(x + row * r.width, wide, count * r.width);
      route(wide, r, r.bias + row * r.bias_stride, count, idx + row * r.topk, w + row * r.topk);
    }
  });
}

template <class T>
struct Mlp {  // w1, w3 [experts, inner, width]; w2 [experts, width, inner]
  const T *w1, *w3, *w2;
  double limit;
  int64_t width, inner, experts;
};

// result [n, width] = w2 . gated(w1 . rows, w3 . rows) of one expert; linear outputs round to T.
template <class T, class A>
void run_expert(const Mlp<T>& m, int64_t expert, const A* rows, int64_t n, A* result) {
  const int64_t inner = m.inner, size = n * inner;
  A *gate = scratch<A>(2 * size, 2), *up = gate + size;
  product(m.w1 + expert * inner * m.width, inner, rows, n, m.width, gate);
  product(m.w3 + expert * inner * m.width, inner, rows, n, m.width, up);
  round_through<T>(gate, 2 * size);
  for (int64_t i = 0; i < size; ++i) gate[i] = gated<A>(gate[i], up[i], A(m.limit));
  round_through<T>(gate, size);
  product(m.w2 + expert * m.width * inner, m.width, gate, n, inner, result);
  round_through<T>(result, n * m.width);
}

// out [n, width], rounded to T, = the weighted sum over the experts of each row: the rows sorted by
// expert, so that each expert's weights are read once. Experts are inside the table.
template <class T, class A>
void routed_block(const Mlp<T>& m, const T* x, const int64_t* idx, const A* w, int64_t n,
                  int64_t topk, A* out) {
  static thread_local std::vector<int64_t> order, start;
  const int64_t pairs = n * topk, width = m.width;
  start.assign(m.experts + 1, 0);
  order.resize(pairs);
  for (int64_t p = 0; p < pairs; ++p) ++start[idx[p] + 1];
  for (int64_t e = 0; e < m.experts; ++e) start[e + 1] += start[e];
  for (int64_t p = 0; p < pairs; ++p) order[start[idx[p]]++] = p;  // start[e] is now e's end
  A* down = scratch<A>(pairs * width, 3);                           // in the order of the pairs
  A* rows = scratch<A>(2 * pairs * width);
  A* results = rows + pairs * width;
  for (int64_t e = 0, first = 0; e < m.experts; first = start[e++]) {
    const int64_t count = start[e] - first;
    if (count == 0) continue;
    for (int64_t i = 0; i < count; ++i)
      widen(x + order[first + i] / topk * width, rows + i * width, width);
    run_expert(m, e, rows, count, results);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(down + order[first + i] * width, results + i * width, width * sizeof(A));
  }
  for (int64_t row = 0; row < n; ++row, out += width) {
    for (int64_t c = 0; c < width; ++c) out[c] = 0;
    for (int64_t k = 0; k < topk; ++k) {
      const A gain = w[row * topk + k];
      const A* from = down + (row * topk + k) * width;
      for (int64_t c = 0; c < width; ++c) out[c] += gain * from[c];
    }
  }
  round_through<T>(out - n * width, n * width);
}

template <class T>
int moe_experts(const T* x, const int64_t* idx, const acc_t<T>* w, const Mlp<T>& m, int64_t n,
                int64_t topk, T* out) {
  using A = acc_t<T>;
  for (int64_t p = 0; p < n * topk; ++p)
    if (idx[p] < 0 || idx[p] >= m.experts) return kIndexOutOfRange;
  const int64_t width = m.width;
  parallel_rows(n, 6 * topk * m.inner * width, [=, &m](int64_t row, int64_t last) {
    for (; row < last; row += kMoeRows) {
      const int64_t count = std::min(kMoeRows, last - row);
      A* sum = scratch<A>(count * width, 1);
      routed_block(m, x + row * width, idx + row * topk, w + row * topk, count, topk, sum);
      for (int64_t i = 0; i < count * width; ++i) store(out[row * width + i], sum[i]);
    }
  });
  return kOk;
}

// out [n, width] = the weighted sum of each row's experts, whose outputs lie in down at place, or
// where there is none in their own order.
template <class T>
void moe_combine(const T* down, const int64_t* place, const acc_t<T>* w, int64_t n, int64_t topk,
                 int64_t width, T* out) {
  using A = acc_t<T>;
  parallel_rows(n, 2 * topk * width, [=](int64_t row, int64_t last) {
    A* sum = scratch<A>(width);
    for (; row < last; ++row) {
      for (int64_t c = 0; c < width; ++c) sum[c] = 0;
      for (int64_t k = row * topk; k < (row + 1) * topk; ++k) {
        const T* from = down + (place ? place[k] : k) * width;
        for (int64_t c = 0; c < width; ++c) sum[c] += w[k] * load(from[c]);
      }
      for (int64_t c = 0; c < width; ++c) store(out[row * width + c], sum[c]);
    }
  });
}

// Routing, routed experts and the shared expert (an Mlp of one) in one pass.
template <class T>
void moe_layer(const T* x, const Router<acc_t<T>>& router, const Mlp<T>& routed,
               const Mlp<T>& shared, int64_t n, T* out) {
  using A = acc_t<T>;
  const int64_t width = routed.width, topk = router.topk;
  const int64_t per_row = 6 * width * (topk * routed.inner + shared.inner);
  parallel_rows(n, per_row, [=, &router, &routed, &shared](int64_t row, int64_t last) {
    std::vector<int64_t> idx;
    std::vector<A> w;
    for (; row < last; row += kMoeRows) {
      const int64_t count = std::min(kMoeRows, last - row);
      const T* from = x + row * width;
      idx.resize(count * topk);
      w.resize(count * topk);
      A* wide = scratch<A>(count * width);
      widen(from, wide, count * width);
      route(wide, router, router.bias + row * router.bias_stride, count, idx.data(), w.data());
      A* sum = scratch<A>(2 * count * width, 1);
      A* own = sum + count * width;
      run_expert(shared, 0, wide, count, own);
      routed_block(routed, from, idx.data(), w.data(), count, topk, sum);
      for (int64_t i = 0; i < count * width; ++i) store(out[row * width + i], sum[i] + own[i]);
    }
  });
}

}  // namespace di
