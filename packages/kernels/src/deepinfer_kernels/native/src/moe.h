// Routing, and the routed experts with the rows grouped by expert.
#pragma once

#include "common.h"
#include "norm.h"

namespace di {

template <class T>
void moe_gate(const T* x, const T* weight, const acc_t<T>* bias, int64_t bias_stride, int64_t topk,
              double scaling, int64_t n, int64_t width, int64_t experts, int64_t* idx,
              acc_t<T>* w) {
  using A = acc_t<T>;
  A* wide = scratch<A>(n * width);
  A* scores = scratch<A>(n * experts, 1);
  A* ranks = scratch<A>(experts, 2);
  widen(x, wide, n * width);
  product(weight, experts, wide, n, width, scores);
  for (int64_t row = 0; row < n; ++row, scores += experts, bias += bias_stride, idx += topk,
               w += topk) {
    for (int64_t e = 0; e < experts; ++e) {
      const A z = scores[e];
      scores[e] = std::sqrt(z > A(20) ? z : std::log1p(std::exp(z)));
      ranks[e] = scores[e] + bias[e];
    }
    A total = 0;
    for (int64_t k = 0; k < topk; ++k) {  // strictly greater: on ties the lower expert stays
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e) {
        bool taken = false;
        for (int64_t before = 0; before < k; ++before) taken |= idx[before] == e;
        if (!taken && (best < 0 || ranks[e] > ranks[best])) best = e;
      }
      idx[k] = best;
      total += w[k] = scores[best];
    }
    const A gain = A(scaling) / std::max(total, A(1e-20));
    for (int64_t k = 0; k < topk; ++k) w[k] *= gain;
  }
}

// Linear outputs are rounded to T, as the separate layers would round them.
template <class T, class A>
inline void round_through(A* values, int64_t n) {
  if (sizeof(T) == sizeof(A)) return;
  for (int64_t i = 0; i < n; ++i) {
    T narrow;
    store(narrow, values[i]);
    values[i] = load(narrow);
  }
}

template <class T>
int moe_experts(const T* x, const int64_t* idx, const acc_t<T>* w, const T* w1, const T* w3,
                const T* w2, double limit, int64_t n, int64_t topk, int64_t width, int64_t inner,
                int64_t experts, T* out) {
  using A = acc_t<T>;
  const int64_t pairs = n * topk;
  static thread_local std::vector<int64_t> order, start;
  start.assign(experts + 1, 0);
  order.resize(pairs);
  for (int64_t p = 0; p < pairs; ++p) {
    if (idx[p] < 0 || idx[p] >= experts) return kIndexOutOfRange;
    ++start[idx[p] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) start[e + 1] += start[e];
  for (int64_t p = 0; p < pairs; ++p) order[start[idx[p]]++] = p;  // start[e] is now e's end
  A* down = scratch<A>(pairs * width);                               // [pairs, width], pair order
  A* rows = scratch<A>(pairs * width, 1);
  A* mid = scratch<A>(3 * pairs * inner, 2);
  A* results = scratch<A>(pairs * width, 3);
  for (int64_t e = 0, first = 0; e < experts; first = start[e++]) {
    const int64_t count = start[e] - first;
    if (count == 0) continue;
    for (int64_t i = 0; i < count; ++i)
      widen(x + order[first + i] / topk * width, rows + i * width, width);
    A *gate = mid, *up = mid + count * inner, *act = up + count * inner;
    product(w1 + e * inner * width, inner, rows, count, width, gate);
    product(w3 + e * inner * width, inner, rows, count, width, up);
    round_through<T>(gate, 2 * count * inner);
    for (int64_t i = 0; i < count * inner; ++i) act[i] = gated<A>(gate[i], up[i], A(limit));
    round_through<T>(act, count * inner);
    product(w2 + e * width * inner, width, act, count, inner, results);
    round_through<T>(results, count * width);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(down + order[first + i] * width, results + i * width, width * sizeof(A));
  }
  for (int64_t row = 0; row < n; ++row, out += width) {
    for (int64_t c = 0; c < width; ++c) {
      A sum = 0;
      for (int64_t k = 0; k < topk; ++k)
        sum += w[row * topk + k] * down[(row * topk + k) * width + c];
      store(out[c], sum);
    }
  }
  return kOk;
}

}  // namespace di
